//! Tiny random models in the Hugging Face layout.

use std::collections::BTreeMap;

use aeon_station::model::{load::transformer_from_bytes, transformer::Transformer};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

/// A model whose every number is known to the test.
#[derive(Clone)]
pub(crate) struct Tiny {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// Sizes that share no factor with a vector register.
pub(crate) fn odd_sizes() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 20, "intermediate_size": 23, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 37,
        "max_position_embeddings": 400, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": true,
        "bos_token_id": 1, "eos_token_id": [2, 3],
    })
}

impl Tiny {
    pub(crate) fn new(mut config: Value, changes: Value) -> Self {
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let size = |key: &str| config[key].as_u64().unwrap() as usize;
        let flag = |key: &str| config.get(key).and_then(Value::as_bool).unwrap_or(false);
        let qwen2 = config["model_type"] == "qwen2";
        let (hidden, inner, vocab) = (size("hidden_size"), size("intermediate_size"), size("vocab_size"));
        let q_dim = size("num_attention_heads") * size("head_dim");
        let kv_dim = size("num_key_value_heads") * size("head_dim");
        let mut tiny = Self { config: config.clone(), tensors: BTreeMap::new() };
        let mut random = StdRng::seed_from_u64(7);
        let mut add = |name: String, shape: Vec<usize>, middle: f32| {
            let values = (0..shape.iter().product()).map(|_| middle + random.random_range(-0.5..0.5)).collect();
            tiny.tensors.insert(name, (shape, values));
        };
        add("model.embed_tokens.weight".into(), vec![vocab, hidden], 0.0);
        add("model.norm.weight".into(), vec![hidden], 1.0);
        if !flag("tie_word_embeddings") {
            add("lm_head.weight".into(), vec![vocab, hidden], 0.0);
        }
        for layer in 0..size("num_hidden_layers") {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            add(name("input_layernorm.weight"), vec![hidden], 1.0);
            add(name("post_attention_layernorm.weight"), vec![hidden], 1.0);
            let attention = flag("attention_bias");
            for (part, rows, cols, bias) in [
                ("self_attn.q_proj", q_dim, hidden, qwen2 || attention),
                ("self_attn.k_proj", kv_dim, hidden, qwen2 || attention),
                ("self_attn.v_proj", kv_dim, hidden, qwen2 || attention),
                ("self_attn.o_proj", hidden, q_dim, !qwen2 && attention),
                ("mlp.gate_proj", inner, hidden, flag("mlp_bias")),
                ("mlp.up_proj", inner, hidden, flag("mlp_bias")),
                ("mlp.down_proj", hidden, inner, flag("mlp_bias")),
            ] {
                add(name(&format!("{part}.weight")), vec![rows, cols], 0.0);
                if bias {
                    add(name(&format!("{part}.bias")), vec![rows], 0.0);
                }
            }
        }
        tiny
    }

    pub(crate) fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    pub(crate) fn safetensors(&self) -> Vec<u8> {
        let bytes: Vec<(&String, &Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| (name, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect()))
            .collect();
        let views = bytes
            .iter()
            .map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    pub(crate) fn load(&self, layers: Option<std::ops::Range<u32>>) -> Transformer {
        transformer_from_bytes("tiny", &self.config.to_string(), &self.safetensors(), layers).unwrap()
    }
}
