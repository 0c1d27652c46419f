//! To an address that may be forged no route answers with more than three times what was sent, whatever was asked; with
//! the token it does. Measured for every route, and printed.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    net::SocketAddr,
    sync::{Arc, mpsc},
    time::Instant,
};

use aeon_proto::{bwah, frame::Frame, route::Route};
use aeon_station::{
    model::identity::Identity,
    station::{
        Station,
        limits::Limits,
        request::{Carrier, Origin, Outcome, Peer, ReplyTo, Request},
    },
};
use common::{
    PATIENCE, floats, ids,
    wire::{Answer, request},
};

const WIDTH: usize = 256;

struct Queued(mpsc::Sender<Option<Vec<u8>>>);

impl ReplyTo for Queued {
    fn finish(self: Box<Self>, reply: Option<Vec<u8>>) {
        self.0.send(reply).unwrap();
    }
}

/// Hands a datagram to a station as if it came from an address of the network; returns what would be sent back.
fn ask(station: &Station, frame: &[u8], is_proven: bool) -> Option<Vec<u8>> {
    let address: SocketAddr = "192.0.2.7:4000".parse().unwrap();
    let peer = Peer {
        carrier: Carrier::Udp,
        connection: 0,
        origin: Origin::Unknown,
        address: Some(address),
        is_proven,
        max_reply_len: 65_507,
        default_session: None,
        stock_replies: false,
    };
    let frame = Frame::decode_exact(frame).unwrap();
    let (sender, replies) = mpsc::channel();
    let mut out = Vec::new();
    let request = Request { peer: &peer, frame, arrived: Instant::now() };
    match station.handle(request, &mut out, || Box::new(Queued(sender))) {
        Outcome::Replied => Some(out),
        Outcome::Queued(_) => replies.recv_timeout(PATIENCE).unwrap(),
        Outcome::Silent => None,
    }
}

fn pad(meta: &str, len: usize) -> String {
    let comma = if meta.is_empty() { "" } else { "," };
    format!(r#"{{{meta}{comma}"pad":"{}"}}"#, "0".repeat(len))
}

/// The requests of a route that draw out most.
fn requests(route: Route) -> Vec<(&'static str, Vec<u8>)> {
    let one = floats(&[1.0; WIDTH]);
    match route {
        Route::HELLO => vec![(r#""content_type":"application/x-aeon-flow; v=1""#, vec![])],
        Route::EMBED => vec![("", ids(&[1])), ("", ids(&[1; 30]))],
        Route::FORWARD => {
            vec![("", one), (r#""in":"ids""#, ids(&[1; 30])), (r#""out":"token","return":"logits""#, vec![])]
        }
        Route::LM_HEAD => {
            vec![("", one.clone()), (r#""return":"logits""#, one.clone()), (r#""return":"topk","top_k":5000"#, one)]
        }
        Route::FORWARD_PCA | Route::LM_HEAD_PCA => vec![("", vec![]), ("", b"PCAR".to_vec())],
        Route::AMPLITUHEDRON_REPLAY => {
            vec![(r#""prefix_hash":"0x1","prefix_len":4,"layer_lo":0,"layer_hi":1"#, vec![]), ("", vec![])]
        }
        Route::AMPLITUHEDRON_CAPTURE => vec![("", vec![]), ("", b"BWAH".to_vec())],
        Route::SHARD_GET => vec![(r#""shard":"s","key":"k""#, vec![]), (r#""shard":"s","key":"none""#, vec![])],
        Route::SHARD_PUT => vec![(r#""shard":"s","key":"other","value":"v""#, vec![]), ("", vec![])],
        _ => vec![("", vec![]), (r#""session":"none""#, vec![])],
    }
}

#[test]
fn no_route_amplifies() {
    let model = Arc::new(Identity::new(WIDTH, 5000));
    let station = Station::new("identity".into(), model, Limits::default(), 1).unwrap();
    // Something worth stealing: a captured prefix and a large value of a shard.
    let capture = bwah::encode_amplituhedron_capture(1, 4, 0, 1, &[1.0; WIDTH], &[]);
    let stored = ask(&station, &request(Route::AMPLITUHEDRON_CAPTURE, 1, "", &capture), true).unwrap();
    assert_eq!(Answer::decode(&stored).status(), 200, "{stored:?}");
    let value = format!(r#"{{"shard":"s","key":"k","value":"{}"}}"#, "v".repeat(20_000));
    let stored = ask(&station, &request(Route::SHARD_PUT, 2, &value, &[]), true).unwrap();
    assert_eq!(Answer::decode(&stored).status(), 200);

    println!("{:<22} {:>8} {:>8} {:>6}  unlimited", "route", "request", "answer", "ratio");
    let (mut sequence, mut large) = (10, 0);
    let unknown = [Route(0x7777), Route(0xffff)];
    for route in Route::ALL.iter().chain(&unknown).copied() {
        for (meta, body) in requests(route) {
            let mut worst = (0.0, 0, 0);
            let mut most = 0;
            for padding in [0, 1, 20, 60, 100, 200, 400, 1000] {
                let meta = if padding == 0 { format!("{{{meta}}}") } else { pad(meta, padding) };
                sequence += 1;
                let frame = request(route, sequence, &meta, &body);
                let reply = ask(&station, &frame, false);
                let len = reply.as_ref().map_or(0, Vec::len);
                assert!(len <= 3 * frame.len(), "{route}: {len} bytes for {}: {meta}", frame.len());
                let ratio = len as f64 / frame.len() as f64;
                if ratio > worst.0 {
                    worst = (ratio, frame.len(), len);
                }
                let token = reply.and_then(|reply| Answer::decode(&reply).meta["token"].as_str().map(str::to_owned));
                sequence += 1;
                let free = ask(&station, &request(route, sequence, &meta, &body), true).unwrap();
                most = most.max(free.len());
                // What was held back comes with the token.
                if let Some(token) = token {
                    let rest = meta.strip_prefix('{').unwrap();
                    let comma = if rest == "}" { "" } else { "," };
                    let meta = format!(r#"{{"token":"{token}"{comma}{rest}"#);
                    sequence += 1;
                    let proven = ask(&station, &request(route, sequence, &meta, &body), false).unwrap();
                    assert!(proven.len() > 3 * frame.len(), "{route}: {} for {}", proven.len(), frame.len());
                    assert_eq!(Answer::decode(&proven).status(), Answer::decode(&free).status());
                    large += 1;
                }
            }
            println!("{:<22} {:>8} {:>8} {:>6.2}  {most}", route.to_string(), worst.1, worst.2, worst.0);
        }
    }
    // The limit was at work, and on more than one route.
    assert!(large > 20, "{large} answers were held back");
}
