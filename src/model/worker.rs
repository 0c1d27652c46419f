//! The threads that models run on, and the bounded queue in front of them.
//!
//! Work is submitted to a **lane**. Work of one lane (one session) runs in the order of submission and never twice at the
//! same time. Each **asker** (a connection, a UDP sender) has its turn after the others, however much it submits. The queue
//! is bounded in items and bytes: nothing waits without bound. If it is full, the newest work of whoever has most of it
//! gives way to an asker who has less; else the new work is refused at once. The pool knows nothing of what it runs.
//!
//! ```text
//! turns:    asker A    asker B   ...     one piece of work each, in turn
//! ready:    lanes      lanes             those with work of which none is running, by who asked for the first of it
//! lanes:    session or single -> work in order
//! ```
//!
//! Each thread has a **pulse** that only this thread moves: when it takes or ends a piece of work, when the work asks at
//! a step boundary whether it was cancelled ([`beat`]), and when it is idle and woken by [`WorkerPool::probe`]. A pulse
//! that stands still after a probe belongs to a thread that is stuck.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap, VecDeque},
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use crate::telemetry::faults::{Fault, fault};

thread_local! {
    /// The pulse of this thread, if it is a worker.
    static PULSE: RefCell<Option<Arc<AtomicU64>>> = const { RefCell::new(None) };
}

/// Shows that the work on this thread goes on. Nothing happens on a thread that is no worker.
pub fn beat() {
    PULSE.with_borrow(|pulse| {
        if let Some(pulse) = pulse {
            pulse.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// How much may wait.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    /// Pieces of work, running ones included.
    pub items: usize,
    /// Bytes that they hold.
    pub bytes: usize,
}

/// The queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueFull {
    /// Pieces of work in the queue.
    pub items: usize,
    /// Bytes in the queue.
    pub bytes: usize,
}

/// Turns in a row that go to askers without a backlog while others wait. Those others still get a quarter of the turns,
/// however many ask one thing at a time.
const FRESH_IN_ROW: u32 = 3;

/// How much of the pool a piece of work takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Bytes that it holds while it waits.
    pub bytes: usize,
    /// Whether it keeps its thread so long that all the others must not be kept by its like.
    pub is_long: bool,
}

impl From<usize> for Size {
    fn from(bytes: usize) -> Self {
        Self { bytes, is_long: false }
    }
}

/// Called with `Ok` to do the work, with the state of the queue if the work has to give way.
type Work = Box<dyn FnOnce(Result<(), QueueFull>) + Send>;

/// Who submits work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Asker {
    /// A stream connection, by number.
    Connection(u64),
    /// A UDP sender.
    Address(SocketAddr),
}

/// What work belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Lane {
    /// A session: its work runs in order.
    Session(Arc<str>),
    /// Work on its own.
    Single(u64),
}

struct Item {
    asker: Asker,
    /// Its place among all work ever submitted.
    number: u64,
    size: Size,
    work: Work,
}

#[derive(Default)]
struct LaneState {
    is_running: bool,
    waiting: VecDeque<Item>,
}

#[derive(Default)]
struct AskerState {
    /// Running work included.
    items: usize,
    bytes: usize,
    /// Lanes that are not running and whose first work is this asker's.
    ready: VecDeque<Lane>,
    /// Work that waits, by number.
    waiting: BTreeMap<u64, Lane>,
}

#[derive(Default)]
struct Queue {
    lanes: HashMap<Lane, LaneState>,
    askers: HashMap<Asker, AskerState>,
    /// Askers with ready lanes who had nothing else waiting.
    fresh: VecDeque<Asker>,
    /// How many of them have just had their turns one after another.
    fresh_in_row: u32,
    /// The other askers with ready lanes.
    turns: VecDeque<Asker>,
    long_running: usize,
    max_long: usize,
    items: usize,
    bytes: usize,
    next_number: u64,
    /// Counts the times that idle threads were asked for a beat.
    probes: u64,
    closed: bool,
}

impl Queue {
    fn is_full(&self, limits: QueueLimits, bytes: usize) -> bool {
        // One piece of work always fits an empty queue, whatever its size.
        self.items >= limits.items || (self.items > 0 && self.bytes + bytes > limits.bytes)
    }

