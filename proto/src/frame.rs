//! Frames: the fixed 10-byte header and the payload behind it. Spec: `proto/SPEC.md`, "Frame header".
//!
//! ```text
//! byte  0           2                   6       7            10
//!       | stream_id | sequence          | flags | length     | payload: `length` bytes
//!       | u16       | u32               | u8    | u24        |
//! ```
//!
//! All integers are big-endian. `stream_id` is the route opcode, `sequence` the request id that the response echoes.

use alloc::vec::Vec;
use core::fmt;

/// Bytes of a frame header.
pub const HEADER_LEN: usize = 10;
/// Bytes of the length in front of each frame on a stream carrier (u32, big-endian, counts header and payload).
pub const PREFIX_LEN: usize = 4;
/// The largest payload: `length` is 24 bits wide.
pub const MAX_PAYLOAD_LEN: usize = 0xff_ffff;
/// The largest frame, header included.
pub const MAX_FRAME_LEN: usize = HEADER_LEN + MAX_PAYLOAD_LEN;

/// The flag byte of a frame header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// No flag: a plain request.
    pub const NONE: Self = Self(0);
    /// Opens several streams at once (never answered by a station).
    pub const FORK: Self = Self(0x01);
    /// First answer wins (never answered by a station).
    pub const RACE: Self = Self(0x02);
    /// Merge of answers (never answered by a station).
    pub const FOLD: Self = Self(0x04);
    /// A failure when RESPONSE is set too; a cancel when it is not.
    pub const VENT: Self = Self(0x08);
    /// Last frame of its exchange.
    pub const FIN: Self = Self(0x10);
    /// A response. The TypeScript library calls this bit POISON.
    pub const RESPONSE: Self = Self(0x20);
    /// Ignored.
    pub const HELIX: Self = Self(0x40);
    /// An acknowledgement of the fragmented transport (never answered by a station).
    pub const ACK: Self = Self(0x80);
    /// What a success carries: FIN and RESPONSE.
    pub const SUCCESS: Self = Self(0x30);
    /// What a failure carries: VENT, FIN and RESPONSE.
    pub const FAILURE: Self = Self(0x38);

    /// Whether every bit of `other` is set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any bit of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// What a frame with these flags is to a station.
    ///
    /// RESPONSE, ACK, FORK, RACE and FOLD are looked at before VENT, so that a failure that comes back as if it were a
    /// request is never taken for a cancel and never answered.
    #[must_use]
    pub const fn kind(self) -> Kind {
        if self.intersects(Self(0x20 | 0x80 | 0x01 | 0x02 | 0x04)) {
            Kind::NeverAnswered
        } else if self.contains(Self::VENT) {
            Kind::Cancel
        } else {
            Kind::Request
        }
    }
}

impl core::ops::BitOr for Flags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flags(0x{:02x})", self.0)
    }
}

/// The three things that a frame can be to a station.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Asks for something and gets exactly one answer (unless its payload is empty: then it is only counted).
    Request,
    /// Withdraws the request in flight with the same stream id and sequence.
    Cancel,
    /// A response, an acknowledgement or a control frame: counted and dropped.
    NeverAnswered,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum DecodeError {
    /// Fewer bytes than a header has.
    #[error("{got} bytes, a frame header has 10")]
    ShortHeader {
        /// Bytes there are.
        got: usize,
    },
    /// Fewer bytes than the header announces.
    #[error("header announces a payload of {expected} bytes, {got} follow")]
    ShortPayload {
        /// Payload bytes announced.
        expected: usize,
        /// Payload bytes there are.
        got: usize,
    },
    /// More bytes than the one frame that is expected.
    #[error("{extra} bytes after the end of the frame")]
    TrailingBytes {
        /// Bytes too many.
        extra: usize,
    },
}

