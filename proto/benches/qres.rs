//! Encoding and decoding QRES beside reading and writing the same bytes.
//!
//! `cargo bench -p aeon-proto --bench qres`. The yardstick of a row is a copy of what the work reads and what it writes: a
//! residual and a body. All variants of a shape take turns within a round, so that a noisy neighbour hits them alike; a
//! row is the median over the rounds of "this variant / the copy of that round", with quartiles, and the median time.
#![expect(clippy::unwrap_used, reason = "a benchmark stops at its first mistake")]

use std::{hint::black_box, time::Instant};

use aeon_proto::qres::{Format, Header, Parts, QresBody, Rotation, encode};

const WIDTHS: [usize; 3] = [576, 896, 3584];
const ROUNDS: usize = 41;
/// Time of one variant in one round.
const SLICE_NS: f64 = 300_000.0;

type Variant<'a> = (String, Box<dyn FnMut() + 'a>);

fn values(d: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..d).map(|_| (0..6).map(|_| next()).sum()).collect()
}

fn main() {
    // `cargo test --benches` only wants to know that it runs.
    let rounds = if std::env::args().any(|arg| arg == "--test") { 1 } else { ROUNDS };
    println!("ratio to copying residual and body once: median (quartiles) of {rounds} interleaved rounds");
    for d in WIDTHS {
        for format in Format::ALL {
            table(d, format, rounds);
        }
    }
}

fn table(d: usize, format: Format, rounds: usize) {
    let (mean, residual) = (values(d + 1)[1..].to_vec(), values(d));
    let basis_fp = u32::from(format.is_rotated());
    let header =
        Header { boundary: 1, hidden_dim: d as u32, basis_fp, methodology: basis_fp, format, seed: 9 * basis_fp };
    let rotation = Rotation::new(d, header.seed).filter(|_| format.is_rotated());
    let parts = Parts { mean: Some(&mean[..]).filter(|_| format.is_rotated()), rotation: rotation.as_ref() };
    let mut body = Vec::new();
    encode(&header, &parts, &residual, |_, _| false, &mut body).unwrap();

    let (mut to_residual, mut to_body) = (vec![0.0; d], vec![0; body.len()]);
    let (mut encoded, mut decoded) = (Vec::with_capacity(body.len() + 8), vec![0.0; d]);
    let mut variants: Vec<Variant<'_>> = vec![
        (
            "copy".into(),
            Box::new(|| {
                to_residual.copy_from_slice(black_box(&residual));
                to_body.copy_from_slice(black_box(&body));
                black_box((&to_residual, &to_body));
            }),
        ),
        (
            "encode".into(),
            Box::new(|| {
                encoded.clear();
                encode(&header, &parts, black_box(&residual), |_, _| false, &mut encoded).unwrap();
                black_box(&encoded);
            }),
        ),
        (
            "decode".into(),
            Box::new(|| {
                let body = QresBody::decode(black_box(&body)).unwrap();
                body.check_finite().unwrap();
                body.read(&parts, &mut decoded).unwrap();
                black_box(&decoded);
            }),
        ),
    ];
    let repeats: Vec<usize> = variants
        .iter_mut()
        .map(|(_, run)| {
            time(run, 3);
            (SLICE_NS / time(run, 5).max(1.0)).clamp(1.0, 1e6) as usize
        })
        .collect();
    let mut times = vec![Vec::new(); variants.len()];
    for _ in 0..rounds {
        for (((_, run), repeats), times) in variants.iter_mut().zip(&repeats).zip(&mut times) {
            // Once unmeasured: the variant before it left its own lines in the cache.
            time(run, 1);
            times.push(time(run, *repeats));
        }
    }
    println!("\n{} {d}, {} bytes", format.name(), body.len());
    for ((name, _), own) in variants.iter().zip(&times) {
        let mut ratios: Vec<f64> = own.iter().zip(&times[0]).map(|(own, copy)| own / copy).collect();
        let mut own = own.clone();
        for list in [&mut ratios, &mut own] {
            list.sort_by(f64::total_cmp);
        }
        let at = |list: &[f64], quarter: usize| list[(list.len() - 1) * quarter / 4];
        println!(
            "  {name:<8} {:8.1} ({:.1}-{:.1})   {:8.0} ns",
            at(&ratios, 2),
            at(&ratios, 1),
            at(&ratios, 3),
            at(&own, 2)
        );
    }
}

/// Nanoseconds of one call.
fn time(run: &mut dyn FnMut(), repeats: usize) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        run();
    }
    start.elapsed().as_nanos() as f64 / repeats as f64
}
