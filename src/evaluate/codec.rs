//! Forms in which residuals can travel, as what a receiver has after them.

use std::{fmt, str::FromStr, sync::Arc};

use aeon_proto::{
    kernel, pcar,
    qres::{self, Format, QresBody, Rotation},
    residual,
};
use half::f16;

use super::error::{CodecError, EvaluateError};
use crate::{
    basis::{BasisFile, fit::OUTLIER_FACTOR},
    client::policy::{CompressionPolicy, compress_residuals},
};

/// A form of residuals, as a command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Setting {
    /// Raw f32.
    F32,
    /// PCA components.
    Pcar {
        /// Components; as many as the basis has if `None`.
        k: Option<u32>,
        /// Whether outlying positions are sent as f16 beside them. The wire has no such form; it shows what it would give.
        escape: bool,
    },
    /// Half floats, 8-bit integers, or few bits of a rotation.
    Quantised {
        /// The form.
        format: Format,
        /// Whether the basis's mean is taken off first.
        mean: bool,
    },
}

/// A text that names no form of residuals.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown body {text:?}; known are f32, f16, i8, q3 to q8, qN:nomean, pcar, pcar:K and pcar:K:escape")]
pub struct SettingError {
    /// The text.
    pub text: String,
}

impl FromStr for Setting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let wrong = || SettingError { text: text.to_owned() };
        let mut parts = text.split(':');
        let setting = match parts.next() {
            Some("f32") => Self::F32,
            Some("pcar") => {
                let k = parts.next().map(|k| k.parse().ok().filter(|k| *k > 0).ok_or_else(wrong)).transpose()?;
                let escape = match parts.next() {
                    None => false,
                    Some("escape") => true,
                    Some(_) => return Err(wrong()),
                };
                Self::Pcar { k, escape }
            }
            Some(name) => {
                let format = Format::from_name(name).ok_or_else(wrong)?;
                let mean = match parts.next() {
                    None => format.is_rotated(),
                    Some("nomean") if format.is_rotated() => false,
                    Some(_) => return Err(wrong()),
                };
                Self::Quantised { format, mean }
            }
            None => return Err(wrong()),
        };
        if parts.next().is_some() { Err(wrong()) } else { Ok(setting) }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::Pcar { k, escape } => {
                f.write_str("pcar")?;
                k.map_or(Ok(()), |k| write!(f, ":{k}"))?;
                f.write_str(if *escape { ":escape" } else { "" })
            }
            Self::Quantised { format, mean } => {
                f.write_str(format.name())?;
                f.write_str(if format.is_rotated() && !mean { ":nomean" } else { "" })
            }
        }
    }
}

/// What went over a hop for some positions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes of the body.
    pub bytes: usize,
    /// Positions that were sent in another form, because the usual one would spoil them.
    pub escaped: usize,
}

/// Encodes and decodes the residuals of one boundary.
pub trait BodyCodec: Send + Sync {
    /// Replaces `residuals`, `[seq, d]`, the first of which is position `pos` of its session, by what the receiver decodes.
    ///
    /// # Errors
    /// See [`CodecError`].
    fn transmit(&self, pos: usize, residuals: &mut [f32]) -> Result<Sent, CodecError>;

    /// Bytes of an ordinary position in a body, without any header.
    fn payload_len(&self) -> usize;

    /// Bytes of the body that holds one ordinary position: what a generated token costs.
    fn body_len(&self) -> usize;
}

/// The codec of a setting for one boundary.
///
/// # Errors
/// [`EvaluateError::NoBasis`], [`EvaluateError::Components`].
pub fn codec(
    setting: Setting,
    boundary: u32,
    d: usize,
    basis: Option<&Arc<BasisFile>>,
) -> Result<Box<dyn BodyCodec>, EvaluateError> {
    match setting {
        Setting::F32 => Ok(Box::new(F32 { d })),
        Setting::Pcar { k, escape } => {
            let part = basis.and_then(|basis| Some((basis, basis.boundary(boundary).filter(|part| part.k > 0)?)));
            let Some((basis, part)) = part else { return Err(no_basis(setting, boundary, basis)) };
            if let Some(k) = k.filter(|k| *k as usize > part.k) {
                return Err(EvaluateError::Components { k, max: part.k, boundary });
            }
            let k = k.unwrap_or(part.k as u32);
            let escapes = escape.then(|| Escapes::of(basis, boundary));
            let policy = CompressionPolicy::of(basis, k);
            Ok(Box::new(Pcar { basis: Arc::clone(basis), boundary, d, policy, escapes }))
        }
        Setting::Quantised { format, mean } => {
            let with_mean = basis.filter(|basis| basis.boundary(boundary).is_some());
            if mean && with_mean.is_none() {
                return Err(no_basis(setting, boundary, basis));
            }
            let named = with_mean.filter(|_| mean);
            let seed = if format.is_rotated() { ROTATION_SEED } else { 0 };
            Ok(Box::new(Quantised {
                header: qres::Header {
                    boundary,
                    hidden_dim: u32::try_from(d).unwrap_or(u32::MAX),
                    basis_fp: named.map_or(0, |basis| basis.basis_fp()),
                    methodology: named.map_or(0, |basis| basis.methodology()),
                    format,
                    seed,
                },
                basis: named.map(Arc::clone),
                rotation: if format.is_rotated() { Rotation::new(d, seed) } else { None },
                escapes: with_mean.map_or(Escapes::over(None), |basis| Escapes::of(basis, boundary)),
                d,
            }))
        }
    }
}

