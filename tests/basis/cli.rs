//! `aeonctl basis` and `aeonctl methodology` as a user runs them: fit, inspect, verify, and what they say when it fails.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use aeon_station::basis::{Registry, read_pca_bases, registry::Source};
use serde_json::Value;

/// Runs `aeonctl` in a folder.
pub(crate) fn aeonctl<S: AsRef<OsStr>>(folder: &Path, arguments: &[S]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aeonctl")).current_dir(folder).args(arguments).output().unwrap()
}

/// Runs it, expects success and silence on stderr, and returns stdout.
pub(crate) fn succeed<S: AsRef<OsStr>>(folder: &Path, arguments: &[S]) -> String {
    let output = aeonctl(folder, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs it, expects an exit code and silence on stdout, and returns stderr.
fn fail(folder: &Path, arguments: &[&str], code: i32) -> String {
    let output = aeonctl(folder, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(output.stdout.is_empty());
    stderr
}

fn fixture() -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/basis/data/residuals.npy").to_str().unwrap().to_owned()
}

fn fit_arguments<'a>(input: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let start = ["basis", "fit", input, "--out", "toy.pcab", "--model", "toy", "--methodology", "k5.json"];
    start.iter().chain(more).copied().collect()
}

#[test]
fn fit_then_inspect_verify_and_serve() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let input = fixture();
    let text = succeed(at, &fit_arguments(&input, &["--k", "5", "--boundaries", "4"]));
    assert!(text.contains("toy.pcab") && text.contains("basis_fp") && text.contains("its own"), "{text}");
    // The methodology was made, and now says all that the options said.
    let first = fs::read(at.join("toy.pcab")).unwrap();
    succeed(at, &fit_arguments(&input, &["--boundaries", "4"]));
    assert_eq!(fs::read(at.join("toy.pcab")).unwrap(), first, "the same input gives the same file");

    let inspected: Value = serde_json::from_str(&succeed(at, &["--json", "basis", "inspect", "toy.pcab"])).unwrap();
    let part = &inspected["boundaries"][0];
    assert_eq!((part["boundary"].as_u64(), part["k"].as_u64()), (Some(4), Some(5)));
    assert_eq!(part["variance"].as_array().unwrap().len(), 6);
    assert!((0.5..1.0).contains(&part["explained"].as_f64().unwrap()));
    assert_eq!(inspected["metadata"]["boundaries"]["4"]["rows"], 240);
    assert_eq!(inspected["metadata"]["policy"]["k_rule"]["fixed"], 5);
    let inputs = inspected["metadata"]["calibration"]["inputs"].as_object().unwrap();
    assert_eq!(inputs["residuals.npy"], format!("blake3:{}", blake3::hash(&fs::read(&input).unwrap()).to_hex()));
    let text = succeed(at, &["basis", "inspect", "toy.pcab", "--svg", "toy.svg"]);
    assert!(text.contains("k = 5") && text.contains('▇'), "{text}");
    let svg = fs::read_to_string(at.join("toy.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("boundary 4") && svg.trim_end().ends_with("</svg>"));

    let text = succeed(at, &["basis", "verify", "toy.pcab"]);
    let fp = inspected["basis_fp"].as_str().unwrap();
    assert!(
        text.contains("valid") && text.contains(fp) && text.contains(inspected["blake3"].as_str().unwrap()),
        "{text}"
    );

    let added = succeed(at, &["methodology", "add", "methodologies", "k5.json"]);
    assert!(added.contains("toy/k5"), "{added}");
    let text = succeed(at, &["basis", "verify", "toy.pcab", "--methodologies", "methodologies"]);
    assert!(text.contains("(toy/k5)"), "{text}");
    let id = inspected["methodology"].as_str().unwrap();
    let list = succeed(at, &["methodology", "list", "methodologies"]);
    assert!(list.contains(id) && list.contains("toy/k5") && list.contains("always 5"), "{list}");
    for name in ["toy/k5", id] {
        let shown: Value =
            serde_json::from_str(&succeed(at, &["--json", "methodology", "show", "methodologies", name])).unwrap();
        assert_eq!((&shown[0]["k"], &shown[0]["spec"]["hidden_dim"]), (&5.into(), &24.into()));
    }
    let registry = Registry::open(Source::new(at)).unwrap();
    assert_eq!(registry.current().bases().len(), 1);
}

#[test]
fn groups_and_rules_reach_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let input = fixture();
    fs::copy(&input, at.join("b.npy")).unwrap();
    let start = ["basis", "fit", &input, "b.npy", "--model", "toy", "--boundaries", "7,2"];
    let fit = |name: &str, more: &[&str]| {
        let (out, methodology) = (format!("{name}.pcab"), format!("{name}.json"));
        let files = ["--out", &out, "--methodology", &methodology];
        succeed(at, &start.iter().chain(&files).chain(more).copied().collect::<Vec<_>>());
        read_pca_bases(&at.join(out)).unwrap()
    };
    let grouped = fit("grouped", &["--per-thousand", "100", "--floor", "2", "--group", "2"]);
    assert_eq!(grouped.layers.iter().map(|layer| layer.boundary).collect::<Vec<_>>(), [2, 7]);
    assert!(std::sync::Arc::ptr_eq(&grouped.layers[0].components, &grouped.layers[1].components));
    assert_eq!(grouped.layers[0].components.nrows(), 3);
    let covered = fit("covered", &["--coverage", "0.95"]);
    let variance = &covered.layers[0].variance;
    let (total, parts) = variance.as_slice().unwrap().split_last().unwrap();
    assert!(parts.iter().sum::<f32>() >= 0.95 * total && parts[1..].iter().sum::<f32>() < 0.95 * total);
    let random = fit("random", &["--coverage", "0.95", "--randomized-above", "10"]);
    assert_eq!(random.layers[0].components.dim(), covered.layers[0].components.dim());
    assert!(random.metadata.contains("randomized"));
}

#[test]
fn mistakes_are_told_with_the_right_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let input = fixture();
    let usage = |more: &[&str], says: &str| {
        let text = fail(at, &fit_arguments(&input, more), 64);
        assert!(text.contains(says), "{text}");
    };
    usage(&[], "does not exist");
    usage(&["--k", "5", "--coverage", "0.9"], "cannot be used with");
    usage(&["--coverage", "7"], "not between");
    usage(&["--k", "5", "--group", "0"], "at least one");
    usage(&["--k", "25"], "at most hidden_dim");
    usage(&["--k", "5", "--boundaries", "1,2"], "2 boundaries for 1");
    usage(&["--k", "5", "--boundaries", "x"], "--boundaries");
    assert_eq!(fs::read_dir(at).unwrap().count(), 0, "nothing was written");
    succeed(at, &fit_arguments(&input, &["--k", "5"]));
    usage(&["--k", "6"], "says k:");
    usage(&["--boundaries", "3"], "says boundaries");
    let other = fail(at, &fit_arguments(&input, &["--model", "other"]), 64);
    assert!(other.contains("cannot be used multiple times") || other.contains("says model"), "{other}");
    let text = fail(at, &["basis", "fit", "no.npy", "--out", "x", "--model", "toy", "--methodology", "k5.json"], 1);
    assert!(text.contains("no.npy: cannot read the file"), "{text}");

    fs::write(at.join("bad.pcab"), "PCAB").unwrap();
    for command in ["inspect", "verify"] {
        let text = fail(at, &["basis", command, "bad.pcab"], 1);
        assert!(text.contains("bad.pcab: not a basis file: basis file of 4 bytes, at least 64 expected"), "{text}");
        assert!(fail(at, &["basis", command, "."], 1).contains("this is a directory"));
    }
    let mut bytes = fs::read(at.join("toy.pcab")).unwrap();
    let len = bytes.len();
    bytes[len / 2] ^= 0x40;
    fs::write(at.join("bad.pcab"), bytes).unwrap();
    assert!(fail(at, &["basis", "verify", "bad.pcab"], 1).contains("no valid basis"));

    fs::create_dir(at.join("empty")).unwrap();
    assert!(fail(at, &["basis", "verify", "toy.pcab", "--methodologies", "empty"], 1).contains("is not in empty"));
    assert!(fail(at, &["methodology", "show", "empty", "x"], 64).contains("no methodology"));
    assert!(fail(at, &["methodology", "list", "missing"], 1).contains("missing: cannot read the folder"));
    assert!(fail(at, &["methodology", "add", "empty", "toy.pcab"], 1).contains("toy.pcab"));
    assert!(fail(at, &["methodology", "add", "empty", "k5.json", "--name", "../x"], 1).contains("no name"));
    assert!(fail(at, &["capture-residuals", "--text", "x", "--out", "y"], 64).contains("no station"));
}
