//! What the binaries share: reading arguments, reporting errors, exit codes.

use std::process::ExitCode;

use aeon_station::{
    config::{Config, ConfigError},
    daemon,
};
use clap::{CommandFactory, FromArgMatches, ValueEnum};

/// The command line or the configuration is wrong.
pub(crate) const USAGE: u8 = 64;
/// A station cannot be reached.
pub(crate) const UNAVAILABLE: u8 = 69;

/// Reads the command line; help and version end the process with 0, a mistake with 64.
pub(crate) fn parse<C: CommandFactory + FromArgMatches>() -> C {
    let parsed = C::command().try_get_matches().and_then(|matches| C::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| {
        let code = if error.use_stderr() { i32::from(USAGE) } else { 0 };
        // A closed pipe is no reason to fail.
        let _ = error.print();
        std::process::exit(code)
    })
}

/// Writes an error with all its causes to stderr.
pub(crate) fn report(error: &dyn std::error::Error) {
    let mut text = format!("error: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    eprintln!("{text}");
}

/// Logs go to stderr; AEON_LOG says how much (`warn` by default).
pub(crate) fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("AEON_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

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

/// Prints the completions of a program.
pub(crate) fn print_completions<C: CommandFactory>(shell: clap_complete::Shell) {
    let mut command = C::command();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut std::io::stdout());
    debug_assert!(shell.to_possible_value().is_some());
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
    start_logging();
    let config = match config() {
        Ok(config) => config,
        Err(error) => {
            report(&error);
            return ExitCode::from(USAGE);
        }
    };
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
    use aeon_station::model::upstream::UpstreamError;
    match error {
        daemon::StartError::Layers { .. } => USAGE,
        daemon::StartError::Upstream(UpstreamError::Client(error)) if error.is_unreachable() => UNAVAILABLE,
        daemon::StartError::Upstream(UpstreamError::Address(_) | UpstreamError::LayersUnknown { .. }) => USAGE,
        _ => 1,
    }
}