/// Seed of the rotation; any does as well.
const ROTATION_SEED: u32 = 1;

fn no_basis(setting: Setting, boundary: u32, basis: Option<&Arc<BasisFile>>) -> EvaluateError {
    let have = basis.into_iter().flat_map(|basis| basis.boundaries()).map(|part| part.boundary).collect();
    EvaluateError::NoBasis { setting: setting.to_string(), boundary, have }
}

/// Which positions are not ordinary.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Escapes {
    limit: f32,
}

impl Escapes {
    /// By the median norm that a basis file has for the boundary; only position 0 if it has none.
    #[must_use]
    pub fn of(basis: &BasisFile, boundary: u32) -> Self {
        Self::over(basis.median_norm(boundary))
    }

    /// Norms over four times `median_norm`, and position 0.
    #[must_use]
    pub fn over(median_norm: Option<f32>) -> Self {
        Self { limit: median_norm.map_or(f32::INFINITY, |norm| norm * OUTLIER_FACTOR) }
    }

    /// Whether a position is to be sent in another form.
    #[must_use]
    pub fn takes(&self, pos: usize, residual: &[f32]) -> bool {
        pos == 0 || norm(residual) > f64::from(self.limit)
    }
}

pub(super) fn norm(residual: &[f32]) -> f64 {
    residual.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

struct F32 {
    d: usize,
}

impl BodyCodec for F32 {
    fn transmit(&self, _: usize, residuals: &mut [f32]) -> Result<Sent, CodecError> {
        residual::check_finite_values(residuals)?;
        Ok(Sent { bytes: 4 * residuals.len(), escaped: 0 })
    }

    fn payload_len(&self) -> usize {
        4 * self.d
    }

    fn body_len(&self) -> usize {
        4 * self.d
    }
}

struct Pcar {
    basis: Arc<BasisFile>,
    boundary: u32,
    d: usize,
    policy: CompressionPolicy,
    escapes: Option<Escapes>,
}

impl BodyCodec for Pcar {
    fn transmit(&self, pos: usize, residuals: &mut [f32]) -> Result<Sent, CodecError> {
        let mut body = Vec::new();
        compress_residuals(residuals, self.boundary, &self.policy, &self.basis, &mut body)?;
        let unreadable = |error| CodecError::Unreadable(Box::new(error));
        let decoded = pcar::PcarBody::decode(&body).map_err(unreadable)?;
        let mut components = Vec::new();
        decoded.read_components(&mut components);
        let (mean, rows) = self
            .basis
            .boundary(self.boundary)
            .and_then(|part| Some((part.mean, part.prefix(decoded.k() as usize)?)))
            .unwrap_or_default();
        let mut lifted = vec![0.0; residuals.len()];
        kernel::lift_batch(mean, rows, &components, &mut lifted)?;
        residual::check_finite_values(&lifted)?;
        let mut sent = Sent { bytes: body.len(), escaped: 0 };
        let one = body.len() / decoded.seq().max(1);
        for (index, (row, lifted)) in residuals.chunks_mut(self.d).zip(lifted.chunks(self.d)).enumerate() {
            match self.escapes {
                Some(escapes) if escapes.takes(pos + index, row) => {
                    row.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32());
                    sent.escaped += 1;
                    sent.bytes = sent.bytes - one + 2 * self.d;
                }
                _ => row.copy_from_slice(lifted),
            }
        }
        residual::check_finite_values(residuals)?;
        Ok(sent)
    }

    fn payload_len(&self) -> usize {
        4 * self.policy.k_components as usize
    }

    fn body_len(&self) -> usize {
        pcar::HEADER_LEN + self.payload_len()
    }
}

struct Quantised {
    header: qres::Header,
    basis: Option<Arc<BasisFile>>,
    rotation: Option<Rotation>,
    escapes: Escapes,
    d: usize,
}

