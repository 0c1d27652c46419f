//! Stream connections: pipelining, backpressure, cancels, slow and broken peers, and the special modes.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{collections::HashSet, time::Duration};

use aeon_proto::route::Route;
use aeon_station::{net::connection::ConnectionOptions, station::limits::Limits};
use common::{
    Bystander, Lab, floats, health, ids, read_ids,
    slow::{SlowLab, SlowOptions},
    until,
    wire::{Wire, cancel, payload, prefixed, raw_frame, request},
    within,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use xxhash_rust::xxh64::xxh64;

fn forward(sequence: u32, meta: &str, mark: f32) -> Vec<u8> {
    request(Route::FORWARD, sequence, meta, &floats(&[mark, 0.0]))
}

fn session(name: &str, pos: usize) -> String {
    format!(r#"{{"session":"{name}","pos":{pos}}}"#)
}

async fn slow(edit: impl FnOnce(&mut SlowOptions)) -> SlowLab {
    let mut options = SlowOptions::default();
    edit(&mut options);
    SlowLab::start(options).await
}

/// Waits until a station says so in HEALTH, on a connection of its own.
async fn until_health(lab: &SlowLab, key: &str, value: u64) {
    let mut wire = Wire::uds(&lab.uds).await;
    until(&format!("{key} {value}"), async || health(&mut wire).await[key] == value).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cheap_routes_overtake_work_and_replies_come_as_they_are_done() {
    let lab = slow(|options| options.workers = 2).await;
    for tcp in [false, true] {
        let mut wire = if tcp { Wire::tcp(lab.tcp).await } else { Wire::uds(&lab.uds).await };
        let begun = lab.control.begun().len();
        wire.send(&[forward(1, "", 1.0), forward(2, "", 2.0), request(Route::HELLO, 3, "", &[])]).await;
        assert_eq!(wire.receive().await.unwrap().sequence, 3);
        lab.control.until_begun(begun + 2).await;
        wire.send(&[request(Route::HEALTH, 4, "", &[])]).await;
        assert_eq!(wire.receive().await.unwrap().sequence, 4);
        // The same sequence on another route is another request.
        wire.send(&[request(Route::HELLO, 1, "", &[])]).await;
        assert_eq!(wire.receive().await.unwrap().stream_id, Route::HELLO.0);
        lab.control.allow(2);
        let mut done = [wire.receive().await.unwrap(), wire.receive().await.unwrap()];
        done.sort_by_key(|answer| answer.sequence);
        assert_eq!(done.each_ref().map(|answer| answer.sequence), [1, 2]);
        assert_eq!(done.each_ref().map(|answer| answer.body.clone()), [floats(&[1.0, 0.0]), floats(&[2.0, 0.0])]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_are_in_flight_then_the_reader_stops_but_cancels_are_read() {
    let lab = slow(|_| ()).await;
    let mut wire = Wire::uds(&lab.uds).await;
    let frames: Vec<_> = (0..100).map(|n| forward(n, "", n as f32)).collect();
    wire.send(&frames).await;
    until_health(&lab, "queued", 64).await;
    // One that waits behind the 64, one that waits in the queue, and the one that runs.
    wire.send(&[cancel(Route::FORWARD, 80)]).await;
    let first = wire.receive().await.unwrap();
    first.assert_vent("parked", Route::FORWARD.0, 80, 499);
    lab.control.until_begun(1).await;
    wire.send(&[cancel(Route::FORWARD, 40), cancel(Route::FORWARD, 0)]).await;
    wire.receive().await.unwrap().assert_vent("running", Route::FORWARD.0, 0, 499);
    lab.control.open();
    let mut seen = HashSet::from([80, 0]);
    for _ in 0..98 {
        let answer = wire.receive().await.unwrap();
        assert!(seen.insert(answer.sequence), "{} twice", answer.sequence);
        assert_eq!(answer.status(), if answer.sequence == 40 { 499 } else { 200 }, "{}", answer.sequence);
    }
    assert_eq!(health(&mut wire).await["queued"], 0);
    assert!(!lab.control.finished().contains(&40.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_request_leaves_its_session_where_it_was() {
    let lab = slow(|_| ()).await;
    for mut wire in [Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp).await, Wire::udp(lab.udp).await] {
        let name = wire.name();
        let begun = lab.control.begun().len();
        lab.control.allow(3);
        for pos in 0..3 {
            assert_eq!(wire.ask(Route::FORWARD, &session(name, pos), &floats(&[1.0, 0.0])).await.status(), 200);
        }
        // One runs, one waits in the queue.
        let (running, queued) = (wire.next_sequence(), wire.next_sequence());
        wire.send(&[forward(running, &session(name, 3), 5.0), forward(queued, &session(name, 4), 6.0)]).await;
        lab.control.until_begun(begun + 4).await;
        wire.send(&[cancel(Route::FORWARD, queued), cancel(Route::FORWARD, running)]).await;
        wire.receive().await.unwrap().assert_vent("running", Route::FORWARD.0, running, 499);
        wire.receive().await.unwrap().assert_vent("queued", Route::FORWARD.0, queued, 499);
        assert_eq!(lab.control.begun().len(), begun + 4, "what was cancelled in the queue never ran");
        let gap = wire.ask(Route::FORWARD, &session(name, 4), &floats(&[1.0, 0.0])).await;
        assert_eq!((gap.status(), gap.meta["expected_pos"].as_u64()), (409, Some(3)), "{}", gap.text);
        lab.control.allow(1);
        assert_eq!(wire.ask(Route::FORWARD, &session(name, 3), &floats(&[1.0, 0.0])).await.ok()["pos"], 3);
        // A cancel of nothing in flight says nothing.
        wire.send(&[cancel(Route::FORWARD, running), cancel(Route(0x7777), 1)]).await;
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_in_the_head_leaves_the_session_where_it_was() {
    let lab = slow(|options| options.slow_head = true).await;
    let mut wire = Wire::uds(&lab.uds).await;
    lab.control.allow(1);
    let token = r#"{"session":"s","pos":0,"out":"token"}"#;
    assert_eq!(wire.ask(Route::FORWARD, token, &floats(&[7.0, 0.0])).await.status(), 200);
    wire.send(&[forward(9, r#"{"session":"s","pos":1,"out":"token"}"#, 8.0)]).await;
    lab.control.until_begun(2).await;
    wire.send(&[cancel(Route::FORWARD, 9)]).await;
    wire.receive().await.unwrap().assert_vent("in the head", Route::FORWARD.0, 9, 499);
    let gap = wire.ask(Route::FORWARD, &session("s", 2), &floats(&[1.0, 0.0])).await;
    assert_eq!((gap.status(), gap.meta["expected_pos"].as_u64()), (409, Some(1)), "{}", gap.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_frame_behind_backpressure_is_not_the_peers_fault() {
    // While the station itself does not read, the clock of a half frame must stand still.
    let edit = |options: &mut SlowOptions| options.connection.half_frame_timeout = Duration::from_millis(300);
    let lab = slow(edit).await;
    let mut wire = Wire::uds(&lab.uds).await;
    let body = floats(&vec![1.0; 2 * 512]);
    let frames: Vec<_> = (0..200).map(|n| request(Route::FORWARD, n, "", &body)).collect();
    let bytes: Vec<u8> = frames.iter().flat_map(|frame| prefixed(frame)).collect();
    let (mut read, mut write) = tokio::io::split(UnixStream::connect(&lab.uds).await.unwrap());
    let writer = tokio::spawn(async move { write.write_all(&bytes).await.map(|()| write) });
    until_health(&lab, "queued", 64).await;
    // Longer than the limit: this waits for the passing of time itself, which the fault needs.
    tokio::time::sleep(Duration::from_millis(900)).await;
    lab.control.open();
    let mut seen = 0;
    let mut prefix = [0; 4];
    while seen < 200 {
        within("a reply", read.read_exact(&mut prefix)).await.unwrap();
        let mut frame = vec![0; u32::from_be_bytes(prefix) as usize];
        within("a reply", read.read_exact(&mut frame)).await.unwrap();
        assert_eq!(frame[6], 0x30, "{}", String::from_utf8_lossy(&frame[12..120.min(frame.len())]));
        seen += 1;
    }
    drop(within("writing", writer).await.unwrap());
    assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_costs_a_bounded_amount_and_nobody_else_anything() {
    // Each 32-byte request has a reply of 64 KiB: 100 MB of replies are asked for.
    let lab = Lab::start("identity:16384", |_| ()).await;
    let mut other = Bystander::new(Wire::tcp(lab.tcp()).await, 16_384);
    let mut mute = UnixStream::connect(&lab.uds).await.unwrap();
    let frame = prefixed(&request(Route::EMBED, 1, "", &ids(&[7])));
    let bytes = frame.repeat(1600);
    within("sending", mute.write_all(&bytes)).await.unwrap();
    let mut handled = 0;
    let mut same = 0;
    until("the station stops", async || {
        let now = lab.health().await["requests"].as_u64().unwrap();
        same = if now == handled + 1 { same + 1 } else { 0 };
        handled = now;
        same > 20
    })
    .await;
    other.go_on("a mute client").await;
    let requests = lab.health().await["requests"].as_u64().unwrap();
    let mute_requests = requests.saturating_sub(same + 30);
    assert!(mute_requests < 200, "{requests} requests handled of 1600 whose replies nobody reads");
    // When it reads at last, every reply is there.
    let mut prefix = [0; 4];
    let mut buffer = vec![0; 70_000];
    for _ in 0..1600 {
        within("a reply", mute.read_exact(&mut prefix)).await.unwrap();
        let len = u32::from_be_bytes(prefix) as usize;
        within("a reply", mute.read_exact(&mut buffer[..len])).await.unwrap();
        assert_eq!(buffer[6], 0x30);
    }
    other.go_on("a client that woke up").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_reads_is_let_go_in_the_end() {
    let edit = |options: &mut SlowOptions| {
        options.is_shut = false;
        options.connection.write_timeout = Duration::from_millis(200);
    };
    let lab = slow(edit).await;
    let mut mute = UnixStream::connect(&lab.uds).await.unwrap();
    let frame = prefixed(&request(Route::HEALTH, 1, "", &[]));
    // Ends with an error when the station has closed the connection.
    let sent = within("sending", async { while mute.write_all(&frame).await.is_ok() {} });
    sent.await;
    assert_eq!(Wire::uds(&lab.uds).await.ask(Route::HELLO, "", &[]).await.status(), 200);
}

/// Frames whose payload says its own hash, and a reply that must be the same bytes.
#[tokio::test(flavor = "multi_thread")]
async fn one_byte_at_a_time_among_other_activity_loses_nothing() {
    let lab = Lab::start("identity:2", |_| ()).await;
    let mut others = Vec::new();
    for _ in 0..2 {
        let uds = lab.uds.clone();
        others.push(tokio::spawn(async move {
            let mut wire = Wire::uds(&uds).await;
            for n in 0..1500_u32 {
                let body = floats(&[n as f32, 1.0]);
                assert_eq!(wire.ask(Route::FORWARD, "", &body).await.body, body);
            }
        }));
    }
    for (count, chunk) in [(1500_u32, 1), (2000, 3), (2000, 17)] {
        let stream = UnixStream::connect(&lab.uds).await.unwrap();
        let (read, mut write) = tokio::io::split(stream);
        let body = |n: u32| {
            let hash = xxh64(&n.to_le_bytes(), 0);
            floats(&[(hash & 0xffff) as f32, (hash >> 16 & 0xffff) as f32])
        };
        let bytes: Vec<u8> = (0..count).flat_map(|n| prefixed(&request(Route::FORWARD, n, "", &body(n)))).collect();
        let writer = tokio::spawn(async move {
            for part in bytes.chunks(chunk) {
                write.write_all(part).await.unwrap();
                if part[0] % 8 == 0 {
                    tokio::task::yield_now().await;
                }
            }
            write
        });
        let mut wire = Wire::stream("dribble", tokio::io::join(read, tokio::io::sink()), true);
        for n in 0..count {
            let answer = wire.receive().await.unwrap();
            assert_eq!((answer.sequence, answer.flags), (n, 0x30), "chunks of {chunk}");
            assert_eq!(answer.body, body(n), "frame {n} in chunks of {chunk}");
        }
        within("the writer", writer).await.unwrap();
    }
    for other in others {
        within("another client", other).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_sending_still_gets_its_replies() {
    let lab = slow(|_| ()).await;
    for tcp in [false, true] {
        let mut wire = if tcp { Wire::tcp(lab.tcp).await } else { Wire::uds(&lab.uds).await };
        let begun = lab.control.begun().len();
        wire.send(&(0..70).map(|n| forward(n, "", n as f32)).collect::<Vec<_>>()).await;
        wire.shutdown().await;
        lab.control.until_begun(begun + 1).await;
        lab.control.allow(70);
        for n in 0..70 {
            assert_eq!(wire.receive().await.unwrap().sequence, n);
        }
        wire.assert_closed("after the last reply").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_connection_takes_its_work_along() {
    let lab = slow(|_| ()).await;
    let mut good = Wire::uds(&lab.uds).await;
    // Few, more than may be in flight, and so many that the station reads no more.
    for (round, count, width) in [(0, 10, 1), (1, 80, 1), (2, 80, 500)] {
        let mut wire = Wire::uds(&lab.uds).await;
        let body = floats(&vec![1.0; 2 * width]);
        let frames: Vec<_> = (0..count).map(|n| request(Route::FORWARD, n, "", &body)).collect();
        wire.send(&frames).await;
        until_health(&lab, "queued", u64::from(count.min(64))).await;
        drop(wire);
        until_health(&lab, "queued", 0).await;
        assert_eq!(lab.control.finished().len(), round, "nobody waits for it");
        lab.control.allow(1);
        good.send(&[forward(500, "", 3.0)]).await;
        assert_eq!(good.receive().await.unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_tcp_connection_takes_its_work_along() {
    let lab = slow(|_| ()).await;
    let stream = tokio::net::TcpStream::connect(lab.tcp).await.unwrap();
    // Closing sends RST, as the end of a crashed process with unread input does.
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    let mut wire = Wire::stream("tcp", stream, true);
    wire.send(&(0..10).map(|n| forward(n, "", n as f32)).collect::<Vec<_>>()).await;
    until_health(&lab, "queued", 10).await;
    drop(wire);
    until_health(&lab, "queued", 0).await;
    assert!(lab.control.finished().is_empty(), "nobody waits for it");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_ends_in_exactly_one_reply() {
    let lab = slow(|options| {
        options.is_shut = false;
        options.workers = 2;
        options.limits = Limits::default();
        options.limits.queue.items = 20;
    })
    .await;
    let mut tasks = Vec::new();
    for client in 0..4_u32 {
        let mut wire = if client % 2 == 0 { Wire::uds(&lab.uds).await } else { Wire::tcp(lab.tcp).await };
        tasks.push(tokio::spawn(async move {
            let mut frames = Vec::new();
            for n in 0..1000_u32 {
                let name = format!(r#"{{"session":"s{}-{}","pos":0}}"#, client, n % 7);
                frames.push(match n % 5 {
                    0 => request(Route::HELLO, n, "", &[]),
                    1 => request(Route(0x7777), n, "", &[]),
                    2 => forward(n, &name, n as f32),
                    3 => forward(n, "", f32::NAN),
                    _ => forward(n, "", n as f32),
                });
                if n % 3 == 0 {
                    frames.push(cancel(Route::FORWARD, n.saturating_sub(3)));
                }
            }
            for frames in frames.chunks(50) {
                wire.send(frames).await;
            }
            let mut seen = HashSet::new();
            let (mut ok, mut refused) = (0, 0);
            for _ in 0..1000 {
                let answer = wire.receive().await.unwrap();
                assert!(seen.insert(answer.sequence), "{} twice", answer.sequence);
                match answer.status() {
                    200 => ok += 1,
                    404 | 422 | 499 | 503 => refused += 1,
                    other => panic!("{other}: {}", answer.text),
                }
            }
            wire.shutdown().await;
            wire.assert_closed("nothing more").await;
            assert!(ok >= 200 && refused >= 400, "{ok} {refused}");
        }));
    }
    for task in tasks {
        within("a client", task).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_connection_too_many_gets_a_vent_and_the_others_go_on() {
    let lab = Lab::start("identity:8:100", |settings| settings.limits.max_connections = Some(3)).await;
    let mut open = vec![Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp()).await, Wire::uds(&lab.uds).await];
    for wire in &mut open {
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
    }
    for tcp in [false, true] {
        let mut wire = if tcp { Wire::tcp(lab.tcp()).await } else { Wire::uds(&lab.uds).await };
        let vent = wire.receive().await.unwrap();
        vent.assert_vent("one too many", 0, 0, 503);
        assert!(vent.meta["retry_after_ms"].as_u64().unwrap() > 0);
        wire.assert_closed("one too many").await;
    }
    assert_eq!(health(&mut open[0]).await["connections_refused"], 2);
    // UDP is no connection, and a place that becomes free is given away again.
    assert_eq!(Wire::udp(lab.udp()).await.ask(Route::HELLO, "", &[]).await.status(), 200);
    open.pop();
    until("a free place", async || {
        let mut wire = Wire::uds(&lab.uds).await;
        wire.send(&[request(Route::HELLO, 5, "", &[])]).await;
        wire.receive().await.is_some_and(|answer| answer.status() == 200)
    })
    .await;
    for wire in &mut open {
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bare_frames_are_spoken_on_tcp() {
    let lab = Lab::start("identity:8:100", |settings| settings.listen.bare_frames = Some(true)).await;
    let mut wire = Wire::bare_tcp(lab.tcp()).await;
    let body = floats(&[1.0; 8]);
    wire.send(&(0..50).map(|n| request(Route::FORWARD, n, "", &body)).collect::<Vec<_>>()).await;
    for n in 0..50 {
        let answer = wire.receive().await.unwrap();
        assert_eq!((answer.sequence, answer.flags, &answer.body), (n, 0x30, &body));
    }
    for part in request(Route::FORWARD, 99, "", &body) {
        wire.send_raw(&[part]).await.unwrap();
    }
    assert_eq!(wire.receive().await.unwrap().sequence, 99);
    // The Unix socket of the same node keeps its prefixes.
    assert_eq!(Wire::uds(&lab.uds).await.ask(Route::FORWARD, "", &body).await.body, body);
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_clients_get_fin_alone_a_fork_first_and_cancel_whole_streams() {
    let edit = |options: &mut SlowOptions| {
        options.connection = ConnectionOptions { stock_clients: true, ..ConnectionOptions::default() };
    };
    let lab = slow(edit).await;
    for tcp in [false, true] {
        let mut wire = if tcp { Wire::tcp(lab.tcp).await } else { Wire::uds(&lab.uds).await };
        let fork = wire.receive_raw().await.unwrap();
        let opcodes: Vec<u8> = Route::ALL.iter().flat_map(|route| route.0.to_be_bytes()).collect();
        assert_eq!(fork, raw_frame(0xfffe, 0, 0x01, &opcodes));
        let begun = lab.control.begun().len();
        lab.control.allow(1);
        wire.send(&[forward(1, "", 1.0), request(Route(0x7777), 2, "", &[])]).await;
        let mut answers = [wire.receive().await.unwrap(), wire.receive().await.unwrap()];
        answers.sort_by_key(|answer| answer.sequence);
        assert_eq!(answers.each_ref().map(|answer| (answer.flags, answer.status())), [(0x10, 200), (0x10, 404)]);
        // POISON (0x20) withdraws the stream, whatever its sequence; so does VENT.
        for flags in [0x20, 0x08, 0x30] {
            let begun = lab.control.begun().len();
            wire.send(&[forward(10, "", 1.0), forward(11, "", 2.0)]).await;
            lab.control.until_begun(begun + 1).await;
            wire.send(&[raw_frame(Route::FORWARD.0, 999, flags, &[])]).await;
            for sequence in [10, 11] {
                let answer = wire.receive().await.unwrap();
                assert_eq!((answer.sequence, answer.flags, answer.status()), (sequence, 0x10, 499), "{flags:#x}");
            }
        }
        // A fold or an acknowledgement is still nothing to answer.
        wire.send(&[raw_frame(3, 5, 0x24, &payload("", &[])), raw_frame(3, 5, 0x80, &payload("", &[]))]).await;
        assert_eq!(wire.ask(Route::HELLO, "", &[]).await.flags, 0x10);
        assert!(lab.control.begun().len() > begun);
    }
}

#[test]
fn stock_clients_are_refused_together_with_udp() {
    use aeon_station::config::{Config, ConfigError, Settings};
    let mut settings = Settings::default();
    settings.listen.stock_clients = Some(true);
    settings.listen.udp = Some(([127, 0, 0, 1], 0).into());
    assert!(matches!(Config::try_from(settings), Err(ConfigError::StockClientsOverUdp)));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_session_share_that_of_their_connection() {
    let edit = |settings: &mut aeon_station::config::Settings| settings.listen.connection_session = Some(true);
    let lab = Lab::start("identity:2", edit).await;
    let body = floats(&[1.0, 2.0]);
    let mut wires = [Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp()).await, Wire::uds(&lab.uds).await];
    for pos in 0..4 {
        for wire in &mut wires {
            assert_eq!(wire.ask(Route::FORWARD, "", &body).await.ok()["pos"], pos, "{wire:?}");
        }
    }
    // It can be rewound and dropped like any other, and a named one stands beside it.
    let [wire, ..] = &mut wires;
    assert_eq!(wire.ask(Route::FORWARD, r#"{"pos":2}"#, &body).await.ok()["pos"], 2);
    assert_eq!(wire.ask(Route::FORWARD, r#"{"session":"named"}"#, &body).await.ok()["pos"], 0);
    assert_eq!(wire.ask(Route::FORWARD, "", &body).await.ok()["pos"], 3);
    assert_eq!(wire.ask(Route::RESET, "", &[]).await.status(), 200);
    assert_eq!(wire.ask(Route::FORWARD, "", &body).await.ok()["pos"], 0);
    // Over UDP there is no connection to share one.
    let mut udp = Wire::udp(lab.udp()).await;
    for _ in 0..2 {
        assert_eq!(udp.ask(Route::FORWARD, "", &body).await.ok()["pos"], 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_answers_on_the_same_connection_in_between() {
    let lab = Lab::start("identity:2:100", |_| ()).await;
    let mut wire = Wire::uds(&lab.uds).await;
    let answer = wire.ask(Route::EMBED, "", &ids(&[5, 6])).await;
    let answer = wire.ask(Route::LM_HEAD, "", &answer.body).await;
    assert_eq!(read_ids(&answer.body), [5, 6]);
}
