//! Many requests in flight over Unix sockets, against a bare epoll echo: CPU time of the server for each request.

use std::{
    collections::HashMap,
    io::{self, ErrorKind, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    figures::{Bound, Plan, Row, Variant, interleave},
    machine::Threads,
    station::{LARGE, SMALL, Station, message},
};
use crate::demo::PrivateFolder;

/// Bytes of one read of the echo and of the load.
pub(super) const BUFFER_LEN: usize = 256 << 10;
/// Events of one wait.
const EVENTS: usize = 64;
/// Longest silence of a server before the run is given up.
const PATIENCE: EpollTimeout = EpollTimeout::NONE;

fn wait(epoll: &Epoll, timeout: EpollTimeout) -> io::Result<Vec<EpollEvent>> {
    let mut events = [EpollEvent::empty(); EVENTS];
    let count = match epoll.wait(&mut events, timeout) {
        Ok(count) => count,
        Err(nix::errno::Errno::EINTR) => 0,
        Err(error) => return Err(error.into()),
    };
    Ok(events[..count].to_vec())
}

/// Writes what fits; returns how much, and whether the socket is full.
fn write_some(mut socket: &UnixStream, bytes: &[u8]) -> io::Result<(usize, bool)> {
    let mut done = 0;
    while done < bytes.len() {
        match socket.write(&bytes[done..]) {
            Ok(len) => done += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok((done, true)),
            Err(error) => return Err(error),
        }
    }
    Ok((done, false))
}

/// The floor: one thread, epoll, whole frames sent back with one write for each read.
pub(super) struct Echo {
    pub(super) threads: Threads,
    pub(super) socket: PathBuf,
    _folder: PrivateFolder,
}

impl Echo {
    pub(super) fn start(core: usize) -> anyhow::Result<Self> {
        let folder = PrivateFolder::new().context("making a folder for the socket")?;
        let socket = folder.path().join("echo.sock");
        let listener = UnixListener::bind(&socket).context("binding the echo")?;
        listener.set_nonblocking(true)?;
        let (threads, (started, is_started)) = (Threads::default(), std::sync::mpsc::channel());
        let entering = threads.clone();
        // It ends with the process: its connections end with their clients, and then it only sleeps.
        std::thread::spawn(move || {
            entering.enter(core);
            let _ = started.send(());
            serve(&listener)
        });
        is_started.recv().context("starting the echo")?;
        Ok(Self { threads, socket, _folder: folder })
    }
}

#[derive(Debug)]
struct Echoed {
    socket: UnixStream,
    /// Part of a frame.
    rest: Vec<u8>,
    /// What the socket did not take yet.
    unsent: Vec<u8>,
}

fn serve(listener: &UnixListener) -> io::Result<()> {
    const LISTENER: u64 = 0;
    let epoll = Epoll::new(EpollCreateFlags::empty())?;
    epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
    let mut connections = HashMap::new();
    let (mut next, mut buffer) = (LISTENER + 1, vec![0; BUFFER_LEN]);
    loop {
        for event in wait(&epoll, EpollTimeout::NONE)? {
            if event.data() == LISTENER {
                while let Ok((socket, _)) = listener.accept() {
                    socket.set_nonblocking(true)?;
                    epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, next))?;
                    connections.insert(next, Echoed { socket, rest: Vec::new(), unsent: Vec::new() });
                    next += 1;
                }
            } else if let Some(connection) = connections.get_mut(&event.data())
                && connection.turn(&epoll, event, &mut buffer).is_err()
            {
                connections.remove(&event.data());
            }
        }
    }
}

/// Hands out the whole frames at the start of `bytes`; returns the bytes they take.
fn frames(bytes: &[u8], mut take: impl FnMut(&[u8])) -> usize {
    let mut used = 0;
    while let Some(prefix) = bytes.get(used..).and_then(<[u8]>::first_chunk) {
        let len = 4 + u32::from_be_bytes(*prefix) as usize;
        let Some(frame) = bytes.get(used..used + len) else { break };
        take(frame);
        used += len;
    }
    used
}

