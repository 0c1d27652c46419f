//! The threads that models run on, and the bounded queue in front of them.
//!
//! Work is submitted to a **lane**. Work of one lane (one session) runs in the order of submission and never twice at the
//! same time. Each **asker** (a connection, a UDP sender) has its turn after the others, however much it submits. The queue
//! is bounded in items and bytes: nothing waits without bound. If it is full, the newest work of whoever has most of it
//! gives way to an asker who has less; else the new work is refused at once. The pool knows nothing of what it runs.
//!
//! Work that says so runs together with other such work, each piece of another lane: a thread takes the work whose turn
//! it is and as much of what comes right after it as a **batch** may hold, so that whoever would have to wait next rides
//! along and nobody is overtaken. Work that is there does not wait for more to come, with one exception: those who were
//! answered together ask again nearly together, so the first of them waits for the others, at most an eighth of the time
//! that their last batch took (and at most 5 ms), and not at all if the last batch was one piece of work.
//!
//! ```text
//! turns:    asker A    asker B   ...     one piece of work each, in turn
//! ready:    lanes      lanes             those with work of which none is running, by who asked for the first of it
//! lanes:    session or single -> work in order
//! batch:    the first of the turns, and those behind it as far as all of them can run together
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
    time::{Duration, Instant},
};

use crate::telemetry::faults::{Fault, fault};

/// Work that was done together is followed by work that waits for its companions, at most this part of the time it took.
const GATHER_SHARE: u32 = 8;
/// The longest that work waits for companions: a few times what a client takes from an answer to its next request.
const MAX_GATHER: Duration = Duration::from_millis(5);

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

/// How much runs at once on one thread.
#[derive(Debug, Clone, Copy)]
pub struct BatchLimits {
    /// Pieces of work; 1 runs each alone.
    pub items: usize,
    /// Rows of them together. A piece of work with more rows runs alone.
    pub rows: usize,
}

impl BatchLimits {
    /// No batches.
    pub const ALONE: Self = Self { items: 1, rows: 0 };
}

/// Work that can run together with other work of its kind.
pub trait Batched: Send + Sized + 'static {
    /// How much of [`BatchLimits::rows`] it takes.
    fn rows(&self) -> usize;

    /// Does all of it, on a worker: one piece or several, each of another lane, in the order of their turns.
    fn run(batch: Vec<Self>);

    /// Called instead, on another thread, if it has to give way to another asker's work.
    fn give_way(self, full: QueueFull);
}

/// The kind of work of a pool that has no batches: there is none of it.
#[derive(Debug, Clone, Copy)]
pub enum NoBatches {}

impl Batched for NoBatches {
    fn rows(&self) -> usize {
        match *self {}
    }

    fn run(_: Vec<Self>) {}

    fn give_way(self, _: QueueFull) {
        match self {}
    }
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
/// Work of more rows is long: a prompt, not a step. It takes tens of times what a step does.
const LONG_ROWS: usize = 64;

enum Work<B> {
    /// Called with `Ok` to do the work, with the state of the queue if the work has to give way.
    Alone(Box<dyn FnOnce(Result<(), QueueFull>) + Send>),
    /// Can run together with others.
    Batched(B),
}

impl<B: Batched> Work<B> {
    /// Rows in a batch; `None` if it runs alone.
    fn rows(&self) -> Option<usize> {
        match self {
            Self::Alone(_) => None,
            Self::Batched(work) => Some(work.rows()),
        }
    }

