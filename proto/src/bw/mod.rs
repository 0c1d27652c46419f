//! The `.bw` blob: bytes with a type, a fingerprint and an exact length. Spec: `proto/SPEC.md`, "The .bw blob".
//!
//! Not a compressor: a blob is 20 bytes longer than its content (plus the name of an uncommon type). What it adds is an
//! integrity check and the word packing that its relatives build on. The bytes are laid out in `layout.rs`; packing is
//! done by the reference loop or, with the `std` feature on x86-64, by vector code of the same result.
//!
//! ```
//! use aeon_proto::bw;
//! let blob = bw::encode(b"seven..", "text/plain");
//! assert_eq!(blob.len(), 27);
//! let decoded = bw::decode(&blob)?;
//! assert_eq!((decoded.bytes.as_slice(), decoded.mime), (&b"seven.."[..], "text/plain"));
//! # Ok::<(), bw::DecodeError>(())
//! ```

#[cfg(all(feature = "std", target_arch = "x86_64"))]
mod hash;
mod layout;
mod reference;
#[cfg(all(feature = "std", target_arch = "x86_64"))]
mod x86;

use alloc::{vec, vec::Vec};

use xxhash_rust::xxh64::xxh64;

use self::layout::{Header, MAGIC, MAX_MIME_EXT_LEN, MIME_INLINE, Packed, Parity, Sections};
pub use self::{decode as decode_bw, encode as encode_bw};
use crate::cursor::{Cursor, Truncated};

/// The type of a blob that is just bytes; the payloads of [`crate::bwah`] have it.
pub const OCTET_STREAM: &str = "application/octet-stream";
/// Bytes that a blob of a coded type is longer than its content.
pub const OVERHEAD: usize = 20;

/// The bits of a fingerprint.
const FP48_MASK: u64 = 0xffff_ffff_ffff;

/// Types that have a code; the code is the index. Any other type is written out.
const CODED: [&str; 3] = [OCTET_STREAM, "application/json", "text/plain"];

/// Why bytes are not a blob. The first fault in the order of the bytes is told, the fingerprint last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum DecodeError {
    /// Fewer bytes than a field needs.
    #[error("{needed} bytes expected at offset {offset}, {left} left")]
    Truncated {
        /// Where the field starts.
        offset: usize,
        /// Bytes that the field takes.
        needed: usize,
        /// Bytes that are there.
        left: usize,
    },
    /// Bytes 0..4 are not `BWB1`.
    #[error("magic {got:02x?} is not BWB1")]
    BadMagic {
        /// The bytes there are.
        got: [u8; 4],
    },
    /// A form of blob that is reserved for dictionaries and lifts.
    #[error("version byte {version:#04x} has flags that are not supported")]
    UnsupportedFlags {
        /// The version byte, flags included.
        version: u8,
    },
    /// Another version than 1.
    #[error("version {got} is not 1")]
    BadVersion {
        /// The version there is.
        got: u8,
    },
    /// A type code that stands for no type.
    #[error("unknown type code {code:#04x}")]
    UnknownMime {
        /// The code.
        code: u8,
    },
    /// Another word packing than 48 bits and 16 bits.
    #[error("words of {word_bits} and {parity_bits} bits, 48 and 16 expected")]
    WordSize {
        /// Byte 12, must be 48.
        word_bits: u8,
        /// Byte 13, must be 16.
        parity_bits: u8,
    },
    /// A written type although there is a code.
    #[error("type code {code:#04x} with a written type of {len} bytes")]
    UnexpectedMime {
        /// The code.
        code: u8,
        /// Bytes of the written type.
        len: u8,
    },
    /// A written type over 127 bytes.
    #[error("written type of {len} bytes, at most 127 are allowed")]
    MimeTooLong {
        /// Its bytes.
        len: usize,
    },
    /// A written type that is not UTF-8.
    #[error("written type is not UTF-8 at byte {valid_up_to}")]
    MimeNotUtf8 {
        /// Bytes of it that are.
        valid_up_to: usize,
    },
    /// A written type that has a code.
    #[error("written type that has the code {code}")]
    NonCanonicalMime {
        /// The code to use.
        code: u8,
    },
    /// `tail_len` is not `orig_len` mod 8.
    #[error("tail of {tail_len} bytes in a content of {orig_len}")]
    TailLen {
        /// Bytes of the content.
        orig_len: u32,
        /// Bytes of its tail.
        tail_len: u8,
    },
    /// More bytes than `orig_len` accounts for.
    #[error("{extra} bytes after the end of the blob")]
    TrailingBytes {
        /// Bytes too many.
        extra: usize,
    },
    /// The content is not the one that was encoded.
    #[error("fingerprint {got:012x}, {expected:012x} expected")]
    Fingerprint {
        /// What the header says.
        expected: u64,
        /// What the content has.
        got: u64,
    },
}

