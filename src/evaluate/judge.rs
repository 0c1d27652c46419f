//! What the components of a basis do to the model they were fitted to: the verdict that a basis file carries.

use std::sync::Arc;

use super::{
    codec::Setting,
    error::EvaluateError,
    mesh::{Mesh, Split},
    run::{OnProgress, Options, evaluate},
};
use crate::{
    basis::{
        BasisFile,
        metadata::{BoundaryEffect, EndEffect},
    },
    model::spec::ModelSpec,
};

/// Loads a model cut at every boundary of a basis that lies between two layers.
///
/// # Errors
/// [`EvaluateError::NoCut`] if the basis has components at none; see [`Split::load`].
pub fn split_for(model: &ModelSpec, basis: &BasisFile) -> Result<Split, EvaluateError> {
    let n_layers = Split::layers(model)?;
    let inner = basis.boundaries().filter(|part| part.k > 0).map(|part| part.boundary);
    Split::load(model, &inner.filter(|boundary| (1..n_layers).contains(boundary)).collect::<Vec<_>>())
}

/// Judges all components of a basis at each cut of a mesh from [`split_for`], one cut at a time. `text` says what the
/// windows are, for people; `budget` is what a cut may cost in perplexity.
///
/// # Errors
/// See [`EvaluateError`].
pub fn judge(
    mesh: &mut dyn Mesh,
    basis: &Arc<BasisFile>,
    windows: &[Vec<u32>],
    text: String,
    budget: f32,
    on_progress: &mut OnProgress<'_>,
) -> Result<EndEffect, EvaluateError> {
    let options = Options { drafts: 0, greedy: 0, ..Options::default() };
    let all = Setting::Pcar { k: None, escape: false };
    let report = evaluate(mesh, windows, &[all], Some(basis), &options, on_progress)?;
    let effects = report.settings.iter().flat_map(|setting| &setting.hops).filter_map(|hop| {
        let effect = hop.alone?;
        let k = basis.boundary(hop.boundary).map_or(0, |part| part.k as u32);
        let (kl, top1, ratio) = (effect.kl as f32, effect.top1 as f32, effect.perplexity_ratio as f32);
        // JSON has no infinities; a basis that bad is no better for it.
        let perplexity_ratio = ratio.min(f32::MAX);
        Some((hop.boundary, BoundaryEffect { k, kl, top1, perplexity_ratio }))
    });
    Ok(EndEffect { text, positions: report.positions as u64, budget, boundaries: effects.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{demo, evaluate::text::windows};

    #[test]
    fn the_demo_basis_fails_one_per_cent_and_passes_what_it_costs() {
        let set = demo::bases().unwrap();
        let basis = set.bases().next().unwrap();
        let mut split = split_for(&ModelSpec::Demo, basis).unwrap();
        assert_eq!(split.info().cuts, [1, 2, 3, 4, 5]);
        let ids = demo::tokenizer().unwrap().encode(demo::HELD_OUT, false).unwrap();
        let windows = windows(split.info(), &ids, 32, 64).unwrap();
        let mut judge = |budget| judge(&mut split, basis, &windows, "text".to_owned(), budget, &mut |_, _| {}).unwrap();
        let effect = judge(0.01);
        assert!(!effect.passed());
        assert_eq!((effect.boundaries.len(), effect.positions), (5, 60));
        let (_, worst) = effect.worst().unwrap();
        assert!(worst.k == 64 && worst.kl > 0.01 && worst.top1 < 1.0);
        assert!(judge(worst.cost().exp_m1() * 1.01).passed());
    }
}
