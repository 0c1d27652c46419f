//! Writes what this crate reads from every golden vector, for parsers in other languages to be compared with.
//!
//! ```text
//! cargo run -p aeon-proto --example vector_fields -- OUT
//! ```
//!
//! `OUT/bytes.bin` holds all inputs, one behind the other, and `OUT/cases.json` one object for each:
//!
//! - `id`: where it stands, `schema`: the file in `proto/schema` that describes it, `at` and `len`: its bytes;
//! - `fields` if it is valid, named as in the schema, else `error`: the name of the fault.
//!
//! Numbers are numbers; `{"f32":u32}` is a bit pattern, `{"at":…,"len":…}` a part of the input, `{"blob_at":…,"len":…}`
//! other bytes of `bytes.bin`, `null` a part that is absent. `counts` says how many entries each section of each file has
//! and how many of them are cases; a section without cases must be one of [`NO_BYTES`].
#![allow(clippy::unwrap_used)] // the vectors are ours: one that cannot be read is a fault of the repository

#[allow(dead_code)] // shared with the tests of the vectors, which use more of it
#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    collections::BTreeMap,
    fmt::Debug,
    path::{Path, PathBuf},
};

use aeon_proto::{
    bw, bwah,
    fragment::{self, Reassembler},
    frame::{Flags, Frame, HEADER_LEN, Header, Kind, MAX_FRAME_LEN},
    json, payload,
    payload::Payload,
    pcab::Pcab,
    pcar::PcarBody,
    qres::QresBody,
    residual,
    route::Route,
};
use serde_json::{Value, json};
use support::{array, bytes, load, number, string, unhex};

/// Sections that no schema can describe, and why.
const NO_BYTES: [(&str, &str, &str); 12] = [
    ("aeon-flow.json", "ordering", "sequence numbers, no bytes"),
    ("kernel.json", "cases", "arithmetic"),
    ("methodology.json", "cases", "JSON text"),
    ("meta.json", "requests", "JSON text"),
    ("meta.json", "invalid_requests", "JSON text"),
    ("meta.json", "replay_keys", "JSON text"),
    ("meta.json", "invalid_replay_keys", "JSON text"),
    ("meta.json", "shards", "JSON text"),
    ("meta.json", "invalid_shards", "JSON text"),
    ("meta.json", "hellos", "JSON text"),
    ("meta.json", "invalid_hellos", "JSON text"),
    ("body.json", "heads", "words whose kind the meta says; the frames of station.json hold some"),
];

/// Every file of vectors.
const FILES: [&str; 12] = [
    "aeon-flow.json",
    "body.json",
    "bw.json",
    "bwah.json",
    "fragment.json",
    "kernel.json",
    "meta.json",
    "methodology.json",
    "pcab.json",
    "pcar.json",
    "qres.json",
    "station.json",
];

type Read = Result<Value, String>;

/// The name of an error's variant.
fn name(error: impl Debug) -> String {
    format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}

/// Where `part` stands in `whole`, of which it is a slice.
fn part(whole: &[u8], part: &[u8]) -> Value {
    let at = (part.as_ptr() as usize).wrapping_sub(whole.as_ptr() as usize);
    assert!(part.is_empty() || whole.get(at..at + part.len()).is_some_and(|found| std::ptr::eq(found, part)));
    json!({"at": if part.is_empty() { 0 } else { at }, "len": part.len()})
}

fn floats(values: &[f32]) -> Value {
    values.iter().map(|value| json!({"f32": value.to_bits()})).collect()
}

fn header(header: &Header) -> Value {
    let Header { stream_id, sequence, flags, payload_len } = *header;
    let kind = match flags.kind() {
        Kind::Request => 0,
        Kind::Cancel => 1,
        Kind::NeverAnswered => 2,
    };
    json!({
        "stream_id": stream_id, "sequence": sequence, "flags": flags.0, "length": payload_len, "kind": kind,
        "is_fork": flags.contains(Flags::FORK), "is_vent": flags.contains(Flags::VENT),
        "is_fin": flags.contains(Flags::FIN), "is_response": flags.contains(Flags::RESPONSE),
        "is_ack": flags.contains(Flags::ACK) && stream_id == fragment::ACK_STREAM_ID,
    })
}

