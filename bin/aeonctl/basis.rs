//! `aeonctl basis`: fitting basis files, and looking into them.

use std::path::{Path, PathBuf};

use aeon_station::basis::{BasisFile, Boundary, metadata::EndEffect, methodologies::Methodologies};
use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::{Context, fit::Fit, plot};

/// What to do with basis files.
#[derive(Debug, Subcommand)]
pub(crate) enum BasisCommand {
    /// Fit a basis to residuals
    Fit(Box<Fit>),
    /// Show what a basis file holds: components, explained variance, norms
    Inspect(Inspect),
    /// Check every byte of a basis file, and print its fingerprints
    Verify(Verify),
}

/// Options of `aeonctl basis inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Basis file
    #[arg(value_name = "FILE.pcab")]
    file: PathBuf,
    /// Draw the explained variance into this file
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
}

/// Options of `aeonctl basis verify`.
#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Basis files
    #[arg(value_name = "FILE.pcab", required = true)]
    files: Vec<PathBuf>,
    /// Folder of methodologies that must hold the one of each file
    #[arg(long, value_name = "DIR")]
    methodologies: Option<PathBuf>,
}

impl BasisCommand {
    pub(crate) fn run(self, context: &Context) -> anyhow::Result<()> {
        match self {
            Self::Fit(fit) => fit.run(context),
            Self::Inspect(inspect) => inspect.run(context),
            Self::Verify(verify) => verify.run(context),
        }
    }
}

impl Inspect {
    fn run(self, context: &Context) -> anyhow::Result<()> {
        let file = BasisFile::open(&self.file)?;
        if let Some(path) = &self.svg {
            std::fs::write(path, plot::svg(&file)).with_context(|| format!("writing {}", path.display()))?;
        }
        match context.json {
            true => println!("{}", describe(&file)),
            false => print!("{}{}{}", heading(&file), table(&file), plot::text(&file)),
        }
        Ok(())
    }
}

impl Verify {
    fn run(self, context: &Context) -> anyhow::Result<()> {
        let known = self.methodologies.as_deref().map(Methodologies::load).transpose()?;
        let mut values = Vec::new();
        for path in &self.files {
            let file = BasisFile::open(path)?;
            let id = file.methodology();
            let name = known.as_ref().map(|known| known.get(id).map(|methodology| methodology.name.clone()));
            if let (Some(None), Some(folder)) = (&name, &self.methodologies) {
                anyhow::bail!("{}: its methodology {id:#010x} is not in {}", path.display(), folder.display());
            }
            if context.json {
                values.push(describe(&file));
                continue;
            }
            println!("{}: valid", path.display());
            println!("  basis_fp     {:#010x}", file.basis_fp());
            println!("  blake3       {}", file.blake3().to_hex());
            let name = name.flatten().map(|name| format!(" ({name})")).unwrap_or_default();
            println!("  methodology  {id:#010x}{name}");
        }
        if context.json {
            println!("{}", Value::Array(values));
        }
        Ok(())
    }
}

/// What the whole file is.
pub(crate) fn heading(file: &BasisFile) -> String {
    let metadata = file.metadata();
    let mut out = format!("{}\n", file.path().display());
    let mut line = |name: &str, value: String| out += &format!("  {name:<12} {value}\n");
    line("basis_fp", format!("{:#010x}", file.basis_fp()));
    line("blake3", file.blake3().to_hex().to_string());
    line("methodology", format!("{:#010x}", file.methodology()));
    if !metadata.model.is_empty() {
        line("model", metadata.model.clone());
    }
    line("width", file.hidden_dim().to_string());
    line("bytes", file.byte_len().to_string());
    if !metadata.policy.k_rule.is_null() {
        line("k rule", metadata.policy.k_rule.to_string());
    }
    if let Some(hash) = metadata.calibration.capture.get("corpus_hash") {
        line("corpus", hash.clone());
    }
    out + "\n"
}

