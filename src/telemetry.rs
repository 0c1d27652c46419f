//! Counters that every part of a station adds to.

use std::sync::atomic::{AtomicU64, Ordering};

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
    /// Connections accepted.
    pub connections: Counter,
    /// Connections refused, over the limit or not allowed.
    pub connections_refused: Counter,
    /// Replies that could not be sent to their UDP peer.
    pub send_errors: Counter,
    /// What was dropped.
    pub dropped: Dropped,
}
