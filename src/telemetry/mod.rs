//! What a station knows of its own work: counters that every part adds to, faults, and how they get into the log.
//!
//! Everything that a request touches is an atomic that was placed when the station was made; nothing is looked up or
//! allocated for it. Label sets are enumerations, so that no peer can make a new one. `station::metrics` writes them out.

pub mod faults;
mod histogram;
mod in_flight;
pub mod log;
pub mod trace;
pub mod traffic;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use self::{faults::FaultCounters, traffic::Traffic};
pub use self::{
    histogram::Histogram,
    in_flight::{InFlight, Ticket},
};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn add_one(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a number.
    pub fn add(&self, number: u64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    /// The number so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
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
    /// Connections accepted.
    pub connections: Counter,
    /// Accepted connections that have ended.
    pub connections_closed: Counter,
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
