//! PCAR: a residual as its first `k` PCA components, one block a position. Spec: `proto/SPEC.md`, "PCAR".
//!
//! ```text
//! byte  0        4          8     12           16            20         24            24 + 4k
//!       | "PCAR" | boundary | k   | hidden_dim | methodology | basis_fp | components | next block …
//!       | tag    | u32      | u32 | u32        | u32         | u32      | f32 × k    |
//! ```
//!
//! All integers are little-endian. Several positions are several blocks back to back whose headers are identical. The
//! station's FORWARD_PCA and LM_HEAD_PCA decode bodies here and then ask their registry about `basis_fp` and
//! `methodology`; this module knows neither bases nor models. It does not compare `k` with `hidden_dim`: a receiver must
//! be able to answer "unknown basis" before it says anything about sizes.

use alloc::vec::Vec;

use crate::{cursor::Cursor, residual};

/// The first four bytes of a block.
pub const TAG: [u8; 4] = *b"PCAR";
/// Bytes of a block before its components.
pub const HEADER_LEN: usize = 24;
/// The largest `k` whose block length fits u32, so that every platform refuses the same bodies.
pub const MAX_K: u32 = (u32::MAX - 24) / 4;

/// The fields that all blocks of a body share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes 4..8, u32 little-endian: the number of layers already applied (the seed calls it `layer_index`).
    pub boundary: u32,
    /// Bytes 8..12, u32 little-endian: components in each block, 1 to [`MAX_K`].
    pub k: u32,
    /// Bytes 12..16, u32 little-endian: the sender's residual width; for the receiver to check.
    pub hidden_dim: u32,
    /// Bytes 16..20, u32 little-endian: id of the methodology spec, see [`crate::methodology`].
    pub methodology: u32,
    /// Bytes 20..24, u32 little-endian: FNV-1a 32 of the sender's basis file, see [`crate::pcab`].
    pub basis_fp: u32,
}

/// A header field, in the order of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Field {
    /// `boundary`
    Boundary,
    /// `k`
    K,
    /// `hidden_dim`
    HiddenDim,
    /// `methodology`
    Methodology,
    /// `basis_fp`
    BasisFp,
}

impl core::fmt::Display for Field {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Boundary => "boundary",
            Self::K => "k",
            Self::HiddenDim => "hidden_dim",
            Self::Methodology => "methodology",
            Self::BasisFp => "basis_fp",
        })
    }
}

/// Why a body is no PCAR sequence. Blocks count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum DecodeError {
    /// The body ends inside a block. An empty body ends inside block 0: there is no sequence of no positions.
    #[error("pcar block {block} takes {needed} bytes, {left} left")]
    Truncated {
        /// The block.
        block: usize,
        /// Bytes of its header, or of all of it once its header is there.
        needed: usize,
        /// Bytes from its start to the end of the body.
        left: usize,
    },
    /// A block does not start with [`TAG`].
    #[error("pcar block {block} starts with {got:02x?}")]
    BadTag {
        /// The block.
        block: usize,
        /// Its first four bytes.
        got: [u8; 4],
    },
    /// `k` is 0: nothing to lift.
    #[error("pcar with k = 0")]
    ZeroComponents,
    /// `k` is over [`MAX_K`]: the length of the block does not fit.
    #[error("pcar with k = {k}, at most {MAX_K}")]
    LengthOverflow {
        /// The field `k`.
        k: u32,
    },
    /// A block's header differs from that of block 0.
    #[error("pcar block {block} has {field} {got}, the first has {expected}")]
    HeaderDiffers {
        /// The block.
        block: usize,
        /// The first field that differs.
        field: Field,
        /// Its value in block 0.
        expected: u32,
        /// Its value in this block.
        got: u32,
    },
}

/// Why components cannot be written as PCAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum EncodeError {
    /// `k` is 0.
    #[error("pcar with k = 0")]
    ZeroComponents,
    /// `k` is over [`MAX_K`].
    #[error("pcar with k = {k}, at most {MAX_K}")]
    LengthOverflow {
        /// The field `k`.
        k: u32,
    },
    /// No components at all, or no whole number of positions.
    #[error("{got} components are no whole number of positions of {k}")]
    Ragged {
        /// Components given.
        got: usize,
        /// Components of one position.
        k: u32,
    },
}

