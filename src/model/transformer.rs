//! A layer range of a Llama or Qwen2 model, computed in f32 on the CPU.
//!
//! [`super::load`] makes one from files; the station drives it as a [`LayerRange`]. The tensors and the plain operations
//! are candle's; the two operations whose order of summation matters, products and attention, are [`super::matrix`] and
//! `attention`: candle's product of one row sums in another order than its product of several, and the bits of
//! a position must not depend on how a prompt was cut into requests.

use std::{any::Any, ops::Range};

use aeon_proto::residual;
use candle_core::{Device, Storage, Tensor};
use candle_nn::{ops::rms_norm, rotary_emb::rope_thd};

use super::{
    Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError, ModelInfo,
    attention::{Attention, KvCache, LayerCache, contiguous},
    config::ModelConfig,
    error::LoadError,
    head::Collector,
    weights::{LayerWeights, TensorSource, Weights},
};

/// Positions computed at once: enough to share each weight that is fetched, few enough to bound the memory of a long
/// prompt and the time until a cancellation is seen.
const CHUNK: usize = 128;
/// Positions whose logits are held at once.
const HEAD_CHUNK: usize = 6;

/// A layer range of a Llama or Qwen2 model.
#[derive(Debug)]
pub struct Transformer {
    info: ModelInfo,
    config: ModelConfig,
    frequencies: Vec<f32>,
    weights: Weights,
}

impl Transformer {
    /// Reads the layers `layers` from a source.
    pub(super) fn new(
        name: String,
        config: ModelConfig,
        layers: Range<u32>,
        source: &mut dyn TensorSource,
    ) -> Result<Self, LoadError> {
        let weights = Weights::load(&config, layers.clone(), source)?;
        let info = ModelInfo {
            name,
            hidden_dim: config.hidden_size,
            vocab: config.vocab_size,
            n_layers: config.n_layers,
            layers,
            max_position: config.max_position,
            bos: config.bos,
            eos: config.eos.clone(),
            config_fp: config.fingerprint(),
            layers_fp: weights.fingerprint.clone(),
        };
        Ok(Self { info, frequencies: config.frequencies(), config, weights })
    }

    /// What the model computes.
    #[must_use]
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Whether a cache is shaped like this model's.
    fn owns(&self, cache: &KvCache) -> bool {
        cache.layers.len() == self.weights.layers.len() && cache.kv_dim == self.config.kv_dim()
    }

    fn not_here(&self, part: &'static str) -> ModelError {
        let Range { start: lo, end: hi } = self.info.layers;
        ModelError::NotHere { part, lo, hi, n_layers: self.info.n_layers }
    }

    /// Residuals of consecutive positions through all layers held.
    fn chunk(&self, cache: &mut KvCache, residuals: &[f32], cancel: &CancelToken) -> Result<Tensor, ModelError> {
        let seq = residuals.len() / self.config.hidden_size;
        let mut x = Tensor::from_slice(residuals, (seq, self.config.hidden_size), &Device::Cpu).op("residuals")?;
        let rotation = Rotation::new(&self.frequencies, cache.len..cache.len + seq).op("rotary angles")?;
        for (layer, memory) in self.weights.layers.iter().zip(&mut cache.layers) {
            if cancel.is_cancelled() {
                return Err(ModelError::Cancelled);
            }
            x = self.layer(layer, memory, &rotation, x)?;
        }
        cache.len += seq;
        Ok(x)
    }

    fn layer(
        &self,
        layer: &LayerWeights,
        memory: &mut LayerCache,
        rotation: &Rotation,
        x: Tensor,
    ) -> Result<Tensor, ModelError> {
        let ModelConfig { n_heads, n_kv_heads, head_dim, norm_eps, .. } = self.config;
        let attended = (|| {
            let normed = rms_norm(&x, &layer.input_norm, norm_eps)?;
            let queries = rotation.apply(&normed.apply_op1_no_bwd(&layer.query)?, n_heads, head_dim)?;
            let keys = rotation.apply(&normed.apply_op1_no_bwd(&layer.key)?, n_kv_heads, head_dim)?;
            append(&mut memory.keys, &keys)?;
            append(&mut memory.values, &normed.apply_op1_no_bwd(&layer.value)?)?;
            let attention = Attention { memory, n_heads, n_kv_heads, head_dim };
            &x + queries.apply_op1_no_bwd(&attention)?.apply_op1_no_bwd(&layer.output)?
        })();
        let x = attended.op("attention")?;
        let forwarded = (|| {
            let normed = rms_norm(&x, &layer.mlp_norm, norm_eps)?;
            let gate = normed.apply_op1_no_bwd(&layer.gate)?.silu()?;
            let inner = (gate * normed.apply_op1_no_bwd(&layer.up)?)?;
            &x + inner.apply_op1_no_bwd(&layer.down)?
        })();
        forwarded.op("feed-forward")
    }
}

impl LayerRange for Transformer {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> Box<dyn Cache> {
        Box::new(KvCache::new(self.weights.layers.len(), self.config.kv_dim()))
    }

