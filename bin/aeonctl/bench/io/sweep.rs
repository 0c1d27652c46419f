//! The same measurements over many sizes and numbers of connections, for the report.

use std::path::Path;

use super::{
    figures::{Plan, Quartiles, interleave},
    machine,
    pipelined::{BUFFER_LEN, Echo, Load},
    round_trip::{Peer, Work},
    station::{LARGE, SMALL, Station, message},
};

/// Values of a residual: frames of 50 bytes to 131 KB, with the two sizes that everything is held to.
const WIDTHS: [usize; 7] = [4, SMALL, 256, 1024, LARGE, 8192, 32_768];
/// Requests that each connection keeps in flight when their number is varied.
const WINDOW: usize = 4;
const CONNECTIONS: [usize; 5] = [1, 4, 16, 64, 256];

/// Floor and ours at one place; medians over the rounds, in ns for each request.
#[derive(Debug, Clone, Copy)]
pub(in crate::bench) struct Point {
    pub(in crate::bench) x: f64,
    pub(in crate::bench) floor: f64,
    pub(in crate::bench) ours: f64,
}

fn median(rounds: &[Vec<f64>], figure: usize) -> f64 {
    Quartiles::of(rounds.iter().filter_map(|round| round.get(figure).copied()).collect()).median
}

fn point(x: f64, figures: &[Vec<Vec<f64>>], figure: usize) -> Point {
    let of = |index: usize| figures.get(index).map_or(f64::NAN, |rounds| median(rounds, figure));
    Point { x, floor: of(0), ours: of(1) }
}

/// By bytes of a frame.
#[derive(Debug, Default)]
pub(in crate::bench) struct Payloads {
    /// One request at a time: the median, and what 99 of 100 stay below.
    pub(in crate::bench) p50: Vec<Point>,
    pub(in crate::bench) p99: Vec<Point>,
    /// One connection with 64 in flight, or as many as a buffer holds: wall time.
    pub(in crate::bench) streamed: Vec<Point>,
}

/// Runs on a thread of its own, which it pins.
pub(in crate::bench) fn payloads(is_quick: bool) -> anyhow::Result<Payloads> {
    let (plan, core) = begin(is_quick)?;
    let mut all = Payloads::default();
    for dim in WIDTHS {
        let (message, station) = (message(dim, 1)?, Station::start(dim, core, 8)?);
        let bytes = (message.len() - 4) as f64;
        let mut variants =
            [Peer::floor(Work::Parse, core)?.variant(&message)?, Peer::connect(&station)?.variant(&message)?];
        let figures = interleave(plan, &mut variants)?;
        all.p50.push(point(bytes, &figures, 0));
        all.p99.push(point(bytes, &figures, 2));
        drop((variants, station));
        let window = (BUFFER_LEN / message.len()).clamp(2, 64);
        all.streamed.push(loaded(plan, core, dim, (1, window), bytes)?);
    }
    Ok(all)
}

/// Time of one small request by the number of connections, each with four in flight.
pub(in crate::bench) fn connections(is_quick: bool) -> anyhow::Result<Vec<Point>> {
    let (plan, core) = begin(is_quick)?;
    CONNECTIONS.iter().map(|count| loaded(plan, core, SMALL, (*count, WINDOW), *count as f64)).collect()
}

fn begin(is_quick: bool) -> anyhow::Result<(Plan, usize)> {
    let core = machine::core()?;
    machine::pin(core)?;
    Ok((if is_quick { Plan::QUICK } else { Plan::FULL }, core))
}

/// Echo and station with the same load.
fn loaded(plan: Plan, core: usize, dim: usize, load: (usize, usize), x: f64) -> anyhow::Result<Point> {
    let (connections, window) = load;
    let message = message(dim, 1)?;
    let requests = message.repeat(window.max(BUFFER_LEN / message.len()));
    let (echo, station) = (Echo::start(core)?, Station::start(dim, core, connections)?);
    let load = |path: &Path| Load::connect(path, connections, window, &requests);
    let mut variants =
        [load(&echo.socket)?.variant(echo.threads.clone()), load(station.socket())?.variant(station.threads.clone())];
    Ok(point(x, &interleave(plan, &mut variants)?, 1))
}
