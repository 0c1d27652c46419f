//! What idle connections cost: memory of the server, and time of the one that is active.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use anyhow::Context as _;
use rustix::process::{Resource, getrlimit};

use super::{
    figures::{Bound, Plan, Quartiles, Row, interleave},
    machine::resident,
    round_trip::Peer,
    station::{SMALL, Station, message},
};

/// Connections wanted.
const CONNECTIONS: usize = 10_000;
/// Connections before the first look, so that what grows once has grown.
const WARM_UP: usize = 500;
/// Positions of a request of 14 KB.
const POSITIONS: usize = 102;
/// Descriptors that are left for everything else.
const SPARE: u64 = 256;

/// Runs first in its process: memory that another part has freed would be used again, and not show.
pub(super) fn measure(plan: Plan, core: usize) -> anyhow::Result<Vec<Row>> {
    let (crowded, quiet) = (Station::start(SMALL, core, CONNECTIONS + WARM_UP + 8)?, Station::start(SMALL, core, 8)?);
    // Both ends of every connection are here.
    let most = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |limit| limit.saturating_sub(SPARE) / 2);
    let count = usize::try_from(most).unwrap_or(usize::MAX).saturating_sub(WARM_UP).min(CONNECTIONS);
    let (small, large) = (message(SMALL, 1)?, message(SMALL, POSITIONS)?);
    let mut idle: Vec<UnixStream> = Vec::with_capacity(count + WARM_UP);
    let mut reply = Vec::new();
    let mut open = |idle: &mut Vec<UnixStream>, number: usize| -> anyhow::Result<()> {
        for _ in 0..number {
            let mut socket = UnixStream::connect(crowded.socket()).context("opening an idle connection")?;
            // An answer shows that the connection is being served, not only queued.
            ask(&mut socket, &small, &mut reply)?;
            idle.push(socket);
        }
        Ok(())
    };
    open(&mut idle, WARM_UP)?;
    let mut reply = Vec::new();
    for socket in &mut idle {
        ask(socket, &large, &mut reply)?;
    }
    let before = resident()?;
    open(&mut idle, count)?;
    let opened = resident()?;
    for socket in &mut idle {
        ask(socket, &large, &mut reply)?;
    }
    let used = resident()?;
    let each = |now: u64| now.saturating_sub(before) as f64 / count as f64;
    let kilobytes = |what: &str, bytes: f64, bound| {
        let ratio = bytes / 1000.0;
        let ratio = Quartiles { q1: ratio, median: ratio, q3: ratio };
        let what = format!("{what}, {count} connections");
        Row { part: "memory", what, unit: "B", floor: 1000.0, ours: bytes, ratio, bound, reached: None }
    };
    let bound = Bound::AtMost { limit: 2.0, goal: 1.2 };
    let mut rows = vec![
        kilobytes("KB for each idle connection", each(opened), bound),
        kilobytes("KB after 14 KB on each", each(used), bound),
    ];
    let mut variants = [Peer::connect(&quiet)?.variant(&small)?, Peer::connect(&crowded)?.variant(&small)?];
    let figures = interleave(plan, &mut variants)?;
    let [alone, among] = &figures[..] else { anyhow::bail!("two variants give two results") };
    let bound = Bound::AtMost { limit: 1.05, goal: 1.05 };
    let what = |figure: &str| format!("active one beside a server without idle ones, {figure}");
    rows.push(Row::of(("memory", what("p50"), "ns"), (alone, among), 0, bound));
    rows.push(Row::of(("memory", what("CPU"), "ns"), (alone, among), 1, bound));
    Ok(rows)
}

fn ask(socket: &mut UnixStream, message: &[u8], reply: &mut Vec<u8>) -> anyhow::Result<()> {
    socket.write_all(message)?;
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix)?;
    reply.resize(u32::from_be_bytes(prefix) as usize, 0);
    Ok(socket.read_exact(reply)?)
}
