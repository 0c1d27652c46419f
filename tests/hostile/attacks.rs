//! The attacks, one after another: each would disturb the figures of another beside it.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aeon_proto::{bwah::encode_amplituhedron_capture, route::Route};
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket, UnixStream},
    task::JoinSet,
    time::timeout,
};

use crate::{
    common::{
        ids, until,
        wire::{Answer, Stream, Wire, cancel, payload, prefixed, raw_frame, request},
        within,
    },
    guarded::{Guarded, cores, pin_thread, print_head, raise_descriptors},
};

/// How long floods last.
const FLOOD: Duration = Duration::from_secs(4);

async fn uds(node: &Guarded) -> UnixStream {
    loop {
        match UnixStream::connect(&node.uds).await {
            Ok(stream) => return stream,
            // The line of those who wait to be accepted is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(error) => panic!("{error}"),
        }
    }
}

async fn stream(node: &Guarded, n: usize) -> Box<dyn Stream> {
    if n.is_multiple_of(2) { Box::new(uds(node).await) } else { Box::new(TcpStream::connect(node.tcp).await.unwrap()) }
}

#[test]
fn hostile_peers_cost_nobody_their_answers() {
    // The attackers compute too, and must not take the time of the node that is measured.
    let cores = cores();
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    if let Some((_, core)) = cores {
        pin_thread(0, core);
        threads.on_thread_start(move || pin_thread(0, core));
    } else {
        eprintln!("one core for the node and its attackers: the times are of both");
    }
    let runtime = threads.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(attack_one_by_one(cores.map(|cores| cores.0)));
}

/// Starts a node that keeps to a core.
async fn node_on(core: Option<usize>, model: &str, connections: u64, extra: &[&str]) -> Guarded {
    let mut node = Guarded::start(model, connections, extra).await;
    if let Some(core) = core {
        node.keep_to(core);
    }
    node
}

async fn attack_one_by_one(core: Option<usize>) {
    let descriptors = raise_descriptors();
    let connections = 5000.min(descriptors.saturating_sub(1000) as usize);
    if connections < 5000 {
        eprintln!("only {connections} connections: the limit of open files is {descriptors}");
    }
    print_head();
    let node = node_on(core, "demo", connections as u64, &["--max-shard-entries", "500"]).await;
    node.under("stalled connections", 0, stalled(&node, connections)).await;
    node.under("unread replies", 0, unread(&node)).await;
    node.under("floods", 0, floods(&node)).await;
    node.under("work of many", 0, work(&node)).await;
    node.under("largest answers", 0, largest(&node)).await;
    node.under("nasty JSON", 0, json(&node)).await;
    node.under("many and false senders", 0, senders(&node)).await;
    node.under("captures and shards", 0, caches(&node)).await;
    node.under("HTTP", 0, http(&node)).await;
    let health = node.health().await;
    assert!(health["shard_entries"].as_u64().unwrap() <= 500 && health["shard_bytes"].as_u64().unwrap() <= 4 << 20);
    assert!(health["replay"]["bytes"].as_u64().unwrap() <= 16 << 20, "{health}");
    node.stop();
    let node = node_on(core, "identity:16:1000", 100, &["--max-sessions", "1000"]).await;
    node.under("sessions", 1000, sessions(&node)).await;
    node.stop();
}