    /// Puts a lane that can run in its asker's line. Only what was just asked for may make its asker a fresh one.
    fn make_ready(&mut self, lane: Lane, just_asked: bool) {
        let first = self.lanes.get(&lane).and_then(|state| state.waiting.front()).map(|item| item.asker);
        let Some((asker, state)) = first.and_then(|asker| Some((asker, self.askers.get_mut(&asker)?))) else { return };
        if state.ready.is_empty() {
            // An answer may be back at its asker before the pool has put the work away.
            let is_fresh = just_asked && state.waiting.len() == 1 && state.items <= 2;
            state.ready.push_back(lane);
            self.line(is_fresh).push_back(asker);
        } else {
            state.ready.push_back(lane);
        }
    }

    fn line(&mut self, fresh: bool) -> &mut VecDeque<Asker> {
        if fresh { &mut self.fresh } else { &mut self.turns }
    }

    /// Takes the next work whose turn it is.
    fn next(&mut self) -> Option<(Lane, Item)> {
        let fresh_first = self.fresh_in_row < FRESH_IN_ROW || self.turns.is_empty();
        [fresh_first, !fresh_first].into_iter().find_map(|fresh| self.next_of(fresh))
    }

    /// Takes the next work of one of the two lines. Who has only long work that cannot run now keeps its place in it.
    fn next_of(&mut self, fresh: bool) -> Option<(Lane, Item)> {
        let takes_long = self.long_running < self.max_long;
        let line = if fresh { &self.fresh } else { &self.turns };
        let first = |lane: &Lane| self.lanes.get(lane).and_then(|state| state.waiting.front());
        let can_run = |lane: &Lane| first(lane).is_some_and(|item| takes_long || !item.size.is_long);
        let (place, asker, index) = line.iter().enumerate().find_map(|(place, asker)| {
            let index = self.askers.get(asker)?.ready.iter().position(can_run)?;
            Some((place, *asker, index))
        })?;
        self.line(fresh).remove(place);
        let state = self.askers.get_mut(&asker)?;
        let lane = state.ready.remove(index)?;
        if !state.ready.is_empty() {
            self.turns.push_back(asker);
        }
        let held = self.lanes.get_mut(&lane)?;
        let item = held.waiting.pop_front()?;
        held.is_running = true;
        if let Some(state) = self.askers.get_mut(&item.asker) {
            state.waiting.remove(&item.number);
        }
        self.long_running += usize::from(item.size.is_long);
        self.fresh_in_row = if fresh { self.fresh_in_row + 1 } else { 0 };
        Some((lane, item))
    }

    /// Forgets what an item counted for.
    fn discount(&mut self, asker: Asker, bytes: usize) {
        self.items -= 1;
        self.bytes -= bytes;
        let Some(state) = self.askers.get_mut(&asker) else { return };
        state.items -= 1;
        state.bytes -= bytes;
        if state.items == 0 {
            self.askers.remove(&asker);
        }
    }

    /// After work of a lane has run.
    fn end(&mut self, lane: Lane, asker: Asker, size: Size) {
        self.discount(asker, size.bytes);
        self.long_running -= usize::from(size.is_long);
        let Some(state) = self.lanes.get_mut(&lane) else { return };
        state.is_running = false;
        if state.waiting.is_empty() {
            self.lanes.remove(&lane);
        } else {
            self.make_ready(lane, false);
        }
    }

    /// Takes out the newest waiting work of whoever has most of what is short, if that is more than `asker` would have.
    fn displace(&mut self, limits: QueueLimits, asker: Asker, bytes: usize) -> Option<Work> {
        let (mine_items, mine_bytes) = self.askers.get(&asker).map_or((0, 0), |state| (state.items, state.bytes));
        let waiting = self.askers.iter().filter(|(_, state)| !state.waiting.is_empty());
        let most = if self.items >= limits.items {
            waiting.max_by_key(|(_, state)| state.items).filter(|(_, state)| state.items > mine_items + 1)
        } else {
            waiting.max_by_key(|(_, state)| state.bytes).filter(|(_, state)| state.bytes > mine_bytes + bytes)
        };
        let most = *most?.0;
        let state = self.askers.get_mut(&most)?;
        let (number, lane) = state.waiting.pop_last()?;
        let held = self.lanes.get_mut(&lane)?;
        let index = held.waiting.iter().rposition(|item| item.number == number)?;
        let item = held.waiting.remove(index)?;
        if index == 0 && !held.is_running {
            // It was what its lane stood in line with.
            state.ready.retain(|ready| *ready != lane);
            if state.ready.is_empty() {
                self.turns.retain(|turn| *turn != most);
                self.fresh.retain(|turn| *turn != most);
            }
            if held.waiting.is_empty() {
                self.lanes.remove(&lane);
            } else {
                self.make_ready(lane, true);
            }
        }
        self.discount(most, item.size.bytes);
        Some(item.work)
    }

