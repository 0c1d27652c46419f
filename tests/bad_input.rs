//! Bad input on every carrier: each fault gets its status, the connection goes on where it can, and nobody else notices.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use aeon_proto::route::Route;
use common::{
    Bystander, Lab, floats, health, ids, until,
    wire::{Answer, Wire, payload, prefixed, raw_frame, request},
    within,
};
use serde_json::{Value, json};
use xxhash_rust::xxh64::xxh64;

const WIDTH: usize = 8;
const MAX_SEQ: usize = 16;

/// A request that is refused while the connection goes on.
struct Fault {
    name: String,
    route: Route,
    payload: Vec<u8>,
    status: u64,
    field: Option<(&'static str, Value)>,
}

fn raw(name: &str, route: Route, payload: Vec<u8>, status: u64) -> Fault {
    Fault { name: name.to_owned(), route, payload, status, field: None }
}

fn fault(name: &str, route: Route, meta: &str, body: &[u8], status: u64) -> Fault {
    raw(name, route, payload(meta, body), status)
}

impl Fault {
    fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.field = Some((key, value.into()));
        self
    }
}

fn row() -> Vec<u8> {
    floats(&[0.5; WIDTH])
}

fn row_with(value: f32) -> Vec<u8> {
    let mut row = [0.5; WIDTH];
    row[WIDTH - 1] = value;
    floats(&row)
}

