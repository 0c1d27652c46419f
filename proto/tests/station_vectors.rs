//! Agreement with `vectors/meta.json`, `body.json`, `station.json` and `fragment.json`, which an independent script made
//! from the specification. Replay keys and HELLO answers of `meta.json` are read by the station's own crate and tested there.
#![allow(clippy::unwrap_used)] // its helpers are test code too

mod support;

use aeon_proto::{
    bwah,
    fragment::{self, Header, Outcome, Reassembler},
    frame::{Flags, Frame, Kind},
    json::{self, Object},
    meta::{self, RequestMeta, Return},
    payload::{self, FrameWriter, Payload},
    pcar::PcarBody,
    residual,
    route::Route,
    status::Status,
};
use serde_json::{Map, Value, json};
use support::{array, bytes, load, matches, number, run, string};

/// The keys that stand in a meta, as the vectors write them.
fn fields(meta: &RequestMeta<'_>, text: &str) -> Value {
    let mut found = Map::new();
    let mut put = |key: &str, value: Option<Value>| found.extend(value.map(|value| (key.to_owned(), value)));
    let text_of = |value: &Option<std::borrow::Cow<'_, str>>| value.as_deref().map(Value::from);
    put("content_type", text_of(&meta.content_type));
    put("session", text_of(&meta.session));
    put("pos", meta.pos.map(Value::from));
    put("accept", meta.accept.as_ref().map(|kinds| kinds.iter().map(|kind| kind.name()).collect()));
    put("accept_basis", meta.accept_basis.as_ref().map(|list| list.iter().copied().collect()));
    put("accept_k", meta.accept_k.map(Value::from));
    put("boundary", meta.boundary.map(Value::from));
    put("config_fp", text_of(&meta.config_fp));
    put("deadline_ms", meta.deadline_ms.map(Value::from));
    put("top_k", meta.top_k.map(Value::from));
    put("trace", text_of(&meta.trace));
    put("token", text_of(&meta.token));
    put("fp48", meta.fp48.map(Value::from));
    // These have a default: they are compared where the text has them, and must be the default elsewhere.
    let object = Object::parse(text).unwrap();
    let returns = match meta.returns {
        Return::Token => "token",
        Return::TopK => "topk",
        Return::Logits => "logits",
    };
    let input = if meta.input == meta::Input::Ids { "ids" } else { "residual" };
    let output = if meta.output == meta::Output::Token { "token" } else { "residual" };
    for (key, value, default) in [
        ("timing", Value::from(meta.timing), Value::from(false)),
        ("return", returns.into(), "token".into()),
        ("in", input.into(), "residual".into()),
        ("out", output.into(), "residual".into()),
    ] {
        match object.get(key) {
            Some(_) => put(key, Some(value)),
            None => assert_eq!(value, default, "{key}"),
        }
    }
    Value::Object(found)
}

#[test]
fn request_metas() {
    run(&load("meta.json"), "requests", 17, |_, entry| {
        let text = string(entry, "text");
        assert_eq!(fields(&RequestMeta::parse(text).unwrap(), text), entry["fields"]);
    });
}

/// The name that the vectors give to what is wrong with a meta text.
fn json_fault(error: &json::Error) -> &'static str {
    match error {
        json::Error::Syntax { .. } => "Syntax",
        json::Error::NotObject => "NotObject",
        json::Error::DuplicateKey { .. } => "DuplicateKey",
        json::Error::TooDeep => "TooDeep",
    }
}

#[test]
fn bad_request_metas() {
    run(&load("meta.json"), "invalid_requests", 67, |_, entry| match RequestMeta::parse(string(entry, "text")) {
        Err(meta::Error::Json(error)) => {
            assert_eq!((json_fault(&error), None), (string(entry, "error"), entry["key"].as_str()));
        }
        Err(meta::Error::Field { key, .. }) => {
            assert_eq!(("Field", Some(key)), (string(entry, "error"), entry["key"].as_str()));
        }
        Ok(meta) => panic!("accepted: {meta:?}"),
    });
}

fn u32s(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|word| word.as_u64().unwrap().try_into().unwrap()).collect()
}

#[test]
fn plain_bodies() {
    run(&load("body.json"), "words", 10, |_, entry| {
        let (body, words) = (bytes(&entry["body"]).unwrap(), u32s(&entry["words"]));
        assert_eq!(residual::decode_u32s(&body).unwrap(), words);
        let floats = residual::decode_f32s(&body).unwrap();
        assert_eq!(floats.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), words);
        let bad = entry["first_not_finite"].as_u64();
        assert_eq!(residual::check_finite(&body).err().map(|error| error.index as u64), bad);
        assert_eq!(residual::check_finite_values(&floats).err().map(|error| error.index as u64), bad);
        let (mut ids, mut again) = (Vec::new(), Vec::new());
        residual::encode_u32s(&words, &mut ids);
        residual::encode_f32s(&floats, &mut again);
        assert_eq!((&ids, &again), (&body, &body));
    });
}

