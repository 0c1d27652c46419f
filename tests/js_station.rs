//! The seed's Phase A loop: residuals of the demo model go from this side, compressed, to the receiver in JavaScript, which
//! lifts them with its own copy of the basis.
//!
//! Skips itself, and says why, where Node or the built package (`proto/js/dist`) is absent; with `AEON_REQUIRE_JS` set that
//! is a failure.
#![allow(clippy::unwrap_used)] // a fault of the set-up is a failed test

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use aeon_proto::{
    frame::{Flags, Frame, MAX_FRAME_LEN},
    kernel,
    payload::{FrameWriter, MetaWriter, Payload},
    pcar::{self, PcarBody},
    residual,
    route::Route,
    status::Status,
};
use aeon_station::{
    basis::{BasisFile, Registry},
    client::{
        Client, ClientError, ClientOptions, Reply, StationAddress,
        policy::{CompressionPolicy, compress_residuals},
    },
    demo,
    model::{CancelToken, LayerRange as _, identity::Identity},
    station::{
        Station,
        limits::Limits,
        request::{Carrier, Origin, Outcome, Peer, Request},
    },
};

const TOKENS: usize = 128;
/// Half of the demo model is before this boundary.
const BOUNDARY: u32 = 3;
/// Positions of one request; several, so that the session goes on.
const CHUNK: usize = 32;
/// What the seed asks of the mean over 128 tokens.
const PASS_BAR: f64 = 0.94;

/// The receiver, ended when the test is.
struct Receiver {
    child: Child,
    udp: String,
}

