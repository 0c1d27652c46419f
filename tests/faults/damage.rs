//! Datagrams that are damaged in spite of their checksum, which has 16 bits only: `fp48` and the checks of an answer find
//! it, and the request is made again.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use aeon_proto::{frame::HEADER_LEN, route::Route};
use aeon_station::client::{ClientOptions, Pipeline, StationAddress};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::net::UdpSocket;

use crate::{
    common::{Lab, within},
    links::{prompt, tokens},
};

const SEED: u64 = 31;

/// What part of a datagram is damaged.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Part {
    Meta,
    Body,
}

/// Passes datagrams on between clients and a station, and turns bits in a share of those of FORWARD, each way.
async fn relay(station: SocketAddr, part: Part, share: f64, damaged: Arc<AtomicU64>) -> StationAddress {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let address = StationAddress::Udp(front.local_addr().unwrap().to_string());
    tokio::spawn(async move {
        let mut rng = ChaCha8Rng::seed_from_u64(SEED);
        let back = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (mut to_station, mut to_client) = (vec![0; 65_536], vec![0; 65_536]);
        let mut client = None;
        loop {
            tokio::select! {
                received = front.recv_from(&mut to_station) => {
                    let (len, from) = received.unwrap();
                    client = Some(from);
                    let datagram = &mut to_station[..len];
                    damage(datagram, part, share, &mut rng, &damaged);
                    back.send_to(datagram, station).await.unwrap();
                }
                received = back.recv(&mut to_client) => {
                    let datagram = &mut to_client[..received.unwrap()];
                    damage(datagram, part, share, &mut rng, &damaged);
                    front.send_to(datagram, client.unwrap()).await.unwrap();
                }
            }
        }
    });
    address
}

fn damage(datagram: &mut [u8], part: Part, share: f64, rng: &mut ChaCha8Rng, damaged: &AtomicU64) {
    if u16::from_be_bytes([datagram[0], datagram[1]]) != Route::FORWARD.0 || rng.random::<f64>() >= share {
        return;
    }
    let meta = HEADER_LEN + 2;
    let body = meta + usize::from(u16::from_be_bytes([datagram[HEADER_LEN], datagram[HEADER_LEN + 1]]));
    let range = if part == Part::Meta { meta..body.min(datagram.len()) } else { body..datagram.len() };
    if range.is_empty() {
        return;
    }
    // Several bits: the checksum that the relay's own socket makes hides them all the same.
    for _ in 0..rng.random_range(1..4) {
        datagram[rng.random_range(range.clone())] ^= 1 << rng.random_range(0..8);
    }
    damaged.fetch_add(1, Ordering::Relaxed);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_checksum_lets_pass_changes_no_token() {
    let mut labs = Vec::new();
    for layers in ["0..2", "2..4", "4..6"] {
        labs.push(Lab::start("demo", |settings| settings.model.layers = Some(layers.into())).await);
    }
    let clean: Vec<StationAddress> = labs.iter().map(Lab::address_udp).collect();
    // Without repetitions by the clock: what makes up for the damage is the answer itself.
    let options = ClientOptions::default();
    let mut pipeline = Pipeline::connect(&clean, &options).await.unwrap();
    let expected = within("clean", tokens(&mut pipeline, &prompt(3, 30), 60)).await.unwrap();
    eprintln!("damage from seed {SEED}");
    for part in [Part::Body, Part::Meta] {
        let damaged = Arc::new(AtomicU64::new(0));
        let mut addresses = Vec::new();
        for lab in &labs {
            addresses.push(relay(lab.udp(), part, 0.1, Arc::clone(&damaged)).await);
        }
        let mut pipeline = Pipeline::connect(&addresses, &options).await.unwrap();
        let got = within("damaged", tokens(&mut pipeline, &prompt(3, 30), 60)).await.unwrap();
        assert_eq!(got, expected, "{part:?}");
        let damaged = damaged.load(Ordering::Relaxed);
        eprintln!("{damaged} datagrams with a damaged {part:?}");
        assert!(damaged > 10, "{damaged}");
    }
}
