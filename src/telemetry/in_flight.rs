//! When the requests in flight arrived, so that one that is stuck shows while it is stuck.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Arrivals that are remembered at once. A request over this is counted but its age is not known; it is not the oldest.
const SLOTS: usize = 2048;

/// The requests that wait for the model or run on it.
#[derive(Debug, Clone)]
pub struct InFlight(Arc<Slots>);

#[derive(Debug)]
struct Slots {
    epoch: Instant,
    /// Microseconds from `epoch` to the arrival, plus one; 0 is a free slot.
    arrivals: Box<[AtomicU64]>,
    next: AtomicUsize,
    count: AtomicUsize,
}

/// A request in flight, for as long as this value lives.
#[derive(Debug)]
pub struct Ticket {
    slots: Arc<Slots>,
    slot: Option<usize>,
}

impl Default for InFlight {
    fn default() -> Self {
        let arrivals = std::iter::repeat_with(AtomicU64::default).take(SLOTS).collect();
        let (next, count) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self(Arc::new(Slots { epoch: Instant::now(), arrivals, next, count }))
    }
}

impl InFlight {
    /// Notes a request that arrived at `arrived`.
    #[must_use]
    pub fn begin(&self, arrived: Instant) -> Ticket {
        let slots = &self.0;
        slots.count.fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(arrived.saturating_duration_since(slots.epoch).as_micros()).unwrap_or(u64::MAX - 1);
        let start = slots.next.fetch_add(1, Ordering::Relaxed);
        // Slots are given out in turn, so that the first try nearly always finds a free one.
        let slot = (0..SLOTS).map(|n| start.wrapping_add(n) % SLOTS).find(|slot| {
            let slot = slots.arrivals.get(*slot);
            slot.is_some_and(|slot| slot.compare_exchange(0, micros + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok())
        });
        Ticket { slots: Arc::clone(slots), slot }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count.load(Ordering::Relaxed)
    }

    /// How long ago the oldest arrived; `None` if there is none.
    #[must_use]
    pub fn oldest(&self, now: Instant) -> Option<Duration> {
        let arrivals = self.0.arrivals.iter().map(|slot| slot.load(Ordering::Relaxed));
        let arrived = Duration::from_micros(arrivals.filter(|arrival| *arrival > 0).min()? - 1);
        Some(now.saturating_duration_since(self.0.epoch).saturating_sub(arrived))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.and_then(|slot| self.slots.arrivals.get(slot)) {
            slot.store(0, Ordering::Relaxed);
        }
        self.slots.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_found_until_it_ends() {
        let in_flight = InFlight::default();
        let at = |ms| in_flight.0.epoch + Duration::from_millis(ms);
        assert_eq!((in_flight.count(), in_flight.oldest(at(9))), (0, None));
        let first = in_flight.begin(at(1));
        let second = in_flight.begin(at(5));
        assert_eq!((in_flight.count(), in_flight.oldest(at(9))), (2, Some(Duration::from_millis(8))));
        drop(first);
        assert_eq!((in_flight.count(), in_flight.oldest(at(9))), (1, Some(Duration::from_millis(4))));
        drop(second);
        assert_eq!((in_flight.count(), in_flight.oldest(at(9))), (0, None));
    }

    #[test]
    fn more_than_there_are_slots_are_still_counted() {
        let in_flight = InFlight::default();
        let epoch = in_flight.0.epoch;
        let tickets: Vec<Ticket> = (0..SLOTS + 10).map(|_| in_flight.begin(epoch)).collect();
        assert_eq!(in_flight.count(), SLOTS + 10);
        drop(tickets);
        assert_eq!((in_flight.count(), in_flight.oldest(epoch)), (0, None));
        assert!(in_flight.begin(epoch).slot.is_some());
    }
}
