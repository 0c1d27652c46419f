meta:
  id: aeon_header
  title: aeon-flow frame header
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
doc: |
  The 10 bytes in front of every payload. All integers are big-endian. No value is illegal at this level: what a frame
  is for whom follows from `flags`.
doc-ref: proto/SPEC.md, "Frame header"
seq:
  - id: stream_id
    type: u2
    doc: The route opcode.
  - id: sequence
    type: u4
    doc: The request id, chosen by the sender of the request; its response echoes it.
  - id: flags
    type: u1
    doc: |
      0x01 FORK, 0x02 RACE, 0x04 FOLD, 0x08 VENT, 0x10 FIN, 0x20 RESPONSE (POISON in the TypeScript library), 0x40 HELIX,
      0x80 ACK.
  - id: length
    type: b24
    doc: Bytes of the payload that follows, 0 to 16,777,215.
instances:
  is_fork:
    value: flags & 0x01 != 0
  is_vent:
    value: flags & 0x08 != 0
    doc: With RESPONSE a failure, without it a cancel.
  is_fin:
    value: flags & 0x10 != 0
  is_response:
    value: flags & 0x20 != 0
  is_ack:
    value: flags & 0x80 != 0 and stream_id == 0xffff
    doc: An acknowledgement of the fragmented transport. The flag on another stream acknowledges nothing.
  kind:
    value: '(flags & 0xa7) != 0 ? 2 : (flags & 0x08) != 0 ? 1 : 0'
    doc: |
      What the frame is to a station: 0 a request, 1 a cancel, 2 never answered. RESPONSE, ACK, FORK, RACE and FOLD are
      looked at before VENT.
