//! Everything at once, for long: what a node holds in the end is what it held after its first minute.
//!
//! Ignored by default. `AEON_SOAK_SECONDS=1800 cargo test --test hostile soak -- --ignored --nocapture` runs the long form,
//! `.ci/run soak` a short one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aeon_proto::{bwah::encode_amplituhedron_capture, route::Route};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    task::JoinSet,
};

use crate::{
    common::{
        ids,
        wire::{Wire, cancel, prefixed, raw_frame, request},
        within,
    },
    guarded::{Guarded, memory},
};

/// What fills up once and then stays, such as the replies kept for copies (4,096), must be full before growth is judged.
const WARM_UP: Duration = Duration::from_secs(20);
const WARM_UP_ROUNDS: u64 = 6000;
/// Growth that the allocator's habits may cause.
const MARGIN: f64 = 3.0 * 1024.0 * 1024.0;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute and more"]
async fn soak() {
    let seconds = std::env::var("AEON_SOAK_SECONDS").map_or(45, |text| text.parse().unwrap());
    let bases = tempfile::tempdir().unwrap();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/bases");
    std::fs::copy(format!("{root}/demo/demo.pcab"), bases.path().join("demo.pcab")).unwrap();
    let (bases_arg, methodologies) = (bases.path().to_str().unwrap(), format!("{root}/methodologies"));
    let limits = ["--max-sessions", "64", "--max-shard-entries", "200", "--max-replay-bytes", "2000000"];
    let node = Guarded::start(
        "demo",
        100,
        &[&["--bases", bases_arg, "--methodologies", &methodologies][..], &limits].concat(),
    )
    .await;
    let node = Arc::new(node);
    let (rounds, copied) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for n in 0..3 {
        let (node, rounds, copied) = (Arc::clone(&node), Arc::clone(&rounds), Arc::clone(&copied));
        tasks.spawn(async move {
            for round in 0_u64.. {
                sessions(&node, &format!("{n}-{round}"), &copied).await;
                others(&node, n + 3 * round).await;
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let (reloaded, pid) = (Arc::clone(&node), node.pid());
    tasks.spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(2)).await;
            kill_process(Pid::from_raw(reloaded.pid() as i32).unwrap(), Signal::HUP).unwrap();
        }
    });
    let started = Instant::now();
    let is_warm = || started.elapsed() >= WARM_UP && copied.load(Ordering::Relaxed) >= WARM_UP_ROUNDS;
    while !is_warm() {
        tokio::time::sleep(Duration::from_millis(250)).await;
        still_running(&mut tasks).await;
        assert!(started.elapsed() < Duration::from_secs(600), "{copied:?} rounds in ten minutes");
    }
    let (warm, warm_rounds) = (Instant::now(), rounds.load(Ordering::Relaxed));
    eprintln!("warm after {:.0} s and {warm_rounds} rounds", started.elapsed().as_secs_f64());
    let mut samples = Vec::new();
    while warm.elapsed() < Duration::from_secs(seconds) {
        tokio::time::sleep(Duration::from_millis(500)).await;
        still_running(&mut tasks).await;
        samples.push((warm.elapsed().as_secs_f64(), memory(pid, "VmRSS") as f64));
    }
    tasks.shutdown().await;
    let rounds = rounds.load(Ordering::Relaxed) - warm_rounds;
    let middle = |samples: &[(f64, f64)]| {
        let mut values: Vec<f64> = samples.iter().map(|sample| sample.1).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let third = samples.len() / 3;
    let (first, last) = (middle(&samples[..third]), middle(&samples[samples.len() - third..]));
    let grown = slope(&samples) * seconds as f64;
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    eprintln!(
        "{seconds} s, {rounds} rounds: {:.1} MiB in the first third, {:.1} in the last, by the slope {:+.2} in all; node says {}",
        mib(first),
        mib(last),
        mib(grown),
        node.health().await,
    );
    assert!(rounds > 0);
    assert!(last <= first + MARGIN, "grown from {first} to {last} bytes in {rounds} rounds");
    assert!(grown <= 2.0 * MARGIN, "grows by {grown} bytes in {rounds} rounds");
    // Nothing of it is left but what limits bound.
    let calm = |health: &Value| ["queued", "queued_bytes", "buffered_bytes"].iter().all(|key| health[*key] == 0);
    let ended = Instant::now();
    loop {
        let health = node.health().await;
        if calm(&health) && health["connections"] == 1 && health["sessions"].as_u64().unwrap() <= 64 {
            break;
        }
        assert!(ended.elapsed() < Duration::from_secs(30), "{health}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Arc::into_inner(node).unwrap().stop();
}

/// A task that ends has panicked.
async fn still_running(tasks: &mut JoinSet<()>) {
    if let Some(ended) = tasks.try_join_next() {
        ended.unwrap();
    }
}

/// Least squares: bytes a second.
fn slope(samples: &[(f64, f64)]) -> f64 {
    let n = samples.len() as f64;
    let (x, y) = samples.iter().fold((0.0, 0.0), |sum, sample| (sum.0 + sample.0 / n, sum.1 + sample.1 / n));
    let (xy, xx) = samples
        .iter()
        .fold((0.0, 0.0), |sum, sample| (sum.0 + (sample.0 - x) * (sample.1 - y), sum.1 + (sample.0 - x).powi(2)));
    xy / xx
}

/// On each carrier a session that grows, is captured and dropped, and the stateless routes raw and as PCA components.
async fn sessions(node: &Guarded, name: &str, copied: &AtomicU64) {
    for mut wire in [node.wire().await, Wire::tcp(node.tcp).await, Wire::udp(node.udp).await] {
        let kind = wire.name();
        let meta = |pos: usize| format!(r#"{{"session":"{kind}-{name}","pos":{pos},"in":"ids","out":"token"}}"#);
        assert_eq!(wire.ask(Route::FORWARD, &meta(0), &ids(&[3, 4, 5, 6])).await.status(), 200);
        for pos in 4..20 {
            let answer = wire.ask(Route::FORWARD, &meta(pos), &ids(&[pos as u32])).await;
            // Of sixty-four sessions this one may have been the oldest.
            assert!([200, 409].contains(&answer.status()), "{answer:?}");
            copied.fetch_add(u64::from(wire.is_udp()), Ordering::Relaxed);
        }
        let hash = name.bytes().fold(7_u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let key = format!(r#""prefix_hash":"0x{hash:016x}","prefix_len":4,"layer_lo":0,"layer_hi":6"#);
        let capture =
            wire.ask(Route::AMPLITUHEDRON_CAPTURE, &format!(r#"{{"session":"{kind}-{name}",{key}}}"#), &[]).await;
        assert!([200, 409].contains(&capture.status()), "{capture:?}");
        let replay = wire.ask(Route::AMPLITUHEDRON_REPLAY, &format!(r#"{{"session":"copy-{name}",{key}}}"#), &[]).await;
        assert!([200, 204].contains(&replay.status()), "{replay:?}");
        // Every fourth is left to be dropped for others.
        if !name.ends_with(['3', '7']) {
            wire.ask(Route::RESET, &format!(r#"{{"session":"{kind}-{name}"}}"#), &[]).await.ok();
        }
        let rows = wire.ask(Route::EMBED, "", &ids(&[1, 2, 3])).await.body;
        let hello = wire.ask(Route::HELLO, r#"{"content_type":"application/x-aeon-flow; v=1"}"#, &[]).await.ok();
        let basis = hello["bases"][0]["basis_fp"].as_str().expect("the basis is there, whatever is loaded again");
        let accept = format!(r#"{{"accept":["pcar"],"accept_basis":["{basis}"]}}"#);
        let components = wire.ask(Route::FORWARD, &accept, &rows).await;
        assert_eq!(components.meta["body"], "pcar", "{components:?}");
        for (route, meta, body) in [
            (Route::LM_HEAD_PCA, r#"{"return":"topk","top_k":5}"#, &components.body),
            (Route::LM_HEAD, r#"{"return":"logits"}"#, &rows),
            (Route::FORWARD, r#"{"fp48":"000000000000"}"#, &rows),
        ] {
            let answer = wire.ask(route, meta, body).await;
            assert_eq!(answer.status(), if meta.contains("fp48") { 400 } else { 200 }, "{answer:?}");
        }
    }
}

/// Errors, cancels, shards, captures, HTTP, connections that end in every way.
async fn others(node: &Guarded, round: u64) {
    let mut wire = node.wire().await;
    let value = "v".repeat(1000 + round as usize % 5000);
    let put = format!(r#"{{"shard":"s","key":"{round}","value":"{value}"}}"#);
    wire.ask(Route::SHARD_PUT, &put, &[]).await.ok();
    wire.ask(Route::SHARD_GET, &format!(r#"{{"shard":"s","key":"{round}"}}"#), &[]).await.ok();
    let envelope = encode_amplituhedron_capture(round, 1, 0, 6, &[0.5; 128], &[]);
    wire.ask(Route::AMPLITUHEDRON_CAPTURE, "", &envelope).await.ok();
    wire.ask(Route::HEALTH, "", &[]).await.ok();
    for (route, meta) in
        [(Route::FORWARD, "{"), (Route(0x7777), ""), (Route::RESET, ""), (Route::EMBED, r#"{"a":1,"a":1}"#)]
    {
        assert!(wire.ask(route, meta, &[1]).await.status() >= 400);
    }
    // Withdrawn, or done before that was read.
    let work = request(Route::FORWARD, 1, r#"{"in":"ids"}"#, &ids(&[9; 50]));
    wire.send(&[work.clone(), cancel(Route::FORWARD, 1)]).await;
    let answer = wire.receive().await.unwrap();
    assert!([200, 499].contains(&answer.status()), "{answer:?}");
    // Gone with work in flight, inside a frame, and without a word.
    wire.send(&[work]).await;
    drop(wire);
    let half = prefixed(&raw_frame(Route::FORWARD.0, 1, 0, &vec![0; 300_000]));
    let mut stream = UnixStream::connect(&node.uds).await.unwrap();
    stream.write_all(&half[..200_000]).await.unwrap();
    drop((stream, TcpStream::connect(node.tcp).await.unwrap()));
    let mut http = TcpStream::connect(node.http).await.unwrap();
    let head = format!(
        "POST /amplituhedron/capture HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        envelope.len()
    );
    http.write_all(&[head.as_bytes(), &envelope].concat()).await.unwrap();
    let mut answer = String::new();
    within("an answer over HTTP", http.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
