//! Agreement with the parts of `proto/vectors/meta.json` that this crate reads: replay keys, shards, and answers to HELLO; and
//! what a station answers to a bad meta.
#![allow(clippy::unwrap_used)]

use std::{sync::Arc, time::Instant};

use aeon_proto::{
    frame::{Flags, Frame},
    json::Object,
    meta,
    payload::{FrameWriter, Payload},
    route::Route,
};
use aeon_station::{
    client::Hello,
    model::identity::Identity,
    replay::key::{Conditions, PrefixKey},
    station::{
        Station,
        limits::Limits,
        request::{Carrier, Origin, Outcome, Peer, ReplyTo, Request},
    },
};
use serde_json::{Map, Value};

fn section(name: &str, count: usize) -> Vec<Value> {
    let mut file: Value = serde_json::from_str(include_str!("../proto/vectors/meta.json")).unwrap();
    assert_eq!(file["counts"][name].as_u64(), Some(count as u64), "{name}");
    let entries: Vec<Value> = serde_json::from_value(file[name].take()).unwrap();
    assert_eq!(entries.len(), count, "{name}");
    entries
}

fn read(text: &str) -> Result<(PrefixKey, Conditions), meta::Error> {
    let object = Object::parse(text)?;
    Ok((PrefixKey::read(&object)?, Conditions::read(&object, None)?))
}

#[test]
fn replay_keys() {
    for entry in section("replay_keys", 8) {
        let text = entry["text"].as_str().unwrap();
        let (key, conditions) = read(text).unwrap();
        let mut found = Map::new();
        found.insert("prefix_hash".into(), format!("0x{:016x}", key.prefix_hash).into());
        found.insert("prefix_len".into(), key.prefix_len.into());
        found.insert("layer_lo".into(), key.layer_lo.into());
        found.insert("layer_hi".into(), key.layer_hi.into());
        for (name, digest) in [("prefix_digest", conditions.prefix_digest), ("mesh_fp", conditions.mesh_fp)] {
            found.extend(digest.map(|digest| (name.to_owned(), digest.to_string().into())));
        }
        found.extend(conditions.basis_fp.map(|basis_fp| ("basis_fp".to_owned(), basis_fp.into())));
        if entry["fields"].get("exact").is_some() {
            found.insert("exact".into(), conditions.exact.into());
        } else {
            assert!(!conditions.exact, "{text}");
        }
        assert_eq!(Value::Object(found), entry["fields"], "{text}");
    }
}

#[test]
fn bad_replay_keys() {
    for entry in section("invalid_replay_keys", 33) {
        match read(entry["text"].as_str().unwrap()) {
            Err(meta::Error::Field { key, .. }) => assert_eq!(Some(key), entry["key"].as_str(), "{entry}"),
            other => panic!("{entry}: {other:?}"),
        }
    }
}

#[test]
fn hellos() {
    for entry in section("hellos", 5) {
        let hello: Hello = serde_json::from_str(entry["text"].as_str().unwrap()).unwrap();
        let fields = &entry["fields"];
        let id = entry["id"].as_str().unwrap();
        let (station, model) = (&hello.station, &hello.model);
        let found = serde_json::json!({
            "status": 200, "content_type": hello.content_type, "layers": hello.layers, "accepts": hello.accepts,
            "station": {"name": station.name, "version": station.version, "uptime_ms": station.uptime_ms},
            "model": {
                "name": model.name, "hidden_dim": model.hidden_dim, "vocab": model.vocab, "n_layers": model.n_layers,
                "max_position": model.max_position, "bos": model.bos, "eos": model.eos, "config_fp": model.config_fp,
                "layers_fp": model.layers_fp,
            },
            "limits": {
                "max_frame": hello.limits.max_frame, "max_datagram": hello.limits.max_datagram,
                "max_seq": hello.limits.max_seq,
            },
        });
        for (key, value) in found.as_object().unwrap() {
            assert_eq!(value, &fields[key], "{key} of {id}");
        }
        let bases = fields["bases"].as_array().map_or(&[][..], Vec::as_slice);
        assert_eq!(hello.bases.len(), bases.len(), "{id}");
        for (basis, expected) in hello.bases.iter().zip(bases) {
            assert_eq!(expected["basis_fp"], basis.basis_fp, "{id}");
            assert_eq!(expected["basis_fp"], format!("0x{:08x}", basis.fingerprint()), "{id}");
            assert_eq!(expected["blake3"], basis.blake3, "{id}");
            assert_eq!(expected["methodology"], basis.methodology, "{id}");
            let boundaries: Vec<Value> = basis
                .boundaries
                .iter()
                .map(|at| serde_json::json!({"boundary": at.boundary, "k": at.k, "explained": at.explained}))
                .collect();
            assert_eq!(expected["boundaries"], Value::Array(boundaries), "{id}");
        }
    }
}

