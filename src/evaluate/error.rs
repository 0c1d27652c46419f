//! Why nothing was evaluated.

use std::path::PathBuf;

use aeon_proto::{kernel::ShapeError, qres, residual::NonFinite};

use crate::{
    basis::{OpenError, fit::FitError, pca::WriteError},
    client::{ClientError, policy::PolicyError},
    model::{ModelError, error::LoadError},
};

/// Why nothing was evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// A cut that is not between two layers.
    #[error("there is no cut at {cut}: a model of {n_layers} layers can be cut at 1 to {}", .n_layers.saturating_sub(1))]
    Cut {
        /// What was asked for.
        cut: u32,
        /// Layers of the model.
        n_layers: u32,
    },
    /// Cuts that are not in increasing order.
    #[error("the cuts {cuts:?} are not in increasing order")]
    CutOrder {
        /// What was asked for.
        cuts: Vec<u32>,
    },
    /// Nothing to send anything over.
    #[error("there is no cut, so that nothing is sent; name cuts between layers, or two stations and more")]
    NoCut,
    /// A backend whose layers are not here.
    #[error("the model {model} has no layers here; name a model directory, a GGUF file, or demo")]
    Unsplittable {
        /// What was named.
        model: String,
    },
    /// Fewer tokens than can be judged.
    #[error("the text has {got} tokens, at least {needed} expected; give more text")]
    TextTooShort {
        /// Tokens there are.
        got: usize,
        /// Tokens there must be.
        needed: usize,
    },
    /// A window that the model has no room for.
    #[error("a context of {got} positions: between {least} and {most} expected for {model}")]
    Context {
        /// What was asked for.
        got: usize,
        /// Least that can be judged.
        least: usize,
        /// Positions of the model, or those whose logits can be held.
        most: usize,
        /// The model.
        model: String,
    },
    /// A token that the model does not have.
    #[error(
        "token {token} of the text is not in the vocabulary of {model}, which has {vocab}; the tokens are of another model"
    )]
    Token {
        /// The token.
        token: u32,
        /// Tokens of the model.
        vocab: usize,
        /// The model.
        model: String,
    },
    /// A file of token windows that cannot be used.
    #[error("{path}: a JSON array of arrays of token ids expected")]
    Windows {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A body that needs a basis, and none has the boundary.
    #[error("{setting} needs a basis for boundary {boundary}; {}", basis_hint(.have))]
    NoBasis {
        /// The body.
        setting: String,
        /// The boundary.
        boundary: u32,
        /// Boundaries of the basis that was given.
        have: Vec<u32>,
    },
    /// A basis of another width.
    #[error("the basis {basis} is for residuals of {got} values, those of {model} have {expected}")]
    BasisWidth {
        /// The file.
        basis: PathBuf,
        /// The model.
        model: String,
        /// Width of the model's residuals.
        expected: usize,
        /// Width of the basis.
        got: usize,
    },
    /// A basis that was fitted to another model.
    #[error(
        "the basis {basis} was fitted to another model (config_fp {got}) than {model} (config_fp {expected}); fit one to it with: aeonctl basis fit"
    )]
    BasisModel {
        /// The file.
        basis: PathBuf,
        /// The model.
        model: String,
        /// Fingerprint of the model's configuration.
        expected: String,
        /// What the basis says.
        got: String,
    },
    /// More components than the basis has.
    #[error("{k} components wanted, the basis has {max} at boundary {boundary}")]
    Components {
        /// Wanted.
        k: u32,
        /// In the basis.
        max: usize,
        /// Where.
        boundary: u32,
    },
    /// Residuals to fit to that would take too much memory.
    #[error(
        "{rows} positions at {boundaries} boundaries take {bytes} bytes, at most {max} expected; calibrate with fewer tokens, or in parts with: aeonctl capture-residuals and basis fit"
    )]
    Memory {
        /// Positions.
        rows: usize,
        /// Boundaries.
        boundaries: usize,
        /// What they take.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// The head gave something else than logits.
    #[error("{station} gave {got} logits, {expected} expected")]
    Logits {
        /// Who.
        station: String,
        /// Expected.
        expected: usize,
        /// Came.
        got: usize,
    },
    /// A reply has no room for the logits of one position.
    #[error(
        "the logits of {vocab} tokens do not fit a reply of {station}, which has room for {got}; \
         reach it over uds: or tcp: to evaluate"
    )]
    NoRoom {
        /// The last station.
        station: String,
        /// Tokens of the model.
        vocab: usize,
        /// Logits that fit.
        got: usize,
    },
    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The model could not compute.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A station could not.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Residuals that the codec cannot send.
    #[error("sending boundary {boundary} as {setting}")]
    Codec {
        /// The body.
        setting: String,
        /// The boundary.
        boundary: u32,
        /// Why.
        source: CodecError,
    },
    /// Nothing could be fitted.
    #[error(transparent)]
    Fit(#[from] FitError),
    /// The basis that was fitted could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The basis that was fitted could not be used.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Why residuals did not pass through a codec.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// NaN or infinity, before or after.
    #[error(transparent)]
    NonFinite(#[from] NonFinite),
    /// Residuals of another width.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The client's own compression.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The quantised form.
    #[error(transparent)]
    Quantise(#[from] qres::EncodeError),
    /// A body that was just written cannot be read.
    #[error("the body that was written cannot be read")]
    Unreadable(#[source] Box<dyn std::error::Error + Send + Sync>),
}

fn basis_hint(have: &[u32]) -> String {
    match have.is_empty() {
        true => "name one with --basis, or have one made with --calibrate".to_owned(),
        false => format!("the one given has {have:?}; fit one that has it with: aeonctl basis fit --boundaries"),
    }
}
