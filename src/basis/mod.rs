//! PCA bases: the files, the set that a station serves with, and how bases are fitted.
//!
//! [`mod@file`] reads a basis file once into memory that nobody can change; [`registry`] holds those that are loaded, with
//! their [`methodologies`], and swaps the whole set on a reload. [`fit`] makes bases from the [`residuals`] of a model, and
//! [`evaluate`] says how good they are. The byte format and the arithmetic are in `aeon_proto`; what a request may do with
//! a basis is the station's business.

pub mod atomic;
mod decompose;
pub mod evaluate;
pub mod file;
pub mod fit;
pub mod metadata;
pub mod methodologies;
pub mod pca;
pub mod quantiser;
pub mod registry;
pub mod residuals;
mod sealed;

pub use file::{BasisFile, Boundary, OpenError};
pub use fit::fit_pca;
pub use pca::{PcaBases, PcaBasis, read_pca_bases, write_pca_bases};
pub use registry::{BasisSet, LookupError, Registry};