    fn push(&mut self, asker: Asker, session: Option<Arc<str>>, size: Size, work: Work) {
        self.items += 1;
        self.bytes += size.bytes;
        let number = self.next_number;
        self.next_number += 1;
        let lane = session.map_or(Lane::Single(number), Lane::Session);
        let state = self.askers.entry(asker).or_default();
        state.items += 1;
        state.bytes += size.bytes;
        state.waiting.insert(number, lane.clone());
        let held = self.lanes.entry(lane.clone()).or_default();
        held.waiting.push_back(Item { asker, number, size, work });
        if held.waiting.len() == 1 && !held.is_running {
            self.make_ready(lane, true);
        }
    }
}

struct Shared {
    queue: Mutex<Queue>,
    work_or_close: Condvar,
    limits: QueueLimits,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A fixed number of worker threads.
pub struct WorkerPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    pulses: Vec<Arc<AtomicU64>>,
}

impl std::fmt::Debug for WorkerPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (items, bytes) = self.usage();
        f.debug_struct("WorkerPool")
            .field("threads", &self.threads.len())
            .field("items", &items)
            .field("bytes", &bytes)
            .finish()
    }
}

impl WorkerPool {
    /// Starts the threads.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(threads: usize, limits: QueueLimits) -> std::io::Result<Self> {
        let queue = Queue { max_long: threads.saturating_sub(1).max(1), ..Queue::default() };
        let shared = Arc::new(Shared { queue: Mutex::new(queue), work_or_close: Condvar::new(), limits });
        let mut pool = Self { shared, threads: Vec::new(), pulses: Vec::new() };
        for n in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let pulse = Arc::<AtomicU64>::default();
            pool.pulses.push(Arc::clone(&pulse));
            let thread = std::thread::Builder::new().name(format!("model-{n}"));
            pool.threads.push(thread.spawn(move || {
                PULSE.set(Some(pulse));
                run(&shared);
            })?);
        }
        Ok(pool)
    }

    /// Puts work behind the other work of its session, or on its own. It is called once: with `Ok` on a worker, or with
    /// what was in the queue when it had to give way to another asker's, on that one's thread.
    ///
    /// # Errors
    /// [`QueueFull`] if it does not fit; the work is then not called.
    pub fn submit(
        &self,
        asker: Asker,
        session: Option<Arc<str>>,
        size: impl Into<Size>,
        work: impl FnOnce(Result<(), QueueFull>) + Send + 'static,
    ) -> Result<(), QueueFull> {
        let size: Size = size.into();
        let bytes = size.bytes;
        let mut displaced = Vec::new();
        let mut queue = self.shared.lock();
        let full = QueueFull { items: queue.items, bytes: queue.bytes };
        while queue.is_full(self.shared.limits, bytes)
            && let Some(work) = queue.displace(self.shared.limits, asker, bytes)
        {
            displaced.push(work);
        }
        let result = if queue.closed || queue.is_full(self.shared.limits, bytes) {
            Err(full)
        } else {
            queue.push(asker, session, size, Box::new(work));
            self.shared.work_or_close.notify_one();
            Ok(())
        };
        drop(queue);
        for work in displaced {
            call(work, Err(full));
        }
        result
    }

    /// Whether work of a session is waiting or running.
    #[must_use]
    pub fn has_work(&self, session: &Arc<str>) -> bool {
        self.shared.lock().lanes.contains_key(&Lane::Session(Arc::clone(session)))
    }

    /// Asks idle threads for a beat: after it, every pulse moves soon unless its thread is stuck or in a long step.
    pub fn probe(&self) {
        self.shared.lock().probes += 1;
        self.shared.work_or_close.notify_all();
    }

    /// The pulse of each thread, in the order of their names `model-0`, `model-1` and so on.
    #[must_use]
    pub fn pulses(&self) -> Vec<u64> {
        self.pulses.iter().map(|pulse| pulse.load(Ordering::Relaxed)).collect()
    }

    /// Pieces of work in the queue (running ones included) and their bytes.
    #[must_use]
    pub fn usage(&self) -> (usize, usize) {
        let queue = self.shared.lock();
        (queue.items, queue.bytes)
    }
}

