//! Attention over the positions that a session remembers, and the memory itself.
//!
//! [`super::transformer`] is the caller. The result for a position is computed from its own query and the keys and
//! values up to it, in the order of the positions, so that it does not depend on which other positions come with it.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, WithDType};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

use super::Cache;

/// Multiply-adds worth giving to another thread, as in [`super::matrix`].
const PARALLEL_WORK: usize = 1 << 18;
/// Partial sums of a dot product: a fixed number, so that the order of the sum is the same on every processor.
const LANES: usize = 8;

/// Keys and values of one layer, `[position, kv_heads * head_dim]` each; keys after the rotation.
#[derive(Debug, Default)]
pub(super) struct LayerCache {
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
}

/// What a session remembers of a layer range.
#[derive(Debug)]
pub(super) struct KvCache {
    /// Positions that all layers hold.
    pub(super) len: usize,
    pub(super) kv_dim: usize,
    pub(super) layers: Vec<LayerCache>,
}

impl KvCache {
    pub(super) fn new(n_layers: usize, kv_dim: usize) -> Self {
        Self { len: 0, kv_dim, layers: (0..n_layers).map(|_| LayerCache::default()).collect() }
    }
}

impl Cache for KvCache {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        // A layer can be ahead of the others after an error.
        let values = self.len.saturating_mul(self.kv_dim);
        for layer in &mut self.layers {
            layer.keys.truncate(values);
            layer.values.truncate(values);
        }
    }

    fn bytes(&self) -> usize {
        let values: usize = self.layers.iter().map(|layer| layer.keys.capacity() + layer.values.capacity()).sum();
        size_of::<Self>() + self.layers.capacity() * size_of::<LayerCache>() + values * size_of::<f32>()
    }
}

/// Attention of queries `[rows, heads * head_dim]`: the last positions of one session or of several, each over its own
/// memory.
#[derive(Debug)]
pub(super) struct Attention<'a> {
    /// For each row of the queries, what its session remembers and the row's position there.
    pub(super) rows: Vec<(&'a LayerCache, usize)>,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) head_dim: usize,
}

impl CustomOp1 for Attention<'_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let queries = contiguous(storage, layout)?;
        let q_dim = self.n_heads * self.head_dim;
        let kv_dim = self.n_kv_heads * self.head_dim;
        let group_dim = q_dim / self.n_kv_heads;
        if queries.len() != self.rows.len() * q_dim {
            candle_core::bail!("{} queries for {} positions", queries.len() / q_dim, self.rows.len());
        }
        if let Some((memory, position)) = self.rows.iter().find(|(memory, at)| memory.keys.len() / kv_dim <= *at) {
            candle_core::bail!("position {position} of {}", memory.keys.len() / kv_dim);
        }
        let mut out = vec![0.0; queries.len()];
        let arch = Arch::new();
        // One piece is the query heads of one position that share a key head.
        let piece = |(index, (out, queries)): (usize, (&mut [f32], &[f32]))| {
            let ((memory, position), kv_head) = (self.rows[index / self.n_kv_heads], index % self.n_kv_heads);
            let (positions, offset) = (position + 1, kv_head * self.head_dim);
            arch.dispatch(Piece { op: self, memory, queries, positions, offset, out });
        };
        if q_dim * self.rows.iter().map(|(_, position)| position + 1).sum::<usize>() < PARALLEL_WORK {
            out.chunks_mut(group_dim).zip(queries.chunks(group_dim)).enumerate().for_each(piece);
        } else {
            out.par_chunks_mut(group_dim).zip(queries.par_chunks(group_dim)).enumerate().for_each(piece);
        }
        Ok((f32::to_cpu_storage_owned(out), Shape::from((self.rows.len(), q_dim))))
    }
}

/// One position's query heads of one key head, over the first `positions` keys and values.
///
/// A type and not a closure: only what is inlined into the dispatch is compiled for the processor's vector registers.
struct Piece<'a> {
    op: &'a Attention<'a>,
    memory: &'a LayerCache,
    queries: &'a [f32],
    positions: usize,
    /// Where the key head begins in a position.
    offset: usize,
    out: &'a mut [f32],
}

