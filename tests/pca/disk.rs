//! Basis files under a running `aeon-node`: destroyed in every way, reloaded by SIGHUP well and badly, and bad at the start.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use aeon_proto::route::Route;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{PATIENCE, Raw, bytes_of, file, lifted, pcab, pcar_body, spec};

const DIM: usize = 1024;
const K: usize = 96;

fn basis(note: &str) -> Vec<u8> {
    pcab(DIM, &[(0, K), (1, 1)], 5, &spec(DIM, "a"), note)
}

/// A folder of bases with its methodology.
fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("methodologies")).unwrap();
    fs::write(folder.path().join("methodologies/a.json"), spec(DIM, "a").canonical()).unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn command(socket: &Path, bases: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aeon-node"));
    command.args(["--model", &format!("identity:{DIM}"), "--uds"]).arg(socket).arg("--bases").arg(bases);
    command.env("NO_COLOR", "1").env_remove("AEON_LOG").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// A node as a process of its own; killed when the test is over.
struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Process {
    fn start(bases: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let mut child = command(&socket, bases).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (send, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let process = Self { child, lines, socket, _folder: folder };
        process.line_with("ready ");
        process
    }

    /// The next line of the log that holds a word.
    fn line_with(&self, word: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|error| panic!("{word}: {error}"));
            if line.contains(word) {
                return line;
            }
        }
    }

    fn reload(&self) {
        kill_process(Pid::from_child(&self.child), Signal::HUP).unwrap();
    }

    fn link(&self) -> Raw {
        Raw::unix(&self.socket)
    }

    /// Fingerprints, as HELLO lists them.
    fn listed(&self) -> Vec<String> {
        let meta = r#"{"content_type":"application/x-aeon-flow; v=1"}"#;
        let hello = self.link().ask(Route::HELLO, meta, &[]).meta;
        hello["bases"].as_array().unwrap().iter().map(|basis| basis["basis_fp"].as_str().unwrap().to_owned()).collect()
    }

    fn check_alive(&mut self) {
        assert!(self.child.try_wait().unwrap().is_none(), "the process has ended");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn fp(bytes: &[u8]) -> String {
    format!("0x{:08x}", aeon_proto::hash::fnv1a32(bytes))
}

type Destroy = fn(&Path);

fn writable(path: &Path) -> fs::File {
    fs::OpenOptions::new().write(true).open(path).unwrap()
}

#[test]
fn files_that_are_destroyed_while_requests_run_change_no_result() {
    let bytes = basis("a");
    let folder = folder(&[("a.pcab", &bytes)]);
    let path = folder.path().join("a.pcab");
    let mut process = Process::start(folder.path());
    let loaded = file(&bytes);
    let components: Vec<f32> = (0..3 * K).map(|i| (i % 17) as f32 * 0.5 - 4.0).collect();
    let body = pcar_body(&loaded, 0, K, &components);
    // The identity gives back what was lifted.
    let expected = bytes_of(&lifted(&loaded, 0, K, &components));
    let ways: [(&str, Destroy); 7] = [
        ("truncated to nothing", |path| writable(path).set_len(0).unwrap()),
        ("truncated by half", |path| {
            let file = writable(path);
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        }),
        ("overwritten with zeros", |path| {
            let mut file = writable(path);
            file.write_all(&vec![0; file.metadata().unwrap().len() as usize]).unwrap();
            file.sync_all().unwrap();
        }),
        ("overwritten with NaN", |path| {
            let mut file = writable(path);
            file.write_all(&vec![0xff; file.metadata().unwrap().len() as usize]).unwrap();
        }),
        ("replaced by rename", |path| {
            let other = path.with_extension("tmp");
            fs::write(&other, basis("other")).unwrap();
            fs::rename(&other, path).unwrap();
        }),
        ("deleted", |path| fs::remove_file(path).unwrap()),
        ("folder deleted", |path| fs::remove_dir_all(path.parent().unwrap()).unwrap()),
    ];
    for (way, destroy) in ways {
        fs::write(&path, &bytes).unwrap();
        let (done, count) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let workers: Vec<_> = (0..2)
                .map(|_| {
                    let mut link = process.link();
                    let (done, count, body, expected) = (&done, &count, &body, &expected);
                    scope.spawn(move || {
                        while !done.load(Ordering::Relaxed) {
                            assert_eq!(&link.ask(Route::FORWARD_PCA, "", body).ok(), expected, "{way}");
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let wait_for = |more: u64| {
                let target = count.load(Ordering::Relaxed) + more;
                let until = Instant::now() + PATIENCE;
                while count.load(Ordering::Relaxed) < target && !workers.iter().any(|worker| worker.is_finished()) {
                    assert!(Instant::now() < until, "{way}");
                    thread::yield_now();
                }
            };
            wait_for(20);
            destroy(&path);
            wait_for(100);
            done.store(true, Ordering::Relaxed);
        });
        process.check_alive();
        assert_eq!(process.listed(), [fp(&bytes)], "{way}");
    }
}

#[test]
fn sighup_takes_what_is_good_and_keeps_the_old_set_when_something_is_bad() {
    let (a, b) = (basis("a"), basis("b"));
    let folder = folder(&[("a.pcab", &a)]);
    let at = |name: &str| folder.path().join(name);
    let mut process = Process::start(folder.path());
    assert_eq!(process.listed(), [fp(&a)]);

    fs::write(at("b.pcab"), &b).unwrap();
    process.reload();
    process.line_with("bases loaded again");
    assert_eq!(process.listed(), [fp(&a), fp(&b)]);

    let basis_b = file(&b);
    let body = pcar_body(&basis_b, 0, 1, &[2.0]);
    let expected = bytes_of(&lifted(&basis_b, 0, 1, &[2.0]));
    // The connection outlives all of it.
    let mut link = process.link();
    assert_eq!(link.ask(Route::FORWARD_PCA, "", &body).ok(), expected);

    let mut nan = a.clone();
    nan[256..260].copy_from_slice(&f32::NAN.to_le_bytes());
    let bad: [(&str, &[u8]); 5] = [
        ("c.pcab", b"no basis"),
        ("b.pcab", &b[..b.len() / 2]),
        ("a.pcab", b""),
        ("nan.pcab", &nan),
        ("methodologies/bad.json", b"{"),
    ];
    for (name, bytes) in bad {
        let before = fs::read(at(name)).ok();
        fs::write(at(name), bytes).unwrap();
        process.reload();
        let line = process.line_with("the old ones stay");
        assert!(line.contains("ERROR") && line.contains(name), "{line}");
        assert_eq!(process.listed(), [fp(&a), fp(&b)], "{name}");
        assert_eq!(link.ask(Route::FORWARD_PCA, "", &body).ok(), expected, "{name}");
        match before {
            Some(before) => fs::write(at(name), before).unwrap(),
            None => fs::remove_file(at(name)).unwrap(),
        }
    }
    // A file without its methodology.
    fs::rename(at("methodologies"), at("elsewhere")).unwrap();
    process.reload();
    let line = process.line_with("the old ones stay");
    assert!(line.contains("a.pcab") && line.contains("aeonctl methodology add"), "{line}");
    fs::rename(at("elsewhere"), at("methodologies")).unwrap();

    fs::remove_file(at("b.pcab")).unwrap();
    process.reload();
    process.line_with("bases loaded again");
    assert_eq!(process.listed(), [fp(&a)]);
    let answer = link.ask(Route::FORWARD_PCA, "", &body);
    let expected = format!(r#"{{"status":412,"error":"basis fingerprint mismatch","have":["{}"]}}"#, fp(&a));
    assert_eq!(answer.text, expected);
    process.check_alive();
}

#[test]
fn sighup_of_a_node_with_an_empty_folder_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let process = Process::start(folder.path());
    process.reload();
    process.line_with("bases loaded again");
    assert!(process.listed().is_empty());
}

/// Runs a node that must end by itself.
fn ends(command: &mut Command) -> Output {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let mut text = Vec::new();
        let _ = std::io::Read::read_to_end(&mut stderr, &mut text);
        let _ = send.send(text);
    });
    let Ok(stderr) = receive.recv_timeout(PATIENCE) else {
        let _ = child.kill();
        panic!("the node runs on");
    };
    Output { status: child.wait().unwrap(), stdout: Vec::new(), stderr }
}

#[test]
fn a_bad_file_at_the_start_ends_the_node_with_path_expected_and_got() {
    let good = basis("a");
    let edited = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let len = good.len();
    let cases: Vec<(Vec<u8>, Vec<String>)> = vec![
        (vec![], vec!["the file is empty".into()]),
        (good[..40].to_vec(), vec!["40 bytes".into(), "at least 64 expected".into()]),
        (good[..len - 1].to_vec(), vec![format!("{} bytes", len - 1), format!("at least {len} expected")]),
        ([&good[..], b"x"].concat(), vec![format!("{} bytes", len + 1), format!("ends at {len}")]),
        (edited(0, b"PNG!"), vec!["50, 4e, 47, 21".into(), "expected".into()]),
        (edited(4, &[2]), vec!["version 2, 1 expected".into()]),
        (edited(8, &[1, 4]), vec!["starts at".into()]),
        (edited(16, &[1, 2, 3, 4]), vec!["methodology 0x04030201".into(), "aeonctl methodology add".into()]),
        (edited(192, &f32::NAN.to_le_bytes()), vec!["mean of entry 0".into(), "NaN or infinite".into()]),
    ];
    for (bytes, words) in cases {
        let folder = folder(&[("good.pcab", &good), ("zz.pcab", &bytes)]);
        let socket = folder.path().join("s");
        let output = ends(&mut command(&socket, folder.path()));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        let path = folder.path().join("zz.pcab").display().to_string();
        assert!(text.starts_with("error: cannot load the bases: ") && text.contains(&path), "{text}");
        for word in &words {
            assert!(text.contains(word.as_str()), "{word}: {text}");
        }
        assert!(!socket.exists(), "nothing is left bound");
    }
    // No folder at all, or a file in its place.
    let folder = folder(&[("good.pcab", &good)]);
    for bases in [folder.path().join("missing"), folder.path().join("good.pcab")] {
        let output = ends(&mut command(&folder.path().join("s"), &bases));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(&bases.display().to_string()), "{text}");
    }
}

#[test]
fn methodologies_without_bases_are_a_mistake_of_the_command_line() {
    let folder = folder(&[]);
    for check in [None, Some("check")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aeon-node"));
        command.args(["--model", "identity:8", "--methodologies"]).arg(folder.path());
        command.arg("--uds").arg(folder.path().join("s")).args(check).stdin(Stdio::null()).stdout(Stdio::null());
        let output = ends(&mut command);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{text}");
        assert!(text.contains("--methodologies without --bases"), "{text}");
    }
}
