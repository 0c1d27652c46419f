meta:
  id: bwah_reply
  title: reply of the replay cache
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: le
  imports:
    - bw
doc: |
  The body of an answer to AMPLITUHEDRON_REPLAY: no bytes for a miss, else the envelope of a hit.
doc-ref: proto/spec-bw.md, "BWAH"
seq:
  - id: hit
    type: hit
    if: not _io.eof
types:
  hit:
    seq:
      - id: magic
        contents: BWAH
      - id: version
        type: u1
        valid: 1
      - id: flags
        type: u1
        valid:
          any-of: [1, 3]
        doc: Bit 0 HIT, bit 1 TAIL_PRESENT.
      - id: tail_len
        type: u4
        valid:
          expr: _ <= _io.size and (flags == 3 or _ == 0)
        doc: Bytes of the blob of the tail; 0 without TAIL_PRESENT.
      - id: kv_len
        type: u4
        valid:
          max: _io.size
        doc: Bytes of the blob of keys and values; 0 if there is none.
      - id: tail
        type: bw
        size: tail_len
        if: flags == 3
        doc: The residual, f32 values.
      - id: tail_is_floats
        size: 0
        if: flags == 3
        valid:
          expr: tail.mime_code == 0 and tail.orig_len % 4 == 0
        doc: No byte; the blob must be bytes, and whole f32 values.
      - id: kv
        type: bw
        size: kv_len
        if: kv_len != 0
        doc: Keys and values, f32.
      - id: kv_is_floats
        size: 0
        if: kv_len != 0
        valid:
          expr: kv.mime_code == 0 and kv.orig_len % 4 == 0
        doc: No byte; as for the tail.
      - id: end
        size: 0
        valid:
          expr: _io.eof