/// A checked PCAR body that borrows the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PcarBody<'a> {
    header: Header,
    block_len: usize,
    bytes: &'a [u8],
}

impl<'a> PcarBody<'a> {
    /// Checks a whole body: one block or several, and nothing behind the last.
    ///
    /// The components are not looked at. Allocates nothing.
    ///
    /// # Errors
    /// See [`DecodeError`]; the fault that comes first in the bytes is the one reported.
    pub fn decode(body: &'a [u8]) -> Result<Self, DecodeError> {
        let header = read_header(body, 0)?;
        let block_len = block_len(header.k).ok_or(DecodeError::LengthOverflow { k: header.k })?;
        if header.k == 0 {
            return Err(DecodeError::ZeroComponents);
        }
        let mut rest = body;
        let mut block = 0_usize;
        while !rest.is_empty() {
            let found = read_header(rest, block)?;
            if found != header {
                return Err(header.difference(&found, block));
            }
            rest = rest.split_at_checked(block_len).map(|(_, rest)| rest).ok_or(DecodeError::Truncated {
                block,
                needed: block_len,
                left: rest.len(),
            })?;
            block = block.saturating_add(1);
        }
        Ok(Self { header, block_len, bytes: body })
    }

    /// The header that all blocks share.
    #[must_use]
    pub const fn header(&self) -> Header {
        self.header
    }

    /// The number of layers already applied.
    #[must_use]
    pub const fn boundary(&self) -> u32 {
        self.header.boundary
    }

    /// Components of each position, at least 1.
    #[must_use]
    pub const fn k(&self) -> u32 {
        self.header.k
    }

    /// The sender's residual width.
    #[must_use]
    pub const fn hidden_dim(&self) -> u32 {
        self.header.hidden_dim
    }

    /// Id of the methodology spec.
    #[must_use]
    pub const fn methodology(&self) -> u32 {
        self.header.methodology
    }

    /// Fingerprint of the basis file.
    #[must_use]
    pub const fn basis_fp(&self) -> u32 {
        self.header.basis_fp
    }

    /// Number of positions, at least 1.
    #[must_use]
    pub fn seq(&self) -> usize {
        self.positions().len()
    }

    /// The components of each position in turn: `4 * k` bytes of packed little-endian f32, at any alignment.
    ///
    /// [`residual::decode_f32s`] reads one such slice.
    pub fn positions(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + DoubleEndedIterator + use<'a> {
        self.bytes.chunks_exact(self.block_len).map(|block| block.get(HEADER_LEN..).unwrap_or_default())
    }

    /// Appends the components of all positions to `out`, `[seq, k]` row-major, as the batched lift wants them.
    pub fn read_components(&self, out: &mut Vec<f32>) {
        out.reserve(self.bytes.len() / 4);
        for position in self.positions() {
            let (words, _) = position.as_chunks::<4>();
            out.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
        }
    }

    /// Checks that no component is NaN or infinite.
    ///
    /// # Errors
    /// [`residual::NonFinite`] with the index of the first bad component in `[seq, k]`.
    pub fn check_finite(&self) -> Result<(), residual::NonFinite> {
        let mut before = 0_usize;
        for position in self.positions() {
            residual::check_finite(position)
                .map_err(|bad| residual::NonFinite { index: bad.index.saturating_add(before) })?;
            before = before.saturating_add(position.len() / 4);
        }
        Ok(())
    }
}

/// Appends one block for each position to `out`; `components` is `[seq, header.k]` row-major. Returns the bytes written.
///
/// Bit patterns are kept as they are: refusing NaN and infinity is the caller's part, with
/// [`residual::check_finite_values`].
///
/// # Errors
/// See [`EncodeError`]; `out` is unchanged then.
pub fn encode(header: &Header, components: &[f32], out: &mut Vec<u8>) -> Result<usize, EncodeError> {
    let k = header.k;
    let block_len = block_len(k).ok_or(EncodeError::LengthOverflow { k })?;
    let row = block_len.saturating_sub(HEADER_LEN) / 4;
    if row == 0 {
        return Err(EncodeError::ZeroComponents);
    }
    if components.is_empty() || !components.len().is_multiple_of(row) {
        return Err(EncodeError::Ragged { got: components.len(), k });
    }
    let head = header.encode();
    let start = out.len();
    let positions = components.chunks_exact(row);
    out.reserve(positions.len().saturating_mul(block_len));
    for position in positions {
        out.extend_from_slice(&head);
        residual::encode_f32s(position, out);
    }
    Ok(out.len().saturating_sub(start))
}

