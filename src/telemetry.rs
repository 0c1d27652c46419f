//! Counters and gauges that every part of a station adds to.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Lets one log line a second through, so that no peer fills a disk with what it does wrong.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<(Option<Instant>, u64)>);

impl Seldom {
    /// One that has let nothing through.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// Whether a line may be written now; then how many were left out since the last.
    #[must_use]
    pub fn turn(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, left_out) = &mut *state;
        if last.is_some_and(|last| now.saturating_duration_since(last) < Duration::from_secs(1)) {
            *left_out += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(left_out))
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn add_one(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The number so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down. Copies share it.
#[derive(Debug, Clone, Default)]
pub struct Gauge(Arc<AtomicUsize>);

impl Gauge {
    /// The number now.
    #[must_use]
    pub fn value(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// A share of this number, nothing at first, which is taken back when it goes.
    #[must_use]
    pub fn share(&self) -> GaugeShare {
        GaugeShare { gauge: self.clone(), held: 0 }
    }
}

/// What one part adds to a [`Gauge`].
#[derive(Debug)]
pub struct GaugeShare {
    gauge: Gauge,
    held: usize,
}

impl GaugeShare {
    /// What is added now.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.held
    }

    /// What others add.
    #[must_use]
    pub fn others(&self) -> usize {
        self.gauge.value().saturating_sub(self.held)
    }

    /// Adds `held` instead.
    pub fn set(&mut self, held: usize) {
        match held.cmp(&self.held) {
            std::cmp::Ordering::Greater => self.gauge.0.fetch_add(held - self.held, Ordering::Relaxed),
            std::cmp::Ordering::Less => self.gauge.0.fetch_sub(self.held - held, Ordering::Relaxed),
            std::cmp::Ordering::Equal => return,
        };
        self.held = held;
    }
}

impl Drop for GaugeShare {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Why a frame or datagram was dropped without an answer.
#[derive(Debug, Default)]
pub struct Dropped {
    /// A response, acknowledgement or control frame.
    pub never_answered: Counter,
    /// A frame with an empty payload.
    pub empty: Counter,
    /// A datagram that is not exactly one frame.
    pub undecodable: Counter,
    /// From a UDP peer that is on no list.
    pub peer_not_allowed: Counter,
    /// A copy of a request that is still being worked on.
    pub duplicate: Counter,
    /// A late copy of a request that newer work has overtaken.
    pub stale: Counter,
    /// A reply that would have been too large for an address that is not proven.
    pub amplification: Counter,
    /// Not signed with the station's key, over UDP; or a cancel that is not.
    pub unauthenticated: Counter,
    /// A cancel of nothing in flight.
    pub idle_cancel: Counter,
}

/// Counters of a station.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests handled.
    pub requests: Counter,
    /// Requests that got a vent.
    pub errors: Counter,
    /// Stream connections open now, refused ones not among them.
    pub connections: Gauge,
    /// Bytes of half frames, waiting requests and unread replies of all connections now.
    pub buffered_bytes: Gauge,
    /// Connections refused, over the limit or not allowed.
    pub connections_refused: Counter,
    /// Replies that could not be sent to their UDP peer.
    pub send_errors: Counter,
    /// What was dropped.
    pub dropped: Dropped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_tells_how_many_were_left_out() {
        let (seldom, start) = (Seldom::new(), Instant::now());
        let at = |ms| seldom.turn(start + Duration::from_millis(ms));
        assert_eq!(
            [at(0), at(1), at(999), at(1000), at(1500), at(2500)],
            [Some(0), None, None, Some(2), None, Some(1)]
        );
    }

    #[test]
    fn shares_of_a_gauge_go_with_their_owners() {
        let gauge = Gauge::default();
        let (mut a, mut b) = (gauge.share(), gauge.share());
        a.set(10);
        b.set(5);
        assert_eq!((gauge.value(), a.others(), a.held()), (15, 5, 10));
        a.set(3);
        drop(b);
        assert_eq!((gauge.value(), a.others()), (3, 0));
        drop(a);
        assert_eq!(gauge.value(), 0);
    }
}
