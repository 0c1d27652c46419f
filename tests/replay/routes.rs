//! The frame routes byte by byte and fault by fault.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aeon_proto::{
    bwah::{decode_amplituhedron_reply, encode_amplituhedron_capture},
    frame::{Flags, Frame},
    payload::{FrameWriter, Payload},
    route::Route,
    status::Status,
};
use aeon_station::{
    client::{Client, ClientError, ClientOptions},
    model::identity::Identity,
    station::{
        Station,
        limits::{Limits, ShardLimits},
        request::{Carrier, Origin, Outcome, Peer, ReplyTo, Request},
    },
};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::support::{
    Carrier::{Tcp, Udp, Unix},
    models, prompt, start,
};

const HIDDEN: usize = 8;

fn station(hidden_dim: usize, edit: impl FnOnce(&mut Limits)) -> Station {
    let mut limits = Limits::default();
    edit(&mut limits);
    Station::new("test".to_owned(), Arc::new(Identity::new(hidden_dim, 100)), limits, 1).unwrap()
}

fn stream() -> Peer {
    Peer {
        carrier: Carrier::Unix,
        connection: 1,
        address: None,
        origin: Origin::Unknown,
        is_proven: true,
        max_reply_len: 16_777_225,
        default_session: None,
        stock_replies: false,
    }
}

fn datagram(address: &str) -> Peer {
    let address = address.parse().ok();
    Peer { carrier: Carrier::Udp, address, is_proven: false, max_reply_len: 65_507, ..stream() }
}

struct Unused;

impl ReplyTo for Unused {
    fn finish(self: Box<Self>, _: Option<Vec<u8>>) {}
}

struct Answer {
    flags: Flags,
    meta: Value,
    body: Vec<u8>,
}

impl Answer {
    fn status(&self) -> u64 {
        self.meta["status"].as_u64().unwrap()
    }
}

/// One request to an inline station; `None` if it was not answered.
fn send(station: &Station, peer: &Peer, sequence: u32, route: Route, meta: &str, body: &[u8]) -> Option<Answer> {
    let mut bytes = Vec::new();
    let mut frame = FrameWriter::new(&mut bytes, route.0, sequence, Flags::NONE);
    frame.meta_text(meta);
    frame.body().extend_from_slice(body);
    frame.finish().unwrap();
    let request = Request { peer, frame: Frame::decode_exact(&bytes).unwrap(), arrived: Instant::now() };
    let mut out = Vec::new();
    match station.handle(request, &mut out, || Box::new(Unused)) {
        Outcome::Silent => return None,
        Outcome::Replied => {}
        Outcome::Queued(_) => panic!("an inline station queues nothing"),
    }
    let frame = Frame::decode_exact(&out).unwrap();
    assert_eq!((frame.stream_id, frame.sequence), (route.0, sequence));
    let payload = Payload::decode(frame.payload).unwrap();
    let meta = serde_json::from_str(payload.meta).unwrap();
    Some(Answer { flags: frame.flags, meta, body: payload.body.to_vec() })
}

fn ask(station: &Station, route: Route, meta: &Value, body: &[u8]) -> Answer {
    send(station, &stream(), 7, route, &meta.to_string(), body).unwrap()
}

fn key(prefix_len: u32) -> Value {
    json!({"prefix_hash": "0xfedcba9876543210", "prefix_len": prefix_len, "layer_lo": 0, "layer_hi": 1})
}

