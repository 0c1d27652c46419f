//! Damaged and hostile models in the Hugging Face layout, each with its error.

use std::path::Path;

use aeon_station::model::{
    error::LoadError,
    load::{load_transformer, transformer_from_bytes},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

use crate::tiny::{Tiny, odd_sizes};

/// The name of the variant.
fn kind(error: &LoadError) -> String {
    format!("{error:?}").chars().take_while(|c| c.is_alphanumeric()).collect()
}

#[test]
fn bad_configurations() {
    let tiny = Tiny::new(odd_sizes(), json!({}));
    let weights = tiny.safetensors();
    let table = [
        (json!({"model_type": "mamba"}), "UnsupportedArchitecture"),
        (json!({"model_type": null}), "MissingValue"),
        (json!({"hidden_size": null}), "MissingValue"),
        (json!({"hidden_size": 0}), "BadValue"),
        (json!({"hidden_size": 1u64 << 40}), "BadValue"),
        (json!({"hidden_size": -1}), "BadJson"),
        (json!({"hidden_size": "20"}), "BadJson"),
        (json!({"hidden_size": 21, "head_dim": null}), "BadValue"),
        (json!({"hidden_size": 24}), "WrongShape"),
        (json!({"num_attention_heads": 0}), "BadValue"),
        (json!({"num_key_value_heads": 0}), "BadValue"),
        (json!({"num_key_value_heads": 4}), "BadValue"),
        (json!({"head_dim": 0}), "BadValue"),
        (json!({"head_dim": 9}), "BadValue"),
        (json!({"num_hidden_layers": 0}), "BadValue"),
        (json!({"num_hidden_layers": u64::MAX}), "BadValue"),
        (json!({"num_hidden_layers": 4}), "MissingTensor"),
        (json!({"vocab_size": 0}), "BadValue"),
        (json!({"vocab_size": 38}), "WrongShape"),
        (json!({"max_position_embeddings": 0}), "BadValue"),
        (json!({"rms_norm_eps": 0.0}), "BadValue"),
        (json!({"rms_norm_eps": 1e300}), "BadValue"),
        (json!({"rope_theta": 0.0}), "BadValue"),
        (json!({"rope_theta": -5.0}), "BadValue"),
        (json!({"bos_token_id": 37}), "BadValue"),
        (json!({"eos_token_id": [2, 99]}), "BadValue"),
        (json!({"hidden_act": "gelu"}), "UnsupportedFeature"),
        (json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), "UnsupportedFeature"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "MissingValue"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}), "BadValue"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), "UnsupportedFeature"),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 100}}),
            "BadValue",
        ),
        (json!({"partial_rotary_factor": 0.5}), "UnsupportedFeature"),
        (json!({"sliding_window": 64}), "UnsupportedFeature"),
        (json!({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": true}), "UnsupportedFeature"),
        (json!({"quantization_config": {"bits": 4}}), "UnsupportedFeature"),
        (json!({"tie_word_embeddings": false}), "MissingTensor"),
        (json!({"attention_bias": true}), "MissingTensor"),
    ];
    for (changes, expected) in table {
        let mut config = tiny.config.clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let error = transformer_from_bytes("tiny", &config.to_string(), &weights, None).unwrap_err();
        assert_eq!(kind(&error), expected, "{changes}: {error}");
    }
    for text in ["", "[]", "{", "null", "{\"model_type\":\"llama\",\"model_type\":\"llama\"}", &"[".repeat(100_000)] {
        let error = transformer_from_bytes("tiny", text, &weights, None).unwrap_err();
        assert_eq!(kind(&error), "BadJson", "{error}");
    }
}

/// A file of this header and so many zero bytes.
fn file(header: &Value, data_len: usize) -> Vec<u8> {
    raw_file(&header.to_string(), data_len)
}

fn raw_file(header: &str, data_len: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_len, 0);
    bytes
}