impl Echoed {
    fn turn(&mut self, epoll: &Epoll, event: EpollEvent, buffer: &mut [u8]) -> io::Result<()> {
        let was_full = !self.unsent.is_empty();
        if !was_full {
            let held = self.rest.len();
            buffer[..held].copy_from_slice(&self.rest);
            let len = match self.socket.read(&mut buffer[held..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => held + len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            // Frame by frame into an output of its own, as the simplest server does that answers more than an echo.
            let used = frames(&buffer[..len], |frame| self.unsent.extend_from_slice(frame));
            self.rest.clear();
            self.rest.extend_from_slice(&buffer[used..len]);
        }
        let (done, is_full) = write_some(&self.socket, &self.unsent)?;
        self.unsent.drain(..done);
        if is_full != was_full {
            let interest = if is_full { EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
            epoll.modify(&self.socket, &mut EpollEvent::new(interest, event.data()))?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Sender {
    socket: UnixStream,
    sent: usize,
    received: usize,
    is_full: bool,
}

/// One thread that keeps `window` requests in flight on each of its connections.
pub(super) struct Load<'a> {
    epoll: Epoll,
    senders: Vec<Sender>,
    window: usize,
    message_len: usize,
    /// The request many times over.
    requests: &'a [u8],
    reply_len: usize,
}

impl<'a> Load<'a> {
    pub(super) fn connect(path: &Path, connections: usize, window: usize, requests: &'a [u8]) -> anyhow::Result<Self> {
        let message_len = whole_message(requests)?;
        let epoll = Epoll::new(EpollCreateFlags::empty())?;
        let mut load = Self { epoll, senders: Vec::new(), window, message_len, requests, reply_len: 0 };
        for index in 0..connections {
            let mut socket = UnixStream::connect(path).context("connecting")?;
            socket.write_all(&requests[..message_len])?;
            let mut prefix = [0; 4];
            socket.read_exact(&mut prefix)?;
            let mut reply = vec![0; u32::from_be_bytes(prefix) as usize];
            socket.read_exact(&mut reply)?;
            load.reply_len = 4 + reply.len();
            socket.set_nonblocking(true)?;
            load.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))?;
            load.senders.push(Sender { socket, sent: 0, received: 0, is_full: false });
        }
        Ok(load)
    }

    /// Sends as much as the window lets; when stopping, only the rest of a request that was begun.
    fn push(&mut self, index: usize, stopping: bool) -> anyhow::Result<()> {
        let sender = &mut self.senders[index];
        let most = match stopping {
            true => sender.sent.next_multiple_of(self.message_len),
            false => (sender.received / self.reply_len + self.window) * self.message_len,
        };
        let mut is_full = false;
        while sender.sent < most && !is_full {
            let at = sender.sent % self.requests.len();
            let len = (most - sender.sent).min(self.requests.len() - at);
            let done;
            (done, is_full) = write_some(&sender.socket, &self.requests[at..at + len])?;
            sender.sent += done;
        }
        if is_full != sender.is_full {
            sender.is_full = is_full;
            let interest = if is_full { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
            self.epoll.modify(&sender.socket, &mut EpollEvent::new(interest, index as u64))?;
        }
        Ok(())
    }

    /// Runs for a slice of time; returns the requests that were answered.
    fn run(&mut self, slice: Duration, buffer: &mut [u8]) -> anyhow::Result<usize> {
        let end = Instant::now() + slice;
        let answered = |load: &Self| load.senders.iter().map(|sender| sender.received / load.reply_len).sum::<usize>();
        let before = answered(self);
        for index in 0..self.senders.len() {
            self.push(index, false)?;
        }
        let mut stopping = false;
        loop {
            for event in wait(&self.epoll, PATIENCE)? {
                let index = event.data() as usize;
                if event.events().contains(EpollFlags::EPOLLIN) {
                    match (&self.senders[index].socket).read(buffer) {
                        Ok(0) => anyhow::bail!("the server closed a connection"),
                        Ok(len) => self.senders[index].received += len,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                self.push(index, stopping)?;
            }
            stopping = stopping || Instant::now() >= end;
            let is_done =
                |sender: &Sender| sender.received / self.reply_len * self.message_len == sender.sent && !sender.is_full;
            if stopping && self.senders.iter().all(is_done) {
                return Ok(answered(self) - before);
            }
        }
    }

    /// A variant that runs this load: CPU time of the server and wall time for each request, in ns.
    pub(super) fn variant(mut self, threads: Threads) -> Variant<'a> {
        let mut buffer = vec![0; BUFFER_LEN];
        Box::new(move |slice| {
            let (before, started) = (threads.cpu(), Instant::now());
            let requests = self.run(slice, &mut buffer)?.max(1) as f64;
            let (cpu, wall) = (threads.cpu() - before, started.elapsed());
            Ok(vec![cpu.as_nanos() as f64 / requests, wall.as_nanos() as f64 / requests])
        })
    }
}

fn whole_message(requests: &[u8]) -> anyhow::Result<usize> {
    let prefix = requests.first_chunk().context("no request")?;
    Ok(4 + u32::from_be_bytes(*prefix) as usize)
}

/// One connection with 64 in flight and 16 with 4, small and large.
pub(super) fn measure(plan: Plan, core: usize) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    // The last number of each: what was reached so far.
    let cases = [
        (SMALL, 1, 64, (2.5, 1.9), 9.8),
        (SMALL, 16, 4, (1.5, 1.3), 3.4),
        (LARGE, 1, 64, (1.2, 1.15), 1.5),
        (LARGE, 16, 4, (1.2, 1.0), 1.5),
    ];
    for (dim, connections, window, (limit, goal), reached) in cases {
        let message = message(dim, 1)?;
        let requests = message.repeat(window.max(BUFFER_LEN / message.len()));
        let (echo, station) = (Echo::start(core)?, Station::start(dim, core, connections)?);
        let load = |path: &Path| Load::connect(path, connections, window, &requests);
        let mut variants = [
            load(&echo.socket)?.variant(echo.threads.clone()),
            load(station.socket())?.variant(station.threads.clone()),
        ];
        let figures = interleave(plan, &mut variants)?;
        let [floor, ours] = &figures[..] else { anyhow::bail!("two variants give two results") };
        let case = format!("{} B, {connections} x {window}", message.len() - 4);
        // The issue bounds the large frames of one connection; sixteen are shown beside it.
        let bound = match (dim, connections) {
            (LARGE, 16) => Bound::Noted,
            _ => Bound::AtMost { limit, goal },
        };
        rows.push(
            Row::of(("pipelined", format!("{case}, server CPU"), "ns"), (floor, ours), 0, bound).reached(reached),
        );
        rows.push(Row::of(("pipelined", format!("{case}, wall"), "ns"), (floor, ours), 1, Bound::Noted));
    }
    Ok(rows)
}
