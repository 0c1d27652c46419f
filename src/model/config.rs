//! The numbers that decide what a Llama or Qwen2 model computes, from `config.json` or from GGUF metadata
//! (`gguf`). Every number is checked here once, so that what is built from a [`ModelConfig`] neither divides by
//! zero nor overflows.

use std::{fmt::Write as _, path::Path};

use serde::Deserialize;

use super::error::LoadError;

/// Largest values accepted: several times what the largest models of these families have, and small enough that the
/// product of any two fits in 64 bits with room to spare.
mod limit {
    pub(super) const HIDDEN: u64 = 1 << 16;
    pub(super) const INTERMEDIATE: u64 = 1 << 20;
    pub(super) const LAYERS: u64 = 1 << 10;
    pub(super) const HEADS: u64 = 1 << 10;
    pub(super) const HEAD_DIM: u64 = 1 << 10;
    pub(super) const VOCAB: u64 = 1 << 22;
    pub(super) const POSITIONS: u64 = 1 << 24;
}

/// Rotary frequencies as Llama 3.1 stretches them: long waves by `factor`, short ones not, those between in part.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Llama3Scaling {
    /// How much longer the longest waves become.
    pub factor: f64,
    /// Waves longer than the original context over this are stretched in full.
    pub low_freq_factor: f64,
    /// Waves shorter than the original context over this are left alone.
    pub high_freq_factor: f64,
    /// Context of the model before stretching.
    pub original_max_position_embeddings: f64,
}

/// How the rotary frequencies are stretched.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All by this factor.
    Linear(f64),
    /// By wave length.
    Llama3(Llama3Scaling),
    /// By a factor for each frequency, as GGUF files carry them.
    Factors(Vec<f32>),
}

/// What a model of the Llama or Qwen2 family computes.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Width of a residual.
    pub hidden_size: usize,
    /// Width of the feed-forward part.
    pub intermediate_size: usize,
    /// Layers of the whole model.
    pub n_layers: u32,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Token ids.
    pub vocab_size: usize,
    /// Positions that a sequence can have.
    pub max_position: usize,
    /// Added to the mean square in the norms.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Stretching of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has one.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The tokens that end one.
    pub eos: Vec<u32>,
}

impl ModelConfig {
    /// Reads the text of a `config.json`; `path` is only for errors.
    ///
    /// # Errors
    /// [`LoadError::BadJson`], [`LoadError::UnsupportedArchitecture`], [`LoadError::UnsupportedFeature`],
    /// [`LoadError::MissingValue`], [`LoadError::BadValue`].
    pub fn from_json(text: &str, path: &Path) -> Result<Self, LoadError> {
        let raw: RawConfig =
            serde_json::from_str(text).map_err(|source| LoadError::BadJson { path: path.to_owned(), source })?;
        raw.check(path)
    }

