//! What systemd is told: ready, reloading, stopping, a line about the state, and that the model threads are alive.
//!
//! ```text
//! start ── READY=1 ──> serving ──(reload)── RELOADING=1 ──> READY=1
//!                         │
//!                         └──(drain)── STOPPING=1
//! while it serves: STATUS=… when it changes, WATCHDOG=1 while the model threads move
//! ```
//!
//! The watchdog is fed for what it is there to watch: only when every model thread has moved since it was fed last
//! (`model::worker`). A timer alone would go on feeding it in front of a thread that is stuck.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use sd_notify::NotifyState;
use tokio_util::task::AbortOnDropHandle;

use crate::station::Station;

/// How often the state is looked at. A short watchdog asks for more.
const PERIOD: Duration = Duration::from_secs(1);

/// The node as systemd sees it. Says nothing more once it is dropped.
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    _watch: Option<AbortOnDropHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    station: Arc<Station>,
    /// The last state that was said.
    status: Mutex<String>,
}

impl Service {
    /// Says that the node is ready, and goes on saying how it is. Needs a running runtime.
    #[must_use]
    pub fn start(station: Arc<Station>) -> Self {
        let shared = Arc::new(Shared { station, status: Mutex::default() });
        // Without a service manager there is nobody to tell.
        let watch = std::env::var_os("NOTIFY_SOCKET").map(|_| {
            let watching = Watch { shared: Arc::clone(&shared), watchdog: sd_notify::watchdog_enabled() };
            AbortOnDropHandle::new(tokio::spawn(watching.run()))
        });
        let service = Self { shared, _watch: watch };
        service.ready();
        service
    }

    /// Says that bases are being loaded again.
    pub fn reloading(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => tell(&[NotifyState::Reloading, now]),
            Err(_) => tell(&[NotifyState::Reloading]),
        }
    }

    /// Says that the node serves: after the start, and after a reload, whether it went well or not.
    pub fn ready(&self) {
        let status = self.shared.describe("");
        tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
        self.shared.remember(status);
    }

    /// Says that the node is about to end.
    pub fn stopping(&self) {
        let status = self.shared.describe("");
        tell(&[NotifyState::Stopping, NotifyState::Status(&status)]);
        self.shared.remember(status);
    }
}

/// A failure to tell costs nothing but the telling; without a service manager nothing happens.
fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot tell the service manager how this node is");
    }
}

impl Shared {
    /// The state in one line.
    fn describe(&self, trouble: &str) -> String {
        let info = self.station.model().info();
        let bases = self.station.bases();
        let mut text = format!(
            "{}{} layers {}..{} of {}, {} sessions, {} bases",
            if self.station.is_draining() { "draining: " } else { "" },
            info.name,
            info.layers.start,
            info.layers.end,
            info.n_layers,
            self.station.session_count(),
            bases.current().bases().len(),
        );
        if let Some(failure) = bases.last_failure() {
            text += &format!("; last reload failed, the old bases stay: {failure}");
        }
        text += trouble;
        // The message is made of lines.
        text.replace(['\n', '\r'], " ")
    }

    /// Keeps what was said; returns whether it is new.
    fn remember(&self, status: String) -> bool {
        let mut last = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = *last != status;
        *last = status;
        is_new
    }
}

struct Watch {
    shared: Arc<Shared>,
    /// Time after which the service manager acts on silence.
    watchdog: Option<Duration>,
}

impl Watch {
    async fn run(self) {
        let station = &self.shared.station;
        // Four looks in the time of the watchdog: one that comes late or finds a thread in a long step does no harm.
        let period = self.watchdog.map_or(PERIOD, |time| (time / 4).clamp(Duration::from_millis(1), PERIOD));
        let (mut fed, mut fed_at) = (station.take_pulses(), Instant::now());
        let mut is_reported = false;
        loop {
            tokio::time::sleep(period).await;
            let pulses = station.take_pulses();
            let still = pulses.iter().zip(&fed).position(|(now, then)| now == then);
            let mut trouble = String::new();
            match (self.watchdog, still) {
                (None, _) => {}
                (Some(_), None) => {
                    tell(&[NotifyState::Watchdog]);
                    (fed, fed_at, is_reported) = (pulses, Instant::now(), false);
                }
                (Some(time), Some(n)) if fed_at.elapsed() > time / 2 => {
                    trouble = format!("; thread model-{n} does not move");
                    if !is_reported {
                        tracing::error!(
                            thread = format!("model-{n}"),
                            "a model thread does not move; the watchdog is not fed until it does"
                        );
                        is_reported = true;
                    }
                }
                (Some(_), Some(_)) => {}
            }
            let status = self.shared.describe(&trouble);
            if self.shared.remember(status.clone()) {
                tell(&[NotifyState::Status(&status)]);
            }
        }
    }
}
