//! Requests of several sessions that a station runs together: each gets what it would have got alone, bit for bit,
//! whatever happens to the others.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test stops at its first failure")]

mod common;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use aeon_proto::route::Route;
use aeon_station::{
    demo,
    model::{
        Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError, ModelInfo,
        batch::{ForwardPart, HeadPart},
        transformer::Transformer,
    },
    net::{
        connection::ConnectionOptions,
        listener::Acceptor,
        peer::CredentialList,
        shutdown::Shutdown,
        uds::{self, UdsListener, UdsOptions},
    },
    station::{Exposition, Station, limits::Limits},
};
use common::{
    floats, ids, until,
    wire::{Answer, Wire, cancel, request},
};
use tempfile::TempDir;

/// A first value on which the model panics.
const FATAL: f32 = 54_321.0;

/// A first value of which the model makes infinity.
const ENDLESS: f32 = 43_210.0;

/// What the test and the model share.
#[derive(Debug, Default)]
struct Gate {
    is_open: Mutex<bool>,
    /// Whether work waits at it.
    is_waiting: AtomicBool,
    changed: Condvar,
    /// Parts of each call that took several, `layers` and `head`.
    batches: Mutex<Vec<(&'static str, usize)>>,
}

/// The demo model, whose work on one part waits at a gate.
#[derive(Debug)]
struct Gated {
    model: Transformer,
    gate: Arc<Gate>,
}

fn spoilt(first: f32, mut output: Vec<f32>) -> Vec<f32> {
    if first == ENDLESS {
        output[3] = f32::INFINITY;
    }
    output
}

impl LayerRange for Gated {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }
    fn new_cache(&self) -> Box<dyn Cache> {
        self.model.new_cache()
    }
    fn cache_bytes_per_position(&self) -> usize {
        self.model.cache_bytes_per_position()
    }
    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.model.embed(ids)
    }
    fn forward(&self, cache: &mut dyn Cache, input: Vec<f32>, cancel: &CancelToken) -> Result<Vec<f32>, ModelError> {
        let mut is_open = self.gate.is_open.lock().unwrap();
        while !*is_open {
            self.gate.is_waiting.store(true, Ordering::SeqCst);
            is_open = self.gate.changed.wait(is_open).unwrap();
        }
        self.gate.is_waiting.store(false, Ordering::SeqCst);
        drop(is_open);
        assert!(input[0] != FATAL, "expected in this test");
        let first = input[0];
        self.model.forward(cache, input, cancel).map(|output| spoilt(first, output))
    }
    fn batch_positions(&self) -> Option<usize> {
        self.model.batch_positions()
    }
    fn forward_batch(&self, parts: Vec<ForwardPart<'_>>) -> Result<Vec<Result<Vec<f32>, ModelError>>, ModelError> {
        self.gate.batches.lock().unwrap().push(("layers", parts.len()));
        assert!(parts.iter().all(|part| part.residuals[0] != FATAL), "expected in this test");
        let firsts: Vec<f32> = parts.iter().map(|part| part.residuals[0]).collect();
        let results = self.model.forward_batch(parts)?;
        Ok(results.into_iter().zip(firsts).map(|(result, first)| result.map(|output| spoilt(first, output))).collect())
    }
    fn head(&self, residuals: &[f32], want: Head, cancel: &CancelToken) -> Result<HeadOutput, ModelError> {
        self.model.head(residuals, want, cancel)
    }
    fn head_batch(&self, parts: &[HeadPart<'_>]) -> Result<Vec<Result<HeadOutput, ModelError>>, ModelError> {
        self.gate.batches.lock().unwrap().push(("head", parts.len()));
        self.model.head_batch(parts)
    }
}

/// A station with one worker on a Unix socket.
struct Lab {
    station: Arc<Station>,
    gate: Arc<Gate>,
    shutdown: Shutdown,
    uds: PathBuf,
    _dir: TempDir,
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.open();
        self.shutdown.kill();
    }
}