impl DecodeError {
    /// The fault's name in the specification.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Truncated { .. } => "Truncated",
            Self::BadMagic { .. } => "BadMagic",
            Self::UnsupportedFlags { .. } => "UnsupportedFlags",
            Self::BadVersion { .. } => "BadVersion",
            Self::UnknownMime { .. } => "UnknownMime",
            Self::WordSize { .. } => "WordSize",
            Self::UnexpectedMime { .. } => "UnexpectedMime",
            Self::MimeTooLong { .. } => "MimeTooLong",
            Self::MimeNotUtf8 { .. } => "MimeNotUtf8",
            Self::NonCanonicalMime { .. } => "NonCanonicalMime",
            Self::TailLen { .. } => "TailLen",
            Self::TrailingBytes { .. } => "TrailingBytes",
            Self::Fingerprint { .. } => "Fingerprint",
        }
    }
}

impl From<Truncated> for DecodeError {
    fn from(Truncated { offset, needed, left }: Truncated) -> Self {
        Self::Truncated { offset, needed, left }
    }
}

/// Why bytes cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum EncodeError {
    /// The content does not fit 32 bits of length.
    #[error("content of {len} bytes, a blob holds at most 4294967295")]
    TooLong {
        /// Its bytes.
        len: usize,
    },
    /// The type is too long to be written.
    #[error("type of {len} bytes, at most 127 are allowed")]
    MimeTooLong {
        /// Its bytes.
        len: usize,
    },
}

/// The low 48 bits of the XXH64 (seed 0) of some bytes.
#[must_use]
pub fn fp48(bytes: &[u8]) -> u64 {
    xxh64(bytes, 0) & FP48_MASK
}

/// Encodes bytes of the type `mime`.
///
/// What [`try_encode`] refuses gives no bytes at all, which [`decode`] takes for no blob; use that function where content
/// over 4 GiB or types over 127 bytes can occur.
#[must_use]
pub fn encode(bytes: &[u8], mime: &str) -> Vec<u8> {
    try_encode(bytes, mime).unwrap_or_default()
}

/// Encodes bytes of the type `mime`, if they fit.
///
/// # Errors
/// See [`EncodeError`].
pub fn try_encode(bytes: &[u8], mime: &str) -> Result<Vec<u8>, EncodeError> {
    let mut out = Vec::new();
    encode_into(bytes, mime, &mut out)?;
    Ok(out)
}

/// Appends the blob of `bytes` to `out`; on an error `out` is unchanged.
///
/// # Errors
/// See [`EncodeError`].
pub fn encode_into(bytes: &[u8], mime: &str, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let orig_len = content_len(bytes.len())?;
    let code = code_of(mime);
    let mime_ext = if code == MIME_INLINE { mime.as_bytes() } else { &[] };
    let mime_ext_len = u8::try_from(mime_ext.len())
        .ok()
        .filter(|len| usize::from(*len) <= MAX_MIME_EXT_LEN)
        .ok_or(EncodeError::MimeTooLong { len: mime.len() })?;
    let header = Header {
        magic: MAGIC,
        version: layout::VERSION,
        mime_code: code,
        fp48: 0,
        word_bits: layout::WORD_BITS,
        parity_bits: layout::PARITY_BITS,
        mime_ext_len,
    };
    layout::write(out, header, mime_ext, orig_len, bytes, pack);
    Ok(())
}

