//! Why a model could not be loaded. Made by [`super::config`], `weights` and the file readers; read by whoever
//! starts a station, so every variant says where the fault is and what was expected there.

use std::path::PathBuf;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There is nothing at the path, or it cannot be read.
    #[error("{path}: cannot read the file (check the path and its permissions)")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The path is neither a model directory nor a GGUF file.
    #[error(
        "{path}: not a model (expected a directory with config.json and model.safetensors or \
         model.safetensors.index.json, or a file *.gguf)"
    )]
    NotAModel {
        /// What was given.
        path: PathBuf,
    },
    /// A file does not begin as its format demands.
    #[error("{path}: bad header: {fault} (the file is damaged or of another format)")]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: String,
    },
    /// A file ends before the data that its header announces.
    #[error("{path}: file is cut short: {expected} bytes announced, {got} there (fetch it again)")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the header asks for.
        expected: u64,
        /// Bytes that the file has.
        got: u64,
    },
    /// `config.json` or another JSON file is not what it should be.
    #[error("{path}: bad JSON")]
    BadJson {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The architecture is not one that this backend computes.
    #[error("{path}: architecture {got:?} is not supported (supported: llama, qwen2)")]
    UnsupportedArchitecture {
        /// The file.
        path: PathBuf,
        /// What the file says.
        got: String,
    },
    /// The model uses something that this backend does not compute.
    #[error("{path}: {feature} is not supported")]
    UnsupportedFeature {
        /// The file.
        path: PathBuf,
        /// The feature and its value.
        feature: String,
    },
    /// A value of the configuration is absent.
    #[error("{path}: {key} is missing")]
    MissingValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A value of the configuration is out of range.
    #[error("{path}: {key} is {got}, expected {expected}")]
    BadValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What would do.
        expected: String,
        /// What is there.
        got: String,
    },
    /// A tensor that this layer range needs is absent.
    #[error("{path}: tensor {name} is missing (the model is incomplete or of another architecture)")]
    MissingTensor {
        /// The file or directory.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor's shape does not fit the configuration.
    #[error("{path}: tensor {name} has shape {got:?}, the configuration asks for {expected:?}")]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// By the configuration.
        expected: Vec<usize>,
        /// In the file.
        got: Vec<usize>,
    },
    /// A tensor's element type is not read.
    #[error("{path}: tensor {name} has element type {got}, expected {expected}")]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Types that are read.
        expected: &'static str,
        /// In the file.
        got: String,
    },
    /// A tensor lies elsewhere than its shape allows, or outside the file.
    #[error("{path}: tensor {name}: {fault}")]
    BadTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong.
        fault: String,
    },
    /// The layers asked for are not in the model.
    #[error("layers {lo}..{hi} are not in the model, which has 0..{n_layers}")]
    LayersOutside {
        /// First layer asked for.
        lo: u32,
        /// One past the last layer asked for.
        hi: u32,
        /// Layers of the model.
        n_layers: u32,
    },
}
