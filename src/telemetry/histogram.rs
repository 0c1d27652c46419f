//! Histograms of durations and of small numbers: one atomic for each bucket.

use std::time::Duration;

use super::Counter;

/// Upper bounds of the buckets in nanoseconds: from a request that is answered at once to a long prefill. About 2.5 apart,
/// which is what a quantile from them is good to.
const BOUNDS: [u64; 20] = [
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    30_000_000_000,
];

/// Upper bounds of the buckets of numbers.
const SIZES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// How often durations fell between which bounds.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [Counter; BOUNDS.len() + 1],
    sum_nanos: Counter,
}

/// What a histogram holds at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Upper bound in seconds, or of numbers (`f64::INFINITY` for the last) and the observations in this bucket alone.
    pub buckets: Vec<(f64, u64)>,
    /// All observations.
    pub count: u64,
    /// All durations together, in seconds, or all numbers.
    pub sum: f64,
}

impl Histogram {
    /// Adds a duration.
    pub fn observe(&self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        // Most stages of most requests are over before the first bound.
        let index = if nanos <= BOUNDS[0] { 0 } else { BOUNDS.partition_point(|bound| *bound < nanos) };
        if let Some(bucket) = self.buckets.get(index) {
            bucket.add_one();
        }
        self.sum_nanos.add(nanos);
    }

    /// What it holds now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let seconds = |nanos: u64| nanos as f64 / 1e9;
        let bounds = BOUNDS.iter().map(|bound| seconds(*bound)).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> =
            bounds.zip(&self.buckets).map(|(bound, bucket)| (bound, bucket.value())).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        Snapshot { buckets, count, sum: seconds(self.sum_nanos.value()) }
    }

    /// Whether nothing was observed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buckets.iter().all(|bucket| bucket.value() == 0)
    }
}

/// How often numbers fell between which bounds.
#[derive(Debug, Default)]
pub struct Sizes {
    buckets: [Counter; SIZES.len() + 1],
    sum: Counter,
}

impl Sizes {
    /// Adds a number.
    pub fn observe(&self, size: usize) {
        if let Some(bucket) = self.buckets.get(SIZES.partition_point(|bound| *bound < size)) {
            bucket.add_one();
        }
        self.sum.add(size as u64);
    }

    /// What it holds now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let bounds = SIZES.iter().map(|bound| *bound as f64).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> =
            bounds.zip(&self.buckets).map(|(bound, bucket)| (bound, bucket.value())).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        Snapshot { buckets, count, sum: self.sum.value() as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::default();
        assert!(histogram.is_empty());
        for nanos in [0, 10_000, 10_001, 30_000_000_000, 30_000_000_001] {
            histogram.observe(Duration::from_nanos(nanos));
        }
        let Snapshot { buckets, count, sum } = histogram.snapshot();
        let filled: Vec<(f64, u64)> = buckets.iter().copied().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(1e-5, 2), (2.5e-5, 1), (30.0, 1), (f64::INFINITY, 1)]);
        assert_eq!((count, sum), (5, 60.000_020_002));
        assert!(BOUNDS.is_sorted());
    }
    #[test]
    fn numbers_have_their_own_bounds() {
        let sizes = Sizes::default();
        for size in [1, 2, 3, 4, 16, 200] {
            sizes.observe(size);
        }
        let Snapshot { buckets, count, sum } = sizes.snapshot();
        let filled: Vec<(f64, u64)> = buckets.iter().copied().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(1.0, 1), (2.0, 1), (4.0, 2), (16.0, 1), (f64::INFINITY, 1)]);
        assert_eq!((count, sum), (6, 226.0));
    }
}
