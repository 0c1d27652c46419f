meta:
  id: aeon_flow
  title: aeon-flow frame with payload and body
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: be
  imports:
    - aeon_header
    - aeon_words
    - bwah_capture
    - bwah_reply
    - pcar
    - udp_ack
doc: |
  One frame, exactly as long as its bytes, read as far as header and route say what it holds. What only the meta says
  (token ids or residuals, PCA components in the answer to a raw route) is left to the reader of the meta: such a body is
  an `aeon_words`.
doc-ref: proto/SPEC.md, "Frame header", "Payload" and "Routes"
seq:
  - id: header
    type: aeon_header
  - id: content
    size: header.length
    type:
      switch-on: role
      cases:
        0: request
        2: answer
        3: udp_ack
        4: openings
        _: unread
  - id: end
    size: 0
    valid:
      expr: _io.eof
instances:
  role:
    value: |
      header.is_ack ? 3 : header.is_response ? 2 :
      (header.is_fork and header.stream_id == 0xfffe) ? 4 : header.kind == 2 ? 5 : header.kind
    doc: |
      0 a request, 1 a cancel (its payload is ignored), 2 an answer, 3 an acknowledgement of the fragmented transport,
      4 the opening of a station for stock clients, 5 anything else that a station never answers.
types:
  request:
    doc: A request without at least the 2 bytes of `meta_len` is never answered.
    seq:
      - id: meta_len
        type: u2
      - id: meta
        type: str
        encoding: UTF-8
        size: meta_len
      - id: body
        size-eos: true
        type:
          switch-on: '_io.eof and _root.header.stream_id == 0xb002 ? 0 : _root.header.stream_id'
          cases:
            0x0002: aeon_words
            0x0003: aeon_words
            0x0004: aeon_words
            0x0103: pcar
            0x0104: pcar
            0xb002: bwah_capture
            _: unread
        doc: |
          EMBED: token ids. FORWARD: residuals, or token ids if the meta has `"in":"ids"`. LM_HEAD: residuals. FORWARD_PCA
          and LM_HEAD_PCA: PCAR. AMPLITUHEDRON_CAPTURE: a BWAH capture, or nothing if the meta names a session. The bodies
          of other routes are not looked at.
  answer:
    seq:
      - id: meta_len
        type: u2
      - id: meta
        type: str
        encoding: UTF-8
        size: meta_len
        doc: Has `status`; in a failure also `error`.
      - id: body
        size-eos: true
        type:
          switch-on: '_root.header.is_vent ? 0 : _root.header.stream_id'
          cases:
            0x0002: aeon_words
            0x0003: aeon_words
            0x0004: aeon_words
            0x0103: aeon_words
            0x0104: aeon_words
            0xb001: bwah_reply
            _: unread
        doc: |
          By `body` of the meta: `f32` and `logits` are floats, `u32` token ids, `topk` for each position `top_k` ids and
          then as many floats, `pcar` the blocks of `pcar`, which are whole words too.
  openings:
    doc: The frame that `--stock-clients` sends on connect, on stream 0xfffe.
    seq:
      - id: opcodes
        type: u2
        repeat: eos
  unread:
    seq:
      - id: bytes
        size-eos: true
