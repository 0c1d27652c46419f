//! Numbers that only grow, to which many threads add without waiting for each other.

use std::{
    cell::Cell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Parts of a counter. The first is shared, and adding to it is an atomic operation; each other one belongs to at most one
/// thread at a time, which adds with a plain load and store. A request adds to a dozen counters, and the threads that
/// serve sockets come first, so theirs are the plain ones.
const LANES: usize = 4;
const SHARED: usize = 0;
/// A thread that has not asked yet.
const UNKNOWN: usize = usize::MAX;

/// Lanes that belong to no thread.
static FREE: Mutex<[bool; LANES]> = Mutex::new([false, true, true, true]);

thread_local! {
    static LANE: Cell<usize> = const { Cell::new(UNKNOWN) };
    static LEASE: Lease = const { Lease };
}

/// Gives the lane of a thread back when the thread ends.
struct Lease;

impl Drop for Lease {
    fn drop(&mut self) {
        // What is counted while the thread ends goes to the shared lane.
        let lane = LANE.replace(SHARED);
        if let Some(free) = FREE.lock().unwrap_or_else(PoisonError::into_inner).get_mut(lane) {
            *free = lane != SHARED;
        }
    }
}

fn lane() -> usize {
    match LANE.get() {
        UNKNOWN => take_lane(),
        lane => lane,
    }
}

#[cold]
fn take_lane() -> usize {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let lane = free.iter().position(|is_free| *is_free).unwrap_or(SHARED);
    LANE.set(lane);
    // Without a lease the lane would never come back: a thread that is ending already shares.
    if lane != SHARED && LEASE.try_with(|_| ()).is_err() {
        LANE.set(SHARED);
        return SHARED;
    }
    if let Some(free) = free.get_mut(lane) {
        *free = false;
    }
    lane
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter([AtomicU64; LANES]);

impl Counter {
    /// Adds one.
    pub fn add_one(&self) {
        self.add(1);
    }

    /// Adds a number.
    pub fn add(&self, number: u64) {
        match lane() {
            SHARED => _ = self.0[SHARED].fetch_add(number, Ordering::Relaxed),
            // Nobody else writes here, so nothing can be lost between the two.
            lane => {
                if let Some(own) = self.0.get(lane) {
                    own.store(own.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
                }
            }
        }
    }

    /// The number so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.iter().fold(0, |sum, part| sum.wrapping_add(part.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    #[test]
    fn nothing_is_lost_however_many_threads_add() {
        const THREADS: usize = 3 * LANES;
        let (counter, barrier) = (Counter::default(), Barrier::new(THREADS));
        // Twice: the second lot takes over lanes that the first has left.
        for round in 1..=2_u64 {
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        barrier.wait();
                        (0..10_000).for_each(|_| counter.add_one());
                        counter.add(5);
                        barrier.wait();
                    });
                }
            });
            assert_eq!(counter.value(), round * THREADS as u64 * 10_005);
        }
    }

    #[test]
    fn a_lane_has_one_owner_at_a_time_and_comes_back() {
        let taken: Vec<usize> = (0..3 * LANES).map(|_| thread::spawn(lane).join().unwrap()).collect();
        // One after the other, so that no more are needed than one, whatever other tests hold.
        assert!(taken.iter().all(|lane| *lane < LANES), "{taken:?}");
        let barrier = Barrier::new(2 * LANES);
        let mut together: Vec<usize> = thread::scope(|scope| {
            let threads: Vec<_> = (0..2 * LANES)
                .map(|_| {
                    scope.spawn(|| {
                        let lane = lane();
                        barrier.wait();
                        lane
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|lane| *lane != SHARED).collect()
        });
        together.sort_unstable();
        let count = together.len();
        together.dedup();
        assert_eq!(together.len(), count, "two threads had the same lane");
    }
}
