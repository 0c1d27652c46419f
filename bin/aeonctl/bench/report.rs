//! `aeonctl bench report`: one page with the figures that people ask for first.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use super::{
    io::sweep::{self, Payloads, Point},
    mesh::{Carrier, Mesh},
};
use crate::{
    Context,
    chart::{self, Axis, Chart, Scale, Series},
};

/// Sessions side by side on one station.
const SESSIONS: [usize; 5] = [1, 2, 4, 8, 16];
/// Stations that share the six layers of the demo model.
const STATIONS: [u32; 4] = [1, 2, 3, 6];
/// What others take for a round trip over a Unix socket, as multiples of the same floor at 174 and at 14,370 bytes:
/// medians of one interleaved run on one core with the releases of late 2026 (tarpc 0.37, hyper 1, ZeroMQ 4.3, tonic
/// 0.14), told here because a report should not need to build them.
const PEERS: [(&str, f64, Option<f64>); 4] = [
    ("tarpc", 4.7, Some(3.4)),
    ("HTTP/1 (hyper)", 4.8, Some(3.0)),
    ("ZeroMQ", 6.9, None),
    ("gRPC (tonic)", 12.0, Some(9.1)),
];
const PEER_BYTES: [f64; 2] = [174.0, 14_370.0];

/// Options of `aeonctl bench report`.
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Fewer and shorter rounds: good enough for the shape of the curves
    #[arg(long)]
    quick: bool,
    /// File to write: .svg holds the charts alone, anything else is an HTML page
    #[arg(long, short, value_name = "FILE", default_value = "aeon-bench.html")]
    out: PathBuf,
}

/// Everything that was measured.
struct Measured {
    payloads: Payloads,
    connections: Vec<Point>,
    /// Tokens per second by sessions on one station.
    sessions: Vec<(usize, f64)>,
    /// Tokens per second of one session by stations, over Unix sockets and over UDP.
    stations: Vec<(u32, f64, f64)>,
}

impl Report {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        // A file that cannot be written should show before minutes of measuring.
        let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&self.out);
        drop(file.with_context(|| format!("writing {}", self.out.display()))?);
        let measured = self.measure(context).await?;
        let charts = measured.charts();
        let text = match self.out.extension().is_some_and(|extension| extension == "svg") {
            true => chart::stacked(&charts),
            false => measured.page(&charts),
        };
        std::fs::write(&self.out, text).with_context(|| format!("writing {}", self.out.display()))?;
        match context.json {
            true => println!("{}", measured.json()),
            false => println!("wrote {}", self.out.display()),
        }
        Ok(())
    }

    async fn measure(&self, context: &Context) -> anyhow::Result<Measured> {
        let is_quick = self.quick;
        eprintln!("measuring round trips and throughput by size ...");
        let payloads = pinned(move || sweep::payloads(is_quick)).await?;
        eprintln!("measuring connections ...");
        let connections = pinned(move || sweep::connections(is_quick)).await?;
        eprintln!("measuring sessions and stations ...");
        let one = Mesh::start(Carrier::Unix, 1).await?;
        let mut meshes = Vec::new();
        for count in STATIONS {
            meshes.push((Mesh::start(Carrier::Unix, count).await?, Mesh::start(Carrier::Udp, count).await?));
        }
        let runs = SESSIONS.map(|count| (&one, count)).into_iter();
        let runs: Vec<(&Mesh, usize)> =
            runs.chain(meshes.iter().flat_map(|(unix, udp)| [(unix, 1), (udp, 1)])).collect();
        let (tokens, rounds) = if is_quick { (40, 3) } else { (120, 9) };
        let mut rates = vec![Vec::new(); runs.len()];
        // They take turns, so that a busy machine slows all alike.
        for _ in 0..rounds {
            for ((mesh, sessions), rates) in runs.iter().zip(&mut rates) {
                rates.push(mesh.run(*sessions, tokens, &context.options).await?);
            }
        }
        let mut medians = rates.into_iter().map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        });
        let mut next = || medians.next().unwrap_or(f64::NAN);
        let sessions = SESSIONS.map(|count| (count, next())).to_vec();
        let stations = STATIONS.map(|count| (count, next(), next())).to_vec();
        drop(runs);
        for mesh in meshes.into_iter().flat_map(|(unix, udp)| [unix, udp]).chain([one]) {
            mesh.stop().await;
        }
        Ok(Measured { payloads, connections, sessions, stations })
    }
}

