//! The server under test: a node with the identity backend, on a thread of its own that stays on one core.

use std::path::{Path, PathBuf};

use aeon_proto::{frame::Flags, payload::FrameWriter, route::Route};
use aeon_station::{
    config::{Config, ListenSettings, ModelSettings, Settings},
    daemon::Node,
};
use anyhow::Context as _;
use tokio::runtime::Runtime;

use super::machine::Threads;
use crate::demo::PrivateFolder;

/// Values of the small residual: its frame has 174 bytes.
pub(super) const SMALL: usize = 35;
/// Values of the large one: 14,370 bytes.
pub(super) const LARGE: usize = 3584;
/// 22 bytes, so that header, meta length and meta take 34.
const META: &str = r#"{"pos":0,"boundary":0}"#;

/// A FORWARD of `positions` residuals of `dim` values, without a length in front.
pub(super) fn frame(dim: usize, positions: usize) -> anyhow::Result<Vec<u8>> {
    let mut frame = Vec::new();
    let mut writer = FrameWriter::new(&mut frame, Route::FORWARD.0, 1, Flags::NONE);
    writer.meta_text(META);
    let values = (0..dim * positions).flat_map(|n| (n as f32).to_le_bytes());
    writer.body().extend(values);
    writer.finish()?;
    Ok(frame)
}

/// The same as it goes over a stream.
pub(super) fn message(dim: usize, positions: usize) -> anyhow::Result<Vec<u8>> {
    let frame = frame(dim, positions)?;
    Ok([&(frame.len() as u32).to_be_bytes()[..], &frame].concat())
}

/// A node, its runtime with one worker thread, and where it listens.
pub(super) struct Station {
    pub(super) threads: Threads,
    pub(super) socket: PathBuf,
    pub(super) udp: std::net::SocketAddr,
    node: Option<Node>,
    runtime: Runtime,
    _folder: PrivateFolder,
}

impl Station {
    /// Starts a node for residuals of `dim` values that takes `connections` at once.
    pub(super) fn start(dim: usize, core: usize, connections: usize) -> anyhow::Result<Self> {
        let threads = Threads::default();
        let entering = threads.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .on_thread_start(move || entering.enter(core))
            .enable_all()
            .build()
            .context("starting a runtime")?;
        let folder = PrivateFolder::new().context("making a folder for the socket")?;
        let socket = folder.path().join("flow.sock");
        let mut settings = Settings {
            model: ModelSettings { model: Some(format!("identity:{dim}")), ..ModelSettings::default() },
            listen: ListenSettings {
                uds: Some(socket.clone()),
                udp: Some(([127, 0, 0, 1], 0).into()),
                ..ListenSettings::default()
            },
            ..Settings::default()
        };
        settings.limits.max_connections = Some(connections);
        let node = runtime.block_on(Node::start(&Config::try_from(settings)?))?;
        let udp = node.udp().context("no UDP address")?;
        Ok(Self { threads, socket, udp, node: Some(node), runtime, _folder: folder })
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Station {
    fn drop(&mut self) {
        if let Some(node) = self.node.take() {
            self.runtime.block_on(node.kill());
        }
    }
}
