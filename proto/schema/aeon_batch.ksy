meta:
  id: aeon_batch
  title: aeon-flow frames back to back
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
  imports:
    - aeon_frame
doc: |
  Frames one behind the other up to the end: what a TCP carrier without prefixes holds. The end must be that of a frame.
doc-ref: proto/SPEC.md, "Carriers"
seq:
  - id: frames
    type: aeon_frame
    repeat: eos
