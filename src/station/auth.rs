//! Who holds the shared key may ask: checks requests, and that none is taken twice. Format: `aeon_proto::auth`.
//!
//! A request is taken if its mac is right, its time within the window of this clock, and its stamp new. Stamps are kept
//! while they are within the window. If there are too many, the oldest are forgotten and nothing as old as they is taken
//! any more: memory is bounded, and a replay is never taken.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aeon_proto::{
    auth::{AuthError, Key, Stamp},
    frame::Frame,
};

/// Stamps kept at most, about 10 MB of them.
const MAX_STAMPS: usize = 1 << 18;

/// The shared key of a station and how strictly time is looked at.
#[derive(Debug, Clone)]
pub struct AuthOptions {
    /// The key.
    pub key: Key,
    /// How far a request's time may be from this clock, either way.
    pub window: Duration,
    /// Whether requests on Unix sockets need none: there the file's mode and the lists of users say who may ask.
    pub exempt_unix: bool,
}

/// Why an authentic request, or one that should be, is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not signed, or not with this key.
    #[error("{0}; this station takes only requests signed with its key (aeonctl --auth-key-file FILE)")]
    NotAuthentic(#[from] AuthError),
    /// Signed too long ago or too far ahead, by the clocks of both.
    #[error("request was signed {off_ms} ms {}, at most {window_ms} ms are taken; set the clocks right",
        if *.is_late { "ago" } else { "in the future" })]
    Stale {
        /// How far its time is off.
        off_ms: u64,
        /// Whether it is in the past.
        is_late: bool,
        /// The limit.
        window_ms: u64,
        /// This clock, in milliseconds since 1970.
        now_ms: u64,
    },
    /// Signed before the oldest stamp that is still known.
    #[error("request was signed before those that this station still remembers; sign it anew")]
    Forgotten,
    /// Taken before.
    #[error("request with this stamp was taken before; sign it anew")]
    Replayed,
}

/// Checks requests against a key and what was taken before.
#[derive(Debug)]
pub(crate) struct Authenticator {
    options: AuthOptions,
    seen: Mutex<Seen>,
    max_stamps: usize,
}

#[derive(Debug)]
struct Seen {
    stamps: BTreeSet<Stamp>,
    /// Nothing signed at or before this time is taken.
    floor: u64,
}

impl Authenticator {
    /// Nothing signed before now is taken: what an earlier process took is not known any more.
    pub(crate) fn new(options: AuthOptions) -> Self {
        let seen = Seen { stamps: BTreeSet::new(), floor: now_ms().saturating_sub(1) };
        Self { options, seen: Mutex::new(seen), max_stamps: MAX_STAMPS }
    }

    pub(crate) const fn key(&self) -> &Key {
        &self.options.key
    }

    pub(crate) const fn exempts_unix(&self) -> bool {
        self.options.exempt_unix
    }

    /// Whether a request carries the key. Its stamp is still to be taken.
    pub(crate) fn verify(&self, frame: &Frame<'_>) -> Result<Stamp, Refused> {
        Ok(self.options.key.verify_request(frame)?)
    }

    /// Takes a stamp, once.
    pub(crate) fn take(&self, stamp: Stamp) -> Result<(), Refused> {
        self.take_at(stamp, now_ms())
    }

    fn take_at(&self, stamp: Stamp, now_ms: u64) -> Result<(), Refused> {
        let window_ms = u64::try_from(self.options.window.as_millis()).unwrap_or(u64::MAX);
        let off_ms = stamp.ts.abs_diff(now_ms);
        if off_ms > window_ms {
            return Err(Refused::Stale { off_ms, is_late: stamp.ts < now_ms, window_ms, now_ms });
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if stamp.ts <= seen.floor {
            return Err(if seen.stamps.contains(&stamp) { Refused::Replayed } else { Refused::Forgotten });
        }
        if !seen.stamps.insert(stamp) {
            return Err(Refused::Replayed);
        }
        // What is older than the window is refused for its age.
        let oldest = now_ms.saturating_sub(window_ms);
        while let Some(first) = seen.stamps.first().copied() {
            if first.ts < oldest {
                seen.stamps.pop_first();
            } else if seen.stamps.len() > self.max_stamps {
                seen.floor = seen.floor.max(first.ts);
                seen.stamps.pop_first();
            } else {
                break;
            }
        }
        Ok(())
    }
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authenticator(max_stamps: usize) -> Authenticator {
        let key = Key::from_secret(b"0123456789abcdef").unwrap();
        let options = AuthOptions { key, window: Duration::from_millis(100), exempt_unix: false };
        let seen = Seen { stamps: BTreeSet::new(), floor: 999 };
        Authenticator { options, seen: Mutex::new(seen), max_stamps }
    }

    fn stamp(ts: u64, nonce: u128) -> Stamp {
        Stamp { ts, nonce }
    }

    #[test]
    fn a_stamp_is_taken_once_within_its_window() {
        let auth = authenticator(100);
        assert_eq!(auth.take_at(stamp(1000, 1), 1050), Ok(()));
        assert_eq!(auth.take_at(stamp(1000, 1), 1060), Err(Refused::Replayed));
        assert_eq!(auth.take_at(stamp(1000, 2), 1060), Ok(()));
        assert_eq!(auth.take_at(stamp(1160, 3), 1060), Ok(()));
        let late = Refused::Stale { off_ms: 101, is_late: true, window_ms: 100, now_ms: 1201 };
        assert_eq!(auth.take_at(stamp(1100, 4), 1201), Err(late));
        assert!(late.to_string().contains("101 ms ago, at most 100 ms"), "{late}");
        let early = auth.take_at(stamp(1302, 5), 1201).unwrap_err();
        assert!(early.to_string().contains("101 ms in the future"), "{early}");
    }

    #[test]
    fn what_was_signed_before_the_station_started_is_not_taken() {
        assert_eq!(authenticator(100).take_at(stamp(999, 1), 1000), Err(Refused::Forgotten));
        let fresh = Authenticator::new(authenticator(1).options);
        assert_eq!(fresh.take(stamp(now_ms().saturating_sub(50), 1)), Err(Refused::Forgotten));
    }

    #[test]
    fn too_many_stamps_raise_the_floor_and_never_let_a_replay_in() {
        let auth = authenticator(10);
        let mut taken = Vec::new();
        for n in 0..50 {
            let stamp = stamp(1000 + n / 2, u128::from(n));
            if auth.take_at(stamp, 1010).is_ok() {
                taken.push(stamp);
            }
            assert!(auth.seen.lock().unwrap().stamps.len() <= 10);
        }
        assert!(taken.len() >= 49);
        for stamp in taken {
            assert!(auth.take_at(stamp, 1010).is_err(), "{stamp:?}");
        }
        assert_eq!(auth.take_at(stamp(1001, 999), 1010), Err(Refused::Forgotten));
        assert_eq!(auth.take_at(stamp(1025, 999), 1010), Ok(()));
    }

    #[test]
    fn stamps_beyond_the_window_are_forgotten_for_their_age() {
        let auth = authenticator(100);
        for n in 0..50 {
            assert_eq!(auth.take_at(stamp(1000, n), 1000), Ok(()));
        }
        assert_eq!(auth.take_at(stamp(1150, 0), 1150), Ok(()));
        assert_eq!(auth.seen.lock().unwrap().stamps.len(), 1);
    }
}
