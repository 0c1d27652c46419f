//! Fitting: against NumPy's SVD, exactly and by random projection, in groups, and with outliers.

use std::path::PathBuf;

use aeon_proto::methodology::{KError, KRule};
use aeon_station::basis::{
    fit::{Fit, FitError, FitOptions, Phase, Rows, fit_group, fit_pca},
    residuals::read_npy,
};
use ndarray::{Array2, ArrayView1, Axis, array, concatenate};
use rand::{RngExt, SeedableRng, rngs::StdRng};

fn fixture(name: &str) -> Array2<f32> {
    read_npy(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/basis/data").join(name)).unwrap()
}

fn fit(rows: &Array2<f32>, options: &FitOptions) -> Result<Fit, FitError> {
    fit_pca(Rows { boundary: 3, values: rows.view() }, options, &mut |_| ())
}

fn fixed(k: u32) -> FitOptions {
    FitOptions::new(KRule::Fixed(k))
}

/// How far the span of the rows of `a` is from that of `b`: the largest length that a row of `a` has outside `b`.
fn distance(a: &Array2<f32>, b: &Array2<f32>) -> f64 {
    let outside = |row: ArrayView1<'_, f32>| {
        let mut rest: Vec<f64> = row.iter().copied().map(f64::from).collect();
        for other in b.rows() {
            let along: f64 = rest.iter().zip(other).map(|(rest, other)| rest * f64::from(*other)).sum();
            rest.iter_mut().zip(other).for_each(|(rest, other)| *rest -= along * f64::from(*other));
        }
        rest.iter().map(|rest| rest * rest).sum::<f64>().sqrt()
    };
    a.rows().into_iter().map(outside).fold(0.0, f64::max)
}

#[test]
fn exact_and_random_fits_agree_with_numpy() {
    let rows = fixture("residuals.npy");
    let (components, variance) = (fixture("components.npy"), fixture("variance.npy"));
    let mut phases = Vec::new();
    let options = FitOptions { leave_out_outliers: false, ..fixed(12) };
    let rows_of = Rows { boundary: 3, values: rows.view() };
    let exact = fit_pca(rows_of, &options, &mut |progress| phases.push(progress.phase)).unwrap();
    assert!([Phase::Moments, Phase::Products, Phase::Eigenvectors].iter().all(|phase| phases.contains(phase)));
    let random = fit(&rows, &FitOptions { randomized_above: 1, ..options }).unwrap();
    assert!(exact.exact && !random.exact);
    for (fit, name) in [(exact, "exact"), (random, "random")] {
        // Vectors of neighbouring variances mix within the accuracy of f32; the span of any prefix must agree.
        for k in [1, 4, 12] {
            let prefix = |matrix: &Array2<f32>| matrix.slice_axis(Axis(0), (..k).into()).to_owned();
            let got = distance(&prefix(&fit.components), &prefix(&components));
            assert!(got < 1e-4, "{name}, {k} components: {got}");
        }
        for (ours, theirs) in fit.components.iter().zip(&components) {
            assert!((ours - theirs).abs() < 1e-4, "{name}: sign or order");
        }
        let member = &fit.members[0];
        for (ours, theirs) in member.mean.iter().zip(&fixture("mean.npy")) {
            assert!((ours - theirs).abs() < 1e-5);
        }
        for (ours, theirs) in member.variance.iter().take(12).zip(&variance) {
            assert!((ours / theirs - 1.0).abs() < 1e-5, "{name}: {ours} {theirs}");
        }
        assert!((member.variance[12] / variance.sum() - 1.0).abs() < 1e-5);
        assert_eq!((member.boundary, member.statistics.rows, member.statistics.outliers), (3, 240, 0));
    }
}

#[test]
fn rules_choose_k() {
    let rows = fixture("residuals.npy");
    let variance = fixture("variance.npy");
    let k = |rule| fit(&rows, &FitOptions { leave_out_outliers: false, ..FitOptions::new(rule) });
    let rows_of = |rule| k(rule).unwrap().components.nrows();
    assert_eq!(rows_of(KRule::Fixed(0)), 0);
    assert_eq!(rows_of(KRule::PerThousand { per_thousand: 8, floor: 8 }), 8);
    assert_eq!(rows_of(KRule::PerThousand { per_thousand: 900, floor: 8 }), 22);
    let mut expected = 0;
    let mut sum = 0.0;
    while sum < 0.95 * variance.sum() {
        sum += variance[(0, expected)];
        expected += 1;
    }
    assert_eq!(rows_of(KRule::Coverage { per_thousand: 950 }), expected);
    assert_eq!(rows_of(KRule::Coverage { per_thousand: 1000 }), 24);
    let random = FitOptions { randomized_above: 1, ..FitOptions::new(KRule::Coverage { per_thousand: 950 }) };
    assert_eq!(fit(&rows, &random).unwrap().components.nrows(), expected);
    assert_eq!(k(KRule::Fixed(25)), Err(FitError::K(KError::TooMany { k: 25, hidden_dim: 24 })));
    assert_eq!(k(KRule::Unknown), Err(FitError::K(KError::UnknownRule)));
    let few = rows.slice_axis(Axis(0), (..8).into()).to_owned();
    assert_eq!(fit(&few, &fixed(8)), Err(FitError::TooFewRows { k: 8, got: 8 }));
    assert_eq!(fit(&few, &fixed(7)).unwrap().components.nrows(), 7);
}

