//! PCAB: the basis file that both ends of a compressed hop hold. Spec: `proto/SPEC.md`, "PCAB".
//!
//! ```text
//! byte  0         4         8            12            16            20        24         32         40         48
//!       | "PCAB"  | version | hidden_dim | entry_count | methodology | flags   | meta_off | meta_len | file_len | zero |
//!       | tag     | u32 = 1 | u32        | u32         | u32         | u32 = 0 | u64      | u64      | u64      | 16 B |
//!
//! 64 + 32e    +0         +4    +8         +16         +24             for each entry e
//!       | boundary | k   | mean_off | basis_off | variance_off |
//!       | u32      | u32 | u64      | u64       | u64          |
//!
//! then  mean f32[d] · basis f32[k][d] · variance f32[k + 1] of entry 0, of entry 1, …, metadata
//! ```
//!
//! Everything is little-endian. Each section starts at the next multiple of 64 after the one before it, and the bytes
//! between are zero. The file ends with the metadata. So for given numbers and metadata there is exactly one file, and
//! every byte of it is accounted for. The one freedom: an entry may name the basis of an earlier entry with the same `k`
//! instead of having its own.
//!
//! [`Pcab::open`] reads the header and the table, [`Pcab::verify`] everything. The station opens and verifies what it
//! maps at start and reload, and keeps the [`Layout`], from which a view is made again at no cost. This module knows
//! neither files nor fingerprints; the fingerprint of a file is [`crate::hash::fnv1a32`] over all of it.

mod error;
mod verify;
mod write;

use alloc::borrow::Cow;

pub use error::{OpenError, Section, VerifyError, WriteError};
pub use verify::{ORTHONORMAL_TOLERANCE, TOTAL_TOLERANCE};
pub use write::PcabWriter;

use crate::{
    cursor::{Cursor, Truncated},
    json, residual,
};

/// The first four bytes of a file.
pub const MAGIC: [u8; 4] = *b"PCAB";
/// The version that this module reads and writes.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_LEN: usize = 64;
/// Bytes of a table entry.
pub const ENTRY_LEN: usize = 32;
/// Every section starts at a multiple of this: a cache line, and one AVX-512 register.
pub const ALIGNMENT: u64 = 64;

/// Where the header fields and the metadata of a checked file are; what [`Pcab::open`] found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    hidden_dim: u32,
    entry_count: u32,
    methodology: u32,
    meta_off: usize,
    file_len: usize,
}

/// A checked basis file that borrows the bytes.
#[derive(Debug, Clone, Copy)]
pub struct Pcab<'a> {
    bytes: &'a [u8],
    layout: Layout,
}

/// One boundary of a basis file.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    boundary: u32,
    k: u32,
    basis_off: u64,
    mean: &'a [u8],
    basis: &'a [u8],
    variance: &'a [u8],
}

/// A table entry as it stands in the file.
#[derive(Debug, Clone, Copy)]
struct RawEntry {
    boundary: u32,
    k: u32,
    mean_off: u64,
    basis_off: u64,
    variance_off: u64,
}

