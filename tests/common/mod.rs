//! What the end-to-end tests share: nodes on every carrier, raw frames, waiting with a bound.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

pub mod netns;
pub mod slow;
pub mod wire;

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aeon_proto::route::Route;
use aeon_station::{
    client::StationAddress,
    config::{Config, Settings},
    daemon::Node,
};
use serde_json::Value;
use tempfile::TempDir;

use self::wire::Wire;

/// No single wait of a test is longer. Far above what is needed, for loaded machines.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a future, at most [`PATIENCE`].
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} took longer than {PATIENCE:?}"),
    }
}

/// Polls a condition until it holds, at most [`PATIENCE`].
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < PATIENCE, "{what} did not come true within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// As [`until`], off the runtime.
pub fn until_blocking(what: &str, condition: impl FnMut() -> bool) {
    until_blocking_for(what, PATIENCE, condition);
}

/// As [`until_blocking`], with a bound of its own.
pub fn until_blocking_for(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < patience, "{what} did not come true within {patience:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A node in this process that listens on a Unix socket, TCP and UDP.
#[derive(Debug)]
pub struct Lab {
    pub dir: TempDir,
    pub node: Node,
    pub uds: PathBuf,
}

impl Lab {
    /// Starts a node with `model`; `edit` changes its settings first.
    pub async fn start(model: &str, edit: impl FnOnce(&mut Settings)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let uds = dir.path().join("s");
        let mut settings = Settings::default();
        settings.model.model = Some(model.to_owned());
        settings.listen.uds = Some(uds.clone());
        settings.listen.tcp = Some(([127, 0, 0, 1], 0).into());
        settings.listen.udp = Some(([127, 0, 0, 1], 0).into());
        edit(&mut settings);
        let node = Node::start(&Config::try_from(settings).unwrap()).await.unwrap();
        Self { dir, node, uds }
    }

    /// A node with the identity model: 8 wide, 100 token ids.
    pub async fn identity() -> Self {
        Self::start("identity:8:100", |_| ()).await
    }

    pub fn tcp(&self) -> SocketAddr {
        self.node.tcp().unwrap()
    }

    pub fn udp(&self) -> SocketAddr {
        self.node.udp().unwrap()
    }

    /// One raw connection on each carrier.
    pub async fn wires(&self) -> Vec<Wire> {
        vec![Wire::uds(&self.uds).await, Wire::tcp(self.tcp()).await, Wire::udp(self.udp()).await]
    }

    /// What HEALTH says.
    pub async fn health(&self) -> Value {
        health(&mut Wire::uds(&self.uds).await).await
    }

    /// A counter of dropped frames.
    pub async fn dropped(&self, name: &str) -> u64 {
        self.health().await["dropped"][name].as_u64().unwrap()
    }

    pub fn address_uds(&self) -> StationAddress {
        StationAddress::Unix(self.uds.clone())
    }

    pub fn address_tcp(&self) -> StationAddress {
        StationAddress::Tcp(self.tcp().to_string())
    }

    pub fn address_udp(&self) -> StationAddress {
        StationAddress::Udp(self.udp().to_string())
    }
}

/// Asks for HEALTH.
pub async fn health(wire: &mut Wire) -> Value {
    wire.ask(Route::HEALTH, "", &[]).await.ok()
}

/// Packed little-endian f32.
pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Packed little-endian u32.
pub fn ids(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The other way round.
pub fn read_ids(bytes: &[u8]) -> Vec<u32> {
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    words.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// A second peer that goes on with a session of its own and must never notice what others do.
#[derive(Debug)]
pub struct Bystander {
    wire: Wire,
    pos: usize,
    width: usize,
    session: String,
}

impl Bystander {
    pub fn new(wire: Wire, width: usize) -> Self {
        let session = format!("bystander-{:016x}", rand::random::<u64>());
        Self { wire, pos: 0, width, session }
    }

    /// One more position; it must be the next one, and come back whole.
    pub async fn go_on(&mut self, what: &str) {
        let values: Vec<f32> = (0..self.width).map(|n| (self.pos * self.width + n) as f32).collect();
        let meta = format!(r#"{{"session":"{}","pos":{}}}"#, self.session, self.pos);
        let answer = self.wire.ask(Route::FORWARD, &meta, &floats(&values)).await;
        assert_eq!(answer.status(), 200, "bystander after {what}: {answer:?}");
        assert_eq!(answer.meta["pos"], self.pos, "{what}");
        self.pos += 1;
    }
}

/// `../shared` beside the checkout, if it is there.
pub fn shared(path: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared").join(path);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

/// An IPv4 address of this machine that is no loopback one, if it has one.
pub fn own_address() -> Option<IpAddr> {
    // Nothing is sent: the system only says from where it would.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    let found = socket.connect("203.0.113.1:9").and_then(|()| socket.local_addr());
    let own = found.ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified());
    if own.is_none() {
        eprintln!("skipped: this machine has loopback addresses only");
    }
    own
}
