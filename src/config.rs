//! Configuration of a station: a TOML file, then the environment, then flags; the later wins.
//!
//! Each group of settings is one struct that is read from the file as a table and from the command line as flags, so that
//! names and documentation exist once. All of it is checked before anything is bound.

use std::{
    io::Read,
    net::SocketAddr,
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use serde::Deserialize;

use crate::{
    auth_key,
    basis::registry::Source,
    codec::Framing,
    model::load::{LayerSpec, ModelSpec, SpecError},
    net::{
        connection::ConnectionOptions,
        peer::{AllowList, CredentialList, parse_network},
        uds::{self, UdsOptions},
    },
    station::{
        auth::AuthOptions,
        limits::{Limits, MAX_DATAGRAM_LEN},
    },
    telemetry::log::{DEFAULT_LEVEL, LogFormat, LogOptions, is_level},
};

/// The longest configuration file, in bytes.
const MAX_FILE_LEN: u64 = 1 << 20;
/// Seconds that clocks may differ.
const DEFAULT_AUTH_WINDOW: u64 = 30;

/// Why a configuration is refused. Nothing was bound and no model was loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is no TOML, or holds a key that does not exist.
    #[error("configuration file {path}: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// The model or its layers.
    #[error(transparent)]
    Model(#[from] SpecError),
    /// A socket path that fits no socket address.
    #[error(transparent)]
    Socket(#[from] uds::BindError),
    /// Nothing to listen on.
    #[error(
        "nothing to listen on; give at least one of --uds PATH, --udp ADDR:PORT, --tcp ADDR:PORT, \
         or --systemd-sockets under a .socket unit"
    )]
    NoListener,
    /// Replies that 0x20 clients read look like requests, so that two UDP stations could answer each other for ever.
    #[error("--stock-clients cannot be used together with UDP; run a second station for UDP peers")]
    StockClientsOverUdp,
    /// Methodologies are only looked at for bases.
    #[error("--methodologies without --bases; add --bases DIR or leave it out")]
    MethodologiesWithoutBases,
    /// The file with the shared key cannot be used.
    #[error("cannot use the key file {path}")]
    Key {
        /// The file.
        path: PathBuf,
        /// Why.
        source: auth_key::KeyFileError,
    },
    /// Settings of authentication without a key.
    #[error("--auth-window and --auth-exempt-unix need --auth-key-file FILE")]
    AuthWithoutKey,
    /// A value that does not belong there.
    #[error("{name} is {got:?}, expected {expected}")]
    Value {
        /// The setting.
        name: &'static str,
        /// What was given.
        got: String,
        /// What belongs there.
        expected: &'static str,
    },
}

macro_rules! settings {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Args, Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: Option<$type>,)*
        }

        impl $name {
            /// Takes what is not set here from `other`.
            #[must_use]
            pub fn or(self, other: Self) -> Self {
                Self { $($field: self.$field.or(other.$field),)* }
            }
        }
    };
}

settings! {
    /// Which model is served, and how.
    ModelSettings {
        /// Directory (Hugging Face layout), FILE.gguf, identity:DIM or identity:DIM:VOCAB, upstream:STATION,DIM,VOCAB or demo
        #[arg(long, global = true, env = "AEON_MODEL", value_name = "M", help_heading = "Model")]
        model: String,
        /// Layers to serve, LO..HI; all of them by default
        #[arg(long, global = true, env = "AEON_LAYERS", value_name = "LO..HI", help_heading = "Model")]
        layers: String,
        /// Folder of basis files (*.pcab) for PCA components
        #[arg(long, global = true, env = "AEON_BASES", value_name = "DIR", help_heading = "Model")]
        bases: PathBuf,
        /// Folder of methodology files [default: methodologies in the folder of bases]
        #[arg(long, global = true, env = "AEON_METHODOLOGIES", value_name = "DIR", help_heading = "Model")]
        methodologies: PathBuf,
        /// Threads that run the model for different sessions side by side [default: 2]
        #[arg(long, global = true, env = "AEON_WORKERS", value_name = "N", help_heading = "Model")]
        workers: usize,
    }
}

