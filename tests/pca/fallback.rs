//! A mesh of three stations that compress between them: what one sends the next gets, and what a station refuses is sent
//! raw as if it had been so from the start.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use aeon_proto::{methodology::MethodologySpec, pcar::PcarBody, route::Route, status::Status};
use aeon_station::{
    basis::{BasisFile, BasisSet},
    client::{
        ClientError, ClientOptions, Pipeline, StationAddress, Want, Wire,
        pipeline::{HopTraffic, Next, PcarWire},
        policy::{CompressionPolicy, compress_residuals},
    },
};

use crate::{
    proxy::{Proxy, Seen},
    support::{PATIENCE, Random, TestNode, file, floats_of, pcab, set, spec},
};

const DIM: usize = 128;
/// Few components, so that a compressed run has other logits than an exact one.
const K: usize = 12;
const LAYERS: [&str; 3] = ["0..2", "2..4", "4..6"];

pub(crate) fn demo_spec() -> MethodologySpec {
    spec(DIM, "a")
}

/// A basis for all boundaries of the demo model; another note is the same numbers under another fingerprint.
pub(crate) fn basis(k: usize, note: &str) -> Vec<u8> {
    let parts: Vec<(u32, usize)> = (0..=6).map(|boundary| (boundary, k)).collect();
    pcab(DIM, &parts, 11, &demo_spec(), note)
}

pub(crate) fn bases(files: &[&Vec<u8>]) -> BasisSet {
    set(files, &[&demo_spec()])
}

/// Three stations; the n-th has the bases of the n-th list.
pub(crate) async fn mesh(files: [&[&Vec<u8>]; 3]) -> Vec<TestNode> {
    let mut nodes = Vec::new();
    for (layers, files) in LAYERS.into_iter().zip(files) {
        nodes.push(TestNode::start("demo", Some(layers), bases(files)).await);
    }
    nodes
}

pub(crate) fn addresses(nodes: &[TestNode]) -> Vec<StationAddress> {
    nodes.iter().map(TestNode::unix).collect()
}

pub(crate) async fn connect(addresses: &[StationAddress], wire: Wire) -> Pipeline {
    let options = ClientOptions { request_timeout: PATIENCE, ..ClientOptions::default() };
    let mut pipeline = Pipeline::connect(addresses, &options).await.unwrap();
    pipeline.set_wire(wire);
    pipeline
}

fn pcar() -> Wire {
    Wire::Pcar(PcarWire::default())
}

pub(crate) fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..len).map(|_| (random.next() % 1024) as u32).collect()
}

/// A prompt and some tokens; ids and logits, so that a single bit shows.
async fn try_steps(pipeline: &mut Pipeline, ids: &[u32], steps: usize) -> Result<Vec<Next>, ClientError> {
    let mut out = Vec::new();
    let mut ids = ids.to_vec();
    for _ in 0..steps {
        let next = pipeline.extend(&ids, Want::TopK(4)).await?;
        ids = vec![next.ids[0]];
        out.push(next);
    }
    Ok(out)
}

pub(crate) async fn steps(pipeline: &mut Pipeline, ids: &[u32], steps: usize) -> Vec<Next> {
    try_steps(pipeline, ids, steps).await.unwrap()
}

pub(crate) fn traffic(pipeline: &Pipeline) -> Vec<HopTraffic> {
    pipeline.stages().iter().map(|stage| stage.traffic).collect()
}

pub(crate) fn refused(pipeline: &Pipeline) -> Vec<u64> {
    traffic(pipeline).iter().map(|hop| hop.refused).collect()
}

pub(crate) fn compressed(pipeline: &Pipeline) -> Vec<u64> {
    traffic(pipeline).iter().map(|hop| hop.compressed).collect()
}

