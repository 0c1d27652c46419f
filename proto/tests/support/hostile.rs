//! What each reader of this crate must do with any bytes at all: not panic, account for every byte, and write what it
//! accepted back to the same bytes. The property tests and the fuzz targets (`fuzz/`) check the same functions.
#![allow(dead_code, clippy::unwrap_used)]

use aeon_proto::{
    bw, bwah,
    fragment::{Fragmenter, Limits, Outcome, Reassembler},
    frame::{DecodeError, Flags, Frame, HEADER_LEN, Header},
    json,
    meta::RequestMeta,
    methodology::MethodologySpec,
    payload::{FrameWriter, Payload},
    pcab::{Pcab, PcabWriter},
    pcar::{self, PcarBody},
    qres::{self, Format, Parts, QresBody, Rotation},
};

/// Panics if a reader does not keep its promise on these bytes.
pub(crate) type Reader = fn(&[u8]);

/// Every reader, with the name of its fuzz target and so of its folder in `fuzz/corpus`.
pub(crate) const READERS: [(&str, Reader); 10] = [
    ("frame_stream", frames),
    ("payload", payload),
    ("pcar", pcar),
    ("qres", qres),
    ("pcab", pcab),
    ("bw", bw),
    ("bwah_reply", bwah_reply),
    ("bwah_capture", bwah_capture),
    ("methodology", methodology),
    ("fragments", fragments),
];

/// Bare frames one after another: the ways to read them agree.
pub(crate) fn frames(bytes: &[u8]) {
    let (mut used, mut frames, mut again) = (0, Vec::new(), Vec::new());
    while let Some((frame, len)) = Frame::decode_prefix(&bytes[used..]) {
        assert_eq!(len, HEADER_LEN + frame.payload.len());
        assert_eq!(Frame::decode_exact(&bytes[used..used + len]), Ok(frame));
        assert_eq!(Frame::decode(&bytes[used..]), Ok(frame));
        assert_eq!(frame.encode(&mut again), Ok(()));
        let _ = format!("{frame:?} {:?}", frame.flags.kind());
        used += len;
        frames.push(frame);
    }
    assert_eq!(again, bytes[..used], "frames do not encode to what they were read from");
    let left = &bytes[used..];
    if left.is_empty() {
        assert_eq!(Frame::decode_batch(bytes), Ok(frames));
        return;
    }
    assert!(Frame::decode_batch(bytes).is_err());
    match (left.first_chunk::<HEADER_LEN>(), Frame::decode(left)) {
        (None, Err(DecodeError::ShortHeader { got })) => assert_eq!(got, left.len()),
        (Some(header), Err(DecodeError::ShortPayload { expected, got })) => {
            assert_eq!((expected, got), (Header::decode(header).payload_len as usize, left.len() - HEADER_LEN));
        }
        other => panic!("{other:?}"),
    }
}

/// A payload and the meta in it. The meta text is kept as it came, whatever it says.
pub(crate) fn payload(bytes: &[u8]) {
    let payload = match Payload::decode(bytes) {
        Ok(payload) => payload,
        Err(error) => return drop(error.to_string()),
    };
    assert_eq!(2 + payload.meta.len() + payload.body.len(), bytes.len());
    let mut out = Vec::new();
    let mut frame = FrameWriter::new(&mut out, 1, 2, Flags::NONE);
    frame.meta_text(payload.meta);
    frame.body().extend_from_slice(payload.body);
    frame.finish().unwrap();
    assert_eq!(&out[HEADER_LEN..], bytes, "the payload does not encode to what it was read from");
    match (json::Object::parse(payload.meta), RequestMeta::parse(payload.meta)) {
        (Err(error), Ok(_)) => panic!("request accepted though the meta is no object: {error}"),
        (_, Err(error)) => drop(error.to_string()),
        (Ok(_), Ok(meta)) => {
            let _ = format!("{meta:?}");
            assert!(meta.session.is_none_or(|name| aeon_proto::meta::is_session_name(&name)));
        }
    }
}

/// A PCAR body.
pub(crate) fn pcar(bytes: &[u8]) {
    let body = match PcarBody::decode(bytes) {
        Ok(body) => body,
        Err(error) => return drop(error.to_string()),
    };
    let mut components = Vec::new();
    body.read_components(&mut components);
    assert_eq!(components.len(), body.seq() * body.k() as usize);
    assert_eq!(body.check_finite().is_ok(), components.iter().all(|value| value.is_finite()));
    let mut again = Vec::new();
    assert_eq!(pcar::encode(&body.header(), &components, &mut again), Ok(bytes.len()));
    assert_eq!(again, bytes, "the body does not encode to what it was read from");
}

