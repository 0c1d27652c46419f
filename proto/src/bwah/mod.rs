//! The BWAH envelope: residuals on their way into and out of a replay cache. Spec: `proto/SPEC.md`, "BWAH".
//!
//! ```text
//! byte  0      4         5       6          10       14
//!       | BWAH | version | flags | tail_len | kv_len |
//!       |      | 0x01    | u8    | u32      | u32    |
//!
//! reply                                              | tail .bw | kv .bw |
//!
//!                                                    14            22           26         28         30
//! capture                                            | prefix_hash | prefix_len | layer_lo | layer_hi | tail .bw | kv .bw |
//!                                                    | u64         | u32        | u16      | u16      |
//! ```
//!
//! All integers are little-endian; the two lengths count encoded bytes. A miss is a reply of no bytes. The two payloads
//! are [`crate::bw`] blobs of little-endian f32 values, whose bit patterns survive both ways, NaNs included; whether a
//! NaN is welcome is for the caller to say. Nothing here knows frames: the envelope travels in a frame body or over HTTP.

mod error;

use alloc::{borrow::Cow, vec, vec::Vec};

pub use self::error::{Blob, BlobError, BlobFault, BwahError, EncodeError};
use crate::{bw, cursor::Cursor};

/// Bytes in front of the blobs of a reply.
pub const REPLY_HEADER_LEN: usize = 14;
/// Bytes in front of the blobs of a capture.
pub const CAPTURE_HEADER_LEN: usize = 30;

const MAGIC: [u8; 4] = *b"BWAH";
const VERSION: u8 = 0x01;
/// Flags: the cache has the entry.
const HIT: u8 = 0x01;
/// Flags: there is a tail.
const TAIL_PRESENT: u8 = 0x02;

/// A reply as it was decoded.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AmplituhedronReply {
    /// Whether the cache has the entry.
    pub hit: bool,
    /// The residual, if there is one.
    pub tail: Option<Vec<f32>>,
    /// The keys and values, if there are any.
    pub kv: Option<Vec<f32>>,
}

/// A capture as it was decoded.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AmplituhedronCapture {
    /// Hash of the prefix.
    pub prefix_hash: u64,
    /// Positions of the prefix.
    pub prefix_len: u32,
    /// First layer.
    pub layer_lo: u16,
    /// Last layer; whether it is included is for the two sides to agree on.
    pub layer_hi: u16,
    /// The residual.
    pub tail: Vec<f32>,
    /// The keys and values.
    pub kv: Vec<f32>,
}

/// Encodes a reply. Without a hit it has no bytes, whatever the payloads.
///
/// What [`try_encode_amplituhedron_reply`] refuses becomes a miss too: the other side then does the work itself.
#[must_use]
pub fn encode_amplituhedron_reply(hit: bool, tail: Option<&[f32]>, kv: Option<&[f32]>) -> Vec<u8> {
    try_encode_amplituhedron_reply(hit, tail, kv).unwrap_or_default()
}

/// Encodes a reply, if it fits.
///
/// # Errors
/// [`EncodeError`] if a payload is too long.
pub fn try_encode_amplituhedron_reply(
    hit: bool,
    tail: Option<&[f32]>,
    kv: Option<&[f32]>,
) -> Result<Vec<u8>, EncodeError> {
    if !hit {
        return Ok(Vec::new());
    }
    let tail_len = tail.map_or(Ok(0), |tail| blob_len(Blob::Tail, tail))?;
    let kv_len = kv.map_or(Ok(0), |kv| blob_len(Blob::Kv, kv))?;
    let flags = if tail.is_some() { HIT | TAIL_PRESENT } else { HIT };
    let mut out = start(flags, tail_len, kv_len, REPLY_HEADER_LEN);
    if let Some(tail) = tail {
        write_blob(Blob::Tail, tail, &mut out)?;
    }
    if let Some(kv) = kv {
        write_blob(Blob::Kv, kv, &mut out)?;
    }
    Ok(out)
}

/// Encodes a capture.
///
/// What [`try_encode_amplituhedron_capture`] refuses gives no bytes, which no decoder takes for a capture.
#[must_use]
pub fn encode_amplituhedron_capture(
    prefix_hash: u64,
    prefix_len: u32,
    layer_lo: u16,
    layer_hi: u16,
    tail: &[f32],
    kv: &[f32],
) -> Vec<u8> {
    try_encode_amplituhedron_capture(prefix_hash, prefix_len, layer_lo, layer_hi, tail, kv).unwrap_or_default()
}

