//! `aeonctl doctor` on meshes that are broken in each way that it looks for, and on one that is not.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{net::SocketAddr, path::Path, process::Output, sync::Arc};

use aeon_station::{
    client::{
        ClientOptions, StationAddress,
        doctor::{Examination, Finding, Severity, diagnose, examine},
        hello::RemoteBasis,
    },
    config::Settings,
};
use common::{Lab, within};
use serde_json::Value;
use tokio::net::UdpSocket;

const VERSION: &str = env!("CARGO_PKG_VERSION");

async fn layers(range: &str) -> Lab {
    layers_with(range, |_| ()).await
}

async fn layers_with(range: &str, edit: impl FnOnce(&mut Settings)) -> Lab {
    Lab::start("demo", |settings| {
        settings.model.layers = Some(range.to_owned());
        edit(settings);
    })
    .await
}

/// With the demo basis, or what is in another folder.
fn bases(settings: &mut Settings, folder: &Path) {
    settings.model.bases = Some(folder.to_owned());
    settings.model.methodologies = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("bases/methodologies"));
}

fn demo_bases(settings: &mut Settings) {
    bases(settings, &Path::new(env!("CARGO_MANIFEST_DIR")).join("bases/demo"));
}

async fn examine_all(stations: &[StationAddress]) -> Vec<Examination> {
    let mut examinations = Vec::new();
    for station in stations {
        examinations.push(within("an examination", examine(station, &ClientOptions::default())).await);
    }
    examinations
}

/// Findings as severity, check and stations, to compare them.
fn brief(findings: &[Finding]) -> Vec<(Severity, &str, Vec<String>)> {
    findings.iter().map(|it| (it.severity, it.check, it.stations.clone())).collect()
}

fn names(stations: &[&StationAddress]) -> Vec<String> {
    stations.iter().map(ToString::to_string).collect()
}