    fn cache_bytes_per_position(&self) -> usize {
        self.weights.layers.len() * self.config.kv_dim() * 2 * size_of::<f32>()
    }

    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        let embedding = self.weights.embedding.as_ref().ok_or_else(|| self.not_here("embedding"))?;
        let mut out = vec![0.0; ids.len() * self.config.hidden_size];
        for (id, out) in ids.iter().zip(out.chunks_mut(self.config.hidden_size)) {
            embedding.copy_row(*id as usize, out);
        }
        Ok(out)
    }

    fn forward(
        &self,
        cache: &mut dyn Cache,
        residuals: Vec<f32>,
        cancel: &CancelToken,
    ) -> Result<Vec<f32>, ModelError> {
        let cache: &mut dyn Any = cache;
        let cache = cache.downcast_mut::<KvCache>().filter(|cache| self.owns(cache)).ok_or(ModelError::ForeignCache)?;
        let before = cache.len;
        let mut out = Vec::with_capacity(residuals.len());
        for chunk in residuals.chunks(CHUNK * self.config.hidden_size) {
            match self.chunk(cache, chunk, cancel).and_then(|x| append(&mut out, &x).op("residuals")) {
                Ok(()) => {}
                Err(error) => {
                    cache.truncate(before);
                    return Err(error);
                }
            }
        }
        Ok(out)
    }

    fn exported_per_position(&self) -> Option<usize> {
        Some(self.weights.layers.len() * self.config.kv_dim() * 2)
    }

    fn export_cache(&self, cache: &dyn Cache, len: usize) -> Result<Vec<f32>, ModelError> {
        let any: &dyn Any = cache;
        let cache = any.downcast_ref::<KvCache>().filter(|cache| self.owns(cache)).ok_or(ModelError::ForeignCache)?;
        if len > cache.len {
            return Err(ModelError::CacheLen { unit: "positions", expected: len, got: cache.len });
        }
        let part_len = len * cache.kv_dim;
        let parts = cache.layers.iter().flat_map(|layer| [&layer.keys[..part_len], &layer.values[..part_len]]);
        Ok(parts.collect::<Vec<_>>().concat())
    }

    fn import_cache(&self, len: usize, values: &[f32]) -> Result<Box<dyn Cache>, ModelError> {
        let mut cache = KvCache::new(self.weights.layers.len(), self.config.kv_dim());
        let expected = len.saturating_mul(cache.kv_dim).saturating_mul(2 * cache.layers.len());
        if values.len() != expected {
            return Err(ModelError::CacheLen { unit: "values", expected, got: values.len() });
        }
        residual::check_finite_values(values).map_err(|error| ModelError::CacheNonFinite { index: error.index })?;
        let mut parts = values.chunks_exact((len * cache.kv_dim).max(1));
        for layer in &mut cache.layers {
            layer.keys.extend_from_slice(parts.next().unwrap_or_default());
            layer.values.extend_from_slice(parts.next().unwrap_or_default());
        }
        cache.len = len;
        Ok(Box::new(cache))
    }

    fn head(&self, residuals: &[f32], want: Head, cancel: &CancelToken) -> Result<HeadOutput, ModelError> {
        let head = self.weights.head.as_ref().ok_or_else(|| self.not_here("head"))?;
        let hidden = self.config.hidden_size;
        let mut collector = Collector::new(want, residuals.len() / hidden, self.config.vocab_size);
        for rows in residuals.chunks(HEAD_CHUNK * hidden) {
            if cancel.is_cancelled() {
                return Err(ModelError::Cancelled);
            }
            let normed = Tensor::from_slice(rows, (rows.len() / hidden, hidden), &Device::Cpu)
                .and_then(|rows| rms_norm(&rows, &head.norm, self.config.norm_eps))
                .op("final norm")?;
            let mut values = Vec::with_capacity(rows.len());
            append(&mut values, &normed).op("final norm")?;
            let logits = head.matrix.multiply(&values);
            logits.chunks(self.config.vocab_size).for_each(|row| collector.push(row));
        }
        Ok(collector.finish())
    }
}

/// Sines and cosines of consecutive positions, `[seq, head_dim / 2]`.
struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    /// Angles are f32 products, as in the reference implementations: at far positions their rounding is part of what
    /// the model was trained with.
    fn new(frequencies: &[f32], positions: Range<usize>) -> candle_core::Result<Self> {
        let shape = (positions.len(), frequencies.len());
        let angles = positions.flat_map(|position| frequencies.iter().map(move |f| f64::from(position as f32 * f)));
        let (mut sin, mut cos) = (Vec::new(), Vec::new());
        for angle in angles {
            sin.push(angle.sin() as f32);
            cos.push(angle.cos() as f32);
        }
        Ok(Self { cos: Tensor::from_vec(cos, shape, &Device::Cpu)?, sin: Tensor::from_vec(sin, shape, &Device::Cpu)? })
    }

    /// Rotates `[seq, heads * head_dim]`; element `i` of a head goes with element `i + head_dim / 2`.
    fn apply(&self, x: &Tensor, heads: usize, head_dim: usize) -> candle_core::Result<Tensor> {
        let (seq, width) = x.dims2()?;
        let x = x.reshape((1, seq, heads, head_dim))?;
        rope_thd(&x, &self.cos, &self.sin)?.reshape((seq, width))
    }
}

/// Adds the values of a tensor to the end of `out`.
fn append(out: &mut Vec<f32>, tensor: &Tensor) -> candle_core::Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("expected a tensor on the CPU") };
    out.extend_from_slice(contiguous(storage, layout)?);
    Ok(())
}

/// Adds what was being computed to an error of the tensor library.
trait Operation<T> {
    fn op(self, operation: &'static str) -> Result<T, ModelError>;
}

impl<T> Operation<T> for candle_core::Result<T> {
    fn op(self, operation: &'static str) -> Result<T, ModelError> {
        self.map_err(|source| ModelError::Compute { operation, source: Box::new(source) })
    }
}