impl Header {
    /// The tag and the five fields.
    fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        let (words, _) = out.as_chunks_mut::<4>();
        let fields = self.fields().map(|(_, value)| value.to_le_bytes());
        for (word, field) in words.iter_mut().zip([TAG].iter().chain(&fields)) {
            *word = *field;
        }
        out
    }

    const fn fields(&self) -> [(Field, u32); 5] {
        [
            (Field::Boundary, self.boundary),
            (Field::K, self.k),
            (Field::HiddenDim, self.hidden_dim),
            (Field::Methodology, self.methodology),
            (Field::BasisFp, self.basis_fp),
        ]
    }

    /// Names the first field in which `found` differs.
    fn difference(&self, found: &Self, block: usize) -> DecodeError {
        let pairs = self.fields().into_iter().zip(found.fields());
        let (field, expected, got) = pairs
            .map(|((field, expected), (_, got))| (field, expected, got))
            .find(|(_, expected, got)| expected != got)
            .unwrap_or((Field::Boundary, self.boundary, found.boundary));
        DecodeError::HeaderDiffers { block, field, expected, got }
    }
}

fn read_header(bytes: &[u8], block: usize) -> Result<Header, DecodeError> {
    let short = |_| DecodeError::Truncated { block, needed: HEADER_LEN, left: bytes.len() };
    let mut cursor = Cursor::new(bytes);
    let mut head = Cursor::new(cursor.take(HEADER_LEN).map_err(short)?);
    let tag = head.array().map_err(short)?;
    if tag != TAG {
        return Err(DecodeError::BadTag { block, got: tag });
    }
    Ok(Header {
        boundary: head.u32_le().map_err(short)?,
        k: head.u32_le().map_err(short)?,
        hidden_dim: head.u32_le().map_err(short)?,
        methodology: head.u32_le().map_err(short)?,
        basis_fp: head.u32_le().map_err(short)?,
    })
}

