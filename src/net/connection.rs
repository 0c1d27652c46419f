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

use std::{
    cell::Cell,
    collections::VecDeque,
    io::{self, ErrorKind},
    sync::Arc,
    time::{Duration, Instant},
};

use aeon_proto::{
    frame::{Flags, Frame, HEADER_LEN, Header, Kind, PREFIX_LEN},
    route::Route,
};
use tokio::{
    io::{Interest, Ready},
    sync::mpsc,
};

use super::shutdown::Shutdown;
use crate::{
    codec::{Framing, StreamError, next_frame},
    model::CancelToken,
    station::{
        Station,
        error::RequestError,
        request::{Outcome, Peer, ReplyTo, Request},
    },
    telemetry::{
        GaugeShare,
        faults::{Fault, fault},
    },
};

/// Bytes that one read takes at most.
const SCRATCH_LEN: usize = 128 * 1024;
/// Reads in a row before other connections get their turn.
const READS_PER_TURN: usize = 4;
/// Frames after which other connections get their turn, however few reads they came in. Tokio's own count is of reads, each of
/// which may hold thousands of frames.
const FRAMES_PER_TURN: u32 = 64;
/// Bytes of requests that are kept while too many are in flight, to find cancels among them.
const LOOKAHEAD_LEN: usize = 64 * 1024;
/// Bytes of replies that wait for their peer before its next request is handled: a few bytes can ask for a lot.
const MAX_WAITING_LEN: usize = 1 << 20;
/// Bytes that a connection may hold however much others do.
const MIN_ROOM: usize = 16 * 1024;
/// Time that a peer gets to read the last vent before a broken connection is closed.
const LINGER: Duration = Duration::from_secs(1);
/// How often a connection that is not being read looks whether its peer is still there.
const PROBE_PERIOD: Duration = Duration::from_millis(100);
/// The stream id on which a stock client is told the opcodes.
const OPEN_STREAMS_ID: u16 = 0xfffe;

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

/// A connected, non-blocking stream socket. `ready` is cancel safe and the other calls never wait, so nothing is lost when
/// a `select!` drops one of them.
pub trait StreamSocket: Send + Sync + 'static {
    /// Waits until the socket can be read or written.
    fn ready(&self, interest: Interest) -> impl Future<Output = io::Result<Ready>> + Send;
    /// Reads what is there.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is.
    fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes what fits.
    ///
    /// # Errors
    /// `WouldBlock` if nothing does.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;
    /// Whether nobody can read what would be written: the peer has closed its socket, not just its sending side.
    fn is_abandoned(&self) -> bool;
    /// Tells the peer that nothing more will come.
    fn shutdown_write(&self);
}

macro_rules! stream_socket {
    ($type:ty) => {
        impl StreamSocket for $type {
            async fn ready(&self, interest: Interest) -> io::Result<Ready> {
                <$type>::ready(self, interest).await
            }
            fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
                <$type>::try_read(self, buffer)
            }
            fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
                <$type>::try_write(self, bytes)
            }
            fn is_abandoned(&self) -> bool {
                // Sending nothing fails where sending something would.
                socket2::SockRef::from(self).send(&[]).is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
            }
            fn shutdown_write(&self) {
                // The peer may be gone already.
                let _ = socket2::SockRef::from(self).shutdown(std::net::Shutdown::Write);
            }
        }
    };
}

stream_socket!(tokio::net::UnixStream);
stream_socket!(tokio::net::TcpStream);

