//! The UDP carrier: one datagram is one frame.
//!
//! Datagrams are received in batches. An error that belongs to one peer (its port is closed, its network is gone, a reply
//! is too large) is counted and never ends the loop. Replies leave from the address that was asked.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind, IoSliceMut},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use aeon_proto::frame::{Frame, HEADER_LEN, Header, Kind};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{io::Interest, net::UdpSocket, sync::mpsc};

use super::{
    peer::{AllowList, canonical},
    shutdown::Shutdown,
};
use crate::{
    model::CancelToken,
    station::{
        Station,
        error::RequestError,
        request::{Carrier, Origin, Outcome, Peer, ReplyTo, Request},
    },
    telemetry::faults::{Fault, fault},
};

/// Datagrams that one system call takes at most.
const BATCH: usize = 16;
/// Bytes of a receive buffer: the largest run of datagrams that the kernel joins into one.
const BUFFER_LEN: usize = 65_536;
/// Batches in a row before other tasks get their turn.
const BATCHES_PER_TURN: usize = 2;
/// Replies that wait for room in the socket's send buffer.
const MAX_BACKLOG: usize = 1024;
/// Receive and send buffer asked of the system.
const SOCKET_BUFFER_LEN: usize = 4 << 20;

/// Why a UDP address cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("{action} {address}")]
pub struct BindError {
    action: &'static str,
    address: SocketAddr,
    source: io::Error,
}

/// A bound UDP socket.
pub struct UdpCarrier {
    socket: UdpSocket,
    state: UdpSocketState,
    allow: AllowList,
    /// Whether datagrams that wait at the end are read by the next process.
    is_inherited: bool,
}

impl std::fmt::Debug for UdpCarrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpCarrier").field("socket", &self.socket).field("allow", &self.allow).finish_non_exhaustive()
    }
}

/// Where a reply goes, and from which local address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Path {
    peer: SocketAddr,
    local: Option<IpAddr>,
}

/// The answer of a worker.
#[derive(Debug)]
struct Completion {
    path: Path,
    key: (SocketAddr, u16, u32),
    id: u64,
    frame: Option<Vec<u8>>,
    /// When the answer was there.
    ready: Instant,
}

struct DatagramReply {
    path: Path,
    key: (SocketAddr, u16, u32),
    id: u64,
    done: mpsc::UnboundedSender<Completion>,
}

impl ReplyTo for DatagramReply {
    fn finish(self: Box<Self>, frame: Option<Vec<u8>>) {
        let Self { path, key, id, done } = *self;
        // A carrier that has stopped sends nothing any more.
        let _ = done.send(Completion { path, key, id, frame, ready: Instant::now() });
    }
}

/// Makes a socket on which datagrams may be larger than one packet: the system cuts and joins them.
fn open(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // The system may give less; what it gave is seen in the buffer size, not in an error.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_LEN);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER_LEN);
    socket.bind(&address.into())?;
    Ok(socket)
}

/// quinn-udp asks the system never to cut a datagram; a residual is larger than a packet, so this is taken back.
pub(crate) fn allow_fragments(socket: &UdpSocket, is_ipv6: bool) -> io::Result<()> {
    if is_ipv6 {
        rustix::net::sockopt::set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::DONT)?;
        nix::sys::socket::setsockopt(socket, nix::sys::socket::sockopt::Ipv6DontFrag, &false)?;
    }
    // On an IPv6 socket this is for IPv4 peers in IPv6 form.
    match rustix::net::sockopt::set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::DONT) {
        Err(error) if !is_ipv6 => Err(error.into()),
        _ => Ok(()),
    }
}

impl UdpCarrier {
    /// Binds `address`. Needs a running runtime.
    ///
    /// # Errors
    /// [`BindError`] with what the system said.
    pub fn bind(address: SocketAddr, allow: AllowList) -> Result<Self, BindError> {
        let error = |action| move |source| BindError { action, address, source };
        let socket = open(address).map_err(error("binding UDP"))?;
        let socket = UdpSocket::from_std(socket.into()).map_err(error("watching UDP"))?;
        Self::set_up(socket, address, allow, false).map_err(error("setting up UDP"))
    }

    /// Takes a non-blocking socket that is bound already, and leaves its buffers as they are. While the node drains,
    /// nothing more is read from it: what comes waits in its buffer for the next process.
    ///
    /// # Errors
    /// What the system said.
    pub fn inherit(socket: std::net::UdpSocket, allow: AllowList) -> io::Result<Self> {
        let socket = UdpSocket::from_std(socket)?;
        let address = socket.local_addr()?;
        Self::set_up(socket, address, allow, true)
    }

