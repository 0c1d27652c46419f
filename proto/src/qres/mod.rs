//! QRES: residuals with few bits a coordinate. Spec: `proto/spec-qres.md`.
//!
//! ```text
//! byte  0        4          8            12    16         20            24       25     26      28     32
//!       | "QRES" | boundary | hidden_dim | seq | basis_fp | methodology | format | bits | flags | seed | escaped | positions
//!       | tag    | u32      | u32        | u32 | u32      | u32         | u8     | u8   | u16   | u32  | bitmap  |
//! ```
//!
//! All little-endian. The bitmap has one bit a position, least significant first: set means that the position is
//! **escaped**, sent as f16 (as f32 with flag 1), whatever the format. The others hold, by format:
//!
//! | format | bits | a position of width d |
//! |---|---|---|
//! | 0 | 16 | f16 × d |
//! | 1 | 8 | f16 scale for each block of 64, then i8 × d |
//! | 2 | 3 to 8 | f16 gain, then d codes of the rotated difference from the mean, least significant bit first |
//!
//! Encoding and decoding give the same bits everywhere: each operation is rounded to f32 (or f16), nothing is fused, and
//! sums have the order of [`crate::kernel`]. A station checks the fields against its bases and model; this module knows
//! neither.

mod codebook;
mod encode;
mod half;
mod rotation;
mod rows;
#[cfg(test)]
mod tests;
#[cfg(all(feature = "std", target_arch = "x86_64"))]
mod x86;

use self::{
    codebook::Codebook,
    rows::{Job, Path},
};
pub use self::{
    codebook::{MAX_BITS, MIN_BITS, levels},
    encode::{EncodeError, encode, encoded_len, is_outlier, norm},
    rotation::{MAX_WIDTH, Rotation},
};
use crate::cursor::Cursor;

/// The first four bytes.
pub const TAG: [u8; 4] = *b"QRES";
/// Bytes before the bitmap.
pub const HEADER_LEN: usize = 32;
/// Coordinates that share a scale in format 1.
pub const I8_BLOCK: usize = 64;
/// The one flag: escaped positions are f32.
const F32_ESCAPES: u16 = 1;

/// How positions that are not escaped are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Half precision.
    F16,
    /// 8-bit integers in blocks of 64, each with a scale.
    I8,
    /// Rotated, this many bits a coordinate: 3 to 8.
    Rotated(u8),
}

impl Format {
    /// The bytes `format` and `bits`.
    #[must_use]
    pub const fn codes(self) -> (u8, u8) {
        match self {
            Self::F16 => (0, 16),
            Self::I8 => (1, 8),
            Self::Rotated(bits) => (2, bits),
        }
    }

    /// All formats, the most exact first.
    pub const ALL: [Self; 8] = [
        Self::F16,
        Self::I8,
        Self::Rotated(8),
        Self::Rotated(7),
        Self::Rotated(6),
        Self::Rotated(5),
        Self::Rotated(4),
        Self::Rotated(3),
    ];

    /// The body kind, as `accept` and `body` name it: `f16`, `i8`, `q3` to `q8`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::I8 => "i8",
            Self::Rotated(3) => "q3",
            Self::Rotated(4) => "q4",
            Self::Rotated(5) => "q5",
            Self::Rotated(6) => "q6",
            Self::Rotated(7) => "q7",
            // Other numbers of bits are refused wherever a header is checked.
            Self::Rotated(_) => "q8",
        }
    }

    /// The format of a body kind; `None` for others.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The format that a body says it has; `None` if that is none, or if it is too short to say.
    #[must_use]
    pub fn peek(body: &[u8]) -> Option<Self> {
        let codes = body.get(24..26).filter(|_| body.starts_with(&TAG))?;
        let (format, bits) = (codes.first()?, codes.last()?);
        Self::from_codes(*format, *bits)
    }

    /// Whether it takes the mean off and rotates: only such bodies name a basis and a seed.
    #[must_use]
    pub const fn is_rotated(self) -> bool {
        matches!(self, Self::Rotated(_))
    }

    const fn from_codes(format: u8, bits: u8) -> Option<Self> {
        match (format, bits) {
            (0, 16) => Some(Self::F16),
            (1, 8) => Some(Self::I8),
            (2, MIN_BITS..=MAX_BITS) => Some(Self::Rotated(bits)),
            _ => None,
        }
    }

    /// Bytes of a position of width `d` that is not escaped.
    #[must_use]
    pub const fn position_len(self, d: usize) -> usize {
        match self {
            Self::F16 => d.saturating_mul(2),
            Self::I8 => d.div_ceil(I8_BLOCK).saturating_mul(2).saturating_add(d),
            Self::Rotated(bits) => d.saturating_mul(bits as usize).div_ceil(8).saturating_add(2),
        }
    }
}

