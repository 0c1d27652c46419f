//! Files of residuals: what `aeonctl capture-residuals` writes and a fit reads.
//!
//! Two formats. **safetensors**: a tensor `boundary.N`, f32 `[n, d]`, for each boundary, with text metadata. **NumPy**
//! (`.npy`): one matrix, f32 or f64, C order; the file does not say which boundary it is of, so the caller does. Only the
//! header is trusted, and only after it agreed with the length of the file: nothing is allocated beyond that length
//! (twice that for f64, which is converted block by block).

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek},
    path::{Path, PathBuf},
};

use ndarray::Array2;
use serde::Deserialize;

use super::{
    atomic::{AtomicFile, WriteFileError},
    file::{OpenError, open_regular},
};

/// Largest file that is read: 65,536 residuals of 8,192 values at 16 boundaries.
pub const MAX_LEN: u64 = 32 << 30;
/// Longest header of a safetensors file: 300 boundaries take 30 KiB.
const MAX_HEADER_LEN: u64 = 4 << 20;
/// Longest header of an .npy file; NumPy's own limit.
const MAX_NPY_HEADER_LEN: u64 = 10_000;
/// Bytes of the length before a safetensors header.
const LENGTH_LEN: u64 = 8;
/// What a boundary's number follows in the name of its tensor.
const PREFIX: &str = "boundary.";
/// Bytes read at once.
const CHUNK_LEN: usize = 1 << 20;

/// Residuals of several boundaries, and what is known of them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Residuals {
    /// For each boundary `[n, d]`.
    pub boundaries: BTreeMap<u32, Array2<f32>>,
    /// Free text: the model, the text, how it was cut.
    pub metadata: BTreeMap<String, String>,
}

/// Why residuals are not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No file, not readable, or too long.
    #[error(transparent)]
    File(#[from] OpenError),
    /// Not in the format.
    #[error("{path}: {fault} (an .npy matrix or a safetensors file of boundary.N tensors expected)")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: String,
    },
    /// The file's length is not what its header says.
    #[error("{path}: {expected} bytes by its header, {got} in the file")]
    Length {
        /// The file.
        path: PathBuf,
        /// By the header.
        expected: u64,
        /// In the file.
        got: u64,
    },
    /// A tensor or matrix of another shape than `[n, d]`.
    #[error("{path}: {name} has shape {got:?}, [positions, width] expected")]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape.
        got: Vec<u64>,
    },
    /// Elements of another type.
    #[error("{path}: {name} has elements of type {got}, {expected} expected")]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Types that are read.
        expected: &'static str,
        /// Its type.
        got: String,
    },
}

/// Reads an `.npy` matrix, f32 or f64 in C order.
///
/// # Errors
/// See [`ReadError`].
pub fn read_npy(path: &Path) -> Result<Array2<f32>, ReadError> {
    let (mut file, file_len) = open(path)?;
    let bad = |fault: String| ReadError::Format { path: path.to_owned(), fault };
    let mut start = [0; 8];
    read_exact(path, &mut file, &mut start)?;
    let [magic @ .., major, _] = start;
    if magic != *b"\x93NUMPY" {
        return Err(bad("is no .npy file".to_owned()));
    }
    let (header_len, prefix_len) = match major {
        1 => {
            let mut len = [0; 2];
            read_exact(path, &mut file, &mut len)?;
            (u64::from(u16::from_le_bytes(len)), 10)
        }
        2 | 3 => {
            let mut len = [0; 4];
            read_exact(path, &mut file, &mut len)?;
            (u64::from(u32::from_le_bytes(len)), 12)
        }
        other => return Err(bad(format!(".npy version {other}, 1 to 3 expected"))),
    };
    if header_len > MAX_NPY_HEADER_LEN || header_len > file_len {
        return Err(bad(format!(".npy header of {header_len} bytes")));
    }
    let mut header = vec![0; header_len as usize];
    read_exact(path, &mut file, &mut header)?;
    let header = String::from_utf8_lossy(&header);
    let header = NpyHeader::parse(&header).ok_or_else(|| bad(format!("unreadable .npy header {header:?}")))?;
    let name = || "the matrix".to_owned();
    let shape = header.shape;
    let [rows, cols] = *shape else {
        return Err(ReadError::Shape { path: path.to_owned(), name: name(), got: shape });
    };
    if header.fortran_order {
        return Err(bad("is in Fortran order; save it with numpy.ascontiguousarray".to_owned()));
    }
    let element_len = match &*header.descr {
        "<f4" => 4,
        "<f8" => 8,
        got => {
            let (path, got) = (path.to_owned(), got.to_owned());
            return Err(ReadError::Type { path, name: name(), expected: "<f4 or <f8", got });
        }
    };
    let expected = checked_len(rows, cols, element_len).and_then(|len| len.checked_add(prefix_len + header_len));
    if expected != Some(file_len) {
        return Err(ReadError::Length { path: path.to_owned(), expected: expected.unwrap_or(u64::MAX), got: file_len });
    }
    read_matrix(path, &mut file, rows, cols, element_len)
}

