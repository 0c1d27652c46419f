//! Where everything stands in a `.bw` blob. All offsets, widths and byte orders are in this file and nowhere else.
//!
//! ```text
//! byte  0       4         5           6      12          13            14              15
//!       | magic | version | mime_code | fp48 | word_bits | parity_bits | mime_ext_len  |
//!       | BWB1  | 0x01    | u8        | u48  | 48        | 16          | u8, 0 to 127  |
//!
//! then  | mime_ext     | orig_len | tail_len        | tail     | parity           | packed           |
//!       | mime_ext_len | u32      | u8              | tail_len | 2 bytes per word | 6 bytes per word |
//! ```
//!
//! All integers are little-endian. The input is read as words of 8 bytes; a word's low 48 bits go to `packed` and its high
//! 16 bits to `parity`. The `orig_len` mod 8 bytes that remain at the end of the input are the `tail`.

use alloc::vec::Vec;

use super::DecodeError;
use crate::cursor::Cursor;

/// The first 4 bytes.
pub(super) const MAGIC: [u8; 4] = *b"BWB1";
/// The version, in the low 5 bits of its byte.
pub(super) const VERSION: u8 = 0x01;
/// Bits of the version byte that announce forms with a dictionary (0x80), a lift (0x40), a positional dictionary (0x20).
pub(super) const VERSION_FLAGS: u8 = 0xe0;
/// `word_bits`: bits of a word in `packed`.
pub(super) const WORD_BITS: u8 = 48;
/// `parity_bits`: bits of a word in `parity`.
pub(super) const PARITY_BITS: u8 = 16;
/// `mime_code` of a type that stands in `mime_ext`.
pub(super) const MIME_INLINE: u8 = 0xff;
/// Longest `mime_ext`.
pub(super) const MAX_MIME_EXT_LEN: usize = 127;
/// Bytes up to `mime_ext`.
pub(super) const HEADER_LEN: usize = 15;
/// Bytes of `orig_len` and `tail_len`.
const LENGTHS_LEN: usize = 5;

/// The bytes of a word in the input, in `parity` and in `packed`.
pub(super) type Word = [u8; 8];
pub(super) type Parity = [u8; 2];
pub(super) type Packed = [u8; 6];

/// The 15 bytes at the start, read but not judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) magic: [u8; 4],
    pub(super) version: u8,
    pub(super) mime_code: u8,
    pub(super) fp48: u64,
    pub(super) word_bits: u8,
    pub(super) parity_bits: u8,
    pub(super) mime_ext_len: u8,
}

impl Header {
    const fn decode(bytes: [u8; HEADER_LEN]) -> Self {
        let [m0, m1, m2, m3, version, mime_code, f0, f1, f2, f3, f4, f5, word_bits, parity_bits, mime_ext_len] = bytes;
        let fp48 = u64::from_le_bytes([f0, f1, f2, f3, f4, f5, 0, 0]);
        Self { magic: [m0, m1, m2, m3], version, mime_code, fp48, word_bits, parity_bits, mime_ext_len }
    }

    const fn encode(self) -> [u8; HEADER_LEN] {
        let [m0, m1, m2, m3] = self.magic;
        let [f0, f1, f2, f3, f4, f5, _, _] = self.fp48.to_le_bytes();
        let Self { version, mime_code, word_bits, parity_bits, mime_ext_len, .. } = self;
        [m0, m1, m2, m3, version, mime_code, f0, f1, f2, f3, f4, f5, word_bits, parity_bits, mime_ext_len]
    }

    /// Reads the header at the start of a blob.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        Ok(Self::decode(cursor.array()?))
    }
}

/// What follows the header and its `mime_ext`, with lengths that agree with each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sections<'a> {
    pub(super) orig_len: u32,
    pub(super) tail: &'a [u8],
    pub(super) parity: &'a [Parity],
    pub(super) packed: &'a [Packed],
}

impl<'a> Sections<'a> {
    /// Reads up to the end of the blob, which must be the end of the buffer.
    pub(super) fn read(cursor: &mut Cursor<'a>) -> Result<Self, DecodeError> {
        let orig_len = cursor.u32_le()?;
        let tail_len = cursor.u8()?;
        if u32::from(tail_len) != orig_len % 8 {
            return Err(DecodeError::TailLen { orig_len, tail_len });
        }
        let offset = cursor.offset();
        let whole = usize::try_from(orig_len).unwrap_or(usize::MAX);
        let body = cursor.rest();
        let Some((body, after)) = body.split_at_checked(whole) else {
            return Err(DecodeError::Truncated { offset, needed: whole, left: body.len() });
        };
        if !after.is_empty() {
            return Err(DecodeError::TrailingBytes { extra: after.len() });
        }
        let (tail, words) = body.split_at_checked(usize::from(tail_len)).unwrap_or_default();
        let (parity, packed) = words.split_at_checked(words.len() / 4).unwrap_or_default();
        Ok(Self { orig_len, tail, parity: parity.as_chunks().0, packed: packed.as_chunks().0 })
    }
}

/// Bytes of a blob.
pub(super) const fn blob_len(mime_ext_len: usize, orig_len: u32) -> usize {
    HEADER_LEN.saturating_add(mime_ext_len).saturating_add(LENGTHS_LEN).saturating_add(orig_len as usize)
}

/// Appends a blob to `out`. `pack` fills `parity` and `packed` from all of `input` and returns the fingerprint, which
/// replaces the one in `header`.
pub(super) fn write(
    out: &mut Vec<u8>,
    mut header: Header,
    mime_ext: &[u8],
    orig_len: u32,
    input: &[u8],
    pack: impl FnOnce(&[u8], &mut [Parity], &mut [Packed]) -> u64,
) {
    let start = out.len();
    out.reserve(blob_len(mime_ext.len(), orig_len));
    out.extend_from_slice(&[0; HEADER_LEN]);
    out.extend_from_slice(mime_ext);
    out.extend_from_slice(&orig_len.to_le_bytes());
    let (words, tail) = input.as_chunks::<8>();
    out.push(tail.len() as u8);
    out.extend_from_slice(tail);
    let body = out.len();
    out.resize(body.saturating_add(words.as_flattened().len()), 0);
    if let Some(body) = out.get_mut(body..)
        && let Some((parity, packed)) = body.split_at_mut_checked(body.len() / 4)
    {
        header.fp48 = pack(input, parity.as_chunks_mut().0, packed.as_chunks_mut().0);
    }
    if let Some(slot) = out.get_mut(start..).and_then(<[u8]>::first_chunk_mut) {
        *slot = header.encode();
    }
}
