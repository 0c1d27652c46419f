//! Weight matrices, and the one product a transformer is made of: activations times a matrix, transposed.
//!
//! [`super::transformer`] is the caller. What is here knows no layer, name or file.
//!
//! A station is asked for one position, for a few, or for a whole prompt, and the bits of a position must not depend on
//! which: a peer may repeat a request cut in another way. So every value is one chain of multiply-adds over the columns
//! in ascending order, whatever the number of rows, the number of threads and the width of the vector registers.
//! For that the weights are stored in panels of as many output values as two vector registers hold:
//!
//! ```text
//! panel p: column 0: [row p·w, …, row p·w + w - 1], column 1: [row p·w, …], …      w = 2 × lanes
//! ```
//!
//! One position streams through memory once, front to back; several positions share each panel while it is in the cache.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Activation rows that one pass over a panel works on: with two registers of output each, they use 12 of the 16 vector
/// registers of AVX2.
const TILE_ROWS: usize = 6;

/// Panels that one pass works on when there is one activation row: two registers would leave the adders idle while each
/// waits for its last sum.
const SINGLE_PANELS: usize = 4;

/// Multiply-adds worth giving to another thread: about 20 µs, a few times what waking one costs.
const PARALLEL_WORK: usize = 1 << 18;

/// Floats in 64 bytes: a panel starts at a cache line, so that no vector load touches two.
const LINE: usize = 16;

/// A matrix `[rows, cols]` in panels.
pub struct Matrix {
    rows: usize,
    cols: usize,
    width: usize,
    arch: Arch,
    storage: Vec<f32>,
    start: usize,
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matrix").field("rows", &self.rows).field("cols", &self.cols).finish_non_exhaustive()
    }
}

impl Matrix {
    /// Packs `values` `[rows, cols]`, row-major. Values beyond `rows * cols` are ignored and missing ones are zero.
    #[must_use]
    pub fn pack(values: &[f32], rows: usize, cols: usize) -> Self {
        Self::pack_for(Arch::new(), values, rows, cols)
    }

    fn pack_for(arch: Arch, values: &[f32], rows: usize, cols: usize) -> Self {
        let width = 2 * arch.dispatch(Lanes);
        let len = rows.div_ceil(width) * width * cols;
        let mut storage = vec![0.0; len + LINE];
        let start = storage.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        if cols > 0 {
            let panels = storage[start..start + len].par_chunks_mut(width * cols);
            panels.zip(values.par_chunks(width * cols)).for_each(|(panel, block)| {
                for (row, values) in block.chunks(cols).enumerate() {
                    for (column, value) in values.iter().enumerate() {
                        panel[column * width + row] = *value;
                    }
                }
            });
        }
        Self { rows, cols, width, arch, storage, start }
    }

    /// Output values.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Input values.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Writes one row of the matrix to `out`, which holds `cols` values. Nothing is written if there is no such row.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        if row >= self.rows {
            return;
        }
        let panel = row / self.width * self.width * self.cols;
        let column_values = self.panels()[panel..].iter().skip(row % self.width).step_by(self.width);
        out.iter_mut().zip(column_values).for_each(|(out, value)| *out = *value);
    }

    /// `activations` `[n, cols]` times this matrix transposed: `[n, rows]`, row-major, each value the sum over columns
    /// in ascending order in f32, with fused multiply-adds where the processor has them. NaN and infinity propagate.
    #[must_use]
    pub fn multiply(&self, activations: &[f32]) -> Vec<f32> {
        let n = activations.len().checked_div(self.cols).unwrap_or(0);
        if n == 0 || self.rows == 0 {
            return Vec::new();
        }
        let tiles;
        let tiles = if n == 1 {
            activations
        } else {
            tiles = interleave(activations, self.cols);
            &tiles
        };
        // The result panel by panel, so that each thread writes to a slice of its own.
        let mut blocks = vec![0.0; self.rows.div_ceil(self.width) * self.width * n];
        let panel_work = self.width * self.cols * n;
        let panels_per_job = PARALLEL_WORK.div_ceil(panel_work).next_multiple_of(SINGLE_PANELS);
        let job = |(index, out): (usize, &mut [f32])| {
            let panels = &self.panels()[index * panels_per_job * self.width * self.cols..];
            self.arch.dispatch(Job { panels, cols: self.cols, tiles, n, out });
        };
        let job_len = panels_per_job * self.width * n;
        if job_len >= blocks.len() {
            job((0, &mut blocks));
        } else {
            blocks.par_chunks_mut(job_len).enumerate().for_each(job);
        }
        if n == 1 {
            blocks.truncate(self.rows);
            return blocks;
        }
        let mut out = vec![0.0; self.rows * n];
        for (panel, block) in blocks.chunks(self.width * n).enumerate() {
            let first = panel * self.width;
            let used = self.width.min(self.rows - first);
            for (row, values) in block.chunks(self.width).enumerate() {
                out[row * self.rows + first..][..used].copy_from_slice(&values[..used]);
            }
        }
        out
    }

    fn panels(&self) -> &[f32] {
        &self.storage[self.start..]
    }
}

