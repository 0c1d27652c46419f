//! Agreement with every entry of `vectors/aeon-flow.json`, which the public TypeScript implementation made.
#![allow(clippy::unwrap_used)] // its helpers are test code too

mod support;

use aeon_proto::{
    frame::{DecodeError, EncodeError, Flags, Frame, MAX_FRAME_LEN, PREFIX_LEN},
    json,
    payload::{self, FrameWriter, Payload},
};
use serde_json::Value;
use support::{array, bytes, load, matches, number, run, string, unhex};

/// How a section is checked: its name, how many entries it has, and the check of one entry by id.
type Section = (&'static str, usize, fn(&str, &Value));

const SECTIONS: [Section; 6] = [
    ("frames", 122, check_frame),
    ("station_payloads", 25, check_payload),
    ("batches", 8, check_batch),
    ("tcp", 9, check_stream),
    ("tcp_receive", 8, check_stream_receive),
    ("errors", 27, check_error),
];

/// Sections that are about the fragmented transport.
const NOT_YET: [(&str, usize); 5] =
    [("udp_fragmented", 24), ("udp_receive", 16), ("udp_acks", 13), ("udp_ack_effects", 7), ("ordering", 12)];

/// Entries that record a habit of the other implementation, and what this crate does. The checks branch on these ids.
const HABITS: [(&str, &str, &str); 9] = [
    ("errors", "encode-keeps-low-bits-stream-65536", "the type holds no such value; a conversion refuses it"),
    ("errors", "encode-keeps-low-bits-sequence-4294967296", "the type holds no such value; a conversion refuses it"),
    ("errors", "encode-keeps-low-bits-flags-256", "the type holds no such value; a conversion refuses it"),
    ("tcp", "two-frames-one-message", "refused on arrival: a message is exactly one frame"),
    ("tcp", "empty-message", "refused on arrival: a message is exactly one frame"),
    ("tcp", "empty-between", "refused on arrival: a message is exactly one frame"),
    ("tcp", "length-16777215", "accepted: the largest frame there is, and the limit on a message"),
    ("tcp", "length-65536", "accepted: under the limit of one frame"),
    ("tcp_receive", "empty-message-first", "as tcp/empty-message"),
];

fn is_habit(section: &str, id: &str) -> bool {
    HABITS.iter().any(|habit| (habit.0, habit.1) == (section, id))
}

#[test]
fn every_section_is_checked_and_271_entries_are_there() {
    let file = load("aeon-flow.json");
    let stated = file["counts"].as_object().unwrap();
    let mut known: Vec<(&str, usize)> = SECTIONS.iter().map(|section| (section.0, section.1)).collect();
    known.extend(NOT_YET);
    assert_eq!(known.len(), stated.len());
    for (name, count) in &known {
        assert_eq!(stated[*name].as_u64(), Some(*count as u64), "{name}");
    }
    let arrays = file.as_object().unwrap().iter().filter(|(_, value)| value.is_array());
    assert_eq!(arrays.map(|(name, _)| name.as_str()).filter(|name| !stated.contains_key(*name)).count(), 0);
    assert_eq!(known.iter().map(|(_, count)| count).sum::<usize>(), 271);
    for (section, id, choice) in HABITS {
        assert!(array(&file, section).iter().any(|entry| string(entry, "id") == id), "{section}/{id}: {choice}");
    }
}

fn run_section(name: &str) {
    let (_, count, check) = SECTIONS.iter().find(|section| section.0 == name).unwrap();
    run(&load("aeon-flow.json"), name, *count, check);
}

#[test]
fn frames() {
    run_section("frames");
}

#[test]
fn station_payloads() {
    run_section("station_payloads");
}

#[test]
fn batches() {
    run_section("batches");
}

#[test]
fn tcp() {
    run_section("tcp");
}

#[test]
fn tcp_receive() {
    run_section("tcp_receive");
}

#[test]
fn errors() {
    run_section("errors");
}

/// A frame of the file, with its payload written out.
#[derive(Debug, Clone, PartialEq)]
struct Owned {
    stream_id: u16,
    sequence: u32,
    flags: Flags,
    payload: Vec<u8>,
}

impl Owned {
    fn read(entry: &Value) -> Self {
        Self {
            stream_id: number(entry, "stream_id").try_into().unwrap(),
            sequence: number(entry, "sequence").try_into().unwrap(),
            flags: Flags(number(entry, "flags").try_into().unwrap()),
            payload: bytes(&entry["payload"]).unwrap(),
        }
    }

    fn frame(&self) -> Frame<'_> {
        Frame { stream_id: self.stream_id, sequence: self.sequence, flags: self.flags, payload: &self.payload }
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.frame().encode(&mut out).unwrap();
        out
    }
}