fn envelope(prefix_len: u32, tail: &[f32], slab: &[f32]) -> Vec<u8> {
    encode_amplituhedron_capture(0xfedc_ba98_7654_3210, prefix_len, 0, 1, tail, slab)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_miss_is_204_with_the_flags_of_a_success_and_no_body() {
    let station = station(HIDDEN, |_| ());
    for meta in [key(5), json!({"prefix_hash": 1, "prefix_len": "5", "layer_lo": "0x0", "layer_hi": 1, "session": "s"})]
    {
        let answer = ask(&station, Route::AMPLITUHEDRON_REPLAY, &meta, &[]);
        assert_eq!((answer.flags, answer.meta, answer.body), (Flags::SUCCESS, json!({"status": 204}), vec![]));
    }
}

#[test]
fn an_envelope_comes_back_as_it_went_in() {
    let station = station(HIDDEN, |_| ());
    let tail = [1.5, -0.0, f32::MAX, f32::MIN_POSITIVE / 4.0, 0.1, -2.0, 3.0, 4.0];
    let answer = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({}), &envelope(5, &tail, &[]));
    assert_eq!((answer.flags, answer.status()), (Flags::SUCCESS, 200));
    assert_eq!(answer.meta["captured"], true);
    let answer = ask(&station, Route::AMPLITUHEDRON_REPLAY, &key(5), &[]);
    assert_eq!((answer.flags, answer.status()), (Flags::SUCCESS, 200));
    assert_eq!(answer.meta["layers"], json!([0, 1]));
    assert_eq!(
        (&answer.meta["prefix_len"], &answer.meta["dim"], &answer.meta["spliced"]),
        (&json!(5), &json!(8), &json!(false))
    );
    // Header of 14 bytes and a blob of 20 more than its content; no slab.
    assert_eq!(answer.body.len(), 34 + 4 * HIDDEN);
    let reply = decode_amplituhedron_reply(&answer.body).unwrap();
    assert!(reply.tail.unwrap().iter().zip(&tail).all(|(a, b)| a.to_bits() == b.to_bits()));
    assert_eq!(reply.kv, None);
}

#[test]
fn a_session_is_captured_and_replayed_into_another() {
    let station = station(HIDDEN, |_| ());
    let forward = |session: &str, pos: usize, values: &[f32]| {
        let meta = json!({"session": session, "pos": pos});
        ask(&station, Route::FORWARD, &meta, &floats(values))
    };
    let row = |value: f32| [value; HIDDEN];
    assert_eq!(forward("a", 0, &[row(1.0), row(2.0), row(3.0)].concat()).status(), 200);
    for pos in 3..10 {
        assert_eq!(forward("a", pos, &row(pos as f32 + 1.0)).status(), 200);
    }
    let with = |prefix_len: u32, session: &str| {
        let mut meta = key(prefix_len);
        meta["session"] = session.into();
        meta
    };
    // Kept are the prefill, the first position behind it and the latest.
    for (prefix_len, tail) in [(3, 3.0), (4, 4.0), (10, 10.0)] {
        assert_eq!(ask(&station, Route::AMPLITUHEDRON_CAPTURE, &with(prefix_len, "a"), &[]).status(), 200);
        let hit = ask(&station, Route::AMPLITUHEDRON_REPLAY, &with(prefix_len, "b"), &[]);
        assert_eq!((hit.status(), &hit.meta["spliced"]), (200, &json!(true)));
        assert_eq!(decode_amplituhedron_reply(&hit.body).unwrap().tail.unwrap(), row(tail));
        // The session goes on behind the prefix, and nowhere else.
        let wrong = forward("b", prefix_len as usize + 1, &row(0.0));
        assert_eq!((wrong.status(), &wrong.meta["expected_pos"]), (409, &json!(prefix_len)));
        assert_eq!(forward("b", prefix_len as usize, &row(0.5)).status(), 200);
    }
    let gone = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &with(5, "a"), &[]);
    assert_eq!((gone.status(), &gone.meta["kept"]), (409, &json!([3, 4, 10])));
    let beyond = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &with(11, "a"), &[]);
    assert_eq!((beyond.status(), &beyond.meta["expected_pos"]), (409, &json!(10)));
    let unknown = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &with(3, "nobody"), &[]);
    assert_eq!((unknown.status(), &unknown.meta["expected_pos"]), (409, &json!(0)));
    // Positions that were replaced take their tails along.
    assert_eq!(forward("a", 2, &row(9.0)).status(), 200);
    let replaced = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &with(2, "a"), &[]);
    assert_eq!((replaced.status(), &replaced.meta["kept"]), (409, &json!([3])));
}

