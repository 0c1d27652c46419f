//! What a station adds to a round trip over a Unix socket and UDP, beside an echo over the same carrier.
//!
//! The echo is another thread that reads a message of the same size and writes it back, with nothing in between: the
//! carrier's own floor. Client and echo block; one request is in flight. Rounds of both alternate. What the model takes is
//! told by the station itself (`timing`) and taken off, so that what is left is the hop.

use std::{
    io::{Read, Write},
    net::UdpSocket,
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use aeon_proto::{
    frame::{Flags, Frame},
    payload::{FrameWriter, Payload},
    route::Route,
};
use aeon_station::{
    config::{LimitSettings, ModelSettings},
    model::session::random_name,
};
use anyhow::Context as _;
use clap::Args;
use serde_json::json;

use super::local::Local;
use crate::{Context, usage};

/// Requests of one side before the other has its turn.
const SLICE: usize = 50;
/// A peer that is silent for so long is gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// Options of `aeonctl bench hop`.
#[derive(Debug, Args)]
pub(crate) struct Hop {
    /// Model to serve, as for aeon-node --model
    #[arg(long, value_name = "M", default_value = "identity:576")]
    model: String,
    /// Layers to serve, LO..HI; all of them by default
    #[arg(long, value_name = "LO..HI")]
    layers: Option<String>,
    /// Requests of each side on each carrier
    #[arg(long, value_name = "N", default_value_t = 3000)]
    requests: usize,
}

/// One end of a carrier.
enum Socket {
    Unix(UnixStream),
    Udp(UdpSocket),
}

impl Socket {
    fn send(&mut self, frame: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Unix(socket) => socket.write_all(&[&(frame.len() as u32).to_be_bytes()[..], frame].concat()),
            Self::Udp(socket) => socket.send(frame).map(|_| ()),
        }
    }

    fn receive(&mut self, buffer: &mut Vec<u8>) -> std::io::Result<()> {
        match self {
            Self::Unix(socket) => {
                let mut prefix = [0; 4];
                socket.read_exact(&mut prefix)?;
                buffer.resize(u32::from_be_bytes(prefix) as usize, 0);
                socket.read_exact(buffer)
            }
            Self::Udp(socket) => {
                buffer.resize(usize::from(u16::MAX), 0);
                let len = socket.recv(buffer)?;
                buffer.truncate(len);
                Ok(())
            }
        }
    }

    /// One end of this carrier whose other end sends back `reply` for every message.
    fn floor(&self, mut reply: Vec<u8>) -> std::io::Result<Self> {
        let (near, mut far) = match self {
            Self::Unix(_) => {
                let (near, far) = UnixStream::pair()?;
                near.set_read_timeout(Some(PATIENCE))?;
                (Self::Unix(near), Self::Unix(far))
            }
            Self::Udp(_) => {
                let (near, far) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
                near.connect(far.local_addr()?)?;
                far.connect(near.local_addr()?)?;
                near.set_read_timeout(Some(PATIENCE))?;
                (Self::Udp(near), Self::Udp(far))
            }
        };
        std::thread::spawn(move || {
            let mut buffer = Vec::new();
            // An empty message ends it, since nobody closes a UDP socket.
            while far.receive(&mut buffer).is_ok() && !buffer.is_empty() {
                // The bytes that came are those that go, as far as there are enough of them.
                let len = buffer.len().min(reply.len());
                if let (Some(to), Some(from)) = (reply.get_mut(..len), buffer.get(..len)) {
                    to.copy_from_slice(from);
                }
                if far.send(&reply).is_err() {
                    return;
                }
            }
        });
        Ok(near)
    }
}

/// Microseconds of one request to the station.
struct Told {
    round_trip: f64,
    queue: f64,
    lift: f64,
    compute: f64,
}

