//! What a measurement needs of the system: one core for both sides, the time that threads ran, memory.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::{Pid, gettid},
};

/// The core that everything runs on: the last one that this process may use, as the first often serves interrupts.
pub(super) fn core() -> anyhow::Result<usize> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("asking for the cores of this process")?;
    (0..CpuSet::count()).rev().find(|core| allowed.is_set(*core).unwrap_or(false)).context("no core to run on")
}

/// Keeps the calling thread on one core. Two sides on two cores would measure the wake-up of a sleeping core instead.
pub(super) fn pin(core: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(core).context("choosing a core")?;
    sched_setaffinity(Pid::from_raw(0), &set).context("pinning a thread to a core")
}

/// The threads of one server, which name themselves when they start.
#[derive(Debug, Clone, Default)]
pub(super) struct Threads(Arc<Mutex<Vec<Pid>>>);

impl Threads {
    /// Adds the calling thread and keeps it on one core.
    pub(super) fn enter(&self, core: usize) {
        // A thread that cannot be pinned still serves; the figures are only less steady.
        let _ = pin(core);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(gettid());
    }

    /// The time that they ran so far. Exact for threads that wait now.
    pub(super) fn cpu(&self) -> Duration {
        let threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ran = |thread: &Pid| -> Option<u64> {
            let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok()
        };
        Duration::from_nanos(threads.iter().filter_map(ran).sum())
    }
}

/// Bytes of this process that are in memory.
pub(super) fn resident() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").context("reading the memory of this process")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).context("no Rss in smaps_rollup")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("reading Rss")?;
    Ok(kib << 10)
}
