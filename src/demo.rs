//! The demo model that is part of the program: a small Llama trained on Shakespeare's plays (`bases/demo`).

use std::ops::Range;

use crate::{
    model::{error::LoadError, load::transformer_from_bytes, transformer::Transformer},
    text::tokenizer::{TextError, Tokenizer},
};

const CONFIG: &str = include_str!("../bases/demo/config.json");
const WEIGHTS: &[u8] = include_bytes!("../bases/demo/model.safetensors");
const TOKENIZER: &[u8] = include_bytes!("../bases/demo/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../bases/demo/tokenizer_config.json");

/// The model's name.
pub const NAME: &str = "demo";

/// Loads layers of the demo model; all of them if none are named.
///
/// # Errors
/// [`LoadError::Layers`](LoadError) if the range is not in the model.
pub fn load(layers: Option<Range<u32>>) -> Result<Transformer, LoadError> {
    transformer_from_bytes(NAME, CONFIG, WEIGHTS, layers)
}

/// The demo model's tokenizer.
///
/// # Errors
/// Only if the program was built with damaged files.
pub fn tokenizer() -> Result<Tokenizer, TextError> {
    Tokenizer::from_bytes(TOKENIZER, Some(TOKENIZER_CONFIG))
}
