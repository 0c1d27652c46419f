//! One request and its answer over a Unix socket: the station beside an echo between two threads on a socket pair.

#![allow(missing_docs)]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use aeon_proto::{frame::Flags, payload::FrameWriter};
use aeon_station::{
    config::{Config, ListenSettings, ModelSettings, Settings},
    daemon::Node,
};
use criterion::{Criterion, criterion_group, criterion_main};

/// A FORWARD with a residual of `dim` values, as it goes over the socket.
fn request(dim: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    let mut writer = FrameWriter::new(&mut frame, 3, 1, Flags::NONE);
    writer.meta().unsigned("pos", 0);
    writer.body().resize(12 + "{\"pos\":0}".len() + 4 * dim, 0);
    let len = writer.finish().unwrap_or_default();
    [&(len as u32).to_be_bytes()[..], &frame].concat()
}

fn read_message(socket: &mut UnixStream, buffer: &mut Vec<u8>) -> std::io::Result<()> {
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix)?;
    buffer.resize(u32::from_be_bytes(prefix) as usize, 0);
    socket.read_exact(buffer)
}

/// The floor: another thread that reads messages and writes them back, with nothing in between.
fn echo() -> std::io::Result<UnixStream> {
    let (near, mut far) = UnixStream::pair()?;
    std::thread::spawn(move || {
        let mut buffer = Vec::new();
        while read_message(&mut far, &mut buffer).is_ok() {
            let message = [&(buffer.len() as u32).to_be_bytes()[..], &buffer].concat();
            if far.write_all(&message).is_err() {
                return;
            }
        }
    });
    Ok(near)
}

fn round_trip(criterion: &mut Criterion) {
    let Ok(runtime) = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() else {
        return;
    };
    for dim in [32, 3584] {
        let path = std::env::temp_dir().join(format!("aeon-bench-{}-{dim}", std::process::id()));
        let settings = Settings {
            model: ModelSettings { model: Some(format!("identity:{dim}")), ..ModelSettings::default() },
            listen: ListenSettings { uds: Some(path.clone()), ..ListenSettings::default() },
            ..Settings::default()
        };
        let node = Config::try_from(settings).map(|config| runtime.block_on(Node::start(&config)));
        let (Ok(Ok(node)), Ok(mut station), Ok(mut floor)) = (node, UnixStream::connect(&path), echo()) else { return };
        let message = request(dim);
        let mut buffer = Vec::new();
        let mut group = criterion.benchmark_group(format!("round trip of {} bytes", message.len()));
        for (name, socket) in [("floor: two threads", &mut floor), ("station, identity", &mut station)] {
            group.bench_function(name, |bencher| {
                bencher.iter(|| socket.write_all(&message).and_then(|()| read_message(socket, &mut buffer)));
            });
        }
        group.finish();
        drop(station);
        runtime.block_on(node.kill());
    }
}

criterion_group!(benches, round_trip);
criterion_main!(benches);