thread_local! {
    static INPUT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    static OUTPUT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A request that waits for the model.
#[derive(Debug)]
struct InFlight {
    id: u64,
    stream_id: u16,
    sequence: u32,
    cancel: CancelToken,
}

/// A request that waits for one in flight to end.
#[derive(Debug)]
struct Parked {
    stream_id: u16,
    sequence: u32,
    flags: Flags,
    payload: Vec<u8>,
    arrived: Instant,
}

/// The answer of a worker.
#[derive(Debug)]
struct Completion {
    id: u64,
    frame: Option<Vec<u8>>,
    /// When the answer was there.
    ready: Instant,
}

struct StreamReply {
    id: u64,
    done: mpsc::UnboundedSender<Completion>,
}

impl ReplyTo for StreamReply {
    fn finish(self: Box<Self>, frame: Option<Vec<u8>>) {
        // A connection that is gone needs no answer.
        let _ = self.done.send(Completion { id: self.id, frame, ready: Instant::now() });
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

struct Connection<S> {
    socket: S,
    peer: Peer,
    station: Arc<Station>,
    options: ConnectionOptions,
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
    done: mpsc::UnboundedSender<Completion>,
    last_request: Instant,
    /// What this connection holds of the memory that all share.
    buffered: GaugeShare,
    /// Reads and frames since other connections had their turn.
    reads: usize,
    frames: u32,
}

/// Serves one connection until its peer, an error or `shutdown` ends it. All work that is still in flight then is
/// cancelled.
pub async fn serve<S: StreamSocket>(
    socket: S,
    peer: Peer,
    station: Arc<Station>,
    options: ConnectionOptions,
    shutdown: Shutdown,
) {
    let (done, mut completions) = mpsc::unbounded_channel();
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
        done,
        last_request: Instant::now(),
        buffered,
        reads: 0,
        frames: 0,
    };
    let end = tokio::select! {
        end = connection.run(&mut completions, &shutdown) => end,
        () = shutdown.killed() => Ok(()),
    };
    if let Err(error) = end {
        let Peer { carrier, origin, .. } = connection.peer;
        fault!(DEBUG, Fault::Send, carrier = carrier.name(), peer = %origin, %error, "connection ended: {error}");
    }
    for request in &connection.in_flight {
        request.cancel.cancel();
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
async fn linger(socket: &impl StreamSocket) {
    socket.shutdown_write();
    let discard = async {
        let mut buffer = [0; 4096];
        while socket.ready(Interest::READABLE).await.is_ok() {
            match socket.try_read(&mut buffer) {
                Ok(0) => return,
                Err(error) if error.kind() != ErrorKind::WouldBlock => return,
                _ => {}
            }
        }
    };
    let _ = tokio::time::timeout(LINGER, discard).await;
}

fn patch_prefix(out: &mut [u8], start: usize, framing: Framing) {
    if framing == Framing::Prefixed
        && let Some((prefix, frame)) = out.get_mut(start..).and_then(<[u8]>::split_first_chunk_mut::<PREFIX_LEN>)
    {
        *prefix = (frame.len() as u32).to_be_bytes();
    }
}

impl<S: StreamSocket> Connection<S> {
    async fn run(
        &mut self,
        completions: &mut mpsc::UnboundedReceiver<Completion>,
        shutdown: &Shutdown,
    ) -> io::Result<()> {
        if self.options.stock_clients {
            self.with_output(Self::open_streams)?;
        }
        let mut timer_at = self.next_deadline();
        let timer = tokio::time::sleep_until(timer_at.into());
        tokio::pin!(timer);
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
            let settled = self.in_flight.is_empty() && self.parked.is_empty() && !writing;
            match self.phase {
                Phase::Open if settled && self.carry.is_empty() && shutdown.is_draining() => {
                    // What has come by now is answered (with 503); then the connection ends.
                    self.read_turn()?;
                    if self.in_flight.is_empty() && self.output.is_empty() {
                        linger(&self.socket).await;
                        return Ok(());
                    }
                    continue;
                }
                Phase::InputEnded if settled => return Ok(()),
                Phase::Broken if settled => {
                    linger(&self.socket).await;
                    return Ok(());
                }
                _ => {}
            }
            let deadline = self.next_deadline();
            if deadline < timer_at {
                timer_at = deadline;
                timer.as_mut().reset(timer_at.into());
            }
            let interest = match (reading, writing) {
                (true, true) => Interest::READABLE | Interest::WRITABLE,
                (_, true) => Interest::WRITABLE,
                _ => Interest::READABLE,
            };
            tokio::select! {
                biased;
                Some(done) = completions.recv() => self.with_output(|connection| {
                    connection.complete(done);
                    while let Ok(done) = completions.try_recv() {
                        connection.complete(done);
                    }
                    connection.unpark();
                })?,
                ready = self.socket.ready(interest), if reading || writing => {
                    let ready = ready?;
                    if ready.is_writable() && writing {
                        self.flush()?;
                        self.catch_up()?;
                    }
                    if ready.is_readable() && reading {
                        self.read_turn()?;
                    }
                }
                () = timer.as_mut() => {
                    if self.expired(Instant::now())? {
                        return Ok(());
                    }
                    timer_at = self.next_deadline();
                    timer.as_mut().reset(timer_at.into());
                }
                () = shutdown.draining(), if !shutdown.is_draining() => {}
            }
        }
    }

    /// Runs `work` with an output buffer that is borrowed from the thread unless replies are waiting already, then writes.
    fn with_output(&mut self, work: impl FnOnce(&mut Self)) -> io::Result<()> {
        if self.output.is_empty() {
            self.output = OUTPUT.take();
        }
        work(self);
        self.flush()?;
        self.catch_up()
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

    /// Handles what was held back while too many replies were waiting or others had their turn, as far as its replies leave
    /// and this turn goes.
    fn catch_up(&mut self) -> io::Result<()> {
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
    fn is_full(&mut self) -> bool {
        self.is_held |= self.output.len() >= MAX_WAITING_LEN
            || self.frames >= FRAMES_PER_TURN
            || (self.output.len() >= MIN_ROOM / 2 && self.output.len() >= self.room() / 2);
        self.is_held
    }

    /// Reads what is there, handles it, writes what was answered.
    fn read_turn(&mut self) -> io::Result<()> {
        let mut input = INPUT.take();
        input.resize(SCRATCH_LEN, 0);
        let result = self.read_into(&mut input);
        INPUT.set(input);
        result
    }

    fn read_into(&mut self, input: &mut [u8]) -> io::Result<()> {
        for _ in 0..READS_PER_TURN {
            // Whole frames may have to wait for their turn, so no more is read than there is room for.
            let most = input.len().min(self.room());
            let input = input.get_mut(..most).unwrap_or_default();
            let len = match self.socket.try_read(input) {
                Ok(0) => {
                    self.end_of_input();
                    return Ok(());
                }
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let now = Instant::now();
            let bytes = input.get(..len).unwrap_or_default();
            self.with_output(|connection| connection.take(bytes, now))?;
            let more = len == input.len();
            self.reads += usize::from(more);
            if !more
                || self.phase != Phase::Open
                || self.is_held
                || !self.output.is_empty()
                || self.parked_bytes >= LOOKAHEAD_LEN
            {
                return Ok(());
            }
        }
        Ok(())
    }

    fn end_of_input(&mut self) {
        self.phase = Phase::InputEnded;
        self.carry = Vec::new();
        self.carry_since = None;
    }

    /// Handles the frames in `bytes`, which follow those in `carry`.
    fn take(&mut self, bytes: &[u8], now: Instant) {
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
    fn frames(&mut self, bytes: &[u8], now: Instant) -> usize {
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

    fn frame(&mut self, frame: Frame<'_>, now: Instant) {
        self.frames += 1;
        let dropped = &self.station.counters().dropped;
        match frame.flags.kind() {
            Kind::Request if frame.payload.is_empty() => dropped.empty.add_one(),
            Kind::Request if self.in_flight.len() >= self.options.max_in_flight || !self.parked.is_empty() => {
                self.parked_bytes += frame.encoded_len();
                let Frame { stream_id, sequence, flags, payload } = frame;
                self.parked.push_back(Parked { stream_id, sequence, flags, payload: payload.to_vec(), arrived: now });
            }
            Kind::Request => self.request(frame, now),
            Kind::Cancel if !self.station.admits_cancel(self.peer.carrier, &frame) => {}
            Kind::Cancel => self.cancel(frame.stream_id, frame.sequence),
            Kind::NeverAnswered if self.options.stock_clients && is_poison(frame.flags) => {
                if self.station.admits_cancel(self.peer.carrier, &frame) {
                    self.cancel(frame.stream_id, frame.sequence);
                }
            }
            Kind::NeverAnswered => dropped.never_answered.add_one(),
        }
    }

    fn request(&mut self, frame: Frame<'_>, arrived: Instant) {
        self.last_request = arrived;
        let start = self.output.len();
        self.output.extend_from_slice(&[0; PREFIX_LEN][..self.options.framing.prefix_len()]);
        let id = self.next_id;
        self.next_id += 1;
        let done = &self.done;
        let request = Request { peer: &self.peer, frame, arrived };
        match self.station.handle(request, &mut self.output, || Box::new(StreamReply { id, done: done.clone() })) {
            Outcome::Replied => {
                self.ready_since.get_or_insert_with(Instant::now);
                patch_prefix(&mut self.output, start, self.options.framing);
            }
            Outcome::Queued(cancel) => {
                self.output.truncate(start);
                let Frame { stream_id, sequence, .. } = frame;
                self.in_flight.push(InFlight { id, stream_id, sequence, cancel });
            }
            Outcome::Silent => self.output.truncate(start),
        }
    }

    /// Withdraws what is in flight under this stream id and sequence; a stock client cancels a whole stream.
    fn cancel(&mut self, stream_id: u16, sequence: u32) {
        let whole_stream = self.options.stock_clients;
        let hit = |id: u16, seq: u32| id == stream_id && (whole_stream || seq == sequence);
        let mut found = false;
        for request in self.in_flight.iter().filter(|request| hit(request.stream_id, request.sequence)) {
            request.cancel.cancel();
            found = true;
        }
        let parked = std::mem::take(&mut self.parked);
        for request in parked {
            if hit(request.stream_id, request.sequence) {
                found = true;
                self.parked_bytes -= HEADER_LEN + request.payload.len();
                self.vent(&RequestError::Cancelled, request.stream_id, request.sequence);
            } else {
                self.parked.push_back(request);
            }
        }
        if !found {
            self.station.counters().dropped.idle_cancel.add_one();
        }
    }

    fn complete(&mut self, done: Completion) {
        self.in_flight.retain(|request| request.id != done.id);
        self.last_request = Instant::now();
        if let Some(frame) = done.frame {
            if self.options.framing == Framing::Prefixed {
                self.output.extend_from_slice(&(frame.len() as u32).to_be_bytes());
            }
            self.output.extend_from_slice(&frame);
            let ready = self.ready_since.get_or_insert(done.ready);
            *ready = done.ready.min(*ready);
        }
    }

    /// Handles parked requests as far as there is room for them in flight.
    fn unpark(&mut self) {
        while self.in_flight.len() < self.options.max_in_flight
            && !self.parked.is_empty()
            && !self.is_full()
            && let Some(Parked { stream_id, sequence, flags, payload, arrived }) = self.parked.pop_front()
        {
            let frame = Frame { stream_id, sequence, flags, payload: &payload };
            self.parked_bytes -= frame.encoded_len();
            self.request(frame, arrived);
        }
    }

    fn vent(&mut self, error: &RequestError, stream_id: u16, sequence: u32) {
        let start = self.output.len();
        self.output.extend_from_slice(&[0; PREFIX_LEN][..self.options.framing.prefix_len()]);
        error.write_vent(stream_id, sequence, self.peer.reply_flags(false), &mut self.output);
        patch_prefix(&mut self.output, start, self.options.framing);
        self.station.counters().errors.add_one();
        self.station.counters().faults.of(error.fault()).add_one();
    }

    /// Says why the stream cannot be read on, and stops reading it.
    fn broken(&mut self, error: RequestError) {
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

    /// Lists the route opcodes for clients that can only send on streams that were opened to them.
    fn open_streams(&mut self) {
        let start = self.output.len();
        self.output.extend_from_slice(&[0; PREFIX_LEN][..self.options.framing.prefix_len()]);
        let mut payload = Vec::new();
        for route in Route::ALL {
            payload.extend_from_slice(&route.0.to_be_bytes());
        }
        let frame = Frame { stream_id: OPEN_STREAMS_ID, sequence: 0, flags: Flags::FORK, payload: &payload };
        // Thirty bytes always fit.
        let _ = frame.encode(&mut self.output);
        patch_prefix(&mut self.output, start, self.options.framing);
    }

    /// Writes as much of the output as the socket takes.
    fn flush(&mut self) -> io::Result<()> {
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

    fn half_frame_deadline(&self) -> Option<Instant> {
        let started_mib = u32::try_from(self.carry.len() >> 20).unwrap_or(u32::MAX).saturating_add(1);
        Some(self.carry_since? + self.options.half_frame_timeout.saturating_mul(started_mib))
    }

    fn next_deadline(&self) -> Instant {
        let idle = self.last_request + self.options.idle_timeout;
        let blocked = self.blocked_since.map(|since| since + self.options.write_timeout);
        [self.half_frame_deadline(), blocked, self.probe_at].into_iter().flatten().fold(idle, Instant::min)
    }

    /// Looks at all time limits; returns whether the connection is over.
    fn expired(&mut self, now: Instant) -> io::Result<bool> {
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

/// Whether a stock client's frame withdraws its stream: POISON, and none of the flags that make it something else.
fn is_poison(flags: Flags) -> bool {
    flags.contains(Flags::RESPONSE) && !flags.intersects(Flags::ACK | Flags::FORK | Flags::RACE | Flags::FOLD)
}
