//! The client library against stations that answer oddly, late or not at all.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aeon_proto::{payload::MetaWriter, route::Route, status::Status};
use aeon_station::{
    client::{Client, ClientError, ClientOptions, StationAddress},
    codec::Framing,
};
use common::{
    Lab, floats, health,
    slow::{SlowLab, SlowOptions},
    until,
    wire::{Wire, payload, prefixed, raw_frame},
    within,
};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UdpSocket, UnixListener},
};
use xxhash_rust::xxh64::xxh64;

fn none(_: &mut MetaWriter<'_, '_>) {}

async fn connect(address: StationAddress) -> Client {
    within("connecting", Client::connect(&address, ClientOptions::default())).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_many_tasks_are_matched_on_every_carrier() {
    let lab = Lab::identity().await;
    for address in [lab.address_uds(), lab.address_tcp(), lab.address_udp()] {
        let client = connect(address).await;
        let tasks = (0..20_u32).map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for n in 0..40 {
                    let body = floats(&[(task * 100 + n) as f32; 8]);
                    assert_eq!(client.request(Route::FORWARD, none, &body).await.unwrap().body, body);
                }
            })
        });
        for task in within("all tasks", futures_util::future::join_all(tasks)).await {
            task.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_dropped_is_withdrawn_at_the_station() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    for address in [
        StationAddress::Unix(lab.uds.clone()),
        StationAddress::Tcp(lab.tcp.to_string()),
        StationAddress::Udp(lab.udp.to_string()),
    ] {
        let client = connect(address).await;
        let begun = lab.control.begun().len();
        let request = tokio::spawn({
            let client = client.clone();
            async move { client.request(Route::FORWARD, none, &floats(&[1.0, 0.0])).await }
        });
        lab.control.until_begun(begun + 1).await;
        request.abort();
        let mut wire = Wire::uds(&lab.uds).await;
        until("the work is gone", async || health(&mut wire).await["queued"] == 0).await;
        assert!(lab.control.finished().is_empty());
        assert!(within("HELLO", client.hello()).await.is_ok(), "the connection goes on");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_ends_ends_its_requests() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let client = connect(StationAddress::Unix(lab.uds.clone())).await;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.request(Route::FORWARD, none, &floats(&[1.0, 0.0])).await }
    });
    lab.control.until_begun(1).await;
    lab.shutdown.kill();
    let error = within("the end", waiting).await.unwrap().unwrap_err();
    assert!(matches!(error, ClientError::Closed { .. }) && error.is_unreachable(), "{error}");
    let error = within("the end", client.request(Route::HELLO, none, &[])).await.unwrap_err();
    assert!(matches!(error, ClientError::Closed { .. }), "{error}");
}