fn faults_of_routes_and_meta() -> Vec<Fault> {
    let mut faults = Vec::new();
    for code in [0x0007, 0x0100, 0x7fff, 0xfffe, 0xffff] {
        faults.push(fault("unknown route", Route(code), "", &row(), 404));
    }
    faults.push(fault("route that is not enabled", Route::BASIS_PUT, "", &row(), 501));
    faults.push(fault("unknown route before its meta", Route(0x0007), "{", &row(), 404));
    let mut bad = |name, payload| faults.push(raw(name, Route::FORWARD, payload, 400));
    bad("payload of one byte", vec![0]);
    bad("meta longer than the payload", [&[0, 50][..], b"{}"].concat());
    bad("meta of 65535 bytes announced", vec![0xff, 0xff]);
    bad("meta that is no UTF-8", [&[0, 2][..], &[0xff, 0xfe], &row()].concat());
    let nested = |levels: usize| format!(r#"{{"x":{}{}}}"#, "[".repeat(levels - 1), "]".repeat(levels - 1));
    let too_long = format!(r#"{{"session":"{}"}}"#, "x".repeat(65));
    let metas = [
        "nonsense",
        "{",
        "{}{}",
        "{} x",
        "{\"a\":}",
        "{'a':1}",
        "\u{feff}{}",
        "[]",
        "5",
        "\"x\"",
        "null",
        "true",
        r#"{"a":1,"a":1}"#,
        r#"{"pos":0,"pos":1}"#,
        r#"{"x":{"a":1,"a":2}}"#,
        r#"{"x":[{"a":1,"a":2}]}"#,
        &nested(64),
        &nested(20_000),
        r#"{"pos":"5"}"#,
        r#"{"pos":-1}"#,
        r#"{"pos":1.5}"#,
        r#"{"pos":1e300}"#,
        r#"{"session":""}"#,
        r#"{"session":"a b"}"#,
        r#"{"session":5}"#,
        r#"{"session":"é"}"#,
        &too_long,
        r#"{"deadline_ms":-1}"#,
        r#"{"timing":1}"#,
        r#"{"return":"x"}"#,
        r#"{"in":"x"}"#,
        r#"{"out":"x"}"#,
        r#"{"fp48":"xyz"}"#,
        r#"{"accept":"f32"}"#,
    ];
    for meta in metas {
        let shown: String = meta.chars().take(40).collect();
        faults.push(fault(&format!("meta {shown}"), Route::FORWARD, meta, &row(), 400));
    }
    faults.push(fault("nested meta of HELLO", Route::HELLO, &nested(64), &[], 400));
    faults.push(fault("duplicate key in HEALTH", Route::HEALTH, r#"{"a":1,"a":1}"#, &[], 400));
    faults
}

fn faults_of_bodies() -> Vec<Fault> {
    let ids_in = r#"{"in":"ids"}"#;
    let long = floats(&vec![0.5; WIDTH * (MAX_SEQ + 1)]);
    let mut faults = vec![
        fault("body of 3 bytes", Route::FORWARD, "", &[1, 2, 3], 400),
        fault("body of 6 bytes", Route::EMBED, "", &[0; 6], 400),
        fault("body of 35 bytes", Route::LM_HEAD, "", &[0; 35], 400),
        fault("hidden size", Route::FORWARD, "", &[0; 12], 400).with("hidden_dim", WIDTH),
        fault("hidden size of the head", Route::LM_HEAD, "", &[0; 36], 400).with("hidden_dim", WIDTH),
        fault("token id of 100", Route::EMBED, "", &ids(&[0, 99, 100]), 400).with("vocab", 100),
        fault("token id of 2^32 - 1", Route::FORWARD, ids_in, &ids(&[u32::MAX]), 400).with("vocab", 100),
        fault("too many positions", Route::FORWARD, "", &long, 413).with("max_seq", MAX_SEQ),
        fault("too many positions", Route::LM_HEAD, "", &long, 413).with("max_seq", MAX_SEQ),
        fault("too many ids", Route::EMBED, "", &ids(&[1; MAX_SEQ + 1]), 413).with("max_seq", MAX_SEQ),
        fault("only e4 accepted", Route::FORWARD, r#"{"accept":["e4"]}"#, &row(), 400),
        fault("top_k missing", Route::LM_HEAD, r#"{"return":"topk"}"#, &row(), 400).with("vocab", 100),
        fault("top_k 0", Route::LM_HEAD, r#"{"return":"topk","top_k":0}"#, &row(), 400).with("vocab", 100),
        fault("top_k 101", Route::LM_HEAD, r#"{"return":"topk","top_k":101}"#, &row(), 400).with("vocab", 100),
        fault("top_k 2^32", Route::LM_HEAD, r#"{"return":"topk","top_k":4294967296}"#, &row(), 400),
        fault("wrong fp48", Route::FORWARD, r#"{"fp48":"000000000000"}"#, &row(), 400),
        fault("wrong fp48 of the head", Route::LM_HEAD, r#"{"fp48":"ffffffffffff"}"#, &row(), 400),
    ];
    for (route, meta) in [(Route::FORWARD, ""), (Route::FORWARD, ids_in), (Route::EMBED, ""), (Route::LM_HEAD, "")] {
        faults.push(fault("zero positions", route, meta, &[], 400));
    }
    let metas = ["", r#"{"session":"nan","pos":0}"#, r#"{"out":"token"}"#];
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)] {
        for meta in metas {
            faults.push(fault(&format!("{value} with {meta}"), Route::FORWARD, meta, &row_with(value), 422));
        }
        faults.push(fault(&format!("{value} in the head"), Route::LM_HEAD, "", &row_with(value), 422));
    }
    faults
}

fn faults_of_position_and_order() -> Vec<Fault> {
    let forward = |meta: &str, body: &[u8], status| fault(meta, Route::FORWARD, meta, body, status);
    let over = (1_u64 << 24, u64::MAX);
    vec![
        forward(&format!(r#"{{"session":"c","pos":{}}}"#, over.0), &row(), 413).with("context_len", 1 << 24),
        forward(&format!(r#"{{"session":"c","pos":{}}}"#, over.1), &row(), 413).with("context_len", 1 << 24),
        forward(r#"{"boundary":1}"#, &row(), 409).with("boundary", 0),
        fault("boundary of the head", Route::LM_HEAD, r#"{"boundary":0}"#, &row(), 409).with("boundary", 1),
        fault("boundary of EMBED", Route::EMBED, r#"{"boundary":7}"#, &ids(&[1]), 409).with("boundary", 0),
        forward(r#"{"config_fp":"00000000000000000000000000000000"}"#, &row(), 409),
        forward(r#"{"session":"gap","pos":5}"#, &row(), 409).with("expected_pos", 0),
        forward(r#"{"pos":3}"#, &row(), 409).with("expected_pos", 0),
        forward(r#"{"deadline_ms":0}"#, &row(), 504),
        forward(r#"{"session":"late","pos":0,"deadline_ms":0}"#, &row(), 504),
        fault("no time for EMBED", Route::EMBED, r#"{"deadline_ms":0}"#, &ids(&[1]), 504),
        fault("no time for the head", Route::LM_HEAD, r#"{"deadline_ms":0}"#, &row(), 504),
        fault("RESET without a session", Route::RESET, "", &[], 400),
        // The order of checks: sizes, boundary, pos, finite, deadline.
        forward(r#"{"boundary":1,"pos":3}"#, &[0; 12], 400),
        forward(r#"{"boundary":1,"pos":3}"#, &row(), 409).with("boundary", 0),
        forward(r#"{"pos":3,"deadline_ms":0}"#, &row_with(f32::NAN), 409).with("expected_pos", 0),
        forward(r#"{"session":"gap","pos":3}"#, &row_with(f32::NAN), 409).with("expected_pos", 0),
        forward(r#"{"deadline_ms":0}"#, &row_with(f32::NAN), 422),
        forward(r#"{"session":"nan","pos":0,"deadline_ms":0}"#, &row_with(f32::NAN), 422),
    ]
}

async fn lab() -> Lab {
    Lab::start("identity:8:100", |settings| settings.limits.max_seq = Some(MAX_SEQ)).await
}

/// Sends every fault on every carrier; after each, the same connection and a bystander are served.
async fn check(faults: Vec<Fault>) {
    let lab = lab().await;
    let mut others = [
        Bystander::new(Wire::uds(&lab.uds).await, WIDTH),
        Bystander::new(Wire::tcp(lab.tcp()).await, WIDTH),
        Bystander::new(Wire::udp(lab.udp()).await, WIDTH),
    ];
    let edges = [0, 1, u32::MAX, 0x8000_0000];
    for mut wire in lab.wires().await {
        for (index, fault) in faults.iter().enumerate() {
            // Sequences at the edges come first; UDP senders must not go back, so they go on from there.
            let sequence = match edges.get(index).filter(|_| !wire.is_udp()) {
                Some(sequence) => *sequence,
                None => wire.next_sequence(),
            };
            let what = format!("{} over {}", fault.name, wire.name());
            let answer = wire.exchange(raw_frame(fault.route.0, sequence, 0, &fault.payload)).await;
            answer.assert_vent(&what, fault.route.0, sequence, fault.status);
            if let Some((key, value)) = &fault.field {
                assert_eq!(answer.meta[key], *value, "{what}: {}", answer.text);
            }
            let next = wire.ask(Route::FORWARD, "", &row()).await;
            assert_eq!((next.status(), &next.body), (200, &row()), "after {what}");
            others[index % 3].go_on(&what).await;
        }
    }
    // No fault made a session that holds anything.
    let health = lab.health().await;
    assert_eq!(health["queued"], 0, "{health}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_route_or_meta_is_refused_and_the_connection_goes_on() {
    check(faults_of_routes_and_meta()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_body_is_refused_and_the_connection_goes_on() {
    check(faults_of_bodies()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_is_refused_in_the_order_of_the_checks() {
    check(faults_of_position_and_order()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_over_udp_needs_a_position() {
    let lab = lab().await;
    let mut wire = Wire::udp(lab.udp()).await;
    let sequence = wire.next_sequence();
    let answer = wire.exchange(request(Route::FORWARD, sequence, r#"{"session":"s"}"#, &row())).await;
    answer.assert_vent("no pos", Route::FORWARD.0, sequence, 400);
    let mut wire = Wire::uds(&lab.uds).await;
    assert_eq!(wire.ask(Route::FORWARD, r#"{"session":"s"}"#, &row()).await.ok()["pos"], 0);
    assert_eq!(wire.ask(Route::FORWARD, r#"{"session":"s"}"#, &row()).await.ok()["pos"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_of_an_unknown_session_is_a_success() {
    let lab = lab().await;
    for mut wire in lab.wires().await {
        let answer = wire.ask(Route::RESET, r#"{"session":"never-seen"}"#, &[]).await;
        assert_eq!((answer.flags, answer.text.as_str()), (0x30, r#"{"status":200}"#));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_fp48_is_answered_with_that_of_the_reply() {
    let lab = lab().await;
    let fp48 = |bytes: &[u8]| format!("{:012x}", xxh64(bytes, 0) & 0xffff_ffff_ffff);
    for mut wire in lab.wires().await {
        let meta = format!(r#"{{"fp48":"{}"}}"#, fp48(&row()));
        let answer = wire.ask(Route::FORWARD, &meta, &row()).await;
        assert_eq!(answer.meta["fp48"], fp48(&answer.body));
        assert_eq!(answer.body, row());
        let answer = wire.ask(Route::LM_HEAD, &meta, &row()).await;
        assert_eq!(answer.meta["fp48"], fp48(&answer.body));
    }
}

/// Checks that bytes on a fresh stream get exactly one vent and a closed connection.
async fn check_broken(mut wire: Wire, what: &str, bytes: &[u8], expected: (u64, u16, u32)) -> Answer {
    wire.send_raw(bytes).await.unwrap();
    let answer = wire.receive().await.unwrap_or_else(|| panic!("{what}: a vent before the end"));
    answer.assert_vent(what, expected.1, expected.2, expected.0);
    wire.assert_closed(what).await;
    answer
}

fn with_prefix(prefix: u32, frame: &[u8]) -> Vec<u8> {
    [&prefix.to_be_bytes()[..], frame].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_prefix_gets_one_vent_and_the_connection_is_closed() {
    let lab = Lab::start("identity:8:100", |settings| settings.limits.max_frame = Some(2048)).await;
    let mut other = Bystander::new(Wire::udp(lab.udp()).await, WIDTH);
    let frame = request(Route::FORWARD, 77, "", &row());
    let len = frame.len() as u32;
    let large = request(Route::FORWARD, 78, "", &[0; 4096]);
    let limit = raw_frame(Route::FORWARD.0, 79, 0, &[0; 2048 - 10]);
    for tcp in [false, true] {
        let connect = async || if tcp { Wire::tcp(lab.tcp()).await } else { Wire::uds(&lab.uds).await };
        for prefix in [0, 9] {
            check_broken(connect().await, "too small", &with_prefix(prefix, &frame), (400, 0, 0)).await;
        }
        for prefix in [10, len - 1, len + 1, 2048] {
            check_broken(connect().await, "mismatch", &with_prefix(prefix, &frame), (400, 3, 77)).await;
        }
        for prefix in [2049, 0x0100_0009, u32::MAX] {
            let answer = check_broken(connect().await, "too large", &with_prefix(prefix, &frame), (413, 3, 77)).await;
            assert_eq!(answer.meta["max_frame"], 2048);
        }
        let answer = check_broken(connect().await, "frame over the limit", &prefixed(&large), (413, 3, 78)).await;
        assert_eq!(answer.meta["max_frame"], 2048);
        // A frame at the limit is taken, and what it holds is looked at.
        let mut wire = connect().await;
        wire.exchange(limit.clone()).await.assert_vent("at the limit", 3, 79, 400);
        // Good frames in front of the wrong one are answered first.
        let mut wire = connect().await;
        wire.send_raw(&[prefixed(&frame), with_prefix(3, &[])].concat()).await.unwrap();
        assert_eq!(wire.receive().await.unwrap().status(), 200);
        assert_eq!(wire.receive().await.unwrap().status(), 400);
        wire.assert_closed("after the vent").await;
        other.go_on("a wrong prefix").await;
    }
    assert_eq!(lab.health().await["errors"], 24);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_frame_and_silence_ends_the_connection_with_a_vent() {
    let lab = Lab::start("identity:8:100", |settings| settings.limits.frame_timeout = Some(1)).await;
    let mut other = Bystander::new(Wire::udp(lab.udp()).await, WIDTH);
    let whole = prefixed(&request(Route::FORWARD, 77, "", &row()));
    let mut idle = Wire::uds(&lab.uds).await;
    for (len, stream_id, sequence) in [(1, 0, 0), (4, 0, 0), (13, 0, 0), (14, 3, 77), (whole.len() - 1, 3, 77)] {
        let wires = [Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp()).await];
        let checks = wires.map(|wire| check_broken(wire, "silence", &whole[..len], (400, stream_id, sequence)));
        futures_util::future::join_all(checks).await;
        other.go_on("half a frame").await;
    }
    // A connection on which nothing was begun is not touched by this limit.
    assert_eq!(idle.ask(Route::FORWARD, "", &row()).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_on_the_port_are_turned_away() {
    let edit = |settings: &mut aeon_station::config::Settings| {
        settings.limits.frame_timeout = Some(1);
    };
    let lab = Lab::start("identity:8:100", edit).await;
    let mut other = Bystander::new(Wire::udp(lab.udp()).await, WIDTH);
    let http = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let answer = check_broken(Wire::tcp(lab.tcp()).await, "HTTP", http, (413, 0x2f20, 0x4854_5450)).await;
    assert_eq!(answer.meta["max_frame"], 16_777_225);
    let tls = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 1, 2, 3, 4, 5, 6, 7, 8];
    check_broken(Wire::tcp(lab.tcp()).await, "TLS", &tls, (413, 1, 0x0001_fc03)).await;
    check_broken(Wire::uds(&lab.uds).await, "SSH", b"SSH-2.0-OpenSSH_9.6\r\n", (413, 0x322e, 0x302d_4f70)).await;
    drop(Wire::tcp(lab.tcp()).await);
    for seed in 0..20_u64 {
        // Whatever it is, it ends: by a vent for what cannot be a frame, or by the limit on half frames.
        let noise: Vec<u8> = (0..400_u64).map(|n| (xxh64(&(seed * 1000 + n).to_le_bytes(), 1) & 0xff) as u8).collect();
        let mut wire = if seed % 2 == 0 { Wire::uds(&lab.uds).await } else { Wire::tcp(lab.tcp()).await };
        wire.send_raw(&noise).await.unwrap();
        wire.shutdown().await;
        let mut vents = 0;
        while let Some(answer) = wire.receive().await {
            assert_eq!(answer.flags, 0x38);
            vents += 1;
        }
        assert!(vents <= 2, "noise {seed}");
        let mut wire = Wire::udp(lab.udp()).await;
        wire.send_raw(&noise).await.unwrap();
        other.go_on("noise").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_must_not_be_answered_are_counted_and_dropped() {
    let lab = lab().await;
    let is_request = |flags: u8| flags & !0x50 == 0;
    let is_cancel = |flags: u8| flags & !0x50 == 0x08;
    let requests: Vec<u32> = (0..256_u32).filter(|flags| is_request(*flags as u8)).collect();
    let cancels = (0..=255_u8).filter(|flags| is_cancel(*flags)).count() as u64;
    assert_eq!((requests.len(), cancels), (4, 4));
    for (round, mut wire) in lab.wires().await.into_iter().enumerate() {
        let before = lab.health().await["dropped"].clone();
        let frames: Vec<_> = (0..=255_u8)
            .map(|flags| raw_frame(Route::FORWARD.0, u32::from(flags), flags, &payload("", &row())))
            .collect();
        for frames in frames.chunks(32) {
            wire.send(frames).await;
        }
        // Empty payloads are no requests, whatever the route.
        wire.send(&[raw_frame(3, 300, 0, &[]), raw_frame(0, 301, 0x10, &[]), raw_frame(0x7777, 302, 0, &[])]).await;
        for flags in &requests {
            let answer = wire.receive().await.unwrap();
            assert_eq!((answer.flags, answer.sequence), (0x30, *flags));
        }
        // The next answer is that of the next question: nothing else was said.
        assert_eq!(wire.ask(Route::FORWARD, "", &row()).await.status(), 200);
        let after = lab.health().await["dropped"].clone();
        let grown = |key: &str| after[key].as_u64().unwrap() - before[key].as_u64().unwrap();
        assert_eq!(grown("never_answered"), 256 - 4 - cancels, "round {round}");
        assert_eq!(grown("idle_cancel"), cancels, "round {round}");
        assert_eq!(grown("empty"), 3, "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_datagram_that_is_not_exactly_one_frame_is_counted_and_dropped() {
    let lab = lab().await;
    let mut wire = Wire::udp(lab.udp()).await;
    let mut other = Bystander::new(Wire::udp(lab.udp()).await, WIDTH);
    let good = request(Route::FORWARD, 5, "", &row());
    let mut long_header = good.clone();
    long_header[9] += 50;
    let bad: [&[u8]; 8] = [
        &[],
        &[3],
        &good[..5],
        &good[..9],
        &good[..good.len() - 1],
        &[good.as_slice(), &[0]].concat(),
        &[good.as_slice(), good.as_slice()].concat(),
        &long_header,
    ];
    for (index, datagram) in bad.into_iter().enumerate() {
        wire.send_raw(datagram).await.unwrap();
        other.go_on("a bad datagram").await;
        assert_eq!(wire.ask(Route::FORWARD, "", &row()).await.status(), 200);
        until("the datagram is counted", async || lab.dropped("undecodable").await == index as u64 + 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_fits_no_datagram_is_refused_before_the_work() {
    let lab = Lab::start("identity:4096", |_| ()).await;
    let mut wire = Wire::udp(lab.udp()).await;
    for meta in ["", r#"{"in":"ids","session":"s","pos":0}"#] {
        let route = if meta.is_empty() { Route::EMBED } else { Route::FORWARD };
        let sequence = wire.next_sequence();
        let answer = wire.exchange(request(route, sequence, meta, &ids(&[1, 2, 3, 4]))).await;
        answer.assert_vent("four positions", route.0, sequence, 413);
        assert_eq!(answer.meta["max_datagram"], 65_507);
    }
    // The session is as it was: there is none.
    let gone = wire.ask(Route::FORWARD, r#"{"in":"ids","session":"s","pos":4}"#, &ids(&[1])).await;
    assert_eq!((gone.status(), &gone.meta["expected_pos"]), (409, &json!(0)));
    let answer = wire.ask(Route::FORWARD, r#"{"in":"ids","session":"s","pos":0}"#, &ids(&[1, 2, 3])).await;
    assert_eq!((answer.status(), answer.body.len()), (200, 3 * 4 * 4096));
    let topk = r#"{"return":"topk","top_k":65536}"#;
    let sequence = wire.next_sequence();
    let answer = wire.exchange(request(Route::LM_HEAD, sequence, topk, &answer.body[..4 * 4096])).await;
    answer.assert_vent("half a megabyte", Route::LM_HEAD.0, sequence, 413);
    // A stream has room for it, though not for everything.
    let mut wire = Wire::tcp(lab.tcp()).await;
    assert_eq!(wire.ask(Route::EMBED, "", &ids(&[1, 2, 3, 4])).await.body.len(), 4 * 4 * 4096);
    let answer = wire.ask(Route::EMBED, "", &ids(&[1; 2000])).await;
    assert_eq!((answer.status(), &answer.meta["max_frame"]), (413, &json!(16_777_225)), "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_station_refuses_new_work_with_a_time_to_come_back() {
    let lab = lab().await;
    let mut wires = lab.wires().await;
    for wire in &mut wires {
        let meta = format!(r#"{{"session":"d-{}","pos":0}}"#, wire.name());
        assert_eq!(wire.ask(Route::FORWARD, &meta, &row()).await.status(), 200);
    }
    lab.node.station().drain();
    for wire in &mut wires {
        for (route, body) in [(Route::FORWARD, row()), (Route::LM_HEAD, row()), (Route::EMBED, ids(&[1]))] {
            let sequence = wire.next_sequence();
            let answer = wire.exchange(request(route, sequence, r#"{"deadline_ms":0}"#, &body)).await;
            answer.assert_vent("draining", route.0, sequence, 503);
            assert!(answer.meta["retry_after_ms"].as_u64().unwrap() > 0);
        }
        // Faults of the request come first.
        assert_eq!(wire.ask(Route::FORWARD, "", &[0; 12]).await.status(), 400);
        assert_eq!(wire.ask(Route::FORWARD, "", &row_with(f32::NAN)).await.status(), 422);
        assert_eq!(health(wire).await["draining"], true);
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
        let meta = format!(r#"{{"session":"d-{}"}}"#, wire.name());
        assert_eq!(wire.ask(Route::RESET, &meta, &[]).await.status(), 200);
    }
    within("stopping", lab.node.stop()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bare_frames_meet_the_same_checks() {
    let edit = |settings: &mut aeon_station::config::Settings| {
        settings.listen.bare_frames = Some(true);
        settings.limits.max_seq = Some(MAX_SEQ);
        settings.limits.max_frame = Some(65_536);
        settings.limits.frame_timeout = Some(1);
    };
    let lab = Lab::start("identity:8:100", edit).await;
    let mut wire = Wire::bare_tcp(lab.tcp()).await;
    for fault in faults_of_bodies().into_iter().chain(faults_of_position_and_order()) {
        let sequence = wire.next_sequence();
        let answer = wire.exchange(raw_frame(fault.route.0, sequence, 0, &fault.payload)).await;
        answer.assert_vent(&fault.name, fault.route.0, sequence, fault.status);
        assert_eq!(wire.ask(Route::FORWARD, "", &row()).await.status(), 200);
    }
    let large = request(Route::FORWARD, 7, "", &[0; 70_000]);
    check_broken(Wire::bare_tcp(lab.tcp()).await, "too large", &large, (413, 3, 7)).await;
    let half = &request(Route::FORWARD, 8, "", &row())[..20];
    check_broken(Wire::bare_tcp(lab.tcp()).await, "silence", half, (400, 3, 8)).await;
}