    /// Width of the keys (or values) of one position.
    #[must_use]
    pub const fn kv_dim(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Width of the queries of one position.
    #[must_use]
    pub const fn q_dim(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// The rotary frequencies of the `head_dim / 2` pairs, in radians a position.
    #[must_use]
    pub fn frequencies(&self) -> Vec<f32> {
        let pairs = self.head_dim / 2;
        let base = f64::from(self.rope_theta);
        (0..pairs)
            .map(|pair| {
                let frequency = base.powf(-(pair as f64) / pairs as f64) as f32;
                match &self.rope_scaling {
                    RopeScaling::None => frequency,
                    RopeScaling::Linear(factor) => (f64::from(frequency) / factor) as f32,
                    RopeScaling::Llama3(scaling) => scaling.stretch(frequency),
                    RopeScaling::Factors(factors) => frequency / factors.get(pair).copied().unwrap_or(1.0),
                }
            })
            .collect()
    }

    /// The values that decide the function, as JSON with sorted keys and no space; floats as the bits of an f32 in hex.
    ///
    /// Stretching appears as its largest factor: a GGUF file carries the factors rounded in another way than
    /// `config.json` describes them, but the largest is exact in both.
    #[must_use]
    pub fn canonical(&self) -> String {
        let largest = match &self.rope_scaling {
            RopeScaling::None => 1.0,
            RopeScaling::Linear(factor) => *factor as f32,
            RopeScaling::Llama3(scaling) => scaling.factor as f32,
            RopeScaling::Factors(factors) => factors.iter().copied().fold(1.0, f32::max),
        };
        let mut text = String::from("{");
        let _ = write!(text, "\"attention_bias\":{},", self.qkv_bias);
        let _ = write!(text, "\"attention_output_bias\":{},", self.output_bias);
        let _ = write!(text, "\"head_dim\":{},", self.head_dim);
        let _ = write!(text, "\"hidden_size\":{},", self.hidden_size);
        let _ = write!(text, "\"intermediate_size\":{},", self.intermediate_size);
        let _ = write!(text, "\"mlp_bias\":{},", self.mlp_bias);
        let _ = write!(text, "\"num_attention_heads\":{},", self.n_heads);
        let _ = write!(text, "\"num_hidden_layers\":{},", self.n_layers);
        let _ = write!(text, "\"num_key_value_heads\":{},", self.n_kv_heads);
        let _ = write!(text, "\"rms_norm_eps\":\"{:08x}\",", self.norm_eps.to_bits());
        let _ = write!(text, "\"rope_factor\":\"{:08x}\",", largest.to_bits());
        let _ = write!(text, "\"rope_theta\":\"{:08x}\",", self.rope_theta.to_bits());
        let _ = write!(text, "\"tie_word_embeddings\":{},", self.tied);
        let _ = write!(text, "\"vocab_size\":{}}}", self.vocab_size);
        text
    }

    /// The first 16 bytes of the BLAKE3 hash of [`ModelConfig::canonical`], as 32 hex digits.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        short_hex(&blake3::hash(self.canonical().as_bytes()))
    }
}

/// The first 16 bytes of a hash as 32 hex digits.
pub(super) fn short_hex(hash: &blake3::Hash) -> String {
    hash.to_hex().chars().take(32).collect()
}

impl Llama3Scaling {
    fn stretch(&self, frequency: f32) -> f32 {
        let wave = 2.0 * std::f64::consts::PI / f64::from(frequency);
        let context = self.original_max_position_embeddings;
        let factor = if wave < context / self.high_freq_factor {
            1.0
        } else if wave > context / self.low_freq_factor {
            self.factor
        } else {
            let part = (context / wave - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            1.0 / ((1.0 - part) / self.factor + part)
        };
        (f64::from(frequency) / factor) as f32
    }
}

/// The same checks for both sources of a configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Check<'a> {
    pub(super) path: &'a Path,
}

impl Check<'_> {
    pub(super) fn missing(self, key: &str) -> LoadError {
        LoadError::MissingValue { path: self.path.to_owned(), key: key.to_owned() }
    }

    pub(super) fn unsupported(self, feature: impl Into<String>) -> LoadError {
        LoadError::UnsupportedFeature { path: self.path.to_owned(), feature: feature.into() }
    }

    pub(super) fn bad(self, key: &str, expected: impl Into<String>, got: impl ToString) -> LoadError {
        let (key, expected, got) = (key.to_owned(), expected.into(), got.to_string());
        LoadError::BadValue { path: self.path.to_owned(), key, expected, got }
    }

    fn whole(self, key: &str, value: u64, max: u64) -> Result<usize, LoadError> {
        match usize::try_from(value) {
            Ok(small) if (1..=max).contains(&value) => Ok(small),
            _ => Err(self.bad(key, format!("1 to {max}"), value)),
        }
    }

    fn float(self, key: &str, value: f64, min: f64, max: f64) -> Result<f64, LoadError> {
        if (min..=max).contains(&value) { Ok(value) } else { Err(self.bad(key, format!("{min} to {max}"), value)) }
    }

