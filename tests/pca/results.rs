//! What the PCA routes compute: bit for bit what the raw routes compute on the lifted residual, and answers that are the
//! projection of the raw answer.

use std::sync::Arc;

use aeon_proto::{frame::Flags, pcar::PcarBody, residual, route::Route};
use aeon_station::{basis::BasisFile, client::StationAddress};

use crate::support::{
    Answer, Random, Raw, TestNode, bytes_of, file, floats_of, header, lifted, pcab, pcar_body, projected, set, spec,
};

const DEMO: usize = 128;

fn fp48(body: &[u8]) -> String {
    format!("{:012x}", xxhash_rust::xxh64::xxh64(body, 0) & 0xffff_ffff_ffff)
}

/// Bases for the demo model, all components at every boundary.
fn demo_basis(seed: u64, k: usize, note: &str) -> (Vec<u8>, Arc<BasisFile>) {
    let parts: Vec<(u32, usize)> = (0..=6).map(|boundary| (boundary, k)).collect();
    let bytes = pcab(DEMO, &parts, seed, &spec(DEMO, "a"), note);
    let basis = file(&bytes);
    (bytes, basis)
}

fn components(seed: u64, seq: usize, k: usize) -> Vec<f32> {
    Random(seed).numbers(seq * k)
}

/// Reads a PCAR answer and checks every field of its header.
fn pcar_of(answer: &Answer, basis: &BasisFile, boundary: u32, k: usize) -> Vec<f32> {
    assert_eq!((answer.status(), answer.meta["body"].as_str()), (200, Some("pcar")), "{}", answer.text);
    let body = PcarBody::decode(&answer.body).unwrap();
    assert_eq!(body.header(), header(basis, boundary, k));
    assert_eq!(Some(body.seq() as u64), answer.meta["seq"].as_u64(), "{}", answer.text);
    assert_eq!(answer.meta["dim"].as_u64(), Some(u64::from(basis.hidden_dim())), "{}", answer.text);
    let mut components = Vec::new();
    body.read_components(&mut components);
    components
}