settings! {
    /// Where a node listens, and to whom.
    ListenSettings {
        /// Unix socket to listen on
        #[arg(long, global = true, env = "AEON_UDS", value_name = "PATH", help_heading = "Listeners")]
        uds: PathBuf,
        /// Mode of the socket file, octal [default: 660]
        #[arg(long, global = true, env = "AEON_UDS_MODE", value_name = "MODE", help_heading = "Listeners")]
        uds_mode: String,
        /// Group of the socket file, by name or number
        #[arg(long, global = true, env = "AEON_UDS_GROUP", value_name = "GROUP", help_heading = "Listeners")]
        uds_group: String,
        /// User ids that may connect to the socket file, beside those in --uds-allow-gid
        #[arg(long, global = true, env = "AEON_UDS_ALLOW_UID", value_name = "UID", value_delimiter = ',', help_heading = "Listeners")]
        uds_allow_uid: Vec<u32>,
        /// Group ids that may connect to the socket file
        #[arg(long, global = true, env = "AEON_UDS_ALLOW_GID", value_name = "GID", value_delimiter = ',', help_heading = "Listeners")]
        uds_allow_gid: Vec<u32>,
        /// Take the sockets that systemd passes, named flow and http [default: true if any are passed]
        #[arg(long, global = true, env = "AEON_SYSTEMD_SOCKETS", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Listeners")]
        systemd_sockets: bool,
        /// UDP address to listen on
        #[arg(long, global = true, env = "AEON_UDP", value_name = "ADDR:PORT", help_heading = "Listeners")]
        udp: SocketAddr,
        /// TCP address to listen on
        #[arg(long, global = true, env = "AEON_TCP", value_name = "ADDR:PORT", help_heading = "Listeners")]
        tcp: SocketAddr,
        /// TCP frames without a length in front
        #[arg(long, global = true, env = "AEON_BARE_FRAMES", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Listeners")]
        bare_frames: bool,
        /// HTTP address to listen on, for the prefix replay cache, metrics, health checks, reload and drain
        #[arg(long, global = true, env = "AEON_HTTP", value_name = "ADDR:PORT", help_heading = "Listeners")]
        http: SocketAddr,
        /// Networks that may send over UDP, TCP and HTTP; replaces the default, loopback
        #[arg(long, global = true, env = "AEON_ALLOW", value_name = "CIDR", value_delimiter = ',', help_heading = "Listeners")]
        allow: Vec<String>,
        /// File with the shared key (at least 16 bytes) that requests must be signed with [default: the systemd credential auth-key, else none]
        #[arg(long, global = true, env = "AEON_AUTH_KEY_FILE", value_name = "FILE", help_heading = "Listeners")]
        auth_key_file: PathBuf,
        /// Seconds that the time of a signed request may be off [default: 30]
        #[arg(long, global = true, env = "AEON_AUTH_WINDOW", value_name = "SECONDS", help_heading = "Listeners")]
        auth_window: u64,
        /// Take unsigned requests on the Unix socket all the same
        #[arg(long, global = true, env = "AEON_AUTH_EXEMPT_UNIX", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Listeners")]
        auth_exempt_unix: bool,
        /// Networks that may reload and drain over HTTP, of those in --allow; replaces the default, loopback
        #[arg(long, global = true, env = "AEON_ADMIN_ALLOW", value_name = "CIDR", value_delimiter = ',', help_heading = "Listeners")]
        admin_allow: Vec<String>,
        /// Serve clients that know flag 0x20 as POISON: every reply carries FIN alone (not with UDP)
        #[arg(long, global = true, env = "AEON_STOCK_CLIENTS", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Listeners")]
        stock_clients: bool,
        /// Requests that name no session share one per connection
        #[arg(long, global = true, env = "AEON_CONNECTION_SESSION", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Listeners")]
        connection_session: bool,
    }
}