    /// Whether it keeps its thread so long that all the others must not be kept by its like.
    fn is_long(&self) -> bool {
        self.rows().is_some_and(|rows| rows > LONG_ROWS)
    }
}

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

struct Item<B> {
    asker: Asker,
    /// Its place among all work ever submitted.
    number: u64,
    bytes: usize,
    work: Work<B>,
}

struct LaneState<B> {
    is_running: bool,
    waiting: VecDeque<Item<B>>,
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

/// The last batch that ended, which tells how many ask again soon.
#[derive(Debug, Clone, Copy)]
struct LastBatch {
    items: usize,
    /// The longest that the next one waits for as many.
    gather: Duration,
}

struct Queue<B> {
    lanes: HashMap<Lane, LaneState<B>>,
    askers: HashMap<Asker, AskerState>,
    /// Askers with ready lanes who had nothing else waiting.
    fresh: VecDeque<Asker>,
    /// How many of them have just had their turns one after another.
    fresh_in_row: u32,
    /// The other askers with ready lanes.
    turns: VecDeque<Asker>,
    long_running: usize,
    max_long: usize,
    /// Lanes in the lines of all askers.
    ready: usize,
    last_batch: LastBatch,
    /// Since when ready work waits for companions.
    gathering: Option<Instant>,
    items: usize,
    bytes: usize,
    next_number: u64,
    /// Counts the times that idle threads were asked for a beat.
    probes: u64,
    closed: bool,
}

/// Where the work whose turn it is stands.
#[derive(Debug, Clone, Copy)]
struct Turn {
    asker: Asker,
    is_fresh: bool,
    /// Of the asker in its line, and of the lane among the asker's.
    place: usize,
    lane: usize,
}

impl<B: Batched> Queue<B> {
    fn new(threads: usize) -> Self {
        Self {
            lanes: HashMap::new(),
            askers: HashMap::new(),
            fresh: VecDeque::new(),
            fresh_in_row: 0,
            turns: VecDeque::new(),
            long_running: 0,
            max_long: threads.saturating_sub(1).max(1),
            ready: 0,
            last_batch: LastBatch { items: 1, gather: Duration::ZERO },
            gathering: None,
            items: 0,
            bytes: 0,
            next_number: 0,
            probes: 0,
            closed: false,
        }
    }

    fn is_full(&self, limits: QueueLimits, bytes: usize) -> bool {
        // One piece of work always fits an empty queue, whatever its size.
        self.items >= limits.items || (self.items > 0 && self.bytes + bytes > limits.bytes)
    }

    /// Puts a lane that can run in its asker's line. Only what was just asked for may make its asker a fresh one.
    fn make_ready(&mut self, lane: Lane, just_asked: bool) {
        let first = self.lanes.get(&lane).and_then(|state| state.waiting.front()).map(|item| item.asker);
        let Some((asker, state)) = first.and_then(|asker| Some((asker, self.askers.get_mut(&asker)?))) else { return };
        let is_in_line = !state.ready.is_empty();
        // An answer may be back at its asker before the pool has put the work away.
        let is_fresh = just_asked && state.waiting.len() == 1 && state.items <= 2;
        state.ready.push_back(lane);
        self.ready += 1;
        if !is_in_line {
            self.line(is_fresh).push_back(asker);
        }
    }

    fn line(&mut self, is_fresh: bool) -> &mut VecDeque<Asker> {
        if is_fresh { &mut self.fresh } else { &mut self.turns }
    }

    /// Whether nobody stands in line.
    fn is_idle(&self) -> bool {
        self.turns.is_empty() && self.fresh.is_empty()
    }

    /// Whose turn it is, of all whose work can run now.
    fn turn(&self) -> Option<Turn> {
        let fresh_first = self.fresh_in_row < FRESH_IN_ROW || self.turns.is_empty();
        [fresh_first, !fresh_first].into_iter().find_map(|is_fresh| self.turn_of(is_fresh))
    }

    /// The same in one of the two lines. Who has only long work that cannot run now keeps its place in it.
    fn turn_of(&self, is_fresh: bool) -> Option<Turn> {
        let takes_long = self.long_running < self.max_long;
        let line = if is_fresh { &self.fresh } else { &self.turns };
        let first = |lane: &Lane| self.lanes.get(lane).and_then(|state| state.waiting.front());
        let can_run = |lane: &Lane| first(lane).is_some_and(|item| takes_long || !item.work.is_long());
        line.iter().enumerate().find_map(|(place, asker)| {
            let lane = self.askers.get(asker)?.ready.iter().position(can_run)?;
            Some(Turn { asker: *asker, is_fresh, place, lane })
        })
    }

    /// The work whose turn it is.
    fn first(&self) -> Option<&Item<B>> {
        let Turn { asker, lane, .. } = self.turn()?;
        self.lanes.get(self.askers.get(&asker)?.ready.get(lane)?)?.waiting.front()
    }

