//! Other forms of residuals than f32: what the `_PCA` and `_Q` routes take, and what `accept` may turn an answer into.

use std::sync::Arc;

use aeon_proto::{
    meta::{BodyKind, RequestMeta},
    pcar::PcarBody,
    qres::{Format, QresBody},
    residual,
    route::Route,
};

use super::{Core, error::RequestError, pca::Projection};
use crate::{
    basis::{
        BasisFile, LookupError,
        quantiser::{Norms, Quantiser},
    },
    model::kept::Provenance,
    telemetry::faults::{Fault, fault},
};

/// How a body is read, or an answer written.
#[derive(Debug, Clone)]
pub(super) enum Coding {
    /// As components of a basis.
    Pca(Projection),
    /// As numbers of few bits.
    Quantised(Quantiser),
}

impl Coding {
    /// The body kind.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Pca(_) => "pcar",
            Self::Quantised(quantiser) => quantiser.header().format.name(),
        }
    }

    /// Bytes of `seq` positions at most.
    pub(super) const fn max_len(&self, seq: usize) -> usize {
        match self {
            Self::Pca(projection) => projection.width().saturating_mul(seq),
            Self::Quantised(quantiser) => quantiser.max_len(seq),
        }
    }

    /// What residuals have passed through that were read.
    pub(super) fn provenance(&self) -> Provenance {
        match self {
            Self::Pca(projection) => Provenance::Basis(projection.basis_fp()),
            Self::Quantised(_) => Provenance::Quantised,
        }
    }

    /// Looks for NaN and infinity in a body that was checked otherwise.
    pub(super) fn check_finite(&self, body: &[u8]) -> Result<(), RequestError> {
        match self {
            Self::Pca(_) => {
                PcarBody::decode(body)?.check_finite().map_err(|error| RequestError::NonFinite { index: error.index })
            }
            Self::Quantised(_) => QresBody::decode(body)?
                .check_finite()
                .map_err(|error| RequestError::PositionNonFinite { position: error.position }),
        }
    }

    /// Residuals `[seq, d]` from a body that was checked.
    pub(super) fn lift(&self, body: &[u8], seq: usize) -> Result<Vec<f32>, RequestError> {
        match self {
            Self::Pca(projection) => projection.lift(body, seq),
            Self::Quantised(quantiser) => {
                let residuals = quantiser.decode(&QresBody::decode(body)?).map_err(|error| {
                    fault!(ERROR, Fault::Model, %error, "cannot read a checked body: {error}");
                    RequestError::Compute { operation: "reading a quantised body" }
                })?;
                residual::check_finite_values(&residuals)
                    .map_err(|error| RequestError::LiftedNonFinite { index: error.index })?;
                Ok(residuals)
            }
        }
    }

    /// The body that stands for residuals `[seq, d]`; `begin` and `norms` are for [`Quantiser::encode`].
    pub(super) fn compress(
        &self,
        residuals: &[f32],
        begin: Option<usize>,
        norms: &mut Norms,
    ) -> Result<Vec<u8>, RequestError> {
        match self {
            Self::Pca(projection) => projection.compress(residuals),
            Self::Quantised(quantiser) => {
                let mut body = Vec::new();
                quantiser.encode(residuals, begin, norms, &mut body).map_err(|error| {
                    fault!(ERROR, Fault::Model, %error, "cannot quantise residuals: {error}");
                    RequestError::Compute { operation: "quantising residuals" }
                })?;
                Ok(body)
            }
        }
    }
}

/// Whether the body of a route is coded.
pub(super) const fn is_coded(route: Route) -> bool {
    matches!(route, Route::FORWARD_PCA | Route::LM_HEAD_PCA | Route::FORWARD_Q | Route::LM_HEAD_Q)
}

impl Core {
    /// Checks the body of a coded route up to its numbers; `expected` is the boundary that the route takes. Returns the
    /// positions too.
    pub(super) fn check_coded(
        &self,
        route: Route,
        body: &[u8],
        expected: u32,
    ) -> Result<(Coding, usize), RequestError> {
        if body.is_empty() {
            return Err(RequestError::NoPositions);
        }
        match route {
            Route::FORWARD_Q | Route::LM_HEAD_Q => self.check_qres(body, expected),
            _ => self.check_pcar(body, expected).map(|(projection, seq)| (Coding::Pca(projection), seq)),
        }
    }