impl Receiver {
    /// A receiver of residuals of 128 values with the demo model's basis, for the layers `LO..HI`.
    fn start(root: &Path, socket: &Path, layers: &str) -> Self {
        let mut child = Command::new("node")
            .arg(root.join("proto/js/station/main.js"))
            .args(["--dim", "128", "--layers", layers, "--udp", "127.0.0.1:0", "--socket"])
            .arg(socket)
            .arg("--bases")
            .arg(root.join("bases/demo"))
            .arg("--methodologies")
            .arg(root.join("bases/methodologies"))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        let udp = line.split(' ').find_map(|word| word.strip_prefix("udp="));
        let udp = udp.unwrap_or_else(|| panic!("no ready line: {line:?}")).to_owned();
        // Goes on reading, so that the receiver never waits for a full pipe.
        std::thread::spawn(move || lines.lines().map_while(Result::ok).for_each(|line| eprintln!("receiver: {line}")));
        Self { child, udp }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Why the test cannot run here, if it cannot.
fn missing(root: &Path) -> Option<String> {
    if Command::new("node").arg("--version").stdout(Stdio::null()).status().is_err() {
        return Some("node is not installed".to_owned());
    }
    let needed = ["proto/js/dist/aeon_proto_bg.wasm", "proto/js/node_modules/@noble/hashes/package.json"];
    let absent = needed.into_iter().find(|path| !root.join(path).exists())?;
    Some(format!("{absent} is not there: run npm install and npm run build in proto/js"))
}

/// What layers 0..3 of the demo model make of the first tokens of a text that it has not seen: `[TOKENS, d]`.
fn residuals() -> (Vec<f32>, usize) {
    let model = demo::load(Some(0..BOUNDARY)).unwrap();
    let ids = demo::tokenizer().unwrap().encode(demo::HELD_OUT, true).unwrap();
    let embedded = model.embed(&ids[..TOKENS]).unwrap();
    let mut cache = model.new_cache();
    let residuals = model.forward(cache.as_mut(), embedded, &CancelToken::default()).unwrap();
    (residuals, model.info().hidden_dim)
}

fn demo_basis() -> Arc<BasisFile> {
    let set = demo::bases().unwrap();
    Arc::clone(set.bases().next().unwrap())
}

fn lift(body: &[u8], basis: &BasisFile) -> Vec<f32> {
    let body = PcarBody::decode(body).unwrap();
    let part = basis.boundary(BOUNDARY).unwrap();
    let mut components = Vec::new();
    body.read_components(&mut components);
    let mut lifted = vec![0.0; body.seq() * part.mean.len()];
    let rows = part.prefix(body.k() as usize).unwrap();
    kernel::Kernel::REFERENCE.lift_batch(part.mean, rows, &components, &mut lifted).unwrap();
    lifted
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn expect_vent(result: Result<Reply, ClientError>, status: Status) -> ClientError {
    let error = result.unwrap_err();
    assert_eq!(error.status(), Some(status), "{error}");
    error
}

/// Says why a test is skipped and returns whether it is.
fn is_skipped(root: &Path) -> bool {
    let Some(reason) = missing(root) else { return false };
    assert!(std::env::var_os("AEON_REQUIRE_JS").is_none(), "{reason}");
    eprintln!("skipped: {reason}");
    true
}

#[tokio::test]
async fn residuals_compressed_here_are_lifted_there_to_the_same_bits() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if is_skipped(root) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("receiver.sock");
    let receiver = Receiver::start(root, &socket, "3..6");
    let (raw, d) = residuals();
    let basis = demo_basis();

    for address in [StationAddress::Unix(socket), StationAddress::Udp(receiver.udp.clone())] {
        let client = Client::connect(&address, ClientOptions::default()).await.unwrap();
        let hello = client.hello().await.unwrap();
        assert_eq!((hello.model.hidden_dim, hello.layers), (128, [3, 6]));
        // A sender compresses only if the receiver has the same file, by its BLAKE3.
        let remote = hello.basis(basis.basis_fp()).expect("the receiver lists the basis");
        assert_eq!(remote.blake3, basis.blake3().to_hex().as_str());
        let k = remote.k_at(BOUNDARY);
        let policy = CompressionPolicy::of(&basis, k);

        let mut lifted_there = Vec::new();
        for (n, chunk) in raw.chunks(CHUNK * d).enumerate() {
            let mut body = Vec::new();
            compress_residuals(chunk, BOUNDARY, &policy, &basis, &mut body).unwrap();
            let reply = client
                .request(
                    Route::FORWARD_PCA,
                    |meta| {
                        meta.string("session", "phase-a").unsigned("pos", (n * CHUNK) as u64);
                    },
                    &body,
                )
                .await
                .unwrap();
            assert_eq!(reply.number("pos"), Some((n * CHUNK) as u64));
            assert_eq!((reply.number("seq"), reply.string("body")), (Some(CHUNK as u64), Some("f32".to_owned())));
            let there = residual::decode_f32s(&reply.body).unwrap().into_owned();
            assert_eq!(bits(&there), bits(&lift(&body, &basis)), "the lift of chunk {n} has other bits over {address}");
            lifted_there.extend(there);
        }
        let cosines: Vec<f64> =
            raw.chunks(d).zip(lifted_there.chunks(d)).map(|(raw, there)| cosine(raw, there)).collect();
        assert_eq!(cosines.len(), TOKENS);
        let mean = cosines.iter().sum::<f64>() / TOKENS as f64;
        let min = cosines.iter().copied().fold(f64::INFINITY, f64::min);
        println!(
            "phase A over {address}: {TOKENS} tokens, d {d}, k {k}, {} of {} bytes a token, cosine mean {mean:.6} min {min:.6}",
            24 + 4 * k,
            4 * d,
        );
        assert!(mean >= PASS_BAR, "mean cosine {mean}");

        // Raw residuals come back as they went, and the session goes on where it ended.
        let go_on = |pos: usize| {
            let client = &client;
            let body: Vec<u8> = raw[..d].iter().flat_map(|value| value.to_le_bytes()).collect();
            async move {
                let meta = |meta: &mut MetaWriter<'_, '_>| {
                    meta.string("session", "phase-a").unsigned("pos", pos as u64);
                };
                (client.request(Route::FORWARD, meta, &body).await, body)
            }
        };
        let vent = expect_vent(go_on(TOKENS + 1).await.0, Status::CONFLICT);
        assert_eq!(vent.vent_number("expected_pos"), Some(TOKENS as u64));
        let (reply, body) = go_on(TOKENS).await;
        assert_eq!(reply.unwrap().body, body);

        // A basis that the receiver does not have is a 412 that lists what it has; the raw request stands in for it.
        let mut body = Vec::new();
        compress_residuals(&raw[..d], BOUNDARY, &policy, &basis, &mut body).unwrap();
        body[20] ^= 1;
        let vent = expect_vent(client.request(Route::FORWARD_PCA, |_| {}, &body).await, Status::PRECONDITION_FAILED);
        assert!(vent.to_string().contains("basis fingerprint mismatch"), "{vent}");
        body[20] ^= 1;
        body[16] ^= 1;
        let vent = expect_vent(client.request(Route::FORWARD_PCA, |_| {}, &body).await, Status::PRECONDITION_FAILED);
        assert_eq!(vent.vent_string("methodology"), Some(format!("0x{:08x}", basis.methodology())));
    }
}

/// The same requests to the identity backend here and to the receiver there: the answers must be the same bytes.
#[test]
fn the_receiver_answers_as_the_identity_backend_does() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if is_skipped(root) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("identity.sock");
    let _receiver = Receiver::start(root, &socket, "0..1");
    let mut there = UnixStream::connect(&socket).unwrap();
    there.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let bases = Arc::new(Registry::fixed(demo::bases().unwrap()));
    let model = Arc::new(Identity::new(128, 65_536));
    let here = Station::with_bases("here".to_owned(), model, bases, Limits::default(), 1).unwrap();
    let peer = Peer {
        carrier: Carrier::Unix,
        connection: 0,
        origin: Origin::Unknown,
        address: None,
        is_proven: true,
        max_reply_len: MAX_FRAME_LEN,
        default_session: None,
        stock_replies: false,
    };

    let basis = demo_basis();
    let basis_fp = format!("0x{:08x}", basis.basis_fp());
    let raw =
        |positions: usize, value: f32| vec![value; positions * 128].iter().flat_map(|v| v.to_le_bytes()).collect();
    let pcar = |change: &dyn Fn(&mut pcar::Header)| {
        let mut header = pcar::Header {
            boundary: 0,
            k: 4,
            hidden_dim: 128,
            methodology: basis.methodology(),
            basis_fp: basis.basis_fp(),
        };
        change(&mut header);
        let mut body = Vec::new();
        pcar::encode(&header, &vec![0.5; 2 * header.k as usize], &mut body).unwrap();
        body
    };
    let compressed =
        format!(r#"{{"accept":["e4","pcar"],"accept_basis":["0x1","{basis_fp}"],"accept_k":7,"fp48":"000000000000"}}"#);
    let compressed_well = format!(r#"{{"accept":["pcar"],"accept_basis":["{basis_fp}"],"accept_k":7}}"#);
    let long_key = format!(r#"{{"{0}":1,"{0}":2}}"#, "é".repeat(400));
    let forward = |meta: &'static str, body: Vec<u8>| (Route::FORWARD, meta.to_owned(), body);
    let cases: Vec<(Route, String, Vec<u8>)> = vec![
        forward("", raw(2, 1.5)),
        forward(r#"{"session":"s"}"#, raw(3, 0.5)),
        forward(r#"{"session":"s","pos":3}"#, raw(1, 0.5)),
        forward(r#"{"session":"s","pos":9}"#, raw(1, 0.5)),
        forward(r#"{"session":"s","pos":1}"#, raw(1, 0.5)),
        forward(r#"{"session":"s"}"#, raw(1, 0.5)),
        forward(r#"{"session":"s"}"#, raw(1, f32::NAN)),
        forward(r#"{"session":"s","pos":0}"#, raw(1, f32::INFINITY)),
        forward(r#"{"session":"s"}"#, raw(1, 0.5)),
        forward(r#"{"session":"new","pos":4}"#, raw(1, 0.5)),
        forward(r#"{"pos":4}"#, raw(1, 0.5)),
        forward(r#"{"session":"s","pos":16777216}"#, raw(1, 0.5)),
        forward(r#"{"deadline_ms":0}"#, raw(1, 0.5)),
        forward(r#"{"boundary":1}"#, raw(1, 0.5)),
        forward(r#"{"config_fp":"00"}"#, raw(1, 0.5)),
        forward(r#"{"accept":["e4"]}"#, raw(1, 0.5)),
        forward(r#"{"accept":["pcar"]}"#, raw(1, 0.5)),
        forward(r#"{"accept":["pcar","f32"]}"#, raw(1, 0.5)),
        forward("", Vec::new()),
        forward("", vec![0; 7]),
        forward("", vec![0; 8]),
        forward("", raw(4097, 0.0)),
        forward("[]", raw(1, 0.5)),
        forward("{", raw(1, 0.5)),
        forward(r#"{"pos":-1}"#, raw(1, 0.5)),
        forward(r#"{"session":""}"#, raw(1, 0.5)),
        (Route::FORWARD, long_key, raw(1, 0.5)),
        (Route::FORWARD, compressed, raw(1, 0.5)),
        (Route::FORWARD, compressed_well, raw(2, 0.5)),
        (Route::RESET, String::new(), Vec::new()),
        (Route::RESET, r#"{"session":"s"}"#.to_owned(), Vec::new()),
        forward(r#"{"session":"s","pos":1}"#, raw(1, 0.5)),
        (Route(0x4242), String::new(), Vec::new()),
        (Route::FORWARD_PCA, String::new(), Vec::new()),
        (Route::FORWARD_PCA, String::new(), vec![1; 30]),
        (Route::FORWARD_PCA, String::new(), pcar(&|_| {})),
        (Route::FORWARD_PCA, String::new(), pcar(&|header| header.basis_fp ^= 1)),
        (Route::FORWARD_PCA, String::new(), pcar(&|header| header.methodology ^= 1)),
        (Route::FORWARD_PCA, String::new(), pcar(&|header| header.hidden_dim = 64)),
        (Route::FORWARD_PCA, String::new(), pcar(&|header| header.boundary = 2)),
        (Route::FORWARD_PCA, r#"{"fp48":"000000000000"}"#.to_owned(), pcar(&|header| header.basis_fp ^= 1)),
    ];
    let ask = |there: &mut UnixStream, bytes: &[u8]| {
        let request = Request { peer: &peer, frame: Frame::decode_exact(bytes).unwrap(), arrived: Instant::now() };
        let mut expected = Vec::new();
        let outcome = here.handle(request, &mut expected, || panic!("the identity backend answers at once"));
        assert!(matches!(outcome, Outcome::Replied));
        there.write_all(&(bytes.len() as u32).to_be_bytes()).unwrap();
        there.write_all(bytes).unwrap();
        let mut prefix = [0; 4];
        there.read_exact(&mut prefix).unwrap();
        let mut got = vec![0; u32::from_be_bytes(prefix) as usize];
        there.read_exact(&mut got).unwrap();
        (expected, got)
    };
    let text = |frame: &[u8]| {
        let payload = Payload::decode(Frame::decode_exact(frame).unwrap().payload).unwrap();
        payload.meta.to_owned()
    };
    let mut hello = Vec::new();
    let mut frame = FrameWriter::new(&mut hello, Route::HELLO.0, 0, Flags::NONE);
    frame.meta().string("content_type", "application/x-aeon-flow; v=1");
    frame.finish().unwrap();
    let (expected, got) = ask(&mut there, &hello);
    let [expected, got]: [serde_json::Value; 2] =
        [expected, got].map(|frame| serde_json::from_str(&text(&frame)).unwrap());
    for key in ["status", "content_type", "model", "layers", "limits", "bases"] {
        assert_eq!(got[key], expected[key], "{key} of HELLO");
    }
    // The receiver gives no quantised answers, and does not say that it does.
    assert_eq!(got["accepts"], serde_json::json!(["f32", "pcar"]));
    let mut statuses = BTreeSet::new();
    for ((route, meta, body), sequence) in cases.into_iter().zip(1_u32..) {
        let mut bytes = Vec::new();
        let mut frame = FrameWriter::new(&mut bytes, route.0, sequence, Flags::NONE);
        frame.meta_text(&meta);
        frame.body().extend_from_slice(&body);
        frame.finish().unwrap();
        let (expected, got) = ask(&mut there, &bytes);
        assert_eq!(text(&got), text(&expected), "meta of the answer to {route} {meta}");
        assert_eq!(got, expected, "answer to {route} {meta}");
        let status = text(&got).split([':', ',', '}']).nth(1).unwrap().to_owned();
        statuses.insert(status);
    }
    let expected = ["200", "400", "404", "409", "412", "413", "422", "504"];
    assert_eq!(statuses.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}
