//! The GGUF file format: metadata and the table of tensors, each checked against the length of the file.
//!
//! The transformer backend takes configuration and tensors from it, the tokenizer its vocabulary; it knows neither.
//! Byte order is little-endian; versions 2 and 3. Format: the `docs/gguf.md` of the ggml project.
//!
//! ```text
//! magic "GGUF" | version u32 | tensors u64 | values u64 | values | table of tensors | padding | data
//! ```

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

const MAGIC: [u8; 4] = *b"GGUF";
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
/// Multiple of which the data begins at, unless the file names another.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted: a huge page.
const MAX_ALIGNMENT: u64 = 1 << 21;
/// Dimensions of a tensor, as in ggml.
const MAX_DIMS: u32 = 4;
/// Longest key, tensor name or token; a chat template is the longest text in practice.
const MAX_TEXT_LEN: u64 = 1 << 24;

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be read.
    #[error("{path}: cannot read the file (check the path and its permissions)")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file ends too early.
    #[error("{path}: file is cut short: {expected} bytes announced, {got} there (fetch it again)")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that it needs.
        expected: u64,
        /// Bytes that it has.
        got: u64,
    },
    /// Something in the header is not what the format allows.
    #[error("{path}: bad header: {fault} (the file is damaged or of another format)")]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: String,
    },
}

/// A metadata value. Arrays of arrays, which no known file has, are refused.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any whole number.
    Integer(i128),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text; bytes that are no UTF-8 become U+FFFD.
    Text(String),
    /// An array of whole numbers or truth values.
    Integers(Vec<i64>),
    /// An array of f32 or f64.
    Floats(Vec<f32>),
    /// An array of texts.
    Texts(Vec<String>),
}

/// An element type: how many elements are packed into how many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    BF16,
    /// 4 bits and a scale.
    Q4_0,
    /// 4 bits, scale and minimum.
    Q4_1,
    /// 5 bits and a scale.
    Q5_0,
    /// 5 bits, scale and minimum.
    Q5_1,
    /// 8 bits and a scale.
    Q8_0,
    /// k-quant of 2 bits.
    Q2K,
    /// k-quant of 3 bits.
    Q3K,
    /// k-quant of 4 bits.
    Q4K,
    /// k-quant of 5 bits.
    Q5K,
    /// k-quant of 6 bits.
    Q6K,
    /// A type that is not read, by its number.
    Unknown(u32),
}

impl ElementType {
    const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::BF16,
            _ => Self::Unknown(number),
        }
    }

    /// Elements and bytes of a block.
    #[must_use]
    pub const fn block(self) -> Option<(u64, u64)> {
        Some(match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q2K => (256, 84),
            Self::Q3K => (256, 110),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
            Self::Unknown(_) => return None,
        })
    }
}

/// An entry of the table of tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Sizes, the slowest first (the file has the fastest first).
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub element_type: ElementType,
    /// Where the tensor begins in the file.
    pub offset: u64,
    /// Its length in bytes; 0 if the type is unknown.
    pub byte_len: u64,
}

/// A GGUF file whose header has been read and checked.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    file: File,
    values: HashMap<String, Value>,
    tensors: HashMap<String, TensorEntry>,
}

impl Gguf {
    /// Reads the header of a file. Every tensor of a known type lies within the file.
    ///
    /// # Errors
    /// [`GgufError`].
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let unreadable = |source| GgufError::Unreadable { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let file_len = file.metadata().map_err(unreadable)?.len();
        let reader = BufReader::with_capacity(1 << 16, &file);
        let mut header = Header { path, reader, position: 0, file_len };
        let (values, tensors) = header.read()?;
        Ok(Self { path: path.to_owned(), file, values, tensors })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A metadata value.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// A text.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        if let Some(Value::Text(text)) = self.value(key) { Some(text) } else { None }
    }

