//! What an evaluation found.

use serde::{Deserialize, Serialize};

/// What an evaluation found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The model.
    pub model: String,
    /// Fingerprint of its configuration.
    pub config_fp: String,
    /// Values of a residual.
    pub hidden_dim: usize,
    /// The boundaries that residuals cross.
    pub cuts: Vec<u32>,
    /// Windows of text.
    pub windows: usize,
    /// Positions of the longest window.
    pub context: usize,
    /// Positions that were judged.
    pub positions: usize,
    /// Perplexity of the text without any codec.
    pub perplexity: f64,
    /// Drafts tried, and the tokens of each.
    pub drafts: [usize; 2],
    /// Greedy continuations tried, and the tokens of each.
    pub greedy: [usize; 2],
    /// For each body, in the order asked for.
    pub settings: Vec<SettingReport>,
}

/// What one body does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SettingReport {
    /// Its name.
    pub body: String,
    /// Bytes of an ordinary position on one hop, without headers, mean over the hops.
    pub bytes: f64,
    /// Bytes of the body of one generated token on one hop, mean over the hops.
    pub body_bytes: f64,
    /// Body bytes of all positions on one hop over positions, mean over the hops: headers and escaped positions count.
    pub sent_bytes: f64,
    /// The effect on the output with this body on all hops.
    pub whole: Effect,
    /// Mean accepted tokens of a draft over its length.
    pub acceptance: Option<f64>,
    /// Mean count of greedy tokens until the first that differs.
    pub greedy: Option<f64>,
    /// Share of greedy texts that are the same to the end.
    pub identical: Option<f64>,
    /// Each hop.
    pub hops: Vec<HopReport>,
}

/// What a body does to the model's output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Kullback-Leibler divergence of the next-token distribution from the unsplit model's, nats per token, mean.
    pub kl: f64,
    /// Share of positions with the same most likely token.
    pub top1: f64,
    /// Perplexity of the text.
    pub perplexity: f64,
    /// The same over that of the unsplit model.
    pub perplexity_ratio: f64,
}

/// What a body does at one boundary. Ordinary positions only, but for `alone`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HopReport {
    /// The number of layers already applied.
    pub boundary: u32,
    /// Bytes of an ordinary position, without headers.
    pub bytes: usize,
    /// Bytes of the body of one generated token.
    pub body_bytes: usize,
    /// Share of positions that were escaped.
    pub escaped: f64,
    /// Cosine between residual and what the receiver has, per position: mean.
    pub cosine: f64,
    /// The same: first percentile.
    pub cosine_p1: f64,
    /// What the mean residual alone scores, for nothing sent; `None` without a basis.
    pub mean_cosine: Option<f64>,
    /// Cosine after the mean is taken off both; `None` without a basis.
    pub centred_cosine: Option<f64>,
    /// Norm of the error over that of the residual: mean.
    pub relative_error: f64,
    /// The same: 99th percentile.
    pub relative_error_p99: f64,
    /// The effect with this body at this boundary and raw residuals at the others; `None` if that was not tried.
    pub alone: Option<Effect>,
}