/// Runs on a thread of its own, so that pinning it to a core does not pin this process.
async fn pinned<T: Send + 'static>(measure: impl FnOnce() -> anyhow::Result<T> + Send + 'static) -> anyhow::Result<T> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("bench".to_owned()).spawn(move || {
        let _ = sender.send(measure());
    });
    thread.context("starting a thread")?;
    receiver.await.context("the measuring thread ended early")?
}

fn axis(label: &str, scale: Scale) -> Axis {
    Axis { label: label.to_owned(), scale }
}

fn series(name: &str, dashed: bool, points: impl IntoIterator<Item = (f64, f64)>) -> Series {
    Series { name: name.to_owned(), dashed, points: points.into_iter().collect() }
}

impl Measured {
    fn charts(&self) -> Vec<Chart> {
        let us = |ns: f64| ns / 1000.0;
        let floor = |points: &[Point]| points.iter().map(|point| (point.x, us(point.floor))).collect::<Vec<_>>();
        let ours = |points: &[Point]| points.iter().map(|point| (point.x, us(point.ours))).collect::<Vec<_>>();
        let mut trips = vec![
            series("aeon-station, p50", false, ours(&self.payloads.p50)),
            series("aeon-station, p99", false, ours(&self.payloads.p99)),
            series("floor (two threads, blocking calls), p50", false, floor(&self.payloads.p50)),
        ];
        for (name, small, large) in PEERS {
            let at = |bytes: f64, ratio: f64| {
                let point = self.payloads.p50.iter().find(|point| point.x == bytes)?;
                Some((bytes, ratio * us(point.floor)))
            };
            let points = [at(PEER_BYTES[0], small), large.and_then(|ratio| at(PEER_BYTES[1], ratio))];
            trips.push(series(&format!("{name}, published ratio x this floor"), true, points.into_iter().flatten()));
        }
        let rate = |ns: f64, bytes: f64| bytes / ns * 1000.0;
        let streamed = &self.payloads.streamed;
        let throughput = vec![
            series("aeon-station", false, streamed.iter().map(|point| (point.x, rate(point.ours, point.x)))),
            series("floor (epoll echo)", false, streamed.iter().map(|point| (point.x, rate(point.floor, point.x)))),
        ];
        let per_second = |ns: f64| 1e9 / ns;
        let connections = vec![
            series("aeon-station", false, self.connections.iter().map(|point| (point.x, per_second(point.ours)))),
            series(
                "floor (epoll echo)",
                false,
                self.connections.iter().map(|point| (point.x, per_second(point.floor))),
            ),
        ];
        let one = self.sessions.first().map_or(f64::NAN, |(_, rate)| *rate);
        let sessions = vec![
            series("aeon-station, one station", false, self.sessions.iter().map(|(n, rate)| (*n as f64, *rate))),
            series("one session alone", true, self.sessions.iter().map(|(n, _)| (*n as f64, one))),
        ];
        let alone = self.stations.first().map_or(f64::NAN, |(_, unix, _)| *unix);
        let stations = vec![
            series("Unix sockets", false, self.stations.iter().map(|(n, unix, _)| (f64::from(*n), *unix))),
            series("UDP on loopback", false, self.stations.iter().map(|(n, _, udp)| (f64::from(*n), *udp))),
            series("one station", true, self.stations.iter().map(|(n, ..)| (f64::from(*n), alone))),
        ];
        let chart = |title: &str, x: Axis, y: Axis, series| Chart { title: title.to_owned(), x, y, series };
        vec![
            chart(
                "Round trip over a Unix socket, by size",
                axis("bytes of a frame", Scale::Log),
                axis("µs", Scale::Log),
                trips,
            ),
            chart(
                "Throughput of one connection with requests in flight, by size (MB/s each way)",
                axis("bytes of a frame", Scale::Log),
                axis("MB/s", Scale::Log),
                throughput,
            ),
            chart(
                "Requests of 174 bytes per second, by connections with 4 in flight each",
                axis("connections", Scale::Log),
                axis("requests/s", Scale::Linear),
                connections,
            ),
            chart(
                "Tokens per second of the demo model, by sessions side by side",
                axis("sessions", Scale::Log),
                axis("tokens/s, all sessions", Scale::Linear),
                sessions,
            ),
            chart(
                "Tokens per second of one session, by stations that share the layers",
                axis("stations", Scale::Linear),
                axis("tokens/s", Scale::Linear),
                stations,
            ),
        ]
    }

