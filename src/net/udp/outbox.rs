//! Answers on their way out.
//!
//! Answers in a row that have one size and go to one peer leave in one system call, which cuts them into datagrams at the
//! very end of the way (GSO); the last of a run may be shorter. Where the system or a device cannot do that, each leaves by
//! itself. What the socket has no room for waits here.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind},
    time::Instant,
};

use super::Path;
use crate::station::limits::MAX_DATAGRAM_LEN;

/// The largest answer that is joined with others: every link takes it uncut (1,280 bytes less the headers of IPv6 and UDP).
/// Larger ones would gain nothing, and a link that does not take them would end the offload for all peers.
const MAX_SEGMENT_LEN: usize = 1232;
/// Answers that wait for room in the socket's send buffer.
const MAX_BACKLOG: usize = 1024;

/// What sends datagrams.
pub(super) trait Wire {
    /// Sends `bytes` as one datagram, or as several of `segment` bytes (the last may be shorter).
    ///
    /// # Errors
    /// `WouldBlock` if the socket has no room, else what the system said.
    fn try_send(&self, path: Path, bytes: &[u8], segment: Option<usize>) -> io::Result<()>;
    /// Datagrams that one call sends at most; 1 where they cannot be joined.
    fn max_segments(&self) -> usize;
    /// One call has taken its answers, the oldest of which was ready at `ready`.
    fn sent(&self, ready: Instant);
    /// An answer did not leave.
    fn failed(&self, path: Path, frame: &[u8], error: &io::Error);
    /// There was no room to let an answer wait.
    fn dropped(&self);
}

/// Answers to one peer, one behind the other.
#[derive(Debug)]
struct Run {
    path: Path,
    /// Bytes of each but the last.
    segment: usize,
    count: usize,
    /// When the oldest was there.
    ready: Instant,
}

/// Answers that are about to leave.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    run: Option<Run>,
    bytes: Vec<u8>,
    backlog: VecDeque<(Path, Vec<u8>, Instant)>,
}

impl Outbox {
    /// Whether answers wait for room in the socket.
    pub(super) fn is_waiting(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Takes an answer. It leaves with [`Self::flush`] at the latest.
    pub(super) fn push(&mut self, wire: &impl Wire, path: Path, frame: &[u8], ready: Instant) {
        if self.is_waiting() {
            return self.keep(wire, path, frame.to_vec(), ready);
        }
        let max_segments = wire.max_segments();
        if let Some(run) = &mut self.run
            && run.path == path
            && frame.len() <= run.segment
            && run.count < max_segments
            && self.bytes.len() == run.segment * run.count
            && self.bytes.len() + frame.len() <= MAX_DATAGRAM_LEN
        {
            self.bytes.extend_from_slice(frame);
            run.count += 1;
            return;
        }
        self.flush(wire);
        if self.is_waiting() {
            return self.keep(wire, path, frame.to_vec(), ready);
        }
        if frame.len() > MAX_SEGMENT_LEN || max_segments < 2 {
            return self.send(wire, path, frame, ready);
        }
        self.bytes.extend_from_slice(frame);
        self.run = Some(Run { path, segment: frame.len(), count: 1, ready });
    }

    /// Sends what was taken.
    pub(super) fn flush(&mut self, wire: &impl Wire) {
        let Some(Run { path, segment, count, ready }) = self.run.take() else { return };
        let bytes = std::mem::take(&mut self.bytes);
        if count == 1 {
            self.send(wire, path, &bytes, ready);
        } else {
            match wire.try_send(path, &bytes, Some(segment)) {
                Ok(()) => wire.sent(ready),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    bytes.chunks(segment).for_each(|frame| self.keep(wire, path, frame.to_vec(), ready));
                }
                // Not joined then. What is wrong with a single one shows when that is sent.
                Err(_) => bytes.chunks(segment).for_each(|frame| self.send(wire, path, frame, ready)),
            }
        }
        self.bytes = bytes;
        self.bytes.clear();
    }

