//! PCA components in place of residuals.
//!
//! The order of the checks is part of the protocol: tag and sizes (400), the basis (412), its methodology (412), the width
//! (400), the boundary (409, then 412 if the basis has none), the number of components (400), finite numbers (422). A
//! request keeps the basis that it was checked against, whatever a reload does meanwhile.

use std::sync::Arc;

use aeon_proto::{
    kernel,
    pcar::{self, PcarBody},
    residual,
};

use super::{Core, error::RequestError};
use crate::{
    basis::BasisFile,
    telemetry::faults::{Fault, fault},
};

/// A basis at one boundary, and how many of its components are used.
#[derive(Debug, Clone)]
pub(super) struct Projection {
    file: Arc<BasisFile>,
    boundary: u32,
    k: usize,
}

impl Projection {
    /// `k` components of a basis that has them.
    pub(super) const fn new(file: Arc<BasisFile>, boundary: u32, k: usize) -> Self {
        Self { file, boundary, k }
    }

    /// The basis.
    pub(super) const fn file(&self) -> &Arc<BasisFile> {
        &self.file
    }

    /// Bytes of one position in this form.
    pub(super) const fn width(&self) -> usize {
        pcar::HEADER_LEN + 4 * self.k
    }

    /// The basis's fingerprint.
    pub(super) fn basis_fp(&self) -> u32 {
        self.file.basis_fp()
    }

    /// Residuals `[seq, d]` from a body that was checked against this basis.
    pub(super) fn lift(&self, body: &[u8], seq: usize) -> Result<Vec<f32>, RequestError> {
        let body = PcarBody::decode(body)?;
        let part = self.file.boundary(self.boundary).ok_or(RequestError::Compute { operation: "basis" })?;
        let mut components = Vec::new();
        body.read_components(&mut components);
        let mut residuals = vec![0.0; seq * part.mean.len()];
        let basis = part.prefix(self.k).unwrap_or_default();
        kernel::lift_batch(part.mean, basis, &components, &mut residuals).map_err(shape_error)?;
        residual::check_finite_values(&residuals)
            .map_err(|error| RequestError::LiftedNonFinite { index: error.index })?;
        Ok(residuals)
    }

    /// The body that stands for residuals `[seq, d]`.
    pub(super) fn compress(&self, residuals: &[f32]) -> Result<Vec<u8>, RequestError> {
        let part = self.file.boundary(self.boundary).ok_or(RequestError::Compute { operation: "basis" })?;
        let seq = residuals.len() / part.mean.len();
        let mut components = vec![0.0; seq * self.k];
        let basis = part.prefix(self.k).unwrap_or_default();
        kernel::project_batch(part.mean, basis, residuals, &mut components).map_err(shape_error)?;
        residual::check_finite_values(&components)
            .map_err(|error| RequestError::ResultNonFinite { index: error.index })?;
        let header = pcar::Header {
            boundary: self.boundary,
            k: self.k as u32,
            hidden_dim: self.file.hidden_dim(),
            methodology: self.file.methodology(),
            basis_fp: self.file.basis_fp(),
        };
        let mut body = Vec::with_capacity(seq * self.width());
        pcar::encode(&header, &components, &mut body).map_err(|error| {
            fault!(ERROR, Fault::Model, %error, "cannot encode components: {error}");
            RequestError::Compute { operation: "encoding components" }
        })?;
        Ok(body)
    }
}

fn shape_error(error: kernel::ShapeError) -> RequestError {
    fault!(ERROR, Fault::Model, %error, "basis and residual do not fit: {error}");
    RequestError::Compute { operation: "projection" }
}

impl Core {
    /// Checks a PCAR body up to its numbers; `expected` is the boundary that the route takes. Returns the positions too.
    pub(super) fn check_pcar(&self, body: &[u8], expected: u32) -> Result<(Projection, usize), RequestError> {
        let body = PcarBody::decode(body)?;
        let seq = body.seq();
        if seq > self.limits.max_positions {
            return Err(RequestError::TooManyPositions { seq, max: self.limits.max_positions });
        }
        let file = self.named_basis(body.basis_fp(), body.methodology())?;
        self.check_width(body.hidden_dim(), Some(&file))?;
        if body.boundary() != expected {
            return Err(RequestError::Boundary { expected, got: body.boundary() });
        }
        let max = file.boundary(expected).map_or(0, |part| part.k);
        if max == 0 {
            return Err(RequestError::BoundaryNotInBasis { boundary: expected });
        }
        let k = body.k() as usize;
        if k > max {
            return Err(RequestError::TooManyComponents { k, max });
        }
        Ok((Projection { file, boundary: expected, k }, seq))
    }
}