    fn page(&self, charts: &[Chart]) -> String {
        let mut body = format!(
            "<p>aeon-station {}, {} {}, {}. Client, server and floor ran on one core and took turns; each point is the \
             median of the rounds. Other systems are drawn at their published multiples of the same floor.</p>\n",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::OS,
            std::env::consts::ARCH,
            chart::escaped(&processor())
        );
        for chart in charts {
            body += &chart.svg();
        }
        let us = |ns: f64| format!("{:.1}", ns / 1000.0);
        let both = self.payloads.p50.iter().zip(&self.payloads.p99).zip(&self.payloads.streamed);
        let rows: Vec<Vec<String>> = both
            .map(|((p50, p99), streamed)| {
                let ratio = |point: &Point| format!("{:.2}", point.ours / point.floor);
                let cells = [p50.x.to_string(), us(p50.floor), us(p50.ours), ratio(p50), us(p99.ours)];
                cells.into_iter().chain([us(streamed.ours), ratio(streamed)]).collect()
            })
            .collect();
        let head =
            ["bytes", "floor p50, µs", "p50, µs", "p50 / floor", "p99, µs", "in flight, µs", "in flight / floor"];
        body += &chart::table(&head, &rows);
        let rows: Vec<Vec<String>> = self
            .connections
            .iter()
            .map(|point| {
                vec![point.x.to_string(), us(point.floor), us(point.ours), format!("{:.2}", point.ours / point.floor)]
            })
            .collect();
        body += &chart::table(&["connections", "floor, µs a request", "µs a request", "ratio"], &rows);
        let one = self.sessions.first().map_or(f64::NAN, |(_, rate)| *rate);
        let rows: Vec<Vec<String>> = self
            .sessions
            .iter()
            .map(|(count, rate)| vec![count.to_string(), format!("{rate:.0}"), format!("{:.2}", rate / one)])
            .collect();
        body += &chart::table(&["sessions", "tokens/s", "beside one"], &rows);
        let rows: Vec<Vec<String>> = self
            .stations
            .iter()
            .map(|(count, unix, udp)| vec![count.to_string(), format!("{unix:.0}"), format!("{udp:.0}")])
            .collect();
        body += &chart::table(&["stations", "tokens/s, Unix", "tokens/s, UDP"], &rows);
        chart::page("aeon-station: measurements", &body)
    }

    fn json(&self) -> Value {
        let points = |points: &[Point]| -> Vec<Value> {
            points.iter().map(|point| json!({"x": point.x, "floor_ns": point.floor, "ours_ns": point.ours})).collect()
        };
        json!({
            "round_trip_p50": points(&self.payloads.p50),
            "round_trip_p99": points(&self.payloads.p99),
            "in_flight": points(&self.payloads.streamed),
            "connections": points(&self.connections),
            "sessions": self.sessions.iter().map(|(n, rate)| json!({"sessions": n, "tokens_per_s": rate})).collect::<Vec<_>>(),
            "stations": self.stations.iter().map(|(n, unix, udp)| {
                json!({"stations": n, "unix_tokens_per_s": unix, "udp_tokens_per_s": udp})
            }).collect::<Vec<_>>(),
        })
    }
}

/// The processor's name, as the system gives it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name =
        text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    name.unwrap_or("unknown processor").to_owned()
}
