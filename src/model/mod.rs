//! Model backends: what a station computes.
//!
//! The trait [`LayerRange`] speaks plain data and is synchronous, so no tensor type and no `await` escapes a backend. A
//! backend knows no frame, route or peer; the station calls it from its own worker threads.

mod attention;
pub mod batch;
pub mod config;
pub mod error;
mod gguf;
pub mod head;
pub mod identity;
pub mod kept;
pub mod load;
pub mod matrix;
mod safetensors;
pub mod session;
pub mod spec;
pub mod transformer;
pub mod upstream;
mod weights;
pub mod worker;

use std::{
    any::Any,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use aeon_proto::status::Status;
use batch::{ForwardPart, HeadPart};
pub use head::{Head, HeadOutput};

/// What a model is, and which part of it a backend holds.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// A name for people.
    pub name: String,
    /// Width of a residual, in f32 values.
    pub hidden_dim: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Layers of the whole model.
    pub n_layers: u32,
    /// Layers held here: `lo..hi`, contiguous.
    pub layers: Range<u32>,
    /// Positions that a sequence can have.
    pub max_position: usize,
    /// The token that begins a text, if the model has one.
    pub bos: Option<u32>,
    /// The tokens that end one.
    pub eos: Vec<u32>,
    /// BLAKE3-128 of the canonical configuration as 32 hex digits: the same on every station of a model.
    pub config_fp: String,
    /// BLAKE3-128 of the weights held here as 32 hex digits.
    pub layers_fp: String,
}

impl ModelInfo {
    /// Whether token ids can be embedded here.
    #[must_use]
    pub const fn has_embedding(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether the final norm and the head are here.
    #[must_use]
    pub const fn has_head(&self) -> bool {
        self.layers.end == self.n_layers
    }
}

/// BLAKE3-128 of some bytes as 32 hex digits.
#[must_use]
pub fn fingerprint(bytes: &[u8]) -> String {
    let hash = blake3::hash(bytes);
    hash.as_bytes()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Asks running work to stop; shared between the one who asks and the one who works.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks for the work to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether someone asked. Work asks at every step boundary, which also shows the watchdog that it goes on.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        worker::beat();
        self.0.load(Ordering::Relaxed)
    }
}

/// The positions of one session that a backend remembers (its key-value cache).
pub trait Cache: Any + Send {
    /// Positions held.
    fn len(&self) -> usize;

    /// Whether no position is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets the positions from `len` on; nothing happens if there are not so many.
    fn truncate(&mut self, len: usize);

    /// Memory held, in bytes.
    fn bytes(&self) -> usize;
}

impl std::fmt::Debug for dyn Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("len", &self.len()).field("bytes", &self.bytes()).finish()
    }
}

/// A contiguous range of a model's layers.
///
/// Residuals are f32, row-major `[seq, hidden_dim]`. The caller has checked lengths, token ids and that inputs are finite.
pub trait LayerRange: Send + Sync {
    /// What this is.
    fn info(&self) -> &ModelInfo;

    /// Whether the work is so little that it can be done on an IO thread.
    fn is_inline(&self) -> bool {
        false
    }

    /// A cache with no positions.
    fn new_cache(&self) -> Box<dyn Cache>;

    /// Bytes that one more position adds to a cache.
    fn cache_bytes_per_position(&self) -> usize;

    /// Token ids to residuals `[ids.len(), hidden_dim]`.
    ///
    /// # Errors
    /// [`ModelError::NotHere`] without layer 0.
    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError>;

    /// Runs residuals `[seq, hidden_dim]` through the layers as the positions after those in `cache`, and returns
    /// `[seq, hidden_dim]`. On an error the cache may hold a part of the new positions: the caller truncates it.
    ///
    /// # Errors
    /// [`ModelError::Cancelled`] if `cancel` was raised meanwhile; others by backend.
    fn forward(&self, cache: &mut dyn Cache, residuals: Vec<f32>, cancel: &CancelToken)
    -> Result<Vec<f32>, ModelError>;

    /// Positions of different sequences that this backend computes at once for less than it takes one by one; `None` if
    /// there is nothing to be gained by giving it several.
    fn batch_positions(&self) -> Option<usize> {
        None
    }

