//! The station's matrix product against candle's, on the shapes of a small model: one position and a prompt.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use aeon_station::model::matrix::Matrix;
use candle_core::{Device, Tensor};
use criterion::{Criterion, Throughput};

/// Outputs and inputs: attention, feed-forward and head of a model with hidden size 576.
const SHAPES: [(usize, usize); 4] = [(576, 576), (1536, 576), (576, 1536), (49_152, 576)];
const POSITIONS: [usize; 4] = [1, 4, 64, 128];

fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i * 2_654_435_761 % 2001) as f32 / 1000.0 - 1.0).collect()
}

/// The time of the fastest of many runs.
fn best(mut run: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    while start.elapsed() < Duration::from_millis(400) {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn main() -> candle_core::Result<()> {
    let mut criterion =
        Criterion::default().sample_size(10).measurement_time(Duration::from_secs(1)).configure_from_args();
    for (rows, cols) in SHAPES {
        let weights = values(rows * cols);
        let matrix = Matrix::pack(&weights, rows, cols);
        let theirs = Tensor::from_vec(weights, (rows, cols), &Device::Cpu)?.t()?;
        for n in POSITIONS {
            let activations = values(n * cols);
            let tensor = Tensor::from_slice(&activations, (n, cols), &Device::Cpu)?;
            let ours_time = best(|| {
                black_box(matrix.multiply(black_box(&activations)));
            });
            let theirs_time = best(|| {
                let _ = black_box(black_box(&tensor).matmul(&theirs));
            });
            let ratio = ours_time / theirs_time;
            let rate = 2.0 * (rows * cols * n) as f64 / ours_time / 1e9;
            println!(
                "{rows}x{cols}, {n} positions: {:.1} us, candle {:.1} us, ratio {ratio:.2}, {rate:.1} Gflop/s",
                ours_time * 1e6,
                theirs_time * 1e6
            );
            let mut group = criterion.benchmark_group(format!("matmul {rows}x{cols}"));
            group.throughput(Throughput::Elements((rows * cols * n) as u64));
            group.bench_function(format!("ours/{n}"), |b| b.iter(|| matrix.multiply(black_box(&activations))));
            group.bench_function(format!("candle/{n}"), |b| b.iter(|| black_box(&tensor).matmul(&theirs)));
        }
    }
    criterion.final_summary();
    Ok(())
}
