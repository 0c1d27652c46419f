//! `aeonctl evaluate` and the verdicts on bases, as a user runs them.
#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    ffi::OsStr,
    fs,
    path::Path,
    process::{Command, Output},
};

use aeon_station::{
    client::{Client, ClientOptions, StationAddress},
    config::{Config, ListenSettings, ModelSettings, Settings},
    daemon::Node,
};
use serde_json::Value;

fn aeonctl<S: AsRef<OsStr>>(folder: &Path, arguments: &[S]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aeonctl")).current_dir(folder).args(arguments).output().unwrap()
}

/// Runs it, expects success, and returns stdout and stderr.
fn succeed<S: AsRef<OsStr>>(folder: &Path, arguments: &[S]) -> (String, String) {
    let output = aeonctl(folder, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    (String::from_utf8(output.stdout).unwrap(), stderr)
}

/// Runs it, expects exit code 64, and returns stderr.
fn refused<S: AsRef<OsStr>>(folder: &Path, arguments: &[S]) -> String {
    let output = aeonctl(folder, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64), "{stderr}");
    assert!(output.stdout.is_empty());
    stderr
}

fn evaluate(folder: &Path, arguments: &[&str]) -> Value {
    let arguments: Vec<&str> = ["--json", "evaluate"].iter().chain(arguments).copied().collect();
    let (stdout, stderr) = succeed(folder, &arguments);
    assert_eq!(stderr, "", "no bar and no word but on a terminal");
    serde_json::from_str(&stdout).unwrap()
}

fn body<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["settings"].as_array().unwrap().iter().find(|setting| setting["body"] == name).unwrap()
}

fn kl(report: &Value, name: &str) -> f64 {
    body(report, name)["whole"]["kl"].as_f64().unwrap()
}

/// The demo model's held-out text.
fn write_text(folder: &Path) {
    fs::write(folder.join("text.txt"), aeon_station::demo::HELD_OUT).unwrap();
}

#[test]
fn the_order_of_bodies_on_the_demo_model() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_text(at);
    let wire = "f32,f16,i8,q8,q6,q5,q4,q3,pcar:8";
    let arguments = [
        "text.txt",
        "--cuts",
        "2,4",
        "--max-tokens",
        "512",
        "--wire",
        wire,
        "--html",
        "r.html",
        "--save-tokens",
        "t.json",
    ];
    let report = evaluate(at, &arguments);
    assert_eq!(
        (&report["model"], &report["cuts"], &report["positions"]),
        (&"demo".into(), &serde_json::json!([2, 4]), &504.into())
    );
    // Each bit divides the divergence by about four.
    for pair in ["q3", "q4", "q5", "q6"].windows(2) {
        let ratio = kl(&report, pair[0]) / kl(&report, pair[1]);
        assert!((2.5..6.0).contains(&ratio), "{pair:?}: {ratio}");
    }
    assert!(kl(&report, "f32").abs() < 1e-12 && kl(&report, "f16") < 1e-5 && kl(&report, "i8") < 1e-3);
    assert!(kl(&report, "q4") < 0.03, "4 bits at two cuts");
    assert!(kl(&report, "pcar:8") > 0.5, "8 components ruin the text");
    let q4 = body(&report, "q4");
    assert_eq!((&q4["bytes"], &q4["body_bytes"]), (&66.0.into(), &99.0.into()));
    for hop in q4["hops"].as_array().unwrap() {
        let alone = hop["alone"]["kl"].as_f64().unwrap();
        assert!(alone < 0.015 && alone < kl(&report, "q4"), "{hop}");
        assert!(hop["cosine"].as_f64().unwrap() > 0.99 && hop["mean_cosine"].as_f64().unwrap() < 0.6);
    }
    let [good, bad] = ["q6", "pcar:8"].map(|name| body(&report, name)["acceptance"].as_f64().unwrap());
    assert!(good > 0.7 && bad < 0.4, "{good} {bad}");
    let page = fs::read_to_string(at.join("r.html")).unwrap();
    assert!(page.contains("<svg") && page.contains(">pcar:8<") && !page.contains("<script"));

    // The windows that were saved give the same figures.
    let again = evaluate(at, &["t.json", "--cuts", "2,4", "--max-tokens", "512", "--wire", "q4", "--whole-only"]);
    assert_eq!(again["positions"], report["positions"]);
    assert!((kl(&again, "q4") - kl(&report, "q4")).abs() < 1e-9);
    let (text, _) =
        succeed(at, &["evaluate", "t.json", "--max-tokens", "128", "--wire", "q4", "--calibrate", "text.txt"]);
    assert!(text.contains("cut at 3") && text.contains("q4") && text.contains("nats per token"), "{text}");
}