#[test]
fn captures_that_do_not_fit_are_refused_with_their_status() {
    let station = station(HIDDEN, |limits| limits.max_replay_bytes = 4096);
    let capture = |body: &[u8]| ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({}), body);
    let tail = [1.0; HIDDEN];
    let good = envelope(5, &tail, &[]);
    let mut nan = tail;
    nan[3] = f32::NAN;
    let mut infinite = tail;
    infinite[7] = f32::NEG_INFINITY;
    for (body, status) in [
        (envelope(5, &nan, &[]), 422),
        (envelope(5, &infinite, &[]), 422),
        (envelope(5, &tail[1..], &[]), 400),
        (envelope(5, &[], &[]), 400),
        (envelope(5, &tail, &[0.0]), 400),
        (envelope(0, &tail, &[]), 400),
        (envelope(u32::MAX, &tail, &[]), 413),
        (encode_amplituhedron_capture(1, 5, 0, 2, &tail, &[]), 409),
        (encode_amplituhedron_capture(1, 5, 1, 1, &tail, &[]), 409),
        (good[..good.len() - 1].to_vec(), 400),
        (good[..29].to_vec(), 400),
        (b"BWAH".to_vec(), 400),
        ([&good[..], b"x"].concat(), 400),
    ] {
        let answer = capture(&body);
        assert_eq!((answer.status(), answer.flags), (status, Flags::FAILURE), "{}", answer.meta);
    }
    for len in 1..good.len() {
        assert_eq!(capture(&good[..len]).status(), 400, "{len}");
    }
    // A fault deep inside is told with its cause.
    let mut damaged = good.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let text = capture(&damaged).meta["error"].to_string();
    assert!(text.contains("InnerBlobError") && text.contains("kv slab"), "{text}");
    assert_eq!(capture(&[]).status(), 400);
    let both = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({"session": "s"}), &good);
    assert_eq!(both.status(), 400);
    let other_key = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &key(6), &good);
    assert_eq!(other_key.status(), 400);
    let config = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({"config_fp": "00"}), &good);
    assert_eq!((config.status(), config.meta["config_fp"].is_string()), (409, true));
    let lossy = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({"exact": true, "basis_fp": "0x7"}), &good);
    assert_eq!(lossy.status(), 409);
    assert_eq!(ask(&station, Route::AMPLITUHEDRON_REPLAY, &key(5), &[]).status(), 204);
    // The budget: an entry larger than all of it.
    let large = self::station(2000, |limits| limits.max_replay_bytes = 4096);
    let answer = ask(&large, Route::AMPLITUHEDRON_CAPTURE, &json!({}), &envelope(5, &[0.0; 2000], &[]));
    assert_eq!((answer.status(), &answer.meta["max_replay_bytes"]), (413, &json!(4096)));
}

#[test]
fn how_an_entry_was_made_decides_who_gets_it() {
    let station = station(HIDDEN, |_| ());
    let config_fp = station.model().info().config_fp.clone();
    let digests = ["00112233445566778899aabbccddeeff", "00112233445566778899aabbccddeefe"];
    let meta = json!({"prefix_digest": digests[0], "mesh_fp": digests[0], "basis_fp": "0xdeadbeef"});
    let body = envelope(5, &[1.0; HIDDEN], &[]);
    assert_eq!(ask(&station, Route::AMPLITUHEDRON_CAPTURE, &meta, &body).status(), 200);
    let status = |name: &str, value: Value| {
        let mut meta = key(5);
        meta[name] = value;
        ask(&station, Route::AMPLITUHEDRON_REPLAY, &meta, &[]).status()
    };
    assert_eq!(status("unknown", json!(1)), 200);
    assert_eq!(status("prefix_digest", json!(digests[0].to_uppercase())), 200);
    assert_eq!(status("prefix_digest", json!(digests[1])), 204);
    assert_eq!(status("mesh_fp", json!(digests[1])), 204);
    assert_eq!(status("config_fp", json!(config_fp)), 200);
    assert_eq!(status("config_fp", json!(config_fp.replace(&config_fp[..1], "x"))), 204);
    assert_eq!(status("exact", json!(true)), 204);
    assert_eq!(status("exact", json!(false)), 200);
    assert_eq!(status("basis_fp", json!("0xdeadbeef")), 200);
    assert_eq!(status("basis_fp", json!("0xdeadbeee")), 204);
    for (name, value) in [("prefix_len", json!(6)), ("layer_hi", json!(2)), ("prefix_hash", json!(1))] {
        assert_eq!(status(name, value), 204);
    }
}