async fn findings(stations: &[StationAddress]) -> Vec<Finding> {
    diagnose(&examine_all(stations).await, VERSION)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_mesh_is_called_good_on_every_carrier() {
    let (first, last) = (layers_with("0..3", demo_bases).await, layers_with("3..6", demo_bases).await);
    let left = [first.address_uds(), first.address_tcp(), first.address_udp()];
    let right = [last.address_udp(), last.address_uds(), last.address_tcp()];
    for (left, right) in left.into_iter().zip(right) {
        let examinations = examine_all(&[left, right]).await;
        assert_eq!(diagnose(&examinations, VERSION), []);
        for it in &examinations {
            assert!(it.round_trip.is_some() && !it.is_draining, "{it:?}");
            // One clock: what it differs by is what the measurement errs by.
            let error = i64::try_from(it.round_trip.unwrap().as_millis()).unwrap() + 1;
            assert!(it.clock_offset_ms.unwrap().abs() <= error, "{it:?}");
            let is_udp = matches!(it.station, StationAddress::Udp(_));
            assert_eq!(it.datagram_len, is_udp.then_some(65_507), "{it:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stations_that_do_not_answer_are_named_with_what_to_look_at() {
    let good = layers("0..6").await;
    let dir = tempfile::tempdir().unwrap();
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mute = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let options = ClientOptions { request_timeout: std::time::Duration::from_secs(1), ..ClientOptions::default() };
    for (station, word) in [
        (StationAddress::Unix(dir.path().join("s")), "systemctl status"),
        (StationAddress::Tcp(gone.to_string()), "firewalls"),
        (StationAddress::Udp(gone.to_string()), "--allow"),
        (StationAddress::Udp(mute.local_addr().unwrap().to_string()), "--allow"),
    ] {
        let silent = within("an examination", examine(&station, &options)).await;
        let good = examine(&good.address_uds(), &options).await;
        let findings = diagnose(&[good, silent], VERSION);
        assert_eq!(brief(&findings), [(Severity::Error, "reach", names(&[&station]))]);
        assert!(findings[0].advice.contains(word), "{findings:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_that_are_missing_doubled_or_out_of_order() {
    let (a, b, c) = (layers("0..2").await, layers("2..4").await, layers("4..6").await);
    let (wide, all) = (layers("1..5").await, layers("0..6").await);
    let [a, b, c, wide, all] = [a, b, c, wide, all].map(|lab| {
        let address = lab.address_uds();
        (lab, address)
    });
    let mesh = |stations: &[&StationAddress]| {
        let stations: Vec<StationAddress> = stations.iter().map(|it| (*it).clone()).collect();
        async move { findings(&stations).await }
    };
    let (a, b, c, wide, all) = (&a.1, &b.1, &c.1, &wide.1, &all.1);
    assert_eq!(mesh(&[a, b, c]).await, []);
    for (stations, about, words) in [
        (vec![a, c], vec![a, c], ["2..4 are held by none", "--layers 2..4"]),
        (vec![b, c], vec![b], ["0..2 are held by none", "--layers 0..2"]),
        (vec![a, b], vec![b], ["4..6 are held by none", "--layers 4..6"]),
        (vec![a, all], vec![a, all], ["both hold layers 0..2", "--layers 2..6"]),
        (vec![all, b], vec![all, b], ["both hold layers 2..4", "held before it"]),
    ] {
        let findings = mesh(&stations).await;
        assert_eq!(brief(&findings), [(Severity::Error, "layers", names(&about))], "{findings:?}");
        let [problem, advice] = words;
        assert!(findings[0].problem.contains(problem) && findings[0].advice.contains(advice), "{findings:?}");
    }
    let findings = mesh(&[c, a, b]).await;
    assert_eq!(brief(&findings), [(Severity::Error, "order", names(&[c, a, b]))]);
    assert_eq!(findings[0].advice, format!("write --station {a} --station {b} --station {c}"));
    // Two faults at once are both told.
    let findings = mesh(&[a, wide]).await;
    assert_eq!(findings.len(), 2, "{findings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_and_a_station_that_drains() {
    let (demo, other) = (layers("0..6").await, Lab::start("identity:128:512", |_| ()).await);
    let stations = [demo.address_uds(), other.address_uds()];
    let found = findings(&stations).await;
    assert!(brief(&found).contains(&(Severity::Error, "model", names(&[&stations[0], &stations[1]]))), "{found:?}");
    demo.node.station().drain();
    let found = findings(&stations[..1]).await;
    assert_eq!(brief(&found), [(Severity::Error, "draining", names(&[&stations[0]]))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn bases_that_the_next_station_does_not_have() {
    let (with, without) = (layers_with("0..3", demo_bases).await, layers("3..6").await);
    let stations = [with.address_uds(), without.address_uds()];
    let found = findings(&stations).await;
    assert_eq!(brief(&found), [(Severity::Warning, "basis", names(&[&stations[0], &stations[1]]))]);
    assert!(found[0].problem.contains("boundary 3") && found[0].advice.contains("reload"), "{found:?}");
    // The other way round, and with a basis on both that are different ones.
    let [with, without] = stations;
    let mut examinations = examine_all(&[with, without]).await;
    let basis: RemoteBasis = examinations[0].hello.as_ref().unwrap().bases[0].clone();
    let (left, right) = examinations.split_at_mut(1);
    let (left, right) = (left[0].hello.as_mut().unwrap(), right[0].hello.as_mut().unwrap());
    right.bases = std::mem::take(&mut left.bases);
    let both = names(&[&examinations[0].station, &examinations[1].station]);
    assert_eq!(brief(&diagnose(&examinations, VERSION)), [(Severity::Warning, "basis", both.clone())]);
    for (edit, expected) in [
        (None, None),
        (Some(RemoteBasis { basis_fp: "0x00000001".into(), ..basis.clone() }), Some((Severity::Warning, "basis"))),
        (Some(RemoteBasis { blake3: "00".repeat(32), ..basis.clone() }), Some((Severity::Error, "basis"))),
        (
            Some(RemoteBasis { methodology: "0x00000001".into(), ..basis.clone() }),
            Some((Severity::Error, "methodology")),
        ),
        // No components for the boundary between them: as if it were not there.
        (Some(RemoteBasis { boundaries: Vec::new(), ..basis.clone() }), Some((Severity::Warning, "basis"))),
    ] {
        examinations[0].hello.as_mut().unwrap().bases = vec![edit.unwrap_or_else(|| basis.clone())];
        let found = diagnose(&examinations, VERSION);
        let expected: Vec<_> = expected.into_iter().map(|(severity, check)| (severity, check, both.clone())).collect();
        assert_eq!(brief(&found), expected, "{found:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_clocks_and_limits() {
    let lab = layers("0..6").await;
    let station = lab.address_uds();
    type Edit = fn(&mut Examination);
    let cases: [(Edit, Severity, &str, &str); 6] = [
        (|it| it.hello.as_mut().unwrap().station.version = "0.0.9".into(), Severity::Warning, "version", "0.0.9"),
        (
            |it| it.hello.as_mut().unwrap().content_type = "application/x-aeon-flow".into(),
            Severity::Warning,
            "protocol",
            "version 1",
        ),
        (|it| it.clock_offset_ms = Some(90_000), Severity::Warning, "clock", "90.0 s ahead of"),
        (|it| it.clock_offset_ms = Some(-5_000), Severity::Warning, "clock", "5.0 s behind"),
        (|it| it.hello.as_mut().unwrap().limits.max_frame = 512, Severity::Error, "frame", "512"),
        (|it| it.station = "udp:10.0.0.1:7".parse().unwrap(), Severity::Error, "datagram", "needs 768"),
    ];
    for (edit, severity, check, word) in cases {
        let mut examinations = examine_all(std::slice::from_ref(&station)).await;
        // What differs by less than the way there and back takes is no fault of a clock.
        examinations[0].clock_offset_ms = Some(900);
        assert_eq!(diagnose(&examinations, VERSION), []);
        edit(&mut examinations[0]);
        let found = diagnose(&examinations, VERSION);
        assert_eq!(brief(&found), [(severity, check, names(&[&examinations[0].station]))]);
        assert!(found[0].problem.contains(word), "{found:?}");
    }
}

/// A network on which datagrams over a size are lost, as where fragments are dropped.
async fn narrow_network(station: SocketAddr, max: usize) -> SocketAddr {
    let outside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = outside.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = vec![0; 65_536];
        let mut inside = std::collections::HashMap::new();
        let outside = Arc::new(outside);
        loop {
            let (len, peer) = outside.recv_from(&mut buffer).await.unwrap();
            let known = inside.get(&peer).map(Arc::clone);
            let socket = match known {
                Some(socket) => socket,
                None => {
                    let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                    socket.connect(station).await.unwrap();
                    let (back, out) = (Arc::clone(&socket), Arc::clone(&outside));
                    tokio::spawn(async move {
                        let mut buffer = vec![0; 65_536];
                        while let Ok(len) = back.recv(&mut buffer).await {
                            out.send_to(&buffer[..len], peer).await.unwrap();
                        }
                    });
                    inside.insert(peer, Arc::clone(&socket));
                    socket
                }
            };
            if len <= max {
                socket.send(&buffer[..len]).await.unwrap();
            }
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn datagrams_that_are_lost_for_their_size() {
    let lab = layers("0..6").await;
    let narrow = StationAddress::Udp(narrow_network(lab.udp(), 9000).await.to_string());
    let examinations = examine_all(std::slice::from_ref(&narrow)).await;
    let len = examinations[0].datagram_len.unwrap();
    assert!((9000 - 256..=9000).contains(&len), "{len}");
    let found = diagnose(&examinations, VERSION);
    assert_eq!(brief(&found), [(Severity::Error, "datagram", names(&[&narrow]))]);
    assert!(found[0].advice.contains(&format!("--max-datagram {len}")), "{found:?}");
    // A station that announces what gets through is a good one.
    let lab = layers_with("0..6", |settings| settings.limits.max_datagram = Some(8000)).await;
    let narrow = StationAddress::Udp(narrow_network(lab.udp(), 9000).await.to_string());
    assert_eq!(findings(&[narrow]).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mesh_with_a_key_is_examined_with_it_and_asked_for_without() {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), "a secret of this test").unwrap();
    let lab = layers_with("0..6", |settings| settings.listen.auth_key_file = Some(key.path().to_owned())).await;
    let options = |secret: Option<&[u8]>| ClientOptions {
        auth: secret.map(|secret| aeon_proto::auth::Key::from_secret(secret).unwrap()),
        health_interval: Some(std::time::Duration::from_millis(200)),
        ..ClientOptions::default()
    };
    for station in [lab.address_tcp(), lab.address_udp()] {
        let look = async |secret: Option<&'static [u8]>| {
            let options = options(secret);
            let examined = within("an examination", examine(&station, &options)).await;
            diagnose(&[examined], VERSION)
        };
        // The room that signatures take is no fault of the network.
        assert_eq!(brief(&look(Some(b"a secret of this test")).await), []);
        for wrong in [None, Some(&b"another secret of a test"[..])] {
            let findings = look(wrong).await;
            assert!(findings[0].advice.contains("--auth-key-file"), "{station}: {findings:?}");
        }
    }
}

async fn doctor(arguments: &[&str]) -> Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_aeonctl"));
    command.arg("doctor").args(arguments);
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_program_says_it_in_text_and_json_and_by_its_exit_code() {
    let (first, last) = (layers("0..3").await, layers("3..6").await);
    let (first, last) = (first.address_uds().to_string(), last.address_udp().to_string());
    let good = ["--station", &first, "--station", &last];
    let output = doctor(&good).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("nothing is wrong with this mesh") && text.contains("layers 3..6 of 6"), "{text}");
    assert!(text.contains("datagrams up to 65507 bytes"), "{text}");
    let output = doctor(&[&good[..], &["--json"]].concat()).await;
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["ok"], &json["findings"]), (&true.into(), &Value::Array(Vec::new())));
    assert_eq!(json["stations"][1]["layers"], serde_json::json!([3, 6]));

    let output = doctor(&["--station", &last]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("error: ") && text.contains("  do: start a station with --layers 0..3"), "{text}");

    let output = doctor(&["--json", "--station", &first, "--station", "uds:/nowhere/s"]).await;
    assert_eq!(output.status.code(), Some(69));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["ok"], false);
    assert_eq!((&json["stations"][0]["answers"], &json["stations"][1]["answers"]), (&true.into(), &false.into()));
    let checks: Vec<&Value> = json["findings"].as_array().unwrap().iter().map(|it| &it["check"]).collect();
    assert_eq!(checks, ["reach", "layers"]);
    assert_eq!(doctor(&[]).await.status.code(), Some(64));
}