    fn set_up(socket: UdpSocket, address: SocketAddr, allow: AllowList, is_inherited: bool) -> io::Result<Self> {
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        allow_fragments(&socket, address.is_ipv6())?;
        Ok(Self { socket, state, allow, is_inherited })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// What the system said.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Serves datagrams until draining begins and nothing is in flight any more.
    pub async fn run(self, station: Arc<Station>, shutdown: Shutdown) {
        let (done, mut completions) = mpsc::unbounded_channel();
        let mut service = Service {
            carrier: self,
            station,
            in_flight: HashMap::new(),
            next_id: 0,
            done,
            backlog: VecDeque::new(),
            output: Vec::new(),
        };
        let mut buffers = vec![0; BATCH * BUFFER_LEN];
        while !(shutdown.is_draining() && service.in_flight.is_empty() && service.backlog.is_empty()) {
            let reading = !(service.carrier.is_inherited && shutdown.is_draining());
            let writing = !service.backlog.is_empty();
            let interest = match (reading, writing) {
                (true, true) => Interest::READABLE | Interest::WRITABLE,
                (false, true) => Interest::WRITABLE,
                _ => Interest::READABLE,
            };
            tokio::select! {
                biased;
                Some(done) = completions.recv() => {
                    service.complete(done);
                    while let Ok(done) = completions.try_recv() {
                        service.complete(done);
                    }
                }
                ready = service.carrier.socket.ready(interest), if reading || writing => match ready {
                    Ok(ready) => {
                        if ready.is_writable() {
                            service.send_backlog();
                        }
                        if reading {
                            match service.receive(&mut buffers) {
                                Ok(false) => {}
                                // Tokio counts system calls, each of which may bring hundreds of datagrams.
                                Ok(true) => tokio::task::yield_now().await,
                                Err(error) => service.after_receive_error(&error).await,
                            }
                        }
                    }
                    Err(error) => service.after_receive_error(&error).await,
                },
                () = shutdown.draining(), if !shutdown.is_draining() => {}
                () = shutdown.killed() => break,
            }
        }
        for (_, cancel) in service.in_flight.into_values() {
            cancel.cancel();
        }
    }
}

struct Service {
    carrier: UdpCarrier,
    station: Arc<Station>,
    in_flight: HashMap<(SocketAddr, u16, u32), (u64, CancelToken)>,
    next_id: u64,
    done: mpsc::UnboundedSender<Completion>,
    backlog: VecDeque<(Path, Vec<u8>, Instant)>,
    output: Vec<u8>,
}

impl Service {
    /// A receive error is about a datagram or a peer, never about the socket as a whole. One that repeats must not spin.
    async fn after_receive_error(&self, error: &io::Error) {
        self.station.counters().faults.of(Fault::Receive).add_one();
        fault!(WARN, Fault::Receive, %error, "cannot receive a datagram: {error}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    /// Handles what has come; returns whether there is more.
    fn receive(&mut self, buffers: &mut [u8]) -> io::Result<bool> {
        for _ in 0..BATCHES_PER_TURN {
            let mut metas = [RecvMeta::default(); BATCH];
            let mut slices: Vec<IoSliceMut<'_>> = buffers.chunks_mut(BUFFER_LEN).map(IoSliceMut::new).collect();
            let UdpCarrier { socket, state, .. } = &self.carrier;
            let received =
                socket.try_io(Interest::READABLE, || state.recv(UdpSockRef::from(socket), &mut slices, &mut metas));
            let count = match received {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                // A peer that closed its port before its reply came: nothing to do with anyone else.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => continue,
                Err(error) => return Err(error),
            };
            let now = Instant::now();
            for (meta, buffer) in metas.iter().take(count).zip(buffers.chunks(BUFFER_LEN)) {
                let path = Path { peer: meta.addr, local: meta.dst_ip };
                let bytes = buffer.get(..meta.len).unwrap_or_default();
                if bytes.is_empty() {
                    self.datagram(path, bytes, now);
                }
                for datagram in bytes.chunks(meta.stride.max(1)) {
                    self.datagram(path, datagram, now);
                }
            }
            if count < BATCH {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn datagram(&mut self, path: Path, bytes: &[u8], now: Instant) {
        let dropped = &self.station.counters().dropped;
        let address = canonical(path.peer);
        if !self.carrier.allow.allows(address.ip()) {
            dropped.peer_not_allowed.add_one();
            return;
        }
        let Ok(frame) = Frame::decode_exact(bytes) else {
            dropped.undecodable.add_one();
            return;
        };
        let key = (address, frame.stream_id, frame.sequence);
        match frame.flags.kind() {
            Kind::Request if frame.payload.is_empty() => dropped.empty.add_one(),
            Kind::Request => self.request(path, key, frame, now),
            Kind::Cancel if !self.station.admits_cancel(Carrier::Udp, &frame) => {}
            Kind::Cancel => match self.in_flight.get(&key) {
                Some((_, cancel)) => cancel.cancel(),
                None => dropped.idle_cancel.add_one(),
            },
            Kind::NeverAnswered => dropped.never_answered.add_one(),
        }
    }

    fn request(&mut self, path: Path, key: (SocketAddr, u16, u32), frame: Frame<'_>, arrived: Instant) {
        let (address, ..) = key;
        let peer = Peer {
            carrier: Carrier::Udp,
            connection: 0,
            address: Some(address),
            origin: Origin::Network(address),
            is_proven: address.ip().is_loopback(),
            max_reply_len: self.station.limits().max_datagram_len,
            default_session: None,
            stock_replies: false,
        };
        let id = self.next_id;
        self.next_id += 1;
        let mut output = std::mem::take(&mut self.output);
        output.clear();
        let done = &self.done;
        let reply_to = || -> Box<dyn ReplyTo> { Box::new(DatagramReply { path, key, id, done: done.clone() }) };
        match self.station.handle(Request { peer: &peer, frame, arrived }, &mut output, reply_to) {
            Outcome::Replied => self.send(path, &output, Instant::now()),
            Outcome::Queued(cancel) => {
                self.in_flight.insert(key, (id, cancel));
            }
            Outcome::Silent => {}
        }
        self.output = output;
    }

    fn complete(&mut self, done: Completion) {
        // Another request may have taken the same sequence meanwhile.
        if self.in_flight.get(&done.key).is_some_and(|(id, _)| *id == done.id) {
            self.in_flight.remove(&done.key);
        }
        if let Some(frame) = done.frame {
            self.send(done.path, &frame, done.ready);
        }
    }

    fn send(&mut self, path: Path, frame: &[u8], ready: Instant) {
        if !self.backlog.is_empty() {
            return self.keep(path, frame.to_vec(), ready);
        }
        match self.try_send(path, frame) {
            Ok(()) => self.sent(ready),
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.keep(path, frame.to_vec(), ready),
            Err(error) if quinn_udp::is_msg_size_err(&error) => self.too_large(path, frame),
            Err(error) => self.failed(path, &error),
        }
    }

    fn try_send(&self, path: Path, frame: &[u8]) -> io::Result<()> {
        let UdpCarrier { socket, state, .. } = &self.carrier;
        let transmit =
            Transmit { destination: path.peer, ecn: None, contents: frame, segment_size: None, src_ip: path.local };
        socket.try_io(Interest::WRITABLE, || state.try_send(UdpSockRef::from(socket), &transmit))
    }

    fn sent(&self, ready: Instant) {
        self.station.counters().stages.write.observe(ready.elapsed());
    }

    fn keep(&mut self, path: Path, frame: Vec<u8>, ready: Instant) {
        if self.backlog.len() < MAX_BACKLOG {
            self.backlog.push_back((path, frame, ready));
        } else {
            self.station.counters().send_errors.add_one();
        }
    }

    fn send_backlog(&mut self) {
        while let Some((path, frame, ready)) = self.backlog.pop_front() {
            match self.try_send(path, &frame) {
                Ok(()) => self.sent(ready),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.backlog.push_front((path, frame, ready));
                    return;
                }
                Err(error) if quinn_udp::is_msg_size_err(&error) => self.too_large(path, &frame),
                Err(error) => self.failed(path, &error),
            }
        }
    }

    /// The system does not send a datagram of this size: the peer is told, and can ask for less.
    fn too_large(&self, path: Path, frame: &[u8]) {
        self.station.counters().send_errors.add_one();
        let Some(header) = frame.first_chunk::<HEADER_LEN>() else { return };
        let Header { stream_id, sequence, .. } = Header::decode(header);
        let max = self.station.limits().max_datagram_len.min(frame.len().saturating_sub(1));
        let error = RequestError::ReplyTooLarge { len: frame.len(), max, datagram: true };
        let mut vent = Vec::new();
        error.write_vent(stream_id, sequence, aeon_proto::frame::Flags::FAILURE, &mut vent);
        if let Err(error) = self.try_send(path, &vent) {
            self.failed(path, &error);
        }
    }

    /// A send error concerns the peer alone: its port is closed, its network unreachable, a buffer full for the moment.
    /// The client repeats its request.
    fn failed(&self, path: Path, error: &io::Error) {
        self.station.counters().send_errors.add_one();
        self.station.counters().faults.of(Fault::Send).add_one();
        fault!(DEBUG, Fault::Send, peer = %path.peer, %error, "cannot send a reply: {error}");
    }
}
