//! Many stations started at once on one socket path, some of them killed on the way: one serves, the others say that it
//! runs already and which process it is, and whatever a killed one left behind is taken over.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    collections::HashSet,
    io::{BufRead, BufReader},
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    time::Duration,
};

use common::PATIENCE;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedMutRandom};

const STATIONS: usize = 30;
const ROUNDS: usize = 200;

/// Ends what was started, whatever happens.
struct Station(Child);

impl Drop for Station {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Station {
    /// Starts a station; its first line on stderr, or the end of it, goes to `lines`.
    fn start(socket: &Path, lines: &mpsc::Sender<(u32, Option<String>)>) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_fat-station-flow"))
            .arg("--socket")
            .arg(socket)
            .args(["--model", "identity:2"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (pid, stderr, lines) = (child.id(), child.stderr.take().unwrap(), lines.clone());
        std::thread::spawn(move || {
            let line = BufReader::new(stderr).lines().next().and_then(Result::ok);
            let _ = lines.send((pid, line));
        });
        Self(child)
    }

    fn wait(&mut self) -> ExitStatus {
        common::until_blocking("a station ends", || self.0.try_wait().unwrap().is_some());
        self.0.wait().unwrap()
    }
}

/// Which process listens at the path.
fn listener(socket: &Path) -> Option<u32> {
    let stream = UnixStream::connect(socket).ok()?;
    let credentials = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    u32::try_from(credentials.pid.as_raw_pid()).ok()
}

/// What the station with this pid said first.
fn first_line(lines: &mpsc::Receiver<(u32, Option<String>)>) -> (u32, Option<String>) {
    lines.recv_timeout(PATIENCE).expect("every station says something or ends")
}

#[test]
fn of_many_that_start_at_once_one_serves() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut rng = StdRng::seed_from_u64(7);
    let (mut refused, mut killed_while_serving) = (0, 0);
    for round in 0..ROUNDS {
        let (sender, lines) = mpsc::channel();
        let mut stations: Vec<Station> = (0..STATIONS).map(|_| Station::start(&socket, &sender)).collect();
        // Some are killed wherever they are: before the lock, under it, or while they serve.
        let victims: HashSet<u32> = (0..rng.random_range(0..8))
            .map(|_| {
                std::thread::sleep(Duration::from_micros(rng.random_range(0..12_000)));
                let victim = stations.choose_mut(&mut rng).unwrap();
                victim.0.kill().unwrap();
                victim.0.id()
            })
            .collect();
        let mut said = Vec::new();
        for _ in 0..STATIONS {
            said.push(first_line(&lines));
        }
        // A killed process listens until the system has taken it down.
        for station in stations.iter_mut().filter(|station| victims.contains(&station.0.id())) {
            station.wait();
        }
        let ready: HashSet<u32> = said
            .iter()
            .filter(|(_, line)| line.as_ref().is_some_and(|line| line.starts_with("ready ")))
            .map(|(pid, _)| *pid)
            .collect();
        for (pid, line) in &said {
            if ready.contains(pid) || victims.contains(pid) {
                continue;
            }
            let line = line.as_ref().unwrap_or_else(|| panic!("round {round}: {pid} ended without a word"));
            let owner = line.split_once("(pid ").and_then(|(_, rest)| rest.split_once(')')).map(|(pid, _)| pid);
            let owner = owner.and_then(|owner| owner.parse().ok());
            // The one named serves, or was killed after it had bound the path.
            let is_known = owner.is_some_and(|owner| ready.contains(&owner) || victims.contains(&owner));
            assert!(line.contains("already listens") && is_known, "round {round}: {pid} says {line}");
            let station = stations.iter_mut().find(|station| station.0.id() == *pid).unwrap();
            assert_eq!(station.wait().code(), Some(1), "round {round}: {line}");
            refused += 1;
        }
        let alive: Vec<u32> = ready.difference(&victims).copied().collect();
        assert!(alive.len() <= 1, "round {round}: {alive:?} serve at once");
        let mut serving = alive.first().copied();
        // Every fifth time the one that serves is killed if the chance has not hit it.
        if let Some(pid) = serving.take_if(|_| round % 5 == 0) {
            let station = stations.iter_mut().find(|station| station.0.id() == pid).unwrap();
            station.0.kill().unwrap();
            station.wait();
        }
        let serving = match serving {
            Some(pid) => pid,
            None => {
                // The one that had the path was killed: the next takes over what it left.
                assert!(round % 5 == 0 || !victims.is_empty(), "round {round}: nobody serves: {said:?}");
                killed_while_serving += 1;
                stations.push(Station::start(&socket, &sender));
                let (pid, line) = first_line(&lines);
                assert!(line.as_ref().is_some_and(|line| line.starts_with("ready ")), "round {round}: {line:?}");
                pid
            }
        };
        assert_eq!(listener(&socket), Some(serving), "round {round}");
        // Now and then it goes in order and takes its file along; else it leaves it for the next round.
        if round % 2 == 0 {
            let pid = rustix::process::Pid::from_raw(serving as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            let station = stations.iter_mut().find(|station| station.0.id() == serving).unwrap();
            assert_eq!(station.wait().code(), Some(0));
            assert!(!socket.exists(), "round {round}");
        }
    }
    println!("{ROUNDS} rounds: {refused} refused, {killed_while_serving} times the serving one was killed");
}
