//! The programs as a user or a service manager meets them: ready lines, exit codes, sockets, signals, texts.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::Path,
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::mpsc,
};

use aeon_proto::route::Route;
use common::{
    PATIENCE, floats, until_blocking,
    wire::{Answer, payload, prefixed, raw_frame, request},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const NODE: &str = env!("CARGO_BIN_EXE_aeon-node");
const CTL: &str = env!("CARGO_BIN_EXE_aeonctl");
const FLOW: &str = env!("CARGO_BIN_EXE_fat-station-flow");
const FLOW_UDP: &str = env!("CARGO_BIN_EXE_fat-station-flow-udp");

fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AEON_") {
            command.env_remove(name);
        }
    }
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs a program to its end, which must come.
fn run(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let stdout = std::thread::spawn(move || read_all(&mut out));
    let stderr = std::thread::spawn(move || read_all(&mut err));
    let status = wait(&mut child);
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

fn read_all(source: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    source.read_to_end(&mut bytes).unwrap();
    bytes
}

fn wait(child: &mut Child) -> ExitStatus {
    let started = std::time::Instant::now();
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

fn ctl(arguments: &[&str]) -> Output {
    run(command(CTL, arguments))
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn assert_code(output: &Output, code: i32, word: &str) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(word), "{word:?} expected in {text}");
    assert!(!text.contains("panicked"), "{text}");
}

/// A station in a process of its own.
struct Station {
    child: Child,
    ready: String,
}

impl Drop for Station {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Station {
    fn start(program: &str, arguments: &[&str]) -> Self {
        Self::spawn(command(program, arguments))
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, first) = mpsc::channel();
        // The pipe is read to its end, so that no log line can block the station.
        std::thread::spawn(move || {
            let _ = sender.send(lines.next());
            lines.for_each(drop);
        });
        let ready = first.recv_timeout(PATIENCE).unwrap().unwrap().unwrap();
        Self { child, ready }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn stop(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        wait(&mut self.child)
    }

    /// A value of the ready line.
    fn value(&self, key: &str) -> &str {
        let field = self.ready.split(' ').find_map(|field| field.strip_prefix(key)?.strip_prefix('='));
        field.unwrap_or_else(|| panic!("{key} in {}", self.ready))
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn the_ready_line_says_where_and_what() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let any = "127.0.0.1:0";
    let node = Station::start(NODE, &["--uds", text(&socket), "--udp", any, "--tcp", any, "--model", "identity:8"]);
    let (udp, tcp) = (node.value("udp").to_owned(), node.value("tcp").to_owned());
    assert_eq!(node.ready, format!("ready uds={} udp={udp} tcp={tcp} model=identity:8 layers=0..1", text(&socket)));
    for address in [format!("uds:{}", text(&socket)), format!("udp:{udp}"), format!("tcp:{tcp}")] {
        let output = ctl(&["--station", &address, "hello"]);
        assert_code(&output, 0, "");
        assert!(stdout(&output).contains("identity:8"), "{}", stdout(&output));
    }
    let flow = Station::start(FLOW, &["--socket", text(&dir.path().join("f")), "--layers", "2..4"]);
    assert!(flow.ready.ends_with(" model=demo layers=2..4"), "{}", flow.ready);
    let flow = Station::start(FLOW_UDP, &["--bind", any, "--model", "identity:4:10"]);
    assert!(flow.ready.starts_with("ready udp=127.0.0.1:") && flow.ready.ends_with("layers=0..1"), "{}", flow.ready);
    assert_eq!(node.stop().code(), Some(0));
}

#[test]
fn mistakes_of_the_command_line_end_with_64() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let socket = text(&socket);
    let long = format!("/tmp/{}", "x".repeat(110));
    let cases: &[(&str, &[&str], &str)] = &[
        (NODE, &[], "nothing to listen on"),
        (NODE, &["--nonsense"], "--nonsense"),
        (NODE, &["--uds", socket, "--model", "identity:x"], "identity"),
        (NODE, &["--uds", socket, "--model", "identity:8", "--layers", "0..5"], "layers 0..1"),
        (NODE, &["--uds", socket, "--layers", "4..9"], "layers"),
        (NODE, &["--uds", socket, "--layers", "5..2"], "5..2"),
        (NODE, &["--uds", socket, "--udp", "127.0.0.1:0", "--stock-clients"], "--stock-clients"),
        (NODE, &["--uds", &long], "107"),
        (NODE, &["--uds", socket, "--allow", "10.0.0.0/99"], "10.0.0.0/99"),
        (NODE, &["--udp", "localhost"], "--udp"),
        (NODE, &["--uds", socket, "--config", "/nowhere.toml"], "/nowhere.toml"),
        (NODE, &["--uds", socket, "--model", "upstream:nonsense,8,10", "--layers", "0..1"], "nonsense"),
        (FLOW, &[], "--socket"),
        (FLOW, &["--socket", socket, "--layers", "x"], "x"),
        (FLOW_UDP, &[], "--bind"),
        (FLOW_UDP, &["--bind", "127.0.0.1:0", "--socket", socket], "--socket"),
        (CTL, &[], "Usage"),
        (CTL, &["hello"], "no station"),
        (CTL, &["--station", "nonsense", "hello"], "nonsense"),
        (CTL, &["--station", "udp:127.0.0.1", "hello"], "udp:127.0.0.1"),
        (CTL, &["--station", "uds:/a", "--station", "uds:/b", "forward", "--ids", "1"], "one station"),
        (CTL, &["--station", "uds:/a", "forward"], "nothing to send"),
        (CTL, &["--station", "uds:/a", "generate", "x", "--temperature", "101"], "temperature"),
        (CTL, &["--station", "uds:/a", "generate", "x", "--top-p", "2"], "top-p"),
    ];
    for (program, arguments, word) in cases {
        let output = run(command(program, arguments));
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {}", stderr(&output));
        assert_code(&output, 64, word);
    }
    assert!(!Path::new(socket).exists());
}

#[test]
fn what_is_not_there_ends_with_69_and_the_rest_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, file) = (dir.path().join("s"), dir.path().join("file"));
    std::fs::write(&file, "keep me").unwrap();
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for station in [format!("uds:{}", text(&socket)), format!("tcp:{gone}"), format!("udp:{gone}")] {
        for arguments in [&["hello"][..], &["health"], &["forward", "--ids", "1"], &["generate", "hello"]] {
            let output = ctl(&[&["--station", &station][..], arguments].concat());
            assert_code(&output, 69, &station);
        }
    }
    let upstream = format!("upstream:uds:{},8,10", text(&socket));
    let node = |arguments: &[&str]| run(command(NODE, arguments));
    assert_code(&node(&["--tcp", "127.0.0.1:0", "--model", &upstream]), 69, text(&socket));
    assert_code(&node(&["--uds", text(&file), "--model", "identity:8"]), 1, "no socket");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "keep me");
    let nowhere = dir.path().join("no").join("s");
    assert_code(&node(&["--uds", text(&nowhere), "--model", "identity:8"]), 1, text(&dir.path().join("no")));
    let model = dir.path().join("no-model");
    assert_code(&node(&["--uds", text(&socket), "--model", text(&model)]), 1, "no-model");
    assert!(!socket.exists(), "nothing is left bound");
    let station = Station::start(NODE, &["--tcp", "127.0.0.1:0", "--model", "identity:8"]);
    assert_code(&node(&["--tcp", station.value("tcp"), "--model", "identity:8"]), 1, station.value("tcp"));
}