settings! {
    /// What a node takes at most.
    LimitSettings {
        /// Bytes of a frame, header included [default: 16777225]
        #[arg(long, global = true, env = "AEON_MAX_FRAME", value_name = "BYTES", help_heading = "Limits")]
        max_frame: usize,
        /// Bytes of a datagram [default: 65507]
        #[arg(long, global = true, env = "AEON_MAX_DATAGRAM", value_name = "BYTES", help_heading = "Limits")]
        max_datagram: usize,
        /// Positions of one request [default: 4096]
        #[arg(long, global = true, env = "AEON_MAX_SEQ", value_name = "N", help_heading = "Limits")]
        max_seq: usize,
        /// Connections at once, all listeners together [default: 16384]
        #[arg(long, global = true, env = "AEON_MAX_CONNECTIONS", value_name = "N", help_heading = "Limits")]
        max_connections: usize,
        /// Requests in flight on one connection before its reader stops [default: 64]
        #[arg(long, global = true, env = "AEON_MAX_IN_FLIGHT", value_name = "N", help_heading = "Limits")]
        max_in_flight: usize,
        /// Requests waiting for the model or running on it [default: 1024]
        #[arg(long, global = true, env = "AEON_MAX_QUEUED", value_name = "N", help_heading = "Limits")]
        max_queued: usize,
        /// Bytes of those requests [default: 268435456]
        #[arg(long, global = true, env = "AEON_MAX_QUEUED_BYTES", value_name = "BYTES", help_heading = "Limits")]
        max_queued_bytes: usize,
        /// Requests of different sessions that run through the model together, so that its weights are read once for all of them; 1 runs each alone [default: 16]
        #[arg(long, global = true, env = "AEON_MAX_BATCH", value_name = "N", help_heading = "Limits")]
        max_batch: usize,
        /// Bytes of half frames, waiting requests and unread replies of all connections [default: 536870912]
        #[arg(long, global = true, env = "AEON_MAX_BUFFERED_BYTES", value_name = "BYTES", help_heading = "Limits")]
        max_buffered_bytes: usize,
        /// Sessions at once [default: 4096]
        #[arg(long, global = true, env = "AEON_MAX_SESSIONS", value_name = "N", help_heading = "Limits")]
        max_sessions: usize,
        /// Bytes of all sessions [default: 2147483648]
        #[arg(long, global = true, env = "AEON_MAX_SESSION_BYTES", value_name = "BYTES", help_heading = "Limits")]
        max_session_bytes: usize,
        /// Bytes of the prefix replay cache; 0 keeps nothing [default: 268435456]
        #[arg(long, global = true, env = "AEON_MAX_REPLAY_BYTES", value_name = "BYTES", help_heading = "Limits")]
        max_replay_bytes: usize,
        /// Entries of all key-value shards [default: 4096]
        #[arg(long, global = true, env = "AEON_MAX_SHARD_ENTRIES", value_name = "N", help_heading = "Limits")]
        max_shard_entries: usize,
        /// Bytes of all key-value shards [default: 16777216]
        #[arg(long, global = true, env = "AEON_MAX_SHARD_BYTES", value_name = "BYTES", help_heading = "Limits")]
        max_shard_bytes: usize,
        /// Seconds after which an unused session is dropped [default: 3600]
        #[arg(long, global = true, env = "AEON_SESSION_IDLE", value_name = "SECONDS", help_heading = "Limits")]
        session_idle: u64,
        /// Seconds in which a frame must arrive whole, for each started MiB of it [default: 10]
        #[arg(long, global = true, env = "AEON_FRAME_TIMEOUT", value_name = "SECONDS", help_heading = "Limits")]
        frame_timeout: u64,
        /// Seconds without a request after which a connection is closed [default: 3600]
        #[arg(long, global = true, env = "AEON_IDLE_TIMEOUT", value_name = "SECONDS", help_heading = "Limits")]
        idle_timeout: u64,
        /// Seconds that a stopping node gives to work in flight [default: 10]
        #[arg(long, global = true, env = "AEON_GRACE", value_name = "SECONDS", help_heading = "Limits")]
        grace: u64,
    }
}

settings! {
    /// What a node logs, and where.
    LogSettings {
        /// Form of log lines: auto is the journal if standard error leads there, else text [default: auto]
        #[arg(long, global = true, env = "AEON_LOG_FORMAT", value_name = "FORM", help_heading = "Log")]
        log_format: LogFormat,
        /// What is logged: off, error, warn, info, debug, trace, also by part, as in warn,aeon_station::request=debug [default: warn]
        #[arg(long, global = true, env = "AEON_LOG", value_name = "LEVEL", help_heading = "Log")]
        log_level: String,
    }
}

/// All settings of a node, as a file holds them.
#[derive(Debug, Clone, Default, PartialEq, Args, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// Name that the node gives itself in HELLO [default: the model's name]
    #[arg(long, global = true, env = "AEON_NAME", value_name = "NAME")]
    pub name: Option<String>,
    /// `[model]`
    #[command(flatten)]
    pub model: ModelSettings,
    /// `[listen]`
    #[command(flatten)]
    pub listen: ListenSettings,
    /// `[limits]`
    #[command(flatten)]
    pub limits: LimitSettings,
    /// `[log]`
    #[command(flatten)]
    pub log: LogSettings,
}

