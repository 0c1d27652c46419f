//! A basis file (PCAB) in memory: read once, fingerprinted, checked, and then looked into without copying.
//!
//! The registry opens files here at start and on a reload, `aeonctl` to inspect and verify them. Format: `proto/SPEC.md`,
//! "PCAB". The mapping is sealed (see `sealed.rs`), so what happens to the file on disk later changes nothing.

use std::{
    borrow::Cow,
    fs::File,
    io,
    path::{Path, PathBuf},
};

use aeon_proto::pcab::{self, Entry, Layout, Pcab};
use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
};

use super::{
    metadata::Metadata,
    sealed::{SealError, Sealed},
};

#[cfg(not(target_endian = "little"))]
compile_error!("basis files are little-endian and are used in place; a big-endian station would have to convert them");

/// Largest basis file that is read unless the caller says otherwise: 80 boundaries of 8,192 values with 1,500 components
/// each, far over what is worth sending.
pub const DEFAULT_MAX_LEN: u64 = 4 << 30;

/// Longest metadata section: 80 boundaries with all that is said of each have about 60 KiB.
const MAX_METADATA_LEN: usize = 256 << 10;

/// Why a basis file is not used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be opened or read.
    #[error("{path}: cannot read the file (check the path and its permissions)")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is something else than a file.
    #[error("{path}: a regular file expected, this is a {got}")]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// What it is.
        got: &'static str,
    },
    /// It has no bytes.
    #[error("{path}: the file is empty")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// It is longer than the limit.
    #[error("{path}: {got} bytes, at most {max} expected")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        max: u64,
        /// Its length.
        got: u64,
    },
    /// Its length changed while it was read.
    #[error("{path}: {expected} bytes at first, {got} when read (replace files by renaming, not in place)")]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its length when it was opened.
        expected: u64,
        /// Bytes that were read.
        got: u64,
    },
    /// There is no memory for its bytes.
    #[error("{path}: no memory for its {len} bytes")]
    Memory {
        /// The file.
        path: PathBuf,
        /// Its length.
        len: u64,
        /// What the system said.
        source: io::Error,
    },
    /// It is not laid out as a basis file.
    #[error("{path}: not a basis file")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong where.
        source: pcab::OpenError,
    },
    /// Its metadata are longer than anyone would write.
    #[error("{path}: metadata of {got} bytes, at most {max} expected")]
    MetadataTooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        max: usize,
        /// Their length.
        got: usize,
    },
    /// Its numbers are no basis.
    #[error("{path}: no valid basis")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong where.
        source: pcab::VerifyError,
    },
}

impl OpenError {
    /// The file that it is about.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Unreadable { path, .. }
            | Self::NotAFile { path, .. }
            | Self::Empty { path }
            | Self::TooLarge { path, .. }
            | Self::Changed { path, .. }
            | Self::Memory { path, .. }
            | Self::Format { path, .. }
            | Self::MetadataTooLarge { path, .. }
            | Self::Content { path, .. } => path,
        }
    }
}

/// A loaded basis file.
#[derive(Debug)]
pub struct BasisFile {
    path: PathBuf,
    sealed: Sealed,
    layout: Layout,
    metadata: Metadata,
}

/// What a basis file holds for one boundary, in place.
#[derive(Debug, Clone, Copy)]
pub struct Boundary<'a> {
    /// The number of layers already applied.
    pub boundary: u32,
    /// Components; 0 if there is only a mean.
    pub k: usize,
    /// The mean residual, `[d]`.
    pub mean: &'a [f32],
    /// The components, `[k, d]` row-major, by descending variance: what `aeon_proto::kernel` takes.
    pub basis: &'a [f32],
    /// The variance of each component, then the total: `[k + 1]`.
    pub variance: &'a [f32],
    /// Where the components stand in the file: equal for boundaries that share them.
    pub basis_offset: u64,
}

impl<'a> Boundary<'a> {
    fn new(entry: &Entry<'a>) -> Option<Self> {
        // Sections are aligned in the file and the mapping at a page, so the values are where they are.
        let borrowed = |values: Cow<'a, [f32]>| match values {
            Cow::Borrowed(values) => Some(values),
            Cow::Owned(values) => values.is_empty().then_some(&[][..]),
        };
        Some(Self {
            boundary: entry.boundary(),
            k: usize::try_from(entry.k()).ok()?,
            mean: borrowed(entry.mean())?,
            basis: borrowed(entry.basis())?,
            variance: borrowed(entry.variance())?,
            basis_offset: entry.basis_offset(),
        })
    }

    /// The share of the variance that the first `k` components cover, 0 to 1; 1 if there is no variance at all.
    #[must_use]
    pub fn explained(&self, k: usize) -> f64 {
        let Some((total, parts)) = self.variance.split_last() else { return 0.0 };
        match f64::from(*total) {
            total if total > 0.0 => parts.iter().take(k).copied().map(f64::from).sum::<f64>() / total,
            _ => 1.0,
        }
    }

    /// The first `k` components, `[k, d]`; `None` if there are not so many.
    #[must_use]
    pub fn prefix(&self, k: usize) -> Option<&'a [f32]> {
        (k <= self.k).then(|| self.basis.get(..k * self.mean.len())).flatten()
    }
}

