//! What benches of a station in this process share: starting it, and figures of interleaved rounds.

use std::path::PathBuf;

use aeon_station::{
    config::{Config, LimitSettings, ListenSettings, ModelSettings, Settings},
    daemon::Node,
};
use anyhow::Context as _;

use crate::demo::PrivateFolder;

/// A station in this process.
pub(super) struct Local {
    pub(super) node: Node,
    pub(super) socket: PathBuf,
    /// Removed last.
    _folder: PrivateFolder,
}

impl Local {
    /// Starts one on a Unix socket and UDP.
    pub(super) async fn start(model: ModelSettings, limits: LimitSettings) -> anyhow::Result<Self> {
        let folder = PrivateFolder::new().context("making a folder for the socket")?;
        let socket = folder.path().join("flow.sock");
        let udp = Some(([127, 0, 0, 1], 0).into());
        let listen = ListenSettings { uds: Some(socket.clone()), udp, ..ListenSettings::default() };
        let config = Config::try_from(Settings { model, listen, limits, ..Settings::default() })?;
        Ok(Self { node: Node::start(&config).await?, socket, _folder: folder })
    }
}

/// The first quartile, the middle and the third quartile of some figures.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spread {
    pub(super) low: f64,
    pub(super) middle: f64,
    pub(super) high: f64,
}

impl Spread {
    pub(super) fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let index = share * figures.len().saturating_sub(1) as f64;
            figures.get(index.round() as usize).copied().unwrap_or(f64::NAN)
        };
        Self { low: at(0.25), middle: at(0.5), high: at(0.75) }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} ({:.digits$} to {:.digits$})", self.middle, self.low, self.high)
    }
}

/// Processor time that this process has used, in seconds; 0 where the system does not say.
pub(super) fn processor_seconds() -> f64 {
    // Fields 14 and 15, of which the second is the program's name in parentheses; Linux counts in hundredths.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_that_of_the_middle_half() {
        let Spread { low, middle, high } = Spread::of(vec![5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!((low, middle, high), (2.0, 3.0, 4.0));
        assert_eq!(format!("{:.1}", Spread { low, middle, high }), "3.0 (2.0 to 4.0)");
        assert!(Spread::of(Vec::new()).middle.is_nan());
    }
}