fn frame_fields(whole: &[u8], frame: &Frame<'_>) -> Value {
    let start = whole.len() - HEADER_LEN - frame.payload.len();
    let head = whole[start..].first_chunk().unwrap();
    json!({"header": header(&Header::decode(head)), "payload": part(whole, frame.payload)})
}

/// A frame that may have bytes behind it: the header is the 10 bytes before the payload.
fn frame_at(whole: &[u8], at: usize, frame: &Frame<'_>) -> Value {
    let head = whole[at..].first_chunk().unwrap();
    json!({"header": header(&Header::decode(head)), "payload": part(whole, frame.payload)})
}

/// The bytes and what is read from them.
struct Cases {
    out: PathBuf,
    blob: Vec<u8>,
    cases: Vec<Value>,
    counts: BTreeMap<String, [usize; 2]>,
}

impl Cases {
    fn add(&mut self, id: &str, schema: &str, input: &[u8], read: impl Fn(&mut Self, &[u8]) -> Read) {
        let at = self.blob.len();
        self.blob.extend_from_slice(input);
        let mut case = json!({"id": id, "schema": schema, "at": at, "len": input.len()});
        match read(self, input) {
            Ok(fields) => case["fields"] = fields,
            Err(error) => case["error"] = error.into(),
        }
        self.cases.push(case);
    }

    fn blob(&mut self, bytes: &[u8]) -> Value {
        let at = self.blob.len();
        self.blob.extend_from_slice(bytes);
        json!({"blob_at": at, "len": bytes.len()})
    }

    /// Runs `each` over a section of a file; it says whether the entry has become a case.
    fn section(
        &mut self,
        file: &Value,
        of: &str,
        section: &str,
        mut each: impl FnMut(&mut Self, &str, &Value) -> bool,
    ) {
        let entries = array(file, section);
        let mut counts = [entries.len(), 0];
        for entry in entries {
            let id = entry["id"].as_str().unwrap_or_else(|| string(entry, "name"));
            let before = self.cases.len();
            let used = each(self, &format!("{of}/{section}/{id}"), entry);
            assert_eq!(used, self.cases.len() > before, "{id}");
            counts[1] += usize::from(used);
        }
        assert!(counts[0] > 0, "{of}/{section}");
        self.counts.insert(format!("{of}/{section}"), counts);
    }

    fn finish(self) {
        for file in FILES {
            for (section, _) in load(file).as_object().unwrap().iter().filter(|(_, value)| value.is_array()) {
                let used = self.counts.get(&format!("{file}/{section}")).is_some_and(|counts| counts[1] > 0);
                let excused = NO_BYTES.iter().any(|(of, name, _)| (*of, *name) == (file, section));
                assert!(used != excused, "{file}/{section} must either give cases or be excused");
            }
        }
        std::fs::create_dir_all(&self.out).unwrap();
        let all = json!({"counts": self.counts, "cases": self.cases});
        std::fs::write(self.out.join("bytes.bin"), &self.blob).unwrap();
        std::fs::write(self.out.join("cases.json"), all.to_string()).unwrap();
        println!("{} cases of {} sections, {} bytes", self.cases.len(), self.counts.len(), self.blob.len());
    }
}

fn datagram(_: &mut Cases, input: &[u8]) -> Read {
    let frame = Frame::decode_exact(input).map_err(name)?;
    Ok(json!({"frame": frame_fields(input, &frame)}))
}

fn one_frame(_: &mut Cases, input: &[u8]) -> Read {
    Ok(frame_at(input, 0, &Frame::decode(input).map_err(name)?))
}

fn batch(_: &mut Cases, input: &[u8]) -> Read {
    let mut at = 0;
    let frames = Frame::decode_batch(input).map_err(name)?.into_iter().map(|frame| {
        let fields = frame_at(input, at, &frame);
        at += frame.encoded_len();
        fields
    });
    Ok(json!({"frames": frames.collect::<Value>()}))
}

/// Prefixed frames up to the end: the rule of the station's reader in its shortest form.
fn stream(_: &mut Cases, input: &[u8]) -> Read {
    let (mut messages, mut at) = (Vec::new(), 0);
    while at < input.len() {
        let prefix = input[at..].first_chunk().ok_or("Truncated")?;
        let len = u32::from_be_bytes(*prefix) as usize;
        if !(HEADER_LEN..=MAX_FRAME_LEN).contains(&len) {
            return Err("BadPrefix".into());
        }
        let message = input[at + 4..].get(..len).ok_or("Truncated")?;
        let frame = Frame::decode_exact(message).map_err(name)?;
        messages.push(json!({"len": len, "content": {"frame": frame_at(input, at + 4, &frame)}}));
        at += 4 + len;
    }
    Ok(json!({"messages": messages}))
}