#[test]
fn key_fields_at_and_past_their_widths() {
    let station = station(HIDDEN, |_| ());
    let status = |name: &str, value: Value| {
        let mut meta = key(5);
        meta[name] = value;
        ask(&station, Route::AMPLITUHEDRON_REPLAY, &meta, &[]).status()
    };
    for (name, value, expected) in [
        ("prefix_hash", json!("0xffffffffffffffff"), 204),
        ("prefix_hash", json!("0x10000000000000000"), 400),
        ("prefix_hash", json!((1_u64 << 53) - 1), 204),
        ("prefix_hash", json!(1_u64 << 53), 400),
        ("prefix_len", json!(u32::MAX), 204),
        ("prefix_len", json!(1_u64 << 32), 400),
        ("layer_lo", json!(65_535), 204),
        ("layer_lo", json!(65_536), 400),
        ("layer_hi", json!(-1), 400),
        ("layer_hi", Value::Null, 400),
        ("session", json!("a b"), 400),
        ("exact", json!("yes"), 400),
    ] {
        assert_eq!(status(name, value.clone()), expected, "{name} {value}");
    }
}

#[test]
fn datagrams_obey_their_limit_and_the_rule_of_three() {
    let station = station(3584, |_| ());
    ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({}), &envelope(5, &[0.5; 3584], &[]));
    let stranger = datagram("10.1.2.3:4");
    let meta = key(5).to_string();
    let refused = send(&station, &stranger, 1, Route::AMPLITUHEDRON_REPLAY, &meta, &[]).unwrap();
    assert_eq!((refused.status(), refused.flags), (403, Flags::FAILURE));
    let mut proven = key(5);
    proven["token"] = refused.meta["token"].clone();
    proven["session"] = "s".into();
    let hit = send(&station, &stranger, 2, Route::AMPLITUHEDRON_REPLAY, &proven.to_string(), &[]).unwrap();
    assert_eq!((hit.status(), hit.body.len()), (200, 14_370));
    // A miss is small, so it needs no proof; neither does a capture.
    assert_eq!(
        send(&station, &stranger, 3, Route::AMPLITUHEDRON_REPLAY, &key(6).to_string(), &[]).unwrap().status(),
        204
    );
    let wide = self::station(20_000, |_| ());
    ask(&wide, Route::AMPLITUHEDRON_CAPTURE, &json!({}), &envelope(5, &[0.5; 20_000], &[]));
    let loopback = Peer { is_proven: true, ..datagram("127.0.0.1:4") };
    let answer = send(&wide, &loopback, 1, Route::AMPLITUHEDRON_REPLAY, &meta, &[]).unwrap();
    assert_eq!((answer.status(), &answer.meta["max_datagram"]), (413, &json!(65_507)));
}

