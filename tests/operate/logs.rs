//! What a node writes while it works.

use std::{
    io::Read,
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Command, Stdio},
};

use aeon_proto::route::Route;
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    common::{PATIENCE, floats, until_blocking, wire::Wire},
    support::{Process, command, http, wait},
};

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Starts a node of the identity model and lets a client talk to it.
fn node(arguments: &[&str], environment: &[(&str, &str)], talk: impl AsyncFnOnce(&mut Wire)) -> Process {
    let node = Process::start(&[&["--model", "identity:8"], arguments].concat(), environment);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut wire = Wire::uds(&node.uds).await;
        talk(&mut wire).await;
    });
    node
}

fn json_lines(node: &Process) -> Vec<Value> {
    node.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn each_request_has_a_span_with_its_trace() {
    let arguments = ["--log-format", "json", "--log-level", "warn,aeon_station::request=debug"];
    let node = node(&arguments, &[], async |wire| {
        let body = floats(&[1.0; 8]);
        let meta = format!(r#"{{"session":"the-secret","trace":"{TRACE}"}}"#);
        wire.ask(Route::FORWARD, &meta, &body).await.ok();
        // What is no traceparent is ignored.
        wire.ask(Route::LM_HEAD, r#"{"trace":"00-nonsense"}"#, &body).await.ok();
        assert_eq!(wire.ask(Route::FORWARD, "", &[0; 3]).await.status(), 400);
    });
    node.line_with(&["FORWARD answered with 400"]);
    let lines = json_lines(&node);
    let span = |route: &str, status: u64| {
        let found =
            lines.iter().map(|line| &line["span"]).find(|span| span["route"] == route && span["status"] == status);
        found.unwrap_or_else(|| panic!("{route} {status} in {lines:#?}")).clone()
    };
    let forward = span("FORWARD", 200);
    assert_eq!(forward["trace"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!((&forward["parent"], &forward["carrier"]), (&"00f067aa0ba902b7".into(), &"unix".into()));
    assert!(forward["micros"].is_u64() && forward["sequence"].is_u64(), "{forward}");
    let peer = format!("pid {} uid {}", std::process::id(), rustix::process::getuid().as_raw());
    assert_eq!(forward["peer"], peer);
    // The short name is the one of the list, and the name stands nowhere.
    let list: Value = serde_json::from_str(&http(node.http, "GET /sessions").text).unwrap();
    assert_eq!(forward["session"], list["sessions"][0]["session"]);
    assert!(!node.lines().concat().contains("the-secret"));
    let head = span("LM_HEAD", 200);
    assert!(head.get("trace").is_none() && head.get("session").is_none(), "{head}");
    assert!(span("FORWARD", 400)["micros"].is_u64());
}

#[test]
fn each_kind_of_fault_has_its_share_of_lines() {
    let level = "aeon_station=debug,aeon_station::request=off";
    let mut node = node(&["--log-format", "json"], &[("AEON_LOG", level)], async |wire| {
        for _ in 0..50 {
            assert_eq!(wire.ask(Route::FORWARD, "", &[0; 3]).await.status(), 400);
        }
        let meta = format!(r#"{{"session":"s","pos":4,"trace":"{TRACE}"}}"#);
        assert_eq!(wire.ask(Route::FORWARD, &meta, &floats(&[1.0; 8])).await.status(), 409);
    });
    node.line_with(&["position"]);
    let of =
        |lines: &[Value], fault: &str| lines.iter().filter(|line| line["fault"] == fault).cloned().collect::<Vec<_>>();
    let lines = json_lines(&node);
    assert_eq!(of(&lines, "bad_request").len(), 10, "{lines:#?}");
    let position = of(&lines, "position");
    assert_eq!(position.len(), 1, "one kind leaves the share of another alone");
    // Without spans the line itself says whose request it was.
    assert_eq!((&position[0]["route"], &position[0]["status"]), (&"FORWARD".into(), &409.into()));
    assert_eq!(position[0]["trace"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert!(position[0]["session"].is_string() && position[0]["peer"].is_string(), "{}", position[0]);
    // What was not logged is counted, in metrics and at the latest when the node ends in the log.
    let metrics = http(node.http, "GET /metrics").text;
    assert!(metrics.contains("aeon_faults_total{fault=\"bad_request\"} 50\n"), "{metrics}");
    node.signal(Signal::TERM);
    assert_eq!(wait(&mut node.child).code(), Some(0));
    let told = node.line_with(&["were not logged"]);
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["fault"], &told["suppressed"]), (&"bad_request".into(), &40.into()));
}

#[test]
fn by_default_faults_of_peers_are_not_logged() {
    let mut node = node(&[], &[], async |wire| {
        assert_eq!(wire.ask(Route::FORWARD, "", &[0; 3]).await.status(), 400);
    });
    node.signal(Signal::TERM);
    assert_eq!(wait(&mut node.child).code(), Some(0));
    assert_eq!(node.lines().len(), 1, "the ready line alone: {:#?}", node.lines());
}

#[test]
fn lines_are_text_unless_the_environment_says_otherwise() {
    let level = ("AEON_LOG", "aeon_station::request=debug");
    let ask = async |wire: &mut Wire| drop(wire.ask(Route::HELLO, "", &[]).await);
    let text = node(&[], &[level], ask);
    let line = text.line_with(&["HELLO answered with 200", "DEBUG", "route=HELLO"]);
    assert!(!line.contains('\u{1b}'), "no colours in a pipe: {line:?}");
    let json = node(&[], &[level, ("AEON_LOG_FORMAT", "json")], ask);
    assert!(json.line_with(&["HELLO answered with 200"]).starts_with('{'));
    // A JOURNAL_STREAM that standard error is not part of changes nothing.
    let redirected = node(&[], &[level, ("JOURNAL_STREAM", "1:1")], ask);
    redirected.line_with(&["HELLO answered with 200", "DEBUG"]);
}

#[test]
fn without_a_journal_lines_go_to_standard_error() {
    if Path::new("/run/systemd/journal/socket").exists() {
        println!("skipped: this machine has a journal");
        return;
    }
    let node = node(&["--log-format", "journald"], &[("AEON_LOG", "info")], async |_: &mut Wire| ());
    node.line_with(&["WARN", "no journal", "standard error"]);
}

/// With standard error being the journal's stream, lines go to the journal with their fields. The journal here is a socket
/// of this test, put in its place in a mount namespace of the node's own.
#[test]
fn under_a_journal_lines_go_there_with_their_fields() {
    let can = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/run"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        println!("skipped: no mount namespace may be made here");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let journal = UnixDatagram::bind(dir.path().join("journal")).unwrap();
    journal.set_read_timeout(Some(PATIENCE)).unwrap();
    let script = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && ln -s \"$1/journal\" /run/systemd/journal/socket \
                  && export JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2) && exec \"$2\" --uds \"$1/s\" --model identity:8";
    let node = env!("CARGO_BIN_EXE_aeon-node");
    let mut child = command("unshare", &["-m", "sh", "-c", script, "sh", dir.path().to_str().unwrap(), node])
        .env("AEON_LOG", "warn,aeon_station::request=debug")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = child.stderr.take().unwrap();
    until_blocking("the node listens", || dir.path().join("s").exists());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { Wire::uds(&dir.path().join("s")).await.ask(Route::HELLO, "", &[]).await.ok() });
    let mut buffer = [0; 65_536];
    let entry = loop {
        // The first datagram is an empty one, to see whether there is a journal.
        let len = journal.recv(&mut buffer).unwrap();
        let text = String::from_utf8_lossy(&buffer[..len]).into_owned();
        if text.contains("HELLO answered with 200") {
            break text;
        }
    };
    for field in ["AEON_ROUTE\n", "AEON_STATUS\n", "AEON_MICROS\n", "AEON_PEER\n", "SYSLOG_IDENTIFIER\n"] {
        assert!(entry.contains(field), "{field:?} in {entry:?}");
    }
    assert!(entry.contains("aeon-node"), "{entry:?}");
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(wait(&mut child).code(), Some(0));
    let mut text = String::new();
    errors.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("ready ") && text.lines().count() == 1, "nothing stands there twice: {text}");
}
