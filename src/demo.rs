//! The demo model that is part of the program: a small Llama trained on Shakespeare's plays (`bases/demo`).

use std::{ops::Range, path::Path, sync::Arc};

use aeon_proto::methodology::MethodologySpec;

use crate::{
    basis::{
        BasisFile, BasisSet, OpenError,
        methodologies::{Methodologies, Methodology, MethodologyError},
        registry::RegistryError,
    },
    model::{error::LoadError, load::transformer_from_bytes, transformer::Transformer},
    text::tokenizer::{TextError, Tokenizer},
};

const CONFIG: &str = include_str!("../bases/demo/config.json");
const WEIGHTS: &[u8] = include_bytes!("../bases/demo/model.safetensors");
const TOKENIZER: &[u8] = include_bytes!("../bases/demo/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../bases/demo/tokenizer_config.json");

const BASIS: &[u8] = include_bytes!("../bases/demo/demo.pcab");
/// The methodology of the demo model's basis, as its file has it.
pub const METHODOLOGY: &str = include_str!("../bases/methodologies/demo/k64.json");

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

/// The demo model's basis and its methodology, as a set to serve with.
///
/// # Errors
/// Only if the program was built with damaged files.
pub fn bases() -> Result<BasisSet, BasesError> {
    let file = Arc::new(BasisFile::from_bytes(Path::new("demo.pcab"), BASIS)?);
    let spec = MethodologySpec::parse(METHODOLOGY)?;
    let mut methodologies = Methodologies::default();
    methodologies.insert(Methodology { name: "demo/k64".to_owned(), path: "demo/k64.json".into(), spec })?;
    Ok(BasisSet::new(vec![file], methodologies)?)
}

/// Some of the plays that the model has not seen, to measure with.
pub const HELD_OUT: &str = include_str!("../bases/demo/heldout.txt");

/// What can be wrong with the files of the demo's basis.
#[derive(Debug, thiserror::Error)]
pub enum BasesError {
    /// The basis file.
    #[error(transparent)]
    File(#[from] OpenError),
    /// The methodology file.
    #[error(transparent)]
    Spec(#[from] aeon_proto::methodology::Error),
    /// The methodology beside others.
    #[error(transparent)]
    Methodology(#[from] MethodologyError),
    /// The two together.
    #[error(transparent)]
    Set(#[from] RegistryError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::LayerRange;

    #[test]
    fn the_files_in_the_program_belong_together() {
        let info = load(None).unwrap().info().clone();
        let tokenizer = tokenizer().unwrap();
        assert_eq!(tokenizer.vocab(), info.vocab);
        assert!(tokenizer.encode(HELD_OUT, true).unwrap().len() > 256);
        let bases = bases().unwrap();
        let basis = bases.bases().next().unwrap();
        assert_eq!(basis.hidden_dim() as usize, info.hidden_dim);
        assert_eq!(basis.boundaries().count() as u32, info.n_layers + 1);
    }
}
