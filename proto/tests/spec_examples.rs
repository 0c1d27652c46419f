//! The worked examples of `SPEC.md` are what they claim to be.

#![allow(clippy::unwrap_used)]

use aeon_proto::{
    frame::{Flags, Frame},
    json::Object,
    payload::{FrameWriter, Payload},
};

struct Example {
    stream_id: u16,
    sequence: u32,
    flags: u8,
    meta: String,
    body: Vec<u8>,
    bytes: Vec<u8>,
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    assert!(digits.len().is_multiple_of(2), "{text}");
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn number(text: &str) -> u32 {
    text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u32::from_str_radix(digits, 16)).unwrap()
}

fn examples() -> Vec<Example> {
    let text = include_str!("../SPEC.md");
    let mut found = Vec::new();
    for part in text.split("```frame ").skip(1) {
        let (info, rest) = part.split_once('\n').unwrap();
        let (bytes, _) = rest.split_once("```").unwrap();
        let (fields, meta) = info.split_once(" meta=").unwrap();
        let (meta, body) = meta.split_once(" body=").unwrap_or((meta, ""));
        let field = |name: &str| number(fields.split(' ').find_map(|field| field.strip_prefix(name)).unwrap());
        found.push(Example {
            stream_id: field("stream=") as u16,
            sequence: field("sequence="),
            flags: field("flags=") as u8,
            meta: meta.to_owned(),
            body: hex(body),
            bytes: hex(bytes),
        });
    }
    found
}

#[test]
fn every_example_decodes_to_what_stands_beside_it_and_encodes_to_its_bytes() {
    let examples = examples();
    assert_eq!(examples.len(), 3);
    for example in examples {
        let frame = Frame::decode_exact(&example.bytes).unwrap_or_else(|error| panic!("{}: {error}", example.meta));
        assert_eq!((frame.stream_id, frame.sequence), (example.stream_id, example.sequence));
        assert_eq!(frame.flags, Flags(example.flags));
        let payload = Payload::decode(frame.payload).unwrap();
        assert_eq!((payload.meta, payload.body), (&*example.meta, &*example.body));
        assert!(!Object::parse(payload.meta).unwrap().is_empty());
        let mut again = Vec::new();
        let mut writer = FrameWriter::new(&mut again, example.stream_id, example.sequence, Flags(example.flags));
        writer.meta_text(&example.meta);
        writer.body().extend_from_slice(&example.body);
        writer.finish().unwrap();
        assert_eq!(again, example.bytes);
    }
}
