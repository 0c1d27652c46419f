//! UDP over a real link: residuals of 14 KB over an MTU of 1500, routes that go and come back, refusals by ICMP.
//!
//! The test makes two network namespaces joined by a veth pair, runs a station in one and itself once more in the other.
//! Without the right to do so it is skipped, and says why.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use aeon_proto::{payload::MetaWriter, residual, route::Route};
use aeon_station::client::{Client, ClientOptions, StationAddress};
use common::{
    netns::{Namespace, ip_ok, try_ip},
    within,
};

const STATION: &str = "10.199.7.1";
const CLIENT: &str = "10.199.7.2";
const PORT: u16 = 7000;
const WIDTH: usize = 3584;
/// Names of the two namespaces, for the copy of this program that runs inside.
const NAMES: &str = "AEON_TEST_NAMESPACES";

/// Two namespaces and what runs in them; all of it goes at the end.
struct Link {
    station: Option<Child>,
    station_side: Namespace,
    client_side: Namespace,
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(mut station) = self.station.take() {
            let _ = station.kill();
            let _ = station.wait();
        }
    }
}

impl Link {
    fn new() -> Result<Self, String> {
        let link = Self { station: None, station_side: Namespace::new("s")?, client_side: Namespace::new("c")? };
        let (a, b) = (&link.station_side.name, &link.client_side.name);
        for arguments in [
            format!("link add v0 netns {a} type veth peer name v1 netns {b}"),
            format!("-n {a} addr add {STATION}/24 dev v0"),
            format!("-n {b} addr add {CLIENT}/24 dev v1"),
            format!("-n {a} link set v0 up mtu 1500"),
            format!("-n {b} link set v1 up mtu 1500"),
        ] {
            try_ip(&arguments)?;
        }
        Ok(link)
    }

    fn start_station(&mut self) {
        let mut station = self
            .station_side
            .command(env!("CARGO_BIN_EXE_aeon-node"))
            .arg("--model")
            .arg(format!("identity:{WIDTH}"))
            .args(["--udp", &format!("0.0.0.0:{PORT}"), "--allow", "10.199.7.0/24"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(station.stderr.take().unwrap()).read_line(&mut line).unwrap();
        self.station = Some(station);
        assert!(line.starts_with("ready udp=0.0.0.0:7000"), "{line}");
    }
}

#[test]
fn residuals_cross_a_real_link_and_outlive_its_faults() {
    let mut link = match Link::new() {
        Ok(link) => link,
        Err(reason) => {
            eprintln!("skipped: no network namespaces here: {reason}");
            return;
        }
    };
    link.start_station();
    let mut inside = link
        .client_side
        .command(std::env::current_exe().unwrap().to_str().unwrap())
        .args(["--exact", "inside_the_namespace", "--ignored", "--nocapture"])
        .env(NAMES, format!("{} {}", link.station_side.name, link.client_side.name))
        .spawn()
        .unwrap();
    let mut status = None;
    common::until_blocking_for("the client inside", Duration::from_secs(120), || {
        status = inside.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success());
}

/// One session of residuals through the station.
struct Session {
    client: Client,
    pos: usize,
}

impl Session {
    /// `seq` more positions, which must come back bit for bit.
    async fn forward(&mut self, seq: usize) {
        let values: Vec<f32> = (0..seq * WIDTH).map(|n| (self.pos * 31 + n) as f32 * 0.001).collect();
        let mut body = Vec::new();
        residual::encode_f32s(&values, &mut body);
        let pos = self.pos as u64;
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("session", "link").unsigned("pos", pos);
        };
        let reply = within("a residual", self.client.request(Route::FORWARD, meta, &body)).await.unwrap();
        assert_eq!(reply.number("pos"), Some(pos));
        assert!(reply.body[..] == body[..], "{seq} positions at {pos} came back changed");
        self.pos += seq;
    }

    async fn send_errors(&self) -> u64 {
        let reply = within("HEALTH", self.client.request(Route::HEALTH, |_| (), &[])).await.unwrap();
        reply.number("send_errors").unwrap()
    }

    /// Breaks the way back, asks, and mends it when the request must have been repeated in vain.
    async fn outlive(&mut self, break_it: impl FnOnce(), mend_it: impl FnOnce() + Send) {
        break_it();
        let request = self.forward(1);
        tokio::pin!(request);
        // This is about repeated requests: time has to pass, more than three repetitions take.
        tokio::select! {
            () = &mut request => panic!("answered over a broken way"),
            () = tokio::time::sleep(Duration::from_millis(1200)) => mend_it(),
        }
        request.await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "runs inside a namespace, by residuals_cross_a_real_link_and_outlive_its_faults"]
async fn inside_the_namespace() {
    let Ok(names) = std::env::var(NAMES) else {
        eprintln!("skipped: {NAMES} is not set");
        return;
    };
    let (station_side, client_side) = names.split_once(' ').unwrap();
    let options = ClientOptions { first_retry: Duration::from_millis(100), ..ClientOptions::default() };
    let address = StationAddress::Udp(format!("{STATION}:{PORT}"));
    let client = Client::connect(&address, options).await.unwrap();
    assert_eq!(within("HELLO", client.hello()).await.unwrap().model.hidden_dim, WIDTH);
    let mut session = Session { client, pos: 0 };
    for _ in 0..50 {
        session.forward(1).await;
    }
    // As many as a datagram holds: 57,344 bytes in 39 packets, each way.
    for _ in 0..20 {
        session.forward(4).await;
    }
    assert_eq!(session.send_errors().await, 0);

    // The address must be proven before four bytes may ask for 14 KB; the client does that by itself.
    let other = Client::connect(&address, ClientOptions::default()).await.unwrap();
    let reply = within("EMBED", other.request(Route::EMBED, |_| (), &7_u32.to_le_bytes())).await.unwrap();
    assert_eq!(reply.body.len(), 4 * WIDTH);

    let route = |verb: &str| {
        let source = format!("-n {station_side} route {verb} 10.199.7.0/24 dev v0 src {STATION}");
        move || ip_ok(&source)
    };
    session.outlive(route("del"), route("add")).await;
    assert!(session.send_errors().await > 0, "the station noticed");
    session.forward(4).await;

    let down = format!("-n {station_side} link set v0 down");
    let up = format!("-n {station_side} link set v0 up");
    session.outlive(|| ip_ok(&down), || ip_ok(&up)).await;
    session.forward(4).await;

    // A port that refuses is reported for what it is.
    let nobody = StationAddress::Udp(format!("{STATION}:9"));
    let client = Client::connect(&nobody, ClientOptions::default()).await.unwrap();
    let error = within("a refusal", client.hello()).await.unwrap_err();
    assert!(error.is_unreachable(), "{error}");

    if Command::new("nft").arg("--version").output().is_err() {
        eprintln!("skipped: no nft here, so nothing refuses datagrams by ICMP");
        return;
    }
    let nft = |rules: &str| {
        let output = Command::new("ip").args(["netns", "exec", client_side, "nft", rules]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    for kind in ["host-unreachable", "port-unreachable", "admin-prohibited"] {
        let rules = format!(
            "table ip lab {{ chain c {{ type filter hook input priority 0; udp sport {PORT} counter reject with icmp type {kind}; }}; }}"
        );
        session.outlive(|| nft(&rules), || nft("delete table ip lab")).await;
        session.forward(4).await;
    }
}
