//! Draining and stopping: what is running ends, what is new is refused, and nobody can hold a station up.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::time::{Duration, Instant};

use aeon_proto::route::Route;
use common::{
    Lab, floats, ids,
    slow::{SlowLab, SlowOptions},
    until,
    wire::{Wire, prefixed, request},
    within,
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpStream, UnixStream},
};

fn forward(sequence: u32, mark: f32) -> Vec<u8> {
    request(Route::FORWARD, sequence, "", &floats(&[mark, 0.0]))
}

#[tokio::test(flavor = "multi_thread")]
async fn on_every_carrier_running_work_ends_and_new_work_is_refused() {
    let lab = SlowLab::start(SlowOptions { workers: 3, ..SlowOptions::default() }).await;
    let mut wires = [Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp).await, Wire::udp(lab.udp).await];
    for (n, wire) in wires.iter_mut().enumerate() {
        wire.send(&[forward(1, n as f32)]).await;
    }
    lab.control.until_begun(3).await;
    lab.station.drain();
    let shutdown = lab.shutdown.clone();
    let stopping = tokio::spawn(async move { shutdown.finish(Duration::from_secs(60)).await });
    until("the listeners are gone", async || {
        UnixStream::connect(&lab.uds).await.is_err() && TcpStream::connect(lab.tcp).await.is_err()
    })
    .await;
    for wire in &mut wires {
        let answer = wire.exchange(forward(2, 9.0)).await;
        answer.assert_vent("draining", Route::FORWARD.0, 2, 503);
    }
    assert!(!stopping.is_finished());
    lab.control.open();
    for wire in &mut wires {
        let answer = wire.receive().await.unwrap();
        assert_eq!((answer.sequence, answer.status()), (1, 200));
        if !wire.is_udp() {
            wire.assert_closed("drained").await;
        }
    }
    drop(wires);
    assert!(within("stopping", stopping).await.unwrap(), "all of it ended by itself");
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_that_do_nothing_hold_no_station_up() {
    let lab = Lab::start("identity:16384", |settings| settings.limits.grace = Some(2)).await;
    // Idle ones that stay, half a frame, and replies that nobody reads.
    let mut idle = Vec::new();
    for _ in 0..20 {
        let mut wire = Wire::uds(&lab.uds).await;
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
        idle.push(wire);
    }
    let mut half = TcpStream::connect(lab.tcp()).await.unwrap();
    half.write_all(&[0, 0, 0]).await.unwrap();
    let mut mute = UnixStream::connect(&lab.uds).await.unwrap();
    mute.write_all(&prefixed(&request(Route::EMBED, 1, "", &ids(&[7]))).repeat(500)).await.unwrap();
    let started = Instant::now();
    assert!(!within("stopping", lab.node.stop()).await, "the grace period ran out for the mute one");
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    assert!(!lab.uds.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_station_stops_at_once() {
    let lab = Lab::start("identity:8", |settings| settings.limits.grace = Some(60)).await;
    let mut open = Wire::tcp(lab.tcp()).await;
    assert_eq!(open.ask(Route::HELLO, "", &[]).await.status(), 200);
    let started = Instant::now();
    let closed = tokio::spawn(async move { open.assert_closed("drained").await });
    assert!(within("stopping", lab.node.stop()).await);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    within("the end of the connection", closed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_station_cancels_what_is_running() {
    let lab = SlowLab::start(SlowOptions { workers: 2, ..SlowOptions::default() }).await;
    let mut wires = [Wire::uds(&lab.uds).await, Wire::udp(lab.udp).await];
    for wire in &mut wires {
        wire.send(&[forward(1, 1.0)]).await;
    }
    lab.control.until_begun(2).await;
    lab.shutdown.kill();
    within("stopping", lab.shutdown.finish(Duration::ZERO)).await;
    // The model is let go of without the gate being opened: its work was cancelled.
    until("the work ends", async || lab.control.idle()).await;
    assert!(lab.control.finished().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_starts_on_one_path_have_one_winner() {
    use aeon_station::net::uds::{BindError, UdsOptions, bind};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    for round in 0..5 {
        let starts: Vec<_> = (0..40)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || bind(&path, &UdsOptions::default()))
            })
            .collect();
        let results: Vec<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
        let winners = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!(winners, 1, "round {round}");
        assert!(results.iter().all(|result| matches!(result, Ok(_) | Err(BindError::InUse { .. }))));
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop(results);
        assert!(!path.exists());
    }
}
