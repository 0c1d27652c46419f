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
    batch::{ForwardPart, HeadPart},
    config::ModelConfig,
    error::LoadError,
    head::Collector,
    weights::{LayerWeights, TensorSource, Weights},
};

/// Positions computed at once: enough to share each weight that is fetched, few enough to bound the memory of a long
/// prompt and the time until a cancellation is seen.
const CHUNK: usize = 128;
/// Positions whose logits are held at once: four passes over each part of the head while it is in the cache.
const HEAD_CHUNK: usize = 24;

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

    /// Some positions of one sequence or of several through all layers held.
    fn chunk(&self, segments: &mut [Segment<'_, '_>]) -> Result<Tensor, ModelError> {
        let hidden = self.config.hidden_size;
        let rows: Vec<f32> = segments.iter().flat_map(|segment| segment.rows).copied().collect();
        let x = (rows.len() / hidden, hidden);
        let mut x = Tensor::from_vec(rows, x, &Device::Cpu).op("residuals")?;
        let positions = segments.iter().flat_map(|segment| segment.positions(hidden));
        let rotation = Rotation::new(&self.frequencies, positions).op("rotary angles")?;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            // All are asked, so that a cancelled one is known at once; the others go on with it to the end of the chunk.
            if segments.iter_mut().map(|segment| segment.sequence.goes_on()).filter(|goes_on| *goes_on).count() == 0 {
                return Err(ModelError::Cancelled);
            }
            x = self.layer(layer, index, segments, &rotation, x)?;
        }
        for segment in segments {
            segment.sequence.cache.len += segment.rows.len() / hidden;
        }
        Ok(x)
    }

    fn layer(
        &self,
        layer: &LayerWeights,
        index: usize,
        segments: &mut [Segment<'_, '_>],
        rotation: &Rotation,
        x: Tensor,
    ) -> Result<Tensor, ModelError> {
        let ModelConfig { n_heads, n_kv_heads, head_dim, norm_eps, hidden_size, .. } = self.config;
        let attended = (|| {
            let normed = rms_norm(&x, &layer.input_norm, norm_eps)?;
            let queries = rotation.apply(&normed.apply_op1_no_bwd(&layer.query)?, n_heads, head_dim)?;
            let keys = rotation.apply(&normed.apply_op1_no_bwd(&layer.key)?, n_kv_heads, head_dim)?;
            let values = normed.apply_op1_no_bwd(&layer.value)?;
            self.remember(segments, index, &keys, |memory| &mut memory.keys)?;
            self.remember(segments, index, &values, |memory| &mut memory.values)?;
            let rows = segments.iter().flat_map(|segment| {
                let memory = &segment.sequence.cache.layers[index];
                segment.positions(hidden_size).map(move |position| (memory, position))
            });
            let attention = Attention { rows: rows.collect(), n_heads, n_kv_heads, head_dim };
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

    /// Puts the keys or values of all segments, `[rows, kv_dim]`, behind those of their own sequences.
    fn remember(
        &self,
        segments: &mut [Segment<'_, '_>],
        index: usize,
        tensor: &Tensor,
        part: impl Fn(&mut LayerCache) -> &mut Vec<f32>,
    ) -> candle_core::Result<()> {
        with_values(tensor, |mut values| {
            for segment in segments {
                let own = segment.rows.len() / self.config.hidden_size * self.config.kv_dim();
                let Some((own, rest)) = values.split_at_checked(own) else {
                    candle_core::bail!("fewer keys or values than positions");
                };
                part(&mut segment.sequence.cache.layers[index]).extend_from_slice(own);
                values = rest;
            }
            Ok(())
        })
    }
}

/// A sequence on its way through the layers.
struct Sequence<'a> {
    cache: &'a mut KvCache,
    /// Positions before this request.
    before: usize,
    /// Positions that are still to be computed.
    left: &'a [f32],
    out: Vec<f32>,
    cancel: &'a CancelToken,
    is_cancelled: bool,
}

impl Sequence<'_> {
    /// Whether nobody has withdrawn it, which also shows that the thread is alive.
    fn goes_on(&mut self) -> bool {
        self.is_cancelled |= self.cancel.is_cancelled();
        !self.is_cancelled
    }
}

/// Some positions of a sequence.
struct Segment<'s, 'a> {
    sequence: &'s mut Sequence<'a>,
    rows: &'a [f32],
}

impl Segment<'_, '_> {
    fn positions(&self, hidden: usize) -> Range<usize> {
        let len = self.sequence.cache.len;
        len..len + self.rows.len() / hidden
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
        let part = ForwardPart { cache, residuals: &residuals, cancel };
        self.forward_batch(vec![part])?.pop().unwrap_or(Err(ModelError::Cancelled))
    }

    fn batch_positions(&self) -> Option<usize> {
        Some(CHUNK)
    }

