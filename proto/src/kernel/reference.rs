//! The two sums as the specification writes them, one rounded operation a step. Spec: `proto/SPEC.md`, "Arithmetic".
//!
//! Every other path must give these bits. Nothing here is meant to be fast; it is meant to be read beside the text.

use super::{Lift, Project};

/// For each position and each j: start with `mean[j]`, then add `c[i] * B[i][j]` for i from 0 to k - 1.
pub(super) fn lift(job: Lift<'_>) {
    let Lift { mean, basis, components, out, k, .. } = job;
    let d = mean.len();
    for (position, out) in out.chunks_exact_mut(d).enumerate() {
        let components = components.chunks_exact(k.max(1)).nth(position).unwrap_or_default();
        for (j, (y, mean)) in out.iter_mut().zip(mean).enumerate() {
            *y = *mean;
            for (row, c) in basis.chunks_exact(d).zip(components) {
                let b = row.get(j).copied().unwrap_or_default();
                let product = c * b;
                *y += product;
            }
        }
    }
}

/// For each position and each row: sixteen partial sums over `j mod 16`, then the fixed tree.
pub(super) fn project(job: Project<'_>) {
    let Project { mean, basis, residuals, out, k, .. } = job;
    let d = mean.len();
    for (residual, out) in residuals.chunks_exact(d).zip(out.chunks_exact_mut(k.max(1))) {
        for (row, out) in basis.chunks_exact(d).zip(out) {
            let mut lanes = [0.0_f32; 16];
            let values = row.iter().zip(residual.iter().zip(mean));
            for (j, (b, (r, mean))) in values.enumerate() {
                let x = r - mean;
                let product = b * x;
                if let Some(lane) = lanes.get_mut(j % 16) {
                    *lane += product;
                }
            }
            *out = tree(lanes);
        }
    }
}

/// Folds sixteen lanes: l with l + 8, then l + 4, then l + 2, then the last two.
pub(super) const fn tree(a: [f32; 16]) -> f32 {
    let s8 =
        [a[0] + a[8], a[1] + a[9], a[2] + a[10], a[3] + a[11], a[4] + a[12], a[5] + a[13], a[6] + a[14], a[7] + a[15]];
    let s4 = [s8[0] + s8[4], s8[1] + s8[5], s8[2] + s8[6], s8[3] + s8[7]];
    let s2 = [s4[0] + s4[2], s4[1] + s4[3]];
    s2[0] + s2[1]
}