    /// The checks of a PCAR body, in their order. Only a body that names a basis can fail those about one.
    fn check_qres(&self, body: &[u8], expected: u32) -> Result<(Coding, usize), RequestError> {
        let body = QresBody::decode(body)?;
        let (header, seq) = (*body.header(), body.seq());
        if seq > self.limits.max_positions {
            return Err(RequestError::TooManyPositions { seq, max: self.limits.max_positions });
        }
        let file = match header.basis_fp {
            0 => None,
            basis_fp => Some(self.named_basis(basis_fp, header.methodology)?),
        };
        self.check_width(header.hidden_dim, file.as_deref())?;
        if header.boundary != expected {
            return Err(RequestError::Boundary { expected, got: header.boundary });
        }
        if file.as_ref().is_some_and(|file| file.boundary(expected).is_none()) {
            return Err(RequestError::BoundaryNotInBasis { boundary: expected });
        }
        let quantiser = Quantiser::of(header, file).ok_or(RequestError::Compute { operation: "basis" })?;
        Ok((Coding::Quantised(quantiser), seq))
    }

    /// The basis that a body names, and whose methodology it must name too.
    pub(super) fn named_basis(&self, basis_fp: u32, methodology: u32) -> Result<Arc<BasisFile>, RequestError> {
        let set = self.bases.current();
        set.find(basis_fp, methodology).map(Arc::clone).map_err(|error| match error {
            LookupError::UnknownBasis { have, .. } => RequestError::UnknownBasis { have },
            LookupError::Methodology { expected, .. } => RequestError::MethodologyMismatch { expected },
        })
    }

    /// Width of body and basis must be the model's.
    pub(super) fn check_width(&self, body: u32, basis: Option<&BasisFile>) -> Result<(), RequestError> {
        let expected = self.model.info().hidden_dim;
        let parts = [("body", Some(body)), ("basis", basis.map(BasisFile::hidden_dim))];
        for (part, got) in parts {
            if let Some(got) = got
                && got as usize != expected
            {
                return Err(RequestError::PcarHiddenDim { part, expected, got });
            }
        }
        Ok(())
    }

    /// How residuals at `boundary` are answered: the first kind of `accept` that can be given. `None` is f32.
    pub(super) fn choose_kind(
        &self,
        meta: &RequestMeta<'_>,
        input: Option<&Coding>,
        boundary: u32,
    ) -> Result<Option<Coding>, RequestError> {
        let Some(kinds) = &meta.accept else { return Ok(None) };
        for kind in kinds {
            let format = match kind {
                BodyKind::F32 => return Ok(None),
                BodyKind::Pcar => {
                    if let Some(projection) = self.output_projection(meta, input, boundary) {
                        return Ok(Some(Coding::Pca(projection)));
                    }
                    continue;
                }
                BodyKind::F16 => Format::F16,
                BodyKind::I8 => Format::I8,
                BodyKind::Q(bits) => Format::Rotated(*bits),
                BodyKind::E(_) => continue,
            };
            if let Some(quantiser) = self.output_quantiser(format, meta, input, boundary) {
                return Ok(Some(Coding::Quantised(quantiser)));
            }
        }
        Err(RequestError::NothingAcceptable)
    }

    /// The first basis that the client can read with and that has the boundary; without a mean if there is none.
    fn output_quantiser(
        &self,
        format: Format,
        meta: &RequestMeta<'_>,
        input: Option<&Coding>,
        boundary: u32,
    ) -> Option<Quantiser> {
        let hidden_dim = u32::try_from(self.model.info().hidden_dim).ok()?;
        let with = |basis| Quantiser::new(format, boundary, hidden_dim, basis);
        let by_basis = match (&meta.accept_basis, input) {
            (Some(fingerprints), _) => {
                let set = self.bases.current();
                fingerprints.iter().find_map(|basis_fp| with(Some(Arc::clone(set.get(*basis_fp)?))))
            }
            (None, Some(Coding::Pca(projection))) => with(Some(Arc::clone(projection.file()))),
            (None, Some(Coding::Quantised(quantiser))) => {
                quantiser.basis().and_then(|basis| with(Some(Arc::clone(basis))))
            }
            (None, None) => None,
        };
        by_basis.or_else(|| with(None))
    }

    fn output_projection(&self, meta: &RequestMeta<'_>, input: Option<&Coding>, boundary: u32) -> Option<Projection> {
        let usable = |file: &Arc<BasisFile>| {
            let max = file.boundary(boundary)?.k;
            let k = meta.accept_k.map_or(max, |k| max.min(k as usize));
            let fits = file.hidden_dim() as usize == self.model.info().hidden_dim;
            (fits && k > 0).then(|| Projection::new(Arc::clone(file), boundary, k))
        };
        match (&meta.accept_basis, input) {
            (Some(fingerprints), _) => {
                let set = self.bases.current();
                fingerprints.iter().find_map(|basis_fp| usable(set.get(*basis_fp)?))
            }
            // The basis of the request, even if it was withdrawn since the request was checked.
            (None, Some(Coding::Pca(projection))) => usable(projection.file()),
            (None, Some(Coding::Quantised(quantiser))) => usable(quantiser.basis()?),
            (None, None) => None,
        }
    }
}
