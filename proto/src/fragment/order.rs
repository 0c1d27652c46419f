//! Order of delivery: the frames of one stream by sequence number.
//!
//! ```text
//!            below next           next              1 to 64 above           more than 64 above
//! arrives    dropped              delivered,        held, a repeat is       delivered, the gap is
//!                                 then what is      dropped                 given up, then what is
//!                                 held behind it                            held behind it
//! ```
//!
//! Sequence numbers do not wrap. Sender and receiver must agree on the first one, as the TypeScript transport does with 0:
//! a stream that begins at 1 would wait for ever, so such a stream is opened with [`StreamOrder::starting_at`] 1.

use alloc::{collections::BTreeMap, vec::Vec};

/// The widest gap that is waited for.
pub const MAX_GAP: u64 = 64;

/// Holds back frames (or whatever stands for them) until those before them have come.
#[derive(Debug, Clone)]
pub struct StreamOrder<T> {
    /// One more than the highest sequence delivered, so that it fits u32 until the very last.
    next: u64,
    held: BTreeMap<u32, T>,
}

impl<T> Default for StreamOrder<T> {
    fn default() -> Self {
        Self::starting_at(0)
    }
}

impl<T> StreamOrder<T> {
    /// Expects `first` first.
    #[must_use]
    pub const fn starting_at(first: u32) -> Self {
        Self { next: first as u64, held: BTreeMap::new() }
    }

    /// Takes a frame and returns what can be delivered now, in order. A frame that is too late or a repeat is dropped.
    pub fn push(&mut self, sequence: u32, item: T) -> Vec<T> {
        let mut ready = Vec::new();
        let wide = u64::from(sequence);
        match wide.checked_sub(self.next) {
            None => return ready,
            Some(0) => {}
            Some(gap) if gap <= MAX_GAP => {
                self.hold(sequence, item);
                return ready;
            }
            Some(_) => {}
        }
        ready.push(item);
        self.next = wide.saturating_add(1);
        while let Ok(next) = u32::try_from(self.next)
            && let Some(item) = self.held.remove(&next)
        {
            ready.push(item);
            self.next = self.next.saturating_add(1);
        }
        ready
    }

    /// Frames held back, those that a jump has left behind included.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// At most [`MAX_GAP`] frames can still be waited for, so that a full store has some that a jump has left behind.
    /// These are the lowest, and they make room.
    fn hold(&mut self, sequence: u32, item: T) {
        if self.held.contains_key(&sequence) {
            return;
        }
        if self.held.len() as u64 >= MAX_GAP {
            self.held.pop_first();
        }
        self.held.insert(sequence, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_jump_leaves_behind_never_fills_the_store() {
        let mut order = StreamOrder::default();
        let mut base = 0_u32;
        for _ in 0..10 {
            for sequence in base + 1..=base + 64 {
                assert!(order.push(sequence, sequence).is_empty());
                assert!(order.held() <= 64);
            }
            base += 200;
            assert_eq!(order.push(base, base), [base]);
            base += 1;
        }
        assert!(order.push(base + 64, 0).is_empty());
        for sequence in (base + 1..base + 64).rev() {
            assert!(order.push(sequence, sequence).is_empty());
        }
        assert_eq!(order.push(base, base).len(), 65, "none that is still waited for was dropped");
        assert_eq!(order.held(), 0);
    }

    #[test]
    fn a_first_sequence_other_than_zero() {
        let mut order = StreamOrder::starting_at(1);
        assert_eq!(order.push(1, 'a'), ['a']);
        assert_eq!(order.push(0, 'x'), []);
        let mut order = StreamOrder::starting_at(u32::MAX);
        assert_eq!(order.push(u32::MAX, 'a'), ['a']);
        assert_eq!(order.push(u32::MAX, 'a'), []);
    }
}
