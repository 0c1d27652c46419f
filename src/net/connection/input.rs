//! From bytes to frames: reading, what is kept of a frame that is not complete yet, and streams that cannot be read on.

use std::{
    cell::Cell,
    io::{self, ErrorKind},
    task::{Context, Poll, ready},
    time::Instant,
};

use aeon_proto::frame::{HEADER_LEN, Header};

use super::{Connection, LOOKAHEAD_LEN, Phase, READS_PER_TURN, SCRATCH_LEN, socket::StreamSocket};
use crate::{
    codec::{StreamError, next_frame},
    station::{error::RequestError, request::Peer},
    telemetry::faults::fault,
};

thread_local! {
    static INPUT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl<S: StreamSocket> Connection<S> {
    /// Waits for something to read, handles it, writes what was answered. Holds a buffer only while there is something.
    pub(super) fn poll_read_turn(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with_input(|connection, input| {
            let read = ready!(connection.socket.poll_read(cx, input));
            Poll::Ready(connection.received(read, input).map(drop))
        })
    }

    /// Reads what is there by now, handles it, writes what was answered.
    pub(super) fn read_turn(&mut self) -> io::Result<()> {
        for _ in 0..READS_PER_TURN {
            let more = self.with_input(|connection, input| {
                let read = connection.socket.try_read(input);
                connection.received(read, input)
            })?;
            let is_free = !self.is_held && self.output.is_empty() && self.parked_bytes < LOOKAHEAD_LEN;
            if !more || !is_free || self.phase != Phase::Open {
                break;
            }
        }
        Ok(())
    }

    /// Runs `work` with the buffer of this thread. Whole frames may have to wait for their turn, so it gets no more of it
    /// than there is room for.
    fn with_input<T>(&mut self, work: impl FnOnce(&mut Self, &mut [u8]) -> T) -> T {
        let mut input = INPUT.take();
        input.resize(SCRATCH_LEN, 0);
        let most = input.len().min(self.room());
        let result = work(self, input.get_mut(..most).unwrap_or_default());
        INPUT.set(input);
        result
    }

    /// Handles what a read brought into `input`; returns whether there may be more.
    fn received(&mut self, read: io::Result<usize>, input: &[u8]) -> io::Result<bool> {
        let len = match read {
            Ok(0) => {
                self.end_of_input();
                return Ok(false);
            }
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(error),
        };
        let now = Instant::now();
        self.with_output(|connection| connection.take(input.get(..len).unwrap_or_default(), now))?;
        let is_full = len == input.len();
        self.reads += usize::from(is_full);
        Ok(is_full)
    }

    pub(super) fn end_of_input(&mut self) {
        self.phase = Phase::InputEnded;
        self.carry = Vec::new();
        self.carry_since = None;
    }

    /// Handles the frames in `bytes`, which follow those in `carry`.
    pub(super) fn take(&mut self, bytes: &[u8], now: Instant) {
        if self.carry.is_empty() {
            let used = self.frames(bytes, now);
            if let Some(rest) = bytes.get(used..).filter(|rest| !rest.is_empty())
                && self.phase == Phase::Open
            {
                self.carry.extend_from_slice(rest);
                self.carry_since = Some(now);
            }
            return;
        }
        let mut carry = std::mem::take(&mut self.carry);
        // It grows by a quarter at a time, and not beyond the frame's end: room that nothing fills is taken from others.
        let frame_len = carry
            .get(self.options.framing.prefix_len()..)
            .and_then(<[u8]>::first_chunk)
            .map(|header| self.options.framing.prefix_len() + HEADER_LEN + Header::decode(header).payload_len as usize);
        let wanted = (carry.len() + carry.len() / 4).min(frame_len.unwrap_or(0)).saturating_sub(carry.len());
        if !bytes.is_empty() {
            carry.reserve_exact(wanted.max(bytes.len()));
            carry.extend_from_slice(bytes);
        }
        let used = self.frames(&carry, now);
        if used == carry.len() || self.phase != Phase::Open {
            self.carry_since = None;
            return;
        }
        if used > 0 {
            carry.drain(..used);
            if carry.capacity() > 2 * SCRATCH_LEN {
                carry.shrink_to_fit();
            }
            self.carry_since = Some(now);
        }
        self.carry = carry;
    }

    /// Handles all whole frames at the start of `bytes`; returns the bytes they took.
    pub(super) fn frames(&mut self, bytes: &[u8], now: Instant) -> usize {
        let mut used = 0;
        loop {
            let rest = bytes.get(used..).unwrap_or_default();
            match next_frame(rest, self.options.framing, self.options.max_frame_len) {
                Ok(None) => return used,
                Ok(Some(_)) if self.is_full() => return used,
                Ok(Some((frame, len))) => {
                    used += len;
                    self.frame(frame, now);
                }
                Err(error) => {
                    self.broken(error.into());
                    return used;
                }
            }
        }
    }

    /// Says why the stream cannot be read on, and stops reading it.
    pub(super) fn broken(&mut self, error: RequestError) {
        let Peer { carrier, origin, .. } = self.peer;
        fault!(DEBUG, error.fault(), carrier = carrier.name(), peer = %origin, %error, "stream cannot be read on: {error}");
        let (stream_id, sequence) = match &error {
            RequestError::Stream(
                StreamError::PrefixMismatch { stream_id, sequence, .. }
                | StreamError::FrameTooLarge { stream_id, sequence, .. },
            ) => (*stream_id, *sequence),
            _ => {
                let header = self.carry.get(self.options.framing.prefix_len()..).and_then(<[u8]>::first_chunk);
                header.map(Header::decode).map_or((0, 0), |header| (header.stream_id, header.sequence))
            }
        };
        self.vent(&error, stream_id, sequence);
        self.phase = Phase::Broken;
        self.carry = Vec::new();
        self.carry_since = None;
    }
}
