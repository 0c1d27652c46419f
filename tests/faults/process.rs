//! Station processes that can be killed, stopped and started again where they were.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use aeon_station::client::StationAddress;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::netns::Namespace;

pub(crate) const NODE: &str = env!("CARGO_BIN_EXE_aeon-node");

/// A station in a process of its own; it ends with this value.
#[derive(Debug)]
pub(crate) struct Station {
    arguments: Vec<String>,
    namespace: Option<String>,
    child: Child,
    /// Where clients find it.
    pub(crate) address: StationAddress,
}

impl Station {
    /// `layers` of the demo model, or another `model`, at `address`; a port 0 is replaced by one that is free.
    pub(crate) fn start(
        model: &str,
        layers: Option<&str>,
        address: &StationAddress,
        namespace: Option<&Namespace>,
    ) -> Self {
        let mut arguments = vec!["--model".to_owned(), model.to_owned()];
        if let Some(layers) = layers {
            arguments.extend(["--layers".to_owned(), layers.to_owned()]);
        }
        let mut address = address.clone();
        let (flag, place) = match &address {
            StationAddress::Unix(path) => ("--uds", path.display().to_string()),
            StationAddress::Tcp(place) => ("--tcp", place.clone()),
            StationAddress::Udp(place) => ("--udp", place.clone()),
        };
        arguments.extend([flag.to_owned(), place]);
        if namespace.is_some() {
            arguments.extend(["--allow", "10.99.0.0/16", "--allow", "fd99::/16"].map(str::to_owned));
        }
        let namespace = namespace.map(|namespace| namespace.name.clone());
        let (child, ready) = spawn(&arguments, namespace.as_deref());
        // The port that it got is kept for the next start.
        for (key, flag) in [("tcp=", "--tcp"), ("udp=", "--udp")] {
            let Some(place) = ready.split_whitespace().find_map(|word| word.strip_prefix(key)) else { continue };
            let at = arguments.iter().position(|argument| argument == flag).unwrap();
            if arguments[at + 1].ends_with(":0") {
                arguments[at + 1] = place.to_owned();
                address = format!("{}:{place}", &key[..3]).parse().unwrap();
            }
        }
        Self { arguments, namespace, child, address }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts the program again at the same address.
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.arguments, self.namespace.as_deref()).0;
    }
}

impl Drop for Station {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(arguments: &[String], namespace: Option<&str>) -> (Child, String) {
    let mut command = match namespace {
        None => Command::new(NODE),
        Some(name) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", name, NODE]);
            command
        }
    };
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AEON_") {
            command.env_remove(name);
        }
    }
    let mut child =
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    // What it says later must not fill the pipe.
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    assert!(line.starts_with("ready "), "{arguments:?}: {line}");
    (child, line)
}

/// A folder for sockets, and addresses of one carrier in it.
pub(crate) fn place(carrier: &str, dir: &tempfile::TempDir, name: &str) -> StationAddress {
    match carrier {
        "uds" => StationAddress::Unix(PathBuf::from(dir.path()).join(name)),
        "tcp" => StationAddress::Tcp("127.0.0.1:0".to_owned()),
        "udp6" => StationAddress::Udp("[::1]:0".to_owned()),
        _ => StationAddress::Udp("127.0.0.1:0".to_owned()),
    }
}
