//! Writing basis files: the one sequence of bytes for given numbers.

use alloc::vec::Vec;

use super::{HEADER_LEN, MAGIC, VERSION, WriteError, align, f32s_len, table_len};
use crate::{json, residual};

/// Collects entries, then writes the file.
///
/// The layout is checked, the numbers are not: [`super::Pcab::verify`] does that with the bytes that come out.
///
/// ```
/// use aeon_proto::pcab::{Pcab, PcabWriter};
/// let mut writer = PcabWriter::new(2, 0x1234_5678);
/// writer.entry(0, &[0.5, 0.5], &[1.0, 0.0], &[4.0, 5.0])?;
/// writer.shared_entry(1, &[0.0, 0.5], 0, &[2.0, 2.5])?;
/// let bytes = writer.finish(r#"{"model":"toy"}"#)?;
/// let file = Pcab::open(&bytes)?;
/// file.verify()?;
/// assert_eq!(*file.at_boundary(1).unwrap().basis(), [1.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct PcabWriter<'a> {
    hidden_dim: u32,
    methodology: u32,
    entries: Vec<Pending<'a>>,
}

#[derive(Debug, Clone, Copy)]
struct Pending<'a> {
    boundary: u32,
    k: u32,
    mean: &'a [f32],
    basis: Basis<'a>,
    variance: &'a [f32],
}

#[derive(Debug, Clone, Copy)]
enum Basis<'a> {
    Own(&'a [f32]),
    /// That of the entry with this index.
    Shared(usize),
}

impl<'a> PcabWriter<'a> {
    /// Starts a file for residuals of `hidden_dim` values.
    #[must_use]
    pub const fn new(hidden_dim: u32, methodology: u32) -> Self {
        Self { hidden_dim, methodology, entries: Vec::new() }
    }

    /// Adds a boundary with a basis of its own: `mean` is `[d]`, `basis` `[k, d]` row-major, `variance` `[k + 1]`.
    /// Boundaries come in increasing order. An empty basis is legal: mean only.
    ///
    /// # Errors
    /// [`WriteError`] if the boundary or a length does not fit; nothing is added then.
    pub fn entry(
        &mut self,
        boundary: u32,
        mean: &'a [f32],
        basis: &'a [f32],
        variance: &'a [f32],
    ) -> Result<(), WriteError> {
        let hidden_dim = self.hidden_dim;
        let bad_len = WriteError::BasisLen { boundary, hidden_dim, got: basis.len() };
        let Some(d) = usize::try_from(hidden_dim).ok().filter(|d| *d > 0) else {
            return Err(WriteError::ZeroHiddenDim);
        };
        let rows = basis.chunks_exact(d);
        let k = u32::try_from(rows.len()).ok().filter(|k| *k <= hidden_dim && rows.remainder().is_empty());
        self.push(Pending { boundary, k: k.ok_or(bad_len)?, mean, basis: Basis::Own(basis), variance })
    }

    /// Adds a boundary that shares the basis of the earlier boundary `with`.
    ///
    /// # Errors
    /// [`WriteError`] if the boundary or a length does not fit or `with` has no components; nothing is added then.
    pub fn shared_entry(
        &mut self,
        boundary: u32,
        mean: &'a [f32],
        with: u32,
        variance: &'a [f32],
    ) -> Result<(), WriteError> {
        let nothing = WriteError::NothingToShare { boundary, with };
        let index = self.entries.binary_search_by_key(&with, |entry| entry.boundary);
        let Some((index, named)) = index.ok().and_then(|index| Some((index, self.entries.get(index)?))) else {
            return Err(nothing);
        };
        if named.k == 0 {
            return Err(nothing);
        }
        let owner = match named.basis {
            Basis::Own(_) => index,
            Basis::Shared(owner) => owner,
        };
        self.push(Pending { boundary, k: named.k, mean, basis: Basis::Shared(owner), variance })
    }

    fn push(&mut self, entry: Pending<'a>) -> Result<(), WriteError> {
        let boundary = entry.boundary;
        if let Some(last) = self.entries.last().filter(|last| last.boundary >= boundary) {
            return Err(WriteError::BoundaryOrder { previous: last.boundary, got: boundary });
        }
        let expected = usize::try_from(self.hidden_dim).map_err(|_| WriteError::TooLong)?;
        if entry.mean.len() != expected {
            return Err(WriteError::MeanLen { boundary, expected, got: entry.mean.len() });
        }
        let expected = usize::try_from(entry.k).map_err(|_| WriteError::TooLong)?.saturating_add(1);
        if entry.variance.len() != expected {
            return Err(WriteError::VarianceLen { boundary, expected, got: entry.variance.len() });
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Writes the file; `metadata` is a JSON object and is kept as it stands.
    ///
    /// # Errors
    /// [`WriteError::NoEntries`], [`WriteError::Metadata`] or [`WriteError::TooLong`].
    pub fn finish(&self, metadata: &str) -> Result<Vec<u8>, WriteError> {
        json::Object::parse(metadata)?;
        if self.entries.is_empty() {
            return Err(WriteError::NoEntries);
        }
        let entry_count = u32::try_from(self.entries.len()).map_err(|_| WriteError::TooLong)?;
        let mut end = (HEADER_LEN as u64).saturating_add(table_len(entry_count));
        let mut place = |len: Option<u64>| {
            let start = align(end).ok_or(WriteError::TooLong)?;
            end = start.checked_add(len.ok_or(WriteError::TooLong)?).ok_or(WriteError::TooLong)?;
            Ok::<u64, WriteError>(start)
        };
        let mut table: Vec<[u64; 3]> = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            let mean_off = place(f32s_len(1, self.hidden_dim))?;
            let basis_off = match entry.basis {
                Basis::Own(_) => place(f32s_len(entry.k, self.hidden_dim))?,
                Basis::Shared(owner) => table.get(owner).map_or(0, |[_, basis_off, _]| *basis_off),
            };
            table.push([mean_off, basis_off, place(f32s_len(1, entry.k.saturating_add(1)))?]);
        }
        let meta_len = super::len_u64(metadata.len());
        let meta_off = place(Some(meta_len))?;
        let mut out = Vec::new();
        out.try_reserve_exact(usize::try_from(end).map_err(|_| WriteError::TooLong)?)
            .map_err(|_| WriteError::TooLong)?;
        out.extend_from_slice(&MAGIC);
        for field in [VERSION, self.hidden_dim, entry_count, self.methodology, 0] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        for field in [meta_off, meta_len, end, 0, 0] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        for (entry, offsets) in self.entries.iter().zip(&table) {
            out.extend_from_slice(&entry.boundary.to_le_bytes());
            out.extend_from_slice(&entry.k.to_le_bytes());
            for offset in offsets {
                out.extend_from_slice(&offset.to_le_bytes());
            }
        }
        for entry in &self.entries {
            write_section(entry.mean, &mut out);
            if let Basis::Own(basis) = entry.basis {
                write_section(basis, &mut out);
            }
            write_section(entry.variance, &mut out);
        }
        pad(&mut out);
        out.extend_from_slice(metadata.as_bytes());
        Ok(out)
    }
}

fn write_section(values: &[f32], out: &mut Vec<u8>) {
    pad(out);
    residual::encode_f32s(values, out);
}

/// Zeros up to the next multiple of the alignment.
fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(super::ALIGNMENT as usize), 0);
}
