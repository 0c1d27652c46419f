//! Bodies of HTTP requests, in the pieces that the connection gives.

use std::{convert::Infallible, io, time::Duration};

use aeon_proto::{frame::Frame, payload::Payload, route::Route};
use bytes::Bytes;
use futures_util::{StreamExt, stream};

use crate::admin::body::{BodyError, collect, key_frame};

/// What a connection gives.
enum Piece {
    Bytes(Bytes),
    Broken,
    /// Nothing more, for ever.
    Silence,
}

/// The first two bytes are the limit; then each byte says how many follow as one piece, or that the body breaks off (255),
/// or that nothing comes any more (254).
pub(crate) fn body(bytes: &[u8]) {
    let Some((&limit, mut rest)) = bytes.split_first_chunk::<2>() else { return };
    let max = usize::from(u16::from_be_bytes(limit));
    let mut pieces = Vec::new();
    while let Some((&len, after)) = rest.split_first() {
        pieces.push(match len {
            255 => Piece::Broken,
            254 => Piece::Silence,
            len => {
                let (piece, after) = after.split_at(after.len().min(len.into()));
                rest = after;
                pieces.push(Piece::Bytes(Bytes::copy_from_slice(piece)));
                continue;
            }
        });
        rest = after;
    }
    let sent: Vec<u8> = pieces
        .iter()
        .map_while(|piece| match piece {
            Piece::Bytes(bytes) => Some(&bytes[..]),
            _ => None,
        })
        .collect::<Vec<_>>()
        .concat();
    // The end that comes first. Of the pieces before it all are taken, or those before the one that is too much.
    let end = pieces.iter().find(|piece| !matches!(piece, Piece::Bytes(_)));
    let (breaks, hangs) = (matches!(end, Some(Piece::Broken)), matches!(end, Some(Piece::Silence)));
    match read(pieces, max) {
        Ok(body) => {
            assert!(!breaks && !hangs && body == sent && body.len() <= max);
            assert!(body.capacity() <= (2 * sent.len()).max(8), "{} for {} bytes", body.capacity(), sent.len());
            key(&body);
        }
        Err(BodyError::TooLarge { max: told }) => assert!(told == max && sent.len() > max),
        Err(BodyError::Broken { got, source }) => {
            assert!(breaks && got == sent.len() && got <= max && source.kind() == io::ErrorKind::ConnectionReset);
        }
        Err(BodyError::TooSlow { got, .. }) => assert!(hangs && got == sent.len() && got <= max),
    }
}

/// Without patience: what is there is taken, and the first wait is one too long.
fn read(pieces: Vec<Piece>, max: usize) -> Result<Vec<u8>, BodyError<io::Error>> {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime without sockets");
    }
    let mut chunks = stream::iter(pieces)
        .then(|piece| async {
            match piece {
                Piece::Bytes(bytes) => Ok(bytes),
                Piece::Broken => Err(io::ErrorKind::ConnectionReset.into()),
                Piece::Silence => match std::future::pending::<Infallible>().await {},
            }
        })
        .boxed_local();
    RUNTIME.with(|runtime| runtime.block_on(collect(&mut chunks, max, Duration::ZERO)))
}

/// As a key of the replay cache: the station sees it byte by byte, or it is refused.
fn key(body: &[u8]) {
    match key_frame(body) {
        Ok(frame) => {
            let frame = Frame::decode_exact(&frame).expect("a whole frame");
            assert_eq!(frame.stream_id, Route::AMPLITUHEDRON_REPLAY.0);
            let payload = Payload::decode(frame.payload).expect("a meta");
            assert!(payload.meta.as_bytes() == body && payload.body.is_empty());
        }
        Err(error) => {
            assert!(std::str::from_utf8(body).is_err() || body.len() > 65_535, "{error}: {}", body.len());
        }
    }
}
