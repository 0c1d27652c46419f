meta:
  id: bw
  title: .bw blob
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: le
doc: |
  Bytes with their type, length and fingerprint, not compressed. The content is cut into words of 8 bytes; of each word the
  high 16 bits stand in `parity` and the low 48 in `packed`, and the bytes that are left over in `tail`. The fingerprint
  (XXH64) is beyond a schema.
doc-ref: proto/spec-bw.md, "The .bw blob"
seq:
  - id: magic
    contents: BWB1
  - id: version
    type: u1
    valid: 1
    doc: The bits 0x80, 0x40 and 0x20 announce forms with dictionaries and lifts, which are reserved.
  - id: mime_code
    type: u1
    valid:
      any-of: [0, 1, 2, 255]
    doc: 0 `application/octet-stream`, 1 `application/json`, 2 `text/plain`, 255 the text in `mime_ext`.
  - id: fp48_lo
    type: u4
    doc: Bits 0 to 31 of the fingerprint.
  - id: fp48_hi
    type: u2
    doc: Bits 32 to 47.
  - id: word_bits
    type: u1
    valid: 48
  - id: parity_bits
    type: u1
    valid: 16
  - id: mime_ext_len
    type: u1
    valid:
      expr: 'mime_code == 255 ? _ <= 127 : _ == 0'
  - id: mime_ext
    type: str
    encoding: UTF-8
    size: mime_ext_len
    valid:
      expr: |
        mime_code != 255 or (_ != "application/octet-stream" and _ != "application/json" and _ != "text/plain")
    doc: The type, if it has no code.
  - id: orig_len
    type: u4
    doc: Bytes of the content, n.
  - id: tail_len
    type: u1
    valid: orig_len % 8
  - id: tail
    size: tail_len
    doc: The last n mod 8 bytes of the content.
  - id: parity
    type: u2
    repeat: expr
    repeat-expr: word_count
    doc: Bytes 6 and 7 of each word.
  - id: packed
    type: low_bits
    repeat: expr
    repeat-expr: word_count
    doc: Bytes 0 to 5 of each word.
  - id: end
    size: 0
    valid:
      expr: _io.eof
instances:
  word_count:
    value: orig_len / 8
  fp48:
    value: fp48_hi * 4294967296 + fp48_lo
    doc: Low 48 bits of the XXH64 (seed 0) of the content.
  mime:
    value: |
      mime_code == 0 ? "application/octet-stream" : mime_code == 1 ? "application/json" :
      mime_code == 2 ? "text/plain" : mime_ext
types:
  low_bits:
    seq:
      - id: lo
        type: u4
        doc: Bytes 0 to 3 of a word.
      - id: hi
        type: u2
        doc: Bytes 4 and 5.