/// Encodes a capture, if it fits.
///
/// # Errors
/// [`EncodeError`] if a payload is too long.
pub fn try_encode_amplituhedron_capture(
    prefix_hash: u64,
    prefix_len: u32,
    layer_lo: u16,
    layer_hi: u16,
    tail: &[f32],
    kv: &[f32],
) -> Result<Vec<u8>, EncodeError> {
    let (tail_len, kv_len) = (blob_len(Blob::Tail, tail)?, blob_len(Blob::Kv, kv)?);
    let mut out = start(HIT | TAIL_PRESENT, tail_len, kv_len, CAPTURE_HEADER_LEN);
    out.extend_from_slice(&prefix_hash.to_le_bytes());
    out.extend_from_slice(&prefix_len.to_le_bytes());
    out.extend_from_slice(&layer_lo.to_le_bytes());
    out.extend_from_slice(&layer_hi.to_le_bytes());
    write_blob(Blob::Tail, tail, &mut out)?;
    write_blob(Blob::Kv, kv, &mut out)?;
    Ok(out)
}

/// The 14 bytes that both envelopes begin with, in a buffer for the whole.
fn start(flags: u8, tail_len: u32, kv_len: u32, header_len: usize) -> Vec<u8> {
    let len = header_len.saturating_add(tail_len as usize).saturating_add(kv_len as usize);
    let mut out = Vec::with_capacity(len);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&[VERSION, flags]);
    out.extend_from_slice(&tail_len.to_le_bytes());
    out.extend_from_slice(&kv_len.to_le_bytes());
    out
}

fn blob_len(blob: Blob, values: &[f32]) -> Result<u32, EncodeError> {
    bw::encoded_len(size_of_val(values))
        .ok()
        .and_then(|len| u32::try_from(len).ok())
        .ok_or(EncodeError { blob, values: values.len() })
}

fn write_blob(blob: Blob, values: &[f32], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let bytes = if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(values))
    } else {
        Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect())
    };
    bw::encode_into(&bytes, bw::OCTET_STREAM, out).map_err(|_| EncodeError { blob, values: values.len() })
}

/// Decodes a reply; no bytes are a miss.
///
/// # Errors
/// See [`BwahError`].
pub fn decode_amplituhedron_reply(buf: &[u8]) -> Result<AmplituhedronReply, BwahError> {
    let Some(view) = ReplyView::parse(buf)? else { return Ok(AmplituhedronReply::default()) };
    let tail = view.tail.map(|tail| read_blob(Blob::Tail, tail)).transpose()?;
    let kv = view.kv.map(|kv| read_blob(Blob::Kv, kv)).transpose()?;
    Ok(AmplituhedronReply { hit: true, tail, kv })
}

/// Decodes a capture.
///
/// # Errors
/// See [`BwahError`].
pub fn decode_amplituhedron_capture(buf: &[u8]) -> Result<AmplituhedronCapture, BwahError> {
    let CaptureView { prefix_hash, prefix_len, layer_lo, layer_hi, tail, kv } = CaptureView::parse(buf)?;
    let (tail, kv) = (read_blob(Blob::Tail, tail)?, read_blob(Blob::Kv, kv)?);
    Ok(AmplituhedronCapture { prefix_hash, prefix_len, layer_lo, layer_hi, tail, kv })
}

/// A hit whose blobs are still encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyView<'a> {
    /// The tail's blob, if the flags announce one.
    pub tail: Option<&'a [u8]>,
    /// The blob of keys and values; a length of 0 means that there is none.
    pub kv: Option<&'a [u8]>,
}

impl<'a> ReplyView<'a> {
    /// Splits a reply without decoding its blobs; `None` is a miss.
    ///
    /// # Errors
    /// Every [`BwahError`] but [`BwahError::InnerBlobError`].
    pub fn parse(buf: &'a [u8]) -> Result<Option<Self>, BwahError> {
        if buf.is_empty() {
            return Ok(None);
        }
        let mut cursor = header(buf, REPLY_HEADER_LEN)?;
        let Common { flags, tail_len, kv_len } = Common::read(&mut cursor)?;
        let has_tail = match flags {
            HIT if tail_len == 0 => false,
            0x03 => true,
            _ => return Err(BwahError::ReservedFlags { flags }),
        };
        let (tail, kv) = blobs(&cursor, tail_len, kv_len)?;
        Ok(Some(Self { tail: has_tail.then_some(tail), kv: (kv_len != 0).then_some(kv) }))
    }
}

/// A capture whose key is read and whose blobs are still encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureView<'a> {
    /// Bytes 14..22: hash of the prefix.
    pub prefix_hash: u64,
    /// Bytes 22..26: positions of the prefix.
    pub prefix_len: u32,
    /// Bytes 26..28: first layer.
    pub layer_lo: u16,
    /// Bytes 28..30: last layer.
    pub layer_hi: u16,
    /// The tail's blob.
    pub tail: &'a [u8],
    /// The blob of keys and values.
    pub kv: &'a [u8],
}

