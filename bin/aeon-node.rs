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
    Check {
        /// Print the settings that file, environment and flags give together, as a configuration file
        #[arg(long)]
        show: bool,
    },
}

fn settings(file: Option<PathBuf>, settings: Settings) -> Result<Settings, ConfigError> {
    let file = file.map(|path| Settings::read(&path)).transpose()?.unwrap_or_default();
    Ok(settings.or(file))
}

/// Checks the settings; with `show` returns them as a file.
fn check(settings: Settings, show: bool) -> anyhow::Result<String> {
    Config::try_from(settings.clone())?;
    Ok(if show { settings.to_toml()? } else { "configuration is good\n".to_owned() })
}

fn main() -> ExitCode {
    let Cli { command, config, mut settings, description } = common::parse();
    if settings.listen.systemd_sockets.is_none() && sockets::are_passed() {
        settings.listen.systemd_sockets = Some(true);
    }
    match command {
        Some(Command::Check { show }) => {
            match self::settings(config, settings).map_err(Into::into).and_then(|settings| check(settings, show)) {
                Ok(text) => {
                    print!("{text}");
                    ExitCode::SUCCESS
                }
                Err(error) => {
                    common::report(error.as_ref());
                    ExitCode::from(common::USAGE)
                }
            }
        }
        None => node::run_node::<Cli>(&description, || Config::try_from(self::settings(config, settings)?)),
    }
}
