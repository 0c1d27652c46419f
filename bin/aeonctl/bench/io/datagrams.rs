//! Datagrams in flight over UDP on loopback, against a loop of `recv_from` and `send_to`.

use std::{
    io::IoSlice,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::sys::socket::{ControlMessage, MsgFlags, MultiHeaders, SockaddrIn, recv, sendmmsg, sendmsg};
use socket2::SockRef;

use super::{
    figures::{Bound, Plan, Quartiles, Row, Variant, interleave},
    machine::Threads,
    station::{LARGE, SMALL, Station, frame},
};

/// Datagrams in flight.
const WINDOW: usize = 64;
/// Receive and send buffer of every socket here, as the station asks for.
const SOCKET_BUFFER_LEN: usize = 4 << 20;
/// Room in a receive buffer that one datagram of 14,370 bytes takes at most, with what the system adds to it.
const LARGE_SHARE: usize = 24 << 10;
/// Silence after which what is missing is taken for lost: longer than a busy machine keeps a thread waiting.
const SILENCE: Duration = Duration::from_secs(2);
/// Full windows of the test for loss.
const WINDOWS: usize = 20;

fn bind() -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind(("127.0.0.1", 0)).context("binding UDP")?;
    let system = SockRef::from(&socket);
    system.set_recv_buffer_size(SOCKET_BUFFER_LEN)?;
    system.set_send_buffer_size(SOCKET_BUFFER_LEN)?;
    Ok(socket)
}

/// The floor: one thread, one call for each datagram and each answer. It sleeps when its client is gone.
fn echo(core: usize) -> anyhow::Result<(Threads, SocketAddr)> {
    let socket = bind()?;
    let address = socket.local_addr()?;
    let (threads, (started, is_started)) = (Threads::default(), std::sync::mpsc::channel());
    let entering = threads.clone();
    std::thread::spawn(move || {
        entering.enter(core);
        let _ = started.send(());
        let mut buffer = vec![0; 65_536];
        while let Ok((len, peer)) = socket.recv_from(&mut buffer) {
            // A client that has gone shows in the next call; another may come.
            let _ = socket.send_to(&buffer[..len], peer);
        }
    });
    is_started.recv().context("starting the echo")?;
    Ok((threads, address))
}

/// How the client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sending {
    /// Each datagram by itself, many in one call.
    Each,
    /// Many as one, which the system cuts (GSO).
    Joined,
}

struct Client<'a> {
    socket: UdpSocket,
    request: &'a [u8],
    sending: Sending,
    buffer: Vec<u8>,
    lost: usize,
}

impl<'a> Client<'a> {
    fn connect(server: SocketAddr, request: &'a [u8], sending: Sending) -> anyhow::Result<Self> {
        let socket = bind()?;
        socket.connect(server)?;
        socket.set_read_timeout(Some(SILENCE))?;
        Ok(Self { socket, request, sending, buffer: vec![0; 65_536], lost: 0 })
    }

    fn send(&self, count: usize) -> anyhow::Result<()> {
        let fd = self.socket.as_raw_fd();
        if self.sending == Sending::Joined && count > 1 {
            let segment = u16::try_from(self.request.len())?;
            let parts = vec![IoSlice::new(self.request); count];
            let control = [ControlMessage::UdpGsoSegments(&segment)];
            sendmsg::<()>(fd, &parts, &control, MsgFlags::empty(), None).context("sending joined datagrams")?;
            return Ok(());
        }
        let mut left = count;
        while left > 0 {
            let slices = vec![[IoSlice::new(self.request)]; left];
            let mut headers = MultiHeaders::<SockaddrIn>::preallocate(left, None);
            let none = vec![None; left];
            let sent = sendmmsg(fd, &mut headers, &slices, none, [], MsgFlags::empty()).context("sending datagrams")?;
            left -= sent.count();
        }
        Ok(())
    }

