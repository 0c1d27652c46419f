//! Whether the bases of a mesh are good enough to send components of.

use aeon_station::{
    basis::BasisFile,
    client::{Pipeline, hello::RemoteBasis},
};

use crate::usage;

/// Looks at the basis of each hop: those that both stations have, or this client's own that the receiver has too. One that
/// was never judged is warned of.
///
/// # Errors
/// A mistake of the user, if one failed its own evaluation and `force` is not set.
pub(crate) fn check(pipeline: &Pipeline, local: Option<&BasisFile>, force: bool) -> anyhow::Result<()> {
    let mut seen = Vec::new();
    for pair in pipeline.stages().windows(2) {
        let [stage, next] = pair else { continue };
        let boundary = next.hello.layers[0];
        let is_used = |basis: &&RemoteBasis| {
            let shared = stage.hello.basis(basis.fingerprint()).is_some_and(|theirs| theirs.blake3 == basis.blake3);
            let own = local.is_some_and(|own| own.blake3().to_hex().as_str() == basis.blake3);
            basis.k_at(boundary) > 0 && if local.is_some() { own } else { shared }
        };
        let Some(basis) = next.hello.bases.iter().find(is_used) else { continue };
        if seen.contains(&basis.basis_fp) {
            continue;
        }
        seen.push(basis.basis_fp.clone());
        let name = &basis.basis_fp;
        match basis.judged {
            None => tracing::warn!(
                "basis {name} was never judged by what it does to the text; aeonctl evaluate --wire pcar shows it"
            ),
            Some(judged) if !judged.passed => {
                let (cut, ratio, top1) = (judged.worst_boundary, judged.perplexity_ratio, 100.0 * judged.top1);
                // It was f32 in the file.
                let budget = (judged.budget * 1e8).round() / 1e6;
                let failure = format!(
                    "basis {name} failed its own evaluation: a cut at {cut} multiplies perplexity by {ratio:.3} (budget {budget} %) \
                     and leaves {top1:.1} % of the next tokens the same"
                );
                match force {
                    true => tracing::warn!("{failure}"),
                    false => {
                        let hint = "use --wire exact, or add --force to send its components all the same";
                        return Err(usage(format!("{failure}; {hint}")));
                    }
                }
            }
            Some(_) => {}
        }
    }
    Ok(())
}
