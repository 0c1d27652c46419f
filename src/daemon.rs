//! A running node: the one place that wires model, station and carriers together.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Instant};

use crate::{
    admin::HttpListener,
    basis::{Registry, registry::RegistryError},
    config::Config,
    control::Control,
    model::{
        LayerRange,
        error::LoadError,
        identity::Identity,
        load::{ModelSpec, load_transformer},
        upstream::{Upstream, UpstreamError},
    },
    net::{
        connection::ConnectionOptions,
        listener::Acceptor,
        shutdown::Shutdown,
        tcp::TcpCarrier,
        udp::{self, UdpCarrier},
        uds::{self, UdsListener},
    },
    station::Station,
    telemetry,
};

/// How often unused sessions are looked for.
const EXPIRY_PERIOD: std::time::Duration = std::time::Duration::from_secs(5);

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model.
    #[error("cannot load the model")]
    Model(#[from] LoadError),
    /// The bases.
    #[error("cannot load the bases")]
    Bases(#[from] RegistryError),
    /// The station behind this one.
    #[error("cannot use the station behind this one")]
    Upstream(#[from] UpstreamError),
    /// Layers that the backend does not have.
    #[error("--layers {lo}..{hi}: this model has layers 0..{n_layers}")]
    Layers {
        /// First layer asked for.
        lo: u32,
        /// One past the last.
        hi: u32,
        /// Layers there are.
        n_layers: u32,
    },
    /// The Unix socket.
    #[error(transparent)]
    Uds(#[from] uds::BindError),
    /// The UDP socket.
    #[error("cannot listen")]
    Udp(#[from] udp::BindError),
    /// Another socket.
    #[error("cannot listen on {what}")]
    Listen {
        /// Where.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Threads.
    #[error("cannot start model threads")]
    Threads(#[source] io::Error),
}

/// A node that serves.
#[derive(Debug)]
pub struct Node {
    control: Control,
    shutdown: Shutdown,
    grace: std::time::Duration,
    uds: Option<PathBuf>,
    udp: Option<SocketAddr>,
    tcp: Option<SocketAddr>,
    http: Option<SocketAddr>,
}

impl Node {
    /// Binds, loads the model, and serves. Needs a running Tokio runtime.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left bound then.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        let bases = match config.bases.clone() {
            None => Registry::default(),
            Some(source) => blocking(move || Registry::open(source)).await?,
        };
        Self::start_with_bases(config, Arc::new(bases)).await
    }

    /// As [`Node::start`], with bases that come from elsewhere than the folder of the configuration.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left bound then.
    pub async fn start_with_bases(config: &Config, bases: Arc<Registry>) -> Result<Self, StartError> {
        raise_descriptor_limit();
        // Sockets first: a path that is taken shows before a large model is loaded, and early peers wait in line.
        let socket = config.uds.as_ref().map(|path| uds::bind(path, &config.uds_options)).transpose()?;
        let udp = config.udp.map(|address| UdpCarrier::bind(address, config.allow.clone())).transpose()?;
        let listen_error = |what: String| move |source| StartError::Listen { what, source };
        let tcp = match config.tcp {
            None => None,
            Some(address) => {
                let bound = TcpCarrier::bind(address, config.allow.clone()).await;
                Some(bound.map_err(listen_error(format!("TCP {address}")))?)
            }
        };
        let http = match config.http {
            None => None,
            Some(address) => {
                let bound = HttpListener::bind(address, config.allow.clone()).await;
                let bound = bound.map_err(listen_error(format!("HTTP {address}")))?;
                Some(bound.with_control(config.admin_allow.clone()))
            }
        };
        let model = load(config).await?;
        let name = config.name.clone().unwrap_or_else(|| model.info().name.clone());
        let station = Station::with_bases(name, model, bases, config.limits.clone(), config.workers);
        let station = station.map_err(StartError::Threads)?;
        let station = Arc::new(station);
        let control = Control::new(Arc::clone(&station));
        let shutdown = Shutdown::default();
        let acceptor = Acceptor::new(
            Arc::clone(&station),
            config.connection.clone(),
            config.connection_session,
            config.max_connections,
            shutdown.clone(),
        );
        let uds = config.uds.clone();
        let mut node = Self { control, shutdown, grace: config.grace, uds, udp: None, tcp: None, http: None };
        if let Some(socket) = socket {
            let listener = UdsListener::new(socket, config.uds_options.credentials.clone());
            let listener = listener.map_err(listen_error("the Unix socket".to_owned()))?;
            node.shutdown.spawn(listener.run(acceptor.clone()));
        }
        if let Some(tcp) = tcp {
            node.tcp = Some(tcp.local_addr().map_err(listen_error("TCP".to_owned()))?);
            let framing = config.tcp_framing;
            let options = ConnectionOptions { framing, ..config.connection.clone() };
            node.shutdown.spawn(tcp.run(acceptor.with_options(options)));
        }
        if let Some(udp) = udp {
            node.udp = Some(udp.local_addr().map_err(listen_error("UDP".to_owned()))?);
            node.shutdown.spawn(udp.run(station.clone(), node.shutdown.clone()));
        }
        if let Some(http) = http {
            node.http = Some(http.local_addr().map_err(listen_error("HTTP".to_owned()))?);
            let timeout = config.connection.half_frame_timeout;
            node.shutdown.spawn(http.run(node.control.clone(), timeout, node.shutdown.clone()));
        }
        let shutdown = node.shutdown.clone();
        node.shutdown.spawn(async move {
            loop {
                tokio::select! {
                    () = tokio::time::sleep(EXPIRY_PERIOD) => {
                        station.expire_sessions(Instant::now());
                        telemetry::faults::tell_suppressed(false);
                    }
                    () = shutdown.draining() => return,
                }
            }
        });
        Ok(node)
    }

    /// The station that it serves.
    #[must_use]
    pub fn station(&self) -> &Arc<Station> {
        self.control.station()
    }

    /// What an operator can ask of it, and what it is doing.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Where it listens for datagrams.
    #[must_use]
    pub fn udp(&self) -> Option<SocketAddr> {
        self.udp
    }

    /// Where it listens for TCP connections.
    #[must_use]
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.tcp
    }

    /// Where it listens for HTTP requests.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// The line that says that it is ready, for people and scripts.
    #[must_use]
    pub fn ready_line(&self) -> String {
        let info = self.station().model().info();
        let mut line = "ready".to_owned();
        if let Some(path) = &self.uds {
            line += &format!(" uds={}", path.display());
        }
        if let Some(address) = self.udp {
            line += &format!(" udp={address}");
        }
        if let Some(address) = self.tcp {
            line += &format!(" tcp={address}");
        }
        if let Some(address) = self.http {
            line += &format!(" http={address}");
        }
        line + &format!(" model={} layers={}..{}", info.name, info.layers.start, info.layers.end)
    }

    /// Refuses new work, lets work in flight end within the grace period, then stops. Returns whether all of it ended.
    pub async fn stop(self) -> bool {
        self.control.drain();
        let ended = self.shutdown.finish(self.grace).await;
        telemetry::faults::tell_suppressed(true);
        ended
    }

    /// Stops at once.
    pub async fn kill(self) {
        self.shutdown.kill();
        self.shutdown.finish(std::time::Duration::ZERO).await;
    }
}

/// Loads the model range that a configuration names.
async fn load(config: &Config) -> Result<Arc<dyn LayerRange>, StartError> {
    let layers = config.layers.clone();
    match config.model.clone() {
        ModelSpec::Identity { hidden_dim, vocab } => match layers {
            Some(layers) if layers != (0..1) => {
                Err(StartError::Layers { lo: layers.start, hi: layers.end, n_layers: 1 })
            }
            _ => Ok(Arc::new(Identity::new(hidden_dim, vocab))),
        },
        ModelSpec::Upstream { station, hidden_dim, vocab } => {
            Ok(Arc::new(Upstream::connect(&station, hidden_dim, vocab, layers).await?))
        }
        ModelSpec::Demo => Ok(Arc::new(blocking(move || crate::demo::load(layers)).await?)),
        ModelSpec::Directory(path) | ModelSpec::Gguf(path) => {
            Ok(Arc::new(blocking(move || load_transformer(&path, layers)).await?))
        }
    }
}

/// Reading and converting files takes seconds: not on a thread that serves sockets.
async fn blocking<T: Send + 'static, E: Send + 'static>(
    load: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    match tokio::task::spawn_blocking(load).await {
        Ok(loaded) => loaded,
        Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
    }
}

/// Every connection takes a descriptor; the soft limit is often 1,024 where the hard one allows many more.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "cannot raise the limit of open files; fewer connections will be taken");
        }
    }
}

