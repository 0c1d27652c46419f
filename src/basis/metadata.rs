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
    /// What its components do to the model's output, if that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_effect: Option<EndEffect>,
}

/// What sending residuals as components does to a model's output, and whether that is good enough.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EndEffect {
    /// What it was measured on, for people.
    pub text: String,
    /// Positions that were judged.
    pub positions: u64,
    /// What a cut may cost in perplexity, such as 0.01 for one per cent.
    pub budget: f32,
    /// For each boundary that was judged: the effect of all its components there, and raw residuals elsewhere.
    pub boundaries: BTreeMap<u32, BoundaryEffect>,
}

/// The effect at one boundary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BoundaryEffect {
    /// Components.
    pub k: u32,
    /// Kullback-Leibler divergence of the next token from the unsplit model's, nats, mean.
    pub kl: f32,
    /// Share of positions with the same most likely token.
    pub top1: f32,
    /// Perplexity over that of the unsplit model.
    pub perplexity_ratio: f32,
}

impl EndEffect {
    /// Whether every boundary that was judged is within the budget; not if none was.
    #[must_use]
    pub fn passed(&self) -> bool {
        !self.boundaries.is_empty() && self.boundaries.values().all(|effect| effect.cost() <= self.allowed())
    }

    /// The boundary that costs most.
    #[must_use]
    pub fn worst(&self) -> Option<(u32, BoundaryEffect)> {
        let by_cost = |a: &(&u32, &BoundaryEffect), b: &(&u32, &BoundaryEffect)| a.1.cost().total_cmp(&b.1.cost());
        self.boundaries.iter().max_by(by_cost).map(|(boundary, effect)| (*boundary, *effect))
    }

    /// The budget in nats.
    #[must_use]
    pub fn allowed(&self) -> f32 {
        self.budget.ln_1p()
    }
}

impl BoundaryEffect {
    /// Nats a token: the divergence, or the growth of the text's own surprise if that is more. What is no number costs
    /// everything.
    #[must_use]
    pub fn cost(&self) -> f32 {
        let cost = self.kl.max(self.perplexity_ratio.ln());
        if cost.is_nan() || self.kl.is_nan() { f32::INFINITY } else { cost }
    }
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
            end_effect: serde_json::from_value(take("end_effect")).unwrap_or_default(),
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
    fn every_boundary_must_be_within_the_budget() {
        let effect = |kl, perplexity_ratio| BoundaryEffect { k: 8, kl, top1: 0.9, perplexity_ratio };
        let judged = |effects: &[BoundaryEffect]| EndEffect {
            budget: 0.01,
            boundaries: (1..).zip(effects.iter().copied()).collect(),
            ..EndEffect::default()
        };
        assert!(!judged(&[]).passed());
        assert!(judged(&[effect(0.005, 1.002), effect(0.0099, 0.99)]).passed());
        assert!(!judged(&[effect(0.005, 1.002), effect(0.0101, 1.0)]).passed());
        // A divergence that looks small hides no perplexity that does not.
        let worst = judged(&[effect(0.02, 1.0), effect(0.005, 1.05)]);
        assert_eq!((worst.passed(), worst.worst().map(|(boundary, _)| boundary)), (false, Some(2)));
        assert!(!judged(&[effect(f32::NAN, 1.0)]).passed());
    }

    #[test]
    fn metadata_read_back_and_foreign_ones_do_no_harm() {
        let mut metadata = Metadata { model: "toy".into(), ..Metadata::default() };
        metadata.boundaries.insert(3, BoundaryStatistics { rows: 10, outliers: 1, median_norm: 2.5 });
        metadata.evaluation = Some(Evaluation::default());
        metadata.end_effect = Some(EndEffect { budget: 0.01, positions: 9, ..EndEffect::default() });
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
