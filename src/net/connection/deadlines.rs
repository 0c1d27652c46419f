//! Time limits of a connection.

use std::{
    io::{self, ErrorKind},
    time::{Duration, Instant},
};

use super::{Connection, socket::StreamSocket};
use crate::station::error::RequestError;

impl<S: StreamSocket> Connection<S> {
    pub(super) fn half_frame_deadline(&self) -> Option<Instant> {
        let started_mib = u32::try_from(self.carry.len() >> 20).unwrap_or(u32::MAX).saturating_add(1);
        Some(self.carry_since? + self.options.half_frame_timeout.saturating_mul(started_mib))
    }

    pub(super) fn next_deadline(&self) -> Instant {
        let idle = self.last_request + self.options.idle_timeout;
        let blocked = self.blocked_since.map(|since| since + self.options.write_timeout);
        [self.half_frame_deadline(), blocked, self.probe_at].into_iter().flatten().fold(idle, Instant::min)
    }

    /// Looks at all time limits; returns whether the connection is over.
    pub(super) fn expired(&mut self, now: Instant) -> io::Result<bool> {
        if self.blocked_since.is_some_and(|since| now >= since + self.options.write_timeout) {
            return Err(io::Error::new(ErrorKind::TimedOut, "peer does not read its replies"));
        }
        if self.probe_at.is_some_and(|at| now >= at) {
            self.probe_at = None;
            if self.socket.is_abandoned() {
                return Err(io::Error::new(ErrorKind::ConnectionAborted, "peer left with work in flight"));
            }
        }
        if self.half_frame_deadline().is_some_and(|deadline| now >= deadline) {
            let waited = self.carry_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            let error = RequestError::HalfFrame { got: self.carry.len(), waited_ms: waited.as_millis() as u64 };
            self.with_output(|connection| connection.broken(error))?;
            return Ok(false);
        }
        let idle = self.in_flight.is_empty() && self.parked.is_empty();
        if now >= self.last_request + self.options.idle_timeout {
            if idle {
                return Ok(true);
            }
            self.last_request = now;
        }
        Ok(false)
    }
}
