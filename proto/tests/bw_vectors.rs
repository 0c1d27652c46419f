//! Agreement with `vectors/bw.json` and `vectors/bwah.json`, which an independent script made from the specification.
#![allow(clippy::unwrap_used)] // its helpers are test code too

mod support;

use std::fmt::Debug;

use aeon_proto::{
    bw::{self, Decoded},
    bwah::{self, BwahError, CaptureView, ReplyView},
};
use serde_json::Value;
use support::{bytes, load, matches, number, run, string};

/// Each of the `facts` must be told by the error.
fn check_facts(entry: &Value, error: &impl Debug) {
    let text = format!("{error:?}");
    for (key, value) in entry["facts"].as_object().unwrap() {
        let told = [format!("{key}: {value},"), format!("{key}: {value} }}")];
        assert!(told.iter().any(|fact| text.contains(fact)), "{key} {value} in {text}");
    }
}

#[test]
fn blobs() {
    run(&load("bw.json"), "valid", 53, |_, entry| {
        let (content, mime) = (bytes(&entry["content"]).unwrap(), string(entry, "mime"));
        let blob = bw::try_encode(&content, mime).unwrap();
        assert!(matches(&entry["encoded"], &blob));
        assert_eq!(bw::encode(&content, mime), blob);
        assert_eq!(bw::decode(&blob), Ok(Decoded { bytes: content, mime }));
    });
}

#[test]
fn bad_blobs() {
    run(&load("bw.json"), "invalid", 92, |_, entry| {
        let error = bw::decode(&bytes(&entry["input"]).unwrap()).unwrap_err();
        assert_eq!(error.name(), string(entry, "error"));
        check_facts(entry, &error);
    });
}

/// The f32 values of a payload, if there is one.
fn values(entry: &Value, key: &str) -> Option<Vec<f32>> {
    let content = bytes(&entry[key])?;
    Some(aeon_proto::residual::decode_f32s(&content).unwrap().into_owned())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn replies() {
    run(&load("bwah.json"), "replies", 10, |_, entry| {
        let (hit, tail, kv) = (entry["hit"] == true, values(entry, "tail"), values(entry, "kv"));
        let reply = bwah::try_encode_amplituhedron_reply(hit, tail.as_deref(), kv.as_deref()).unwrap();
        assert!(matches(&entry["encoded"], &reply));
        assert_eq!(bwah::encode_amplituhedron_reply(hit, tail.as_deref(), kv.as_deref()), reply);
        let decoded = bwah::decode_amplituhedron_reply(&reply).unwrap();
        assert_eq!(decoded.hit, hit);
        assert_eq!(decoded.tail.as_deref().map(bits), tail.as_deref().map(bits));
        assert_eq!(decoded.kv.as_deref().map(bits), kv.as_deref().map(bits));
        assert_eq!(ReplyView::parse(&reply).unwrap().is_some(), hit);
    });
}

#[test]
fn captures() {
    run(&load("bwah.json"), "captures", 5, |_, entry| {
        let hash = u64::from_str_radix(string(entry, "prefix_hash").trim_start_matches("0x"), 16).unwrap();
        let len = u32::try_from(number(entry, "prefix_len")).unwrap();
        let layer = |key| u16::try_from(number(entry, key)).unwrap();
        let (lo, hi) = (layer("layer_lo"), layer("layer_hi"));
        let (tail, kv) = (values(entry, "tail").unwrap(), values(entry, "kv").unwrap());
        let capture = bwah::try_encode_amplituhedron_capture(hash, len, lo, hi, &tail, &kv).unwrap();
        assert!(matches(&entry["encoded"], &capture));
        assert_eq!(bwah::encode_amplituhedron_capture(hash, len, lo, hi, &tail, &kv), capture);
        let view = CaptureView::parse(&capture).unwrap();
        assert_eq!((view.prefix_hash, view.prefix_len, view.layer_lo, view.layer_hi), (hash, len, lo, hi));
        let decoded = bwah::decode_amplituhedron_capture(&capture).unwrap();
        assert_eq!((decoded.prefix_hash, decoded.prefix_len), (hash, len));
        assert_eq!((decoded.layer_lo, decoded.layer_hi), (lo, hi));
        assert_eq!((bits(&decoded.tail), bits(&decoded.kv)), (bits(&tail), bits(&kv)));
    });
}

fn check_bad_envelope(entry: &Value, error: &BwahError) {
    assert_eq!(error.name(), string(entry, "error"));
    check_facts(entry, error);
    if let BwahError::InnerBlobError(inner) = error {
        assert_eq!(format!("{:?}", inner.blob), string(entry, "blob"));
        assert_eq!(inner.fault.name(), string(entry, "cause"));
    }
}

#[test]
fn bad_replies() {
    run(&load("bwah.json"), "invalid_replies", 107, |_, entry| {
        let input = bytes(&entry["input"]).unwrap();
        check_bad_envelope(entry, &bwah::decode_amplituhedron_reply(&input).unwrap_err());
    });
}

#[test]
fn bad_captures() {
    run(&load("bwah.json"), "invalid_captures", 126, |_, entry| {
        let input = bytes(&entry["input"]).unwrap();
        check_bad_envelope(entry, &bwah::decode_amplituhedron_capture(&input).unwrap_err());
    });
}
