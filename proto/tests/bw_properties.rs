//! What the `.bw` blob, the BWAH envelope and the fragmented transport promise, for any input.

use aeon_proto::{
    bw, bwah,
    bwah::{AmplituhedronCapture, AmplituhedronReply, BwahError},
    fragment::{Fragmenter, Limits, Outcome, Reassembler},
};
use proptest::{collection::vec, option, prelude::*, sample::Index};

/// Any bit pattern, NaNs and infinities included.
fn values() -> impl Strategy<Value = Vec<f32>> {
    vec(any::<u32>().prop_map(f32::from_bits), 0..200)
}

fn mime() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(bw::OCTET_STREAM.to_owned()),
        Just("application/json".to_owned()),
        Just("text/plain".to_owned()),
        "[a-z]{1,8}/[a-z0-9.+-]{0,20}",
        ".{0,30}",
    ]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn encode_reply(reply: &AmplituhedronReply) -> Vec<u8> {
    bwah::encode_amplituhedron_reply(reply.hit, reply.tail.as_deref(), reply.kv.as_deref())
}

fn encode_capture(capture: &AmplituhedronCapture) -> Vec<u8> {
    let AmplituhedronCapture { prefix_hash, prefix_len, layer_lo, layer_hi, tail, kv } = capture;
    bwah::encode_amplituhedron_capture(*prefix_hash, *prefix_len, *layer_lo, *layer_hi, tail, kv)
}

fn replies() -> impl Strategy<Value = AmplituhedronReply> {
    let hit = (option::of(values()), option::of(values()));
    prop_oneof![
        1 => Just(AmplituhedronReply::default()),
        9 => hit.prop_map(|(tail, kv)| AmplituhedronReply { hit: true, tail, kv }),
    ]
}

fn captures() -> impl Strategy<Value = AmplituhedronCapture> {
    let key = (any::<u64>(), any::<u32>(), any::<u16>(), any::<u16>());
    (key, values(), values()).prop_map(|((prefix_hash, prefix_len, layer_lo, layer_hi), tail, kv)| {
        AmplituhedronCapture { prefix_hash, prefix_len, layer_lo, layer_hi, tail, kv }
    })
}

/// Values compare by bits: a NaN equals itself.
fn same_reply(a: &AmplituhedronReply, b: &AmplituhedronReply) -> bool {
    let payload_bits = |payload: &Option<Vec<f32>>| payload.as_deref().map(bits);
    (a.hit, payload_bits(&a.tail), payload_bits(&a.kv)) == (b.hit, payload_bits(&b.tail), payload_bits(&b.kv))
}