/// A PCA request and the raw request of what it stands for must have the same answer, meta and all.
fn same(link: &mut Raw, pca: (Route, &str, &[u8]), raw: (Route, &str, &[u8])) -> Vec<u8> {
    let expected = link.ask(raw.0, raw.1, raw.2);
    let got = link.ask(pca.0, pca.1, pca.2);
    assert_eq!(got.text, expected.text);
    let expected = expected.ok();
    assert_eq!(got.ok(), expected);
    expected
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forward_pca_is_forward_on_the_lifted_residual() {
    let (demo, narrow) = (spec(DEMO, "a"), spec(8, "a"));
    let files = [demo_basis(1, DEMO, "").0, pcab(8, &[(0, 8)], 2, &narrow, "")];
    let basis = [file(&files[0]), file(&files[1])];
    for (model, layers, lo, which, dim) in
        [("identity:8", None, 0, 1, 8), ("demo", None, 0, 0, DEMO), ("demo", Some("2..5"), 2, 0, DEMO)]
    {
        let node = TestNode::start(model, layers, set(&files, &[&demo, &narrow])).await;
        let basis = &basis[which];
        for (carrier, mut link) in node.links() {
            for (k, seq) in [(dim, 1), (dim, 9), (1, 1), (3, 1), (3, 30), (dim - 1, 2)] {
                let values = components(k as u64, seq, k);
                let body = pcar_body(basis, lo, k, &values);
                let raw = bytes_of(&lifted(basis, lo, k, &values));
                same(&mut link, (Route::FORWARD_PCA, "", &body), (Route::FORWARD, "", &raw));
                let name = |form: &str, pos: usize| format!(r#"{{"session":"{carrier}-{form}-{k}","pos":{pos}}}"#);
                // The same split on both sides: how positions are grouped may change the last bit.
                let mut pos = 0;
                for part in [1, 3, 2, seq].map(|part| part.min(seq)) {
                    let (from, to) = (pos.min(seq - part), pos.min(seq - part) + part);
                    let block = 24 + 4 * k;
                    let pca = &body[from * block..to * block];
                    let raw = &raw[from * 4 * dim..to * 4 * dim];
                    same(&mut link, (Route::FORWARD_PCA, &name("p", pos), pca), (Route::FORWARD, &name("r", pos), raw));
                    pos += part;
                }
                assert_eq!(link.session_len(&format!("{carrier}-p-{k}"), dim), pos as u64);
                // Back to an earlier position.
                same(&mut link, (Route::FORWARD_PCA, &name("p", 1), &body), (Route::FORWARD, &name("r", 1), &raw));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_head_on_components_is_the_head_on_the_lifted_residual() {
    let (bytes, basis) = demo_basis(3, DEMO, "");
    let spec = spec(DEMO, "a");
    let node = TestNode::start("demo", Some("3..6"), set(&[&bytes], &[&spec])).await;
    for (_, mut link) in node.links() {
        for (k, seq) in [(DEMO, 1), (DEMO, 5), (2, 1), (2, 7)] {
            let values = components(9, seq, k);
            let head = pcar_body(&basis, 6, k, &values);
            let head_raw = bytes_of(&lifted(&basis, 6, k, &values));
            let layers = pcar_body(&basis, 3, k, &values);
            let layers_raw = bytes_of(&lifted(&basis, 3, k, &values));
            for (how, width) in [
                ("{}", 4),
                (r#"{"return":"token"}"#, 4),
                (r#"{"return":"topk","top_k":3}"#, 24),
                (r#"{"return":"logits"}"#, 4096),
            ] {
                let answer = same(&mut link, (Route::LM_HEAD_PCA, how, &head), (Route::LM_HEAD, how, &head_raw));
                assert_eq!(answer.len(), seq * width, "{how}");
                let how =
                    if how == "{}" { r#"{"out":"token"}"#.into() } else { how.replace('}', r#","out":"token"}"#) };
                let answer = same(&mut link, (Route::FORWARD_PCA, &how, &layers), (Route::FORWARD, &how, &layers_raw));
                assert_eq!(answer.len(), width, "{how}");
            }
        }
        let meta = r#"{"out":"token","session":"fused","pos":0}"#;
        let body = pcar_body(&basis, 3, 4, &components(2, 3, 4));
        assert_eq!(link.ask(Route::FORWARD_PCA, meta, &body).ok().len(), 4);
        assert_eq!(link.session_len("fused", DEMO), 3);
        link.ask(Route::RESET, r#"{"session":"fused"}"#, &[]).ok();
    }
}

/// What an answer should be.
#[derive(Debug, Clone, Copy)]
enum Expected {
    Raw,
    /// By the first or second basis, this many components.
    Pcar(usize, usize),
    Refused,
}

use Expected::{Pcar, Refused};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_acceptable_kind_and_basis_that_the_station_has_is_given() {
    let spec = spec(DEMO, "a");
    let ((a_bytes, a), (b_bytes, b)) = (demo_basis(4, 8, "a"), demo_basis(5, 5, "b"));
    // No components where the answers are.
    let poor = pcab(DEMO, &[(1, 0), (2, 8), (4, 0)], 6, &spec, "poor");
    let node = TestNode::start("demo", Some("2..4"), set(&[&a_bytes, &b_bytes, &poor], &[&spec])).await;
    let poor = file(&poor);
    let bases = [&a, &b];
    let [fp_a, fp_b, fp_poor] = [&a, &b, &poor].map(|basis| format!("0x{:08x}", basis.basis_fp()));
    let none = "0x00000001";
    let values = components(7, 3, 8);
    let (body_a, body_poor) = (pcar_body(&a, 2, 8, &values), pcar_body(&poor, 2, 8, &values));
    let raw = bytes_of(&lifted(&a, 2, 8, &values));
    use Expected::Raw;
    let by = |route: Route, meta: &str, expected: Expected| (route, meta.to_owned(), expected);
    let (forward, pca) = (Route::FORWARD, Route::FORWARD_PCA);
    let cases = [
        // Without `accept` a client sees f32 only, whatever else it says.
        by(forward, "{}", Raw),
        by(pca, "{}", Raw),
        by(pca, &format!(r#"{{"accept_basis":["{fp_a}"],"accept_k":3}}"#), Raw),
        by(forward, r#"{"accept":["f32"]}"#, Raw),
        by(pca, r#"{"accept":["f32","pcar"]}"#, Raw),
        // Without `accept_basis` it is the basis of the body, if that has one.
        by(pca, r#"{"accept":["pcar"]}"#, Pcar(0, 8)),
        by(pca, r#"{"accept":["pcar","f32"]}"#, Pcar(0, 8)),
        by(forward, r#"{"accept":["pcar","f32"]}"#, Raw),
        by(forward, r#"{"accept":["pcar"]}"#, Refused),
        // Kinds that this station cannot give, and that nobody knows, are passed over.
        by(pca, r#"{"accept":["e4","e8","e3","pcar"]}"#, Pcar(0, 8)),
        by(pca, r#"{"accept":["zstd","PCAR","q9","","pcar"]}"#, Pcar(0, 8)),
        by(pca, r#"{"accept":["e4","f32","pcar"]}"#, Raw),
        by(pca, r#"{"accept":["e4","e8"]}"#, Refused),
        by(pca, r#"{"accept":["unheard"]}"#, Refused),
        by(pca, r#"{"accept":[]}"#, Refused),
        by(forward, r#"{"accept":[]}"#, Refused),
        // The first of the listed bases that is here and fits.
        by(forward, &format!(r#"{{"accept":["pcar"],"accept_basis":["{fp_b}","{fp_a}"]}}"#), Pcar(1, 5)),
        by(forward, &format!(r#"{{"accept":["pcar"],"accept_basis":["{none}","{fp_a}","{fp_b}"]}}"#), Pcar(0, 8)),
        by(pca, &format!(r#"{{"accept":["pcar"],"accept_basis":["{fp_b}"]}}"#), Pcar(1, 5)),
        by(pca, &format!(r#"{{"accept":["pcar"],"accept_basis":["{fp_poor}","{fp_b}"]}}"#), Pcar(1, 5)),
        by(pca, &format!(r#"{{"accept":["pcar","f32"],"accept_basis":["{none}"]}}"#), Raw),
        by(pca, &format!(r#"{{"accept":["pcar","f32"],"accept_basis":["{fp_poor}"]}}"#), Raw),
        by(pca, r#"{"accept":["pcar","f32"],"accept_basis":[]}"#, Raw),
        by(pca, &format!(r#"{{"accept":["pcar"],"accept_basis":["{none}"]}}"#), Refused),
        by(pca, r#"{"accept":["pcar"],"accept_basis":[]}"#, Refused),
        // Components at most.
        by(pca, r#"{"accept":["pcar"],"accept_k":3}"#, Pcar(0, 3)),
        by(pca, r#"{"accept":["pcar"],"accept_k":1}"#, Pcar(0, 1)),
        by(pca, r#"{"accept":["pcar"],"accept_k":4294967295}"#, Pcar(0, 8)),
        by(pca, &format!(r#"{{"accept":["pcar"],"accept_basis":["{fp_b}"],"accept_k":7}}"#), Pcar(1, 5)),
        by(pca, r#"{"accept":["pcar","f32"],"accept_k":0}"#, Raw),
        by(pca, r#"{"accept":["pcar"],"accept_k":0}"#, Refused),
    ];
    for (carrier, mut link) in node.links() {
        let plain = floats_of(&link.ask(forward, "", &raw).ok());
        for (route, meta, expected) in &cases {
            let body = if *route == pca { &body_a } else { &raw };
            let answer = link.ask(*route, meta, body);
            match *expected {
                Raw => {
                    assert_eq!(answer.meta["body"], "f32", "{carrier} {meta}: {}", answer.text);
                    assert_eq!(floats_of(&answer.ok()), plain, "{carrier} {meta}");
                }
                Pcar(which, k) => {
                    let got = pcar_of(&answer, bases[which], 4, k);
                    assert_eq!(got, projected(bases[which], 4, k, &plain), "{carrier} {meta}");
                    assert_eq!(answer.meta["layers"].to_string(), "[2,4]");
                }
                Refused => {
                    assert_eq!(answer.status(), 400, "{carrier} {meta}: {}", answer.text);
                    assert!(answer.error().starts_with("none of the accepted body kinds"), "{}", answer.text);
                }
            }
        }
        // The body's basis has nothing where the answer is.
        let answer = link.ask(pca, r#"{"accept":["pcar"]}"#, &body_poor);
        assert_eq!(answer.status(), 400, "{}", answer.text);
        let answer = link.ask(pca, r#"{"accept":["pcar","f32"]}"#, &body_poor);
        assert_eq!((answer.status(), answer.meta["body"].as_str()), (200, Some("f32")), "{}", answer.text);
        // A refusal leaves the session alone.
        let meta = |more: &str| format!(r#"{{"session":"{carrier}","pos":0{more}}}"#);
        link.ask(pca, &meta(""), &body_a).ok();
        assert_eq!(link.ask(pca, &meta(r#","accept":["e4"]"#), &body_a).status(), 400);
        assert_eq!(link.session_len(carrier, DEMO), 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_and_the_last_residual_can_be_had_as_components() {
    let spec = spec(DEMO, "a");
    let (bytes, basis) = demo_basis(8, 16, "");
    let node = TestNode::start("demo", None, set(&[&bytes], &[&spec])).await;
    let mut ids = Vec::new();
    residual::encode_u32s(&[5, 900, 0, 5], &mut ids);
    let accept = format!(r#""accept":["pcar"],"accept_basis":["0x{:08X}"]"#, basis.basis_fp());
    for (_, mut link) in node.links() {
        let plain = floats_of(&link.ask(Route::EMBED, "", &ids).ok());
        let answer = link.ask(Route::EMBED, &format!("{{{accept}}}"), &ids);
        let embedded = pcar_of(&answer, &basis, 0, 16);
        assert_eq!(embedded, projected(&basis, 0, 16, &plain));
        // EMBED has no body with a basis that could be meant.
        assert_eq!(link.ask(Route::EMBED, r#"{"accept":["pcar"]}"#, &ids).status(), 400);
        assert_eq!(floats_of(&link.ask(Route::EMBED, r#"{"accept":["pcar","f32"]}"#, &ids).ok()), plain);
        // They are what FORWARD_PCA takes, and its answer what LM_HEAD_PCA takes.
        let answer = link.ask(Route::FORWARD_PCA, r#"{"accept":["pcar"]}"#, &answer.body);
        let last = pcar_of(&answer, &basis, 6, 16);
        let raw = bytes_of(&lifted(&basis, 6, 16, &last));
        same(&mut link, (Route::LM_HEAD_PCA, "", &answer.body), (Route::LM_HEAD, "", &raw));
        // Token ids in, components out.
        let plain = floats_of(&link.ask(Route::FORWARD, r#"{"in":"ids"}"#, &ids).ok());
        let answer = link.ask(Route::FORWARD, &format!(r#"{{"in":"ids",{accept}}}"#), &ids);
        assert_eq!(pcar_of(&answer, &basis, 6, 16), projected(&basis, 6, 16, &plain));
        // A token is no residual: what may stand for residuals does not matter.
        let answer = link.ask(Route::FORWARD, r#"{"in":"ids","out":"token","accept":["pcar"]}"#, &ids);
        assert_eq!((answer.meta["body"].as_str(), answer.body.len()), (Some("u32"), 4), "{}", answer.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hello_lists_the_bases_to_clients_of_version_one_only() {
    let spec = spec(DEMO, "a");
    let (a_bytes, a) = demo_basis(1, 3, "a");
    let b_bytes = pcab(DEMO, &[(0, 2), (3, 0), (6, 1)], 2, &spec, "b");
    let b = file(&b_bytes);
    let node = TestNode::start("demo", Some("0..3"), set(&[&a_bytes, &b_bytes], &[&spec])).await;
    for (_, mut link) in node.links() {
        let v1 = r#"{"content_type":"application/x-aeon-flow; v=1"}"#;
        let hello = link.ask(Route::HELLO, v1, &[]).meta;
        assert_eq!(hello["content_type"], "application/x-aeon-flow; v=1");
        assert_eq!(hello["accepts"].to_string(), r#"["f32","f16","i8","q8","q7","q6","q5","q4","q3","pcar"]"#);
        let listed = hello["bases"].as_array().unwrap();
        assert_eq!(listed.len(), 2);
        for (basis, listed) in [&a, &b].into_iter().zip(listed) {
            assert_eq!(listed["basis_fp"], format!("0x{:08x}", basis.basis_fp()));
            assert_eq!(listed["blake3"], basis.blake3().to_string());
            assert_eq!(listed["methodology"], format!("0x{:08x}", spec.id()));
            let parts = listed["boundaries"].as_array().unwrap();
            assert_eq!(parts.len(), basis.boundaries().count());
            for (part, listed) in basis.boundaries().zip(parts) {
                assert_eq!(listed["boundary"], part.boundary);
                assert_eq!(listed["k"], part.k);
                assert_eq!(listed["explained"], part.explained(part.k));
            }
        }
        // 3 + 2 + 1 of 7 in all.
        assert_eq!(listed[0]["boundaries"][0]["explained"], 6.0 / 7.0);
        assert_eq!(listed[1]["boundaries"][1]["explained"], 0.0);
        for v0 in ["", "{}", r#"{"content_type":"application/x-aeon-flow"}"#] {
            let hello = link.ask(Route::HELLO, v0, &[]).meta;
            assert_eq!(hello["accepts"].to_string(), r#"["f32"]"#);
            assert!(hello.get("bases").is_none(), "{hello}");
        }
        // The station keeps no negotiated state: components are taken from whoever sends them.
        link.ask(Route::FORWARD_PCA, "", &pcar_body(&a, 0, 1, &[1.0])).ok();
        node.replace(set::<Vec<u8>>(&[], &[]));
        let hello = link.ask(Route::HELLO, v1, &[]).meta;
        assert_eq!(
            (hello["accepts"].to_string(), hello["bases"].to_string()),
            (r#"["f32","f16","i8","q8","q7","q6","q5","q4","q3"]"#.into(), "[]".into())
        );
        node.replace(set(&[&a_bytes, &b_bytes], &[&spec]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_bases_than_an_answer_holds_leave_hello_and_the_412_working() {
    let spec = spec(DEMO, "a");
    let files: Vec<Vec<u8>> = (0..200).map(|n| demo_basis(n, 1, &n.to_string()).0).collect();
    let small = |settings: &mut aeon_station::config::Settings| settings.limits.max_datagram = Some(2048);
    let node = TestNode::start_with("demo", Some("0..1"), set(&files, &[&spec]), small).await;
    let [first, last] = [&files[0], &files[199]].map(|bytes| file(bytes));
    for (carrier, mut link) in node.links() {
        let hello = link.ask(Route::HELLO, r#"{"content_type":"application/x-aeon-flow; v=1"}"#, &[]);
        assert_eq!(hello.status(), 200, "{carrier}: {}", hello.text);
        let listed = hello.meta["bases"].as_array().unwrap();
        assert!(!listed.is_empty() && listed.len() < 200, "{carrier}: {}", listed.len());
        assert_eq!(listed[0]["basis_fp"], format!("0x{:08x}", first.basis_fp()));
        // Those that are not listed are there all the same.
        link.ask(Route::FORWARD_PCA, "", &pcar_body(&last, 0, 1, &[1.0])).ok();
        let unknown = pcab(DEMO, &[(0, 1)], 7, &spec, "unknown");
        let answer = link.ask(Route::FORWARD_PCA, "", &pcar_body(&file(&unknown), 0, 1, &[1.0]));
        assert_eq!(answer.status(), 412, "{carrier}: {}", answer.text);
        assert_eq!(answer.meta["have"][0], format!("0x{:08x}", first.basis_fp()));
    }
    // A client finds the station usable on both carriers.
    for address in [node.unix(), node.udp()] {
        let client = aeon_station::client::Client::connect(&address, Default::default()).await.unwrap();
        assert!(client.hello().await.unwrap().basis(first.basis_fp()).is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_datagram_counts_the_compressed_size() {
    let spec = spec(DEMO, "a");
    let (bytes, basis) = demo_basis(1, 4, "");
    let node = TestNode::start("demo", Some("0..3"), set(&[&bytes], &[&spec])).await;
    let mut link = Raw::udp(&node.udp());
    let body = pcar_body(&basis, 0, 4, &components(1, 400, 4));
    // 400 raw residuals are 204,800 bytes; as components they are 16,000.
    let meta = r#"{"session":"s","pos":0}"#;
    let answer = link.ask(Route::FORWARD_PCA, meta, &body);
    assert_eq!((answer.status(), answer.meta["max_datagram"].as_u64()), (413, Some(65_507)), "{}", answer.text);
    assert_eq!(link.session_len("s", DEMO), 0);
    let meta = r#"{"session":"s","pos":0,"accept":["pcar","f32"]}"#;
    let answer = link.ask(Route::FORWARD_PCA, meta, &body);
    assert_eq!((answer.status(), answer.body.len()), (200, 16_000), "{}", answer.text);
    assert_eq!(link.session_len("s", DEMO), 400);
    // The same limit of a frame.
    let small = |settings: &mut aeon_station::config::Settings| settings.limits.max_frame = Some(20_000);
    let node = TestNode::start_with("demo", Some("0..3"), set(&[&bytes], &[&spec]), small).await;
    let mut link = Raw::unix(&node.socket);
    let answer = link.ask(Route::FORWARD_PCA, "", &body);
    assert_eq!((answer.status(), answer.meta["max_frame"].as_u64()), (413, Some(20_000)), "{}", answer.text);
    assert_eq!(link.ask(Route::FORWARD_PCA, r#"{"accept":["pcar"]}"#, &body).ok().len(), 16_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timing_and_body_hashes_are_those_of_the_components() {
    let spec = spec(DEMO, "a");
    let (bytes, basis) = demo_basis(1, DEMO, "");
    let node = TestNode::start("demo", Some("0..1"), set(&[&bytes], &[&spec])).await;
    let body = pcar_body(&basis, 0, DEMO, &components(1, 100, DEMO));
    for (_, mut link) in node.links() {
        let answer = link.ask(Route::FORWARD_PCA, r#"{"timing":true,"accept":["pcar"]}"#, &body);
        let timing = &answer.meta["timing"];
        // A hundred positions of 128 x 128 products take longer than a microsecond anywhere.
        assert!(timing["lift_us"].as_u64().unwrap() > 0, "{}", answer.text);
        assert!(timing["compute_us"].as_u64().unwrap() > 0 && timing["queue_us"].is_u64(), "{}", answer.text);
        let raw = bytes_of(&[0.5; DEMO]);
        let answer = link.ask(Route::FORWARD, r#"{"timing":true}"#, &raw);
        assert_eq!(answer.meta["timing"]["lift_us"], 0, "{}", answer.text);
        assert!(link.ask(Route::FORWARD_PCA, "", &body).meta.get("timing").is_none());

        for more in ["", r#","accept":["pcar"]"#, r#","accept":["pcar"],"accept_k":2"#] {
            let answer = link.ask(Route::FORWARD_PCA, &format!(r#"{{"fp48":"{}"{more}}}"#, fp48(&body)), &body);
            assert_eq!(answer.meta["fp48"].as_str(), Some(&*fp48(&answer.body)), "{}", answer.text);
            let plain = link.ask(Route::FORWARD_PCA, &format!("{{{}}}", more.trim_start_matches(',')), &body);
            assert!(plain.meta.get("fp48").is_none());
            assert_eq!(plain.ok(), answer.ok());
        }
        let mut damaged = body.clone();
        damaged[30] ^= 1;
        let answer = link.ask(Route::FORWARD_PCA, &format!(r#"{{"fp48":"{}"}}"#, fp48(&body)), &damaged);
        assert!(answer.status() == 400 && answer.error().starts_with("fp48 of the body"), "{}", answer.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_a_datagram_is_answered_from_the_cache_even_if_the_basis_is_gone() {
    let spec = spec(DEMO, "a");
    let (bytes, basis) = demo_basis(1, 4, "");
    for model in ["demo", "identity:128"] {
        let node = TestNode::start(model, None, set(&[&bytes], &[&spec])).await;
        let StationAddress::Udp(_) = node.udp() else { panic!() };
        let mut link = Raw::udp(&node.udp());
        let body = pcar_body(&basis, 0, 4, &components(1, 2, 4));
        let meta = r#"{"session":"s","pos":0,"out":"token"}"#;
        let first = link.ask(Route::FORWARD_PCA, meta, &body);
        node.replace(set::<Vec<u8>>(&[], &[]));
        let copy = link.repeat(Route::FORWARD_PCA, meta, &body);
        assert_eq!((copy.flags, &copy.text, &copy.body), (Flags::SUCCESS, &first.text, &first.body), "{model}");
        first.ok();
        // A new request is computed anew, and a refusal is not remembered.
        assert_eq!(link.ask(Route::FORWARD_PCA, meta, &body).status(), 412);
        node.replace(set(&[&bytes], &[&spec]));
        assert_eq!(link.repeat(Route::FORWARD_PCA, meta, &body).ok(), copy.body);
        assert_eq!(link.session_len("s", DEMO), 2);
    }
}

/// A residual that is finite but whose first component is not.
fn too_large(basis: &BasisFile) -> Vec<f32> {
    basis.boundary(1).unwrap().basis.iter().take(8).map(|value| f32::MAX.copysign(*value)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_cannot_be_compressed_leaves_the_session_as_it_was() {
    let spec = spec(8, "a");
    let bytes = pcab(8, &[(0, 2), (1, 2)], 3, &spec, "");
    let basis = file(&bytes);
    let node = TestNode::start("identity:8", None, set(&[&bytes], &[&spec])).await;
    let body = bytes_of(&too_large(&basis));
    assert!(!projected(&basis, 1, 2, &too_large(&basis))[0].is_finite());
    for (carrier, mut link) in node.links() {
        let meta = |pos: &str, accept: &str| {
            let fp = basis.basis_fp();
            format!(r#"{{"session":"{carrier}"{pos},"accept":["{accept}"],"accept_basis":["0x{fp:08x}"]}}"#)
        };
        let pos = if carrier == "udp" { r#","pos":0"# } else { "" };
        let answer = link.ask(Route::FORWARD, &meta(pos, "pcar"), &body);
        assert_eq!(answer.status(), 500, "{}", answer.text);
        // On UDP the answer may be lost: the copy must be answered too.
        assert_eq!(link.repeat(Route::FORWARD, &meta(pos, "pcar"), &body).status(), 500);
        assert_eq!(link.session_len(carrier, 8), 0, "{carrier}");
        assert_eq!(link.ask(Route::FORWARD, &meta(pos, "f32"), &body).ok(), body);
        assert_eq!(link.session_len(carrier, 8), 1, "{carrier}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_keeps_the_basis_that_it_was_checked_against() {
    let spec = spec(DEMO, "a");
    let (bytes, basis) = demo_basis(1, 4, "");
    let node = TestNode::start("demo", None, set(&[&bytes], &[&spec])).await;
    let body = pcar_body(&basis, 0, 4, &components(1, 2, 4));
    let mut ids = Vec::new();
    residual::encode_u32s(&[7; 400], &mut ids);
    for mut link in [Raw::unix(&node.socket), Raw::udp(&node.udp())] {
        let expected = link.ask(Route::FORWARD_PCA, r#"{"accept":["pcar"]}"#, &body).ok();
        // Long requests for both workers, then one that must wait, then one that is answered at once: when that answer is
        // here, those before it were checked.
        for session in ["s", "t"] {
            link.sequence += 1;
            let long = format!(r#"{{"session":"{session}","pos":0,"in":"ids","out":"token"}}"#);
            link.send(Route::FORWARD, &long, &ids);
        }
        link.sequence += 1;
        link.send(Route::FORWARD_PCA, r#"{"session":"s","pos":0,"accept":["pcar"]}"#, &body);
        let waiting = link.sequence;
        link.sequence += 1;
        link.send(Route::HEALTH, "", &[]);
        let mut answers = Vec::new();
        for _ in 0..4 {
            let (route, sequence, answer) = link.receive();
            if route == Route::HEALTH {
                node.replace(set::<Vec<u8>>(&[], &[]));
            }
            answers.push((sequence, answer));
        }
        let (_, answer) = answers.into_iter().find(|(sequence, _)| *sequence == waiting).unwrap();
        assert_eq!(answer.ok(), expected);
        assert_eq!(link.ask(Route::FORWARD_PCA, "", &body).status(), 412);
        node.replace(set(&[&bytes], &[&spec]));
        link.ask(Route::RESET, r#"{"session":"s"}"#, &[]).ok();
        link.ask(Route::RESET, r#"{"session":"t"}"#, &[]).ok();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn components_without_a_position_are_put_behind_those_of_the_session() {
    let spec = spec(DEMO, "a");
    let (bytes, basis) = demo_basis(1, 4, "");
    let share = |settings: &mut aeon_station::config::Settings| {
        settings.listen.connection_session = Some(true);
    };
    let node = TestNode::start_with("demo", Some("0..2"), set(&[&bytes], &[&spec]), share).await;
    let body = |seed| pcar_body(&basis, 0, 4, &components(seed, 2, 4));
    let [mut named, mut unnamed] = [Raw::unix(&node.socket), Raw::unix(&node.socket)];
    for (seed, pos) in [(1, 0), (2, 2), (3, 4)] {
        let answer = named.ask(Route::FORWARD_PCA, r#"{"session":"s"}"#, &body(seed));
        assert_eq!(answer.meta["pos"], pos);
        let shared = unnamed.ask(Route::FORWARD_PCA, "", &body(seed));
        assert_eq!(shared.text, answer.text);
        let raw = bytes_of(&lifted(&basis, 0, 4, &components(seed, 2, 4)));
        let again = named.ask(Route::FORWARD, &format!(r#"{{"session":"s","pos":{pos}}}"#), &raw);
        assert_eq!(again.ok(), answer.body);
        assert_eq!(shared.ok(), answer.body);
    }
    // Over UDP a position must be there, and that is told like any wrong position: behind the body.
    let mut udp = Raw::udp(&node.udp());
    assert_eq!(udp.ask(Route::FORWARD_PCA, r#"{"session":"u"}"#, &body(1)).status(), 400);
    let answer = udp.ask(Route::FORWARD_PCA, r#"{"session":"u"}"#, &[]);
    assert!(answer.error().starts_with("body is empty"), "{}", answer.text);
}
