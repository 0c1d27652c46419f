//! Frames in and out of buffers: the codec beside a plain copy of the same bytes.

#![allow(missing_docs)]

use std::hint::black_box;

use aeon_proto::frame::{Flags, Frame, MAX_FRAME_LEN};
use aeon_station::codec::{FrameCodec, Framing, next_frame};
use bytes::BytesMut;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tokio_util::codec::Decoder;

const FRAMES: usize = 64;

fn batch(payload_len: usize) -> Vec<u8> {
    let payload = vec![7; payload_len];
    let mut bytes = Vec::new();
    for sequence in 0..FRAMES as u32 {
        bytes.extend_from_slice(&(10 + payload_len as u32).to_be_bytes());
        let frame = Frame { stream_id: 3, sequence, flags: Flags::NONE, payload: &payload };
        frame.encode(&mut bytes).unwrap_or_default();
    }
    bytes
}

fn codec(criterion: &mut Criterion) {
    for payload_len in [164, 14_360] {
        let bytes = batch(payload_len);
        let payload = vec![7; payload_len];
        let mut group = criterion.benchmark_group(format!("{FRAMES} frames of {payload_len} bytes"));
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        let mut copy = vec![0; bytes.len()];
        group.bench_function("floor: copy", |bencher| bencher.iter(|| copy.copy_from_slice(black_box(&bytes))));
        group.bench_function("encode into one buffer", |bencher| {
            let mut out = Vec::with_capacity(bytes.len());
            bencher.iter(|| {
                out.clear();
                for sequence in 0..FRAMES as u32 {
                    let frame = Frame { stream_id: 3, sequence, flags: Flags::NONE, payload: black_box(&payload) };
                    frame.encode(&mut out).unwrap_or_default();
                }
                black_box(out.len())
            });
        });
        group.bench_function("decode borrowed (server)", |bencher| {
            bencher.iter(|| {
                let mut at = 0;
                let mut sum = 0;
                while let Ok(Some((frame, len))) = next_frame(black_box(&bytes[at..]), Framing::Prefixed, MAX_FRAME_LEN)
                {
                    at += len;
                    sum += frame.payload.len();
                }
                black_box(sum)
            });
        });
        group.bench_function("decode owned (client), filling included", |bencher| {
            let mut codec = FrameCodec::new(Framing::Prefixed, MAX_FRAME_LEN);
            bencher.iter(|| {
                let mut buffer = BytesMut::from(black_box(&bytes[..]));
                let mut sum = 0;
                while let Ok(Some(frame)) = codec.decode(&mut buffer) {
                    sum += frame.payload.len();
                }
                black_box(sum)
            });
        });
        group.finish();
    }
}

criterion_group!(benches, codec);
criterion_main!(benches);
