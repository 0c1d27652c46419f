//! GGUF files made here: every element type gives the dequantised weights, and damaged ones their error.

use std::{io::Write, path::Path};

use aeon_station::model::{
    LayerRange,
    error::LoadError,
    load::{load_transformer, transformer_from_bytes},
};
use candle_core::{
    Device, Tensor,
    quantized::{GgmlDType, QTensor, gguf_file},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::json;

use crate::tiny::{Tiny, odd_sizes};

/// Rows as long as the blocks of the k-quants.
fn block_sizes() -> serde_json::Value {
    let mut config = odd_sizes();
    for (key, value) in [
        ("hidden_size", 256),
        ("intermediate_size", 512),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("head_dim", 64),
    ] {
        config[key] = json!(value);
    }
    config
}

fn stored_name(name: &str) -> String {
    let name = name
        .replace("model.layers.", "blk.")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("model.norm", "output_norm")
        .replace("model.embed_tokens", "token_embd")
        .replace("lm_head", "output");
    let parts =
        ["q", "k", "v"].iter().fold(name, |name, p| name.replace(&format!("self_attn.{p}_proj"), &format!("attn_{p}")));
    ["gate", "up", "down"].iter().fold(parts, |name, p| name.replace(&format!("mlp.{p}_proj"), &format!("ffn_{p}")))
}

/// The row order of llama files: pairs that rotate together are neighbours.
fn interleave(values: &[f32], head_dim: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for head in values.chunks(head_dim * cols) {
        for i in 0..head_dim / 2 {
            for row in [i, i + head_dim / 2] {
                out.extend_from_slice(&head[row * cols..][..cols]);
            }
        }
    }
    out
}

/// Writes the model as GGUF and returns the weights that the file stands for.
fn write(tiny: &Tiny, dtype: GgmlDType, path: &Path) -> Tiny {
    let architecture = tiny.config["model_type"].as_str().unwrap().to_owned();
    let mut expected = tiny.clone();
    let mut tensors = Vec::new();
    for (name, (shape, values)) in &tiny.tensors {
        let plain = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu).unwrap();
        let dtype = if shape.len() == 2 { dtype } else { GgmlDType::F32 };
        let dequantised = QTensor::quantize(&plain, dtype).unwrap().dequantize(&Device::Cpu).unwrap();
        expected.tensors.get_mut(name).unwrap().1 = dequantised.flatten_all().unwrap().to_vec1().unwrap();
        let rotated = name.contains("q_proj") || name.contains("k_proj");
        let stored = if architecture == "llama" && rotated {
            interleave(values, tiny.size("head_dim"), shape.get(1).copied().unwrap_or(1))
        } else {
            values.clone()
        };
        let stored = Tensor::from_vec(stored, shape.as_slice(), &Device::Cpu).unwrap();
        tensors.push((stored_name(name), QTensor::quantize(&stored, dtype).unwrap()));
    }
    let number = |key: &str| gguf_file::Value::U32(tiny.size(key) as u32);
    let float = |key: &str| gguf_file::Value::F32(tiny.config[key].as_f64().unwrap() as f32);
    let mut values = vec![
        ("general.architecture".to_owned(), gguf_file::Value::String(architecture.clone())),
        ("tokenizer.ggml.bos_token_id".to_owned(), gguf_file::Value::U32(1)),
        ("tokenizer.ggml.eos_token_id".to_owned(), gguf_file::Value::U32(2)),
        ("tokenizer.ggml.eot_token_id".to_owned(), gguf_file::Value::U32(3)),
    ];
    for (key, value) in [
        ("embedding_length", number("hidden_size")),
        ("feed_forward_length", number("intermediate_size")),
        ("block_count", number("num_hidden_layers")),
        ("attention.head_count", number("num_attention_heads")),
        ("attention.head_count_kv", number("num_key_value_heads")),
        ("context_length", number("max_position_embeddings")),
        ("rope.dimension_count", number("head_dim")),
        ("rope.freq_base", float("rope_theta")),
        ("attention.layer_norm_rms_epsilon", float("rms_norm_eps")),
    ] {
        values.push((format!("{architecture}.{key}"), value));
    }
    let values: Vec<_> = values.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = std::fs::File::create(path).unwrap();
    gguf_file::write(&mut file, &values, &tensors).unwrap();
    expected
}

