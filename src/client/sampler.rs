//! Choosing the next token from the best few logits.

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token; higher is bolder.
    pub temperature: f32,
    /// Only the most likely tokens that make up this share of the probability are drawn from.
    pub top_p: f32,
    /// The same seed gives the same text on the same logits.
    pub seed: u64,
}

/// Draws tokens; the same seed gives the same choices on every machine.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// A sampler at the start of its sequence of random numbers.
    #[must_use]
    pub fn new(sampling: Sampling) -> Self {
        Self { sampling, rng: ChaCha8Rng::seed_from_u64(sampling.seed) }
    }

    /// Goes on where a sampler with the same seed is after so many tokens.
    pub fn skip(&mut self, tokens: usize) {
        if !self.is_greedy() {
            (0..tokens).for_each(|_| {
                uniform(&mut self.rng);
            });
        }
    }

    /// Whether the most likely token is taken, so that no logits are needed.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.sampling.temperature <= 0.0
    }

    /// Draws one of `ids` by their `logits`, which are in descending order. `None` if there are none.
    pub fn choose(&mut self, ids: &[u32], logits: &[f32]) -> Option<u32> {
        let (first, highest) = (*ids.first()?, *logits.first()?);
        if self.is_greedy() {
            return Some(first);
        }
        let temperature = f64::from(self.sampling.temperature);
        let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - highest) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = 0.0;
        let mut count = 0;
        for weight in &weights {
            kept += weight;
            count += 1;
            if kept >= f64::from(self.sampling.top_p) * total {
                break;
            }
        }
        let mut draw = uniform(&mut self.rng) * kept;
        for (id, weight) in ids.iter().zip(&weights).take(count) {
            draw -= weight;
            if draw < 0.0 {
                return Some(*id);
            }
        }
        ids.get(count - 1).copied()
    }
}

fn uniform(rng: &mut impl Rng) -> f64 {
    rng.random::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(temperature: f32, top_p: f32, seed: u64) -> Vec<u32> {
        let mut sampler = Sampler::new(Sampling { temperature, top_p, seed });
        (0..400).map(|_| sampler.choose(&[7, 8, 9], &[2.0, 1.0, -5.0]).unwrap()).collect()
    }

    #[test]
    fn greedy_takes_the_first_and_a_seed_repeats() {
        assert!(draws(0.0, 1.0, 1).iter().all(|id| *id == 7));
        assert_eq!(draws(0.8, 1.0, 5), draws(0.8, 1.0, 5));
        assert_ne!(draws(0.8, 1.0, 5), draws(0.8, 1.0, 6));
    }

    #[test]
    fn a_sampler_that_skips_goes_on_where_another_is() {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, top_p: 0.9, seed: 4 };
            let mut sampler = Sampler::new(sampling);
            sampler.skip(150);
            let rest: Vec<u32> = (0..250).map(|_| sampler.choose(&[7, 8, 9], &[2.0, 1.0, -5.0]).unwrap()).collect();
            assert_eq!(rest, draws(temperature, 0.9, 4)[150..]);
        }
    }

    #[test]
    fn frequencies_follow_the_logits_and_top_p_cuts_the_tail() {
        let count = |draws: &[u32], id| draws.iter().filter(|draw| **draw == id).count();
        let all = draws(1.0, 1.0, 3);
        // softmax of (2, 1, -5) is (0.731, 0.269, 0.0007)
        assert!((250..330).contains(&count(&all, 7)), "{}", count(&all, 7));
        assert!(count(&draws(5.0, 1.0, 3), 9) > 0);
        assert_eq!(count(&draws(5.0, 0.8, 3), 9), 0);
        assert_eq!(count(&draws(1.0, 0.5, 3), 7), 400);
    }

    #[test]
    fn nothing_to_choose_from_gives_nothing() {
        assert_eq!(Sampler::new(Sampling { temperature: 1.0, top_p: 0.9, seed: 0 }).choose(&[], &[]), None);
    }
}
