//! What can be wrong with an envelope, and with what is to be put into one.

use crate::{bw, cursor::Truncated};

/// Why bytes are not an envelope. A missing header is told before anything that it might have said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum BwahError {
    /// Fewer bytes than the header, or than the header announces.
    #[error("{needed} bytes expected at offset {offset}, {left} left")]
    Truncated {
        /// Where the missing part starts.
        offset: usize,
        /// Bytes that it takes.
        needed: usize,
        /// Bytes that are there.
        left: usize,
    },
    /// Bytes 0..4 are not `BWAH`.
    #[error("magic {got:02x?} is not BWAH")]
    BadMagic {
        /// The bytes there are.
        got: [u8; 4],
    },
    /// Byte 4 is not 1.
    #[error("version {got} is not 1")]
    BadVersion {
        /// The version there is.
        got: u8,
    },
    /// Flags other than 0x03, or than 0x01 in a reply whose `tail_len` is 0.
    #[error("reserved flags {flags:#04x}")]
    ReservedFlags {
        /// The flags there are.
        flags: u8,
    },
    /// More bytes than the two lengths account for.
    #[error("{extra} bytes after the end of the envelope")]
    TrailingBytes {
        /// Bytes too many.
        extra: usize,
    },
    /// One of the two payloads is at fault.
    #[error("payload does not decode")]
    InnerBlobError(#[source] BlobError),
}

impl BwahError {
    /// The fault's name in the specification.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Truncated { .. } => "Truncated",
            Self::BadMagic { .. } => "BadMagic",
            Self::BadVersion { .. } => "BadVersion",
            Self::ReservedFlags { .. } => "ReservedFlags",
            Self::TrailingBytes { .. } => "TrailingBytes",
            Self::InnerBlobError(_) => "InnerBlobError",
        }
    }
}

impl BlobFault {
    /// The fault's name in the specification.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Bw(cause) => cause.name(),
            Self::Mime => "Mime",
            Self::Length { .. } => "Length",
        }
    }
}

/// Which payload is at fault, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
#[error("{blob}")]
pub struct BlobError {
    /// Which one.
    pub blob: Blob,
    /// What is wrong with it.
    #[source]
    pub fault: BlobFault,
}

/// The two payloads of an envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Blob {
    /// The residual at the last position of the prefix.
    Tail,
    /// The keys and values of the prefix.
    Kv,
}

impl core::fmt::Display for Blob {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Tail => "tail",
            Self::Kv => "kv slab",
        })
    }
}

/// What can be wrong with a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum BlobFault {
    /// It is no blob.
    #[error("no .bw blob")]
    Bw(#[from] bw::DecodeError),
    /// It is a blob of another type than application/octet-stream.
    #[error("not of type application/octet-stream")]
    Mime,
    /// Its content is no whole number of f32 values.
    #[error("content of {len} bytes is no multiple of 4")]
    Length {
        /// Bytes of the content.
        len: usize,
    },
}

/// Why values cannot be put into an envelope: a payload's blob does not fit 32 bits of length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
#[error("{blob} of {values} values is too long for an envelope")]
pub struct EncodeError {
    /// Which payload.
    pub blob: Blob,
    /// How many f32 values it has.
    pub values: usize,
}

impl From<Truncated> for BwahError {
    fn from(Truncated { offset, needed, left }: Truncated) -> Self {
        Self::Truncated { offset, needed, left }
    }
}
