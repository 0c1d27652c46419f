//! Methodology specs: how a basis was fitted, as a JSON object with an id. Spec: `proto/SPEC.md`, "Methodology".
//!
//! ```text
//! { "model": "qwen-0.5b", "hidden_dim": 896, "k_rule": { "per_thousand": 8, "floor": 8 },
//!   "boundaries": [1, 2, 3], "calibration": { "corpus_hash": "…", "tokens": 65536 }, "variant": "k8" }
//!        │
//!        └─ canonical JSON (RFC 8785) ── FNV-1a 32 ── id: bytes 16..20 of a PCAR header and of a PCAB file
//! ```
//!
//! Two policies with the same numbers but another calibration give other reconstructions, so the wire carries the id of
//! the whole spec. Members that this version does not know are kept and hashed: specs can grow without a change of the
//! protocol. All numbers are integers, so canonical text needs no printing of floats. The station's registry reads its
//! directory of specs through this module.

use alloc::{borrow::ToOwned, string::String, vec::Vec};
use core::fmt::Write as _;

use crate::{
    hash::fnv1a32,
    json::{self, Object, Value},
};

/// Integers in a spec are below this, positive or negative: what a JavaScript number holds exactly.
pub const MAX_INTEGER: u64 = 1 << 53;

/// Why a text is no methodology spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Error {
    /// Not an object by the rules of this protocol.
    #[error("methodology: {0}")]
    Json(#[from] json::Error),
    /// A member that every spec has is missing. Dots stand for nesting.
    #[error("methodology without {key:?}")]
    Missing {
        /// The member.
        key: &'static str,
    },
    /// A known member holds a value that does not belong there.
    #[error("methodology member {key:?} must be {expected}")]
    Field {
        /// The member.
        key: &'static str,
        /// What belongs there.
        expected: &'static str,
    },
    /// A number, anywhere, that is spelled with a fraction or an exponent, or as `-0`, or is too large for an integer.
    #[error("a number in the methodology is no plain integer")]
    NotInteger,
    /// An integer, anywhere, at or past 2^53.
    #[error("{value} is no integer below 2^53")]
    IntegerTooLarge {
        /// The integer.
        value: i128,
    },
    /// The id would be 0, which on the wire stands for no methodology. Any change to `variant` gives another.
    #[error("methodology with the reserved id 0")]
    ReservedId,
}

/// Why a rule gives no `k`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum KError {
    /// The rule is one that this version does not know.
    #[error("unknown k_rule")]
    UnknownRule,
    /// The rule is about covered variance, and no variances were given.
    #[error("k_rule needs variances")]
    NeedsVariances,
    /// All the components given cover less than the rule asks for.
    #[error("{components} components cover less than {per_thousand} per thousand")]
    NotCovered {
        /// Components given.
        components: usize,
        /// What the rule asks for.
        per_thousand: u32,
    },
    /// More components than values in a residual.
    #[error("k = {k} at a width of {hidden_dim}")]
    TooMany {
        /// What the rule gives.
        k: u32,
        /// The width.
        hidden_dim: u32,
    },
}

/// How the number of components follows from the width or from the variances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KRule {
    /// `max(floor, ceil(d * per_thousand / 1000))`, at most d.
    PerThousand {
        /// 1 to 1000.
        per_thousand: u32,
        /// At least this many.
        floor: u32,
    },
    /// Always the same; 0 for a mean only.
    Fixed(u32),
    /// As few as cover this share of the variance, 1 to 1000.
    Coverage {
        /// The share.
        per_thousand: u32,
    },
    /// A rule of a later version: hashed like all else, but it gives no `k`.
    Unknown,
}

impl KRule {
    /// The number of components for residuals of `hidden_dim` values.
    ///
    /// # Errors
    /// [`KError`]; [`KError::NeedsVariances`] for [`Self::Coverage`].
    pub fn k(self, hidden_dim: u32) -> Result<u32, KError> {
        match self {
            Self::PerThousand { per_thousand, floor } => {
                let share = u64::from(hidden_dim).saturating_mul(u64::from(per_thousand)).div_ceil(1000);
                Ok(u32::try_from(share).unwrap_or(u32::MAX).max(floor).min(hidden_dim))
            }
            Self::Fixed(k) if k > hidden_dim => Err(KError::TooMany { k, hidden_dim }),
            Self::Fixed(k) => Ok(k),
            Self::Coverage { .. } => Err(KError::NeedsVariances),
            Self::Unknown => Err(KError::UnknownRule),
        }
    }

