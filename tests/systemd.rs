//! A node as a service manager meets it: sockets that are handed over, and what it says of itself. The manager is played
//! by the test; `tests/systemd/` does the same under a real systemd.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use aeon_proto::route::Route;
use common::{
    PATIENCE, floats, ids, until_blocking,
    wire::{Answer, prefixed, request},
};
use nix::{
    sys::{
        ptrace,
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid as NixPid,
};
use rustix::process::{Pid, Signal, kill_process};

const NODE: &str = env!("CARGO_BIN_EXE_aeon-node");

/// Passes sockets on as systemd does: from descriptor 3, with names. `names` of `None` leaves the names out.
fn activated(sockets: &[OwnedFd], names: Option<&str>, arguments: &[&str]) -> Command {
    let mut script = String::new();
    for (index, socket) in sockets.iter().enumerate() {
        script += &format!("exec {}<&{}; ", 3 + index, socket.as_raw_fd());
    }
    script += &format!("export LISTEN_PID=$$ LISTEN_FDS={}; exec \"$0\" \"$@\"", sockets.len());
    let mut command = Command::new("bash");
    command.args(["-c", &script, NODE]).args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AEON_") {
            command.env_remove(name);
        }
    }
    command.env_remove("LISTEN_FDNAMES").envs(names.map(|names| ("LISTEN_FDNAMES", names)));
    command
}

/// A copy of a socket that programs which are started from here get, at a number that is free in them.
fn pass(socket: impl Into<OwnedFd>) -> OwnedFd {
    let copy = rustix::io::fcntl_dupfd_cloexec(socket.into(), 100).unwrap();
    rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty()).unwrap();
    copy
}

