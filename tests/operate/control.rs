//! Reload, drain and lists, over HTTP, by signal and by `aeonctl`.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use aeon_proto::route::Route;
use aeon_station::{
    admin::HttpListener,
    control::{Control, Phase},
    net::peer::AllowList,
};
use rustix::process::Signal;
use serde_json::json;

use crate::{
    common::{
        Lab, PATIENCE, floats, ids,
        slow::{SlowLab, SlowOptions},
        wire::{Wire, request},
        within,
    },
    support::{Process, ask, ctl, http, lab, wait},
    toy,
};

fn fp(name: &str) -> String {
    format!("0x{:08x}", aeon_proto::hash::fnv1a32(&toy::basis(name)))
}

async fn with_bases(folder: &tempfile::TempDir) -> Lab {
    lab(|settings| settings.model.bases = Some(folder.path().to_owned())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_says_what_changed_and_a_bad_file_is_named() {
    let folder = toy::folder(&["a", "b"]);
    let lab = with_bases(&folder).await;
    let address = lab.node.http().unwrap();
    let mut status = lab.node.control().status();
    toy::write(folder.path(), "c", &toy::basis("c"));
    fs::remove_file(folder.path().join("b.pcab")).unwrap();
    let done = ask(address, "POST /reload").await;
    assert_eq!(done.status, 200, "{done:?}");
    let json = done.json();
    assert_eq!((&json["added"], &json["withdrawn"]), (&json!([fp("c")]), &json!([fp("b")])));
    assert_eq!((&json["kept"], &json["methodologies"], &json["reloaded"]), (&json!(1), &json!(1), &json!(true)));
    let published = within("a status", status.wait_for(|status| status.last_reload.is_some())).await.unwrap().clone();
    assert_eq!(published.last_reload.unwrap().unwrap().to_string(), json["text"].as_str().unwrap());

    fs::write(folder.path().join("bad.pcab"), "no basis").unwrap();
    let refused = ask(address, "POST /reload").await;
    let json = refused.json();
    assert_eq!((refused.status, &json["kept"], &json["reloaded"]), (422, &json!(2), &json!(false)));
    assert!(json["error"].as_str().unwrap().contains("bad.pcab"), "{json}");
    let failed = |status: &aeon_station::control::Status| matches!(status.last_reload, Some(Err(_)));
    let published = within("a status", status.wait_for(failed)).await.unwrap().clone();
    assert!(published.last_reload.unwrap().unwrap_err().cause.contains("bad.pcab"));
    let bases = ask(address, "GET /bases").await.json();
    let list: Vec<_> = bases["bases"].as_array().unwrap().iter().map(|basis| basis["basis_fp"].clone()).collect();
    assert_eq!(list, [json!(fp("a")), json!(fp("c"))], "the old set stays in use");
    assert_eq!(bases["methodologies"][0]["name"], "toy");
    assert!(!bases.to_string().contains(folder.path().to_str().unwrap()), "no folders: {bases}");
    let metrics = ask(address, "GET /metrics").await.text;
    for line in [
        "aeon_reloads_total{result=\"done\"} 1\n",
        "aeon_reloads_total{result=\"failed\"} 1\n",
        "aeon_last_reload_failed 1\n",
    ] {
        assert!(metrics.contains(line), "{line}");
    }
    fs::remove_file(folder.path().join("bad.pcab")).unwrap();
    assert_eq!(ask(address, "POST /reload").await.status, 200);
    assert!(ask(address, "GET /metrics").await.text.contains("aeon_last_reload_failed 0\n"));
    assert_eq!(lab.node.control().status().borrow().phase, Phase::Serving);
    lab.node.stop().await;
    // Without a folder there is nothing to load, which is no fault.
    let plain = crate::support::lab(|_| ()).await;
    let answer = ask(plain.node.http().unwrap(), "POST /reload").await.json();
    assert_eq!(answer["reloaded"], false);
    assert!(answer["text"].as_str().unwrap().contains("--bases"), "{answer}");
    plain.node.stop().await;
}

/// Good and bad reloads while requests run that use the bases: none fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_notice_nothing_of_reloads() {
    let folder = toy::folder(&["a"]);
    let lab = with_bases(&folder).await;
    let address = lab.node.http().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let accept = format!(r#"{{"accept":["pcar"],"accept_basis":["{}"]}}"#, fp("a"));
    let mut clients = Vec::new();
    for mut wire in lab.wires().await {
        let (over, accept) = (Arc::clone(&over), accept.clone());
        clients.push(tokio::spawn(async move {
            let mut count = 0_u64;
            while !over.load(Ordering::Relaxed) {
                let answer = wire.ask(Route::EMBED, &accept, &ids(&[1, 2])).await;
                assert_eq!((answer.status(), answer.meta["body"].as_str()), (200, Some("pcar")), "{answer:?}");
                let answer = wire.ask(Route::FORWARD_PCA, "", &answer.body).await;
                assert_eq!(answer.status(), 200, "{answer:?}");
                count += 1;
            }
            count
        }));
    }
    for round in 0..20 {
        let bad = folder.path().join("bad.pcab");
        if round % 2 == 0 {
            toy::write(folder.path(), "more", &toy::basis(&format!("more-{round}")));
            assert_eq!(ask(address, "POST /reload").await.status, 200);
        } else {
            fs::write(&bad, "no basis").unwrap();
            assert_eq!(ask(address, "POST /reload").await.status, 422);
            fs::remove_file(&bad).unwrap();
        }
    }
    over.store(true, Ordering::Relaxed);
    for client in clients {
        assert!(within("a client", client).await.unwrap() > 0);
    }
    lab.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_and_peers_from_elsewhere_change_nothing() {
    let lab = lab(|settings| settings.listen.admin_allow = Some(vec!["10.0.0.0/8".to_owned()])).await;
    let address = lab.node.http().unwrap();
    for head in ["POST /reload", "POST /drain"] {
        let answer = ask(address, head).await;
        assert_eq!(answer.status, 403, "{head}");
        assert!(answer.json()["error"].as_str().unwrap().contains("admin-allow"));
    }
    for head in ["GET /metrics", "GET /bases", "GET /sessions"] {
        assert_eq!(ask(address, head).await.status, 200, "{head}");
    }
    lab.node.stop().await;
    let lab = crate::support::lab(|_| ()).await;
    let address = lab.node.http().unwrap();
    for head in ["POST /drain", "POST /reload", "POST /amplituhedron/replay", "POST /amplituhedron/capture"] {
        let answer = ask(address, &format!("{head}\nOrigin: http://page.example")).await;
        assert_eq!(answer.status, 403, "{head}");
        assert!(answer.json()["error"].as_str().unwrap().contains("Origin"));
    }
    for head in ["GET /drain", "GET /reload", "POST /metrics", "PUT /bases"] {
        assert_eq!(ask(address, head).await.status, 405, "{head}");
    }
    assert_eq!(ask(address, "GET /ready\nOrigin: http://page.example").await.status, 200);
    assert!(!lab.node.station().is_draining());
    lab.node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_listed_without_their_names() {
    let lab = lab(|_| ()).await;
    let mut wire = Wire::uds(&lab.uds).await;
    for (session, positions) in [("first-secret", 2), ("second-secret", 3)] {
        let meta = format!(r#"{{"session":"{session}"}}"#);
        wire.ask(Route::FORWARD, &meta, &floats(&vec![1.0; positions * 8])).await.ok();
    }
    let list = ask(lab.node.http().unwrap(), "GET /sessions").await.json();
    assert!(!list.to_string().contains("secret"), "{list}");
    assert_eq!((&list["count"], &list["max_count"]), (&json!(2), &json!(4096)));
    let rows = list["sessions"].as_array().unwrap();
    let positions: Vec<_> = rows.iter().map(|row| row["positions"].as_u64().unwrap()).collect();
    assert_eq!(positions, [3, 2], "the one used last first");
    let tag = |n: usize| rows[n]["session"].as_str().unwrap();
    assert!(tag(0).len() == 12 && tag(0) != tag(1));
    lab.node.stop().await;
}

#[test]
fn aeonctl_drains_a_node_and_it_exits_with_0() {
    let mut node = Process::start(&["--model", "identity:8"], &[]);
    let output = ctl(&["drain", "--admin", &node.admin()]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("draining, 0 requests in flight"), "{output:?}");
    assert_eq!(wait(&mut node.child).code(), Some(0));
    assert!(!node.uds.exists());
    let gone = ctl(&["drain", "--admin", &node.admin()]);
    assert_eq!(gone.status.code(), Some(69), "{gone:?}");
    let wrong = ctl(&["drain", "--admin", "https://127.0.0.1:1"]);
    assert_eq!(wrong.status.code(), Some(64), "{wrong:?}");
}

/// New work is refused from the moment of the request on, work in flight ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_over_http_is_that_of_a_signal() {
    let lab = lab(|_| ()).await;
    let mut wire = Wire::uds(&lab.uds).await;
    wire.ask(Route::FORWARD, "", &floats(&[1.0; 8])).await.ok();
    let answer = ask(lab.node.http().unwrap(), "POST /drain").await;
    assert_eq!((answer.status, &answer.json()["draining"]), (202, &json!(true)));
    let refused = wire.ask(Route::FORWARD, "", &floats(&[1.0; 8])).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.meta["retry_after_ms"].as_u64().is_some());
    assert_eq!(ask(lab.node.http().unwrap(), "GET /ready").await.status, 503);
    within("the request to stop", lab.node.control().drain_requested()).await;
    assert_eq!(lab.node.control().status().borrow().phase, Phase::Draining);
    assert!(lab.node.stop().await);
}

#[test]
fn aeonctl_and_a_signal_reload_and_a_bad_file_is_in_log_and_answer() {
    let folder = toy::folder(&["a"]);
    let bases = folder.path().to_str().unwrap().to_owned();
    let node = Process::start(&["--model", "identity:8", "--bases", &bases], &[]);
    toy::write(folder.path(), "b", &toy::basis("b"));
    let done = ctl(&["reload", "--admin", &node.admin()]);
    assert!(done.status.success(), "{done:?}");
    let added = format!("1 added {}", fp("b"));
    assert!(String::from_utf8_lossy(&done.stdout).contains(&added), "{done:?}");
    node.line_with(&["WARN", &added]);
    fs::write(folder.path().join("bad.pcab"), "no basis").unwrap();
    // Of several nodes each is asked, whatever the others answer.
    let bad = ctl(&["reload", "--admin", &node.admin(), "--admin", &node.admin(), "--json"]);
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    let answers: serde_json::Value = serde_json::from_slice(&bad.stdout).unwrap();
    assert_eq!(answers.as_array().unwrap().len(), 2);
    assert!(answers[1]["answer"]["error"].as_str().unwrap().contains("bad.pcab"));
    assert!(String::from_utf8_lossy(&bad.stderr).contains("bad.pcab"), "{bad:?}");
    node.line_with(&["ERROR", "the old ones stay", "bad.pcab"]);
    fs::remove_file(folder.path().join("bad.pcab")).unwrap();
    fs::remove_file(folder.path().join("b.pcab")).unwrap();
    node.signal(Signal::HUP);
    node.line_with(&["WARN", &format!("1 withdrawn {}", fp("b"))]);
    let metrics = http(node.http, "GET /metrics").text;
    assert!(metrics.contains("aeon_reloads_total{result=\"done\"} 2\n"), "{metrics}");
    assert!(metrics.contains("aeon_reloads_total{result=\"failed\"} 2\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_in_flight_ends_while_a_node_drains() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let control = Control::new(Arc::clone(&lab.station));
    let listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), AllowList::default()).await.unwrap();
    let address = listener.local_addr().unwrap();
    lab.shutdown.spawn(listener.run(control.clone(), PATIENCE, lab.shutdown.clone()));
    let mut wire = Wire::uds(&lab.uds).await;
    wire.send(&[request(Route::FORWARD, 1, "", &floats(&[7.0, 0.0]))]).await;
    lab.control.until_begun(1).await;
    let answer = ask(address, "POST /drain").await;
    assert_eq!((answer.status, answer.json()), (202, json!({"draining": true, "in_flight": 1})));
    let refused = wire.exchange(request(Route::FORWARD, 2, "", &floats(&[8.0, 0.0]))).await;
    assert_eq!((refused.sequence, refused.status()), (2, 503));
    within("the request to stop", control.drain_requested()).await;
    lab.control.open();
    let done = wire.receive().await.unwrap();
    assert_eq!((done.sequence, done.status(), done.body), (1, 200, floats(&[7.0, 0.0])));
    assert!(lab.shutdown.finish(PATIENCE).await);
}
