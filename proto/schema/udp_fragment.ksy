meta:
  id: udp_fragment
  title: datagram of the fragmented UDP transport
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
doc: |
  A part of an encoded frame behind a header of 4 bytes. A datagram that breaks a rule is dropped without an answer. That
  all parts of a frame have the same `total`, and that all but the last are full, are rules between datagrams.
doc-ref: proto/spec-bw.md, "Fragmented UDP"
seq:
  - id: frame_id
    type: u2
    doc: Counts the sender's frames from 0 and wraps.
  - id: index
    type: u1
    doc: Which part, from 0.
  - id: total
    type: u1
    valid:
      expr: _ > index
    doc: How many parts, 1 to 255; more than `index`.
  - id: first
    size: 0
    valid:
      expr: not _io.eof
    doc: No byte; there must be a part.
  - id: part
    size-eos: true
    doc: 1 byte to the mtu less 4.