#[test]
fn bad_plain_bodies() {
    run(&load("body.json"), "invalid", 7, |_, entry| {
        let body = bytes(&entry["body"]).unwrap();
        let error = residual::LengthError { len: body.len() };
        assert_eq!(string(entry, "error"), "Length");
        assert_eq!(residual::decode_f32s(&body), Err(error));
        assert_eq!(residual::decode_u32s(&body), Err(error));
    });
}

/// The answer of the head is plain words; which of them are ids is said by its kind.
#[test]
fn answers_of_the_head() {
    run(&load("body.json"), "heads", 5, |_, entry| {
        let body = bytes(&entry["body"]).unwrap();
        let words = residual::decode_u32s(&body).unwrap();
        let seq = number(entry, "seq") as usize;
        let (ids, logits): (Vec<u32>, Vec<u32>) = match string(entry, "kind") {
            "u32" => {
                assert_eq!(words.len(), seq);
                (words.into_owned(), vec![])
            }
            "logits" => (vec![], words.into_owned()),
            _ => {
                let k = number(entry, "top_k") as usize;
                assert_eq!(words.len(), seq * 2 * k);
                let positions = words.chunks(2 * k).map(|position| position.split_at(k));
                positions.fold((vec![], vec![]), |(ids, logits), (more_ids, more_logits)| {
                    ([&ids[..], more_ids].concat(), [&logits[..], more_logits].concat())
                })
            }
        };
        assert_eq!(ids, u32s(&entry["ids"]));
        let expected =
            array(entry, "logits").iter().map(|bits| u32::from_str_radix(bits.as_str().unwrap(), 16).unwrap());
        assert_eq!(logits, expected.collect::<Vec<_>>());
    });
}

fn header(entry: &Value) -> (u16, u32, Flags) {
    (
        number(entry, "stream_id").try_into().unwrap(),
        number(entry, "sequence").try_into().unwrap(),
        Flags(number(entry, "flags").try_into().unwrap()),
    )
}

/// The first fault of a body that a reader of this frame meets.
fn body_fault(frame: &Frame<'_>, payload: &Payload<'_>) -> Option<&'static str> {
    let response = frame.flags.contains(Flags::RESPONSE);
    match Route(frame.stream_id) {
        Route::EMBED | Route::FORWARD | Route::LM_HEAD => residual::decode_u32s(payload.body).err().map(|_| "Length"),
        Route::FORWARD_PCA | Route::LM_HEAD_PCA if !response => match PcarBody::decode(payload.body) {
            Err(aeon_proto::pcar::DecodeError::Truncated { .. }) => Some("Truncated"),
            Err(aeon_proto::pcar::DecodeError::BadTag { .. }) => Some("BadTag"),
            Err(error) => panic!("{error}"),
            Ok(_) => None,
        },
        Route::AMPLITUHEDRON_CAPTURE if !response && !payload.body.is_empty() => {
            bwah::decode_amplituhedron_capture(payload.body).err().map(|error| error.name())
        }
        Route::AMPLITUHEDRON_REPLAY if response => {
            bwah::decode_amplituhedron_reply(payload.body).err().map(|error| error.name())
        }
        _ => None,
    }
}

#[test]
fn frames_of_a_station() {
    run(&load("station.json"), "frames", 49, |_, entry| {
        let (stream_id, sequence, flags) = header(entry);
        let (meta, body) = (string(entry, "meta"), bytes(&entry["body"]).unwrap());
        let mut out = Vec::new();
        let mut writer = FrameWriter::new(&mut out, stream_id, sequence, flags);
        writer.meta_text(meta);
        writer.body().extend_from_slice(&body);
        writer.finish().unwrap();
        assert!(matches(&entry["encoded"], &out));
        let frame = Frame::decode_exact(&out).unwrap();
        let payload = Payload::decode(frame.payload).unwrap();
        assert_eq!(payload, Payload { meta, body: &body });
        assert_eq!(body_fault(&frame, &payload), None);
        if flags.contains(Flags::RESPONSE) {
            assert_eq!(flags.kind(), Kind::NeverAnswered);
            let object = Object::parse(meta).unwrap();
            if let Some(json::Value::Unsigned(status)) = object.get("status") {
                let status = Status(u16::try_from(*status).unwrap());
                assert_ne!(status.description(), Status(999).description());
                assert_eq!(status.is_success(), flags == Flags::SUCCESS);
                assert_eq!(object.get("error").is_some(), flags == Flags::FAILURE);
            }
        } else {
            assert_eq!(flags.kind(), Kind::Request);
            RequestMeta::parse(meta).unwrap();
        }
    });
}

