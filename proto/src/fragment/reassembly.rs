//! Joining parts: the receiving side of the fragmented transport.

use alloc::{borrow::Cow, boxed::Box, collections::BTreeMap, vec::Vec};

use super::{HEADER_LEN, Header};

/// How much a [`Reassembler`] keeps of frames that are not complete. Datagrams of unknown origin fill it, so each number is
/// a bound on what a stranger can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Frames of all peers together.
    pub frames: usize,
    /// Bytes of all peers together (parts as they came; the book-keeping adds a few hundred bytes for each frame).
    pub bytes: usize,
    /// Frames of one peer.
    pub peer_frames: usize,
    /// Bytes of one peer.
    pub peer_bytes: usize,
    /// Milliseconds from the first part of a frame until it is given up.
    pub expiry_ms: u64,
}

impl Default for Limits {
    /// 1024 frames and 64 MiB in all; 64 frames and 32 MiB (two frames of the greatest length) for each peer; 5 seconds.
    fn default() -> Self {
        Self { frames: 1024, bytes: 64 << 20, peer_frames: 64, peer_bytes: 32 << 20, expiry_ms: 5000 }
    }
}

/// Why a datagram was dropped. What was kept of the frame before is kept on, except after [`Dropped::OverLimit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Dropped {
    /// Fewer bytes than a header, or nothing behind it.
    #[error("{got} bytes, a fragment header and a part expected")]
    Short {
        /// Bytes of the datagram.
        got: usize,
    },
    /// The header says that the frame has no parts.
    #[error("a frame of 0 parts")]
    ZeroTotal,
    /// A part that its frame cannot have.
    #[error("part {index} of {total}")]
    IndexPastTotal {
        /// The part, counted from 0.
        index: u8,
        /// Parts of the frame.
        total: u8,
    },
    /// Another part of this frame gave another number of parts.
    #[error("frame of {got} parts, {expected} before")]
    TotalMismatch {
        /// Parts by the first datagram of the frame.
        expected: u8,
        /// Parts by this one.
        got: u8,
    },
    /// The frame itself had to give way to the limits.
    #[error("over the limits of reassembly")]
    OverLimit,
}

/// What a datagram did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<'d> {
    /// Its frame is whole: these bytes, in order. They are not checked; see [`crate::frame::Frame::decode_exact`].
    Complete(Cow<'d, [u8]>),
    /// Parts of its frame are missing.
    Waiting,
    /// That part is here already.
    Duplicate,
}

/// Counts over the life of a [`Reassembler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Frames completed.
    pub completed: u64,
    /// Frames given up because of their age.
    pub expired: u64,
    /// Frames given up because of a limit.
    pub evicted: u64,
}

/// Parts of one frame. Those that come in order are joined at once, the others wait.
#[derive(Debug)]
struct Assembly {
    order: u64,
    created_ms: u64,
    total: u8,
    next: u8,
    joined: Vec<u8>,
    waiting: BTreeMap<u8, Box<[u8]>>,
    len: usize,
}

/// Joins parts to frames, for any number of peers. Frames are told apart by peer **and** frame id.
///
/// All of it is bounded by [`Limits`]: a peer that is over its own share loses its oldest frame, and when all together are
/// over, the oldest of all goes. Call [`Reassembler::expire`] from time to time, or let [`Reassembler::push`] do it.
///
/// A frame id comes round after 65,536 frames. If parts of the older frame are still waiting then, both can mix; what
/// guards against that is the expiry and, where the peers use it, the fingerprint of the body.
#[derive(Debug)]
pub struct Reassembler<K> {
    limits: Limits,
    assemblies: BTreeMap<(K, u16), Assembly>,
    by_age: BTreeMap<u64, (K, u16)>,
    next_order: u64,
    bytes: usize,
    totals: Totals,
}

