//! Frames on a byte stream: the tokio-util codec, and the function under it that the server drives by itself.
//!
//! A stream carries frames either **prefixed** (a big-endian u32 with the length of the frame that follows) or **bare**
//! (the header delimits itself). Spec: `proto/SPEC.md`, "Carriers". Nothing is reserved on the word of a length: buffers
//! grow with the bytes that came.

use aeon_proto::frame::{EncodeError, Flags, Frame, HEADER_LEN, Header, PREFIX_LEN};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio_util::codec::{Decoder, Encoder};

/// How frames are told apart on a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Framing {
    /// A u32 with the frame's length in front of each frame.
    #[default]
    Prefixed,
    /// Frames one after another.
    Bare,
}

impl Framing {
    /// Bytes in front of each frame.
    #[must_use]
    pub const fn prefix_len(self) -> usize {
        match self {
            Self::Prefixed => PREFIX_LEN,
            Self::Bare => 0,
        }
    }
}

/// Why a stream cannot be read on: the place of the next frame is not known any more.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// A prefix too small for a header.
    #[error("length prefix {prefix} is under 10, the bytes of a frame header")]
    PrefixTooSmall {
        /// The prefix.
        prefix: u32,
    },
    /// Prefix and header disagree.
    #[error("length prefix {prefix} does not equal 10 + {payload_len} of the header behind it")]
    PrefixMismatch {
        /// The prefix.
        prefix: u32,
        /// Payload bytes by the header.
        payload_len: u32,
        /// As the header says.
        stream_id: u16,
        /// As the header says.
        sequence: u32,
    },
    /// A frame over the limit.
    #[error("frame of {len} bytes, at most {max} are taken")]
    FrameTooLarge {
        /// Bytes of the frame.
        len: u64,
        /// The limit.
        max: usize,
        /// As the header says.
        stream_id: u16,
        /// As the header says.
        sequence: u32,
    },
    /// The stream ended inside a frame.
    #[error("stream ended inside a frame, after {got} bytes of it")]
    CutFrame {
        /// Bytes of the frame that came.
        got: usize,
    },
    /// A frame to send does not fit the format.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The stream itself failed.
    #[error("stream failed")]
    Io(#[from] std::io::Error),
}

/// Decodes the frame at the start of `bytes`; returns it with the bytes it took, prefix included, or `None` if more bytes
/// are needed. The answer depends on the bytes alone, not on how they were cut into reads.
///
/// # Errors
/// [`StreamError::PrefixTooSmall`] as soon as the prefix is there; [`StreamError::FrameTooLarge`] and
/// [`StreamError::PrefixMismatch`] as soon as the header is there, so that they can name its stream id and sequence.
pub fn next_frame(
    bytes: &[u8],
    framing: Framing,
    max_frame_len: usize,
) -> Result<Option<(Frame<'_>, usize)>, StreamError> {
    let (prefix, rest) = match framing {
        Framing::Bare => (None, bytes),
        Framing::Prefixed => {
            let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_LEN>() else { return Ok(None) };
            let prefix = u32::from_be_bytes(*prefix);
            if (prefix as usize) < HEADER_LEN {
                return Err(StreamError::PrefixTooSmall { prefix });
            }
            (Some(prefix), rest)
        }
    };
    let Some(header) = rest.first_chunk::<HEADER_LEN>() else { return Ok(None) };
    let Header { stream_id, sequence, payload_len, .. } = Header::decode(header);
    let frame_len = HEADER_LEN as u64 + u64::from(payload_len);
    let announced = prefix.map_or(frame_len, u64::from);
    if announced > max_frame_len as u64 {
        return Err(StreamError::FrameTooLarge { len: announced, max: max_frame_len, stream_id, sequence });
    }
    if let Some(prefix) = prefix
        && announced != frame_len
    {
        return Err(StreamError::PrefixMismatch { prefix, payload_len, stream_id, sequence });
    }
    Ok(Frame::decode_prefix(rest).map(|(frame, len)| (frame, len + framing.prefix_len())))
}

/// A frame that owns its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedFrame {
    /// The route opcode.
    pub stream_id: u16,
    /// The request id.
    pub sequence: u32,
    /// The flag byte.
    pub flags: Flags,
    /// Meta and body.
    pub payload: Bytes,
}