struct Node {
    child: Child,
    log: PathBuf,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Node {
    fn start(mut command: Command, dir: &Path) -> Self {
        let log = dir.join(format!("log-{:016x}", rand::random::<u64>()));
        let child = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        let mut node = Self { child, log };
        until_blocking("the node is ready", || {
            assert!(node.child.try_wait().unwrap().is_none(), "it ended: {}", node.log());
            node.log().contains("ready ")
        });
        node
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(&mut self) -> Option<i32> {
        let mut status = None;
        until_blocking("the node ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }
}

fn ask(stream: &mut (impl Read + Write), sequence: u32) -> Answer {
    stream.write_all(&prefixed(&request(Route::HELLO, sequence, "", &[]))).unwrap();
    read(stream)
}

fn read(stream: &mut impl Read) -> Answer {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(prefix) as usize];
    stream.read_exact(&mut frame).unwrap();
    Answer::decode(&frame)
}

fn connect_unix(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn udp_hello(peer: &UdpSocket, sequence: u32) {
    let pad = format!(r#"{{"pad":"{}"}}"#, "0".repeat(1200));
    peer.send(&request(Route::HELLO, sequence, &pad, &[])).unwrap();
}

fn udp_read(peer: &UdpSocket) -> Answer {
    let mut buffer = [0; 65_536];
    let len = peer.recv(&mut buffer).unwrap();
    Answer::decode(&buffer[..len])
}

fn udp_peer(to: std::net::SocketAddr) -> UdpSocket {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    peer.connect(to).unwrap();
    peer
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn sockets_of_every_kind_are_taken_by_name_and_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let uds = UnixListener::bind(&path).unwrap();
    let (tcp, http) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let udp_v6 = UdpSocket::bind("[::1]:0").ok();
    let (tcp_at, http_at, udp_at) = (tcp.local_addr().unwrap(), http.local_addr().unwrap(), udp.local_addr().unwrap());
    // As the kernel hands them out, they block: the node must see to that.
    let mut sockets = vec![pass(http), pass(uds), pass(udp), pass(tcp)];
    let mut names = "http:flow:flow:flow".to_owned();
    let mut also = String::new();
    if let Some(udp) = udp_v6 {
        also = format!(" udp={}", udp.local_addr().unwrap());
        sockets.push(pass(udp));
        names += ":flow";
    }
    // A listener of the configuration with the address of one that was passed is that one; others are opened beside it.
    let more = dir.path().join("more");
    let arguments = ["--model", "identity:8", "--uds", text(&path), "--http", &http_at.to_string()];
    let mut node = Node::start(activated(&sockets, Some(&names), &arguments), dir.path());
    let ready = format!(
        "ready uds={} udp={udp_at}{also} tcp={tcp_at} http={http_at} model=identity:8 layers=0..1\n",
        text(&path)
    );
    assert_eq!(node.log(), ready);
    assert_eq!(ask(&mut connect_unix(&path), 1).status(), 200);
    let mut stream = TcpStream::connect(tcp_at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(ask(&mut stream, 2).status(), 200);
    let peer = udp_peer(udp_at);
    udp_hello(&peer, 3);
    assert_eq!(udp_read(&peer).status(), 200);
    let mut stream = TcpStream::connect(http_at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for fd in 3..3 + sockets.len() {
        let info = fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", node.child.id())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
        let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
        let (cloexec, nonblock) = (0o2_000_000, 0o4000);
        assert_eq!(flags & (cloexec | nonblock), cloexec | nonblock, "descriptor {fd}: {flags:o}");
    }
    node.signal(Signal::TERM);
    assert_eq!(node.wait(), Some(0));
    assert!(path.exists(), "the socket file is its owner's");

    let uds = UnixListener::bind(dir.path().join("t")).unwrap();
    let mut node =
        Node::start(activated(&[pass(uds)], None, &["--model", "identity:8", "--uds", text(&more)]), dir.path());
    assert_eq!(ask(&mut connect_unix(&dir.path().join("t")), 1).status(), 200, "sockets without names carry frames");
    assert_eq!(ask(&mut connect_unix(&more), 1).status(), 200);
    node.signal(Signal::TERM);
    assert_eq!(node.wait(), Some(0));
    assert!(!more.exists() && dir.path().join("t").exists());
}

#[test]
fn sockets_that_cannot_be_used_end_with_64() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let unix = |name: &str| pass(UnixListener::bind(path(name)).unwrap());
    let udp = || pass(UdpSocket::bind("127.0.0.1:0").unwrap());
    let tcp = || pass(TcpListener::bind("127.0.0.1:0").unwrap());
    let file = |name: &str| pass(fs::File::create(path(name)).unwrap());
    let (connection, _other) = UnixStream::pair().unwrap();
    let datagrams = UnixDatagram::bind(path("d")).unwrap();
    type Case<'a> = (Vec<OwnedFd>, Option<&'a str>, &'a [&'a str], &'a [&'a str]);
    let cases: Vec<Case<'_>> = vec![
        (vec![unix("a")], Some("aeon-node.socket"), &[], &["socket 3", "aeon-node.socket", "FileDescriptorName=flow"]),
        (vec![unix("b"), tcp()], Some("flow:metrics"), &[], &["socket 4", "metrics"]),
        (vec![file("c")], Some("flow"), &[], &["descriptor 3", "ListenStream="]),
        (vec![pass(datagrams)], Some("flow"), &[], &["descriptor 3"]),
        (vec![pass(connection)], Some("flow"), &[], &["does not listen", "Accept=no"]),
        (vec![unix("e")], Some("http"), &[], &["http", "no TCP socket"]),
        (vec![udp()], Some("http"), &[], &["http", "no TCP socket"]),
        (vec![unix("f"), tcp()], Some("flow"), &[], &["2 sockets", "1 names"]),
        (vec![unix("g"), udp()], Some("flow:flow"), &["--stock-clients"], &["--stock-clients"]),
        (vec![], None, &["--systemd-sockets"], &["no sockets were passed"]),
        // Sockets that nobody asked for do not count as listeners when they are turned down.
        (vec![unix("h")], Some("flow"), &["--systemd-sockets", "false"], &["nothing to listen on"]),
    ];
    for (sockets, names, arguments, words) in cases {
        let arguments = [&["--model", "identity:8"], arguments].concat();
        let output = activated(&sockets, names, &arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{names:?} {error}");
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} expected in {error}");
    }
    let check = |arguments: &[&str]| Command::new(NODE).arg("check").args(arguments).output().unwrap().status.code();
    assert_eq!((check(&["--systemd-sockets"]), check(&[])), (Some(0), Some(64)));
}

#[test]
fn between_two_processes_connections_and_datagrams_wait() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let uds = UnixListener::bind(&path).unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = udp.local_addr().unwrap();
    let sockets = [pass(uds), pass(udp)];
    let start = || Node::start(activated(&sockets, Some("flow:flow"), &["--model", "identity:8"]), dir.path());
    let mut node = start();
    let mut old = connect_unix(&path);
    assert_eq!(ask(&mut old, 1).status(), 200);
    let peer = udp_peer(address);
    udp_hello(&peer, 1);
    assert_eq!(udp_read(&peer).status(), 200);
    for (signal, code) in [(Signal::TERM, Some(0)), (Signal::KILL, None)] {
        node.signal(signal);
        assert_eq!(node.wait(), code);
        assert_eq!(old.read(&mut [0; 1]).unwrap_or(0), 0, "the established connection has ended");
        // Nobody runs: what comes now is for the next process.
        let mut waiting: Vec<_> = (0..20).map(|_| connect_unix(&path)).collect();
        for stream in &mut waiting {
            stream.write_all(&prefixed(&request(Route::HELLO, 7, "", &[]))).unwrap();
        }
        (0..10).for_each(|sequence| udp_hello(&peer, 100 + sequence));
        node = start();
        for stream in &mut waiting {
            assert_eq!(read(stream).status(), 200);
        }
        let mut sequences: Vec<u32> = (0..10).map(|_| udp_read(&peer).sequence).collect();
        sequences.sort_unstable();
        assert_eq!(sequences, (100..110).collect::<Vec<_>>());
        old = waiting.remove(0);
    }
}

#[test]
fn datagrams_that_come_while_a_node_drains_are_left_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = udp_peer(udp.local_addr().unwrap());
    let sockets = [pass(UnixListener::bind(&path).unwrap()), pass(udp)];
    // The model threads are stopped, so that work stays in flight for as long as the test wants.
    let arguments = ["--model", "demo", "--workers", "1", "--grace", "60"];
    let mut node = Node::start(activated(&sockets, Some("flow:flow"), &arguments), dir.path());
    let threads = Stopped::all(&node);
    let pad = "0".repeat(2000);
    let meta = format!(r#"{{"in":"ids","out":"token","pad":"{pad}"}}"#);
    peer.send(&request(Route::FORWARD, 1, &meta, &ids(&[1, 2, 3]))).unwrap();
    let queued = |stream: &mut UnixStream| {
        stream.write_all(&prefixed(&request(Route::HEALTH, 1, "", &[]))).unwrap();
        read(stream).ok()["queued"].as_u64().unwrap()
    };
    let mut stream = connect_unix(&path);
    until_blocking("the work is queued", || queued(&mut stream) == 1);
    node.signal(Signal::TERM);
    // Closing is what an idle connection gets when the node drains.
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    udp_hello(&peer, 2);
    threads.release();
    let answer = udp_read(&peer);
    assert_eq!((answer.sequence, answer.status()), (1, 200), "what was in flight ends");
    assert_eq!(node.wait(), Some(0));
    let _next = Node::start(activated(&sockets, Some("flow:flow"), &["--model", "identity:8"]), dir.path());
    let answer = udp_read(&peer);
    assert_eq!((answer.sequence, answer.status()), (2, 200), "what came later is answered by the next");
}

/// The service manager's end of the notifications.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    fn new(dir: &Path) -> Self {
        let path = dir.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket, path }
    }

    fn receive(&self) -> String {
        let mut buffer = [0; 4096];
        let len = self.socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..len]).into_owned()
    }

    /// Messages up to the first that holds `part`, which is the last of them.
    fn until(&self, part: &str) -> Vec<String> {
        let started = Instant::now();
        let mut messages = Vec::new();
        loop {
            assert!(started.elapsed() < PATIENCE, "{part:?} expected among {messages:?}");
            let message = self.receive();
            let is_last = message.contains(part);
            messages.push(message);
            if is_last {
                return messages;
            }
        }
    }

    fn last(&self, part: &str) -> String {
        self.until(part).pop().unwrap()
    }
}

