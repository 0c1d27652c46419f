//! A station on any of the carriers, configured by a file, the environment and flags.

mod common;
#[path = "common/node.rs"]
mod node;

use std::{path::PathBuf, process::ExitCode};

use aeon_station::{
    config::{Config, ConfigError, Settings},
    systemd::sockets,
};
use clap::{Parser, Subcommand};

/// Serves layers of a language model over aeon-flow on Unix sockets, UDP and TCP
///
/// Settings come from the configuration file, then from the environment, then from flags; the later wins.
#[derive(Debug, Parser)]
#[command(name = "aeon-node", version, args_conflicts_with_subcommands = false)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// TOML file with the tables model, listen, limits and log, whose keys are the flags below
    #[arg(long, env = "AEON_CONFIG", value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    description: node::SelfDescription,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check the configuration and exit: 0 if it is good, 64 if it is not
    Check,
}

fn configuration(file: Option<PathBuf>, settings: Settings) -> Result<Config, ConfigError> {
    let file = file.map(|path| Settings::read(&path)).transpose()?.unwrap_or_default();
    Config::try_from(settings.or(file))
}

fn main() -> ExitCode {
    let Cli { command, config, mut settings, description } = common::parse();
    if settings.listen.systemd_sockets.is_none() && sockets::are_passed() {
        settings.listen.systemd_sockets = Some(true);
    }
    match command {
        Some(Command::Check) => match configuration(config, settings) {
            Ok(_) => {
                println!("configuration is good");
                ExitCode::SUCCESS
            }
            Err(error) => {
                common::report(&error);
                ExitCode::from(common::USAGE)
            }
        },
        None => node::run_node::<Cli>(&description, || configuration(config, settings)),
    }
}
