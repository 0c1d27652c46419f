//! Replies on their way out: one buffer of the thread for all replies to one read, kept only while the socket is full.

use std::{
    cell::Cell,
    io::{self, ErrorKind},
    time::Instant,
};

use aeon_proto::frame::PREFIX_LEN;

use super::{Connection, FRAMES_PER_TURN, MIN_ROOM, SCRATCH_LEN, socket::StreamSocket};
use crate::codec::Framing;

thread_local! {
    static OUTPUT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Bytes of replies that wait for their peer before its next request is handled: a few bytes can ask for a lot.
const MAX_WAITING_LEN: usize = 1 << 20;

pub(super) fn patch_prefix(out: &mut [u8], start: usize, framing: Framing) {
    if framing == Framing::Prefixed
        && let Some((prefix, frame)) = out.get_mut(start..).and_then(<[u8]>::split_first_chunk_mut::<PREFIX_LEN>)
    {
        *prefix = (frame.len() as u32).to_be_bytes();
    }
}

impl<S: StreamSocket> Connection<S> {
    /// Runs `work` with an output buffer that is borrowed from the thread unless replies are waiting already, then writes.
    pub(super) fn with_output(&mut self, work: impl FnOnce(&mut Self)) -> io::Result<()> {
        if self.output.is_empty() {
            self.output = OUTPUT.take();
        }
        work(self);
        self.flush()?;
        self.catch_up()
    }

    /// Handles what was held back while too many replies were waiting or others had their turn, as far as its replies leave
    /// and this turn goes.
    pub(super) fn catch_up(&mut self) -> io::Result<()> {
        while self.is_held && self.output.is_empty() && self.frames < FRAMES_PER_TURN {
            self.is_held = false;
            self.output = OUTPUT.take();
            self.unpark();
            self.take(&[], Instant::now());
            self.flush()?;
        }
        Ok(())
    }

    /// Whether so many replies are waiting that no request is handled before they have left, or this turn is over.
    pub(super) fn is_full(&mut self) -> bool {
        self.is_held |= self.output.len() >= MAX_WAITING_LEN
            || self.frames >= FRAMES_PER_TURN
            || (self.output.len() >= MIN_ROOM / 2 && self.output.len() >= self.room() / 2);
        self.is_held
    }

    /// Writes as much of the output as the socket takes.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while let Some(rest) = self.output.get(self.written..).filter(|rest| !rest.is_empty()) {
            match self.socket.try_write(rest) {
                Ok(len) => {
                    self.written += len;
                    self.blocked_since = None;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.blocked_since.get_or_insert_with(Instant::now);
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if let Some(ready) = self.ready_since.take() {
            self.station.counters().stages.write.observe(ready.elapsed());
        }
        self.written = 0;
        self.blocked_since = None;
        let mut output = std::mem::take(&mut self.output);
        output.clear();
        // The thread keeps one buffer of a usual size; a large one goes back to the allocator.
        if output.capacity() <= 2 * SCRATCH_LEN {
            OUTPUT.set(output);
        }
        Ok(())
    }
}
