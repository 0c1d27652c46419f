//! Arbitrary bytes on the PCA routes: a refusal with one of four statuses, a session as it was, and a station that works on.

use std::{collections::BTreeMap, sync::Mutex};

use aeon_proto::{pcar::PcarBody, route::Route};
use proptest::{prelude::*, test_runner::TestRunner};

use crate::support::{TestNode, bytes_of, file, pcab, pcar_body, set, spec};

const DIM: usize = 8;

/// Bytes of any kind, behind the tag or not, and bodies that have a few bytes of their headers and some components changed
/// and perhaps an end of another length.
fn body(good: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let any_bytes = || prop::collection::vec(any::<u8>(), 0..200);
    let edits = prop::collection::vec((4..24_usize, any::<u8>()), 0..2);
    let component = prop_oneof![any::<u32>(), Just(f32::NAN.to_bits()), Just(f32::INFINITY.to_bits())];
    let components = prop::collection::vec(component, 0..4);
    let end = prop_oneof![Just(0), -40..40_isize];
    let changed = (1..4_usize, edits, components, end).prop_map(move |(blocks, edits, components, end)| {
        let mut block = good.clone();
        for (at, byte) in edits {
            block[at] = byte;
        }
        let mut body = block.repeat(blocks);
        // From the end on, so that the headers stay.
        for (bits, block) in components.iter().zip(body.chunks_mut(good.len())) {
            block[28..].copy_from_slice(&bits.to_le_bytes());
        }
        body.resize(body.len().saturating_add_signed(end), 7);
        body
    });
    prop_oneof![1 => any_bytes(), 1 => any_bytes().prop_map(|bytes| [b"PCAR", &*bytes].concat()), 6 => changed]
}

#[test]
fn arbitrary_bytes_are_refused_with_a_fitting_status_and_leave_the_session_alone() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let spec = spec(DIM, "a");
    let bytes = pcab(DIM, &[(0, 2), (1, 2)], 1, &spec, "");
    let basis = file(&bytes);
    let node = runtime.block_on(TestNode::start("identity:8", None, set(&[&bytes], &[&spec])));
    let links = node.links().map(|(_, link)| Mutex::new(link));
    let seen = Mutex::new(BTreeMap::<u64, u32>::new());
    let good = |boundary| pcar_body(&basis, boundary, 2, &[1.0, 2.0]);
    let begin = r#"{"session":"s","pos":0}"#;
    for (link, (route, boundary)) in
        links.iter().flat_map(|link| [(link, (Route::FORWARD_PCA, 0)), (link, (Route::LM_HEAD_PCA, 1))])
    {
        let mut runner =
            TestRunner::new(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() });
        link.lock().unwrap().ask(Route::FORWARD, begin, &bytes_of(&[0.5; 3 * DIM])).ok();
        let result = runner.run(&body(good(boundary)), |body| {
            let mut link = link.lock().unwrap();
            let answer = link.ask(route, r#"{"session":"s","pos":3}"#, &body);
            *seen.lock().unwrap().entry(answer.status()).or_default() += 1;
            match answer.status() {
                200 => {
                    let seq = PcarBody::decode(&body).unwrap().seq() as u64;
                    prop_assert_eq!(answer.meta["seq"].as_u64(), Some(seq));
                    let grown = if route == Route::FORWARD_PCA { seq } else { 0 };
                    prop_assert_eq!(link.session_len("s", DIM), 3 + grown);
                    // Back to three positions.
                    link.ask(Route::FORWARD, begin, &bytes_of(&[0.5; 3 * DIM])).ok();
                    link.ask(Route::RESET, r#"{"session":"s"}"#, &[]).ok();
                    link.ask(Route::FORWARD, begin, &bytes_of(&[0.5; 3 * DIM])).ok();
                }
                status => {
                    prop_assert!([400, 412, 409, 422].contains(&status), "{}", answer.text);
                    prop_assert!(answer.body.is_empty());
                    prop_assert_eq!(link.session_len("s", DIM), 3);
                }
            }
            Ok(())
        });
        result.unwrap();
    }
    let seen = seen.into_inner().unwrap();
    assert!([200, 400, 409, 412, 422].iter().all(|status| seen.contains_key(status)), "{seen:?}");
}
