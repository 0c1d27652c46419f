//! `aeonctl bench`: measurements that need no set-up.

mod hop;
mod io;
mod local;
mod mesh;
mod phases;
mod report;
mod sessions;
mod wire;

use clap::{Args, Subcommand};

use crate::Context;

/// Options of `aeonctl bench`.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Check the replay wire against its predictions P1 to P5 and their falsifiers F1 to F5
    Wire(wire::Wire),
    /// Measure round trips, pipelining, datagrams, the codec and idle connections, each beside its floor
    Io(io::Io),
    /// Measure by size, connections, sessions and stations, and draw it on one page
    Report(report::Report),
    /// Measure tokens a second of one station with one session and with several, beside a station without batches
    Sessions(sessions::Sessions),
    /// Measure what a station adds to a round trip over a Unix socket and UDP, beside an echo over the same carrier
    Hop(hop::Hop),
    /// Hold PCA components and quantised bodies to the bars of the design (cosine, accepted drafts, bytes saved), beside
    /// what they do to the model's output
    Phases(phases::Phases),
}

impl Bench {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        match self.what {
            What::Wire(wire) => wire.run(context).await,
            What::Io(io) => io.run(context),
            What::Report(report) => report.run(context).await,
            What::Sessions(sessions) => sessions.run(context).await,
            What::Hop(hop) => hop.run(context).await,
            What::Phases(phases) => phases.run(context).await,
        }
    }
}