impl<'a> Pcab<'a> {
    /// Checks the header, the table and every offset. The numbers are not read; [`Self::verify`] does that.
    ///
    /// Allocates nothing. Takes time proportional to the number of entries (times its logarithm where bases are shared).
    ///
    /// # Errors
    /// See [`OpenError`]: the first fault in the order of the header, the table and, for each entry, its sections.
    pub fn open(bytes: &'a [u8]) -> Result<Self, OpenError> {
        let got = len_u64(bytes.len());
        let (mut layout, header) = read_header(bytes)?;
        if header.file_len > got {
            return Err(OpenError::Truncated { needed: header.file_len, got });
        }
        if header.file_len < got {
            return Err(OpenError::TrailingBytes { expected: header.file_len, got });
        }
        let table_end = (HEADER_LEN as u64).saturating_add(table_len(layout.entry_count));
        if table_end > got {
            return Err(OpenError::Truncated { needed: table_end, got });
        }
        layout.file_len = bytes.len();
        let file = Self { bytes, layout };
        let mut walk = Walk { end: table_end, file_len: got };
        let mut previous = None;
        for index in 0..layout.entry_count {
            let Some(raw) = file.raw(index) else { break };
            if let Some(previous) = previous.filter(|previous| *previous >= raw.boundary) {
                return Err(OpenError::BoundaryOrder { entry: index, previous, got: raw.boundary });
            }
            previous = Some(raw.boundary);
            file.check_entry(&mut walk, index, &raw)?;
        }
        walk.section(Section::Metadata, header.meta_off, Some(header.meta_len))?;
        if walk.end != got {
            return Err(OpenError::FileLen { expected: walk.end, got });
        }
        // Not past the end of the bytes, so it fits.
        layout.meta_off = usize::try_from(header.meta_off).unwrap_or(bytes.len());
        Ok(Self { bytes, layout })
    }

    fn check_entry(&self, walk: &mut Walk, index: u32, raw: &RawEntry) -> Result<(), OpenError> {
        let d = self.layout.hidden_dim;
        if raw.k > d {
            return Err(OpenError::TooManyComponents { entry: index, got: raw.k, max: d });
        }
        walk.section(Section::Mean(index), raw.mean_off, f32s_len(1, d))?;
        match self.owner(index, raw.basis_off) {
            Some((owner, expected)) if expected != raw.k => {
                return Err(OpenError::SharedBasisK { entry: index, owner, expected, got: raw.k });
            }
            Some(_) => {}
            None => walk.section(Section::Basis(index), raw.basis_off, f32s_len(raw.k, d))?,
        }
        walk.section(Section::Variance(index), raw.variance_off, f32s_len(1, raw.k.saturating_add(1)))
    }

    /// The entry before `index` that has a basis of its own, with at least one row, at `basis_off`, and its `k`.
    ///
    /// Means stand in the order of the entries, so the owner is the last entry whose mean starts below the basis.
    fn owner(&self, index: u32, basis_off: u64) -> Option<(u32, u32)> {
        let (mut low, mut high) = (0, index);
        while low < high {
            let middle = low.midpoint(high);
            if self.raw(middle)?.mean_off < basis_off {
                low = middle.saturating_add(1);
            } else {
                high = middle;
            }
        }
        let owner = low.checked_sub(1)?;
        let raw = self.raw(owner)?;
        (raw.basis_off == basis_off && raw.k > 0).then_some((owner, raw.k))
    }

    /// Makes the view again from what [`Self::layout`] gave for the same bytes.
    ///
    /// With other bytes nothing worse happens than entries that are missing or hold other numbers.
    #[must_use]
    pub const fn with_layout(bytes: &'a [u8], layout: Layout) -> Self {
        Self { bytes, layout }
    }

    /// What was found out about the file; to be kept beside the bytes.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Values of a residual, at least 1.
    #[must_use]
    pub const fn hidden_dim(&self) -> u32 {
        self.layout.hidden_dim
    }

    /// Number of boundaries, at least 1.
    #[must_use]
    pub const fn entry_count(&self) -> u32 {
        self.layout.entry_count
    }

    /// Id of the methodology spec by which the file was made.
    #[must_use]
    pub const fn methodology(&self) -> u32 {
        self.layout.methodology
    }

