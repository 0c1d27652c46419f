//! Network namespaces, for tests that need more than loopback. They need root and iproute2.

use std::{
    fs::File,
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
};

/// Runs `ip` with arguments that have no blanks in them.
pub fn ip(arguments: &str) -> Output {
    Command::new("ip").args(arguments.split_whitespace()).output().unwrap()
}

/// As [`ip`]; it must succeed.
pub fn ip_ok(arguments: &str) {
    try_ip(arguments).unwrap();
}

/// As [`ip`], with what it said if it fails.
pub fn try_ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split_whitespace()).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// A namespace with its loopback device up; it goes with this value.
#[derive(Debug)]
pub struct Namespace {
    pub name: String,
}

impl Namespace {
    /// Makes one; an error says why that is not possible here.
    pub fn new(part: &str) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let namespace = Self { name: format!("aeon-{part}-{}-{count}", std::process::id()) };
        try_ip(&format!("netns add {}", namespace.name))?;
        try_ip(&format!("-n {} link set lo up", namespace.name))?;
        Ok(namespace)
    }

    /// A command that runs inside.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    /// Moves this thread, and those that it starts from now on, inside.
    pub fn enter(&self) {
        let file = File::open(format!("/run/netns/{}", self.name)).unwrap();
        nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}
