//! Nodes with an HTTP listener, in this process and in one of their own, and a plain HTTP client.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex, mpsc},
    time::Instant,
};

use aeon_station::config::Settings;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Lab, PATIENCE};

/// A node of the identity model, 8 wide, with an HTTP listener.
pub(crate) async fn lab(edit: impl FnOnce(&mut Settings)) -> Lab {
    Lab::start("identity:8:100", |settings| {
        settings.listen.http = "127.0.0.1:0".parse().ok();
        edit(settings);
    })
    .await
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        assert!(self.head.contains("content-type: application/json"), "{self:?}");
        serde_json::from_str(&self.text).unwrap()
    }
}

/// One request; `head` is its first line without the version, and header lines behind it.
pub(crate) fn http(address: SocketAddr, head: &str) -> Answer {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let (line, headers) = head.split_once('\n').unwrap_or((head, ""));
    let headers: String = headers.lines().map(|header| format!("{header}\r\n")).collect();
    let request = format!("{line} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n");
    socket.write_all(request.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_lowercase(), text: body.to_owned() }
}

/// As [`http`], off the runtime's threads.
pub(crate) async fn ask(address: SocketAddr, head: &str) -> Answer {
    let head = head.to_owned();
    tokio::task::spawn_blocking(move || http(address, &head)).await.unwrap()
}

/// A program without this test's settings.
pub(crate) fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AEON_") {
            command.env_remove(name);
        }
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn ctl(arguments: &[&str]) -> Output {
    command(env!("CARGO_BIN_EXE_aeonctl"), arguments).output().unwrap()
}

pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("a program did not end within {PATIENCE:?}");
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A node in a process of its own; everything that it writes to standard error is kept.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) http: SocketAddr,
    pub(crate) uds: std::path::PathBuf,
    lines: Arc<Mutex<Vec<String>>>,
    _dir: tempfile::TempDir,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    pub(crate) fn start(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let uds = dir.path().join("s");
        let fixed = ["--uds", uds.to_str().unwrap(), "--http", "127.0.0.1:0"];
        let mut command = command(env!("CARGO_BIN_EXE_aeon-node"), &[&fixed[..], arguments].concat());
        command.envs(environment.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (kept, output) = (Arc::clone(&lines), child.stderr.take().unwrap());
        let (sender, ready) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if line.starts_with("ready ") {
                    let _ = sender.send(line.clone());
                }
                kept.lock().unwrap().push(line);
            }
        });
        let ready = ready.recv_timeout(PATIENCE).unwrap();
        let http = ready.split(' ').find_map(|field| field.strip_prefix("http=")).unwrap().parse().unwrap();
        Self { child, http, uds, lines, _dir: dir }
    }

    pub(crate) fn admin(&self) -> String {
        format!("http://{}", self.http)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    /// Waits until a line holds all of these parts, and returns it.
    pub(crate) fn line_with(&self, parts: &[&str]) -> String {
        let started = Instant::now();
        loop {
            let found = self.lines().into_iter().find(|line| parts.iter().all(|part| line.contains(part)));
            if let Some(line) = found {
                return line;
            }
            assert!(started.elapsed() < PATIENCE, "no line with {parts:?} in {:#?}", self.lines());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