/// Why a frame cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum EncodeError {
    /// The payload does not fit 24 bits of length.
    #[error("payload of {len} bytes, a frame holds at most 16777215")]
    PayloadTooLong {
        /// Bytes of the payload.
        len: usize,
    },
    /// The meta text does not fit 16 bits of length.
    #[error("meta of {len} bytes, a payload holds at most 65535")]
    MetaTooLong {
        /// Bytes of the meta text.
        len: usize,
    },
}

/// A frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes 0..2: the route opcode.
    pub stream_id: u16,
    /// Bytes 2..6: the request id, chosen by the sender of the request.
    pub sequence: u32,
    /// Byte 6.
    pub flags: Flags,
    /// Bytes 7..10: payload bytes, at most [`MAX_PAYLOAD_LEN`].
    pub payload_len: u32,
}

impl Header {
    /// Reads a header. Every 10 bytes are one: no value is illegal at this level.
    #[must_use]
    pub const fn decode(bytes: &[u8; HEADER_LEN]) -> Self {
        let [s0, s1, q0, q1, q2, q3, flags, l0, l1, l2] = *bytes;
        Self {
            stream_id: u16::from_be_bytes([s0, s1]),
            sequence: u32::from_be_bytes([q0, q1, q2, q3]),
            flags: Flags(flags),
            payload_len: u32::from_be_bytes([0, l0, l1, l2]),
        }
    }

    /// Writes a header.
    ///
    /// # Errors
    /// [`EncodeError::PayloadTooLong`] if `payload_len` needs more than 24 bits.
    pub const fn encode(&self) -> Result<[u8; HEADER_LEN], EncodeError> {
        let [l3, l2, l1, l0] = self.payload_len.to_be_bytes();
        if l3 != 0 {
            return Err(EncodeError::PayloadTooLong { len: self.payload_len as usize });
        }
        let [s0, s1] = self.stream_id.to_be_bytes();
        let [q0, q1, q2, q3] = self.sequence.to_be_bytes();
        Ok([s0, s1, q0, q1, q2, q3, self.flags.0, l2, l1, l0])
    }

    /// Bytes of the whole frame.
    #[must_use]
    pub const fn frame_len(&self) -> usize {
        HEADER_LEN.saturating_add(self.payload_len as usize)
    }
}

