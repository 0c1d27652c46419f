//! The HTTP listener, with bytes on a socket.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use aeon_proto::bwah::{decode_amplituhedron_reply, encode_amplituhedron_capture};
use aeon_station::{
    config::{Config, Settings},
    daemon::Node,
};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;
/// The frame limit.
const MAX: usize = 16_777_225;

struct Http {
    node: Node,
    address: SocketAddr,
    _dir: tempfile::TempDir,
}

async fn node(model: &str, edit: impl FnOnce(&mut Settings)) -> Http {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.model.model = Some(model.to_owned());
    settings.listen.uds = Some(dir.path().join("flow.sock"));
    settings.listen.http = "127.0.0.1:0".parse().ok();
    edit(&mut settings);
    let node = Node::start(&Config::try_from(settings).unwrap()).await.unwrap();
    let address = node.http().unwrap();
    assert!(node.ready_line().contains(&format!(" http={address}")));
    Http { node, address, _dir: dir }
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        assert!(self.head.contains("content-type: application/json"), "{self:?}");
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// How a body is announced.
#[derive(Debug, Clone, Copy)]
enum Length {
    Announced,
    Chunked,
}

fn exchange(address: SocketAddr, head: &str, body: &[u8], length: Length) -> Answer {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut request = format!("{head} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n").into_bytes();
    // The server may answer before all of the body is there, and close: what cannot be written is not of interest then.
    match length {
        Length::Announced => {
            request.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
            request.extend_from_slice(body);
            let _ = socket.write_all(&request);
        }
        Length::Chunked => {
            request.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
            for chunk in body.chunks(MIB) {
                request.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                request.extend_from_slice(chunk);
                request.extend_from_slice(b"\r\n");
            }
            request.extend_from_slice(b"0\r\n\r\n");
            let _ = socket.write_all(&request);
        }
    }
    read_answer(&mut socket)
}

fn read_answer(socket: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    let _ = socket.read_to_end(&mut bytes);
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_lowercase(), body: bytes[end..].to_vec() }
}

async fn send(http: &Http, head: &str, body: Vec<u8>, length: Length) -> Answer {
    let (address, head) = (http.address, head.to_owned());
    tokio::task::spawn_blocking(move || exchange(address, &head, &body, length)).await.unwrap()
}

async fn post(http: &Http, path: &str, body: impl Into<Vec<u8>>) -> Answer {
    send(http, &format!("POST {path}"), body.into(), Length::Announced).await
}

fn key(prefix_len: u32) -> Value {
    json!({"prefix_hash": "0x0123456789abcdef", "prefix_len": prefix_len, "layer_lo": 0, "layer_hi": 1})
}

