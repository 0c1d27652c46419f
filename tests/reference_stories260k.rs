//! The transformer backend against stored outputs of an independent implementation of a real model.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use aeon_station::{
    model::{
        Cache, CancelToken, Head, HeadOutput, LayerRange,
        head::argmax,
        load::{load_transformer, transformer_from_bytes},
        transformer::Transformer,
    },
    text::tokenizer::Tokenizer,
};
use safetensors::SafeTensors;
use serde::Deserialize;

/// Largest difference in a residual or logit; two independent implementations differ by 2e-5.
const TOLERANCE: f32 = 1e-4;
const LAYERS: u32 = 5;
/// Positions whose residuals are stored.
const STORED: usize = 16;

fn model_dir() -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/models/stories260K");
    if !dir.exists() {
        eprintln!("skipped: {} is not there", dir.display());
        return None;
    }
    Some(dir)
}

#[derive(Deserialize)]
struct Reference {
    #[serde(rename = "cases")]
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    #[serde(rename = "prompt")]
    text: String,
    #[serde(rename = "prompt_ids")]
    ids: Vec<u32>,
    continuation_ids: Vec<u32>,
    continuation_text: String,
}

struct Stored {
    prompts: Vec<Prompt>,
    tensors: HashMap<String, Vec<f32>>,
}

impl Stored {
    fn read(dir: &Path) -> Self {
        let reference: Reference = serde_json::from_slice(&std::fs::read(dir.join("reference.json")).unwrap()).unwrap();
        let bytes = std::fs::read(dir.join("reference.safetensors")).unwrap();
        let mut tensors = HashMap::new();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            if tensor.dtype() == safetensors::Dtype::F32 {
                let values = tensor.data().as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
                tensors.insert(name, values);
            }
        }
        Self { prompts: reference.prompts, tensors }
    }
}

fn assert_near(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= TOLERANCE, "{what}: off by {worst}");
}

/// A model in parts, each with its cache.
struct Mesh {
    parts: Vec<(Transformer, Box<dyn Cache>)>,
}

impl Mesh {
    fn new(dir: &Path, bounds: &[u32]) -> Self {
        let parts = bounds.windows(2).map(|bounds| {
            let part = load_transformer(dir, Some(bounds[0]..bounds[1])).unwrap();
            let cache = part.new_cache();
            (part, cache)
        });
        Self { parts: parts.collect() }
    }

    fn reset(&mut self) {
        self.parts.iter_mut().for_each(|(_, cache)| cache.truncate(0));
    }

    fn embed(&self, ids: &[u32]) -> Vec<f32> {
        self.parts[0].0.embed(ids).unwrap()
    }

    /// The residuals at every boundary of a part, the embeddings first.
    fn forward(&mut self, ids: &[u32]) -> Vec<(u32, Vec<f32>)> {
        let mut residuals = self.embed(ids);
        let mut out = vec![(0, residuals.clone())];
        for (part, cache) in &mut self.parts {
            residuals = part.forward(cache.as_mut(), residuals, &CancelToken::default()).unwrap();
            out.push((part.info().layers.end, residuals.clone()));
        }
        out
    }

    fn logits(&self, residuals: &[f32]) -> Vec<f32> {
        let (part, _) = self.parts.last().unwrap();
        match part.head(residuals, Head::Logits, &CancelToken::default()).unwrap() {
            HeadOutput::Logits(logits) => logits,
            other => panic!("{other:?}"),
        }
    }
}

/// The model whole, in two and in five.
const SPLITS: [&[u32]; 3] = [&[0, LAYERS], &[0, 2, LAYERS], &[0, 1, 2, 3, 4, LAYERS]];