    /// The entry with this index, counted from 0 in the order of the file.
    #[must_use]
    pub fn entry(&self, index: u32) -> Option<Entry<'a>> {
        let raw = self.raw(index)?;
        let section = |offset: u64, len: Option<u64>| {
            let start = usize::try_from(offset).ok()?;
            self.bytes.get(start..)?.get(..usize::try_from(len?).ok()?)
        };
        let d = self.layout.hidden_dim;
        Some(Entry {
            boundary: raw.boundary,
            k: raw.k,
            basis_off: raw.basis_off,
            mean: section(raw.mean_off, f32s_len(1, d))?,
            basis: section(raw.basis_off, f32s_len(raw.k, d))?,
            variance: section(raw.variance_off, f32s_len(1, raw.k.saturating_add(1)))?,
        })
    }

    /// All entries, in increasing order of the boundary.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'a>> + use<'a> {
        let file = *self;
        (0..file.layout.entry_count).filter_map(move |index| file.entry(index))
    }

    /// The entry for a boundary, if the file has one.
    #[must_use]
    pub fn at_boundary(&self, boundary: u32) -> Option<Entry<'a>> {
        let (mut low, mut high) = (0, self.layout.entry_count);
        while low < high {
            let middle = low.midpoint(high);
            if self.raw(middle)?.boundary < boundary {
                low = middle.saturating_add(1);
            } else {
                high = middle;
            }
        }
        self.entry(low).filter(|entry| entry.boundary == boundary)
    }

    /// The bytes of the metadata section.
    #[must_use]
    pub fn metadata_bytes(&self) -> &'a [u8] {
        self.bytes.get(self.layout.meta_off..self.layout.file_len).unwrap_or_default()
    }

    /// The metadata, as a JSON object. An empty section is the empty object.
    ///
    /// # Errors
    /// [`VerifyError::MetadataNotUtf8`] or [`VerifyError::Metadata`].
    pub fn metadata(&self) -> Result<json::Object<'a>, VerifyError> {
        let text = core::str::from_utf8(self.metadata_bytes())
            .map_err(|error| VerifyError::MetadataNotUtf8 { valid_up_to: error.valid_up_to() })?;
        Ok(json::Object::parse(text)?)
    }

    fn raw(&self, index: u32) -> Option<RawEntry> {
        if index >= self.layout.entry_count {
            return None;
        }
        let at = usize::try_from(index).ok()?.checked_mul(ENTRY_LEN)?.checked_add(HEADER_LEN)?;
        let mut cursor = Cursor::new(self.bytes.get(at..)?);
        Some(RawEntry {
            boundary: cursor.u32_le().ok()?,
            k: cursor.u32_le().ok()?,
            mean_off: cursor.u64_le().ok()?,
            basis_off: cursor.u64_le().ok()?,
            variance_off: cursor.u64_le().ok()?,
        })
    }
}

impl<'a> Entry<'a> {
    /// The number of layers already applied to the residuals that this entry is for.
    #[must_use]
    pub const fn boundary(&self) -> u32 {
        self.boundary
    }

    /// Number of components; 0 if there is only a mean.
    #[must_use]
    pub const fn k(&self) -> u32 {
        self.k
    }

    /// The mean residual, `[d]`. Borrows where the bytes are aligned on a little-endian machine and copies otherwise.
    #[must_use]
    pub fn mean(&self) -> Cow<'a, [f32]> {
        values(self.mean)
    }

    /// The components, `[k, d]` row-major, as [`crate::kernel`] wants them. Borrows like [`Self::mean`].
    #[must_use]
    pub fn basis(&self) -> Cow<'a, [f32]> {
        values(self.basis)
    }

    /// The variance along each component, then the total: `[k + 1]`. Borrows like [`Self::mean`].
    #[must_use]
    pub fn variance(&self) -> Cow<'a, [f32]> {
        values(self.variance)
    }

    /// Where the basis stands in the file: the same for entries that share one, if they have components.
    #[must_use]
    pub const fn basis_offset(&self) -> u64 {
        self.basis_off
    }

    /// The share of the variance that the components cover, 0 to 1, by [`Self::variance`]. 1 if there is none at all.
    #[must_use]
    pub fn explained(&self) -> f64 {
        let variance = self.variance();
        let Some((total, parts)) = variance.split_last() else { return 0.0 };
        if *total > 0.0 { parts.iter().copied().map(f64::from).sum::<f64>() / f64::from(*total) } else { 1.0 }
    }
}

