//! What a session keeps beside its cache, so that its prefix can be captured: tails, and what its positions came through.
//!
//! The **tail** of a prefix is the output residual at its last position. The cache does not hold it, so the station keeps
//! some as requests pass:
//!
//! - of every request with more than one position (a prefill, or a chunk of one): the tail at its end;
//! - of the first single position after such a request, since it may be the remainder of a prefill;
//! - of the latest position, whatever it came with.
//!
//! Older tails go first when there are more than `MAX_TAILS`. So the tail of the last prefill is there for as long as
//! decoding goes on, token by token, and a capture may come late. Going back to a position drops every tail behind it: a
//! tail always belongs to the positions that the session holds now.

use std::{collections::VecDeque, net::SocketAddr};

use super::session::is_newer;
use crate::basis::quantiser::Norms;

/// Tails that a session keeps: the last prefill, its possible remainder, the latest, and one prefill before.
const MAX_TAILS: usize = 4;
/// Changes of provenance that are told apart; the first ones are taken together when there are more.
const MAX_PARTS: usize = 8;

/// What residuals passed through before they came into a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Provenance {
    /// Nothing that loses anything.
    #[default]
    Raw,
    /// The basis with this fingerprint.
    Basis(u32),
    /// Numbers of few bits.
    Quantised,
    /// Several of these in turn.
    Mixed,
}

impl Provenance {
    /// What a sequence passed through of which one part passed through `self` and another through `other`.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::Mixed }
    }
}

impl std::fmt::Display for Provenance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Raw => f.write_str("raw"),
            Self::Basis(fingerprint) => write!(f, "0x{fingerprint:08x}"),
            Self::Quantised => f.write_str("quantised"),
            Self::Mixed => f.write_str("mixed"),
        }
    }
}

/// A tail and the prefix that it ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Tail {
    /// Positions of the prefix.
    pub prefix_len: usize,
    /// The residual at the last of them.
    pub values: Vec<f32>,
    /// The UDP request that made it.
    by: Option<(SocketAddr, u32)>,
    /// Whether it came alone behind another one, as in decoding.
    is_single: bool,
}

impl Tail {
    /// Whether it was there when a UDP sender sent its request `sequence`, as far as that sender's own requests go. A
    /// capture that was overtaken on its way must not take what a newer request has made of the session.
    #[must_use]
    pub fn was_there(&self, sender: SocketAddr, sequence: u32) -> bool {
        self.by.is_none_or(|(maker, made)| maker != sender || is_newer(sequence, made))
    }
}

/// What one session keeps.
#[derive(Debug, Default)]
pub struct Kept {
    /// By increasing prefix.
    tails: VecDeque<Tail>,
    /// Where positions began to come through something else, by increasing position; the first begins at 0.
    parts: Vec<(usize, Provenance)>,
    /// The latest norms of its output, if that was quantised.
    pub norms: Norms,
}