#[test]
fn frames_without_a_payload_of_two_parts() {
    run(&load("station.json"), "plain", 12, |_, entry| {
        let (stream_id, sequence, flags) = header(entry);
        let payload = bytes(&entry["payload"]).unwrap();
        let mut out = Vec::new();
        let frame = Frame { stream_id, sequence, flags, payload: &payload };
        frame.encode(&mut out).unwrap();
        assert!(matches(&entry["encoded"], &out));
        assert_eq!(Frame::decode_exact(&out), Ok(frame));
        let role = match flags.kind() {
            Kind::Cancel => "cancel",
            Kind::NeverAnswered => "never",
            Kind::Request => "request",
        };
        assert_eq!(role, string(entry, "role"));
    });
}

#[test]
fn bad_frames_of_a_station() {
    run(&load("station.json"), "invalid", 48, |_, entry| {
        let encoded = bytes(&entry["encoded"]).unwrap();
        let frame = Frame::decode_exact(&encoded).unwrap();
        assert_eq!((frame.stream_id, frame.sequence, frame.flags), header(entry));
        let fault = match Payload::decode(frame.payload) {
            Err(payload::Error::ShortPayload { .. }) => "ShortPayload",
            Err(payload::Error::ShortMeta { .. }) => "ShortMeta",
            Err(payload::Error::NotUtf8 { .. }) => "NotUtf8",
            Ok(payload) => match Object::parse(payload.meta) {
                Err(error) => json_fault(&error),
                Ok(_) => body_fault(&frame, &payload).unwrap(),
            },
        };
        assert_eq!(fault, string(entry, "error"));
    });
}

#[test]
fn fragment_headers() {
    run(&load("fragment.json"), "valid", 6, |_, entry| {
        let datagram = bytes(&entry["datagram"]).unwrap();
        let (first, part) = datagram.split_first_chunk().unwrap();
        let header = Header::decode(*first);
        assert_eq!(u64::from(header.frame_id), number(entry, "frame_id"));
        assert_eq!(u64::from(header.index), number(entry, "index"));
        assert_eq!(u64::from(header.total), number(entry, "total"));
        assert_eq!(part, bytes(&entry["part"]).unwrap());
        let mut out = Vec::new();
        fragment::Part { header, bytes: part }.write(&mut out);
        assert_eq!(out, datagram);
        let mut reassembler = Reassembler::new(fragment::Limits::default());
        let expected = if header.total == 1 { Outcome::Complete(part.into()) } else { Outcome::Waiting };
        assert_eq!(reassembler.push(0, &(), &datagram), Ok(expected));
    });
}

#[test]
fn bad_fragment_headers() {
    run(&load("fragment.json"), "invalid", 9, |_, entry| {
        let datagram = bytes(&entry["datagram"]).unwrap();
        let mut reassembler = Reassembler::new(fragment::Limits::default());
        let fault = match reassembler.push(0, &(), &datagram).unwrap_err() {
            fragment::Dropped::Short { got } => {
                assert_eq!(got, datagram.len());
                "Short"
            }
            fragment::Dropped::ZeroTotal => "ZeroTotal",
            fragment::Dropped::IndexPastTotal { .. } => "IndexPastTotal",
            other => panic!("{other}"),
        };
        assert_eq!(fault, string(entry, "error"));
        assert!(reassembler.is_empty());
    });
}

#[test]
fn acknowledgements() {
    run(&load("fragment.json"), "acks", 8, |_, entry| {
        let payload = bytes(&entry["payload"]).unwrap();
        let entries: Vec<_> = fragment::decode_acks(&payload).collect();
        let ignored = payload.len() - fragment::ACK_ENTRY_LEN * entries.len();
        assert_eq!(ignored as u64, number(entry, "ignored"));
        let found = entries.iter().map(|ack| {
            let named = (0..fragment::ACK_WINDOW).filter_map(|bit| ack.base.checked_add(bit));
            let sequences: Vec<u32> = named.filter(|sequence| ack.contains(*sequence)).collect();
            json!({"stream_id": ack.stream_id, "base": ack.base, "sequences": sequences})
        });
        assert_eq!(found.collect::<Value>(), entry["entries"]);
        let mut out = Vec::new();
        fragment::encode_ack(&entries, &mut out).unwrap();
        assert_eq!(out[10..], payload[..payload.len() - ignored]);
    });
}
