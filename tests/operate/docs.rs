//! The dashboard and the alert rules ask only for metrics that there are.

use std::{collections::BTreeSet, fs, path::Path};

use aeon_proto::route::Route;
use serde_json::Value;

use crate::{
    common::{floats, wire::Wire},
    metrics::Samples,
    support::{ask, lab},
    toy,
};

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name)).unwrap()
}

/// Every name of ours in an expression.
fn names(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("aeon_")).map(str::to_owned).collect()
}

/// The labels that an expression selects or groups by.
fn labels(expression: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for part in expression.split("by (").skip(1) {
        found.extend(part.split(')').next().unwrap().split(',').map(|label| label.trim().to_owned()));
    }
    for part in expression.split('{').skip(1) {
        let inside = part.split('}').next().unwrap();
        found.extend(inside.split(',').filter_map(|pair| Some(pair.split(['=', '!']).next()?.trim().to_owned())));
    }
    found.retain(|label| !label.is_empty());
    found
}

fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                match value {
                    Value::String(text) if key == "expr" || (key == "query" && text.contains("aeon_")) => {
                        found.push(text.clone());
                    }
                    value => expressions(value, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, found)),
        _ => {}
    }
}

/// The expressions of the rules, `expr: …` on one line each.
fn rules(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_that_is_asked_for_exists() {
    let folder = toy::folder(&["a"]);
    let lab = lab(|settings| settings.model.bases = Some(folder.path().to_owned())).await;
    Wire::uds(&lab.uds).await.ask(Route::FORWARD, "", &floats(&[1.0; 8])).await.ok();
    let text = ask(lab.node.http().unwrap(), "GET /metrics").await.text;
    lab.node.stop().await;
    let there = Samples::read(&text).names();
    // Prometheus adds these to every sample that it scrapes.
    let mut known: BTreeSet<String> = ["job", "instance", "le"].map(str::to_owned).into();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        known.extend(labels(line));
    }
    let dashboard: Value = serde_json::from_str(&read("grafana-dashboard.json")).unwrap();
    let mut asked = Vec::new();
    expressions(&dashboard, &mut asked);
    assert!(asked.len() >= 15, "{asked:?}");
    let alerts = rules(&read("alerts.yml"));
    assert!(alerts.len() >= 6, "{alerts:?}");
    assert_eq!(alerts.len(), read("alerts.yml").matches("- alert:").count());
    for expression in asked.iter().chain(&alerts) {
        let names = names(expression);
        assert!(!names.is_empty() || expression.starts_with("up{"), "{expression}");
        for name in names {
            assert!(there.contains(&name), "{name} of {expression} is not in {there:?}");
        }
        for label in labels(expression) {
            assert!(known.contains(&label), "label {label} of {expression}");
        }
    }
    // And the other way round: what an operator must see is on the dashboard.
    let seen: BTreeSet<String> = asked.iter().flat_map(|expression| names(expression)).collect();
    for name in [
        "aeon_requests_total",
        "aeon_request_duration_seconds_bucket",
        "aeon_stage_duration_seconds_bucket",
        "aeon_body_bytes_total",
        "aeon_compression_saved_bytes_total",
        "aeon_raw_fallbacks_total",
        "aeon_sessions",
        "aeon_session_bytes",
        "aeon_replay_hits_total",
        "aeon_dropped_frames_total",
        "aeon_oldest_in_flight_seconds",
        "aeon_basis_info",
        "aeon_methodology_info",
    ] {
        assert!(seen.contains(name), "{name} is not on the dashboard");
    }
}

#[test]
fn expressions_are_taken_apart() {
    let expression = r#"sum by (route, le) (rate(aeon_a_total{status=~"5..",x!="y"}[5m])) / aeon_b"#;
    assert_eq!(names(expression), ["aeon_a_total", "aeon_b"].map(str::to_owned).into());
    assert_eq!(labels(expression), ["route", "le", "status", "x"].map(str::to_owned).into());
}