impl OwnedFrame {
    /// The same frame with a borrowed payload.
    #[must_use]
    pub fn as_frame(&self) -> Frame<'_> {
        Frame { stream_id: self.stream_id, sequence: self.sequence, flags: self.flags, payload: &self.payload }
    }
}

/// The codec for `Framed` and its halves, as clients use them.
#[derive(Debug, Clone, Copy)]
pub struct FrameCodec {
    framing: Framing,
    max_frame_len: usize,
}

impl FrameCodec {
    /// A codec that takes frames of at most `max_frame_len` bytes, header included.
    #[must_use]
    pub const fn new(framing: Framing, max_frame_len: usize) -> Self {
        Self { framing, max_frame_len }
    }
}

impl Decoder for FrameCodec {
    type Item = OwnedFrame;
    type Error = StreamError;

    fn decode(&mut self, src: &mut BytesMut) -> Result<Option<OwnedFrame>, StreamError> {
        let Some((Frame { stream_id, sequence, flags, payload }, used)) =
            next_frame(src, self.framing, self.max_frame_len)?
        else {
            return Ok(None);
        };
        let payload_len = payload.len();
        let mut bytes = src.split_to(used);
        bytes.advance(used - payload_len);
        Ok(Some(OwnedFrame { stream_id, sequence, flags, payload: bytes.freeze() }))
    }

    fn decode_eof(&mut self, src: &mut BytesMut) -> Result<Option<OwnedFrame>, StreamError> {
        match self.decode(src)? {
            None if !src.is_empty() => Err(StreamError::CutFrame { got: src.len() }),
            frame => Ok(frame),
        }
    }
}

impl Encoder<OwnedFrame> for FrameCodec {
    type Error = StreamError;

