//! Compressing residuals on the sender's side.

use aeon_proto::{
    kernel::{self, ShapeError},
    pcar::{self, EncodeError},
    residual::{self, NonFinite},
};

use crate::basis::BasisFile;

/// What a sender does to residuals, and what the receiver needs to undo it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompressionPolicy {
    /// Components that are sent.
    pub k_components: u32,
    /// Boundaries that are compressed; residuals at others travel raw.
    pub layer_set: Vec<u32>,
    /// Id of the methodology that the basis was fitted by.
    pub methodology_id: u32,
    /// FNV-1a 32 of the basis file.
    pub basis_fingerprint: u32,
}

/// A residual as components of a basis.
#[derive(Debug, Clone, PartialEq)]
pub struct CompressedResidual {
    /// What the components belong to.
    pub header: pcar::Header,
    /// The components, by descending variance.
    pub components: Vec<f32>,
}

/// Why a residual cannot be compressed or lifted.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The policy or body is for another basis.
    #[error("basis 0x{got:08x} given, 0x{expected:08x} needed")]
    Basis {
        /// By the policy or body.
        expected: u32,
        /// The one given.
        got: u32,
    },
    /// The policy or body is for another methodology.
    #[error("methodology 0x{got:08x} given, 0x{expected:08x} needed")]
    Methodology {
        /// By the policy or body.
        expected: u32,
        /// The one given.
        got: u32,
    },
    /// The policy leaves this boundary raw, or the basis has no components for it.
    #[error("boundary {boundary} is not compressed by this policy and basis")]
    Boundary {
        /// Which one.
        boundary: u32,
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
    /// NaN or infinity, before or after.
    #[error(transparent)]
    NonFinite(#[from] NonFinite),
    /// The residual is of another width.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A body that the format cannot hold.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl CompressionPolicy {
    /// All boundaries of a basis with `k` components each, or with as many as the basis has where that is less.
    #[must_use]
    pub fn of(basis: &BasisFile, k: u32) -> Self {
        Self {
            k_components: k,
            layer_set: basis.boundaries().filter(|part| part.k > 0).map(|part| part.boundary).collect(),
            methodology_id: basis.methodology(),
            basis_fingerprint: basis.basis_fp(),
        }
    }
}

impl CompressedResidual {
    /// Appends the PCAR block.
    ///
    /// # Errors
    /// [`PolicyError::Encode`].
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), PolicyError> {
        pcar::encode(&self.header, &self.components, out)?;
        Ok(())
    }
}

/// Projects residuals `[seq, d]` at a boundary and appends the PCAR blocks to `out`.
///
/// # Errors
/// See [`PolicyError`].
pub fn compress_residuals(
    residuals: &[f32],
    boundary: u32,
    policy: &CompressionPolicy,
    basis: &BasisFile,
    out: &mut Vec<u8>,
) -> Result<(), PolicyError> {
    check(basis, policy.basis_fingerprint, policy.methodology_id)?;
    let part = basis.boundary(boundary).filter(|part| part.k > 0 && policy.layer_set.contains(&boundary));
    let part = part.ok_or(PolicyError::Boundary { boundary })?;
    let k = part.k.min(policy.k_components as usize);
    let basis_rows = part.prefix(k).ok_or(PolicyError::Boundary { boundary })?;
    residual::check_finite_values(residuals)?;
    let width = part.mean.len();
    if residuals.is_empty() || !residuals.len().is_multiple_of(width) {
        // The kernel names the lengths that do not fit.
        return Ok(kernel::project(part.mean, basis_rows, residuals, &mut vec![0.0; k])?);
    }
    let mut components = vec![0.0; residuals.len() / width * k];
    kernel::project_batch(part.mean, basis_rows, residuals, &mut components)?;
    residual::check_finite_values(&components)?;
    let header = pcar::Header {
        boundary,
        k: k as u32,
        hidden_dim: basis.hidden_dim(),
        methodology: basis.methodology(),
        basis_fp: basis.basis_fp(),
    };
    pcar::encode(&header, &components, out)?;
    Ok(())
}

/// Projects one residual `[d]` at boundary `layer` (the number of layers already applied).
///
/// # Errors
/// See [`PolicyError`].
pub fn compress_residual(
    residual: &[f32],
    layer: u32,
    policy: &CompressionPolicy,
    basis: &BasisFile,
) -> Result<CompressedResidual, PolicyError> {
    let mut body = Vec::new();
    compress_residuals(residual, layer, policy, basis, &mut body)?;
    match pcar::PcarBody::decode(&body) {
        Ok(body) => {
            let mut components = Vec::new();
            body.read_components(&mut components);
            Ok(CompressedResidual { header: body.header(), components })
        }
        Err(_) => Err(PolicyError::Boundary { boundary: layer }),
    }
}