fn split(input: &[u8]) -> Result<Payload<'_>, String> {
    let payload = Payload::decode(input).map_err(|error: payload::Error| name(error))?;
    json::Object::parse(payload.meta).map_err(name)?;
    Ok(payload)
}

fn payload_parts(_: &mut Cases, input: &[u8]) -> Read {
    let Payload { meta, body } = split(input)?;
    Ok(json!({"meta_len": meta.len(), "meta": meta, "body": part(input, body)}))
}

fn words(_: &mut Cases, input: &[u8]) -> Read {
    let values = residual::decode_u32s(input).map_err(|_| "Length")?;
    let as_floats = residual::decode_f32s(input).map_err(|_| "Length")?;
    Ok(json!({"words": *values, "floats": floats(&as_floats)}))
}

fn acks(whole: &[u8], input: &[u8]) -> Value {
    let entries: Vec<_> = fragment::decode_acks(input).collect();
    let ignored = &input[entries.len() * fragment::ACK_ENTRY_LEN..];
    let entries = entries.iter().map(|ack| {
        json!({
            "stream_id": ack.stream_id, "base": ack.base,
            "bits_hi": (ack.bits >> 32) as u32, "bits_lo": ack.bits as u32,
        })
    });
    json!({"entries": entries.collect::<Value>(), "ignored": part(whole, ignored)})
}

fn pcar(_: &mut Cases, input: &[u8]) -> Read {
    let body = PcarBody::decode(input).map_err(name)?;
    let mut components = Vec::new();
    body.read_components(&mut components);
    let blocks = components.chunks(body.k() as usize).map(|components| {
        json!({
            "boundary": body.boundary(), "k": body.k(), "hidden_dim": body.hidden_dim(),
            "methodology": body.methodology(), "basis_fp": body.basis_fp(), "components": floats(components),
        })
    });
    Ok(json!({"blocks": blocks.collect::<Value>()}))
}

fn qres(_: &mut Cases, input: &[u8]) -> Read {
    let body = QresBody::decode(input).map_err(name)?;
    let header = body.header();
    let (d, (format, bits)) = (header.hidden_dim as usize, header.format.codes());
    let bitmap_len = body.seq().div_ceil(8);
    let (head, mut rest) = input.split_at(32 + bitmap_len);
    let is_whole = head[26] == 1;
    let mut take = |len: usize| {
        let (taken, after) = rest.split_at(len);
        rest = after;
        taken
    };
    let halves = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|two| u16::from_le_bytes(*two)).collect::<Value>();
    let positions = (0..body.seq()).map(|position| {
        let is_escaped = body.is_escaped(position);
        let mut fields = json!({
            "is_escaped": is_escaped, "floats": null, "halves": null, "scales": null, "steps": null, "gain": null, "codes": null,
        });
        match (is_escaped, format) {
            (true, _) if is_whole => fields["floats"] = floats(&residual::decode_f32s(take(4 * d)).unwrap()),
            (true, _) | (_, 0) => fields["halves"] = halves(take(2 * d)),
            (_, 1) => {
                fields["scales"] = halves(take(2 * d.div_ceil(64)));
                fields["steps"] = take(d).iter().map(|step| *step as i8).collect();
            }
            _ => {
                fields["gain"] = halves(take(2))[0].clone();
                fields["codes"] = part(input, take((d * usize::from(bits)).div_ceil(8)));
            }
        }
        fields
    });
    let positions: Value = positions.collect();
    Ok(json!({
        "boundary": header.boundary, "hidden_dim": d, "position_count": body.seq(), "basis_fp": header.basis_fp,
        "methodology": header.methodology, "format": format, "bits": bits, "flags": u16::from(is_whole),
        "seed": header.seed, "bitmap": head[32..].to_vec(), "positions": positions,
    }))
}

