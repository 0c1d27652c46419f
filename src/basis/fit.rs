//! Fitting a basis to residuals: mean, principal components, and how much each of them explains.
//!
//! `aeonctl basis fit` calls this with what [`super::residuals`] read. Sums are in f64. One basis can serve a group of
//! boundaries: each keeps its own mean, and each counts the same whatever its scale, since residuals grow from layer to
//! layer. Positions of outlying norm (the first of a text, some delimiters) are left out unless asked for: a handful of
//! them would be most of the variance, and they are sent uncompressed anyway.
//!
//! The same input gives the same subspace everywhere, with the same signs; the last bits depend on the processor and its
//! number of cores, so a basis that is fitted again has another fingerprint.

use aeon_proto::methodology::{KError, KRule};
use ndarray::{Array1, Array2, ArrayView2};

use super::{
    decompose::{Centred, Decomposed, Part},
    metadata::BoundaryStatistics,
};

/// Norms over this many times the median are outliers.
pub const OUTLIER_FACTOR: f32 = 4.0;

/// How a basis is fitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FitOptions {
    /// How many components.
    pub k_rule: KRule,
    /// Whether positions of outlying norm are left out.
    pub leave_out_outliers: bool,
    /// Widths over this are decomposed by random projection.
    pub randomized_above: usize,
    /// Seed of the random projection.
    pub seed: u64,
}

impl FitOptions {
    /// The usual options with a rule for `k`.
    #[must_use]
    pub const fn new(k_rule: KRule) -> Self {
        Self { k_rule, leave_out_outliers: true, randomized_above: 8192, seed: 0 }
    }
}

/// Residuals of one boundary.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// The number of layers already applied.
    pub boundary: u32,
    /// The residuals, `[n, d]`.
    pub values: ArrayView2<'a, f32>,
}

/// What a fit is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Means, norms and total variance.
    Moments,
    /// Sums of products, exact or projected.
    Products,
    /// Eigenvectors; one step that takes its time.
    Eigenvectors,
    /// The variance of each member of a group along the shared components.
    Variances,
}

/// How far a fit is: `done` of `total` steps of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Steps done.
    pub done: u64,
    /// Steps in all.
    pub total: u64,
}

/// Told about progress, on the thread that fits.
pub type OnProgress<'a> = dyn FnMut(Progress) + 'a;

/// A basis for one boundary or a group of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// The components, `[k, d]`, by descending variance (for a group: of all members together). The value of largest
    /// magnitude of each is positive.
    pub components: Array2<f32>,
    /// The boundaries, in the order given.
    pub members: Vec<Member>,
    /// Whether the decomposition was exact or by random projection.
    pub exact: bool,
}

/// What is a boundary's own.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// The number of layers already applied.
    pub boundary: u32,
    /// The mean residual, `[d]`.
    pub mean: Array1<f32>,
    /// The variance along each component, then the total (divided by n - 1): `[k + 1]`.
    pub variance: Array1<f32>,
    /// Counts and norms.
    pub statistics: BoundaryStatistics,
}

/// Why no basis was fitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// No boundary was given.
    #[error("no residuals to fit to")]
    Nothing,
    /// Too few residuals for a variance.
    #[error("boundary {boundary} has {got} residuals, at least 2 expected")]
    NoVariance {
        /// The boundary.
        boundary: u32,
        /// Residuals given.
        got: usize,
    },
    /// Residuals of another width, or of none.
    #[error("residuals of boundary {boundary} are {got} wide, {expected} expected")]
    Width {
        /// The boundary.
        boundary: u32,
        /// Width of the first boundary.
        expected: usize,
        /// Width of this one.
        got: usize,
    },
    /// A NaN or infinity.
    #[error("residual {row} of boundary {boundary} holds a NaN or an infinity")]
    NonFinite {
        /// The boundary.
        boundary: u32,
        /// Which residual.
        row: usize,
    },
    /// Fewer residuals than components.
    #[error("{got} residuals cannot give {k} components; capture more, at least {} and better ten times as many", .k + 1)]
    TooFewRows {
        /// Components wanted.
        k: usize,
        /// Residuals used.
        got: usize,
    },
    /// The rule for `k` gives none.
    #[error("the rule for k does not apply")]
    K(#[from] KError),
    /// The eigenvectors could not be computed.
    #[error("the eigendecomposition did not converge")]
    Decomposition,
}

/// Fits a basis to the residuals of one boundary.
///
/// Takes `n * d * d` multiplications and about `10 * d * d` more for the eigenvectors, and `24 * d * d` bytes; with random
/// projection `n * d * k * 20` and `30 * d * k`.
///
/// # Errors
/// See [`FitError`].
pub fn fit_pca(rows: Rows<'_>, options: &FitOptions, on_progress: &mut OnProgress<'_>) -> Result<Fit, FitError> {
    fit_group(&[rows], options, on_progress)
}

