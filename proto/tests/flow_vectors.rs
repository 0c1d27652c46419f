//! Agreement with every entry of `vectors/aeon-flow.json`, which the public TypeScript implementation made.
#![allow(clippy::unwrap_used)] // its helpers are test code too

mod support;

use std::collections::BTreeMap;

use aeon_proto::{
    fragment::{self, AckEntry, Fragmenter, InFlight, Outcome, Reassembler, Received, StreamOrder},
    frame::{DecodeError, EncodeError, Flags, Frame, MAX_FRAME_LEN, PREFIX_LEN},
    json,
    payload::{self, FrameWriter, Payload},
};
use serde_json::Value;
use support::{array, bytes, load, matches, number, run, string, unhex};

/// How a section is checked: its name, how many entries it has, and the check of one entry by id.
type Section = (&'static str, usize, fn(&str, &Value));

const SECTIONS: [Section; 11] = [
    ("frames", 122, check_frame),
    ("station_payloads", 25, check_payload),
    ("batches", 8, check_batch),
    ("tcp", 9, check_stream),
    ("tcp_receive", 8, check_stream_receive),
    ("udp_fragmented", 24, check_fragmented),
    ("udp_receive", 16, check_receive),
    ("udp_acks", 13, check_acks),
    ("udp_ack_effects", 7, check_ack_effects),
    ("ordering", 12, check_ordering),
    ("errors", 27, check_error),
];

/// Entries that record a habit of the other implementation, and what this crate does. The checks branch on these ids.
const HABITS: [(&str, &str, &str); 14] = [
    ("errors", "encode-keeps-low-bits-stream-65536", "the type holds no such value; a conversion refuses it"),
    ("errors", "encode-keeps-low-bits-sequence-4294967296", "the type holds no such value; a conversion refuses it"),
    ("errors", "encode-keeps-low-bits-flags-256", "the type holds no such value; a conversion refuses it"),
    ("tcp", "two-frames-one-message", "refused on arrival: a message is exactly one frame"),
    ("tcp", "empty-message", "refused on arrival: a message is exactly one frame"),
    ("tcp", "empty-between", "refused on arrival: a message is exactly one frame"),
    ("tcp", "length-16777215", "accepted: the largest frame there is, and the limit on a message"),
    ("tcp", "length-65536", "accepted: under the limit of one frame"),
    ("tcp_receive", "empty-message-first", "as tcp/empty-message"),
    ("udp_receive", "single-index-ignored", "dropped: the index is past the total"),
    ("udp_receive", "bytes-after-the-frame", "dropped: not exactly one frame"),
    ("udp_receive", "index-past-total", "dropped, as asked for"),
    ("udp_receive", "flag-80-on-any-stream-is-an-ack", "not delivered either, but not read as an acknowledgement"),
    ("ordering", "first-is-one-waits", "the same, unless the stream is opened with another first sequence"),
];

fn is_habit(section: &str, id: &str) -> bool {
    HABITS.iter().any(|habit| (habit.0, habit.1) == (section, id))
}

#[test]
fn every_section_is_checked_and_271_entries_are_there() {
    let file = load("aeon-flow.json");
    let stated = file["counts"].as_object().unwrap();
    assert_eq!(SECTIONS.len(), stated.len());
    for (name, count, _) in SECTIONS {
        assert_eq!(stated[name].as_u64(), Some(count as u64), "{name}");
    }
    let arrays = file.as_object().unwrap().iter().filter(|(_, value)| value.is_array());
    assert_eq!(arrays.map(|(name, _)| name.as_str()).filter(|name| !stated.contains_key(*name)).count(), 0);
    assert_eq!(SECTIONS.iter().map(|section| section.1).sum::<usize>(), 271);
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
fn udp_fragmented() {
    run_section("udp_fragmented");
}

#[test]
fn udp_receive() {
    run_section("udp_receive");
}

#[test]
fn udp_acks() {
    run_section("udp_acks");
}

#[test]
fn udp_ack_effects() {
    run_section("udp_ack_effects");
}

#[test]
fn ordering() {
    run_section("ordering");
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

fn check_fragmented(_: &str, entry: &Value) {
    let mtu = number(entry, "mtu") as usize;
    let mut fragmenter = Fragmenter::starting_at(mtu, number(entry, "first_frame_id").try_into().unwrap()).unwrap();
    for (n, frame) in read_all(entry, "frames").iter().enumerate() {
        let frame = frame.encode();
        let mut datagrams: Vec<Vec<u8>> = Vec::new();
        let result = fragmenter.split(&frame).map(|parts| {
            for part in parts {
                datagrams.push(Vec::new());
                part.write(datagrams.last_mut().unwrap());
            }
        });
        assert_eq!(result.is_err(), datagrams.is_empty());
        if let Some(joined) = entry["datagrams_joined"].get(n) {
            assert_eq!(datagrams.len() as u64, number(joined, "count"));
            assert!(matches(joined, &datagrams.concat()));
        } else {
            let expected = entry["datagrams"][n].as_array().unwrap();
            assert_eq!(datagrams.len(), expected.len());
            assert!(expected.iter().zip(&datagrams).all(|(expected, datagram)| matches(expected, datagram)));
        }
        let mut reassembler = Reassembler::new(fragment::Limits::default());
        for (left, datagram) in (0..datagrams.len()).zip(datagrams.iter().rev()) {
            let outcome = reassembler.push(0, &(), datagram).unwrap();
            let last = left + 1 == datagrams.len();
            assert_eq!(outcome, if last { Outcome::Complete((&frame).into()) } else { Outcome::Waiting });
        }
    }
}

/// The receiving side put together: parts joined, exactly one frame, acknowledgements aside, each stream in order.
fn receive(datagrams: &[Vec<u8>], first_sequence: u32) -> (Vec<Owned>, Vec<AckEntry>) {
    let mut reassembler = Reassembler::new(fragment::Limits::default());
    let mut streams: BTreeMap<u16, StreamOrder<Owned>> = BTreeMap::new();
    let (mut delivered, mut acks) = (Vec::new(), Vec::new());
    for datagram in datagrams {
        let Ok(Outcome::Complete(bytes)) = reassembler.push(0, &"peer", datagram) else { continue };
        let Ok(frame) = Frame::decode_exact(&bytes) else { continue };
        if fragment::is_ack(&frame) {
            acks.extend(fragment::decode_acks(frame.payload));
        } else if !frame.flags.contains(Flags::ACK) {
            let order = streams.entry(frame.stream_id).or_insert_with(|| StreamOrder::starting_at(first_sequence));
            let Frame { stream_id, sequence, flags, payload } = frame;
            delivered.extend(order.push(sequence, Owned { stream_id, sequence, flags, payload: payload.to_vec() }));
        }
    }
    (delivered, acks)
}

fn check_receive(id: &str, entry: &Value) {
    let datagrams: Vec<Vec<u8>> =
        array(entry, "datagrams").iter().map(|datagram| unhex(datagram.as_str().unwrap())).collect();
    let (delivered, acks) = receive(&datagrams, 0);
    if ["single-index-ignored", "bytes-after-the-frame"].contains(&id) {
        assert!(is_habit("udp_receive", id));
        assert_eq!(delivered, [], "dropped");
        let strict = datagrams.iter().map(|datagram| {
            let frame_len = 10 + usize::from(datagram[13]);
            [&[0, 0, 0, 1], &datagram[4..4 + frame_len]].concat()
        });
        assert_eq!(receive(&strict.collect::<Vec<_>>(), 0).0, read_all(entry, "delivered"), "the strict form is not");
    } else {
        assert_eq!(delivered, read_all(entry, "delivered"));
    }
    let expected: &[AckEntry] =
        if id == "ack-not-delivered" { &[AckEntry { stream_id: 4, base: 0, bits: 1 }] } else { &[] };
    assert_eq!(acks, expected);
}

fn check_acks(_: &str, entry: &Value) {
    let mut received = Received::new();
    for stream in array(entry, "received") {
        for sequence in array(stream, "sequences") {
            let stream_id = number(stream, "stream_id").try_into().unwrap();
            received.insert(stream_id, sequence.as_u64().unwrap().try_into().unwrap());
        }
    }
    let entries = received.take(usize::MAX);
    let mut frame = Vec::new();
    fragment::encode_ack(&entries, &mut frame).unwrap();
    let frame_id = number(entry, "frame_id").try_into().unwrap();
    let mut datagram = Vec::new();
    Fragmenter::starting_at(fragment::DEFAULT_MTU, frame_id).unwrap().write(&frame, &mut datagram).unwrap();
    assert_eq!(datagram, unhex(string(entry, "datagram")));
    let frame = Frame::decode_exact(&frame).unwrap();
    assert!(fragment::is_ack(&frame));
    assert_eq!(fragment::decode_acks(frame.payload).collect::<Vec<_>>(), entries);
}

fn check_ack_effects(_: &str, entry: &Value) {
    let keys = |name| {
        array(entry, name)
            .iter()
            .map(|frame| (number(frame, "stream_id") as u16, number(frame, "sequence") as u32))
            .collect::<Vec<_>>()
    };
    let mut in_flight = InFlight::default();
    for (stream_id, sequence) in keys("inflight") {
        assert_eq!(in_flight.insert(stream_id, sequence, 0, ()), None);
    }
    for entry in fragment::decode_acks(&unhex(string(entry, "ack_payload"))) {
        in_flight.acknowledge(entry);
    }
    assert_eq!(in_flight.keys().collect::<Vec<_>>(), keys("left"));
}

fn check_ordering(id: &str, entry: &Value) {
    let numbers = |values: &Value| {
        values.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as u32).collect::<Vec<_>>()
    };
    let mut order = StreamOrder::default();
    for step in array(entry, "steps") {
        let sequence = number(step, "push") as u32;
        assert_eq!(order.push(sequence, sequence), numbers(&step["delivers"]), "push {sequence}");
    }
    assert_eq!(order.held() as u64, number(entry, "held_back"));
    if is_habit("ordering", id) {
        let mut order = StreamOrder::starting_at(1);
        for step in array(entry, "steps") {
            let sequence = number(step, "push") as u32;
            assert_eq!(order.push(sequence, sequence), [sequence]);
        }
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
