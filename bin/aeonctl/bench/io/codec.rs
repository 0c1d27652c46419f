//! Frames in and out of memory, against a plain JavaScript codec under Node.

use std::{
    hint::black_box,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use aeon_proto::frame::{Flags, Frame};
use anyhow::Context as _;
use nix::time::ClockId;

use super::figures::{Bound, Plan, Row, Variant, interleave};

/// A codec as one writes it without thinking of speed; it answers each line with a measurement.
const PEER: &str = include_str!("codec.mjs");
/// Bytes of a payload.
const PAYLOAD_LEN: usize = 140;
/// Frames of one flush, and of one buffer to decode.
const FRAMES: u32 = 64;
/// Times that the buffer is filled between two looks at the clock.
const REPEATS: u32 = 16;

/// Node, if there is one.
struct Node {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Node {
    fn start() -> Option<Self> {
        let command = Command::new("node")
            .args(["--input-type=module", "--eval", PEER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn();
        let mut child = command.ok()?;
        let (requests, answers) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
        Some(Self { child, requests, answers })
    }

    /// ns of one encode and one decode.
    fn measure(&mut self, slice: Duration) -> anyhow::Result<Vec<f64>> {
        writeln!(self.requests, "{PAYLOAD_LEN} {}", slice.as_secs_f64() * 1e3)?;
        let mut line = String::new();
        self.answers.read_line(&mut line).context("reading from node")?;
        let figures: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
        figures.with_context(|| format!("node answered {line:?}"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The time that this thread ran; what others take of the core does not count.
fn thread_time() -> anyhow::Result<Duration> {
    Ok(ClockId::CLOCK_THREAD_CPUTIME_ID.now().context("reading the thread's clock")?.into())
}

/// Time of one frame in ns, by repeating `work` (which handles [`FRAMES`]) for a slice.
fn per_frame(slice: Duration, mut work: impl FnMut()) -> anyhow::Result<f64> {
    let (started, mut frames) = (thread_time()?, 0_u32);
    loop {
        for _ in 0..REPEATS {
            work();
        }
        frames += REPEATS * FRAMES;
        let ran = thread_time()? - started;
        if ran >= slice {
            return Ok(ran.as_nanos() as f64 / f64::from(frames));
        }
    }
}

fn encode(payload: &[u8], out: &mut Vec<u8>) {
    out.clear();
    for sequence in 0..FRAMES {
        let frame = Frame { stream_id: 3, sequence, flags: Flags::NONE, payload: black_box(payload) };
        frame.encode(out).unwrap_or_default();
    }
    black_box(out);
}

fn decode(bytes: &[u8]) {
    let mut rest = black_box(bytes);
    while let Some((frame, len)) = Frame::decode_prefix(rest) {
        black_box(frame);
        rest = rest.get(len..).unwrap_or_default();
    }
}

/// Encoding by copy into one buffer, and decoding borrowed slices. Nothing if there is no Node.
pub(super) fn measure(plan: Plan) -> anyhow::Result<Vec<Row>> {
    let Some(mut node) = Node::start() else {
        eprintln!("codec: left out, there is no `node` to compare with");
        return Ok(Vec::new());
    };
    let payload = vec![7; PAYLOAD_LEN];
    let mut out = Vec::new();
    encode(&payload, &mut out);
    let bytes = out.clone();
    let theirs: Variant<'_> = Box::new(move |slice| node.measure(slice));
    let ours: Variant<'_> = Box::new(move |slice| {
        Ok(vec![per_frame(slice / 2, || encode(&payload, &mut out))?, per_frame(slice / 2, || decode(&bytes))?])
    });
    let figures = interleave(plan, &mut [theirs, ours])?;
    let [theirs, ours] = &figures[..] else { anyhow::bail!("two variants give two results") };
    let row = |what: &str, figure, limit, goal| {
        let what = format!("{what} of {PAYLOAD_LEN} B, times JavaScript");
        Row::of(("codec", what, "ns"), (theirs, ours), figure, Bound::AtLeast { limit, goal })
    };
    Ok(vec![row("encode", 0, 60.0, 100.0), row("decode", 1, 30.0, 45.0)])
}