impl NullaryFnOnce for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { op, memory, queries, positions, offset, out } = self;
        let dim = op.head_dim;
        let kv_dim = op.n_kv_heads * dim;
        let scale = 1.0 / (dim as f32).sqrt();
        let mut scores = vec![0.0; positions * (queries.len() / dim)];
        for (position, keys) in memory.keys.chunks_exact(kv_dim).take(positions).enumerate() {
            let key = &keys[offset..offset + dim];
            for (query, scores) in queries.chunks_exact(dim).zip(scores.chunks_exact_mut(positions)) {
                scores[position] = dot(query, key) * scale;
            }
        }
        for scores in scores.chunks_exact_mut(positions) {
            let max = scores.iter().fold(f32::NEG_INFINITY, |max, score| if *score > max { *score } else { max });
            let mut sum = 0.0;
            for score in scores.iter_mut() {
                *score = (*score - max).exp();
                sum += *score;
            }
            scores.iter_mut().for_each(|score| *score /= sum);
        }
        for (position, values) in memory.values.chunks_exact(kv_dim).take(positions).enumerate() {
            let value = &values[offset..offset + dim];
            for (out, scores) in out.chunks_exact_mut(dim).zip(scores.chunks_exact(positions)) {
                add_scaled(out, scores[position], value);
            }
        }
    }
}

/// The sum of products, in [`LANES`] partial sums.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let [a0, a1, a2, a3, b0, b1, b2, b3] = sums;
    let mut sum = ((a0 + b0) + (a2 + b2)) + ((a1 + b1) + (a3 + b3));
    for (a, b) in a_rest.iter().zip(b_rest) {
        sum += a * b;
    }
    sum
}

/// Adds `scale * values` to `out`.
#[inline(always)]
fn add_scaled(out: &mut [f32], scale: f32, values: &[f32]) {
    let (out, out_rest) = out.as_chunks_mut::<LANES>();
    let (values, values_rest) = values.as_chunks::<LANES>();
    for (out, values) in out.iter_mut().zip(values) {
        // By value: the compiler cannot know that the slices do not overlap.
        let (mut sums, values) = (*out, *values);
        for lane in 0..LANES {
            sums[lane] += scale * values[lane];
        }
        *out = sums;
    }
    for (out, value) in out_rest.iter_mut().zip(values_rest) {
        *out += scale * value;
    }
}

/// The values of a contiguous f32 tensor on the CPU.
pub(super) fn contiguous<'s>(storage: &'s CpuStorage, layout: &Layout) -> candle_core::Result<&'s [f32]> {
    let CpuStorage::F32(values) = storage else {
        candle_core::bail!("expected {:?}, got {:?}", DType::F32, storage_type(storage));
    };
    match layout.contiguous_offsets() {
        Some((from, to)) if to <= values.len() => Ok(&values[from..to]),
        _ => candle_core::bail!("expected a contiguous tensor"),
    }
}

fn storage_type(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage as _;
    storage.dtype()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_cuts_layers_that_are_ahead() {
        let mut cache = KvCache::new(2, 3);
        cache.len = 2;
        cache.layers[0] = LayerCache { keys: vec![1.0; 15], values: vec![2.0; 12] };
        cache.layers[1] = LayerCache { keys: vec![3.0; 6], values: vec![4.0; 6] };
        assert!(cache.bytes() >= (15 + 12 + 6 + 6) * 4);
        // Work broke off after the first layer: the caller goes back to where it was.
        cache.truncate(2);
        assert!(cache.layers.iter().all(|layer| layer.keys.len() == 6 && layer.values.len() == 6));
        cache.truncate(1);
        assert_eq!((cache.len(), cache.layers[1].values.len()), (1, 3));
    }

    #[test]
    fn sums_of_any_length() {
        for len in [0, 1, 7, 8, 9, 16, 23] {
            let a: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let expected: f32 = a.iter().map(|a| a * a).sum();
            assert_eq!(dot(&a, &a), expected);
            let mut out = vec![1.0; len];
            add_scaled(&mut out, 2.0, &a);
            assert!(out.iter().zip(&a).all(|(out, a)| *out == 1.0 + 2.0 * a));
        }
    }
}