#[test]
fn check_tells_good_files_from_bad_ones() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("aeon.toml");
    let check = |content: &str, more: &[&str]| {
        std::fs::write(&file, content).unwrap();
        run(command(NODE, &[&["check", "--config", text(&file)][..], more].concat()))
    };
    let good = "name = \"n\"\n[model]\nmodel = \"identity:8\"\n[listen]\nuds = \"/run/aeon/s\"\nallow = [\"10.0.0.0/8\"]\n\
                [limits]\nmax-seq = 10\n";
    let output = check(good, &[]);
    assert_code(&output, 0, "");
    assert_eq!(stdout(&output), "configuration is good\n");
    assert_code(&check("[model]\nmodel = \"demo\"\n", &["--uds", "/run/aeon/s"]), 0, "");
    for (content, word) in [
        ("", "nothing to listen on"),
        ("[listen]\nudss = \"/a\"\n", "udss"),
        ("[listen\n", "aeon.toml"),
        ("[listen]\nuds = 5\n", "uds"),
        ("[listen]\nudp = \"nonsense\"\n", "udp"),
        ("[listen]\nuds = \"/a\"\nuds-mode = \"9\"\n", "uds-mode"),
        ("[listen]\nuds = \"/a\"\n[limits]\nmax-seq = 0\n", "max-seq"),
        ("[listen]\nuds = \"/a\"\n[model]\nlayers = \"x\"\n", "x"),
    ] {
        assert_code(&check(content, &[]), 64, word);
    }
    // What they give together is a file that is good in its turn.
    let output = check(good, &["--show", "--grace", "3", "--uds", "/run/aeon/other"]);
    assert_code(&output, 0, "");
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("grace = 3\n") && shown.contains("uds = \"/run/aeon/other\"\n"), "{shown}");
    assert_eq!(check(&shown, &["--show"]).stdout, shown.as_bytes());
    // A flag is checked together with the file, wherever it stands.
    assert_code(&check(good, &["--udp", "127.0.0.1:0", "--stock-clients"]), 64, "--stock-clients");
}