/// A QRES body. What was finite is read as finite, and halves are written back to the same bytes.
pub(crate) fn qres(bytes: &[u8]) {
    let body = match QresBody::decode(bytes) {
        Ok(body) => body,
        Err(error) => return drop(error.to_string()),
    };
    let header = body.header();
    let d = header.hidden_dim as usize;
    let escaped = (0..body.seq()).filter(|position| body.is_escaped(*position)).count();
    let has_f32_escapes = bytes[26] == 1;
    let of_f32 = if has_f32_escapes { 2 * d * escaped } else { 0 };
    assert_eq!(qres::encoded_len(header.format, d, body.seq(), escaped) + of_f32, bytes.len());
    assert_eq!(Format::peek(bytes), Some(header.format));
    let rotation = Rotation::new(d, header.seed).filter(|_| header.format.is_rotated());
    let mean = vec![0.0; d];
    let parts = Parts { mean: Some(&mean[..]).filter(|_| header.basis_fp != 0), rotation: rotation.as_ref() };
    let mut residuals = vec![0.0; body.seq() * d];
    body.read(&parts, &mut residuals).unwrap();
    if let Err(error) = body.check_finite() {
        return drop(error.to_string());
    }
    assert!(residuals.iter().all(|value| value.is_finite()));
    let mut again = Vec::new();
    qres::encode(header, &parts, &residuals, |position, _| body.is_escaped(position), &mut again).unwrap();
    if header.format == Format::F16 && !has_f32_escapes {
        assert_eq!(again, bytes, "the body does not encode to what it was read from");
    }
}

/// A basis file. Opening leaves padding and values unchecked; what passes `verify` too has one spelling.
pub(crate) fn pcab(bytes: &[u8]) {
    let file = match Pcab::open(bytes) {
        Ok(file) => file,
        Err(error) => return drop(error.to_string()),
    };
    assert_eq!(file.entries().count(), file.entry_count() as usize);
    let parts: Vec<_> = file.entries().map(|entry| (entry, entry.mean(), entry.basis(), entry.variance())).collect();
    if let Err(error) = file.verify() {
        return drop(error.to_string());
    }
    let mut writer = PcabWriter::new(file.hidden_dim(), file.methodology());
    for (index, (entry, mean, basis, variance)) in parts.iter().enumerate() {
        match parts[..index].iter().find(|(other, ..)| other.basis_offset() == entry.basis_offset()) {
            Some((owner, ..)) => writer.shared_entry(entry.boundary(), mean, owner.boundary(), variance),
            None => writer.entry(entry.boundary(), mean, basis, variance),
        }
        .unwrap();
        assert_eq!(file.at_boundary(entry.boundary()).map(|found| found.k()), Some(entry.k()));
        let _ = entry.explained();
    }
    let metadata = std::str::from_utf8(file.metadata_bytes()).unwrap();
    assert_eq!(writer.finish(metadata).unwrap(), bytes, "the file does not encode to what it was read from");
}

/// A `.bw` blob.
pub(crate) fn bw(bytes: &[u8]) {
    match bw::decode(bytes) {
        Ok(decoded) => {
            assert_eq!(bw::Blob::parse(bytes).map(|blob| blob.content_len()), Ok(decoded.bytes.len()));
            assert_eq!(bw::encode(&decoded.bytes, decoded.mime), bytes);
        }
        Err(error) => drop((error.name(), error.to_string())),
    }
}

/// The reply of a replay cache.
pub(crate) fn bwah_reply(bytes: &[u8]) {
    match bwah::decode_amplituhedron_reply(bytes) {
        Ok(reply) => {
            assert!(bwah::ReplyView::parse(bytes).is_ok_and(|view| view.is_some() == reply.hit));
            let again = bwah::encode_amplituhedron_reply(reply.hit, reply.tail.as_deref(), reply.kv.as_deref());
            assert_eq!(again, bytes);
        }
        Err(error) => drop((error.name(), error.to_string())),
    }
}