/// What a body says about itself, beside which positions are escaped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes 4..8: the number of layers already applied.
    pub boundary: u32,
    /// Bytes 8..12: the sender's residual width, 1 to [`MAX_WIDTH`].
    pub hidden_dim: u32,
    /// Bytes 16..20: FNV-1a 32 of the basis file whose mean was subtracted; 0 for no mean. Only format 2 has one.
    pub basis_fp: u32,
    /// Bytes 20..24: methodology of that basis; 0 for no mean.
    pub methodology: u32,
    /// Bytes 24 and 25.
    pub format: Format,
    /// Bytes 28..32: seed of the rotation; 0 in the other formats.
    pub seed: u32,
}

/// Why a body is no QRES. Positions count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum DecodeError {
    /// Too short for its header and bitmap.
    #[error("qres of {got} bytes, its header and bitmap take {needed}")]
    Truncated {
        /// Bytes of header and bitmap.
        needed: usize,
        /// Bytes there are.
        got: usize,
    },
    /// Another tag.
    #[error("qres tag is {got:02x?}, expected \"QRES\"")]
    BadTag {
        /// What stands there.
        got: [u8; 4],
    },
    /// A format, or a number of bits in it, that is not defined.
    #[error("qres format {format} with {bits} bits; known are 0 with 16, 1 with 8, and 2 with 3 to 8")]
    UnknownFormat {
        /// The format byte.
        format: u8,
        /// The bits byte.
        bits: u8,
    },
    /// Flags that are not defined.
    #[error("qres flags are 0x{flags:04x}, only 0x0001 is defined")]
    UnknownFlags {
        /// The flags.
        flags: u16,
    },
    /// A width of nothing or too much.
    #[error("qres hidden_dim is {got}, it must be 1 to {MAX_WIDTH}")]
    Width {
        /// By the header.
        got: u32,
    },
    /// No positions.
    #[error("qres holds no positions")]
    NoPositions,
    /// A mean or seed in a format that has none, or a methodology without a basis.
    #[error("qres {field} is 0x{got:08x}, in this format it must be 0")]
    Unused {
        /// The field.
        field: &'static str,
        /// What stands there.
        got: u32,
    },
    /// A bit of the bitmap beyond the last position.
    #[error("qres bitmap marks positions beyond the last")]
    Bitmap,
    /// Bits other than 0 after the last code of a position.
    #[error("qres position {position} has bits after its last code, they must be 0")]
    Padding {
        /// The position.
        position: usize,
    },
    /// Longer or shorter than its positions.
    #[error("qres of {got} bytes, {seq} positions of which {escaped} are escaped take {needed}")]
    Length {
        /// Positions.
        seq: usize,
        /// Escaped ones.
        escaped: usize,
        /// Bytes they take, with everything before them.
        needed: u64,
        /// Bytes there are.
        got: usize,
    },
}

/// A position whose numbers are not all finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
#[error("qres position {position} holds NaN or infinity")]
pub struct NonFinitePosition {
    /// Counted from 0.
    pub position: usize,
}

/// Why a body cannot be read into residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum ReadError {
    /// A mean or rotation of another width or seed, one too many, or one missing.
    #[error("the mean or rotation given is not the one that the qres header names")]
    Parts,
    /// Room for another number of values.
    #[error("room for {got} values where {seq} positions of {d} are expected")]
    Shape {
        /// Values there is room for.
        got: usize,
        /// Positions of the body.
        seq: usize,
        /// Values of a position.
        d: usize,
    },
}

/// Mean and rotation, as the header of a body names them.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// The mean of the boundary, `[d]`; `None` if `basis_fp` is 0.
    pub mean: Option<&'a [f32]>,
    /// The rotation of width d from `seed`; `None` but in format 2.
    pub rotation: Option<&'a Rotation>,
}