    fn encode(&mut self, frame: OwnedFrame, dst: &mut BytesMut) -> Result<(), StreamError> {
        let len = frame.payload.len();
        let payload_len = u32::try_from(len).map_err(|_| EncodeError::PayloadTooLong { len })?;
        let OwnedFrame { stream_id, sequence, flags, payload } = frame;
        let header = Header { stream_id, sequence, flags, payload_len }.encode()?;
        dst.reserve(self.framing.prefix_len() + HEADER_LEN + len);
        if self.framing == Framing::Prefixed {
            dst.put_u32(HEADER_LEN as u32 + payload_len);
        }
        dst.extend_from_slice(&header);
        dst.extend_from_slice(&payload);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use aeon_proto::frame::MAX_FRAME_LEN;
    use proptest::prelude::*;

    use super::*;

    fn frame(stream_id: u16, payload: &[u8]) -> OwnedFrame {
        OwnedFrame { stream_id, sequence: 7, flags: Flags::FIN, payload: Bytes::copy_from_slice(payload) }
    }

    fn encoded(framing: Framing, frames: &[OwnedFrame]) -> BytesMut {
        let mut out = BytesMut::new();
        let mut codec = FrameCodec::new(framing, MAX_FRAME_LEN);
        frames.iter().for_each(|frame| codec.encode(frame.clone(), &mut out).unwrap());
        out
    }

    fn decode_in_chunks(framing: Framing, bytes: &[u8], chunk: usize) -> Vec<OwnedFrame> {
        let mut codec = FrameCodec::new(framing, MAX_FRAME_LEN);
        let mut buffer = BytesMut::new();
        let mut frames = Vec::new();
        for part in bytes.chunks(chunk) {
            buffer.extend_from_slice(part);
            while let Some(frame) = codec.decode(&mut buffer).unwrap() {
                frames.push(frame);
            }
        }
        assert!(codec.decode_eof(&mut buffer).unwrap().is_none());
        frames
    }

    #[test]
    fn one_byte_at_a_time_and_one_large_read_give_the_same_frames() {
        let frames = [frame(3, b""), frame(4, b"there"), frame(0xffff, &[7; 300])];
        for framing in [Framing::Prefixed, Framing::Bare] {
            let bytes = encoded(framing, &frames);
            for chunk in [1, 2, 3, 14, 50, bytes.len()] {
                assert_eq!(decode_in_chunks(framing, &bytes, chunk), frames, "{framing:?} by {chunk}");
            }
        }
        assert_eq!(encoded(Framing::Prefixed, &frames[..1])[..], [0, 0, 0, 10, 0, 3, 0, 0, 0, 7, 0x10, 0, 0, 0]);
    }

    #[test]
    fn a_wrong_prefix_is_named_as_soon_as_the_header_is_there() {
        let good = encoded(Framing::Prefixed, &[frame(3, b"abc")]);
        for (prefix, at) in [(0_u32, 4), (9, 4), (12, 14), (14, 14), (u32::MAX, 14), (MAX_FRAME_LEN as u32 + 1, 14)] {
            let mut bytes = good.to_vec();
            bytes[..4].copy_from_slice(&prefix.to_be_bytes());
            for len in 0..bytes.len() {
                let result = next_frame(&bytes[..len], Framing::Prefixed, MAX_FRAME_LEN);
                assert_eq!(result.is_err(), len >= at, "{prefix} with {len} bytes");
            }
            let error = next_frame(&bytes, Framing::Prefixed, MAX_FRAME_LEN).unwrap_err();
            match prefix {
                0 | 9 => assert!(matches!(error, StreamError::PrefixTooSmall { .. })),
                12 | 14 => assert!(matches!(error, StreamError::PrefixMismatch { stream_id: 3, sequence: 7, .. })),
                _ => assert!(matches!(error, StreamError::FrameTooLarge { stream_id: 3, sequence: 7, .. })),
            }
        }
    }

    #[test]
    fn frames_at_and_over_the_limit() {
        let bytes = encoded(Framing::Bare, &[frame(1, &[0; 20])]);
        assert!(next_frame(&bytes, Framing::Bare, 30).unwrap().is_some());
        assert!(matches!(next_frame(&bytes, Framing::Bare, 29), Err(StreamError::FrameTooLarge { len: 30, .. })));
    }

    #[test]
    fn an_announced_length_reserves_nothing() {
        let mut buffer = BytesMut::from(&[0, 0xff, 0xff, 0xff, 0, 3, 0, 0, 0, 1, 0, 0xff, 0xff, 0xf5][..]);
        let before = buffer.capacity();
        let decoded = FrameCodec::new(Framing::Prefixed, MAX_FRAME_LEN).decode(&mut buffer).unwrap();
        assert!(decoded.is_none());
        assert_eq!(buffer.capacity(), before);
    }

    #[test]
    fn a_stream_that_ends_inside_a_frame_says_so() {
        let mut bytes = encoded(Framing::Prefixed, &[frame(1, b"abc")]);
        bytes.truncate(16);
        let result = FrameCodec::new(Framing::Prefixed, MAX_FRAME_LEN).decode_eof(&mut bytes);
        assert!(matches!(result, Err(StreamError::CutFrame { got: 16 })));
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_frames_that_were_sent(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..12),
            cuts in proptest::collection::vec(1_usize..64, 1..8),
            bare in any::<bool>(),
        ) {
            let framing = if bare { Framing::Bare } else { Framing::Prefixed };
            let frames: Vec<_> = payloads.iter().map(|payload| frame(payload.len() as u16, payload)).collect();
            let bytes = encoded(framing, &frames);
            let mut codec = FrameCodec::new(framing, MAX_FRAME_LEN);
            let mut buffer = BytesMut::new();
            let mut decoded = Vec::new();
            let (mut at, mut turn) = (0, 0);
            while at < bytes.len() {
                let end = bytes.len().min(at + cuts[turn % cuts.len()]);
                buffer.extend_from_slice(&bytes[at..end]);
                (at, turn) = (end, turn + 1);
                while let Some(frame) = codec.decode(&mut buffer).unwrap() {
                    decoded.push(frame);
                }
            }
            prop_assert_eq!(decoded, frames);
            prop_assert!(buffer.is_empty());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), bare in any::<bool>()) {
            let framing = if bare { Framing::Bare } else { Framing::Prefixed };
            if let Ok(Some((frame, used))) = next_frame(&bytes, framing, MAX_FRAME_LEN) {
                prop_assert_eq!(used, frame.encoded_len() + framing.prefix_len());
                prop_assert!(used <= bytes.len());
            }
        }
    }
}
