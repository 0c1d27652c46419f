//! Bases with random numbers, nodes in this process, and a client that sends what it is told to, right or wrong.

use std::{
    io::{Read, Write},
    net::UdpSocket,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aeon_proto::{
    frame::{Flags, Frame, MAX_FRAME_LEN},
    kernel,
    methodology::MethodologySpec,
    payload::{FrameWriter, Payload},
    pcab::PcabWriter,
    pcar, residual,
    route::Route,
};
use aeon_station::{
    basis::{
        BasisFile, BasisSet, Registry,
        methodologies::{Methodologies, Methodology},
    },
    client::StationAddress,
    config::{Config, Settings},
    daemon::Node,
};
use serde_json::Value;

/// No test waits longer than this for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Random numbers that are the same on every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    pub(crate) fn number(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    pub(crate) fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number() as f32).collect()
    }
}

/// A methodology for residuals of `dim` values; another `variant` is another methodology.
pub(crate) fn spec(dim: usize, variant: &str) -> MethodologySpec {
    let text = format!(
        r#"{{"model":"test","hidden_dim":{dim},"k_rule":{{"floor":1,"per_thousand":8}},"variant":"{variant}"}}"#
    );
    MethodologySpec::parse(&text).unwrap()
}

/// A basis file with orthonormal random rows; `parts` are boundaries and their components. Another `note` changes the
/// metadata alone, so that the numbers are the same and the fingerprint is not.
pub(crate) fn pcab(dim: usize, parts: &[(u32, usize)], seed: u64, spec: &MethodologySpec, note: &str) -> Vec<u8> {
    let mut random = Random(seed);
    let made: Vec<_> = parts
        .iter()
        .map(|(boundary, k)| {
            let mean: Vec<f32> = random.numbers(dim).iter().map(|value| value / 8.0).collect();
            let mut variance: Vec<f32> = (1..=*k).rev().map(|value| value as f32).collect();
            variance.push(variance.iter().sum::<f32>() + 1.0);
            (*boundary, mean, orthonormal(&mut random, *k, dim), variance)
        })
        .collect();
    let mut writer = PcabWriter::new(dim as u32, spec.id());
    for (boundary, mean, rows, variance) in &made {
        writer.entry(*boundary, mean, rows, variance).unwrap();
    }
    writer.finish(&format!(r#"{{"note":"{note}"}}"#)).unwrap()
}

fn orthonormal(random: &mut Random, k: usize, dim: usize) -> Vec<f32> {
    let mut rows: Vec<Vec<f64>> = Vec::new();
    while rows.len() < k {
        let mut row: Vec<f64> = (0..dim).map(|_| random.number()).collect();
        // Twice is enough for single precision.
        for _ in 0..2 {
            for before in &rows {
                let product: f64 = before.iter().zip(&row).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(before).for_each(|(a, b)| *a -= product * b);
            }
            let norm = row.iter().map(|value| value * value).sum::<f64>().sqrt();
            row.iter_mut().for_each(|value| *value /= norm);
        }
        rows.push(row);
    }
    rows.concat().iter().map(|value| *value as f32).collect()
}

pub(crate) fn file(bytes: &[u8]) -> Arc<BasisFile> {
    Arc::new(BasisFile::from_bytes(Path::new("test.pcab"), bytes).unwrap())
}

pub(crate) fn set<B: AsRef<[u8]>>(files: &[B], specs: &[&MethodologySpec]) -> BasisSet {
    let mut methodologies = Methodologies::default();
    for spec in specs {
        let name = format!("{:08x}", spec.id());
        methodologies
            .insert(Methodology { path: PathBuf::from(&name), name, spec: MethodologySpec::clone(spec) })
            .unwrap();
    }
    BasisSet::new(files.iter().map(|bytes| file(bytes.as_ref())).collect(), methodologies).unwrap()
}

/// A running node and the folder of its socket.
pub(crate) struct TestNode {
    pub(crate) node: Node,
    pub(crate) socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl TestNode {
    /// Starts a node on a Unix socket and a UDP port of its own.
    pub(crate) async fn start(model: &str, layers: Option<&str>, set: BasisSet) -> Self {
        Self::start_with(model, layers, set, |_| ()).await
    }

    pub(crate) async fn start_with(
        model: &str,
        layers: Option<&str>,
        set: BasisSet,
        edit: impl FnOnce(&mut Settings),
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let mut settings = Settings::default();
        settings.model.model = Some(model.to_owned());
        settings.model.layers = layers.map(str::to_owned);
        settings.listen.uds = Some(socket.clone());
        settings.listen.udp = "127.0.0.1:0".parse().ok();
        edit(&mut settings);
        let config = Config::try_from(settings).unwrap();
        let node = Node::start_with_bases(&config, Arc::new(Registry::fixed(set))).await.unwrap();
        Self { node, socket, _folder: folder }
    }

    pub(crate) fn replace(&self, set: BasisSet) {
        self.node.station().bases().replace(set);
    }

    pub(crate) fn errors(&self) -> u64 {
        self.node.station().counters().errors.value()
    }

    pub(crate) fn unix(&self) -> StationAddress {
        StationAddress::Unix(self.socket.clone())
    }

    pub(crate) fn udp(&self) -> StationAddress {
        StationAddress::Udp(self.node.udp().unwrap().to_string())
    }

    /// A raw client on each carrier.
    pub(crate) fn links(&self) -> [(&'static str, Raw); 2] {
        [("unix", Raw::unix(&self.socket)), ("udp", Raw::udp(&self.udp()))]
    }
}

enum Socket {
    Unix(UnixStream),
    Udp(UdpSocket),
}

/// Sends frames with any meta and body, one at a time, and checks that each answer is for the request.
pub(crate) struct Raw {
    socket: Socket,
    pub(crate) sequence: u32,
}

/// An answer, good or bad.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) flags: Flags,
    pub(crate) text: String,
    pub(crate) meta: Value,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn status(&self) -> u64 {
        self.meta["status"].as_u64().unwrap()
    }

    pub(crate) fn error(&self) -> &str {
        self.meta["error"].as_str().unwrap_or("")
    }

    /// The body of a success.
    pub(crate) fn ok(self) -> Vec<u8> {
        assert_eq!((self.status(), self.flags), (200, Flags::SUCCESS), "{}", self.text);
        self.body
    }
}

impl Raw {
    pub(crate) fn unix(path: &Path) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket: Socket::Unix(socket), sequence: 1 }
    }

    pub(crate) fn udp(address: &StationAddress) -> Self {
        let StationAddress::Udp(address) = address else { panic!("{address}") };
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket: Socket::Udp(socket), sequence: 1 }
    }

    pub(crate) fn ask(&mut self, route: Route, meta: &str, body: &[u8]) -> Answer {
        self.sequence += 1;
        self.repeat(route, meta, body)
    }

    /// As [`Self::ask`], with the sequence of the request before.
    pub(crate) fn repeat(&mut self, route: Route, meta: &str, body: &[u8]) -> Answer {
        self.send(route, meta, body);
        let (answered, sequence, answer) = self.receive();
        assert_eq!((answered, sequence), (route, self.sequence));
        answer
    }

    /// Sends a request without waiting for its answer.
    pub(crate) fn send(&mut self, route: Route, meta: &str, body: &[u8]) {
        let mut bytes = Vec::new();
        let mut frame = FrameWriter::new(&mut bytes, route.0, self.sequence, Flags::NONE);
        frame.meta_text(meta);
        frame.body().extend_from_slice(body);
        frame.finish().unwrap();
        match &mut self.socket {
            Socket::Udp(socket) => {
                socket.send(&bytes).unwrap();
            }
            Socket::Unix(socket) => {
                socket.write_all(&(bytes.len() as u32).to_be_bytes()).unwrap();
                socket.write_all(&bytes).unwrap();
            }
        }
    }

    /// The next answer that comes, and to what.
    pub(crate) fn receive(&mut self) -> (Route, u32, Answer) {
        let mut reply = vec![0; 65_536];
        match &mut self.socket {
            Socket::Udp(socket) => {
                let len = socket.recv(&mut reply).unwrap();
                reply.truncate(len);
            }
            Socket::Unix(socket) => {
                let mut len = [0; 4];
                socket.read_exact(&mut len).unwrap();
                let len = u32::from_be_bytes(len) as usize;
                assert!(len <= MAX_FRAME_LEN);
                reply.resize(len, 0);
                socket.read_exact(&mut reply).unwrap();
            }
        }
        let frame = Frame::decode_exact(&reply).unwrap();
        let payload = Payload::decode(frame.payload).unwrap();
        let meta = serde_json::from_str(payload.meta).unwrap();
        let answer = Answer { flags: frame.flags, text: payload.meta.to_owned(), meta, body: payload.body.to_vec() };
        (Route(frame.stream_id), frame.sequence, answer)
    }

    /// Positions that a session holds, as the station says when it is asked to go on far behind them.
    pub(crate) fn session_len(&mut self, session: &str, dim: usize) -> u64 {
        let meta = format!(r#"{{"session":"{session}","pos":777}}"#);
        let answer = self.ask(Route::FORWARD, &meta, &vec![0; 4 * dim]);
        assert_eq!(answer.status(), 409, "{}", answer.text);
        answer.meta["expected_pos"].as_u64().unwrap()
    }
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    residual::encode_f32s(values, &mut bytes);
    bytes
}

pub(crate) fn floats_of(bytes: &[u8]) -> Vec<f32> {
    residual::decode_f32s(bytes).unwrap().into_owned()
}

/// A PCAR body with the header that belongs to a basis.
pub(crate) fn pcar_body(basis: &BasisFile, boundary: u32, k: usize, components: &[f32]) -> Vec<u8> {
    let header = header(basis, boundary, k);
    let mut body = Vec::new();
    pcar::encode(&header, components, &mut body).unwrap();
    body
}

pub(crate) fn header(basis: &BasisFile, boundary: u32, k: usize) -> pcar::Header {
    pcar::Header {
        boundary,
        k: k as u32,
        hidden_dim: basis.hidden_dim(),
        methodology: basis.methodology(),
        basis_fp: basis.basis_fp(),
    }
}

/// What components stand for, by the definition.
pub(crate) fn lifted(basis: &BasisFile, boundary: u32, k: usize, components: &[f32]) -> Vec<f32> {
    let part = basis.boundary(boundary).unwrap();
    let mut out = vec![0.0; components.len() / k * part.mean.len()];
    kernel::Kernel::REFERENCE.lift_batch(part.mean, part.prefix(k).unwrap(), components, &mut out).unwrap();
    out
}

/// What a residual is as components, by the definition.
pub(crate) fn projected(basis: &BasisFile, boundary: u32, k: usize, residuals: &[f32]) -> Vec<f32> {
    let part = basis.boundary(boundary).unwrap();
    let mut out = vec![0.0; residuals.len() / part.mean.len() * k];
    kernel::Kernel::REFERENCE.project_batch(part.mean, part.prefix(k).unwrap(), residuals, &mut out).unwrap();
    out
}
