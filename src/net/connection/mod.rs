//! One stream connection: reads frames, hands them to the station, writes the replies.
//!
//! An idle connection holds no buffer: when the socket is readable, one read goes into a scratch buffer of the thread, all
//! frames in it are handled, and all their replies leave with one write. Only a frame that is not complete yet, or a reply
//! that the socket does not take at once, is kept.
//!
//! ```text
//!            socket readable                     station: Replied
//!  socket ------------------> next_frame ------> handle ---------> output --> socket
//!             carry: rest of        |               |  station: Queued
//!             a half frame          |               v
//!                                   |           in flight --- worker ---> output
//!                                   +--> parked, while 64 are in flight (cancels are still taken)
//! ```

mod deadlines;
mod input;
mod output;
mod requests;
mod socket;

use std::{
    collections::VecDeque,
    future::poll_fn,
    io::{self, ErrorKind},
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use aeon_proto::frame::Flags;
use tokio::io::Interest;

use self::{
    output::patch_prefix,
    requests::{Completion, Done, InFlight, Parked},
};
use super::shutdown::Shutdown;
use crate::{
    codec::Framing,
    station::{Station, error::RequestError, request::Peer},
    telemetry::{
        GaugeShare,
        faults::{Fault, fault},
    },
};

pub use self::socket::StreamSocket;

/// Bytes that one read takes at most.
const SCRATCH_LEN: usize = 128 * 1024;
/// Reads in a row before other connections get their turn.
const READS_PER_TURN: usize = 4;
/// Frames after which other connections get their turn, however few reads they came in. Tokio's own count is of reads, each of
/// which may hold thousands of frames.
const FRAMES_PER_TURN: u32 = 64;
/// Bytes of requests that are kept while too many are in flight, to find cancels among them.
const LOOKAHEAD_LEN: usize = 64 * 1024;
/// Bytes that a connection may hold however much others do.
const MIN_ROOM: usize = 16 * 1024;
/// Time that a peer gets to read the last vent before a broken connection is closed.
const LINGER: Duration = Duration::from_secs(1);
/// How often a connection that is not being read looks whether its peer is still there.
const PROBE_PERIOD: Duration = Duration::from_millis(100);

/// How a connection is run.
#[derive(Debug, Clone)]
pub struct ConnectionOptions {
    /// Prefixed or bare frames.
    pub framing: Framing,
    /// The largest frame taken, header included.
    pub max_frame_len: usize,
    /// Requests in flight before the reader stops.
    pub max_in_flight: usize,
    /// Time for a frame to arrive whole, for each started MiB of it.
    pub half_frame_timeout: Duration,
    /// Time without any request after which a connection is closed.
    pub idle_timeout: Duration,
    /// Time for a peer to take replies that wait for it.
    pub write_timeout: Duration,
    /// Serve clients that know 0x20 as POISON.
    pub stock_clients: bool,
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        Self {
            framing: Framing::Prefixed,
            max_frame_len: aeon_proto::frame::MAX_FRAME_LEN,
            max_in_flight: 64,
            half_frame_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(3600),
            write_timeout: Duration::from_secs(30),
            stock_clients: false,
        }
    }
}

/// What is left to do on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Requests are read.
    Open,
    /// The peer sends no more; what is in flight is answered.
    InputEnded,
    /// The place of the next frame is lost: what is in flight is answered, input is thrown away.
    Broken,
}

/// What a connection waits for.
enum Event {
    /// A worker has an answer.
    Completed(Completion),
    /// The socket takes more.
    Writable(io::Result<()>),
    /// Something was read, and handled.
    Read(io::Result<()>),
    /// A time limit may be over.
    Timer,
    /// The process is about to end.
    Draining,
}

struct Connection<S> {
    socket: S,
    peer: Peer,
    station: Arc<Station>,
    options: Arc<ConnectionOptions>,
    phase: Phase,
    carry: Vec<u8>,
    carry_since: Option<Instant>,
    /// Whether requests in `carry` or `parked` wait for replies to leave, or for the next turn.
    is_held: bool,
    parked: VecDeque<Parked>,
    parked_bytes: usize,
    output: Vec<u8>,
    written: usize,
    blocked_since: Option<Instant>,
    /// Since when the oldest reply in `output` is there.
    ready_since: Option<Instant>,
    probe_at: Option<Instant>,
    in_flight: Vec<InFlight>,
    next_id: u64,
    /// Brings the answers of workers; made with the first request in flight.
    done: Option<Done>,
    last_request: Instant,
    /// What this connection holds of the memory that all share.
    buffered: GaugeShare,
    /// Reads and frames since other connections had their turn.
    reads: usize,
    frames: u32,
}