/// A residual as the next position of a session.
fn request(dim: usize, session: &str, sequence: u32, pos: u64) -> anyhow::Result<Vec<u8>> {
    let mut frame = Vec::new();
    let mut writer = FrameWriter::new(&mut frame, Route::FORWARD.0, sequence, Flags::NONE);
    writer.meta().string("session", session).unsigned("pos", pos).boolean("timing", true);
    for index in 0..dim {
        writer.body().extend_from_slice(&(index as f32 / dim as f32 - 0.5).to_le_bytes());
    }
    writer.finish()?;
    Ok(frame)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// What a reply says of its time, if it is a success.
fn timing(reply: &[u8]) -> anyhow::Result<[f64; 3]> {
    let payload = Payload::decode(Frame::decode_exact(reply)?.payload)?;
    let meta: serde_json::Value = serde_json::from_str(payload.meta)?;
    let status = meta.get("status").and_then(serde_json::Value::as_u64);
    anyhow::ensure!(status == Some(200), "the station answered {}", payload.meta);
    let times = meta.get("timing").context("an answer without timing")?;
    let stage = |name: &str| times.get(name).and_then(serde_json::Value::as_f64).context("an answer without a stage");
    Ok([stage("queue_us")?, stage("lift_us")?, stage("compute_us")?])
}

impl Hop {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        if self.requests == 0 {
            return Err(usage("--requests is 0, at least 1 is needed"));
        }
        let model =
            ModelSettings { model: Some(self.model.clone()), layers: self.layers.clone(), ..ModelSettings::default() };
        let local = Local::start(model, LimitSettings::default()).await?;
        let info = local.node.station().model().info().clone();
        let socket = UnixStream::connect(&local.socket)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut carriers = vec![("Unix socket", Socket::Unix(socket))];
        if let Some(address) = local.node.udp() {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            socket.connect(address)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            carriers.push(("UDP", Socket::Udp(socket)));
        }
        let mut rows = Vec::new();
        if !context.json {
            println!("{}, layers {:?}, one residual of {} values", info.name, info.layers, info.hidden_dim);
        }
        for (name, socket) in carriers {
            let write = || local.node.station().counters().stages.write.snapshot();
            let before = write();
            let requests = self.requests;
            let (dim, context_len) = (info.hidden_dim, info.max_position);
            let measured =
                tokio::task::spawn_blocking(move || measure(name, socket, dim, context_len, requests)).await??;
            let after = write();
            let writing = 1e6 * (after.sum - before.sum) / (after.count - before.count).max(1) as f64;
            let Measured { floor, told } = measured;
            let of = |figure: fn(&Told) -> f64| told.iter().map(figure).collect::<Vec<_>>();
            let hop = of(|told| told.round_trip - told.compute);
            let (floor50, floor99) = (percentile(floor.clone(), 50), percentile(floor, 99));
            let (hop50, hop99) = (percentile(hop.clone(), 50), percentile(hop, 99));
            let stages = [of(|told| told.queue), of(|told| told.lift), of(|told| told.compute)];
            let [queue, lift, compute] = stages.map(|figures| percentile(figures, 50));
            if context.json {
                rows.push(json!({
                    "carrier": name, "floor_p50_us": floor50, "floor_p99_us": floor99, "hop_p50_us": hop50,
                    "hop_p99_us": hop99, "added_p50_us": hop50 - floor50, "added_p99_us": hop99 - floor99,
                    "queue_us": queue, "lift_us": lift, "compute_us": compute, "write_us": writing,
                }));
                continue;
            }
            println!("{name}");
            println!("  floor     p50 {floor50:>7.1} us, p99 {floor99:>7.1} us");
            println!("  hop       p50 {hop50:>7.1} us, p99 {hop99:>7.1} us, without compute");
            println!("  added     p50 {:>7.1} us, p99 {:>7.1} us", hop50 - floor50, hop99 - floor99);
            println!("  of which  queue {queue:.1}, lift {lift:.1}, write {writing:.1} us; compute {compute:.1} us");
        }
        local.node.stop().await;
        if context.json {
            println!("{}", json!({ "model": info.name, "dim": info.hidden_dim, "hop": rows }));
        }
        Ok(())
    }
}

fn percentile(mut figures: Vec<f64>, share: usize) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures.get((figures.len() * share / 100).min(figures.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

struct Measured {
    /// Microseconds of each round trip to the echo.
    floor: Vec<f64>,
    told: Vec<Told>,
}

/// Sends requests to the station, one after the other.
struct Asker<'a> {
    name: &'a str,
    session: String,
    socket: Socket,
    sequence: u32,
    dim: usize,
    /// Positions of the session before it begins again: attention is not what is measured here.
    session_len: u32,
    reply: Vec<u8>,
}

impl Asker<'_> {
    fn frame(&mut self) -> anyhow::Result<Vec<u8>> {
        let pos = self.sequence % self.session_len;
        self.sequence += 1;
        request(self.dim, &self.session, self.sequence, u64::from(pos))
    }

    fn ask(&mut self) -> anyhow::Result<Told> {
        let frame = self.frame()?;
        let started = Instant::now();
        self.socket.send(&frame)?;
        self.socket.receive(&mut self.reply).with_context(|| format!("no answer over {}", self.name))?;
        let round_trip = micros(started.elapsed());
        let [queue, lift, compute] = timing(&self.reply)?;
        Ok(Told { round_trip, queue, lift, compute })
    }
}

fn measure(name: &str, socket: Socket, dim: usize, context_len: usize, requests: usize) -> anyhow::Result<Measured> {
    let session_len = context_len.clamp(1, 16) as u32;
    let mut asker = Asker { name, session: random_name(), socket, sequence: 0, dim, session_len, reply: Vec::new() };
    for _ in 0..SLICE {
        asker.ask()?;
    }
    let mut echo = asker.socket.floor(asker.reply.clone())?;
    let message = request(dim, &asker.session, 0, 0)?;
    let (mut floor, mut told, mut buffer) = (Vec::new(), Vec::new(), Vec::new());
    // What a wake-up costs depends on where the scheduler puts the two ends, which changes within a run.
    while told.len() < requests {
        for _ in 0..SLICE {
            let started = Instant::now();
            echo.send(&message)?;
            echo.receive(&mut buffer).with_context(|| format!("no echo over {name}"))?;
            floor.push(micros(started.elapsed()));
        }
        for _ in 0..SLICE {
            told.push(asker.ask()?);
        }
    }
    if let Socket::Udp(socket) = &echo {
        socket.send(&[])?;
    }
    Ok(Measured { floor, told })
}