    /// The number of components where the variance along each is known: `parts` in falling order, and their `total` over
    /// all `hidden_dim` directions. Sums are taken in f64, from the first on.
    ///
    /// # Errors
    /// [`KError`]; never [`KError::NeedsVariances`].
    pub fn k_by_variance(self, hidden_dim: u32, parts: &[f32], total: f32) -> Result<u32, KError> {
        let Self::Coverage { per_thousand } = self else { return self.k(hidden_dim) };
        let wanted = f64::from(total) * f64::from(per_thousand);
        let mut sum = 0.0;
        let mut k = 0_u32;
        let mut parts_left = parts.iter();
        while sum * 1000.0 < wanted {
            let Some(part) = parts_left.next() else {
                return Err(KError::NotCovered { components: parts.len(), per_thousand });
            };
            sum += f64::from(*part);
            k = k.saturating_add(1);
        }
        if k > hidden_dim { Err(KError::TooMany { k, hidden_dim }) } else { Ok(k) }
    }
}

/// What a basis was fitted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calibration {
    /// `corpus_hash`: names the text, in whatever way the maker chose.
    pub corpus_hash: String,
    /// `tokens`: how many of it were used.
    pub tokens: u64,
}

/// A checked spec: its known members, its canonical text and its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MethodologySpec {
    model: String,
    hidden_dim: u32,
    k_rule: KRule,
    boundaries: Option<Vec<u32>>,
    calibration: Option<Calibration>,
    variant: Option<String>,
    canonical: String,
    id: u32,
}

impl MethodologySpec {
    /// Reads a spec. `model`, `hidden_dim` and `k_rule` must be there; `boundaries`, `calibration` and `variant` may be.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        let object = Object::parse(text)?;
        let mut canonical = Vec::new();
        write_object(&object, &mut canonical)?;
        // The parts are JSON strings and digits, so this is UTF-8.
        let canonical = String::from_utf8(canonical).map_err(|_| Error::NotInteger)?;
        let id = fnv1a32(canonical.as_bytes());
        let spec = Self {
            model: string(&object, "model")?.ok_or(Error::Missing { key: "model" })?,
            hidden_dim: hidden_dim(&object)?,
            k_rule: k_rule(&object)?,
            boundaries: boundaries(&object)?,
            calibration: calibration(&object)?,
            variant: string(&object, "variant")?,
            canonical,
            id,
        };
        if let KRule::Fixed(k) = spec.k_rule
            && k > spec.hidden_dim
        {
            return Err(Error::Field { key: "k_rule.fixed", expected: "at most hidden_dim" });
        }
        if id == 0 { Err(Error::ReservedId) } else { Ok(spec) }
    }

    /// The id on the wire: FNV-1a 32 of [`Self::canonical`]. Never 0.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// The spec as canonical JSON (RFC 8785): the same text for every spelling of the same spec.
    #[must_use]
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// The model that the basis is for.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Values of a residual, at least 1.
    #[must_use]
    pub const fn hidden_dim(&self) -> u32 {
        self.hidden_dim
    }

    /// How the number of components was chosen.
    #[must_use]
    pub const fn k_rule(&self) -> KRule {
        self.k_rule
    }

    /// The boundaries that the basis has, in increasing order; `None` if the spec does not say.
    #[must_use]
    pub fn boundaries(&self) -> Option<&[u32]> {
        self.boundaries.as_deref()
    }

    /// What the basis was fitted on, if the spec says.
    #[must_use]
    pub const fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_ref()
    }

    /// Free text that tells two otherwise equal specs apart.
    #[must_use]
    pub fn variant(&self) -> Option<&str> {
        self.variant.as_deref()
    }
}

/// Writes a value as canonical JSON.
fn write_value(value: &Value<'_>, out: &mut Vec<u8>) -> Result<(), Error> {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(value) => out.extend_from_slice(if *value { b"true" } else { b"false" }),
        Value::Unsigned(value) => write_integer(i128::from(*value), out)?,
        Value::Negative(value) => write_integer(i128::from(*value), out)?,
        Value::Float(_) => return Err(Error::NotInteger),
        Value::String(text) => json::write_string(text, out),
        Value::Array(items) => {
            out.push(b'[');
            for (n, item) in items.iter().enumerate() {
                if n > 0 {
                    out.push(b',');
                }
                write_value(item, out)?;
            }
            out.push(b']');
        }
        Value::Object(object) => write_object(object, out)?,
    }
    Ok(())
}

