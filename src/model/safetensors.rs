//! Weights in the Hugging Face layout: one safetensors file, several with an index, or bytes in memory.
//!
//! Only the header of a file is read at first, and every byte after it must belong to one tensor; then the tensors that
//! [`super::weights`] asks for are read at their offsets. A file is never mapped, so one that shrinks while it is read
//! gives an error and not a signal.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Component, Path, PathBuf},
};

use half::{bf16, f16};
use serde::Deserialize;

use super::{error::LoadError, weights::TensorSource};

/// Largest header accepted, as in the format's own library.
const MAX_HEADER_LEN: u64 = 100_000_000;
/// Bytes of the length before the header.
const LENGTH_LEN: u64 = 8;
/// Largest JSON file accepted; an index of 100,000 tensors has about 10 MB.
const MAX_JSON_LEN: u64 = 1 << 28;
/// Bytes read at once: few calls, and the raw form of a tensor is never held whole.
const READ_LEN: usize = 1 << 20;

/// Reads a JSON file of bounded size.
pub(super) fn read_text(path: &Path) -> Result<String, LoadError> {
    let unreadable = |source| LoadError::Unreadable { path: path.to_owned(), source };
    let mut text = String::new();
    File::open(path).map_err(unreadable)?.take(MAX_JSON_LEN).read_to_string(&mut text).map_err(unreadable)?;
    Ok(text)
}

/// A directory of safetensors files, or one in memory.
#[derive(Debug)]
pub(super) struct SafeTensors<'a> {
    path: PathBuf,
    files: Vec<TensorFile<'a>>,
    /// Tensor to file name, if there is an index.
    index: Option<HashMap<String, String>>,
}

impl SafeTensors<'_> {
    /// Opens the weights of a model directory.
    pub(super) fn open(dir: &Path) -> Result<Self, LoadError> {
        let single = dir.join("model.safetensors");
        if single.exists() {
            return Ok(Self { path: single.clone(), files: vec![TensorFile::open(&single)?], index: None });
        }
        let path = dir.join("model.safetensors.index.json");
        if !path.exists() {
            return Err(LoadError::NotAModel { path: dir.to_owned() });
        }
        let index: Index = serde_json::from_str(&read_text(&path)?)
            .map_err(|source| LoadError::BadJson { path: path.clone(), source })?;
        Ok(Self { path: dir.to_owned(), files: Vec::new(), index: Some(index.weight_map) })
    }
}

impl<'a> SafeTensors<'a> {
    /// Takes a file that is in memory; `path` is only for errors.
    pub(super) fn from_bytes(bytes: &'a [u8], path: &Path) -> Result<Self, LoadError> {
        let file = TensorFile::new(Storage::Memory(bytes), path)?;
        Ok(Self { path: path.to_owned(), files: vec![file], index: None })
    }

    /// The file that holds a tensor, opened when it is first needed.
    fn file_of(&mut self, name: &str) -> Result<&TensorFile<'a>, LoadError> {
        let missing = || LoadError::MissingTensor { path: self.path.clone(), name: name.to_owned() };
        let position = match &self.index {
            None => Some(0),
            Some(index) => {
                let path = self.path.join(plain_name(index.get(name).ok_or_else(missing)?, &self.path)?);
                let position = self.files.iter().position(|file| file.path == path);
                if position.is_none() {
                    self.files.push(TensorFile::open(&path)?);
                }
                position
            }
        };
        let file = position.map_or(self.files.last(), |position| self.files.get(position));
        file.ok_or_else(missing)
    }
}

/// A file name of an index, which must not lead out of the directory.
fn plain_name<'n>(name: &'n str, dir: &Path) -> Result<&'n str, LoadError> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(_)), None) => Ok(name),
        _ => Err(LoadError::BadValue {
            path: dir.join("model.safetensors.index.json"),
            key: "weight_map".to_owned(),
            expected: "file names in the same directory".to_owned(),
            got: name.to_owned(),
        }),
    }
}

impl TensorSource for SafeTensors<'_> {
    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        self.file_of(name)?.read(name, shape)
    }
}

#[derive(Debug, Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

/// An entry of the header.
#[derive(Debug, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

#[derive(Debug)]
enum Storage<'a> {
    File(File),
    Memory(&'a [u8]),
}

impl Storage<'_> {
    fn len(&self) -> io::Result<u64> {
        match self {
            Self::File(file) => Ok(file.metadata()?.len()),
            Self::Memory(bytes) => Ok(bytes.len() as u64),
        }
    }

    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::File(file) => file.read_exact_at(out, offset),
            Self::Memory(bytes) => {
                let mut rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or(&[]);
                rest.read_exact(out)
            }
        }
    }
}

/// One safetensors file whose header has been checked.
#[derive(Debug)]
struct TensorFile<'a> {
    path: PathBuf,
    storage: Storage<'a>,
    data_offset: u64,
    entries: HashMap<String, Entry>,
}