impl Parts<'_> {
    fn fit(&self, header: &Header) -> bool {
        let d = header.hidden_dim as usize;
        self.mean.is_some() == (header.basis_fp != 0)
            && self.mean.is_none_or(|mean| mean.len() == d)
            && self.rotation.is_some() == header.format.is_rotated()
            && self.rotation.is_none_or(|rotation| rotation.width() == d && rotation.seed() == header.seed)
    }
}

impl Header {
    fn check(&self) -> Result<(), DecodeError> {
        let (format, bits) = self.format.codes();
        if Format::from_codes(format, bits).is_none() {
            return Err(DecodeError::UnknownFormat { format, bits });
        }
        if self.hidden_dim == 0 || self.hidden_dim as usize > MAX_WIDTH {
            return Err(DecodeError::Width { got: self.hidden_dim });
        }
        let is_rotated = self.format.is_rotated();
        for (field, got, may_stand) in [
            ("basis_fp", self.basis_fp, is_rotated),
            ("methodology", self.methodology, is_rotated && self.basis_fp != 0),
            ("seed", self.seed, is_rotated),
        ] {
            if got != 0 && !may_stand {
                return Err(DecodeError::Unused { field, got });
            }
        }
        Ok(())
    }
}

/// A body, checked in its form: every position is where the header and bitmap say. Numbers are not looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QresBody<'a> {
    header: Header,
    seq: usize,
    has_f32_escapes: bool,
    bitmap: &'a [u8],
    positions: &'a [u8],
}

impl<'a> QresBody<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// See [`DecodeError`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let short = |needed: usize| DecodeError::Truncated { needed, got: bytes.len() };
        let mut cursor = Cursor::new(bytes);
        let tag = cursor.array().map_err(|_| short(HEADER_LEN))?;
        if tag != TAG {
            return Err(DecodeError::BadTag { got: tag });
        }
        let mut word = || cursor.u32_le().map_err(|_| short(HEADER_LEN));
        let (boundary, hidden_dim, seq, basis_fp, methodology) = (word()?, word()?, word()?, word()?, word()?);
        let [format, bits, low, high] = word()?.to_le_bytes();
        let seed = word()?;
        let Some(format) = Format::from_codes(format, bits) else {
            return Err(DecodeError::UnknownFormat { format, bits });
        };
        let flags = u16::from_le_bytes([low, high]);
        if flags & !F32_ESCAPES != 0 {
            return Err(DecodeError::UnknownFlags { flags });
        }
        let header = Header { boundary, hidden_dim, basis_fp, methodology, format, seed };
        header.check()?;
        let seq = seq as usize;
        if seq == 0 {
            return Err(DecodeError::NoPositions);
        }
        let bitmap_len = seq.div_ceil(8);
        let bitmap = cursor.take(bitmap_len).map_err(|_| short(HEADER_LEN.saturating_add(bitmap_len)))?;
        if !seq.is_multiple_of(8) && bitmap.last().is_some_and(|last| last >> (seq % 8) != 0) {
            return Err(DecodeError::Bitmap);
        }
        let escaped: usize = bitmap.iter().map(|byte| byte.count_ones() as usize).sum();
        let has_f32_escapes = flags & F32_ESCAPES != 0;
        let body = Self { header, seq, has_f32_escapes, bitmap, positions: cursor.rest() };
        let len = |count: usize, len: usize| (count as u64).saturating_mul(len as u64);
        let plain = header.format.position_len(hidden_dim as usize);
        let needed = (cursor.offset() as u64)
            .saturating_add(len(escaped, body.escaped_len()))
            .saturating_add(len(seq.saturating_sub(escaped), plain));
        if needed != bytes.len() as u64 {
            return Err(DecodeError::Length { seq, escaped, needed, got: bytes.len() });
        }
        if let Format::Rotated(bits) = header.format {
            let mut padded = Ok(());
            body.each_position(|position, is_escaped, bytes| {
                if padded.is_ok() && !is_escaped && !rows::is_padded(bytes, hidden_dim as usize, bits) {
                    padded = Err(DecodeError::Padding { position });
                }
            });
            padded?;
        }
        Ok(body)
    }

    /// The header.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Number of positions.
    #[must_use]
    pub const fn seq(&self) -> usize {
        self.seq
    }

    /// Whether a position is escaped.
    #[must_use]
    pub fn is_escaped(&self, position: usize) -> bool {
        self.bitmap.get(position / 8).is_some_and(|byte| byte >> (position % 8) & 1 == 1)
    }

    const fn escaped_len(&self) -> usize {
        (self.header.hidden_dim as usize).saturating_mul(if self.has_f32_escapes { 4 } else { 2 })
    }

    #[inline(always)]
    fn each_position(&self, mut each: impl FnMut(usize, bool, &'a [u8])) {
        let (escaped_len, plain_len) =
            (self.escaped_len(), self.header.format.position_len(self.header.hidden_dim as usize));
        let mut rest = self.positions;
        for position in 0..self.seq {
            let is_escaped = self.is_escaped(position);
            let len = if is_escaped { escaped_len } else { plain_len };
            let (bytes, after) = rest.split_at_checked(len).unwrap_or_default();
            each(position, is_escaped, bytes);
            rest = after;
        }
    }

    /// Looks for NaN and infinity among the numbers of the body: escaped values, halves, scales and gains.
    ///
    /// # Errors
    /// [`NonFinitePosition`] with the first position that has one.
    pub fn check_finite(&self) -> Result<(), NonFinitePosition> {
        Path::detect().run(CheckFinite(self))
    }

    /// Writes the residuals, `[seq, d]`, to `out`. They can be infinite even if the body is finite, since a mean is added:
    /// the caller looks.
    ///
    /// Allocates one row in format 2. Numbers that are not finite give some value, and no fault.
    ///
    /// # Errors
    /// See [`ReadError`]; `out` is unchanged then.
    pub fn read(&self, parts: &Parts<'_>, out: &mut [f32]) -> Result<(), ReadError> {
        self.read_by(Path::detect(), parts, out)
    }

    fn read_by(&self, path: Path, parts: &Parts<'_>, out: &mut [f32]) -> Result<(), ReadError> {
        let d = self.header.hidden_dim as usize;
        if !parts.fit(&self.header) {
            return Err(ReadError::Parts);
        }
        if self.seq.checked_mul(d) != Some(out.len()) {
            return Err(ReadError::Shape { got: out.len(), seq: self.seq, d });
        }
        path.run(Read { body: self, parts, out });
        Ok(())
    }
}

