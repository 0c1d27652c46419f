meta:
  id: bwah_capture
  title: capture for the replay cache
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: le
  imports:
    - bw
doc: |
  The body of AMPLITUHEDRON_CAPTURE: a key, the tail and a slab of keys and values. Both blobs are always there; an empty
  one is a blob of 20 bytes.
doc-ref: proto/spec-bw.md, "BWAH"
seq:
  - id: magic
    contents: BWAH
  - id: version
    type: u1
    valid: 1
  - id: flags
    type: u1
    valid: 3
    doc: HIT and TAIL_PRESENT.
  - id: tail_len
    type: u4
    valid:
      max: _io.size
    doc: Bytes of the blob of the tail.
  - id: kv_len
    type: u4
    valid:
      max: _io.size
    doc: Bytes of the blob of keys and values.
  - id: prefix_hash_lo
    type: u4
    doc: Bits 0 to 31 of the hash of the prefix (in two halves, as JavaScript has no exact number for 64 bits).
  - id: prefix_hash_hi
    type: u4
    doc: Bits 32 to 63.
  - id: prefix_len
    type: u4
    doc: Positions of the prefix; any value here, at least 1 for a station.
  - id: layer_lo
    type: u2
    doc: First layer.
  - id: layer_hi
    type: u2
    doc: One past the last layer.
  - id: tail
    type: bw
    size: tail_len
    doc: The residual, f32 values.
  - id: tail_is_floats
    size: 0
    valid:
      expr: tail.mime_code == 0 and tail.orig_len % 4 == 0
    doc: No byte; the blob must be bytes, and whole f32 values.
  - id: kv
    type: bw
    size: kv_len
    doc: Keys and values, f32.
  - id: kv_is_floats
    size: 0
    valid:
      expr: kv.mime_code == 0 and kv.orig_len % 4 == 0
    doc: No byte; as for the tail.
  - id: end
    size: 0
    valid:
      expr: _io.eof
