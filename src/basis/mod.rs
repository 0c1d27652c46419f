//! PCA bases: the files, the set that a station serves with, and how bases are fitted.
//!
//! [`file`] reads a basis file once into memory that nobody can change; [`registry`] holds those that are loaded, with
//! their [`methodologies`], and swaps the whole set on a reload. The byte format and the arithmetic are in `aeon_proto`;
//! what a request may do with a basis is the station's business.

pub mod atomic;
pub mod file;
pub mod metadata;
pub mod methodologies;
pub mod pca;
pub mod registry;
mod sealed;

pub use file::{BasisFile, Boundary, OpenError};
pub use pca::{PcaBases, PcaBasis, read_pca_bases, write_pca_bases};
pub use registry::{BasisSet, LookupError, Registry};