    fn forward_batch(&self, parts: Vec<ForwardPart<'_>>) -> Result<Vec<Result<Vec<f32>, ModelError>>, ModelError> {
        let hidden = self.config.hidden_size;
        let sequence = |ForwardPart { cache, residuals, cancel }| {
            let cache: &mut dyn Any = cache;
            let cache = cache.downcast_mut::<KvCache>().filter(|cache| self.owns(cache));
            let cache = cache.ok_or(ModelError::ForeignCache)?;
            let (before, out) = (cache.len, Vec::with_capacity(residuals.len()));
            Ok(Sequence { cache, before, left: residuals, out, cancel, is_cancelled: false })
        };
        let mut sequences: Vec<Result<Sequence<'_>, ModelError>> = parts.into_iter().map(sequence).collect();
        loop {
            let mut room = CHUNK * hidden;
            let mut segments = Vec::new();
            for sequence in sequences.iter_mut().flatten().filter(|sequence| !sequence.is_cancelled) {
                let (rows, left) = sequence.left.split_at(sequence.left.len().min(room));
                if !rows.is_empty() {
                    room -= rows.len();
                    sequence.left = left;
                    segments.push(Segment { sequence, rows });
                }
            }
            if segments.is_empty() {
                break;
            }
            match self.chunk(&mut segments) {
                Ok(x) => with_values(&x, |mut values| {
                    for segment in segments {
                        let (own, rest) = values.split_at(segment.rows.len().min(values.len()));
                        segment.sequence.out.extend_from_slice(own);
                        values = rest;
                    }
                    Ok(())
                })
                .op("residuals")?,
                // All of these were withdrawn; others may be left.
                Err(ModelError::Cancelled) => {}
                Err(error) => {
                    sequences.iter_mut().flatten().for_each(|sequence| sequence.cache.truncate(sequence.before));
                    return Err(error);
                }
            }
        }
        let result = |sequence: Sequence<'_>| {
            if sequence.is_cancelled {
                sequence.cache.truncate(sequence.before);
                return Err(ModelError::Cancelled);
            }
            Ok(sequence.out)
        };
        Ok(sequences.into_iter().map(|sequence| sequence.and_then(result)).collect())
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
        self.head_batch(&[HeadPart { residuals, want, cancel }])?.pop().unwrap_or(Err(ModelError::Cancelled))
    }

    fn head_batch(&self, parts: &[HeadPart<'_>]) -> Result<Vec<Result<HeadOutput, ModelError>>, ModelError> {
        let head = self.weights.head.as_ref().ok_or_else(|| self.not_here("head"))?;
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let collector = |part: &HeadPart<'_>| Collector::new(part.want, part.residuals.len() / hidden, vocab);
        let mut collectors: Vec<Collector> = parts.iter().map(collector).collect();
        let mut cancelled = vec![false; parts.len()];
        let owners = parts
            .iter()
            .enumerate()
            .flat_map(|(owner, part)| part.residuals.chunks_exact(hidden).map(move |row| (owner, row)));
        let rows: Vec<(usize, &[f32])> = owners.collect();
        for rows in rows.chunks(HEAD_CHUNK) {
            for (is_cancelled, part) in cancelled.iter_mut().zip(parts) {
                *is_cancelled |= part.cancel.is_cancelled();
            }
            let rows: Vec<(usize, &[f32])> = rows.iter().copied().filter(|(owner, _)| !cancelled[*owner]).collect();
            if rows.is_empty() {
                continue;
            }
            let values: Vec<f32> = rows.iter().flat_map(|(_, row)| *row).copied().collect();
            let normed = Tensor::from_vec(values, (rows.len(), hidden), &Device::Cpu)
                .and_then(|rows| rms_norm(&rows, &head.norm, self.config.norm_eps))
                .op("final norm")?;
            let logits = with_values(&normed, |values| Ok(head.matrix.multiply(values))).op("final norm")?;
            for ((owner, _), row) in rows.iter().zip(logits.chunks(vocab)) {
                collectors[*owner].push(row);
            }
        }
        let result = |(collector, is_cancelled): (Collector, bool)| match is_cancelled {
            true => Err(ModelError::Cancelled),
            false => Ok(collector.finish()),
        };
        Ok(collectors.into_iter().zip(cancelled).map(result).collect())
    }
}

/// Sines and cosines of positions, `[rows, head_dim / 2]`.
struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    /// Angles are f32 products, as in the reference implementations: at far positions their rounding is part of what
    /// the model was trained with.
    fn new(frequencies: &[f32], positions: impl Iterator<Item = usize>) -> candle_core::Result<Self> {
        let angles = positions.flat_map(|position| frequencies.iter().map(move |f| f64::from(position as f32 * f)));
        let (mut sin, mut cos) = (Vec::new(), Vec::new());
        for angle in angles {
            sin.push(angle.sin() as f32);
            cos.push(angle.cos() as f32);
        }
        let shape = (sin.len() / frequencies.len().max(1), frequencies.len());
        Ok(Self { cos: Tensor::from_vec(cos, shape, &Device::Cpu)?, sin: Tensor::from_vec(sin, shape, &Device::Cpu)? })
    }

    /// Rotates `[seq, heads * head_dim]`; element `i` of a head goes with element `i + head_dim / 2`.
    fn apply(&self, x: &Tensor, heads: usize, head_dim: usize) -> candle_core::Result<Tensor> {
        let (seq, width) = x.dims2()?;
        let x = x.reshape((1, seq, heads, head_dim))?;
        rope_thd(&x, &self.cos, &self.sin)?.reshape((seq, width))
    }
}

/// Does something with the values of a tensor.
fn with_values<T>(tensor: &Tensor, work: impl FnOnce(&[f32]) -> candle_core::Result<T>) -> candle_core::Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("expected a tensor on the CPU") };
    work(contiguous(storage, layout)?)
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
