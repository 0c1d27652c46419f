//! What can be wrong with a basis file, one variant a fault.

use crate::json;

/// A section of a basis file. Entries count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Section {
    /// The mean of an entry.
    Mean(u32),
    /// The basis of an entry.
    Basis(u32),
    /// The variances of an entry.
    Variance(u32),
    /// The JSON text at the end.
    Metadata,
}

impl core::fmt::Display for Section {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Mean(entry) => write!(f, "mean of entry {entry}"),
            Self::Basis(entry) => write!(f, "basis of entry {entry}"),
            Self::Variance(entry) => write!(f, "variance of entry {entry}"),
            Self::Metadata => f.write_str("metadata"),
        }
    }
}

/// Why bytes are no basis file. All numbers are bytes or offsets from the start of the file unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum OpenError {
    /// The file ends before something it must hold: the header, what `file_len` says, or the table of entries.
    #[error("basis file of {got} bytes, at least {needed} expected")]
    Truncated {
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        got: u64,
    },
    /// Bytes follow after `file_len`.
    #[error("basis file of {got} bytes, but it says that it ends at {expected}")]
    TrailingBytes {
        /// The field `file_len`.
        expected: u64,
        /// Bytes there are.
        got: u64,
    },
    /// The file does not start with `PCAB`.
    #[error("basis file starts with {got:02x?}, {:02x?} expected", super::MAGIC)]
    BadMagic {
        /// Its first four bytes.
        got: [u8; 4],
    },
    /// A version other than 1.
    #[error("basis file of version {got}, {} expected", super::VERSION)]
    BadVersion {
        /// The field `version`.
        got: u32,
    },
    /// `hidden_dim` is 0.
    #[error("basis file of width 0")]
    ZeroHiddenDim,
    /// `entry_count` is 0.
    #[error("basis file without entries")]
    NoEntries,
    /// A flag that this version does not know.
    #[error("basis file with flags {got:#010x}, 0 expected")]
    UnknownFlags {
        /// The field `flags`.
        got: u32,
    },
    /// A reserved byte of the header is not zero.
    #[error("reserved byte {offset} of a basis file is {got:#04x}, 0 expected")]
    ReservedNotZero {
        /// Where it is.
        offset: u64,
        /// Its value.
        got: u8,
    },
    /// The boundary of an entry is not above that of the entry before it.
    #[error("entry {entry} is for boundary {got}, after {previous}")]
    BoundaryOrder {
        /// The entry.
        entry: u32,
        /// The boundary of the entry before it.
        previous: u32,
        /// Its boundary.
        got: u32,
    },
    /// An entry has more components than a residual has values.
    #[error("entry {entry} has {got} components at a width of {max}")]
    TooManyComponents {
        /// The entry.
        entry: u32,
        /// Its `k`.
        got: u32,
        /// `hidden_dim`.
        max: u32,
    },
    /// The length of a section, or its end, does not fit 64 bits.
    #[error("{section} is too long for any file")]
    SizeOverflow {
        /// The section.
        section: Section,
    },
    /// A section starts at no multiple of 64.
    #[error("{section} starts at {got}, no multiple of {}", super::ALIGNMENT)]
    Unaligned {
        /// The section.
        section: Section,
        /// Its offset field.
        got: u64,
    },
    /// A section starts before the one before it ends.
    #[error("{section} starts at {got}, inside what ends at {expected}")]
    Overlap {
        /// The section.
        section: Section,
        /// Where it must start.
        expected: u64,
        /// Its offset field.
        got: u64,
    },
    /// A section starts later than the alignment asks for, so that bytes between belong to nothing.
    #[error("{section} starts at {got} instead of {expected}")]
    Gap {
        /// The section.
        section: Section,
        /// Where it must start.
        expected: u64,
        /// Its offset field.
        got: u64,
    },
    /// A section ends, or would start, past the end of the file.
    #[error("{section} ends at {end} in a file of {file_len}")]
    OutOfFile {
        /// The section.
        section: Section,
        /// Where it would end.
        end: u64,
        /// The field `file_len`.
        file_len: u64,
    },
    /// An entry shares the basis of an earlier one but has another `k`.
    #[error("entry {entry} has {got} components but shares the basis of entry {owner}, which has {expected}")]
    SharedBasisK {
        /// The entry.
        entry: u32,
        /// The entry whose basis it shares.
        owner: u32,
        /// `k` of that entry.
        expected: u32,
        /// `k` of this entry.
        got: u32,
    },
    /// The metadata does not end where the file does.
    #[error("metadata ends at {expected} but the file at {got}")]
    FileLen {
        /// `meta_off + meta_len`.
        expected: u64,
        /// The field `file_len`.
        got: u64,
    },
}

