//! Residuals to QRES bodies and back, with the mean of a basis: what stations and clients share.
//!
//! Which positions are escaped is the sender's decision. Here it is: the first position of a session, and every position
//! whose norm is over four times the median at this boundary. The median is that of the basis's metadata; without one, that
//! of the latest positions of the session at this boundary, those of the same body included ([`Norms`]). So a repeated
//! request is answered by the same bytes.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use aeon_proto::qres::{self, EncodeError, Format, HEADER_LEN, Header, Parts, QresBody, ReadError, Rotation};

use super::BasisFile;

/// Norms that a session's own median is taken from. More would follow a change of text more slowly.
const MAX_NORMS: usize = 128;
/// Rotations that are kept. Senders of this program use one for each boundary; others may use any.
const MAX_ROTATIONS: usize = 32;

/// Quantises residuals at one boundary, or reads bodies that were quantised in the same way.
#[derive(Debug, Clone)]
pub struct Quantiser {
    header: Header,
    basis: Option<Arc<BasisFile>>,
    rotation: Option<Arc<Rotation>>,
}

impl Quantiser {
    /// For residuals of width `hidden_dim` at a boundary. Formats that take no mean off leave the basis aside. The seed of
    /// a rotation is the boundary.
    ///
    /// `None` if the basis does not have the boundary, or is of another width.
    #[must_use]
    pub fn new(format: Format, boundary: u32, hidden_dim: u32, basis: Option<Arc<BasisFile>>) -> Option<Self> {
        let basis = basis.filter(|_| format.is_rotated());
        let header = Header {
            boundary,
            hidden_dim,
            basis_fp: basis.as_ref().map_or(0, |basis| basis.basis_fp()),
            methodology: basis.as_ref().map_or(0, |basis| basis.methodology()),
            format,
            seed: if format.is_rotated() { boundary } else { 0 },
        };
        Self::of(header, basis)
    }

    /// For bodies with this header; `basis` is the one that it names, `None` if it names none.
    ///
    /// `None` if the basis does not have the boundary, is of another width, or is not the one named.
    #[must_use]
    pub fn of(header: Header, basis: Option<Arc<BasisFile>>) -> Option<Self> {
        let fits = match &basis {
            Some(basis) => basis.basis_fp() == header.basis_fp && basis.hidden_dim() == header.hidden_dim,
            None => header.basis_fp == 0,
        };
        if !fits || basis.as_ref().is_some_and(|basis| basis.boundary(header.boundary).is_none()) {
            return None;
        }
        let rotation = match header.format.is_rotated() {
            true => Some(rotation(header.hidden_dim as usize, header.seed)?),
            false => None,
        };
        Some(Self { header, basis, rotation })
    }

    /// What all its bodies say of themselves.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// The basis whose mean is taken off.
    #[must_use]
    pub const fn basis(&self) -> Option<&Arc<BasisFile>> {
        self.basis.as_ref()
    }

    /// Bytes of a body of `seq` positions at most: all of them may be escaped, as f32.
    #[must_use]
    pub const fn max_len(&self, seq: usize) -> usize {
        max_len(self.header.hidden_dim as usize, seq)
    }

    fn parts(&self) -> Parts<'_> {
        let part = self.basis.as_ref().and_then(|basis| basis.boundary(self.header.boundary));
        Parts { mean: part.map(|part| part.mean), rotation: self.rotation.as_deref() }
    }

    /// Appends the body of residuals `[seq, d]` to `out`. `begin` is the first one's position in its session, `None` if
    /// they have no place in one; `norms` are those of the session at this boundary, and take in these.
    ///
    /// # Errors
    /// See [`EncodeError`].
    pub fn encode(
        &self,
        residuals: &[f32],
        begin: Option<usize>,
        norms: &mut Norms,
        out: &mut Vec<u8>,
    ) -> Result<(), EncodeError> {
        let d = self.header.hidden_dim as usize;
        let stored = self.basis.as_ref().and_then(|basis| basis.median_norm(self.header.boundary));
        let median = match stored {
            Some(median) => Some(median),
            None => {
                norms.note(begin.unwrap_or(1), residuals.chunks_exact(d).map(qres::norm));
                norms.median()
            }
        };
        let escape = |position: usize, row: &[f32]| {
            begin.is_some_and(|begin| begin + position == 0)
                || median.is_some_and(|median| qres::is_outlier(row, median))
        };
        qres::encode(&self.header, &self.parts(), residuals, escape, out)
    }

    /// Residuals `[seq, d]` of a body with this header. They can be infinite, by the mean.
    ///
    /// # Errors
    /// See [`ReadError`]; among them is that the body has another header.
    pub fn decode(&self, body: &QresBody<'_>) -> Result<Vec<f32>, ReadError> {
        let mut residuals = vec![0.0; body.seq() * self.header.hidden_dim as usize];
        body.read(&self.parts(), &mut residuals)?;
        Ok(residuals)
    }
}