/// Members in the order of their keys as UTF-16: a character past U+FFFF sorts by its surrogates, before U+E000.
fn write_object(object: &Object<'_>, out: &mut Vec<u8>) -> Result<(), Error> {
    let mut members: Vec<(&str, &Value<'_>)> = object.iter().collect();
    members.sort_unstable_by(|(a, _), (b, _)| a.encode_utf16().cmp(b.encode_utf16()));
    out.push(b'{');
    for (n, (key, value)) in members.into_iter().enumerate() {
        if n > 0 {
            out.push(b',');
        }
        json::write_string(key, out);
        out.push(b':');
        write_value(value, out)?;
    }
    out.push(b'}');
    Ok(())
}

fn write_integer(value: i128, out: &mut Vec<u8>) -> Result<(), Error> {
    if value.unsigned_abs() >= u128::from(MAX_INTEGER) {
        return Err(Error::IntegerTooLarge { value });
    }
    let mut text = String::new();
    let _ = write!(text, "{value}");
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

fn string(object: &Object<'_>, key: &'static str) -> Result<Option<String>, Error> {
    match object.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some((**text).to_owned())),
        Some(_) => Err(Error::Field { key, expected: "a string" }),
    }
}

fn hidden_dim(object: &Object<'_>) -> Result<u32, Error> {
    let key = "hidden_dim";
    match object.get(key).ok_or(Error::Missing { key })? {
        Value::Unsigned(value @ 1..=0xffff_ffff) => Ok(low_half(*value)),
        _ => Err(Error::Field { key, expected: "an integer from 1 to 4294967295" }),
    }
}

fn k_rule(object: &Object<'_>) -> Result<KRule, Error> {
    let key = "k_rule";
    let Value::Object(rule) = object.get(key).ok_or(Error::Missing { key })? else {
        return Err(Error::Field { key, expected: "an object" });
    };
    let share = |key: &'static str, value: &Value<'_>| match value {
        Value::Unsigned(value @ 1..=1000) => Ok(low_half(*value)),
        _ => Err(Error::Field { key, expected: "an integer from 1 to 1000" }),
    };
    let count = |key: &'static str, value: &Value<'_>| match value {
        Value::Unsigned(value @ 0..=0xffff_ffff) => Ok(low_half(*value)),
        _ => Err(Error::Field { key, expected: "an integer from 0 to 4294967295" }),
    };
    match (rule.get("per_thousand"), rule.get("fixed"), rule.get("coverage_per_thousand")) {
        (Some(value), None, None) => {
            let floor = rule.get("floor").ok_or(Error::Missing { key: "k_rule.floor" })?;
            let per_thousand = share("k_rule.per_thousand", value)?;
            Ok(KRule::PerThousand { per_thousand, floor: count("k_rule.floor", floor)? })
        }
        (None, Some(value), None) => Ok(KRule::Fixed(count("k_rule.fixed", value)?)),
        (None, None, Some(value)) => {
            Ok(KRule::Coverage { per_thousand: share("k_rule.coverage_per_thousand", value)? })
        }
        (None, None, None) => Ok(KRule::Unknown),
        _ => Err(Error::Field { key, expected: "one rule" }),
    }
}

fn boundaries(object: &Object<'_>) -> Result<Option<Vec<u32>>, Error> {
    let wrong = Error::Field { key: "boundaries", expected: "an array of increasing integers below 2^32" };
    match object.get("boundaries") {
        None => Ok(None),
        Some(Value::Array(items)) => {
            let mut boundaries: Vec<u32> = Vec::with_capacity(items.len());
            for item in items {
                let Value::Unsigned(value @ 0..=0xffff_ffff) = item else { return Err(wrong) };
                let boundary = low_half(*value);
                if boundaries.last().is_some_and(|last| *last >= boundary) {
                    return Err(wrong);
                }
                boundaries.push(boundary);
            }
            Ok(Some(boundaries))
        }
        Some(_) => Err(wrong),
    }
}

fn calibration(object: &Object<'_>) -> Result<Option<Calibration>, Error> {
    let object = match object.get("calibration") {
        None => return Ok(None),
        Some(Value::Object(object)) => object,
        Some(_) => return Err(Error::Field { key: "calibration", expected: "an object" }),
    };
    let corpus_hash = match object.get("corpus_hash") {
        None => return Err(Error::Missing { key: "calibration.corpus_hash" }),
        Some(Value::String(text)) => (**text).to_owned(),
        Some(_) => return Err(Error::Field { key: "calibration.corpus_hash", expected: "a string" }),
    };
    let tokens = match object.get("tokens") {
        None => return Err(Error::Missing { key: "calibration.tokens" }),
        Some(Value::Unsigned(tokens)) => *tokens,
        Some(_) => return Err(Error::Field { key: "calibration.tokens", expected: "an integer from 0 on" }),
    };
    Ok(Some(Calibration { corpus_hash, tokens }))
}

/// For values that a pattern has bounded.
fn low_half(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