/// Serves one connection until its peer, an error or `shutdown` ends it. All work that is still in flight then is
/// cancelled. `held` is what the connection takes of something shared; it goes with it.
///
/// The connection is made here and not in the future, which would keep room for both what it is made of and itself.
pub(super) fn serve<S: StreamSocket>(
    socket: S,
    peer: Peer,
    station: Arc<Station>,
    options: Arc<ConnectionOptions>,
    shutdown: Shutdown,
    held: impl Send,
) -> impl Future<Output = ()> + Send {
    let buffered = station.counters().buffered_bytes.share();
    let mut connection = Connection {
        socket,
        peer,
        station,
        options,
        phase: Phase::Open,
        carry: Vec::new(),
        carry_since: None,
        is_held: false,
        parked: VecDeque::new(),
        parked_bytes: 0,
        output: Vec::new(),
        written: 0,
        blocked_since: None,
        ready_since: None,
        probe_at: None,
        in_flight: Vec::new(),
        next_id: 0,
        done: None,
        last_request: Instant::now(),
        buffered,
        reads: 0,
        frames: 0,
    };
    async move {
        let end = tokio::select! {
            biased;
            end = connection.run(&shutdown) => end,
            () = shutdown.killed() => Ok(()),
        };
        if let Err(error) = end {
            let Peer { carrier, origin, .. } = connection.peer;
            fault!(DEBUG, Fault::Send, carrier = carrier.name(), peer = %origin, %error, "connection ended: {error}");
        }
        for request in &connection.in_flight {
            request.cancel.cancel();
        }
        drop(held);
    }
}

/// Sends one vent on a connection that is not served, and closes it.
pub(super) async fn refuse(socket: impl StreamSocket, framing: Framing, flags: Flags, error: &RequestError) {
    let mut out = vec![0; framing.prefix_len()];
    error.write_vent(0, 0, flags, &mut out);
    patch_prefix(&mut out, 0, framing);
    let writable = tokio::time::timeout(LINGER, socket.ready(Interest::WRITABLE)).await;
    if let Ok(Ok(_)) = writable {
        let _ = socket.try_write(&out);
        linger(&socket).await;
    }
}

/// Lets the peer read what was sent: closing with unread input would make some systems throw it away.
/// Connections box this: few end so, and none should keep room for it.
async fn linger(socket: &impl StreamSocket) {
    socket.shutdown_write();
    let discard = async {
        while socket.ready(Interest::READABLE).await.is_ok() {
            // Not across the wait: what lives there is part of every connection.
            let mut buffer = [0; 4096];
            match socket.try_read(&mut buffer) {
                Ok(0) => return,
                Err(error) if error.kind() != ErrorKind::WouldBlock => return,
                _ => {}
            }
        }
    };
    let _ = tokio::time::timeout(LINGER, discard).await;
}

