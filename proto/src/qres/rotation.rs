//! The rotation that spreads a residual's few large values over all of its coordinates. Spec: `proto/spec-qres.md`.
//!
//! Two rounds of: signs, a permutation, then the Walsh-Hadamard transform in blocks. Signs and permutations come out of
//! SplitMix64 from a seed, so both sides make the same rotation from 4 bytes. It is orthogonal up to a factor that is a
//! power of two, so that scaling is exact; every operation is an f32 addition or subtraction in a fixed order.

use alloc::{vec, vec::Vec};

/// A rotation of residuals of one width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rotation {
    seed: u32,
    block: usize,
    rounds: [Round; 2],
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Round {
    /// `source[j]`: which coordinate comes to place j; its top bit says that the sign turns.
    source: Vec<u32>,
}

/// Marks a coordinate whose sign turns.
const NEGATIVE: u32 = 1 << 31;

/// The largest width of a rotation.
pub const MAX_WIDTH: usize = 1 << 24;

struct SplitMix64(u64);

impl SplitMix64 {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Round {
    fn new(random: &mut SplitMix64, d: usize) -> Self {
        // First the signs, 64 from each number, the least significant bit first.
        let mut signs = Vec::with_capacity(d);
        while signs.len() < d {
            let word = random.next();
            signs.extend((0..64).map(|bit| word >> bit & 1 == 1).take(d.saturating_sub(signs.len())));
        }
        // Then Fisher and Yates, from the last place down; a 32-bit number scaled to the places that are left.
        let mut source: Vec<u32> = (0..d as u32).collect();
        for last in (1..d).rev() {
            let scaled = (random.next() >> 32).wrapping_mul((last as u64).wrapping_add(1)) >> 32;
            source.swap(last, scaled as usize);
        }
        for place in &mut source {
            if signs.get(*place as usize) == Some(&true) {
                *place |= NEGATIVE;
            }
        }
        Self { source }
    }

    #[inline(always)]
    fn forward(&self, from: &[f32], to: &mut [f32]) {
        for (value, source) in to.iter_mut().zip(&self.source) {
            let taken = from.get((source & !NEGATIVE) as usize).copied().unwrap_or_default();
            *value = f32::from_bits(taken.to_bits() ^ (source & NEGATIVE));
        }
    }

    #[inline(always)]
    fn backward(&self, from: &[f32], to: &mut [f32]) {
        for (value, source) in from.iter().zip(&self.source) {
            if let Some(place) = to.get_mut((source & !NEGATIVE) as usize) {
                *place = f32::from_bits(value.to_bits() ^ (source & NEGATIVE));
            }
        }
    }
}

impl Rotation {
    /// The rotation of width `d` from a seed; `None` for 0 or more than [`MAX_WIDTH`].
    #[must_use]
    pub fn new(d: usize, seed: u32) -> Option<Self> {
        if d == 0 || d > MAX_WIDTH {
            return None;
        }
        let mut random = SplitMix64(u64::from(seed));
        let rounds = [Round::new(&mut random, d), Round::new(&mut random, d)];
        Some(Self { seed, block: 1 << d.trailing_zeros(), rounds })
    }

    /// The width.
    #[must_use]
    pub fn width(&self) -> usize {
        self.rounds[0].source.len()
    }

    /// What it was made from.
    #[must_use]
    pub const fn seed(&self) -> u32 {
        self.seed
    }

    /// The block length of the transform: the largest power of two that divides the width. Both directions together
    /// multiply by its square.
    #[must_use]
    pub const fn block(&self) -> usize {
        self.block
    }

    /// Rotates in place, and multiplies by [`Self::block`]. Buffers have the rotation's width.
    #[inline(always)]
    pub(super) fn forward(&self, values: &mut [f32], scratch: &mut [f32]) {
        let [first, second] = &self.rounds;
        first.forward(values, scratch);
        transform(scratch, self.block);
        second.forward(scratch, values);
        transform(values, self.block);
    }

    /// Rotates back in place, and multiplies by [`Self::block`].
    #[inline(always)]
    pub(super) fn backward(&self, values: &mut [f32], scratch: &mut [f32]) {
        let [first, second] = &self.rounds;
        transform(values, self.block);
        second.backward(values, scratch);
        transform(scratch, self.block);
        first.backward(scratch, values);
    }