/// A safetensors file of residuals whose header was read and checked.
#[derive(Debug)]
pub struct ResidualFile {
    path: PathBuf,
    file: File,
    metadata: BTreeMap<String, String>,
    places: BTreeMap<u32, Place>,
}

/// Where a boundary's matrix is.
#[derive(Debug, Clone, Copy)]
struct Place {
    offset: u64,
    rows: u64,
    cols: u64,
}

impl ResidualFile {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let (mut file, file_len) = open(path)?;
        let bad = |fault: String| ReadError::Format { path: path.to_owned(), fault };
        let mut len = [0; 8];
        read_exact(path, &mut file, &mut len)?;
        let header_len = u64::from_le_bytes(len);
        if header_len > MAX_HEADER_LEN || header_len > file_len {
            return Err(bad(format!("safetensors header of {header_len} bytes")));
        }
        let mut header = vec![0; header_len as usize];
        read_exact(path, &mut file, &mut header)?;
        let mut members: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| bad(format!("safetensors header: {error}")))?;
        let metadata = match members.remove("__metadata__") {
            None => BTreeMap::new(),
            Some(value) => serde_json::from_value(value).map_err(|error| bad(format!("__metadata__: {error}")))?,
        };
        let mut tensors = Vec::new();
        for (name, value) in members {
            let tensor: Tensor =
                serde_json::from_value(value).map_err(|error| bad(format!("tensor {name}: {error}")))?;
            tensors.push((tensor.data_offsets, name, tensor));
        }
        tensors.sort_by_key(|(offsets, ..)| *offsets);
        let start = LENGTH_LEN + header_len;
        let mut end = 0;
        let mut places = BTreeMap::new();
        for (offsets, name, tensor) in tensors {
            let boundary = name.strip_prefix(PREFIX).and_then(|number| number.parse::<u32>().ok());
            // One spelling, so that no boundary is there twice.
            let boundary = boundary.filter(|boundary| name == format!("{PREFIX}{boundary}"));
            let boundary = boundary.ok_or_else(|| bad(format!("tensor {name:?}")))?;
            if tensor.dtype != "F32" {
                return Err(ReadError::Type { path: path.to_owned(), name, expected: "F32", got: tensor.dtype });
            }
            let [rows, cols] = *tensor.shape else {
                return Err(ReadError::Shape { path: path.to_owned(), name, got: tensor.shape });
            };
            let expected = checked_len(rows, cols, 4).and_then(|len| len.checked_add(end));
            if (offsets.0, Some(offsets.1)) != (end, expected) {
                return Err(bad(format!("tensor {name} at {}..{} does not follow at {end}", offsets.0, offsets.1)));
            }
            places.insert(boundary, Place { offset: start + end, rows, cols });
            end = offsets.1;
        }
        if start.checked_add(end) != Some(file_len) {
            let expected = start.saturating_add(end);
            return Err(ReadError::Length { path: path.to_owned(), expected, got: file_len });
        }
        Ok(Self { path: path.to_owned(), file, metadata, places })
    }

    /// The boundaries that it holds, in increasing order.
    pub fn boundaries(&self) -> impl ExactSizeIterator<Item = u32> {
        self.places.keys().copied()
    }

    /// Residuals of a boundary; 0 if it has none.
    #[must_use]
    pub fn rows(&self, boundary: u32) -> usize {
        self.places.get(&boundary).map_or(0, |place| usize::try_from(place.rows).unwrap_or(usize::MAX))
    }

    /// What it says of itself.
    #[must_use]
    pub const fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Reads the residuals of a boundary, `[n, d]`; `None` if it has none.
    ///
    /// # Errors
    /// [`ReadError`] if the file has changed.
    pub fn read(&mut self, boundary: u32) -> Result<Option<Array2<f32>>, ReadError> {
        let Some(place) = self.places.get(&boundary).copied() else { return Ok(None) };
        let unreadable = |source| OpenError::Unreadable { path: self.path.clone(), source };
        self.file.seek(io::SeekFrom::Start(place.offset)).map_err(unreadable)?;
        read_matrix(&self.path, &mut self.file, place.rows, place.cols, 4).map(Some)
    }
}

