//! Acknowledgements: which frames have come, and which a sender still waits for.
//!
//! An acknowledgement is a frame on stream 0xffff with sequence 0 and flags 0x80. Its payload is a row of entries:
//!
//! ```text
//! byte  0           2          6             10          14
//!       | stream_id | base     | bits 32..63 | bits 0..31 |
//!       | u16       | u32      | u32         | u32        |
//! ```
//!
//! All big-endian. Bit i says that sequence `base + i` has come; sums past 0xffff_ffff name nothing.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

use crate::frame::{EncodeError, Flags, Frame};

/// The stream that acknowledgements travel on.
pub const ACK_STREAM_ID: u16 = 0xffff;
/// Bytes of one entry.
pub const ACK_ENTRY_LEN: usize = 14;
/// Sequence numbers that one entry covers.
pub const ACK_WINDOW: u32 = 64;

/// What has come on one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckEntry {
    /// Bytes 0..2.
    pub stream_id: u16,
    /// Bytes 2..6: the sequence that bit 0 stands for.
    pub base: u32,
    /// Bytes 6..14.
    pub bits: u64,
}

impl AckEntry {
    /// Reads an entry. Every 14 bytes are one.
    #[must_use]
    pub const fn decode(bytes: [u8; ACK_ENTRY_LEN]) -> Self {
        let [s0, s1, q0, q1, q2, q3, b0, b1, b2, b3, b4, b5, b6, b7] = bytes;
        Self {
            stream_id: u16::from_be_bytes([s0, s1]),
            base: u32::from_be_bytes([q0, q1, q2, q3]),
            bits: u64::from_be_bytes([b0, b1, b2, b3, b4, b5, b6, b7]),
        }
    }

    /// Writes an entry.
    #[must_use]
    pub const fn encode(self) -> [u8; ACK_ENTRY_LEN] {
        let [s0, s1] = self.stream_id.to_be_bytes();
        let [q0, q1, q2, q3] = self.base.to_be_bytes();
        let [b0, b1, b2, b3, b4, b5, b6, b7] = self.bits.to_be_bytes();
        [s0, s1, q0, q1, q2, q3, b0, b1, b2, b3, b4, b5, b6, b7]
    }

    /// Whether it says that `sequence` has come.
    #[must_use]
    pub const fn contains(self, sequence: u32) -> bool {
        match sequence.checked_sub(self.base) {
            Some(bit) if bit < ACK_WINDOW => self.bits >> bit & 1 == 1,
            _ => false,
        }
    }
}

/// Whether a frame acknowledges: the ACK flag, on stream 0xffff. The flag alone, on any other stream, makes a frame that is
/// neither delivered nor read as an acknowledgement.
#[must_use]
pub const fn is_ack(frame: &Frame<'_>) -> bool {
    frame.stream_id == ACK_STREAM_ID && frame.flags.contains(Flags::ACK)
}

/// The entries of an acknowledgement's payload. An entry that is cut off at the end is ignored.
pub fn decode_acks(payload: &[u8]) -> impl ExactSizeIterator<Item = AckEntry> {
    let (entries, _) = payload.as_chunks::<ACK_ENTRY_LEN>();
    entries.iter().map(|entry| AckEntry::decode(*entry))
}

/// Appends the frame that carries `entries` to `out`.
///
/// # Errors
/// [`EncodeError::PayloadTooLong`] for more entries than a frame holds.
pub fn encode_ack(entries: &[AckEntry], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let payload: Vec<u8> = entries.iter().flat_map(|entry| entry.encode()).collect();
    Frame { stream_id: ACK_STREAM_ID, sequence: 0, flags: Flags::ACK, payload: &payload }.encode(out)
}

/// Collects what came until the next acknowledgement is sent.
#[derive(Debug, Clone, Default)]
pub struct Received {
    sequences: BTreeSet<(u16, u32)>,
}

impl Received {
    /// Sequences that are remembered at most. One that finds no room is not acknowledged; its sender repeats it.
    pub const CAPACITY: usize = 4096;

    /// Starts empty.
    #[must_use]
    pub const fn new() -> Self {
        Self { sequences: BTreeSet::new() }
    }

    /// Notes a frame that came.
    pub fn insert(&mut self, stream_id: u16, sequence: u32) {
        if self.sequences.len() < Self::CAPACITY {
            self.sequences.insert((stream_id, sequence));
        }
    }

    /// Whether there is nothing to acknowledge.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Takes out what fits one acknowledgement of at most `max_entries` entries: for each stream one entry from its lowest
    /// sequence on. What lies beyond an entry's window stays for the next call.
    pub fn take(&mut self, max_entries: usize) -> Vec<AckEntry> {
        let mut entries: Vec<AckEntry> = Vec::new();
        self.sequences.retain(|&(stream_id, sequence)| {
            if entries.last().is_none_or(|entry| entry.stream_id != stream_id) {
                if entries.len() >= max_entries {
                    return true;
                }
                entries.push(AckEntry { stream_id, base: sequence, bits: 0 });
            }
            let Some(entry) = entries.last_mut() else { return true };
            let bit = 1_u64.checked_shl(sequence.saturating_sub(entry.base));
            entry.bits |= bit.unwrap_or(0);
            bit.is_none()
        });
        entries
    }
}

/// Frames that were sent and not yet acknowledged, each with whatever is needed to send it again.
#[derive(Debug, Clone)]
pub struct InFlight<T> {
    frames: BTreeMap<(u16, u32), Sent<T>>,
}

