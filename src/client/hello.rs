//! What a station says of itself.

use std::ops::Range;

use serde::Deserialize;

/// The answer to HELLO, as far as this client uses it. Unknown members are ignored.
#[derive(Debug, Clone, Deserialize)]
pub struct Hello {
    /// The protocol version, in a content type.
    pub content_type: String,
    /// The process.
    pub station: StationInfo,
    /// The model.
    pub model: RemoteModel,
    /// First layer held, and one past the last.
    pub layers: [u32; 2],
    /// Body kinds that it takes and gives.
    pub accepts: Vec<String>,
    /// What it takes at most.
    pub limits: RemoteLimits,
    /// The bases that it has loaded.
    #[serde(default)]
    pub bases: Vec<RemoteBasis>,
}

/// A basis that a station has loaded.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RemoteBasis {
    /// FNV-1a 32 of the file, `0x` and 8 hex digits.
    pub basis_fp: String,
    /// BLAKE3 of the file.
    pub blake3: String,
    /// Id of its methodology, `0x` and 8 hex digits.
    pub methodology: String,
    /// What it holds.
    pub boundaries: Vec<RemoteBoundary>,
    /// What its components do to the model's output, if its file says so.
    #[serde(default)]
    pub judged: Option<RemoteVerdict>,
}

/// The verdict on a basis: the effect of all components at the cut where it is worst.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct RemoteVerdict {
    /// Whether every cut was within the budget.
    pub passed: bool,
    /// What a cut may cost in perplexity, such as 0.01 for one per cent.
    pub budget: f64,
    /// The cut that costs most.
    pub worst_boundary: u32,
    /// Perplexity there over that of the unsplit model.
    pub perplexity_ratio: f64,
    /// Share of positions with the same most likely token there.
    pub top1: f64,
}

/// What a basis holds for one boundary.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct RemoteBoundary {
    /// The number of layers already applied.
    pub boundary: u32,
    /// Components.
    pub k: u32,
    /// Share of the variance that they cover.
    pub explained: f64,
}

impl RemoteBasis {
    /// Whether it holds anything for a boundary: a mean at least.
    #[must_use]
    pub fn has(&self, boundary: u32) -> bool {
        self.boundaries.iter().any(|part| part.boundary == boundary)
    }

    /// The fingerprint as a number; 0, which no basis is asked for by, if the station wrote something else.
    #[must_use]
    pub fn fingerprint(&self) -> u32 {
        aeon_proto::meta::parse_fingerprint(&self.basis_fp).unwrap_or(0)
    }

    /// Components for a boundary; 0 if there are none.
    #[must_use]
    pub fn k_at(&self, boundary: u32) -> u32 {
        self.boundaries.iter().find(|part| part.boundary == boundary).map_or(0, |part| part.k)
    }
}

/// The station process.
#[derive(Debug, Clone, Deserialize)]
pub struct StationInfo {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Milliseconds since it started.
    pub uptime_ms: u64,
}

/// The model that a station serves a part of.
#[derive(Debug, Clone, Deserialize)]
pub struct RemoteModel {
    /// Its name.
    pub name: String,
    /// Width of a residual.
    pub hidden_dim: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Layers of the whole model.
    pub n_layers: u32,
    /// Positions of a sequence.
    pub max_position: usize,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The tokens that end one.
    pub eos: Vec<u32>,
    /// The same on every station of a model.
    pub config_fp: String,
    /// Of the weights held there.
    pub layers_fp: String,
}

/// What a station takes at most.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct RemoteLimits {
    /// Bytes of a frame.
    pub max_frame: usize,
    /// Bytes of a datagram.
    pub max_datagram: usize,
    /// Positions of a request.
    pub max_seq: usize,
}

impl Hello {
    /// The basis with a fingerprint.
    #[must_use]
    pub fn basis(&self, basis_fp: u32) -> Option<&RemoteBasis> {
        self.bases.iter().find(|basis| basis.fingerprint() == basis_fp)
    }

    /// Whether it takes and gives a body kind.
    #[must_use]
    pub fn takes(&self, kind: &str) -> bool {
        self.accepts.iter().any(|accepted| accepted == kind)
    }

    /// The layers held.
    #[must_use]
    pub const fn layers(&self) -> Range<u32> {
        self.layers[0]..self.layers[1]
    }
}