    /// A whole number that is not negative.
    #[must_use]
    pub fn unsigned(&self, key: &str) -> Option<u64> {
        if let Some(Value::Integer(number)) = self.value(key) { u64::try_from(*number).ok() } else { None }
    }

    /// A number with or without fraction.
    #[must_use]
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.value(key)? {
            Value::Float(number) => Some(*number),
            Value::Integer(number) => Some(*number as f64),
            _ => None,
        }
    }

    /// A truth value.
    #[must_use]
    pub fn boolean(&self, key: &str) -> Option<bool> {
        if let Some(Value::Bool(value)) = self.value(key) { Some(*value) } else { None }
    }

    /// An array of texts.
    #[must_use]
    pub fn texts(&self, key: &str) -> Option<&[String]> {
        if let Some(Value::Texts(texts)) = self.value(key) { Some(texts) } else { None }
    }

    /// An array of numbers with fraction.
    #[must_use]
    pub fn floats(&self, key: &str) -> Option<&[f32]> {
        if let Some(Value::Floats(floats)) = self.value(key) { Some(floats) } else { None }
    }

    /// An array of whole numbers.
    #[must_use]
    pub fn integers(&self, key: &str) -> Option<&[i64]> {
        if let Some(Value::Integers(integers)) = self.value(key) { Some(integers) } else { None }
    }

    /// Where a tensor lies.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// Fills `out` from the file.
    ///
    /// # Errors
    /// [`GgufError::Unreadable`], also if the file has become shorter.
    pub fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<(), GgufError> {
        self.file.read_exact_at(out, offset).map_err(|source| GgufError::Unreadable { path: self.path.clone(), source })
    }
}

/// Reads a header and knows how much of the file is left.
struct Header<'a> {
    path: &'a Path,
    reader: BufReader<&'a File>,
    position: u64,
    file_len: u64,
}

type Contents = (HashMap<String, Value>, HashMap<String, TensorEntry>);

