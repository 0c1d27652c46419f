meta:
  id: aeon_payload
  title: aeon-flow payload with an unread body
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
doc: |
  A JSON object and a body. That the meta is UTF-8 and a JSON object without duplicate keys and of at most 32 levels is
  beyond a schema; a receiver answers anything else with status 400.
doc-ref: proto/SPEC.md, "Payload"
seq:
  - id: meta_len
    type: u2
    doc: Bytes of the meta; 0 stands for `{}`. Past the end of the payload it is status 400.
  - id: meta
    type: str
    encoding: UTF-8
    size: meta_len
  - id: body
    size-eos: true
    doc: By route; see `aeon_flow`.