/// Announcements, half frames, halves of large frames, and slow writers.
async fn stalled(node: &Guarded, connections: usize) -> String {
    let large = prefixed(&raw_frame(Route::FORWARD.0, 1, 0, &vec![0; 0xff_ffff]));
    let hello = prefixed(&request(Route::HELLO, 1, "", &[]));
    let (mut open, mut slow) = (Vec::new(), Vec::new());
    let mut sent = 0;
    for n in 0..connections {
        let mut stream = stream(node, n / 4).await;
        let len = match n % 4 {
            0 => 14,
            1 => 1000,
            2 => 400_000,
            _ => {
                slow.push(stream);
                continue;
            }
        };
        // What the node does not take is not waited for.
        let _ = timeout(Duration::from_millis(5), stream.write_all(&large[..len])).await;
        sent += len;
        open.push(stream);
    }
    // A byte now and then, never a frame whole in time.
    for byte in &hello[..3] {
        for stream in &mut slow {
            let _ = stream.write_all(&[*byte]).await;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let refused = node.health().await["errors"].as_u64().unwrap();
    format!("{connections} connections, up to {} MB of half frames, {refused} vents", sent / 1_000_000)
}

/// Requests in masses whose replies nobody reads.
async fn unread(node: &Guarded) -> String {
    let mut tasks = JoinSet::new();
    let sent = Arc::new(AtomicU64::new(0));
    let hello = prefixed(&request(Route::HELLO, 1, "", &[]));
    let logits = prefixed(&request(Route::LM_HEAD, 1, r#"{"return":"logits"}"#, &vec![0; 4 * 128 * 1000]));
    for n in 0..16 {
        let (mut stream, sent) = (stream(node, n).await, Arc::clone(&sent));
        let hellos = hello.repeat(100);
        tasks.spawn(async move {
            for _ in 0..100_000 / 16 / 100 {
                if timeout(Duration::from_secs(2), stream.write_all(&hellos)).await.is_err() {
                    break;
                }
                sent.fetch_add(100, Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        });
    }
    for n in 0..40 {
        let (mut stream, sent) = (stream(node, n).await, Arc::clone(&sent));
        let logits = logits.clone();
        tasks.spawn(async move {
            for _ in 0..3 {
                let written = timeout(Duration::from_secs(2), stream.write_all(&logits)).await;
                if !matches!(written, Ok(Ok(()))) {
                    break;
                }
                sent.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        });
    }
    tasks.join_all().await;
    format!("{} requests went in before the node stopped reading", sent.load(Ordering::Relaxed))
}

fn cheap_frames() -> Vec<Vec<u8>> {
    let reset = request(Route::RESET, 4, r#"{"session":"nobody"}"#, &[]);
    let vent = raw_frame(Route::FORWARD.0, 3, 0x38, &payload(r#"{"status":500,"error":"x"}"#, &[]));
    let broken = request(Route::FORWARD, 6, "{", &[]);
    let unknown = raw_frame(0x7777, 7, 0, &payload("", &[]));
    let empty = raw_frame(Route::HELLO.0, 8, 0, &[]);
    vec![request(Route::HELLO, 1, "", &[]), vent, reset, cancel(Route::FORWARD, 5), broken, unknown, empty]
}

/// Cheap frames as fast as they go, on every carrier.
async fn floods(node: &Guarded) -> String {
    let mut tasks = JoinSet::new();
    let sent = Arc::new(AtomicU64::new(0));
    let until = Instant::now() + FLOOD;
    for n in 0..4 {
        let (mut read, mut write) = tokio::io::split(stream(node, n).await);
        let sent = Arc::clone(&sent);
        tasks.spawn(async move {
            let mut buffer = vec![0; 65_536];
            while matches!(timeout(Duration::from_secs(3), read.read(&mut buffer)).await, Ok(Ok(1..))) {}
        });
        tasks.spawn(async move {
            let frames: Vec<u8> = cheap_frames().iter().flat_map(|frame| prefixed(frame)).collect();
            let batch = frames.repeat(20);
            while Instant::now() < until && write.write_all(&batch).await.is_ok() {
                sent.fetch_add(140, Ordering::Relaxed);
            }
            let _ = write.shutdown().await;
        });
    }
    for _ in 0..3 {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(node.udp).await.unwrap();
        let sent = Arc::clone(&sent);
        tasks.spawn(async move {
            let frames = cheap_frames();
            let mut buffer = vec![0; 65_536];
            while Instant::now() < until {
                for frame in &frames {
                    if socket.send(frame).await.is_ok() {
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                }
                while socket.try_recv(&mut buffer).is_ok() {}
                tokio::task::yield_now().await;
            }
        });
    }
    tasks.join_all().await;
    format!("{} frames", sent.load(Ordering::Relaxed))
}

/// More model work than the queue holds, from many connections and UDP senders, all of it in time for nobody.
async fn work(node: &Guarded) -> String {
    let mut tasks = JoinSet::new();
    let sent = Arc::new(AtomicU64::new(0));
    let until = Instant::now() + FLOOD;
    let frame = |sequence| request(Route::FORWARD, sequence, r#"{"in":"ids","out":"token"}"#, &ids(&[3; 8]));
    for n in 0..40 {
        let (mut read, mut write) = tokio::io::split(stream(node, n).await);
        let batch: Vec<u8> = (0..64).flat_map(|n| prefixed(&frame(n))).collect();
        let sent = Arc::clone(&sent);
        tasks.spawn(async move {
            let mut buffer = vec![0; 65_536];
            while Instant::now() < until && timeout(Duration::from_secs(1), write.write_all(&batch)).await.is_ok() {
                sent.fetch_add(64, Ordering::Relaxed);
                let _ = timeout(Duration::from_millis(50), read.read(&mut buffer)).await;
            }
        });
    }
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut sequence = 0;
    while Instant::now() < until {
        for _ in 0..50 {
            sequence += 1;
            let _ = socket.send_to(&frame(sequence), node.udp).await;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tasks.join_all().await;
    format!("{} requests", sent.load(Ordering::Relaxed) + u64::from(sequence))
}

/// The largest answers that there are, which are read and must be right.
async fn largest(node: &Guarded) -> String {
    let mut tasks = JoinSet::new();
    for n in 0..6 {
        let mut wire = if n % 2 == 0 { node.wire().await } else { Wire::tcp(node.tcp).await };
        tasks.spawn(async move {
            let (mut done, mut busy) = (0, 0);
            for (meta, rows, width) in
                [(r#"{"return":"logits"}"#, 4000, 4 * 1024), (r#"{"return":"topk","top_k":1024}"#, 2000, 8 * 1024)]
            {
                let body = vec![0; rows * 4 * 128];
                for _ in 0..100 {
                    let sequence = wire.next_sequence();
                    wire.send(&[request(Route::LM_HEAD, sequence, meta, &body)]).await;
                    // When memory is short, whoever is slow to read a large answer loses its connection, inside a frame too.
                    let frame = timeout(Duration::from_secs(60), wire.receive_unless_cut()).await.unwrap();
                    let Some(frame) = frame else { return (done, busy, true) };
                    let answer = Answer::decode(&frame);
                    if answer.status() == 200 {
                        assert_eq!(answer.body.len(), rows * width);
                        done += 1;
                        break;
                    }
                    assert_eq!(answer.status(), 503, "{}", answer.text);
                    busy += 1;
                    tokio::time::sleep(Duration::from_millis(300)).await;
                }
            }
            (done, busy, false)
        });
    }
    let ends = tasks.join_all().await;
    let done: u32 = ends.iter().map(|end| end.0).sum();
    let (busy, lost) = (ends.iter().map(|end| end.1).sum::<u32>(), ends.iter().filter(|end| end.2).count());
    assert!(done > 0, "none was answered");
    format!("{done} answers of 16 MB, {busy} times busy, {lost} given up for memory")
}

/// Metas of every nasty shape on every route, streams and UDP: each gets one answer.
async fn json(node: &Guarded) -> String {
    let deep = |open: &str, close: &str, n: usize| format!(r#"{{"x":{}1{}}}"#, open.repeat(n), close.repeat(n));
    let texts: Vec<Vec<u8>> = [
        deep("[", "]", 31),
        deep("[", "]", 30_000),
        deep(r#"{"a":"#, "}", 10_000),
        "[".repeat(65_535),
        "{\"a\":".repeat(10_000),
        r#"{"pos":1,"pos":2}"#.into(),
        r#"{"x":{"a":1,"a":1}}"#.into(),
        format!(r#"{{"{}":1}}"#, "k".repeat(65_500)),
        format!("{{{}}}", (0..8000).map(|n| format!(r#""{n}":0"#)).collect::<Vec<_>>().join(",")),
        r#"{"pos":18446744073709551616}"#.into(),
        r#"{"pos":-1}"#.into(),
        r#"{"pos":1e400}"#.into(),
        r#"{"pos":1.5}"#.into(),
        format!(r#"{{"pos":{}}}"#, "9".repeat(65_000)),
        format!(r#"{{"x":0.{}1}}"#, "0".repeat(65_000)),
        r#"{"deadline_ms":18446744073709551615}"#.into(),
        r#"{"top_k":4294967295,"return":"topk"}"#.into(),
        r#"{"session":"\u0000"}"#.into(),
        r#"{"session":"\ud800"}"#.into(),
        r#"{"session":"\udc00\ud800"}"#.into(),
        r#"{"x":"\ud834\udd1e"}"#.into(),
        r#"{"x":"\q"}"#.into(),
        r#"{"x":tru}"#.into(),
        r#"{"x":01}"#.into(),
        "\u{feff}{}".into(),
        "{}{}".into(),
        "null".into(),
        " ".repeat(65_535),
        "{\"x\":\"\u{1}\"}".into(),
        "/* */{}".into(),
        r#"{"accept":["pcar","pcar",1]}"#.into(),
        format!(r#"{{"accept_basis":[{}"0x0"]}}"#, r#""0x1","#.repeat(5000)),
        r#"{"fp48":"zz"}"#.into(),
        r#"{"token":"00","auth":"x","pad":"y"}"#.into(),
    ]
    .into_iter()
    .map(String::into_bytes)
    .chain([
        b"{\"x\":\"\xff\xfe\"}".to_vec(),
        b"{\"x\":\"\xed\xa0\x80\"}".to_vec(),
        b"{\"x\":\"\xc0\x80\"}".to_vec(),
        b"{\"\0\":\"\0\"}".to_vec(),
        vec![0; 1000],
        vec![0xff; 65_535],
    ])
    .collect();
    let mut asked = 0;
    let mut wires = [node.wire().await, Wire::tcp(node.tcp).await, Wire::udp(node.udp).await];
    let lying = [&[0xff, 0xff, b'{'][..], &[0, 5, b'{'], &[0], &[0xff]].map(<[u8]>::to_vec);
    for route in Route::ALL {
        for text in &texts {
            let mut bytes = (text.len() as u16).to_be_bytes().to_vec();
            bytes.extend_from_slice(text);
            asked += answered(&mut wires, *route, &bytes).await;
        }
        for bytes in &lying {
            asked += answered(&mut wires, *route, bytes).await;
        }
    }
    format!("{asked} requests, each with its answer")
}

async fn answered(wires: &mut [Wire], route: Route, payload: &[u8]) -> usize {
    let mut asked = 0;
    for wire in wires {
        if wire.is_udp() && payload.len() > 65_000 {
            continue;
        }
        let sequence = wire.next_sequence();
        let answer = wire.exchange(raw_frame(route.0, sequence, 0, payload)).await;
        assert_eq!((answer.stream_id, answer.sequence), (route.0, sequence), "{answer:?}");
        assert!(matches!(answer.status(), 200 | 204 | 400..=499 | 501), "{answer:?}");
        asked += 1;
    }
    asked
}

/// An IPv4 packet with a UDP datagram, from any sender.
fn packet(from: SocketAddrV4, to: SocketAddrV4, data: &[u8]) -> Vec<u8> {
    let len = (28 + data.len()) as u16;
    let mut out = vec![0x45, 0];
    out.extend_from_slice(&len.to_be_bytes());
    // Identification, fragment, time to live, protocol; the system fills in the checksum, and that of UDP may be left out.
    out.extend_from_slice(&[0, 0, 0, 0, 64, 17, 0, 0]);
    out.extend_from_slice(&from.ip().octets());
    out.extend_from_slice(&to.ip().octets());
    out.extend_from_slice(&from.port().to_be_bytes());
    out.extend_from_slice(&to.port().to_be_bytes());
    out.extend_from_slice(&(len - 20).to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(data);
    out
}

fn v4(address: SocketAddr) -> SocketAddrV4 {
    match address {
        SocketAddr::V4(address) => address,
        SocketAddr::V6(_) => panic!("{address}"),
    }
}

/// Requests from thousands of ports and, where the system lets, from false addresses; among them those of another station,
/// and replies that come back as requests.
async fn senders(node: &Guarded) -> String {
    let frame = |sequence| request(Route::FORWARD, sequence, r#"{"in":"ids","out":"token"}"#, &ids(&[3]));
    for n in 0..2000 {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let _ = socket.send_to(&frame(n), node.udp).await;
        let _ = socket.send_to(&request(Route::HELLO, n, "", &[]), node.udp).await;
        if n % 50 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    // A reply that is sent back is no request, on no carrier.
    let before = node.health().await;
    let mut wire = Wire::udp(node.udp).await;
    let sequence = wire.next_sequence();
    wire.send(&[request(Route::HELLO, sequence, "", &[])]).await;
    let reply = wire.receive_raw().await.unwrap();
    let (mut uds, mut tcp) = (node.wire().await, Wire::tcp(node.tcp).await);
    for wire in [&mut wire, &mut uds, &mut tcp] {
        wire.send(&[reply.clone(), reply.clone()]).await;
        let sequence = wire.next_sequence();
        assert_eq!(
            wire.exchange(request(Route::HELLO, sequence, "", &[])).await.sequence,
            sequence,
            "no echo before it"
        );
    }
    let never = |health: &serde_json::Value| health["dropped"]["never_answered"].as_u64().unwrap();
    assert_eq!(never(&node.health().await), never(&before) + 6);
    let Ok(raw) = rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::RAW)) else {
        return "2,000 ports; skipped false addresses: no right to raw sockets".to_owned();
    };
    // Two stations, each of which gets the other's replies as if it had asked.
    let other = Guarded::start("identity:16:1000", 10, &[]).await;
    let send = |from: SocketAddrV4, to: SocketAddr, data: &[u8]| {
        let to = v4(to);
        let sent = sendto(&raw, &packet(from, to, data), SendFlags::empty(), &SocketAddrV4::new(*to.ip(), 0));
        assert!(sent.is_ok(), "{sent:?}");
    };
    let (a, b) = (other.health().await, node.health().await);
    for n in 0..500 {
        send(v4(node.udp), other.udp, &request(Route::HELLO, n, "", &[]));
        send(v4(node.udp), other.udp, &request(Route::FORWARD, n, "{", &[0; 64]));
        if n % 20 == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    until("every reply has reached the other station", async || never(&node.health().await) >= never(&b) + 1000).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let again = other.health().await;
    assert_eq!(never(&node.health().await), never(&b) + 1000, "they bounce");
    assert_eq!(never(&again), never(&a), "they bounce");
    // What asks there are the thousand and these questions for HEALTH.
    let asked = again["requests"].as_u64().unwrap() - a["requests"].as_u64().unwrap();
    assert!((1000..1010).contains(&asked), "{asked} requests");
    // False senders within and without the list: nobody reads the replies, or none are sent.
    for n in 0..20_000_u32 {
        let address = Ipv4Addr::new(127, (n >> 8) as u8, n as u8, 1);
        let from =
            SocketAddrV4::new(if n % 4 == 0 { Ipv4Addr::new(10, 9, 8, n as u8) } else { address }, 4000 + n as u16);
        let frame = if n % 10 == 0 { frame(n) } else { request(Route::HELLO, n, "", &[]) };
        send(from, node.udp, &frame);
        if n % 100 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    other.stop();
    "2,000 ports, 20,000 false addresses, 1,000 replies to another station".to_owned()
}

/// Thousands of shards and captures, over the budgets of both many times.
async fn caches(node: &Guarded) -> String {
    let mut wire = node.wire().await;
    let value = "v".repeat(40_000);
    let mut captures = 0;
    for n in 0..2000 {
        let meta = format!(r#"{{"shard":"s{}","key":"k{n}","value":"{value}"}}"#, n % 7);
        assert_eq!(wire.ask(Route::SHARD_PUT, &meta, &[]).await.status(), 200);
        // The tail alone and, which is refused, with a slab of a wrong size.
        for slab in [0, 20_000] {
            let envelope = encode_amplituhedron_capture(n, 1 + n as u32 % 1000, 0, 6, &[0.5; 128], &vec![1.0; slab]);
            let status = wire.ask(Route::AMPLITUHEDRON_CAPTURE, "", &envelope).await.status();
            captures += u32::from(status == 200);
            assert!([200, 400].contains(&status), "{status}");
        }
    }
    format!("2,000 shards, {captures} captures taken")
}

/// Slow headers, bodies that never come, lengths beyond all bounds, many connections.
async fn http(node: &Guarded) -> String {
    let mut open = Vec::new();
    for n in 0..600 {
        let mut stream = TcpStream::connect(node.http).await.unwrap();
        let post = "POST /amplituhedron/capture HTTP/1.1\r\nHost: x\r\n";
        let text = match n % 6 {
            0 => "GET /li".to_owned(),
            1 => format!("{post}X: {}", "y".repeat(100_000)),
            2 => format!("{post}Content-Length: 16000000\r\n\r\nhalf"),
            3 => format!("{post}Content-Length: 99999999999999999999\r\n\r\n"),
            4 => format!("{post}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx"),
            _ => format!("{post}Content-Length: 18446744073709551615\r\nExpect: 100-continue\r\n\r\n"),
        };
        let _ = timeout(Duration::from_millis(20), stream.write_all(text.as_bytes())).await;
        open.push(stream);
    }
    let mut stream = TcpStream::connect(node.http).await.unwrap();
    stream.write_all(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    within("/live", stream.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // Large bodies, whole, side by side: each is read and refused.
    let mut tasks = JoinSet::new();
    let body = Arc::new(vec![7_u8; 8_000_000]);
    for _ in 0..20 {
        let mut stream = TcpStream::connect(node.http).await.unwrap();
        let body = Arc::clone(&body);
        tasks.spawn(async move {
            let head =
                format!("POST /amplituhedron/capture HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
            let sent = async {
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(&body).await
            };
            let _ = timeout(Duration::from_secs(10), sent).await;
        });
    }
    tasks.join_all().await;
    format!("{} connections", open.len() + 21)
}

/// Two hundred thousand sessions, one request each, half of them over UDP.
async fn sessions(node: &Guarded) -> String {
    const EACH: u32 = 50_000;
    let begin = |n: u32, who: u32| {
        request(Route::FORWARD, n, &format!(r#"{{"session":"s{who}-{n}","pos":0,"in":"ids"}}"#), &ids(&[n % 1000]))
    };
    let mut tasks = JoinSet::new();
    for who in 0..2 {
        let mut wire = if who == 0 { node.wire().await } else { Wire::tcp(node.tcp).await };
        tasks.spawn(async move {
            for first in (0..EACH).step_by(500) {
                wire.send(&(first..first + 500).map(|n| begin(n, who)).collect::<Vec<_>>()).await;
                for _ in 0..500 {
                    assert_eq!(wire.receive().await.unwrap().status(), 200);
                }
            }
            u64::from(EACH)
        });
    }
    for who in 2..4 {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(node.udp).await.unwrap();
        tasks.spawn(async move {
            let mut buffer = vec![0; 2048];
            let mut answered = 0;
            for first in (0..EACH).step_by(50) {
                for n in first..first + 50 {
                    socket.send(&begin(n, who)).await.unwrap();
                }
                for _ in 0..50 {
                    match timeout(Duration::from_millis(200), socket.recv(&mut buffer)).await {
                        Ok(Ok(_)) => answered += 1,
                        _ => break,
                    }
                }
            }
            answered
        });
    }
    let answered: u64 = tasks.join_all().await.into_iter().sum();
    let health = node.health().await;
    assert!(health["sessions"].as_u64().unwrap() <= 1000, "{health}");
    format!("{answered} of {} answered", 4 * EACH)
}