proptest! {
    #[test]
    fn blob_round_trip_for_every_input(content in vec(any::<u8>(), 0..2000), mime in mime()) {
        let blob = bw::try_encode(&content, &mime).unwrap();
        let coded = [bw::OCTET_STREAM, "application/json", "text/plain"].contains(&mime.as_str());
        prop_assert_eq!(blob.len(), content.len() + bw::OVERHEAD + if coded { 0 } else { mime.len() });
        let decoded = bw::decode(&blob).unwrap();
        prop_assert_eq!(&decoded.bytes, &content);
        prop_assert_eq!(decoded.mime, mime);
        prop_assert_eq!(bw::Blob::parse(&blob).unwrap().fp48, bw::fp48(&content));
    }

    #[test]
    fn blob_truncation_at_every_length_is_typed(content in vec(any::<u8>(), 0..100), mime in mime()) {
        let blob = bw::encode(&content, &mime);
        for len in 0..blob.len() {
            let result = bw::decode(&blob[..len]);
            prop_assert!(matches!(result, Err(bw::DecodeError::Truncated { .. })), "{len}: {result:?}");
        }
    }

    #[test]
    fn accepted_blobs_encode_to_the_same_bytes(
        content in vec(any::<u8>(), 0..100), mime in mime(), at in any::<Index>(), byte in any::<u8>(),
    ) {
        let mut blob = bw::encode(&content, &mime);
        let at = at.index(blob.len());
        blob[at] = byte;
        if let Ok(decoded) = bw::decode(&blob) {
            prop_assert_eq!(bw::encode(&decoded.bytes, decoded.mime), blob);
        }
    }

    #[test]
    fn any_bytes_are_judged_without_a_panic(bytes in vec(any::<u8>(), 0..200)) {
        let mut blob = b"BWB1\x01".to_vec();
        blob.extend_from_slice(&bytes);
        let mut envelope = b"BWAH\x01\x03".to_vec();
        envelope.extend_from_slice(&bytes);
        for bytes in [&bytes, &blob, &envelope] {
            if let Ok(decoded) = bw::decode(bytes) {
                prop_assert_eq!(&bw::encode(&decoded.bytes, decoded.mime), bytes);
            }
            if let Ok(reply) = bwah::decode_amplituhedron_reply(bytes) {
                prop_assert_eq!(&encode_reply(&reply), bytes);
            }
            if let Ok(capture) = bwah::decode_amplituhedron_capture(bytes) {
                prop_assert_eq!(&encode_capture(&capture), bytes);
            }
        }
    }

    #[test]
    fn reply_round_trip_for_every_input(reply in replies()) {
        let decoded = bwah::decode_amplituhedron_reply(&encode_reply(&reply)).unwrap();
        prop_assert!(same_reply(&decoded, &reply));
    }

    #[test]
    fn capture_round_trip_for_every_input(capture in captures()) {
        let decoded = bwah::decode_amplituhedron_capture(&encode_capture(&capture)).unwrap();
        let key = |c: &AmplituhedronCapture| (c.prefix_hash, c.prefix_len, c.layer_lo, c.layer_hi);
        prop_assert_eq!(key(&decoded), key(&capture));
        prop_assert_eq!((bits(&decoded.tail), bits(&decoded.kv)), (bits(&capture.tail), bits(&capture.kv)));
    }

    #[test]
    fn reply_header_is_14_bytes_of_magic_version_flags_and_lengths(reply in replies()) {
        let bytes = encode_reply(&reply);
        let blob_len = |payload: &Option<Vec<f32>>| payload.as_ref().map_or(0, |values| 4 * values.len() + 20);
        let (tail_len, kv_len) = (blob_len(&reply.tail), blob_len(&reply.kv));
        if reply.hit {
            prop_assert_eq!(bytes.len(), 14 + tail_len + kv_len);
            prop_assert_eq!(&bytes[..5], b"BWAH\x01");
            prop_assert_eq!(bytes[5], if reply.tail.is_some() { 0x03 } else { 0x01 });
            prop_assert_eq!(&bytes[6..10], (tail_len as u32).to_le_bytes());
            prop_assert_eq!(&bytes[10..14], (kv_len as u32).to_le_bytes());
        } else {
            prop_assert!(bytes.is_empty());
        }
    }

    #[test]
    fn capture_header_is_30_bytes_with_the_key_in_the_last_16(capture in captures()) {
        let bytes = encode_capture(&capture);
        prop_assert_eq!(bytes.len(), 30 + 20 + 20 + 4 * (capture.tail.len() + capture.kv.len()));
        prop_assert_eq!(&bytes[..6], b"BWAH\x01\x03");
        prop_assert_eq!(&bytes[14..22], capture.prefix_hash.to_le_bytes());
        prop_assert_eq!(&bytes[22..26], capture.prefix_len.to_le_bytes());
        prop_assert_eq!(&bytes[26..28], capture.layer_lo.to_le_bytes());
        prop_assert_eq!(&bytes[28..30], capture.layer_hi.to_le_bytes());
    }

    #[test]
    fn envelope_truncation_at_every_length_is_typed(capture in captures(), reply in replies()) {
        let bytes = encode_capture(&capture);
        for len in 0..bytes.len() {
            let result = bwah::decode_amplituhedron_capture(&bytes[..len]);
            prop_assert!(matches!(result, Err(BwahError::Truncated { .. })), "capture {len}");
        }
        let bytes = encode_reply(&reply);
        for len in 1..bytes.len() {
            let result = bwah::decode_amplituhedron_reply(&bytes[..len]);
            prop_assert!(matches!(result, Err(BwahError::Truncated { .. })), "reply {len}");
        }
    }

    #[test]
    fn single_byte_mutations_never_panic_and_what_is_accepted_encodes_the_same(
        capture in captures(), reply in replies(), at in any::<Index>(), byte in any::<u8>(),
    ) {
        let mut bytes = encode_capture(&capture);
        let place = at.index(bytes.len());
        bytes[place] = byte;
        if let Ok(capture) = bwah::decode_amplituhedron_capture(&bytes) {
            prop_assert_eq!(encode_capture(&capture), bytes);
        }
        let mut bytes = encode_reply(&reply);
        if !bytes.is_empty() {
            let place = at.index(bytes.len());
            bytes[place] = byte;
        }
        if let Ok(reply) = bwah::decode_amplituhedron_reply(&bytes) {
            prop_assert_eq!(encode_reply(&reply), bytes);
        }
    }

    #[test]
    fn every_flag_byte_but_two_is_reserved(reply in replies(), flags in any::<u8>()) {
        let mut bytes = encode_reply(&reply);
        if reply.hit {
            let own = bytes[5];
            bytes[5] = flags;
            match bwah::decode_amplituhedron_reply(&bytes) {
                Err(BwahError::ReservedFlags { flags: told }) => prop_assert!(told == flags && flags != own),
                Ok(_) => prop_assert_eq!(flags, own),
                // A tail is announced where there is none.
                Err(BwahError::InnerBlobError(_)) => prop_assert!(own == 0x01 && flags == 0x03),
                Err(error) => prop_assert!(false, "{error:?}"),
            }
        }
    }

    #[test]
    fn parts_in_any_order_and_repeated_join_to_the_frame(
        frame in vec(any::<u8>(), 1..2000), mtu in 12_usize..300, id in any::<u16>(),
        order in vec(any::<Index>(), 0..100),
    ) {
        let mut fragmenter = Fragmenter::starting_at(mtu, id).unwrap();
        let mut datagrams = Vec::new();
        for part in fragmenter.split(&frame).unwrap() {
            let mut datagram = Vec::new();
            part.write(&mut datagram);
            prop_assert!(datagram.len() <= mtu);
            datagrams.push(datagram);
        }
        // Any choice with repeats, then all of them, up to the first time that the frame is whole.
        let some = order.iter().map(|index| index.index(datagrams.len()));
        let mut reassembler = Reassembler::new(Limits::default());
        let mut whole = None;
        for n in some.chain(0..datagrams.len()) {
            match reassembler.push(0, &1_u8, &datagrams[n]).unwrap() {
                Outcome::Complete(bytes) => {
                    whole = Some(bytes.into_owned());
                    break;
                }
                Outcome::Waiting | Outcome::Duplicate => {}
            }
        }
        prop_assert_eq!(whole, Some(frame));
        prop_assert!(reassembler.is_empty() && reassembler.bytes() == 0);
    }

    #[test]
    fn reassembly_stays_within_its_limits(
        datagrams in vec((any::<u8>(), 0..4_u16, 0..6_u8, 0..6_u8, 0..50_usize, 0..40_u64), 0..300),
    ) {
        let limits = Limits { frames: 6, bytes: 200, peer_frames: 3, peer_bytes: 120, expiry_ms: 1000 };
        let mut reassembler = Reassembler::new(limits);
        let mut now = 0;
        for (peer, id, index, total, len, wait) in datagrams {
            now += wait;
            let mut datagram = vec![(id >> 8) as u8, id as u8, index, total];
            datagram.resize(4 + len, index);
            let _ = reassembler.push(now, &(peer % 4), &datagram);
            prop_assert!(reassembler.len() <= limits.frames && reassembler.bytes() <= limits.bytes);
        }
        reassembler.expire(now + 1000);
        prop_assert!(reassembler.is_empty() && reassembler.bytes() == 0);
    }
}