    /// Checks what the rest of the code relies on.
    pub(super) fn finish(self, raw: Numbers) -> Result<ModelConfig, LoadError> {
        let n_heads = self.whole("num_attention_heads", raw.n_heads, limit::HEADS)?;
        let n_kv_heads = self.whole("num_key_value_heads", raw.n_kv_heads, limit::HEADS)?;
        if !n_heads.is_multiple_of(n_kv_heads) {
            return Err(self.bad("num_key_value_heads", format!("a divisor of {n_heads}"), n_kv_heads));
        }
        let hidden_size = self.whole("hidden_size", raw.hidden_size, limit::HIDDEN)?;
        let head_dim = match raw.head_dim {
            Some(value) => self.whole("head_dim", value, limit::HEAD_DIM)?,
            None if hidden_size.is_multiple_of(n_heads) => {
                self.whole("head_dim", (hidden_size / n_heads) as u64, limit::HEAD_DIM)?
            }
            None => return Err(self.bad("hidden_size", format!("a multiple of {n_heads} heads"), hidden_size)),
        };
        if !head_dim.is_multiple_of(2) {
            return Err(self.bad("head_dim", "an even number", head_dim));
        }
        let vocab_size = self.whole("vocab_size", raw.vocab_size, limit::VOCAB)?;
        let token = |key: &str, id: u64| match u32::try_from(id) {
            Ok(small) if id < vocab_size as u64 => Ok(small),
            _ => Err(self.bad(key, format!("below the vocabulary of {vocab_size}"), id)),
        };
        let mut eos = raw.eos.iter().map(|id| token("eos_token_id", *id)).collect::<Result<Vec<_>, _>>()?;
        eos.sort_unstable();
        eos.dedup();
        self.scaling(&raw.rope_scaling, head_dim)?;
        Ok(ModelConfig {
            hidden_size,
            intermediate_size: self.whole("intermediate_size", raw.intermediate_size, limit::INTERMEDIATE)?,
            n_layers: self.whole("num_hidden_layers", raw.n_layers, limit::LAYERS)? as u32,
            n_heads,
            n_kv_heads,
            head_dim,
            vocab_size,
            max_position: self.whole("max_position_embeddings", raw.max_position, limit::POSITIONS)?,
            norm_eps: self.float("rms_norm_eps", raw.norm_eps, 1e-12, 1.0)? as f32,
            rope_theta: self.float("rope_theta", raw.rope_theta, 1.0, 1e12)? as f32,
            rope_scaling: raw.rope_scaling,
            qkv_bias: raw.qkv_bias,
            output_bias: raw.output_bias,
            mlp_bias: raw.mlp_bias,
            tied: raw.tied,
            bos: raw.bos.map(|id| token("bos_token_id", id)).transpose()?,
            eos,
        })
    }

    fn scaling(self, scaling: &RopeScaling, head_dim: usize) -> Result<(), LoadError> {
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear(factor) => {
                self.float("rope_scaling.factor", *factor, 1.0, 1e6)?;
            }
            RopeScaling::Llama3(scaling) => {
                self.float("rope_scaling.factor", scaling.factor, 1.0, 1e6)?;
                self.float("rope_scaling.low_freq_factor", scaling.low_freq_factor, 1e-3, 1e6)?;
                let above = scaling.low_freq_factor * (1.0 + 1e-6);
                self.float("rope_scaling.high_freq_factor", scaling.high_freq_factor, above, 1e7)?;
                let (key, context) = ("original_max_position_embeddings", scaling.original_max_position_embeddings);
                self.float(key, context, 1.0, limit::POSITIONS as f64)?;
            }
            RopeScaling::Factors(factors) => {
                if factors.len() != head_dim / 2 {
                    return Err(self.bad("rope_freqs", format!("{} factors", head_dim / 2), factors.len()));
                }
                for factor in factors {
                    self.float("rope_freqs", f64::from(*factor), 1e-6, 1e6)?;
                }
            }
        }
        Ok(())
    }
}

/// The values of a configuration before they are checked.
#[derive(Debug)]
pub(super) struct Numbers {
    pub(super) hidden_size: u64,
    pub(super) intermediate_size: u64,
    pub(super) n_layers: u64,
    pub(super) n_heads: u64,
    pub(super) n_kv_heads: u64,
    pub(super) head_dim: Option<u64>,
    pub(super) vocab_size: u64,
    pub(super) max_position: u64,
    pub(super) norm_eps: f64,
    pub(super) rope_theta: f64,
    pub(super) rope_scaling: RopeScaling,
    pub(super) qkv_bias: bool,
    pub(super) output_bias: bool,
    pub(super) mlp_bias: bool,
    pub(super) tied: bool,
    pub(super) bos: Option<u64>,
    pub(super) eos: Vec<u64>,
}

/// One id or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum TokenIds {
    One(u64),
    Several(Vec<u64>),
}

impl TokenIds {
    pub(super) fn into_vec(self) -> Vec<u64> {
        match self {
            Self::One(id) => vec![id],
            Self::Several(ids) => ids,
        }
    }
}

/// `config.json` as it is written.
#[derive(Debug, Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    vocab_size: Option<u64>,
    max_position_embeddings: Option<u64>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<u64>,
    use_sliding_window: Option<bool>,
    quantization_config: Option<serde_json::Value>,
    bos_token_id: Option<TokenIds>,
    eos_token_id: Option<TokenIds>,
}

/// `rope_scaling`, or `rope_parameters`, which newer files use for the base as well.
#[derive(Debug, Clone, Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    r#type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
    full_attention: Option<serde_json::Value>,
}

