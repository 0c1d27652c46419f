//! A mesh over links with faults. A coordinator has a link of its own to each of the stations.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use aeon_proto::route::Route;
use aeon_station::client::{
    Client, ClientError, ClientOptions, Pipeline, StationAddress,
    generate::{GenerateOptions, generate},
    sampler::Sampling,
};

use crate::{
    common::netns::Namespace,
    emulator::{Emulator, End, Faults, Link},
    process::Station,
};

/// What the requirement says of every hop.
pub(crate) const ROUGH: Faults = Faults {
    loss: 0.05,
    duplication: 0.02,
    reordering: 0.05,
    corruption: 0.001,
    delay: Duration::from_millis(20),
    jitter: Duration::from_millis(10),
    only_first_fragments: false,
    is_cut: false,
};
const SEED: u64 = 20_240_607;
const PORT: u16 = 7000;

/// Stations in namespaces of their own, and the links to them.
pub(crate) struct Lab {
    pub(crate) stations: Vec<Station>,
    pub(crate) emulator: Emulator,
    coordinator: Namespace,
    _namespaces: Vec<Namespace>,
}

impl Lab {
    /// Starts stations with these layers of the demo model (or these models); the error says why that cannot be.
    pub(crate) fn start(carrier: &str, parts: &[(&str, Option<&str>)]) -> Result<Self, String> {
        let coordinator = Namespace::new("c")?;
        let mut namespaces = Vec::new();
        let mut ends = Vec::new();
        for index in 0..parts.len() {
            let namespace = Namespace::new("s")?;
            let end = |name: &str, side: u32| End {
                namespace: name.to_owned(),
                addresses: vec![format!("10.99.{index}.{side}/24"), format!("fd99:{index}::{side}/64")],
            };
            ends.push([end(&coordinator.name, 1), end(&namespace.name, 2)]);
            namespaces.push(namespace);
        }
        let emulator = Emulator::start(ends, SEED)?;
        eprintln!("links with faults from seed {SEED}");
        let started = parts.iter().zip(&namespaces).enumerate().map(|(index, ((model, layers), namespace))| {
            let any = match carrier {
                "udp" => StationAddress::Udp(format!("[::]:{PORT}")),
                _ => StationAddress::Tcp(format!("[::]:{PORT}")),
            };
            let mut station = Station::start(model, *layers, &any, Some(namespace));
            station.address = format!("{carrier}:10.99.{index}.2:{PORT}").parse().unwrap();
            station
        });
        let stations = started.collect();
        Ok(Self { stations, emulator, coordinator, _namespaces: namespaces })
    }

    /// The same, with a printed reason where it cannot be.
    pub(crate) fn start_or_skip(carrier: &str, parts: &[(&str, Option<&str>)]) -> Option<Self> {
        match Self::start(carrier, parts) {
            Ok(lab) => Some(lab),
            Err(reason) => {
                eprintln!("skipped: no network namespaces with TUN devices here: {reason}");
                None
            }
        }
    }

    pub(crate) fn link(&self, index: usize) -> &Link {
        &self.emulator.links[index]
    }

    pub(crate) fn set(&self, faults: Faults) {
        self.emulator.links.iter().for_each(|link| link.set(faults));
    }

    pub(crate) fn addresses(&self) -> Vec<StationAddress> {
        self.stations.iter().map(|station| station.address.clone()).collect()
    }

    fn addresses_v6(&self) -> Vec<StationAddress> {
        (0..self.stations.len()).map(|index| StationAddress::Udp(format!("[fd99:{index}::2]:{PORT}"))).collect()
    }

    /// Runs a future where the coordinator is.
    pub(crate) fn run<T: Send>(&self, future: impl Future<Output = T> + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.coordinator.enter();
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
            });
            thread.join().unwrap()
        })
    }
}

pub(crate) fn options(max_tokens: usize) -> GenerateOptions {
    let sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
    GenerateOptions { max_tokens, sampling, top_k: 1, stop: Vec::new() }
}

