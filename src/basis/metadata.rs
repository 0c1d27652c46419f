//! What the metadata section of a basis file says: how it was made, and how good it is.
//!
//! `fit` writes it, `aeonctl basis inspect` prints it, and the quantised codecs take the median norms from it. The format
//! only asks for a JSON object, so reading is lenient: what is missing or of another kind is left at its default.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The metadata of a basis file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metadata {
    /// Name of the model.
    pub model: String,
    /// The program that fitted it.
    pub program: String,
    /// How it was fitted.
    pub policy: Policy,
    /// From what.
    pub calibration: Calibration,
    /// The residuals of each boundary.
    pub boundaries: BTreeMap<u32, BoundaryStatistics>,
    /// How well it represents residuals that it was not fitted to, if that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<Evaluation>,
}

/// How a basis was fitted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// The rule for `k`, as in the methodology, or what was asked for instead.
    pub k_rule: Value,
    /// Boundaries that share a basis.
    pub group: u32,
    /// Whether positions of outlying norm were left out.
    pub outliers_left_out: bool,
    /// `exact` or `randomized`.
    pub method: String,
}

/// What a basis was fitted from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Calibration {
    /// The files, without their folders, and their BLAKE3 hashes.
    pub inputs: BTreeMap<String, String>,
    /// What the files say of themselves.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub capture: BTreeMap<String, String>,
}

/// The residuals of one boundary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BoundaryStatistics {
    /// Residuals given.
    pub rows: u64,
    /// Those of them that were left out for their norm.
    pub outliers: u64,
    /// Median of all their norms.
    pub median_norm: f32,
}

/// How well a basis represents residuals of other text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Evaluation {
    /// The files, without their folders, and their BLAKE3 hashes.
    pub inputs: BTreeMap<String, String>,
    /// For each boundary, the figures at several `k`.
    pub boundaries: BTreeMap<u32, Vec<Fidelity>>,
}

/// Figures of reconstruction from `k` components, over positions whose norm is no outlier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fidelity {
    /// Components.
    pub k: u32,
    /// Share of the variance about the basis's mean that is kept.
    pub explained: f32,
    /// Mean cosine between residual and reconstruction. With `k` 0 it is what the mean alone scores.
    pub cosine: f32,
    /// The same after the mean is taken off both: what the components add.
    pub centred_cosine: f32,
    /// Root of the error's energy over the residuals' energy.
    pub relative_error: f32,
}

impl Metadata {
    /// Reads a metadata section. Parts that are missing or of another kind are left at their defaults.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let Ok(Value::Object(mut members)) = serde_json::from_str(text) else { return Self::default() };
        let mut take = |key: &str| members.remove(key).unwrap_or_default();
        Self {
            model: serde_json::from_value(take("model")).unwrap_or_default(),
            program: serde_json::from_value(take("program")).unwrap_or_default(),
            policy: serde_json::from_value(take("policy")).unwrap_or_default(),
            calibration: serde_json::from_value(take("calibration")).unwrap_or_default(),
            boundaries: serde_json::from_value(take("boundaries")).unwrap_or_default(),
            evaluation: serde_json::from_value(take("evaluation")).unwrap_or_default(),
        }
    }

    /// The median norm of a boundary's residuals, if it is known.
    #[must_use]
    pub fn median_norm(&self, boundary: u32) -> Option<f32> {
        self.boundaries.get(&boundary).map(|statistics| statistics.median_norm).filter(|norm| *norm > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_read_back_and_foreign_ones_do_no_harm() {
        let mut metadata = Metadata { model: "toy".into(), ..Metadata::default() };
        metadata.boundaries.insert(3, BoundaryStatistics { rows: 10, outliers: 1, median_norm: 2.5 });
        metadata.evaluation = Some(Evaluation::default());
        let text = serde_json::to_string(&metadata).unwrap();
        assert_eq!(Metadata::parse(&text), metadata);
        assert_eq!(metadata.median_norm(3), Some(2.5));
        assert_eq!(metadata.median_norm(4), None);
        for text in ["", "[]", "{}", r#"{"boundaries":[1]}"#, r#"{"boundaries":{"x":{}}}"#] {
            assert_eq!(Metadata::parse(text), Metadata::default(), "{text}");
        }
        let text = r#"{"model":"m","policy":7,"boundaries":{"3":{"median_norm":2.5,"more":[]}},"else":1}"#;
        assert_eq!(Metadata::parse(text).model, "m");
        assert_eq!(Metadata::parse(text).median_norm(3), Some(2.5));
    }
}
