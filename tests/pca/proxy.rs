//! A proxy in front of a station that writes down every frame, and can change it on its way.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use aeon_proto::{
    frame::{Frame, MAX_FRAME_LEN},
    payload::Payload,
    route::Route,
};
use aeon_station::{
    client::StationAddress,
    codec::{FrameCodec, Framing, OwnedFrame},
};
use futures_util::StreamExt;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};
use tokio_util::codec::FramedRead;

/// A frame that passed.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) is_request: bool,
    pub(crate) route: Route,
    pub(crate) meta: String,
    pub(crate) body: Vec<u8>,
}

type Change = dyn Fn(Seen) -> Seen + Send + Sync;

/// Everything that passed is written down as it came, before it is changed.
pub(crate) struct Proxy {
    socket: PathBuf,
    seen: Arc<Mutex<Vec<Seen>>>,
    _folder: tempfile::TempDir,
}

impl Proxy {
    pub(crate) fn start(target: &Path) -> Self {
        Self::changing(target, |seen| seen)
    }

    pub(crate) fn changing(target: &Path, change: impl Fn(Seen) -> Seen + Send + Sync + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("proxy");
        let listener = UnixListener::bind(&socket).unwrap();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let (log, target, change): (_, _, Arc<Change>) = (Arc::clone(&seen), target.to_owned(), Arc::new(change));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (from_client, to_client) = client.into_split();
                let (from_station, to_station) = UnixStream::connect(&target).await.unwrap().into_split();
                tokio::spawn(pass(true, from_client, to_station, Arc::clone(&log), Arc::clone(&change)));
                tokio::spawn(pass(false, from_station, to_client, Arc::clone(&log), Arc::clone(&change)));
            }
        });
        Self { socket, seen, _folder: folder }
    }

    pub(crate) fn address(&self) -> StationAddress {
        StationAddress::Unix(self.socket.clone())
    }

    /// What passed since the last call, without HELLO.
    pub(crate) fn take(&self) -> Vec<Seen> {
        let mut seen = std::mem::take(&mut *self.seen.lock().unwrap());
        seen.retain(|seen| seen.route != Route::HELLO);
        seen
    }

    /// Of those, the requests.
    pub(crate) fn requests(&self) -> Vec<Seen> {
        self.take().into_iter().filter(|seen| seen.is_request).collect()
    }
}

async fn pass(
    is_request: bool,
    from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    log: Arc<Mutex<Vec<Seen>>>,
    change: Arc<Change>,
) {
    let mut frames = FramedRead::new(from, FrameCodec::new(Framing::Prefixed, MAX_FRAME_LEN));
    while let Some(Ok(frame)) = frames.next().await {
        let OwnedFrame { stream_id, sequence, flags, payload } = frame;
        // A cancel has no payload.
        let payload = match Payload::decode(&payload) {
            Err(_) => payload.to_vec(),
            Ok(Payload { meta, body }) => {
                let seen = Seen { is_request, route: Route(stream_id), meta: meta.to_owned(), body: body.to_vec() };
                log.lock().unwrap().push(seen.clone());
                let Seen { meta, body, .. } = change(seen);
                [&(meta.len() as u16).to_be_bytes(), meta.as_bytes(), &body].concat()
            }
        };
        let mut bytes = vec![0; 4];
        Frame { stream_id, sequence, flags, payload: &payload }.encode(&mut bytes).unwrap();
        let len = (bytes.len() - 4) as u32;
        bytes[..4].copy_from_slice(&len.to_be_bytes());
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}
