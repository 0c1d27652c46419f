//! The settings of a node as a file, the environment and flags give them, and what each of them may be.
//!
//! Pure: texts and numbers are judged by themselves. What depends on the machine (files, sockets, keys) is the business of
//! the configuration that is made of them. The fuzz targets read this file by its path, so it must not need the model.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::net::peer::parse_network;

/// A value that does not belong there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {got:?}, expected {expected}")]
pub struct ValueError {
    /// The setting.
    pub name: &'static str,
    /// What was given.
    pub got: String,
    /// What belongs there.
    pub expected: &'static str,
}

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// The journal if standard error leads there, else text.
    #[default]
    Auto,
    /// Lines for people, on standard error.
    Text,
    /// One JSON object a line, on standard error.
    Json,
    /// The journal, with each field as one of its own.
    Journald,
}

macro_rules! settings {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Args, Deserialize, Serialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
        pub struct $name {
            $($(#[$field_doc])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>,)*
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
#[derive(Debug, Clone, Default, PartialEq, Args, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// Name that the node gives itself in HELLO [default: the model's name]
    #[arg(long, global = true, env = "AEON_NAME", value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
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
    /// Reads a TOML text.
    ///
    /// # Errors
    /// The line, and what is wrong there: no TOML, a key that does not exist, or a value of a wrong type.
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }

    /// The settings as a TOML text that [`Settings::parse`] reads: only what is set, in its tables.
    ///
    /// # Errors
    /// A path that is no UTF-8, or a number beyond those of TOML (2^63 - 1).
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
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

impl ListenSettings {
    /// The mode of the socket file.
    ///
    /// # Errors
    /// [`ValueError`] unless it is octal and has permission bits only.
    pub fn mode(&self) -> Result<u32, ValueError> {
        let text = self.uds_mode.as_deref().unwrap_or("660");
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o777);
        mode.ok_or_else(|| ValueError { name: "uds-mode", got: text.to_owned(), expected: "an octal mode such as 660" })
    }

    /// The networks that may send.
    ///
    /// # Errors
    /// [`ValueError`] for the first that is no network.
    pub fn allowed(&self) -> Result<Vec<IpNet>, ValueError> {
        networks("allow", self.allow.as_deref())
    }

    /// The networks that may reload and drain.
    ///
    /// # Errors
    /// [`ValueError`] for the first that is no network.
    pub fn admin_allowed(&self) -> Result<Vec<IpNet>, ValueError> {
        networks("admin-allow", self.admin_allow.as_deref())
    }
}

fn networks(name: &'static str, texts: Option<&[String]>) -> Result<Vec<IpNet>, ValueError> {
    let network = |text: &String| {
        let expected = "a network such as 10.0.0.0/8, or an address";
        parse_network(text).map_err(|_| ValueError { name, got: text.clone(), expected })
    };
    texts.unwrap_or_default().iter().map(network).collect()
}

/// The largest count and the longest time, in seconds: beyond all use, and sums of them fit every clock and counter.
const MOST: u64 = u32::MAX as u64;
/// Threads beyond what any machine runs side by side.
const MOST_WORKERS: u64 = 1024;

impl Settings {
    /// Whether each number can be served with.
    ///
    /// # Errors
    /// [`ValueError`] for the first that cannot.
    pub fn check_numbers(&self) -> Result<(), ValueError> {
        let (limits, listen) = (&self.limits, &self.listen);
        let number = |value: Option<usize>| value.map(|value| value as u64);
        for (name, value, least, most, expected) in [
            ("max-frame", number(limits.max_frame), 1024, u64::MAX, "at least 1024"),
            ("max-datagram", number(limits.max_datagram), 1024, u64::MAX, "at least 1024"),
            ("max-seq", number(limits.max_seq), 1, u64::MAX, "at least 1"),
            ("max-connections", number(limits.max_connections), 1, MOST, "1 to 4294967295"),
            ("max-in-flight", number(limits.max_in_flight), 1, u64::MAX, "at least 1"),
            ("max-queued", number(limits.max_queued), 1, u64::MAX, "at least 1"),
            ("max-queued-bytes", number(limits.max_queued_bytes), 1, u64::MAX, "at least 1"),
            ("max-batch", number(limits.max_batch), 1, u64::MAX, "at least 1"),
            ("max-buffered-bytes", number(limits.max_buffered_bytes), 1, u64::MAX, "at least 1"),
            ("max-sessions", number(limits.max_sessions), 1, u64::MAX, "at least 1"),
            ("max-session-bytes", number(limits.max_session_bytes), 1, u64::MAX, "at least 1"),
            ("max-shard-entries", number(limits.max_shard_entries), 1, u64::MAX, "at least 1"),
            ("max-shard-bytes", number(limits.max_shard_bytes), 1, u64::MAX, "at least 1"),
            ("session-idle", limits.session_idle, 0, MOST, "seconds up to 4294967295"),
            ("frame-timeout", limits.frame_timeout, 1, MOST, "seconds from 1 to 4294967295"),
            ("idle-timeout", limits.idle_timeout, 1, MOST, "seconds from 1 to 4294967295"),
            ("grace", limits.grace, 0, MOST, "seconds up to 4294967295"),
            ("workers", number(self.model.workers), 1, MOST_WORKERS, "1 to 1024"),
            ("auth-window", listen.auth_window, 1, 3600, "seconds from 1 to 3600"),
        ] {
            if let Some(got) = value.filter(|value| !(least..=most).contains(value)) {
                return Err(ValueError { name, got: got.to_string(), expected });
            }
        }
        Ok(())
    }
}
