//! Bases as matrices: those of a file, in place ([`PcaBasis`]), and those that a fit made, to be written ([`PcaBases`]).
//!
//! Shapes follow `proto/SPEC.md`, "PCAB": mean `[d]`, components `[k, d]` with one component a row, variance `[k + 1]`
//! with the total last.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use aeon_proto::pcab::{self, Pcab, PcabWriter};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2};

use super::{
    atomic::{WriteFileError, write_atomically},
    file::{BasisFile, OpenError},
};

/// The bases of a file, as ndarray views.
#[derive(Debug, Clone)]
pub struct PcaBasis {
    file: Arc<BasisFile>,
}

/// The basis of one boundary.
#[derive(Debug, Clone, Copy)]
pub struct PcaLayer<'a> {
    /// The mean residual, `[d]`.
    pub mean: ArrayView1<'a, f32>,
    /// The components, `[k, d]`, one a row, by descending variance.
    pub components: ArrayView2<'a, f32>,
    /// The variance of each component, then the total: `[k + 1]`.
    pub variance: ArrayView1<'a, f32>,
}

impl PcaBasis {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        BasisFile::open(path).map(Self::from)
    }

    /// The basis of a boundary (the number of layers already applied), if the file has one.
    #[must_use]
    pub fn layer(&self, boundary: u32) -> Option<PcaLayer<'_>> {
        let part = self.file.boundary(boundary)?;
        Some(PcaLayer {
            mean: ArrayView1::from(part.mean),
            components: ArrayView2::from_shape((part.k, part.mean.len()), part.basis).ok()?,
            variance: ArrayView1::from(part.variance),
        })
    }

    /// The file.
    #[must_use]
    pub const fn file(&self) -> &Arc<BasisFile> {
        &self.file
    }
}

impl From<BasisFile> for PcaBasis {
    fn from(file: BasisFile) -> Self {
        Self { file: Arc::new(file) }
    }
}

impl From<Arc<BasisFile>> for PcaBasis {
    fn from(file: Arc<BasisFile>) -> Self {
        Self { file }
    }
}

/// Bases to be written, or read to be changed.
#[derive(Debug, Clone, PartialEq)]
pub struct PcaBases {
    /// Values of a residual.
    pub hidden_dim: u32,
    /// Id of the methodology spec.
    pub methodology: u32,
    /// The metadata section, a JSON object; see [`super::metadata::Metadata`].
    pub metadata: String,
    /// One for each boundary, in increasing order.
    pub layers: Vec<FittedLayer>,
}

/// The basis of one boundary, owned.
#[derive(Debug, Clone, PartialEq)]
pub struct FittedLayer {
    /// The number of layers already applied.
    pub boundary: u32,
    /// The mean residual, `[d]`.
    pub mean: Array1<f32>,
    /// The components, `[k, d]`. Boundaries that share one `Arc` share it in the file too.
    pub components: Arc<Array2<f32>>,
    /// The variance of each component, then the total: `[k + 1]`.
    pub variance: Array1<f32>,
}

/// A basis file that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// FNV-1a 32 of its bytes.
    pub basis_fp: u32,
    /// BLAKE3 of its bytes.
    pub blake3: blake3::Hash,
    /// Its length.
    pub len: usize,
}

/// Why bases were not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// They do not fit together.
    #[error("{path}: the bases do not make a file")]
    Layout {
        /// The file to be.
        path: PathBuf,
        /// What does not fit.
        source: pcab::WriteError,
    },
    /// Nobody would load the result.
    #[error("{path}: the bases are not valid")]
    Invalid {
        /// The file to be.
        path: PathBuf,
        /// What is wrong with them.
        source: pcab::VerifyError,
    },
    /// The file system.
    #[error(transparent)]
    File(#[from] WriteFileError),
}

/// Reads all bases of a file into memory of its own.
///
/// # Errors
/// See [`OpenError`].
pub fn read_pca_bases(path: &Path) -> Result<PcaBases, OpenError> {
    let basis = PcaBasis::open(path)?;
    let file = basis.file();
    let mut layers: Vec<FittedLayer> = Vec::new();
    let mut shared: std::collections::HashMap<u64, Arc<Array2<f32>>> = std::collections::HashMap::new();
    for part in file.boundaries() {
        let Some(layer) = basis.layer(part.boundary) else { continue };
        let components = match shared.get(&part.basis_offset) {
            Some(components) if part.k > 0 => Arc::clone(components),
            _ => Arc::new(layer.components.to_owned()),
        };
        shared.insert(part.basis_offset, Arc::clone(&components));
        let (mean, variance) = (layer.mean.to_owned(), layer.variance.to_owned());
        layers.push(FittedLayer { boundary: part.boundary, mean, components, variance });
    }
    Ok(PcaBases {
        hidden_dim: file.hidden_dim(),
        methodology: file.methodology(),
        metadata: file.metadata_text().to_owned(),
        layers,
    })
}

/// Writes bases to a file, which appears whole or not at all. The same bases always give the same bytes.
///
/// # Errors
/// See [`WriteError`]; nothing that [`BasisFile::open`] would refuse is written.
pub fn write_pca_bases(path: &Path, bases: &PcaBases) -> Result<Written, WriteError> {
    let bytes = encode_pca_bases(path, bases)?;
    write_atomically(path, &bytes)?;
    let basis_fp = aeon_proto::hash::fnv1a32(&bytes);
    Ok(Written { basis_fp, blake3: blake3::hash(&bytes), len: bytes.len() })
}

/// The bytes of a basis file; `path` is for errors only.
///
/// # Errors
/// [`WriteError::Layout`], [`WriteError::Invalid`].
pub fn encode_pca_bases(path: &Path, bases: &PcaBases) -> Result<Vec<u8>, WriteError> {
    let bytes = encode(bases).map_err(|source| WriteError::Layout { path: path.to_owned(), source })?;
    // What the writer lays out, the reader opens; only the numbers can be wrong.
    if let Ok(pcab) = Pcab::open(&bytes) {
        pcab.verify().map_err(|source| WriteError::Invalid { path: path.to_owned(), source })?;
    }
    Ok(bytes)
}

fn encode(bases: &PcaBases) -> Result<Vec<u8>, pcab::WriteError> {
    let mut writer = PcabWriter::new(bases.hidden_dim, bases.methodology);
    // Owned layers may have any strides in theory; the usual ones borrow.
    let contiguous: Vec<_> = bases
        .layers
        .iter()
        .map(|layer| (layer.mean.as_standard_layout(), layer.components.as_standard_layout(), layer.variance.to_vec()))
        .collect();
    for (index, (layer, (mean, components, variance))) in bases.layers.iter().zip(&contiguous).enumerate() {
        let (mean, components) = (mean.as_slice().unwrap_or_default(), components.as_slice().unwrap_or_default());
        let earlier = bases.layers.iter().take(index);
        let owner = earlier.clone().find(|earlier| Arc::ptr_eq(&earlier.components, &layer.components));
        match owner {
            Some(owner) if layer.components.nrows() > 0 => {
                writer.shared_entry(layer.boundary, mean, owner.boundary, variance)?;
            }
            _ => writer.entry(layer.boundary, mean, components, variance)?,
        }
    }
    writer.finish(&bases.metadata)
}
