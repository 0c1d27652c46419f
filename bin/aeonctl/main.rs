//! The client and toolbox for stations.

mod admin;
mod auto;
mod basis;
mod bench;
mod capture;
mod chart;
#[path = "../common/mod.rs"]
mod common;
mod demo;
mod doctor;
mod evaluate;
mod fidelity;
mod fit;
mod generate;
mod methodology;
mod plot;
mod query;
mod replay;
mod report;
mod top;
mod unfinished;
mod verdict;

use std::{path::PathBuf, process::ExitCode};

use aeon_station::client::{
    ClientError, ClientOptions, StationAddress,
    admin::{AdminAddress, AdminError},
};
use clap::{Parser, Subcommand};

/// Client and toolbox for aeon-flow stations
///
/// Exit codes: 0 done, 64 wrong usage, 69 a station cannot be reached, 1 anything else.
#[derive(Debug, Parser)]
#[command(name = "aeonctl", version)]
struct Cli {
    /// Station to use: uds:PATH, udp:ADDR:PORT or tcp:ADDR:PORT; several make a mesh, in the order of their layers
    #[arg(long = "station", value_name = "S", global = true)]
    stations: Vec<StationAddress>,
    /// HTTP listener of a node, for top, reload and drain; several are asked one after the other [default: http://127.0.0.1:7080]
    #[arg(long = "admin", env = "AEON_ADMIN", value_name = "URL", value_delimiter = ',', global = true)]
    admins: Vec<AdminAddress>,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
    /// Frames without a length in front, on TCP
    #[arg(long, global = true)]
    bare_frames: bool,
    /// File with the shared key of the stations, if they take only signed requests
    #[arg(long, env = "AEON_AUTH_KEY_FILE", value_name = "FILE", global = true)]
    auth_key_file: Option<PathBuf>,
    /// Seconds to wait for an answer
    #[arg(long, value_name = "SECONDS", default_value_t = 120, global = true)]
    timeout: u64,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show what stations are: model, layers, limits
    Hello,
    /// Show how stations are: load, sessions, counters
    Health,
    /// Send token ids or a residual through the layers of one station
    Forward(query::Forward),
    /// Generate text with a mesh, and report speed and bytes for each hop
    Generate(generate::Generate),
    /// Start two stations in this process, one on a Unix socket and one on UDP, and generate text through both
    Demo(demo::Demo),
    /// Judge forms of residuals by what they do to a model's output: bytes, cosine, divergence, perplexity, drafts
    ///
    /// Every position of the text passes through the codec at every cut, the prompt's as well. Judged are all positions of
    /// a window but the first and the last. Cosines and errors are those of ordinary positions: not position 0, and none
    /// whose norm is over four times the median of its boundary. f16, i8 and qN send those as f16; pcar sends all positions
    /// as components, as the wire does, and pcar:K:escape shows what it would be with them as f16.
    Evaluate(Box<evaluate::Evaluate>),
    /// Run a text through a mesh and write what crosses each boundary
    CaptureResiduals(capture::Capture),
    /// Fit, inspect and verify basis files
    #[command(subcommand)]
    Basis(basis::BasisCommand),
    /// Add to, list and show a folder of methodologies
    #[command(subcommand)]
    Methodology(methodology::MethodologyCommand),
    /// Examine a mesh before it is used: what is wrong with it, and what to do
    Doctor,
    /// Measure and judge what this program is made of
    Bench(bench::Bench),
    /// Watch stations: rates, latencies, bytes for each token, sessions, errors (of --admin by their metrics, of --station by HEALTH)
    Top(top::Top),
    /// Have nodes load their bases and methodologies again; if a file is bad, the old ones stay and the file is named
    Reload,
    /// Have nodes end: they refuse new work with 503, finish what is in flight, and exit
    Drain,
    /// Ask the prefix replay caches of stations for a prefix
    Replay(replay::Replay),
    /// Fill the prefix replay caches of stations, from a session or a BWAH file
    Capture(replay::Capture),
    /// Print the completions of this program for a shell
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: clap_complete::Shell,
    },
    /// Print the man page of this program, or write those of all its commands into a folder
    Man {
        /// Folder for aeonctl.1, aeonctl-hello.1 and so on
        #[arg(value_name = "DIR")]
        folder: Option<PathBuf>,
    },
}