fn pcab(_: &mut Cases, input: &[u8]) -> Read {
    let file = Pcab::open(input).map_err(name)?;
    file.verify().map_err(name)?;
    let mut owners = BTreeMap::new();
    let (mut table, mut sections) = (Vec::new(), Vec::new());
    let at = |entry: u32, offset: usize| {
        let start = 64 + 32 * entry as usize + offset;
        u64::from_le_bytes(*input[start..].first_chunk().unwrap())
    };
    for (index, entry) in (0..).zip(file.entries()) {
        let shared = entry.k() > 0 && owners.contains_key(&entry.basis_offset());
        owners.entry(entry.basis_offset()).or_insert(index);
        let rows = entry.basis();
        let rows = rows.chunks(file.hidden_dim() as usize).map(|row| json!({"values": floats(row)}));
        table.push(json!({
            "boundary": entry.boundary(), "k": entry.k(), "mean_off": at(index, 8), "basis_off": entry.basis_offset(),
            "variance_off": at(index, 24), "is_shared": shared, "owns_basis": entry.k() > 0 && !shared,
        }));
        sections.push(json!({
            "mean": floats(&entry.mean()), "variance": floats(&entry.variance()),
            "basis": if shared { Value::Null } else { rows.collect() },
        }));
    }
    let metadata = file.metadata_bytes();
    Ok(json!({
        "hidden_dim": file.hidden_dim(), "entry_count": file.entry_count(), "methodology": file.methodology(),
        "meta_off": input.len() - metadata.len(), "meta_len": metadata.len(), "file_len": input.len(),
        "metadata": std::str::from_utf8(metadata).unwrap(), "entries": table, "sections": sections,
    }))
}

fn blob(cases: &mut Cases, input: &[u8]) -> Read {
    let head = bw::Blob::parse(input).map_err(|error| error.name())?;
    let decoded = bw::decode(input).map_err(|error| error.name())?;
    let coded = ["application/octet-stream", "application/json", "text/plain"];
    let code = coded.iter().position(|mime| *mime == head.mime);
    let ext = if code.is_some() { "" } else { head.mime };
    Ok(json!({
        "mime": head.mime, "mime_code": code.unwrap_or(255), "mime_ext": ext, "mime_ext_len": ext.len(),
        "fp48": head.fp48, "fp48_lo": head.fp48 as u32, "fp48_hi": head.fp48 >> 32,
        "orig_len": decoded.bytes.len(), "tail_len": decoded.bytes.len() % 8, "word_count": decoded.bytes.len() / 8,
        "content": cases.blob(&decoded.bytes),
    }))
}

/// A blob that holds f32 values, as read by the decoders of the envelope.
fn inner(cases: &mut Cases, input: Option<&[u8]>, values: Option<&[f32]>) -> Value {
    let Some(input) = input else { return Value::Null };
    let fields = blob(cases, input).unwrap();
    let mut bytes = Vec::new();
    residual::encode_f32s(values.unwrap(), &mut bytes);
    assert_eq!(bw::decode(input).unwrap().bytes, bytes);
    fields
}

fn envelope_error(error: &bwah::BwahError) -> String {
    match error {
        bwah::BwahError::InnerBlobError(inner) => format!("InnerBlobError {}", inner.fault.name()),
        error => error.name().to_owned(),
    }
}

fn reply(cases: &mut Cases, input: &[u8]) -> Read {
    let decoded = bwah::decode_amplituhedron_reply(input).map_err(|error| envelope_error(&error))?;
    let Some(view) = bwah::ReplyView::parse(input).map_err(|error| envelope_error(&error))? else {
        return Ok(json!({"hit": null}));
    };
    Ok(json!({"hit": {
        "flags": if view.tail.is_some() { 3 } else { 1 },
        "tail_len": view.tail.map_or(0, <[u8]>::len), "kv_len": view.kv.map_or(0, <[u8]>::len),
        "tail": inner(cases, view.tail, decoded.tail.as_deref()), "kv": inner(cases, view.kv, decoded.kv.as_deref()),
    }}))
}

fn capture(cases: &mut Cases, input: &[u8]) -> Read {
    let decoded = bwah::decode_amplituhedron_capture(input).map_err(|error| envelope_error(&error))?;
    let view = bwah::CaptureView::parse(input).map_err(|error| envelope_error(&error))?;
    Ok(json!({
        "tail_len": view.tail.len(), "kv_len": view.kv.len(),
        "prefix_hash_lo": view.prefix_hash as u32, "prefix_hash_hi": view.prefix_hash >> 32,
        "prefix_len": view.prefix_len, "layer_lo": view.layer_lo, "layer_hi": view.layer_hi,
        "tail": inner(cases, Some(view.tail), Some(&decoded.tail)),
        "kv": inner(cases, Some(view.kv), Some(&decoded.kv)),
    }))
}

