//! When to repeat a datagram: the round trip as it was so far, estimated as RFC 6298 does, with Karn's rule.

use std::time::Duration;

/// Shortest and longest time until a datagram is repeated.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(4);
/// Longest pause, in times of the estimate: what is lost more often than that is lost by chance, not by crowding.
const MAX_BACK_OFF: u32 = 16;
/// What clocks and schedulers may add.
const GRANULARITY: Duration = Duration::from_millis(1);
/// Share of a pause by which chance makes it longer, so that clients that lost datagrams together do not repeat together.
const JITTER: f64 = 0.25;

/// The estimate for one station.
#[derive(Debug, Clone)]
pub(super) struct Estimator {
    /// Smoothed round trip and its variation, once there is a sample.
    smoothed: Option<(Duration, Duration)>,
    /// The time until a repetition by these two alone.
    estimate: Duration,
    timeout: Duration,
    shortest: Duration,
    longest: Duration,
}

impl Estimator {
    /// `first` is the time until a repetition as long as nothing is known.
    pub(super) fn new(first: Duration) -> Self {
        let (shortest, longest) = (SHORTEST.min(first), LONGEST.max(first));
        Self { smoothed: None, estimate: first, timeout: first, shortest, longest }
    }

    /// Time without an answer after which a request is repeated for the first time.
    pub(super) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The time until the next repetition of a request, after one of `pause` was not enough.
    pub(super) fn longer(&self, pause: Duration) -> Duration {
        (pause * 2).min((self.estimate * MAX_BACK_OFF).clamp(pause, self.longest.max(pause)))
    }

    /// A request that was repeated, for the first time after `first`, was answered: nobody knows which copy of it, so that
    /// says nothing of the round trip (Karn). But it may have become longer, and would never be measured if the next
    /// request did not wait longer. Only half as long again, as it may also be that much is lost.
    pub(super) fn unclear(&mut self, first: Duration) {
        self.timeout = self.timeout.max((first * 3 / 2).min(self.longest));
    }

    /// A request that was sent once was answered after `round_trip`.
    pub(super) fn sample(&mut self, round_trip: Duration) {
        let (smoothed, variation) = match self.smoothed {
            None => (round_trip, round_trip / 2),
            Some((smoothed, variation)) => {
                let difference = smoothed.abs_diff(round_trip);
                (smoothed * 7 / 8 + round_trip / 8, variation * 3 / 4 + difference / 4)
            }
        };
        self.smoothed = Some((smoothed, variation));
        self.estimate = (smoothed + (variation * 4).max(GRANULARITY)).clamp(self.shortest, self.longest);
        self.timeout = self.estimate;
    }
}

/// A pause made longer by chance; `draw` is in `0.0..1.0`.
pub(super) fn jittered(pause: Duration, draw: f64) -> Duration {
    pause.mul_f64(1.0 + draw.clamp(0.0, 1.0) * JITTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn samples_are_weighed_as_in_rfc_6298() {
        let mut estimator = Estimator::new(ms(250));
        assert_eq!(estimator.timeout(), ms(250));
        estimator.sample(ms(80));
        assert_eq!(estimator.timeout(), ms(80 + 4 * 40));
        // variation 3/4 * 40 + 1/4 * 40, smoothed 7/8 * 80 + 1/8 * 120
        estimator.sample(ms(120));
        assert_eq!(estimator.timeout(), ms(85 + 4 * 40));
        for _ in 0..200 {
            estimator.sample(ms(100));
        }
        assert!((ms(100)..ms(103)).contains(&estimator.timeout()), "{:?}", estimator.timeout());
    }

    #[test]
    fn a_timeout_that_was_too_short_is_kept_longer_until_there_is_a_sample() {
        let mut estimator = Estimator::new(ms(250));
        estimator.sample(ms(100));
        assert_eq!(estimator.timeout(), ms(300));
        assert_eq!(estimator.longer(ms(300)), ms(600));
        estimator.unclear(ms(300));
        assert_eq!(estimator.timeout(), ms(450));
        // Another request that began earlier does not make it shorter, nor any longer one that began together with it.
        estimator.unclear(ms(200));
        estimator.unclear(ms(300));
        assert_eq!(estimator.timeout(), ms(450));
        estimator.sample(ms(100));
        assert!(estimator.timeout() < ms(300));
    }

    #[test]
    fn pauses_have_bounds_and_jitter_only_adds() {
        let mut estimator = Estimator::new(ms(250));
        for _ in 0..100 {
            estimator.sample(Duration::from_micros(50));
        }
        assert_eq!(estimator.timeout(), SHORTEST);
        assert_eq!(estimator.longer(SHORTEST), 2 * SHORTEST);
        assert_eq!(estimator.longer(ms(300)), SHORTEST * MAX_BACK_OFF);
        assert_eq!(estimator.longer(LONGEST), LONGEST);
        estimator.sample(Duration::from_secs(60));
        assert_eq!(estimator.timeout(), LONGEST);
        assert_eq!(Estimator::new(ms(5)).shortest, ms(5));
        assert_eq!((jittered(ms(100), 0.0), jittered(ms(100), 1.0)), (ms(100), ms(125)));
    }
}
