meta:
  id: aeon_words
  title: packed body of aeon-flow
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: le
doc: |
  A body of token ids, residuals or logits: 4-byte values, little-endian, without alignment. Which of the two readings is
  the right one is said by the route and by the meta (`in`, `return`, `body`). A length that is no multiple of 4 is
  status 400.
doc-ref: proto/SPEC.md, "Routes"
seq:
  - id: words
    type: u4
    repeat: eos
    doc: The values as u32, or the bit patterns of f32 values.
instances:
  floats:
    pos: 0
    type: f4
    repeat: eos
    doc: The same bytes as f32 values.
