//! A station with a shared key: who holds it is served on every carrier, nobody else is; over UDP they hear nothing.
//! Requests are signed here a second time, from the text of the specification.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aeon_proto::{auth::Key, frame::Frame, payload::MetaWriter, route::Route};
use aeon_station::{
    client::{Client, ClientError, ClientOptions, StationAddress},
    station::auth::AuthOptions,
};
use common::{
    Lab, floats, ids, read_ids,
    slow::{SlowLab, SlowOptions},
    until,
    wire::{Answer, Wire, cancel, raw_frame, request},
    within,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const SECRET: &str = "a secret of this test";

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

fn mac(context: &str, frame: &[u8]) -> String {
    let key = blake3::derive_key(context, SECRET.as_bytes());
    blake3::keyed_hash(&key, frame).to_hex().to_string()
}

/// Signs a request frame: `auth` becomes the last member, its mac is taken with zeros in its place.
fn sign_at(frame: &[u8], ts: u64, nonce: u128) -> Vec<u8> {
    let (number, payload) = (u32::from_be_bytes([frame[2], frame[3], frame[4], frame[5]]), &frame[10..]);
    let meta_len = if payload.is_empty() { 0 } else { usize::from(u16::from_be_bytes([payload[0], payload[1]])) };
    let (meta, body) = if payload.is_empty() {
        ("", &[][..])
    } else {
        (std::str::from_utf8(&payload[2..2 + meta_len]).unwrap(), &payload[2 + meta_len..])
    };
    let open = match meta.strip_suffix('}') {
        None | Some("{") => "{".to_owned(),
        Some(open) => format!("{open},"),
    };
    let head = format!(r#"{open}"auth":{{"ts":{ts},"nonce":"{nonce:032x}","mac":""#);
    let build = |mac: &str| {
        let meta = format!(r#"{head}{mac}"}}}}"#);
        raw_frame(u16::from_be_bytes([frame[0], frame[1]]), number, frame[6], &common::wire::payload(&meta, body))
    };
    build(&mac("aeon-flow v1 request authentication", &build(&"0".repeat(64))))
}

fn sign(frame: &[u8]) -> (Vec<u8>, u128) {
    let nonce = rand::random();
    (sign_at(frame, now_ms(), nonce), nonce)
}

/// Checks that a reply is signed for a request.
#[track_caller]
fn assert_signed(reply: &[u8], nonce: u128) {
    let answer = Answer::decode(reply);
    let auth = &answer.meta["auth"];
    assert_eq!(auth["nonce"], format!("{nonce:032x}"), "{}", answer.text);
    let given = auth["mac"].as_str().unwrap();
    assert!(answer.text.ends_with(&format!(r#""mac":"{given}"}}}}"#)));
    let at = 10 + 2 + answer.text.len() - 3 - 64;
    let mut zeroed = reply.to_vec();
    zeroed[at..at + 64].fill(b'0');
    assert_eq!(mac("aeon-flow v1 reply authentication", &zeroed), given);
}

async fn lab(edit: impl FnOnce(&mut aeon_station::config::Settings)) -> Lab {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), format!("{SECRET}\n")).unwrap();
    Lab::start("identity:8:100", |settings| {
        settings.listen.auth_key_file = Some(key.path().to_owned());
        edit(settings);
    })
    .await
}

/// A client that gives up soon, over UDP.
async fn hasty(lab: &Lab, secret: Option<&str>) -> Client {
    let options = ClientOptions { request_timeout: Duration::from_millis(300), ..options(secret) };
    Client::connect(&lab.address_udp(), options).await.unwrap()
}

fn options(secret: Option<&str>) -> ClientOptions {
    let auth = secret.map(|secret| Key::from_secret(secret.as_bytes()).unwrap());
    ClientOptions { auth, request_timeout: Duration::from_secs(2), ..ClientOptions::default() }
}

/// What a signed HEALTH on the Unix socket says about drops.
async fn dropped(lab: &Lab) -> u64 {
    let mut wire = Wire::uds(&lab.uds).await;
    let (frame, _) = sign(&request(Route::HEALTH, 1, "", &[]));
    wire.exchange(frame).await.meta["dropped"]["unauthenticated"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_the_key_is_served_on_every_carrier() {
    let lab = lab(|_| ()).await;
    for address in [lab.address_uds(), lab.address_tcp(), lab.address_udp()] {
        let client = Client::connect(&address, options(Some(SECRET))).await.unwrap();
        assert_eq!(client.hello().await.unwrap().model.hidden_dim, 8, "{address}");
        let body = floats(&[1.5; 16]);
        let at = |pos: u64| {
            move |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", "s").unsigned("pos", pos);
            }
        };
        let reply = client.request(Route::FORWARD, at(0), &body);
        let reply = reply.await.unwrap();
        assert_eq!((&reply.body[..], reply.number("seq")), (&body[..], Some(2)), "{address}");
        let vent = client.request(Route::FORWARD, at(9), &body);
        assert_eq!(vent.await.unwrap_err().vent_number("expected_pos"), Some(2), "{address}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_is_served() {
    let lab = lab(|_| ()).await;
    for address in [lab.address_uds(), lab.address_tcp()] {
        let stranger = Client::connect(&address, options(None)).await.unwrap();
        let error = stranger.hello().await.unwrap_err();
        assert_eq!(error.status().map(|status| status.0), Some(403), "{error}");
        assert!(error.to_string().contains("no auth") && error.to_string().contains("--auth-key-file"), "{error}");
        let wrong = Client::connect(&address, options(Some("another secret of a test"))).await.unwrap();
        let error = wrong.hello().await.unwrap_err();
        assert!(matches!(error, ClientError::NotAuthentic { .. }), "{error}");
        assert!(error.to_string().contains("403") && error.to_string().contains("keys differ"), "{error}");
    }
    let before = dropped(&lab).await;
    for secret in [None, Some("another secret of a test")] {
        let error = hasty(&lab, secret).await.hello().await.unwrap_err();
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
        assert!(error.to_string().contains("--auth-key-file"), "{error}");
    }
    assert!(dropped(&lab).await >= before + 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_are_signed_for_their_request_and_a_request_is_taken_once() {
    let lab = lab(|_| ()).await;
    for mut wire in [Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp()).await] {
        let (frame, nonce) = sign(&request(Route::EMBED, 5, r#"{"timing":true}"#, &ids(&[7])));
        wire.send(std::slice::from_ref(&frame)).await;
        let reply = wire.receive_raw().await.unwrap();
        assert_eq!(Answer::decode(&reply).status(), 200);
        assert_signed(&reply, nonce);
        let again = wire.exchange(frame).await;
        assert_eq!(again.status(), 403, "{}", again.text);
        assert!(again.text.contains("taken before"), "{}", again.text);
        // A vent is signed too.
        let (frame, nonce) = sign(&request(Route(0x77), 6, "", &[]));
        wire.send(&[frame]).await;
        let reply = wire.receive_raw().await.unwrap();
        assert_eq!(Answer::decode(&reply).status(), 404);
        assert_signed(&reply, nonce);
        // The bytes of a signed request count, all of them.
        let (mut frame, _) = sign(&request(Route::EMBED, 7, "", &ids(&[7])));
        *frame.last_mut().unwrap() = 1;
        assert_eq!(wire.exchange(frame).await.status(), 403);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn over_udp_copies_get_the_same_answer_and_only_their_sender_does() {
    let lab = lab(|_| ()).await;
    let (mut mine, mut thief) = (Wire::udp(lab.udp()).await, Wire::udp(lab.udp()).await);
    for (route, body) in [(Route::HELLO, vec![]), (Route::EMBED, ids(&[3])), (Route::HEALTH, vec![])] {
        let (frame, nonce) = sign(&request(route, mine.next_sequence(), "", &body));
        mine.send(&[frame.clone(), frame.clone()]).await;
        let (first, second) = (mine.receive_raw().await.unwrap(), mine.receive_raw().await.unwrap());
        assert_eq!(first, second);
        assert_signed(&first, nonce);
        let before = dropped(&lab).await;
        thief.send(&[frame]).await;
        until("the replay is dropped", async || dropped(&lab).await > before).await;
    }
    // The next thing that the thief hears is an answer to its own, signed request.
    let (frame, nonce) = sign(&request(Route::EMBED, 1, "", &ids(&[4])));
    thief.send(&[frame]).await;
    let reply = thief.receive_raw().await.unwrap();
    assert_signed(&reply, nonce);
}

#[tokio::test(flavor = "multi_thread")]
async fn old_requests_are_refused_with_the_time_of_the_station() {
    let lab = lab(|settings| settings.listen.auth_window = Some(5)).await;
    for mut wire in lab.wires().await {
        for (off, word) in [(-6000_i64, "ago"), (60_000, "in the future")] {
            let ts = now_ms().saturating_add_signed(off);
            let frame = request(Route::HEALTH, wire.next_sequence(), r#"{"pad":"0000000000000000000000"}"#, &[]);
            wire.send(&[sign_at(&frame, ts, 77)]).await;
            let reply = wire.receive_raw().await.unwrap();
            let answer = Answer::decode(&reply);
            assert_eq!(answer.status(), 403, "{wire:?}: {}", answer.text);
            assert!(answer.text.contains(word) && answer.text.contains("clocks"), "{}", answer.text);
            assert!(answer.meta["now_ms"].as_u64().unwrap().abs_diff(now_ms()) < 30_000);
            assert_signed(&reply, 77);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_signed_cancel_withdraws() {
    let lab = SlowLab::start(SlowOptions::default()).await;
    let key = Key::from_secret(SECRET.as_bytes()).unwrap();
    lab.station.require_auth(AuthOptions { key, window: Duration::from_secs(30), exempt_unix: false });
    for (n, mut wire) in
        [Wire::uds(&lab.uds).await, Wire::tcp(lab.tcp).await, Wire::udp(lab.udp).await].into_iter().enumerate()
    {
        let mark = n as f32 + 1.0;
        let (frame, nonce) = sign(&request(Route::FORWARD, 9, "", &floats(&[mark, 0.0])));
        wire.send(&[frame]).await;
        lab.control.until_begun(n + 1).await;
        wire.send(&[cancel(Route::FORWARD, 9)]).await;
        until("the cancel is dropped", async || lab.station.counters().dropped.unauthenticated.value() == n as u64 + 1)
            .await;
        wire.send(&[sign(&cancel(Route::FORWARD, 9)).0]).await;
        let reply = wire.receive_raw().await.unwrap();
        assert_eq!(Answer::decode(&reply).status(), 499);
        assert_signed(&reply, nonce);
    }
    // Our client signs its cancels.
    let options =
        ClientOptions { auth: Some(Key::from_secret(SECRET.as_bytes()).unwrap()), ..ClientOptions::default() };
    let client = Client::connect(&StationAddress::Unix(lab.uds.clone()), options).await.unwrap();
    let body = floats(&[4.0, 0.0]);
    let asked = tokio::time::timeout(Duration::from_millis(200), client.request(Route::FORWARD, |_| (), &body));
    assert!(asked.await.is_err());
    until("the work ends", async || lab.control.idle()).await;
    assert_eq!(lab.control.finished(), [0.0; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unix_socket_can_be_left_open() {
    let lab = lab(|settings| settings.listen.auth_exempt_unix = Some(true)).await;
    let mut wire = Wire::uds(&lab.uds).await;
    assert_eq!(read_ids(&wire.ask(Route::LM_HEAD, "", &floats(&[7.0; 8])).await.body), [7]);
    let mut wire = Wire::tcp(lab.tcp()).await;
    assert_eq!(wire.ask(Route::HEALTH, "", &[]).await.status(), 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_a_key_takes_no_unsigned_answer() {
    let lab = Lab::identity().await;
    let client = Client::connect(&lab.address_tcp(), options(Some(SECRET))).await.unwrap();
    let error = client.hello().await.unwrap_err();
    assert!(matches!(error, ClientError::NotAuthentic { said: None, .. }), "{error}");
    assert!(error.to_string().contains("same --auth-key-file"), "{error}");
    assert!(matches!(hasty(&lab, Some(SECRET)).await.hello().await, Err(ClientError::Timeout { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_answer_still_has_room_for_its_signature() {
    let lab = lab(|settings| settings.limits.max_datagram = Some(1024)).await;
    let mut wire = Wire::udp(lab.udp()).await;
    let ask = |count: usize| request(Route::EMBED, rand::random(), "", &ids(&vec![1; count]));
    let mut largest = 0;
    for count in 8..32 {
        let (frame, nonce) = sign(&ask(count));
        wire.send(&[frame]).await;
        let reply = within("an answer", wire.receive_raw()).await.unwrap();
        assert!(reply.len() <= 1024, "{count}: {}", reply.len());
        assert_signed(&reply, nonce);
        largest = largest.max(reply.len());
        let status = Answer::decode(&reply).status();
        assert!(Frame::decode_exact(&reply).is_ok() && (status == 200 || status == 413), "{status}");
    }
    assert!(largest > 500, "{largest}");
}

#[tokio::test(flavor = "multi_thread")]
async fn http_knows_no_signatures_and_works_beside_a_key() {
    let lab = lab(|settings| settings.listen.http = Some(([127, 0, 0, 1], 0).into())).await;
    let key = r#"{"prefix_hash":"0x1","prefix_len":4,"layer_lo":0,"layer_hi":1}"#;
    let capture = aeon_proto::bwah::encode_amplituhedron_capture(1, 4, 0, 1, &[1.5; 8], &[]);
    for (path, body, status) in
        [("replay", key.as_bytes(), "204"), ("capture", &capture, "200"), ("replay", key.as_bytes(), "200")]
    {
        let mut stream = TcpStream::connect(lab.node.http().unwrap()).await.unwrap();
        let len = body.len();
        let head = format!(
            "POST /amplituhedron/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        let mut answer = Vec::new();
        within("an answer", stream.read_to_end(&mut answer)).await.unwrap();
        let line = String::from_utf8_lossy(&answer[..answer.len().min(12)]).into_owned();
        assert_eq!(line, format!("HTTP/1.1 {status}"), "{path}: {}", String::from_utf8_lossy(&answer));
    }
}