fn hello(station: &str) -> Value {
    let output = ctl(&["--station", station, "--json", "hello"]);
    assert_code(&output, 0, "");
    serde_json::from_slice::<Value>(&output.stdout).unwrap()[0].take()
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let (file, socket) = (dir.path().join("aeon.toml"), dir.path().join("s"));
    std::fs::write(&file, "name = \"of-the-file\"\n[model]\nmodel = \"identity:8\"\n[limits]\nmax-seq = 11\n").unwrap();
    let station = format!("uds:{}", text(&socket));
    for (environment, flag, expected) in [
        (None, None, "of-the-file"),
        (Some("of-the-environment"), None, "of-the-environment"),
        (Some("of-the-environment"), Some("of-the-flag"), "of-the-flag"),
        (None, Some("of-the-flag"), "of-the-flag"),
    ] {
        let mut command = command(NODE, &["--uds", text(&socket)]);
        command.env("AEON_CONFIG", &file).envs(environment.map(|name| ("AEON_NAME", name)));
        command.args(flag.into_iter().flat_map(|name| ["--name", name]));
        let node = Station::spawn(command);
        let answer = hello(&station);
        assert_eq!(answer["station"]["name"], expected);
        // What only the file says holds in every case.
        assert_eq!((&answer["model"]["hidden_dim"], &answer["limits"]["max_seq"]), (&8.into(), &11.into()));
        assert_eq!(node.stop().code(), Some(0));
    }
}

#[test]
fn the_socket_file_has_its_mode_is_ours_alone_and_goes_with_us() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let arguments = ["--uds", text(&socket), "--model", "identity:8"];
    let mode = || std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
    let mut first = Station::start(NODE, &arguments);
    assert_eq!(mode(), 0o660);
    // A second copy refuses, names the first, and leaves it alone.
    let second = run(command(NODE, &arguments));
    assert_code(&second, 1, &format!("pid {}", first.child.id()));
    assert_eq!(hello(&format!("uds:{}", text(&socket)))["layers"][1], 1);
    // What a killed station leaves behind is replaced.
    first.signal(Signal::KILL);
    wait(&mut first.child);
    assert!(socket.exists());
    let again = Station::start(NODE, &[&arguments[..], &["--uds-mode", "600"]].concat());
    assert_eq!(mode(), 0o600);
    assert_eq!(again.stop().code(), Some(0));
    assert!(!socket.exists());
    let third = Station::start(FLOW, &["--socket", text(&socket), "--model", "identity:8"]);
    assert_eq!(mode(), 0o660);
    third.signal(Signal::INT);
    assert_eq!(third.stop().code(), Some(0));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

fn read_frame(stream: &mut UnixStream) -> Option<Vec<u8>> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).ok()?;
    let mut frame = vec![0; u32::from_be_bytes(prefix) as usize];
    stream.read_exact(&mut frame).ok()?;
    Some(frame)
}

/// A station of the raw routes that says when it was asked and answers when it is told to.
struct Behind {
    asked: mpsc::Receiver<()>,
    answer: mpsc::Sender<()>,
}

impl Behind {
    fn start(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let (say, asked) = mpsc::channel();
        let (answer, told) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while let Some(frame) = read_frame(&mut stream) {
                let (opcode, sequence) = (u16::from_be_bytes([frame[0], frame[1]]), &frame[2..6]);
                let sequence = u32::from_be_bytes([sequence[0], sequence[1], sequence[2], sequence[3]]);
                let reply = match opcode {
                    3 if frame[6] == 0 => {
                        say.send(()).unwrap();
                        if told.recv().is_err() {
                            return;
                        }
                        let body = &frame[frame.len() - 8..];
                        raw_frame(3, sequence, 0x30, &payload("", body))
                    }
                    3 => continue,
                    _ => raw_frame(opcode, sequence, 0x38, &payload(r#"{"status":404,"error":"unknown"}"#, &[])),
                };
                if stream.write_all(&prefixed(&reply)).is_err() {
                    return;
                }
            }
        });
        Self { asked, answer }
    }
}

