//! A station dies in the middle of a text: killed, stopped, or cut off from the network, on every carrier, with and
//! without a standby.

use std::time::{Duration, Instant};

use aeon_station::client::{
    ClientError, ClientOptions, Pipeline, StationAddress,
    generate::{GenerateOptions, generate, resume},
    sampler::Sampling,
};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{
    links::{Lab, options, prompt, tokens},
    process::{Station, place},
};

/// Long enough for a station on a crowded machine to answer HEALTH in, short enough to wait for.
const INTERVAL: Duration = Duration::from_secs(3);
const PARTS: [&str; 3] = ["0..2", "2..4", "4..6"];
/// The one that dies, from 0.
const VICTIM: usize = 1;
const TOKENS: usize = 24;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Death {
    Killed,
    Stopped,
}

fn client() -> ClientOptions {
    ClientOptions { health_interval: Some(INTERVAL), ..ClientOptions::default() }
}

/// A mesh of three processes and a standby for the middle one.
struct Mesh {
    stations: Vec<Station>,
    standby: Station,
    _dir: TempDir,
}

impl Mesh {
    fn start(carrier: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start = |layers: &str, name: &str| Station::start("demo", Some(layers), &place(carrier, &dir, name), None);
        let stations = PARTS.iter().map(|layers| start(layers, layers)).collect();
        Self { stations, standby: start(PARTS[VICTIM], "standby"), _dir: dir }
    }

    fn addresses(&self) -> Vec<StationAddress> {
        self.stations.iter().map(|station| station.address.clone()).collect()
    }

    fn kill(&mut self, death: Death) {
        let victim = &mut self.stations[VICTIM];
        match death {
            Death::Killed => victim.kill(),
            Death::Stopped => victim.signal(Signal::STOP),
        }
    }

    fn bring_back(&mut self, death: Death) {
        let victim = &mut self.stations[VICTIM];
        match death {
            Death::Killed => victim.restart(),
            Death::Stopped => victim.signal(Signal::CONT),
        }
    }
}

/// Sampled, so that the draws must go on where they were too.
fn sampled() -> GenerateOptions {
    GenerateOptions { sampling: Sampling { temperature: 0.9, top_p: 0.95, seed: 11 }, top_k: 40, ..options(TOKENS) }
}

async fn undisturbed(addresses: &[StationAddress], options: &GenerateOptions) -> Vec<u32> {
    let mut pipeline = Pipeline::connect(addresses, &client()).await.unwrap();
    let tokens = generate(&mut pipeline, &prompt(5, 9), options, |_| true).await.unwrap().tokens;
    assert_eq!(tokens.len(), TOKENS, "the text ends before the station can die");
    pipeline.reset().await.unwrap();
    tokens
}

/// An error must say where, and when it was silence, must not have waited for more than two intervals.
fn assert_named(error: &ClientError, address: &StationAddress, since: Instant, what: &str) {
    eprintln!("{what}: after {:.1?}: {error}: {}", since.elapsed(), error.cause());
    let ClientError::Hop { number, count, station, layers, .. } = error else { panic!("{what}: {error}") };
    assert_eq!((*number, *count, *layers), (VICTIM + 1, 3, [2, 4]), "{what}");
    assert_eq!(station, address, "{what}");
    assert!(error.to_string().contains(&address.to_string()), "{what}: {error}");
    if let ClientError::Silent { waited, .. } = error.cause() {
        assert!(*waited < 2 * INTERVAL, "{what}: {waited:?}");
    }
}

async fn with_standby(carrier: &str, death: Death) {
    let what = format!("{carrier}, {death:?}, with a standby");
    let mut mesh = Mesh::start(carrier);
    let (addresses, standby) = (mesh.addresses(), mesh.standby.address.clone());
    let expected = undisturbed(&addresses, &sampled()).await;
    let mut pipeline = Pipeline::connect(&addresses, &client()).await.unwrap();
    assert!(pipeline.add_standbys(std::slice::from_ref(&standby)).await.unwrap().is_empty());
    let mut count = 0;
    let on_token = |_| {
        count += 1;
        if count == 10 {
            mesh.kill(death);
        }
        true
    };
    let got = generate(&mut pipeline, &prompt(5, 9), &sampled(), on_token).await.unwrap();
    assert_eq!(got.tokens, expected, "{what}");
    let [failover] = pipeline.failovers() else { panic!("{what}: {:?}", pipeline.failovers()) };
    eprintln!("{what}: {failover:?}");
    assert_eq!((failover.number, &failover.from, &failover.to), (VICTIM + 1, &addresses[VICTIM], &standby), "{what}");
    assert!(failover.reason.contains(&addresses[VICTIM].to_string()), "{what}: {}", failover.reason);
    assert_eq!(pipeline.stages()[VICTIM].address(), &standby);

    // The first one is a standby now, and takes over when the second dies too. What it may still hold of the first text
    // must not get into the second one.
    let second = prompt(6, 9);
    let whole = {
        let standby = [addresses[0].clone(), standby.clone(), addresses[2].clone()];
        let mut pipeline = Pipeline::connect(&standby, &client()).await.unwrap();
        tokens(&mut pipeline, &second, TOKENS).await.unwrap()
    };
    mesh.bring_back(death);
    pipeline.rewind(0);
    let mut got = tokens(&mut pipeline, &second, TOKENS - 4).await.unwrap();
    mesh.standby.kill();
    got.extend(tokens(&mut pipeline, &[got[got.len() - 1]], 4).await.unwrap());
    assert_eq!(got, whole, "{what}: back again");
    assert_eq!(pipeline.failovers().len(), 2, "{what}: {:?}", pipeline.failovers());
}