/// The prompt of one of several sessions.
pub(crate) fn prompt(session: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (session * 131 + i * 17 + 2) % 1024).collect()
}

/// Exactly `count` tokens of a session: where the model ends its text, the text goes on all the same.
pub(crate) async fn tokens(pipeline: &mut Pipeline, prompt: &[u32], count: usize) -> Result<Vec<u32>, ClientError> {
    let mut tokens = Vec::new();
    let mut input = prompt.to_vec();
    while tokens.len() < count {
        let next = pipeline.extend(&input, aeon_station::client::Want::Token).await?;
        tokens.push(next.ids[0]);
        input = next.ids;
    }
    Ok(tokens)
}

/// Sessions side by side, each with connections of its own.
async fn sessions(addresses: &[StationAddress], count: u32, len: usize) -> Vec<Vec<u32>> {
    let session = |number: u32| async move {
        let mut pipeline = Pipeline::connect(addresses, &ClientOptions::default()).await.unwrap();
        let tokens = tokens(&mut pipeline, &prompt(number, 8 + number), len).await.unwrap();
        pipeline.reset().await.unwrap();
        tokens
    };
    futures_util::future::join_all((0..count).map(session)).await
}

const THIRDS: [(&str, Option<&str>); 3] = [("demo", Some("0..2")), ("demo", Some("2..4")), ("demo", Some("4..6"))];

#[test]
fn eight_sessions_over_rough_links_give_the_tokens_of_clean_ones() {
    let Some(lab) = Lab::start_or_skip("udp", &THIRDS) else { return };
    let addresses = lab.addresses();
    let started = Instant::now();
    let expected = lab.run(sessions(&addresses, 8, 250));
    eprintln!("8 x 250 tokens over clean links: {:.1?}", started.elapsed());
    lab.set(ROUGH);
    let started = Instant::now();
    let rough = lab.run(sessions(&addresses, 8, 250));
    eprintln!("8 x 250 tokens over rough links: {:.1?}", started.elapsed());
    assert!(rough == expected, "other tokens over rough links");
    let mut duplicates = 0;
    for (index, link) in lab.emulator.links.iter().enumerate() {
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &*link.counts;
        eprintln!("link {index}: {counts:?}");
        assert!(count(&counts.lost) > 50 && count(&counts.doubled) > 20, "{counts:?}");
        assert!(count(&counts.reordered) > 50 && count(&counts.damaged) > 0, "{counts:?}");
    }
    // Copies came, and were known as such.
    lab.set(Faults::default());
    for address in &addresses {
        let health = lab.run(async {
            let client = Client::connect(address, ClientOptions::default()).await.unwrap();
            let reply = client.request(Route::HEALTH, |_| (), &[]).await.unwrap();
            serde_json::from_str::<serde_json::Value>(&reply.meta).unwrap()
        });
        eprintln!("{address}: {} requests, dropped {}", health["requests"], health["dropped"]);
        duplicates += health["dropped"]["duplicate"].as_u64().unwrap() + health["dropped"]["stale"].as_u64().unwrap();
    }
    assert!(duplicates > 0);
}

#[test]
fn an_mtu_of_1280_and_ipv6_over_rough_links_change_nothing() {
    let Some(lab) = Lab::start_or_skip("udp", &THIRDS) else { return };
    let (v4, v6) = (lab.addresses(), lab.addresses_v6());
    let expected = lab.run(sessions(&v4, 4, 24));
    lab.emulator.links.iter().for_each(|link| link.set_mtu(1280));
    lab.set(Faults { delay: Duration::from_millis(3), jitter: Duration::from_millis(2), ..ROUGH });
    for addresses in [v4, v6] {
        assert!(lab.run(sessions(&addresses, 4, 24)) == expected, "other tokens at {addresses:?}");
    }
}