fn fragment_parts(_: &mut Cases, input: &[u8]) -> Read {
    Reassembler::new(fragment::Limits::default()).push(0, &(), input).map_err(name)?;
    let (head, rest) = input.split_first_chunk().unwrap();
    let fragment::Header { frame_id, index, total } = fragment::Header::decode(*head);
    Ok(json!({"frame_id": frame_id, "index": index, "total": total, "part": part(input, rest)}))
}

/// A frame with everything in it, by flags and route.
fn flow(cases: &mut Cases, input: &[u8]) -> Read {
    let frame = Frame::decode_exact(input).map_err(name)?;
    let response = frame.flags.contains(Flags::RESPONSE);
    let unread = |bytes: &[u8]| json!({"bytes": part(input, bytes)});
    let (role, content) = if fragment::is_ack(&frame) {
        (3, acks(input, frame.payload))
    } else if !response && frame.flags.contains(Flags::FORK) && frame.stream_id == 0xfffe {
        let (opcodes, rest) = frame.payload.as_chunks();
        if !rest.is_empty() {
            return Err("Length".into());
        }
        (4, json!({"opcodes": opcodes.iter().map(|code| u16::from_be_bytes(*code)).collect::<Vec<_>>()}))
    } else if !response && frame.flags.kind() != Kind::Request {
        (if frame.flags.kind() == Kind::Cancel { 1 } else { 5 }, unread(frame.payload))
    } else {
        let Payload { meta, body } = split(frame.payload)?;
        let body = match Route(frame.stream_id) {
            _ if response && frame.flags.contains(Flags::VENT) => unread(body),
            Route::EMBED | Route::FORWARD | Route::LM_HEAD => words(cases, body)?,
            Route::FORWARD_PCA | Route::LM_HEAD_PCA if response => words(cases, body)?,
            Route::FORWARD_PCA | Route::LM_HEAD_PCA => pcar(cases, body)?,
            Route::AMPLITUHEDRON_REPLAY if response => reply(cases, body)?,
            Route::AMPLITUHEDRON_CAPTURE if !response && !body.is_empty() => capture(cases, body)?,
            _ => unread(body),
        };
        (if response { 2 } else { 0 }, json!({"meta_len": meta.len(), "meta": meta, "body": body}))
    };
    let head = Header::decode(input.first_chunk().unwrap());
    Ok(json!({"header": header(&head), "role": role, "content": content}))
}

fn payload_of(entry: &Value) -> Option<Vec<u8>> {
    bytes(&entry["payload"])
}

/// Encodes a frame of `aeon-flow.json`.
fn encode(entry: &Value) -> Option<Vec<u8>> {
    let payload = payload_of(entry)?;
    let frame = Frame {
        stream_id: number(entry, "stream_id").try_into().ok()?,
        sequence: number(entry, "sequence").try_into().ok()?,
        flags: Flags(number(entry, "flags").try_into().ok()?),
        payload: &payload,
    };
    let mut out = Vec::new();
    frame.encode(&mut out).ok()?;
    Some(out)
}

/// The bytes of a vector that may be too long to be printed; `made` are then the same bytes, made by this crate.
fn written(value: &Value, made: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
    bytes(value).unwrap_or_else(|| {
        let made = made();
        assert!(support::matches(value, &made));
        made
    })
}

