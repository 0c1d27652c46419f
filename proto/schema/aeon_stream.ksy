meta:
  id: aeon_stream
  title: aeon-flow frames on a stream carrier
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
  imports:
    - aeon_datagram
doc: |
  Unix socket and TCP: in front of each frame stands its length.
doc-ref: proto/SPEC.md, "Carriers"
seq:
  - id: messages
    type: message
    repeat: eos
types:
  message:
    seq:
      - id: len
        type: u4
        valid:
          min: 10
          max: 16777225
        doc: |
          Bytes of the frame, header included: 10 + `length`. Another number is answered with one vent of status 400, and the
          connection is closed.
      - id: content
        type: aeon_datagram
        size: len
        doc: Exactly one frame, as in a datagram.