/// A frame whose payload is borrowed from the buffer that it was read into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The route opcode.
    pub stream_id: u16,
    /// The request id.
    pub sequence: u32,
    /// The flag byte.
    pub flags: Flags,
    /// Meta and body, see [`crate::payload`].
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Decodes the frame at the start of `bytes` and says how long it is; `Ok(None)` means that more bytes are needed.
    /// What follows the frame is not looked at.
    #[must_use]
    pub fn decode_prefix(bytes: &'a [u8]) -> Option<(Self, usize)> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_LEN>()?;
        let header = Header::decode(header);
        let payload = rest.get(..header.payload_len as usize)?;
        Some((Self::from_parts(header, payload), header.frame_len()))
    }

    /// Decodes the frame at the start of `bytes` and ignores what follows it.
    ///
    /// # Errors
    /// [`DecodeError::ShortHeader`] or [`DecodeError::ShortPayload`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Err(DecodeError::ShortHeader { got: bytes.len() });
        };
        let header = Header::decode(header);
        let expected = header.payload_len as usize;
        match rest.get(..expected) {
            Some(payload) => Ok(Self::from_parts(header, payload)),
            None => Err(DecodeError::ShortPayload { expected, got: rest.len() }),
        }
    }

    /// Decodes `bytes` as exactly one frame, as a datagram must be.
    ///
    /// # Errors
    /// As [`Frame::decode`], and [`DecodeError::TrailingBytes`].
    pub fn decode_exact(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let frame = Self::decode(bytes)?;
        match bytes.len().saturating_sub(frame.encoded_len()) {
            0 => Ok(frame),
            extra => Err(DecodeError::TrailingBytes { extra }),
        }
    }

    /// Decodes frames that stand one after another up to the end of `bytes`.
    ///
    /// # Errors
    /// As [`Frame::decode`], if the end of `bytes` is not the end of a frame.
    pub fn decode_batch(mut bytes: &'a [u8]) -> Result<Vec<Self>, DecodeError> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let frame = Self::decode(bytes)?;
            bytes = bytes.get(frame.encoded_len()..).unwrap_or_default();
            frames.push(frame);
        }
        Ok(frames)
    }

    const fn from_parts(header: Header, payload: &'a [u8]) -> Self {
        Self { stream_id: header.stream_id, sequence: header.sequence, flags: header.flags, payload }
    }

    /// Bytes of the frame when encoded.
    #[must_use]
    pub const fn encoded_len(&self) -> usize {
        HEADER_LEN.saturating_add(self.payload.len())
    }

    /// Appends the encoded frame to `out`; on an error `out` is unchanged.
    ///
    /// # Errors
    /// [`EncodeError::PayloadTooLong`].
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let len = self.payload.len();
        if len > MAX_PAYLOAD_LEN {
            return Err(EncodeError::PayloadTooLong { len });
        }
        let header = Header {
            stream_id: self.stream_id,
            sequence: self.sequence,
            flags: self.flags,
            payload_len: u32::try_from(len).map_err(|_| EncodeError::PayloadTooLong { len })?,
        };
        out.reserve(self.encoded_len());
        out.extend_from_slice(&header.encode()?);
        out.extend_from_slice(self.payload);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    const BYTES: [u8; 14] = [0x01, 0x03, 0, 0, 0, 9, 0x30, 0, 0, 4, 0xde, 0xad, 0xbe, 0xef];

    #[test]
    fn deconstructs_and_constructs() {
        let frame = Frame::decode_exact(&BYTES).unwrap();
        assert_eq!((frame.stream_id, frame.sequence, frame.flags), (0x0103, 9, Flags::SUCCESS));
        assert_eq!(frame.payload, [0xde, 0xad, 0xbe, 0xef]);
        let mut out = vec![0xa5];
        frame.encode(&mut out).unwrap();
        assert_eq!(out[0], 0xa5);
        assert_eq!(out[1..], BYTES);
    }

    #[test]
    fn every_shorter_prefix_asks_for_more_and_one_byte_more_is_refused() {
        for len in 0..BYTES.len() {
            assert_eq!(Frame::decode_prefix(&BYTES[..len]), None);
            assert!(Frame::decode_exact(&BYTES[..len]).is_err());
        }
        let mut long = BYTES.to_vec();
        long.push(0);
        assert_eq!(Frame::decode_exact(&long), Err(DecodeError::TrailingBytes { extra: 1 }));
        assert_eq!(Frame::decode_prefix(&long).unwrap().1, BYTES.len());
    }

    #[test]
    fn payload_length_at_and_past_its_limit() {
        let mut out = Vec::new();
        let payload = vec![7; MAX_PAYLOAD_LEN + 1];
        let mut frame = Frame { stream_id: 1, sequence: 2, flags: Flags::NONE, payload: &payload };
        let err = frame.encode(&mut out).unwrap_err();
        assert_eq!(err, EncodeError::PayloadTooLong { len: MAX_PAYLOAD_LEN + 1 });
        assert!(out.is_empty());
        frame.payload = &payload[1..];
        frame.encode(&mut out).unwrap();
        assert_eq!(out.len(), MAX_FRAME_LEN);
        assert_eq!(out[7..10], [0xff, 0xff, 0xff]);
        let header = Header { stream_id: 0, sequence: 0, flags: Flags::NONE, payload_len: 1 << 24 };
        assert!(header.encode().is_err());
    }

    #[test]
    fn every_flag_byte_has_one_kind() {
        for byte in 0..=255_u8 {
            let kind = Flags(byte).kind();
            let expected = if byte & 0b1010_0111 != 0 {
                Kind::NeverAnswered
            } else if byte & 0x08 != 0 {
                Kind::Cancel
            } else {
                Kind::Request
            };
            assert_eq!(kind, expected, "{byte:#04x}");
        }
    }
}
