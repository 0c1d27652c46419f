//! A model in parts, with a place between each two where residuals can be changed.

use std::ops::Range;

use super::error::EvaluateError;
use crate::{
    demo,
    model::{Cache, CancelToken, Head, HeadOutput, LayerRange, load::load_transformer, spec::ModelSpec},
};

/// What a model in parts is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshInfo {
    /// A name for people.
    pub name: String,
    /// Values of a residual.
    pub hidden_dim: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Layers of the model.
    pub n_layers: u32,
    /// Positions of a sequence.
    pub max_position: usize,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// Fingerprint of the model's configuration.
    pub config_fp: String,
    /// The boundaries between the parts, in increasing order.
    pub cuts: Vec<u32>,
}

/// Which of two sequences a part remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The one without any codec.
    Reference,
    /// The one with the codec that is judged.
    Candidate,
}

impl Slot {
    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

/// A model in parts. Residuals are f32, `[seq, hidden_dim]`; each part keeps what it has seen of both sequences.
pub trait Mesh {
    /// What it is.
    fn info(&self) -> &MeshInfo;

    /// Token ids to residuals.
    ///
    /// # Errors
    /// See [`EvaluateError`].
    fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, EvaluateError>;

    /// Runs residuals through part number `part` as the positions from `pos` on; what it has seen from there on is
    /// forgotten first. `pos` is at most what it has seen.
    ///
    /// # Errors
    /// See [`EvaluateError`].
    fn forward(&mut self, part: usize, slot: Slot, pos: usize, residuals: Vec<f32>) -> Result<Vec<f32>, EvaluateError>;

    /// The head's logits, `[seq, vocab]`.
    ///
    /// # Errors
    /// See [`EvaluateError`].
    fn logits(&mut self, residuals: &[f32]) -> Result<Vec<f32>, EvaluateError>;
}

/// A model cut into parts in this process.
pub struct Split {
    info: MeshInfo,
    parts: Vec<Part>,
    cancel: CancelToken,
}

struct Part {
    model: Box<dyn LayerRange>,
    /// Of the reference and the candidate.
    caches: [Box<dyn Cache>; 2],
}

impl std::fmt::Debug for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Split").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Split {
    /// Loads a model in the parts that `cuts` (boundaries, in increasing order) leave.
    ///
    /// # Errors
    /// [`EvaluateError::Unsplittable`], [`EvaluateError::Load`], and those of [`Split::new`].
    pub fn load(model: &ModelSpec, cuts: &[u32]) -> Result<Self, EvaluateError> {
        check_order(cuts)?;
        let n_layers = Self::layers(model)?;
        if let Some(cut) = cuts.iter().copied().find(|cut| *cut == 0 || *cut >= n_layers) {
            return Err(EvaluateError::Cut { cut, n_layers });
        }
        let ends = cuts.iter().copied().chain([n_layers]);
        let starts = std::iter::once(0).chain(cuts.iter().copied());
        Self::new(starts.zip(ends).map(|(start, end)| load(model, start..end)).collect::<Result<_, _>>()?)
    }

    /// How many layers a model has.
    ///
    /// # Errors
    /// [`EvaluateError::Unsplittable`], [`EvaluateError::Load`].
    pub fn layers(model: &ModelSpec) -> Result<u32, EvaluateError> {
        // Any part says it; the first layer is a small one.
        Ok(load(model, 0..1)?.info().n_layers)
    }

    /// A split of parts that are loaded: all layers of one model, in order.
    ///
    /// # Errors
    /// [`EvaluateError::NoCut`] with fewer than two parts, [`EvaluateError::CutOrder`] if they do not follow each other.
    pub fn new(parts: Vec<Box<dyn LayerRange>>) -> Result<Self, EvaluateError> {
        let [first, .., last] = &*parts else { return Err(EvaluateError::NoCut) };
        let cuts: Vec<u32> = parts.iter().skip(1).map(|part| part.info().layers.start).collect();
        let follow = parts.windows(2).all(|pair| pair[0].info().layers.end == pair[1].info().layers.start);
        if !follow || !first.info().has_embedding() || !last.info().has_head() {
            return Err(EvaluateError::CutOrder { cuts });
        }
        let info = first.info();
        let info = MeshInfo {
            name: info.name.clone(),
            hidden_dim: info.hidden_dim,
            vocab: info.vocab,
            n_layers: info.n_layers,
            max_position: info.max_position,
            bos: info.bos,
            config_fp: info.config_fp.clone(),
            cuts,
        };
        let parts = parts.into_iter().map(|model| Part { caches: [model.new_cache(), model.new_cache()], model });
        Ok(Self { info, parts: parts.collect(), cancel: CancelToken::default() })
    }
}

fn load(model: &ModelSpec, layers: Range<u32>) -> Result<Box<dyn LayerRange>, EvaluateError> {
    match model {
        ModelSpec::Demo => Ok(Box::new(demo::load(Some(layers))?)),
        ModelSpec::Directory(path) | ModelSpec::Gguf(path) => Ok(Box::new(load_transformer(path, Some(layers))?)),
        ModelSpec::Identity { .. } => Err(EvaluateError::Unsplittable { model: "identity".to_owned() }),
        ModelSpec::Upstream { station, .. } => Err(EvaluateError::Unsplittable { model: station.clone() }),
    }
}

/// Refuses cuts that are not in increasing order, or none.
pub(super) fn check_order(cuts: &[u32]) -> Result<(), EvaluateError> {
    match cuts {
        [] => Err(EvaluateError::NoCut),
        cuts if cuts.windows(2).all(|pair| pair[0] < pair[1]) => Ok(()),
        cuts => Err(EvaluateError::CutOrder { cuts: cuts.to_vec() }),
    }
}

impl Mesh for Split {
    fn info(&self) -> &MeshInfo {
        &self.info
    }

    fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, EvaluateError> {
        Ok(self.parts[0].model.embed(ids)?)
    }

    fn forward(&mut self, part: usize, slot: Slot, pos: usize, residuals: Vec<f32>) -> Result<Vec<f32>, EvaluateError> {
        let part = &mut self.parts[part];
        let cache = part.caches[slot.index()].as_mut();
        cache.truncate(pos);
        Ok(part.model.forward(cache, residuals, &self.cancel)?)
    }

    fn logits(&mut self, residuals: &[f32]) -> Result<Vec<f32>, EvaluateError> {
        let last = &self.parts[self.parts.len() - 1].model;
        match last.head(residuals, Head::Logits, &self.cancel)? {
            HeadOutput::Logits(logits) => Ok(logits),
            HeadOutput::Tokens(_) | HeadOutput::TopK { .. } => {
                let expected = residuals.len() / self.info.hidden_dim * self.info.vocab;
                Err(EvaluateError::Logits { station: self.info.name.clone(), expected, got: 0 })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_that_are_none_are_refused() {
        let load = |cuts: &[u32]| Split::load(&ModelSpec::Demo, cuts).err();
        assert!(matches!(load(&[]), Some(EvaluateError::NoCut)));
        assert!(matches!(load(&[3, 3]), Some(EvaluateError::CutOrder { .. })));
        assert!(matches!(load(&[0, 3]), Some(EvaluateError::Cut { cut: 0, n_layers: 6 })));
        assert!(matches!(load(&[3, 6]), Some(EvaluateError::Cut { cut: 6, n_layers: 6 })));
        let identity = ModelSpec::Identity { hidden_dim: 4, vocab: 9 };
        assert!(matches!(Split::load(&identity, &[1]).err(), Some(EvaluateError::Unsplittable { .. })));
        assert!(load(&[1, 3]).is_none());
    }
}