#[test]
fn the_manager_hears_of_the_start_reloads_and_the_stop() {
    let dir = tempfile::tempdir().unwrap();
    let bases = dir.path().join("bases");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::create_dir_all(&bases).unwrap();
    fs::copy(root.join("bases/demo/demo.pcab"), bases.join("demo.pcab")).unwrap();
    let (manager, socket) = (Manager::new(dir.path()), dir.path().join("s"));
    let mut command = Command::new(NODE);
    let methodologies = root.join("bases/methodologies");
    command.args(["--uds", text(&socket), "--layers", "0..3", "--bases", text(&bases)]);
    command.args(["--methodologies", text(&methodologies)]).env("NOTIFY_SOCKET", &manager.path);
    let mut node = Node::start(command, dir.path());
    // The first message comes when peers are served, not before.
    assert_eq!(manager.receive(), "READY=1\nSTATUS=demo layers 0..3 of 6, 0 sessions, 1 bases\n");
    let mut stream = connect_unix(&socket);
    let body = prefixed(&request(Route::FORWARD, 1, r#"{"session":"a","pos":0,"in":"ids"}"#, &ids(&[1])));
    stream.write_all(&body).unwrap();
    assert_eq!(read(&mut stream).status(), 200);
    manager.last("STATUS=demo layers 0..3 of 6, 1 sessions, 1 bases\n");

    fs::write(bases.join("bad.pcab"), "no basis").unwrap();
    node.signal(Signal::HUP);
    let reloading = manager.last("RELOADING=1\n");
    let usec = reloading.lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC=")).unwrap();
    assert!(usec.parse::<u64>().unwrap() > 0);
    let ready = manager.receive();
    assert!(ready.starts_with("READY=1\n") && ready.contains("bad.pcab") && ready.contains(", 1 bases;"), "{ready}");
    fs::remove_file(bases.join("bad.pcab")).unwrap();
    node.signal(Signal::HUP);
    manager.last("RELOADING=1\n");
    assert_eq!(manager.receive(), "READY=1\nSTATUS=demo layers 0..3 of 6, 1 sessions, 1 bases\n");
    node.signal(Signal::TERM);
    let stopping = manager.last("STOPPING=1\n");
    assert!(stopping.contains("STATUS=draining: demo"), "{stopping}");
    assert_eq!(node.wait(), Some(0));
}

/// Model threads of a node that are held still, and nothing else of it.
struct Stopped(Vec<NixPid>);

impl Stopped {
    fn all(node: &Node) -> Self {
        let tasks = fs::read_dir(format!("/proc/{}/task", node.child.id())).unwrap();
        let mut stopped = Vec::new();
        for task in tasks.map(|task| task.unwrap().path()) {
            if fs::read_to_string(task.join("comm")).unwrap().starts_with("model-") {
                let thread = NixPid::from_raw(task.file_name().unwrap().to_str().unwrap().parse().unwrap());
                ptrace::attach(thread).unwrap();
                waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
                stopped.push(thread);
            }
        }
        assert!(!stopped.is_empty(), "a node with model threads");
        Self(stopped)
    }

    fn release(self) {
        drop(self);
    }

    /// A thread that is traced is not gone before its tracer has seen its end.
    fn see_the_end(&self) {
        for thread in &self.0 {
            let _ = waitpid(*thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG));
        }
    }
}

impl Drop for Stopped {
    /// A test that fails must not leave threads behind that nobody can end.
    fn drop(&mut self) {
        for thread in &self.0 {
            let _ = ptrace::detach(*thread, None);
        }
    }
}

#[test]
fn the_watchdog_is_fed_by_idle_and_working_threads_and_not_by_stuck_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (manager, socket) = (Manager::new(dir.path()), dir.path().join("s"));
    let mut command = Command::new(NODE);
    command.args(["--uds", text(&socket), "--model", "demo"]).env("NOTIFY_SOCKET", &manager.path);
    command.env("WATCHDOG_USEC", "1000000");
    let node = Node::start(command, dir.path());
    for _ in 0..5 {
        manager.last("WATCHDOG=1\n");
    }
    let threads = Stopped::all(&node);
    let messages = manager.until("does not move");
    assert!(messages.last().unwrap().starts_with("STATUS=demo layers 0..6 of 6"), "{messages:?}");
    // Everything else goes on: only the threads that compute are stuck, and no timer speaks for them.
    let mut stream = connect_unix(&socket);
    for sequence in 0..5 {
        assert_eq!(ask(&mut stream, sequence).status(), 200);
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    manager.socket.set_nonblocking(true).unwrap();
    let mut buffer = [0; 4096];
    while let Ok(len) = manager.socket.recv(&mut buffer) {
        assert!(!buffer[..len].starts_with(b"WATCHDOG"), "fed in front of a stuck thread");
    }
    manager.socket.set_nonblocking(false).unwrap();
    threads.release();
    manager.last("WATCHDOG=1\n");
    assert!(node.log().contains("a model thread does not move"), "{}", node.log());
}

#[test]
fn stuck_model_threads_hold_up_neither_the_grace_period_nor_a_second_signal() {
    for (grace, is_signalled_again) in [("600", true), ("1", false)] {
        let dir = tempfile::tempdir().unwrap();
        let (manager, socket) = (Manager::new(dir.path()), dir.path().join("s"));
        let mut command = Command::new(NODE);
        command.args(["--uds", text(&socket), "--model", "demo", "--grace", grace]);
        // Without a manager nothing but the node itself holds on to its model threads at the end.
        command.envs(is_signalled_again.then_some(("NOTIFY_SOCKET", &manager.path)));
        let mut node = Node::start(command, dir.path());
        let threads = Stopped::all(&node);
        let mut stream = connect_unix(&socket);
        stream.write_all(&prefixed(&request(Route::FORWARD, 1, "", &floats(&[0.0; 128])))).unwrap();
        assert_eq!(ask(&mut stream, 2).status(), 200, "the request before it was taken");
        node.signal(Signal::TERM);
        if is_signalled_again {
            manager.last("STOPPING=1\n");
            assert!(node.child.try_wait().unwrap().is_none(), "work in flight has its grace period");
            node.signal(Signal::TERM);
        }
        let mut status = None;
        until_blocking("the node ends", || {
            threads.see_the_end();
            status = node.child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(0));
    }
}

#[test]
fn a_signal_ends_a_node_that_still_loads() {
    let dir = tempfile::tempdir().unwrap();
    // A model folder whose configuration never comes: the node waits for it.
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        model.join("config.json"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let socket = dir.path().join("s");
    let mut command = Command::new(NODE);
    let log = dir.path().join("log");
    command.args(["--uds", text(&socket), "--model", text(&model)]).stderr(fs::File::create(&log).unwrap());
    let mut node = Node { child: command.spawn().unwrap(), log };
    until_blocking("the socket is there", || socket.exists());
    node.signal(Signal::TERM);
    assert_eq!(node.wait(), Some(0), "{}", node.log());
    assert!(!socket.exists());
}
