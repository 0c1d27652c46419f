//! Everything at once, for long: what a node holds in the end is what it held after its first minute, by the count of its
//! own allocator. The traffic stops for a moment whenever it is measured.
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
    sync::RwLock,
    task::JoinSet,
};

use crate::{
    common::{
        ids,
        wire::{Wire, cancel, prefixed, raw_frame, request},
        within,
    },
    counted::Gauge,
    guarded::{Guarded, memory},
};

/// What fills up once and then stays must be full before growth is judged: 4,096 replies kept for copies (of which a round
/// makes two dozen), and the names of 4,096 sessions that were dropped (four or more).
const WARM_UP: Duration = Duration::from_secs(20);
const WARM_UP_ROUNDS: u64 = 1200;
/// What is held differs by some 10 KiB from one moment to another.
const LIVE_MARGIN: f64 = 64.0 * 1024.0;
/// Growth of the pages in use that the allocator's habits may cause.
const RESIDENT_MARGIN: f64 = 6.0 * 1024.0 * 1024.0;

/// What a node held at one moment, while nobody asked anything of it.
struct Sample {
    seconds: f64,
    /// Bytes allocated and not freed.
    live: f64,
    /// Those of them that are in no account with a limit of its own: sessions, captures and shards come and go.
    rest: f64,
    /// Bytes of pages in use.
    resident: f64,
}