/// A node whose work is in the hands of the test, and a connection on which a FORWARD is running.
fn busy_node(dir: &Path) -> (Behind, Station, UnixStream) {
    let (back, front) = (dir.join("back"), dir.join("front"));
    let behind = Behind::start(&back);
    let model = format!("upstream:uds:{},2,10", text(&back));
    let node = Station::start(NODE, &["--uds", text(&front), "--model", &model, "--layers", "0..1", "--grace", "60"]);
    let mut stream = UnixStream::connect(&front).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&prefixed(&request(Route::FORWARD, 1, "", &floats(&[1.0, 2.0])))).unwrap();
    behind.asked.recv_timeout(PATIENCE).unwrap();
    (behind, node, stream)
}

#[test]
fn a_stopping_station_finishes_what_is_running_and_refuses_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let (behind, mut node, mut stream) = busy_node(dir.path());
    node.signal(Signal::TERM);
    let front = dir.path().join("front");
    // The listener goes; what is connected hears that the station drains.
    until_blocking("the listener is gone", || UnixStream::connect(&front).is_err());
    stream.write_all(&prefixed(&request(Route::FORWARD, 2, "", &floats(&[1.0, 2.0])))).unwrap();
    let refused = Answer::decode(&read_frame(&mut stream).unwrap());
    refused.assert_vent("draining", Route::FORWARD.0, 2, 503);
    assert!(node.child.try_wait().unwrap().is_none(), "it waits for the first");
    behind.answer.send(()).unwrap();
    let answer = Answer::decode(&read_frame(&mut stream).unwrap());
    assert_eq!((answer.sequence, answer.status(), answer.body), (1, 200, floats(&[1.0, 2.0])));
    assert_eq!(stream.read(&mut [0; 10]).unwrap(), 0, "then the connection ends");
    drop(stream);
    assert_eq!(wait(&mut node.child).code(), Some(0));
    assert!(!front.exists());
}

#[test]
fn a_second_signal_ends_a_station_at_once() {
    for (first, second) in [(Signal::TERM, Signal::TERM), (Signal::INT, Signal::TERM), (Signal::TERM, Signal::INT)] {
        let dir = tempfile::tempdir().unwrap();
        let (_behind, mut node, _stream) = busy_node(dir.path());
        node.signal(first);
        until_blocking("the listener is gone", || UnixStream::connect(dir.path().join("front")).is_err());
        node.signal(second);
        let started = std::time::Instant::now();
        wait(&mut node.child);
        assert!(started.elapsed().as_secs() < 10, "the grace period is a minute");
        assert!(!dir.path().join("front").exists());
    }
}

