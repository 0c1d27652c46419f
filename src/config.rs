//! Configuration of a station: a TOML file, then the environment, then flags; the later wins.
//!
//! Each group of [`settings`] is one struct that is read from the file as a table and from the command line as flags, so
//! that names and documentation exist once. All of it is checked before anything is bound.

pub mod settings;

use std::{
    io::Read,
    net::SocketAddr,
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

pub use settings::{LimitSettings, ListenSettings, LogSettings, ModelSettings, Settings, ValueError};

use crate::{
    auth_key,
    basis::registry::Source,
    codec::Framing,
    model::spec::{LayerSpec, ModelSpec, SpecError},
    net::{
        connection::ConnectionOptions,
        peer::{AllowList, CredentialList},
        uds::{self, UdsOptions},
    },
    station::{
        auth::AuthOptions,
        limits::{Limits, MAX_DATAGRAM_LEN},
    },
    telemetry::log::{DEFAULT_LEVEL, LogOptions, is_level},
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
    #[error(transparent)]
    Value(#[from] ValueError),
}

impl Settings {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// [`ConfigError::Read`] or [`ConfigError::Parse`], which names the line.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = read_limited(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })
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
        settings.check_numbers()?;
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
        let mode = listen.mode()?;
        let (allow, admin_allow) = (AllowList::new(listen.allowed()?), AllowList::new(listen.admin_allowed()?));
        let level = log.log_level.filter(|level| !level.is_empty()).unwrap_or_else(|| DEFAULT_LEVEL.to_owned());
        if !is_level(&level) {
            let expected = "off, error, warn, info, debug or trace, or directives such as warn,aeon_station=debug";
            return Err(ValueError { name: "log-level", got: level, expected }.into());
        }
        let log = LogOptions { format: log.log_format.unwrap_or_default(), level };
        let defaults = (Limits::default(), ConnectionOptions::default());
        let max_frame_len = limits.max_frame.unwrap_or(defaults.0.max_frame_len).min(defaults.0.max_frame_len);
        let station_limits = Limits {
            max_frame_len,
            max_datagram_len: limits.max_datagram.unwrap_or(MAX_DATAGRAM_LEN).min(MAX_DATAGRAM_LEN),
            max_positions: limits.max_seq.unwrap_or(defaults.0.max_positions),
            queue: crate::model::worker::QueueLimits {
                items: limits.max_queued.unwrap_or(defaults.0.queue.items),
                bytes: limits.max_queued_bytes.unwrap_or(defaults.0.queue.bytes),
            },
            max_batch: limits.max_batch.unwrap_or(defaults.0.max_batch),
            max_buffered_bytes: limits.max_buffered_bytes.unwrap_or(defaults.0.max_buffered_bytes),
            sessions: crate::model::session::SessionLimits {
                count: limits.max_sessions.unwrap_or(defaults.0.sessions.count),
                bytes: limits.max_session_bytes.unwrap_or(defaults.0.sessions.bytes),
                max_idle: limits.session_idle.map_or(defaults.0.sessions.max_idle, Duration::from_secs),
            },
            max_replay_bytes: limits.max_replay_bytes.unwrap_or(defaults.0.max_replay_bytes),
            shards: crate::station::limits::ShardLimits {
                entries: limits.max_shard_entries.unwrap_or(defaults.0.shards.entries),
                bytes: limits.max_shard_bytes.unwrap_or(defaults.0.shards.bytes),
            },
            retry_after: defaults.0.retry_after,
        };
        let connection = ConnectionOptions {
            framing: Framing::Prefixed,
            max_frame_len,
            max_in_flight: limits.max_in_flight.unwrap_or(defaults.1.max_in_flight),
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
            workers: model.workers.unwrap_or(2),
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
            max_connections: limits.max_connections.unwrap_or(16_384),
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
    let window = Duration::from_secs(window.unwrap_or(DEFAULT_AUTH_WINDOW));
    let key = auth_key::read(&path).map_err(|source| ConfigError::Key { path, source })?;
    Ok(Some(AuthOptions { key, window, exempt_unix: exempt_unix.unwrap_or(false) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::LogFormat;

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
