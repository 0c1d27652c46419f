//! A station on UDP, in place of the original program of this name.

mod common;
#[path = "common/node.rs"]
mod node;

use std::{net::SocketAddr, process::ExitCode};

use aeon_station::config::{Config, ListenSettings, LogSettings, ModelSettings, Settings};
use clap::Parser;

/// Serves layers of a language model over aeon-flow on UDP, one frame a datagram
#[derive(Debug, Parser)]
#[command(name = "fat-station-flow-udp", version)]
struct Cli {
    /// UDP address to listen on
    #[arg(long, value_name = "ADDR:PORT", required_unless_present_any = ["completions", "man"])]
    bind: Option<SocketAddr>,
    #[command(flatten)]
    model: ModelSettings,
    /// Networks that may send; replaces the default, loopback
    #[arg(long, value_name = "CIDR")]
    allow: Option<Vec<String>>,
    #[command(flatten)]
    log: LogSettings,
    #[command(flatten)]
    description: node::SelfDescription,
}

fn main() -> ExitCode {
    let Cli { bind, model, allow, log, description } = common::parse();
    node::run_node::<Cli>(&description, || {
        let listen = ListenSettings { udp: bind, allow, ..ListenSettings::default() };
        Config::try_from(Settings { model, listen, log, ..Settings::default() })
    })
}
