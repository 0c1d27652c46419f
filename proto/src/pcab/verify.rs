//! The check that reads every byte: are these numbers a basis?

use alloc::{vec, vec::Vec};

use super::{ENTRY_LEN, Entry, HEADER_LEN, Pcab, Section, VerifyError};
use crate::{kernel, residual};

/// How far the product of two rows may be from 0, and that of a row with itself from 1.
///
/// A basis that was computed in f64 and rounded has products around 1e-7; one from an f32 library around 1e-5.
pub const ORTHONORMAL_TOLERANCE: f32 = 1e-4;

/// How far the parts of the variance may exceed the total, as a share of it: each was rounded to f32 for itself.
pub const TOTAL_TOLERANCE: f64 = 1e-4;

impl Pcab<'_> {
    /// Reads the whole file and checks that it holds what a lift relies on.
    ///
    /// Padding is zero; all numbers are finite; the rows of each basis are orthonormal to [`ORTHONORMAL_TOLERANCE`];
    /// variances are not negative, do not increase (unless the basis is shared: then they are those of one boundary of a
    /// group, in the order of the group) and add up to no more than the total, to [`TOTAL_TOLERANCE`]; the metadata is a
    /// JSON object. Products are taken by [`kernel::project_batch`], so the verdict is the same everywhere.
    ///
    /// Takes `k * k * d / 2` multiplications for each basis. Allocates a mean, `k` products and 8 bytes for each entry, and
    /// a copy of each section in turn where the bytes are not aligned.
    ///
    /// # Errors
    /// See [`VerifyError`]; padding first, then entry by entry, then the metadata.
    pub fn verify(&self) -> Result<(), VerifyError> {
        self.verify_padding()?;
        let mut offsets: Vec<u64> = self.entries().filter(|entry| entry.k > 0).map(|entry| entry.basis_off).collect();
        offsets.sort_unstable();
        let zero_mean = vec![0.0; usize::try_from(self.layout.hidden_dim).unwrap_or_default()];
        let mut highest = 0;
        for (index, entry) in (0..).zip(self.entries()) {
            finite(Section::Mean(index), entry.mean)?;
            finite(Section::Variance(index), entry.variance)?;
            // Bases stand in the order of the entries, so one that was seen is not above the highest.
            if entry.basis_off > highest {
                highest = entry.basis_off;
                finite(Section::Basis(index), entry.basis)?;
                verify_rows(index, &entry, &zero_mean)?;
            }
            let first = offsets.partition_point(|offset| *offset < entry.basis_off);
            let shared = offsets.get(first..).and_then(|rest| rest.get(1)) == Some(&entry.basis_off);
            verify_variance(index, &entry, shared)?;
        }
        self.metadata().map(|_| ())
    }

    fn verify_padding(&self) -> Result<(), VerifyError> {
        let table = usize::try_from(self.layout.entry_count).unwrap_or_default().saturating_mul(ENTRY_LEN);
        let mut end = table.saturating_add(HEADER_LEN);
        let mut highest = 0;
        for entry in self.entries() {
            let own = entry.basis_off > highest;
            highest = highest.max(entry.basis_off);
            for section in [Some(entry.mean), own.then_some(entry.basis), Some(entry.variance)].into_iter().flatten() {
                end = self.padding_after(end)?.saturating_add(section.len());
            }
        }
        self.padding_after(end).map(|_| ())
    }

    /// Checks the bytes from `end` to the next section, and returns where that starts.
    fn padding_after(&self, end: usize) -> Result<usize, VerifyError> {
        let start = end.checked_next_multiple_of(super::ALIGNMENT as usize).unwrap_or(end);
        let padding = self.bytes.get(end..start).unwrap_or_default();
        match (end..).zip(padding).find(|(_, byte)| **byte != 0) {
            Some((offset, got)) => Err(VerifyError::PaddingNotZero { offset: super::len_u64(offset), got: *got }),
            None => Ok(start),
        }
    }
}

fn finite(section: Section, bytes: &[u8]) -> Result<(), VerifyError> {
    residual::check_finite(bytes).map_err(|bad| VerifyError::NonFinite { section, index: bad.index })
}

/// Multiplies each row with itself and with the rows before it.
fn verify_rows(index: u32, entry: &Entry<'_>, zero_mean: &[f32]) -> Result<(), VerifyError> {
    let basis = entry.basis();
    let d = zero_mean.len().max(1);
    let mut products = Vec::new();
    for (row, values) in basis.chunks_exact(d).enumerate() {
        let before = basis.get(..row.saturating_add(1).saturating_mul(d)).unwrap_or_default();
        products.resize(row.saturating_add(1), 0.0_f32);
        // The lengths fit by construction. If they did not, the zeros would be refused as no unit vector.
        let _ = kernel::project(zero_mean, before, values, &mut products);
        for (other, got) in products.iter().copied().enumerate() {
            let expected = if other == row { 1.0 } else { 0.0 };
            // Written so that NaN fails too: products of finite rows can overflow.
            if (got - expected).abs() <= ORTHONORMAL_TOLERANCE {
                continue;
            }
            return Err(if other == row {
                VerifyError::NotUnit { entry: index, row, got }
            } else {
                VerifyError::NotOrthogonal { entry: index, row, other, got }
            });
        }
        products.fill(0.0);
    }
    Ok(())
}

fn verify_variance(index: u32, entry: &Entry<'_>, shared: bool) -> Result<(), VerifyError> {
    let variance = entry.variance();
    if let Some((at, got)) = variance.iter().enumerate().find(|(_, value)| **value < 0.0) {
        return Err(VerifyError::NegativeVariance { entry: index, index: at, got: *got });
    }
    let Some((total, parts)) = variance.split_last() else { return Ok(()) };
    let rise = parts.array_windows().position(|[previous, got]| got > previous);
    if let Some(at) = rise.filter(|_| !shared)
        && let Some([previous, got, ..]) = parts.get(at..)
    {
        let (index, entry) = (at.saturating_add(1), index);
        return Err(VerifyError::VarianceOrder { entry, index, previous: *previous, got: *got });
    }
    let sum: f64 = parts.iter().copied().map(f64::from).sum();
    if sum > f64::from(*total) * (1.0 + TOTAL_TOLERANCE) {
        return Err(VerifyError::TotalTooSmall { entry: index, sum, total: *total });
    }
    Ok(())
}
