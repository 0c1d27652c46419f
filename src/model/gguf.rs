//! Configuration and weights from a GGUF file, under the names and in the row order of the Hugging Face layout.
//!
//! [`super::load`] calls this. Quantised tensors become f32 through candle. In files of the `llama` architecture the
//! query and key rows of a head are stored so that neighbours rotate together; here they are put back, so that one
//! rotation and one layout of keys serve all models.

use candle_core::{
    Device,
    quantized::{GgmlDType, ggml_file::qtensor_from_ggml},
};
use half::{bf16, f16};

use super::{
    config::{Check, ModelConfig, Numbers, RopeScaling},
    error::LoadError,
    weights::TensorSource,
};
use crate::gguf::{ElementType, Gguf, GgufError, TensorEntry};

/// Bytes read at once, so that the raw form of a large tensor is never held whole.
const READ_LEN: usize = 1 << 20;

impl From<GgufError> for LoadError {
    fn from(error: GgufError) -> Self {
        match error {
            GgufError::Unreadable { path, source } => Self::Unreadable { path, source },
            GgufError::Truncated { path, expected, got } => Self::Truncated { path, expected, got },
            GgufError::BadHeader { path, fault } => Self::BadHeader { path, fault },
        }
    }
}

/// The configuration that the metadata describe.
pub(super) fn config(file: &Gguf) -> Result<ModelConfig, LoadError> {
    let check = Check { path: file.path() };
    let architecture = file.text("general.architecture").ok_or_else(|| check.missing("general.architecture"))?;
    if !["llama", "qwen2"].contains(&architecture) {
        let got = architecture.to_owned();
        return Err(LoadError::UnsupportedArchitecture { path: file.path().to_owned(), got });
    }
    let key = |name: &str| format!("{architecture}.{name}");
    let number = |name: &str| file.unsigned(&key(name));
    let need = |name: &str| number(name).ok_or_else(|| check.missing(&key(name)));
    let shape = |name: &str| {
        let missing = || LoadError::MissingTensor { path: file.path().to_owned(), name: name.to_owned() };
        file.tensor(name).map(|tensor| tensor.shape.clone()).ok_or_else(missing)
    };
    if let Some(experts) = number("expert_count").filter(|n| *n > 0) {
        return Err(check.unsupported(format!("expert_count {experts}")));
    }
    let context = need("context_length")?;
    if let Some(window) = number("attention.sliding_window").filter(|window| (1..context).contains(window)) {
        return Err(check.unsupported(format!("attention.sliding_window {window}")));
    }
    let hidden_size = need("embedding_length")?;
    let n_heads = need("attention.head_count")?;
    let head_dim = number("attention.key_length").or_else(|| hidden_size.checked_div(n_heads));
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let (Some(other), Some(head_dim)) = (number(name), head_dim)
            && other != head_dim
        {
            return Err(check.unsupported(format!("{} {other} with heads of {head_dim}", key(name))));
        }
    }
    let ends = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"];
    let has = |name: &str| file.tensor(name).is_some();
    check.finish(Numbers {
        hidden_size,
        intermediate_size: need("feed_forward_length")?,
        n_layers: need("block_count")?,
        n_heads,
        n_kv_heads: number("attention.head_count_kv").unwrap_or(n_heads),
        head_dim: number("attention.key_length"),
        vocab_size: shape("token_embd.weight")?.first().copied().unwrap_or(0) as u64,
        max_position: context,
        norm_eps: file
            .float(&key("attention.layer_norm_rms_epsilon"))
            .ok_or_else(|| check.missing(&key("attention.layer_norm_rms_epsilon")))?,
        rope_theta: file.float(&key("rope.freq_base")).unwrap_or(10_000.0),
        rope_scaling: scaling(file, architecture, check)?,
        qkv_bias: has("blk.0.attn_q.bias"),
        output_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_gate.bias"),
        tied: !has("output.weight"),
        bos: file.unsigned("tokenizer.ggml.bos_token_id"),
        eos: ends.iter().filter_map(|key| file.unsigned(key)).collect(),
    })
}

fn scaling(file: &Gguf, architecture: &str, check: Check<'_>) -> Result<RopeScaling, LoadError> {
    if let Some(entry) = file.tensor("rope_freqs.weight") {
        let shape = entry.shape.clone();
        return Ok(RopeScaling::Factors(GgufSource { file }.values("rope_freqs.weight", entry, &shape)?));
    }
    let key = format!("{architecture}.rope.scaling.factor");
    let linear = file.float(&key);
    match file.text(&format!("{architecture}.rope.scaling.type")) {
        None | Some("none") => {}
        Some("linear") => return Ok(RopeScaling::Linear(linear.ok_or_else(|| check.missing(&key))?)),
        Some(kind) => return Err(check.unsupported(format!("rope.scaling.type {kind:?}"))),
    }
    let old = file.float(&format!("{architecture}.rope.scale_linear"));
    Ok(old.map_or(RopeScaling::None, RopeScaling::Linear))
}

/// The tensors of a GGUF file.
#[derive(Debug)]
pub(super) struct GgufSource<'a> {
    file: &'a Gguf,
}