/// The acceptance of `fidelity` figures: a trained model of 260,000 parameters, on text that it wrote itself.
#[test]
fn four_bits_and_eight_components_of_stories260k() {
    let Some(model) = common::shared("models/stories260K") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = model.to_str().unwrap();
    let calibrate = ["--calibrate", "sample:32", "--cuts", "2", "--wire", "q4,pcar:8", "--max-tokens", "2048"];
    let start = ["sample:16", "--model", model];
    let report = evaluate(folder.path(), &[&start[..], &calibrate[..]].concat());
    assert!(kl(&report, "q4") < 0.015, "{}", kl(&report, "q4"));
    assert!(kl(&report, "pcar:8") > 3.0, "{}", kl(&report, "pcar:8"));
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::write(at.join("short.txt"), "a").unwrap();
    fs::write(at.join("foreign.json"), "[[0,1,2,3,4000000]]").unwrap();
    fs::write(at.join("bad.json"), "{}").unwrap();
    for (arguments, said) in [
        (vec!["--cuts", "6"], "can be cut at 1 to 5"),
        (vec!["--cuts", "4,2"], "increasing"),
        (vec!["--cuts", "x"], "8,15,23"),
        (vec!["--cuts", "2", "--wire", "q4", "short.txt"], "give more text"),
        (vec!["--context", "100000"], "context of 100000"),
        (vec!["foreign.json"], "another model"),
        (vec!["--wire", "q2"], "q3 to q8"),
        (vec!["--wire", "pcar:65"], "the basis has 64"),
        (vec!["--model", "identity:8"], "no layers here"),
        (vec!["--top-p", "2"], "between 0 and"),
    ] {
        let arguments: Vec<&str> = std::iter::once("evaluate").chain(arguments).collect();
        let stderr = refused(at, &arguments);
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
    }
    let output = aeonctl(at, &["evaluate", "bad.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("array of arrays"));
}

async fn node(layers: &str, socket: &Path, bases: Option<&Path>) -> Node {
    let model = ModelSettings { layers: Some(layers.to_owned()), ..ModelSettings::default() };
    let listen = ListenSettings { uds: Some(socket.to_owned()), ..ListenSettings::default() };
    let mut settings = Settings { model, listen, ..Settings::default() };
    settings.model.bases = bases.map(Path::to_owned);
    Node::start(&Config::try_from(settings).unwrap()).await.unwrap()
}

fn stations(at: &Path, names: &[&str]) -> Vec<String> {
    names.iter().flat_map(|name| ["--station".to_owned(), format!("uds:{}", at.join(name).display())]).collect()
}

#[test]
fn a_live_mesh_gives_the_figures_of_the_split_in_this_process() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_text(at);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let _nodes =
        runtime.block_on(async { [node("0..2", &at.join("a"), None).await, node("2..6", &at.join("b"), None).await] });
    let rest = ["text.txt", "--max-tokens", "128", "--context", "64", "--wire", "q4,pcar:16", "--drafts", "6"];
    let here = evaluate(at, &[&rest[..], &["--cuts", "2"]].concat());
    let mesh = stations(at, &["a", "b"]);
    let command = ["--json", "evaluate"].iter().chain(&rest).map(|part| (*part).to_owned());
    let arguments: Vec<String> = mesh.iter().cloned().chain(command).collect();
    let live: Value = serde_json::from_str(&succeed(at, &arguments).0).unwrap();
    assert_eq!(live, here);

    let mixed: Vec<String> = mesh.iter().cloned().chain(["evaluate", "--cuts", "2"].map(str::to_owned)).collect();
    assert!(refused(at, &mixed).contains("cut where they meet"));
    let one = ["--station", &mesh[1], "evaluate"].map(str::to_owned);
    assert!(refused(at, &one).contains("layers"));
}

/// A basis is judged when it is fitted; what it says of itself is shown, announced, and heeded.
#[test]
fn a_basis_that_failed_is_used_with_force_only() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_text(at);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    {
        let _nodes = runtime
            .block_on(async { [node("0..3", &at.join("a"), None).await, node("3..6", &at.join("b"), None).await] });
        let mut capture = stations(at, &["a", "b"]);
        let command = [
            "capture-residuals",
            "--text",
            "text.txt",
            "--window",
            "64",
            "--max-tokens",
            "960",
            "--out",
            "r.safetensors",
        ];
        capture.extend(command.map(str::to_owned));
        succeed(at, &capture);
    }
    let fit = |out: &str, budget: &str| {
        let start = [
            "basis",
            "fit",
            "r.safetensors",
            "--model",
            "demo",
            "--methodology",
            "bases/methodologies/k.json",
            "--k",
            "32",
        ];
        let judge = ["--judge", "text.txt", "--judge-model", "demo", "--judge-tokens", "256", "--judge-budget", budget];
        succeed(at, &[&start[..], &["--out", out], &judge[..]].concat()).0
    };
    fs::create_dir(at.join("bases")).unwrap();
    let text = fit("bases/basis.pcab", "1");
    assert!(text.contains("End effect") && text.contains("text.txt") && text.contains("FAILED"), "{text}");
    // The first position of each of the 11 windows is left out too.
    let inspected: Value =
        serde_json::from_str(&succeed(at, &["--json", "basis", "inspect", "bases/basis.pcab"]).0).unwrap();
    let counts = &inspected["metadata"]["boundaries"]["3"];
    assert_eq!((&counts["rows"], &counts["outliers"]), (&658.into(), &11.into()));
    assert!(counts["median_norm"].as_f64().unwrap() > 0.0);
    let effect = &inspected["metadata"]["end_effect"]["boundaries"]["3"];
    assert!(effect["kl"].as_f64().unwrap() > 0.01 && effect["k"] == 32, "{effect}");
    assert_eq!(inspected["passed"], false);
    assert!(succeed(at, &["basis", "inspect", "bases/basis.pcab"]).0.contains("FAILED"));

    let generate = |names: [&str; 2], more: &[&str]| -> Vec<String> {
        let command = ["generate", "--wire", "pcar", "--max-tokens", "4", "First"];
        stations(at, &names).into_iter().chain(command.iter().chain(more).map(|part| (*part).to_owned())).collect()
    };
    let serve = |[first, second]: [&str; 2]| {
        let bases = at.join("bases");
        runtime.block_on(async {
            [node("0..3", &at.join(first), Some(&bases)).await, node("3..6", &at.join(second), Some(&bases)).await]
        })
    };
    {
        let _nodes = serve(["c", "d"]);
        let hello = runtime.block_on(async {
            let address = StationAddress::Unix(at.join("d"));
            Client::connect(&address, ClientOptions::default()).await.unwrap().hello().await.unwrap()
        });
        let judged = hello.bases[0].judged.unwrap();
        assert_eq!((judged.passed, judged.worst_boundary), (false, 3));
        assert!((judged.budget - 0.01).abs() < 1e-6 && judged.perplexity_ratio > 1.01);
        let stderr = refused(at, &generate(["c", "d"], &[]));
        assert!(stderr.contains("failed its own evaluation") && stderr.contains("--force"), "{stderr}");
        let (_, stderr) = succeed(at, &generate(["c", "d"], &["--force"]));
        assert!(stderr.contains("failed its own evaluation") && stderr.contains("compressed"), "{stderr}");
    }
    // With a budget that it meets it is used without a word.
    let text = fit("bases/basis.pcab", "1000");
    assert!(text.contains("PASSED"), "{text}");
    let _nodes = serve(["e", "f"]);
    let (_, stderr) = succeed(at, &generate(["e", "f"], &[]));
    assert!(!stderr.contains("evaluation") && stderr.contains("compressed"), "{stderr}");
}