#[test]
fn aeonctl_asks_and_answers_in_text_and_json() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let _first = Station::start(FLOW, &["--socket", text(&socket), "--layers", "0..3"]);
    let second = Station::start(FLOW_UDP, &["--bind", "127.0.0.1:0", "--layers", "3..6"]);
    let (first, second) = (format!("uds:{}", text(&socket)), format!("udp:{}", second.value("udp")));
    let mesh = ["--station", &first, "--station", &second];
    let ask = |arguments: &[&str]| {
        let output = ctl(&[&mesh[..], arguments].concat());
        assert_code(&output, 0, "");
        output
    };
    let json = |arguments: &[&str]| serde_json::from_slice::<Value>(&ask(arguments).stdout).unwrap();

    let answer = stdout(&ask(&["hello"]));
    for word in [first.as_str(), &second, "layers      0..3 of 6", "layers      3..6 of 6", "demo, 128 wide"] {
        assert!(answer.contains(word), "{word} in {answer}");
    }
    let answer = json(&["--json", "hello"]);
    assert_eq!((&answer[0]["address"], &answer[1]["layers"][0]), (&first.as_str().into(), &3.into()));
    let answer = stdout(&ask(&["health"]));
    assert!(answer.contains("requests") && answer.contains("undecodable 0"), "{answer}");
    assert_eq!(json(&["--json", "health"])[1]["draining"], false);

    let prompt = "First Citizen:\nBefore we proceed";
    let generated = json(&["--json", "generate", prompt, "--max-tokens", "16"]);
    let tokens = generated["tokens"].as_array().unwrap();
    assert_eq!((tokens.len(), generated["hops"].as_array().unwrap().len()), (16, 2));
    assert_eq!(generated["hops"][0]["bytes_out_per_token"], 512.0);
    let output = ask(&["generate", prompt, "--max-tokens", "16"]);
    assert_eq!(stdout(&output).trim_end(), generated["text"].as_str().unwrap().trim_end());
    for word in ["stopped: as many", "tokens/s", "time to first token", "layers 0..3", "layers 3..6"] {
        assert!(stderr(&output).contains(word), "{word} in {}", stderr(&output));
    }
    // A seed repeats, and nothing is left on the stations.
    let sampled = |seed: &str| {
        json(&["--json", "generate", prompt, "--max-tokens", "16", "--temperature", "0.9", "--seed", seed])["text"]
            .take()
    };
    assert_eq!(sampled("5"), sampled("5"));
    assert_ne!(sampled("5"), sampled("6"));
    assert_eq!(json(&["--json", "health"])[0]["sessions"], 0);
    // What both stations remember of the prompt is not computed again, and goes on with the same tokens.
    for hits in [0, 1] {
        let replayed = json(&["--json", "generate", prompt, "--max-tokens", "16", "--replay"]);
        assert_eq!(replayed["tokens"], generated["tokens"]);
        let health = json(&["--json", "health"]);
        assert_eq!([0, 1].map(|station: usize| health[station]["replay"]["hits"].as_u64()), [Some(hits); 2]);
    }

    let forward = |arguments: &[&str]| ctl(&[&["--station", &first, "forward"][..], arguments].concat());
    let residuals = dir.path().join("residuals");
    let output = forward(&["--ids", "1,2,3", "--output", text(&residuals)]);
    assert_code(&output, 0, "");
    assert!(stdout(&output).contains("\"seq\":3") && stdout(&output).contains("norm"), "{}", stdout(&output));
    assert_eq!(std::fs::metadata(&residuals).unwrap().len(), 3 * 512);
    let arguments = ["--station", &second, "--json", "forward", "--input", text(&residuals), "--token"];
    let answer: Value = serde_json::from_slice(&ctl(&arguments).stdout).unwrap();
    assert!(answer["token"].as_u64().unwrap() < 1024, "{answer}");
    assert_code(&forward(&["--ids", "5000"]), 1, "vocabulary");
    assert_code(&forward(&["--ids", "1", "--token"]), 1, "501");

    // A mesh in the wrong order or with a part missing is a mistake of the one who typed it.
    let output = ctl(&["--station", &second, "--station", &first, "generate", "x"]);
    assert_code(&output, 64, "layer 0 is next");
    assert_code(&ctl(&["--station", &first, "generate", "x"]), 64, "layers 3..6");
}

#[test]
fn a_tokenizer_of_another_model_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let _station = Station::start(NODE, &["--uds", text(&socket), "--model", "identity:8:100"]);
    let station = format!("uds:{}", text(&socket));
    let output = ctl(&["--station", &station, "generate", "x"]);
    assert_code(&output, 64, "add --tokenizer");
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/bases/demo/tokenizer.json");
    let output = ctl(&["--station", &station, "generate", "x", "--tokenizer", tokenizer]);
    assert_code(&output, 64, "the tokenizer has 1024 tokens, the model identity:8 only 100");
    assert_code(&ctl(&["--station", &station, "generate", "x", "--tokenizer", "/nowhere"]), 1, "/nowhere");
}

#[test]
fn every_program_describes_itself() {
    for program in [NODE, CTL, FLOW, FLOW_UDP] {
        for argument in ["--help", "--version", "-h"] {
            let output = run(command(program, &[argument]));
            assert_code(&output, 0, "");
            assert!(!output.stdout.is_empty());
        }
    }
    for program in [NODE, FLOW, FLOW_UDP] {
        let name = Path::new(program).file_name().unwrap().to_str().unwrap();
        for shell in ["bash", "zsh", "fish"] {
            let output = run(command(program, &["--completions", shell]));
            assert_code(&output, 0, "");
            assert!(stdout(&output).contains(name), "{name} for {shell}");
        }
        let output = run(command(program, &["--man"]));
        assert_code(&output, 0, "");
        assert!(stdout(&output).contains(".TH"), "{name}");
    }
    for subcommand in ["hello", "health", "forward", "generate", "demo", "completions", "man"] {
        assert_code(&ctl(&[subcommand, "--help"]), 0, "");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&ctl(&["completions", shell])).contains("generate"));
    }
    assert_code(&ctl(&["completions", "nonsense"]), 64, "nonsense");
    assert!(stdout(&ctl(&["man"])).contains(".TH aeonctl"));
    let dir = tempfile::tempdir().unwrap();
    assert_code(&ctl(&["man", text(dir.path())]), 0, "");
    assert!(dir.path().join("aeonctl.1").exists() && dir.path().join("aeonctl-generate.1").exists());
}

#[test]
fn a_reader_that_goes_away_ends_the_client_without_a_message() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_aeonctl"))
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