    /// How much longer the work whose turn it is waits for companions; `None` if it does not.
    fn gather(&mut self, limits: BatchLimits, now: Instant) -> Option<Duration> {
        let LastBatch { items, gather } = self.last_batch;
        let can_grow = |item: &Item<B>| item.work.rows().is_some_and(|rows| rows < limits.rows);
        if self.closed || self.ready >= items.min(limits.items) || !self.first().is_some_and(can_grow) {
            return None;
        }
        let since = *self.gathering.get_or_insert(now);
        (since + gather).checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// Takes the work whose turn it is, and what comes right after it and can run together with it.
    fn next_batch(&mut self, limits: BatchLimits) -> Vec<(Lane, Item<B>)> {
        // Also if there is none: nobody waits for companions any more, so the next to come must wake a thread.
        self.gathering = None;
        let Some(first) = self.next() else { return Vec::new() };
        let mut rows = first.1.work.rows();
        let mut batch = vec![first];
        while let Some(held) = rows
            && batch.len() < limits.items
            && let Some(more) = self.first().and_then(|item| item.work.rows())
            && held.saturating_add(more) <= limits.rows
            && let Some(next) = self.next()
        {
            rows = Some(held + more);
            batch.push(next);
        }
        batch
    }

    /// Takes the work whose turn it is.
    fn next(&mut self) -> Option<(Lane, Item<B>)> {
        let Turn { asker, is_fresh, place, lane } = self.turn()?;
        self.line(is_fresh).remove(place);
        let state = self.askers.get_mut(&asker)?;
        let lane = state.ready.remove(lane)?;
        if !state.ready.is_empty() {
            self.turns.push_back(asker);
        }
        self.ready -= 1;
        let held = self.lanes.get_mut(&lane)?;
        let item = held.waiting.pop_front()?;
        held.is_running = true;
        if let Some(state) = self.askers.get_mut(&item.asker) {
            state.waiting.remove(&item.number);
        }
        self.long_running += usize::from(item.work.is_long());
        self.fresh_in_row = if is_fresh { self.fresh_in_row + 1 } else { 0 };
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
    fn end(&mut self, ended: Ended) {
        let Ended { lane, asker, bytes, was_long } = ended;
        self.discount(asker, bytes);
        self.long_running -= usize::from(was_long);
        let Some(state) = self.lanes.get_mut(&lane) else { return };
        state.is_running = false;
        if state.waiting.is_empty() {
            self.lanes.remove(&lane);
        } else {
            self.make_ready(lane, false);
        }
    }

    /// Takes out the newest waiting work of whoever has most of what is short, if that is more than `asker` would have.
    fn displace(&mut self, limits: QueueLimits, asker: Asker, bytes: usize) -> Option<Work<B>> {
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
            let before = state.ready.len();
            state.ready.retain(|ready| *ready != lane);
            self.ready -= before - state.ready.len();
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
        self.discount(most, item.bytes);
        Some(item.work)
    }

    fn push(&mut self, asker: Asker, session: Option<Arc<str>>, bytes: usize, work: Work<B>) {
        self.items += 1;
        self.bytes += bytes;
        let number = self.next_number;
        self.next_number += 1;
        let lane = session.map_or(Lane::Single(number), Lane::Session);
        let state = self.askers.entry(asker).or_default();
        state.items += 1;
        state.bytes += bytes;
        state.waiting.insert(number, lane.clone());
        let held = self.lanes.entry(lane.clone());
        let held = held.or_insert_with(|| LaneState { is_running: false, waiting: VecDeque::new() });
        held.waiting.push_back(Item { asker, number, bytes, work });
        if held.waiting.len() == 1 && !held.is_running {
            self.make_ready(lane, true);
        }
    }
}

struct Shared<B> {
    queue: Mutex<Queue<B>>,
    work_or_close: Condvar,
    limits: QueueLimits,
    batch: BatchLimits,
}

impl<B> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, Queue<B>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A fixed number of worker threads.
pub struct WorkerPool<B: Batched = NoBatches> {
    shared: Arc<Shared<B>>,
    threads: Vec<JoinHandle<()>>,
    pulses: Vec<Arc<AtomicU64>>,
}

impl<B: Batched> std::fmt::Debug for WorkerPool<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (items, bytes) = self.usage();
        f.debug_struct("WorkerPool")
            .field("threads", &self.threads.len())
            .field("items", &items)
            .field("bytes", &bytes)
            .finish()
    }
}

impl<B: Batched> WorkerPool<B> {
    /// Starts the threads.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(threads: usize, limits: QueueLimits, batch: BatchLimits) -> std::io::Result<Self> {
        let queue = Mutex::new(Queue::new(threads));
        let shared = Arc::new(Shared { queue, work_or_close: Condvar::new(), limits, batch });
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
        bytes: usize,
        work: impl FnOnce(Result<(), QueueFull>) + Send + 'static,
    ) -> Result<(), QueueFull> {
        self.queue(asker, session, bytes, Work::Alone(Box::new(work)))
    }