impl BasisFile {
    /// Opens a file of at most [`DEFAULT_MAX_LEN`] bytes and checks every byte of it.
    ///
    /// Never blocks on what is no file. Takes memory for the file's bytes and a fixed amount (a buffer, and the metadata as
    /// a tree, of at most 256 KiB of text), whatever its header says.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with_limit(path, DEFAULT_MAX_LEN)
    }

    /// As [`Self::open`], with another limit on the bytes.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_with_limit(path: &Path, max_len: u64) -> Result<Self, OpenError> {
        let (mut file, len) = open_regular(path)?;
        if len == 0 {
            return Err(OpenError::Empty { path: path.to_owned() });
        }
        let too_large = |got| OpenError::TooLarge { path: path.to_owned(), max: max_len, got };
        if len > max_len {
            return Err(too_large(len));
        }
        // One byte more than the file had is enough to see that it grew.
        Self::read(path, &mut io::Read::take(&mut file, len.saturating_add(1)), len)
    }

    /// Takes a file that is already in memory, under the same checks; `name` stands for its path.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn from_bytes(name: &Path, bytes: &[u8]) -> Result<Self, OpenError> {
        if bytes.is_empty() {
            return Err(OpenError::Empty { path: name.to_owned() });
        }
        Self::read(name, &mut &*bytes, bytes.len() as u64)
    }

    /// Reads `source`, which should have `len` bytes.
    fn read(path: &Path, source: &mut dyn io::Read, len: u64) -> Result<Self, OpenError> {
        let path = path.to_owned();
        let sealed = match Sealed::copy(source) {
            Ok(sealed) => sealed,
            Err(SealError::Read(source)) => return Err(OpenError::Unreadable { path, source }),
            Err(SealError::Memory(source)) => return Err(OpenError::Memory { path, len, source }),
        };
        let got = sealed.bytes().len() as u64;
        if got != len {
            return Err(OpenError::Changed { path, expected: len, got });
        }
        let pcab = match Pcab::open(sealed.bytes()) {
            Ok(pcab) => pcab,
            Err(source) => return Err(OpenError::Format { path, source }),
        };
        // The tree that JSON is read into takes many times the bytes of its text.
        let metadata_len = pcab.metadata_bytes().len();
        if metadata_len > MAX_METADATA_LEN {
            return Err(OpenError::MetadataTooLarge { path, max: MAX_METADATA_LEN, got: metadata_len });
        }
        if let Err(source) = pcab.verify() {
            return Err(OpenError::Content { path, source });
        }
        let layout = pcab.layout();
        let metadata = Metadata::parse(text(&pcab));
        Ok(Self { path, sealed, layout, metadata })
    }

    /// Where it was read from; the file there may be another by now.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// FNV-1a 32 of the file: what PCAR names it by.
    #[must_use]
    pub const fn basis_fp(&self) -> u32 {
        self.sealed.fnv()
    }

    /// BLAKE3 of the file: what tells files apart for certain.
    #[must_use]
    pub const fn blake3(&self) -> blake3::Hash {
        self.sealed.blake3()
    }

    /// Id of the methodology by which it was fitted.
    #[must_use]
    pub fn methodology(&self) -> u32 {
        self.pcab().methodology()
    }

    /// Values of a residual.
    #[must_use]
    pub fn hidden_dim(&self) -> u32 {
        self.pcab().hidden_dim()
    }

    /// Bytes of the file, and of memory that it takes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.sealed.bytes().len()
    }

    /// The bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.sealed.bytes()
    }

    /// What it holds for a boundary, if anything. Cheap: a binary search.
    #[must_use]
    pub fn boundary(&self, boundary: u32) -> Option<Boundary<'_>> {
        Boundary::new(&self.pcab().at_boundary(boundary)?)
    }

    /// All boundaries, in increasing order.
    pub fn boundaries(&self) -> impl Iterator<Item = Boundary<'_>> {
        self.pcab().entries().filter_map(|entry| Boundary::new(&entry))
    }

    /// What the metadata section says, as far as it is of use here.
    #[must_use]
    pub const fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The metadata section: a JSON object, or nothing.
    #[must_use]
    pub fn metadata_text(&self) -> &str {
        text(&self.pcab())
    }

    /// The median norm of the residuals that a boundary was fitted on, if the metadata say it: a residual of over four
    /// times this norm is an outlier.
    #[must_use]
    pub fn median_norm(&self, boundary: u32) -> Option<f32> {
        self.metadata.median_norm(boundary)
    }

    /// The file as its format's reader sees it.
    #[must_use]
    pub fn pcab(&self) -> Pcab<'_> {
        Pcab::with_layout(self.sealed.bytes(), self.layout)
    }
}

/// The metadata section of a file that was checked.
fn text<'a>(pcab: &Pcab<'a>) -> &'a str {
    std::str::from_utf8(pcab.metadata_bytes()).unwrap_or_default()
}

/// Opens a regular file for reading and returns its length. A FIFO does not block it, and nothing else is opened.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64), OpenError> {
    let not_a_file = |got| OpenError::NotAFile { path: path.to_owned(), got };
    let unreadable = |errno: Errno| OpenError::Unreadable { path: path.to_owned(), source: errno.into() };
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => file,
        // That is how the system refuses to open a socket.
        Err(Errno::NXIO) => return Err(not_a_file("socket")),
        Err(errno) => return Err(unreadable(errno)),
    };
    let stat = rustix::fs::fstat(&file).map_err(unreadable)?;
    let got = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok((File::from(file), u64::try_from(stat.st_size).unwrap_or(0))),
        FileType::Directory => "directory",
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        FileType::CharacterDevice | FileType::BlockDevice => "device",
        _ => "special file",
    };
    Err(not_a_file(got))
}
