//! The numerical part of a fit: centred residuals, their covariance, and its leading eigenvectors.
//!
//! Exact: the covariance is summed over blocks of rows (its lower half, by faer) and decomposed whole. By random
//! projection: N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
//! algorithm 4.4 with [`POWER_STEPS`] steps, on the same blocks, so that the covariance is never formed. All in f64.

use aeon_proto::methodology::{KError, KRule};
use faer::{
    Accum, Mat, MatRef, Side, get_global_parallelism,
    linalg::matmul::{
        matmul,
        triangular::{self, BlockStructure},
    },
};
use ndarray::{Array2, ArrayView2};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::fit::{FitError, OnProgress, Phase, Progress};

/// Rows of a block: long enough that a product is worth its overhead, at 8,192 values 32 MiB.
const BLOCK_ROWS: usize = 512;
/// Directions that a random projection takes beyond those wanted.
const OVERSAMPLING: usize = 32;
/// Times that the covariance is applied to the random directions: errors shrink with the 13th power of the ratio of
/// variances inside and outside.
const POWER_STEPS: usize = 6;
/// Directions that a random projection begins with where the rule for `k` does not say how many.
const FIRST_GUESS: usize = 256;

/// The residuals of one boundary that a fit uses.
#[derive(Debug)]
pub(super) struct Part<'a> {
    values: ArrayView2<'a, f32>,
    kept: Vec<usize>,
    /// Their mean.
    pub(super) mean: Vec<f64>,
    /// Their total variance.
    pub(super) total: f64,
}

impl<'a> Part<'a> {
    /// Takes the rows `kept`, at least two.
    pub(super) fn new(values: ArrayView2<'a, f32>, kept: Vec<usize>) -> Self {
        let count = kept.len() as f64;
        let mut mean = vec![0.0; values.ncols()];
        for row in &kept {
            for (sum, value) in mean.iter_mut().zip(values.row(*row)) {
                *sum += f64::from(*value);
            }
        }
        mean.iter_mut().for_each(|sum| *sum /= count);
        let energy = |row: &usize| -> f64 {
            values.row(*row).iter().zip(&mean).map(|(value, mean)| (f64::from(*value) - mean).powi(2)).sum()
        };
        let total = kept.iter().map(energy).sum::<f64>() / (count - 1.0);
        Self { values, kept, mean, total }
    }

    /// Degrees of freedom: the rank that its covariance can have.
    fn degrees(&self) -> usize {
        self.kept.len().saturating_sub(1)
    }
}

/// Components and the variance along each.
#[derive(Debug)]
pub(super) struct Decomposed {
    /// `[k, d]`
    pub(super) components: Array2<f32>,
    /// `[k]`, descending
    pub(super) values: Vec<f64>,
}

/// Chooses `k` from leading variances and the total.
pub(super) type ChooseK<'a> = dyn Fn(&[f64], f64) -> Result<usize, FitError> + 'a;

/// All parts of a fit, each about its own mean. Alone, a part is scaled so that products of rows sum to its covariance;
/// in a group, so that each has the total variance 1.
#[derive(Debug)]
pub(super) struct Centred<'a> {
    parts: Vec<Part<'a>>,
    d: usize,
}

impl<'a> Centred<'a> {
    pub(super) const fn new(parts: Vec<Part<'a>>, d: usize) -> Self {
        Self { parts, d }
    }

    pub(super) fn parts(&self) -> &[Part<'a>] {
        &self.parts
    }

    /// The rank that the covariance can have.
    pub(super) fn degrees(&self) -> usize {
        self.parts.iter().map(Part::degrees).sum()
    }

    fn scale(&self, part: &Part<'_>) -> f64 {
        let degrees = part.degrees() as f64;
        match (self.parts.len(), part.total) {
            (1, _) => degrees.sqrt().recip(),
            (_, total) if total > 0.0 => (total * degrees).sqrt().recip(),
            _ => 0.0,
        }
    }

