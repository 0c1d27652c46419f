//! Links between network namespaces that lose, double, reorder, delay and damage packets.
//!
//! The two ends of a link are TUN devices, so that this program sees whole IP packets: large datagrams in fragments, with
//! the checksums that the system made and will check. One thread carries the packets of all links. What happens to a packet
//! comes from a random sequence with a fixed seed for each direction.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::{sync::oneshot, time::Instant};
use tokio_tun::Tun;

use crate::common::netns::try_ip;

/// What a link does to packets; shares are of 1.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    pub(crate) loss: f64,
    pub(crate) duplication: f64,
    /// Share of packets that skip the delay.
    pub(crate) reordering: f64,
    /// Share of packets of which one bit is turned.
    pub(crate) corruption: f64,
    pub(crate) delay: Duration,
    /// The delay is up to so much shorter or longer.
    pub(crate) jitter: Duration,
    /// Whether fragments other than the first are lost: a black hole for datagrams of more than one packet.
    pub(crate) only_first_fragments: bool,
    /// Whether nothing comes through.
    pub(crate) is_cut: bool,
}

/// How often a link did what.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) seen: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) doubled: AtomicU64,
    pub(crate) reordered: AtomicU64,
    pub(crate) damaged: AtomicU64,
    pub(crate) fragments: AtomicU64,
}

impl Counts {
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// One end of a link: a device in a namespace, with addresses as `ip addr add` takes them.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub(crate) namespace: String,
    pub(crate) addresses: Vec<String>,
}

/// A link that is up; its faults can be changed at any time.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    faults: Arc<Mutex<Faults>>,
    pub(crate) counts: Arc<Counts>,
    devices: [(String, String); 2],
}

impl Link {
    pub(crate) fn set(&self, faults: Faults) {
        *self.faults.lock().unwrap() = faults;
    }

    /// Cuts the link, or mends it; its other faults stay.
    pub(crate) fn cut(&self, is_cut: bool) {
        self.faults.lock().unwrap().is_cut = is_cut;
    }

    pub(crate) fn set_mtu(&self, mtu: u32) {
        for (namespace, device) in &self.devices {
            try_ip(&format!("-n {namespace} link set {device} mtu {mtu}")).unwrap();
        }
    }
}

/// The thread that carries packets; the devices go with it.
#[derive(Debug)]
pub(crate) struct Emulator {
    pub(crate) links: Vec<Link>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Emulator {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Emulator {
    /// Sets links up; an error says why that is not possible here.
    pub(crate) fn start(ends: Vec<[End; 2]>, seed: u64) -> Result<Self, String> {
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut links = Vec::new();
                let mut carriers = tokio::task::JoinSet::new();
                for (index, ends) in ends.into_iter().enumerate() {
                    match open(index, ends) {
                        Ok((link, [a, b])) => {
                            let (a, b) = (Arc::new(a), Arc::new(b));
                            for (direction, (from, to)) in [(&a, &b), (&b, &a)].into_iter().enumerate() {
                                let rng = ChaCha8Rng::seed_from_u64(seed + 2 * index as u64 + direction as u64);
                                carriers.spawn(carry(Arc::clone(from), Arc::clone(to), link.clone(), rng));
                            }
                            links.push(link);
                        }
                        Err(error) => {
                            let _ = ready.send(Err(error));
                            return;
                        }
                    }
                }
                let _ = ready.send(Ok(links));
                let _ = stopped.await;
            });
        });
        let links = is_ready.recv().map_err(|_| "the emulator's thread ended".to_owned())?;
        Ok(Self { links: links?, stop: Some(stop), thread: Some(thread) })
    }
}

/// Makes the two devices of a link here and moves them to their namespaces; they stay with their descriptors.
fn open(index: usize, ends: [End; 2]) -> Result<(Link, [Tun; 2]), String> {
    let mut devices = Vec::new();
    let mut tuns = Vec::new();
    for (side, end) in ends.into_iter().enumerate() {
        let device = format!("ae{}-{index}{side}", std::process::id() % 1_000_000);
        let End { namespace, addresses } = end;
        // One of another test may be on its way to its namespace under the same name.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap();
        let tun = Tun::builder().name(&device).build().map_err(|error| format!("/dev/net/tun: {error}"))?;
        try_ip(&format!("link set {device} netns {namespace}"))?;
        for address in addresses {
            let nodad = if address.contains(':') { "nodad" } else { "" };
            try_ip(&format!("-n {namespace} addr add {address} dev {device} {nodad}"))?;
        }
        try_ip(&format!("-n {namespace} link set {device} up mtu 1500 txqueuelen 2000"))?;
        devices.push((namespace, device));
        tuns.extend(tun);
    }
    let (devices, tuns) = (devices.try_into().unwrap(), tuns.try_into().ok().unwrap());
    Ok((Link { faults: Arc::default(), counts: Arc::default(), devices }, tuns))
}

/// Carries packets one way.
async fn carry(from: Arc<Tun>, to: Arc<Tun>, link: Link, mut rng: ChaCha8Rng) {
    let counts = &*link.counts;
    let mut on_the_way: BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>> = BinaryHeap::new();
    let mut buffer = vec![0; 65_536];
    let mut order = 0;
    loop {
        let due = on_the_way.peek().map(|Reverse((due, ..))| *due);
        tokio::select! {
            biased;
            () = async { tokio::time::sleep_until(due.unwrap()).await }, if due.is_some() => {
                let Some(Reverse((.., packet))) = on_the_way.pop() else { continue };
                // A device whose other end goes away takes nothing; the test is over then.
                let _ = to.send(&packet).await;
            }
            received = from.recv(&mut buffer) => {
                let Ok(len) = received else { return };
                let mut packet = buffer[..len].to_vec();
                let faults = *link.faults.lock().unwrap();
                let mut hit = |share: f64| rng.random::<f64>() < share;
                Counts::add(&counts.seen);
                if faults.only_first_fragments && is_later_fragment(&packet) {
                    Counts::add(&counts.fragments);
                    continue;
                }
                if faults.is_cut || hit(faults.loss) {
                    Counts::add(&counts.lost);
                    continue;
                }
                let (is_damaged, is_early, is_doubled) =
                    (hit(faults.corruption), hit(faults.reordering), hit(faults.duplication));
                let header = if packet[0] >> 4 == 6 { 40 } else { 20 };
                if is_damaged && packet.len() > header {
                    Counts::add(&counts.damaged);
                    let at = rng.random_range(header..packet.len());
                    packet[at] ^= 1 << rng.random_range(0..8);
                }
                let spread = faults.jitter.mul_f64(2.0 * rng.random::<f64>());
                let mut due = Instant::now() + (faults.delay + spread).saturating_sub(faults.jitter);
                if is_early {
                    Counts::add(&counts.reordered);
                    due = Instant::now();
                }
                if is_doubled {
                    Counts::add(&counts.doubled);
                    order += 1;
                    on_the_way.push(Reverse((due, order, packet.clone())));
                }
                order += 1;
                on_the_way.push(Reverse((due, order, packet)));
            }
        }
    }
}

/// Whether an IP packet is a fragment, and not the first of its datagram.
fn is_later_fragment(packet: &[u8]) -> bool {
    match packet[0] >> 4 {
        4 => (u16::from_be_bytes([packet[6], packet[7]]) & 0x1fff) != 0,
        // The fragment header comes first behind the IPv6 header where there is one.
        6 => packet[6] == 44 && (u16::from_be_bytes([packet[42], packet[43]]) & 0xfff8) != 0,
        _ => false,
    }
}