/// A line for each boundary.
pub(crate) fn table(file: &BasisFile) -> String {
    let metadata = file.metadata();
    let mut out = format!(
        "{:>8} {:>5} {:>9} {:>10} {:>11} {:>8} {:>8}  {}\n",
        "boundary", "k", "explained", "mean norm", "median norm", "rows", "outliers", "basis of"
    );
    let mut owners: Vec<(u64, u32)> = Vec::new();
    for part in file.boundaries() {
        let owner = owners.iter().find(|(offset, _)| *offset == part.basis_offset).map(|(_, owner)| *owner);
        if part.k > 0 && owner.is_none() {
            owners.push((part.basis_offset, part.boundary));
        }
        let statistics = metadata.boundaries.get(&part.boundary).copied().unwrap_or_default();
        let known = |value: String| if statistics.rows > 0 { value } else { "-".to_owned() };
        out += &format!(
            "{:>8} {:>5} {:>8.2}% {:>10.3} {:>11} {:>8} {:>8}  {}\n",
            part.boundary,
            part.k,
            100.0 * part.explained(part.k),
            norm(part.mean),
            known(format!("{:.3}", statistics.median_norm)),
            known(statistics.rows.to_string()),
            known(statistics.outliers.to_string()),
            match (part.k, owner) {
                (0, _) => "none, mean only".to_owned(),
                (_, Some(owner)) => format!("boundary {owner}"),
                (_, None) => "its own".to_owned(),
            }
        );
    }
    let evaluation = metadata.evaluation.as_ref().filter(|evaluation| !evaluation.boundaries.is_empty());
    let Some(evaluation) = evaluation else { return out + &end_effect(file) + "\n" };
    out += "\nOn other text (k 0 is the mean alone):\n";
    out += &format!(
        "{:>8} {:>5} {:>9} {:>9} {:>9} {:>9}\n",
        "boundary", "k", "explained", "cosine", "centred", "rel.error"
    );
    for (boundary, figures) in &evaluation.boundaries {
        for figure in figures {
            let (k, explained) = (figure.k, 100.0 * figure.explained);
            let (cosine, centred, error) = (figure.cosine, figure.centred_cosine, figure.relative_error);
            out += &format!("{boundary:>8} {k:>5} {explained:>8.2}% {cosine:>9.4} {centred:>9.4} {error:>9.4}\n");
        }
    }
    out + &end_effect(file) + "\n"
}

/// What the components do to the model's output, and the verdict.
fn end_effect(file: &BasisFile) -> String {
    if file.boundaries().all(|part| part.k == 0) {
        return String::new();
    }
    let Some(judged) = file.metadata().end_effect.as_ref().filter(|judged| !judged.boundaries.is_empty()) else {
        return "\nWhat these components do to the model's output was never judged; aeonctl basis fit --judge does it.\n"
            .to_owned();
    };
    let mut out = format!(
        "\nEnd effect of all components at one cut, on {} positions of {}:\n{:>8} {:>5} {:>9} {:>9} {:>12}\n",
        judged.positions, judged.text, "boundary", "k", "KL", "top-1", "perplexity"
    );
    for (boundary, effect) in &judged.boundaries {
        let (k, kl, top1, ratio) = (effect.k, effect.kl, 100.0 * effect.top1, effect.perplexity_ratio);
        out += &format!("{boundary:>8} {k:>5} {kl:>9.4} {top1:>8.1}% {:>12}\n", format!("x{ratio:.4}"));
    }
    let percent = 100.0 * judged.budget;
    out += &match judged.passed() {
        true => format!("PASSED: no cut costs more than {percent} % of perplexity\n"),
        false => {
            format!("FAILED: a cut costs more than {percent} % of perplexity; generate uses it with --force only\n")
        }
    };
    out
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// The file for programs.
pub(crate) fn describe(file: &BasisFile) -> Value {
    let boundary = |part: Boundary<'_>| {
        json!({
            "boundary": part.boundary,
            "k": part.k,
            "explained": part.explained(part.k),
            "mean_norm": norm(part.mean),
            "variance": part.variance,
        })
    };
    json!({
        "path": display(file.path()),
        "basis_fp": format!("{:#010x}", file.basis_fp()),
        "blake3": file.blake3().to_hex().as_str(),
        "methodology": format!("{:#010x}", file.methodology()),
        "hidden_dim": file.hidden_dim(),
        "bytes": file.byte_len(),
        "boundaries": file.boundaries().map(boundary).collect::<Vec<_>>(),
        "passed": file.metadata().end_effect.as_ref().map(EndEffect::passed),
        "metadata": serde_json::from_str::<Value>(file.metadata_text()).unwrap_or_default(),
    })
}

pub(crate) fn display(path: &Path) -> String {
    path.display().to_string()
}
