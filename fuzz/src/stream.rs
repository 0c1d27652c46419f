//! Frames on a byte stream, however it is cut into reads.

use bytes::BytesMut;
use tokio_util::codec::{Decoder, Encoder};

use crate::codec::{FrameCodec, Framing, OwnedFrame, next_frame};

/// The first byte chooses framing and limit, the second the sizes of the reads; the stream is the rest.
///
/// Frames, the bytes used, and the error in its words must not depend on the reads.
pub(crate) fn chunks(bytes: &[u8]) {
    let Some((&[how, cut], stream)) = bytes.split_first_chunk::<2>() else { return };
    let framing = if how & 1 == 0 { Framing::Prefixed } else { Framing::Bare };
    let max_frame_len = if how & 2 == 0 { 256 } else { aeon_proto::frame::MAX_FRAME_LEN };
    let (whole, whole_end, used) = at_once(stream, framing, max_frame_len);
    let (pieces, pieces_end, left) = in_reads(stream, framing, max_frame_len, cut);
    assert_eq!((&pieces, &pieces_end), (&whole, &whole_end), "the cut of the reads shows");
    assert_eq!(used + left, stream.len(), "bytes got lost");

    let mut again = BytesMut::new();
    for frame in whole {
        assert!(10 + frame.payload.len() <= max_frame_len);
        FrameCodec::new(framing, max_frame_len).encode(frame, &mut again).expect("a frame that was read");
    }
    assert_eq!(again, stream[..used], "frames do not encode to what they were read from");
}

/// Frames, the error at the end if there is one, and the bytes used.
fn at_once(stream: &[u8], framing: Framing, max_frame_len: usize) -> (Vec<OwnedFrame>, Option<String>, usize) {
    let (mut frames, mut used) = (Vec::new(), 0);
    loop {
        match next_frame(&stream[used..], framing, max_frame_len) {
            Ok(Some((frame, len))) => {
                used += len;
                frames.push(OwnedFrame {
                    stream_id: frame.stream_id,
                    sequence: frame.sequence,
                    flags: frame.flags,
                    payload: frame.payload.to_vec().into(),
                });
            }
            Ok(None) if used == stream.len() => return (frames, None, used),
            Ok(None) => {
                return (
                    frames,
                    Some(format!("stream ended inside a frame, after {} bytes of it", stream.len() - used)),
                    used,
                );
            }
            Err(error) => return (frames, Some(error.to_string()), used),
        }
    }
}

/// The same through the codec, with reads of 1 to 64 bytes; the last value is what is left in its buffer and not yet read.
fn in_reads(stream: &[u8], framing: Framing, max: usize, cut: u8) -> (Vec<OwnedFrame>, Option<String>, usize) {
    let mut codec = FrameCodec::new(framing, max);
    let (mut frames, mut buffer, mut rest, mut random) = (Vec::new(), BytesMut::new(), stream, u32::from(cut));
    loop {
        loop {
            match codec.decode(&mut buffer) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error.to_string()), buffer.len() + rest.len()),
            }
        }
        if rest.is_empty() {
            let end = codec.decode_eof(&mut buffer).map(|frame| assert_eq!(frame, None));
            return (frames, end.err().map(|error| error.to_string()), buffer.len());
        }
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let read;
        (read, rest) = rest.split_at(rest.len().min(1 + (random >> 26) as usize));
        buffer.extend_from_slice(read);
    }
}
