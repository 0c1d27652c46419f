meta:
  id: qres
  title: residuals with few bits a coordinate
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: le
doc: |
  The body of FORWARD_Q and LM_HEAD_Q, and of an answer whose meta says `"body":"f16"`, `"i8"` or `"q3"` to `"q8"`. Whether basis,
  methodology and width are known, and the numbers finite, is for the receiver to say.
doc-ref: proto/spec-qres.md, "Layout"
seq:
  - id: tag
    contents: QRES
  - id: boundary
    type: u4
    doc: Number of layers already applied; 0 is the embedding.
  - id: hidden_dim
    type: u4
    valid:
      min: 1
      max: 16777216
    doc: Width of the sender's residual.
  - id: position_count
    type: u4
    valid:
      min: 1
  - id: basis_fp
    type: u4
    doc: FNV-1a 32 of the basis file whose mean was taken off; 0 for none.
  - id: methodology
    type: u4
    valid:
      expr: basis_fp != 0 or _ == 0
    doc: Of that basis; 0 for none.
  - id: format
    type: u1
    doc: 0 is half precision, 1 blocks of 8-bit integers, 2 rotated.
  - id: bits
    type: u1
    valid:
      expr: (format == 0 and _ == 16) or (format == 1 and _ == 8) or (format == 2 and _ >= 3 and _ <= 8)
  - id: flags
    type: u2
    valid:
      max: 1
    doc: Bit 0 says that escaped positions are f32, not f16.
  - id: seed
    type: u4
    valid:
      expr: format == 2 or (_ == 0 and basis_fp == 0)
    doc: Of the rotation.
  - id: bitmap
    type: u1
    repeat: expr
    repeat-expr: (position_count + 7) / 8
    doc: One bit a position, the least significant first; set for one that is escaped.
  - id: bitmap_place
    size: 0
    valid:
      expr: position_count % 8 == 0 or bitmap[bitmap.size - 1] >> (position_count % 8) == 0
    doc: Nothing; no bit stands beyond the last position.
  - id: positions
    type: position(_index)
    repeat: expr
    repeat-expr: position_count
  - id: end
    size: 0
    valid:
      expr: _io.eof
    doc: Nothing follows.
types:
  position:
    doc: One residual, in the form that the bitmap and the format say.
    params:
      - id: index
        type: u4
    seq:
      - id: floats
        type: f4
        repeat: expr
        repeat-expr: _parent.hidden_dim
        if: is_escaped and _parent.flags == 1
        doc: The values.
      - id: halves
        type: u2
        repeat: expr
        repeat-expr: _parent.hidden_dim
        if: (is_escaped and _parent.flags == 0) or (not is_escaped and _parent.format == 0)
        doc: The values, as bits of IEEE 754 binary16.
      - id: scales
        type: u2
        repeat: expr
        repeat-expr: (_parent.hidden_dim + 63) / 64
        if: not is_escaped and _parent.format == 1
        doc: Of each block of 64 coordinates, as bits of binary16.
      - id: steps
        type: s1
        repeat: expr
        repeat-expr: _parent.hidden_dim
        if: not is_escaped and _parent.format == 1
        doc: Each coordinate in units of its scale.
      - id: gain
        type: u2
        if: not is_escaped and _parent.format == 2
        doc: Root mean square of the rotated coordinates, as bits of binary16.
      - id: codes
        size: (_parent.hidden_dim * _parent.bits + 7) / 8
        if: not is_escaped and _parent.format == 2
        doc: One code of `bits` bits a coordinate, the least significant bit first.
      - id: codes_place
        size: 0
        if: not is_escaped and _parent.format == 2
        valid:
          expr: _parent.hidden_dim * _parent.bits % 8 == 0 or codes[codes.length - 1] >> (_parent.hidden_dim * _parent.bits % 8) == 0
        doc: Nothing; the bits after the last code are 0.
    instances:
      is_escaped:
        value: _parent.bitmap[index / 8] >> (index % 8) & 1 == 1