/// Bytes of a QRES body of `seq` positions of width `d` at most.
#[must_use]
pub const fn max_len(d: usize, seq: usize) -> usize {
    HEADER_LEN.saturating_add(seq.div_ceil(8)).saturating_add(seq.saturating_mul(d).saturating_mul(4))
}

/// The rotation of a width from a seed. It takes about as long to make as to use, so the latest are kept.
fn rotation(d: usize, seed: u32) -> Option<Arc<Rotation>> {
    static ROTATIONS: Mutex<VecDeque<Arc<Rotation>>> = Mutex::new(VecDeque::new());
    let is_it = |rotation: &&Arc<Rotation>| rotation.width() == d && rotation.seed() == seed;
    let known = || ROTATIONS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(rotation) = known().iter().find(is_it) {
        return Some(Arc::clone(rotation));
    }
    let rotation = Arc::new(Rotation::new(d, seed)?);
    let mut known = known();
    if known.len() >= MAX_ROTATIONS {
        known.pop_front();
    }
    known.push_back(Arc::clone(&rotation));
    Some(rotation)
}

/// The latest norms of a session's positions at one boundary. The first position is left out: it is no measure of the
/// others.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Norms(VecDeque<(usize, f32)>);

impl Norms {
    /// Takes in the norms of the positions from `begin` on, in place of what was noted of them.
    pub fn note(&mut self, begin: usize, norms: impl IntoIterator<Item = f32>) {
        self.truncate(begin);
        self.0.extend((begin..).zip(norms).filter(|(position, _)| *position > 0));
        let surplus = self.0.len().saturating_sub(MAX_NORMS);
        self.0.drain(..surplus);
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        while self.0.back().is_some_and(|(position, _)| *position >= len) {
            self.0.pop_back();
        }
    }

    /// The median, the lower one of two; `None` of nothing.
    #[must_use]
    pub fn median(&self) -> Option<f32> {
        let mut norms: Vec<f32> = self.0.iter().map(|(_, norm)| *norm).collect();
        norms.sort_by(f32::total_cmp);
        norms.get(norms.len().saturating_sub(1) / 2).copied()
    }

    /// Memory held, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<(usize, f32)>()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use aeon_proto::pcab::PcabWriter;

    use super::*;

    fn encode(
        quantiser: &Quantiser,
        residuals: &[f32],
        begin: Option<usize>,
        norms: &mut Norms,
    ) -> (Vec<bool>, Vec<u8>) {
        let mut bytes = Vec::new();
        quantiser.encode(residuals, begin, norms, &mut bytes).unwrap();
        let body = QresBody::decode(&bytes).unwrap();
        assert_eq!(body.header(), quantiser.header());
        assert!(bytes.len() <= quantiser.max_len(body.seq()));
        assert_eq!(quantiser.decode(&body).unwrap().len(), residuals.len());
        ((0..body.seq()).map(|position| body.is_escaped(position)).collect(), bytes)
    }

    /// Positions of width 4 with these norms.
    fn rows(norms: &[f32]) -> Vec<f32> {
        norms.iter().flat_map(|norm| [norm / 2.0; 4]).collect()
    }