/// Reads all boundaries of a safetensors file.
///
/// # Errors
/// See [`ReadError`].
pub fn read_safetensors(path: &Path) -> Result<Residuals, ReadError> {
    let mut file = ResidualFile::open(path)?;
    let mut residuals = Residuals { metadata: file.metadata.clone(), ..Residuals::default() };
    for boundary in file.boundaries().collect::<Vec<_>>() {
        if let Some(values) = file.read(boundary)? {
            residuals.boundaries.insert(boundary, values);
        }
    }
    Ok(residuals)
}

/// Writes residuals as safetensors; the file appears whole or not at all. The same residuals always give the same bytes.
///
/// # Errors
/// [`WriteFileError`].
pub fn write_safetensors(path: &Path, residuals: &Residuals) -> Result<(), WriteFileError> {
    let shapes = residuals.boundaries.iter().map(|(boundary, values)| (*boundary, values.dim()));
    let mut writer = ResidualWriter::create(path, shapes, &residuals.metadata)?;
    for (boundary, values) in &residuals.boundaries {
        writer.append(*boundary, &values.iter().copied().collect::<Vec<_>>())?;
    }
    writer.finish()
}

/// Writes a safetensors file whose shapes are known before its numbers, so that they need not be in memory together.
///
/// The file appears at its place when it is finished; dropped before, it leaves nothing.
#[derive(Debug)]
pub struct ResidualWriter {
    file: AtomicFile,
    /// For each boundary where its next values go, and where they end.
    next: BTreeMap<u32, (u64, u64)>,
}