#[test]
fn bad_hellos() {
    for entry in section("invalid_hellos", 16) {
        let result: Result<Hello, _> = serde_json::from_str(entry["text"].as_str().unwrap());
        assert!(result.is_err(), "{entry}");
    }
}

struct Unused;

impl ReplyTo for Unused {
    fn finish(self: Box<Self>, _: Option<Vec<u8>>) {}
}

fn station() -> Station {
    Station::new("test".to_owned(), Arc::new(Identity::new(2, 100)), Limits::default(), 1).unwrap()
}

/// Flags and meta of the answer to one request.
fn ask(station: &Station, route: Route, meta: &str, body: &[u8]) -> (Flags, String) {
    let mut bytes = Vec::new();
    let mut frame = FrameWriter::new(&mut bytes, route.0, 1, Flags::NONE);
    frame.meta_text(meta);
    frame.body().extend_from_slice(body);
    frame.finish().unwrap();
    let peer = Peer {
        carrier: Carrier::Unix,
        connection: 0,
        origin: Origin::Unknown,
        address: None,
        is_proven: true,
        max_reply_len: 16_777_225,
        default_session: None,
        stock_replies: false,
    };
    let request = Request { peer: &peer, frame: Frame::decode_exact(&bytes).unwrap(), arrived: Instant::now() };
    let mut out = Vec::new();
    assert!(matches!(station.handle(request, &mut out, || Box::new(Unused)), Outcome::Replied), "{meta}");
    let frame = Frame::decode_exact(&out).unwrap();
    (frame.flags, Payload::decode(frame.payload).unwrap().meta.to_owned())
}

#[test]
fn shards() {
    let station = station();
    for entry in section("shards", 15) {
        let text = |key: &str| entry[key].as_str().unwrap();
        let (flags, meta) = ask(&station, Route::SHARD_PUT, text("text"), &[]);
        assert_eq!(flags, Flags::SUCCESS, "{meta}");
        let name = serde_json::json!({"shard": text("shard"), "key": text("key")});
        let (flags, meta) = ask(&station, Route::SHARD_GET, &name.to_string(), b"not looked at");
        assert_eq!(flags, Flags::SUCCESS, "{meta}");
        // As text, so that the order of members is compared too.
        let expected = text("value");
        let (_, value) = meta.split_once("\"value\":").unwrap();
        let spelled = |text: &str| Object::parse(&format!("{{\"v\":{text}}}")).map(|object| format!("{object:?}"));
        assert_eq!(spelled(value.strip_suffix('}').unwrap()), spelled(expected), "{meta}");
        let found: Value = serde_json::from_str(&meta).unwrap();
        assert_eq!((&found["shard"], &found["key"]), (&entry["shard"], &entry["key"]));
    }
}

#[test]
fn bad_shards() {
    let station = station();
    for entry in section("invalid_shards", 18) {
        let (flags, meta) = ask(&station, Route::SHARD_PUT, entry["text"].as_str().unwrap(), &[]);
        let found: Value = serde_json::from_str(&meta).unwrap();
        assert_eq!((flags, &found["status"]), (Flags::FAILURE, &entry["status"]), "{entry}: {meta}");
    }
}

#[test]
fn a_bad_meta_is_answered_with_400() {
    let station = station();
    let (flags, meta) = ask(&station, Route::FORWARD, "{}", &[0; 8]);
    assert_eq!(flags, Flags::SUCCESS, "{meta}");
    for entry in section("invalid_requests", 67) {
        let (flags, meta) = ask(&station, Route::FORWARD, entry["text"].as_str().unwrap(), &[0; 8]);
        let found: Value = serde_json::from_str(&meta).unwrap();
        assert_eq!((flags, &found["status"]), (Flags::FAILURE, &400.into()), "{entry}: {meta}");
    }
}