/// The smallest body for each hop, by an evaluation made now or before, and what is said about it.
#[test]
fn auto_spends_a_budget_and_says_on_what() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let _nodes = runtime.block_on(async {
        let [a, b, c] = ["a", "b", "c"].map(|name| at.join(name));
        [node("0..2", &a, None).await, node("2..4", &b, None).await, node("4..6", &c, None).await]
    });
    let mesh = stations(at, &["a", "b", "c"]);
    let command = |more: &[&str]| -> Vec<String> {
        let command = ["--json", "generate", "--max-tokens", "12", "First Citizen:"];
        mesh.iter().cloned().chain(command.iter().chain(more).map(|part| (*part).to_owned())).collect()
    };
    let tokens = |stdout: &str| serde_json::from_str::<Value>(stdout).unwrap()["tokens"].clone();
    let (exact, _) = succeed(at, &command(&[]));
    // Nothing may be lost: all hops are raw, and the text is that of an unsplit run.
    let (stdout, stderr) = succeed(at, &command(&["--wire", "auto", "--budget", "0"]));
    assert_eq!(tokens(&stdout), tokens(&exact));
    assert!(stderr.contains("boundary 2: f32") && stderr.contains("boundary 4: f32"), "{stderr}");
    // By default one per cent in all, and both hops are coded.
    let (stdout, stderr) = succeed(at, &command(&["--wire", "auto"]));
    assert!(stderr.contains("budget 1 % of perplexity, 0.00995 nats") && stderr.contains("wrote just now"), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    for hop in report["hops"].as_array().unwrap().iter().skip(1) {
        assert_eq!(hop["compressed_requests"], hop["requests"], "{stderr}");
        assert!(hop["bytes_in_per_token"].as_f64().unwrap() < 300.0, "{hop}");
    }
    let (_, stderr) = succeed(at, &command(&["--wire", "auto", "--budget", "900"]));
    assert!(stderr.contains("boundary 2: q3:nomean") && stderr.contains("boundary 4: q3:nomean"), "{stderr}");

    // By figures from before, one hop may take more of the budget than another.
    let bodies = "f16,i8,q6:nomean,q5:nomean,q4:nomean,q3:nomean,q3";
    let arguments = ["--cuts", "2,4", "--max-tokens", "256", "--wire", bodies, "--drafts", "0", "--greedy", "0"];
    let (saved, _) = succeed(at, &[&["--json", "evaluate"][..], &arguments[..]].concat());
    let mut saved: Value = serde_json::from_str(&saved).unwrap();
    for setting in saved["settings"].as_array_mut().unwrap() {
        let is_q5 = setting["body"] == "q5:nomean";
        for hop in setting["hops"].as_array_mut().unwrap() {
            let cheap = hop["boundary"] == 4 || is_q5;
            hop["alone"]["kl"] = if cheap { 0.001 } else { 0.5 }.into();
        }
    }
    let write = |value: &Value| fs::write(at.join("e.json"), value.to_string()).unwrap();
    let with = ["--wire", "auto", "--evaluation", "e.json"];
    write(&saved);
    let (_, stderr) = succeed(at, &command(&with));
    assert!(
        stderr.contains("boundary 2: q5:nomean, 115 of 512 bytes") && stderr.contains("boundary 4: q3:nomean"),
        "{stderr}"
    );
    assert!(stderr.contains("e.json") && stderr.contains("in all 0.00200 nats"), "{stderr}");
    assert!(
        stderr.contains("not every hop has a basis"),
        "q3 was judged with a mean that these stations lack: {stderr}"
    );
    let mut other = saved.clone();
    other["config_fp"] = "0".into();
    write(&other);
    assert!(refused(at, &command(&with)).contains("is about the model demo"));
    saved["cuts"] = serde_json::json!([3]);
    for setting in saved["settings"].as_array_mut().unwrap() {
        setting["hops"].as_array_mut().unwrap().truncate(1);
    }
    write(&saved);
    assert!(refused(at, &command(&with)).contains("this mesh at [2, 4]"));
    write(&serde_json::json!({}));
    assert!(refused(at, &command(&with)).contains("aeonctl --json evaluate"));
}

#[test]
fn phases_have_a_verdict_each_and_say_what_was_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let (stdout, _) = succeed(folder.path(), &["--json", "bench", "phases", "--receiver", "nowhere.js"]);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert!(report["javascript_skipped"].as_str().unwrap().contains("nowhere.js"), "{report}");
    let verdicts = |name: &str| {
        let body = report["bodies"].as_array().unwrap().iter().find(|body| body["body"] == name).unwrap();
        ["phase_a", "phase_b_acceptance", "phase_b_saving"].map(|key| body[key].as_bool().unwrap())
    };
    // Eight components have neither the cosine nor the drafts; four bits have all.
    assert_eq!(verdicts("pcar:8")[..2], [false, false]);
    assert_eq!(verdicts("q4"), [true, true, true]);
    let (text, _) = succeed(folder.path(), &["bench", "phases", "--receiver", "nowhere.js"]);
    assert!(text.contains("Phase A") && text.contains("FAIL") && text.contains("skipped: nowhere.js"), "{text}");
}