#[test]
fn every_element_type() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let llama = Tiny::new(block_sizes(), json!({}));
    let untied = Tiny::new(block_sizes(), json!({"tie_word_embeddings": false, "attention_bias": true}));
    let qwen2 = Tiny::new(block_sizes(), json!({"model_type": "qwen2"}));
    use GgmlDType as D;
    let types =
        [D::F32, D::F16, D::BF16, D::Q4_0, D::Q4_1, D::Q5_0, D::Q5_1, D::Q8_0, D::Q2K, D::Q3K, D::Q4K, D::Q5K, D::Q6K];
    let all =
        types.iter().map(|dtype| (&llama, *dtype)).chain([(&untied, D::F32), (&untied, D::Q8_0), (&qwen2, D::Q4K)]);
    for (tiny, dtype) in all {
        let expected = write(tiny, dtype, &path);
        let (from_file, from_bytes) = (load_transformer(&path, None).unwrap(), expected.load(None));
        let what = format!("{dtype:?} {}", tiny.config["model_type"]);
        assert_eq!(from_file.info().layers_fp, from_bytes.info().layers_fp, "{what}");
        assert_eq!(from_file.info().config_fp, from_bytes.info().config_fp, "{what}");
        assert_eq!(from_file.info().eos, from_bytes.info().eos, "{what}");
        let part = load_transformer(&path, Some(1..2)).unwrap();
        assert_eq!(part.info().layers_fp, expected.load(Some(1..2)).info().layers_fp, "{what}");
    }
}

/// A file written by hand.
#[derive(Default)]
struct Raw {
    values: Vec<u8>,
    n_values: u64,
    tensors: Vec<u8>,
    n_tensors: u64,
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

impl Raw {
    fn value(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        text(&mut self.values, key);
        self.values.extend(kind.to_le_bytes());
        self.values.extend(value);
        self.n_values += 1;
        self
    }

    fn number(self, key: &str, value: u32) -> Self {
        self.value(key, 4, &value.to_le_bytes())
    }

    fn text(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.value(key, 8, &bytes)
    }

    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        text(&mut self.tensors, name);
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| self.tensors.extend(dim.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.n_tensors += 1;
        self
    }

    fn bytes(&self, data_len: usize) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(self.n_tensors.to_le_bytes());
        bytes.extend(self.n_values.to_le_bytes());
        bytes.extend(&self.values);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len().next_multiple_of(32) + data_len, 0);
        bytes
    }
}

/// Metadata of a model of 64 × 4 with one layer.
fn described() -> Raw {
    Raw::default()
        .text("general.architecture", "llama")
        .number("llama.embedding_length", 64)
        .number("llama.feed_forward_length", 64)
        .number("llama.block_count", 1)
        .number("llama.attention.head_count", 4)
        .number("llama.context_length", 100)
        .value("llama.attention.layer_norm_rms_epsilon", 6, &1e-5f32.to_le_bytes())
}

fn load_bytes(bytes: &[u8], path: &Path) -> Result<String, LoadError> {
    std::fs::File::create(path).unwrap().write_all(bytes).unwrap();
    load_transformer(path, None).map(|model| model.info().layers_fp.clone())
}

