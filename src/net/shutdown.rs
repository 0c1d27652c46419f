//! How carriers are told to stop: first gently, then at once.

use std::time::Duration;

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Shared by everything that runs until the process stops.
///
/// ```text
/// running --drain()--> draining: nothing new is accepted, work in flight ends
///                          |
///                          +--all tasks ended, or grace period over--> killed: what is left is dropped
/// ```
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    drain: CancellationToken,
    kill: CancellationToken,
    tasks: TaskTracker,
}

impl Shutdown {
    /// Starts a task that the end of the process waits for.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Asks everything to end its work.
    pub fn drain(&self) {
        self.drain.cancel();
    }

    /// Asks everything to stop at once.
    pub fn kill(&self) {
        self.drain.cancel();
        self.kill.cancel();
    }

    /// Waits until draining has begun. Cancel safe.
    pub async fn draining(&self) {
        self.drain.cancelled().await;
    }

    /// Waits until everything must stop at once. Cancel safe.
    pub async fn killed(&self) {
        self.kill.cancelled().await;
    }

    /// Whether draining has begun.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.drain.is_cancelled()
    }

    /// Drains, waits for all tasks at most for `grace`, then stops what is left. Returns whether all ended by themselves.
    pub async fn finish(&self, grace: Duration) -> bool {
        self.drain();
        self.tasks.close();
        let ended = tokio::time::timeout(grace, self.tasks.wait()).await.is_ok();
        if !ended {
            self.kill();
            // Tasks only have to notice: what they wait for is cancelled.
            let _ = tokio::time::timeout(Duration::from_secs(1), self.tasks.wait()).await;
        }
        ended
    }
}
