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
    /// The layers held.
    #[must_use]
    pub const fn layers(&self) -> Range<u32> {
        self.layers[0]..self.layers[1]
    }
}
