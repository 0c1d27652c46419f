//! Payloads: a JSON meta object and a body. Spec: `proto/SPEC.md`, "Payload".
//!
//! ```text
//! byte  0          2            2 + meta_len
//!       | meta_len | meta       | body: the rest of the payload
//!       | u16      | UTF-8 JSON |
//! ```
//!
//! `meta_len` is big-endian; 0 stands for the empty object. [`FrameWriter`] writes a whole frame in place, so that
//! neither meta nor body is copied on the way out.

use alloc::{string::String, vec::Vec};
use core::fmt::Write as _;

use crate::{
    frame::{EncodeError, Flags, HEADER_LEN, Header, MAX_PAYLOAD_LEN},
    json,
};

/// Why a payload does not split into meta and body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Error {
    /// Fewer than the 2 bytes of `meta_len`.
    #[error("payload of {got} bytes has no room for the meta length")]
    ShortPayload {
        /// Bytes there are.
        got: usize,
    },
    /// `meta_len` points past the end of the payload.
    #[error("meta of {expected} bytes announced, {got} follow")]
    ShortMeta {
        /// Meta bytes announced.
        expected: usize,
        /// Bytes behind the length.
        got: usize,
    },
    /// The meta is not UTF-8.
    #[error("meta is not UTF-8 at byte {valid_up_to}")]
    NotUtf8 {
        /// Bytes of the meta that are.
        valid_up_to: usize,
    },
}

/// A payload in its two parts, both borrowed. The meta text is kept as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Payload<'a> {
    /// The JSON text; empty stands for `{}`.
    pub meta: &'a str,
    /// What follows the meta.
    pub body: &'a [u8],
}

impl<'a> Payload<'a> {
    /// Splits a payload. Whether the meta is a JSON object is for [`json::Object::parse`] to say.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, Error> {
        let Some((len, rest)) = payload.split_first_chunk::<2>() else {
            return Err(Error::ShortPayload { got: payload.len() });
        };
        let expected = usize::from(u16::from_be_bytes(*len));
        let Some((meta, body)) = rest.split_at_checked(expected) else {
            return Err(Error::ShortMeta { expected, got: rest.len() });
        };
        match core::str::from_utf8(meta) {
            Ok(meta) => Ok(Self { meta, body }),
            Err(error) => Err(Error::NotUtf8 { valid_up_to: error.valid_up_to() }),
        }
    }
}

/// Writes one frame at the end of a buffer: header, meta member by member, then the body.
///
/// ```
/// use aeon_proto::{frame::{Flags, Frame}, payload::FrameWriter};
/// let mut out = Vec::new();
/// let mut frame = FrameWriter::new(&mut out, 3, 9, Flags::SUCCESS);
/// frame.meta().unsigned("status", 200).string("body", "u32");
/// frame.body().extend_from_slice(&7_u32.to_le_bytes());
/// frame.finish()?;
/// assert_eq!(Frame::decode_exact(&out)?.payload, b"\x00\x1b{\"status\":200,\"body\":\"u32\"}\x07\0\0\0");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FrameWriter<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    meta: Meta,
    stream_id: u16,
    sequence: u32,
    flags: Flags,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meta {
    Empty,
    Open,
    Closed { len: usize },
}

/// Where the meta text starts in a frame.
const META_START: usize = HEADER_LEN + 2;

impl<'a> FrameWriter<'a> {
    /// Starts a frame behind what `out` already holds.
    pub fn new(out: &'a mut Vec<u8>, stream_id: u16, sequence: u32, flags: Flags) -> Self {
        let start = out.len();
        out.extend_from_slice(&[0; META_START]);
        Self { out, start, meta: Meta::Empty, stream_id, sequence, flags }
    }

    /// The meta, to add members to. Members that are added after the body was begun are lost.
    pub const fn meta(&mut self) -> MetaWriter<'_, 'a> {
        MetaWriter { frame: self }
    }

    /// Writes a meta text as it stands, in place of members.
    pub fn meta_text(&mut self, text: &str) {
        self.out.truncate(self.start.saturating_add(META_START));
        self.out.extend_from_slice(text.as_bytes());
        self.meta = Meta::Closed { len: text.len() };
    }

    /// Closes the meta and hands out the buffer to append the body to.
    pub fn body(&mut self) -> &mut Vec<u8> {
        self.close_meta();
        self.out
    }

    fn close_meta(&mut self) -> usize {
        match self.meta {
            Meta::Closed { len } => return len,
            Meta::Open => self.out.push(b'}'),
            Meta::Empty => {}
        }
        let len = self.out.len().saturating_sub(self.start.saturating_add(META_START));
        self.meta = Meta::Closed { len };
        len
    }

