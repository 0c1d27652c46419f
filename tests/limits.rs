//! Limits: the largest frames, small datagrams, the end of the context, idle peers, credentials, memory.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use aeon_proto::{payload::MetaWriter, route::Route};
use aeon_station::{
    client::{
        Client, ClientOptions, Pipeline, StationAddress,
        generate::{GenerateOptions, Stop, generate},
        sampler::Sampling,
    },
    config::Settings,
};
use common::{
    Lab, floats,
    slow::{SlowLab, SlowOptions},
    wire::{Wire, prefixed, raw_frame, request},
    within,
};
use tokio::{io::AsyncWriteExt, net::UnixStream};

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_frames_go_both_ways_on_streams() {
    let lab = Lab::start("identity:1024", |settings| settings.listen.bare_frames = Some(true)).await;
    let body: Vec<u8> = (0..4095 * 1024_u32).flat_map(|n| (n as f32).to_le_bytes()).collect();
    for mut wire in [Wire::uds(&lab.uds).await, Wire::bare_tcp(lab.tcp()).await] {
        for _ in 0..2 {
            let answer = wire.ask(Route::FORWARD, "", &body).await;
            assert_eq!(answer.status(), 200, "{}", answer.text);
            assert!(answer.body == body, "16 MiB came back changed");
        }
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
    }
    // The largest frame that there can be is taken too, though no residuals fill it.
    let mut wire = Wire::uds(&lab.uds).await;
    let answer = wire.ask(Route::FORWARD, "", &vec![0; 0xff_ffff - 2]).await;
    assert_eq!(answer.status(), 400);
    assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_splits_what_no_datagram_holds() {
    let edit = |settings: &mut Settings| settings.limits.max_datagram = Some(2048);
    let lab = Lab::start("demo", edit).await;
    let other = Lab::start("demo", |settings| settings.model.layers = Some("0..3".into())).await;
    let last = Lab::start("demo", |settings| {
        settings.model.layers = Some("3..6".into());
        edit(settings);
    })
    .await;
    let prompt: Vec<u32> = (0..200).map(|n| (n * 37 + 5) % 1024).collect();
    let options = GenerateOptions {
        max_tokens: 8,
        sampling: Sampling { temperature: 0.0, top_p: 1.0, seed: 0 },
        top_k: 1,
        stop: Vec::new(),
    };
    let mut texts = Vec::new();
    for addresses in [
        vec![lab.address_uds()],
        vec![lab.address_udp()],
        vec![other.address_udp(), last.address_udp()],
        vec![other.address_uds(), last.address_udp()],
    ] {
        let mut pipeline = Pipeline::connect(&addresses, &ClientOptions::default()).await.unwrap();
        let generated = within("a text", generate(&mut pipeline, &prompt, &options, |_| true)).await.unwrap();
        let traffic = pipeline.stages()[0].traffic;
        assert_eq!(traffic.positions, 200 + 7, "{addresses:?}");
        texts.push(generated.tokens);
    }
    assert!(texts.iter().all(|text| *text == texts[0] && text.len() == 8), "{texts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_ends_where_the_context_does() {
    let lab = Lab::start("demo", |_| ()).await;
    // Over UDP the prompt has to be split as well.
    for address in [lab.address_tcp(), lab.address_udp()] {
        let mut pipeline = Pipeline::connect(&[address], &ClientOptions::default()).await.unwrap();
        let prompt: Vec<u32> = (0..1020).map(|n| (n * 37 + 5) % 1024).collect();
        let options = GenerateOptions {
            max_tokens: 100,
            sampling: Sampling { temperature: 1.0, top_p: 1.0, seed: 3 },
            top_k: 1000,
            stop: Vec::new(),
        };
        let generated = within("a text", generate(&mut pipeline, &prompt, &options, |_| true)).await.unwrap();
        match generated.stop {
            Stop::ContextFull { context_len: 1024 } => assert_eq!(generated.tokens.len(), 5),
            Stop::EndOfText(_) => assert!(generated.tokens.len() < 5),
            other => panic!("{other:?}"),
        }
    }
    let mut wire = Wire::uds(&lab.uds).await;
    let meta = r#"{"session":"c","pos":0,"in":"ids","out":"token"}"#;
    let answer = wire.ask(Route::FORWARD, meta, &[0; 4 * 1025]).await;
    assert_eq!((answer.status(), answer.meta["context_len"].as_u64()), (413, Some(1024)), "{}", answer.text);
    assert_eq!(wire.ask(Route::FORWARD, meta, &[0; 4 * 1024]).await.status(), 200);
    let answer = wire.ask(Route::FORWARD, r#"{"session":"c","in":"ids"}"#, &[0; 4]).await;
    assert_eq!((answer.status(), answer.meta["context_len"].as_u64()), (413, Some(1024)), "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_requests_is_closed_in_time_but_not_one_that_waits() {
    let mut options = SlowOptions::default();
    options.connection.idle_timeout = Duration::from_millis(300);
    let lab = SlowLab::start(options).await;
    let (mut idle, mut never, mut waiting) =
        (Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp).await, Wire::uds(&lab.uds).await);
    assert_eq!(idle.ask(Route::HELLO, "", &[]).await.status(), 200);
    waiting.send(&[request(Route::FORWARD, 1, "", &floats(&[1.0, 0.0]))]).await;
    idle.assert_closed("idle").await;
    never.assert_closed("never used").await;
    // By now the one that waits has waited for as long as the idle one.
    lab.control.allow(1);
    assert_eq!(waiting.receive().await.unwrap().status(), 200);
    waiting.assert_closed("idle in the end").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_listed_is_told_so_on_a_unix_socket() {
    let own = rustix::process::getuid().as_raw();
    for (uid, is_welcome) in [(own, true), (own + 1, false)] {
        let lab = Lab::start("identity:8", |settings| settings.listen.uds_allow_uid = Some(vec![uid])).await;
        let mut wire = Wire::uds(&lab.uds).await;
        if is_welcome {
            assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
        } else {
            wire.receive().await.unwrap().assert_vent("not listed", 0, 0, 403);
            wire.assert_closed("not listed").await;
            let client = Client::connect(&lab.address_tcp(), ClientOptions::default()).await.unwrap();
            assert!(client.hello().await.is_ok());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_said_and_not_waited_for() {
    let mut options = SlowOptions::default();
    options.limits.queue.items = 3;
    let lab = SlowLab::start(options).await;
    for mut wire in [Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp).await, Wire::udp(lab.udp).await] {
        let begun = lab.control.begun().len();
        let frames: Vec<_> = (0..5).map(|n| request(Route::FORWARD, n, "", &floats(&[1.0, 0.0]))).collect();
        wire.send(&frames).await;
        for sequence in [3, 4] {
            let answer = wire.receive().await.unwrap();
            answer.assert_vent("overloaded", Route::FORWARD.0, sequence, 503);
            assert!(answer.meta["retry_after_ms"].as_u64().unwrap() > 0);
        }
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
        lab.control.until_begun(begun + 1).await;
        lab.control.allow(3);
        for sequence in [0, 1, 2] {
            let answer = wire.receive().await.unwrap();
            assert_eq!((answer.sequence, answer.status()), (sequence, 200));
        }
    }
    // A client comes back by itself when there is room: here three others have one request each in the queue.
    let mut others = vec![Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp).await, Wire::udp(lab.udp).await];
    for wire in &mut others {
        wire.send(&[request(Route::FORWARD, 0, "", &floats(&[1.0, 0.0]))]).await;
    }
    let queued = async || common::health(&mut Wire::uds(&lab.uds).await).await["queued"] == 3;
    common::until("the queue is full", queued).await;
    let address = StationAddress::Tcp(lab.tcp.to_string());
    let client = Client::connect(&address, ClientOptions::default()).await.unwrap();
    let body = floats(&[5.0, 0.0]);
    let asking =
        tokio::spawn(async move { client.request(Route::FORWARD, |_: &mut MetaWriter<'_, '_>| (), &body).await });
    let errors = async || common::health(&mut Wire::uds(&lab.uds).await).await["errors"].as_u64().unwrap();
    let before = errors().await;
    common::until("the client was refused", async || errors().await > before || asking.is_finished()).await;
    lab.control.open();
    assert!(within("the client", asking).await.unwrap().is_ok());
}

/// A process that ends with the test, however that ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kilobytes that a process holds, by the system's account.
fn resident_kb(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn announced_lengths_and_idle_connections_cost_next_to_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut node = Process(
        Command::new(env!("CARGO_BIN_EXE_aeon-node"))
            .args(["--uds", socket.to_str().unwrap(), "--model", "identity:8"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut line = String::new();
    BufReader::new(node.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let mut wire = Wire::uds(&socket).await;
    assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
    let before = resident_kb(node.0.id());
    let header = prefixed(&raw_frame(3, 1, 0, &[0; 0xff_ffff]))[..14].to_vec();
    let mut open = Vec::new();
    for n in 0..1000 {
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        if n % 2 == 0 {
            stream.write_all(&header).await.unwrap();
        } else {
            stream.write_all(&prefixed(&request(Route::HELLO, 1, "", &[]))).await.unwrap();
        }
        open.push(stream);
    }
    let accepted = async || common::health(&mut wire).await["connections"].as_u64().unwrap() > 1000;
    common::until("all are accepted", accepted).await;
    let grown = resident_kb(node.0.id()).saturating_sub(before);
    assert!(grown < 20_000, "{grown} kB for a thousand connections");
    drop(open);
}
