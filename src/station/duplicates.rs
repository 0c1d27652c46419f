//! Copies of UDP requests: what the network doubles or a client repeats is computed once.
//!
//! A request that changes a session or costs a worker's time is remembered by its sender, opcode, sequence and XXH64 of the
//! payload. A copy that comes while the first is being worked on is dropped; a copy that comes later gets the same reply
//! again, as long as it is kept. The cache is bounded in entries and bytes, the oldest goes first.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use aeon_proto::frame::Frame;

/// Replies kept at most.
const MAX_ENTRIES: usize = 4096;
/// Bytes of replies kept at most.
const MAX_BYTES: usize = 32 << 20;

/// What tells one UDP request from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    sender: SocketAddr,
    stream_id: u16,
    sequence: u32,
    payload: u64,
}

impl Key {
    pub(crate) fn new(sender: SocketAddr, frame: &Frame<'_>) -> Self {
        let payload = xxhash_rust::xxh64::xxh64(frame.payload, 0);
        Self { sender, stream_id: frame.stream_id, sequence: frame.sequence, payload }
    }
}

/// What is known of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Nothing: it is now in flight, and must be finished.
    New,
    /// It is being worked on.
    InFlight,
    /// It was done, with this reply.
    Done(Arc<[u8]>),
}

/// The bounded cache of replies.
#[derive(Debug, Default)]
pub(crate) struct Duplicates {
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    entries: HashMap<Key, Option<Arc<[u8]>>>,
    done: VecDeque<(Key, usize)>,
    bytes: usize,
}

impl Duplicates {
    /// Looks a request up, and takes it in flight if it is new.
    pub(crate) fn begin(&self, key: Key) -> Known {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        match cache.entries.get(&key) {
            Some(Some(reply)) => Known::Done(Arc::clone(reply)),
            Some(None) => Known::InFlight,
            None => {
                if cache.entries.capacity() == 0 {
                    // Twice what it holds: entries come and go, and the table then never has to be made anew for that.
                    cache.entries.reserve(2 * MAX_ENTRIES);
                }
                cache.entries.insert(key, None);
                Known::New
            }
        }
    }

    /// Ends the flight of a request: keeps its reply, or forgets it so that a copy is tried anew.
    pub(crate) fn finish(&self, key: Key, reply: Option<&[u8]>) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(reply) = reply.filter(|reply| reply.len() <= MAX_BYTES) else {
            cache.entries.remove(&key);
            return;
        };
        cache.entries.insert(key, Some(reply.into()));
        cache.done.push_back((key, reply.len()));
        cache.bytes += reply.len();
        while cache.done.len() > MAX_ENTRIES || cache.bytes > MAX_BYTES {
            let Some((oldest, len)) = cache.done.pop_front() else { break };
            cache.entries.remove(&oldest);
            cache.bytes -= len;
        }
    }
}

#[cfg(test)]
mod tests {
    use aeon_proto::frame::Flags;

    use super::*;

    fn key(sequence: u32, payload: &[u8]) -> Key {
        let frame = Frame { stream_id: 3, sequence, flags: Flags::NONE, payload };
        Key::new("127.0.0.1:7".parse().unwrap(), &frame)
    }

    #[test]
    fn a_copy_is_dropped_in_flight_and_answered_from_the_cache_later() {
        let duplicates = Duplicates::default();
        assert_eq!(duplicates.begin(key(1, b"a")), Known::New);
        assert_eq!(duplicates.begin(key(1, b"a")), Known::InFlight);
        assert_eq!(duplicates.begin(key(1, b"b")), Known::New);
        duplicates.finish(key(1, b"a"), Some(b"reply"));
        assert_eq!(duplicates.begin(key(1, b"a")), Known::Done(b"reply"[..].into()));
        duplicates.finish(key(1, b"b"), None);
        assert_eq!(duplicates.begin(key(1, b"b")), Known::New);
    }

    #[test]
    fn entries_and_bytes_are_bounded() {
        let duplicates = Duplicates::default();
        for sequence in 0..MAX_ENTRIES as u32 + 10 {
            duplicates.begin(key(sequence, b""));
            duplicates.finish(key(sequence, b""), Some(b"x"));
        }
        assert_eq!(duplicates.begin(key(9, b"")), Known::New);
        assert!(matches!(duplicates.begin(key(10, b"")), Known::Done(_)));
        let large = vec![0; MAX_BYTES / 2 + 1];
        for sequence in [100_000, 100_001] {
            duplicates.begin(key(sequence, b""));
            duplicates.finish(key(sequence, b""), Some(&large));
        }
        assert_eq!(duplicates.begin(key(100_000, b"")), Known::New);
        assert!(matches!(duplicates.begin(key(100_001, b"")), Known::Done(_)));
    }
}
