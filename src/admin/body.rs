//! Bodies of requests: pieces put together within a limit, and a key made a frame. No socket and no station, so that the fuzz
//! targets can read this file by its path.

use std::time::{Duration, Instant};

use aeon_proto::{frame::Flags, payload::FrameWriter, route::Route};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};

/// Why a body was not read to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError<E> {
    /// A body over the limit.
    #[error("body is too large, at most {max} bytes are taken (max-frame)")]
    TooLarge {
        /// The limit.
        max: usize,
    },
    /// A body that came too slowly.
    #[error("body did not come within the time that this node gives: {got} bytes in {waited:?}")]
    TooSlow {
        /// Bytes that came.
        got: usize,
        /// How long was waited.
        waited: Duration,
    },
    /// The connection broke inside the body.
    #[error("body ended early: {got} bytes came")]
    Broken {
        /// Bytes that came.
        got: usize,
        /// What broke. Not told to the peer, who knows.
        source: E,
    },
}

/// Puts a body of at most `max` bytes together. Memory grows with what came, whatever was announced. Each started MiB has
/// `timeout` to come.
pub(crate) async fn collect<E>(
    chunks: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
    max: usize,
    timeout: Duration,
) -> Result<Vec<u8>, BodyError<E>> {
    let started = Instant::now();
    let mut body: Vec<u8> = Vec::new();
    loop {
        let mib = u32::try_from(body.len() >> 20).unwrap_or(u32::MAX).saturating_add(1);
        let deadline = started + timeout.saturating_mul(mib);
        match tokio::time::timeout_at(deadline.into(), chunks.next()).await {
            Ok(None) => return Ok(body),
            Ok(Some(Ok(chunk))) if chunk.len() > max - body.len() => return Err(BodyError::TooLarge { max }),
            Ok(Some(Ok(chunk))) => body.extend_from_slice(&chunk),
            Ok(Some(Err(source))) => return Err(BodyError::Broken { got: body.len(), source }),
            Err(_) => return Err(BodyError::TooSlow { got: body.len(), waited: started.elapsed() }),
        }
    }
}

/// A key that no meta can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("key is no JSON text of at most 65535 bytes")]
pub(crate) struct KeyError;

/// The REPLAY frame that asks for a key: the key is its meta, byte by byte.
///
/// # Errors
/// [`KeyError`] for a text that is no UTF-8 or too long. What the text says is the station's to judge.
pub(crate) fn key_frame(key: &[u8]) -> Result<Vec<u8>, KeyError> {
    let text = std::str::from_utf8(key).map_err(|_| KeyError)?;
    let mut bytes = Vec::new();
    let mut frame = FrameWriter::new(&mut bytes, Route::AMPLITUHEDRON_REPLAY.0, 0, Flags::NONE);
    frame.meta_text(text);
    frame.finish().map_err(|_| KeyError)?;
    Ok(bytes)
}
