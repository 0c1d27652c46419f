//! The HTTP listener: the prefix replay cache, and what operators see and ask. Spec: `proto/SPEC.md`, "HTTP".
//!
//! | method and path | answer |
//! |---|---|
//! | `POST /amplituhedron/replay` | 200 with the envelope, 204 without anything, 4xx and 5xx as JSON |
//! | `POST /amplituhedron/capture` | 200 `{"captured":true}`, 4xx and 5xx as JSON |
//! | `GET /live` | 200 as long as the process answers |
//! | `GET /ready` | 200, or 503 once the node drains |
//! | `GET /metrics` | all metrics, for Prometheus |
//! | `GET /bases` | bases and methodologies in use, as JSON |
//! | `GET /sessions` | sessions and their memory, as JSON; by a hash, because names are secrets of clients |
//! | `POST /reload` | 200 with what changed, 422 with the bad file |
//! | `POST /drain` | 202, and the node stops when work in flight has ended |
//!
//! The last two are for peers on the list of `admin-allow`, which is loopback unless something else is configured. A POST
//! with an `Origin` header comes from a page in a browser and gets 403.
//!
//! The daemon starts it beside the other carriers; it sees the station's handler and knows no frame of theirs. Bodies have
//! one limit, that of frames. A peer that is not on the allow list gets 403.

pub(crate) mod body;
mod control;
mod replay;
mod reply;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    response::Response,
    routing::{get, post},
};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use self::reply::{Refusal, json};
use crate::{
    control::Control,
    net::{peer::AllowList, shutdown::Shutdown},
    station::Station,
    telemetry::faults::{Fault, fault},
};

/// Connections at once.
const MAX_CONNECTIONS: usize = 1024;
/// Bodies at once, which bounds the memory of all of them. Slow uploads take these, so that health checks are answered
/// beside them.
const MAX_BODIES: usize = 32;
/// Header lines of one request.
const MAX_HEADERS: usize = 64;

/// What every route sees.
#[derive(Debug, Clone)]
struct Admin {
    control: Control,
    /// Time for each started MiB of a request.
    timeout: Duration,
    bodies: Arc<Semaphore>,
    /// Whether this peer may reload and drain.
    may_control: bool,
}

impl Admin {
    fn station(&self) -> &Arc<Station> {
        self.control.station()
    }
}

/// A bound HTTP listener.
#[derive(Debug)]
pub struct HttpListener {
    listener: TcpListener,
    allow: AllowList,
    /// Who may reload and drain, of those that are allowed.
    control: AllowList,
}

impl HttpListener {
    /// Binds `address`.
    ///
    /// # Errors
    /// What the system said.
    pub async fn bind(address: SocketAddr, allow: AllowList) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, allow, control: AllowList::default() })
    }

    /// Who may reload and drain, of those that are allowed; loopback unless this is called.
    #[must_use]
    pub fn with_control(self, control: AllowList) -> Self {
        Self { control, ..self }
    }

    /// Takes a non-blocking socket that listens already.
    ///
    /// # Errors
    /// If the runtime cannot watch it.
    pub fn inherit(listener: std::net::TcpListener, allow: AllowList) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::from_std(listener)?, allow, control: AllowList::default() })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// What the system said.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until draining begins. `timeout` is the time for each started MiB of a request.
    pub async fn run(self, control: Control, timeout: Duration, shutdown: Shutdown) {
        let faults = Arc::clone(control.station().counters());
        let bodies = Arc::new(Semaphore::new(MAX_BODIES));
        let admin = Admin { control, timeout, bodies, may_control: false };
        let control_router = routes(Admin { may_control: true, ..admin.clone() });
        let router = routes(admin);
        let refusal = Router::new().fallback(|| async { Refusal::PeerNotAllowed.into_response() });
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&permits) => accepted,
                () = shutdown.draining() => return,
            };
            match accepted {
                Ok((socket, address, permit)) => {
                    let router = match self.allow.allows(address.ip()) {
                        false => refusal.clone(),
                        true if self.control.allows(address.ip()) => control_router.clone(),
                        true => router.clone(),
                    };
                    let serving = serve(socket, router, timeout, shutdown.clone());
                    shutdown.spawn(async move {
                        serving.await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    faults.faults.of(Fault::Accept).add_one();
                    fault!(WARN, Fault::Accept, %error, "cannot accept an HTTP connection: {error}");
                    // Without descriptors the next try fails at once too: give others time to close theirs.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// One connection over the bound waits in the system's line.
    async fn accept(&self, permits: &Arc<Semaphore>) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
        let permit = Arc::clone(permits).acquire_owned().await.map_err(io::Error::other)?;
        let (socket, address) = self.listener.accept().await?;
        // An answer must not wait for the acknowledgement of the one before it.
        let _ = socket.set_nodelay(true);
        Ok((socket, address, permit))
    }
}

async fn serve(socket: TcpStream, router: Router, timeout: Duration, shutdown: Shutdown) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(timeout)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(router));
    tokio::pin!(connection);
    let mut draining = false;
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    fault!(DEBUG, Fault::Http, %error, "HTTP connection ended: {error}");
                }
                return;
            }
            () = shutdown.draining(), if !draining => {
                draining = true;
                connection.as_mut().graceful_shutdown();
            }
            () = shutdown.killed() => return,
        }
    }
}

fn routes(admin: Admin) -> Router {
    Router::new()
        .route("/amplituhedron/replay", post(replay::replay))
        .route("/amplituhedron/capture", post(replay::capture))
        .route("/live", get(|| async { json(200, r#"{"live":true}"#) }))
        .route("/ready", get(ready))
        .route("/metrics", get(control::metrics))
        .route("/bases", get(control::bases))
        .route("/sessions", get(control::sessions))
        .route("/reload", post(control::reload))
        .route("/drain", post(control::drain))
        .method_not_allowed_fallback(|| async { Refusal::Method.into_response() })
        .fallback(|| async { Refusal::UnknownPath.into_response() })
        .layer(axum::middleware::from_fn(control::refuse_pages))
        .with_state(admin)
}

async fn ready(State(admin): State<Admin>) -> Response {
    match admin.station().is_draining() {
        false => json(200, r#"{"ready":true}"#),
        true => json(503, r#"{"ready":false,"error":"draining: this node is about to stop"}"#),
    }
}