/// A station that answers one request with these bytes, opcode and sequence of the request patched in.
async fn answer_with(reply: impl Fn(u16, u32) -> Vec<u8> + Send + 'static) -> (StationAddress, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut header = [0; 14];
        stream.read_exact(&mut header).await.unwrap();
        let opcode = u16::from_be_bytes([header[4], header[5]]);
        let sequence = u32::from_be_bytes([header[6], header[7], header[8], header[9]]);
        stream.write_all(&reply(opcode, sequence)).await.unwrap();
        // Stays open until the client is done with it.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    (StationAddress::Unix(path), dir)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_are_none_are_errors_and_no_panics() {
    let frame = |flags: u8, payload: Vec<u8>| {
        move |opcode: u16, sequence: u32| prefixed(&raw_frame(opcode, sequence, flags, &payload))
    };
    for (what, bytes) in [
        ("payload of one byte", vec![7]),
        ("meta too long", vec![0xff, 0xff, 0]),
        ("no JSON", payload("nonsense", &[])),
        ("status is a text", payload(r#"{"status":"200"}"#, &[])),
        ("empty", Vec::new()),
    ] {
        let (address, _dir) = answer_with(frame(0x30, bytes)).await;
        let error = within(what, connect(address).await.request(Route::FORWARD, none, &[])).await.unwrap_err();
        assert!(matches!(error, ClientError::BadReply { .. }), "{what}: {error}");
    }
    // The original station's replies may name no status.
    let (address, _dir) = answer_with(frame(0x30, payload("", &[1, 2, 3, 4]))).await;
    let reply = within("raw", connect(address).await.request(Route::LM_HEAD, none, &[])).await.unwrap();
    assert_eq!((reply.status, &reply.body[..]), (Status::OK, &[1, 2, 3, 4][..]));
    let (address, _dir) = answer_with(frame(0x38, payload("", &[]))).await;
    let error = within("raw", connect(address).await.request(Route::LM_HEAD, none, &[])).await.unwrap_err();
    assert_eq!(error.status(), Some(Status::INTERNAL));
    let (address, _dir) =
        answer_with(frame(0x10, payload(r#"{"status":409,"error":"x","expected_pos":7}"#, &[]))).await;
    let error = within("stock", connect(address).await.request(Route::FORWARD, none, &[])).await.unwrap_err();
    assert_eq!((error.status(), error.vent_number("expected_pos")), (Some(Status::CONFLICT), Some(7)));
    // A stream that is no stream of frames ends all requests on it.
    let (address, _dir) = answer_with(|_, _| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()).await;
    let error = within("HTTP", connect(address).await.request(Route::FORWARD, none, &[])).await.unwrap_err();
    assert!(matches!(error, ClientError::Closed { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_never_comes_is_waited_for_so_long() {
    let options = ClientOptions { request_timeout: Duration::from_millis(300), ..ClientOptions::default() };
    let lab = SlowLab::start(SlowOptions::default()).await;
    // A port that swallows everything, and a station that takes its time.
    let hole = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let hole = StationAddress::Udp(hole.local_addr().unwrap().to_string());
    for (address, route) in [
        (StationAddress::Unix(lab.uds.clone()), Route::FORWARD),
        (StationAddress::Udp(lab.udp.to_string()), Route::FORWARD),
    ] {
        let client = Client::connect(&address, options.clone()).await.unwrap();
        let error = within("waiting", client.request(route, none, &floats(&[1.0, 0.0]))).await.unwrap_err();
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
        let mut wire = Wire::uds(&lab.uds).await;
        until("the work is withdrawn", async || health(&mut wire).await["queued"] == 0).await;
    }
    let client = Client::connect(&hole, options).await.unwrap();
    let error = within("waiting", client.hello()).await.unwrap_err();
    assert!(error.is_unreachable(), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_datagram_is_repeated_until_its_answer_comes() {
    let lab = Lab::identity().await;
    // A relay that loses half of all datagrams, each way.
    let relay = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = StationAddress::Udp(relay.local_addr().unwrap().to_string());
    let station = lab.udp();
    let relaying = tokio::spawn(async move {
        let mut buffer = vec![0; 65_536];
        let (mut client, mut count) = (None, 0_u64);
        loop {
            let (len, from) = relay.recv_from(&mut buffer).await.unwrap();
            count += 1;
            if from != station {
                client = Some(from);
            }
            if xxh64(&count.to_le_bytes(), 0).is_multiple_of(2) {
                let to = if from == station { client.unwrap() } else { station };
                relay.send_to(&buffer[..len], to).await.unwrap();
            }
        }
    });
    let options = ClientOptions { first_retry: Duration::from_millis(5), ..ClientOptions::default() };
    let client = Client::connect(&address, options).await.unwrap();
    for pos in 0..30_u64 {
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("session", "lossy").unsigned("pos", pos);
        };
        let body = floats(&[pos as f32; 8]);
        let reply = within("an answer", client.request(Route::FORWARD, meta, &body)).await.unwrap();
        assert_eq!((reply.number("pos"), &reply.body[..]), (Some(pos), &body[..]));
    }
    relaying.abort();
}

/// A relay in front of a UDP station that keeps each datagram for a while, and counts those to the station.
async fn slow_relay(station: SocketAddr, delay: Duration) -> (StationAddress, Arc<AtomicU64>) {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let address = StationAddress::Udp(front.local_addr().unwrap().to_string());
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        let (mut to_station, mut to_client) = (vec![0; 65_536], vec![0; 65_536]);
        let mut client = None;
        loop {
            let (socket, datagram, to) = tokio::select! {
                received = front.recv_from(&mut to_station) => {
                    let (len, from) = received.unwrap();
                    client = Some(from);
                    counted.fetch_add(1, Ordering::Relaxed);
                    (&back, to_station[..len].to_vec(), station)
                }
                received = back.recv(&mut to_client) => {
                    (&front, to_client[..received.unwrap()].to_vec(), client.unwrap())
                }
            };
            let socket = Arc::clone(socket);
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                socket.send_to(&datagram, to).await.unwrap();
            });
        }
    });
    (address, count)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pause_before_a_repetition_follows_the_round_trip() {
    let lab = Lab::identity().await;
    let (address, count) = slow_relay(lab.udp(), Duration::from_millis(60)).await;
    let options = ClientOptions { first_retry: Duration::from_millis(20), ..ClientOptions::default() };
    let client = Client::connect(&address, options).await.unwrap();
    let ask = async || within("an answer", client.request(Route::FORWARD, none, &floats(&[1.0; 8]))).await.unwrap();
    // The first requests are repeated: nothing is known yet, and answers to repeated ones say nothing.
    for _ in 0..8 {
        ask().await;
    }
    let learnt = count.load(Ordering::Relaxed);
    assert!(learnt > 8, "{learnt}");
    for _ in 0..10 {
        ask().await;
    }
    // With pauses from 20 ms each of them would have been sent three times.
    let sent = count.load(Ordering::Relaxed) - learnt;
    assert!((10..20).contains(&sent), "{sent}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_station_is_asked_again_no_sooner_than_it_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let station = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut times = Vec::new();
        for n in 0..4 {
            let mut header = [0; 14];
            stream.read_exact(&mut header).await.unwrap();
            let len = u32::from_be_bytes([0, header[11], header[12], header[13]]) as usize;
            stream.read_exact(&mut vec![0; len]).await.unwrap();
            times.push(Instant::now());
            let sequence = u32::from_be_bytes([header[6], header[7], header[8], header[9]]);
            let meta = r#"{"status":503,"error":"full","retry_after_ms":120}"#;
            let (flags, meta) = if n < 3 { (0x38, meta) } else { (0x30, r#"{"status":200}"#) };
            stream.write_all(&prefixed(&raw_frame(3, sequence, flags, &payload(meta, &[])))).await.unwrap();
        }
        times
    });
    let client = connect(StationAddress::Unix(path)).await;
    within("an answer", client.request(Route::FORWARD, none, &[])).await.unwrap();
    let times = within("the station", station).await.unwrap();
    let pauses: Vec<Duration> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    for (n, pause) in pauses.iter().enumerate() {
        assert!(*pause >= Duration::from_millis(120 << n), "{pauses:?}");
    }
    // One that would have to be waited for longer than anyone waits is the answer.
    let meta = format!(r#"{{"status":503,"error":"full","retry_after_ms":{}}}"#, u64::MAX);
    let reply = move |opcode, sequence| prefixed(&raw_frame(opcode, sequence, 0x38, &payload(&meta, &[])));
    let (address, _dir) = answer_with(reply).await;
    let error = within("a refusal", connect(address).await.request(Route::FORWARD, none, &[])).await.unwrap_err();
    assert_eq!(error.status(), Some(Status::UNAVAILABLE), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_station_that_is_busy_is_not_taken_for_one_that_is_gone() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let options = ClientOptions {
        health_interval: Some(Duration::from_secs(2)),
        request_timeout: Duration::from_secs(6),
        ..ClientOptions::default()
    };
    let addresses = [
        StationAddress::Unix(lab.uds.clone()),
        StationAddress::Tcp(lab.tcp.to_string()),
        StationAddress::Udp(lab.udp.to_string()),
    ];
    let ask = async |address: &StationAddress| {
        let client = Client::connect(address, options.clone()).await.unwrap();
        client.request(Route::FORWARD, none, &floats(&[1.0, 0.0])).await.unwrap_err()
    };
    let errors = futures_util::future::join_all(addresses.iter().map(ask));
    for error in within("all of them", errors).await {
        // Three intervals without the answer, but HEALTH came.
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    }
    // A station that says nothing at all is silent.
    let hole = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let error = within("silence", ask(&StationAddress::Udp(hole.local_addr().unwrap().to_string()))).await;
    assert!(matches!(error, ClientError::Silent { route: Route::FORWARD, .. }), "{error}");
    assert!(error.is_unreachable() && error.to_string().contains("HEALTH"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_station_that_takes_no_connection_is_busy_and_not_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
    listener.listen(0).unwrap();
    let options = ClientOptions { connect_timeout: Duration::from_millis(200), ..ClientOptions::default() };
    let address = StationAddress::Unix(path);
    let mut clients = Vec::new();
    let error = loop {
        match within("connecting", Client::connect(&address, options.clone())).await {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
        assert!(clients.len() < 100);
    };
    assert!(matches!(error, ClientError::Busy { .. }) && error.is_unreachable(), "{error}");
    // One that is taken makes room; whoever waits gets it.
    let started = Instant::now();
    let waiting = tokio::spawn(async move { Client::connect(&address, ClientOptions::default()).await });
    let _taken = tokio::task::spawn_blocking(move || (listener.accept().unwrap(), listener)).await.unwrap();
    assert!(within("connecting", waiting).await.unwrap().is_ok());
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn bare_frames_are_an_option_of_the_client() {
    let lab = Lab::start("identity:8", |settings| settings.listen.bare_frames = Some(true)).await;
    let options = ClientOptions { framing: Framing::Bare, ..ClientOptions::default() };
    let client = Client::connect(&lab.address_tcp(), options).await.unwrap();
    assert_eq!(within("HELLO", client.hello()).await.unwrap().model.hidden_dim, 8);
}