/// Runs a node until a signal ends it: SIGTERM and SIGINT drain it, a second one stops it at once.
///
/// # Errors
/// If it does not start.
pub async fn run(config: &Config) -> Result<(), StartError> {
    use tokio::signal::unix::{SignalKind, signal};
    let handler = |kind| signal(kind).map_err(|source| StartError::Listen { what: "signals".to_owned(), source });
    let (mut terminate, mut interrupt) = (handler(SignalKind::terminate())?, handler(SignalKind::interrupt())?);
    let mut hangup = handler(SignalKind::hangup())?;
    let node = Node::start(config).await?;
    eprintln!("{}", node.ready_line());
    let name = loop {
        tokio::select! {
            _ = terminate.recv() => break "SIGTERM",
            _ = interrupt.recv() => break "SIGINT",
            () = node.control.drain_requested() => break "POST /drain",
            _ = hangup.recv() => {
                let control = node.control.clone();
                // What comes of it is logged and published; a signal to stop need not wait for it.
                node.shutdown.spawn(async move { drop(control.reload().await) });
            }
        }
    };
    tracing::info!(signal = name, grace_s = config.grace.as_secs(), "draining");
    let shutdown = node.shutdown.clone();
    tokio::select! {
        ended = node.stop() => if !ended {
            tracing::warn!("work in flight did not end within the grace period and was dropped");
        },
        _ = terminate.recv() => shutdown.kill(),
        _ = interrupt.recv() => shutdown.kill(),
    }
    Ok(())
}