/// Rows `[n, cols]` in tiles of [`TILE_ROWS`], column by column: the order in which the product reads them.
fn interleave(rows: &[f32], cols: usize) -> Vec<f32> {
    let mut tiles = vec![0.0; rows.len()];
    for (tile, rows) in tiles.chunks_mut(TILE_ROWS * cols).zip(rows.chunks(TILE_ROWS * cols)) {
        let height = rows.len() / cols;
        for (row, values) in rows.chunks(cols).enumerate() {
            tile.iter_mut().skip(row).step_by(height).zip(values).for_each(|(out, value)| *out = *value);
        }
    }
    tiles
}

/// The number of f32 values in a vector register.
struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

/// As many panels as fit into `out` `[panels, n, width]`.
struct Job<'a> {
    panels: &'a [f32],
    cols: usize,
    tiles: &'a [f32],
    n: usize,
    out: &'a mut [f32],
}

impl WithSimd for Job<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = 2 * S::F32_LANES;
        let panel_len = width * self.cols;
        if self.n == 1 {
            let groups = self.panels.chunks(SINGLE_PANELS * panel_len);
            for (panels, out) in groups.zip(self.out.chunks_mut(SINGLE_PANELS * width)) {
                if out.len() == SINGLE_PANELS * width {
                    single::<S, SINGLE_PANELS>(simd, panels, panel_len, self.tiles, out);
                } else {
                    for (panel, out) in panels.chunks(panel_len).zip(out.chunks_mut(width)) {
                        single::<S, 1>(simd, panel, panel_len, self.tiles, out);
                    }
                }
            }
            return;
        }
        for (panel, out) in self.panels.chunks(panel_len).zip(self.out.chunks_mut(self.n * width)) {
            for (tile, out) in self.tiles.chunks(TILE_ROWS * self.cols).zip(out.chunks_mut(TILE_ROWS * width)) {
                match out.len() / width {
                    1 => several::<S, 1>(simd, panel, tile, out),
                    2 => several::<S, 2>(simd, panel, tile, out),
                    3 => several::<S, 3>(simd, panel, tile, out),
                    4 => several::<S, 4>(simd, panel, tile, out),
                    5 => several::<S, 5>(simd, panel, tile, out),
                    _ => several::<S, TILE_ROWS>(simd, panel, tile, out),
                }
            }
        }
    }
}

/// One panel, `ROWS` activation rows.
#[inline(always)]
fn several<S: Simd, const ROWS: usize>(simd: S, panel: &[f32], tile: &[f32], out: &mut [f32]) {
    let mut sums = [[simd.splat_f32s(0.0); 2]; ROWS];
    let weights = S::as_simd_f32s(panel).0.as_chunks::<2>().0;
    for (weights, values) in weights.iter().zip(tile.as_chunks::<ROWS>().0) {
        for (sums, value) in sums.iter_mut().zip(values) {
            let value = simd.splat_f32s(*value);
            sums[0] = simd.mul_add_e_f32s(value, weights[0], sums[0]);
            sums[1] = simd.mul_add_e_f32s(value, weights[1], sums[1]);
        }
    }
    let out = S::as_mut_simd_f32s(out).0.as_chunks_mut::<2>().0;
    out.iter_mut().zip(sums).for_each(|(out, sums)| *out = sums);
}

