//! How a model is loaded that lies in files. The daemon calls this once at its start.

use std::{ops::Range, path::Path};

use serde::Deserialize;

use super::{
    config::{ModelConfig, TokenIds},
    error::LoadError,
    gguf::GgufWeights,
    safetensors::{SafeTensors, read_text},
    transformer::Transformer,
};
use crate::gguf::Gguf;

/// Loads layers of a model directory or a GGUF file; all layers if none are named.
///
/// # Errors
/// [`LoadError`].
pub fn load_transformer(path: &Path, layers: Option<Range<u32>>) -> Result<Transformer, LoadError> {
    let metadata = path.metadata().map_err(|source| LoadError::Unreadable { path: path.to_owned(), source })?;
    if metadata.is_file() {
        let file = Gguf::open(path)?;
        let config = super::gguf::config(&file)?;
        let layers = layers.unwrap_or(0..config.n_layers);
        let mut source = GgufWeights::new(&file, &config);
        return Transformer::new(name_of(path), config, layers, &mut source);
    }
    if !path.join("config.json").exists() {
        return Err(LoadError::NotAModel { path: path.to_owned() });
    }
    let config_path = path.join("config.json");
    let mut config = ModelConfig::from_json(&read_text(&config_path)?, &config_path)?;
    let generation = path.join("generation_config.json");
    if generation.exists() {
        let text = read_text(&generation)?;
        let defaults: GenerationConfig =
            serde_json::from_str(&text).map_err(|source| LoadError::BadJson { path: generation, source })?;
        // This file often names more ends of text than `config.json`: the end of a turn, for one.
        let more = defaults.eos_token_id.map(TokenIds::into_vec).unwrap_or_default();
        let in_vocab =
            more.iter().filter_map(|id| u32::try_from(*id).ok().filter(|id| (*id as usize) < config.vocab_size));
        config.eos.extend(in_vocab);
        config.eos.sort_unstable();
        config.eos.dedup();
    }
    let mut source = SafeTensors::open(path)?;
    let layers = layers.unwrap_or(0..config.n_layers);
    Transformer::new(name_of(path), config, layers, &mut source)
}

/// Makes a model of files that are in memory: the text of a `config.json` and the bytes of a `model.safetensors`.
///
/// # Errors
/// [`LoadError`], with `name` in place of the path.
pub fn transformer_from_bytes(
    name: &str,
    config: &str,
    safetensors: &[u8],
    layers: Option<Range<u32>>,
) -> Result<Transformer, LoadError> {
    let config = ModelConfig::from_json(config, &Path::new(name).join("config.json"))?;
    let mut source = SafeTensors::from_bytes(safetensors, &Path::new(name).join("model.safetensors"))?;
    let layers = layers.unwrap_or(0..config.n_layers);
    Transformer::new(name.to_owned(), config, layers, &mut source)
}

/// The last part of a path, as a name for people.
fn name_of(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    name.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

#[derive(Debug, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<TokenIds>,
}
