//! A running node: the one place that wires model, station and carriers together.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Instant};

use crate::{
    admin::HttpListener,
    basis::{Registry, registry::RegistryError},
    config::Config,
    control::{Control, Phase},
    model::{
        LayerRange,
        error::LoadError,
        identity::Identity,
        load::load_transformer,
        spec::ModelSpec,
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
    systemd::{
        notify,
        sockets::{self, Inherited, SocketError},
    },
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
    /// The sockets that systemd passes.
    #[error(transparent)]
    Systemd(#[from] SocketError),
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
    uds: Vec<PathBuf>,
    udp: Vec<SocketAddr>,
    tcp: Vec<SocketAddr>,
    http: Vec<SocketAddr>,
}

impl Node {
    /// Binds, loads the model, and serves. Needs a running Tokio runtime.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left bound then.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        Self::start_on(Inherited::default(), config).await
    }

    /// As [`Node::start`], on sockets that are there already beside those of the configuration.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left bound then.
    pub async fn start_on(inherited: Inherited, config: &Config) -> Result<Self, StartError> {
        let bases = match config.bases.clone() {
            None => Registry::default(),
            Some(source) => blocking(move || Registry::open(source)).await?,
        };
        Self::start_with(inherited, config, Arc::new(bases)).await
    }

    /// As [`Node::start`], with bases that come from elsewhere than the folder of the configuration.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left bound then.
    pub async fn start_with_bases(config: &Config, bases: Arc<Registry>) -> Result<Self, StartError> {
        Self::start_with(Inherited::default(), config, bases).await
    }

    async fn start_with(inherited: Inherited, config: &Config, bases: Arc<Registry>) -> Result<Self, StartError> {
        raise_descriptor_limit();
        // Sockets first: a path that is taken shows before a large model is loaded, and early peers wait in line.
        let sockets = Sockets::open(inherited, config).await?;
        let model = load(config).await?;
        let name = config.name.clone().unwrap_or_else(|| model.info().name.clone());
        let station = Station::with_bases(name, model, bases, config.limits.clone(), config.workers);
        let station = station.map_err(StartError::Threads)?;
        if let Some(auth) = &config.auth {
            station.require_auth(auth.clone());
        }
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
        let mut node = Self {
            control,
            shutdown,
            grace: config.grace,
            uds: Vec::new(),
            udp: Vec::new(),
            tcp: Vec::new(),
            http: Vec::new(),
        };
        for listener in sockets.uds {
            node.uds.push(listener.path().to_owned());
            node.shutdown.spawn(listener.run(acceptor.clone()));
        }
        for tcp in sockets.tcp {
            node.tcp.push(tcp.local_addr().map_err(listen_error("TCP"))?);
            let framing = config.tcp_framing;
            let options = ConnectionOptions { framing, ..config.connection.clone() };
            node.shutdown.spawn(tcp.run(acceptor.with_options(options)));
        }
        for udp in sockets.udp {
            node.udp.push(udp.local_addr().map_err(listen_error("UDP"))?);
            node.shutdown.spawn(udp.run(station.clone(), node.shutdown.clone()));
        }
        for http in sockets.http {
            node.http.push(http.local_addr().map_err(listen_error("HTTP"))?);
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

    /// Where it listens for datagrams: the first address.
    #[must_use]
    pub fn udp(&self) -> Option<SocketAddr> {
        self.udp.first().copied()
    }

    /// Where it listens for TCP connections: the first address.
    #[must_use]
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.tcp.first().copied()
    }

    /// Where it listens for HTTP requests: the first address.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.http.first().copied()
    }

    /// The line that says that it is ready, for people and scripts.
    #[must_use]
    pub fn ready_line(&self) -> String {
        let info = self.station().model().info();
        let mut line = "ready".to_owned();
        for path in &self.uds {
            line += &format!(" uds={}", path.display());
        }
        for address in &self.udp {
            line += &format!(" udp={address}");
        }
        for address in &self.tcp {
            line += &format!(" tcp={address}");
        }
        for address in &self.http {
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

/// What a node listens on: the sockets that it was given and those of its configuration. None is listened on twice.
struct Sockets {
    uds: Vec<UdsListener>,
    udp: Vec<UdpCarrier>,
    tcp: Vec<TcpCarrier>,
    http: Vec<HttpListener>,
}

impl Sockets {
    async fn open(inherited: Inherited, config: &Config) -> Result<Self, StartError> {
        if config.connection.stock_clients && !inherited.udp.is_empty() {
            return Err(SocketError::StockClientsOverUdp.into());
        }
        let credentials = &config.uds_options.credentials;
        let uds = inherited.uds.into_iter().map(|socket| UdsListener::inherit(socket, credentials.clone()));
        let mut uds = uds.collect::<io::Result<Vec<_>>>().map_err(listen_error("a Unix socket of systemd"))?;
        if let Some(path) = config.uds.as_ref().filter(|path| uds.iter().all(|socket| socket.path() != *path)) {
            let listener = UdsListener::new(uds::bind(path, &config.uds_options)?, credentials.clone());
            uds.push(listener.map_err(listen_error("the Unix socket"))?);
        }
        let allow = &config.allow;
        let udp = inherited.udp.into_iter().map(|socket| UdpCarrier::inherit(socket, allow.clone()));
        let mut udp = udp.collect::<io::Result<Vec<_>>>().map_err(listen_error("a UDP socket of systemd"))?;
        let is_new = |address: &SocketAddr, bound: Option<SocketAddr>| bound != Some(*address);
        if let Some(address) = config.udp.filter(|new| udp.iter().all(|old| is_new(new, old.local_addr().ok()))) {
            udp.push(UdpCarrier::bind(address, allow.clone())?);
        }
        let tcp = inherited.tcp.into_iter().map(|socket| TcpCarrier::inherit(socket, allow.clone()));
        let mut tcp = tcp.collect::<io::Result<Vec<_>>>().map_err(listen_error("a TCP socket of systemd"))?;
        if let Some(address) = config.tcp.filter(|new| tcp.iter().all(|old| is_new(new, old.local_addr().ok()))) {
            let bound = TcpCarrier::bind(address, allow.clone()).await;
            tcp.push(bound.map_err(listen_error(format!("TCP {address}")))?);
        }
        let control = |http: HttpListener| http.with_control(config.admin_allow.clone());
        let http = inherited.http.into_iter().map(|socket| HttpListener::inherit(socket, allow.clone()).map(control));
        let mut http = http.collect::<io::Result<Vec<_>>>().map_err(listen_error("an HTTP socket of systemd"))?;
        if let Some(address) = config.http.filter(|new| http.iter().all(|old| is_new(new, old.local_addr().ok()))) {
            let bound = HttpListener::bind(address, allow.clone()).await;
            http.push(control(bound.map_err(listen_error(format!("HTTP {address}")))?));
        }
        Ok(Self { uds, udp, tcp, http })
    }
}

fn listen_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> StartError {
    let what = what.into();
    move |source| StartError::Listen { what, source }
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
    let inherited = if config.systemd_sockets { sockets::take()? } else { Inherited::default() };
    // A large model takes minutes to load: a signal must not have to wait for it.
    let node = tokio::select! {
        node = Node::start_on(inherited, config) => node?,
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    let service = notify::Service::start(Arc::clone(node.station()));
    let (mut status, mut told_of_reload) = (node.control.status(), false);
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
            Ok(()) = status.changed() => match status.borrow_and_update().phase {
                Phase::Reloading if !told_of_reload => {
                    service.reloading();
                    told_of_reload = true;
                }
                Phase::Serving => {
                    // A reload may be over before its beginning was seen here.
                    if !told_of_reload {
                        service.reloading();
                    }
                    service.ready();
                    told_of_reload = false;
                }
                Phase::Reloading | Phase::Draining => {}
            }
        }
    };
    tracing::info!(signal = name, grace_s = config.grace.as_secs(), "draining");
    let (station, shutdown) = (Arc::clone(node.station()), node.shutdown.clone());
    station.drain();
    service.stopping();
    let ended = tokio::select! {
        ended = node.stop() => ended,
        _ = terminate.recv() => false,
        _ = interrupt.recv() => false,
    };
    if !ended {
        tracing::warn!("work in flight did not end, by the grace period or a second signal, and is dropped");
        shutdown.kill();
        // The end of the process ends model threads too; waiting for one that is in a long step, or stuck, would not.
        std::mem::forget(station);
    }
    Ok(())
}