    fn total(&self) -> f64 {
        match &*self.parts {
            [part] => part.total,
            parts => parts.iter().filter(|part| part.total > 0.0).count() as f64,
        }
    }

    fn block_count(&self) -> u64 {
        self.parts.iter().map(|part| part.kept.len().div_ceil(BLOCK_ROWS) as u64).sum()
    }

    /// Hands out the rows of one part in blocks, centred and times `scale`.
    fn blocks(&self, part: &Part<'_>, scale: f64, each: &mut dyn FnMut(MatRef<'_, f64>)) {
        let mut buffer = vec![0.0; BLOCK_ROWS.min(part.kept.len()) * self.d];
        for rows in part.kept.chunks(BLOCK_ROWS) {
            for (row, out) in rows.iter().zip(buffer.chunks_exact_mut(self.d)) {
                for ((out, value), mean) in out.iter_mut().zip(part.values.row(*row)).zip(&part.mean) {
                    *out = (f64::from(*value) - mean) * scale;
                }
            }
            let used = buffer.get(..rows.len() * self.d).unwrap_or_default();
            each(MatRef::from_row_major_slice(used, rows.len(), self.d));
        }
    }

    /// Hands out all blocks of all parts, scaled.
    fn all_blocks(&self, steps: &mut Steps<'_, '_>, each: &mut dyn FnMut(MatRef<'_, f64>)) {
        for part in &self.parts {
            self.blocks(part, self.scale(part), &mut |block| {
                each(block);
                steps.next();
            });
        }
    }

    /// Decomposes the covariance.
    pub(super) fn exact(&self, choose: &ChooseK<'_>, on_progress: &mut OnProgress<'_>) -> Result<Decomposed, FitError> {
        let mut covariance = Mat::<f64>::zeros(self.d, self.d);
        let mut steps = Steps::new(Phase::Products, self.block_count(), on_progress);
        self.all_blocks(&mut steps, &mut |block| {
            triangular::matmul(
                covariance.as_mut(),
                BlockStructure::TriangularLower,
                Accum::Add,
                block.transpose(),
                BlockStructure::Rectangular,
                block,
                BlockStructure::Rectangular,
                1.0,
                get_global_parallelism(),
            );
        });
        on_progress(Progress { phase: Phase::Eigenvectors, done: 0, total: 1 });
        let (values, vectors) = eigen(covariance.as_ref())?;
        let k = choose(&values, self.total())?;
        Ok(leading(&values, vectors.as_ref(), k))
    }

    /// Finds the leading eigenvectors by random projection.
    pub(super) fn randomized(
        &self,
        rule: KRule,
        seed: u64,
        choose: &ChooseK<'_>,
        on_progress: &mut OnProgress<'_>,
    ) -> Result<Decomposed, FitError> {
        let most = self.d.min(self.degrees());
        let mut wanted = match rule.k(u32::try_from(self.d).unwrap_or(u32::MAX)) {
            Err(KError::NeedsVariances) => FIRST_GUESS,
            k => usize::try_from(k?).unwrap_or(usize::MAX),
        };
        if wanted > most && rule.k(1) != Err(KError::NeedsVariances) {
            return Err(FitError::TooFewRows { k: wanted, got: self.degrees() + 1 });
        }
        loop {
            let (values, vectors) = self.project(wanted.saturating_add(OVERSAMPLING).min(most), seed, on_progress)?;
            match choose(values.get(..wanted.min(values.len())).unwrap_or_default(), self.total()) {
                Err(FitError::K(KError::NotCovered { .. })) if wanted < most => {
                    wanted = wanted.saturating_mul(2).min(most)
                }
                k => return Ok(leading(&values, vectors.as_ref(), k?)),
            }
        }
    }

    /// The leading `rank` eigenvalues and eigenvectors, the last of them roughly.
    fn project(
        &self,
        rank: usize,
        seed: u64,
        on_progress: &mut OnProgress<'_>,
    ) -> Result<(Vec<f64>, Mat<f64>), FitError> {
        let total = self.block_count() * (POWER_STEPS as u64 + 1);
        let mut steps = Steps::new(Phase::Products, total, on_progress);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut directions = Mat::from_fn(self.d, rank, |_, _| if rng.random::<bool>() { 1.0 } else { -1.0 });
        for _ in 0..POWER_STEPS {
            directions = self.apply(directions.as_ref(), &mut steps).qr().compute_thin_Q();
        }
        let image = self.apply(directions.as_ref(), &mut steps);
        on_progress(Progress { phase: Phase::Eigenvectors, done: 0, total: 1 });
        let small = directions.transpose() * &image;
        let (values, inner) = eigen(small.as_ref())?;
        Ok((values, &directions * &inner))
    }

    /// The covariance times `[d, rank]`.
    fn apply(&self, directions: MatRef<'_, f64>, steps: &mut Steps<'_, '_>) -> Mat<f64> {
        let mut image = Mat::zeros(self.d, directions.ncols());
        self.all_blocks(steps, &mut |block| {
            let inner = block * directions;
            let parallel = get_global_parallelism();
            matmul(image.as_mut(), Accum::Add, block.transpose(), inner.as_ref(), 1.0, parallel);
        });
        image
    }

    /// The variance of each part along each component.
    pub(super) fn variances(&self, components: &Array2<f32>, on_progress: &mut OnProgress<'_>) -> Vec<Vec<f64>> {
        let k = components.nrows();
        let basis = Mat::from_fn(self.d, k, |j, i| f64::from(components[(i, j)]));
        let mut steps = Steps::new(Phase::Variances, self.block_count(), on_progress);
        let variance = |part: &Part<'_>| {
            let mut sums = vec![0.0; k];
            self.blocks(part, 1.0, &mut |block| {
                let along = block * &basis;
                for (sum, column) in sums.iter_mut().zip(along.col_iter()) {
                    *sum += column.iter().map(|value| value * value).sum::<f64>();
                }
                steps.next();
            });
            sums.into_iter().map(|sum| sum / part.degrees() as f64).collect()
        };
        self.parts.iter().map(variance).collect()
    }
}

