//! A station on a Unix socket, in place of the original program of this name.

mod common;
#[path = "common/node.rs"]
mod node;

use std::{path::PathBuf, process::ExitCode};

use aeon_station::config::{Config, ListenSettings, LogSettings, ModelSettings, Settings};
use clap::Parser;

/// Serves layers of a language model over aeon-flow on a Unix socket
#[derive(Debug, Parser)]
#[command(name = "fat-station-flow", version)]
struct Cli {
    /// Unix socket to listen on
    #[arg(long, value_name = "PATH", required_unless_present_any = ["completions", "man"])]
    socket: Option<PathBuf>,
    #[command(flatten)]
    model: ModelSettings,
    /// Serve clients that know flag 0x20 as POISON: every reply carries FIN alone
    #[arg(long)]
    stock_clients: bool,
    /// Requests that name no session share one per connection
    #[arg(long)]
    connection_session: bool,
    #[command(flatten)]
    log: LogSettings,
    #[command(flatten)]
    description: node::SelfDescription,
}

fn main() -> ExitCode {
    let Cli { socket, model, stock_clients, connection_session, log, description } = common::parse();
    node::run_node::<Cli>(&description, || {
        let listen = ListenSettings {
            uds: socket,
            stock_clients: Some(stock_clients),
            connection_session: Some(connection_session),
            ..ListenSettings::default()
        };
        Config::try_from(Settings { model, listen, log, ..Settings::default() })
    })
}
