//! `aeonctl bench`: measurements that need no set-up.

mod phases;
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
    /// Hold PCA components and quantised bodies to the bars of the design (cosine, accepted drafts, bytes saved), beside
    /// what they do to the model's output
    Phases(phases::Phases),
}

impl Bench {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        match self.what {
            What::Wire(wire) => wire.run(context).await,
            What::Phases(phases) => phases.run(context).await,
        }
    }
}