fn aeon_flow(cases: &mut Cases) {
    let (name, file) = ("aeon-flow.json", load("aeon-flow.json"));
    let frames = |entry: &Value| array(entry, "frames").iter().flat_map(|frame| encode(frame).unwrap()).collect();
    cases.section(&file, name, "frames", |cases, id, entry| {
        let input = written(&entry["encoded"], || encode(entry).unwrap());
        cases.add(id, "aeon_datagram", &input, datagram);
        true
    });
    cases.section(&file, name, "station_payloads", |cases, id, entry| {
        if let Some(payload) = payload_of(entry) {
            cases.add(id, "aeon_payload", &payload, payload_parts);
            return true;
        }
        let fill = &entry["meta_fill"];
        let meta = if fill.is_null() {
            string(entry, "meta_json").to_owned()
        } else {
            let middle = string(fill, "repeat").repeat(number(fill, "count") as usize);
            [string(fill, "before"), &middle, string(fill, "after")].concat()
        };
        let body = bytes(&entry["body"]).unwrap();
        let payload = [&(meta.len() as u16).to_be_bytes(), meta.as_bytes(), &body].concat();
        assert!(support::matches(&entry["payload"], &payload));
        cases.add(id, "aeon_payload", &payload, payload_parts);
        true
    });
    cases.section(&file, name, "batches", |cases, id, entry| {
        cases.add(id, "aeon_batch", &written(&entry["encoded"], || frames(entry)), batch);
        true
    });
    cases.section(&file, name, "tcp", |cases, id, entry| {
        let made = || {
            let messages = array(entry, "messages").iter().flat_map(|frames| {
                let message: Vec<u8> =
                    frames.as_array().unwrap().iter().flat_map(|frame| encode(frame).unwrap()).collect();
                [&(message.len() as u32).to_be_bytes()[..], &message].concat()
            });
            messages.collect()
        };
        cases.add(id, "aeon_stream", &written(&entry["encoded"], made), stream);
        true
    });
    let texts = |entry: &Value, key: &str| -> Vec<Vec<u8>> {
        array(entry, key).iter().map(|text| unhex(text.as_str().unwrap())).collect()
    };
    cases.section(&file, name, "tcp_receive", |cases, id, entry| {
        cases.add(id, "aeon_stream", &texts(entry, "chunks").concat(), stream);
        true
    });
    cases.section(&file, name, "udp_fragmented", |cases, id, entry| {
        let first = number(entry, "first_frame_id").try_into().unwrap();
        let mut fragmenter = fragment::Fragmenter::starting_at(number(entry, "mtu") as usize, first).unwrap();
        let before = cases.cases.len();
        for frame in array(entry, "frames") {
            // A frame of too many parts has no datagrams.
            let frame = encode(frame).unwrap();
            for part in fragmenter.split(&frame).into_iter().flatten() {
                let mut datagram = Vec::new();
                part.write(&mut datagram);
                cases.add(&format!("{id}/{}", part.header.index), "udp_fragment", &datagram, fragment_parts);
            }
        }
        cases.cases.len() > before
    });
    cases.section(&file, name, "udp_receive", |cases, id, entry| {
        for (n, datagram) in texts(entry, "datagrams").iter().enumerate() {
            cases.add(&format!("{id}/{n}"), "udp_fragment", datagram, fragment_parts);
        }
        !array(entry, "datagrams").is_empty()
    });
    cases.section(&file, name, "udp_acks", |cases, id, entry| {
        let datagram = unhex(string(entry, "datagram"));
        cases.add(id, "udp_fragment", &datagram, fragment_parts);
        cases.add(id, "aeon_flow", &datagram[fragment::HEADER_LEN..], flow);
        true
    });
    cases.section(&file, name, "udp_ack_effects", |cases, id, entry| {
        cases.add(id, "udp_ack", &unhex(string(entry, "ack_payload")), |_, input| Ok(acks(input, input)));
        true
    });
    cases.section(&file, name, "errors", |cases, id, entry| {
        match string(entry, "operation") {
            "decode" => cases.add(id, "aeon_frame", &bytes(&entry["input"]).unwrap(), one_frame),
            "decode_batch" => cases.add(id, "aeon_batch", &bytes(&entry["input"]).unwrap(), batch),
            // What cannot be encoded has no bytes.
            _ => return false,
        }
        true
    });
}

