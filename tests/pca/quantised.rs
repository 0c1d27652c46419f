//! Quantised residuals: the checks in their order, what comes out, and a mesh that sends them.

use std::sync::Arc;

use aeon_proto::{
    frame::Flags,
    qres::{self, Format, Header, Parts, QresBody, Rotation},
    route::Route,
};
use aeon_station::{
    basis::{
        BasisFile,
        quantiser::{Norms, Quantiser},
    },
    client::{Pipeline, StationAddress, Wire, pipeline::QuantisedWire},
};

use crate::{
    fallback::{addresses, bases, basis, compressed, connect, mesh, prompt, refused, run_with, steps, traffic},
    proxy::{Proxy, Seen},
    support::{Random, TestNode, bytes_of, file, floats_of, pcab, set, spec},
};

const DIM: usize = 96;

fn quantiser(format: Format, boundary: u32, basis: Option<&Arc<BasisFile>>) -> Quantiser {
    Quantiser::new(format, boundary, DIM as u32, basis.cloned()).unwrap()
}

fn body(quantiser: &Quantiser, residuals: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    quantiser.encode(residuals, Some(0), &mut Norms::default(), &mut out).unwrap();
    out
}

/// What a body stands for, by the functions of the format alone.
fn read(bytes: &[u8], basis: Option<&BasisFile>) -> Vec<f32> {
    let body = QresBody::decode(bytes).unwrap();
    let header = body.header();
    let rotation = Rotation::new(header.hidden_dim as usize, header.seed).filter(|_| header.format.is_rotated());
    let mean = basis.filter(|_| header.basis_fp != 0).map(|basis| basis.boundary(header.boundary).unwrap().mean);
    let mut out = vec![0.0; body.seq() * header.hidden_dim as usize];
    body.read(&Parts { mean, rotation: rotation.as_ref() }, &mut out).unwrap();
    out
}

fn wire(format: Format) -> Wire {
    Wire::Quantised(QuantisedWire::new(format))
}