/// A capture, the body of a POST to the replay cache.
pub(crate) fn bwah_capture(bytes: &[u8]) {
    match bwah::decode_amplituhedron_capture(bytes) {
        Ok(bwah::AmplituhedronCapture { prefix_hash, prefix_len, layer_lo, layer_hi, tail, kv }) => {
            let view = bwah::CaptureView::parse(bytes).unwrap();
            assert_eq!(bwah::CAPTURE_HEADER_LEN + view.tail.len() + view.kv.len(), bytes.len());
            let again = bwah::encode_amplituhedron_capture(prefix_hash, prefix_len, layer_lo, layer_hi, &tail, &kv);
            assert_eq!(again, bytes);
        }
        Err(error) => drop((error.name(), error.to_string())),
    }
}

/// A methodology spec. Texts may spell it in many ways; the canonical one reads as itself.
pub(crate) fn methodology(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let spec = match MethodologySpec::parse(text) {
        Ok(spec) => spec,
        Err(error) => return drop(error.to_string()),
    };
    let again = MethodologySpec::parse(spec.canonical()).unwrap();
    assert_eq!((again.canonical(), again.id()), (spec.canonical(), spec.id()));
    if let Ok(k) = spec.k_rule().k(spec.hidden_dim()) {
        assert!((0..=spec.hidden_dim()).contains(&k), "k {k} of {}", spec.hidden_dim());
    }
}

/// Limits under which the fragment check runs: small, so that they are met.
pub(crate) const FRAGMENT_LIMITS: Limits =
    Limits { frames: 6, bytes: 2000, peer_frames: 3, peer_bytes: 1200, expiry_ms: 300 };

/// Datagrams of the fragmented transport. Each record of the input is a peer (u8), the time since the last (u8, ms), a
/// length (u16, big-endian) and that many bytes. At the end the whole input is cut into parts and joined again.
pub(crate) fn fragments(bytes: &[u8]) {
    let mut reassembler = Reassembler::new(FRAGMENT_LIMITS);
    let (mut rest, mut now, mut came, mut handed_on) = (bytes, 0, 0, 0);
    while let Some(([peer, wait, len1, len0], behind)) = rest.split_first_chunk::<4>() {
        let len = usize::from(u16::from_be_bytes([*len1, *len0])).min(behind.len());
        let datagram;
        (datagram, rest) = behind.split_at(len);
        now += u64::from(*wait);
        came += len.saturating_sub(4);
        let outcome = reassembler.push(now, &(peer % 4), datagram);
        if let Some((&[_, _, index, total], _)) = datagram.split_first_chunk::<4>()
            && index >= total
        {
            assert!(outcome.is_err(), "part {index} of {total} was taken");
        }
        match outcome {
            Ok(Outcome::Complete(whole)) => handed_on += whole.len(),
            Ok(Outcome::Waiting | Outcome::Duplicate) => {}
            Err(dropped) => drop(dropped.to_string()),
        }
        assert!(reassembler.len() <= FRAGMENT_LIMITS.frames && reassembler.bytes() <= FRAGMENT_LIMITS.bytes);
        assert!(handed_on + reassembler.bytes() <= came, "more bytes than came");
    }
    reassembler.expire(now + FRAGMENT_LIMITS.expiry_ms);
    assert!(reassembler.is_empty() && reassembler.bytes() == 0);
    cut_and_join(bytes);
}

/// The parts of a frame join to it in whatever order they come. The first bytes choose their size and their order.
fn cut_and_join(bytes: &[u8]) {
    let Some((&[mtu, step, id1, id0], _)) = bytes.split_first_chunk::<4>() else { return };
    let Ok(mut fragmenter) = Fragmenter::starting_at(5 + usize::from(mtu), u16::from_be_bytes([id1, id0])) else {
        return;
    };
    let Ok(parts) = fragmenter.split(bytes) else { return };
    let mut datagrams: Vec<Vec<u8>> = parts
        .map(|part| {
            let mut datagram = Vec::new();
            part.write(&mut datagram);
            datagram
        })
        .collect();
    let mut reassembler = Reassembler::new(Limits::default());
    loop {
        let datagram = datagrams.swap_remove(usize::from(step) % datagrams.len());
        match reassembler.push(0, &0_u8, &datagram) {
            Ok(Outcome::Complete(whole)) => {
                assert_eq!(whole, bytes);
                assert!(datagrams.is_empty() && reassembler.is_empty());
                return;
            }
            outcome => assert_eq!(outcome, Ok(Outcome::Waiting)),
        }
    }
}