impl Lab {
    fn start(edit: impl FnOnce(&mut Limits)) -> Self {
        let gate = Arc::<Gate>::default();
        let model = Gated { model: demo::load(None).unwrap(), gate: Arc::clone(&gate) };
        let mut limits = Limits::default();
        edit(&mut limits);
        let station = Arc::new(Station::new("gated".into(), Arc::new(model), limits, 1).unwrap());
        let shutdown = Shutdown::default();
        let dir = tempfile::tempdir().unwrap();
        let uds = dir.path().join("s");
        let socket = uds::bind(&uds, &UdsOptions::default()).unwrap();
        let acceptor = Acceptor::new(Arc::clone(&station), ConnectionOptions::default(), false, 100, shutdown.clone());
        shutdown.spawn(UdsListener::new(socket, CredentialList::default()).unwrap().run(acceptor));
        Self { station, gate, shutdown, uds, _dir: dir }
    }

    fn open(&self) {
        *self.gate.is_open.lock().unwrap() = true;
        self.gate.changed.notify_all();
    }

    fn shut(&self) {
        *self.gate.is_open.lock().unwrap() = false;
    }

    async fn until_in_flight(&self, count: usize) {
        until("requests are in flight", async || self.station.counters().in_flight.count() == count).await;
    }

    fn take_batches(&self) -> Vec<(&'static str, usize)> {
        std::mem::take(&mut self.gate.batches.lock().unwrap())
    }