/// What every command gets.
struct Context {
    stations: Vec<StationAddress>,
    admins: Vec<AdminAddress>,
    options: ClientOptions,
    json: bool,
}

/// A mistake of the user that no argument parser can see.
#[derive(Debug)]
struct UsageError(String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

fn usage(text: impl Into<String>) -> anyhow::Error {
    UsageError(text.into()).into()
}

impl Context {
    /// The stations named, at least one.
    fn stations(&self) -> anyhow::Result<&[StationAddress]> {
        match self.stations.is_empty() {
            true => Err(usage("no station was named; add --station uds:PATH, udp:ADDR:PORT or tcp:ADDR:PORT")),
            false => Ok(&self.stations),
        }
    }

    /// The one station that a command is about.
    fn station(&self) -> anyhow::Result<&StationAddress> {
        match self.stations()? {
            [station] => Ok(station),
            several => Err(usage(format!("this command is about one station, {} were named", several.len()))),
        }
    }
}

/// Logs go to stderr; AEON_LOG says how much (`warn` by default).
fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("AEON_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Colours are for terminals, not for files and journals.
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}

fn main() -> ExitCode {
    // A reader that has seen enough (head, less) ends this program as it ends others, without a message.
    sigpipe::reset();
    let cli: Cli = common::parse();
    start_logging();
    let auth = match cli.auth_key_file.as_deref().map(|path| (path, aeon_station::auth_key::read(path))) {
        None => None,
        Some((_, Ok(key))) => Some(key),
        Some((path, Err(error))) => {
            eprintln!("error: cannot use the key file {}: {error}", path.display());
            return ExitCode::from(common::USAGE);
        }
    };
    let options = ClientOptions {
        auth,
        framing: match cli.bare_frames {
            true => aeon_station::codec::Framing::Bare,
            false => aeon_station::codec::Framing::Prefixed,
        },
        request_timeout: std::time::Duration::from_secs(cli.timeout),
        ..ClientOptions::default()
    };
    let context = Context { stations: cli.stations, admins: cli.admins, options, json: cli.json };
    let result = match cli.command {
        Command::Completions { shell } => {
            common::print_completions::<Cli>(shell);
            Ok(())
        }
        Command::Man { folder } => man(folder),
        Command::Basis(command) => command.run(&context),
        Command::Methodology(command) => command.run(&context),
        command => run(command, &context),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            common::report(error.as_ref());
            ExitCode::from(exit_code(&error))
        }
    }
}

fn run(command: Command, context: &Context) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(async {
        match command {
            Command::Hello => query::hello(context).await,
            Command::Health => query::health(context).await,
            Command::Doctor => doctor::doctor(context).await,
            Command::Forward(forward) => forward.run(context).await,
            Command::Generate(generate) => generate.run(context).await,
            Command::Demo(demo) => demo.run(context).await,
            Command::Evaluate(evaluate) => evaluate.run(context).await,
            Command::CaptureResiduals(capture) => capture.run(context).await,
            Command::Top(top) => top.run(context).await,
            Command::Reload => admin::reload(context).await,
            Command::Drain => admin::drain(context).await,
            Command::Bench(bench) => bench.run(context).await,
            Command::Replay(replay) => replay.run(context).await,
            Command::Capture(capture) => capture.run(context).await,
            // Handled before there is a runtime.
            Command::Completions { .. } | Command::Man { .. } | Command::Basis(_) | Command::Methodology(_) => Ok(()),
        }
    });
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    result
}

fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<UsageError>() {
        return common::USAGE;
    }
    if let Some(unhealthy) = error.downcast_ref::<doctor::Unhealthy>() {
        return if unhealthy.is_unreachable { common::UNAVAILABLE } else { 1 };
    }
    if error.is::<top::Unreachable>() || error.downcast_ref().is_some_and(AdminError::is_unreachable) {
        return common::UNAVAILABLE;
    }
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Mesh { .. }) => common::USAGE,
        Some(error) if error.is_unreachable() => common::UNAVAILABLE,
        _ => 1,
    }
}

fn man(folder: Option<PathBuf>) -> anyhow::Result<()> {
    use clap::CommandFactory;
    match folder {
        None => clap_mangen::Man::new(Cli::command()).render(&mut std::io::stdout())?,
        Some(folder) => {
            std::fs::create_dir_all(&folder)?;
            clap_mangen::generate_to(Cli::command(), &folder)?;
        }
    }
    Ok(())
}
