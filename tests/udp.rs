//! UDP end to end: copies, late datagrams, errors of single peers, addresses, and who may ask.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::net::{IpAddr, SocketAddr};

use aeon_proto::route::Route;
use aeon_station::client::{Client, ClientOptions};
use common::{
    Bystander, Lab, floats, health, ids, own_address,
    slow::{SlowLab, SlowOptions},
    until,
    wire::{Answer, Wire, cancel, request},
    within,
};
use tokio::net::UdpSocket;

fn forward(sequence: u32, meta: &str, mark: f32) -> Vec<u8> {
    request(Route::FORWARD, sequence, meta, &floats(&[mark, 0.0]))
}

fn session(name: &str, pos: usize) -> String {
    format!(r#"{{"session":"{name}","pos":{pos}}}"#)
}

async fn dropped(lab: &SlowLab, key: &str) -> u64 {
    health(&mut Wire::uds(&lab.uds).await).await["dropped"][key].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_dropped_in_flight_and_answered_from_the_cache_later() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let mut wire = Wire::udp(lab.udp).await;
    // With a session, without one, and the other routes that take a worker's time.
    let asked = [
        forward(10, &session("s", 0), 1.0),
        forward(11, "", 2.0),
        request(Route::FORWARD, 12, r#"{"out":"token"}"#, &floats(&[3.0, 0.0])),
    ];
    for (index, frame) in asked.iter().enumerate() {
        let (begun, duplicates) = (lab.control.begun().len(), dropped(&lab, "duplicate").await);
        wire.send(&[frame.clone(), frame.clone(), frame.clone()]).await;
        lab.control.until_begun(begun + 1).await;
        until("the copies are dropped", async || dropped(&lab, "duplicate").await == duplicates + 2).await;
        lab.control.allow(1);
        let reply = wire.receive_raw().await.unwrap();
        wire.send(std::slice::from_ref(frame)).await;
        assert_eq!(wire.receive_raw().await.unwrap(), reply, "{index}");
        assert_eq!(lab.control.begun().len(), begun + 1, "{index}: computed once");
    }
    // The same bytes from another peer are another request.
    let mut other = Wire::udp(lab.udp).await;
    other.send(&[asked[1].clone()]).await;
    lab.control.allow(1);
    assert_eq!(other.receive().await.unwrap().status(), 200);
    assert_eq!(lab.control.begun().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_refused_or_cancelled_is_tried_anew() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let mut wire = Wire::udp(lab.udp).await;
    let gap = forward(20, &session("s", 1), 1.0);
    assert_eq!(wire.exchange(gap.clone()).await.status(), 409);
    let first = forward(21, &session("s", 0), 1.0);
    wire.send(std::slice::from_ref(&first)).await;
    lab.control.until_begun(1).await;
    wire.send(&[cancel(Route::FORWARD, 21)]).await;
    assert_eq!(wire.receive().await.unwrap().status(), 499);
    lab.control.allow(2);
    assert_eq!(wire.exchange(first).await.status(), 200);
    assert_eq!(wire.exchange(forward(22, &session("s", 1), 1.0)).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_datagram_cannot_undo_newer_work() {
    let lab = Lab::start("identity:2:100", |_| ()).await;
    // Sequences go on over the end of their 32 bits.
    for base in [1000_u32, u32::MAX - 2] {
        let mut wire = Wire::udp(lab.udp()).await;
        let name = format!("s-{base}");
        let at = |step: u32, pos| forward(base.wrapping_add(step), &session(&name, pos), pos as f32);
        let stale = lab.dropped("stale").await;
        for pos in 0..5 {
            assert_eq!(wire.exchange(at(pos as u32, pos)).await.status(), 200);
        }
        // Copies that are still in the cache get their old answer; others are dropped. Neither rewinds the session.
        assert_eq!(wire.exchange(at(0, 0)).await.ok()["pos"], 0);
        wire.send(&[at(0, 1), at(3, 0), at(4, 3), forward(base.wrapping_sub(50), &session(&name, 0), 0.0)]).await;
        wire.send(&[request(Route::RESET, base.wrapping_sub(1), &format!(r#"{{"session":"{name}"}}"#), &[])]).await;
        assert_eq!(wire.exchange(at(5, 5)).await.ok()["pos"], 5, "nothing was undone");
        assert_eq!(lab.dropped("stale").await, stale + 5);
        // After a RESET the old work stays undone too.
        let reset = request(Route::RESET, base.wrapping_add(6), &format!(r#"{{"session":"{name}"}}"#), &[]);
        assert_eq!(wire.exchange(reset.clone()).await.status(), 200);
        wire.send(&[at(4, 0)]).await;
        assert_eq!(wire.exchange(at(7, 1)).await.meta["expected_pos"], 0);
        assert_eq!(wire.exchange(at(8, 0)).await.ok()["pos"], 0);
        // A late copy of the RESET gets its answer again and drops nothing.
        assert_eq!(wire.exchange(reset).await.status(), 200);
        assert_eq!(wire.exchange(at(9, 1)).await.ok()["pos"], 1);
        assert_eq!(lab.dropped("stale").await, stale + 6);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_reaches_only_the_peer_that_asked() {
    let lab = SlowLab::start(SlowOptions { workers: 2, ..SlowOptions::default() }).await;
    let (mut one, mut two) = (Wire::udp(lab.udp).await, Wire::udp(lab.udp).await);
    one.send(&[forward(5, "", 1.0)]).await;
    two.send(&[forward(5, "", 2.0)]).await;
    lab.control.until_begun(2).await;
    one.send(&[cancel(Route::FORWARD, 5)]).await;
    one.receive().await.unwrap().assert_vent("its own", Route::FORWARD.0, 5, 499);
    lab.control.open();
    assert_eq!(two.receive().await.unwrap().status(), 200);
}

/// Sends requests from sockets that are closed before the answer can come.
async fn send_and_close(target: SocketAddr, count: usize) {
    let local: SocketAddr = if target.is_ipv6() { "[::1]:0" } else { "127.0.0.1:0" }.parse().unwrap();
    for n in 0..count {
        let socket = UdpSocket::bind(local).await.unwrap();
        let frame = request(Route::HELLO, n as u32, "", &[]);
        if n % 2 == 0 {
            socket.connect(target).await.unwrap();
            // The port of the one before may be this one's: its refusals are not for us to judge.
            let _ = socket.send(&frame).await;
        } else {
            socket.send_to(&frame, target).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_that_are_gone_are_no_error_to_others() {
    for (local, hosts) in [("127.0.0.1:0", &["127.0.0.1"][..]), ("[::]:0", &["127.0.0.1", "::1"])] {
        let edit = |settings: &mut aeon_station::config::Settings| settings.listen.udp = local.parse().ok();
        let lab = Lab::start("identity:8:100", edit).await;
        let port = lab.udp().port();
        for host in hosts {
            let target = SocketAddr::new(host.parse().unwrap(), port);
            let mut good = Bystander::new(Wire::udp(target).await, 8);
            let going = tokio::spawn(async move { send_and_close(target, 1000).await });
            let mut rounds = 0;
            while !going.is_finished() || rounds < 50 {
                good.go_on("peers that are gone").await;
                rounds += 1;
            }
            within("the other peers", going).await.unwrap();
            good.go_on("all of them are gone").await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_come_from_the_address_that_was_asked() {
    for (bind, asked, client) in [
        ("0.0.0.0:0", "127.0.0.2", "127.0.0.1:0"),
        ("0.0.0.0:0", "127.0.0.1", "127.0.0.9:0"),
        ("[::]:0", "127.0.0.3", "127.0.0.1:0"),
        ("[::]:0", "::1", "[::1]:0"),
        ("[::1]:0", "::1", "[::1]:0"),
    ] {
        let edit = |settings: &mut aeon_station::config::Settings| settings.listen.udp = bind.parse().ok();
        let lab = Lab::start("identity:8:100", edit).await;
        let target = SocketAddr::new(asked.parse::<IpAddr>().unwrap(), lab.udp().port());
        let socket = UdpSocket::bind(client).await.unwrap();
        for sequence in 0..3 {
            let frame = request(Route::FORWARD, sequence, &session("s", sequence as usize), &floats(&[1.0; 8]));
            socket.send_to(&frame, target).await.unwrap();
            let mut buffer = vec![0; 2000];
            let (len, from) = within("a reply", socket.recv_from(&mut buffer)).await.unwrap();
            assert_eq!(from, target, "bound to {bind}");
            assert_eq!(Answer::decode(&buffer[..len]).status(), 200);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_on_no_list_is_counted_and_hears_nothing() {
    let edit = |settings: &mut aeon_station::config::Settings| {
        settings.listen.allow = Some(vec!["10.0.0.0/8".to_owned(), "127.0.0.2".to_owned()]);
        settings.listen.udp = "0.0.0.0:0".parse().ok();
    };
    let lab = Lab::start("identity:8:100", edit).await;
    let target = SocketAddr::new([127, 0, 0, 1].into(), lab.udp().port());
    let stranger = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let frame = request(Route::HELLO, 1, "", &[]);
    for _ in 0..3 {
        stranger.send_to(&frame, target).await.unwrap();
    }
    stranger.send_to(b"junk", target).await.unwrap();
    until("all are counted", async || lab.dropped("peer_not_allowed").await == 4).await;
    let listed = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    let mut buffer = vec![0; 2000];
    listed.send_to(&frame, target).await.unwrap();
    within("a reply", listed.recv_from(&mut buffer)).await.unwrap();
    // Whatever was said to the stranger would be there by now.
    assert!(stranger.try_recv_from(&mut buffer).is_err());
    // On TCP a stranger is told.
    let mut wire = Wire::tcp(lab.tcp()).await;
    wire.receive().await.unwrap().assert_vent("TCP", 0, 0, 403);
    wire.assert_closed("TCP").await;
    assert_eq!(Wire::uds(&lab.uds).await.ask(Route::HELLO, "", &[]).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_not_proven_draws_out_no_more_than_three_times_what_it_sent() {
    // Through an address of this machine that is no loopback one, if it has one.
    let Some(own) = own_address() else { return };
    let edit = |settings: &mut aeon_station::config::Settings| {
        settings.listen.udp = Some(SocketAddr::new(own, 0));
        settings.listen.allow = Some(vec![own.to_string()]);
    };
    let lab = Lab::start("identity:1024", edit).await;
    let socket = UdpSocket::bind(SocketAddr::new(own, 0)).await.unwrap();
    socket.connect(lab.udp()).await.unwrap();
    let mut buffer = vec![0; 65_536];
    let mut exchange = async |frame: Vec<u8>| {
        socket.send(&frame).await.unwrap();
        let len = within("a reply", socket.recv(&mut buffer)).await.unwrap();
        (len, Answer::decode(&buffer[..len]))
    };
    // Too small to be told anything within three times its size.
    let tiny = request(Route::EMBED, 1, "", &ids(&[1]));
    socket.send(&tiny).await.unwrap();
    until("it is counted", async || lab.dropped("amplification").await == 1).await;
    let pad = format!(r#"{{"pad":"{}"}}"#, "0".repeat(100));
    let frame = request(Route::EMBED, 2, &pad, &ids(&[1]));
    let (len, vent) = exchange(frame.clone()).await;
    vent.assert_vent("not proven", Route::EMBED.0, 2, 403);
    assert!(len <= 3 * frame.len(), "{len} bytes for {}", frame.len());
    assert!(vent.meta["error"].as_str().unwrap().starts_with("address not proven"), "{}", vent.text);
    let token = vent.meta["token"].as_str().unwrap().to_owned();
    let (_, answer) = exchange(request(Route::EMBED, 3, &format!(r#"{{"token":"{token}"}}"#), &ids(&[1]))).await;
    assert_eq!((answer.status(), answer.body.len()), (200, 4096));
    // A wrong token proves nothing; what fits three times the request needs none.
    let wrong = format!(r#"{{"token":"{}"}}"#, "0".repeat(32));
    let (_, vent) = exchange(request(Route::EMBED, 4, &wrong, &ids(&[1; 10]))).await;
    assert_eq!(vent.status(), 403);
    let (_, answer) = exchange(request(Route::FORWARD, 5, "", &floats(&[1.0; 1024]))).await;
    assert_eq!(answer.status(), 200);
    // The token belongs to one address and port.
    let other = UdpSocket::bind(SocketAddr::new(own, 0)).await.unwrap();
    other.connect(lab.udp()).await.unwrap();
    let meta = format!(r#"{{"token":"{token}","pad":"{}"}}"#, "0".repeat(60));
    other.send(&request(Route::EMBED, 6, &meta, &ids(&[1]))).await.unwrap();
    let mut buffer = vec![0; 65_536];
    let len = within("a reply", other.recv(&mut buffer)).await.unwrap();
    assert_eq!(Answer::decode(&buffer[..len]).status(), 403);
    // The client does all this by itself, however small its request is.
    let client = Client::connect(&lab.address_udp(), ClientOptions::default()).await.unwrap();
    let reply = within("the client", client.request(Route::EMBED, |_| (), &ids(&[1, 2, 3]))).await.unwrap();
    assert_eq!(reply.body.len(), 3 * 4096);
    assert_eq!(within("the client", client.hello()).await.unwrap().model.hidden_dim, 1024);
}

/// On one thread, so that all requests wait before the station looks. Each write is observed once, however many answers it
/// takes along.
#[tokio::test]
async fn answers_of_one_size_to_one_peer_leave_in_one_call() {
    const REQUESTS: u32 = 20;
    let lab = Lab::identity().await;
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(lab.udp()).unwrap();
    let writes = || lab.node.station().counters().stages.write.snapshot().count;
    for sequence in 0..REQUESTS {
        socket.send(&request(Route::FORWARD, sequence, r#"{"pos":0}"#, &floats(&[sequence as f32; 8]))).unwrap();
    }
    let socket = UdpSocket::from_std({
        socket.set_nonblocking(true).unwrap();
        socket
    })
    .unwrap();
    let mut buffer = [0; 2048];
    for sequence in 0..REQUESTS {
        let len = within("an answer", socket.recv(&mut buffer)).await.unwrap();
        let frame = aeon_proto::frame::Frame::decode_exact(&buffer[..len]).unwrap();
        assert_eq!(frame.sequence, sequence, "answers keep the order of their requests");
        assert!(frame.payload.ends_with(&floats(&[sequence as f32; 8])));
    }
    let segments = quinn_udp::UdpSocketState::new((&socket).into()).unwrap().max_gso_segments();
    if segments < REQUESTS as usize {
        println!("the system joins no datagrams: {} writes for {REQUESTS} answers", writes());
        assert_eq!(writes(), u64::from(REQUESTS));
    } else {
        assert_eq!(writes(), 1);
    }
}