/// A fault: what it is, the body, the status, what the error says, and members behind it.
type Case = (&'static str, Vec<u8>, u64, &'static str, String);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_has_its_answer_and_the_connection_lives() {
    let (narrow, wide) = (spec(DIM, "a"), spec(2 * DIM, "a"));
    let files = [pcab(DIM, &[(0, 0)], 1, &narrow, "a"), pcab(2 * DIM, &[(0, 1)], 2, &wide, "wide")];
    let model = format!("identity:{DIM}");
    let node = TestNode::start(&model, None, set(&files, &[&narrow, &wide])).await;
    let [known, wide] = files.each_ref().map(|bytes| file(bytes));
    let values = Random(3).numbers(3 * DIM);
    let good = body(&quantiser(Format::Rotated(4), 0, Some(&known)), &values);
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let other_basis = |basis: &BasisFile| with(16, &[basis.basis_fp().to_le_bytes(), [0; 4]].concat());
    let raw = |header: Header, values: &[f32]| {
        let rotation = Rotation::new(header.hidden_dim as usize, header.seed);
        let mut out = Vec::new();
        let parts = Parts { mean: None, rotation: rotation.as_ref() };
        qres::encode(&header, &parts, values, |_, _| false, &mut out).unwrap();
        out
    };
    let header = Header {
        boundary: 0,
        hidden_dim: DIM as u32,
        basis_fp: 0,
        methodology: 0,
        format: Format::Rotated(3),
        seed: 5,
    };
    let fp = |basis: &BasisFile| format!("\"0x{:08x}\"", basis.basis_fp());
    let mismatch = format!(",\"have\":[{},{}]", fp(&known), fp(&wide));
    let gain = 33 + 2 * DIM;
    let cases: Vec<Case> = vec![
        ("nothing", vec![], 400, "body is empty", String::new()),
        ("short", good[..31].to_vec(), 400, "qres of 31 bytes", String::new()),
        ("tag", with(0, b"PCAR"), 400, "qres tag is", String::new()),
        ("format", with(24, &[2, 9]), 400, "qres format 2 with 9 bits", String::new()),
        ("flags", with(26, &[4]), 400, "qres flags are 0x0004", String::new()),
        ("long", [&*good, &[0]].concat(), 400, "qres of ", String::new()),
        ("bitmap", with(32, &[0x80]), 400, "qres bitmap", String::new()),
        ("positions", with(12, &[255; 4]), 400, "qres of ", String::new()),
        ("basis", with(16, b"none"), 412, "basis fingerprint mismatch", mismatch.clone()),
        (
            "methodology",
            with(20, &[1]),
            412,
            "methodology mismatch",
            format!(",\"methodology\":\"0x{:08x}\"", known.methodology()),
        ),
        // The basis comes before the width, and the width before the boundary.
        ("basis first", [&with(16, b"none")[..4], &[9], &with(16, b"none")[5..]].concat(), 412, "basis", mismatch),
        (
            "width",
            raw(Header { hidden_dim: 8, boundary: 7, ..header }, &[1.0; 8]),
            400,
            "hidden_dim mismatch: 8 in the body",
            format!(",\"hidden_dim\":{DIM}"),
        ),
        (
            "width of the basis",
            [&other_basis(&wide)[..20], &wide.methodology().to_le_bytes()[..], &good[24..]].concat(),
            400,
            "hidden_dim mismatch: 192 in the basis",
            format!(",\"hidden_dim\":{DIM}"),
        ),
        ("boundary", with(4, &[1]), 409, "", ",\"boundary\":0".to_owned()),
        ("NaN", with(gain, &[0, 0x7e]), 422, "position 1 of the quantised body", String::new()),
        ("infinity", with(33, &[0, 0xfc]), 422, "position 0 of the quantised body", String::new()),
    ];
    for (carrier, mut link) in node.links() {
        for (name, body, status, error, fields) in &cases {
            let answer = link.ask(Route::FORWARD_Q, "", body);
            assert_eq!((answer.status(), answer.flags), (*status, Flags::FAILURE), "{carrier} {name} {}", answer.text);
            assert!(answer.error().starts_with(error), "{carrier} {name} {}", answer.text);
            assert!(answer.text.ends_with(&format!("{fields}}}")), "{carrier} {name} {}", answer.text);
            let meta = r#"{"session":"s","pos":0}"#;
            assert_eq!(link.ask(Route::FORWARD_Q, meta, &good).ok(), bytes_of(&read(&good, Some(&known))));
        }
        // The head's boundary is 1, which this basis does not have: it takes a body without a mean.
        let at_head = with(4, &[1]);
        let answer = link.ask(Route::LM_HEAD_Q, "", &at_head);
        assert_eq!(
            (answer.status(), answer.error()),
            (412, "the basis has no components for boundary 1; send raw f32")
        );
        let head = body(&quantiser(Format::Rotated(8), 1, None), &[9.0; DIM]);
        let token = link.ask(Route::LM_HEAD_Q, "", &head).ok();
        assert_eq!(token, 9_u32.to_le_bytes());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_and_answers_are_what_the_format_says() {
    let spec = spec(DIM, "a");
    let bytes = pcab(DIM, &[(0, 0), (1, 2)], 5, &spec, "a");
    let known = file(&bytes);
    let node = TestNode::start(&format!("identity:{DIM}"), None, set(&[&bytes], &[&spec])).await;
    let values = Random(8).numbers(5 * DIM);
    for (carrier, mut link) in node.links() {
        for format in Format::ALL {
            for basis in [None, Some(&known)] {
                // In: the station answers with what it read.
                let sent = body(&quantiser(format, 0, basis), &values);
                let expected = read(&sent, Some(&known));
                assert_eq!(floats_of(&link.ask(Route::FORWARD_Q, "", &sent).ok()), expected, "{carrier} {format:?}");
                // Out: it answers with the body of what came in raw.
                let list = basis.map(|basis| format!("\"0x{:08x}\"", basis.basis_fp())).unwrap_or_default();
                let meta = format!(r#"{{"accept":["e4","{}","f32"],"accept_basis":[{list}]}}"#, format.name());
                let answer = link.ask(Route::FORWARD, &meta, &bytes_of(&values));
                assert_eq!(answer.meta["body"], format.name());
                assert_eq!(answer.ok(), body(&quantiser(format, 1, basis), &values), "{carrier} {format:?}");
            }
            // Without a list the answer has the mean of the request's basis.
            let meta = format!(r#"{{"accept":["{}"]}}"#, format.name());
            let sent = body(&quantiser(format, 0, Some(&known)), &values);
            let answer = link.ask(Route::FORWARD_Q, &meta, &sent).ok();
            assert_eq!(answer, body(&quantiser(format, 1, Some(&known)), &read(&sent, Some(&known))), "{format:?}");
            // A basis that the station lacks leaves the mean out, and raw bodies name none.
            for list in [r#","accept_basis":["0x00000001"]"#, ""] {
                let meta = format!(r#"{{"accept":["{}"]{list}}}"#, format.name());
                let answer = link.ask(Route::FORWARD, &meta, &bytes_of(&values)).ok();
                assert_eq!(answer, body(&quantiser(format, 1, None), &values));
            }
        }
        let answer = link.ask(Route::FORWARD, r#"{"accept":["e4"]}"#, &bytes_of(&values));
        assert_eq!(answer.status(), 400, "{}", answer.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_escapes_its_first_position_and_outliers_and_repeats_itself() {
    let node = TestNode::start(&format!("identity:{DIM}"), None, set::<Vec<u8>>(&[], &[])).await;
    let ones = [1.0; DIM];
    let escaped = |bytes: &[u8]| {
        let body = QresBody::decode(bytes).unwrap();
        (0..body.seq()).map(|position| body.is_escaped(position)).collect::<Vec<_>>()
    };
    for (carrier, mut link) in node.links() {
        let mut ask = |pos: usize, scales: &[f32]| {
            let meta = format!(r#"{{"session":"{carrier}","pos":{pos},"accept":["q4"]}}"#);
            let values: Vec<f32> = scales.iter().flat_map(|scale| ones.map(|one| one * scale)).collect();
            escaped(&link.ask(Route::FORWARD, &meta, &bytes_of(&values)).ok())
        };
        assert_eq!(ask(0, &[1.0, 1.0, 1.0, 1.0, 1.0, 9.0]), [true, false, false, false, false, true]);
        assert_eq!(ask(6, &[3.5]), [false]);
        assert_eq!(ask(7, &[4.5]), [true]);
        assert_eq!(ask(7, &[4.5]), [true]);
        // Going back forgets what came after.
        assert_eq!(ask(1, &[10.0, 10.0]), [false, false]);
        assert_eq!(ask(3, &[39.0]), [false]);
        assert_eq!(ask(3, &[41.0]), [true]);
    }
}

async fn logits(pipeline: &mut Pipeline) -> Vec<f32> {
    steps(pipeline, &prompt(1, 20), 4).await.into_iter().flat_map(|next| next.logits).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mesh_sends_fewer_bytes_and_stays_close() {
    let nodes = mesh([&[], &[], &[]]).await;
    let udp: Vec<StationAddress> = nodes.iter().map(TestNode::udp).collect();
    let mut exact = connect(&addresses(&nodes), Wire::Exact).await;
    let exact = logits(&mut exact).await;
    let size = exact.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let positions = 23.0;
    // By the square root of the distortion: it doubles with each bit less.
    let bounds = [0.002, 0.05, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6];
    for (format, bound) in Format::ALL.into_iter().zip(bounds) {
        let mut runs = Vec::new();
        for addresses in [addresses(&nodes), udp.clone()] {
            let mut pipeline = connect(&addresses, wire(format)).await;
            let got = steps(&mut pipeline, &prompt(1, 20), 4).await;
            assert_eq!((refused(&pipeline), compressed(&pipeline)), (vec![0; 3], vec![0, 4, 4]));
            for hop in &traffic(&pipeline)[1..] {
                let plain = format.position_len(128) as f64;
                let most = positions * plain + 2.0 * 256.0 + 4.0 * 35.0;
                assert!((hop.sent as f64) < most, "{format:?}: {} bytes of {most}", hop.sent);
                assert_eq!(hop.sent + hop.saved, 23 * 512, "{format:?}");
            }
            runs.push(got);
        }
        assert_eq!(runs[0], runs[1], "{format:?}");
        // The first token's logits, before the texts part.
        let first = &runs[0][0];
        let error = first.logits.iter().zip(&exact).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(error < bound * size, "{format:?}: {error} of {size}");
        assert!(error > 0.0, "{format:?} must show in the logits");
    }
    assert!(nodes.iter().all(|node| node.errors() == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_station_sends_the_next_gets_with_the_mean_that_both_have() {
    let a = basis(0, "a");
    for (files, has_mean) in [([&[&a][..]; 3], true), ([&[&a], &[], &[&a]], false)] {
        let nodes = mesh(files).await;
        let proxies: Vec<Proxy> = nodes.iter().map(|node| Proxy::start(&node.socket)).collect();
        let addresses: Vec<StationAddress> = proxies.iter().map(Proxy::address).collect();
        let mut pipeline = connect(&addresses, wire(Format::Rotated(5))).await;
        steps(&mut pipeline, &prompt(1, 20), 3).await;
        let logs: Vec<Vec<Seen>> = proxies.iter().map(Proxy::take).collect();
        let mut count = 0;
        for (hop, two) in logs.windows(2).enumerate() {
            let answers = two[0].iter().filter(|seen| !seen.is_request);
            for (answer, request) in answers.zip(two[1].iter().filter(|seen| seen.is_request)) {
                assert_eq!((request.route, &request.body), (Route::FORWARD_Q, &answer.body));
                let body = QresBody::decode(&request.body).unwrap();
                let fingerprint = if has_mean { file(&a).basis_fp() } else { 0 };
                assert_eq!((body.header().boundary, body.header().basis_fp), (2 * hop as u32 + 2, fingerprint));
                assert_eq!(body.is_escaped(0), count % 3 == 0, "only the session's first position");
                count += 1;
            }
        }
        assert_eq!(count, 6);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_basis_gives_the_run_that_was_raw_there_from_the_start() {
    let a = basis(0, "a");
    let all = &[&a][..];
    for format in [Format::Rotated(4), Format::Rotated(8)] {
        for station in [1, 2] {
            let nodes = mesh([all; 3]).await;
            let mut pipeline = connect(&addresses(&nodes), wire(format)).await;
            nodes[station].replace(bases(&[]));
            let got = steps(&mut pipeline, &prompt(1, 20), 5).await;
            let mut count = [0, 0, 0];
            count[station] = 1;
            assert_eq!(refused(&pipeline), count);
            // The hop before a refusal is done twice.
            assert_eq!(compressed(&pipeline), [[0, 0, 5], [0, 6, 0]][station - 1]);
            if station == 2 {
                // Station 1 has its basis, so the hop to it is as ever; the raw hop behind it shows.
                assert_ne!(got, run_with([all; 3], wire(format)).await);
            }
        }
    }
    // Formats without a mean meet no such refusal.
    let nodes = mesh([all; 3]).await;
    let mut pipeline = connect(&addresses(&nodes), wire(Format::I8)).await;
    nodes[1].replace(bases(&[]));
    steps(&mut pipeline, &prompt(1, 20), 2).await;
    assert_eq!(refused(&pipeline), [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_the_basis_takes_the_mean_off_for_a_station_whose_predecessor_has_none() {
    let a = basis(0, "a");
    let local = file(&a);
    let nodes = mesh([&[], &[&a], &[&a]]).await;
    let proxies: Vec<Proxy> = nodes.iter().map(|node| Proxy::start(&node.socket)).collect();
    let addresses: Vec<StationAddress> = proxies.iter().map(Proxy::address).collect();
    let wire =
        Wire::Quantised(QuantisedWire { local: Some(Arc::clone(&local)), ..QuantisedWire::new(Format::Rotated(4)) });
    let mut pipeline = connect(&addresses, wire).await;
    steps(&mut pipeline, &prompt(1, 20), 3).await;
    assert_eq!(compressed(&pipeline), [0, 3, 3]);
    let logs: Vec<Vec<Seen>> = proxies.iter().map(Proxy::take).collect();
    let by_hand = Quantiser::new(Format::Rotated(4), 2, 128, Some(local)).unwrap();
    let (mut norms, mut begin) = (Norms::default(), 0);
    let answers = logs[0].iter().filter(|seen| !seen.is_request);
    for (answer, request) in answers.zip(logs[1].iter().filter(|seen| seen.is_request)) {
        let mut expected = Vec::new();
        by_hand.encode(&floats_of(&answer.body), Some(begin), &mut norms, &mut expected).unwrap();
        assert_eq!((request.route, &request.body), (Route::FORWARD_Q, &expected));
        begin += answer.body.len() / 512;
    }
    assert_eq!(begin, 22);
    // Its refusal is repeated raw from what the client holds.
    nodes[1].replace(bases(&[]));
    steps(&mut pipeline, &[5], 1).await;
    assert_eq!(refused(&pipeline), [0, 1, 0]);
}