    /// Takes one answer, waiting for it, and then those that are there; returns how many came.
    fn receive(&mut self, most: usize) -> usize {
        if self.socket.recv(&mut self.buffer).is_err() {
            return 0;
        }
        let fd = self.socket.as_raw_fd();
        let more = (1..most).take_while(|_| recv(fd, &mut self.buffer, MsgFlags::MSG_DONTWAIT).is_ok());
        1 + more.count()
    }

    /// Keeps `window` datagrams in flight for a slice of time; returns how many were answered.
    fn run(&mut self, slice: Duration, window: usize) -> anyhow::Result<usize> {
        let (end, mut in_flight, mut answered) = (Instant::now() + slice, 0, 0);
        loop {
            // The first window is sent in any case.
            if in_flight < window && (answered == 0 || Instant::now() < end) {
                self.send(window - in_flight)?;
                in_flight = window;
            }
            if in_flight == 0 {
                return Ok(answered);
            }
            match self.receive(in_flight) {
                0 => {
                    self.lost += in_flight;
                    in_flight = 0;
                }
                came => {
                    in_flight -= came;
                    answered += came;
                }
            }
        }
    }

    /// A variant that runs this client: CPU time of the server and wall time for each request, in ns.
    fn variant(mut self, threads: Threads) -> Variant<'a> {
        Box::new(move |slice| {
            let (before, started) = (threads.cpu(), Instant::now());
            let requests = self.run(slice, WINDOW)?.max(1) as f64;
            let (cpu, wall) = (threads.cpu() - before, started.elapsed());
            Ok(vec![cpu.as_nanos() as f64 / requests, wall.as_nanos() as f64 / requests])
        })
    }
}

/// Small datagrams by CPU, and large ones by loss.
pub(super) fn measure(plan: Plan, core: usize) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (sending, how, bound) in [
        (Sending::Each, "sent each", Bound::AtMost { limit: 0.65, goal: 0.55 }),
        (Sending::Joined, "sent joined", Bound::Noted),
    ] {
        let (request, station, (threads, floor)) = (frame(SMALL, 1)?, Station::start(SMALL, core, 8)?, echo(core)?);
        let mut variants = [
            Client::connect(floor, &request, sending)?.variant(threads),
            Client::connect(station.udp, &request, sending)?.variant(station.threads.clone()),
        ];
        let figures = interleave(plan, &mut variants)?;
        let [floor, ours] = &figures[..] else { anyhow::bail!("two variants give two results") };
        let case = format!("{} B, {WINDOW} in flight, {how}", request.len());
        rows.push(Row::of(("udp", format!("{case}, server CPU"), "ns"), (floor, ours), 0, bound));
        rows.push(Row::of(("udp", format!("{case}, wall"), "ns"), (floor, ours), 1, Bound::Noted));
    }
    rows.push(loss(core)?);
    Ok(rows)
}

/// Full windows of large datagrams: as many at once as the receive buffer holds, and every one must be answered.
fn loss(core: usize) -> anyhow::Result<Row> {
    let (request, station) = (frame(LARGE, 1)?, Station::start(LARGE, core, 8)?);
    let mut client = Client::connect(station.udp, &request, Sending::Each)?;
    let window = (SockRef::from(&client.socket).recv_buffer_size()? / LARGE_SHARE).max(1);
    let mut answered = 0;
    for _ in 0..WINDOWS {
        // One window: the time is over before the first answer is there.
        answered += client.run(Duration::from_nanos(1), window)?;
    }
    anyhow::ensure!(answered + client.lost > 0, "nothing was sent");
    let percent = 100.0 * client.lost as f64 / (answered + client.lost) as f64;
    Ok(Row {
        part: "udp",
        what: format!("{} B, % lost of {WINDOWS} windows of {window}", request.len()),
        unit: "lost",
        floor: 0.0,
        ours: client.lost as f64,
        ratio: Quartiles { q1: percent, median: percent, q3: percent },
        bound: Bound::AtMost { limit: 0.0, goal: 0.0 },
        reached: None,
    })
}
