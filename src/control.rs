//! What an operator asks of a running node, by a signal or over HTTP, and what came of it.
//!
//! ```text
//! SIGHUP ──┐                                 ┌── the reply of POST /reload
//!          ├─> Control::reload ─> Registry ──┼── the log
//! POST ────┘                                 ├── metrics
//!                                            └── Status, for whoever watches it
//! ```
//!
//! [`Status`] is published on a watch channel, so that a service manager can be told the same as the log and the reply.

use std::{fmt, sync::Arc};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{basis::registry::Reload, causes::with_causes, station::Station};

/// What a node is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// It takes requests.
    #[default]
    Serving,
    /// It takes requests and loads bases and methodologies meanwhile.
    Reloading,
    /// It takes no new work and is about to stop.
    Draining,
}

/// What is known of a node beside its requests.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// What it is doing.
    pub phase: Phase,
    /// What the last reload did.
    pub last_reload: Option<Result<ReloadReport, ReloadFailure>>,
}

/// A reload that put a new set in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReloadReport {
    /// What it changed.
    pub reload: Reload,
    /// Methodologies in use now.
    pub methodologies: usize,
    /// Whether the node has a folder to load bases from; without one nothing was loaded.
    pub has_folder: bool,
}

impl fmt::Display for ReloadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reload { added, withdrawn, kept, duplicates } = &self.reload;
        if !self.has_folder {
            return f.write_str("nothing to load again: this node was started without --bases");
        }
        let list = |fingerprints: &[u32]| {
            let texts: Vec<String> = fingerprints.iter().map(|fp| format!(" 0x{fp:08x}")).collect();
            texts.concat()
        };
        write!(f, "bases loaded again: {} added{}, ", added.len(), list(added))?;
        write!(f, "{} withdrawn{}, {kept} kept, ", withdrawn.len(), list(withdrawn))?;
        write!(f, "{} methodologies", self.methodologies)?;
        for duplicate in duplicates {
            write!(f, "; left out {duplicate}")?;
        }
        Ok(())
    }
}

/// A reload that left the old set in use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bases not loaded again, the old ones stay: {cause}")]
pub struct ReloadFailure {
    /// Which file is bad, and why.
    pub cause: String,
    /// Bases that stay in use.
    pub kept: usize,
}

/// A handle on a running node. Copies are handles on the same node.
#[derive(Debug, Clone)]
pub struct Control(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    station: Arc<Station>,
    drain: CancellationToken,
    status: watch::Sender<Status>,
}

impl Control {
    /// A handle on the node of a station.
    #[must_use]
    pub fn new(station: Arc<Station>) -> Self {
        Self(Arc::new(Inner { station, drain: CancellationToken::new(), status: watch::Sender::default() }))
    }

    /// The station.
    #[must_use]
    pub fn station(&self) -> &Arc<Station> {
        &self.0.station
    }

    /// What the node is doing, now and whenever it changes.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.0.status.subscribe()
    }

    /// Loads bases and methodologies again while requests run, each of which keeps the set that it began with. When
    /// anything is wrong the old set stays in use. Once begun it goes on even if the caller goes away.
    ///
    /// # Errors
    /// [`ReloadFailure`], which names the bad file.
    pub async fn reload(&self) -> Result<ReloadReport, ReloadFailure> {
        let inner = Arc::clone(&self.0);
        // Reading and checking files takes seconds: not on a thread that serves sockets.
        match tokio::task::spawn_blocking(move || inner.reload()).await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "the reload broke off: {error}");
                Err(ReloadFailure { cause: "internal error; the log of this node says more".to_owned(), kept: 0 })
            }
        }
    }

    /// Refuses new work from now on, and has the node stop once work in flight has ended.
    pub fn drain(&self) {
        self.0.station.drain();
        self.0.status.send_modify(|status| status.phase = Phase::Draining);
        self.0.drain.cancel();
    }

    /// Waits until the node was asked to drain. Cancel safe.
    pub async fn drain_requested(&self) {
        self.0.drain.cancelled().await;
    }
}

impl Inner {
    fn reload(&self) -> Result<ReloadReport, ReloadFailure> {
        self.set_phase(Phase::Reloading);
        let bases = self.station.bases();
        let result = match bases.reload() {
            Ok(reload) => {
                let methodologies = bases.current().methodologies().iter().len();
                Ok(ReloadReport { reload, methodologies, has_folder: bases.folder().is_some() })
            }
            Err(error) => Err(ReloadFailure { cause: with_causes(&error), kept: bases.current().bases().len() }),
        };
        self.station.counters().reloads.note(result.is_ok());
        match &result {
            Ok(report) => tracing::warn!("{report}"),
            Err(failure) => tracing::error!(cause = failure.cause, "{failure}"),
        }
        self.status.send_modify(|status| status.last_reload = Some(result.clone()));
        self.set_phase(Phase::Serving);
        result
    }

    /// Draining is never left again.
    fn set_phase(&self, phase: Phase) {
        self.status.send_modify(|status| {
            if !self.station.is_draining() {
                status.phase = phase;
            }
        });
    }
}
