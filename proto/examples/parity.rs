//! One side of the parity test: sends every kind of body over real sockets and compares what the other side sends.
//!
//! ```text
//! cargo run -p aeon-proto --example parity -- SOCKET
//! ```
//!
//! Listens on a Unix socket and on a free UDP port, says `ready udp=PORT`, and waits for the peer, `proto/js/test/parity.js`.
//! Both make the same frames from the rules below, each with its own code. On the Unix socket the peer sends all its
//! frames, then this side; on UDP each datagram is answered by this side's frame of the same number. A byte that differs
//! is told, and the exit status is 1.

use std::{
    fmt::Display,
    io::{Read as _, Write as _},
    net::UdpSocket,
    os::unix::net::UnixListener,
    process::ExitCode,
    time::Duration,
};

use aeon_proto::{
    bwah,
    frame::{Flags, Frame, HEADER_LEN, MAX_FRAME_LEN, PREFIX_LEN},
    payload::FrameWriter,
    pcar, residual,
    route::Route,
};

/// Nothing waits longer than this.
const PATIENCE: Duration = Duration::from_secs(20);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(differences) if differences.is_empty() => ExitCode::SUCCESS,
        Ok(differences) => {
            differences.iter().for_each(|difference| eprintln!("{difference}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("parity: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<Vec<String>> {
    let path = std::env::args_os().nth(1).ok_or("usage: parity SOCKET")?;
    let frames = frames()?;
    let listener = UnixListener::bind(path)?;
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    udp.set_read_timeout(Some(PATIENCE))?;
    println!("ready udp={}", udp.local_addr()?.port());
    let mut differences = Vec::new();

    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    for (name, frame) in &frames {
        let mut prefix = [0; PREFIX_LEN];
        stream.read_exact(&mut prefix)?;
        let len = u32::from_be_bytes(prefix) as usize;
        if !(HEADER_LEN..=MAX_FRAME_LEN).contains(&len) {
            return Err(format!("{name}: a length of {len}").into());
        }
        let mut got = vec![0; len];
        stream.read_exact(&mut got)?;
        compare(format_args!("unix {name}"), frame, &got, &mut differences);
    }
    for (_, frame) in &frames {
        stream.write_all(&u32::try_from(frame.len())?.to_be_bytes())?;
        stream.write_all(frame)?;
    }

    let mut buffer = vec![0; 65_536];
    for (name, frame) in frames.iter().filter(|(_, frame)| frame.len() <= MAX_DATAGRAM) {
        let (len, peer) = udp.recv_from(&mut buffer)?;
        let got = buffer.get(..len).unwrap_or_default();
        compare(format_args!("udp {name}"), frame, got, &mut differences);
        udp.send_to(frame, peer)?;
    }
    Ok(differences)
}

const MAX_DATAGRAM: usize = 65_507;

/// Tells the first byte that differs. What is equal must also be exactly one frame.
fn compare(what: impl Display, expected: &[u8], got: &[u8], differences: &mut Vec<String>) {
    let first = expected.iter().zip(got).position(|(a, b)| a != b).unwrap_or(expected.len().min(got.len()));
    if expected != got {
        let (expected, got) = (expected.len(), got.len());
        differences.push(format!("{what}: byte {first} differs, {expected} bytes expected, {got} came"));
    } else if let Err(error) = Frame::decode_exact(got) {
        differences.push(format!("{what}: {error}"));
    } else {
        println!("{what}: {} bytes equal", got.len());
    }
}

/// Bit patterns that a careless codec changes, then a fixed sequence of finite numbers.
fn patterns(count: usize) -> Vec<u32> {
    let special = [0x8000_0000, 0x0000_0001, 0x7fc0_0001, 0xffa0_0000, 0xff80_0000, 0x7f7f_ffff];
    let rest = (0..count as u32).map(|n| (n.wrapping_mul(2_654_435_761) & 0x3fff_ffff) | 0x2000_0000);
    special.into_iter().chain(rest).take(count).collect()
}

fn floats(count: usize) -> Vec<f32> {
    patterns(count).into_iter().map(f32::from_bits).collect()
}

/// Every kind of body, by name.
fn frames() -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut frames = Vec::new();
    let mut add = |name, route: Route, sequence, flags, write: &dyn Fn(&mut FrameWriter<'_>) -> Result<()>| {
        let mut bytes = Vec::new();
        let mut frame = FrameWriter::new(&mut bytes, route.0, sequence, flags);
        write(&mut frame)?;
        frame.finish()?;
        frames.push((name, bytes));
        Ok::<(), Box<dyn std::error::Error>>(())
    };
    add("json", Route::HELLO, 1, Flags::NONE, &|frame| {
        let mut meta = frame.meta();
        meta.string("content_type", "application/x-aeon-flow; v=1").string("pad", "\"\\/\u{8}\u{c}\n\r\t\u{1}\u{7f}é𝄞");
        meta.boolean("timing", true).unsigneds("layers", [0, 6]).strings("accept", ["f32", "pcar"]);
        meta.raw("model", r#"{"hidden_dim":896,"bos":null}"#).unsigned("pos", 9_007_199_254_740_991);
        Ok(())
    })?;
    add("empty", Route::HEALTH, 0xffff_ffff, Flags::FIN, &|_| Ok(()))?;
    add("u32", Route::EMBED, 2, Flags::NONE, &|frame| {
        residual::encode_u32s(&[0, 1, 65_535, u32::MAX], frame.body());
        Ok(())
    })?;
    add("f32", Route::FORWARD, 3, Flags::NONE, &|frame| {
        frame.meta().string("session", "parity").unsigned("pos", 0);
        residual::encode_f32s(&floats(3584), frame.body());
        Ok(())
    })?;
    add("f32 of 64 positions", Route::FORWARD, 4, Flags::SUCCESS, &|frame| {
        frame.meta().unsigned("status", 200).string("body", "f32");
        residual::encode_f32s(&floats(64 * 896), frame.body());
        Ok(())
    })?;
    add("pcar", Route::FORWARD_PCA, 5, Flags::NONE, &|frame| {
        let header =
            pcar::Header { boundary: 3, k: 29, hidden_dim: 3584, methodology: 0xe18a_c075, basis_fp: 0xdead_beef };
        pcar::encode(&header, &floats(58), frame.body())?;
        Ok(())
    })?;
    add("bwah reply", Route::AMPLITUHEDRON_REPLAY, 6, Flags::SUCCESS, &|frame| {
        frame.meta().unsigned("status", 200);
        let reply = bwah::try_encode_amplituhedron_reply(true, Some(&floats(3584)), Some(&floats(7)))?;
        frame.body().extend_from_slice(&reply);
        Ok(())
    })?;
    add("bwah miss", Route::AMPLITUHEDRON_REPLAY, 7, Flags::SUCCESS, &|frame| {
        frame.meta().unsigned("status", 204);
        frame.body().extend_from_slice(&bwah::try_encode_amplituhedron_reply(false, None, None)?);
        Ok(())
    })?;
    add("bwah capture", Route::AMPLITUHEDRON_CAPTURE, 8, Flags::NONE, &|frame| {
        let capture =
            bwah::try_encode_amplituhedron_capture(0xfedc_ba98_7654_3210, 17, 0, 28, &floats(896), &floats(0))?;
        frame.body().extend_from_slice(&capture);
        Ok(())
    })?;
    add("vent", Route::FORWARD_PCA, 9, Flags::FAILURE, &|frame| {
        let mut meta = frame.meta();
        meta.unsigned("status", 412).string("error", "basis fingerprint mismatch").strings("have", ["0x1a9fb320"]);
        Ok(())
    })?;
    Ok(frames)
}
