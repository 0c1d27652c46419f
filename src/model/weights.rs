//! The tensors of a layer range, whatever file they come from: which ones are needed, in which shapes, and the
//! fingerprint of what was read. [`super::load`] calls this; the files are [`super::safetensors`] and [`super::gguf`].

use std::{ops::Range, sync::Arc};

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor, WithDType};

use super::{
    attention::contiguous,
    config::{ModelConfig, short_hex},
    error::LoadError,
    matrix::Matrix,
};

/// Where tensors are read from, by the names of the Hugging Face layout.
pub(super) trait TensorSource {
    /// The values of a tensor, row-major, if it has this shape.
    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError>;
}

/// A projection with or without bias.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Matrix,
    pub(super) bias: Option<Vec<f32>>,
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let mut out = self.weight.multiply(contiguous(storage, layout)?);
        let rows = self.weight.rows();
        if let Some(bias) = &self.bias {
            for out in out.chunks_mut(rows) {
                out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
            }
        }
        let seq = out.len() / rows;
        Ok((f32::to_cpu_storage_owned(out), Shape::from((seq, rows))))
    }
}

/// What one layer holds.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) input_norm: Tensor,
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    pub(super) output: Linear,
    pub(super) mlp_norm: Tensor,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// Final norm and head.
#[derive(Debug)]
pub(super) struct HeadWeights {
    pub(super) norm: Tensor,
    pub(super) matrix: Arc<Matrix>,
}

/// What a layer range holds.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) layers: Vec<LayerWeights>,
    /// With layer 0.
    pub(super) embedding: Option<Arc<Matrix>>,
    /// With the last layer.
    pub(super) head: Option<HeadWeights>,
    /// BLAKE3-128 over names, shapes and values of all of it.
    pub(super) fingerprint: String,
}

impl Weights {
    /// Reads what the layers `lo..hi` need, and nothing else.
    pub(super) fn load(
        config: &ModelConfig,
        layers: Range<u32>,
        source: &mut dyn TensorSource,
    ) -> Result<Self, LoadError> {
        let Range { start: lo, end: hi } = layers;
        if lo >= hi || hi > config.n_layers {
            return Err(LoadError::LayersOutside { lo, hi, n_layers: config.n_layers });
        }
        let mut reader = Reader { source, hasher: blake3::Hasher::new() };
        let has_head = hi == config.n_layers;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let mut embedding = None;
        if lo == 0 || (has_head && config.tied) {
            embedding = Some(Arc::new(reader.matrix("model.embed_tokens.weight", vocab, hidden)?));
        }
        let held = (lo..hi).map(|layer| reader.layer(config, layer)).collect::<Result<Vec<_>, _>>()?;
        let mut head = None;
        if has_head {
            let norm = reader.norm("model.norm.weight", hidden)?;
            let matrix = match &embedding {
                Some(embedding) if config.tied => embedding.clone(),
                _ => Arc::new(reader.matrix("lm_head.weight", vocab, hidden)?),
            };
            head = Some(HeadWeights { norm, matrix });
        }
        let fingerprint = short_hex(&reader.hasher.finalize());
        Ok(Self { layers: held, embedding: embedding.filter(|_| lo == 0), head, fingerprint })
    }
}

/// Reads tensors and hashes them on the way.
struct Reader<'a> {
    source: &'a mut dyn TensorSource,
    hasher: blake3::Hasher,
}

impl Reader<'_> {
    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let values = self.source.read(name, shape)?;
        self.hasher.update(name.as_bytes());
        self.hasher.update(&[0, shape.len() as u8]);
        for size in shape {
            self.hasher.update(&(*size as u64).to_le_bytes());
        }
        for value in values.chunks(1 << 14) {
            let bytes: Vec<u8> = value.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.hasher.update(&bytes);
        }
        Ok(values)
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<Tensor, LoadError> {
        let values = self.values(name, &[len])?;
        Tensor::from_vec(values, len, &Device::Cpu).map_err(|error| LoadError::BadTensor {
            path: Default::default(),
            name: name.to_owned(),
            fault: error.to_string(),
        })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        Ok(Matrix::pack(&self.values(name, &[rows, cols])?, rows, cols))
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear, LoadError> {
        let weight = self.matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = bias.then(|| self.values(&format!("{name}.bias"), &[rows])).transpose()?;
        Ok(Linear { weight, bias })
    }

    fn layer(&mut self, config: &ModelConfig, layer: u32) -> Result<LayerWeights, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
        let (qkv_bias, mlp_bias) = (config.qkv_bias, config.mlp_bias);
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        Ok(LayerWeights {
            input_norm: self.norm(&name("input_layernorm.weight"), hidden)?,
            query: self.linear(&name("self_attn.q_proj"), q_dim, hidden, qkv_bias)?,
            key: self.linear(&name("self_attn.k_proj"), kv_dim, hidden, qkv_bias)?,
            value: self.linear(&name("self_attn.v_proj"), kv_dim, hidden, qkv_bias)?,
            output: self.linear(&name("self_attn.o_proj"), hidden, q_dim, config.output_bias)?,
            mlp_norm: self.norm(&name("post_attention_layernorm.weight"), hidden)?,
            gate: self.linear(&name("mlp.gate_proj"), inner, hidden, mlp_bias)?,
            up: self.linear(&name("mlp.up_proj"), inner, hidden, mlp_bias)?,
            down: self.linear(&name("mlp.down_proj"), hidden, inner, mlp_bias)?,
        })
    }
}