/// `24 + 4k`, if it fits u32.
fn block_len(k: u32) -> Option<usize> {
    let len = k.checked_mul(4)?.checked_add(HEADER_LEN as u32)?;
    usize::try_from(len).ok()
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    const HEADER: Header =
        Header { boundary: 7, k: 2, hidden_dim: 896, methodology: 0x0102_0304, basis_fp: 0xa1b2_c3d4 };

    #[rustfmt::skip]
    const BLOCK: [u8; 32] = [
        b'P', b'C', b'A', b'R', 7, 0, 0, 0, 2, 0, 0, 0, 0x80, 3, 0, 0, 4, 3, 2, 1, 0xd4, 0xc3, 0xb2, 0xa1,
        0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0,
    ];

    #[test]
    fn deconstructs_and_constructs() {
        let body = PcarBody::decode(&BLOCK).unwrap();
        assert_eq!((body.header(), body.seq()), (HEADER, 1));
        let mut components = Vec::new();
        body.read_components(&mut components);
        assert_eq!(components, [1.0, -2.0]);
        let mut out = vec![0xa5; 3];
        assert_eq!(encode(&HEADER, &components, &mut out), Ok(32));
        assert_eq!((&out[..3], &out[3..]), (&[0xa5; 3][..], &BLOCK[..]));
    }

    #[test]
    fn every_shorter_body_and_every_longer_one_is_refused() {
        let two = [BLOCK, BLOCK].concat();
        assert_eq!(PcarBody::decode(&two).unwrap().seq(), 2);
        for len in (0..64).filter(|len| *len != 32) {
            let (block, left) = (len / 32, len % 32);
            let needed = if left < 24 { 24 } else { 32 };
            assert_eq!(PcarBody::decode(&two[..len]), Err(DecodeError::Truncated { block, needed, left }));
        }
    }

    #[test]
    fn the_differing_field_is_named() {
        let fields = [Field::Boundary, Field::K, Field::HiddenDim, Field::Methodology, Field::BasisFp];
        for (n, field) in fields.into_iter().enumerate() {
            let mut body = [BLOCK, BLOCK, BLOCK].concat();
            body[64 + 4 + 4 * n + 3] ^= 0x80;
            let (_, expected) = HEADER.fields()[n];
            let got = expected ^ 0x8000_0000;
            assert_eq!(PcarBody::decode(&body), Err(DecodeError::HeaderDiffers { block: 2, field, expected, got }));
        }
        let mut body = [BLOCK, BLOCK].concat();
        body[32] = b'Q';
        assert_eq!(PcarBody::decode(&body), Err(DecodeError::BadTag { block: 1, got: *b"QCAR" }));
    }

    #[test]
    fn component_count_at_and_past_its_limits() {
        let with_k = |k: u32| {
            let mut body = BLOCK;
            body[8..12].copy_from_slice(&k.to_le_bytes());
            PcarBody::decode(&body).map(|body| body.seq())
        };
        assert_eq!(with_k(0), Err(DecodeError::ZeroComponents));
        assert_eq!(with_k(1), Err(DecodeError::Truncated { block: 1, needed: 24, left: 4 }));
        assert_eq!(with_k(3), Err(DecodeError::Truncated { block: 0, needed: 36, left: 32 }));
        let needed = 24 + 4 * MAX_K as usize;
        assert_eq!(with_k(MAX_K), Err(DecodeError::Truncated { block: 0, needed, left: 32 }));
        for k in [MAX_K + 1, u32::MAX] {
            assert_eq!(with_k(k), Err(DecodeError::LengthOverflow { k }));
            assert_eq!(encode(&Header { k, ..HEADER }, &[1.0], &mut vec![]), Err(EncodeError::LengthOverflow { k }));
        }
    }

    #[test]
    fn components_must_fill_positions() {
        let mut out = vec![1];
        for got in [0, 1, 3] {
            assert_eq!(encode(&HEADER, &[0.0; 3][..got], &mut out), Err(EncodeError::Ragged { got, k: 2 }));
        }
        assert_eq!(encode(&Header { k: 0, ..HEADER }, &[], &mut out), Err(EncodeError::ZeroComponents));
        assert_eq!(out, [1]);
    }

    #[test]
    fn the_first_bad_component_is_counted_over_all_positions() {
        let mut out = vec![];
        encode(&HEADER, &[1.0, 2.0, 3.0, f32::NEG_INFINITY], &mut out).unwrap();
        let bad = PcarBody::decode(&out).unwrap().check_finite();
        assert_eq!(bad, Err(residual::NonFinite { index: 3 }));
        assert_eq!(PcarBody::decode(&out[..32]).unwrap().check_finite(), Ok(()));
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes_to_the_same_bits(
            fields in any::<[u32; 4]>(),
            k in 1_u32..9,
            bits in prop::collection::vec(any::<u32>(), 8..80),
            offset in 0_usize..4,
        ) {
            let [boundary, hidden_dim, methodology, basis_fp] = fields;
            let header = Header { boundary, k, hidden_dim, methodology, basis_fp };
            let seq = bits.len() / k as usize;
            let components: Vec<f32> = bits.iter().take(seq * k as usize).map(|bits| f32::from_bits(*bits)).collect();
            let mut out = vec![0; offset];
            let len = encode(&header, &components, &mut out).unwrap();
            prop_assert_eq!(len, seq * (24 + 4 * k as usize));
            let body = PcarBody::decode(&out[offset..]).unwrap();
            prop_assert_eq!((body.header(), body.seq()), (header, seq));
            let mut back = Vec::new();
            body.read_components(&mut back);
            prop_assert!(back.iter().zip(&components).all(|(a, b)| a.to_bits() == b.to_bits()));
            let slices: Vec<u8> = body.positions().flatten().copied().collect();
            prop_assert_eq!(residual::decode_f32s(&slices).unwrap().len(), back.len());
        }

        #[test]
        fn any_bytes_are_refused_or_encode_again_to_themselves(
            mut body in prop::collection::vec(any::<u8>(), 0..120),
            repeat in any::<bool>(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            if repeat {
                body = [BLOCK, BLOCK, BLOCK].concat();
                let at = at.index(body.len());
                body[at] = byte;
            }
            if let Ok(decoded) = PcarBody::decode(&body) {
                let mut components = Vec::new();
                decoded.read_components(&mut components);
                let mut again = Vec::new();
                encode(&decoded.header(), &components, &mut again).unwrap();
                prop_assert_eq!(again, body);
            }
        }
    }
}