#[test]
fn outliers_are_left_out_unless_asked_for() {
    let rows = fixture("residuals.npy");
    let clean = fit(&rows, &fixed(4)).unwrap();
    let sinks = Array2::from_shape_fn((3, 24), |(_, j)| if j == 5 { 3000.0 } else { 0.0 });
    let with_sinks = concatenate(Axis(0), &[rows.view(), sinks.view()]).unwrap();
    let without = fit(&with_sinks, &fixed(4)).unwrap();
    assert_eq!(without.components, clean.components);
    assert_eq!((without.members[0].statistics.rows, without.members[0].statistics.outliers), (243, 3));
    assert!((without.members[0].statistics.median_norm / clean.members[0].statistics.median_norm - 1.0).abs() < 0.05);
    let all = fit(&with_sinks, &FitOptions { leave_out_outliers: false, ..fixed(4) }).unwrap();
    assert!(all.components[(0, 5)] > 0.99 && all.members[0].statistics.outliers == 0);
}

#[test]
fn a_group_shares_components_but_not_means_nor_variances() {
    let mut rng = StdRng::seed_from_u64(5);
    // Two boundaries whose residuals vary along different axes, the second at a hundred times the scale.
    let mut cloud = |axis: usize, scale: f32, mean: f32| {
        Array2::from_shape_fn((400, 6), |(_, j)| {
            let size = if j == axis { scale } else { scale / 50.0 };
            mean + size * (rng.random::<f32>() - 0.5)
        })
    };
    let (a, b) = (cloud(1, 1.0, 3.0), cloud(4, 100.0, -200.0));
    let group = [Rows { boundary: 1, values: a.view() }, Rows { boundary: 2, values: b.view() }];
    let mut phases = Vec::new();
    let fit = fit_group(&group, &fixed(2), &mut |progress| phases.push(progress.phase)).unwrap();
    assert!(phases.contains(&Phase::Variances));
    // Each counts the same: both axes are among the two components.
    let along = |j: usize| fit.components.column(j).iter().map(|value| value * value).sum::<f32>();
    assert!(along(1) > 0.99 && along(4) > 0.99, "{:?}", fit.components);
    assert!((fit.members[0].mean[0] - 3.0).abs() < 0.1 && (fit.members[1].mean[0] + 200.0).abs() < 1.0);
    for (member, scale) in fit.members.iter().zip([1.0, 100.0]) {
        let covered = member.variance[0] + member.variance[1];
        assert!(covered / member.variance[2] > 0.99);
        assert!((member.variance[2] / (scale * scale / 12.0) - 1.0).abs() < 0.2, "{}", member.variance);
    }
    let random = fit_group(&group, &FitOptions { randomized_above: 1, ..fixed(2) }, &mut |_| ()).unwrap();
    assert!(distance(&random.components, &fit.components) < 1e-4);
}

#[test]
fn what_cannot_be_fitted_is_refused_with_its_place() {
    let good = array![[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]];
    let mut bad = good.clone();
    bad[(1, 1)] = f32::INFINITY;
    assert_eq!(fit(&bad, &fixed(1)), Err(FitError::NonFinite { boundary: 3, row: 1 }));
    assert_eq!(fit(&array![[1.0, 2.0]], &fixed(1)), Err(FitError::NoVariance { boundary: 3, got: 1 }));
    assert_eq!(fit(&Array2::zeros((5, 0)), &fixed(1)), Err(FitError::Width { boundary: 3, expected: 1, got: 0 }));
    let other = Array2::zeros((5, 3));
    let group = [Rows { boundary: 0, values: good.view() }, Rows { boundary: 1, values: other.view() }];
    let error = fit_group(&group, &fixed(1), &mut |_| ());
    assert_eq!(error, Err(FitError::Width { boundary: 1, expected: 2, got: 3 }));
    assert_eq!(fit_group(&[], &fixed(1), &mut |_| ()), Err(FitError::Nothing));
    // No variance at all is no fault: any direction does.
    let still = fit(&Array2::ones((5, 4)), &fixed(3)).unwrap();
    assert_eq!(still.members[0].variance.to_vec(), [0.0; 4]);
    assert!(distance(&still.components, &still.components) < 1e-6);
}
