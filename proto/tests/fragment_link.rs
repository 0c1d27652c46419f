//! The fragmented transport over a bad link: two ends in memory, a clock moved by hand, datagrams lost, repeated and late.

use std::collections::BTreeMap;

use aeon_proto::{
    fragment::{self, Fragmenter, InFlight, Limits, Outcome, Reassembler, Received, StreamOrder},
    frame::{Flags, Frame},
};

/// A seeded source of chances.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Datagrams under way, by time of arrival; of those sent, one in six is lost, one in ten comes twice.
#[derive(Default)]
struct Link {
    under_way: BTreeMap<(u64, u64), Vec<u8>>,
    count: u64,
}

impl Link {
    fn send(&mut self, now: u64, chance: &mut Chance, datagram: &[u8]) {
        let copies = if chance.below(6) == 0 { 0 } else { 1 + u64::from(chance.below(10) == 0) };
        for _ in 0..copies {
            self.count += 1;
            self.under_way.insert((now + 1 + chance.below(20), self.count), datagram.to_vec());
        }
    }

    fn arrived(&mut self, now: u64) -> Vec<Vec<u8>> {
        let later = self.under_way.split_off(&(now + 1, 0));
        std::mem::replace(&mut self.under_way, later).into_values().collect()
    }
}

fn split(fragmenter: &mut Fragmenter, frame: &[u8]) -> Vec<Vec<u8>> {
    let parts = fragmenter.split(frame).expect("a frame that fits");
    parts
        .map(|part| {
            let mut datagram = Vec::new();
            part.write(&mut datagram);
            datagram
        })
        .collect()
}

/// Sends 300 frames on two streams and returns the payloads in the order in which the other end hands them on.
fn run(seed: u64) -> (BTreeMap<u16, Vec<u32>>, usize) {
    const FRAMES: u32 = 300;
    // No more than the gap that a receiver waits for, else it would give up what is only late.
    const WINDOW: usize = fragment::MAX_GAP as usize;
    let mut chance = Chance(seed);
    let (mut there, mut back) = (Link::default(), Link::default());
    let mut fragmenter = Fragmenter::new(40).expect("a size in range");
    let mut in_flight: InFlight<Vec<u8>> = InFlight::default();
    let mut next = BTreeMap::from([(3_u16, 0_u32), (0x0103, 0)]);

    let limits = Limits { expiry_ms: 200, ..Limits::default() };
    let (mut at_receiver, mut at_sender) = (Reassembler::new(limits), Reassembler::new(limits));
    let mut acknowledger = Fragmenter::new(fragment::DEFAULT_MTU).expect("a size in range");
    let mut received = Received::new();
    let mut orders: BTreeMap<u16, StreamOrder<u32>> = BTreeMap::new();
    let mut delivered: BTreeMap<u16, Vec<u32>> = BTreeMap::new();

    for now in 0..100_000 {
        for (stream_id, sequence) in &mut next {
            let waiting = in_flight.keys().filter(|key| key.0 == *stream_id).map(|key| key.1).min();
            if *sequence < FRAMES && sequence.saturating_sub(waiting.unwrap_or(*sequence)) < WINDOW as u32 {
                let payload = [&sequence.to_le_bytes()[..], &vec![0; chance.below(150) as usize]].concat();
                let frame = Frame { stream_id: *stream_id, sequence: *sequence, flags: Flags::NONE, payload: &payload };
                let mut bytes = Vec::new();
                frame.encode(&mut bytes).expect("a short frame");
                for datagram in split(&mut fragmenter, &bytes) {
                    there.send(now, &mut chance, &datagram);
                }
                assert!(in_flight.insert(*stream_id, *sequence, now, bytes).is_none());
                *sequence += 1;
            }
        }
        for (_, _, bytes) in in_flight.overdue(now, 60) {
            for datagram in split(&mut fragmenter, bytes) {
                there.send(now, &mut chance, &datagram);
            }
        }
        for datagram in there.arrived(now) {
            if let Ok(Outcome::Complete(bytes)) = at_receiver.push(now, &"sender", &datagram) {
                let frame = Frame::decode_exact(&bytes).expect("parts of one frame");
                received.insert(frame.stream_id, frame.sequence);
                let number = frame.payload.first_chunk().map(|bytes| u32::from_le_bytes(*bytes)).expect("4 bytes");
                let ready = orders.entry(frame.stream_id).or_default().push(frame.sequence, number);
                delivered.entry(frame.stream_id).or_default().extend(ready);
            }
        }
        if now % 10 == 0 && !received.is_empty() {
            let mut bytes = Vec::new();
            fragment::encode_ack(&received.take(100), &mut bytes).expect("a short frame");
            for datagram in split(&mut acknowledger, &bytes) {
                back.send(now, &mut chance, &datagram);
            }
        }
        for datagram in back.arrived(now) {
            if let Ok(Outcome::Complete(bytes)) = at_sender.push(now, &"receiver", &datagram) {
                let frame = Frame::decode_exact(&bytes).expect("one frame");
                assert!(fragment::is_ack(&frame));
                for entry in fragment::decode_acks(frame.payload) {
                    in_flight.acknowledge(entry);
                }
            }
        }
        if in_flight.is_empty() && next.values().all(|sequence| *sequence == FRAMES) {
            break;
        }
    }
    (delivered, in_flight.len())
}

#[test]
fn all_frames_arrive_once_and_in_order_over_a_lossy_link() {
    for seed in 1..=20 {
        let (delivered, left) = run(seed);
        assert_eq!(left, 0, "seed {seed}");
        assert_eq!(delivered.len(), 2);
        for (stream_id, numbers) in delivered {
            assert!(numbers.iter().copied().eq(0..300), "seed {seed}, stream {stream_id}");
        }
    }
}