impl Drop for WorkerPool {
    /// Lets running work end, drops waiting work, joins the threads.
    fn drop(&mut self) {
        let waiting = {
            let mut queue = self.shared.lock();
            queue.closed = true;
            queue.turns.clear();
            queue.fresh.clear();
            std::mem::take(&mut queue.lanes)
        };
        self.shared.work_or_close.notify_all();
        drop(waiting);
        for thread in self.threads.drain(..) {
            // The last owner may be a worker itself: it cannot wait for its own end.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// Work answers for its own failures; a panic that still gets here must not take the thread along.
fn call(work: Work, turn: Result<(), QueueFull>) {
    if catch_unwind(AssertUnwindSafe(|| work(turn))).is_err() {
        fault!(ERROR, Fault::Panic, "model work panicked");
    }
}

fn run(shared: &Shared) {
    let mut queue = shared.lock();
    // A thread that begins after a probe answers it too.
    let mut probes = 0;
    loop {
        if queue.probes != probes {
            probes = queue.probes;
            beat();
        }
        let Some((lane, Item { asker, size, work, .. })) = queue.next() else {
            if queue.closed {
                return;
            }
            queue = shared.work_or_close.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(queue);
        beat();
        call(work, Ok(()));
        beat();
        queue = shared.lock();
        queue.end(lane, asker, size);
        if !(queue.turns.is_empty() && queue.fresh.is_empty()) {
            shared.work_or_close.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};

    use super::*;
    use crate::model::CancelToken;

    const ONE: Asker = Asker::Connection(1);
    const TWO: Asker = Asker::Connection(2);

    fn pool(threads: usize, items: usize, bytes: usize) -> WorkerPool {
        WorkerPool::start(threads, QueueLimits { items, bytes }).unwrap()
    }

    #[test]
    fn one_session_runs_in_order_and_sessions_run_side_by_side() {
        let pool = pool(2, 1000, 1 << 20);
        let (tx, rx) = mpsc::channel();
        // Both sessions must be running at once for either to pass.
        let barrier = Arc::new(Barrier::new(2));
        for name in ["a", "b"] {
            let barrier = Arc::clone(&barrier);
            pool.submit(ONE, Some(name.into()), 1, move |_| {
                barrier.wait();
            })
            .unwrap();
            for n in 0..100 {
                let tx = tx.clone();
                pool.submit(ONE, Some(name.into()), 1, move |_| tx.send((name, n)).unwrap()).unwrap();
            }
        }
        drop(tx);
        let mut next = HashMap::from([("a", 0), ("b", 0)]);
        for (name, n) in rx {
            let expected = next.get_mut(name).unwrap();
            assert_eq!(n, *expected);
            *expected += 1;
        }
        assert_eq!(next, HashMap::from([("a", 100), ("b", 100)]));
    }

    #[test]
    fn a_full_queue_refuses_at_once_and_empties_again() {
        let pool = pool(1, 3, 100);
        let (release, wait) = mpsc::channel::<()>();
        let (tx, rx) = mpsc::channel();
        pool.submit(ONE, None, 10, move |_| wait.recv().unwrap()).unwrap();
        pool.submit(ONE, None, 80, |_| ()).unwrap();
        assert_eq!(pool.submit(ONE, None, 11, |_| ()), Err(QueueFull { items: 2, bytes: 90 }));
        pool.submit(ONE, None, 10, move |_| tx.send(()).unwrap()).unwrap();
        assert_eq!(pool.submit(ONE, None, 0, |_| ()), Err(QueueFull { items: 3, bytes: 100 }));
        release.send(()).unwrap();
        rx.recv().unwrap();
        while pool.usage() != (0, 0) {
            std::thread::yield_now();
        }
        pool.submit(ONE, None, 5000, |_| ()).unwrap();
    }

    #[test]
    fn a_panic_costs_only_its_own_work() {
        let pool = pool(1, 10, 100);
        let (tx, rx) = mpsc::channel();
        pool.submit(ONE, Some("a".into()), 1, |_| panic!("expected in this test")).unwrap();
        pool.submit(ONE, Some("a".into()), 1, move |_| tx.send(7).unwrap()).unwrap();
        assert_eq!(rx.recv(), Ok(7));
    }

    #[test]
    fn idle_and_working_threads_have_a_pulse_and_stuck_ones_have_none() {
        let pool = pool(2, 10, 100);
        let moved = |before: &[u64], n: usize| pool.pulses()[n] > before[n];
        // Idle: both answer each probe.
        for _ in 0..3 {
            let before = pool.pulses();
            pool.probe();
            while !(moved(&before, 0) && moved(&before, 1)) {
                std::thread::yield_now();
            }
        }
        // One thread is held in its work until it is released; which of the two takes it is not known.
        let (release, wait) = mpsc::channel::<bool>();
        let (tx, rx) = mpsc::channel();
        pool.submit(ONE, None, 1, move |_| {
            tx.send(std::thread::current().name().map(str::to_owned)).unwrap();
            // Each message is a step of the work.
            while wait.recv().unwrap() {
                assert!(!CancelToken::default().is_cancelled());
                tx.send(None).unwrap();
            }
        })
        .unwrap();
        let stuck = if rx.recv().unwrap().unwrap() == "model-0" { 0 } else { 1 };
        let before = pool.pulses();
        for _ in 0..3 {
            let idle = pool.pulses();
            pool.probe();
            while !moved(&idle, 1 - stuck) {
                std::thread::yield_now();
            }
        }
        assert_eq!(pool.pulses()[stuck], before[stuck]);
        // A step that goes on shows, without an end of the work.
        release.send(true).unwrap();
        assert_eq!(rx.recv(), Ok(None));
        assert!(moved(&before, stuck));
        release.send(false).unwrap();
    }

    #[test]
    fn dropping_the_pool_ends_its_threads() {
        let pool = pool(2, 10, 100);
        let (tx, rx) = mpsc::channel::<()>();
        pool.submit(ONE, None, 1, move |_| drop(tx)).unwrap();
        drop(pool);
        assert!(rx.recv().is_err());
    }

    /// A pool whose one thread waits for the sender to go, and a place to note what ran and what gave way.
    fn held(items: usize, bytes: usize) -> (WorkerPool, mpsc::Sender<()>, Noted) {
        let pool = pool(1, items, bytes);
        let (release, wait) = mpsc::channel::<()>();
        let (begun_tx, begun) = mpsc::channel();
        let work = move |_| {
            begun_tx.send(()).unwrap();
            assert!(wait.recv().is_err());
        };
        pool.submit(ONE, Some("held".into()), 1, work).unwrap();
        begun.recv().unwrap();
        (pool, release, Noted::default())
    }

    #[derive(Clone, Default)]
    struct Noted(Arc<Mutex<Vec<(u32, bool)>>>);

    impl Noted {
        fn work(&self, n: u32) -> impl FnOnce(Result<(), QueueFull>) + Send + use<> {
            let noted = self.clone();
            move |turn| noted.0.lock().unwrap().push((n, turn.is_ok()))
        }

        fn all(&self, pool: &WorkerPool) -> Vec<(u32, bool)> {
            while pool.usage() != (0, 0) {
                std::thread::yield_now();
            }
            self.0.lock().unwrap().clone()
        }
    }

    #[test]
    fn who_asks_little_does_not_wait_for_who_asks_much() {
        let (pool, release, noted) = held(100, 1 << 20);
        for n in 0..5 {
            pool.submit(ONE, None, 1, noted.work(n)).unwrap();
        }
        for n in 10..12 {
            pool.submit(TWO, Some("b".into()), 1, noted.work(n)).unwrap();
        }
        drop(release);
        let order: Vec<u32> = noted.all(&pool).into_iter().map(|(n, _)| n).collect();
        assert_eq!(order, [0, 10, 1, 11, 2, 3, 4]);
    }

    #[test]
    fn who_had_nothing_waiting_comes_before_a_backlog_but_not_for_ever() {
        let (pool, release, noted) = held(100, 1 << 20);
        // Who asks two things at once has a backlog after the first of them.
        for n in 0..4 {
            pool.submit(ONE, None, 1, noted.work(n)).unwrap();
        }
        for n in 10..17 {
            pool.submit(Asker::Connection(n.into()), None, 1, noted.work(n)).unwrap();
        }
        drop(release);
        let order: Vec<u32> = noted.all(&pool).into_iter().map(|(n, _)| n).collect();
        // What holds the thread was the first of three in a row.
        assert_eq!(order, [0, 10, 1, 11, 12, 13, 2, 14, 15, 16, 3]);
    }

    #[test]
    fn long_work_leaves_a_thread_to_what_is_short() {
        let pool = pool(2, 100, 1 << 20);
        let (begun_tx, begun) = mpsc::channel();
        let releases: Vec<_> = (0..3)
            .map(|n| {
                let (release, wait) = mpsc::channel::<()>();
                let begun = begun_tx.clone();
                let long = move |_| {
                    begun.send(n).unwrap();
                    assert!(wait.recv().is_err());
                };
                pool.submit(Asker::Connection(n), None, Size { bytes: 1, is_long: true }, long).unwrap();
                release
            })
            .collect();
        assert_eq!(begun.recv(), Ok(0));
        for n in 10..20 {
            let tx = begun_tx.clone();
            pool.submit(TWO, None, 1, move |_| tx.send(n).unwrap()).unwrap();
            assert_eq!(begun.recv(), Ok(n));
        }
        for (n, release) in releases.into_iter().enumerate() {
            assert!(begun.try_recv().is_err(), "a second one runs beside {n}");
            drop(release);
            if n < 2 {
                assert_eq!(begun.recv(), Ok(n as u64 + 1));
            }
        }
    }

    #[test]
    fn a_full_queue_makes_room_for_who_has_less_of_it() {
        let (pool, release, noted) = held(4, 1 << 20);
        for n in 0..3 {
            pool.submit(ONE, Some("a".into()), 1, noted.work(n)).unwrap();
        }
        assert!(pool.submit(ONE, None, 1, noted.work(3)).is_err());
        // The newest gives way, so that what is left of a session is still in order.
        pool.submit(TWO, Some("a".into()), 1, noted.work(10)).unwrap();
        pool.submit(TWO, None, 1, noted.work(11)).unwrap();
        assert_eq!(pool.usage().0, 4);
        assert!(pool.submit(TWO, None, 1, noted.work(12)).is_err(), "both have two now");
        drop(release);
        assert_eq!(noted.all(&pool), [(2, false), (1, false), (0, true), (11, true), (10, true)]);
        assert!(pool.shared.lock().askers.is_empty() && pool.shared.lock().lanes.is_empty());
    }

    #[test]
    fn bytes_are_shared_out_like_items() {
        let (pool, release, noted) = held(100, 1001);
        for n in 0..3 {
            pool.submit(ONE, None, 300, noted.work(n)).unwrap();
        }
        assert!(pool.submit(ONE, None, 300, noted.work(3)).is_err());
        pool.submit(TWO, None, 400, noted.work(10)).unwrap();
        assert!(pool.submit(TWO, None, 400, noted.work(11)).is_err());
        drop(release);
        assert_eq!(noted.all(&pool), [(2, false), (0, true), (10, true), (1, true)]);
    }

    #[test]
    fn a_lane_whose_first_work_gives_way_runs_the_rest_once() {
        let (pool, release, noted) = held(4, 1 << 20);
        pool.submit(ONE, Some("x".into()), 1, noted.work(0)).unwrap();
        pool.submit(ONE, Some("s".into()), 1, noted.work(1)).unwrap();
        pool.submit(TWO, Some("s".into()), 1, noted.work(10)).unwrap();
        // The first of "s" gives way; what stands behind it is another asker's.
        pool.submit(Asker::Connection(3), None, 1, noted.work(20)).unwrap();
        drop(release);
        assert_eq!(noted.all(&pool), [(1, false), (0, true), (10, true), (20, true)]);
    }
}