impl Settings {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// [`ConfigError::Read`] or [`ConfigError::Parse`], which names the line.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = read_limited(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })
    }

    /// Takes what is not set here from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            name: self.name.or(other.name),
            model: self.model.or(other.model),
            listen: self.listen.or(other.listen),
            limits: self.limits.or(other.limits),
            log: self.log.or(other.log),
        }
    }
}

/// A checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name in HELLO.
    pub name: Option<String>,
    /// Which model.
    pub model: ModelSpec,
    /// Which of its layers; `None` for all.
    pub layers: Option<Range<u32>>,
    /// Where bases are; `None` for no bases.
    pub bases: Option<Source>,
    /// Model threads.
    pub workers: usize,
    /// Unix socket.
    pub uds: Option<PathBuf>,
    /// Its options.
    pub uds_options: UdsOptions,
    /// Whether sockets come from systemd.
    pub systemd_sockets: bool,
    /// UDP address.
    pub udp: Option<SocketAddr>,
    /// TCP address.
    pub tcp: Option<SocketAddr>,
    /// Framing of TCP connections.
    pub tcp_framing: Framing,
    /// HTTP address.
    pub http: Option<SocketAddr>,
    /// Who may send over UDP, TCP and HTTP.
    pub allow: AllowList,
    /// The shared key that requests must be signed with; `None` for none.
    pub auth: Option<AuthOptions>,
    /// Who may reload and drain over HTTP, of those.
    pub admin_allow: AllowList,
    /// Options of connections.
    pub connection: ConnectionOptions,
    /// Whether requests without a session share one per connection.
    pub connection_session: bool,
    /// Connections at once.
    pub max_connections: usize,
    /// Limits of the station.
    pub limits: Limits,
    /// Time for work in flight when stopping.
    pub grace: Duration,
    /// What is logged, and where.
    pub log: LogOptions,
}

impl TryFrom<Settings> for Config {
    type Error = ConfigError;