#[test]
fn bad_safetensors() {
    let tiny = Tiny::new(odd_sizes(), json!({}));
    let good = tiny.safetensors();
    let entry = |dtype: &str, shape: Value, from: u64, to: u64| json!({"dtype": dtype, "shape": shape, "data_offsets": [from, to]});
    let one = |entry: Value| json!({"model.embed_tokens.weight": entry});
    let mut longer = good.clone();
    longer.push(0);
    let table = [
        (Vec::new(), "Truncated"),
        (vec![1; 7], "Truncated"),
        (u64::MAX.to_le_bytes().to_vec(), "BadHeader"),
        (100u64.to_le_bytes().to_vec(), "Truncated"),
        (raw_file("not json", 0), "BadHeader"),
        (raw_file(&"[".repeat(100_000), 0), "BadHeader"),
        (raw_file("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4), "BadHeader"),
        (file(&json!({}), 0), "MissingTensor"),
        (file(&json!({"__metadata__": {"format": "pt"}}), 0), "MissingTensor"),
        (file(&one(json!({"dtype": "F32"})), 0), "BadHeader"),
        (file(&one(entry("F32", json!([37, 20]), 0, 2960)), 2959), "Truncated"),
        (file(&one(entry("F32", json!([37, 20]), 0, 2960)), 2961), "BadHeader"),
        (file(&one(entry("F32", json!([37, 20]), 4, 2964)), 2964), "BadTensor"),
        (file(&one(entry("F32", json!([37, 20]), 2960, 0)), 2960), "BadTensor"),
        (file(&one(entry("F32", json!([37, 20]), 0, u64::MAX)), 2960), "BadTensor"),
        (file(&one(entry("F32", json!([37, 21]), 0, 2960)), 2960), "BadTensor"),
        (file(&one(entry("F32", json!([1u64 << 62, 1u64 << 62]), 0, 2960)), 2960), "BadTensor"),
        (file(&one(entry("F32", json!([20, 37]), 0, 2960)), 2960), "WrongShape"),
        (file(&one(entry("F32", json!([740]), 0, 2960)), 2960), "WrongShape"),
        (file(&one(entry("F64", json!([37, 20]), 0, 5920)), 5920), "WrongType"),
        (file(&one(entry("F6_E2M3", json!([37, 20]), 0, 555)), 555), "WrongType"),
        (file(&json!({"a": entry("U8", json!([8]), 0, 8), "b": entry("U8", json!([8]), 4, 12)}), 12), "BadTensor"),
        (good[..good.len() - 1].to_vec(), "Truncated"),
        (longer, "BadHeader"),
    ];
    for (number, (bytes, expected)) in table.into_iter().enumerate() {
        let error = transformer_from_bytes("tiny", &tiny.config.to_string(), &bytes, None).unwrap_err();
        assert_eq!(kind(&error), expected, "row {number}: {error}");
    }
    for (lo, hi) in [(0, 4), (3, 3), (2, 1), (5, 9)] {
        let error = transformer_from_bytes("tiny", &tiny.config.to_string(), &good, Some(lo..hi)).unwrap_err();
        assert_eq!(kind(&error), "LayersOutside", "{error}");
    }
}

#[test]
fn no_damage_causes_a_panic() {
    let tiny = Tiny::new(odd_sizes(), json!({"num_hidden_layers": 1}));
    let (config, weights) = (tiny.config.to_string(), tiny.safetensors());
    let header_len = 2000.min(weights.len());
    let mut random = StdRng::seed_from_u64(11);
    for _ in 0..2000 {
        let mut config = config.clone().into_bytes();
        let mut weights = weights.clone();
        let target = if random.random() { &mut config } else { &mut weights };
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..target.len().min(header_len));
            target[at] = random.random();
        }
        let _ = transformer_from_bytes("tiny", &String::from_utf8_lossy(&config), &weights, None);
    }
    for len in (0..weights.len()).step_by(97) {
        assert!(transformer_from_bytes("tiny", &config, &weights[..len], None).is_err());
    }
}