    /// As [`Self::forward`], of several sequences: results in the order of the parts, with the bits that each would have
    /// alone. A part that fails or is cancelled does not touch the others.
    ///
    /// # Errors
    /// If the batch fails as a whole. The caches may hold parts of new positions then: the caller truncates them, and may
    /// try each part alone.
    fn forward_batch(&self, parts: Vec<ForwardPart<'_>>) -> Result<Vec<Result<Vec<f32>, ModelError>>, ModelError> {
        Ok(parts.into_iter().map(|part| self.forward(part.cache, part.residuals.to_vec(), part.cancel)).collect())
    }

    /// f32 values that [`LayerRange::export_cache`] gives for each position, all layers together; `None` if the contents
    /// of a cache cannot leave this backend.
    fn exported_per_position(&self) -> Option<usize> {
        None
    }

    /// The first `len` positions of a cache, `[layer][keys, values][position][kv_heads * head_dim]`, keys after the
    /// rotation. A backend that remembers no numbers gives none.
    ///
    /// # Errors
    /// [`ModelError::CacheNotPortable`] unless the backend can; [`ModelError::CacheLen`] if `cache` holds fewer positions.
    fn export_cache(&self, cache: &dyn Cache, len: usize) -> Result<Vec<f32>, ModelError> {
        let _ = (cache, len);
        Err(ModelError::CacheNotPortable)
    }

    /// A fresh cache of `len` positions, from what [`LayerRange::export_cache`] gave.
    ///
    /// # Errors
    /// [`ModelError::CacheNotPortable`] unless the backend can; [`ModelError::CacheLen`] if `values` are not those of `len`
    /// positions; [`ModelError::CacheNonFinite`] for NaN or infinity.
    fn import_cache(&self, len: usize, values: &[f32]) -> Result<Box<dyn Cache>, ModelError> {
        let _ = (len, values);
        Err(ModelError::CacheNotPortable)
    }

    /// Final norm and head on residuals `[seq, hidden_dim]`.
    ///
    /// # Errors
    /// [`ModelError::NotHere`] without the last layer.
    fn head(&self, residuals: &[f32], want: Head, cancel: &CancelToken) -> Result<HeadOutput, ModelError>;

    /// As [`Self::head`], for several requests, in the way of [`Self::forward_batch`].
    ///
    /// # Errors
    /// If the batch fails as a whole.
    fn head_batch(&self, parts: &[HeadPart<'_>]) -> Result<Vec<Result<HeadOutput, ModelError>>, ModelError> {
        Ok(parts.iter().map(|part| self.head(part.residuals, part.want, part.cancel)).collect())
    }
}

impl std::fmt::Debug for dyn LayerRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LayerRange").field(self.info()).finish()
    }
}

/// Why a backend did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The caller withdrew the work.
    #[error("cancelled")]
    Cancelled,
    /// The part that was asked for is on another station.
    #[error("this station holds layers {lo}..{hi} of {n_layers}, so it has no {part}")]
    NotHere {
        /// "embedding" or "head".
        part: &'static str,
        /// First layer held.
        lo: u32,
        /// One past the last layer held.
        hi: u32,
        /// Layers of the model.
        n_layers: u32,
    },
    /// The tensor library failed.
    #[error("{operation}")]
    Compute {
        /// What was being computed.
        operation: &'static str,
        /// The library's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The station behind this one refused.
    #[error("upstream station answered {status}: {text}")]
    Upstream {
        /// Its status.
        status: Status,
        /// Its words.
        text: String,
        /// Where it says that the session goes on.
        expected_pos: Option<usize>,
    },
    /// The station behind this one cannot be reached or does not answer as agreed.
    #[error("upstream station {address}")]
    UpstreamUnreachable {
        /// Where it should be.
        address: String,
        /// What happened.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A cache of another backend was handed in.
    #[error("cache belongs to another backend")]
    ForeignCache,
    /// What this backend remembers cannot be taken out of it or put into it.
    #[error("this backend cannot export or import what its sessions remember")]
    CacheNotPortable,
    /// Cache contents of another length than asked for.
    #[error("cache contents of {got} {unit}, {expected} expected")]
    CacheLen {
        /// What is counted.
        unit: &'static str,
        /// How many there should be.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// Cache contents that no computation gives.
    #[error("value {index} of the cache contents is NaN or infinite")]
    CacheNonFinite {
        /// Which value.
        index: usize,
    },
}