/// Bytes of the blob of `content_len` bytes of a coded type.
///
/// # Errors
/// [`EncodeError::TooLong`].
pub fn encoded_len(content_len: usize) -> Result<usize, EncodeError> {
    self::content_len(content_len).map(|len| layout::blob_len(0, len))
}

fn content_len(len: usize) -> Result<u32, EncodeError> {
    u32::try_from(len).map_err(|_| EncodeError::TooLong { len })
}

fn code_of(mime: &str) -> u8 {
    CODED.iter().zip(0_u8..).find(|(name, _)| **name == mime).map_or(MIME_INLINE, |(_, code)| code)
}

/// What a blob holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decoded<'a> {
    /// The content.
    pub bytes: Vec<u8>,
    /// Its type.
    pub mime: &'a str,
}

/// Decodes a blob and checks its fingerprint.
///
/// Allocates `orig_len` bytes once they are known to be there.
///
/// # Errors
/// See [`DecodeError`].
pub fn decode(buf: &[u8]) -> Result<Decoded<'_>, DecodeError> {
    let blob = Blob::parse(buf)?;
    let mut bytes = vec![0; blob.content_len()];
    blob.unpack(&mut bytes)?;
    Ok(Decoded { bytes, mime: blob.mime })
}

/// A blob whose header and lengths are checked and whose content is still packed.
#[derive(Debug, Clone, Copy)]
pub struct Blob<'a> {
    /// The type of the content.
    pub mime: &'a str,
    /// The low 48 bits of the content's XXH64, as the header has it.
    pub fp48: u64,
    sections: Sections<'a>,
}

impl<'a> Blob<'a> {
    /// Reads the blob that `buf` is, to its last byte.
    ///
    /// # Errors
    /// Every [`DecodeError`] but [`DecodeError::Fingerprint`].
    pub fn parse(buf: &'a [u8]) -> Result<Self, DecodeError> {
        let mut cursor = Cursor::new(buf);
        let header = Header::read(&mut cursor)?;
        if header.magic != MAGIC {
            return Err(DecodeError::BadMagic { got: header.magic });
        }
        if header.version & layout::VERSION_FLAGS != 0 {
            return Err(DecodeError::UnsupportedFlags { version: header.version });
        }
        if header.version != layout::VERSION {
            return Err(DecodeError::BadVersion { got: header.version });
        }
        let coded = CODED.get(usize::from(header.mime_code)).copied();
        let (code, len) = (header.mime_code, header.mime_ext_len);
        if coded.is_none() && code != MIME_INLINE {
            return Err(DecodeError::UnknownMime { code });
        }
        if (header.word_bits, header.parity_bits) != (layout::WORD_BITS, layout::PARITY_BITS) {
            let Header { word_bits, parity_bits, .. } = header;
            return Err(DecodeError::WordSize { word_bits, parity_bits });
        }
        let mime = match coded {
            Some(mime) if len == 0 => mime,
            Some(_) => return Err(DecodeError::UnexpectedMime { code, len }),
            None => written_mime(&mut cursor, usize::from(len))?,
        };
        Ok(Self { mime, fp48: header.fp48, sections: Sections::read(&mut cursor)? })
    }

    /// Bytes of the content.
    #[must_use]
    pub const fn content_len(&self) -> usize {
        self.sections.orig_len as usize
    }

    /// Writes the content into `out`, which must have [`Blob::content_len`] bytes, and checks the fingerprint.
    ///
    /// # Errors
    /// [`DecodeError::Fingerprint`] if the content has changed (`out` holds it then), or if `out` has another length.
    pub fn unpack(&self, out: &mut [u8]) -> Result<(), DecodeError> {
        let Sections { tail, parity, packed, .. } = self.sections;
        let (_, rest) = out.as_chunks_mut::<8>();
        if rest.len() == tail.len() {
            rest.copy_from_slice(tail);
        }
        match unpack(parity, packed, out) {
            got if got == self.fp48 => Ok(()),
            got => Err(DecodeError::Fingerprint { expected: self.fp48, got }),
        }
    }
}

