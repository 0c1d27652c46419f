//! A real node under a limit of address space, and well-behaved clients whose every request must be answered rightly.

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use aeon_proto::{payload::MetaWriter, route::Route};
use aeon_station::client::{Client, ClientOptions, StationAddress};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinSet;

use crate::common::{health, ids, until_blocking, wire::Wire};

const MIB: u64 = 1 << 20;
/// What a node may need beside its budgets: stacks of threads that start later, arenas of the allocator, frames that are
/// being worked on (two of 16 MiB, their numbers and answers), buffers of the system library.
const SLACK: u64 = 192 * MIB;
/// How long the bystanders are alone before each attack.
const QUIET: Duration = Duration::from_millis(1500);

/// The budgets of the nodes here, small so that a leak shows soon.
const BUDGETS: [(&str, u64); 5] = [
    ("--max-buffered-bytes", 64 * MIB),
    ("--max-queued-bytes", 48 * MIB),
    ("--max-session-bytes", 64 * MIB),
    ("--max-replay-bytes", 16 * MIB),
    ("--max-shard-bytes", 4 * MIB),
];

/// The core of the node and its bystanders, and that of the attackers; `None` if there is only one core.
pub(crate) fn cores() -> Option<(usize, usize)> {
    let allowed = sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
    let mut cores = (0..CpuSet::count()).filter(|core| allowed.is_set(*core).unwrap_or(false));
    Some((cores.next()?, cores.next()?))
}

/// Lets a thread (0: this one) run on one core only.
pub(crate) fn pin_thread(thread: i32, core: usize) {
    let mut set = CpuSet::new();
    set.set(core).unwrap();
    // A thread that has ended meanwhile needs no place.
    let _ = sched_setaffinity(nix::unistd::Pid::from_raw(thread), &set);
}

/// One request of a bystander.
#[derive(Clone, Copy)]
struct Asked {
    /// As the client saw it.
    took: Duration,
    /// From its arrival until the model took it, by the node's own clock.
    waited: Duration,
    /// What the model took for it, by the node's own clock.
    computed: Duration,
}

struct Bystanders {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Asked>>,
}

impl Bystanders {
    async fn end(self) -> Vec<Asked> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = tokio::task::spawn_blocking(|| self.thread.join()).await.unwrap();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Asks one station the same thing again and again, as a well-behaved client.
async fn ask(address: StationAddress, stop: Arc<AtomicBool>) -> Vec<Asked> {
    let client = Client::connect(&address, ClientOptions::default()).await.unwrap();
    let mut asked = Vec::new();
    let mut expected = None;
    while !stop.load(Ordering::Relaxed) {
        let started = Instant::now();
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("in", "ids").string("out", "token").boolean("timing", true);
        };
        let reply = client.request(Route::FORWARD, meta, &ids(&[5, 7, 11])).await;
        let reply = reply.unwrap_or_else(|error| panic!("bystander {address}: {error:?}"));
        let took = started.elapsed();
        let meta: Value = serde_json::from_str(&reply.meta).unwrap();
        let micros = |key: &str| Duration::from_micros(meta["timing"][key].as_u64().unwrap_or_default());
        asked.push(Asked { took, waited: micros("queue_us"), computed: micros("compute_us") });
        assert_eq!(reply.body.len(), 4);
        assert_eq!(*expected.get_or_insert_with(|| reply.body.clone()), reply.body, "{address}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    asked
}

/// A running `aeon-node`.
pub(crate) struct Guarded {
    child: Child,
    pub(crate) uds: PathBuf,
    pub(crate) udp: SocketAddr,
    pub(crate) tcp: SocketAddr,
    pub(crate) http: SocketAddr,
    limit: u64,
    before: u64,
    core: Option<usize>,
    _dir: TempDir,
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A memory figure of a process, in bytes, by the system's account.
pub(crate) fn memory(pid: u32, key: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Lets this process open as many files as it may; returns how many.
pub(crate) fn raise_descriptors() -> u64 {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
    limit.maximum.unwrap_or(u64::MAX)
}

impl Guarded {
    /// Starts a node and, once it serves, forbids it to grow by more than its budgets (`extra` may make them smaller), [`SLACK`], and 32 KiB for each of
    /// `connections`.
    pub(crate) async fn start(model: &str, connections: u64, extra: &[&str]) -> Self {
        let command = |args: &[String]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_aeon-node"));
            command.args(args).stdout(Stdio::null());
            command
        };
        Self::start_as(command, model, connections, extra).await
    }

    /// As [`Guarded::start`], a program that `command` makes of the node's arguments.
    pub(crate) async fn start_as(
        command: impl FnOnce(&[String]) -> Command,
        model: &str,
        connections: u64,
        extra: &[&str],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let uds = dir.path().join("s");
        let mut args = vec!["--uds", uds.to_str().unwrap(), "--udp", "127.0.0.1:0", "--tcp", "127.0.0.1:0"];
        args.extend(["--http", "127.0.0.1:0", "--frame-timeout", "3", "--model", model]);
        args.extend(extra);
        let mut args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        for (flag, bytes) in BUDGETS.iter().filter(|(flag, _)| !extra.contains(flag)) {
            args.extend([(*flag).to_owned(), bytes.to_string()]);
        }
        // glibc sets 64 MiB of address space aside for each thread that allocates, unless it is told not to.
        let mut child = command(&args).env("MALLOC_ARENA_MAX", "2").stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut before = Vec::new();
        let ready = loop {
            match lines.next() {
                Some(Ok(line)) if line.starts_with("ready ") => break line,
                Some(Ok(line)) => before.push(line),
                end => panic!("{end:?}: the node did not start: {before:?}"),
            }
        };
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("node: {line}")));
        let address = |key: &str| {
            let word = ready.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
            word.unwrap().parse().unwrap()
        };
        let (udp, tcp, http) = (address("udp"), address("tcp"), address("http"));
        let mut node = Self { child, uds, udp, tcp, http, limit: 0, before: 0, core: None, _dir: dir };
        // The threads that it will always need are started by use.
        node.bystanders(Duration::from_millis(200)).await;
        let budget: u64 = BUDGETS.iter().map(|(_, bytes)| bytes).sum();
        node.before = memory(node.pid(), "VmRSS");
        node.limit = budget + SLACK + connections * 32 * 1024;
        let all = memory(node.pid(), "VmSize") + node.limit;
        let pid = Pid::from_child(&node.child);
        prlimit(Some(pid), Resource::As, Rlimit { current: Some(all), maximum: Some(all) }).unwrap();
        node
    }

    /// Gives the node and its bystanders a core of their own; the attackers keep off it by themselves.
    pub(crate) fn keep_to(&mut self, core: usize) {
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap() {
            pin_thread(thread.unwrap().file_name().to_str().unwrap().parse().unwrap(), core);
        }
        self.core = Some(core);
    }

    /// The process itself, for pipes that it was given.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) async fn wire(&self) -> Wire {
        Wire::uds(&self.uds).await
    }

