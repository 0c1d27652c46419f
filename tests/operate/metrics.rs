//! Real traffic through a station, and the figures that come out.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use aeon_proto::{bwah::encode_amplituhedron_capture, route::Route};
use aeon_station::station::Exposition;
use serde_json::json;

use crate::{
    common::{
        Lab, floats, ids,
        slow::{SlowLab, SlowOptions},
        until,
        wire::{Wire, raw_frame, request},
    },
    support::{ask, lab},
    toy,
};

/// Samples by their whole name with labels, as they stand in the text.
#[derive(Debug)]
pub(crate) struct Samples(BTreeMap<String, f64>);

impl Samples {
    pub(crate) fn read(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        };
        let samples: Vec<(String, f64)> = lines.map(sample).collect();
        let count = samples.len();
        let samples = Self(samples.into_iter().collect());
        assert_eq!(samples.0.len(), count, "a sample stands there twice");
        samples
    }

    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.0.keys().map(|name| name.split('{').next().unwrap().to_owned()).collect()
    }

    #[track_caller]
    fn is(&self, name: &str, value: f64) {
        assert_eq!(self.0.get(name), Some(&value), "{name}");
    }

    fn with(&self, part: &str) -> Vec<(&str, f64)> {
        self.0.iter().filter(|(name, _)| name.contains(part)).map(|(name, value)| (&**name, *value)).collect()
    }
}

async fn scrape(address: SocketAddr) -> Samples {
    let answer = ask(address, "GET /metrics").await;
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"), "{}", answer.head);
    Samples::read(&answer.text)
}

/// Both forms, judged by a parser that is not ours.
fn judge(prometheus: &str, openmetrics: &str) {
    openmetrics_parser::prometheus::parse_prometheus(prometheus).unwrap();
    openmetrics_parser::openmetrics::parse_openmetrics(openmetrics).unwrap();
    for line in prometheus.lines().filter(|line| line.starts_with("# HELP")) {
        assert!(line.len() > 30 && line.ends_with('.'), "a help text: {line}");
    }
}

