//! Every check of a PCA body, in its order, on a Unix socket and on UDP: the status, the words and the fields.

use std::sync::Arc;

use aeon_proto::{frame::Flags, pcar, route::Route};
use aeon_station::basis::BasisFile;

use crate::support::{Answer, Raw, TestNode, bytes_of, file, floats_of, header, lifted, pcab, pcar_body, set, spec};

/// With 2 components a block takes 32 bytes: as many as a raw residual of 8 values.
const DIM: usize = 8;
const K: usize = 2;

struct Fixture {
    node: TestNode,
    /// Boundaries 0 and 1, two components each.
    basis: Arc<BasisFile>,
    /// Boundary 0 with a mean only, nothing for boundary 1.
    poor: Arc<BasisFile>,
    /// Residuals of twice the width.
    wide: Arc<BasisFile>,
    /// A methodology that is known, but not that of any basis.
    other: u32,
}

async fn fixture() -> Fixture {
    let (narrow, wide, other) = (spec(DIM, "a"), spec(2 * DIM, "a"), spec(DIM, "other"));
    let random = (1..).map(|seed| pcab(DIM, &[(0, K), (1, K)], seed, &narrow, "a"));
    let files = [
        random.into_iter().find(|bytes| overflowing(&file(bytes)).is_some()).unwrap(),
        pcab(DIM, &[(0, 0)], 2, &narrow, "poor"),
        pcab(2 * DIM, &[(0, K), (1, K)], 3, &wide, "wide"),
    ];
    let node = TestNode::start("identity:8", None, set(&files, &[&narrow, &wide, &other])).await;
    let [basis, poor, wide] = files.map(|bytes| file(&bytes));
    Fixture { node, basis, poor, wide, other: other.id() }
}

/// One fault and its answer.
struct Case {
    name: &'static str,
    route: Route,
    body: Vec<u8>,
    status: u64,
    error: &'static str,
    /// Members behind the error, as they are written.
    fields: String,
}

impl Case {
    fn new(name: &'static str, body: Vec<u8>, status: u64, error: &'static str) -> Self {
        Self { name, route: Route::FORWARD_PCA, body, status, error, fields: String::new() }
    }

    fn field(mut self, fields: impl Into<String>) -> Self {
        self.fields = format!(",{}", fields.into());
        self
    }