impl<K: Ord + Clone> Reassembler<K> {
    /// Starts empty.
    #[must_use]
    pub const fn new(limits: Limits) -> Self {
        Self {
            limits,
            assemblies: BTreeMap::new(),
            by_age: BTreeMap::new(),
            next_order: 0,
            bytes: 0,
            totals: Totals { completed: 0, expired: 0, evicted: 0 },
        }
    }

    /// Takes a datagram of `peer` that arrived at `now_ms`.
    ///
    /// # Errors
    /// See [`Dropped`]; nothing is ever sent back for such a datagram.
    pub fn push<'d>(&mut self, now_ms: u64, peer: &K, datagram: &'d [u8]) -> Result<Outcome<'d>, Dropped> {
        self.expire(now_ms);
        let (header, part) = match datagram.split_first_chunk::<HEADER_LEN>() {
            Some((header, part)) if !part.is_empty() => (Header::decode(*header), part),
            _ => return Err(Dropped::Short { got: datagram.len() }),
        };
        let Header { frame_id, index, total } = header;
        if total == 0 {
            return Err(Dropped::ZeroTotal);
        }
        if index >= total {
            return Err(Dropped::IndexPastTotal { index, total });
        }
        if total == 1 {
            return Ok(self.complete(Cow::Borrowed(part)));
        }
        let key = (peer.clone(), frame_id);
        let order = self.next_order;
        let by_age = &mut self.by_age;
        let next_order = &mut self.next_order;
        let assembly = self.assemblies.entry(key).or_insert_with_key(|key| {
            by_age.insert(order, key.clone());
            *next_order = order.wrapping_add(1);
            Assembly::new(order, now_ms, total)
        });
        if assembly.total != total {
            return Err(Dropped::TotalMismatch { expected: assembly.total, got: total });
        }
        if !assembly.add(index, part) {
            return Ok(Outcome::Duplicate);
        }
        self.bytes = self.bytes.saturating_add(part.len());
        let order = assembly.order;
        if assembly.next == total {
            let joined = self.remove(order).map(|assembly| assembly.joined).unwrap_or_default();
            return Ok(self.complete(Cow::Owned(joined)));
        }
        self.enforce_limits(peer);
        if self.by_age.contains_key(&order) { Ok(Outcome::Waiting) } else { Err(Dropped::OverLimit) }
    }

    /// Gives up what has waited too long.
    pub fn expire(&mut self, now_ms: u64) {
        while let Some(order) = self.oldest()
            && let Some(key) = self.by_age.get(&order)
            && let Some(assembly) = self.assemblies.get(key)
            && now_ms.saturating_sub(assembly.created_ms) >= self.limits.expiry_ms
        {
            self.remove(order);
            self.totals.expired = self.totals.expired.saturating_add(1);
        }
    }

    /// Gives up all that is kept of a peer.
    pub fn forget(&mut self, peer: &K) {
        let orders: Vec<u64> = self.of_peer(peer).map(|assembly| assembly.order).collect();
        for order in orders {
            self.remove(order);
        }
    }

    /// Frames that are not complete.
    #[must_use]
    pub fn len(&self) -> usize {
        self.assemblies.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.assemblies.is_empty()
    }

    /// Bytes of parts that wait.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// What has happened so far.
    #[must_use]
    pub const fn totals(&self) -> Totals {
        self.totals
    }

    const fn complete<'d>(&mut self, frame: Cow<'d, [u8]>) -> Outcome<'d> {
        self.totals.completed = self.totals.completed.saturating_add(1);
        Outcome::Complete(frame)
    }

    fn oldest(&self) -> Option<u64> {
        self.by_age.first_key_value().map(|(order, _)| *order)
    }

    fn of_peer(&self, peer: &K) -> impl Iterator<Item = &Assembly> {
        let keys = (peer.clone(), 0)..=(peer.clone(), u16::MAX);
        self.assemblies.range(keys).map(|(_, assembly)| assembly)
    }

    fn enforce_limits(&mut self, peer: &K) {
        loop {
            let (frames, bytes, oldest) =
                self.of_peer(peer).fold((0_usize, 0_usize, u64::MAX), |(frames, bytes, oldest), assembly| {
                    (frames.saturating_add(1), bytes.saturating_add(assembly.len), oldest.min(assembly.order))
                });
            if frames == 0 || (frames <= self.limits.peer_frames && bytes <= self.limits.peer_bytes) {
                break;
            }
            self.evict(oldest);
        }
        while (self.assemblies.len() > self.limits.frames || self.bytes > self.limits.bytes)
            && let Some(order) = self.oldest()
        {
            self.evict(order);
        }
    }

    fn evict(&mut self, order: u64) {
        self.remove(order);
        self.totals.evicted = self.totals.evicted.saturating_add(1);
    }

    fn remove(&mut self, order: u64) -> Option<Assembly> {
        let key = self.by_age.remove(&order)?;
        let assembly = self.assemblies.remove(&key)?;
        self.bytes = self.bytes.saturating_sub(assembly.len);
        Some(assembly)
    }
}

