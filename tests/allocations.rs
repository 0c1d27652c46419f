//! What the way of a request allocates once its connection stands. Both ends run on this thread, where every allocation is
//! counted; the client's own calls make none.
#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use aeon_proto::{frame::Flags, payload::FrameWriter, route::Route};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UdpSocket, UnixStream},
    runtime::{Builder, Runtime},
};

use self::common::Lab;

const REQUESTS: u64 = 500;
/// Width of the identity model.
const DIM: usize = 8;
/// The body as aligned values, which the model takes over, and the cache of a request without a session.
const FORWARD: u64 = 2;

fn frame(route: Route, positions: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    let mut writer = FrameWriter::new(&mut frame, route.0, 1, Flags::NONE);
    if positions > 0 {
        writer.meta().unsigned("pos", 0).unsigned("boundary", 0);
    }
    writer.body().extend(vec![0; 4 * DIM * positions]);
    writer.finish().unwrap();
    frame
}

/// Allocations of one request, from many of them; what happens once is rounded away.
fn for_each(runtime: &Runtime, mut ask: impl AsyncFnMut()) -> u64 {
    let mut many = || {
        runtime.block_on(async {
            for _ in 0..REQUESTS {
                ask().await;
            }
        });
    };
    many();
    allocation_counter::measure(many).count_total / REQUESTS
}

#[test]
fn an_established_connection_allocates_only_what_the_model_takes() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let lab = runtime.block_on(Lab::identity());
    for (route, positions, expected) in [
        (Route::HEALTH, 0, 0),
        (Route::FORWARD, 1, FORWARD),
        // 14 KB, in one read and one write.
        (Route::FORWARD, 440, FORWARD),
    ] {
        let frame = frame(route, positions);
        let message = [&(frame.len() as u32).to_be_bytes()[..], &frame].concat();
        let mut unix = runtime.block_on(UnixStream::connect(&lab.uds)).unwrap();
        let mut reply = vec![0; 1 << 16];
        let mut last = 0;
        let count = for_each(&runtime, async || {
            unix.write_all(&message).await.unwrap();
            let len = unix.read_u32().await.unwrap() as usize;
            unix.read_exact(&mut reply[..len]).await.unwrap();
            last = len;
        });
        assert_eq!(reply[6], Flags::SUCCESS.0, "{:?}", String::from_utf8_lossy(&reply[12..last]));
        assert_eq!(count, expected, "Unix, route {route}, {positions} positions");
        let udp = runtime.block_on(UdpSocket::bind("127.0.0.1:0")).unwrap();
        runtime.block_on(udp.connect(lab.udp())).unwrap();
        let count = for_each(&runtime, async || {
            udp.send(&frame).await.unwrap();
            udp.recv(&mut reply).await.unwrap();
        });
        assert_eq!(reply[6], Flags::SUCCESS.0);
        assert_eq!(count, expected, "UDP, route {route}, {positions} positions");
    }
    runtime.block_on(lab.node.kill());
}

/// The counter itself: an allocation more for each request would be seen.
#[test]
fn one_allocation_for_each_request_shows() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let count = for_each(&runtime, async || drop(std::hint::black_box(vec![1_u8; 100])));
    assert_eq!(count, 1);
}

#[test]
fn frames_are_encoded_and_decoded_without_allocating() {
    use aeon_proto::frame::Frame;
    let payload = [7; 140];
    let mut out = Vec::with_capacity(1 << 16);
    let used = allocation_counter::measure(|| {
        for sequence in 0..64 {
            Frame { stream_id: 3, sequence, flags: Flags::NONE, payload: &payload }.encode(&mut out).unwrap();
        }
        let (mut rest, mut count) = (&out[..], 0);
        while let Some((frame, len)) = Frame::decode_prefix(rest) {
            assert_eq!(frame.payload, payload);
            rest = &rest[len..];
            count += 1;
        }
        assert_eq!((count, rest.len()), (64, 0));
    });
    assert_eq!(used.count_total, 0);
}