#[test]
fn directories() {
    let tiny = Tiny::new(odd_sizes(), json!({}));
    let dir = tempfile::tempdir().unwrap();
    let load = |path: &Path| load_transformer(path, None);
    assert_eq!(kind(&load(&dir.path().join("absent")).unwrap_err()), "Unreadable");
    assert_eq!(kind(&load(dir.path()).unwrap_err()), "NotAModel");
    std::fs::write(dir.path().join("config.json"), tiny.config.to_string()).unwrap();
    assert_eq!(kind(&load(dir.path()).unwrap_err()), "NotAModel");
    assert_eq!(kind(&load(&dir.path().join("config.json")).unwrap_err()), "BadHeader");

    // In two files with an index, and then the faults that an index can have.
    let (mut first, mut second) = (tiny.clone(), tiny.clone());
    first.tensors.retain(|name, _| !name.contains("layers.2."));
    second.tensors.retain(|name, _| name.contains("layers.2."));
    std::fs::write(dir.path().join("a.safetensors"), first.safetensors()).unwrap();
    std::fs::write(dir.path().join("b.safetensors"), second.safetensors()).unwrap();
    let place = |name: &String| if name.contains("layers.2.") { "b.safetensors" } else { "a.safetensors" };
    let map: serde_json::Map<_, _> = tiny.tensors.keys().map(|name| (name.clone(), json!(place(name)))).collect();
    let write_index = |map: &Value| {
        std::fs::write(dir.path().join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
            .unwrap();
    };
    write_index(&Value::Object(map.clone()));
    let model = load(dir.path()).unwrap();
    let whole = tiny.load(None);
    use aeon_station::model::LayerRange as _;
    assert_eq!(model.info().layers_fp, whole.info().layers_fp);
    for (file, expected) in [
        ("../b.safetensors", "BadValue"),
        ("/etc/passwd", "BadValue"),
        ("", "BadValue"),
        ("absent.safetensors", "Unreadable"),
        ("a.safetensors", "MissingTensor"),
    ] {
        let mut map = map.clone();
        map["model.layers.2.mlp.up_proj.weight"] = json!(file);
        write_index(&Value::Object(map));
        assert_eq!(kind(&load(dir.path()).unwrap_err()), expected, "{file}");
        // A station that does not need the tensor does not open its file.
        load_transformer(dir.path(), Some(0..2)).unwrap();
    }
    std::fs::write(dir.path().join("model.safetensors.index.json"), "{}").unwrap();
    assert_eq!(kind(&load(dir.path()).unwrap_err()), "BadJson");
    std::fs::write(dir.path().join("generation_config.json"), "{\"eos_token_id\": [7, 2, 5000]}").unwrap();
    std::fs::write(dir.path().join("model.safetensors"), tiny.safetensors()).unwrap();
    assert_eq!(load(dir.path()).unwrap().info().eos, [2, 3, 7]);
}

#[test]
fn half_precision() {
    let tiny = Tiny::new(odd_sizes(), json!({}));
    use aeon_station::model::LayerRange as _;
    let rounded = |round: fn(f32) -> (f32, [u8; 2]), dtype| {
        let mut rounded = tiny.clone();
        let mut bytes = Vec::new();
        for (name, (shape, values)) in &mut rounded.tensors {
            let halves: Vec<(f32, [u8; 2])> = values.iter().map(|value| round(*value)).collect();
            *values = halves.iter().map(|half| half.0).collect();
            bytes.push((name.clone(), shape.clone(), halves.iter().flat_map(|half| half.1).collect::<Vec<u8>>()));
        }
        let views = bytes.iter().map(|(name, shape, bytes)| {
            (name, safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
        let file = safetensors::serialize(views, None).unwrap();
        let model = transformer_from_bytes("tiny", &tiny.config.to_string(), &file, None).unwrap();
        assert_eq!(model.info().layers_fp, rounded.load(None).info().layers_fp);
    };
    rounded(|v| (half::f16::from_f32(v).to_f32(), half::f16::from_f32(v).to_le_bytes()), safetensors::Dtype::F16);
    rounded(|v| (half::bf16::from_f32(v).to_f32(), half::bf16::from_f32(v).to_le_bytes()), safetensors::Dtype::BF16);
}
