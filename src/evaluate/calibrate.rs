//! A basis for the cuts of a mesh, from a text that is run through it.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use aeon_proto::methodology::{KRule, MethodologySpec};
use ndarray::ArrayView2;

use super::{
    error::EvaluateError,
    mesh::{Mesh, Slot},
};
use crate::basis::{
    BasisFile, PcaBases,
    fit::{FitError, FitOptions, Rows, fit_group},
    metadata::{Calibration, Metadata, Policy},
    pca::{FittedLayer, encode_pca_bases},
};

/// Residuals that are held at most, in bytes.
const MAX_BYTES: u64 = 2 << 30;

/// Fits a mean, and `k` components, to what crosses each cut when `windows` are run through the mesh. Position 0 and
/// positions of outlying norm are left out. `on_window` is told of each window that is done.
///
/// # Errors
/// [`EvaluateError::Memory`]; [`EvaluateError::Fit`], for too few positions.
pub fn calibrate(
    mesh: &mut dyn Mesh,
    windows: &[Vec<u32>],
    k: u32,
    on_window: &mut dyn FnMut(),
) -> Result<Arc<BasisFile>, EvaluateError> {
    let info = mesh.info().clone();
    let d = info.hidden_dim;
    let rows: usize = windows.iter().map(|window| window.len().saturating_sub(1)).sum();
    let bytes = rows as u64 * info.cuts.len() as u64 * d as u64 * 4;
    if bytes > MAX_BYTES {
        return Err(EvaluateError::Memory { rows, boundaries: info.cuts.len(), bytes, max: MAX_BYTES });
    }
    let mut crossed: Vec<Vec<f32>> = vec![Vec::new(); info.cuts.len()];
    for window in windows {
        let mut residuals = mesh.embed(window)?;
        for (part, crossed) in crossed.iter_mut().enumerate() {
            residuals = mesh.forward(part, Slot::Reference, 0, residuals)?;
            crossed.extend_from_slice(residuals.get(d..).unwrap_or_default());
        }
        on_window();
    }
    let spec =
        serde_json::json!({ "model": info.name, "hidden_dim": d, "k_rule": { "fixed": k }, "boundaries": info.cuts });
    // A name can hold what a methodology cannot; the basis is for this process only, where nobody asks.
    let methodology = MethodologySpec::parse(&spec.to_string()).map_or(1, |spec| spec.id());
    let options = FitOptions::new(KRule::Fixed(k));
    let mut metadata = Metadata {
        model: info.name.clone(),
        program: concat!("aeonctl ", env!("CARGO_PKG_VERSION")).to_owned(),
        policy: Policy {
            k_rule: serde_json::json!({ "fixed": k }),
            group: 1,
            outliers_left_out: true,
            method: "exact".to_owned(),
        },
        calibration: Calibration {
            inputs: BTreeMap::new(),
            capture: BTreeMap::from([
                ("config_fp".to_owned(), info.config_fp.clone()),
                ("tokens".to_owned(), rows.to_string()),
            ]),
        },
        ..Metadata::default()
    };
    let mut layers = Vec::new();
    for (boundary, crossed) in info.cuts.iter().zip(&mut crossed) {
        let crossed = std::mem::take(crossed);
        let Ok(values) = ArrayView2::from_shape((crossed.len() / d, d), &crossed) else {
            return Err(FitError::Width { boundary: *boundary, expected: d, got: crossed.len() }.into());
        };
        let fit = fit_group(&[Rows { boundary: *boundary, values }], &options, &mut |_| {})?;
        let components = Arc::new(fit.components);
        for member in fit.members {
            metadata.boundaries.insert(member.boundary, member.statistics);
            layers.push(FittedLayer {
                boundary: member.boundary,
                mean: member.mean,
                components: Arc::clone(&components),
                variance: member.variance,
            });
        }
    }
    let metadata = serde_json::to_string(&metadata).unwrap_or_default();
    let bases = PcaBases { hidden_dim: u32::try_from(d).unwrap_or(u32::MAX), methodology, metadata, layers };
    let name = Path::new("calibrated.pcab");
    Ok(Arc::new(BasisFile::from_bytes(name, &encode_pca_bases(name, &bases)?)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        demo,
        evaluate::{mesh::Split, text::windows},
        model::spec::ModelSpec,
    };

    #[test]
    fn a_basis_of_means_or_of_components_too() {
        let mut split = Split::load(&ModelSpec::Demo, &[2, 4]).unwrap();
        let ids = demo::tokenizer().unwrap().encode(demo::HELD_OUT, false).unwrap();
        let windows = windows(split.info(), &ids, 64, 256).unwrap();
        let mut done = 0;
        let basis = calibrate(&mut split, &windows, 0, &mut || done += 1).unwrap();
        assert_eq!(done, 4);
        let shapes = |basis: &BasisFile| basis.boundaries().map(|part| (part.boundary, part.k)).collect::<Vec<_>>();
        assert_eq!(shapes(&basis), [(2, 0), (4, 0)]);
        assert!(basis.median_norm(2).unwrap() > 0.0);
        assert_eq!(basis.metadata().calibration.capture["config_fp"], split.info().config_fp);
        let basis = calibrate(&mut split, &windows, 8, &mut || {}).unwrap();
        assert_eq!(shapes(&basis), [(2, 8), (4, 8)]);
        let few = &windows[..1];
        assert!(matches!(calibrate(&mut split, few, 100, &mut || {}), Err(EvaluateError::Fit(_))));
    }
}