/// Lifts a compressed residual at boundary `layer` back to `[d]`.
///
/// # Errors
/// See [`PolicyError`].
pub fn decompress_residual(
    compressed: &CompressedResidual,
    layer: u32,
    basis: &BasisFile,
) -> Result<Vec<f32>, PolicyError> {
    let header = &compressed.header;
    check(basis, header.basis_fp, header.methodology)?;
    let part = basis.boundary(layer).filter(|_| header.boundary == layer);
    let part = part.ok_or(PolicyError::Boundary { boundary: layer })?;
    let rows = part.prefix(compressed.components.len());
    let rows = rows.ok_or(PolicyError::Components { k: header.k, max: part.k, boundary: layer })?;
    residual::check_finite_values(&compressed.components)?;
    let mut residual = vec![0.0; part.mean.len()];
    kernel::lift(part.mean, rows, &compressed.components, &mut residual)?;
    residual::check_finite_values(&residual)?;
    Ok(residual)
}

fn check(basis: &BasisFile, basis_fp: u32, methodology: u32) -> Result<(), PolicyError> {
    if basis.basis_fp() != basis_fp {
        return Err(PolicyError::Basis { expected: basis_fp, got: basis.basis_fp() });
    }
    if basis.methodology() != methodology {
        return Err(PolicyError::Methodology { expected: methodology, got: basis.methodology() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use aeon_proto::pcab::PcabWriter;

    use super::*;

    /// Boundary 2 of width 4: mean 1, components along the first two axes.
    fn basis() -> BasisFile {
        let (mean, rows) = ([1.0; 4], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
        let mut writer = PcabWriter::new(4, 7);
        writer.entry(2, &mean, &rows, &[2.0, 1.0, 4.0]).unwrap();
        BasisFile::from_bytes(Path::new("test.pcab"), &writer.finish("{}").unwrap()).unwrap()
    }

    #[test]
    fn what_the_components_hold_comes_back_and_the_rest_is_the_mean() {
        let basis = basis();
        let policy = CompressionPolicy::of(&basis, 8);
        let compressed = compress_residual(&[3.0, -1.0, 9.0, 9.0], 2, &policy, &basis).unwrap();
        assert_eq!(compressed.components, [2.0, -2.0]);
        assert_eq!(decompress_residual(&compressed, 2, &basis).unwrap(), [3.0, -1.0, 1.0, 1.0]);
        let one = compress_residual(&[3.0, -1.0, 9.0, 9.0], 2, &CompressionPolicy::of(&basis, 1), &basis).unwrap();
        assert_eq!(decompress_residual(&one, 2, &basis).unwrap(), [3.0, 1.0, 1.0, 1.0]);
        let mut body = Vec::new();
        one.encode(&mut body).unwrap();
        assert_eq!(body.len(), 24 + 4);
    }

    #[test]
    fn another_basis_boundary_or_number_is_refused() {
        let basis = basis();
        let policy = CompressionPolicy::of(&basis, 2);
        let compress = |policy: &CompressionPolicy, residual: &[f32], layer| {
            compress_residual(residual, layer, policy, &basis).unwrap_err()
        };
        let other = CompressionPolicy { basis_fingerprint: 1, ..policy.clone() };
        assert!(matches!(compress(&other, &[0.0; 4], 2), PolicyError::Basis { .. }));
        let other = CompressionPolicy { methodology_id: 1, ..policy.clone() };
        assert!(matches!(compress(&other, &[0.0; 4], 2), PolicyError::Methodology { .. }));
        assert!(matches!(compress(&policy, &[0.0; 4], 3), PolicyError::Boundary { boundary: 3 }));
        let other = CompressionPolicy { layer_set: vec![], ..policy.clone() };
        assert!(matches!(compress(&other, &[0.0; 4], 2), PolicyError::Boundary { boundary: 2 }));
        assert!(matches!(compress(&policy, &[0.0; 5], 2), PolicyError::Shape(_)));
        assert!(matches!(compress(&policy, &[0.0, f32::NAN, 0.0, 0.0], 2), PolicyError::NonFinite(_)));
        let mut compressed = compress_residual(&[0.0; 4], 2, &policy, &basis).unwrap();
        compressed.components.push(0.0);
        assert!(matches!(decompress_residual(&compressed, 2, &basis), Err(PolicyError::Components { .. })));
        compressed.components = vec![f32::MAX, f32::INFINITY];
        assert!(matches!(decompress_residual(&compressed, 2, &basis), Err(PolicyError::NonFinite(_))));
    }
}
