//! `aeonctl top` where there is no terminal: one table, or JSON.

use aeon_proto::route::Route;
use serde_json::Value;

use crate::{
    common::{Lab, floats, wire::Wire},
    support::{ctl, lab},
};

async fn busy_lab() -> Lab {
    let lab = lab(|_| ()).await;
    let mut wire = Wire::uds(&lab.uds).await;
    for _ in 0..20 {
        wire.ask(Route::FORWARD, r#"{"session":"s"}"#, &floats(&[1.0; 8])).await.ok();
    }
    assert_eq!(wire.ask(Route::FORWARD, "", &[0; 3]).await.status(), 400);
    lab
}

async fn top(arguments: &[String]) -> std::process::Output {
    let arguments: Vec<String> = arguments.to_vec();
    let run = move || ctl(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_table_of_what_is_up_and_what_is_down() {
    let lab = busy_lab().await;
    let up = format!("http://{}", lab.node.http().unwrap());
    let arguments = ["top", "--once", "--admin", &up, "--admin", "http://127.0.0.1:1"].map(str::to_owned);
    let output = top(&arguments).await;
    assert!(output.status.success(), "one is up: {output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("station") && lines[0].contains("out B/tok"), "{text}");
    let cells: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!((cells[0], cells[1]), (&*up, "up"), "{text}");
    // 20 positions of 32 bytes each way, and 3 bytes of a bad request.
    assert_eq!((cells[7], cells[8], cells[10]), ("32.1", "32.0", "1"), "{text}");
    assert!(lines[2].starts_with("http://127.0.0.1:1") && lines[2].contains(" down "), "{text}");
    assert!(lines[3].contains("is down: cannot reach"), "{text}");
    // Without a terminal it is the same, with HEALTH of the frame wire as far as that goes.
    let uds = format!("uds:{}", lab.uds.display());
    let udp = format!("udp:{}", lab.udp());
    let output = top(&["top", "--station", &uds, "--station", &udp].map(str::to_owned)).await;
    let text = String::from_utf8(output.stdout).unwrap();
    for line in text.lines().skip(1) {
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!((cells[1], cells[3], cells[5]), ("up", "-", "-"), "{text}");
    }
    assert_eq!(text.lines().count(), 3, "{text}");
    lab.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_has_all_figures() {
    let lab = busy_lab().await;
    let up = format!("http://{}", lab.node.http().unwrap());
    let output = top(&["top", "--json", "--admin", &up].map(str::to_owned)).await;
    let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &rows[0];
    assert_eq!((&row["address"], &row["up"], &row["sessions"]), (&up.clone().into(), &true.into(), &1.into()));
    assert_eq!((&row["faults"]["bad_request"], &row["layers"]), (&1.into(), &"0..1".into()));
    assert!(row["latency"]["p50_seconds"].as_f64().unwrap() > 0.0, "{row}");
    assert!(row["stages"]["compute"]["p99_seconds"].as_f64().unwrap() > 0.0);
    assert!(row["requests_per_second"].as_f64().unwrap() > 0.0);
    lab.node.stop().await;
    let down = top(&["top", "--json", "--admin", &up].map(str::to_owned)).await;
    assert_eq!(down.status.code(), Some(69), "{down:?}");
    let rows: Value = serde_json::from_slice(&down.stdout).unwrap();
    assert_eq!(rows[0]["up"], false);
    assert_eq!(top(&["top", "--interval", "0"].map(str::to_owned)).await.status.code(), Some(64));
}