impl<S: StreamSocket> Connection<S> {
    async fn run(&mut self, shutdown: &Shutdown) -> io::Result<()> {
        if self.options.stock_clients {
            self.with_output(Self::open_streams)?;
        }
        let mut timer_at = self.next_deadline();
        let mut timer = std::pin::pin!(tokio::time::sleep_until(timer_at.into()));
        let mut draining = std::pin::pin!(shutdown.draining());
        loop {
            self.check_room()?;
            if self.frames >= FRAMES_PER_TURN || self.reads >= READS_PER_TURN {
                (self.reads, self.frames) = (0, 0);
                tokio::task::yield_now().await;
            }
            if self.is_held && self.output.is_empty() {
                self.catch_up()?;
                continue;
            }
            let writing = !self.output.is_empty();
            let reading = self.phase == Phase::Open && self.parked_bytes < LOOKAHEAD_LEN && !writing;
            // The clock of a half frame runs only while the station reads: what the socket holds is not its peer's fault.
            if !reading {
                self.carry_since = None;
            } else if self.carry_since.is_none() && !self.carry.is_empty() {
                self.carry_since = Some(Instant::now());
            }
            // A peer that has gone shows in a read; where none is due, work for it must not go on for ever.
            if reading || self.in_flight.is_empty() {
                self.probe_at = None;
            } else {
                self.probe_at.get_or_insert_with(|| Instant::now() + PROBE_PERIOD);
            }
            if self.in_flight.is_empty() {
                // Every answer has come, and an idle connection keeps nothing for the next.
                self.done = None;
            }
            let settled = self.in_flight.is_empty() && self.parked.is_empty() && !writing;
            // Asked here and not while waiting, where the answer would be "yes" already when the wait for it ends.
            let is_draining = shutdown.is_draining();
            match self.phase {
                Phase::Open if settled && self.carry.is_empty() && is_draining => {
                    // What has come by now is answered (with 503); then the connection ends.
                    self.read_turn()?;
                    if self.in_flight.is_empty() && self.output.is_empty() {
                        Box::pin(linger(&self.socket)).await;
                        return Ok(());
                    }
                    continue;
                }
                Phase::InputEnded if settled => return Ok(()),
                Phase::Broken if settled => {
                    Box::pin(linger(&self.socket)).await;
                    return Ok(());
                }
                _ => {}
            }
            let deadline = self.next_deadline();
            if deadline < timer_at {
                timer_at = deadline;
                timer.as_mut().reset(timer_at.into());
            }
            // One future that polls what is due, and nothing else: a request costs a few of these turns.
            let event = poll_fn(|cx| {
                if let Poll::Ready(done) = self.poll_completion(cx) {
                    return Poll::Ready(Event::Completed(done));
                }
                if writing {
                    if let Poll::Ready(ready) = self.socket.poll_writable(cx) {
                        return Poll::Ready(Event::Writable(ready));
                    }
                } else if reading && let Poll::Ready(handled) = self.poll_read_turn(cx) {
                    return Poll::Ready(Event::Read(handled));
                }
                if timer.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Event::Timer);
                }
                if !is_draining && draining.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Event::Draining);
                }
                Poll::Pending
            });
            match event.await {
                Event::Completed(done) => self.completed(done)?,
                Event::Writable(ready) => {
                    ready?;
                    self.flush()?;
                    self.catch_up()?;
                }
                Event::Read(handled) => handled?,
                Event::Timer => {
                    if self.expired(Instant::now())? {
                        return Ok(());
                    }
                    timer_at = self.next_deadline();
                    timer.as_mut().reset(timer_at.into());
                }
                Event::Draining => {}
            }
        }
    }

    /// What this connection may hold now: as much as it leaves free. So one alone may hold half of all there is, many get
    /// equal parts, and who comes last still finds some.
    fn room(&self) -> usize {
        let max = self.station.limits().max_buffered_bytes;
        (max.saturating_sub(self.buffered.others()) / 2).max(MIN_ROOM)
    }

    /// Gives up a half frame or a peer that does not read if either takes memory that others need.
    fn check_room(&mut self) -> io::Result<()> {
        let held = self.carry.capacity() + self.parked_bytes + self.output.capacity();
        let is_grown = held > self.buffered.held();
        self.buffered.set(held);
        if !is_grown || held <= MIN_ROOM {
            return Ok(());
        }
        let room = self.room();
        if held <= room {
            return Ok(());
        }
        if !self.output.is_empty() {
            return Err(io::Error::new(ErrorKind::OutOfMemory, "peer does not read its replies, and memory is short"));
        }
        if self.phase == Phase::Open && !self.carry.is_empty() {
            let retry_after_ms = self.station.retry_after_ms();
            self.with_output(|connection| {
                connection.broken(RequestError::NoBufferRoom { held, room, retry_after_ms })
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::identity::Identity,
        station::{
            limits::Limits,
            request::{Carrier, Origin},
        },
    };

    /// Thousands of connections are idle at once, and each is little more than this future: a buffer in it, or a second
    /// copy of what it is made of, shows here.
    #[tokio::test]
    async fn an_idle_connection_is_small() {
        let station = Station::new("s".into(), Arc::new(Identity::new(4, 10)), Limits::default(), 1).unwrap();
        let peer = Peer {
            carrier: Carrier::Unix,
            connection: 1,
            address: None,
            origin: Origin::Unknown,
            is_proven: true,
            max_reply_len: 1 << 20,
            default_session: None,
            stock_replies: false,
        };
        let (socket, _other) = tokio::net::UnixStream::pair().unwrap();
        let serving = serve(socket, peer, Arc::new(station), Arc::default(), Shutdown::default(), ());
        let size = size_of_val(&serving);
        assert!(size <= 1280, "the future of a connection has {size} bytes");
    }
}