    /// As [`Self::submit`], of work that may run together with other work.
    ///
    /// # Errors
    /// [`QueueFull`] if it does not fit; the work is then dropped.
    pub fn submit_batched(
        &self,
        asker: Asker,
        session: Option<Arc<str>>,
        bytes: usize,
        work: B,
    ) -> Result<(), QueueFull> {
        self.queue(asker, session, bytes, Work::Batched(work))
    }

    fn queue(&self, asker: Asker, session: Option<Arc<str>>, bytes: usize, work: Work<B>) -> Result<(), QueueFull> {
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
            let is_batched = work.rows().is_some();
            queue.push(asker, session, bytes, work);
            // A thread that waits for companions looks again when its time is over: waking it for each would be in vain.
            if !is_batched
                || queue.gathering.is_none()
                || queue.ready >= queue.last_batch.items.min(self.shared.batch.items)
            {
                self.shared.work_or_close.notify_one();
            }
            Ok(())
        };
        drop(queue);
        for work in displaced {
            guarded(|| match work {
                Work::Alone(work) => work(Err(full)),
                Work::Batched(work) => work.give_way(full),
            });
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

impl<B: Batched> Drop for WorkerPool<B> {
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
fn guarded(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        fault!(ERROR, Fault::Panic, "model work panicked");
    }
}

/// Work that has run, and where it belonged.
struct Ended {
    lane: Lane,
    asker: Asker,
    bytes: usize,
    was_long: bool,
}

/// Does what was taken together.
fn run_batch<B: Batched>(batch: Vec<(Lane, Item<B>)>) -> Vec<Ended> {
    let mut ended = Vec::with_capacity(batch.len());
    let mut together = Vec::new();
    for (lane, Item { asker, bytes, work, .. }) in batch {
        ended.push(Ended { lane, asker, bytes, was_long: work.is_long() });
        match work {
            Work::Alone(work) => guarded(|| work(Ok(()))),
            Work::Batched(work) => together.push(work),
        }
    }
    if !together.is_empty() {
        guarded(|| B::run(together));
    }
    ended
}

fn run<B: Batched>(shared: &Shared<B>) {
    let mut queue = shared.lock();
    // A thread that begins after a probe answers it too.
    let mut probes = 0;
    loop {
        if queue.probes != probes {
            probes = queue.probes;
            beat();
        }
        if let Some(left) = queue.gather(shared.batch, Instant::now()) {
            let waited = shared.work_or_close.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            continue;
        }
        let batch = queue.next_batch(shared.batch);
        if batch.is_empty() {
            if queue.closed {
                return;
            }
            queue = shared.work_or_close.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        if !queue.is_idle() {
            shared.work_or_close.notify_one();
        }
        drop(queue);
        beat();
        let (items, started) = (batch.len(), Instant::now());
        let ended = run_batch(batch);
        let gather = (started.elapsed() / GATHER_SHARE).min(MAX_GATHER);
        beat();
        queue = shared.lock();
        queue.last_batch = LastBatch { items, gather };
        for ended in ended {
            queue.end(ended);
        }
        if !queue.is_idle() {
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
        WorkerPool::start(threads, QueueLimits { items, bytes }, BatchLimits::ALONE).unwrap()
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

    /// Work of as many rows that tells when it begins, and waits to be released.
    struct Step {
        rows: usize,
        n: u64,
        begun: mpsc::Sender<u64>,
        wait: Option<mpsc::Receiver<()>>,
    }

    impl Batched for Step {
        fn rows(&self) -> usize {
            self.rows
        }
        fn run(batch: Vec<Self>) {
            for step in batch {
                step.begun.send(step.n).unwrap();
                if let Some(wait) = step.wait {
                    assert!(wait.recv().is_err());
                }
            }
        }
        fn give_way(self, _: QueueFull) {}
    }

    #[test]
    fn long_work_leaves_a_thread_to_what_is_short() {
        let limits = QueueLimits { items: 100, bytes: 1 << 20 };
        let pool = WorkerPool::start(2, limits, BatchLimits::ALONE).unwrap();
        let (begun_tx, begun) = mpsc::channel();
        let step = |n, rows, wait| Step { rows, n, begun: begun_tx.clone(), wait };
        let releases: Vec<_> = (0..3)
            .map(|n| {
                let (release, wait) = mpsc::channel::<()>();
                pool.submit_batched(Asker::Connection(n), None, 1, step(n, LONG_ROWS + 1, Some(wait))).unwrap();
                release
            })
            .collect();
        assert_eq!(begun.recv(), Ok(0));
        for n in 10..20 {
            pool.submit_batched(TWO, None, 1, step(n, LONG_ROWS, None)).unwrap();
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
    /// Work that notes with what it ran.
    struct Noting {
        n: u32,
        rows: usize,
        noted: Arc<Mutex<Vec<Vec<u32>>>>,
    }

    const GAVE_WAY: u32 = 1000;

    impl Batched for Noting {
        fn rows(&self) -> usize {
            self.rows
        }
        fn run(batch: Vec<Self>) {
            let numbers: Vec<u32> = batch.iter().map(|work| work.n).collect();
            batch[0].noted.lock().unwrap().push(numbers.clone());
            assert!(!numbers.contains(&13), "expected in this test");
        }
        fn give_way(self, _: QueueFull) {
            self.noted.lock().unwrap().push(vec![GAVE_WAY + self.n]);
        }
    }

    /// A pool whose one thread waits, with work behind it that can run together.
    struct Batches {
        pool: WorkerPool<Noting>,
        release: Option<mpsc::Sender<()>>,
        noted: Arc<Mutex<Vec<Vec<u32>>>>,
    }

    impl Batches {
        fn new(items: usize, rows: usize, queue: usize) -> Self {
            let limits = QueueLimits { items: queue, bytes: 1 << 20 };
            let pool = WorkerPool::start(1, limits, BatchLimits { items, rows }).unwrap();
            let (release, wait) = mpsc::channel::<()>();
            let (begun_tx, begun) = mpsc::channel();
            pool.submit(ONE, Some("held".into()), 1, move |_| {
                begun_tx.send(()).unwrap();
                assert!(wait.recv().is_err());
            })
            .unwrap();
            begun.recv().unwrap();
            Self { pool, release: Some(release), noted: Arc::default() }
        }

        fn add(&self, asker: Asker, session: &str, n: u32, rows: usize) {
            let work = Noting { n, rows, noted: Arc::clone(&self.noted) };
            self.pool.submit_batched(asker, Some(session.into()), 1, work).unwrap();
        }

        fn all(&mut self) -> Vec<Vec<u32>> {
            self.release = None;
            while self.pool.usage() != (0, 0) {
                std::thread::yield_now();
            }
            std::mem::take(&mut self.noted.lock().unwrap())
        }
    }

    #[test]
    fn a_batch_is_what_would_run_next_anyway() {
        let mut batches = Batches::new(4, 100, 100);
        for (n, session) in ["a", "b", "a", "c", "d"].iter().enumerate() {
            batches.add(ONE, session, n as u32, 1);
        }
        batches.add(TWO, "e", 10, 1);
        // In the order of turns; the second of "a" comes after its first.
        assert_eq!(batches.all(), [vec![0, 10, 1, 3], vec![4, 2]]);
    }

    #[test]
    fn a_batch_ends_at_its_rows_and_at_work_that_runs_alone() {
        let mut batches = Batches::new(16, 10, 100);
        for (n, rows) in [4, 6, 1, 50, 10, 1, 10].iter().enumerate() {
            batches.add(ONE, &n.to_string(), n as u32, *rows);
        }
        let noted = Arc::clone(&batches.noted);
        batches.pool.submit(ONE, None, 1, move |_| noted.lock().unwrap().push(vec![7])).unwrap();
        batches.add(ONE, "8", 8, 1);
        batches.add(ONE, "9", 9, usize::MAX);
        assert_eq!(batches.all(), [vec![0, 1], vec![2], vec![3], vec![4], vec![5], vec![6], vec![7], vec![8], vec![9]]);
    }

    #[test]
    fn batches_of_one_are_none() {
        let mut batches = Batches::new(1, 100, 100);
        (0..3).for_each(|n| batches.add(ONE, &n.to_string(), n, 1));
        assert_eq!(batches.all(), [[0], [1], [2]]);
    }

    #[test]
    fn a_panic_of_a_batch_ends_no_thread_and_frees_its_sessions() {
        let mut batches = Batches::new(2, 100, 100);
        for n in [12, 13, 14] {
            batches.add(ONE, &n.to_string(), n, 1);
        }
        batches.add(ONE, "13", 15, 1);
        assert_eq!(batches.all(), [[12, 13], [14, 15]]);
    }

    #[test]
    fn batched_work_gives_way_too() {
        let mut batches = Batches::new(16, 100, 4);
        (0..3).for_each(|n| batches.add(ONE, &n.to_string(), n, 1));
        batches.add(TWO, "t", 3, 1);
        assert_eq!(batches.all(), [vec![GAVE_WAY + 2], vec![0, 3, 1]]);
    }

    #[test]
    fn who_was_answered_together_is_awaited_for_a_bounded_time() {
        let limits = BatchLimits { items: 4, rows: 10 };
        let mut queue = Queue::<Noting>::new(1);
        let noted = Arc::default();
        let add = |queue: &mut Queue<Noting>, n: u32, rows| {
            let work = Work::Batched(Noting { n, rows, noted: Arc::clone(&noted) });
            queue.push(ONE, Some(n.to_string().into()), 1, work);
        };
        let start = Instant::now();
        let gather = Duration::from_millis(2);
        let millis = Duration::from_millis;
        // After work that was alone nothing waits.
        add(&mut queue, 0, 1);
        assert_eq!(queue.gather(limits, start), None);
        assert_eq!(queue.next_batch(limits).len(), 1);
        // After three together the first of them waits, from when it came.
        queue.last_batch = LastBatch { items: 3, gather };
        assert_eq!(queue.gather(limits, start), None, "there is nothing");
        add(&mut queue, 1, 1);
        assert_eq!(queue.gather(limits, start + millis(5)), Some(millis(2)));
        assert_eq!(queue.gather(limits, start + millis(6)), Some(millis(1)));
        add(&mut queue, 2, 1);
        assert_eq!(queue.gather(limits, start + millis(7)), None, "time is over");
        assert_eq!(queue.next_batch(limits).len(), 2);
        assert!(queue.gathering.is_none());
        // All are there.
        (3..5).for_each(|n| add(&mut queue, n, 1));
        assert_eq!(queue.gather(limits, start), Some(millis(2)));
        add(&mut queue, 5, 1);
        assert_eq!(queue.gather(limits, start), None);
        assert_eq!(queue.next_batch(limits).len(), 3);
        // What takes no companions does not wait for them.
        add(&mut queue, 6, 10);
        assert_eq!(queue.gather(limits, start), None);
        assert_eq!(queue.next_batch(limits).len(), 1);
        // Neither does anybody once the pool ends.
        add(&mut queue, 7, 1);
        queue.closed = true;
        assert_eq!(queue.gather(limits, start), None);
    }

    #[test]
    fn work_that_came_after_others_left_is_not_forgotten() {
        let limits = BatchLimits { items: 4, rows: 10 };
        let mut queue = Queue::<Noting>::new(1);
        let work = |n| Work::Batched(Noting { n, rows: 1, noted: Arc::default() });
        queue.last_batch = LastBatch { items: 3, gather: Duration::from_secs(1) };
        queue.push(ONE, None, 1, work(1));
        let now = Instant::now();
        assert!(queue.gather(limits, now).is_some());
        // The one that waited has to give way, and the thread that waited with it finds nothing.
        assert!(
            queue.displace(QueueLimits { items: 1, bytes: 0 }, TWO, 0).is_none(),
            "it is not more than the other has"
        );
        queue.push(ONE, None, 1, work(2));
        assert!(queue.displace(QueueLimits { items: 1, bytes: 0 }, TWO, 0).is_some());
        assert_eq!((queue.ready, queue.next_batch(limits).len(), queue.ready), (1, 1, 0));
        assert!(queue.next_batch(limits).is_empty());
        assert!(queue.gathering.is_none(), "whoever comes next wakes a thread");
    }
}