    /// Sends everything while the worker is held at the gate, then opens it. Answers by their place in `asked`.
    async fn together(&self, asked: &[Asked], cancelled: &[usize]) -> Vec<Answer> {
        let mut wire = Wire::uds(&self.uds).await;
        // After work that ran alone nobody waits for companions, which would let the first request below past the gate.
        self.open();
        wire.exchange(request(Route::EMBED, 999, "", &ids(&[1]))).await.ok();
        self.shut();
        wire.send(&[request(Route::FORWARD, 1000, r#"{"in":"ids"}"#, &ids(&[1]))]).await;
        until("a request is at the gate", async || self.gate.is_waiting.load(Ordering::SeqCst)).await;
        for (n, (route, meta, body)) in asked.iter().enumerate() {
            wire.send(&[request(*route, n as u32, meta, body)]).await;
        }
        self.until_in_flight(asked.len() + 1).await;
        for n in cancelled {
            wire.send(&[cancel(asked[*n].0, *n as u32)]).await;
        }
        self.take_batches();
        if !cancelled.is_empty() {
            // A cancel says nothing: what comes after it on the connection shows that it was read.
            wire.ask(Route::HEALTH, "", &[]).await;
        }
        self.open();
        let mut answers = BTreeMap::new();
        while answers.len() < asked.len() + 1 {
            let answer = wire.receive().await.unwrap();
            answers.insert(answer.sequence, answer);
        }
        answers.remove(&1000).unwrap().ok();
        answers.into_values().collect()
    }

    /// One after the other.
    async fn alone(&self, asked: &[Asked]) -> Vec<Answer> {
        self.open();
        let mut wire = Wire::uds(&self.uds).await;
        let mut answers = Vec::new();
        for (n, (route, meta, body)) in asked.iter().enumerate() {
            answers.push(wire.exchange(request(*route, n as u32, meta, body)).await);
        }
        answers
    }
}

type Asked = (Route, String, Vec<u8>);

fn forward(session: &str, pos: usize, tokens: &[u32]) -> Asked {
    (Route::FORWARD, format!(r#"{{"session":"{session}","pos":{pos},"in":"ids"}}"#), ids(tokens))
}

fn next_token(session: &str, pos: usize, tokens: &[u32]) -> Asked {
    let meta = format!(r#"{{"session":"{session}","pos":{pos},"in":"ids","out":"token"}}"#);
    (Route::FORWARD, meta, ids(tokens))
}

fn residuals(session: &str, pos: usize, seq: usize, first: f32) -> Asked {
    let mut values: Vec<f32> = (0..seq * 128).map(|i| (i % 37) as f32 / 37.0 - 0.5).collect();
    values[0] = first;
    (Route::FORWARD, format!(r#"{{"session":"{session}","pos":{pos}}}"#), floats(&values))
}

fn head(meta: &str, seq: usize) -> Asked {
    let values: Vec<f32> = (0..seq * 128).map(|i| (i % 23) as f32 / 23.0 - 0.5).collect();
    (Route::LM_HEAD, meta.to_owned(), floats(&values))
}

/// Sessions of different lengths.
fn histories() -> Vec<Asked> {
    [1, 9, 40, 77]
        .iter()
        .enumerate()
        .map(|(n, len)| {
            let tokens: Vec<u32> = (0..*len).map(|at| ((at * 7 + n * 13) % 200) as u32).collect();
            forward(&format!("s{n}"), 0, &tokens)
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn together_as_alone() {
    let batched = Lab::start(|_| ());
    let single = Lab::start(|limits| limits.max_batch = 1);
    let prompt: Vec<u32> = (3..33).collect();
    let asked = [
        // Decoding at four depths, a prompt, a sequence without a session, heads with and without layers, an embedding.
        next_token("s0", 1, &[5]),
        forward("s1", 9, &[6]),
        (
            Route::FORWARD,
            r#"{"session":"s2","pos":40,"in":"ids","out":"token","return":"topk","top_k":5}"#.into(),
            ids(&[7]),
        ),
        next_token("s3", 77, &[8]),
        next_token("fresh", 0, &prompt),
        (Route::FORWARD, r#"{"in":"ids","out":"token","return":"logits"}"#.into(), ids(&[9, 10, 11])),
        residuals("bare", 0, 3, 0.25),
        head(r#"{"return":"logits"}"#, 2),
        head(r#"{"return":"topk","top_k":3}"#, 30),
        head("", 1),
        (Route::EMBED, String::new(), ids(&[1, 2, 3])),
        // A rewind, and a session that goes.
        forward("s1b", 0, &[4, 4]),
        (Route::RESET, r#"{"session":"gone"}"#.into(), Vec::new()),
    ];
    for lab in [&batched, &single] {
        let known = [histories(), vec![forward("s1b", 0, &[1, 2, 3]), forward("gone", 0, &[1])]].concat();
        lab.alone(&known).await.into_iter().for_each(|answer| drop(answer.ok()));
    }
    let expected = single.alone(&asked).await;
    let answers = batched.together(&asked, &[]).await;
    assert_eq!(batched.take_batches(), [("layers", 8), ("head", 8)]);
    for ((asked, answer), expected) in asked.iter().zip(&answers).zip(&expected) {
        assert_eq!(answer, expected, "{asked:?}");
        assert_eq!(answer.status(), 200);
    }
    assert!(single.take_batches().is_empty());
    // What the sessions remember is the same too.
    let more =
        [next_token("s0", 2, &[1]), forward("s3", 78, &[1]), forward("fresh", 30, &[1]), forward("s1b", 2, &[1])];
    assert_eq!(batched.together(&more, &[]).await, single.alone(&more).await);
    assert_eq!(batched.take_batches(), [("layers", 4)]);
    let metrics = batched.station.metrics(Exposition::Prometheus).unwrap();
    assert!(metrics.contains("aeon_batch_size_bucket{le=\"16\"}"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_meets_is_its_own() {
    let lab = Lab::start(|_| ());
    let single = Lab::start(|limits| limits.max_batch = 1);
    for lab in [&lab, &single] {
        lab.alone(&histories()).await.into_iter().for_each(|answer| drop(answer.ok()));
    }
    let asked = [
        next_token("s0", 1, &[5]),
        // Positions that are not there.
        forward("s1", 50, &[6]),
        // Withdrawn before its turn.
        forward("s2", 40, &[7]),
        // Too late.
        (Route::FORWARD, r#"{"session":"late","pos":0,"in":"ids","deadline_ms":0}"#.into(), ids(&[1])),
        // Not a number.
        residuals("nan", 0, 1, f32::NAN),
        // What the layers make infinite.
        residuals("huge", 0, 2, ENDLESS),
        next_token("s3", 77, &[8]),
    ];
    let expected = single.alone(&[asked[0].clone(), asked[6].clone()]).await;
    let answers = lab.together(&asked, &[2]).await;
    assert_eq!(lab.take_batches(), [("layers", 3), ("head", 2)]);
    let statuses: Vec<u64> = answers.iter().map(Answer::status).collect();
    assert_eq!(statuses, [200, 409, 499, 504, 422, 500, 200]);
    assert_eq!((&answers[0].body, &answers[6].body), (&expected[0].body, &expected[1].body));
    // Nothing of what failed is remembered.
    let more = [forward("s1", 9, &[6]), forward("s2", 40, &[7]), forward("huge", 0, &[1]), forward("late", 0, &[1])];
    let (answers, expected) = (lab.together(&more, &[]).await, single.alone(&more).await);
    assert_eq!(answers, expected);
    assert!(answers.iter().all(|answer| answer.status() == 200), "{answers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_costs_only_its_own_request() {
    let lab = Lab::start(|_| ());
    let single = Lab::start(|limits| limits.max_batch = 1);
    for lab in [&lab, &single] {
        lab.alone(&histories()).await.into_iter().for_each(|answer| drop(answer.ok()));
    }
    let asked = [next_token("s0", 1, &[5]), residuals("fatal", 0, 1, FATAL), forward("s3", 77, &[8])];
    let expected = single.alone(&asked).await;
    let answers = lab.together(&asked, &[]).await;
    assert_eq!(answers.iter().map(Answer::status).collect::<Vec<_>>(), [200, 500, 200]);
    assert_eq!(answers, expected);
    let more = [next_token("s0", 2, &[5]), forward("fatal", 0, &[1]), forward("s3", 78, &[8])];
    assert_eq!(lab.together(&more, &[]).await, single.alone(&more).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_session_stays_in_order_and_batches_are_bounded() {
    let lab = Lab::start(|limits| limits.max_batch = 3);
    // Two requests of one session among those of others.
    let asked: Vec<Asked> = vec![
        forward("a", 0, &[1, 2]),
        forward("a", 2, &[3]),
        forward("b", 0, &[1]),
        forward("c", 0, &[1]),
        forward("d", 0, &[1]),
    ];
    let answers = lab.together(&asked, &[]).await;
    assert!(answers.iter().all(|answer| answer.status() == 200), "{answers:?}");
    assert_eq!(lab.take_batches(), [("layers", 3), ("layers", 2)]);
    // A prompt longer than what is computed at once runs alone.
    let prompt: Vec<u32> = (0..129).collect();
    let asked = [forward("e", 0, &[1]), forward("f", 0, &prompt), forward("g", 0, &[1]), forward("h", 0, &[1])];
    assert!(lab.together(&asked, &[]).await.iter().all(|answer| answer.status() == 200));
    assert_eq!(lab.take_batches(), [("layers", 2)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_without_room_beside_the_others_gets_it_after_them() {
    let bytes_per_position = demo::load(None).unwrap().cache_bytes_per_position();
    // Room for one session of 20 positions, not for two.
    let lab = Lab::start(|limits| limits.sessions.bytes = 30 * bytes_per_position);
    let prompt: Vec<u32> = (0..20).collect();
    let asked = [forward("a", 0, &prompt), forward("b", 0, &prompt)];
    let answers = lab.together(&asked, &[]).await;
    assert!(answers.iter().all(|answer| answer.status() == 200), "{answers:?}");
    assert_eq!(answers[0].body, answers[1].body);
    assert_eq!(
        lab.station.metrics(Exposition::Prometheus).unwrap().lines().find(|line| line.starts_with("aeon_sessions ")),
        Some("aeon_sessions 1")
    );
}
