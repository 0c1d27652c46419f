meta:
  id: aeon_frame
  title: aeon-flow frame with an unread payload
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
  imports:
    - aeon_header
doc: |
  A header and as many bytes as it announces. What follows the frame is not looked at; `aeon_datagram` and `aeon_stream`
  say what may. `aeon_flow` reads the payload too.
doc-ref: proto/SPEC.md, "Frame header"
seq:
  - id: header
    type: aeon_header
  - id: payload
    size: header.length