/// Fits one basis to the residuals of several boundaries.
///
/// # Errors
/// See [`FitError`].
pub fn fit_group(group: &[Rows<'_>], options: &FitOptions, on_progress: &mut OnProgress<'_>) -> Result<Fit, FitError> {
    let d = check(group)?;
    let mut parts = Vec::with_capacity(group.len());
    let mut statistics = Vec::with_capacity(group.len());
    for (done, rows) in group.iter().enumerate() {
        on_progress(Progress { phase: Phase::Moments, done: done as u64, total: group.len() as u64 });
        let (part, counts) = moments(rows, options.leave_out_outliers)?;
        parts.push(part);
        statistics.push(counts);
    }
    let centred = Centred::new(parts, d);
    let choose = |values: &[f64], total: f64| choose_k(options.k_rule, d, centred.degrees(), values, total);
    let Decomposed { components, values } = if d > options.randomized_above {
        centred.randomized(options.k_rule, options.seed, &choose, on_progress)?
    } else {
        centred.exact(&choose, on_progress)?
    };
    let along = match group {
        [_] => vec![values],
        _ => centred.variances(&components, on_progress),
    };
    let members = group.iter().zip(centred.parts()).zip(along).zip(statistics);
    let members = members.map(|(((rows, part), along), statistics)| Member {
        boundary: rows.boundary,
        mean: part.mean.iter().map(|value| *value as f32).collect(),
        variance: along.into_iter().chain([part.total]).map(|value| value as f32).collect(),
        statistics,
    });
    Ok(Fit { members: members.collect(), components, exact: d <= options.randomized_above })
}

/// Checks the shapes and returns the width.
fn check(group: &[Rows<'_>]) -> Result<usize, FitError> {
    let expected = group.first().ok_or(FitError::Nothing)?.values.ncols();
    for rows in group {
        let (boundary, got) = (rows.boundary, rows.values.ncols());
        if got != expected || got == 0 || u32::try_from(got).is_err() {
            return Err(FitError::Width { boundary, expected: expected.max(1), got });
        }
        if rows.values.nrows() < 2 {
            return Err(FitError::NoVariance { boundary, got: rows.values.nrows() });
        }
    }
    Ok(expected)
}

/// Finds outliers, the mean and the total variance of the rest.
fn moments<'a>(rows: &Rows<'a>, leave_out: bool) -> Result<(Part<'a>, BoundaryStatistics), FitError> {
    let (boundary, values) = (rows.boundary, rows.values);
    let norms = norms(values);
    if let Some(row) = norms.iter().position(|norm| !norm.is_finite()) {
        return Err(FitError::NonFinite { boundary, row });
    }
    let median_norm = median(&norms);
    let limit = if leave_out && median_norm > 0.0 { median_norm * OUTLIER_FACTOR } else { f32::INFINITY };
    let kept: Vec<usize> = (0..norms.len()).filter(|row| norms.get(*row).is_some_and(|norm| *norm <= limit)).collect();
    if kept.len() < 2 {
        return Err(FitError::NoVariance { boundary, got: kept.len() });
    }
    let statistics =
        BoundaryStatistics { rows: norms.len() as u64, outliers: (norms.len() - kept.len()) as u64, median_norm };
    Ok((Part::new(values, kept), statistics))
}

/// The norm of each row.
pub(super) fn norms(values: ArrayView2<'_, f32>) -> Vec<f32> {
    let norm =
        |row: ndarray::ArrayView1<'_, f32>| row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    values.rows().into_iter().map(|row| norm(row) as f32).collect()
}

/// The middle of the values, the lower one of two; 0 for none.
pub(super) fn median(values: &[f32]) -> f32 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    sorted.len().checked_sub(1).and_then(|last| sorted.get(last / 2)).copied().unwrap_or(0.0)
}

/// The number of components that the rule gives for variances `values`, in falling order, of `total`.
fn choose_k(rule: KRule, d: usize, degrees: usize, values: &[f64], total: f64) -> Result<usize, FitError> {
    let parts: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    let hidden_dim = u32::try_from(d).unwrap_or(u32::MAX);
    let k = match rule.k_by_variance(hidden_dim, &parts, total as f32) {
        // All there are, and the rest is rounding.
        Err(KError::NotCovered { .. }) if values.len() >= d.min(degrees) => d.min(degrees),
        k => usize::try_from(k?).unwrap_or(usize::MAX),
    };
    match k <= degrees {
        true => Ok(k),
        false => Err(FitError::TooFewRows { k, got: degrees + 1 }),
    }
}