    fn try_from(settings: Settings) -> Result<Self, ConfigError> {
        let Settings { name, model, listen, limits, log } = settings;
        let spec = ModelSpec::parse(model.model.as_deref().unwrap_or("demo"))?;
        let layers = model.layers.as_deref().map(LayerSpec::parse).transpose()?.map(|layers| layers.range());
        if let Some(path) = &listen.uds {
            uds::check_path_len(path)?;
        }
        let systemd_sockets = listen.systemd_sockets.unwrap_or(false);
        if listen.uds.is_none() && listen.udp.is_none() && listen.tcp.is_none() && !systemd_sockets {
            return Err(ConfigError::NoListener);
        }
        let stock_clients = listen.stock_clients.unwrap_or(false);
        if stock_clients && listen.udp.is_some() {
            return Err(ConfigError::StockClientsOverUdp);
        }
        let mode = listen.uds_mode.as_deref().unwrap_or("660");
        let mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o777).ok_or_else(|| {
            ConfigError::Value { name: "uds-mode", got: mode.to_owned(), expected: "an octal mode such as 660" }
        })?;
        let networks = |name, texts: Option<Vec<String>>| {
            let expected = "a network such as 10.0.0.0/8, or an address";
            let texts = texts.unwrap_or_default().into_iter();
            let networks =
                texts.map(|text| parse_network(&text).map_err(|_| ConfigError::Value { name, got: text, expected }));
            networks.collect::<Result<_, _>>().map(AllowList::new)
        };
        let allow = networks("allow", listen.allow)?;
        let admin_allow = networks("admin-allow", listen.admin_allow)?;
        let level = log.log_level.filter(|level| !level.is_empty()).unwrap_or_else(|| DEFAULT_LEVEL.to_owned());
        if !is_level(&level) {
            let expected = "off, error, warn, info, debug or trace, or directives such as warn,aeon_station=debug";
            return Err(ConfigError::Value { name: "log-level", got: level, expected });
        }
        let log = LogOptions { format: log.log_format.unwrap_or_default(), level };
        let defaults = (Limits::default(), ConnectionOptions::default());
        let at_least = |name, value: Option<usize>, default: usize, least: usize, expected| match value {
            Some(value) if value < least => Err(ConfigError::Value { name, got: value.to_string(), expected }),
            value => Ok(value.unwrap_or(default)),
        };
        let positive = |name, value, default| at_least(name, value, default, 1, "at least 1");
        let max_frame_len = at_least("max-frame", limits.max_frame, defaults.0.max_frame_len, 1024, "at least 1024")?
            .min(defaults.0.max_frame_len);
        let station_limits = Limits {
            max_frame_len,
            max_datagram_len: at_least("max-datagram", limits.max_datagram, MAX_DATAGRAM_LEN, 1024, "at least 1024")?
                .min(MAX_DATAGRAM_LEN),
            max_positions: positive("max-seq", limits.max_seq, defaults.0.max_positions)?,
            queue: crate::model::worker::QueueLimits {
                items: positive("max-queued", limits.max_queued, defaults.0.queue.items)?,
                bytes: positive("max-queued-bytes", limits.max_queued_bytes, defaults.0.queue.bytes)?,
            },
            max_batch: positive("max-batch", limits.max_batch, defaults.0.max_batch)?,
            max_buffered_bytes: positive(
                "max-buffered-bytes",
                limits.max_buffered_bytes,
                defaults.0.max_buffered_bytes,
            )?,
            sessions: crate::model::session::SessionLimits {
                count: positive("max-sessions", limits.max_sessions, defaults.0.sessions.count)?,
                bytes: positive("max-session-bytes", limits.max_session_bytes, defaults.0.sessions.bytes)?,
                max_idle: limits.session_idle.map_or(defaults.0.sessions.max_idle, Duration::from_secs),
            },
            max_replay_bytes: limits.max_replay_bytes.unwrap_or(defaults.0.max_replay_bytes),
            shards: crate::station::limits::ShardLimits {
                entries: positive("max-shard-entries", limits.max_shard_entries, defaults.0.shards.entries)?,
                bytes: positive("max-shard-bytes", limits.max_shard_bytes, defaults.0.shards.bytes)?,
            },
            retry_after: defaults.0.retry_after,
        };
        let connection = ConnectionOptions {
            framing: Framing::Prefixed,
            max_frame_len,
            max_in_flight: positive("max-in-flight", limits.max_in_flight, defaults.1.max_in_flight)?,
            half_frame_timeout: limits.frame_timeout.map_or(defaults.1.half_frame_timeout, Duration::from_secs),
            idle_timeout: limits.idle_timeout.map_or(defaults.1.idle_timeout, Duration::from_secs),
            write_timeout: defaults.1.write_timeout,
            stock_clients,
        };
        let credentials = CredentialList {
            uids: listen.uds_allow_uid.unwrap_or_default(),
            gids: listen.uds_allow_gid.unwrap_or_default(),
        };
        let bases = match (model.bases, model.methodologies) {
            (Some(bases), methodologies) => Some(Source { methodologies, ..Source::new(bases) }),
            (None, Some(_)) => return Err(ConfigError::MethodologiesWithoutBases),
            (None, None) => None,
        };
        Ok(Self {
            name,
            model: spec,
            layers,
            bases,
            workers: positive("workers", model.workers, 2)?,
            uds: listen.uds,
            uds_options: UdsOptions { mode, group: listen.uds_group, credentials },
            systemd_sockets,
            udp: listen.udp,
            tcp: listen.tcp,
            tcp_framing: if listen.bare_frames.unwrap_or(false) { Framing::Bare } else { Framing::Prefixed },
            http: listen.http,
            allow,
            auth: auth(listen.auth_key_file, listen.auth_window, listen.auth_exempt_unix)?,
            admin_allow,
            connection,
            connection_session: listen.connection_session.unwrap_or(false),
            max_connections: positive("max-connections", limits.max_connections, 16_384)?,
            limits: station_limits,
            grace: Duration::from_secs(limits.grace.unwrap_or(10)),
            log,
        })
    }
}

/// Reads a text file that may be any file: a device has no end.
fn read_limited(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE_LEN + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_LEN {
        let problem = format!("more than {MAX_FILE_LEN} bytes: this is no configuration file");
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, problem));
    }
    Ok(text)
}

