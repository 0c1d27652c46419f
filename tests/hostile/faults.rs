//! One test for each fault that hostile peers once found.

use std::{
    io::{Read, Write},
    net::TcpStream as BlockingTcp,
    sync::Arc,
    time::Duration,
};

use aeon_proto::route::Route;
use aeon_station::{
    model::{Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError, ModelInfo, identity::Identity},
    net::{
        connection::ConnectionOptions,
        listener::Acceptor,
        peer::{AllowList, CredentialList},
        shutdown::Shutdown,
        udp::UdpCarrier,
        uds::{self, UdsListener, UdsOptions},
    },
    station::{Station, limits::Limits},
};

use crate::common::{
    Lab, floats, health,
    slow::{SlowLab, SlowOptions},
    until,
    wire::{Wire, prefixed, raw_frame, request},
};

/// An identity model that panics on one token id.
#[derive(Debug)]
struct Fragile(Identity);

const FATAL: u32 = 13;

impl LayerRange for Fragile {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }
    fn is_inline(&self) -> bool {
        true
    }
    fn new_cache(&self) -> Box<dyn Cache> {
        self.0.new_cache()
    }
    fn cache_bytes_per_position(&self) -> usize {
        self.0.cache_bytes_per_position()
    }
    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        assert!(!ids.contains(&FATAL), "expected in this test");
        self.0.embed(ids)
    }
    fn forward(&self, cache: &mut dyn Cache, input: Vec<f32>, cancel: &CancelToken) -> Result<Vec<f32>, ModelError> {
        self.0.forward(cache, input, cancel)
    }
    fn head(&self, residuals: &[f32], head: Head, cancel: &CancelToken) -> Result<HeadOutput, ModelError> {
        self.0.head(residuals, head, cancel)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_an_inline_backend_costs_only_its_own_request() {
    let model = Fragile(Identity::new(2, 100));
    let station = Arc::new(Station::new("fragile".into(), Arc::new(model), Limits::default(), 1).unwrap());
    let shutdown = Shutdown::default();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let socket = uds::bind(&path, &UdsOptions::default()).unwrap();
    let acceptor = Acceptor::new(Arc::clone(&station), ConnectionOptions::default(), false, 10, shutdown.clone());
    shutdown.spawn(UdsListener::new(socket, CredentialList::default()).unwrap().run(acceptor));
    let carrier = UdpCarrier::bind(([127, 0, 0, 1], 0).into(), AllowList::default()).unwrap();
    let udp = carrier.local_addr().unwrap();
    shutdown.spawn(carrier.run(Arc::clone(&station), shutdown.clone()));
    for mut wire in [Wire::udp(udp).await, Wire::uds(&path).await] {
        let meta = r#"{"session":"s","pos":0,"in":"ids"}"#;
        for _ in 0..3 {
            let sequence = wire.next_sequence();
            let answer = wire.exchange(request(Route::FORWARD, sequence, meta, &FATAL.to_le_bytes())).await;
            answer.assert_vent(wire.name(), Route::FORWARD.0, sequence, 500);
            // A copy is tried anew: the failed one is not in flight for ever.
            let answer = wire.exchange(request(Route::FORWARD, sequence, meta, &FATAL.to_le_bytes())).await;
            answer.assert_vent(wire.name(), Route::FORWARD.0, sequence, 500);
            assert_eq!(wire.ask(Route::EMBED, "", &7_u32.to_le_bytes()).await.status(), 200);
        }
        assert_eq!(wire.ask(Route::FORWARD, meta, &7_u32.to_le_bytes()).await.status(), 200);
    }
    shutdown.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_datagram_limit_holds_for_requests_too() {
    let lab = Lab::start("identity:8:100", |settings| settings.limits.max_datagram = Some(2000)).await;
    let mut wire = Wire::udp(lab.udp()).await;
    // Header, length and 62 or 63 positions of 32 bytes.
    assert_eq!(wire.ask(Route::LM_HEAD, "", &[0; 62 * 32]).await.status(), 200);
    let answer = wire.ask(Route::LM_HEAD, "", &[0; 63 * 32]).await;
    assert_eq!((answer.status(), answer.meta["max_datagram"].as_u64()), (413, Some(2000)), "{}", answer.text);
    assert_eq!(wire.ask(Route::LM_HEAD, "", &[0; 32]).await.status(), 200);
    assert_eq!(Wire::uds(&lab.uds).await.ask(Route::LM_HEAD, "", &[0; 63 * 32]).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_can_never_fit_is_413_and_costs_nobody_theirs() {
    let lab = Lab::start("demo", |settings| settings.limits.max_session_bytes = Some(400_000)).await;
    for mut wire in lab.wires().await {
        let name = wire.name().replace(' ', "-");
        let meta = |session: &str, pos: usize| {
            format!(r#"{{"session":"{session}-{name}","pos":{pos},"in":"ids","out":"token"}}"#)
        };
        assert_eq!(wire.ask(Route::FORWARD, &meta("small", 0), &[0; 4]).await.status(), 200);
        let answer = wire.ask(Route::FORWARD, &meta("large", 0), &[0; 4 * 1000]).await;
        assert_eq!((answer.status(), answer.meta["max_session_bytes"].as_u64()), (413, Some(400_000)), "{answer:?}");
        assert_eq!(wire.ask(Route::FORWARD, &meta("small", 1), &[0; 4]).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn half_frames_share_a_budget_and_small_ones_always_fit() {
    let lab = Lab::start("identity:32:100", |settings| settings.limits.max_buffered_bytes = Some(1 << 20)).await;
    let mut watch = Wire::uds(&lab.uds).await;
    let mut hogs = Vec::new();
    // Each is a part of a frame of 4 MiB. The first may hold half of what there is, the next half of what is left.
    for (len, fits) in [(300_000, true), (200_000, true), (300_000, false), (100_000, true)] {
        let mut wire = Wire::uds(&lab.uds).await;
        let frame = raw_frame(Route::FORWARD.0, 77, 0, &vec![0; 4 << 20]);
        wire.send_raw(&prefixed(&frame)[..len]).await.unwrap();
        if fits {
            until("the half frame is held", async || {
                health(&mut watch).await["buffered_bytes"].as_u64().unwrap() as usize
                    >= hogs.iter().map(|(len, _)| *len).sum::<usize>() + len
            })
            .await;
            hogs.push((len, wire));
        } else {
            let answer = wire.receive().await.unwrap();
            answer.assert_vent("no room", Route::FORWARD.0, 77, 503);
            assert!(answer.meta["retry_after_ms"].as_u64().unwrap() > 0);
        }
        let answer = watch.ask(Route::FORWARD, "", &floats(&[1.0; 8 * 100])).await;
        assert_eq!(answer.body, floats(&[1.0; 8 * 100]));
    }
    drop(hogs);
    until("all is given back", async || health(&mut watch).await["buffered_bytes"] == 0).await;
    // Alone one may send what takes half of it.
    let body = vec![0; 400_000];
    assert!(watch.ask(Route::FORWARD, "", &body).await.body == body);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_is_given_up_when_memory_is_short() {
    let lab = Lab::start("identity:8:1000", |settings| settings.limits.max_buffered_bytes = Some(4 << 20)).await;
    let mut watch = Wire::uds(&lab.uds).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        // Not TCP, where the system may keep all of it.
        let mut wire = Wire::uds(&lab.uds).await;
        // 1,000 positions: 4 MB of logits for 32 KB.
        let logits = request(Route::LM_HEAD, 1, r#"{"return":"logits"}"#, &[0; 1000 * 32]);
        wire.send(&[logits, request(Route::HELLO, 2, "", &[])]).await;
        silent.push(wire);
        let held = health(&mut watch).await["buffered_bytes"].as_u64().unwrap();
        assert!(held <= 4 << 20, "{held} bytes are held");
    }
    until("those who do not read are given up", async || {
        health(&mut watch).await["connections"].as_u64().unwrap() < 10
    })
    .await;
    assert_eq!(watch.ask(Route::FORWARD, "", &floats(&[1.0; 800])).await.body, floats(&[1.0; 800]));
    drop(silent);
    until("all is given back", async || {
        let health = health(&mut watch).await;
        health["buffered_bytes"] == 0 && health["connections"] == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_takes_from_who_has_most_for_who_has_none() {
    let mut options = SlowOptions::default();
    options.limits.queue.items = 4;
    let lab = SlowLab::start(options).await;
    let forward = |sequence, mark| request(Route::FORWARD, sequence, "", &floats(&[mark, 0.0]));
    let mut hog = Wire::uds(&lab.uds).await;
    hog.send(&[forward(0, 1.0)]).await;
    lab.control.until_begun(1).await;
    hog.send(&[forward(1, 2.0), forward(2, 3.0), forward(3, 4.0), forward(4, 5.0)]).await;
    hog.receive().await.unwrap().assert_vent("the hog's fifth", Route::FORWARD.0, 4, 503);
    let mut small = Wire::udp(lab.udp).await;
    small.send(&[forward(9, 9.0)]).await;
    // The newest of the hog's gives way, and the turn is the other's after the one that runs and the hog's next.
    hog.receive().await.unwrap().assert_vent("the hog's fourth", Route::FORWARD.0, 3, 503);
    lab.control.allow(4);
    assert_eq!(small.receive().await.unwrap().body, floats(&[9.0, 0.0]));
    for sequence in 0..3 {
        assert_eq!(hog.receive().await.unwrap().sequence, sequence);
    }
    assert_eq!(lab.control.finished(), [1.0, 2.0, 9.0, 3.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_request_asks_for_counts_in_the_queue() {
    let mut options = SlowOptions { slow_head: true, ..SlowOptions::default() };
    options.limits.queue.bytes = 10_000;
    let lab = SlowLab::start(options).await;
    let mut wire = Wire::uds(&lab.uds).await;
    // One position is 8 bytes, its logits are 4,000.
    let logits = |sequence| request(Route::LM_HEAD, sequence, r#"{"return":"logits"}"#, &floats(&[1.0, 0.0]));
    wire.send(&[logits(0), logits(1), logits(2)]).await;
    wire.receive().await.unwrap().assert_vent("over the budget", Route::LM_HEAD.0, 2, 503);
    let mut watch = Wire::uds(&lab.uds).await;
    assert_eq!(health(&mut watch).await["queued_bytes"], 8000);
    lab.control.open();
    until("the queue is empty", async || health(&mut watch).await["queued_bytes"] == 0).await;
}

#[tokio::test]
async fn who_sends_without_end_does_not_keep_the_thread() {
    // Everything that serves has one thread here, and the one who sends two of its own.
    let lab = Lab::identity().await;
    let mut flood = BlockingTcp::connect(lab.tcp()).unwrap();
    let (mut replies, end) = (flood.try_clone().unwrap(), flood.try_clone().unwrap());
    let writing = std::thread::spawn(move || {
        let hellos = prefixed(&request(Route::HELLO, 1, "", &[])).repeat(10_000);
        while flood.write_all(&hellos).is_ok() {}
    });
    let reading = std::thread::spawn(move || std::io::copy(&mut replies, &mut std::io::sink()));
    let mut wire = Wire::uds(&lab.uds).await;
    let requests = |health: &serde_json::Value| health["requests"].as_u64().unwrap();
    until("the flood is there", async || requests(&health(&mut wire).await) > 20_000).await;
    let mut most = 0;
    let mut before = requests(&health(&mut wire).await);
    for _ in 0..20 {
        let now = requests(&health(&mut wire).await);
        most = most.max(now - before);
        before = now;
    }
    end.shutdown(std::net::Shutdown::Both).unwrap();
    writing.join().unwrap();
    let _ = reading.join().unwrap();
    // A turn is 64 frames; the question, its answer and the test itself take a few turns each.
    assert!(most < 5_000, "{most} requests were handled while one waited");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_those_open_now() {
    let lab = Lab::identity().await;
    let mut watch = Wire::uds(&lab.uds).await;
    let open: Vec<Wire> = vec![Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp()).await];
    until("three are open", async || health(&mut watch).await["connections"] == 3).await;
    drop(open);
    until("one is left", async || health(&mut watch).await["connections"] == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_uploads_do_not_keep_health_checks_waiting() {
    let lab = Lab::start("identity:8", |settings| {
        settings.listen.http = Some(([127, 0, 0, 1], 0).into());
        settings.limits.frame_timeout = Some(2);
    })
    .await;
    let address = lab.node.http().unwrap();
    let connect = move || {
        let stream = BlockingTcp::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    };
    let uploads: Vec<BlockingTcp> = (0..100)
        .map(|_| {
            let mut stream = connect();
            stream
                .write_all(b"POST /amplituhedron/capture HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx")
                .unwrap();
            stream
        })
        .collect();
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = connect();
        stream.write_all(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let statuses: Vec<String> = uploads
            .into_iter()
            .map(|mut upload| {
                let mut status = [0; 12];
                upload.read_exact(&mut status).unwrap();
                String::from_utf8(status.to_vec()).unwrap()
            })
            .collect();
        (answer, statuses)
    })
    .await
    .unwrap();
    assert!(answer.0.starts_with("HTTP/1.1 200"), "{answer:?}");
    // Who waits for a turn with a body is told, like those who are too slow with it.
    assert!(answer.1.iter().all(|status| ["HTTP/1.1 408", "HTTP/1.1 503"].contains(&&**status)), "{answer:?}");
    assert!(answer.1.iter().any(|status| status == "HTTP/1.1 503"), "{answer:?}");
}
