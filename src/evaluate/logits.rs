//! Two distributions of the next token, compared.

use rayon::prelude::*;

use crate::model::head::argmax;

/// The logits of some positions, `[seq, vocab]`, and the logarithm of each position's sum of exponentials.
#[derive(Debug)]
pub(super) struct Distributions {
    logits: Vec<f32>,
    log_sums: Vec<f64>,
    vocab: usize,
}

/// How a distribution differs from the reference at one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Difference {
    /// Kullback-Leibler divergence from the reference, in nats.
    pub(super) divergence: f64,
    /// Whether both have the same most likely token.
    pub(super) agrees: bool,
    /// The most likely token.
    pub(super) best: u32,
    /// How unexpected the token of the text is, in nats.
    pub(super) surprise: f64,
}

impl Distributions {
    pub(super) fn new(logits: Vec<f32>, vocab: usize) -> Self {
        let log_sums = logits.par_chunks(vocab).map(log_sum).collect();
        Self { logits, log_sums, vocab }
    }

    pub(super) fn best(&self, position: usize) -> u32 {
        argmax(self.row(position))
    }

    fn row(&self, position: usize) -> &[f32] {
        self.logits.get(position * self.vocab..(position + 1) * self.vocab).unwrap_or_default()
    }

    pub(super) fn surprise(&self, position: usize, token: u32) -> f64 {
        let log_sum = self.log_sums.get(position).copied().unwrap_or_default();
        log_sum - self.row(position).get(token as usize).copied().map_or(0.0, f64::from)
    }

    /// Compares the positions from `from` on with other logits, `[seq, vocab]`. `next` gives the token that follows each.
    pub(super) fn compare(&self, from: usize, logits: &[f32], next: impl Fn(usize) -> u32 + Sync) -> Vec<Difference> {
        let one = |(index, row): (usize, &[f32])| {
            let position = from + index;
            let (own, own_log_sum) = (self.row(position), self.log_sums.get(position).copied().unwrap_or_default());
            let log_sum = log_sum(row);
            let mut divergence = 0.0;
            for (own, other) in own.iter().zip(row) {
                let own = f64::from(*own) - own_log_sum;
                divergence += own.exp() * (own - (f64::from(*other) - log_sum));
            }
            let best = argmax(row);
            let token = row.get(next(position) as usize).copied().map_or(0.0, f64::from);
            Difference { divergence, agrees: best == argmax(own), best, surprise: log_sum - token }
        };
        logits.par_chunks(self.vocab).enumerate().map(one).collect()
    }
}

fn log_sum(row: &[f32]) -> f64 {
    let highest = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    highest + row.iter().map(|logit| (f64::from(*logit) - highest).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_by_hand() {
        // Probabilities 3/4 and 1/4 against 1/2 and 1/2.
        let own = Distributions::new(vec![3_f32.ln(), 0.0, 0.0, 5.0], 2);
        let [one] = *own.compare(0, &[7.0, 7.0], |_| 1) else { panic!() };
        let expected = 0.75 * 1.5_f64.ln() + 0.25 * 0.5_f64.ln();
        assert!((one.divergence - expected).abs() < 1e-7, "{one:?}");
        assert!((one.surprise - 2_f64.ln()).abs() < 1e-7);
        assert!(one.agrees && one.best == 0);
        assert!((own.surprise(0, 0) - (4.0_f64 / 3.0).ln()).abs() < 1e-7);
        let [other] = *own.compare(1, &[9.0, 0.0], |_| 0) else { panic!() };
        assert!(!other.agrees && own.best(1) == 1);
    }
}
