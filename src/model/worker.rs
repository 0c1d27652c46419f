//! The threads that models run on, and the bounded queue in front of them.
//!
//! Work is submitted to a **lane**. Work of one lane (one session) runs in the order of submission and never twice at the
//! same time; lanes run side by side and take turns. The queue is bounded in items and bytes: what does not fit is
//! refused at once, nothing waits without bound. The pool knows nothing of what it runs.

use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use crate::telemetry::faults::{Fault, fault};

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

type Work = Box<dyn FnOnce() + Send>;

/// What work belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Lane {
    /// A session: its work runs in order.
    Session(Arc<str>),
    /// Work on its own.
    Single(u64),
}

#[derive(Default)]
struct Queue {
    lanes: HashMap<Lane, VecDeque<(usize, Work)>>,
    /// Lanes that have work and of which none is running.
    ready: VecDeque<Lane>,
    items: usize,
    bytes: usize,
    next_single: u64,
    closed: bool,
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
        let shared = Arc::new(Shared { queue: Mutex::default(), work_or_close: Condvar::new(), limits });
        let mut pool = Self { shared, threads: Vec::new() };
        for n in 0..threads {
            let shared = Arc::clone(&pool.shared);
            pool.threads.push(std::thread::Builder::new().name(format!("model-{n}")).spawn(move || run(&shared))?);
        }
        Ok(pool)
    }

    /// Puts work behind the other work of its session, or on its own.
    ///
    /// # Errors
    /// [`QueueFull`] if it does not fit; the work is then not run.
    pub fn submit(
        &self,
        session: Option<Arc<str>>,
        bytes: usize,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), QueueFull> {
        let mut queue = self.shared.lock();
        let (items, queued) = (queue.items, queue.bytes);
        // One piece of work always fits an empty queue, whatever its size.
        let full = items >= self.shared.limits.items || (items > 0 && queued + bytes > self.shared.limits.bytes);
        if full || queue.closed {
            return Err(QueueFull { items, bytes: queued });
        }
        queue.items += 1;
        queue.bytes += bytes;
        let lane = session.map_or_else(
            || {
                queue.next_single += 1;
                Lane::Single(queue.next_single)
            },
            Lane::Session,
        );
        if let Some(waiting) = queue.lanes.get_mut(&lane) {
            waiting.push_back((bytes, Box::new(work)));
        } else {
            queue.lanes.insert(lane.clone(), VecDeque::from([(bytes, Box::new(work) as Work)]));
            queue.ready.push_back(lane);
            self.shared.work_or_close.notify_one();
        }
        Ok(())
    }

    /// Whether work of a session is waiting or running.
    #[must_use]
    pub fn has_work(&self, session: &Arc<str>) -> bool {
        self.shared.lock().lanes.contains_key(&Lane::Session(Arc::clone(session)))
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
            queue.ready.clear();
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

fn run(shared: &Shared) {
    let mut queue = shared.lock();
    loop {
        let Some(lane) = queue.ready.pop_front() else {
            if queue.closed {
                return;
            }
            queue = shared.work_or_close.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let Some((bytes, work)) = queue.lanes.get_mut(&lane).and_then(VecDeque::pop_front) else { continue };
        drop(queue);
        // Work answers for its own failures; a panic that still gets here must not take the thread along.
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            fault!(ERROR, Fault::Panic, "model work panicked");
        }
        queue = shared.lock();
        queue.items -= 1;
        queue.bytes -= bytes;
        if let Some(waiting) = queue.lanes.get(&lane) {
            if waiting.is_empty() {
                queue.lanes.remove(&lane);
            } else {
                queue.ready.push_back(lane);
                shared.work_or_close.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};

    use super::*;

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
            pool.submit(Some(name.into()), 1, move || {
                barrier.wait();
            })
            .unwrap();
            for n in 0..100 {
                let tx = tx.clone();
                pool.submit(Some(name.into()), 1, move || tx.send((name, n)).unwrap()).unwrap();
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
        pool.submit(None, 10, move || wait.recv().unwrap()).unwrap();
        pool.submit(None, 80, || ()).unwrap();
        assert_eq!(pool.submit(None, 11, || ()), Err(QueueFull { items: 2, bytes: 90 }));
        pool.submit(None, 10, move || tx.send(()).unwrap()).unwrap();
        assert_eq!(pool.submit(None, 0, || ()), Err(QueueFull { items: 3, bytes: 100 }));
        release.send(()).unwrap();
        rx.recv().unwrap();
        while pool.usage() != (0, 0) {
            std::thread::yield_now();
        }
        pool.submit(None, 5000, || ()).unwrap();
    }

    #[test]
    fn a_panic_costs_only_its_own_work() {
        let pool = pool(1, 10, 100);
        let (tx, rx) = mpsc::channel();
        pool.submit(Some("a".into()), 1, || panic!("expected in this test")).unwrap();
        pool.submit(Some("a".into()), 1, move || tx.send(7).unwrap()).unwrap();
        assert_eq!(rx.recv(), Ok(7));
    }

    #[test]
    fn dropping_the_pool_ends_its_threads() {
        let pool = pool(2, 10, 100);
        let (tx, rx) = mpsc::channel::<()>();
        pool.submit(None, 1, move || drop(tx)).unwrap();
        drop(pool);
        assert!(rx.recv().is_err());
    }
}
