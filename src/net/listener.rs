//! What Unix and TCP listeners have in common: who gets a connection, and what those get who do not.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::Semaphore;

use super::{
    connection::{ConnectionOptions, StreamSocket, refuse, serve},
    shutdown::Shutdown,
};
use crate::{
    model::session::random_name,
    station::{
        Station,
        error::RequestError,
        request::{Carrier, Origin, Peer},
    },
    telemetry::faults::{Fault, fault},
};

/// Connections at once that are told why they are refused; more are only closed.
const MAX_REFUSALS: usize = 256;

/// Takes accepted sockets into service. Copies share one bound on connections.
#[derive(Debug, Clone)]
pub struct Acceptor {
    station: Arc<Station>,
    options: Arc<ConnectionOptions>,
    /// Whether requests without a session share one per connection.
    connection_session: bool,
    permits: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
    max_connections: usize,
    shutdown: Shutdown,
}

impl Acceptor {
    /// An acceptor of at most `max_connections` at once.
    #[must_use]
    pub fn new(
        station: Arc<Station>,
        options: ConnectionOptions,
        connection_session: bool,
        max_connections: usize,
        shutdown: Shutdown,
    ) -> Self {
        let permits = Arc::new(Semaphore::new(max_connections));
        let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
        let options = Arc::new(options);
        Self { station, options, connection_session, permits, refusals, max_connections, shutdown }
    }

    /// The same acceptor with other options for its connections.
    #[must_use]
    pub fn with_options(&self, options: ConnectionOptions) -> Self {
        Self { options: Arc::new(options), ..self.clone() }
    }

    /// Waits for the end of accepting. Cancel safe.
    pub(super) async fn draining(&self) {
        self.shutdown.draining().await;
    }

    /// Serves a socket, or refuses it with a vent if its peer is not allowed or there is no room.
    pub(super) fn admit(&self, socket: impl StreamSocket, carrier: Carrier, origin: Origin, is_allowed: bool) {
        static NEXT_CONNECTION: AtomicU64 = AtomicU64::new(1);
        let counters = self.station.counters();
        counters.connections_accepted.add_one();
        let peer = Peer {
            carrier,
            connection: NEXT_CONNECTION.fetch_add(1, Ordering::Relaxed),
            address: None,
            origin,
            is_proven: true,
            max_reply_len: self.station.limits().max_frame_len,
            default_session: self.connection_session.then(|| random_name().into()),
            stock_replies: self.options.stock_clients,
        };
        let permit = match Arc::clone(&self.permits).try_acquire_owned() {
            _ if !is_allowed => Err(RequestError::PeerNotAllowed),
            Ok(permit) => Ok(permit),
            Err(_) => {
                let retry_after_ms = self.station.retry_after_ms();
                Err(RequestError::TooManyConnections { max: self.max_connections, retry_after_ms })
            }
        };
        match permit {
            Ok(permit) => {
                let mut open = counters.connections.share();
                open.set(1);
                let (station, options) = (Arc::clone(&self.station), Arc::clone(&self.options));
                self.shutdown.spawn(serve(socket, peer, station, options, self.shutdown.clone(), (permit, open)));
            }
            Err(error) => {
                counters.connections_refused.add_one();
                counters.faults.of(error.fault()).add_one();
                fault!(WARN, error.fault(), carrier = carrier.name(), peer = %origin, %error, "connection refused: {error}");
                // The vent is a courtesy, for which a flood of connections must not take all descriptors.
                let Ok(refusing) = Arc::clone(&self.refusals).try_acquire_owned() else { return };
                let (framing, flags) = (self.options.framing, peer.reply_flags(false));
                self.shutdown.spawn(async move {
                    refuse(socket, framing, flags, &error).await;
                    drop(refusing);
                });
            }
        }
    }

    /// Accepting fails for reasons that pass (a connection that is gone already, no descriptors left): say so and go on.
    pub(super) async fn after_error(&self, error: &io::Error) {
        self.station.counters().faults.of(Fault::Accept).add_one();
        fault!(WARN, Fault::Accept, %error, "cannot accept a connection: {error}");
        // Without descriptors the next try fails at once too: give others time to close theirs.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
