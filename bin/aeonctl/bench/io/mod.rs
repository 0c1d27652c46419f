//! How close the carriers come to what the system itself takes.
//!
//! Every figure stands beside a floor that runs in the same rounds: floor, ours, floor, ours, all on one core, so that a busy
//! machine slows both alike. A row shows the median of the ratios of single rounds and their quartiles. `docs/performance.md`
//! tells the method and what came out.

mod codec;
mod datagrams;
mod figures;
mod machine;
mod memory;
mod pipelined;
mod round_trip;
mod station;
pub(super) mod sweep;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use serde_json::json;

use self::figures::{Plan, Row};
use crate::Context;

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Memory and time that idle connections cost
    Memory,
    /// One request at a time over a Unix socket
    RoundTrip,
    /// Many requests in flight over Unix sockets
    Pipelined,
    /// Datagrams
    Udp,
    /// Frames in memory, beside a codec in JavaScript
    Codec,
}

/// Options of `aeonctl bench io`.
#[derive(Debug, Args)]
pub(crate) struct Io {
    /// Fewer and shorter rounds: good enough to see a figure double
    #[arg(long)]
    quick: bool,
    /// What to measure [default: everything]
    #[arg(value_name = "PART")]
    parts: Vec<Part>,
}

impl Io {
    pub(crate) fn run(self, context: &Context) -> anyhow::Result<()> {
        // On a thread of its own: pinning it must not pin the rest of this process.
        let measuring = std::thread::Builder::new().name("bench".to_owned()).spawn(move || self.measure());
        let rows = match measuring.context("starting a thread")?.join() {
            Ok(rows) => rows?,
            Err(panicked) => std::panic::resume_unwind(panicked),
        };
        match context.json {
            true => println!("{}", json!({ "io": rows.iter().map(Row::json).collect::<Vec<_>>() })),
            false => print!("{}", figures::table(&rows)),
        }
        let worse: Vec<String> = rows.iter().filter(|row| row.is_regression()).map(Row::name).collect();
        anyhow::ensure!(worse.is_empty(), "more than twice as far off as the limit allows: {}", worse.join("; "));
        Ok(())
    }

    fn measure(self) -> anyhow::Result<Vec<Row>> {
        let plan = if self.quick { Plan::QUICK } else { Plan::FULL };
        let core = machine::core()?;
        machine::pin(core)?;
        let mut rows = Vec::new();
        // In this order: memory that was freed before it is looked at would not show.
        for part in Part::value_variants().iter().filter(|part| self.parts.is_empty() || self.parts.contains(part)) {
            rows.extend(match part {
                Part::Memory => memory::measure(plan, core).context("measuring memory")?,
                Part::RoundTrip => round_trip::measure(plan, core).context("measuring round trips")?,
                Part::Pipelined => pipelined::measure(plan, core).context("measuring pipelined requests")?,
                Part::Udp => datagrams::measure(plan, core).context("measuring datagrams")?,
                Part::Codec => codec::measure(plan).context("measuring the codec")?,
            });
        }
        Ok(rows)
    }
}
