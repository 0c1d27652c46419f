//! What a station takes at most. Every number can be configured; the defaults are safe for a process of a few GiB.

use std::time::Duration;

use aeon_proto::frame::MAX_FRAME_LEN;

use crate::model::{session::SessionLimits, worker::QueueLimits};

/// The largest UDP payload over IPv4: 65,535 less the headers of IP and UDP.
pub const MAX_DATAGRAM_LEN: usize = 65_507;

/// How much the key-value shards of a station may hold, all shards together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardLimits {
    /// Entries at once.
    pub entries: usize,
    /// Bytes of all entries.
    pub bytes: usize,
}

/// Limits of a station.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a frame, header included, in either direction.
    pub max_frame_len: usize,
    /// Bytes of a datagram, in either direction.
    pub max_datagram_len: usize,
    /// Positions of one request.
    pub max_positions: usize,
    /// Work waiting for the model or running on it, of all peers.
    pub queue: QueueLimits,
    /// Requests of different sessions that run through the model together; 1 runs each alone.
    pub max_batch: usize,
    /// Bytes of half frames, waiting requests and unread replies of all connections. One connection may hold as much as is
    /// left, and 16 KiB in any case.
    pub max_buffered_bytes: usize,
    /// Sessions and their memory.
    pub sessions: SessionLimits,
    /// Bytes of the prefix replay cache.
    pub max_replay_bytes: usize,
    /// Entries of the key-value shards and their memory.
    pub shards: ShardLimits,
    /// What an overloaded or draining station tells clients to wait.
    pub retry_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_frame_len: MAX_FRAME_LEN,
            max_datagram_len: MAX_DATAGRAM_LEN,
            max_positions: 4096,
            queue: QueueLimits { items: 1024, bytes: 256 << 20 },
            max_batch: 16,
            max_buffered_bytes: 512 << 20,
            sessions: SessionLimits { count: 4096, bytes: 2 << 30, max_idle: Duration::from_secs(3600) },
            max_replay_bytes: 256 << 20,
            shards: ShardLimits { entries: 4096, bytes: 16 << 20 },
            retry_after: Duration::from_millis(250),
        }
    }
}