fn http(lab: &Lab) -> SocketAddr {
    lab.node.http().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traffic_is_counted_by_route_status_carrier_and_kind() {
    let lab = lab(|_| ()).await;
    let before = scrape(http(&lab)).await;
    before.is(r#"aeon_requests_total{route="FORWARD",status="200"}"#, 0.0);
    before.is("aeon_open_connections", 0.0);
    let (mut uds, mut tcp, mut udp) =
        (Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp()).await, Wire::udp(lab.udp()).await);
    let three = floats(&[1.0; 24]);
    let frame = request(Route::FORWARD, 1, r#"{"session":"s"}"#, &three);
    let reply = uds.exchange(frame.clone()).await;
    assert_eq!(reply.status(), 200);
    tcp.ask(Route::FORWARD, r#"{"in":"ids"}"#, &ids(&[1, 2])).await.ok();
    udp.ask(Route::LM_HEAD, "", &floats(&[2.0; 8])).await.ok();
    udp.ask(Route::LM_HEAD, r#"{"return":"topk","top_k":2}"#, &floats(&[2.0; 8])).await.ok();
    // Faults: a bad body, an unknown route, a position that is not the next.
    assert_eq!(uds.ask(Route::FORWARD, "", &[0; 5]).await.status(), 400);
    assert_eq!(uds.ask(Route(0x1234), "", &[]).await.status(), 404);
    assert_eq!(uds.ask(Route::FORWARD, r#"{"session":"s","pos":9}"#, &three).await.status(), 409);
    // Dropped: an empty request, a response, a datagram that is no frame.
    uds.send(&[raw_frame(3, 7, 0, &[]), raw_frame(3, 7, 0x30, b"x")]).await;
    udp.send_raw(b"no frame").await.unwrap();
    until("all was dropped", async || {
        let health = lab.health().await;
        health["dropped"]["empty"] == 1 && health["dropped"]["undecodable"] == 1
    })
    .await;
    let after = scrape(http(&lab)).await;
    for (route, status, count) in [
        ("FORWARD", "200", 2.0),
        ("FORWARD", "400", 1.0),
        ("FORWARD", "409", 1.0),
        ("LM_HEAD", "200", 2.0),
        ("other", "404", 1.0),
    ] {
        after.is(&format!(r#"aeon_requests_total{{route="{route}",status="{status}"}}"#), count);
    }
    for (direction, carrier, kind, bytes) in [
        ("in", "unix", "f32", 96.0 + 5.0 + 96.0),
        ("out", "unix", "f32", 96.0),
        ("in", "tcp", "u32", 8.0),
        ("out", "tcp", "f32", 64.0),
        ("in", "udp", "f32", 64.0),
        ("out", "udp", "u32", 4.0),
        ("out", "udp", "topk", 16.0),
        ("out", "udp", "pcar", 0.0),
    ] {
        let name = format!(r#"aeon_body_bytes_total{{direction="{direction}",carrier="{carrier}",kind="{kind}"}}"#);
        after.is(&name, bytes);
    }
    let tcp_frame = request(Route::FORWARD, 1, r#"{"in":"ids"}"#, &ids(&[1, 2])).len() as f64;
    after.is(r#"aeon_frame_bytes_total{direction="in",carrier="tcp"}"#, tcp_frame);
    after.is("aeon_positions_total", 5.0);
    after.is("aeon_sessions", 1.0);
    assert!(after.0["aeon_session_bytes"] > 0.0);
    after.is(r#"aeon_faults_total{fault="position"}"#, 1.0);
    after.is(r#"aeon_faults_total{fault="not_here"}"#, 1.0);
    after.is(r#"aeon_faults_total{fault="bad_request"}"#, 1.0);
    for reason in ["empty", "never_answered", "undecodable"] {
        after.is(&format!(r#"aeon_dropped_frames_total{{reason="{reason}"}}"#), 1.0);
    }
    after.is(r#"aeon_stage_duration_seconds_count{stage="compute"}"#, 4.0);
    after.is(r#"aeon_stage_duration_seconds_count{stage="queue"}"#, 4.0);
    after.is(r#"aeon_stage_duration_seconds_count{stage="lift"}"#, 0.0);
    after.is(r#"aeon_request_duration_seconds_count{route="FORWARD"}"#, 4.0);
    assert!(after.0[r#"aeon_stage_duration_seconds_count{stage="write"}"#] >= 7.0);
    assert!(after.0[r#"aeon_request_duration_seconds_sum{route="FORWARD"}"#] > 0.0);
    assert!(after.0["aeon_open_connections"] >= 2.0);
    assert_eq!(after.with("aeon_model_info").len(), 1);
    assert!(after.with("aeon_model_info")[0].0.contains(r#"layers="0..1""#));
    drop((uds, tcp));
    until("connections have ended", async || scrape(http(&lab)).await.0["aeon_open_connections"] == 0.0).await;
    lab.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn components_are_counted_with_what_they_save_and_each_412_with_its_reason() {
    let folder = toy::folder(&["a"]);
    let lab = lab(|settings| settings.model.bases = Some(folder.path().to_owned())).await;
    let mut wire = Wire::uds(&lab.uds).await;
    let fp = aeon_proto::hash::fnv1a32(&toy::basis("a"));
    let accept = format!(r#"{{"accept":["pcar"],"accept_basis":["0x{fp:08x}"],"accept_k":1}}"#);
    let answer = wire.ask(Route::EMBED, &accept, &ids(&[1, 2, 3])).await;
    assert_eq!(answer.meta["body"], "pcar", "{answer:?}");
    // 24 + 4 bytes a position in place of 32.
    assert_eq!(answer.body.len(), 3 * 28);
    wire.ask(Route::FORWARD_PCA, "", &answer.body).await.ok();
    let mut unknown = answer.body.clone();
    for row in unknown.chunks_mut(28) {
        row[20..24].copy_from_slice(&[1, 2, 3, 4]);
    }
    let refused = wire.ask(Route::FORWARD_PCA, "", &unknown).await;
    assert_eq!(refused.status(), 412, "{refused:?}");
    let after = scrape(http(&lab)).await;
    after.is(r#"aeon_compression_saved_bytes_total{direction="out"}"#, 12.0);
    after.is(r#"aeon_compression_saved_bytes_total{direction="in"}"#, 12.0);
    after.is(r#"aeon_body_bytes_total{direction="out",carrier="unix",kind="pcar"}"#, 84.0);
    after.is(r#"aeon_body_bytes_total{direction="in",carrier="unix",kind="pcar"}"#, 168.0);
    after.is(r#"aeon_stage_duration_seconds_count{stage="lift"}"#, 1.0);
    after.is(r#"aeon_requests_total{route="FORWARD_PCA",status="412"}"#, 1.0);
    after.is(r#"aeon_raw_fallbacks_total{reason="unknown_basis"}"#, 1.0);
    let basis = after.with("aeon_basis_info");
    assert!(basis.len() == 1 && basis[0].0.contains(&format!(r#"basis_fp="0x{fp:08x}""#)), "{basis:?}");
    let methodology = after.with("aeon_methodology_info");
    assert!(methodology.len() == 1 && methodology[0].0.contains(r#"name="toy""#), "{methodology:?}");
    lab.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replay_hits_and_misses_and_what_is_held() {
    let lab = lab(|_| ()).await;
    let mut wire = Wire::uds(&lab.uds).await;
    let key = json!({"prefix_hash": "0x0000000000000007", "prefix_len": 5, "layer_lo": 0, "layer_hi": 1}).to_string();
    assert_eq!(wire.ask(Route::AMPLITUHEDRON_REPLAY, &key, &[]).await.status(), 204);
    let envelope = encode_amplituhedron_capture(7, 5, 0, 1, &[0.5; 8], &[]);
    wire.ask(Route::AMPLITUHEDRON_CAPTURE, "", &envelope).await.ok();
    let hit = wire.ask(Route::AMPLITUHEDRON_REPLAY, &key, &[]).await;
    let hit_len = hit.body.len() as f64;
    hit.ok();
    let after = scrape(http(&lab)).await;
    after.is("aeon_replay_hits_total", 1.0);
    after.is("aeon_replay_misses_total", 1.0);
    after.is("aeon_replay_captures_total", 1.0);
    after.is("aeon_replay_entries", 1.0);
    assert!(after.0["aeon_replay_bytes"] >= 32.0);
    after.is(r#"aeon_requests_total{route="AMPLITUHEDRON_REPLAY",status="204"}"#, 1.0);
    after.is(r#"aeon_requests_total{route="AMPLITUHEDRON_REPLAY",status="200"}"#, 1.0);
    after.is(r#"aeon_body_bytes_total{direction="in",carrier="unix",kind="bwah"}"#, envelope.len() as f64);
    after.is(r#"aeon_body_bytes_total{direction="out",carrier="unix",kind="bwah"}"#, hit_len);
    lab.node.stop().await;
}

/// What a request that is stuck looks like while it is stuck.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_oldest_request_in_flight_grows_old() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let metrics = || Samples::read(&lab.station.metrics(Exposition::Prometheus).unwrap());
    metrics().is("aeon_oldest_in_flight_seconds", 0.0);
    let mut wire = Wire::uds(&lab.uds).await;
    wire.send(&[1, 2].map(|n| request(Route::FORWARD, n, "", &floats(&[n as f32, 0.0])))).await;
    lab.control.until_begun(1).await;
    until("both are in flight", async || metrics().0["aeon_in_flight"] == 2.0).await;
    let young = metrics().0["aeon_oldest_in_flight_seconds"];
    assert!(young > 0.0);
    until("it is older", async || metrics().0["aeon_oldest_in_flight_seconds"] > young).await;
    metrics().is("aeon_queued_requests", 2.0);
    metrics().is(r#"aeon_requests_total{route="FORWARD",status="200"}"#, 0.0);
    lab.control.open();
    for _ in 0..2 {
        assert_eq!(wire.receive().await.unwrap().status(), 200);
    }
    let after = metrics();
    after.is("aeon_in_flight", 0.0);
    after.is("aeon_oldest_in_flight_seconds", 0.0);
    after.is(r#"aeon_requests_total{route="FORWARD",status="200"}"#, 2.0);
}

/// A peer can count up what is there, and make nothing new.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_label_comes_from_a_peer_and_both_forms_are_well_formed() {
    let evil = "evil\"} 1\n# \\";
    let lab = lab(|settings| settings.name = Some(evil.to_owned())).await;
    let mut wire = Wire::uds(&lab.uds).await;
    for (route, session) in (0..60_u16).map(|n| (n * 997, n)) {
        let meta = format!(r#"{{"session":"peer-{session}","trace":"peer-trace","accept":["peer-kind"]}}"#);
        wire.ask(Route(route), &meta, b"peer body").await;
    }
    let plain = ask(http(&lab), "GET /metrics").await;
    let open = ask(http(&lab), "GET /metrics\nAccept: application/openmetrics-text; version=1.0.0").await;
    assert!(open.head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{}", open.head);
    assert!(open.text.ends_with("# EOF\n"));
    judge(&plain.text, &open.text);
    assert!(!plain.text.contains("peer-"), "{}", plain.text);
    let samples = Samples::read(&plain.text);
    assert_eq!(samples.with("aeon_model_info").len(), 1);
    let labels = |key: &str| -> BTreeSet<String> {
        let value = |name: &String| Some(name.split_once(&format!("{key}=\""))?.1.split('"').next()?.to_owned());
        samples.0.keys().filter_map(value).collect()
    };
    assert!(labels("route").len() <= Route::ALL.len() + 1, "{:?}", labels("route"));
    assert!(labels("status").len() <= 16 && labels("carrier").len() == 4 && labels("kind").len() == 15);
    lab.node.stop().await;
}
