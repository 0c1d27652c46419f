//! What a station knows of its own work: counters that every part adds to, faults, and how they get into the log.
//!
//! Everything that a request touches was placed when the station was made; nothing is looked up or allocated for it. Label sets are enumerations, so that no peer can make a new one. `station::metrics` writes them out.

mod counter;
pub mod faults;
mod histogram;
mod in_flight;
pub mod log;
pub mod trace;
pub mod traffic;

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

pub use self::{
    counter::Counter,
    histogram::{Histogram, Sizes, Snapshot},
    in_flight::{InFlight, Ticket},
};
use self::{faults::FaultCounters, traffic::Traffic};

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
    /// Stream connections accepted, refused ones among them.
    pub connections_accepted: Counter,
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
    /// Requests and bytes by route, status, carrier and body kind.
    pub traffic: Traffic,
    /// Where the time of requests goes.
    pub stages: Stages,
    /// How many requests went through the model together.
    pub batches: Sizes,
    /// Requests that wait for the model or run on it.
    pub in_flight: InFlight,
    /// Requests that failed, by kind of fault.
    pub faults: FaultCounters,
    /// Reloads of bases and methodologies.
    pub reloads: Reloads,
}

/// Where the time of requests goes.
#[derive(Debug, Default)]
pub struct Stages {
    /// From arrival until the model begins.
    pub queue: Histogram,
    /// Components to residuals.
    pub lift: Histogram,
    /// The model, compression of the answer included.
    pub compute: Histogram,
    /// From an answer being ready until the system has all of it; one observation for each write, which may hold several.
    pub write: Histogram,
}

/// Reloads of bases and methodologies.
#[derive(Debug, Default)]
pub struct Reloads {
    /// Those that put a new set in use.
    pub done: Counter,
    /// Those that left the old set in use.
    pub failed: Counter,
    last_failed: AtomicBool,
}

impl Reloads {
    /// Counts one.
    pub fn note(&self, is_done: bool) {
        if is_done {
            self.done.add_one()
        } else {
            self.failed.add_one()
        }
        self.last_failed.store(!is_done, Ordering::Relaxed);
    }

    /// Whether the last one left the old set in use.
    #[must_use]
    pub fn last_failed(&self) -> bool {
        self.last_failed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