#[test]
fn residuals_and_logits_at_every_boundary() {
    let Some(dir) = model_dir() else { return };
    let stored = Stored::read(&dir);
    for bounds in SPLITS {
        let mut mesh = Mesh::new(&dir, bounds);
        for (index, prompt) in stored.prompts.iter().enumerate() {
            let ids: Vec<u32> = prompt.ids.iter().chain(&prompt.continuation_ids).copied().take(STORED).collect();
            let residuals = &stored.tensors[&format!("prompt{index}.residuals")];
            let hidden = residuals.len() / STORED / (LAYERS as usize + 1);
            let mut whole = Vec::new();
            for step in [ids.len(), 4, 1] {
                mesh.reset();
                let mut joined: Vec<(u32, Vec<f32>)> = Vec::new();
                for ids in ids.chunks(step) {
                    let part = mesh.forward(ids);
                    if joined.is_empty() {
                        joined = part;
                    } else {
                        joined.iter_mut().zip(part).for_each(|(joined, part)| joined.1.extend(part.1));
                    }
                }
                for (boundary, got) in &joined {
                    let expected = &residuals[*boundary as usize * STORED * hidden..][..got.len()];
                    assert_near(got, expected, &format!("prompt {index}, boundary {boundary}, {step} at a time"));
                }
                let logits = mesh.logits(&joined.last().unwrap().1);
                let expected = &stored.tensors[&format!("prompt{index}.logits16")];
                assert_near(&logits, &expected[..logits.len()], &format!("logits of prompt {index}"));
                // However the prompt is cut, the bits are the same.
                joined.push((LAYERS + 1, logits));
                let bits: Vec<u32> = joined.iter().flat_map(|(_, values)| values.iter().map(|v| v.to_bits())).collect();
                if whole.is_empty() {
                    whole = bits;
                } else {
                    assert!(whole == bits, "other bits for prompt {index}, {step} at a time");
                }
            }
        }
    }
}

#[test]
fn greedy_continuations() {
    let Some(dir) = model_dir() else { return };
    let stored = Stored::read(&dir);
    let tokenizer = Tokenizer::from_path(&dir).unwrap();
    for bounds in SPLITS {
        let mut mesh = Mesh::new(&dir, bounds);
        for (index, prompt) in stored.prompts.iter().enumerate() {
            let step_logits = &stored.tensors[&format!("prompt{index}.step_logits")];
            let vocab = step_logits.len() / prompt.continuation_ids.len();
            mesh.reset();
            assert_eq!(tokenizer.encode(&prompt.text, true).unwrap(), prompt.ids);
            let mut ids = prompt.ids.clone();
            let mut continuation = Vec::new();
            for expected in step_logits.chunks(vocab) {
                let (_, residuals) = mesh.forward(&ids).pop().unwrap();
                let last = &residuals[residuals.len() - residuals.len() / ids.len()..];
                let logits = mesh.logits(last);
                assert_near(&logits, expected, &format!("step {} of prompt {index}", continuation.len()));
                continuation.push(argmax(&logits));
                ids = vec![argmax(&logits)];
            }
            assert_eq!(continuation, prompt.continuation_ids);
            let mut decoder = tokenizer.decoder();
            let mut text = String::new();
            for id in prompt.ids.iter().chain(&continuation) {
                text.push_str(&decoder.push(*id));
            }
            text.push_str(&decoder.finish());
            assert!(text.ends_with(&prompt.continuation_text), "{text:?} ends in {:?}", prompt.continuation_text);
        }
    }
}

#[test]
fn parts_agree_on_the_model() {
    let Some(dir) = model_dir() else { return };
    let whole = load_transformer(&dir, None).unwrap();
    let info = whole.info().clone();
    assert_eq!((info.hidden_dim, info.vocab, info.n_layers, info.layers), (64, 512, 5, 0..5));
    assert_eq!((info.bos, info.eos, info.name.as_str()), (Some(1), vec![2], "stories260K"));
    let part = load_transformer(&dir, Some(2..4)).unwrap();
    assert_eq!(part.info().config_fp, info.config_fp);
    assert_ne!(part.info().layers_fp, info.layers_fp);
    let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let weights = std::fs::read(dir.join("model.safetensors")).unwrap();
    let embedded = transformer_from_bytes("demo", &config, &weights, None).unwrap();
    assert_eq!(embedded.info().config_fp, info.config_fp);
    assert_eq!(embedded.info().layers_fp, info.layers_fp);
}