    fn check(&self, answer: &Answer) {
        let expected = format!(r#"{{"status":{},"error":"{}"{}}}"#, self.status, self.error, self.fields);
        assert_eq!(answer.text, expected, "{}", self.name);
        assert_eq!(answer.flags, Flags::FAILURE, "{}", self.name);
        assert!(answer.body.is_empty(), "{}", self.name);
    }
}

fn with(header: pcar::Header, components: &[f32]) -> Vec<u8> {
    let mut body = Vec::new();
    pcar::encode(&header, components, &mut body).unwrap();
    body
}

fn faults(fixture: &Fixture) -> Vec<Case> {
    let Fixture { basis, poor, wide, other, .. } = fixture;
    let good = header(basis, 0, K);
    let block = pcar_body(basis, 0, K, &[1.0, 2.0]);
    let edited = |at: usize, byte: u8| {
        let mut body = [&*block, &block].concat();
        body[at] = byte;
        body
    };
    let have = [basis, poor, wide].map(|basis| format!("\"0x{:08x}\"", basis.basis_fp())).join(",");
    let have = format!("\"have\":[{have}]");
    let methodology = format!("\"methodology\":\"0x{:08x}\"", basis.methodology());
    let unknown_basis = with(pcar::Header { basis_fp: basis.basis_fp() ^ 1, ..good }, &[1.0, 2.0]);
    let unknown_methodology = with(pcar::Header { methodology: 1, ..good }, &[1.0, 2.0]);
    let other_methodology = with(pcar::Header { methodology: *other, ..good }, &[1.0, 2.0]);
    let other_width = with(pcar::Header { hidden_dim: 9, ..good }, &[1.0, 2.0]);
    let wide_basis = pcar_body(wide, 0, K, &[1.0, 2.0]);
    let narrow_body = with(pcar::Header { hidden_dim: 8, ..header(wide, 0, K) }, &[1.0, 2.0]);
    let finite = "value 3 of the body is NaN or infinite";
    let mut cases = vec![
        Case::new("empty", vec![], 400, "body is empty, at least one position is expected"),
        Case::new("cut tag", b"PCA".to_vec(), 400, "PCAR body: pcar block 0 takes 24 bytes, 3 left"),
        Case::new("tag alone", b"PCAR".to_vec(), 400, "PCAR body: pcar block 0 takes 24 bytes, 4 left"),
        Case::new("no PCAR", bytes_of(&[0.5; DIM]), 400, "PCAR body: pcar block 0 starts with [00, 00, 00, 3f]"),
        Case::new("wrong tag", edited(0, b'Q'), 400, "PCAR body: pcar block 0 starts with [51, 43, 41, 52]"),
        Case::new("wrong second tag", edited(32, b'Q'), 400, "PCAR body: pcar block 1 starts with [51, 43, 41, 52]"),
        Case::new("cut block", block[..31].to_vec(), 400, "PCAR body: pcar block 0 takes 32 bytes, 31 left"),
        Case::new("cut header", block[..23].to_vec(), 400, "PCAR body: pcar block 0 takes 24 bytes, 23 left"),
        Case::new(
            "part of a block behind",
            [&*block, &block[..30]].concat(),
            400,
            "PCAR body: pcar block 1 takes 32 bytes, 30 left",
        ),
        Case::new(
            "one byte behind",
            [&*block, &block[..1]].concat(),
            400,
            "PCAR body: pcar block 1 takes 24 bytes, 1 left",
        ),
        Case::new("no components", edited(8, 0), 400, "PCAR body: pcar with k = 0"),
        Case::new(
            "other boundary behind",
            edited(36, 1),
            400,
            "PCAR body: pcar block 1 has boundary 1, the first has 0",
        ),
        Case::new("other k behind", edited(40, 1), 400, "PCAR body: pcar block 1 has k 1, the first has 2"),
        Case::new(
            "other width behind",
            edited(44, 7),
            400,
            "PCAR body: pcar block 1 has hidden_dim 7, the first has 8",
        ),
        Case::new("unknown basis", unknown_basis, 412, "basis fingerprint mismatch").field(have),
        Case::new("unknown methodology", unknown_methodology, 412, "methodology mismatch").field(&*methodology),
        Case::new("another's methodology", other_methodology, 412, "methodology mismatch").field(methodology),
        Case::new("other width", other_width, 400, "hidden_dim mismatch: 9 in the body, this model has 8")
            .field("\"hidden_dim\":8"),
        Case::new("wide basis", wide_basis, 400, "hidden_dim mismatch: 16 in the body, this model has 8")
            .field("\"hidden_dim\":8"),
        Case::new("wide basis alone", narrow_body, 400, "hidden_dim mismatch: 16 in the basis, this model has 8")
            .field("\"hidden_dim\":8"),
        Case::new(
            "boundary of the head",
            pcar_body(basis, 1, K, &[1.0, 2.0]),
            409,
            "boundary 1 in the request, this route takes boundary 0",
        )
        .field("\"boundary\":0"),
        Case::new(
            "boundary of no model",
            pcar_body(basis, u32::MAX, K, &[1.0, 2.0]),
            409,
            "boundary 4294967295 in the request, this route takes boundary 0",
        )
        .field("\"boundary\":0"),
        Case::new(
            "a mean only",
            pcar_body(poor, 0, 1, &[1.0]),
            412,
            "the basis has no components for boundary 0; send raw f32",
        ),
        Case::new(
            "too many components",
            pcar_body(basis, 0, 3, &[1.0, 2.0, 3.0]),
            400,
            "3 components in the body, the basis has 2 at this boundary",
        )
        .field("\"k\":2"),
        Case::new(
            "components that overflow",
            pcar_body(basis, 0, K, &overflowing(basis).unwrap()),
            422,
            overflow_text(basis),
        ),
    ];
    for (name, bad) in [("NaN", f32::NAN), ("infinity", f32::INFINITY), ("-infinity", f32::NEG_INFINITY)] {
        cases.push(Case::new(name, pcar_body(basis, 0, K, &[1.0, 2.0, 3.0, bad]), 422, finite));
    }
    let head = |mut case: Case| {
        case.route = Route::LM_HEAD_PCA;
        case
    };
    let at_head = |k: usize, components: &[f32]| pcar_body(basis, 1, k, components);
    cases.extend([
        head(Case::new("head: empty", vec![], 400, "body is empty, at least one position is expected")),
        head(Case::new(
            "head: boundary of the layers",
            block.clone(),
            409,
            "boundary 0 in the request, this route takes boundary 1",
        ))
        .field("\"boundary\":1"),
        head(Case::new(
            "head: boundary not in the basis",
            pcar_body(poor, 1, 1, &[1.0]),
            412,
            "the basis has no components for boundary 1; send raw f32",
        )),
        head(Case::new(
            "head: too many components",
            at_head(3, &[1.0, 2.0, 3.0]),
            400,
            "3 components in the body, the basis has 2 at this boundary",
        ))
        .field("\"k\":2"),
        head(Case::new("head: NaN", at_head(K, &[1.0, 2.0, 3.0, f32::NAN]), 422, finite)),
    ]);
    cases
}

/// Components that are finite but whose sum is not, if the basis has rows for that.
fn overflowing(basis: &BasisFile) -> Option<[f32; K]> {
    let rows = basis.boundary(0)?.basis;
    let at = (0..DIM).find(|at| rows[*at].abs() + rows[DIM + at].abs() > 1.1)?;
    Some([f32::MAX.copysign(rows[at]), f32::MAX.copysign(rows[DIM + at])])
}

fn overflow_text(basis: &BasisFile) -> &'static str {
    let lifted = lifted(basis, 0, K, &overflowing(basis).unwrap());
    let index = lifted.iter().position(|value| !value.is_finite()).unwrap();
    format!("value {index} of the lifted residual is NaN or infinite").leak()
}