/// The sections are whole numbers of f32, so nothing can fail here.
fn values(section: &[u8]) -> Cow<'_, [f32]> {
    residual::decode_f32s(section).unwrap_or_default()
}

/// The header fields that only the check needs.
struct Header {
    meta_off: u64,
    meta_len: u64,
    file_len: u64,
}

fn read_header(bytes: &[u8]) -> Result<(Layout, Header), OpenError> {
    let short = |_: Truncated| OpenError::Truncated { needed: HEADER_LEN as u64, got: len_u64(bytes.len()) };
    let mut whole = Cursor::new(bytes);
    let mut cursor = Cursor::new(whole.take(HEADER_LEN).map_err(short)?);
    let magic = cursor.array().map_err(short)?;
    if magic != MAGIC {
        return Err(OpenError::BadMagic { got: magic });
    }
    let version = cursor.u32_le().map_err(short)?;
    if version != VERSION {
        return Err(OpenError::BadVersion { got: version });
    }
    let hidden_dim = cursor.u32_le().map_err(short)?;
    if hidden_dim == 0 {
        return Err(OpenError::ZeroHiddenDim);
    }
    let entry_count = cursor.u32_le().map_err(short)?;
    if entry_count == 0 {
        return Err(OpenError::NoEntries);
    }
    let methodology = cursor.u32_le().map_err(short)?;
    let flags = cursor.u32_le().map_err(short)?;
    if flags != 0 {
        return Err(OpenError::UnknownFlags { got: flags });
    }
    let header = Header {
        meta_off: cursor.u64_le().map_err(short)?,
        meta_len: cursor.u64_le().map_err(short)?,
        file_len: cursor.u64_le().map_err(short)?,
    };
    let reserved = len_u64(cursor.offset());
    if let Some((offset, got)) = (reserved..).zip(cursor.rest()).find(|(_, byte)| **byte != 0) {
        return Err(OpenError::ReservedNotZero { offset, got: *got });
    }
    Ok((Layout { hidden_dim, entry_count, methodology, meta_off: 0, file_len: 0 }, header))
}

/// Walks over the sections in the order of the file.
struct Walk {
    /// Where the last section ends.
    end: u64,
    file_len: u64,
}

impl Walk {
    /// Takes the section at `got`, if it starts exactly where the next one must.
    fn section(&mut self, section: Section, got: u64, len: Option<u64>) -> Result<(), OpenError> {
        let overflow = OpenError::SizeOverflow { section };
        let expected = align(self.end).ok_or(overflow)?;
        let end = got.checked_add(len.ok_or(overflow)?).ok_or(overflow)?;
        if !got.is_multiple_of(ALIGNMENT) {
            return Err(OpenError::Unaligned { section, got });
        }
        if end > self.file_len {
            return Err(OpenError::OutOfFile { section, end, file_len: self.file_len });
        }
        match got.cmp(&expected) {
            core::cmp::Ordering::Less => Err(OpenError::Overlap { section, expected, got }),
            core::cmp::Ordering::Greater => Err(OpenError::Gap { section, expected, got }),
            core::cmp::Ordering::Equal => {
                self.end = end;
                Ok(())
            }
        }
    }
}

/// The next multiple of [`ALIGNMENT`].
fn align(offset: u64) -> Option<u64> {
    offset.checked_next_multiple_of(ALIGNMENT)
}

/// Bytes of `rows` rows of `row` f32.
fn f32s_len(rows: u32, row: u32) -> Option<u64> {
    u64::from(rows).checked_mul(u64::from(row))?.checked_mul(4)
}

/// Bytes of the table; u32 times 32 always fits.
fn table_len(entry_count: u32) -> u64 {
    u64::from(entry_count).saturating_mul(ENTRY_LEN as u64)
}

fn len_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