    /// Bytes of the frame so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.out.len().saturating_sub(self.start)
    }

    /// Never true: a frame has at least a header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the frame back out of the buffer.
    pub fn abandon(self) {
        self.out.truncate(self.start);
    }

    /// Completes the frame and returns its length.
    ///
    /// # Errors
    /// [`EncodeError`] if meta or payload are too long; the buffer is then as it was before the frame.
    pub fn finish(mut self) -> Result<usize, EncodeError> {
        let meta_len = self.close_meta();
        let result = self.patch(meta_len);
        if result.is_err() {
            self.out.truncate(self.start);
        }
        result
    }

    fn patch(&mut self, meta_len: usize) -> Result<usize, EncodeError> {
        let frame_len = self.len();
        let len = frame_len.saturating_sub(HEADER_LEN);
        let meta_len = u16::try_from(meta_len).map_err(|_| EncodeError::MetaTooLong { len: meta_len })?;
        if len > MAX_PAYLOAD_LEN {
            return Err(EncodeError::PayloadTooLong { len });
        }
        let header = Header {
            stream_id: self.stream_id,
            sequence: self.sequence,
            flags: self.flags,
            payload_len: u32::try_from(len).map_err(|_| EncodeError::PayloadTooLong { len })?,
        }
        .encode()?;
        if let Some(frame) = self.out.get_mut(self.start..)
            && let Some((head, rest)) = frame.split_first_chunk_mut::<HEADER_LEN>()
            && let Some((meta, _)) = rest.split_first_chunk_mut::<2>()
        {
            *head = header;
            *meta = meta_len.to_be_bytes();
        }
        Ok(frame_len)
    }
}

/// Adds members to the meta of a [`FrameWriter`], in the order of the calls. Keys must be distinct.
#[derive(Debug)]
pub struct MetaWriter<'m, 'a> {
    frame: &'m mut FrameWriter<'a>,
}

impl MetaWriter<'_, '_> {
    fn separate(&mut self) {
        let first = match self.frame.meta {
            Meta::Empty => b'{',
            Meta::Open | Meta::Closed { .. } => b',',
        };
        self.frame.meta = Meta::Open;
        self.frame.out.push(first);
    }

    fn key(&mut self, key: &str) -> &mut Vec<u8> {
        self.separate();
        json::write_string(key, self.frame.out);
        self.frame.out.push(b':');
        self.frame.out
    }

    /// A whole number.
    pub fn unsigned(&mut self, key: &str, value: u64) -> &mut Self {
        let mut digits = [0; 20];
        let text = decimal(value, &mut digits);
        self.key(key).extend_from_slice(text);
        self
    }

    /// A string.
    pub fn string(&mut self, key: &str, value: &str) -> &mut Self {
        json::write_string(value, self.key(key));
        self
    }

    /// A string made from anything that prints.
    pub fn display(&mut self, key: &str, value: impl core::fmt::Display) -> &mut Self {
        let mut text = String::new();
        let _ = write!(text, "{value}");
        self.string(key, &text)
    }

    /// `true` or `false`.
    pub fn boolean(&mut self, key: &str, value: bool) -> &mut Self {
        self.key(key).extend_from_slice(if value { b"true" } else { b"false" });
        self
    }

    /// An array of whole numbers.
    pub fn unsigneds(&mut self, key: &str, values: impl IntoIterator<Item = u64>) -> &mut Self {
        let out = self.key(key);
        out.push(b'[');
        let mut digits = [0; 20];
        for (n, value) in values.into_iter().enumerate() {
            if n > 0 {
                out.push(b',');
            }
            out.extend_from_slice(decimal(value, &mut digits));
        }
        out.push(b']');
        self
    }

    /// An object of whole numbers. Keys must be distinct.
    pub fn numbers<'s>(&mut self, key: &str, members: impl IntoIterator<Item = (&'s str, u64)>) -> &mut Self {
        let out = self.key(key);
        out.push(b'{');
        let mut digits = [0; 20];
        for (n, (key, value)) in members.into_iter().enumerate() {
            if n > 0 {
                out.push(b',');
            }
            json::write_string(key, out);
            out.push(b':');
            out.extend_from_slice(decimal(value, &mut digits));
        }
        out.push(b'}');
        self
    }

    /// An array of strings.
    pub fn strings<'s>(&mut self, key: &str, values: impl IntoIterator<Item = &'s str>) -> &mut Self {
        let out = self.key(key);
        out.push(b'[');
        for (n, value) in values.into_iter().enumerate() {
            if n > 0 {
                out.push(b',');
            }
            json::write_string(value, out);
        }
        out.push(b']');
        self
    }

    /// Members that are JSON text already: `"a":1,"b":2`, at least one.
    pub fn members(&mut self, json: &str) -> &mut Self {
        self.separate();
        self.frame.out.extend_from_slice(json.as_bytes());
        self
    }

    /// A value that is JSON text already.
    pub fn raw(&mut self, key: &str, json: &str) -> &mut Self {
        self.key(key).extend_from_slice(json.as_bytes());
        self
    }
}