impl BodyCodec for Quantised {
    fn transmit(&self, pos: usize, residuals: &mut [f32]) -> Result<Sent, CodecError> {
        let mean = self.basis.as_ref().and_then(|basis| basis.boundary(self.header.boundary)).map(|part| part.mean);
        let parts = qres::Parts { mean, rotation: self.rotation.as_ref() };
        let mut body = Vec::new();
        let escape = |index: usize, row: &[f32]| self.escapes.takes(pos + index, row);
        qres::encode(&self.header, &parts, residuals, escape, &mut body)?;
        let decoded = QresBody::decode(&body).map_err(|error| CodecError::Unreadable(Box::new(error)))?;
        decoded.read(&parts, residuals).map_err(|error| CodecError::Unreadable(Box::new(error)))?;
        residual::check_finite_values(residuals)?;
        let escaped = (0..decoded.seq()).filter(|position| decoded.is_escaped(*position)).count();
        Ok(Sent { bytes: body.len(), escaped })
    }

    fn payload_len(&self) -> usize {
        self.header.format.position_len(self.d)
    }

    fn body_len(&self) -> usize {
        qres::encoded_len(self.header.format, self.d, 1, 0)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use aeon_proto::pcab::PcabWriter;

    use super::*;

    fn basis() -> Arc<BasisFile> {
        let mut writer = PcabWriter::new(2, 7);
        writer.entry(1, &[1.0, 1.0], &[1.0, 0.0], &[1.0, 2.0]).unwrap();
        let metadata = r#"{"boundaries":{"1":{"rows":9,"outliers":0,"median_norm":1.0}}}"#;
        Arc::new(BasisFile::from_bytes(Path::new("t.pcab"), &writer.finish(metadata).unwrap()).unwrap())
    }

    #[test]
    fn settings_read_what_they_write() {
        for text in ["f32", "f16", "i8", "q3", "q8", "q4:nomean", "pcar", "pcar:8", "pcar:8:escape"] {
            assert_eq!(text.parse::<Setting>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "f33",
            "pcar:",
            "pcar:0",
            "pcar:x",
            "pcar:8:no",
            "pcar:8:escape:",
            "f32:1",
            "q2",
            "q9",
            "i8:nomean",
            "q4:x",
        ] {
            assert!(text.parse::<Setting>().is_err(), "{text}");
        }
    }

    #[test]
    fn components_are_lifted_and_outliers_escape_if_asked() {
        let basis = basis();
        let rows = [3.0, 5.0, 2.0, 0.5, 0.0, 9.1];
        let run = |escape| {
            let mut values = rows;
            let codec = codec(Setting::Pcar { k: Some(1), escape }, 1, 2, Some(&basis)).unwrap();
            assert_eq!((codec.payload_len(), codec.body_len()), (4, 28));
            (codec.transmit(0, &mut values).unwrap(), values)
        };
        assert_eq!(run(false), (Sent { bytes: 3 * 28, escaped: 0 }, [3.0, 1.0, 2.0, 1.0, 0.0, 1.0]));
        let half = f16::from_f32(9.1).to_f32();
        assert_eq!(run(true), (Sent { bytes: 28 + 2 * 4, escaped: 2 }, [3.0, 5.0, 2.0, 1.0, 0.0, half]));
    }

    #[test]
    fn quantised_rows_are_near_and_outliers_nearer() {
        let basis = basis();
        let rows = [3.0, 5.0, 2.0, 0.5, 0.1, 9.1];
        let run = |text: &str, pos, basis: Option<&Arc<BasisFile>>| {
            let mut values = rows;
            let codec = codec(text.parse().unwrap(), 1, 2, basis).unwrap();
            let sent = codec.transmit(pos, &mut values).unwrap();
            assert_eq!(sent.bytes, 32 + 1 + codec.payload_len() * (3 - sent.escaped) + 4 * sent.escaped, "{text}");
            assert_eq!(codec.body_len(), 33 + codec.payload_len());
            (sent.escaped, values.iter().zip(rows).map(|(got, sent)| (got - sent).abs()).fold(0.0, f32::max))
        };
        // Position 0, and the two over four times the median norm of 1.
        assert_eq!(run("q6", 0, Some(&basis)).0, 2);
        assert_eq!(run("q6", 5, Some(&basis)).0, 2);
        // Without a median only position 0 is known to be one.
        assert_eq!((run("q6:nomean", 0, None).0, run("i8", 5, None).0), (1, 0));
        let [coarse, fine] = ["q3:nomean", "q8:nomean"].map(|text| run(text, 5, None).1);
        assert!(fine < coarse && run("f16", 5, None).1 < 0.01);
    }

    #[test]
    fn what_the_basis_lacks_is_named() {
        let basis = basis();
        let wrong = |setting: &str, boundary, basis| codec(setting.parse().unwrap(), boundary, 2, basis).err().unwrap();
        assert!(matches!(wrong("pcar:2", 1, Some(&basis)), EvaluateError::Components { k: 2, max: 1, boundary: 1 }));
        let error = wrong("pcar", 3, Some(&basis));
        assert!(error.to_string().contains("boundary 3") && error.to_string().contains("[1]"), "{error}");
        assert!(wrong("pcar", 1, None).to_string().contains("--basis"));
        assert!(matches!(wrong("q4", 3, Some(&basis)), EvaluateError::NoBasis { boundary: 3, .. }));
    }
}