/// The key from its file, or from the credential that systemd hands over.
fn auth(
    file: Option<PathBuf>,
    window: Option<u64>,
    exempt_unix: Option<bool>,
) -> Result<Option<AuthOptions>, ConfigError> {
    let Some(path) = file.or_else(auth_key::credential) else {
        return match (window, exempt_unix) {
            (None, None | Some(false)) => Ok(None),
            _ => Err(ConfigError::AuthWithoutKey),
        };
    };
    let window = match window.unwrap_or(DEFAULT_AUTH_WINDOW) {
        window @ 1..=3600 => Duration::from_secs(window),
        window => {
            let expected = "seconds from 1 to 3600";
            return Err(ConfigError::Value { name: "auth-window", got: window.to_string(), expected });
        }
    };
    let key = auth_key::read(&path).map_err(|source| ConfigError::Key { path, source })?;
    Ok(Some(AuthOptions { key, window, exempt_unix: exempt_unix.unwrap_or(false) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_toml(text: &str) -> Result<Settings, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("aeon.toml");
        std::fs::write(&path, text).unwrap();
        Settings::read(&path)
    }

    #[test]
    fn a_file_fills_in_what_flags_leave_open() {
        let file = from_toml(
            "name = \"n\"\n[model]\nmodel = \"identity:8\"\n[listen]\nuds = \"/a\"\ntcp = \"127.0.0.1:1\"\n[limits]\ngrace = 3\n",
        );
        let flags = Settings {
            listen: ListenSettings { uds: Some("/b".into()), ..ListenSettings::default() },
            ..Settings::default()
        };
        let config = Config::try_from(flags.or(file.unwrap())).unwrap();
        assert_eq!((config.uds.as_deref(), config.tcp), (Some(Path::new("/b")), "127.0.0.1:1".parse().ok()));
        assert_eq!((config.name.as_deref(), config.grace), (Some("n"), Duration::from_secs(3)));
        assert_eq!(config.model, ModelSpec::Identity { hidden_dim: 8, vocab: 65_536 });
        assert_eq!(config.limits.max_positions, Limits::default().max_positions);
    }

    #[test]
    fn what_is_logged_comes_from_its_own_table() {
        let config =
            |text: &str| Config::try_from(from_toml(&format!("[listen]\nuds = \"/a\"\n{text}")).unwrap()).unwrap();
        assert_eq!(config("").log, LogOptions::default());
        let log = config("[log]\nlog-format = \"json\"\nlog-level = \"info\"\n").log;
        assert_eq!(log, LogOptions { format: LogFormat::Json, level: "info".to_owned() });
        // An empty variable is none.
        assert_eq!(config("[log]\nlog-level = \"\"\n").log.level, "warn");
        assert!(from_toml("[log]\nlog-format = \"loud\"\n").is_err());
    }

    #[test]
    fn an_unknown_key_names_itself_and_its_line() {
        let error = from_toml("[listen]\nudss = \"/a\"\n").unwrap_err().to_string();
        assert!(error.contains("udss") && error.contains("line 2"), "{error}");
        assert!(matches!(from_toml("[listen\n"), Err(ConfigError::Parse { .. })));
        assert!(matches!(Settings::read(Path::new("/nowhere")), Err(ConfigError::Read { .. })));
        let endless = Settings::read(Path::new("/dev/zero"));
        assert!(
            matches!(endless, Err(ConfigError::Read { source, .. }) if source.to_string().contains("1048576 bytes"))
        );
    }

    #[test]
    fn mistakes_are_found_before_anything_is_bound() {
        let check = |edit: fn(&mut Settings)| {
            let mut settings = Settings::default();
            settings.listen.uds = Some("/a".into());
            edit(&mut settings);
            Config::try_from(settings).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(check(|_| ()), Ok(()));
        type Edit = fn(&mut Settings);
        let cases: [(Edit, &str); 14] = [
            (|s| s.listen.auth_key_file = Some("/nowhere".into()), "/nowhere"),
            (|s| s.listen.auth_window = Some(5), "--auth-key-file"),
            (
                |s| {
                    s.listen.auth_key_file = Some("Cargo.toml".into());
                    s.listen.auth_window = Some(0);
                },
                "auth-window",
            ),
            (|s| s.listen.uds = None, "nothing to listen on"),
            (|s| s.model.model = Some("identity:x".into()), "identity"),
            (|s| s.model.layers = Some("5..2".into()), "layers"),
            (|s| s.listen.uds_mode = Some("999".into()), "uds-mode"),
            (|s| s.listen.allow = Some(vec!["10.0.0.0/40".into()]), "allow"),
            (|s| s.listen.admin_allow = Some(vec!["here".into()]), "admin-allow"),
            (|s| s.log.log_level = Some("aeon_station=loudly".into()), "log-level"),
            (|s| s.limits.max_frame = Some(10), "max-frame"),
            (|s| s.limits.max_in_flight = Some(0), "max-in-flight"),
            (|s| s.limits.max_batch = Some(0), "max-batch"),
            (
                |s| {
                    s.listen.stock_clients = Some(true);
                    s.listen.udp = "127.0.0.1:0".parse().ok();
                },
                "--stock-clients",
            ),
        ];
        for (edit, word) in cases {
            let error = check(edit).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