impl Kept {
    /// Forgets what is about positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        while self.tails.back().is_some_and(|tail| tail.prefix_len > len) {
            self.tails.pop_back();
        }
        while self.parts.last().is_some_and(|(begin, _)| *begin >= len) {
            self.parts.pop();
        }
        self.norms.truncate(len);
    }

    /// Notes the output `last` at the end of the positions `begin..begin + seq`, which replaces what was noted of them;
    /// `by` is the UDP request that it answers.
    pub fn note(
        &mut self,
        begin: usize,
        seq: usize,
        last: &[f32],
        provenance: Provenance,
        by: Option<(SocketAddr, u32)>,
    ) {
        self.truncate(begin);
        self.note_part(begin, provenance);
        let follows = |tail: &Tail| tail.prefix_len == begin;
        let is_single = seq == 1 && self.tails.back().is_some_and(follows);
        let singles = self.tails.iter().rev().take_while(|tail| tail.is_single).count();
        // The memory of a tail that goes is used again: decoding allocates nothing here.
        let reused = match (is_single && singles >= 2, self.tails.len() >= MAX_TAILS) {
            (true, _) => self.tails.pop_back(),
            (false, true) => self.tails.pop_front(),
            (false, false) => None,
        };
        let mut values = reused.map(|tail| tail.values).unwrap_or_default();
        values.clear();
        values.extend_from_slice(last);
        self.tails.push_back(Tail { prefix_len: begin.saturating_add(seq), values, by, is_single });
    }

    fn note_part(&mut self, begin: usize, provenance: Provenance) {
        match self.parts.last() {
            Some((_, last)) if *last == provenance => return,
            None if begin > 0 => self.parts.push((0, Provenance::Mixed)),
            _ => {}
        }
        self.parts.push((begin, provenance));
        if self.parts.len() > MAX_PARTS {
            self.parts.drain(1..2);
            self.parts[0].1 = Provenance::Mixed;
        }
    }

    /// Replaces everything by what is about a prefix that was put into the session as a whole.
    pub fn replace(&mut self, prefix_len: usize, values: Vec<f32>, provenance: Provenance) {
        self.tails.clear();
        self.tails.push_back(Tail { prefix_len, values, by: None, is_single: false });
        self.parts.clear();
        self.parts.push((0, provenance));
        self.norms.truncate(0);
    }

    /// The tail of a prefix, if it is kept.
    #[must_use]
    pub fn tail(&self, prefix_len: usize) -> Option<&Tail> {
        self.tails.iter().find(|tail| tail.prefix_len == prefix_len)
    }

    /// The prefixes whose tails are kept.
    #[must_use]
    pub fn prefixes(&self) -> Vec<usize> {
        self.tails.iter().map(|tail| tail.prefix_len).collect()
    }

    /// What the first `prefix_len` positions came through.
    #[must_use]
    pub fn provenance(&self, prefix_len: usize) -> Provenance {
        let parts = self.parts.iter().take_while(|(begin, _)| *begin < prefix_len);
        parts.map(|(_, provenance)| *provenance).reduce(Provenance::and).unwrap_or_default()
    }

    /// Memory held, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let tails: usize =
            self.tails.iter().map(|tail| size_of::<Tail>() + tail.values.capacity() * size_of::<f32>()).sum();
        tails + self.parts.capacity() * size_of::<(usize, Provenance)>() + self.norms.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(kept: &mut Kept, begin: usize, seq: usize) {
        kept.note(begin, seq, &[(begin + seq) as f32], Provenance::Raw, None);
    }

    #[test]
    fn the_tail_of_the_last_prefill_outlives_decoding() {
        let mut kept = Kept::default();
        note(&mut kept, 0, 200);
        for pos in 200..300 {
            note(&mut kept, pos, 1);
        }
        assert_eq!(kept.prefixes(), [200, 201, 300]);
        assert_eq!(kept.tail(200).unwrap().values, [200.0]);
        assert_eq!(kept.tail(300).unwrap().values, [300.0]);
        assert_eq!(kept.tail(250), None);
        // Another prompt behind it, with a remainder of one position.
        note(&mut kept, 300, 4);
        note(&mut kept, 304, 1);
        note(&mut kept, 305, 1);
        note(&mut kept, 306, 1);
        assert_eq!(kept.prefixes(), [300, 304, 305, 307]);
    }

    #[test]
    fn going_back_drops_what_is_behind() {
        let mut kept = Kept::default();
        note(&mut kept, 0, 8);
        note(&mut kept, 8, 4);
        note(&mut kept, 8, 2);
        assert_eq!(kept.prefixes(), [8, 10]);
        kept.truncate(9);
        assert_eq!(kept.prefixes(), [8]);
        note(&mut kept, 5, 1);
        assert_eq!(kept.prefixes(), [6]);
        note(&mut kept, 0, 1);
        assert_eq!(kept.prefixes(), [1]);
        kept.replace(7, vec![0.5], Provenance::Mixed);
        assert_eq!((kept.prefixes(), kept.provenance(7)), (vec![7], Provenance::Mixed));
    }

    #[test]
    fn an_overtaken_capture_is_told_from_one_in_order() {
        let (sender, other) = ("10.0.0.1:5".parse().unwrap(), "10.0.0.2:5".parse().unwrap());
        let mut kept = Kept::default();
        kept.note(0, 4, &[], Provenance::Raw, Some((sender, 7)));
        let tail = kept.tail(4).unwrap();
        assert!(tail.was_there(sender, 8) && !tail.was_there(sender, 7) && !tail.was_there(sender, 6));
        assert!(tail.was_there(other, 1));
        kept.note(4, 1, &[], Provenance::Raw, Some((sender, 20)));
        assert!(kept.tail(4).unwrap().was_there(sender, 8));
        kept.note(0, 4, &[], Provenance::Raw, Some((sender, 21)));
        assert!(!kept.tail(4).unwrap().was_there(sender, 8));
    }

    #[test]
    fn provenance_is_that_of_all_positions_of_the_prefix() {
        let basis = Provenance::Basis(7);
        let mut kept = Kept::default();
        kept.note(0, 10, &[], Provenance::Raw, None);
        kept.note(10, 5, &[], basis, None);
        assert_eq!(kept.provenance(10), Provenance::Raw);
        assert_eq!(kept.provenance(11), Provenance::Mixed);
        // What came through the basis is replaced.
        kept.note(8, 1, &[], Provenance::Raw, None);
        assert_eq!(kept.provenance(9), Provenance::Raw);
        kept.note(0, 3, &[], basis, None);
        assert_eq!(kept.provenance(3), basis);
        for pos in 3..100 {
            kept.note(pos, 1, &[], if pos % 2 == 0 { basis } else { Provenance::Raw }, None);
        }
        assert_eq!(kept.provenance(100), Provenance::Mixed);
        assert!(kept.bytes() < 4096);
        kept.truncate(0);
        kept.note(0, 2, &[], Provenance::Raw, None);
        assert_eq!(kept.provenance(2), Provenance::Raw);
    }
}