/// `PANELS` panels, one activation row.
#[inline(always)]
fn single<S: Simd, const PANELS: usize>(simd: S, panels: &[f32], panel_len: usize, row: &[f32], out: &mut [f32]) {
    let mut sums = [[simd.splat_f32s(0.0); 2]; PANELS];
    let mut weights = [&[][..]; PANELS];
    for (weights, panel) in weights.iter_mut().zip(panels.chunks(panel_len)) {
        *weights = &S::as_simd_f32s(panel).0.as_chunks::<2>().0[..row.len()];
    }
    for (column, value) in row.iter().enumerate() {
        let value = simd.splat_f32s(*value);
        for (sums, weights) in sums.iter_mut().zip(&weights) {
            let weights = weights[column];
            sums[0] = simd.mul_add_e_f32s(value, weights[0], sums[0]);
            sums[1] = simd.mul_add_e_f32s(value, weights[1], sums[1]);
        }
    }
    let out = S::as_mut_simd_f32s(out).0.as_chunks_mut::<2>().0;
    out.iter_mut().zip(sums).for_each(|(out, sums)| *out = sums);
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut random = StdRng::seed_from_u64(seed);
        (0..len).map(|_| random.random_range(-1.0..1.0)).collect()
    }

    #[test]
    fn equals_the_plain_product() {
        for (rows, cols, n) in [(1, 1, 1), (5, 3, 2), (16, 8, 6), (33, 7, 13), (130, 65, 1), (257, 31, 20)] {
            let (values, activations) = (random(rows * cols, 1), random(n * cols, 2));
            let out = Matrix::pack(&values, rows, cols).multiply(&activations);
            assert_eq!(out.len(), n * rows);
            for (i, out) in out.iter().enumerate() {
                let (weights, inputs) = (&values[i % rows * cols..], &activations[i / rows * cols..]);
                let expected: f64 = (0..cols).map(|c| f64::from(weights[c]) * f64::from(inputs[c])).sum();
                assert!((f64::from(*out) - expected).abs() < 1e-4, "{rows}x{cols}x{n} at {i}: {out} and {expected}");
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_rows_or_threads() {
        for (rows, cols) in [(100, 40), (1000, 300)] {
            let matrix = Matrix::pack(&random(rows * cols, 3), rows, cols);
            let activations = random(23 * cols, 4);
            let whole = matrix.multiply(&activations);
            for rows in 1..=TILE_ROWS + 1 {
                let parts: Vec<f32> = activations.chunks(rows * cols).flat_map(|part| matrix.multiply(part)).collect();
                assert_eq!(whole, parts, "cut in {rows}");
            }
            let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            assert_eq!(whole, alone.install(|| matrix.multiply(&activations)));
        }
    }

    #[test]
    fn other_processors() {
        let (values, activations) = (random(70 * 50, 6), random(9 * 50, 7));
        let best = Matrix::pack(&values, 70, 50).multiply(&activations);
        let plain = Matrix::pack_for(Arch::Scalar, &values, 70, 50).multiply(&activations);
        assert!(best.iter().zip(&plain).all(|(best, plain)| (best - plain).abs() < 1e-4));
        #[cfg(target_arch = "x86_64")]
        if let Some(narrow) = pulp::x86::V3::try_new() {
            let narrow = Matrix::pack_for(Arch::V3(narrow), &values, 70, 50).multiply(&activations);
            assert!(best.iter().zip(&narrow).all(|(best, narrow)| best.to_bits() == narrow.to_bits()));
        }
    }

    #[test]
    fn gives_its_rows_back() {
        let values = random(37 * 11, 5);
        let matrix = Matrix::pack(&values, 37, 11);
        for (row, expected) in values.chunks(11).enumerate() {
            let mut out = [0.0; 11];
            matrix.copy_row(row, &mut out);
            assert_eq!(out, expected);
        }
        let mut untouched = [7.0; 11];
        matrix.copy_row(37, &mut untouched);
        assert_eq!(untouched, [7.0; 11]);
    }
}