impl<'a> TensorFile<'a> {
    fn open(path: &Path) -> Result<Self, LoadError> {
        let file = File::open(path).map_err(|source| LoadError::Unreadable { path: path.to_owned(), source })?;
        Self::new(Storage::File(file), path)
    }

    fn new(storage: Storage<'a>, path: &Path) -> Result<Self, LoadError> {
        let unreadable = |source| LoadError::Unreadable { path: path.to_owned(), source };
        let bad = |fault: String| LoadError::BadHeader { path: path.to_owned(), fault };
        let truncated = |expected, got| LoadError::Truncated { path: path.to_owned(), expected, got };
        let file_len = storage.len().map_err(unreadable)?;
        if file_len < LENGTH_LEN {
            return Err(truncated(LENGTH_LEN, file_len));
        }
        let mut length = [0; LENGTH_LEN as usize];
        storage.read_exact_at(&mut length, 0).map_err(unreadable)?;
        let header_len = u64::from_le_bytes(length);
        if header_len > MAX_HEADER_LEN {
            return Err(bad(format!("header of {header_len} bytes, at most {MAX_HEADER_LEN}")));
        }
        let data_offset = LENGTH_LEN + header_len;
        if data_offset > file_len {
            return Err(truncated(data_offset, file_len));
        }
        let mut header = vec![0; header_len as usize];
        storage.read_exact_at(&mut header, LENGTH_LEN).map_err(unreadable)?;
        let mut fields: HashMap<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| bad(error.to_string()))?;
        fields.remove("__metadata__");
        let mut entries = HashMap::with_capacity(fields.len());
        for (name, value) in fields {
            let entry = serde_json::from_value(value).map_err(|error| bad(format!("tensor {name}: {error}")))?;
            entries.insert(name, entry);
        }
        let data_len = file_len - data_offset;
        let file = Self { path: path.to_owned(), storage, data_offset, entries };
        let announced = file.check_offsets()?;
        if announced > data_len {
            return Err(truncated(data_offset.saturating_add(announced), file_len));
        }
        if announced < data_len {
            return Err(bad(format!("{} bytes after the last tensor", data_len - announced)));
        }
        Ok(file)
    }

    /// Checks that the tensors lie end to end, each as long as its shape says, and returns their length.
    fn check_offsets(&self) -> Result<u64, LoadError> {
        let mut sorted: Vec<_> = self.entries.iter().collect();
        sorted.sort_by_key(|(_, entry)| entry.data_offsets);
        let mut end = 0;
        for (name, entry) in sorted {
            let bad = |fault: String| LoadError::BadTensor { path: self.path.clone(), name: name.clone(), fault };
            let (from, to) = entry.data_offsets;
            if from != end || to < from {
                return Err(bad(format!("lies at {from}..{to}, expected to begin at {end}")));
            }
            end = to;
            let Some(size) = element_len(&entry.dtype) else { continue };
            let len = entry.shape.iter().try_fold(size, |len, n| len.checked_mul(*n as u64));
            if len != Some(to - from) {
                return Err(bad(format!("has {} bytes for shape {:?} of {}", to - from, entry.shape, entry.dtype)));
            }
        }
        Ok(end)
    }

    fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let (path, named) = (self.path.clone(), name.to_owned());
        let Some(entry) = self.entries.get(name) else {
            return Err(LoadError::MissingTensor { path, name: named });
        };
        if entry.shape != shape {
            return Err(LoadError::WrongShape {
                path,
                name: named,
                expected: shape.to_vec(),
                got: entry.shape.clone(),
            });
        }
        let convert: fn(&[u8], &mut Vec<f32>) = match entry.dtype.as_str() {
            "F32" => |bytes, out| out.extend(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value))),
            "F16" => {
                |bytes, out| out.extend(bytes.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()))
            }
            "BF16" => {
                |bytes, out| out.extend(bytes.as_chunks().0.iter().map(|value| bf16::from_le_bytes(*value).to_f32()))
            }
            got => {
                let expected = "F32, F16 or BF16";
                return Err(LoadError::WrongType { path, name: named, expected, got: got.to_owned() });
            }
        };
        let (from, to) = entry.data_offsets;
        let mut values = Vec::with_capacity(shape.iter().product());
        let mut buffer = vec![0; READ_LEN.min((to - from) as usize)];
        let mut offset = from;
        while offset < to {
            let len = READ_LEN.min((to - offset) as usize);
            let bytes = &mut buffer[..len];
            self.storage
                .read_exact_at(bytes, self.data_offset + offset)
                .map_err(|source| LoadError::Unreadable { path: path.clone(), source })?;
            convert(bytes, &mut values);
            offset += len as u64;
        }
        Ok(values)
    }
}

/// Bytes of an element, for the types whose elements have whole bytes.
fn element_len(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => 1,
        "F16" | "BF16" | "I16" | "U16" => 2,
        "F32" | "I32" | "U32" => 4,
        "F64" | "I64" | "U64" => 8,
        _ => return None,
    })
}