    /// A buffer for [`Self::forward`] and [`Self::backward`].
    pub(super) fn scratch(&self) -> Vec<f32> {
        vec![0.0; self.width()]
    }
}

/// The Walsh-Hadamard transform of each block, without scaling: butterflies of 1, 2, 4, … places apart.
#[inline(always)]
fn transform(values: &mut [f32], block: usize) {
    let mut apart = 1_usize;
    if block >= 8 {
        for eight in values.as_chunks_mut::<8>().0 {
            *eight = near::<4>(near::<2>(near::<1>(*eight)));
        }
        apart = 8;
        // Two steps in one go through memory; each value goes through the same additions as in two.
        while apart.saturating_mul(4) <= block {
            for four in values.chunks_exact_mut(apart.saturating_mul(4)) {
                let (low, high) = four.split_at_mut(apart.saturating_mul(2));
                let ((a, b), (c, d)) = (low.split_at_mut(apart), high.split_at_mut(apart));
                let (a, b, c, d) = (a.as_chunks_mut().0, b.as_chunks_mut().0, c.as_chunks_mut().0, d.as_chunks_mut().0);
                for ((a, b), (c, d)) in a.iter_mut().zip(b).zip(c.iter_mut().zip(d)) {
                    let ((sum, difference), (other_sum, other_difference)) = (pair(*a, *b), pair(*c, *d));
                    (*a, *c) = pair(sum, other_sum);
                    (*b, *d) = pair(difference, other_difference);
                }
            }
            apart = apart.saturating_mul(4);
        }
    }
    while apart < block {
        for two in values.chunks_exact_mut(apart.saturating_mul(2)) {
            let (low, high) = two.split_at_mut(apart);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        apart = apart.saturating_mul(2);
    }
}

/// One step within eight neighbours.
#[inline(always)]
#[expect(clippy::indexing_slicing, reason = "both places are under 8")]
fn near<const APART: usize>(values: [f32; 8]) -> [f32; 8] {
    core::array::from_fn(|place| {
        let (value, other) = (values[place], values[place ^ APART]);
        if place & APART == 0 { value + other } else { other - value }
    })
}

/// Sums and differences.
#[inline(always)]
#[expect(clippy::indexing_slicing, reason = "all places are under 8")]
fn pair(a: [f32; 8], b: [f32; 8]) -> ([f32; 8], [f32; 8]) {
    (core::array::from_fn(|place| a[place] + b[place]), core::array::from_fn(|place| a[place] - b[place]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back_is_the_square_of_the_block() {
        for d in [1_usize, 3, 8, 64, 96, 576, 3584] {
            let rotation = Rotation::new(d, 7).unwrap();
            assert_eq!((rotation.width(), rotation.block()), (d, 1 << d.trailing_zeros()));
            let whole: Vec<f32> = (0..d).map(|n| ((n * 37) % 101) as f32 - 50.0).collect();
            let (mut values, mut scratch) = (whole.clone(), rotation.scratch());
            rotation.forward(&mut values, &mut scratch);
            let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>();
            let scale = (rotation.block() as f64).powi(2);
            assert!((norm(&values) / norm(&whole) / scale - 1.0).abs() < 1e-6);
            rotation.backward(&mut values, &mut scratch);
            // Small whole numbers are exact all the way.
            let back: Vec<f32> = values.iter().map(|v| v / (rotation.block() * rotation.block()) as f32).collect();
            assert!(back.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-2), "{d}");
        }
        assert!(Rotation::new(0, 1).is_none() && Rotation::new(MAX_WIDTH + 1, 1).is_none());
    }

    #[test]
    fn one_large_value_is_spread_and_seeds_differ() {
        let rotation = Rotation::new(576, 1).unwrap();
        let mut values = [0.0; 576];
        values[17] = 64.0;
        rotation.forward(&mut values, &mut rotation.scratch());
        let largest = values.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
        assert!(largest <= 64.0 * 64.0 / 2.0, "{largest}");
        assert!(values.iter().filter(|v| **v != 0.0).count() > 300);
        assert_ne!(Rotation::new(576, 1), Rotation::new(576, 2));
        assert_eq!(Rotation::new(576, 1), Some(rotation));
    }

    #[test]
    fn the_generator_is_split_mix() {
        // The first outputs for seed 1234567, as its author's C code gives them.
        let mut random = SplitMix64(1_234_567);
        let first = [random.next(), random.next(), random.next()];
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
