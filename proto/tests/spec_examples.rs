//! The worked examples of `SPEC.md` are what they claim to be.

#![allow(clippy::unwrap_used)]

use aeon_proto::{
    auth::{Key, Stamp},
    frame::{Flags, Frame},
    json::Object,
    payload::{FrameWriter, Payload},
};

struct Example {
    stream_id: u16,
    sequence: u32,
    flags: u8,
    /// `None` for a frame with an empty payload.
    meta: Option<String>,
    body: Vec<u8>,
    /// The frame, without the length in front of it that streams have.
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
        let (fields, meta) = info.split_once(" meta=").map_or((info, None), |(fields, meta)| (fields, Some(meta)));
        let (meta, body) = match meta.and_then(|meta| meta.split_once(" body=")) {
            Some((meta, body)) => (Some(meta), body),
            None => (meta, ""),
        };
        let field = |name: &str| number(fields.split(' ').find_map(|field| field.strip_prefix(name)).unwrap());
        let mut bytes = hex(bytes);
        if fields.starts_with("prefixed ") {
            let frame = bytes.split_off(4);
            assert_eq!(bytes, (frame.len() as u32).to_be_bytes(), "{info}");
            bytes = frame;
        }
        found.push(Example {
            stream_id: field("stream=") as u16,
            sequence: field("sequence="),
            flags: field("flags=") as u8,
            meta: meta.map(str::to_owned),
            body: hex(body),
            bytes,
        });
    }
    found
}

#[test]
fn every_example_decodes_to_what_stands_beside_it_and_encodes_to_its_bytes() {
    let examples = examples();
    assert_eq!(examples.len(), 22);
    for example in examples {
        let frame = Frame::decode_exact(&example.bytes).unwrap_or_else(|error| panic!("{:?}: {error}", example.meta));
        assert_eq!((frame.stream_id, frame.sequence), (example.stream_id, example.sequence));
        assert_eq!(frame.flags, Flags(example.flags));
        let Some(meta) = example.meta else {
            assert!(frame.payload.is_empty() && example.body.is_empty());
            continue;
        };
        let payload = Payload::decode(frame.payload).unwrap();
        assert_eq!((payload.meta, payload.body), (&*meta, &*example.body));
        assert_eq!(Object::parse(payload.meta).unwrap().is_empty(), meta.is_empty());
        let mut again = Vec::new();
        let mut writer = FrameWriter::new(&mut again, example.stream_id, example.sequence, Flags(example.flags));
        writer.meta_text(&meta);
        writer.body().extend_from_slice(&example.body);
        writer.finish().unwrap();
        assert_eq!(again, example.bytes);
    }
}

#[test]
fn the_signed_examples_are_signed() {
    let key = Key::from_secret(b"correct horse battery staple").unwrap();
    let signed: Vec<Example> =
        examples().into_iter().filter(|e| e.meta.as_ref().is_some_and(|meta| meta.contains("\"auth\""))).collect();
    let [request, reply] = &*signed else { panic!("{} signed examples", signed.len()) };
    let stamp = Stamp { ts: 1_764_547_200_000, nonce: 0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f };
    let request = Frame::decode_exact(&request.bytes).unwrap();
    assert_eq!(key.verify_request(&request), Ok(stamp));
    let reply = Frame::decode_exact(&reply.bytes).unwrap();
    assert_eq!(key.verify_reply(&reply, stamp.nonce), Ok(()));
    let mut again = Vec::new();
    Frame { payload: b"\0\0\x01\0\0\0", ..request }.encode(&mut again).unwrap();
    key.sign_request(&mut again, 0, stamp).unwrap();
    assert_eq!(Frame::decode_exact(&again).unwrap(), request);
}