#[derive(Debug, Clone)]
struct Sent<T> {
    sent_ms: u64,
    frame: T,
}

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self { frames: BTreeMap::new() }
    }
}

impl<T> InFlight<T> {
    /// Notes a frame as sent at `now_ms`; a frame with the same stream and sequence is replaced and returned.
    ///
    /// How many may be in flight is the sender's choice: look at [`InFlight::len`] first. A stream on which sequences more
    /// than [`super::MAX_GAP`] apart are in flight loses frames, because the receiver gives up what is only late.
    pub fn insert(&mut self, stream_id: u16, sequence: u32, now_ms: u64, frame: T) -> Option<T> {
        self.frames.insert((stream_id, sequence), Sent { sent_ms: now_ms, frame }).map(|sent| sent.frame)
    }

    /// Removes what `entry` names and says how many frames that were.
    pub fn acknowledge(&mut self, entry: AckEntry) -> usize {
        let last = entry.base.saturating_add(ACK_WINDOW.saturating_sub(1));
        let acknowledged: Vec<(u16, u32)> = self
            .frames
            .range((entry.stream_id, entry.base)..=(entry.stream_id, last))
            .map(|(key, _)| *key)
            .filter(|(_, sequence)| entry.contains(*sequence))
            .collect();
        for key in &acknowledged {
            self.frames.remove(key);
        }
        acknowledged.len()
    }

    /// Removes a frame that is given up.
    pub fn remove(&mut self, stream_id: u16, sequence: u32) -> Option<T> {
        self.frames.remove(&(stream_id, sequence)).map(|sent| sent.frame)
    }

    /// The frames that were sent `after_ms` or longer ago; they count as sent again at `now_ms`.
    pub fn overdue(&mut self, now_ms: u64, after_ms: u64) -> impl Iterator<Item = (u16, u32, &T)> {
        self.frames.iter_mut().filter_map(move |(&(stream_id, sequence), sent)| {
            (now_ms.saturating_sub(sent.sent_ms) >= after_ms).then(|| {
                sent.sent_ms = now_ms;
                (stream_id, sequence, &sent.frame)
            })
        })
    }

    /// Stream and sequence of all that is left, in ascending order.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = (u16, u32)> {
        self.frames.keys().copied()
    }

    /// Frames in flight.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether all is acknowledged.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_its_low_bit_in_the_last_byte() {
        let bytes = [0xf0, 0x01, 0, 0, 3, 0xe8, 0x80, 0, 0, 1, 0, 0, 0, 0x0b];
        let entry = AckEntry { stream_id: 0xf001, base: 1000, bits: 0x8000_0001_0000_000b };
        assert_eq!(AckEntry::decode(bytes), entry);
        assert_eq!(entry.encode(), bytes);
        let named: Vec<u32> = (0..2000).filter(|sequence| entry.contains(*sequence)).collect();
        assert_eq!(named, [1000, 1001, 1003, 1032, 1063]);
    }

    #[test]
    fn what_does_not_fit_an_acknowledgement_stays_for_the_next() {
        let mut received = Received::new();
        for (stream_id, sequence) in [(9, 7), (4, 65), (4, 0), (4, 63), (4, 64), (5, u32::MAX), (5, u32::MAX)] {
            received.insert(stream_id, sequence);
        }
        let entry = |stream_id, base, bits| AckEntry { stream_id, base, bits };
        assert_eq!(received.take(2), [entry(4, 0, 1 << 63 | 1), entry(5, u32::MAX, 1)]);
        assert_eq!(received.take(2), [entry(4, 64, 3), entry(9, 7, 1)]);
        assert!(received.is_empty());
        assert_eq!(received.take(2), []);
        for sequence in 0..5000 {
            received.insert(1, sequence);
        }
        assert_eq!(received.sequences.len(), Received::CAPACITY);
    }

    #[test]
    fn overdue_frames_are_named_once_per_period() {
        let mut in_flight = InFlight::default();
        assert_eq!(in_flight.insert(4, 0, 100, "a"), None);
        assert_eq!(in_flight.insert(4, 1, 150, "b"), None);
        assert_eq!(in_flight.overdue(199, 100).count(), 0);
        assert_eq!(in_flight.overdue(200, 100).collect::<Vec<_>>(), [(4, 0, &"a")]);
        assert_eq!(in_flight.overdue(250, 100).collect::<Vec<_>>(), [(4, 1, &"b")]);
        assert_eq!(in_flight.insert(4, 1, 300, "c"), Some("b"));
        assert_eq!(in_flight.remove(4, 1), Some("c"));
        assert_eq!(in_flight.acknowledge(AckEntry { stream_id: 4, base: 0, bits: u64::MAX }), 1);
        assert!(in_flight.is_empty());
    }

    #[test]
    fn entries_at_the_top_of_the_range_do_not_wrap() {
        let mut in_flight = InFlight::default();
        in_flight.insert(4, u32::MAX, 0, ());
        in_flight.insert(4, 0, 0, ());
        in_flight.insert(5, 0, 0, ());
        assert_eq!(in_flight.acknowledge(AckEntry { stream_id: 4, base: u32::MAX, bits: u64::MAX }), 1);
        assert_eq!(in_flight.keys().collect::<Vec<_>>(), [(4, 0), (5, 0)]);
    }
}