    /// Sends what waited, as far as there is room now.
    pub(super) fn send_backlog(&mut self, wire: &impl Wire) {
        while let Some((path, frame, ready)) = self.backlog.pop_front() {
            match wire.try_send(path, &frame, None) {
                Ok(()) => wire.sent(ready),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.backlog.push_front((path, frame, ready));
                    return;
                }
                Err(error) => wire.failed(path, &frame, &error),
            }
        }
    }

    fn send(&mut self, wire: &impl Wire, path: Path, frame: &[u8], ready: Instant) {
        if self.is_waiting() {
            return self.keep(wire, path, frame.to_vec(), ready);
        }
        match wire.try_send(path, frame, None) {
            Ok(()) => wire.sent(ready),
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.keep(wire, path, frame.to_vec(), ready),
            Err(error) => wire.failed(path, frame, &error),
        }
    }

    fn keep(&mut self, wire: &impl Wire, path: Path, frame: Vec<u8>, ready: Instant) {
        if self.backlog.len() < MAX_BACKLOG {
            self.backlog.push_back((path, frame, ready));
        } else {
            wire.dropped();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// What was sent in one call: to which port, how many bytes, cut at which length.
    type Call = (u16, usize, Option<usize>);

    /// A wire that notes its calls; it may refuse to join, or be full.
    #[derive(Default)]
    struct Noted {
        calls: RefCell<Vec<Call>>,
        refuses_joined: bool,
        segments: Cell<usize>,
        room: Cell<usize>,
        failed: Cell<usize>,
        dropped: Cell<usize>,
    }

    impl Noted {
        fn new(segments: usize) -> Self {
            Self { segments: Cell::new(segments), room: Cell::new(usize::MAX), ..Self::default() }
        }
    }

    impl Wire for Noted {
        fn try_send(&self, path: Path, bytes: &[u8], segment: Option<usize>) -> io::Result<()> {
            if self.room.get() == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            if segment.is_some() && self.refuses_joined {
                self.segments.set(1);
                return Err(ErrorKind::InvalidInput.into());
            }
            self.room.set(self.room.get() - 1);
            self.calls.borrow_mut().push((path.peer.port(), bytes.len(), segment));
            Ok(())
        }
        fn max_segments(&self) -> usize {
            self.segments.get()
        }
        fn sent(&self, _: Instant) {}
        fn failed(&self, _: Path, _: &[u8], _: &io::Error) {
            self.failed.set(self.failed.get() + 1);
        }
        fn dropped(&self) {
            self.dropped.set(self.dropped.get() + 1);
        }
    }

    fn path(port: u16) -> Path {
        Path { peer: ([127, 0, 0, 1], port).into(), local: None }
    }

    /// Pushes answers of these sizes to these ports and flushes.
    fn calls(wire: &Noted, answers: &[(u16, usize)]) -> Vec<Call> {
        let mut outbox = Outbox::default();
        for (port, len) in answers {
            outbox.push(wire, path(*port), &vec![0; *len], Instant::now());
        }
        outbox.flush(wire);
        wire.calls.take()
    }

    #[test]
    fn answers_of_one_size_to_one_peer_leave_in_one_call() {
        let wire = Noted::new(64);
        assert_eq!(calls(&wire, &[(1, 200); 10]), [(1, 2000, Some(200))]);
        assert_eq!(calls(&wire, &[(1, 200)]), [(1, 200, None)], "one alone is no run");
        assert_eq!(calls(&wire, &[]), []);
    }

    #[test]
    fn another_peer_or_a_larger_answer_ends_a_run_and_a_shorter_one_is_its_last() {
        let wire = Noted::new(64);
        assert_eq!(calls(&wire, &[(1, 9), (1, 9), (2, 9), (2, 9)]), [(1, 18, Some(9)), (2, 18, Some(9))]);
        assert_eq!(calls(&wire, &[(1, 9), (1, 9), (1, 10)]), [(1, 18, Some(9)), (1, 10, None)]);
        assert_eq!(calls(&wire, &[(1, 9), (1, 5), (1, 9), (1, 9)]), [(1, 14, Some(9)), (1, 18, Some(9))]);
    }

    #[test]
    fn a_run_is_bounded_in_number_and_bytes() {
        assert_eq!(calls(&Noted::new(3), &[(1, 9); 7]), [(1, 27, Some(9)), (1, 27, Some(9)), (1, 9, None)]);
        let runs = calls(&Noted::new(1000), &[(1, MAX_SEGMENT_LEN); 60]);
        let most = MAX_DATAGRAM_LEN / MAX_SEGMENT_LEN * MAX_SEGMENT_LEN;
        assert_eq!(runs.iter().map(|(_, len, _)| *len).collect::<Vec<_>>(), [most, 60 * MAX_SEGMENT_LEN - most]);
        assert_eq!(calls(&Noted::new(64), &[(1, MAX_SEGMENT_LEN + 1); 2]), [(1, MAX_SEGMENT_LEN + 1, None); 2]);
    }

    #[test]
    fn without_offload_each_answer_leaves_by_itself_and_none_is_lost() {
        let wire = Noted { refuses_joined: true, ..Noted::new(64) };
        // The first run finds out; nothing is joined after it.
        assert_eq!(calls(&wire, &[(1, 9), (1, 9), (1, 5)]), [(1, 9, None), (1, 9, None), (1, 5, None)]);
        assert_eq!(wire.max_segments(), 1);
        assert_eq!(calls(&wire, &[(1, 9), (1, 9)]), [(1, 9, None); 2]);
        assert_eq!((wire.failed.get(), wire.dropped.get()), (0, 0));
    }

    #[test]
    fn what_the_socket_has_no_room_for_waits_in_order_and_within_bounds() {
        let wire = Noted::new(64);
        wire.room.set(0);
        let mut outbox = Outbox::default();
        for len in [9, 9, 5, 700] {
            outbox.push(&wire, path(1), &vec![0; len], Instant::now());
        }
        outbox.flush(&wire);
        assert!(outbox.is_waiting() && wire.calls.borrow().is_empty());
        wire.room.set(2);
        outbox.send_backlog(&wire);
        outbox.push(&wire, path(1), &[0; 3], Instant::now());
        wire.room.set(usize::MAX);
        outbox.send_backlog(&wire);
        assert!(!outbox.is_waiting());
        assert_eq!(wire.calls.take(), [9, 9, 5, 700, 3].map(|len| (1, len, None)));
        wire.room.set(0);
        for _ in 0..MAX_BACKLOG + 3 {
            outbox.push(&wire, path(1), &[0; 2000], Instant::now());
        }
        assert_eq!(wire.dropped.get(), 3);
    }
}
