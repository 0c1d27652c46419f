//! A node whose allocator counts: this program started again, since an installed node has no such allocator.

use std::{
    io::{BufRead, BufReader, Lines, Write},
    process::{ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use aeon_station::{
    config::{Config, Settings},
    daemon, telemetry,
};
use clap::{Args, FromArgMatches};
use peak_alloc::PeakAlloc;

use crate::guarded::Guarded;

/// Counts the bytes that are allocated and not yet freed.
#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The node's arguments, one a line.
const ARGUMENTS: &str = "AEON_COUNTED_NODE";

/// The node itself, with as many threads as an installed one. For each line on its standard input it writes `live BYTES`.
#[test]
#[ignore = "no test: what the soak starts"]
fn node() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else { return };
    let command = Settings::augment_args(clap::Command::new("counted").no_binary_name(true));
    let settings = Settings::from_arg_matches(&command.get_matches_from(arguments.lines())).unwrap();
    let config = Config::try_from(settings).unwrap();
    telemetry::log::start(&config.log, "counted");
    std::thread::spawn(|| {
        for _ in std::io::stdin().lines().map_while(Result::ok) {
            println!("\nlive {}", MEMORY.current_usage());
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(daemon::run(&config)).unwrap();
}

/// Where such a node is asked.
pub(crate) struct Gauge {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Gauge {
    /// Starts a node as [`Guarded::start`] does, with the gauge of its memory.
    pub(crate) async fn start(model: &str, connections: u64, extra: &[&str]) -> (Guarded, Self) {
        let command = |arguments: &[String]| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--ignored", "--exact", "--nocapture", "counted::node"]);
            command.env(ARGUMENTS, arguments.join("\n")).stdin(Stdio::piped()).stdout(Stdio::piped());
            command
        };
        let mut node = Guarded::start_as(command, model, connections, extra).await;
        let input = node.child().stdin.take().unwrap();
        let output = BufReader::new(node.child().stdout.take().unwrap()).lines();
        (node, Self { input, output })
    }

    fn ask(&mut self) -> u64 {
        self.input.write_all(b"?\n").unwrap();
        let mut lines = self.output.by_ref().map(Result::unwrap);
        lines.find_map(|line| line.strip_prefix("live ")?.parse().ok()).unwrap()
    }

    /// The bytes that the node holds at rest: the least of some readings, since what asks and what ends is in them too.
    pub(crate) async fn live_bytes(&mut self) -> u64 {
        let mut least = u64::MAX;
        for _ in 0..8 {
            least = least.min(self.ask());
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        least
    }
}
