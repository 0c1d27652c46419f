//! Authentication of frames by a shared key. Spec: `proto/SPEC.md`, "Authenticated frames".
//!
//! The last member of the meta is `auth`, in exactly this form, so that a peer in any language finds it without a parser:
//!
//! ```text
//! request  "auth":{"ts":1764547200000,"nonce":"<32 hex>","mac":"<64 hex>"}}
//! reply    "auth":{"nonce":"<32 hex of the request>","mac":"<64 hex>"}}
//! ```
//!
//! `mac` is keyed BLAKE3 over the whole frame, header included, with the 64 digits of `mac` taken as `0`. Requests and
//! replies have different keys, both derived from the secret, so that neither can be taken for the other. This module
//! knows no clock and remembers nothing: whether a time is near enough and a nonce new is for its caller to say.

use alloc::{format, vec::Vec};
use core::fmt::{self, Write as _};

use crate::frame::{Frame, HEADER_LEN, Header, MAX_PAYLOAD_LEN};

/// The shortest secret, in bytes.
pub const MIN_SECRET_LEN: usize = 16;
/// What signing a request adds to its frame at most.
pub const MAX_REQUEST_LEN: usize = 170;
/// What signing a reply adds to its frame at most.
pub const MAX_REPLY_LEN: usize = 130;

const REQUEST_CONTEXT: &str = "aeon-flow v1 request authentication";
const REPLY_CONTEXT: &str = "aeon-flow v1 reply authentication";
const NONCE_DIGITS: usize = 32;
const MAC_DIGITS: usize = 64;
const ZEROS: &[u8; MAC_DIGITS] = &[b'0'; MAC_DIGITS];

/// Why a secret is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("secret of {got} bytes, at least {MIN_SECRET_LEN} are needed; `openssl rand -hex 32` makes a good one")]
pub struct SecretTooShort {
    /// Bytes there are, without white space at the ends.
    pub got: usize,
}

/// Why a frame does not count as authentic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The meta does not end with `auth` in its form.
    #[error("frame carries no auth")]
    Missing,
    /// The key or the bytes differ from the sender's.
    #[error("mac of the frame is wrong: the keys differ, or the frame was changed on its way")]
    Mac,
    /// A reply to another request.
    #[error("reply is to another request: its nonce is not the request's")]
    Nonce,
}

/// Why a frame cannot be signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SignError {
    /// Not one whole frame with a payload.
    #[error("not a whole frame with a meta that is an object")]
    Frame,
    /// No room for `auth`.
    #[error("frame has no room for auth: meta of {meta_len} bytes, payload of {payload_len}")]
    TooLong {
        /// Bytes that the meta would have.
        meta_len: usize,
        /// Bytes that the payload would have.
        payload_len: usize,
    },
}

/// When a request was made, and a number that its sender uses once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// Milliseconds since 1970 by the sender's clock.
    pub ts: u64,
    /// Random.
    pub nonce: u128,
}

/// A shared key. Its text form never shows it.
#[derive(Clone)]
pub struct Key {
    request: [u8; 32],
    reply: [u8; 32],
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// Derives the keys from a secret: the bytes of a key file without ASCII white space at its ends.
    ///
    /// # Errors
    /// [`SecretTooShort`].
    pub fn from_secret(secret: &[u8]) -> Result<Self, SecretTooShort> {
        let secret = secret.trim_ascii();
        if secret.len() < MIN_SECRET_LEN {
            return Err(SecretTooShort { got: secret.len() });
        }
        Ok(Self {
            request: blake3::derive_key(REQUEST_CONTEXT, secret),
            reply: blake3::derive_key(REPLY_CONTEXT, secret),
        })
    }