    fn basis(metadata: &str) -> Arc<BasisFile> {
        let mut writer = PcabWriter::new(4, 7);
        writer.entry(3, &[1.0; 4], &[], &[4.0]).unwrap();
        Arc::new(BasisFile::from_bytes(Path::new("test.pcab"), &writer.finish(metadata).unwrap()).unwrap())
    }

    #[test]
    fn the_first_position_and_outliers_are_escaped() {
        let quantiser = Quantiser::new(Format::Rotated(4), 3, 4, None).unwrap();
        let escaped = |begin, norms: &mut Norms, rows: &[f32]| encode(&quantiser, rows, begin, norms).0;
        let mut norms = Norms::default();
        assert_eq!(escaped(Some(0), &mut norms, &rows(&[1.0, 1.0, 5.0, 1.0])), [true, false, true, false]);
        // One at a time, by the norms before; the first one, large as it may be, is no measure.
        assert_eq!(escaped(Some(4), &mut norms, &rows(&[3.9])), [false]);
        // That one counts from here on: the median is 3.9.
        assert_eq!(escaped(Some(5), &mut norms, &rows(&[15.5])), [false]);
        assert_eq!(escaped(Some(5), &mut norms, &rows(&[15.7])), [true]);
        let before = norms.clone();
        let again = escaped(Some(4), &mut norms, &rows(&[3.9, 15.7]));
        assert_eq!((again, &norms), (vec![false, true], &before));
        // What has no place in a session has no first position.
        assert_eq!(escaped(None, &mut Norms::default(), &rows(&[1.0, 1.0, 9.0])), [false, false, true]);
        assert_eq!(escaped(Some(7), &mut Norms::default(), &rows(&[100.0])), [false]);
    }

    #[test]
    fn the_median_of_the_basis_goes_first() {
        let with = basis(r#"{"boundaries":{"3":{"median_norm":10.0}}}"#);
        let quantiser = Quantiser::new(Format::Rotated(4), 3, 4, Some(Arc::clone(&with))).unwrap();
        let mut norms = Norms::default();
        let (escaped, bytes) = encode(&quantiser, &rows(&[1.0, 1.0, 39.0, 41.0]), Some(9), &mut norms);
        assert_eq!((escaped, norms), (vec![false, false, false, true], Norms::default()));
        assert_eq!(quantiser.header().basis_fp, with.basis_fp());
        // Without it the session's own median is used.
        let without = Quantiser::new(Format::Rotated(4), 3, 4, Some(basis("{}"))).unwrap();
        assert_eq!(encode(&without, &rows(&[1.0, 1.0, 39.0]), Some(9), &mut Norms::default()).0, [false, false, true]);
        // Another header is not read.
        let body = QresBody::decode(&bytes).unwrap();
        let other = Quantiser::new(Format::Rotated(4), 3, 4, None).unwrap();
        assert_eq!(other.decode(&body), Err(ReadError::Parts));
        // Only rotated formats have a mean, and only of the basis's boundaries and width.
        assert_eq!(Quantiser::new(Format::I8, 3, 4, Some(Arc::clone(&with))).unwrap().header().basis_fp, 0);
        assert!(Quantiser::new(Format::Rotated(4), 2, 4, Some(Arc::clone(&with))).is_none());
        assert!(Quantiser::new(Format::Rotated(4), 3, 8, Some(Arc::clone(&with))).is_none());
        assert!(Quantiser::of(Header { basis_fp: 9, ..*quantiser.header() }, Some(with)).is_none());
        assert!(Quantiser::of(*quantiser.header(), None).is_none());
    }

    #[test]
    fn norms_are_the_latest_ones() {
        let mut norms = Norms::default();
        assert_eq!(norms.median(), None);
        norms.note(0, [100.0, 3.0, 1.0, 2.0]);
        assert_eq!(norms.median(), Some(2.0));
        norms.note(2, [5.0]);
        assert_eq!(norms.median(), Some(3.0));
        norms.note(3, (0..1000).map(|_| 7.0));
        assert_eq!((norms.median(), norms.0.len()), (Some(7.0), MAX_NORMS));
        norms.truncate(0);
        assert_eq!(norms.median(), None);
    }
}
