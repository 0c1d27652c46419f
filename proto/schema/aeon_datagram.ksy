meta:
  id: aeon_datagram
  title: aeon-flow frame as a datagram
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
  imports:
    - aeon_frame
doc: |
  The UDP carrier: one datagram is exactly one frame. A datagram of another length is dropped without an answer.
doc-ref: proto/SPEC.md, "Carriers"
seq:
  - id: frame
    type: aeon_frame
  - id: end
    size: 0
    valid:
      expr: _io.eof
