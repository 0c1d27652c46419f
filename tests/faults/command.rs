//! `aeonctl generate` when a station dies.

use std::{
    io::{Read, Write},
    process::{Child, Command, Output, Stdio},
};

use tempfile::TempDir;

use crate::process::{Station, place};

const CTL: &str = env!("CARGO_BIN_EXE_aeonctl");
const PROMPT: &str = "First Citizen:\nBefore we proceed any further, hear me speak.\n";
const TOKENS: &str = "600";

struct Mesh {
    stations: [Station; 2],
    dir: TempDir,
}

impl Mesh {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start = |layers: &str| Station::start("demo", Some(layers), &place("uds", &dir, layers), None);
        Self { stations: ["0..3", "3..6"].map(start), dir }
    }

    /// `aeonctl generate` on this mesh.
    fn generate(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(CTL);
        for station in &self.stations {
            command.args(["--station", &station.address.to_string()]);
        }
        command.arg("generate").args(arguments).args(["--health-interval", "3"]);
        command.env_remove("AEON_LOG").env("TMPDIR", self.dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Kills the second station once the text has begun; returns what the program gave in all.
    fn die_under(&mut self, mut child: Child) -> Output {
        let mut first = vec![0; 8];
        let stdout = child.stdout.as_mut().unwrap();
        stdout.read_exact(&mut first).unwrap();
        self.stations[1].kill();
        let mut output = child.wait_with_output().unwrap();
        output.stdout.splice(0..0, first);
        std::io::stderr().write_all(&output.stderr).unwrap();
        output
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_standby_takes_over_in_the_middle_of_a_text() {
    let mut mesh = Mesh::start();
    let arguments = [PROMPT, "--max-tokens", TOKENS, "--temperature", "0.8"];
    let expected = mesh.generate(&arguments).output().unwrap();
    assert!(expected.status.success());
    let standby = Station::start("demo", Some("3..6"), &place("uds", &mesh.dir, "standby"), None);
    let address = standby.address.to_string();
    let child = mesh.generate(&[&arguments[..], &["--standby", &address]].concat()).spawn().unwrap();
    let output = mesh.die_under(child);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), text(&expected.stdout));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("station 2 of 2") && stderr.contains(&format!("{address} took over from")), "{stderr}");
    // So it does for one that is not there from the start, and the report for programs says so.
    let arguments = [&arguments[..], &["--standby", &address, "--json"]].concat();
    let output = mesh.generate(&arguments).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["text"], text(&expected.stdout).strip_suffix('\n').unwrap());
    assert_eq!((&report["failovers"][0]["station"], &report["failovers"][0]["to"]), (&2.into(), &address.into()));
}

#[test]
fn without_a_standby_the_text_goes_on_when_the_station_is_back() {
    let mut mesh = Mesh::start();
    let arguments = [PROMPT, "--max-tokens", TOKENS, "--temperature", "0.8"];
    let expected = mesh.generate(&arguments).output().unwrap();
    let child = mesh.generate(&arguments).spawn().unwrap();
    let output = mesh.die_under(child);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    let stderr = text(&output.stderr);
    let victim = mesh.stations[1].address.to_string();
    assert!(stderr.contains(&format!("station 2 of 2, {victim} with layers 3..6, failed")), "{stderr}");
    let file = stderr.split_whitespace().skip_while(|word| *word != "--resume").nth(1).unwrap().to_owned();
    // While the station is away the file stays as it is.
    let again = mesh.generate(&["--resume", &file]).output().unwrap();
    assert_eq!(again.status.code(), Some(69), "{again:?}");
    mesh.stations[1].restart();
    let refused = mesh.generate(&["--resume", &file, "--wire", "pcar"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    let rest = mesh.generate(&["--resume", &file]).output().unwrap();
    assert!(rest.status.success(), "{rest:?}");
    // Each run ends its text with a line end of its own.
    let before = text(&output.stdout).strip_suffix('\n').unwrap();
    assert_eq!(format!("{before}{}", text(&rest.stdout)), text(&expected.stdout));
    assert!(!std::path::Path::new(&file).exists(), "the file is of no more use");
    let refused = mesh.generate(&["--resume", &file, "--max-tokens", "7"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
}

#[test]
fn files_that_are_no_unfinished_text_are_refused() {
    let mesh = Mesh::start();
    let file = mesh.dir.path().join("no.json");
    for content in ["", "{}", "[1]", "\u{0}"] {
        std::fs::write(&file, content).unwrap();
        let refused = mesh.generate(&["--resume", file.to_str().unwrap()]).output().unwrap();
        assert_eq!(refused.status.code(), Some(64), "{content:?}: {refused:?}");
    }
}