impl ResidualWriter {
    /// Begins a file of matrices `(boundary, (rows, cols))`.
    ///
    /// # Errors
    /// [`WriteFileError`].
    pub fn create(
        path: &Path,
        shapes: impl IntoIterator<Item = (u32, (usize, usize))>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WriteFileError> {
        let mut header = serde_json::Map::new();
        if !metadata.is_empty() {
            header.insert("__metadata__".to_owned(), serde_json::json!(metadata));
        }
        let mut next = BTreeMap::new();
        let mut end = 0_u64;
        for (boundary, (rows, cols)) in shapes {
            let start = end;
            end = start.saturating_add((rows as u64).saturating_mul(cols as u64).saturating_mul(4));
            let tensor = serde_json::json!({ "dtype": "F32", "shape": [rows, cols], "data_offsets": [start, end] });
            header.insert(format!("{PREFIX}{boundary}"), tensor);
            next.insert(boundary, (start, end));
        }
        let mut header = serde_json::Value::Object(header).to_string();
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        let start = LENGTH_LEN + header.len() as u64;
        for (from, to) in next.values_mut() {
            (*from, *to) = (*from + start, *to + start);
        }
        let file = AtomicFile::create(path)?;
        file.write_at(&(header.len() as u64).to_le_bytes(), 0)?;
        file.write_at(header.as_bytes(), LENGTH_LEN)?;
        Ok(Self { file, next })
    }

    /// Puts values behind those that the boundary has already.
    ///
    /// # Errors
    /// [`WriteFileError`], also for more values than announced.
    pub fn append(&mut self, boundary: u32, values: &[f32]) -> Result<(), WriteFileError> {
        let mut bytes = Vec::new();
        aeon_proto::residual::encode_f32s(values, &mut bytes);
        let room = self.next.get_mut(&boundary).filter(|(from, to)| to - from >= bytes.len() as u64);
        let Some((from, _)) = room else {
            return Err(self.file.failed(format!("more values for boundary {boundary} than announced")));
        };
        self.file.write_at(&bytes, *from)?;
        *from += bytes.len() as u64;
        Ok(())
    }

    /// Puts the file at its place.
    ///
    /// # Errors
    /// [`WriteFileError`], also for fewer values than announced.
    pub fn finish(self) -> Result<(), WriteFileError> {
        if let Some((boundary, _)) = self.next.iter().find(|(_, (from, to))| from != to) {
            return Err(self.file.failed(format!("fewer values for boundary {boundary} than announced")));
        }
        self.file.finish()
    }
}

/// An entry of a safetensors header.
#[derive(Debug, Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

fn open(path: &Path) -> Result<(File, u64), ReadError> {
    let (file, len) = open_regular(path)?;
    match len {
        0 => Err(OpenError::Empty { path: path.to_owned() }.into()),
        len if len > MAX_LEN => Err(OpenError::TooLarge { path: path.to_owned(), max: MAX_LEN, got: len }.into()),
        len => Ok((file, len)),
    }
}

fn read_exact(path: &Path, file: &mut File, out: &mut [u8]) -> Result<(), ReadError> {
    file.read_exact(out).map_err(|source| match source.kind() {
        io::ErrorKind::UnexpectedEof => {
            ReadError::Format { path: path.to_owned(), fault: "ends in the middle of its header or data".to_owned() }
        }
        _ => OpenError::Unreadable { path: path.to_owned(), source }.into(),
    })
}

fn checked_len(rows: u64, cols: u64, element_len: u64) -> Option<u64> {
    rows.checked_mul(cols)?.checked_mul(element_len)
}

/// Reads a matrix whose bytes are known to be in the file.
fn read_matrix(path: &Path, file: &mut File, rows: u64, cols: u64, element_len: u64) -> Result<Array2<f32>, ReadError> {
    let count = (rows * cols) as usize;
    let mut values = Vec::with_capacity(count);
    let mut buffer = vec![0; CHUNK_LEN.min(count * element_len as usize)];
    while values.len() < count {
        let len = buffer.len().min((count - values.len()) * element_len as usize);
        let chunk = buffer.get_mut(..len).unwrap_or_default();
        read_exact(path, file, chunk)?;
        match element_len {
            4 => values.extend(chunk.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))),
            _ => values.extend(chunk.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes) as f32)),
        }
    }
    let shape = (rows as usize, cols as usize);
    Array2::from_shape_vec(shape, values)
        .map_err(|error| ReadError::Format { path: path.to_owned(), fault: error.to_string() })
}

/// The three members of an `.npy` header, a Python dictionary.
#[derive(Debug, PartialEq, Eq)]
struct NpyHeader {
    descr: String,
    fortran_order: bool,
    shape: Vec<u64>,
}

impl NpyHeader {
    /// NumPy writes `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }` and reads any order and spacing.
    fn parse(text: &str) -> Option<Self> {
        let value_of = |key: &str| {
            let quoted = [format!("'{key}'"), format!("\"{key}\"")];
            let rest = quoted.iter().find_map(|key| text.split_once(key.as_str())).map(|(_, rest)| rest)?;
            Some(rest.trim_start().strip_prefix(':')?.trim_start())
        };
        let descr = value_of("descr")?;
        let quote = descr.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
        let descr = descr.get(1..)?.split_once(quote)?.0.to_owned();
        let order = value_of("fortran_order")?;
        let fortran_order = match (order.starts_with("True"), order.starts_with("False")) {
            (true, false) => true,
            (false, true) => false,
            _ => return None,
        };
        let shape = value_of("shape")?.strip_prefix('(')?.split_once(')')?.0;
        let numbers = shape.split(',').map(str::trim).filter(|number| !number.is_empty());
        let shape = numbers.map(|number| number.parse().ok()).collect::<Option<_>>()?;
        Some(Self { descr, fortran_order, shape })
    }
}
