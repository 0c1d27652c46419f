//! The UDP carrier: one datagram is one frame.
//!
//! Datagrams are received in batches, and answered in runs. An error that belongs to one peer (its port is closed, its network is gone, a reply
//! is too large) is counted and never ends the loop. Replies leave from the address that was asked.

mod outbox;

use std::{
    collections::HashMap,
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

use self::outbox::{Outbox, Wire};
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
const BATCH: usize = 32;
/// Bytes of a receive buffer: the largest run of datagrams that the kernel joins into one.
const BUFFER_LEN: usize = 65_536;
/// Batches in a row before other tasks get their turn.
const BATCHES_PER_TURN: usize = 2;
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
    if let Some(advice) = buffer_advice(socket.recv_buffer_size()?) {
        tracing::warn!(%address, "{advice}");
    }
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER_LEN);
    socket.bind(&address.into())?;
    Ok(socket)
}

/// What an operator can do about a receive buffer that is smaller than was asked for. Linux says twice what it grants, for
/// its own book-keeping.
fn buffer_advice(size: usize) -> Option<String> {
    let granted = size / 2;
    (granted < SOCKET_BUFFER_LEN).then(|| {
        format!(
            "the UDP receive buffer has {granted} of {SOCKET_BUFFER_LEN} bytes, so that datagrams may be lost under load; \
             allow more with: sysctl -w net.core.rmem_max={SOCKET_BUFFER_LEN}"
        )
    })
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
            outbox: Outbox::default(),
            output: Vec::new(),
        };
        let mut buffers = vec![0; BATCH * BUFFER_LEN];
        while !(shutdown.is_draining() && service.in_flight.is_empty() && !service.outbox.is_waiting()) {
            let reading = !(service.carrier.is_inherited && shutdown.is_draining());
            let writing = service.outbox.is_waiting();
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
                    service.flush();
                }
                ready = service.carrier.socket.ready(interest), if reading || writing => match ready {
                    Ok(ready) => {
                        if ready.is_writable() {
                            service.send_backlog();
                        }
                        if reading {
                            let received = service.receive(&mut buffers);
                            service.flush();
                            match received {
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
    outbox: Outbox,
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
            let mut chunks = buffers.chunks_mut(BUFFER_LEN);
            let mut slices: [_; BATCH] = std::array::from_fn(|_| IoSliceMut::new(chunks.next().unwrap_or_default()));
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
        let Self { outbox, carrier, station, .. } = self;
        outbox.push(&Sender { carrier, station }, path, frame, ready);
    }

    fn flush(&mut self) {
        let Self { outbox, carrier, station, .. } = self;
        outbox.flush(&Sender { carrier, station });
    }

    fn send_backlog(&mut self) {
        let Self { outbox, carrier, station, .. } = self;
        outbox.send_backlog(&Sender { carrier, station });
    }
}

/// The socket as answers leave by it, and what is counted of them.
struct Sender<'a> {
    carrier: &'a UdpCarrier,
    station: &'a Station,
}

impl Wire for Sender<'_> {
    fn try_send(&self, path: Path, bytes: &[u8], segment: Option<usize>) -> io::Result<()> {
        let UdpCarrier { socket, state, .. } = self.carrier;
        let transmit =
            Transmit { destination: path.peer, ecn: None, contents: bytes, segment_size: segment, src_ip: path.local };
        socket.try_io(Interest::WRITABLE, || state.try_send(UdpSockRef::from(socket), &transmit))
    }

    /// It sinks to 1 when the system or a device refuses to join datagrams.
    fn max_segments(&self) -> usize {
        self.carrier.state.max_gso_segments()
    }

    fn sent(&self, ready: Instant) {
        self.station.counters().stages.write.observe(ready.elapsed());
    }

    fn dropped(&self) {
        self.station.counters().send_errors.add_one();
    }

    /// A send error concerns the peer alone: its port is closed, its network unreachable, a buffer full for the moment.
    /// The client repeats its request.
    fn failed(&self, path: Path, frame: &[u8], error: &io::Error) {
        if quinn_udp::is_msg_size_err(error) {
            return self.too_large(path, frame);
        }
        self.station.counters().send_errors.add_one();
        self.station.counters().faults.of(Fault::Send).add_one();
        fault!(DEBUG, Fault::Send, peer = %path.peer, %error, "cannot send a reply: {error}");
    }
}

impl Sender<'_> {
    /// The system does not send a datagram of this size: the peer is told, and can ask for less.
    fn too_large(&self, path: Path, frame: &[u8]) {
        self.station.counters().send_errors.add_one();
        let Some(header) = frame.first_chunk::<HEADER_LEN>() else { return };
        let Header { stream_id, sequence, .. } = Header::decode(header);
        let max = self.station.limits().max_datagram_len.min(frame.len().saturating_sub(1));
        let error = RequestError::ReplyTooLarge { len: frame.len(), max, datagram: true };
        let mut vent = Vec::new();
        error.write_vent(stream_id, sequence, aeon_proto::frame::Flags::FAILURE, &mut vent);
        if let Err(error) = self.try_send(path, &vent, None) {
            self.station.counters().send_errors.add_one();
            fault!(DEBUG, Fault::Send, peer = %path.peer, %error, "cannot send a reply: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_receive_buffer_names_the_sysctl() {
        assert_eq!(buffer_advice(2 * SOCKET_BUFFER_LEN), None);
        let advice = buffer_advice(425_984).unwrap();
        assert!(advice.contains("212992 of 4194304 bytes") && advice.contains("net.core.rmem_max=4194304"), "{advice}");
    }
}
