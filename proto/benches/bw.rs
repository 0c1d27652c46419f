//! Speed of the `.bw` codec and the BWAH envelope on one residual of 3584 f32 values.
//!
//! `cargo bench -p aeon-proto --bench bw` prints a table first: each row beside XXH64 alone over the same 14,336 bytes,
//! all rows taking turns in each round, so that a busy machine slows them alike. Criterion's own figures follow,
//! for comparison with saved baselines; `-- --quick` shortens them.

use std::{hint::black_box, time::Instant};

use aeon_proto::{bw, bwah};
use criterion::{Criterion, Throughput};
use xxhash_rust::xxh64::xxh64;

/// Bytes of a residual of 3584 values.
const LEN: usize = 14_336;
/// Rounds of the table.
const ROUNDS: usize = 301;
/// Calls in a row of one round.
const CALLS: u32 = 40;

type Case = (&'static str, Box<dyn FnMut()>);

/// Bytes without a pattern that a branch predictor or a compressor could use.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..LEN).map(|_| next()).collect()
}

/// Everything that is measured; the first is what the others are held against.
fn cases() -> Vec<Case> {
    let content = noise();
    let values: Vec<f32> = content.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let blob = bw::encode(&content, bw::OCTET_STREAM);
    let reply = bwah::encode_amplituhedron_reply(true, Some(&values), None);
    let (mut copy, mut copy_2, mut out, mut unpacked) = (content.clone(), content.clone(), Vec::new(), content.clone());
    let parsed: &'static [u8] = Vec::leak(blob.clone());
    let (a, b, c, d, e) = (content.clone(), content.clone(), content.clone(), content.clone(), content);
    vec![
        (
            "XXH64 alone",
            Box::new(move || {
                black_box(xxh64(black_box(&c), 0));
            }),
        ),
        (
            "memcpy + XXH64",
            Box::new(move || {
                copy.copy_from_slice(black_box(&a));
                black_box((&copy, xxh64(black_box(&a), 0)));
            }),
        ),
        (
            "memcpy alone",
            Box::new(move || {
                copy_2.copy_from_slice(black_box(&b));
                black_box(&copy_2);
            }),
        ),
        (
            "bw encode, buffer kept",
            Box::new(move || {
                out.clear();
                bw::encode_into(black_box(&d), bw::OCTET_STREAM, &mut out).unwrap_or_default();
                black_box(&out);
            }),
        ),
        (
            "bw encode, new buffer",
            Box::new(move || {
                black_box(bw::encode(black_box(&e), bw::OCTET_STREAM));
            }),
        ),
        (
            "bw decode, buffer kept",
            Box::new(move || {
                let _ = black_box(bw::Blob::parse(black_box(parsed)).and_then(|blob| blob.unpack(&mut unpacked)));
            }),
        ),
        (
            "bw decode, new buffer",
            Box::new(move || {
                let _ = black_box(bw::decode(black_box(&blob)));
            }),
        ),
        (
            "BWAH reply encode",
            Box::new(move || {
                black_box(bwah::encode_amplituhedron_reply(true, Some(black_box(&values)), None));
            }),
        ),
        (
            "BWAH reply decode",
            Box::new(move || {
                let _ = black_box(bwah::decode_amplituhedron_reply(black_box(&reply)));
            }),
        ),
    ]
}

fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values.get(values.len() * quarter / 4).copied().unwrap_or(f64::NAN))
}

fn print_table() {
    let mut cases = cases();
    let mut times = vec![Vec::with_capacity(ROUNDS); cases.len()];
    for _ in 0..ROUNDS {
        for ((_, run), times) in cases.iter_mut().zip(&mut times) {
            let start = Instant::now();
            for _ in 0..CALLS {
                run();
            }
            times.push(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
        }
    }
    println!("14,336 bytes, {ROUNDS} rounds of {CALLS} calls; ratio to the first row within each round");
    println!("{:<24} {:>6} {:>13} {:>10}", "", "ratio", "q1-q3", "ns median");
    let Some((base, _)) = times.split_first() else { return };
    for ((name, _), times) in cases.iter().zip(&times) {
        let ratios = times.iter().zip(base).map(|(time, base)| time / base).collect();
        let ([q1, ratio, q3], [_, median, _]) = (quartiles(ratios), quartiles(times.clone()));
        println!("{name:<24} {ratio:>6.2} {:>13} {median:>10.0}", format!("{q1:.2}-{q3:.2}"));
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "--bench") {
        print_table();
    }
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("bw 14336");
    group.throughput(Throughput::Bytes(LEN as u64));
    for (name, mut run) in cases() {
        group.bench_function(name, |bencher| bencher.iter(&mut run));
    }
    group.finish();
    criterion.final_summary();
}
