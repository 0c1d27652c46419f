meta:
  id: pcab
  title: PCA basis file
  license: MIT OR Apache-2.0
  ks-version: '0.11'
  endian: le
doc: |
  The basis file that both ends of a compressed hop hold, version 1. For given content there is one file: every section
  stands at the next multiple of 64, in a fixed order, with zeros between. This schema therefore reads the file from front
  to back and demands of every offset that it names the place where its section has to be. The rules on products and sums
  of numbers, and on the text of the metadata, are beyond a schema.

  Looking for the owner of a shared basis takes time proportional to the entries before it.
doc-ref: proto/spec-pca.md, "PCAB"
seq:
  - id: magic
    contents: PCAB
  - id: version
    type: u4
    valid: 1
  - id: hidden_dim
    type: u4
    valid:
      min: 1
    doc: Width d of a residual.
  - id: entry_count
    type: u4
    valid:
      min: 1
  - id: methodology
    type: u4
    doc: Id of the methodology spec; any value.
  - id: flags
    type: u4
    valid: 0
  - id: meta_off
    type: u8
    doc: Start of the metadata.
  - id: meta_len
    type: u8
    valid:
      max: _io.size
    doc: Bytes of the metadata; 0 stands for `{}`.
  - id: file_len
    type: u8
    valid:
      expr: _ == _io.size
    doc: Bytes of the file.
  - id: reserved
    type: u1
    repeat: expr
    repeat-expr: 16
    valid: 0
  - id: entries
    type: entry(_index)
    repeat: expr
    repeat-expr: entry_count
  - id: sections
    type: section(_index)
    repeat: expr
    repeat-expr: entry_count
  - id: padding
    type: padding
  - id: meta_place
    size: 0
    valid:
      expr: meta_off == _io.pos
    doc: No byte; the metadata must begin here.
  - id: metadata
    type: str
    encoding: UTF-8
    size: meta_len
    doc: A JSON object by the rules of the payload meta.
  - id: end
    size: 0
    valid:
      expr: _io.eof
types:
  entry:
    doc: 32 bytes of the table, for one boundary.
    params:
      - id: index
        type: u4
    seq:
      - id: boundary
        type: u4
        valid:
          expr: index == 0 or _ > _root.entries[index - 1].boundary
        doc: Above that of the entry before.
      - id: k
        type: u4
        valid:
          max: _root.hidden_dim
        doc: Components; 0 is a mean only.
      - id: mean_off
        type: u8
      - id: basis_off
        type: u8
        doc: Its own basis, or that of an earlier entry.
      - id: variance_off
        type: u8
    instances:
      is_shared:
        value: basis_off < mean_off
        doc: A basis of its own stands behind the mean; another's stands before it.
      owns_basis:
        value: k > 0 and not is_shared
  section:
    doc: The numbers of one entry, each array behind its padding.
    params:
      - id: index
        type: u4
    seq:
      - id: mean_padding
        type: padding
      - id: mean_place
        size: 0
        valid:
          expr: entry.mean_off == _io.pos
        doc: No byte; the mean must begin here.
      - id: mean
        type: f4
        repeat: expr
        repeat-expr: _root.hidden_dim
        valid:
          expr: _ - _ == 0
        doc: Finite.
      - id: owner
        type: candidate(_index, index)
        repeat: until
        repeat-until: _.ends_search
        if: entry.is_shared
        doc: No byte; looks for the earlier entry whose basis this one names.
      - id: owner_found
        size: 0
        if: entry.is_shared
        valid:
          expr: owner.last.matches
        doc: No byte; the search must have ended at an entry with a basis of its own, there, and with the same k.
      - id: basis_padding
        type: padding
        if: not entry.is_shared
      - id: basis_place
        size: 0
        if: not entry.is_shared
        valid:
          expr: entry.basis_off == _io.pos
        doc: No byte; the basis must begin here.
      - id: basis
        type: row
        repeat: expr
        repeat-expr: entry.k
        if: not entry.is_shared
        doc: One row a component. Each has length 1 and stands at right angles to the others, to within 1e-4.
      - id: variance_padding
        type: padding
      - id: variance_place
        size: 0
        valid:
          expr: entry.variance_off == _io.pos
        doc: No byte; the variances must begin here.
      - id: variance
        type: f4
        repeat: expr
        repeat-expr: entry.k + 1
        valid:
          expr: _ - _ == 0 and _ >= 0
        doc: The variance along each component, then the total. Finite and not negative.
    instances:
      entry:
        value: _root.entries[index]
  row:
    seq:
      - id: values
        type: f4
        repeat: expr
        repeat-expr: _root.hidden_dim
        valid:
          expr: _ - _ == 0
        doc: Finite.
  candidate:
    doc: No bytes. Whether entry `other` owns the basis that entry `index` names.
    params:
      - id: other
        type: u4
      - id: index
        type: u4
    instances:
      matches:
        value: |
          _root.entries[other].owns_basis
          and _root.entries[other].basis_off == _root.entries[index].basis_off
          and _root.entries[other].k == _root.entries[index].k
      ends_search:
        value: matches or other + 1 >= index
  padding:
    doc: Zeros up to the next multiple of 64.
    seq:
      - id: zeros
        type: u1
        repeat: expr
        repeat-expr: zero_count
        valid: 0
    instances:
      zero_count:
        value: (64 - _io.pos % 64) % 64
        doc: |
          Taken once, before the first zero is read: JavaScript evaluates an expression in `repeat-expr` again after each
          item.