#[test]
fn a_black_hole_above_one_packet_is_worked_around_or_named() {
    let parts = [("demo", Some("0..3")), ("demo", Some("3..6")), ("identity:3584", None)];
    let Some(lab) = Lab::start_or_skip("udp", &parts) else { return };
    let addresses = lab.addresses();
    let options = ClientOptions { health_interval: Some(Duration::from_secs(2)), ..ClientOptions::default() };
    let run = || {
        lab.run(async {
            let mut pipeline = Pipeline::connect(&addresses[..2], &options).await.unwrap();
            tokens(&mut pipeline, &prompt(1, 40), 6).await.unwrap()
        })
    };
    let expected = run();
    lab.set(Faults { only_first_fragments: true, ..Faults::default() });
    assert_eq!(run(), expected);
    let fragments = lab.link(0).counts.fragments.load(Ordering::Relaxed);
    assert!(fragments > 0, "nothing was lost");
    // One residual of 14 KB can never come through: that is said, and by whom.
    let error = lab.run(async {
        let options = ClientOptions { request_timeout: Duration::from_secs(8), ..options.clone() };
        let client = Client::connect(&addresses[2], options).await.unwrap();
        client.request(Route::EMBED, |_| (), &7_u32.to_le_bytes()).await.unwrap_err()
    });
    assert!(matches!(error, ClientError::Unanswered { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&addresses[2].to_string()) && text.contains("tcp:"), "{text}");
}

#[test]
fn a_partition_that_heals_costs_time_only() {
    for carrier in ["udp", "tcp"] {
        let Some(lab) = Lab::start_or_skip(carrier, &THIRDS) else { return };
        let addresses = lab.addresses();
        let expected = lab.run(sessions(&addresses, 1, 20)).remove(0);
        let run = async |after: Duration, interval| {
            let options = ClientOptions { health_interval: Some(interval), ..ClientOptions::default() };
            let mut pipeline = Pipeline::connect(&addresses, &options).await.unwrap();
            let mut got = tokens(&mut pipeline, &prompt(0, 8), 10).await.unwrap();
            lab.link(1).cut(true);
            let mending = async {
                tokio::time::sleep(after).await;
                lab.link(1).cut(false);
            };
            let last = [got[9]];
            let (rest, ()) = tokio::join!(tokens(&mut pipeline, &last, 10), mending);
            let rest = match rest {
                Ok(rest) => rest,
                // Too long for this health interval: it was named, and now goes on.
                Err(error) => {
                    assert!(matches!(error, ClientError::Hop { number: 2, .. }), "{error}");
                    assert!(matches!(error.cause(), ClientError::Silent { .. }), "{error}");
                    tokens(&mut pipeline, &last, 10).await.unwrap()
                }
            };
            got.extend(rest);
            assert_eq!(got, expected, "{carrier}, {after:?} of {interval:?}");
            assert!(pipeline.failovers().is_empty());
        };
        lab.run(run(Duration::from_secs(2), Duration::from_secs(30)));
        lab.run(run(Duration::from_secs(4), Duration::from_secs(1)));
    }
}

#[test]
fn ipv6_on_loopback_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let stations: Vec<Station> = THIRDS
        .iter()
        .map(|(model, layers)| Station::start(model, *layers, &crate::process::place("udp6", &dir, ""), None))
        .collect();
    let addresses: Vec<StationAddress> = stations.iter().map(|station| station.address.clone()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut pipeline = Pipeline::connect(&addresses, &ClientOptions::default()).await.unwrap();
        let got = generate(&mut pipeline, &prompt(0, 8), &options(20), |_| true).await.unwrap().tokens;
        let whole = Station::start("demo", None, &crate::process::place("uds", &dir, "whole"), None);
        let mut pipeline =
            Pipeline::connect(std::slice::from_ref(&whole.address), &ClientOptions::default()).await.unwrap();
        let expected = generate(&mut pipeline, &prompt(0, 8), &options(20), |_| true).await.unwrap().tokens;
        assert_eq!(got, expected);
    });
}