fn bodies_and_envelopes(cases: &mut Cases) {
    for (name, read) in [("pcar", pcar as fn(&mut Cases, &[u8]) -> Read), ("pcab", pcab), ("qres", qres)] {
        let of = format!("{name}.json");
        cases.section(&load(&of), &of, "cases", |cases, id, entry| {
            cases.add(id, name, &unhex(string(entry, "hex")), read);
            let error = cases.cases.last().unwrap()["error"].as_str();
            assert_eq!(error, entry["error"].as_str(), "{id}");
            true
        });
    }
    let values = |value: &Value| bytes(value).map(|content| residual::decode_f32s(&content).unwrap().into_owned());
    let file = load("bw.json");
    cases.section(&file, "bw.json", "valid", |cases, id, entry| {
        let made = || bw::encode(&bytes(&entry["content"]).unwrap(), string(entry, "mime"));
        cases.add(id, "bw", &written(&entry["encoded"], made), blob);
        true
    });
    cases.section(&file, "bw.json", "invalid", |cases, id, entry| {
        cases.add(id, "bw", &bytes(&entry["input"]).unwrap(), blob);
        true
    });
    let file = load("bwah.json");
    cases.section(&file, "bwah.json", "replies", |cases, id, entry| {
        let (tail, kv) = (values(&entry["tail"]), values(&entry["kv"]));
        let made = || bwah::encode_amplituhedron_reply(entry["hit"] == true, tail.as_deref(), kv.as_deref());
        cases.add(id, "bwah_reply", &written(&entry["encoded"], made), reply);
        true
    });
    cases.section(&file, "bwah.json", "captures", |cases, id, entry| {
        let hash = u64::from_str_radix(string(entry, "prefix_hash").trim_start_matches("0x"), 16).unwrap();
        let [len, lo, hi] = ["prefix_len", "layer_lo", "layer_hi"].map(|key| number(entry, key));
        let (tail, kv) = (values(&entry["tail"]).unwrap(), values(&entry["kv"]).unwrap());
        let made = || bwah::encode_amplituhedron_capture(hash, len as u32, lo as u16, hi as u16, &tail, &kv);
        cases.add(id, "bwah_capture", &written(&entry["encoded"], made), capture);
        true
    });
    for (section, schema, read) in [
        ("invalid_replies", "bwah_reply", reply as fn(&mut Cases, &[u8]) -> Read),
        ("invalid_captures", "bwah_capture", capture),
    ] {
        cases.section(&file, "bwah.json", section, |cases, id, entry| {
            cases.add(id, schema, &bytes(&entry["input"]).unwrap(), read);
            true
        });
    }
}

fn station(cases: &mut Cases) {
    let file = load("body.json");
    for section in ["words", "invalid"] {
        cases.section(&file, "body.json", section, |cases, id, entry| {
            cases.add(id, "aeon_words", &bytes(&entry["body"]).unwrap(), words);
            true
        });
    }
    let file = load("station.json");
    for section in ["frames", "plain", "invalid"] {
        cases.section(&file, "station.json", section, |cases, id, entry| {
            cases.add(id, "aeon_flow", &bytes(&entry["encoded"]).unwrap(), flow);
            assert_eq!(cases.cases.last().unwrap().get("error").is_some(), section == "invalid", "{id}");
            let encoded = bytes(&entry["encoded"]).unwrap();
            if section != "plain" {
                cases.add(&format!("{id}/payload"), "aeon_payload", &encoded[HEADER_LEN..], payload_parts);
            }
            // Every shorter payload behind a header that is right about it, the frame cut short, and one byte more.
            for len in 0..encoded.len() - HEADER_LEN {
                let mut cut = encoded[..HEADER_LEN + len].to_vec();
                cases.add(&format!("{id}/cut-{len}"), "aeon_flow", &cut, flow);
                cut[7..HEADER_LEN].copy_from_slice(&(len as u32).to_be_bytes()[1..]);
                cases.add(&format!("{id}/payload-of-{len}"), "aeon_flow", &cut, flow);
            }
            cases.add(&format!("{id}/longer"), "aeon_flow", &[&encoded[..], &[0]].concat(), flow);
            true
        });
    }
    let file = load("fragment.json");
    for section in ["valid", "invalid"] {
        cases.section(&file, "fragment.json", section, |cases, id, entry| {
            cases.add(id, "udp_fragment", &bytes(&entry["datagram"]).unwrap(), fragment_parts);
            true
        });
    }
    cases.section(&file, "fragment.json", "acks", |cases, id, entry| {
        cases.add(id, "udp_ack", &bytes(&entry["payload"]).unwrap(), |_, input| Ok(acks(input, input)));
        true
    });
}

fn main() {
    let Some(out) = std::env::args_os().nth(1) else {
        eprintln!("usage: vector_fields OUT");
        std::process::exit(2);
    };
    let mut cases =
        Cases { out: Path::new(&out).to_owned(), blob: Vec::new(), cases: Vec::new(), counts: BTreeMap::new() };
    aeon_flow(&mut cases);
    bodies_and_envelopes(&mut cases);
    station(&mut cases);
    cases.finish();
}