fn read_all(entry: &Value, key: &str) -> Vec<Owned> {
    array(entry, key).iter().map(Owned::read).collect()
}

/// Longest input for which every prefix is tried.
const SWEEP_LEN: usize = 600;

fn check_frame(_: &str, entry: &Value) {
    let frame = Owned::read(entry);
    let mut encoded = frame.encode();
    assert!(matches(&entry["encoded"], &encoded));
    assert_eq!(Frame::decode_exact(&encoded), Ok(frame.frame()));
    assert_eq!(Frame::decode_prefix(&encoded), Some((frame.frame(), encoded.len())));
    for len in 0..encoded.len().min(SWEEP_LEN) {
        assert_eq!(Frame::decode_prefix(&encoded[..len]), None, "{len} bytes");
        let expected = if len < 10 {
            DecodeError::ShortHeader { got: len }
        } else {
            DecodeError::ShortPayload { expected: frame.payload.len(), got: len - 10 }
        };
        assert_eq!(Frame::decode_exact(&encoded[..len]), Err(expected));
    }
    encoded.push(0);
    assert_eq!(Frame::decode_exact(&encoded), Err(DecodeError::TrailingBytes { extra: 1 }));
}

fn meta_text(entry: &Value) -> String {
    let fill = &entry["meta_fill"];
    if fill.is_null() {
        return string(entry, "meta_json").to_owned();
    }
    let middle = string(fill, "repeat").repeat(number(fill, "count") as usize);
    [string(fill, "before"), &middle, string(fill, "after")].concat()
}

fn check_payload(_: &str, entry: &Value) {
    let stream_id = number(entry, "stream_id").try_into().unwrap();
    let sequence = number(entry, "sequence").try_into().unwrap();
    let flags = Flags(number(entry, "flags").try_into().unwrap());
    if entry["valid"] == true {
        let (meta, body) = (meta_text(entry), bytes(&entry["body"]).unwrap());
        let mut out = Vec::new();
        let mut writer = FrameWriter::new(&mut out, stream_id, sequence, flags);
        writer.meta_text(&meta);
        writer.body().extend_from_slice(&body);
        writer.finish().unwrap();
        assert!(matches(&entry["encoded"], &out));
        let frame = Frame::decode_exact(&out).unwrap();
        assert!(matches(&entry["payload"], frame.payload));
        assert_eq!(Payload::decode(frame.payload), Ok(Payload { meta: &meta, body: &body }));
        assert!(json::Object::parse(&meta).is_ok());
        return;
    }
    let payload = bytes(&entry["payload"]).unwrap();
    let encoded = bytes(&entry["encoded"]).unwrap();
    let frame = Frame { stream_id, sequence, flags, payload: &payload };
    assert_eq!(Frame::decode_exact(&encoded), Ok(frame), "only the payload is bad");
    let parsed = |payload: &Payload<'_>| json::Object::parse(payload.meta).map(|object| object.iter().len());
    let decoded = Payload::decode(&payload);
    match string(entry, "problem") {
        "no room for the meta length" => {
            assert_eq!(decoded, Err(payload::Error::ShortPayload { got: payload.len() }));
        }
        "meta runs past the payload" => assert!(matches!(decoded, Err(payload::Error::ShortMeta { got: 2, .. }))),
        "meta is not UTF-8" => assert!(matches!(decoded, Err(payload::Error::NotUtf8 { .. }))),
        "meta is not JSON" => assert!(matches!(parsed(&decoded.unwrap()), Err(json::Error::Syntax { .. }))),
        "meta is no object" => assert_eq!(parsed(&decoded.unwrap()), Err(json::Error::NotObject)),
        problem => panic!("unknown problem {problem:?}"),
    }
}

fn check_batch(_: &str, entry: &Value) {
    let frames = read_all(entry, "frames");
    let encoded = frames.iter().map(Owned::encode).collect::<Vec<_>>().concat();
    assert!(matches(&entry["encoded"], &encoded));
    assert_eq!(Frame::decode_batch(&encoded), Ok(frames.iter().map(Owned::frame).collect()));
}

/// The messages that are whole at the start of `buffer`, which keeps the rest. The station's own reader of a stream is not
/// in this crate; this is the rule in its shortest form.
fn split_messages(buffer: &mut Vec<u8>) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    while let Some((prefix, rest)) = buffer.split_first_chunk::<PREFIX_LEN>() {
        let len = u32::from_be_bytes(*prefix) as usize;
        if rest.len() < len {
            break;
        }
        messages.push(rest[..len].to_vec());
        buffer.drain(..PREFIX_LEN + len);
    }
    messages
}