impl<'a> CaptureView<'a> {
    /// Splits a capture without decoding its blobs.
    ///
    /// # Errors
    /// Every [`BwahError`] but [`BwahError::InnerBlobError`].
    pub fn parse(buf: &'a [u8]) -> Result<Self, BwahError> {
        let mut cursor = header(buf, CAPTURE_HEADER_LEN)?;
        let Common { flags, tail_len, kv_len } = Common::read(&mut cursor)?;
        if flags != HIT | TAIL_PRESENT {
            return Err(BwahError::ReservedFlags { flags });
        }
        let prefix_hash = cursor.u64_le()?;
        let prefix_len = cursor.u32_le()?;
        let (layer_lo, layer_hi) = (cursor.u16_le()?, cursor.u16_le()?);
        let (tail, kv) = blobs(&cursor, tail_len, kv_len)?;
        Ok(Self { prefix_hash, prefix_len, layer_lo, layer_hi, tail, kv })
    }
}

/// A cursor over `buf`, if that has a whole header.
fn header(buf: &[u8], needed: usize) -> Result<Cursor<'_>, BwahError> {
    if buf.len() < needed {
        return Err(BwahError::Truncated { offset: 0, needed, left: buf.len() });
    }
    Ok(Cursor::new(buf))
}

/// What both headers begin with.
struct Common {
    flags: u8,
    tail_len: u32,
    kv_len: u32,
}

impl Common {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, BwahError> {
        let magic = cursor.array()?;
        if magic != MAGIC {
            return Err(BwahError::BadMagic { got: magic });
        }
        let version = cursor.u8()?;
        if version != VERSION {
            return Err(BwahError::BadVersion { got: version });
        }
        Ok(Self { flags: cursor.u8()?, tail_len: cursor.u32_le()?, kv_len: cursor.u32_le()? })
    }
}

/// What follows the header: two blobs of these lengths and no more.
fn blobs<'a>(cursor: &Cursor<'a>, tail_len: u32, kv_len: u32) -> Result<(&'a [u8], &'a [u8]), BwahError> {
    let mut cursor = cursor.clone();
    let len = |len: u32| usize::try_from(len).unwrap_or(usize::MAX);
    let (tail, kv) = (cursor.take(len(tail_len))?, cursor.take(len(kv_len))?);
    match cursor.rest().len() {
        0 => Ok((tail, kv)),
        extra => Err(BwahError::TrailingBytes { extra }),
    }
}

fn read_blob(blob: Blob, bytes: &[u8]) -> Result<Vec<f32>, BwahError> {
    decode_f32s(bytes).map_err(|fault| BwahError::InnerBlobError(BlobError { blob, fault }))
}