fn written_mime<'a>(cursor: &mut Cursor<'a>, len: usize) -> Result<&'a str, DecodeError> {
    if len > MAX_MIME_EXT_LEN {
        return Err(DecodeError::MimeTooLong { len });
    }
    let mime = core::str::from_utf8(cursor.take(len)?)
        .map_err(|error| DecodeError::MimeNotUtf8 { valid_up_to: error.valid_up_to() })?;
    match code_of(mime) {
        MIME_INLINE => Ok(mime),
        code => Err(DecodeError::NonCanonicalMime { code }),
    }
}

/// Packs the words of `input` and returns the fingerprint of all of it.
fn pack(input: &[u8], parity: &mut [Parity], packed: &mut [Packed]) -> u64 {
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    if let Some(path) = x86::Path::detect() {
        return path.pack(input, parity, packed) & FP48_MASK;
    }
    reference::pack(input.as_chunks().0, parity, packed);
    fp48(input)
}

/// Unpacks into the words of `output`, whose tail is there already, and returns the fingerprint of all of it.
fn unpack(parity: &[Parity], packed: &[Packed], output: &mut [u8]) -> u64 {
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    if let Some(path) = x86::Path::detect() {
        return path.unpack(parity, packed, output) & FP48_MASK;
    }
    reference::unpack(parity, packed, output.as_chunks_mut().0);
    fp48(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten bytes: one word and a tail of two.
    const BLOB: [u8; 30] = *b"BWB1\x01\x02\xb2\x8b\x49\xe5\x1d\x7a\x30\x10\x00\x0a\0\0\0\x02ijghabcdef";

    #[test]
    fn the_bytes_of_a_blob() {
        let blob = encode(b"abcdefghij", "text/plain");
        assert_eq!(blob, BLOB);
        let decoded = decode(&BLOB).unwrap();
        assert_eq!(decoded, Decoded { bytes: b"abcdefghij".to_vec(), mime: "text/plain" });
        let parsed = Blob::parse(&BLOB).unwrap();
        assert_eq!((parsed.mime, parsed.fp48, parsed.content_len()), ("text/plain", 0x7a1d_e549_8bb2, 10));
    }

    #[test]
    fn sizes_are_those_of_the_specification() {
        assert_eq!(encode(&[0; 14_336], OCTET_STREAM).len(), 14_356);
        assert_eq!(encode(&[], OCTET_STREAM), *b"BWB1\x01\0\x99\xe9\xd8\x51\x37\xdb\x30\x10\0\0\0\0\0\0");
        assert_eq!(encode(&[1; 9], "a/b").len(), 9 + OVERHEAD + 3);
        assert_eq!(encoded_len(14_336), Ok(14_356));
    }

    #[test]
    fn limits_of_content_and_type() {
        let long = "x".repeat(128);
        assert_eq!(try_encode(&[], &long), Err(EncodeError::MimeTooLong { len: 128 }));
        assert!(encode(&[], &long).is_empty());
        let blob = encode(&[7; 3], &long[1..]);
        assert_eq!(decode(&blob).unwrap(), Decoded { bytes: vec![7; 3], mime: &long[1..] });
        assert_eq!(decode(&encode(&[], "")).unwrap().mime, "");
        assert_eq!(content_len(u32::MAX as usize), Ok(u32::MAX));
        #[cfg(target_pointer_width = "64")]
        assert_eq!(encoded_len(1 << 32), Err(EncodeError::TooLong { len: 1 << 32 }));
        let mut out = vec![9];
        assert!(encode_into(&[1], &long, &mut out).is_err());
        assert_eq!(out, [9]);
    }

    #[test]
    fn each_fault_has_its_error_and_the_first_is_told() {
        let change = |changes: &[(usize, u8)]| {
            let mut bytes = BLOB;
            for (at, byte) in changes {
                bytes[*at] = *byte;
            }
            decode(&bytes).unwrap_err()
        };
        assert_eq!(change(&[(3, b'2'), (4, 9)]), DecodeError::BadMagic { got: *b"BWB2" });
        for flag in [0x80, 0x40, 0x20, 0xe0] {
            let version = flag | 1;
            assert_eq!(change(&[(4, version), (5, 9)]), DecodeError::UnsupportedFlags { version });
        }
        assert_eq!(change(&[(4, 0), (5, 9)]), DecodeError::BadVersion { got: 0 });
        assert_eq!(change(&[(5, 3), (12, 9)]), DecodeError::UnknownMime { code: 3 });
        assert_eq!(change(&[(12, 47), (14, 9)]), DecodeError::WordSize { word_bits: 47, parity_bits: 16 });
        assert_eq!(change(&[(13, 17)]), DecodeError::WordSize { word_bits: 48, parity_bits: 17 });
        assert_eq!(change(&[(14, 1), (15, 0)]), DecodeError::UnexpectedMime { code: 2, len: 1 });
        assert_eq!(change(&[(5, 0xff), (14, 128)]), DecodeError::MimeTooLong { len: 128 });
        assert_eq!(change(&[(15, 0xff)]), DecodeError::TailLen { orig_len: 255, tail_len: 2 });
        assert_eq!(change(&[(15, 18)]), DecodeError::Truncated { offset: 20, needed: 18, left: 10 });
        assert_eq!(change(&[(15, 2)]), DecodeError::TrailingBytes { extra: 8 });
        let expected = DecodeError::Fingerprint { expected: 0x7a1d_e549_8bb3, got: 0x7a1d_e549_8bb2 };
        assert_eq!(change(&[(6, 0xb3)]), expected);
        assert!(matches!(change(&[(29, 0)]), DecodeError::Fingerprint { expected: 0x7a1d_e549_8bb2, .. }));
        let mut huge = BLOB;
        huge[15..20].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 7]);
        let needed = u32::MAX as usize;
        assert_eq!(decode(&huge), Err(DecodeError::Truncated { offset: 20, needed, left: 10 }));
    }

    #[test]
    fn every_prefix_is_truncated_and_a_written_type_is_checked() {
        for len in 0..BLOB.len() {
            assert!(matches!(decode(&BLOB[..len]), Err(DecodeError::Truncated { .. })), "{len}");
        }
        let written = |mime: &[u8]| {
            let mut blob = BLOB[..15].to_vec();
            (blob[5], blob[14]) = (0xff, mime.len() as u8);
            blob.extend_from_slice(mime);
            blob.extend_from_slice(&BLOB[15..]);
            decode(&blob).map(|decoded| decoded.mime.len())
        };
        assert_eq!(written(b"text/html"), Ok(9));
        assert_eq!(written(b"text/plain"), Err(DecodeError::NonCanonicalMime { code: 2 }));
        assert_eq!(written(b"a/\xff"), Err(DecodeError::MimeNotUtf8 { valid_up_to: 2 }));
    }

    #[test]
    fn both_paths_round_trip_at_every_length() {
        let bytes: Vec<u8> = (0..2000_u32).map(|i| (i.wrapping_mul(40_503) >> 7) as u8).collect();
        for len in (0..300).chain([1792, 1999]) {
            let content = &bytes[bytes.len() - len..];
            let blob = encode(content, OCTET_STREAM);
            assert_eq!(decode(&blob).unwrap().bytes, content);
            let (words, tail) = content.as_chunks();
            let (mut parity, mut packed) = (vec![[0; 2]; words.len()], vec![[0; 6]; words.len()]);
            reference::pack(words, &mut parity, &mut packed);
            assert_eq!(blob[20..], [tail, parity.as_flattened(), packed.as_flattened()].concat());
        }
    }
}