    /// Signs the request frame that `out` ends with, from byte `start` on.
    ///
    /// # Errors
    /// See [`SignError`]; the frame is then as it was.
    pub fn sign_request(&self, out: &mut Vec<u8>, start: usize, stamp: Stamp) -> Result<(), SignError> {
        let head = format!(r#""auth":{{"ts":{},"nonce":"{:032x}","mac":""#, stamp.ts, stamp.nonce);
        sign(&self.request, out, start, &head)
    }

    /// Signs the reply frame that `out` ends with, from byte `start` on, as one to the request with this nonce.
    ///
    /// # Errors
    /// See [`SignError`]; the frame is then as it was.
    pub fn sign_reply(&self, out: &mut Vec<u8>, start: usize, nonce: u128) -> Result<(), SignError> {
        let head = format!(r#""auth":{{"nonce":"{nonce:032x}","mac":""#);
        sign(&self.reply, out, start, &head)
    }

    /// Checks a request and returns its stamp.
    ///
    /// # Errors
    /// [`AuthError::Missing`] or [`AuthError::Mac`].
    pub fn verify_request(&self, frame: &Frame<'_>) -> Result<Stamp, AuthError> {
        let parts = split(frame.payload).ok_or(AuthError::Missing)?;
        let (rest, nonce) = take_nonce(parts.head).ok_or(AuthError::Missing)?;
        let rest = rest.strip_suffix(b",").ok_or(AuthError::Missing)?;
        let digits = rest.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
        let (rest, ts) = rest.split_at(rest.len().saturating_sub(digits));
        let ts = core::str::from_utf8(ts).ok().and_then(|ts| ts.parse().ok()).ok_or(AuthError::Missing)?;
        rest.strip_suffix(br#""auth":{"ts":"#).ok_or(AuthError::Missing)?;
        check(&self.request, frame, &parts)?;
        Ok(Stamp { ts, nonce })
    }

    /// Checks a reply to the request with this nonce.
    ///
    /// # Errors
    /// See [`AuthError`].
    pub fn verify_reply(&self, frame: &Frame<'_>, nonce: u128) -> Result<(), AuthError> {
        let parts = split(frame.payload).ok_or(AuthError::Missing)?;
        let (rest, got) = take_nonce(parts.head).ok_or(AuthError::Missing)?;
        rest.strip_suffix(br#""auth":{"#).ok_or(AuthError::Missing)?;
        check(&self.reply, frame, &parts)?;
        if got == nonce { Ok(()) } else { Err(AuthError::Nonce) }
    }
}

/// A payload around the digits of its `mac`.
struct Parts<'a> {
    /// The payload up to and with `"auth":{…,"nonce":"…"`.
    head: &'a [u8],
    /// The payload before the digits.
    before: &'a [u8],
    mac: &'a [u8],
    /// The payload behind the digits.
    after: &'a [u8],
}

fn split(payload: &[u8]) -> Option<Parts<'_>> {
    let (len, _) = payload.split_first_chunk::<2>()?;
    let meta_end = usize::from(u16::from_be_bytes(*len)).checked_add(2)?;
    let digits_end = meta_end.checked_sub(br#""}}"#.len())?;
    let digits_start = digits_end.checked_sub(MAC_DIGITS)?;
    if payload.get(digits_end..meta_end)? != br#""}}"# {
        return None;
    }
    let before = payload.get(..digits_start)?;
    let head = before.strip_suffix(br#","mac":""#)?;
    Some(Parts { head, before, mac: payload.get(digits_start..digits_end)?, after: payload.get(digits_end..)? })
}

/// Takes `"nonce":"<32 hex>"` off the end.
fn take_nonce(head: &[u8]) -> Option<(&[u8], u128)> {
    let head = head.strip_suffix(b"\"")?;
    let (rest, digits) = head.split_at_checked(head.len().checked_sub(NONCE_DIGITS)?)?;
    let nonce = hex::<16>(digits)?;
    Some((rest.strip_suffix(br#""nonce":""#)?, u128::from_be_bytes(nonce)))
}

/// Reads lower-case hex digits.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte & 0x0f),
        b'a'..=b'f' => Some((byte & 0x0f).saturating_add(9)),
        _ => None,
    };
    let (pairs, rest) = digits.as_chunks::<2>();
    if !rest.is_empty() || pairs.len() != N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

fn mac(key: &[u8; 32], header: &[u8], before: &[u8], after: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(header).update(before).update(ZEROS).update(after);
    hasher.finalize()
}

fn check(key: &[u8; 32], frame: &Frame<'_>, parts: &Parts<'_>) -> Result<(), AuthError> {
    let given: [u8; 32] = hex(parts.mac).ok_or(AuthError::Missing)?;
    let payload_len = u32::try_from(frame.payload.len()).map_err(|_| AuthError::Missing)?;
    let Frame { stream_id, sequence, flags, .. } = *frame;
    let header = Header { stream_id, sequence, flags, payload_len }.encode().map_err(|_| AuthError::Missing)?;
    // blake3::Hash compares in constant time.
    match mac(key, &header, parts.before, parts.after) == given {
        true => Ok(()),
        false => Err(AuthError::Mac),
    }
}

fn sign(key: &[u8; 32], out: &mut Vec<u8>, start: usize, head: &str) -> Result<(), SignError> {
    let header = out.get(start..).and_then(|frame| frame.first_chunk::<HEADER_LEN>()).ok_or(SignError::Frame)?;
    let mut header = Header::decode(header);
    let payload_start = start.saturating_add(HEADER_LEN);
    let payload = out.get(payload_start..).unwrap_or_default();
    if payload.len() != header.payload_len as usize {
        return Err(SignError::Frame);
    }
    // A frame without a payload, which only a cancel is, gets a meta of its own.
    let old_len = payload.first_chunk::<2>().map(|len| usize::from(u16::from_be_bytes(*len)));
    let meta = payload.get(2..2_usize.saturating_add(old_len.unwrap_or(0))).unwrap_or_default();
    let Some(members) = (if meta.is_empty() { Some(&b""[..]) } else { members(meta) }) else {
        return Err(SignError::Frame);
    };
    let comma = if members.is_empty() { "" } else { "," };
    let mut text = format!("{{{}{comma}{head}", core::str::from_utf8(members).map_err(|_| SignError::Frame)?);
    let digits = 2_usize.saturating_add(text.len());
    // Writing to a String does not fail.
    let _ = write!(text, r#"{:0<MAC_DIGITS$}"}}}}"#, "");
    let body_start = 2_usize.saturating_add(meta.len()).min(payload.len());
    let payload_len = text.len().saturating_add(2).saturating_add(payload.len().saturating_sub(body_start));
    let too_long = SignError::TooLong { meta_len: text.len(), payload_len };
    let meta_len = u16::try_from(text.len()).map_err(|_| too_long)?;
    if payload_len > MAX_PAYLOAD_LEN {
        return Err(too_long);
    }
    header.payload_len = u32::try_from(payload_len).map_err(|_| too_long)?;
    let header = header.encode().map_err(|_| too_long)?;
    let new = meta_len.to_be_bytes().into_iter().chain(text.bytes());
    out.splice(payload_start..payload_start.saturating_add(body_start), new);
    if let Some(bytes) = out.get_mut(start..payload_start) {
        bytes.copy_from_slice(&header);
    }
    let payload = out.get(payload_start..).unwrap_or_default();
    let (before, rest) = payload.split_at_checked(digits).ok_or(SignError::Frame)?;
    let after = rest.get(MAC_DIGITS..).unwrap_or_default();
    let mac = mac(key, &header, before, after).to_hex();
    let digits = payload_start.saturating_add(digits);
    if let Some(bytes) = out.get_mut(digits..digits.saturating_add(MAC_DIGITS)) {
        bytes.copy_from_slice(mac.as_bytes());
    }
    Ok(())
}

/// What stands between the braces of an object.
fn members(meta: &[u8]) -> Option<&[u8]> {
    Some(meta.trim_ascii().strip_prefix(b"{")?.strip_suffix(b"}")?.trim_ascii())
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{frame::Flags, json::Object, payload::Payload};

    const STAMP: Stamp = Stamp { ts: 1_764_547_200_000, nonce: 0xfeed };

    fn key() -> Key {
        Key::from_secret(b" 0123456789abcdef\n").unwrap()
    }

    fn frame(flags: Flags, payload: &[u8]) -> Vec<u8> {
        let mut out = vec![0xaa; 3];
        Frame { stream_id: 3, sequence: 9, flags, payload }.encode(&mut out).unwrap();
        out
    }

    fn signed(payload: &[u8]) -> Vec<u8> {
        let mut out = frame(Flags::NONE, payload);
        key().sign_request(&mut out, 3, STAMP).unwrap();
        assert_eq!(out[..3], [0xaa; 3]);
        out.split_off(3)
    }

    fn verify(bytes: &[u8]) -> Result<Stamp, AuthError> {
        key().verify_request(&Frame::decode_exact(bytes).unwrap())
    }

    #[test]
    fn a_signed_request_reads_as_before_and_verifies() {
        for (payload, members, body) in [
            (&b"\0\x02{}body"[..], 1, &b"body"[..]),
            (b"\0\0body", 1, b"body"),
            (b"\0\x09{\"pos\":1}", 2, b""),
            (b"\0\x0d { \"pos\" :1 }body", 2, b"body"),
            (b"", 1, b""),
        ] {
            let bytes = signed(payload);
            let frame = Frame::decode_exact(&bytes).unwrap();
            let read = Payload::decode(frame.payload).unwrap();
            let object = Object::parse(read.meta).unwrap();
            assert_eq!((object.iter().len(), read.body), (members, body), "{}", read.meta);
            assert!(
                read.meta.contains(r#""auth":{"ts":1764547200000,"nonce":"0000000000000000000000000000feed","mac":""#)
            );
            assert_eq!(verify(&bytes), Ok(STAMP));
            assert!(bytes.len() <= HEADER_LEN + payload.len() + MAX_REQUEST_LEN);
        }
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let bytes = signed(b"\0\x09{\"pos\":1}body");
        for at in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[at / 8] ^= 1 << (at % 8);
            // A changed length is no frame any more; HELIX is ignored by stations, but not here.
            if let Ok(frame) = Frame::decode_exact(&changed) {
                assert!(key().verify_request(&frame).is_err(), "bit {at}");
            }
        }
    }

    #[test]
    fn other_keys_and_the_other_direction_do_not_verify() {
        let bytes = signed(b"\0\0");
        let frame = Frame::decode_exact(&bytes).unwrap();
        let other = Key::from_secret(b"0123456789abcdeg").unwrap();
        assert_eq!(other.verify_request(&frame), Err(AuthError::Mac));
        assert_eq!(key().verify_reply(&frame, STAMP.nonce), Err(AuthError::Missing));
        assert_eq!(Key::from_secret(b" 0123456789abcde ").unwrap_err(), SecretTooShort { got: 15 });
        assert_eq!(format!("{:?}", key()), "Key(..)");
    }

    #[test]
    fn a_reply_belongs_to_one_request() {
        let mut out = frame(Flags::SUCCESS, b"\0\x0e{\"status\":200}body");
        let before = out.len();
        key().sign_reply(&mut out, 3, 7).unwrap();
        assert!(out.len() <= before + MAX_REPLY_LEN);
        let frame = Frame::decode_exact(&out[3..]).unwrap();
        assert_eq!(key().verify_reply(&frame, 7), Ok(()));
        assert_eq!(key().verify_reply(&frame, 8), Err(AuthError::Nonce));
        assert_eq!(key().verify_request(&frame), Err(AuthError::Missing));
        let mut forged = out.clone();
        let last = forged.len() - 1;
        forged[last] ^= 1;
        let forged = Frame::decode_exact(&forged[3..]).unwrap();
        assert_eq!(key().verify_reply(&forged, 7), Err(AuthError::Mac));
    }

    #[test]
    fn what_only_looks_like_auth_is_missing() {
        for meta in [
            "",
            "{}",
            r#"{"auth":{"mac":"00"}}"#,
            r#"{"auth":1}"#,
            r#"{"nonce":"00000000000000000000000000000000","mac":"0000000000000000000000000000000000000000000000000000000000000000"}}"#,
            r#"{"auth":{"ts":,"nonce":"00000000000000000000000000000000","mac":"0000000000000000000000000000000000000000000000000000000000000000"}}"#,
            r#"{"auth":{"ts":99999999999999999999,"nonce":"00000000000000000000000000000000","mac":"0000000000000000000000000000000000000000000000000000000000000000"}}"#,
            r#"{"auth":{"ts":1,"nonce":"0000000000000000000000000000000G","mac":"0000000000000000000000000000000000000000000000000000000000000000"}}"#,
            r#"{"auth":{"ts":1,"nonce":"00000000000000000000000000000000","mac":"000000000000000000000000000000000000000000000000000000000000000G"}}"#,
        ] {
            let mut payload = (meta.len() as u16).to_be_bytes().to_vec();
            payload.extend_from_slice(meta.as_bytes());
            let bytes = frame(Flags::NONE, &payload);
            assert_eq!(verify(&bytes[3..]), Err(AuthError::Missing), "{meta}");
        }
        assert_eq!(verify(&frame(Flags::NONE, b"\xff\xff{}")[3..]), Err(AuthError::Missing));
        assert_eq!(verify(&frame(Flags::NONE, b"\0")[3..]), Err(AuthError::Missing));
    }

    #[test]
    fn what_has_no_room_is_left_as_it_was() {
        let mut payload = vec![0xff, 0xff];
        payload.extend_from_slice(br#"{"pad":""#);
        payload.resize(65_535, b'x');
        payload.extend_from_slice(br#""}"#);
        let mut out = frame(Flags::NONE, &payload);
        let before = out.clone();
        assert!(matches!(key().sign_request(&mut out, 3, STAMP), Err(SignError::TooLong { .. })));
        assert_eq!(out, before);
        let mut out = frame(Flags::NONE, b"\0\x02[]");
        assert_eq!(key().sign_request(&mut out, 3, STAMP), Err(SignError::Frame));
    }
}