fn begin_session(link: &mut Raw, session: &str) {
    let meta = format!(r#"{{"session":"{session}","pos":0}}"#);
    link.ask(Route::FORWARD, &meta, &bytes_of(&[0.25; 3 * DIM])).ok();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_fault_has_its_answer_and_leaves_connection_and_session_as_they_were() {
    let fixture = fixture().await;
    for (carrier, mut link) in fixture.node.links() {
        begin_session(&mut link, carrier);
        for case in faults(&fixture) {
            // In a session, behind what it holds; at an earlier position, which a success would rewind it to; and without.
            let in_session = |pos: u64| format!(r#"{{"session":"{carrier}","pos":{pos}}}"#);
            for meta in [in_session(3), in_session(1), String::new()] {
                case.check(&link.ask(case.route, &meta, &case.body));
            }
            assert_eq!(link.session_len(carrier, DIM), 3, "{carrier}: {}", case.name);
        }
        let good = pcar_body(&fixture.basis, 0, K, &[1.0, 2.0]);
        link.ask(Route::FORWARD_PCA, &format!(r#"{{"session":"{carrier}","pos":3}}"#), &good).ok();
        assert_eq!(link.session_len(carrier, DIM), 4);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_does_not_begin_a_session_that_goes_on_elsewhere() {
    let fixture = fixture().await;
    for (carrier, mut link) in fixture.node.links() {
        for case in faults(&fixture) {
            let meta = format!(r#"{{"session":"{carrier}-new","pos":0}}"#);
            case.check(&link.ask(case.route, &meta, &case.body));
            assert_eq!(link.session_len(&format!("{carrier}-new"), DIM), 0, "{carrier}: {}", case.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_412_of_a_wrong_basis_starts_as_specified_and_lists_nothing_on_a_station_without_bases() {
    let fixture = fixture().await;
    let bare = TestNode::start("identity:8", None, set::<Vec<u8>>(&[], &[])).await;
    let body = pcar_body(&fixture.basis, 0, K, &[1.0, 2.0]);
    for (_, mut link) in bare.links() {
        let answer = link.ask(Route::FORWARD_PCA, "", &body);
        assert_eq!(answer.text, r#"{"status":412,"error":"basis fingerprint mismatch","have":[]}"#);
        let answer = link.ask(Route::LM_HEAD_PCA, "", &body);
        assert!(answer.text.starts_with(r#"{"status":412,"error":"basis fingerprint mismatch""#), "{}", answer.text);
    }
}

/// What can be wrong with one request, in the order of the checks.
const ORDER: [(&str, u64, &str); 9] = [
    ("fp48", 400, "fp48 of the body"),
    ("part of a block behind", 400, "PCAR body"),
    ("basis", 412, "basis fingerprint mismatch"),
    ("methodology", 412, "methodology mismatch"),
    ("hidden_dim", 400, "hidden_dim mismatch"),
    ("boundary", 409, "boundary 5 in the request"),
    ("not in the basis", 412, "the basis has no components"),
    ("k", 400, "64 components in the body"),
    ("NaN", 422, "value 0 of the body"),
];

/// A body with the faults of those indices of [`ORDER`], and its meta.
fn faulty(fixture: &Fixture, faults: &[usize], position: &str) -> (String, Vec<u8>) {
    let has = |fault: usize| faults.contains(&fault);
    let basis = if has(6) { &fixture.poor } else { &fixture.basis };
    // More components than any basis has, or one, which the basis without components has not either.
    let k = if has(7) { 64 } else { 1 };
    let mut header = header(basis, 0, k);
    if has(2) {
        header.basis_fp ^= 0x5555;
    }
    if has(3) {
        header.methodology ^= 1;
    }
    if has(4) {
        header.hidden_dim = 7;
    }
    if has(5) {
        header.boundary = 5;
    }
    let mut components = vec![0.5; k];
    if has(8) {
        components[0] = f32::NAN;
    }
    let mut body = with(header, &components);
    if has(1) {
        body.extend_from_slice(b"PCAR");
    }
    let fp48 = if has(0) { r#","fp48":"000000000000""# } else { "" };
    (format!("{{{position}{fp48}}}"), body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_faults_the_earlier_check_decides() {
    let fixture = fixture().await;
    for (carrier, mut link) in fixture.node.links() {
        begin_session(&mut link, carrier);
        let position = format!(r#""session":"{carrier}","pos":3"#);
        for (earlier, (name, status, error)) in ORDER.iter().enumerate() {
            for (later, (second, ..)) in ORDER.iter().enumerate().skip(earlier) {
                let (meta, body) = faulty(&fixture, &[earlier, later], &position);
                let answer = link.ask(Route::FORWARD_PCA, &meta, &body);
                let both = format!("{carrier}: {name} and {second}: {}", answer.text);
                assert_eq!(answer.status(), *status, "{both}");
                assert!(answer.error().starts_with(error), "{both}");
            }
        }
        let all: Vec<usize> = (0..ORDER.len()).collect();
        for (index, (name, status, error)) in ORDER.iter().enumerate() {
            let (meta, body) = faulty(&fixture, &all[index..], &position);
            let answer = link.ask(Route::FORWARD_PCA, &meta, &body);
            assert_eq!(answer.status(), *status, "{name} and all behind it: {}", answer.text);
            assert!(answer.error().starts_with(error), "{name} and all behind it: {}", answer.text);
        }
        assert_eq!(link.session_len(carrier, DIM), 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_position_is_told_after_the_body_and_before_its_numbers() {
    let fixture = fixture().await;
    for (carrier, mut link) in fixture.node.links() {
        begin_session(&mut link, carrier);
        let gap = format!(r#""session":"{carrier}","pos":4"#);
        for (fault, (name, status, _)) in ORDER.iter().enumerate() {
            let (meta, body) = faulty(&fixture, &[fault], &gap);
            let answer = link.ask(Route::FORWARD_PCA, &meta, &body);
            let expected = if fault == 8 { 409 } else { *status };
            assert_eq!(answer.status(), expected, "{name}: {}", answer.text);
            assert_eq!(answer.meta["expected_pos"].as_u64(), (fault == 8).then_some(3), "{}", answer.text);
        }
        // Without a session only position 0 can be.
        let body = pcar_body(&fixture.basis, 0, K, &[1.0, f32::NAN]);
        let answer = link.ask(Route::FORWARD_PCA, r#"{"pos":1}"#, &body);
        assert_eq!((answer.status(), answer.meta["expected_pos"].as_u64()), (409, Some(0)), "{}", answer.text);
        // What the meta says of the boundary is checked beside what the body says.
        let body = pcar_body(&fixture.basis, 0, K, &[1.0, 2.0]);
        let answer = link.ask(Route::FORWARD_PCA, r#"{"boundary":1}"#, &body);
        assert_eq!((answer.status(), answer.meta["boundary"].as_u64()), (409, Some(0)), "{}", answer.text);
        let answer = link.ask(Route::FORWARD_PCA, r#"{"config_fp":"00"}"#, &body);
        assert_eq!(answer.status(), 409, "{}", answer.text);
        // Numbers that are wrong are told before a deadline that has passed.
        for bad in [[1.0, f32::NAN], overflowing(&fixture.basis).unwrap()] {
            let body = pcar_body(&fixture.basis, 0, K, &bad);
            for (route, meta) in [
                (Route::FORWARD_PCA, r#"{"deadline_ms":0}"#.to_owned()),
                (Route::FORWARD_PCA, format!(r#"{{"session":"{carrier}","pos":3,"deadline_ms":0}}"#)),
            ] {
                let answer = link.ask(route, &meta, &body);
                assert_eq!(answer.status(), 422, "{}", answer.text);
            }
        }
        let body = pcar_body(&fixture.basis, 1, K, &[1.0, f32::NAN]);
        let answer = link.ask(Route::LM_HEAD_PCA, r#"{"deadline_ms":0}"#, &body);
        assert_eq!(answer.status(), 422, "{}", answer.text);
        let answer = link.ask(Route::FORWARD_PCA, r#"{"deadline_ms":0}"#, &body_of(&fixture));
        assert_eq!(answer.status(), 504, "{}", answer.text);
        assert_eq!(link.session_len(carrier, DIM), 3);
    }
}

fn body_of(fixture: &Fixture) -> Vec<u8> {
    pcar_body(&fixture.basis, 0, K, &[1.0, 2.0])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_positions_are_told_before_an_unknown_basis() {
    let spec = spec(DIM, "a");
    let bytes = pcab(DIM, &[(0, K)], 1, &spec, "");
    let limit = |settings: &mut aeon_station::config::Settings| settings.limits.max_seq = Some(4);
    let node = TestNode::start_with("identity:8", None, set(&[&bytes], &[&spec]), limit).await;
    let basis = file(&bytes);
    for (_, mut link) in node.links() {
        link.ask(Route::FORWARD_PCA, "", &pcar_body(&basis, 0, 1, &[0.5; 4])).ok();
        let unknown = with(pcar::Header { basis_fp: 7, ..header(&basis, 0, 1) }, &[0.5; 5]);
        for body in [pcar_body(&basis, 0, 1, &[0.5; 5]), unknown] {
            let answer = link.ask(Route::FORWARD_PCA, "", &body);
            assert_eq!((answer.status(), answer.meta["max_seq"].as_u64()), (413, Some(4)), "{}", answer.text);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_the_model_that_are_elsewhere_are_told_before_the_body() {
    let node = TestNode::start("demo", Some("2..4"), set::<Vec<u8>>(&[], &[])).await;
    for (_, mut link) in node.links() {
        for (route, meta) in [(Route::LM_HEAD_PCA, "{}"), (Route::FORWARD_PCA, r#"{"out":"token"}"#)] {
            let answer = link.ask(route, meta, b"no PCAR");
            assert_eq!((answer.status(), answer.meta["layers"][0].as_u64()), (501, Some(2)), "{}", answer.text);
        }
        let answer = link.ask(Route::FORWARD_PCA, "{}", b"no PCAR");
        assert_eq!(answer.status(), 400, "{}", answer.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_raw_routes_take_a_body_that_starts_with_the_tag_as_floats() {
    let fixture = fixture().await;
    for (carrier, mut link) in fixture.node.links() {
        for header in [header(&fixture.basis, 0, K), pcar::Header { basis_fp: 7, ..header(&fixture.basis, 9, K) }] {
            let body = with(header, &[1.0, 2.0]);
            assert!(floats_of(&body).iter().all(|value| value.is_finite()));
            let reply = link.ask(Route::FORWARD, "", &body);
            assert_eq!((reply.meta["body"].as_str(), reply.meta["seq"].as_u64()), (Some("f32"), Some(1)));
            assert_eq!(reply.ok(), body, "{carrier}");
            let reply = link.ask(Route::LM_HEAD, "", &body).ok();
            let token = f32::from_le_bytes(*b"PCAR").round().min(65_535.0) as u32;
            assert_eq!(reply, token.to_le_bytes(), "{carrier}");
        }
        // One component less is no whole residual.
        let answer = link.ask(Route::FORWARD, "", &pcar_body(&fixture.basis, 0, 1, &[1.0]));
        assert!(answer.status() == 400 && answer.error().starts_with("hidden_dim mismatch"), "{}", answer.text);
        // As token ids it is out of the vocabulary, whatever the tag says.
        let answer = link.ask(Route::EMBED, "", &pcar_body(&fixture.basis, 0, 1, &[1.0]));
        assert!(answer.status() == 400 && answer.error().starts_with("token id"), "{}", answer.text);
    }
}