/// What a run gives where the stations have these bases from the start.
pub(crate) async fn run_with(files: [&[&Vec<u8>]; 3], wire: Wire) -> Vec<Next> {
    let nodes = mesh(files).await;
    let mut pipeline = connect(&addresses(&nodes), wire).await;
    let out = steps(&mut pipeline, &prompt(1, 20), 5).await;
    assert_eq!(refused(&pipeline), [0, 0, 0]);
    assert!(nodes.iter().all(|node| node.errors() == 0));
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_at_any_station_gives_the_run_that_was_raw_there_from_the_start() {
    let (a, renamed) = (basis(K, "a"), basis(K, "renamed"));
    let all: &[&Vec<u8>] = &[&a];
    let exact = run_with([&[], &[], &[]], Wire::Exact).await;
    let everywhere = run_with([all; 3], pcar()).await;
    assert_ne!(everywhere, exact, "compression shows in the logits");
    for station in [1, 2] {
        let mut from_the_start = [all; 3];
        from_the_start[station] = &[];
        let expected = run_with(from_the_start, pcar()).await;
        assert_ne!(expected, everywhere);
        for instead in [&[][..], &[&renamed]] {
            let nodes = mesh([all; 3]).await;
            let mut pipeline = connect(&addresses(&nodes), pcar()).await;
            nodes[station].replace(bases(instead));
            assert_eq!(steps(&mut pipeline, &prompt(1, 20), 5).await, expected, "station {station}");
            let mut count = [0, 0, 0];
            count[station] = 1;
            assert_eq!(refused(&pipeline), count);
            assert_eq!(nodes.iter().map(TestNode::errors).collect::<Vec<_>>(), count);
            assert_eq!(compressed(&pipeline)[station], 0, "raw after the refusal");

            // The station has nothing new to say: raw, and no refusal either.
            pipeline.refresh().await.unwrap();
            steps(&mut pipeline, &[7], 2).await;
            assert_eq!(refused(&pipeline), count);
            // The basis is back: tried again.
            nodes[station].replace(bases(all));
            pipeline.refresh().await.unwrap();
            steps(&mut pipeline, &[7], 2).await;
            assert_eq!(refused(&pipeline), count);
            assert_eq!(compressed(&pipeline)[station], 2);
            // Tried again means that it can be refused again.
            nodes[station].replace(bases(&[]));
            steps(&mut pipeline, &[7], 2).await;
            count[station] = 2;
            assert_eq!(refused(&pipeline), count);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stations_that_all_lose_the_basis_give_the_exact_run() {
    let a = basis(K, "a");
    let exact = run_with([&[], &[], &[]], Wire::Exact).await;
    let nodes = mesh([&[&a]; 3]).await;
    let mut pipeline = connect(&addresses(&nodes), pcar()).await;
    nodes.iter().for_each(|node| node.replace(bases(&[])));
    assert_eq!(steps(&mut pipeline, &prompt(1, 20), 5).await, exact);
    // The first station answers raw at once, since it cannot do otherwise.
    assert_eq!(refused(&pipeline), [0, 0, 0]);

    let nodes = mesh([&[&a]; 3]).await;
    let mut pipeline = connect(&addresses(&nodes), pcar()).await;
    nodes[1..].iter().for_each(|node| node.replace(bases(&[])));
    assert_eq!(steps(&mut pipeline, &prompt(1, 20), 5).await, exact);
    assert_eq!(refused(&pipeline), [0, 1, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_methodology_is_refused_and_sent_raw() {
    let a = basis(K, "a");
    for station in [1, 2] {
        let nodes = mesh([&[&a]; 3]).await;
        let proxy = Proxy::changing(&nodes[station].socket, |mut seen| {
            if seen.is_request && seen.route == Route::FORWARD_PCA {
                for block in seen.body.chunks_mut(24 + 4 * K) {
                    block[16] ^= 1;
                }
            }
            seen
        });
        let mut addresses = addresses(&nodes);
        addresses[station] = proxy.address();
        let mut pipeline = connect(&addresses, pcar()).await;
        let got = steps(&mut pipeline, &prompt(1, 20), 5).await;
        let mut count = [0, 0, 0];
        count[station] = 1;
        assert_eq!(refused(&pipeline), count);
        let seen = proxy.take();
        assert!(seen[1].meta.starts_with(r#"{"status":412,"error":"methodology mismatch""#), "{}", seen[1].meta);
        assert!(seen[2..].iter().all(|seen| seen.route == Route::FORWARD), "raw from then on");
        assert_eq!(got, raw_into(station).await);
    }
}

/// A run in which one station gets raw residuals from the start and all else is compressed.
async fn raw_into(station: usize) -> Vec<Next> {
    let a = basis(K, "a");
    let all: &[&Vec<u8>] = &[&a];
    // Nothing enters the first station compressed, so that it need not have the basis.
    let files = if station == 1 { [&[], all, all] } else { [all, all, &[]] };
    run_with(files, pcar()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_station_that_loses_the_basis_while_its_neighbour_refuses_gets_raw_too() {
    let a = basis(K, "a");
    let exact = run_with([&[], &[], &[]], Wire::Exact).await;
    let mut nodes = mesh([&[&a]; 3]).await;
    // The moment the last station is asked, all stations behind the first have lost the basis: the middle one answered
    // with components just before, and is now asked again.
    let last = nodes.pop().unwrap();
    let (middle_bases, last_bases) = [&nodes[1], &last].map(|node| Arc::clone(node.node.station().bases())).into();
    let proxy = Proxy::changing(&last.socket, move |seen| {
        if seen.route == Route::FORWARD_PCA && seen.is_request {
            middle_bases.replace(bases(&[]));
            last_bases.replace(bases(&[]));
        }
        seen
    });
    let mut addresses = addresses(&nodes);
    addresses.push(proxy.address());
    let mut pipeline = connect(&addresses, pcar()).await;
    assert_eq!(steps(&mut pipeline, &prompt(1, 20), 5).await, exact);
    assert_eq!(refused(&pipeline), [0, 1, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compressed_answers_go_on_unchanged() {
    let a = basis(K, "a");
    let nodes = mesh([&[&a]; 3]).await;
    let proxies: Vec<Proxy> = nodes.iter().map(|node| Proxy::start(&node.socket)).collect();
    let addresses: Vec<StationAddress> = proxies.iter().map(Proxy::address).collect();
    let mut pipeline = connect(&addresses, pcar()).await;
    steps(&mut pipeline, &prompt(1, 20), 4).await;
    let logs: Vec<Vec<Seen>> = proxies.iter().map(Proxy::take).collect();
    let basis = file(&a);
    for (station, pair) in logs.windows(2).enumerate() {
        let answers = pair[0].iter().filter(|seen| !seen.is_request);
        let requests: Vec<&Seen> = pair[1].iter().filter(|seen| seen.is_request).collect();
        assert_eq!(requests.len(), 4);
        for (answer, request) in answers.zip(requests) {
            assert_eq!(answer.body, request.body);
            assert_eq!(request.route, Route::FORWARD_PCA);
            let header = PcarBody::decode(&request.body).unwrap().header();
            assert_eq!(header, crate::support::header(&basis, 2 * (station as u32 + 1), K));
        }
    }
    assert!(logs[0].iter().all(|seen| seen.route == Route::FORWARD), "the first station gets token ids");
    assert_eq!(compressed(&pipeline), [0, 4, 4]);
    let sent: Vec<u64> = traffic(&pipeline).iter().map(|hop| hop.sent).collect();
    let bytes = 23 * (24 + 4 * K as u64);
    assert_eq!(sent, [23 * 4, bytes, bytes]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_the_basis_compresses_for_a_station_whose_predecessor_has_none() {
    let a = basis(K, "a");
    let local = file(&a);
    let wire = |k| Wire::Pcar(PcarWire { local: Some(Arc::clone(&local)), k, ..PcarWire::default() });
    for (k, expected_k) in [(None, K), (Some(5), 5), (Some(1000), K)] {
        let nodes = mesh([&[], &[&a], &[&a]]).await;
        let proxies: Vec<Proxy> = nodes.iter().map(|node| Proxy::start(&node.socket)).collect();
        let addresses: Vec<StationAddress> = proxies.iter().map(Proxy::address).collect();
        let mut pipeline = connect(&addresses, wire(k)).await;
        steps(&mut pipeline, &prompt(1, 20), 3).await;
        let logs: Vec<Vec<Seen>> = proxies.iter().map(Proxy::take).collect();
        let raw = logs[0].iter().filter(|seen| !seen.is_request);
        for (raw, request) in raw.zip(logs[1].iter().filter(|seen| seen.is_request)) {
            assert_eq!(request.route, Route::FORWARD_PCA);
            assert_eq!(request.body, compress(&floats_of(&raw.body), 2, k, &local));
            assert_eq!(PcarBody::decode(&request.body).unwrap().k() as usize, expected_k);
        }
        assert_eq!(compressed(&pipeline), [0, 3, 3]);
    }
}

fn compress(residuals: &[f32], boundary: u32, k: Option<u32>, basis: &BasisFile) -> Vec<u8> {
    let policy = CompressionPolicy::of(basis, k.unwrap_or(u32::MAX));
    let mut body = Vec::new();
    compress_residuals(residuals, boundary, &policy, basis, &mut body).unwrap();
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_client_compressed_itself_is_sent_raw_after_a_refusal_without_asking_the_station_before_again() {
    let a = basis(K, "a");
    let wire = Wire::Pcar(PcarWire { local: Some(file(&a)), ..PcarWire::default() });
    let nodes = mesh([&[], &[&a], &[&a]]).await;
    let first = Proxy::start(&nodes[0].socket);
    let mut addresses = addresses(&nodes);
    addresses[0] = first.address();
    let mut pipeline = connect(&addresses, wire).await;
    nodes[1].replace(bases(&[]));
    let got = steps(&mut pipeline, &prompt(1, 20), 5).await;
    assert_eq!(refused(&pipeline), [0, 1, 0]);
    assert_eq!(first.requests().len(), 5);
    // The second station answers raw now, since it has no basis any more.
    assert_eq!(got, run_with([&[], &[], &[]], Wire::Exact).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_basis_that_two_neighbours_share_everything_is_exact() {
    let (a, b) = (basis(K, "a"), basis(K, "b"));
    let exact = run_with([&[], &[], &[]], Wire::Exact).await;
    let wires = [
        pcar(),
        Wire::Pcar(PcarWire { local: Some(file(&basis(K, "of nobody"))), ..PcarWire::default() }),
        Wire::Pcar(PcarWire { k: Some(3), ..PcarWire::default() }),
    ];
    for wire in wires {
        for files in [[&[][..], &[], &[]], [&[&a], &[], &[&a]], [&[&a], &[&b], &[&a]]] {
            assert_eq!(run_with(files, wire.clone()).await, exact);
        }
    }
    // Shared, but not the one that is wanted, or no components of it.
    let other = Wire::Pcar(PcarWire { basis_fp: Some(file(&b).basis_fp()), ..PcarWire::default() });
    assert_eq!(run_with([&[&a]; 3], other).await, exact);
    let none = Wire::Pcar(PcarWire { k: Some(0), ..PcarWire::default() });
    assert_eq!(run_with([&[&a]; 3], none).await, exact);
    let none = Wire::Pcar(PcarWire { k: Some(0), local: Some(file(&a)), ..PcarWire::default() });
    assert_eq!(run_with([&[], &[&a], &[]], none).await, exact);
    let mean_only = pcab(DIM, &[(2, 0), (4, 0)], 1, &demo_spec(), "");
    assert_eq!(run_with([&[&mean_only]; 3], pcar()).await, exact);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wire_says_which_basis_and_how_many_components() {
    let (a, b) = (basis(K, "a"), pcab(DIM, &[(2, 9), (4, 9)], 12, &demo_spec(), "b"));
    let nodes = mesh([&[&a, &b]; 3]).await;
    let proxy = Proxy::start(&nodes[2].socket);
    let mut addresses = addresses(&nodes);
    addresses[2] = proxy.address();
    let mut pipeline = connect(&addresses, Wire::Exact).await;
    let (a, b) = (file(&a), file(&b));
    for (wanted, k, expected_basis, expected_k) in [
        (Some(&b), None, &b, 9),
        (Some(&b), Some(4), &b, 4),
        (Some(&a), Some(10), &a, 10),
        (Some(&b), Some(10), &b, 9),
        (Some(&a), Some(u32::MAX), &a, K),
        (None, Some(1), &a, 1),
    ] {
        let basis_fp = wanted.map(|basis| basis.basis_fp());
        pipeline.set_wire(Wire::Pcar(PcarWire { basis_fp, k, local: None }));
        steps(&mut pipeline, &[3, 4], 2).await;
        for request in proxy.requests() {
            let header = PcarBody::decode(&request.body).unwrap().header();
            assert_eq!(header, crate::support::header(expected_basis, 4, expected_k));
        }
    }
    // Exact again: no PCA route, and nothing else than f32 is accepted.
    pipeline.set_wire(Wire::Exact);
    steps(&mut pipeline, &[3, 4], 2).await;
    let seen = proxy.requests();
    assert_eq!(seen.len(), 2);
    assert!(seen.iter().all(|seen| seen.route == Route::FORWARD && !seen.meta.contains("accept")), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_exact_wire_sends_no_pca_route_though_all_stations_have_the_basis() {
    let a = basis(K, "a");
    let nodes = mesh([&[&a]; 3]).await;
    let proxies: Vec<Proxy> = nodes.iter().map(|node| Proxy::start(&node.socket)).collect();
    let addresses: Vec<StationAddress> = proxies.iter().map(Proxy::address).collect();
    let mut pipeline = connect(&addresses, Wire::Exact).await;
    let got = steps(&mut pipeline, &prompt(1, 20), 5).await;
    assert_eq!(got, run_with([&[], &[], &[]], Wire::Exact).await);
    for seen in proxies.iter().flat_map(Proxy::requests) {
        assert!(seen.route == Route::FORWARD && !seen.meta.contains("accept"), "{seen:?}");
    }
    assert_eq!(compressed(&pipeline), [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prompt_over_udp_is_split_so_that_components_fit_too() {
    // With all components a position is larger than a raw one.
    let a = basis(DIM, "a");
    let nodes = mesh([&[&a]; 3]).await;
    let udp: Vec<StationAddress> = nodes.iter().map(TestNode::udp).collect();
    let mut pipeline = connect(&udp, pcar()).await;
    let ids = prompt(5, 300);
    let next = pipeline.extend(&ids, Want::Token).await.unwrap();
    assert_eq!(next.ids.len(), 1);
    assert_eq!(refused(&pipeline), [0, 0, 0]);
    assert!(compressed(&pipeline)[1] >= 3);
    assert!(nodes.iter().all(|node| node.errors() == 0));
}

/// Changes what the first station says while `on` is set, and returns how the pipeline takes it.
async fn with_changed_answers(wire: Wire, change: impl Fn(Seen) -> Seen + Send + Sync + 'static) -> ClientError {
    let a = basis(K, "a");
    let nodes = mesh([&[&a]; 3]).await;
    let on = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&on);
    let proxy = Proxy::changing(&nodes[0].socket, move |seen| match flag.load(Ordering::Relaxed) && !seen.is_request {
        true => change(seen),
        false => seen,
    });
    let mut addresses = addresses(&nodes);
    addresses[0] = proxy.address();
    let mut pipeline = connect(&addresses, wire).await;
    steps(&mut pipeline, &prompt(1, 20), 1).await;
    on.store(true, Ordering::Relaxed);
    let error = try_steps(&mut pipeline, &[5], 1).await.unwrap_err();
    assert_eq!(pipeline.history().len(), 20, "the session is as it was before");
    on.store(false, Ordering::Relaxed);
    steps(&mut pipeline, &[5], 1).await;
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_other_layers_is_not_passed_on() {
    for wire in [Wire::Exact, pcar()] {
        let error = with_changed_answers(wire, |mut seen| {
            seen.meta = seen.meta.replace(r#""layers":[0,2]"#, r#""layers":[0,3]"#);
            seen
        })
        .await;
        assert!(
            matches!(error.cause(), ClientError::BadReply { problem, .. } if problem.contains("layers")),
            "{error}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn components_that_are_not_what_was_asked_for_are_not_passed_on() {
    // One byte of each header field, and one byte less.
    for at in [0, 4, 8, 12, 16, 20, usize::MAX] {
        let error = with_changed_answers(pcar(), move |mut seen| {
            match seen.body.get_mut(at) {
                Some(byte) => *byte ^= 0x40,
                None => drop(seen.body.pop()),
            }
            seen
        })
        .await;
        let is_bad_reply =
            matches!(error.cause(), ClientError::BadReply { problem, .. } if problem.contains("components"));
        assert!(is_bad_reply, "byte {at}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_412_of_a_raw_request_is_an_error_and_not_tried_for_ever() {
    let a = basis(K, "a");
    let nodes = mesh([&[&a]; 3]).await;
    let proxy = Proxy::changing(&nodes[1].socket, |mut seen| {
        // Raw or not, the station seems to refuse everything.
        if !seen.is_request && seen.route != Route::HELLO {
            (seen.meta, seen.body) = (r#"{"status":412,"error":"basis fingerprint mismatch"}"#.to_owned(), vec![]);
        }
        seen
    });
    let mut addresses = addresses(&nodes);
    addresses[1] = proxy.address();
    let mut pipeline = connect(&addresses, pcar()).await;
    let error = try_steps(&mut pipeline, &prompt(1, 20), 1).await.unwrap_err();
    assert_eq!(error.status(), Some(Status::PRECONDITION_FAILED), "{error}");
    assert_eq!(proxy.requests().len(), 2, "once compressed, once raw");
    assert_eq!(refused(&pipeline), [0, 1, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_one_fingerprint_but_other_contents_are_not_shared() {
    let a = basis(K, "a");
    let (hash, other) = (file(&a).blake3().to_string(), "0".repeat(64));
    let nodes = mesh([&[&a]; 3]).await;
    let proxy = Proxy::changing(&nodes[1].socket, move |mut seen| {
        if seen.route == Route::HELLO {
            seen.meta = seen.meta.replace(&hash, &other);
        }
        seen
    });
    let mut addresses = addresses(&nodes);
    addresses[1] = proxy.address();
    // The last station has the file that this client has, so that it can be compressed for.
    for (local, to_the_last) in [(None, 0), (Some(file(&a)), 2)] {
        let mut pipeline = connect(&addresses, Wire::Pcar(PcarWire { local, ..PcarWire::default() })).await;
        steps(&mut pipeline, &prompt(1, 20), 2).await;
        assert_eq!(compressed(&pipeline), [0, 0, to_the_last]);
    }
}