struct CheckFinite<'a>(&'a QresBody<'a>);

impl Job for CheckFinite<'_> {
    type Output = Result<(), NonFinitePosition>;

    #[inline(always)]
    fn run(self) -> Self::Output {
        let Self(body) = self;
        let d = body.header.hidden_dim as usize;
        let mut checked = Ok(());
        body.each_position(|position, is_escaped, bytes| {
            let is_finite = match (is_escaped, body.header.format) {
                (true, _) if body.has_f32_escapes => {
                    bytes.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite())
                }
                (true, _) | (_, Format::F16) => rows::are_finite_halves(bytes),
                (_, Format::I8) => {
                    let scales = d.div_ceil(I8_BLOCK).saturating_mul(2);
                    rows::are_finite_halves(bytes.get(..scales).unwrap_or_default())
                }
                (_, Format::Rotated(_)) => rows::are_finite_halves(bytes.get(..2).unwrap_or_default()),
            };
            if checked.is_ok() && !is_finite {
                checked = Err(NonFinitePosition { position });
            }
        });
        checked
    }
}

struct Read<'a> {
    body: &'a QresBody<'a>,
    parts: &'a Parts<'a>,
    out: &'a mut [f32],
}

impl Job for Read<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { body, parts, out } = self;
        let book = match body.header.format {
            Format::Rotated(bits) => Codebook::of(bits),
            Format::F16 | Format::I8 => None,
        };
        let mut scratch = parts.rotation.map(Rotation::scratch).unwrap_or_default();
        let mut rows = out.chunks_exact_mut(body.header.hidden_dim as usize);
        body.each_position(|_, is_escaped, bytes| {
            let Some(row) = rows.next() else { return };
            match (is_escaped, body.header.format, book, parts.rotation) {
                (true, ..) if body.has_f32_escapes => rows::read_whole(bytes, row),
                (true, ..) | (_, Format::F16, ..) => rows::read_halves(bytes, row),
                (_, Format::I8, ..) => rows::read_i8(bytes, row),
                (_, Format::Rotated(_), Some(book), Some(rotation)) => {
                    rows::read_rotated(bytes, book, rotation, parts.mean, &mut scratch, row);
                }
                (_, Format::Rotated(_), ..) => {}
            }
        });
    }
}
