//! Sums while an evaluation runs.

use super::{logits::Difference, report::Effect};

/// Of the output.
#[derive(Debug, Clone, Default)]
pub(super) struct Output {
    divergence: f64,
    agreeing: usize,
    surprise: f64,
    positions: usize,
}

impl Output {
    pub(super) fn add(&mut self, difference: &Difference) {
        self.divergence += difference.divergence;
        self.agreeing += usize::from(difference.agrees);
        self.surprise += difference.surprise;
        self.positions += 1;
    }

    /// `surprise` is the reference's, mean.
    pub(super) fn effect(&self, surprise: f64) -> Effect {
        let count = self.positions.max(1) as f64;
        Effect {
            kl: self.divergence / count,
            top1: self.agreeing as f64 / count,
            perplexity: (self.surprise / count).exp(),
            perplexity_ratio: (self.surprise / count - surprise).exp(),
        }
    }
}

/// Of what crosses a boundary.
#[derive(Debug, Clone, Default)]
pub(super) struct Crossings {
    cosines: Vec<f32>,
    errors: Vec<f32>,
    mean_cosine: f64,
    centred_cosine: f64,
    pub(super) bytes: usize,
    pub(super) escaped: usize,
    pub(super) positions: usize,
}

impl Crossings {
    /// Adds an ordinary position; `mean` is empty if none is known.
    pub(super) fn add(&mut self, mean: &[f32], residual: &[f32], decoded: &[f32]) {
        let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
        let (mut cxx, mut cyy, mut cxy, mut mm, mut xm, mut error) = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
        for (index, (x, y)) in residual.iter().zip(decoded).enumerate() {
            let m = f64::from(mean.get(index).copied().unwrap_or_default());
            let (x, y) = (f64::from(*x), f64::from(*y));
            (xx, yy, xy) = (xx + x * x, yy + y * y, xy + x * y);
            (mm, xm) = (mm + m * m, xm + x * m);
            error += (x - y) * (x - y);
            let (x, y) = (x - m, y - m);
            (cxx, cyy, cxy) = (cxx + x * x, cyy + y * y, cxy + x * y);
        }
        let cosine = |xy: f64, xx: f64, yy: f64| if xx * yy > 0.0 { xy / (xx * yy).sqrt() } else { 0.0 };
        self.cosines.push(cosine(xy, xx, yy) as f32);
        self.errors.push(if xx > 0.0 { (error / xx).sqrt() as f32 } else { 0.0 });
        self.mean_cosine += cosine(xm, xx, mm);
        self.centred_cosine += cosine(cxy, cxx, cyy);
    }

    pub(super) fn cosine(&self) -> (f64, f64) {
        (mean(&self.cosines), percentile(&self.cosines, 0.01))
    }

    pub(super) fn error(&self) -> (f64, f64) {
        (mean(&self.errors), percentile(&self.errors, 0.99))
    }

    /// Cosine of the mean alone, and centred cosine.
    pub(super) fn about_mean(&self) -> (f64, f64) {
        let count = self.cosines.len().max(1) as f64;
        (self.mean_cosine / count, self.centred_cosine / count)
    }
}

fn mean(values: &[f32]) -> f64 {
    values.iter().copied().map(f64::from).sum::<f64>() / values.len().max(1) as f64
}

/// The value at a share of the way through the sorted values; 0 for none.
fn percentile(values: &[f32], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    let index = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(index).copied().map_or(0.0, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossings_by_hand() {
        let mut crossings = Crossings::default();
        crossings.add(&[1.0, 0.0], &[1.0, 1.0], &[1.0, 0.5]);
        let near = |got: f64, expected: f64| assert!((got - expected).abs() < 1e-6, "{got} {expected}");
        near(crossings.cosine().0, 1.5 / (2.0 * 1.25_f64).sqrt());
        near(crossings.error().0, 0.125_f64.sqrt());
        near(crossings.about_mean().0, 0.5_f64.sqrt());
        near(crossings.about_mean().1, 1.0);
        crossings.add(&[], &[0.0, 2.0], &[0.0, 1.0]);
        near(crossings.error().1, 0.5);
    }

    #[test]
    fn percentiles() {
        let values: Vec<f32> = (0..101).rev().map(|value| value as f32).collect();
        assert_eq!((percentile(&values, 0.01), percentile(&values, 0.99)), (1.0, 99.0));
        assert_eq!(percentile(&[], 0.5), 0.0);
    }

    #[test]
    fn effects() {
        let mut output = Output::default();
        output.add(&Difference { divergence: 0.5, agrees: true, best: 0, surprise: 2.0 });
        output.add(&Difference { divergence: 0.1, agrees: false, best: 0, surprise: 4.0 });
        let effect = output.effect(1.0);
        assert!((effect.kl - 0.3).abs() < 1e-9 && (effect.top1 - 0.5).abs() < 1e-9);
        assert!((effect.perplexity.ln() - 3.0).abs() < 1e-9 && (effect.perplexity_ratio.ln() - 2.0).abs() < 1e-9);
    }
}
