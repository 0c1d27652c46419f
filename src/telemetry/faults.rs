//! Faults by kind: counted for metrics, and told in the log at most so often.
//!
//! A peer decides how often a fault happens, so it must not decide how much is logged. Each kind has a share of lines of its
//! own; what goes over it is counted, and the count is told with the next line of that kind or when the share is renewed.
//! The share is that of the process, because the log is.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{Counter, traffic::labels};

/// Lines of one kind in a [`WINDOW`]: enough to see what is going on.
const BURST: u32 = 10;
/// After which time a kind may use its lines again.
const WINDOW: Duration = Duration::from_secs(10);

labels! {
    /// Kinds of faults. A closed set: it bounds both the log and the labels of metrics.
    Fault {
        /// A frame, payload, meta or body that is malformed.
        BadRequest = "bad_request",
        /// A stream that cannot be read on.
        Stream = "stream",
        /// A peer that is not allowed, or an address that is not proven.
        Forbidden = "forbidden",
        /// An unknown route, session or key, or a part of the model that is elsewhere.
        NotHere = "not_here",
        /// A position that is not where the session ends.
        Position = "position",
        /// Another boundary, configuration or provenance.
        Conflict = "conflict",
        /// Components of a basis that is not loaded here.
        UnknownBasis = "unknown_basis",
        /// Components that were made by another methodology.
        Methodology = "methodology",
        /// A boundary for which the basis has nothing.
        BasisBoundary = "basis_boundary",
        /// A request or reply over a limit of size.
        TooLarge = "too_large",
        /// NaN or infinity in a request.
        NonFinite = "non_finite",
        /// Withdrawn by its sender.
        Cancelled = "cancelled",
        /// A deadline that passed.
        Deadline = "deadline",
        /// A full queue.
        Overloaded = "overloaded",
        /// Sessions that leave no room.
        NoCapacity = "no_capacity",
        /// Too many connections.
        Connections = "connections",
        /// New work on a node that is about to stop.
        Draining = "draining",
        /// The station behind this one refuses or does not answer.
        Upstream = "upstream",
        /// The model, or a result that is not finite.
        Model = "model",
        /// A panic.
        Panic = "panic",
        /// A connection that cannot be accepted.
        Accept = "accept",
        /// A datagram that cannot be received.
        Receive = "receive",
        /// A reply that cannot be sent.
        Send = "send",
        /// An HTTP connection or body that broke off.
        Http = "http",
    }
}

#[derive(Debug)]
struct Share {
    since: Option<Instant>,
    used: u32,
    suppressed: u64,
}

#[derive(Debug)]
struct Throttle(Mutex<Share>);

impl Throttle {
    const fn new() -> Self {
        Self(Mutex::new(Share { since: None, used: 0, suppressed: 0 }))
    }

    /// `Some` if a line may be written now, with the number of those that were not before it.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut share = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if share.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            share.since = Some(now);
            share.used = 0;
        }
        if share.used >= BURST {
            share.suppressed += 1;
            return None;
        }
        share.used += 1;
        Some(std::mem::take(&mut share.suppressed))
    }

    /// What was suppressed, once its window is over (or `at_once`).
    fn take_suppressed(&self, now: Instant, at_once: bool) -> Option<u64> {
        let mut share = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = share.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW);
        (share.suppressed > 0 && (is_over || at_once)).then(|| std::mem::take(&mut share.suppressed))
    }
}

static THROTTLES: [Throttle; Fault::ALL.len()] = [const { Throttle::new() }; Fault::ALL.len()];

impl Fault {
    /// `Some` if a line about this kind may be written now, with the number of those that were suppressed before it.
    pub(crate) fn admit(self) -> Option<u64> {
        THROTTLES.get(self as usize)?.admit(Instant::now())
    }
}

/// Tells how many lines of each kind were suppressed, for kinds that get a new share now; of all kinds if `at_once`.
pub(crate) fn tell_suppressed(at_once: bool) {
    let now = Instant::now();
    for (fault, throttle) in Fault::ALL.iter().zip(&THROTTLES) {
        if let Some(suppressed) = throttle.take_suppressed(now, at_once) {
            tracing::warn!(fault = fault.name(), suppressed, "more faults of this kind were not logged");
        }
    }
}

/// Logs a fault unless its kind has used up its share: `fault!(WARN, Fault::Accept, %error, "text")`.
macro_rules! fault {
    ($level:ident, $fault:expr, $($rest:tt)+) => {
        if tracing::enabled!(tracing::Level::$level)
            && let Some(suppressed) = $fault.admit()
        {
            let suppressed = (suppressed > 0).then_some(suppressed);
            tracing::event!(tracing::Level::$level, fault = $fault.name(), suppressed, $($rest)+);
        }
    };
}
pub(crate) use fault;

/// How often each kind happened on one station.
#[derive(Debug)]
pub struct FaultCounters([Counter; Fault::ALL.len()]);

impl Default for FaultCounters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Counter::default()))
    }
}

impl FaultCounters {
    /// The counter of a kind.
    #[must_use]
    pub fn of(&self, fault: Fault) -> &Counter {
        &self.0[fault as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_gets_its_share_and_what_is_over_it_is_told_later() {
        let (throttle, start) = (Throttle::new(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(throttle.admit(start), Some(0));
        }
        for _ in 0..7 {
            assert_eq!(throttle.admit(start + WINDOW / 2), None);
        }
        assert_eq!(throttle.take_suppressed(start + WINDOW / 2, false), None);
        assert_eq!(throttle.admit(start + WINDOW), Some(7));
        assert_eq!(throttle.admit(start + WINDOW), Some(0));
        for _ in 0..BURST {
            throttle.admit(start + WINDOW);
        }
        assert_eq!(throttle.take_suppressed(start + WINDOW, true), Some(2));
        assert_eq!(throttle.take_suppressed(start + 3 * WINDOW, false), None);
    }

    #[test]
    fn kinds_are_in_the_order_of_their_table() {
        assert!(Fault::ALL.iter().enumerate().all(|(index, fault)| *fault as usize == index));
        let counters = FaultCounters::default();
        counters.of(Fault::Http).add_one();
        let counted: Vec<_> = Fault::ALL.iter().filter(|fault| counters.of(**fault).value() > 0).collect();
        assert_eq!(counted, [&Fault::Http]);
    }
}