impl Header<'_> {
    fn read(&mut self) -> Result<Contents, GgufError> {
        let magic = self.array::<4>()?;
        if magic != MAGIC {
            return Err(self.bad(format!("begins with {magic:02x?}, expected {MAGIC:02x?}")));
        }
        let version = self.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(self.bad(format!("version {version}, expected {VERSIONS:?}")));
        }
        let (n_tensors, n_values) = (self.u64()?, self.u64()?);
        let mut values = HashMap::new();
        for _ in 0..n_values {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(self.bad(format!("key {key} twice")));
            }
        }
        let mut tensors = HashMap::new();
        for _ in 0..n_tensors {
            let (name, entry) = self.tensor()?;
            if tensors.insert(name.clone(), entry).is_some() {
                return Err(self.bad(format!("tensor {name} twice")));
            }
        }
        let alignment = match values.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(Value::Integer(n)) if (1..=i128::from(MAX_ALIGNMENT)).contains(n) => *n as u64,
            Some(other) => return Err(self.bad(format!("alignment {other:?}, expected 1 to {MAX_ALIGNMENT}"))),
        };
        let data_offset = self.position.next_multiple_of(alignment);
        for (name, entry) in &mut tensors {
            let offset = data_offset.checked_add(entry.offset);
            let Some((offset, end)) = offset.and_then(|offset| Some((offset, offset.checked_add(entry.byte_len)?)))
            else {
                return Err(self.bad(format!("tensor {name} lies at {}", entry.offset)));
            };
            if end > self.file_len {
                return Err(self.truncated(end));
            }
            entry.offset = offset;
        }
        Ok((values, tensors))
    }

    fn tensor(&mut self) -> Result<(String, TensorEntry), GgufError> {
        let name = self.text()?;
        let n_dims = self.u32()?;
        if n_dims > MAX_DIMS {
            return Err(self.bad(format!("tensor {name} has {n_dims} dimensions, at most {MAX_DIMS}")));
        }
        let mut shape = Vec::new();
        for _ in 0..n_dims {
            shape.push(self.u64()?);
        }
        let row_len = shape.first().copied().unwrap_or(1);
        let element_type = ElementType::from_number(self.u32()?);
        let offset = self.u64()?;
        let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let byte_len = match element_type.block() {
            None => Some(0),
            Some((block, _)) if !row_len.is_multiple_of(block) => {
                return Err(self.bad(format!("tensor {name} has rows of {row_len}, expected a multiple of {block}")));
            }
            Some((block, bytes)) => elements.and_then(|elements| (elements / block).checked_mul(bytes)),
        };
        let sizes: Result<Vec<usize>, _> = shape.iter().rev().map(|size| usize::try_from(*size)).collect();
        match (byte_len, sizes) {
            (Some(byte_len), Ok(shape)) => Ok((name, TensorEntry { shape, element_type, offset, byte_len })),
            _ => Err(self.bad(format!("tensor {name} has shape {shape:?}"))),
        }
    }

    fn value(&mut self, kind: u32) -> Result<Value, GgufError> {
        if kind == 9 {
            let (kind, len) = (self.u32()?, self.u64()?);
            return self.values(kind, len);
        }
        Ok(match kind {
            7 => Value::Bool(self.integer(kind)? != 0),
            6 | 12 => Value::Float(self.fraction(kind)?),
            8 => Value::Text(self.text()?),
            _ => Value::Integer(self.integer(kind)?),
        })
    }

    fn values(&mut self, kind: u32, len: u64) -> Result<Value, GgufError> {
        // Nothing is reserved for a length before as many bytes have been read.
        Ok(match kind {
            9 => return Err(self.bad("an array of arrays".to_owned())),
            6 | 12 => {
                let mut floats = Vec::new();
                for _ in 0..len {
                    floats.push(self.fraction(kind)? as f32);
                }
                Value::Floats(floats)
            }
            8 => {
                let mut texts = Vec::new();
                for _ in 0..len {
                    texts.push(self.text()?);
                }
                Value::Texts(texts)
            }
            _ => {
                let mut integers = Vec::new();
                for _ in 0..len {
                    integers.push(self.integer(kind)? as i64);
                }
                Value::Integers(integers)
            }
        })
    }

    fn integer(&mut self, kind: u32) -> Result<i128, GgufError> {
        Ok(match kind {
            0 | 7 => u8::from_le_bytes(self.array()?).into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => u32::from_le_bytes(self.array()?).into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            10 => u64::from_le_bytes(self.array()?).into(),
            11 => i64::from_le_bytes(self.array()?).into(),
            _ => return Err(self.bad(format!("value of type {kind}"))),
        })
    }

    fn fraction(&mut self, kind: u32) -> Result<f64, GgufError> {
        Ok(if kind == 6 { f32::from_le_bytes(self.array()?).into() } else { f64::from_le_bytes(self.array()?) })
    }

    fn text(&mut self) -> Result<String, GgufError> {
        let len = self.u64()?;
        self.need(len)?;
        if len > MAX_TEXT_LEN {
            return Err(self.bad(format!("a text of {len} bytes, at most {MAX_TEXT_LEN}")));
        }
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes)?;
        Ok(match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        })
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), GgufError> {
        self.need(bytes.len() as u64)?;
        self.position += bytes.len() as u64;
        self.reader.read_exact(bytes).map_err(|source| GgufError::Unreadable { path: self.path.to_owned(), source })
    }

    fn need(&self, len: u64) -> Result<(), GgufError> {
        let end = self.position.saturating_add(len);
        if end > self.file_len { Err(self.truncated(end)) } else { Ok(()) }
    }

    fn bad(&self, fault: String) -> GgufError {
        GgufError::BadHeader { path: self.path.to_owned(), fault }
    }

    fn truncated(&self, expected: u64) -> GgufError {
        GgufError::Truncated { path: self.path.to_owned(), expected, got: self.file_len }
    }
}