    pub(crate) async fn health(&self) -> Value {
        health(&mut self.wire().await).await
    }

    fn addresses(&self) -> [StationAddress; 3] {
        [
            StationAddress::Unix(self.uds.clone()),
            StationAddress::Tcp(self.tcp.to_string()),
            StationAddress::Udp(self.udp.to_string()),
        ]
    }

    /// One client on each carrier asks one thing after another for a while.
    async fn bystanders(&self, time: Duration) -> Vec<Asked> {
        let bystanders = self.start_bystanders();
        tokio::time::sleep(time).await;
        bystanders.end().await
    }

    /// The bystanders have a thread of their own, on the node's core: what the attackers do to their own threads is not the
    /// node's doing.
    fn start_bystanders(&self) -> Bystanders {
        let stop = Arc::new(AtomicBool::new(false));
        let (addresses, stopped, core) = (self.addresses(), Arc::clone(&stop), self.core);
        let thread = std::thread::spawn(move || {
            if let Some(core) = core {
                pin_thread(0, core);
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut asking = JoinSet::new();
                for address in addresses {
                    asking.spawn(ask(address, Arc::clone(&stopped)));
                }
                asking.join_all().await.concat()
            })
        });
        Bystanders { stop, thread }
    }

    /// Runs an attack with bystanders beside it, prints a line, and waits until the node holds nothing of it any more.
    /// `sessions` is how many it may still hold then.
    pub(crate) async fn under(&self, what: &str, sessions: u64, attack: impl Future<Output = String>) {
        let quiet = self.bystanders(QUIET).await;
        let bystanders = self.start_bystanders();
        let started = Instant::now();
        let note = attack.await;
        let took = started.elapsed();
        let loud = bystanders.end().await;
        let ms = |asked: &[Asked], of: fn(&Asked) -> Duration, percent: usize| {
            let mut times: Vec<Duration> = asked.iter().map(of).collect();
            times.sort();
            times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3
        };
        let took_of = |asked: &Asked| asked.took;
        let (q50, q99) = (ms(&quiet, took_of, 50), ms(&quiet, took_of, 99));
        let (l50, l99) = (ms(&loud, took_of, 50), ms(&loud, took_of, 99));
        let (waited, computed) = (ms(&loud, |asked| asked.waited, 99), ms(&loud, |asked| asked.computed, 99));
        let (peak, before) = (memory(self.pid(), "VmHWM"), self.before);
        eprintln!(
            "| {what:<22} | {:>5} | {q50:>6.1} {q99:>7.1} | {l50:>7.1} {l99:>8.1} | {:>6.1}x | {waited:>7.1} {computed:>7.1} | +{:>4} of {:>4} MiB | {:>4.1} s | {note}",
            loud.len(),
            l99 / q99,
            peak.saturating_sub(before) / MIB,
            self.limit / MIB,
            took.as_secs_f64(),
        );
        // One connection is the one that asks.
        let mut last = Value::Null;
        let started = Instant::now();
        loop {
            let health = self.health().await;
            let zero = |key: &str| health[key] == 0;
            let is_calm = zero("queued") && zero("queued_bytes") && zero("buffered_bytes");
            if is_calm && health["connections"] == 1 && health["sessions"].as_u64().unwrap() <= sessions {
                break;
            }
            assert!(
                started.elapsed() < Duration::from_secs(40),
                "{what}: the node still holds {health} (before: {last})"
            );
            last = health;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.bystanders(Duration::from_millis(50)).await;
    }

    /// The node must stop by itself when it is told to.
    pub(crate) fn stop(mut self) {
        rustix::process::kill_process(Pid::from_child(&self.child), rustix::process::Signal::TERM).unwrap();
        let mut status = None;
        until_blocking("the node stops", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success(), "{status:?}");
    }
}

/// The head of the table that [`Guarded::under`] prints.
pub(crate) fn print_head() {
    eprintln!(
        "| attack                 | asked | quiet p50 p99  | attacked p50 p99 | ratio   | in queue, at work | most memory       | time   | (times in ms; goal for the ratio of p99: 3; the node's own times are p99 under attack)"
    );
}