type Of = fn(&Sample) -> f64;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute and more"]
async fn soak() {
    let seconds = std::env::var("AEON_SOAK_SECONDS").map_or(45, |text| text.parse().unwrap());
    let bases = tempfile::tempdir().unwrap();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/bases");
    std::fs::copy(format!("{root}/demo/demo.pcab"), bases.path().join("demo.pcab")).unwrap();
    let (bases_arg, methodologies) = (bases.path().to_str().unwrap(), format!("{root}/methodologies"));
    let limits = ["--max-sessions", "64", "--max-shard-entries", "200", "--max-replay-bytes", "2000000"];
    // One line for each reload would hide everything else.
    let rest =
        ["--log-level", "warn,aeon_station::control=error", "--bases", bases_arg, "--methodologies", &methodologies];
    let arguments = [&rest[..], &limits].concat();
    let (node, mut gauge) = Gauge::start("demo", 100, &arguments).await;
    let node = Arc::new(node);
    let (rounds, reloads) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    // Held shared while something is asked, and alone to measure.
    let busy = Arc::new(RwLock::new(()));
    let mut tasks = JoinSet::new();
    for n in 0..3 {
        let (node, rounds, busy) = (Arc::clone(&node), Arc::clone(&rounds), Arc::clone(&busy));
        tasks.spawn(async move {
            for round in 0_u64.. {
                let _busy = busy.read().await;
                sessions(&node, &format!("{n}-{round}")).await;
                others(&node, n + 3 * round).await;
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let (reloaded, reloading, pid) = (Arc::clone(&node), Arc::clone(&reloads), node.pid());
    let among = Arc::clone(&busy);
    tasks.spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let _busy = among.read().await;
            kill_process(Pid::from_raw(reloaded.pid() as i32).unwrap(), Signal::HUP).unwrap();
            reloading.fetch_add(1, Ordering::Relaxed);
        }
    });
    let started = Instant::now();
    let is_warm = || started.elapsed() >= WARM_UP && rounds.load(Ordering::Relaxed) >= WARM_UP_ROUNDS;
    while !is_warm() {
        tokio::time::sleep(Duration::from_millis(250)).await;
        still_running(&mut tasks).await;
        assert!(started.elapsed() < Duration::from_secs(600), "{rounds:?} rounds in ten minutes");
    }
    let counts = || (rounds.load(Ordering::Relaxed), reloads.load(Ordering::Relaxed));
    let (warm, before) = (Instant::now(), counts());
    eprintln!("warm after {:.0} s and {} rounds", started.elapsed().as_secs_f64(), before.0);
    let mut samples = Vec::new();
    while warm.elapsed() < Duration::from_secs(seconds) {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        still_running(&mut tasks).await;
        let _alone = busy.write().await;
        let health = at_rest(&node).await;
        let (live, resident) = (gauge.live_bytes().await as f64, memory(pid, "VmRSS") as f64);
        let accounts = [&health["session_bytes"], &health["replay"]["bytes"], &health["shard_bytes"]];
        let rest = live - accounts.into_iter().map(|bytes| bytes.as_f64().unwrap()).sum::<f64>();
        samples.push(Sample { seconds: warm.elapsed().as_secs_f64(), live, rest, resident });
    }
    tasks.shutdown().await;
    let after = counts();
    let (rounds, reloads) = (after.0 - before.0, after.1 - before.1);
    let kib = |bytes: f64| bytes / 1024.0;
    let figures: [(&str, Of); 3] = [
        ("live bytes", |sample| sample.live),
        ("beside sessions, captures and shards", |sample| sample.rest),
        ("pages in use", |sample| sample.resident),
    ];
    let [_, rest, resident] = figures.map(|(figure, of)| {
        let [first, second, last] = thirds(&samples, of);
        let slope = slope(&samples, of) * seconds as f64;
        eprintln!(
            "{figure}: {:.0} KiB in the first third, {:.0} in the second, {:.0} in the last; by the slope {:+.0} in all",
            kib(first),
            kib(second),
            kib(last),
            kib(slope),
        );
        (last - first).max(slope)
    });
    let every = samples.len().div_ceil(10);
    let course = samples.iter().step_by(every).map(|at| format!("{:.0}@{:.0}s", kib(at.rest), at.seconds));
    eprintln!("KiB beside them: {}", course.collect::<Vec<_>>().join(" "));
    eprintln!("{seconds} s, {rounds} rounds, {reloads} reloads; node says {}", node.health().await);
    assert!(rounds > 0 && reloads > 0);
    assert!(rest <= LIVE_MARGIN, "holds {rest} bytes more after {rounds} rounds and {reloads} reloads");
    assert!(resident <= RESIDENT_MARGIN, "pages of {resident} bytes more after {rounds} rounds and {reloads} reloads");
    // Nothing of it is left but what limits bound.
    let health = at_rest(&node).await;
    assert!(health["sessions"].as_u64().unwrap() <= 64, "{health}");
    Arc::into_inner(node).unwrap().stop();
}

/// Waits until a node has nothing to do and only the one connection that asks.
async fn at_rest(node: &Guarded) -> Value {
    let started = Instant::now();
    loop {
        let health = node.health().await;
        let is_calm = ["queued", "queued_bytes", "buffered_bytes"].iter().all(|key| health[*key] == 0);
        if is_calm && health["connections"] == 1 {
            return health;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{health}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The medians of the first, second and last third.
fn thirds(samples: &[Sample], of: Of) -> [f64; 3] {
    let third = samples.len() / 3;
    [&samples[..third], &samples[third..samples.len() - third], &samples[samples.len() - third..]].map(|samples| {
        let mut values: Vec<f64> = samples.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}

/// A task that ends has panicked.
async fn still_running(tasks: &mut JoinSet<()>) {
    if let Some(ended) = tasks.try_join_next() {
        ended.unwrap();
    }
}

/// Least squares: bytes a second.
fn slope(samples: &[Sample], of: Of) -> f64 {
    let n = samples.len() as f64;
    let (x, y) = samples.iter().fold((0.0, 0.0), |sum, sample| (sum.0 + sample.seconds / n, sum.1 + of(sample) / n));
    let (xy, xx) = samples.iter().fold((0.0, 0.0), |sum, sample| {
        (sum.0 + (sample.seconds - x) * (of(sample) - y), sum.1 + (sample.seconds - x).powi(2))
    });
    xy / xx
}

/// On each carrier a session that grows, is captured and dropped, and the stateless routes raw and as PCA components.
async fn sessions(node: &Guarded, name: &str) {
    for mut wire in [node.wire().await, Wire::tcp(node.tcp).await, Wire::udp(node.udp).await] {
        let kind = wire.name();
        let meta = |pos: usize| format!(r#"{{"session":"{kind}-{name}","pos":{pos},"in":"ids","out":"token"}}"#);
        assert_eq!(wire.ask(Route::FORWARD, &meta(0), &ids(&[3, 4, 5, 6])).await.status(), 200);
        for pos in 4..20 {
            let answer = wire.ask(Route::FORWARD, &meta(pos), &ids(&[pos as u32])).await;
            // Of sixty-four sessions this one may have been the oldest.
            assert!([200, 409].contains(&answer.status()), "{answer:?}");
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
    // Of many sizes, and the two hundred that are kept always of much the same sum.
    let value = "v".repeat(1000 + round as usize * 997 % 5000);
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