impl Assembly {
    const fn new(order: u64, created_ms: u64, total: u8) -> Self {
        Self { order, created_ms, total, next: 0, joined: Vec::new(), waiting: BTreeMap::new(), len: 0 }
    }

    /// Adds a part; false if it is here already.
    fn add(&mut self, index: u8, part: &[u8]) -> bool {
        if index < self.next || self.waiting.contains_key(&index) {
            return false;
        }
        self.len = self.len.saturating_add(part.len());
        if index > self.next {
            self.waiting.insert(index, part.into());
            return true;
        }
        self.joined.extend_from_slice(part);
        self.next = self.next.saturating_add(1);
        while let Some(part) = self.waiting.remove(&self.next) {
            self.joined.extend_from_slice(&part);
            self.next = self.next.saturating_add(1);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn datagram(frame_id: u16, index: u8, total: u8, part: &[u8]) -> Vec<u8> {
        let mut out = Header { frame_id, index, total }.encode().to_vec();
        out.extend_from_slice(part);
        out
    }

    fn small() -> Reassembler<u8> {
        Reassembler::new(Limits { frames: 4, bytes: 40, peer_frames: 3, peer_bytes: 30, expiry_ms: 100 })
    }

    fn complete(bytes: &[u8]) -> Outcome<'_> {
        Outcome::Complete(Cow::Borrowed(bytes))
    }

    #[test]
    fn every_order_of_arrival_joins_and_repeats_are_ignored() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut reassembler = small();
            let part = |index: u8| datagram(7, index, 3, &[b'a' + index; 2]);
            for index in &order[..2] {
                assert_eq!(reassembler.push(0, &1, &part(*index)), Ok(Outcome::Waiting));
                assert_eq!(reassembler.push(0, &1, &part(*index)), Ok(Outcome::Duplicate));
            }
            assert_eq!(reassembler.bytes(), 4);
            assert_eq!(reassembler.push(0, &1, &part(order[2])), Ok(complete(b"aabbcc")));
            assert_eq!((reassembler.len(), reassembler.bytes()), (0, 0));
        }
    }

    #[test]
    fn peers_and_frame_ids_are_kept_apart() {
        let mut reassembler = small();
        assert_eq!(reassembler.push(0, &1, &datagram(7, 0, 2, b"1a")), Ok(Outcome::Waiting));
        assert_eq!(reassembler.push(0, &2, &datagram(7, 0, 2, b"2a")), Ok(Outcome::Waiting));
        assert_eq!(reassembler.push(0, &1, &datagram(8, 0, 2, b"3a")), Ok(Outcome::Waiting));
        assert_eq!(reassembler.push(0, &2, &datagram(7, 1, 2, b"2b")), Ok(complete(b"2a2b")));
        assert_eq!(reassembler.push(0, &1, &datagram(8, 1, 2, b"3b")), Ok(complete(b"3a3b")));
        assert_eq!(reassembler.push(0, &1, &datagram(7, 1, 2, b"1b")), Ok(complete(b"1a1b")));
        assert_eq!(reassembler.totals().completed, 3);
    }

    #[test]
    fn faults_are_named_and_leave_the_frame_alone() {
        let mut reassembler = small();
        for got in 0..=4 {
            assert_eq!(reassembler.push(0, &1, &[1; 5][..got]), Err(Dropped::Short { got }));
        }
        assert_eq!(reassembler.push(0, &1, &datagram(1, 0, 0, b"x")), Err(Dropped::ZeroTotal));
        let past = Err(Dropped::IndexPastTotal { index: 2, total: 2 });
        assert_eq!(reassembler.push(0, &1, &datagram(1, 2, 2, b"x")), past);
        assert!(reassembler.is_empty());
        assert_eq!(reassembler.push(0, &1, &datagram(1, 0, 2, b"a")), Ok(Outcome::Waiting));
        let mismatch = Err(Dropped::TotalMismatch { expected: 2, got: 3 });
        assert_eq!(reassembler.push(0, &1, &datagram(1, 1, 3, b"x")), mismatch);
        assert_eq!(reassembler.push(0, &1, &datagram(1, 1, 2, b"b")), Ok(complete(b"ab")));
    }

    #[test]
    fn the_oldest_gives_way_first_of_the_peer_then_of_all() {
        let mut reassembler = small();
        for id in 0..4 {
            assert_eq!(reassembler.push(0, &1, &datagram(id, 0, 2, b"abcd")), Ok(Outcome::Waiting));
        }
        assert_eq!((reassembler.len(), reassembler.totals().evicted), (3, 1));
        assert_eq!(reassembler.push(0, &1, &datagram(1, 1, 2, b"x")), Ok(complete(b"abcdx")));
        assert_eq!(reassembler.push(0, &2, &datagram(0, 0, 2, &[0; 20])), Ok(Outcome::Waiting));
        assert_eq!(reassembler.push(0, &3, &datagram(0, 0, 2, &[0; 20])), Ok(Outcome::Waiting));
        assert_eq!((reassembler.len(), reassembler.bytes()), (2, 40), "both frames of peer 1 are gone");
        assert_eq!(reassembler.push(0, &4, &datagram(0, 0, 2, &[0; 31])), Err(Dropped::OverLimit));
        assert_eq!((reassembler.len(), reassembler.bytes()), (2, 40));
        reassembler.forget(&2);
        assert_eq!((reassembler.len(), reassembler.bytes()), (1, 20));
    }

    #[test]
    fn waiting_ends_at_the_expiry() {
        let mut reassembler = small();
        assert_eq!(reassembler.push(1000, &1, &datagram(0, 0, 2, b"a")), Ok(Outcome::Waiting));
        assert_eq!(reassembler.push(1050, &1, &datagram(1, 0, 2, b"a")), Ok(Outcome::Waiting));
        reassembler.expire(1099);
        assert_eq!(reassembler.len(), 2);
        assert_eq!(reassembler.push(1100, &1, &datagram(0, 1, 2, b"b")), Ok(Outcome::Waiting), "begun anew");
        assert_eq!((reassembler.len(), reassembler.totals().expired), (2, 1));
        reassembler.expire(u64::MAX);
        assert_eq!((reassembler.len(), reassembler.bytes(), reassembler.by_age.len()), (0, 0, 0));
    }

    #[test]
    fn the_longest_frame_of_255_parts() {
        let mut reassembler = Reassembler::new(Limits::default());
        let part = vec![5; super::super::MAX_MTU - HEADER_LEN];
        for index in (1..255).rev() {
            assert_eq!(reassembler.push(0, &(), &datagram(3, index, 255, &part)), Ok(Outcome::Waiting));
        }
        let last = datagram(3, 0, 255, &part);
        let Ok(Outcome::Complete(frame)) = reassembler.push(0, &(), &last) else { panic!() };
        assert_eq!(frame.len(), 255 * part.len());
    }
}
