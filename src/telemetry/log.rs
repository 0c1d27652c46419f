//! Where log lines go: to the journal, to standard error as text, or to standard error as JSON.

use std::{ffi::OsStr, io, os::fd::AsFd};

use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::settings::LogFormat;

/// What is logged unless something else is asked for.
pub const DEFAULT_LEVEL: &str = "warn";

/// Prefix of this program's fields in the journal: `journalctl AEON_FAULT=position`.
const JOURNAL_PREFIX: &str = "AEON";

/// How a node logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// The form of lines.
    pub format: LogFormat,
    /// What is logged, as directives such as `info` or `warn,aeon_station::request=debug`.
    pub level: String,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { format: LogFormat::Auto, level: DEFAULT_LEVEL.to_owned() }
    }
}

/// Whether directives can be read.
#[must_use]
pub fn is_level(level: &str) -> bool {
    EnvFilter::try_new(level).is_ok()
}

/// Whether `JOURNAL_STREAM` (device and inode, as systemd sets it) names an open file.
fn names_stream(variable: &OsStr, device: u64, inode: u64) -> bool {
    let Some((named_device, named_inode)) = variable.to_str().and_then(|text| text.split_once(':')) else {
        return false;
    };
    named_device.parse() == Ok(device) && named_inode.parse() == Ok(inode)
}

/// Whether what is written to standard error ends up in the journal. A redirected one does not, whatever systemd set up.
fn stderr_is_journal() -> bool {
    let (Some(variable), Ok(stat)) = (std::env::var_os("JOURNAL_STREAM"), rustix::fs::fstat(io::stderr().as_fd()))
    else {
        return false;
    };
    names_stream(&variable, stat.st_dev, stat.st_ino)
}

/// Starts logging for the whole process; `program` is its name in the journal. What cannot be done (no journal, a logger
/// that is there already) is said on standard error, and never ends the program.
pub fn start(options: &LogOptions, program: &str) {
    let filter = || EnvFilter::try_new(&options.level).unwrap_or_else(|_| EnvFilter::new(DEFAULT_LEVEL));
    let wants_journal = match options.format {
        LogFormat::Journald => true,
        LogFormat::Auto => stderr_is_journal(),
        LogFormat::Text | LogFormat::Json => false,
    };
    let text = || {
        let terminal = io::IsTerminal::is_terminal(&io::stderr());
        // Colours are for terminals, not for files and journals.
        tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(terminal)
    };
    let mut missing = None;
    let layer = match wants_journal.then(tracing_journald::Layer::new) {
        Some(Ok(journal)) => journal
            .with_syslog_identifier(program.to_owned())
            .with_field_prefix(Some(JOURNAL_PREFIX.to_owned()))
            .boxed(),
        Some(Err(error)) => {
            missing = Some(error);
            text().boxed()
        }
        None if options.format == LogFormat::Json => {
            let json = tracing_subscriber::fmt::layer().json().flatten_event(true);
            json.with_writer(io::stderr).with_span_list(false).boxed()
        }
        None => text().boxed(),
    };
    if let Err(error) = tracing_subscriber::registry().with(layer.with_filter(filter())).try_init() {
        eprintln!("logging was started before: {error}");
    }
    if let Some(error) = missing {
        tracing::warn!(%error, "there is no journal to write to: logging to standard error: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_named_by_device_and_inode() {
        let names = |text: &str| names_stream(OsStr::new(text), 8, 1234);
        assert!(names("8:1234"));
        for other in ["8:1235", "9:1234", "1234:8", "8", "8:", ":1234", "8:1234:", "", "x:y"] {
            assert!(!names(other), "{other}");
        }
    }

    #[test]
    fn directives_are_checked() {
        for good in ["warn", "info", "warn,aeon_station::request=debug", "off"] {
            assert!(is_level(good), "{good}");
        }
        for bad in ["warn,,=", "aeon_station=loudly"] {
            assert!(!is_level(bad), "{bad}");
        }
    }
}