fn decimal(mut value: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut used = 0_usize;
    for digit in digits.iter_mut().rev() {
        *digit = b'0'.wrapping_add((value % 10) as u8);
        value /= 10;
        used = used.saturating_add(1);
        if value == 0 {
            break;
        }
    }
    digits.get(digits.len().saturating_sub(used)..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::frame::Frame;

    #[test]
    fn splits_and_refuses() {
        let split = |bytes: &'static [u8]| Payload::decode(bytes);
        assert_eq!(split(b"\0\x02{}hello"), Ok(Payload { meta: "{}", body: b"hello" }));
        assert_eq!(split(b"\0\0"), Ok(Payload { meta: "", body: b"" }));
        assert_eq!(split(b""), Err(Error::ShortPayload { got: 0 }));
        assert_eq!(split(b"\0"), Err(Error::ShortPayload { got: 1 }));
        assert_eq!(split(b"\0\x03{}"), Err(Error::ShortMeta { expected: 3, got: 2 }));
        assert_eq!(split(b"\0\x03{\xff}"), Err(Error::NotUtf8 { valid_up_to: 1 }));
    }

    #[test]
    fn writes_members_in_order_behind_what_is_there() {
        let mut out = vec![0xa5; 3];
        let mut frame = FrameWriter::new(&mut out, 0x0103, 7, Flags::FAILURE);
        frame.meta().unsigned("status", 412).string("error", "a \"b\"").boolean("t", true).raw("r", "[1]");
        frame.meta().unsigneds("n", [0, u64::MAX]).strings("s", ["x", "y"]).display("d", 5);
        frame.meta().numbers("o", [("a", 1), ("b\"", 2)]).numbers("e", []).members(r#""m":1,"k":[]"#);
        frame.body().push(9);
        let len = frame.finish().unwrap();
        assert_eq!(out[..3], [0xa5; 3]);
        assert_eq!(len, out.len() - 3);
        let frame = Frame::decode_exact(&out[3..]).unwrap();
        assert_eq!((frame.stream_id, frame.sequence, frame.flags), (0x0103, 7, Flags::FAILURE));
        let payload = Payload::decode(frame.payload).unwrap();
        let expected = r#"{"status":412,"error":"a \"b\"","t":true,"r":[1],"n":[0,18446744073709551615],"s":["x","y"],"d":"5","o":{"a":1,"b\"":2},"e":{},"m":1,"k":[]}"#;
        assert_eq!(payload, Payload { meta: expected, body: &[9] });
        assert!(json::Object::parse(payload.meta).is_ok());
    }

    #[test]
    fn a_frame_without_members_has_an_empty_meta() {
        let mut out = Vec::new();
        assert_eq!(FrameWriter::new(&mut out, 1, 2, Flags::NONE).finish(), Ok(12));
        assert_eq!(out, [0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0]);
    }

    #[test]
    fn lengths_past_their_fields_leave_the_buffer_alone() {
        let mut out = vec![1];
        let mut frame = FrameWriter::new(&mut out, 1, 2, Flags::NONE);
        frame.meta_text(&"x".repeat(65_536));
        assert_eq!(frame.finish(), Err(EncodeError::MetaTooLong { len: 65_536 }));
        assert_eq!(out, [1]);
        let mut frame = FrameWriter::new(&mut out, 1, 2, Flags::NONE);
        frame.body().resize(1 + 12 + MAX_PAYLOAD_LEN - 2, 0);
        assert!(frame.finish().is_ok());
        let mut out = vec![1];
        let mut frame = FrameWriter::new(&mut out, 1, 2, Flags::NONE);
        frame.body().resize(1 + 12 + MAX_PAYLOAD_LEN - 1, 0);
        assert_eq!(frame.finish(), Err(EncodeError::PayloadTooLong { len: MAX_PAYLOAD_LEN + 1 }));
        assert_eq!(out, [1]);
    }
}