/// Eigenvalues, descending and not below 0, and eigenvectors in columns. Only the lower half of `matrix` is read.
fn eigen(matrix: MatRef<'_, f64>) -> Result<(Vec<f64>, Mat<f64>), FitError> {
    let eigen = matrix.self_adjoint_eigen(Side::Lower).map_err(|_| FitError::Decomposition)?;
    let values = eigen.S().column_vector().iter().rev().map(|value| value.max(0.0)).collect();
    Ok((values, eigen.U().reverse_cols().to_owned()))
}

/// The first `k` columns as rows of f32, each with the sign that makes its value of largest magnitude positive.
fn leading(values: &[f64], vectors: MatRef<'_, f64>, k: usize) -> Decomposed {
    let mut components = Array2::zeros((k, vectors.nrows()));
    for (mut row, column) in components.rows_mut().into_iter().zip(vectors.col_iter()) {
        // The first of equal magnitudes.
        let largest = column.iter().fold(0.0_f64, |best, value| if value.abs() > best.abs() { *value } else { best });
        let sign = if largest < 0.0 { -1.0 } else { 1.0 };
        for (out, value) in row.iter_mut().zip(column.iter()) {
            *out = (value * sign) as f32;
        }
    }
    Decomposed { components, values: values.iter().take(k).copied().collect() }
}

/// Counts steps and tells about them.
struct Steps<'p, 'c> {
    progress: Progress,
    on_progress: &'p mut OnProgress<'c>,
}

impl<'p, 'c> Steps<'p, 'c> {
    fn new(phase: Phase, total: u64, on_progress: &'p mut OnProgress<'c>) -> Self {
        let progress = Progress { phase, done: 0, total };
        on_progress(progress);
        Self { progress, on_progress }
    }

    fn next(&mut self) {
        self.progress.done += 1;
        (self.on_progress)(self.progress);
    }
}
