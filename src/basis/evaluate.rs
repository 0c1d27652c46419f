//! How well a basis represents residuals that it was not fitted to.
//!
//! The figures are those that do not flatter: per position, without outliers, and beside what the mean alone scores. A
//! cosine near 1 still says little about the model's output; `aeonctl evaluate` measures that.

use aeon_proto::kernel;
use ndarray::ArrayView2;

use super::{
    fit::{OUTLIER_FACTOR, norms},
    metadata::Fidelity,
    pca::FittedLayer,
};

/// Reconstructs `rows` `[n, d]` from the first k components, for each of `ks`, by the arithmetic of the wire, and says
/// how near the results are. Positions of over four times `median_norm` are left out, as they are sent another way.
///
/// `None` if the widths differ, a `k` is over the basis's, or no position is left.
#[must_use]
pub fn evaluate(
    layer: &FittedLayer,
    median_norm: f32,
    rows: ArrayView2<'_, f32>,
    ks: &[usize],
) -> Option<Vec<Fidelity>> {
    let mean = layer.mean.as_slice()?;
    let basis = layer.components.as_slice()?;
    let (d, most) = (mean.len(), layer.components.nrows());
    if rows.ncols() != d || ks.iter().any(|k| *k > most) {
        return None;
    }
    let limit = if median_norm > 0.0 { median_norm * OUTLIER_FACTOR } else { f32::INFINITY };
    let mut sums = vec![Sums::default(); ks.len()];
    let mut count = 0_u64;
    let (mut components, mut lifted) = (vec![0.0; most], vec![0.0; d]);
    for (row, norm) in rows.rows().into_iter().zip(norms(rows)) {
        if norm > limit {
            continue;
        }
        let row = row.to_vec();
        kernel::project(mean, basis, &row, &mut components).ok()?;
        for (k, sums) in ks.iter().zip(&mut sums) {
            kernel::lift(mean, basis.get(..k * d)?, components.get(..*k)?, &mut lifted).ok()?;
            sums.add(mean, &row, &lifted);
        }
        count += 1;
    }
    if count == 0 {
        return None;
    }
    Some(ks.iter().zip(&sums).map(|(k, sums)| sums.fidelity(*k, count as f64)).collect())
}

/// Sums over positions, of f64 sums over coordinates.
#[derive(Debug, Clone, Default)]
struct Sums {
    cosine: f64,
    centred_cosine: f64,
    energy: f64,
    centred_energy: f64,
    error: f64,
}

impl Sums {
    fn add(&mut self, mean: &[f32], row: &[f32], lifted: &[f32]) {
        let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
        let (mut cxx, mut cyy, mut cxy, mut error) = (0.0, 0.0, 0.0, 0.0);
        for ((mean, x), y) in mean.iter().zip(row).zip(lifted) {
            let (mean, x, y) = (f64::from(*mean), f64::from(*x), f64::from(*y));
            (xx, yy, xy) = (xx + x * x, yy + y * y, xy + x * y);
            error += (x - y) * (x - y);
            let (x, y) = (x - mean, y - mean);
            (cxx, cyy, cxy) = (cxx + x * x, cyy + y * y, cxy + x * y);
        }
        let cosine = |xy: f64, xx: f64, yy: f64| if xx * yy > 0.0 { xy / (xx * yy).sqrt() } else { 0.0 };
        self.cosine += cosine(xy, xx, yy);
        self.centred_cosine += cosine(cxy, cxx, cyy);
        self.energy += xx;
        self.centred_energy += cxx;
        self.error += error;
    }

    fn fidelity(&self, k: usize, count: f64) -> Fidelity {
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        // Six digits, so that the text of a basis file does not depend on the last bits.
        let round = |value: f64| ((value * 1e6).round() / 1e6) as f32;
        Fidelity {
            k: u32::try_from(k).unwrap_or(u32::MAX),
            explained: round(1.0 - share(self.error, self.centred_energy)),
            cosine: round(self.cosine / count),
            centred_cosine: round(self.centred_cosine / count),
            relative_error: round(share(self.error, self.energy).sqrt()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ndarray::array;

    use super::*;

    #[test]
    fn figures_by_hand() {
        let layer = FittedLayer {
            boundary: 0,
            mean: array![1.0, 0.0, 0.0],
            components: Arc::new(array![[0.0, 1.0, 0.0]]),
            variance: array![1.0, 2.0],
        };
        // The last row is an outlier.
        let rows = array![[1.0, 3.0, 4.0], [1.0, -3.0, 4.0], [100.0, 0.0, 0.0]];
        let figures = evaluate(&layer, 5.0, rows.view(), &[0, 1]).unwrap();
        let near = |got: f32, expected: f32| assert!((got - expected).abs() < 1e-5, "{got} {expected}");
        near(figures[0].explained, 0.0);
        near(figures[0].cosine, 1.0 / 26_f32.sqrt());
        near(figures[0].centred_cosine, 0.0);
        near(figures[0].relative_error, (25_f32 / 26.0).sqrt());
        near(figures[1].explained, 9.0 / 25.0);
        near(figures[1].cosine, 10.0 / (26_f32 * 10.0).sqrt());
        near(figures[1].centred_cosine, 0.6);
        near(figures[1].relative_error, (16_f32 / 26.0).sqrt());
        assert_eq!(evaluate(&layer, 5.0, rows.view(), &[2]), None);
        assert_eq!(evaluate(&layer, 0.1, rows.view(), &[1]), None);
    }
}