/// Why the numbers of a well-formed basis file are no basis.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum VerifyError {
    /// A byte between two sections is not zero.
    #[error("padding byte {offset} is {got:#04x}, 0 expected")]
    PaddingNotZero {
        /// Where it is.
        offset: u64,
        /// Its value.
        got: u8,
    },
    /// A NaN or an infinity.
    #[error("value {index} of the {section} is NaN or infinite")]
    NonFinite {
        /// The section.
        section: Section,
        /// Which value of it.
        index: usize,
    },
    /// The length of a row is not 1.
    #[error("row {row} of entry {entry} has squared length {got}, 1 expected")]
    NotUnit {
        /// The entry.
        entry: u32,
        /// The row.
        row: usize,
        /// Its product with itself.
        got: f32,
    },
    /// Two rows are not at right angles.
    #[error("rows {row} and {other} of entry {entry} have product {got}, 0 expected")]
    NotOrthogonal {
        /// The entry.
        entry: u32,
        /// The later row.
        row: usize,
        /// The earlier row.
        other: usize,
        /// Their product.
        got: f32,
    },
    /// A variance is below zero.
    #[error("variance {index} of entry {entry} is {got}")]
    NegativeVariance {
        /// The entry.
        entry: u32,
        /// Which one; `k` is the total.
        index: usize,
        /// Its value.
        got: f32,
    },
    /// A component has more variance than the one before it, in a basis that belongs to one boundary.
    #[error("variance {index} of entry {entry} is {got}, after {previous}")]
    VarianceOrder {
        /// The entry.
        entry: u32,
        /// Which one.
        index: usize,
        /// The variance before it.
        previous: f32,
        /// Its value.
        got: f32,
    },
    /// The components have more variance than there is in all.
    #[error("variances of entry {entry} add up to {sum}, over the total of {total}")]
    TotalTooSmall {
        /// The entry.
        entry: u32,
        /// Sum over the components.
        sum: f64,
        /// The last value of the section.
        total: f32,
    },
    /// The metadata is not UTF-8.
    #[error("metadata is not UTF-8 at byte {valid_up_to}")]
    MetadataNotUtf8 {
        /// Bytes of it that are.
        valid_up_to: usize,
    },
    /// The metadata is no JSON object by the rules of this protocol.
    #[error("metadata: {0}")]
    Metadata(#[from] json::Error),
}

/// Why numbers cannot be written as a basis file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum WriteError {
    /// The width is 0.
    #[error("basis file of width 0")]
    ZeroHiddenDim,
    /// No entry was added.
    #[error("basis file without entries")]
    NoEntries,
    /// The boundary is not above that of the entry before it.
    #[error("entry for boundary {got} after {previous}")]
    BoundaryOrder {
        /// The boundary of the entry before it.
        previous: u32,
        /// The boundary given.
        got: u32,
    },
    /// A mean of another length than the width.
    #[error("mean of {got} values at boundary {boundary}, {expected} expected")]
    MeanLen {
        /// The entry's boundary.
        boundary: u32,
        /// The width.
        expected: usize,
        /// Values given.
        got: usize,
    },
    /// A basis that is no whole number of rows, or of more rows than the width.
    #[error("basis of {got} values at boundary {boundary} is no 0 to {hidden_dim} rows of {hidden_dim}")]
    BasisLen {
        /// The entry's boundary.
        boundary: u32,
        /// The width.
        hidden_dim: u32,
        /// Values given.
        got: usize,
    },
    /// Variances other than one for each component and the total.
    #[error("{got} variances at boundary {boundary}, {expected} expected")]
    VarianceLen {
        /// The entry's boundary.
        boundary: u32,
        /// `k + 1`.
        expected: usize,
        /// Values given.
        got: usize,
    },
    /// No earlier entry for the boundary whose basis is to be shared, or that one has no components.
    #[error("boundary {boundary} shares the basis of boundary {with}, which has none")]
    NothingToShare {
        /// The entry's boundary.
        boundary: u32,
        /// The boundary named.
        with: u32,
    },
    /// The metadata is no JSON object by the rules of this protocol.
    #[error("metadata: {0}")]
    Metadata(#[from] json::Error),
    /// More entries than u32 counts, or more bytes than memory can hold.
    #[error("basis file too long")]
    TooLong,
}