#[test]
fn copies_and_late_requests_over_udp_do_no_harm() {
    let station = station(HIDDEN, |_| ());
    let peer = Peer { is_proven: true, ..datagram("127.0.0.1:4") };
    let forward = |sequence: u32, seq: usize, value: f32| {
        let body = floats(&vec![value; HIDDEN * seq]);
        send(&station, &peer, sequence, Route::FORWARD, r#"{"session":"s","pos":0}"#, &body)
    };
    let mut meta = key(3);
    meta["session"] = "s".into();
    let meta = meta.to_string();
    assert_eq!(forward(10, 3, 1.0).unwrap().status(), 200);
    // The capture of sequence 11 is overtaken by new positions, and must not keep those under the old key.
    assert_eq!(forward(12, 3, 2.0).unwrap().status(), 200);
    assert_eq!(send(&station, &peer, 11, Route::AMPLITUHEDRON_CAPTURE, &meta, &[]).unwrap().status(), 409);
    assert_eq!(send(&station, &peer, 13, Route::AMPLITUHEDRON_CAPTURE, &meta, &[]).unwrap().status(), 200);
    assert_eq!(send(&station, &peer, 14, Route::AMPLITUHEDRON_REPLAY, &meta, &[]).unwrap().status(), 200);
    // A copy gets the same answer again; a late one is dropped, since newer work has changed the session.
    assert_eq!(forward(16, 5, 4.0).unwrap().status(), 200);
    assert_eq!(send(&station, &peer, 14, Route::AMPLITUHEDRON_REPLAY, &meta, &[]).unwrap().status(), 200);
    assert!(send(&station, &peer, 15, Route::AMPLITUHEDRON_REPLAY, &meta, &[]).is_none());
    let append = send(&station, &peer, 17, Route::FORWARD, r#"{"session":"s","pos":5}"#, &floats(&[0.0; HIDDEN]));
    assert_eq!(append.unwrap().status(), 200);
}

#[test]
fn a_draining_station_takes_nothing_new() {
    let station = station(HIDDEN, |_| ());
    station.drain();
    let body = envelope(5, &[1.0; HIDDEN], &[]);
    assert_eq!(ask(&station, Route::AMPLITUHEDRON_REPLAY, &key(5), &[]).status(), 503);
    assert_eq!(ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({}), &body).status(), 503);
    assert_eq!(ask(&station, Route::SHARD_PUT, &json!({"shard": "s", "key": "k", "value": 1}), &[]).status(), 503);
    assert_eq!(ask(&station, Route::SHARD_GET, &json!({"shard": "s", "key": "k"}), &[]).status(), 404);
}

#[test]
fn shards_hold_json_values_and_say_what_they_vent() {
    let station = station(HIDDEN, |limits| limits.shards = ShardLimits { entries: 2, bytes: 70_000 });
    let put = |key: &str, value: Value| {
        ask(&station, Route::SHARD_PUT, &json!({"shard": "s", "key": key, "value": value}), &[])
    };
    let get = |shard: &str, key: &str| ask(&station, Route::SHARD_GET, &json!({"shard": shard, "key": key}), &[]);
    let value = json!({"a": [1, null, "é\n"], "b": {"c": 0.5}});
    let first = put("one", value.clone());
    assert_eq!(first.status(), 200);
    assert_eq!(
        (&first.meta["held"], &first.meta["vented"], &first.meta["capacity"]),
        (&json!(1), &json!(0), &json!(2))
    );
    assert_eq!(get("s", "one").meta, json!({"status": 200, "shard": "s", "key": "one", "value": value}));
    put("two", json!(false));
    let third = put("three", Value::Null);
    assert_eq!((&third.meta["held"], &third.meta["vented"]), (&json!(2), &json!(1)));
    let unknown = get("s", "one");
    assert_eq!((unknown.status(), unknown.flags), (404, Flags::FAILURE));
    assert_eq!(get("t", "two").status(), 404);
    assert_eq!(get("s", "three").meta["value"], Value::Null);
    let large = put("large", json!("x".repeat(60_000)));
    assert_eq!((large.status(), &large.meta["max_shard_entry"]), (413, &json!(60_000)));
    // The longest value and the longest names, all of which need escapes, still fit a reply.
    let name = "\u{1}".repeat(256);
    let meta = json!({"shard": name, "key": name, "value": "x".repeat(59_998)});
    assert_eq!(ask(&station, Route::SHARD_PUT, &meta, &[]).status(), 200);
    assert_eq!(ask(&station, Route::SHARD_GET, &json!({"shard": name, "key": name}), &[]).status(), 200);
    for meta in [
        json!({"key": "k", "value": 1}),
        json!({"shard": "", "key": "k", "value": 1}),
        json!({"shard": "s", "key": 7, "value": 1}),
        json!({"shard": "s", "key": "k".repeat(257), "value": 1}),
        json!({"shard": "s", "key": "k"}),
    ] {
        assert_eq!(ask(&station, Route::SHARD_PUT, &meta, &[]).status(), 400, "{meta}");
    }
    let twice = send(&station, &stream(), 1, Route::SHARD_PUT, r#"{"shard":"s","key":"k","value":{"a":1,"a":2}}"#, &[]);
    assert_eq!(twice.unwrap().status(), 400);
}

/// A real model, over every carrier: what a session gives is whole, and what is not whole is never put into one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slabs_of_a_real_model_are_checked() {
    let model = &models()[0];
    let ids = prompt(model, 6, 1);
    let embedded = model.whole.embed(&ids).unwrap();
    let mut cache = model.whole.new_cache();
    let output = model.whole.forward(cache.as_mut(), embedded, &aeon_station::model::CancelToken::default()).unwrap();
    let tail = &output[output.len() - 128..];
    let slab = model.whole.export_cache(cache.as_ref(), 6).unwrap();
    let envelope = |slab: &[f32]| encode_amplituhedron_capture(9, 6, 0, 6, tail, slab);
    for carrier in [Unix, Udp, Tcp] {
        let stations = start(model, &[carrier], |_, settings| settings.limits.max_datagram = Some(65_507)).await;
        let options = ClientOptions { request_timeout: Duration::from_secs(20), ..ClientOptions::default() };
        let client = Client::connect(&stations.addresses[0], options).await.unwrap();
        let capture = |body: Vec<u8>| {
            let client = client.clone();
            async move {
                match client.request(Route::AMPLITUHEDRON_CAPTURE, |_| (), &body).await {
                    Ok(reply) => reply.status,
                    Err(ClientError::Vent { status, .. }) => status,
                    Err(error) => panic!("{error}"),
                }
            }
        };
        let replay = || async {
            let meta = |meta: &mut aeon_proto::payload::MetaWriter<'_, '_>| {
                meta.unsigned("prefix_hash", 9)
                    .unsigned("prefix_len", 6)
                    .unsigned("layer_lo", 0)
                    .unsigned("layer_hi", 6);
                meta.string("session", "fresh");
            };
            client.request(Route::AMPLITUHEDRON_REPLAY, meta, &[]).await.unwrap().status
        };
        for len in [slab.len() - 1, slab.len() / 6 * 5, slab.len() / 2, 1] {
            assert_eq!(capture(envelope(&slab[..len])).await, Status::BAD_REQUEST, "{len}");
        }
        let mut bad = slab.clone();
        bad[slab.len() - 1] = f32::NAN;
        assert_eq!(capture(envelope(&bad)).await, Status::UNPROCESSABLE);
        let whole = envelope(&slab);
        assert_eq!(capture(whole[..whole.len() - 1].to_vec()).await, Status::BAD_REQUEST);
        assert_eq!(replay().await, Status::NO_CONTENT);
        // The tail alone is no prefix that a session could go on from.
        assert_eq!(capture(envelope(&[])).await, Status::OK);
        assert_eq!(replay().await, Status::NO_CONTENT);
        assert_eq!(capture(whole).await, Status::OK);
        assert_eq!(replay().await, Status::OK);
        let next = |meta: &mut aeon_proto::payload::MetaWriter<'_, '_>| {
            meta.string("session", "fresh").unsigned("pos", 6).string("in", "ids").string("out", "token");
        };
        let reply = client.request(Route::FORWARD, next, &5_u32.to_le_bytes()).await.unwrap();
        let expected = super::support::unsplit(&*model.whole, &[&ids[..], &[5]].concat(), 1);
        assert_eq!(*reply.body, expected[0].to_le_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever finite numbers are captured come back bit for bit, over the routes.
    #[test]
    fn capture_then_replay_is_identity(
        bits in proptest::collection::vec(any::<u32>(), HIDDEN), prefix_len in 1_u32..(1 << 24), prefix_hash: u64,
    ) {
        let station = station(HIDDEN, |_| ());
        let tail: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        let body = encode_amplituhedron_capture(prefix_hash, prefix_len, 0, 1, &tail, &[]);
        let captured = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({}), &body);
        let meta = json!({"prefix_hash": prefix_hash.to_string(), "prefix_len": prefix_len, "layer_lo": 0, "layer_hi": 1});
        let answer = ask(&station, Route::AMPLITUHEDRON_REPLAY, &meta, &[]);
        if tail.iter().all(|value| value.is_finite()) {
            prop_assert_eq!((captured.status(), answer.status()), (200, 200));
            let back = decode_amplituhedron_reply(&answer.body).unwrap().tail.unwrap();
            let back: Vec<u32> = back.iter().map(|value| value.to_bits()).collect();
            prop_assert_eq!(back, bits);
        } else {
            prop_assert_eq!((captured.status(), answer.status()), (422, 204));
        }
    }

    /// Any body gets an answer and leaves the station as it was.
    #[test]
    fn no_capture_body_does_harm(mut body in proptest::collection::vec(any::<u8>(), 1..200), magic: bool) {
        let station = station(HIDDEN, |_| ());
        if magic && body.len() >= 6 {
            body[..6].copy_from_slice(b"BWAH\x01\x03");
        }
        let answer = ask(&station, Route::AMPLITUHEDRON_CAPTURE, &json!({}), &body);
        prop_assert!(matches!(answer.status(), 400 | 409 | 413));
        prop_assert_eq!(ask(&station, Route::AMPLITUHEDRON_REPLAY, &key(5), &[]).status(), 204);
    }
}
