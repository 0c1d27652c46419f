//! One request at a time over a Unix socket, against two threads with blocking calls on a socket pair.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use aeon_proto::{frame::MAX_FRAME_LEN, meta::RequestMeta, payload::Payload, route::Route};
use aeon_station::codec::{Framing, next_frame};
use anyhow::Context as _;

use super::{
    figures::{Bound, Plan, Row, Variant, interleave},
    machine::Threads,
    station::{LARGE, SMALL, Station, message},
};

/// A server and a connection to it.
pub(super) struct Peer {
    pub(super) socket: UnixStream,
    pub(super) threads: Threads,
}

/// What a floor does with each message before it sends it back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Nothing,
    /// Header check, meta parse and dispatch.
    Parse,
}

impl Peer {
    pub(super) fn connect(station: &Station) -> anyhow::Result<Self> {
        let socket = UnixStream::connect(station.socket()).context("connecting to the station")?;
        Ok(Self { socket, threads: station.threads.clone() })
    }

    /// Another thread on the far end of a socket pair, which ends with it.
    pub(super) fn floor(work: Work, core: usize) -> anyhow::Result<Self> {
        let (near, mut far) = UnixStream::pair().context("making a socket pair")?;
        let (threads, (started, is_started)) = (Threads::default(), std::sync::mpsc::channel());
        let entering = threads.clone();
        std::thread::spawn(move || {
            entering.enter(core);
            let _ = started.send(());
            let mut buffer = vec![0; 256 << 10];
            let mut held = 0;
            while let Ok(len @ 1..) = far.read(&mut buffer[held..]) {
                held += len;
                let mut used = 0;
                while let Ok(Some((frame, len))) = next_frame(&buffer[used..held], Framing::Prefixed, MAX_FRAME_LEN) {
                    let is_known = || {
                        let payload = Payload::decode(frame.payload).ok()?;
                        let meta = RequestMeta::parse(payload.meta).ok()?;
                        (Route(frame.stream_id) == Route::FORWARD && meta.pos == Some(0)).then_some(())
                    };
                    if work == Work::Parse && is_known().is_none() {
                        return;
                    }
                    used += len;
                }
                if far.write_all(&buffer[..used]).is_err() {
                    return;
                }
                buffer.copy_within(used..held, 0);
                held -= used;
            }
        });
        is_started.recv().context("starting the floor")?;
        Ok(Self { socket: near, threads })
    }

    /// Sends `message` and reads the answer whole, by its length.
    pub(super) fn ask(&mut self, message: &[u8], buffer: &mut Vec<u8>) -> anyhow::Result<usize> {
        self.socket.write_all(message)?;
        let mut prefix = [0; 4];
        self.socket.read_exact(&mut prefix)?;
        buffer.resize(u32::from_be_bytes(prefix) as usize, 0);
        self.socket.read_exact(buffer)?;
        Ok(4 + buffer.len())
    }

    /// A variant that asks one request after the other: its median time and the server's CPU time, in ns.
    pub(super) fn variant<'a>(mut self, message: &'a [u8]) -> anyhow::Result<Variant<'a>> {
        let reply_len = self.ask(message, &mut Vec::new())?;
        // The length is known by now, so that one call reads an answer and the client weighs little.
        let mut reply = vec![0; reply_len];
        Ok(Box::new(move |slice: Duration| {
            let (before, end) = (self.threads.cpu(), Instant::now() + slice);
            let mut times = Vec::with_capacity(1 << 14);
            let mut started = Instant::now();
            while started < end {
                self.socket.write_all(message)?;
                self.socket.read_exact(&mut reply)?;
                let now = Instant::now();
                times.push((now - started).as_nanos() as f64);
                started = now;
            }
            let cpu = (self.threads.cpu() - before).as_nanos() as f64 / times.len() as f64;
            times.sort_by(f64::total_cmp);
            let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
            Ok(vec![at(0.5), cpu, at(0.99)])
        }))
    }
}

/// Both sizes: time and CPU of the server.
pub(super) fn measure(plan: Plan, core: usize) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (dim, limit, goal) in [(SMALL, 1.6, 1.4), (LARGE, 1.5, 1.35)] {
        let (message, station) = (message(dim, 1)?, Station::start(dim, core, 8)?);
        let mut variants = [
            Peer::floor(Work::Parse, core)?.variant(&message)?,
            Peer::floor(Work::Nothing, core)?.variant(&message)?,
            Peer::connect(&station)?.variant(&message)?,
        ];
        let figures = interleave(plan, &mut variants)?;
        let [floor, bare, ours] = &figures[..] else { anyhow::bail!("three variants give three results") };
        let size = message.len() - 4;
        let bound = Bound::AtMost { limit, goal };
        let mut row = |what: String, floor, figure, bound| {
            rows.push(Row::of(("round trip", what, "ns"), (floor, ours), figure, bound));
        };
        row(format!("{size} B, p50"), floor, 0, bound);
        row(format!("{size} B, p50, beside a bare echo"), bare, 0, Bound::Noted);
        row(format!("{size} B, server CPU"), floor, 1, bound);
    }
    Ok(rows)
}