async fn without_standby(carrier: &str, death: Death) {
    let what = format!("{carrier}, {death:?}, without a standby");
    let mut mesh = Mesh::start(carrier);
    let addresses = mesh.addresses();
    let expected = undisturbed(&addresses, &sampled()).await;
    let mut pipeline = Pipeline::connect(&addresses, &client()).await.unwrap();
    let mut got = Vec::new();
    let mut died = Instant::now();
    let on_token = |token| {
        got.push(token);
        if got.len() == 10 {
            mesh.kill(death);
            died = Instant::now();
        }
        true
    };
    let error = generate(&mut pipeline, &prompt(5, 9), &sampled(), on_token).await.unwrap_err();
    assert_named(&error, &addresses[VICTIM], died, &what);
    assert!(error.is_unreachable(), "{what}: {error}");
    // Ten tokens were sent; what did not come through is not part of the session.
    assert_eq!(pipeline.history(), [&prompt(5, 9), &expected[..9]].concat(), "{what}");
    mesh.bring_back(death);
    let rest = resume(&mut pipeline, &prompt(5, 9), &got, &sampled(), |_| true).await.unwrap();
    assert_eq!([got.clone(), rest.tokens].concat(), expected, "{what}: gone on with");
    // So does another client that knows only the tokens.
    let mut other = Pipeline::connect(&addresses, &client()).await.unwrap();
    let rest = resume(&mut other, &prompt(5, 9), &got, &sampled(), |_| true).await.unwrap();
    assert_eq!([got, rest.tokens].concat(), expected, "{what}: by another client");
}

fn every_death(carrier: &'static str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        for death in [Death::Killed, Death::Stopped] {
            tokio::join!(with_standby(carrier, death), without_standby(carrier, death));
        }
    });
}

#[test]
fn a_station_on_a_unix_socket_dies() {
    every_death("uds");
}

#[test]
fn a_station_on_tcp_dies() {
    every_death("tcp");
}

#[test]
fn a_station_on_udp_dies() {
    every_death("udp");
}

/// As when its power fails: nothing comes from there any more, not even a refusal.
#[test]
fn a_station_vanishes_from_the_network() {
    let parts = [("demo", Some("0..2")), ("demo", Some("2..4")), ("demo", Some("4..6")), ("demo", Some("2..4"))];
    for carrier in ["tcp", "udp"] {
        let Some(mut lab) = Lab::start_or_skip(carrier, &parts) else { return };
        let mut addresses = lab.addresses();
        let standby = addresses.pop().unwrap();
        let expected = lab.run(undisturbed(&addresses, &sampled()));
        for has_standby in [true, false] {
            let what = format!("{carrier}, vanished, standby: {has_standby}");
            let mut got = Vec::new();
            let mut died = Instant::now();
            let (result, mut pipeline) = lab.run(async {
                let mut pipeline = Pipeline::connect(&addresses, &client()).await.unwrap();
                if has_standby {
                    assert!(pipeline.add_standbys(std::slice::from_ref(&standby)).await.unwrap().is_empty());
                }
                let on_token = |token| {
                    got.push(token);
                    if got.len() == 10 {
                        lab.link(VICTIM).cut(true);
                        died = Instant::now();
                    }
                    true
                };
                let result = generate(&mut pipeline, &prompt(5, 9), &sampled(), on_token).await;
                if let Err(error) = &result {
                    assert_named(error, &addresses[VICTIM], died, &what);
                }
                // A connection is of the runtime that made it.
                let failovers = pipeline.failovers().to_vec();
                drop(pipeline);
                (result.map(|generated| generated.tokens), failovers)
            });
            lab.link(VICTIM).cut(false);
            if has_standby {
                assert_eq!(result.unwrap(), expected, "{what}");
                assert_eq!(pipeline.remove(0).to, standby, "{what}");
                assert!(pipeline.is_empty(), "{what}");
                continue;
            }
            assert!(matches!(result.unwrap_err().cause(), ClientError::Silent { .. }), "{what}");
            // The power is back, and the station has forgotten everything.
            lab.stations[VICTIM].kill();
            lab.stations[VICTIM].restart();
            let rest = lab.run(async {
                let mut pipeline = Pipeline::connect(&addresses, &client()).await.unwrap();
                resume(&mut pipeline, &prompt(5, 9), &got, &sampled(), |_| true).await.unwrap().tokens
            });
            assert_eq!([got, rest].concat(), expected, "{what}: gone on with");
        }
    }
}