#[test]
fn bad_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.gguf");
    let embedded = || described().tensor("token_embd.weight", &[64, 4], 0, 0);
    let zeros = |kind: u32, len: u64| [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let with_number = |key: &str, value: u32| {
        // The first of two equal keys would win in a careless reader: the whole description is written anew.
        let mut raw = Raw::default().text("general.architecture", "llama");
        for (name, usual) in [
            ("llama.embedding_length", 64),
            ("llama.feed_forward_length", 64),
            ("llama.block_count", 1),
            ("llama.attention.head_count", 4),
            ("llama.context_length", 100),
        ] {
            raw = raw.number(name, if name == key { value } else { usual });
        }
        raw.value("llama.attention.layer_norm_rms_epsilon", 6, &1e-5f32.to_le_bytes())
            .tensor("token_embd.weight", &[64, 4], 0, 0)
            .bytes(1024)
    };
    let mut many = described().bytes(0);
    many[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut long_key = described().bytes(0);
    long_key[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut version = described().bytes(0);
    version[4] = 9;
    let table = [
        (Vec::new(), "Truncated"),
        (b"GGUF".to_vec(), "Truncated"),
        (b"GGML\x03\0\0\0".to_vec(), "BadHeader"),
        (version, "BadHeader"),
        (many, "Truncated"),
        (long_key, "Truncated"),
        (Raw::default().bytes(0), "MissingValue"),
        (Raw::default().text("general.architecture", "gpt2").bytes(0), "UnsupportedArchitecture"),
        (Raw::default().number("general.architecture", 1).bytes(0), "MissingValue"),
        (described().bytes(0), "MissingTensor"),
        (embedded().bytes(1024), "MissingTensor"),
        (embedded().bytes(1023), "Truncated"),
        (described().tensor("token_embd.weight", &[64, 4], 0, 1 << 40).bytes(1024), "Truncated"),
        (described().tensor("token_embd.weight", &[64, 4], 0, u64::MAX).bytes(1024), "BadHeader"),
        (described().tensor("token_embd.weight", &[1 << 62, 1 << 62], 0, 0).bytes(1024), "BadHeader"),
        (described().tensor("token_embd.weight", &[63, 4], 8, 0).bytes(1024), "BadHeader"),
        (described().tensor("token_embd.weight", &[1; 5], 0, 0).bytes(1024), "BadHeader"),
        (described().tensor("token_embd.weight", &[32, 8], 0, 0).bytes(1024), "WrongShape"),
        (described().tensor("token_embd.weight", &[64, 4], 19, 0).bytes(1024), "WrongType"),
        (described().tensor("token_embd.weight", &[], 0, 0).bytes(1024), "BadValue"),
        (embedded().tensor("token_embd.weight", &[64, 4], 0, 0).bytes(1024), "BadHeader"),
        (embedded().number("llama.block_count", 2).bytes(1024), "BadHeader"),
        (embedded().number("general.alignment", 0).bytes(1024), "BadHeader"),
        (embedded().number("general.alignment", u32::MAX).bytes(1024), "BadHeader"),
        (embedded().value("x", 9, &zeros(0, u64::MAX)).bytes(1024), "Truncated"),
        (embedded().value("x", 9, &zeros(9, 1)).bytes(1024), "BadHeader"),
        (embedded().value("x", 13, &[0; 8]).bytes(1024), "BadHeader"),
        (with_number("llama.attention.head_count", 0), "BadValue"),
        (with_number("llama.block_count", 0), "BadValue"),
        (with_number("llama.embedding_length", 0), "BadValue"),
        (with_number("llama.context_length", u32::MAX), "BadValue"),
        (embedded().number("llama.expert_count", 8).bytes(1024), "UnsupportedFeature"),
        (embedded().number("llama.rope.dimension_count", 8).bytes(1024), "UnsupportedFeature"),
        (embedded().number("llama.attention.sliding_window", 8).bytes(1024), "UnsupportedFeature"),
        (embedded().text("llama.rope.scaling.type", "yarn").bytes(1024), "UnsupportedFeature"),
        (embedded().tensor("rope_freqs.weight", &[3], 0, 0).bytes(1024), "BadValue"),
        // Factors of zero would divide.
        (embedded().tensor("rope_freqs.weight", &[8], 0, 0).bytes(1024), "BadValue"),
    ];
    for (row, (bytes, expected)) in table.into_iter().enumerate() {
        let error = load_bytes(&bytes, &path).unwrap_err();
        let kind: String = format!("{error:?}").chars().take_while(|c| c.is_alphanumeric()).collect();
        assert_eq!(kind, expected, "row {row}: {error}");
    }
}

#[test]
fn no_damage_causes_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let sizes = json!({"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 8});
    write(&Tiny::new(odd_sizes(), sizes), GgmlDType::Q8_0, &path);
    let good = std::fs::read(&path).unwrap();
    load_transformer(&path, None).unwrap();
    for len in (0..good.len()).step_by(41) {
        assert!(load_bytes(&good[..len], &path).is_err(), "{len}");
    }
    let mut random = StdRng::seed_from_u64(13);
    for _ in 0..1000 {
        let mut bytes = good.clone();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..1200);
            bytes[at] = random.random();
        }
        let _ = load_bytes(&bytes, &path);
    }
}

#[test]
fn both_forms_of_a_real_model_have_one_fingerprint() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/models/stories260K");
    if !dir.exists() {
        eprintln!("skipped: {} is not there", dir.display());
        return;
    }
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let mut tiny = Tiny { config, tensors: Default::default() };
    for (name, tensor) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let values = tensor.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        tiny.tensors.insert(name, (tensor.shape().to_vec(), values));
    }
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("stories.gguf");
    write(&tiny, GgmlDType::F32, &path);
    let (gguf, hf) = (load_transformer(&path, None).unwrap(), load_transformer(&dir, None).unwrap());
    assert_eq!(gguf.info().config_fp, hf.info().config_fp);
    assert_eq!(gguf.info().layers_fp, hf.info().layers_fp);
    let again = transformer_from_bytes("x", &tiny.config.to_string(), &bytes, Some(1..3)).unwrap();
    assert_eq!(again.info().layers_fp, load_transformer(&path, Some(1..3)).unwrap().info().layers_fp);
}