/// Decodes a blob of little-endian f32 values, bit patterns unchanged.
///
/// # Errors
/// See [`BlobFault`].
pub fn decode_f32s(blob: &[u8]) -> Result<Vec<f32>, BlobFault> {
    let blob = bw::Blob::parse(blob)?;
    if blob.mime != bw::OCTET_STREAM {
        return Err(BlobFault::Mime);
    }
    let len = blob.content_len();
    if !len.is_multiple_of(4) {
        return Err(BlobFault::Length { len });
    }
    let mut values = vec![0_f32; len / 4];
    blob.unpack(bytemuck::cast_slice_mut(&mut values))?;
    if cfg!(target_endian = "big") {
        for value in &mut values {
            *value = f32::from_bits(value.to_bits().swap_bytes());
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit patterns that arithmetic would not keep apart.
    fn awkward() -> Vec<f32> {
        let bits = [0, 0x8000_0000, 1, 0x7f80_0000, 0xff80_0000, 0x7fc0_0001, 0x7f80_0001, 0xffff_ffff, 0x3f80_0000];
        bits.into_iter().map(f32::from_bits).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn replies_of_every_shape() {
        let values = awkward();
        assert!(encode_amplituhedron_reply(false, Some(&values), None).is_empty());
        assert_eq!(decode_amplituhedron_reply(&[]), Ok(AmplituhedronReply::default()));
        for (tail, kv) in [(None, None), (Some(&values), None), (None, Some(&values)), (Some(&values), Some(&values))] {
            let reply = encode_amplituhedron_reply(true, tail.map(Vec::as_slice), kv.map(Vec::as_slice));
            assert_eq!(reply[..5], *b"BWAH\x01");
            assert_eq!(reply[5], if tail.is_some() { 3 } else { 1 });
            let decoded = decode_amplituhedron_reply(&reply).unwrap();
            assert!(decoded.hit);
            assert_eq!(decoded.tail.as_deref().map(bits), tail.map(|tail| bits(tail)));
            assert_eq!(decoded.kv.as_deref().map(bits), kv.map(|kv| bits(kv)));
        }
        let empty = decode_amplituhedron_reply(&encode_amplituhedron_reply(true, Some(&[]), Some(&[]))).unwrap();
        assert_eq!((empty.tail, empty.kv), (Some(vec![]), Some(vec![])));
    }

    #[test]
    fn sizes_are_those_of_the_specification() {
        assert_eq!(encode_amplituhedron_reply(true, Some(&[0.5; 3584]), None).len(), 14_370);
        assert_eq!(encode_amplituhedron_reply(true, None, None), *b"BWAH\x01\x01\0\0\0\0\0\0\0\0");
        assert_eq!(encode_amplituhedron_capture(0, 0, 0, 0, &[], &[]).len(), 30 + 20 + 20);
    }

    #[test]
    fn the_bytes_of_a_capture() {
        let values = awkward();
        let capture = encode_amplituhedron_capture(0x0102_0304_0506_0708, 0x090a_0b0c, 0x0d0e, 0x0f10, &values, &[]);
        let header =
            *b"BWAH\x01\x03\x38\0\0\0\x14\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01\x0c\x0b\x0a\x09\x0e\x0d\x10\x0f";
        assert_eq!(capture[..30], header);
        let view = CaptureView::parse(&capture).unwrap();
        assert_eq!((view.tail.len(), view.kv.len()), (56, 20));
        let decoded = decode_amplituhedron_capture(&capture).unwrap();
        assert_eq!((decoded.prefix_hash, decoded.prefix_len), (0x0102_0304_0506_0708, 0x090a_0b0c));
        assert_eq!((decoded.layer_lo, decoded.layer_hi), (0x0d0e, 0x0f10));
        assert_eq!((bits(&decoded.tail), decoded.kv), (bits(&values), vec![]));
    }

    #[test]
    fn each_fault_has_its_error() {
        let reply = encode_amplituhedron_reply(true, Some(&[1.0, 2.0]), None);
        let change = |at: usize, byte: u8| {
            let mut bytes = reply.clone();
            bytes[at] = byte;
            decode_amplituhedron_reply(&bytes).unwrap_err()
        };
        assert_eq!(change(0, b'C'), BwahError::BadMagic { got: *b"CWAH" });
        assert_eq!(change(4, 2), BwahError::BadVersion { got: 2 });
        for flags in (0..=255).filter(|flags| *flags != 3) {
            assert_eq!(change(5, flags), BwahError::ReservedFlags { flags });
        }
        assert_eq!(change(6, 29), BwahError::Truncated { offset: 14, needed: 29, left: 28 });
        assert_eq!(change(10, 1), BwahError::Truncated { offset: 42, needed: 1, left: 0 });
        let inner = |fault| BwahError::InnerBlobError(BlobError { blob: Blob::Tail, fault });
        let magic = bw::DecodeError::BadMagic { got: *b"CWB1" };
        assert_eq!(change(14, b'C'), inner(BlobFault::Bw(magic)));
        assert_eq!(change(19, 1), inner(BlobFault::Mime));
        assert!(matches!(change(41, 1), BwahError::InnerBlobError(_)));
        let mut long = reply.clone();
        long.push(0);
        assert_eq!(decode_amplituhedron_reply(&long), Err(BwahError::TrailingBytes { extra: 1 }));
        let mut odd = b"BWAH\x01\x03\x17\0\0\0\0\0\0\0".to_vec();
        odd.extend(bw::encode(&[1, 2, 3], bw::OCTET_STREAM));
        assert_eq!(decode_amplituhedron_reply(&odd), Err(inner(BlobFault::Length { len: 3 })));
        for len in 1..reply.len() {
            assert!(matches!(decode_amplituhedron_reply(&reply[..len]), Err(BwahError::Truncated { .. })), "{len}");
        }
    }

    #[test]
    fn a_capture_has_both_blobs() {
        let capture = encode_amplituhedron_capture(1, 2, 3, 4, &[1.0], &[2.0]);
        for len in 0..capture.len() {
            let needed = if len < 30 { Some(30) } else { None };
            match decode_amplituhedron_capture(&capture[..len]).unwrap_err() {
                BwahError::Truncated { needed: n, .. } => assert!(needed.is_none_or(|needed| needed == n)),
                error => panic!("{len}: {error:?}"),
            }
        }
        let mut bytes = capture[..30 + 24].to_vec();
        bytes[10] = 0;
        let fault = BlobFault::Bw(bw::DecodeError::Truncated { offset: 0, needed: 15, left: 0 });
        let expected = BwahError::InnerBlobError(BlobError { blob: Blob::Kv, fault });
        assert_eq!(decode_amplituhedron_capture(&bytes), Err(expected));
        let mut bytes = capture;
        for flags in [0, 1, 2, 4, 7, 0x83] {
            bytes[5] = flags;
            assert_eq!(decode_amplituhedron_capture(&bytes), Err(BwahError::ReservedFlags { flags }));
        }
    }
}