fn check_stream(id: &str, entry: &Value) {
    let messages: Vec<Vec<Owned>> = array(entry, "messages")
        .iter()
        .map(|frames| frames.as_array().unwrap().iter().map(Owned::read).collect())
        .collect();
    let mut encoded = Vec::new();
    for frames in &messages {
        let message = frames.iter().map(Owned::encode).collect::<Vec<_>>().concat();
        encoded.extend_from_slice(&(message.len() as u32).to_be_bytes());
        encoded.extend_from_slice(&message);
    }
    assert!(matches(&entry["encoded"], &encoded));
    for (message, frames) in split_messages(&mut encoded).iter().zip(&messages) {
        assert!(message.len() <= MAX_FRAME_LEN);
        let strict = Frame::decode_exact(message);
        match frames.as_slice() {
            [frame] => assert_eq!(strict, Ok(frame.frame())),
            [] => assert_eq!(strict, Err(DecodeError::ShortHeader { got: 0 })),
            [first, ..] => {
                let extra = message.len() - first.frame().encoded_len();
                assert_eq!(strict, Err(DecodeError::TrailingBytes { extra }));
            }
        }
        assert!(frames.len() == 1 || is_habit("tcp", id));
    }
    assert!(encoded.is_empty());
}

fn check_stream_receive(id: &str, entry: &Value) {
    let texts = |key| array(entry, key).iter().map(|text| unhex(text.as_str().unwrap())).collect::<Vec<_>>();
    let (chunks, expected) = (texts("chunks"), texts("messages"));
    let feed = |chunks: &[&[u8]]| {
        let mut buffer = Vec::new();
        let mut messages = Vec::new();
        for chunk in chunks {
            buffer.extend_from_slice(chunk);
            messages.extend(split_messages(&mut buffer));
        }
        messages
    };
    assert_eq!(feed(&chunks.iter().map(Vec::as_slice).collect::<Vec<_>>()), expected);
    let all = chunks.concat();
    for cut in 0..=all.len() {
        assert_eq!(feed(&[&all[..cut], &all[cut..]]), expected, "cut at {cut}");
    }
    for message in &expected {
        assert_eq!(Frame::decode_exact(message).is_err(), message.is_empty());
        assert!(!message.is_empty() || is_habit("tcp_receive", id));
    }
}

fn check_error(id: &str, entry: &Value) {
    let (operation, input) = (string(entry, "operation"), &entry["input"]);
    let problem = entry["problem"].as_str();
    assert_eq!(entry["ok"] == true, problem.is_none());
    let decode_problem = |error| match error {
        DecodeError::ShortHeader { .. } => "short_header",
        DecodeError::ShortPayload { .. } => "short_payload",
        DecodeError::TrailingBytes { .. } => "trailing_bytes",
    };
    match operation {
        "decode" => {
            let input = bytes(input).unwrap();
            let result = Frame::decode(&input);
            assert_eq!(result.err().map(decode_problem), problem);
            if let Ok(frame) = result {
                assert_eq!(frame, Owned::read(&entry["frame"]).frame());
                assert_eq!(frame.encoded_len() as u64, number(entry, "bytes_read"));
            }
        }
        "decode_batch" => {
            let input = bytes(input).unwrap();
            let result = Frame::decode_batch(&input);
            assert_eq!(result.as_ref().err().map(|error| decode_problem(*error)), problem);
            if let Ok(frames) = result {
                assert_eq!(frames, read_all(entry, "frames").iter().map(Owned::frame).collect::<Vec<_>>());
            }
        }
        "encode" if is_habit("errors", id) => {
            let fits = u16::try_from(number(input, "stream_id")).is_ok()
                && u32::try_from(number(input, "sequence")).is_ok()
                && u8::try_from(number(input, "flags")).is_ok();
            assert!(!fits, "refused by its type");
        }
        "encode" => check_oversize(&[Owned::read(input)], problem),
        "encode_batch" => {
            check_oversize(&input.as_array().unwrap().iter().map(Owned::read).collect::<Vec<_>>(), problem);
        }
        _ => panic!("unknown operation {operation:?}"),
    }
}

/// All frames but the last encode; the last is too long and leaves nothing behind.
fn check_oversize(frames: &[Owned], problem: Option<&str>) {
    assert_eq!(problem, Some("oversize"));
    let (last, before) = frames.split_last().unwrap();
    let mut out = before.iter().map(Owned::encode).collect::<Vec<_>>().concat();
    let len = out.len();
    let result = last.frame().encode(&mut out);
    assert_eq!(result, Err(EncodeError::PayloadTooLong { len: last.payload.len() }));
    assert_eq!(out.len(), len);
}
