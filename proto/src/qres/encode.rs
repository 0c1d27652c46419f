//! Residuals to bodies: which positions are escaped, then the rows.

use alloc::vec::Vec;

use super::{
    DecodeError, F32_ESCAPES, Format, HEADER_LEN, Header, I8_BLOCK, Parts, TAG,
    codebook::Codebook,
    half,
    rotation::Rotation,
    rows::{self, Job, Path},
};
use crate::residual::NonFinite;

/// Why residuals cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum EncodeError {
    /// NaN or infinity.
    #[error(transparent)]
    NonFinite(#[from] NonFinite),
    /// Fields that no reader would take.
    #[error("qres header: {0}")]
    Header(DecodeError),
    /// No whole number of positions, or none.
    #[error("{got} values are no whole positive number of positions of {d}")]
    Shape {
        /// Values given.
        got: usize,
        /// Values of a position.
        d: usize,
    },
    /// A mean or rotation of another width or seed, one too many, or one missing.
    #[error("the mean or rotation given is not the one that the qres header names")]
    Parts,
}

/// Appends a body to `out`. `residuals` is `[seq, d]`; `escape` says of a position and its values whether it must be
/// escaped (see [`is_outlier`]). A position whose numbers the format cannot hold is escaped in any case, and as f32 if f16
/// cannot hold them either; one such escape makes all of the body f32.
///
/// # Errors
/// See [`EncodeError`]; `out` is unchanged then.
pub fn encode(
    header: &Header,
    parts: &Parts<'_>,
    residuals: &[f32],
    escape: impl FnMut(usize, &[f32]) -> bool,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    encode_by(Path::detect(), header, parts, residuals, escape, out)
}

pub(super) fn encode_by(
    path: Path,
    header: &Header,
    parts: &Parts<'_>,
    residuals: &[f32],
    escape: impl FnMut(usize, &[f32]) -> bool,
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    header.check().map_err(EncodeError::Header)?;
    let d = header.hidden_dim as usize;
    if !parts.fit(header) {
        return Err(EncodeError::Parts);
    }
    let shape = EncodeError::Shape { got: residuals.len(), d };
    if residuals.is_empty() || !residuals.len().is_multiple_of(d) {
        return Err(shape);
    }
    let seq = u32::try_from(residuals.chunks_exact(d).len()).map_err(|_| shape)?;
    crate::residual::check_finite_values(residuals)?;
    path.run(Encode { header, parts, residuals, seq, escape, out });
    Ok(())
}

/// Bytes of a body whose escapes are f16.
#[must_use]
pub const fn encoded_len(format: Format, d: usize, seq: usize, escaped: usize) -> usize {
    let plain = format.position_len(d).saturating_mul(seq.saturating_sub(escaped));
    let escaped = d.saturating_mul(2).saturating_mul(escaped);
    HEADER_LEN.saturating_add(seq.div_ceil(8)).saturating_add(plain).saturating_add(escaped)
}

/// The Euclidean norm of a position, its squares summed in the order of a projection.
#[must_use]
pub fn norm(row: &[f32]) -> f32 {
    libm::sqrtf(rows::sum_of_squares(row))
}

/// Whether a position must be escaped by its norm: it is over four times the `median` of ordinary positions.
///
/// Such positions (attention sinks) are what all later ones look at: coded badly, they spoil the answers to all of them.
/// The first position of a session is one in every model that was measured, and is escaped whatever its norm.
#[must_use]
pub fn is_outlier(row: &[f32], median: f32) -> bool {
    norm(row) > 4.0 * median
}

/// What is known of a position before anything is written.
#[derive(Clone, Copy)]
struct Plan {
    is_escaped: bool,
    gain: u16,
}

struct Encode<'a, E> {
    header: &'a Header,
    parts: &'a Parts<'a>,
    residuals: &'a [f32],
    seq: u32,
    escape: E,
    out: &'a mut Vec<u8>,
}

impl<E: FnMut(usize, &[f32]) -> bool> Job for Encode<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { header, parts, residuals, seq, mut escape, out } = self;
        let d = header.hidden_dim as usize;
        let mut centred = Vec::with_capacity(d);
        let mut plans = Vec::with_capacity(seq as usize);
        let mut are_whole = false;
        for (position, row) in residuals.chunks_exact(d).enumerate() {
            let mut gain = 0;
            let fits = match header.format {
                Format::F16 => rows::fits_halves(row),
                Format::I8 => row.chunks(I8_BLOCK).all(|block| half::is_finite(rows::i8_scale(block))),
                Format::Rotated(_) => {
                    rows::centre(parts.mean, row, &mut centred);
                    gain = rows::gain(&centred);
                    // Then no value is over 65,520 times the root of d, and no sum of the rotation overflows.
                    half::is_finite(gain)
                }
            };
            let is_escaped = escape(position, row) || !fits;
            are_whole |= is_escaped && !rows::fits_halves(row);
            plans.push(Plan { is_escaped, gain });
        }

        out.extend_from_slice(&TAG);
        for word in [header.boundary, header.hidden_dim, seq, header.basis_fp, header.methodology] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let (format, bits) = header.format.codes();
        out.extend_from_slice(&[format, bits]);
        out.extend_from_slice(&if are_whole { F32_ESCAPES } else { 0 }.to_le_bytes());
        out.extend_from_slice(&header.seed.to_le_bytes());
        for eight in plans.chunks(8) {
            out.push(eight.iter().rev().fold(0, |byte, plan| byte << 1 | u8::from(plan.is_escaped)));
        }
        let book = match header.format {
            Format::Rotated(bits) => Codebook::of(bits),
            Format::F16 | Format::I8 => None,
        };
        let mut scratch = parts.rotation.map(Rotation::scratch).unwrap_or_default();
        let is_single = plans.len() == 1;
        for (row, plan) in residuals.chunks_exact(d).zip(&plans) {
            match (plan.is_escaped, header.format, book, parts.rotation) {
                (true, ..) if are_whole => crate::residual::encode_f32s(row, out),
                (true, ..) | (_, Format::F16, ..) => rows::write_halves(row, out),
                (_, Format::I8, ..) => rows::write_i8(row, out),
                (_, Format::Rotated(_), Some(book), Some(rotation)) => {
                    if !is_single {
                        rows::centre(parts.mean, row, &mut centred);
                    }
                    rows::write_rotated(&mut centred, plan.gain, book, rotation, &mut scratch, out);
                }
                (_, Format::Rotated(_), ..) => {}
            }
        }
    }
}