/// What the standby has in its replay cache need not be sent again.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_knows_the_prompt_replays_it() {
    let mut mesh = Mesh::start("uds");
    let (addresses, standby) = (mesh.addresses(), mesh.standby.address.clone());
    let expected = undisturbed(&addresses, &sampled()).await;
    let with_replay = async |addresses: &[StationAddress]| {
        let mut pipeline = Pipeline::connect(addresses, &client()).await.unwrap();
        pipeline.use_replay();
        pipeline
    };
    // An earlier text went through the standby, which remembers its prompt.
    let mut other = addresses.clone();
    other[VICTIM] = standby.clone();
    for addresses in [&addresses, &other] {
        let mut pipeline = with_replay(addresses).await;
        assert_eq!(generate(&mut pipeline, &prompt(5, 9), &sampled(), |_| true).await.unwrap().tokens, expected);
        pipeline.captured().await;
        pipeline.reset().await.unwrap();
    }
    let mut pipeline = with_replay(&addresses).await;
    pipeline.add_standbys(&[standby]).await.unwrap();
    let mut count = 0;
    let on_token = |_| {
        count += 1;
        if count == 10 {
            mesh.kill(Death::Killed);
        }
        true
    };
    let got = generate(&mut pipeline, &prompt(5, 9), &sampled(), on_token).await.unwrap();
    assert_eq!(got.tokens, expected);
    let stats = pipeline.replay_stats();
    assert_eq!((pipeline.failovers().len(), stats.skipped, stats.restored), (1, 1, 1), "{stats:?}");
}

/// A station that was started again has lost the session; only the stations up to it see the history a second time.
#[tokio::test(flavor = "multi_thread")]
async fn a_station_that_was_started_again_gets_the_session_back() {
    for carrier in ["uds", "tcp", "udp"] {
        let mut mesh = Mesh::start(carrier);
        let addresses = mesh.addresses();
        let expected = undisturbed(&addresses, &sampled()).await;
        let mut pipeline = Pipeline::connect(&addresses, &client()).await.unwrap();
        let mut count = 0;
        let on_token = |_| {
            count += 1;
            if count == 10 {
                mesh.kill(Death::Killed);
                mesh.bring_back(Death::Killed);
            }
            true
        };
        let got = generate(&mut pipeline, &prompt(5, 9), &sampled(), on_token).await.unwrap();
        assert_eq!(got.tokens, expected, "{carrier}");
        assert!(pipeline.failovers().is_empty());
        let positions: Vec<u64> = pipeline.stages().iter().map(|stage| stage.traffic.positions).collect();
        let all = (9 + TOKENS - 1) as u64;
        assert!(positions[0] > all && positions[2] == all, "{carrier}: {positions:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_must_hold_the_same_layers_of_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let start = |model: &str, layers, name: &str| Station::start(model, layers, &place("uds", &dir, name), None);
    let mesh = [start("demo", Some("0..3"), "a"), start("demo", Some("3..6"), "b")];
    let addresses = mesh.each_ref().map(|station| station.address.clone());
    let others = [start("demo", Some("2..6"), "c"), start("identity:128:1024", None, "d")];
    let mut pipeline = Pipeline::connect(&addresses, &client()).await.unwrap();
    for (other, word) in others.iter().zip(["layers 2..6", "config_fp"]) {
        let error = pipeline.add_standbys(std::slice::from_ref(&other.address)).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ClientError::Mesh { .. }) && text.contains(word), "{text}");
    }
    // One that is not there yet may come.
    let missing: StationAddress = StationAddress::Unix(dir.path().join("later"));
    let unreached = pipeline.add_standbys(std::slice::from_ref(&missing)).await.unwrap();
    assert!(matches!(&unreached[..], [(address, error)] if *address == missing && error.is_unreachable()));
}