impl RawConfig {
    fn check(self, path: &Path) -> Result<ModelConfig, LoadError> {
        let check = Check { path };
        let named = self.architectures.as_ref().and_then(|names| names.first());
        let kind = match (&self.model_type, named) {
            (Some(kind), _) => kind.clone(),
            (None, Some(name)) => name.trim_end_matches("ForCausalLM").to_lowercase(),
            (None, None) => return Err(check.missing("model_type")),
        };
        let qwen2 = match kind.as_str() {
            "llama" => false,
            "qwen2" => true,
            _ => return Err(LoadError::UnsupportedArchitecture { path: path.to_owned(), got: kind }),
        };
        self.refuse_features(qwen2, check)?;
        let need = |value: Option<u64>, key: &str| value.ok_or_else(|| check.missing(key));
        let n_heads = need(self.num_attention_heads, "num_attention_heads")?;
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let theta = self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta).or(self.rope_theta);
        let attention_bias = self.attention_bias.unwrap_or(false);
        check.finish(Numbers {
            hidden_size: need(self.hidden_size, "hidden_size")?,
            intermediate_size: need(self.intermediate_size, "intermediate_size")?,
            n_layers: need(self.num_hidden_layers, "num_hidden_layers")?,
            n_heads,
            n_kv_heads: self.num_key_value_heads.unwrap_or(n_heads),
            head_dim: self.head_dim,
            vocab_size: need(self.vocab_size, "vocab_size")?,
            max_position: need(self.max_position_embeddings, "max_position_embeddings")?,
            norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: theta.unwrap_or(10_000.0),
            rope_scaling: rope.map_or(Ok(RopeScaling::None), |rope| rope.scaling(check))?,
            qkv_bias: qwen2 || attention_bias,
            output_bias: !qwen2 && attention_bias,
            mlp_bias: !qwen2 && self.mlp_bias.unwrap_or(false),
            tied: self.tie_word_embeddings.unwrap_or(false),
            bos: self.bos_token_id.and_then(|ids| ids.into_vec().first().copied()),
            eos: self.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
        })
    }

    fn refuse_features(&self, qwen2: bool, check: Check<'_>) -> Result<(), LoadError> {
        if let Some(act) = self.hidden_act.as_deref().filter(|act| *act != "silu" && *act != "swish") {
            return Err(check.unsupported(format!("hidden_act {act:?}")));
        }
        if self.quantization_config.as_ref().is_some_and(|value| !value.is_null()) {
            return Err(check.unsupported("quantization_config"));
        }
        // Qwen2 names a window but uses it only if told to.
        let used = self.use_sliding_window.unwrap_or(!qwen2);
        let window = self.sliding_window.filter(|_| used);
        if let Some(window) = window.filter(|window| self.max_position_embeddings.is_none_or(|max| *window < max)) {
            return Err(check.unsupported(format!("sliding_window {window}")));
        }
        let ropes = [&self.rope_parameters, &self.rope_scaling].into_iter().flatten();
        let partial = ropes.filter_map(|rope| rope.partial_rotary_factor).chain(self.partial_rotary_factor);
        if let Some(factor) = partial.into_iter().find(|factor| *factor != 1.0) {
            return Err(check.unsupported(format!("partial_rotary_factor {factor}")));
        }
        Ok(())
    }
}

impl RawRope {
    fn scaling(&self, check: Check<'_>) -> Result<RopeScaling, LoadError> {
        if self.full_attention.is_some() {
            return Err(check.unsupported("rope_parameters by layer type"));
        }
        let need = |value: Option<f64>, key: &str| value.ok_or_else(|| check.missing(key));
        let kind = self.rope_type.as_deref().or(self.r#type.as_deref()).unwrap_or("default");
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear(need(self.factor, "rope_scaling.factor")?)),
            "llama3" => Ok(RopeScaling::Llama3(Llama3Scaling {
                factor: need(self.factor, "rope_scaling.factor")?,
                low_freq_factor: need(self.low_freq_factor, "rope_scaling.low_freq_factor")?,
                high_freq_factor: need(self.high_freq_factor, "rope_scaling.high_freq_factor")?,
                original_max_position_embeddings: need(
                    self.original_max_position_embeddings,
                    "rope_scaling.original_max_position_embeddings",
                )?,
            })),
            _ => Err(check.unsupported(format!("rope_type {kind:?}"))),
        }
    }
}