fn envelope(prefix_len: u32, tail: &[f32]) -> Vec<u8> {
    encode_amplituhedron_capture(0x0123_4567_89ab_cdef, prefix_len, 0, 1, tail, &[])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capture_and_replay_with_the_seeds_types_and_statuses() {
    let http = node("identity:16", |_| ()).await;
    let miss = post(&http, "/amplituhedron/replay", key(5).to_string()).await;
    assert_eq!((miss.status, miss.body.len()), (204, 0));
    assert!(!miss.head.contains("content-type"), "{}", miss.head);
    let captured = post(&http, "/amplituhedron/capture", envelope(5, &[0.25; 16])).await;
    assert_eq!((captured.status, captured.json()), (200, json!({"captured": true})));
    let hit = post(&http, "/amplituhedron/replay", key(5).to_string()).await;
    assert_eq!((hit.status, hit.body.len()), (200, 34 + 64));
    assert!(hit.head.contains("content-type: application/x-bitwise-residual\r\n"), "{}", hit.head);
    assert_eq!(decode_amplituhedron_reply(&hit.body).unwrap().tail.unwrap(), [0.25; 16]);
    // The cache is the one of the frame routes, and a session can be named.
    let mut with_session = key(5);
    with_session["session"] = "s".into();
    assert_eq!(post(&http, "/amplituhedron/replay", with_session.to_string()).await.status, 200);
    // The type of the request is of no interest.
    let typed = "POST /amplituhedron/replay HTTP/1.1\r\nContent-Type: image/png\r\nX-Rest:";
    assert_eq!(send(&http, typed, key(5).to_string().into(), Length::Chunked).await.status, 200);
    http.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_are_json_errors() {
    let http = node("identity:16", |_| ()).await;
    let twice = key(5).to_string().replace('{', r#"{"prefix_len":5,"#);
    for body in ["", "{", "[]", "{}", "nonsense", &twice, r#"{"prefix_hash":1.5}"#] {
        let answer = post(&http, "/amplituhedron/replay", body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.json()["error"].is_string());
    }
    let not_text = post(&http, "/amplituhedron/replay", vec![0xff; 10]).await;
    assert_eq!((not_text.status, not_text.json()["error"].is_string()), (400, true));
    let long = post(&http, "/amplituhedron/replay", format!("{{\"x\":\"{}\"}}", "x".repeat(65_530))).await;
    assert_eq!(long.status, 400);
    let mut nan = [0.0; 16];
    nan[2] = f32::NAN;
    for (body, status) in [
        (envelope(5, &nan), 422),
        (envelope(5, &[0.0; 15]), 400),
        (encode_amplituhedron_capture(1, 5, 3, 4, &[0.0; 16], &[]), 409),
        (b"{}".to_vec(), 400),
        (Vec::new(), 400),
    ] {
        let answer = post(&http, "/amplituhedron/capture", body).await;
        assert_eq!(answer.status, status);
        assert!(answer.json()["error"].is_string());
    }
    for (head, status) in [
        ("GET /nowhere", 404),
        ("POST /", 404),
        ("GET /amplituhedron/replay", 405),
        ("PUT /amplituhedron/capture", 405),
        ("POST /live", 405),
    ] {
        let answer = send(&http, head, Vec::new(), Length::Announced).await;
        assert_eq!(answer.status, status, "{head}");
        assert!(answer.json()["error"].is_string());
    }
    let live = send(&http, "GET /live", Vec::new(), Length::Announced).await;
    assert_eq!((live.status, live.json()), (200, json!({"live": true})));
    let ready = send(&http, "GET /ready", Vec::new(), Length::Announced).await;
    assert_eq!((ready.status, ready.json()), (200, json!({"ready": true})));
    http.node.stop().await;
}

/// One limit: that of frames. Nothing happens at 2 MiB, the framework's own limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_body_limit_is_the_frame_limit() {
    // 700 positions of the demo model: six layers, keys and values of 64 numbers each.
    let http = node("demo", |_| ()).await;
    let slab = vec![0.5; 700 * 6 * 2 * 64];
    let large = encode_amplituhedron_capture(0x0123_4567_89ab_cdef, 700, 0, 6, &[0.5; 128], &slab);
    assert!(large.len() > 2 * MIB);
    for length in [Length::Announced, Length::Chunked] {
        for len in [2 * MIB - 1, 2 * MIB, 2 * MIB + 1, MAX - 1, MAX] {
            for path in ["capture", "replay"] {
                let answer = send(&http, &format!("POST /amplituhedron/{path}"), vec![b'{'; len], length).await;
                assert_eq!(answer.status, 400, "{len} {length:?}");
            }
        }
        let answer = send(&http, "POST /amplituhedron/capture", large.clone(), length).await;
        assert_eq!(answer.status, 200, "{length:?}");
        for len in [MAX + 1, MAX + MIB, 64 * MIB] {
            for path in ["capture", "replay"] {
                let answer = send(&http, &format!("POST /amplituhedron/{path}"), vec![b'{'; len], length).await;
                assert_eq!(answer.status, 413, "{len} {length:?}");
                let json = answer.json();
                assert_eq!(json["max_frame"], MAX);
                assert!(json["error"].to_string().contains("16777225"));
            }
        }
    }
    let mut whole = key(700);
    whole["layer_hi"] = 6.into();
    whole["session"] = "s".into();
    assert_eq!(post(&http, "/amplituhedron/replay", whole.to_string()).await.status, 200);
    http.node.stop().await;
    // A limit that the operator lowers is the limit here too.
    let small = node("identity:16", |settings| settings.limits.max_frame = Some(2048)).await;
    assert_eq!(post(&small, "/amplituhedron/capture", vec![0; 2048]).await.status, 400);
    let answer = post(&small, "/amplituhedron/capture", vec![0; 2049]).await;
    assert_eq!((answer.status, &answer.json()["max_frame"]), (413, &json!(2048)));
    small.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_asks_first_is_refused_before_it_sends() {
    let http = node("identity:16", |_| ()).await;
    let address = http.address;
    let answer = tokio::task::spawn_blocking(move || {
        let mut socket = TcpStream::connect(address).unwrap();
        let head = format!(
            "POST /amplituhedron/capture HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
            MAX + 1
        );
        socket.write_all(head.as_bytes()).unwrap();
        read_answer(&mut socket)
    });
    assert_eq!(answer.await.unwrap().status, 413);
    http.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_are_not_listed_get_403() {
    let http = node("identity:16", |settings| settings.listen.allow = Some(vec!["10.0.0.0/8".to_owned()])).await;
    for head in ["GET /live", "POST /amplituhedron/replay"] {
        let answer = send(&http, head, Vec::new(), Length::Announced).await;
        assert_eq!((answer.status, answer.json()["error"].is_string()), (403, true));
    }
    http.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_and_broken_bodies_are_given_up() {
    let http = node("identity:16", |settings| settings.limits.frame_timeout = Some(1)).await;
    let address = http.address;
    let slow = tokio::task::spawn_blocking(move || {
        let mut socket = TcpStream::connect(address).unwrap();
        let head = "POST /amplituhedron/capture HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\nBWAH";
        socket.write_all(head.as_bytes()).unwrap();
        let started = Instant::now();
        (read_answer(&mut socket), started.elapsed())
    });
    let (answer, waited) = slow.await.unwrap();
    assert_eq!(answer.status, 408);
    assert!(waited < Duration::from_secs(5));
    // A head that never ends is given up too.
    let head = tokio::task::spawn_blocking(move || {
        let mut socket = TcpStream::connect(address).unwrap();
        socket.write_all(b"POST /amplituhedron/capture HTTP/1.1\r\nHos").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket.read_to_end(&mut Vec::new()).is_ok()
    });
    assert!(head.await.unwrap());
    assert_eq!(send(&http, "GET /live", Vec::new(), Length::Announced).await.status, 200);
    http.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_drains_with_the_node() {
    let http = node("identity:16", |_| ()).await;
    let address = http.address;
    // A connection that is kept open does not hold the node up.
    let mut idle = TcpStream::connect(address).unwrap();
    idle.write_all(b"GET /live HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    let mut buffer = [0; 1024];
    let len = tokio::task::spawn_blocking(move || {
        let len = idle.read(&mut buffer).unwrap();
        (len, idle)
    });
    let (len, _idle) = len.await.unwrap();
    assert!(len > 0);
    let started = Instant::now();
    assert!(http.node.stop().await);
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(TcpStream::connect(address).is_err());
}
