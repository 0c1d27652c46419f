meta:
  id: udp_ack
  title: acknowledgement of the fragmented UDP transport
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
doc: |
  The payload of a frame on stream 0xffff with sequence 0 and flags 0x80: a row of entries. What is left at the end and is
  no whole entry is ignored. No bytes are illegal.
doc-ref: proto/spec-bw.md, "Fragmented UDP"
seq:
  - id: entries
    type: entry
    repeat: expr
    repeat-expr: _io.size / 14
  - id: ignored
    size-eos: true
    doc: 0 to 13 bytes.
types:
  entry:
    seq:
      - id: stream_id
        type: u2
        doc: The stream that is acknowledged.
      - id: base
        type: u4
        doc: The sequence that bit 0 stands for.
      - id: bits_hi
        type: u4
        doc: Bits 32 to 63. Bit i says that sequence `base` + i has come; sums over 0xffffffff name nothing.
      - id: bits_lo
        type: u4
        doc: Bits 0 to 31.
