//! What the binaries that serve share: describing themselves, and running a node.

use std::process::ExitCode;

use aeon_station::{
    config::{Config, ConfigError},
    daemon,
    model::{error::LoadError, upstream::UpstreamError},
    telemetry,
};
use clap::CommandFactory;

use crate::common::{UNAVAILABLE, USAGE, print_completions, report};

/// What a program writes about itself instead of running.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SelfDescription {
    /// Print the completions of this program for a shell and exit
    #[arg(long, value_name = "SHELL", help_heading = "Install")]
    completions: Option<clap_complete::Shell>,
    /// Print the man page of this program and exit
    #[arg(long, help_heading = "Install")]
    man: bool,
}

impl SelfDescription {
    /// Prints what was asked for; returns whether anything was.
    pub(crate) fn print<C: CommandFactory>(&self) -> std::io::Result<bool> {
        if let Some(shell) = self.completions {
            print_completions::<C>(shell);
            return Ok(true);
        }
        if self.man {
            clap_mangen::Man::new(C::command()).render(&mut std::io::stdout())?;
            return Ok(true);
        }
        Ok(false)
    }
}

/// Runs a node with a configuration until a signal ends it.
pub(crate) fn run_node<C: CommandFactory>(
    description: &SelfDescription,
    config: impl FnOnce() -> Result<Config, ConfigError>,
) -> ExitCode {
    match description.print::<C>() {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            return ExitCode::FAILURE;
        }
    }
    let config = match config() {
        Ok(config) => config,
        Err(error) => {
            report(&error);
            return ExitCode::from(USAGE);
        }
    };
    telemetry::log::start(&config.log, C::command().get_name());
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            report(&error);
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(daemon::run(&config));
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::from(exit_code(&error))
        }
    }
}

fn exit_code(error: &daemon::StartError) -> u8 {
    match error {
        daemon::StartError::Layers { .. } | daemon::StartError::Model(LoadError::LayersOutside { .. }) => USAGE,
        daemon::StartError::Systemd(_) => USAGE,
        daemon::StartError::Upstream(UpstreamError::Client(error)) if error.is_unreachable() => UNAVAILABLE,
        daemon::StartError::Upstream(UpstreamError::Address(_) | UpstreamError::LayersUnknown { .. }) => USAGE,
        _ => 1,
    }
}