/// The tensors of a GGUF file for a configuration, which says how long a head is.
#[derive(Debug)]
pub(super) struct GgufWeights<'a> {
    source: GgufSource<'a>,
    /// Width of a head if query and key rows have to be put back.
    interleaved: Option<usize>,
}

impl<'a> GgufWeights<'a> {
    pub(super) fn new(file: &'a Gguf, config: &ModelConfig) -> Self {
        let interleaved = (file.text("general.architecture") == Some("llama")).then_some(config.head_dim);
        Self { source: GgufSource { file }, interleaved }
    }
}

impl TensorSource for GgufWeights<'_> {
    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let file = self.source.file;
        let stored = stored_name(name);
        let missing = || LoadError::MissingTensor { path: file.path().to_owned(), name: stored.clone() };
        let entry = file.tensor(&stored).ok_or_else(missing)?;
        let values = self.source.values(&stored, entry, shape)?;
        match self.interleaved {
            Some(head_dim) if name.contains(".q_proj.") || name.contains(".k_proj.") => {
                Ok(halves(&values, head_dim, shape.get(1).copied().unwrap_or(1)))
            }
            _ => Ok(values),
        }
    }
}

impl GgufSource<'_> {
    fn values(&self, name: &str, entry: &TensorEntry, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let (path, named) = (self.file.path().to_owned(), name.to_owned());
        if entry.shape != shape {
            return Err(LoadError::WrongShape {
                path,
                name: named,
                expected: shape.to_vec(),
                got: entry.shape.clone(),
            });
        }
        let Some((block, block_len)) = entry.element_type.block() else {
            let expected = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or a k-quant";
            return Err(LoadError::WrongType { path, name: named, expected, got: format!("{:?}", entry.element_type) });
        };
        let bad = |error: candle_core::Error| LoadError::BadTensor {
            path: path.clone(),
            name: named.clone(),
            fault: error.to_string(),
        };
        let mut values = Vec::with_capacity(shape.iter().product());
        let step = READ_LEN as u64 / block_len * block_len;
        let mut buffer = vec![0; step.min(entry.byte_len) as usize];
        let mut done = 0;
        while done < entry.byte_len {
            let len = step.min(entry.byte_len - done);
            let bytes = &mut buffer[..len as usize];
            self.file.read_exact_at(bytes, entry.offset + done)?;
            let elements = (len / block_len * block) as usize;
            dequantise(entry.element_type, bytes, elements, &mut values).map_err(bad)?;
            done += len;
        }
        Ok(values)
    }
}

/// Adds the values of whole blocks.
fn dequantise(element_type: ElementType, bytes: &[u8], elements: usize, out: &mut Vec<f32>) -> candle_core::Result<()> {
    let quantised = match element_type {
        ElementType::F32 => {
            out.extend(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)));
            return Ok(());
        }
        ElementType::F16 => {
            out.extend(bytes.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()));
            return Ok(());
        }
        ElementType::BF16 => {
            out.extend(bytes.as_chunks().0.iter().map(|value| bf16::from_le_bytes(*value).to_f32()));
            return Ok(());
        }
        ElementType::Q4_0 => GgmlDType::Q4_0,
        ElementType::Q4_1 => GgmlDType::Q4_1,
        ElementType::Q5_0 => GgmlDType::Q5_0,
        ElementType::Q5_1 => GgmlDType::Q5_1,
        ElementType::Q8_0 => GgmlDType::Q8_0,
        ElementType::Q2K => GgmlDType::Q2K,
        ElementType::Q3K => GgmlDType::Q3K,
        ElementType::Q4K => GgmlDType::Q4K,
        ElementType::Q5K => GgmlDType::Q5K,
        ElementType::Q6K => GgmlDType::Q6K,
        ElementType::Unknown(number) => candle_core::bail!("element type {number}"),
    };
    let tensor = qtensor_from_ggml(quantised, bytes, vec![elements], &Device::Cpu)?.dequantize(&Device::Cpu)?;
    out.extend_from_slice(&tensor.to_vec1::<f32>()?);
    Ok(())
}

/// The name of a tensor in GGUF files.
fn stored_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".to_owned(),
        "model.norm.weight" => return "output_norm.weight".to_owned(),
        "lm_head.weight" => return "output.weight".to_owned(),
        _ => {}
    }
    let parts = [
        ("model.layers.", "blk."),
        (".input_layernorm.", ".attn_norm."),
        (".post_attention_layernorm.", ".ffn_norm."),
        (".self_attn.q_proj.", ".attn_q."),
        (".self_attn.k_proj.", ".attn_k."),
        (".self_attn.v_proj.", ".attn_v."),
        (".self_attn.o_proj.", ".attn_output."),
        (".mlp.gate_proj.", ".ffn_gate."),
        (".mlp.up_proj.", ".ffn_up."),
        (".mlp.down_proj.", ".ffn_down."),
    ];
    parts.iter().fold(name.to_owned(), |name, (ours, theirs)| name.replace(ours, theirs))
}

/// Puts the rows of each head from the order 0, h, 1, h + 1, … (h half a head) into the order 0, 1, ….
fn halves(values: &[f32], head_dim: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks(head_dim * cols) {
        for parity in 0..2 {
            head.chunks(cols).skip(parity).step_by(2).for_each(|row| out.extend_from_slice(row));
        }
    }
    out
}
