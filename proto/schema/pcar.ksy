meta:
  id: pcar
  title: residuals as PCA components
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: le
doc: |
  The body of FORWARD_PCA and LM_HEAD_PCA, and of an answer whose meta says `"body":"pcar"`: one block for each position,
  back to back, at least one. Whether basis, methodology and width are known, and the components finite, is for the
  receiver to say.
doc-ref: proto/spec-pca.md, "PCAR"
seq:
  - id: blocks
    type: block(_index)
    repeat: until
    repeat-until: _io.eof
types:
  block:
    doc: One position, 24 + 4k bytes. All blocks of a body have the same header.
    params:
      - id: index
        type: u4
    seq:
      - id: tag
        contents: PCAR
      - id: boundary
        type: u4
        valid:
          expr: index == 0 or _ == _parent.blocks[0].boundary
        doc: Number of layers already applied; 0 is the embedding.
      - id: k
        type: u4
        valid:
          expr: _ >= 1 and _ <= 1073741817 and (index == 0 or _ == _parent.blocks[0].k)
        doc: Components, 1 to 1,073,741,817, so that the length of a block fits u32.
      - id: hidden_dim
        type: u4
        valid:
          expr: index == 0 or _ == _parent.blocks[0].hidden_dim
        doc: Width of the sender's residual.
      - id: methodology
        type: u4
        valid:
          expr: index == 0 or _ == _parent.blocks[0].methodology
        doc: Id of the methodology spec.
      - id: basis_fp
        type: u4
        valid:
          expr: index == 0 or _ == _parent.blocks[0].basis_fp
        doc: FNV-1a 32 of the sender's basis file.
      - id: components
        type: f4
        repeat: expr
        repeat-expr: k
        doc: In the order of the rows of the basis.
