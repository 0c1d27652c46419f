//! Sessions end to end: rewind, gaps, eviction, order, and clients that recover what a station has lost.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::time::{Duration, Instant};

use aeon_proto::route::Route;
use aeon_station::{
    client::{ClientOptions, Pipeline, StationAddress, Want},
    config::{Config, Settings},
    daemon::Node,
    model::session::SessionLimits,
};
use common::{
    Lab, floats, health, ids,
    slow::{SlowLab, SlowOptions},
    until,
    wire::{Answer, Wire, request},
    within,
};

fn at(name: &str, pos: usize) -> String {
    format!(r#"{{"session":"{name}","pos":{pos},"in":"ids"}}"#)
}

#[track_caller]
fn assert_goes_on_at(answer: &Answer, expected: u64) {
    assert_eq!((answer.status(), answer.meta["expected_pos"].as_u64()), (409, Some(expected)), "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewound_session_computes_the_same_bits() {
    let lab = Lab::start("demo", |settings| settings.model.layers = Some("0..3".into())).await;
    for mut wire in lab.wires().await {
        let name = wire.name().to_owned();
        let mut first = Vec::new();
        for pos in 0..12 {
            first.push(wire.ask(Route::FORWARD, &at(&name, pos), &ids(&[40 + pos as u32])).await.body);
        }
        for (pos, body) in first.iter().enumerate().skip(5) {
            let again = wire.ask(Route::FORWARD, &at(&name, pos), &ids(&[40 + pos as u32])).await;
            assert_eq!(again.body, *body, "{name} at {pos}");
        }
        // The same request twice under two sequences, and after a detour with other tokens.
        let tail = ids(&[60, 61, 62]);
        let one = wire.ask(Route::FORWARD, &at(&name, 12), &tail).await.body;
        wire.ask(Route::FORWARD, &at(&name, 3), &ids(&[9, 9, 9, 9])).await.ok();
        assert_goes_on_at(&wire.ask(Route::FORWARD, &at(&name, 12), &tail).await, 7);
        for pos in 3..12 {
            wire.ask(Route::FORWARD, &at(&name, pos), &ids(&[40 + pos as u32])).await.ok();
        }
        assert_eq!(wire.ask(Route::FORWARD, &at(&name, 12), &tail).await.body, one);
        assert_eq!(wire.ask(Route::FORWARD, &at(&name, 12), &tail).await.body, one);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_names_where_to_go_on_and_streams_append() {
    let lab = Lab::start("identity:2:100", |_| ()).await;
    for mut wire in lab.wires().await {
        let name = wire.name().to_owned();
        assert_goes_on_at(&wire.ask(Route::FORWARD, &at(&name, 1), &ids(&[1])).await, 0);
        wire.ask(Route::FORWARD, &at(&name, 0), &ids(&[1, 2, 3])).await.ok();
        assert_goes_on_at(&wire.ask(Route::FORWARD, &at(&name, 4), &ids(&[1])).await, 3);
        assert_eq!(wire.ask(Route::FORWARD, &at(&name, 3), &ids(&[1])).await.ok()["pos"], 3);
        assert_goes_on_at(&wire.ask(Route::FORWARD, r#"{"pos":1,"in":"ids"}"#, &ids(&[1])).await, 0);
        assert_eq!(wire.ask(Route::FORWARD, r#"{"pos":0,"in":"ids"}"#, &ids(&[1])).await.ok()["pos"], 0);
        if !wire.is_udp() {
            let meta = format!(r#"{{"session":"{name}","in":"ids"}}"#);
            for pos in [4, 5, 6] {
                assert_eq!(wire.ask(Route::FORWARD, &meta, &ids(&[1])).await.ok()["pos"], pos);
            }
        }
    }
    // Sessions belong to the station, not to the connection.
    let mut wire = Wire::tcp(lab.tcp()).await;
    assert_eq!(wire.ask(Route::FORWARD, &at("uds", 7), &ids(&[1])).await.ok()["pos"], 7);
    assert_eq!(wire.ask(Route::RESET, r#"{"session":"udp"}"#, &[]).await.status(), 200);
    assert_goes_on_at(&wire.ask(Route::FORWARD, &at("udp", 4), &ids(&[1])).await, 0);
}

fn open_lab(sessions: SessionLimits) -> SlowOptions {
    let mut options = SlowOptions { is_shut: false, ..SlowOptions::default() };
    options.limits.sessions = sessions;
    options
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread")]
async fn the_session_used_longest_ago_is_dropped_for_a_new_one() {
    let lab = SlowLab::start(open_lab(SessionLimits { count: 2, bytes: 1 << 20, max_idle: HOUR })).await;
    let mut wire = Wire::uds(&lab.uds).await;
    for name in ["a", "b", "a", "c"] {
        let meta = format!(r#"{{"session":"{name}","in":"ids"}}"#);
        wire.ask(Route::FORWARD, &meta, &ids(&[1])).await.ok();
    }
    assert_eq!(health(&mut wire).await["sessions"], 2);
    // b is gone, and so that nobody gets an answer without its history, even an append is told.
    assert_goes_on_at(&wire.ask(Route::FORWARD, &at("b", 1), &ids(&[1])).await, 0);
    assert_goes_on_at(&wire.ask(Route::FORWARD, r#"{"session":"b","in":"ids"}"#, &ids(&[1])).await, 0);
    assert_eq!(wire.ask(Route::FORWARD, &at("a", 2), &ids(&[1])).await.ok()["pos"], 2);
    assert_eq!(wire.ask(Route::FORWARD, &at("b", 0), &ids(&[1])).await.ok()["pos"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_stay_within_their_budget_of_bytes() {
    // 100 bytes a position and some for the session: room for two sessions of 50 positions, not for three.
    let lab = SlowLab::start(open_lab(SessionLimits { count: 100, bytes: 14_000, max_idle: HOUR })).await;
    let mut wire = Wire::uds(&lab.uds).await;
    for name in ["a", "b", "c"] {
        wire.ask(Route::FORWARD, &at(name, 0), &ids(&[1; 50])).await.ok();
        assert!(health(&mut wire).await["session_bytes"].as_u64().unwrap() <= 14_000);
    }
    assert_goes_on_at(&wire.ask(Route::FORWARD, &at("a", 50), &ids(&[1])).await, 0);
    assert_eq!(wire.ask(Route::FORWARD, &at("b", 50), &ids(&[1])).await.ok()["pos"], 50);
    // More than the whole budget is refused, and what is there stays.
    let sequence = wire.next_sequence();
    let answer = wire.exchange(request(Route::FORWARD, sequence, &at("b", 51), &ids(&[1; 200]))).await;
    answer.assert_vent("over the budget", Route::FORWARD.0, sequence, 413);
    assert_eq!(answer.meta["max_session_bytes"], 14_000);
    assert_eq!(wire.ask(Route::FORWARD, &at("c", 50), &ids(&[1])).await.ok()["pos"], 50);
    assert_eq!(wire.ask(Route::FORWARD, &at("b", 51), &ids(&[1])).await.ok()["pos"], 51);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_expire_by_age_and_say_so() {
    let lab = SlowLab::start(open_lab(SessionLimits { count: 100, bytes: 1 << 20, max_idle: HOUR })).await;
    let mut wire = Wire::uds(&lab.uds).await;
    wire.ask(Route::FORWARD, &at("old", 0), &ids(&[1, 2])).await.ok();
    assert_eq!(lab.station.expire_sessions(Instant::now() + HOUR / 2), 0);
    assert_eq!(lab.station.expire_sessions(Instant::now() + HOUR), 1);
    assert_goes_on_at(&wire.ask(Route::FORWARD, &at("old", 2), &ids(&[1])).await, 0);
    assert_eq!(health(&mut wire).await["sessions"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_session_runs_in_order_while_others_run_beside_it() {
    let lab = SlowLab::start(SlowOptions { workers: 2, ..SlowOptions::default() }).await;
    let mut wire = Wire::uds(&lab.uds).await;
    let forward = |sequence: u32, name: &str, pos: usize, mark: f32| {
        let meta = format!(r#"{{"session":"{name}","pos":{pos}}}"#);
        request(Route::FORWARD, sequence, &meta, &floats(&[mark, 0.0]))
    };
    let frames: Vec<_> = (0..6).map(|n| forward(n, "a", n as usize, n as f32)).collect();
    wire.send(&frames).await;
    wire.send(&[forward(100, "b", 0, 100.0)]).await;
    lab.control.until_begun(2).await;
    let mut begun = lab.control.begun();
    begun.sort_by(f32::total_cmp);
    assert_eq!(begun, [0.0, 100.0], "one of each session");
    lab.control.open();
    let mut of_a = Vec::new();
    for _ in 0..7 {
        let answer = wire.receive().await.unwrap();
        assert_eq!(answer.status(), 200, "{}", answer.text);
        of_a.extend(Some(answer.sequence).filter(|sequence| *sequence < 100));
    }
    assert_eq!(of_a, [0, 1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_waits_for_what_was_asked_before_it() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let mut wire = Wire::uds(&lab.uds).await;
    let body = floats(&[1.0, 0.0]);
    // The one worker is busy, so the session of the second request is not made yet when the RESET comes.
    wire.send(&[request(Route::FORWARD, 1, "", &body)]).await;
    lab.control.until_begun(1).await;
    wire.send(&[
        request(Route::FORWARD, 2, r#"{"session":"s","pos":0}"#, &body),
        request(Route::RESET, 3, r#"{"session":"s"}"#, &[]),
        request(Route::HELLO, 4, "", &[]),
    ])
    .await;
    assert_eq!(wire.receive().await.unwrap().sequence, 4);
    lab.control.open();
    for sequence in [1, 2, 3] {
        let answer = wire.receive().await.unwrap();
        assert_eq!((answer.sequence, answer.status()), (sequence, 200));
    }
    assert_eq!(health(&mut wire).await["sessions"], 0);
}

/// Two stations with the demo model in two parts; the listeners of both can be chosen.
struct Mesh {
    settings: Vec<Settings>,
    nodes: Vec<Option<Node>>,
    addresses: Vec<StationAddress>,
    _dir: tempfile::TempDir,
}

impl Mesh {
    async fn start(carriers: [&str; 2]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut mesh = Self { settings: Vec::new(), nodes: Vec::new(), addresses: Vec::new(), _dir: dir };
        for (carrier, layers) in carriers.into_iter().zip(["0..2", "2..6"]) {
            let mut settings = Settings::default();
            settings.model.layers = Some(layers.to_owned());
            let socket = mesh._dir.path().join(layers);
            match carrier {
                "uds" => settings.listen.uds = Some(socket.clone()),
                "tcp" => settings.listen.tcp = Some(([127, 0, 0, 1], 0).into()),
                _ => settings.listen.udp = Some(([127, 0, 0, 1], 0).into()),
            }
            let node = Node::start(&Config::try_from(settings.clone()).unwrap()).await.unwrap();
            // A node that is started again listens where it did before.
            (settings.listen.tcp, settings.listen.udp) = (node.tcp(), node.udp());
            mesh.addresses.push(match (node.tcp(), node.udp()) {
                (Some(address), _) => StationAddress::Tcp(address.to_string()),
                (_, Some(address)) => StationAddress::Udp(address.to_string()),
                _ => StationAddress::Unix(socket),
            });
            mesh.settings.push(settings);
            mesh.nodes.push(Some(node));
        }
        mesh
    }

    fn lose_sessions(&self, index: usize) {
        let station = self.nodes[index].as_ref().unwrap().station();
        assert!(station.expire_sessions(Instant::now() + 2 * HOUR) > 0);
    }

    async fn restart(&mut self, index: usize) {
        within("stopping", self.nodes[index].take().unwrap().stop()).await;
        let config = Config::try_from(self.settings[index].clone()).unwrap();
        self.nodes[index] = Some(Node::start(&config).await.unwrap());
    }

    /// Greedy tokens; `between` is called before each step.
    async fn tokens(&mut self, mut between: impl AsyncFnMut(&mut Self, usize)) -> Vec<u32> {
        let mut pipeline = Pipeline::connect(&self.addresses, &ClientOptions::default()).await.unwrap();
        let mut input = vec![0, 70, 80, 90, 100];
        let mut tokens = Vec::new();
        for step in 0..16 {
            between(self, step).await;
            let next = within("a step", pipeline.extend(&input, Want::Token)).await.unwrap();
            tokens.push(next.ids[0]);
            input = next.ids;
        }
        tokens
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_session_does_not_change_the_tokens() {
    for carriers in [["uds", "udp"], ["udp", "tcp"]] {
        let mut mesh = Mesh::start(carriers).await;
        let undisturbed = mesh.tokens(async |_, _| ()).await;
        let disturbed = mesh
            .tokens(async |mesh, step| match step {
                3 => mesh.lose_sessions(1),
                7 => mesh.lose_sessions(0),
                11 => (0..2).for_each(|index| mesh.lose_sessions(index)),
                _ => {}
            })
            .await;
        assert_eq!(disturbed, undisturbed, "{carriers:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_station_does_not_change_the_tokens() {
    for carriers in [["uds", "udp"], ["tcp", "uds"]] {
        let mut mesh = Mesh::start(carriers).await;
        let undisturbed = mesh.tokens(async |_, _| ()).await;
        let disturbed = mesh
            .tokens(async |mesh, step| match step {
                4 => mesh.restart(0).await,
                9 => mesh.restart(1).await,
                _ => {}
            })
            .await;
        assert_eq!(disturbed, undisturbed, "{carriers:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_many_clients_do_not_mix() {
    let lab = Lab::start("demo", |settings| settings.model.layers = Some("0..1".into())).await;
    let mut alone = Wire::uds(&lab.uds).await;
    let mut expected = Vec::new();
    for client in 0..6_u32 {
        let tokens: Vec<u32> = (0..10).map(|n| (client * 31 + n * 7) % 1024).collect();
        let mut bodies = Vec::new();
        for (pos, token) in tokens.iter().enumerate() {
            bodies.push(alone.ask(Route::FORWARD, &at(&format!("alone-{client}"), pos), &ids(&[*token])).await.body);
        }
        expected.push((tokens, bodies));
    }
    let mut tasks = Vec::new();
    for (client, (tokens, bodies)) in expected.into_iter().enumerate() {
        let mut wire = lab.wires().await.swap_remove(client % 3);
        tasks.push(tokio::spawn(async move {
            for (pos, (token, body)) in tokens.iter().zip(bodies).enumerate() {
                let answer = wire.ask(Route::FORWARD, &at(&format!("mixed-{client}"), pos), &ids(&[*token])).await;
                assert_eq!(answer.body, body, "client {client} at {pos}");
            }
        }));
    }
    for task in tasks {
        within("a client", task).await.unwrap();
    }
    until("no work is left", async || lab.health().await["queued"] == 0).await;
}
