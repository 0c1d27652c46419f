//! `aeonctl basis fit`: from files of residuals to a basis file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aeon_proto::methodology::{KRule, MethodologySpec};
use aeon_station::basis::{
    BasisFile, PcaBases,
    atomic::write_atomically,
    evaluate::evaluate,
    fit::{FitOptions, Phase, Progress, Rows, fit_group},
    metadata::{Calibration, EndEffect, Evaluation, Metadata, Policy},
    methodologies::read_spec,
    pca::{FittedLayer, encode_pca_bases},
    residuals::{ResidualFile, read_npy},
    write_pca_bases,
};
use aeon_station::{
    client::sampler::Sampling,
    evaluate::{
        Mesh as _,
        judge::{judge, split_for},
    },
    model::spec::ModelSpec,
};
use anyhow::Context as _;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use ndarray::{Array2, Axis, concatenate};
use serde_json::json;

use crate::{
    Context, basis,
    evaluate::{Source, Windows, as_usage, demo_config_fp, progress_bar, tokenizer_of},
    methodology::{rule, rule_json},
    usage,
};

/// Positions of a window to judge with, as `aeonctl evaluate` has them.
const JUDGE_CONTEXT: usize = 128;

/// Options of `aeonctl basis fit`.
#[derive(Debug, Args)]
pub(crate) struct Fit {
    /// Residuals: safetensors files of capture-residuals, or .npy matrices, one for each boundary
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<PathBuf>,
    /// Basis file to write
    #[arg(long, value_name = "FILE.pcab")]
    out: PathBuf,
    /// Name of the model
    #[arg(long, value_name = "NAME")]
    model: String,
    /// Methodology of the basis, a JSON file; if it does not exist, it is made from these options
    #[arg(long, value_name = "FILE")]
    methodology: PathBuf,
    /// Components of each boundary [default: by the methodology]
    #[arg(long, value_name = "N", group = "rule")]
    k: Option<u32>,
    /// Components per thousand values of a residual
    #[arg(long, value_name = "N", group = "rule")]
    per_thousand: Option<u32>,
    /// With --per-thousand: at least this many
    #[arg(long, value_name = "N", requires = "per_thousand", default_value_t = 8)]
    floor: u32,
    /// As few components as cover this share of the variance, 0 to 1
    #[arg(long, value_name = "SHARE", group = "rule")]
    coverage: Option<f64>,
    /// Boundaries that share one basis; each keeps its own mean
    #[arg(long, value_name = "N", default_value_t = 1)]
    group: u32,
    /// Boundaries to fit, such as 1,2,8..12; for .npy files what each is of, in their order [default: all; 0, 1, …]
    #[arg(long, value_name = "LIST")]
    boundaries: Option<String>,
    /// Fit to the first position of each window and to positions of outlying norm too (over four times the median)
    #[arg(long)]
    keep_outliers: bool,
    /// Decompose wider residuals by random projection
    #[arg(long, value_name = "WIDTH", default_value_t = 8192)]
    randomized_above: usize,
    /// Seed of the random projection
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Residuals of other text, to measure the basis on; the figures go into the file
    #[arg(long, value_name = "FILE.safetensors")]
    evaluate: Option<PathBuf>,
    /// Numbers of components to measure at
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [0, 8, 16, 32, 64, 128])]
    evaluate_at: Vec<usize>,
    /// Judge what all components do to the output of the model, cut at each boundary in turn, and write the verdict into
    /// the file: with this text (a text file, a .json file of token windows, or sample:N), which was not fitted to
    #[arg(long, value_name = "TEXT", requires = "judge_model")]
    judge: Option<Source>,
    /// The model to judge with: a directory, FILE.gguf or demo
    #[arg(long, value_name = "M", requires = "judge")]
    judge_model: Option<String>,
    /// What a cut may cost in perplexity, in per cent; a basis that costs more fails, and generate then asks for --force
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, requires = "judge")]
    judge_budget: f32,
    /// Positions to judge at most
    #[arg(long, value_name = "N", default_value_t = 1024, requires = "judge")]
    judge_tokens: usize,
}

/// The files that residuals come from.
enum Inputs {
    /// Each with all its boundaries.
    SafeTensors(Vec<ResidualFile>),
    /// One boundary each.
    Npy(BTreeMap<u32, PathBuf>),
}

impl Fit {
    pub(crate) fn run(self, context: &Context) -> anyhow::Result<()> {
        if self.group == 0 {
            return Err(usage("--group 0: a group has at least one boundary"));
        }
        if !(0.0..=1000.0).contains(&self.judge_budget) {
            return Err(usage(format!("--judge-budget {} is not between 0 and 1000", self.judge_budget)));
        }
        let mut inputs = self.open()?;
        let boundaries = self.boundaries(&inputs)?;
        let capture = inputs.metadata();
        let spec = self.spec(&mut inputs, &boundaries, &capture)?;
        let options = FitOptions {
            k_rule: spec.k_rule(),
            leave_out_outliers: !self.keep_outliers,
            randomized_above: self.randomized_above,
            seed: self.seed,
        };
        let mut metadata = Metadata {
            model: self.model.clone(),
            program: concat!("aeonctl ", env!("CARGO_PKG_VERSION")).to_owned(),
            policy: Policy {
                k_rule: rule_json(spec.k_rule(), Some(&spec)),
                group: self.group,
                outliers_left_out: !self.keep_outliers,
                method: "exact".to_owned(),
            },
            calibration: Calibration { inputs: hashes(&self.inputs)?, capture },
            ..Metadata::default()
        };
        let mut layers = Vec::new();
        for group in boundaries.chunks(self.group as usize) {
            let matrices =
                group.iter().map(|boundary| inputs.read(*boundary)).collect::<anyhow::Result<Vec<Array2<f32>>>>()?;
            let given: Vec<usize> = matrices.iter().map(Array2::nrows).collect();
            let matrices: Vec<Array2<f32>> = match self.keep_outliers {
                true => matrices,
                false => matrices.into_iter().map(|rows| without(rows, &inputs.firsts(group[0]))).collect(),
            };
            let rows: Vec<_> = group
                .iter()
                .zip(&matrices)
                .map(|(boundary, values)| Rows { boundary: *boundary, values: values.view() })
                .collect();
            let bar = fit_bar(group)?;
            let fit = fit_group(&rows, &options, &mut |progress| show(&bar, progress));
            bar.finish_and_clear();
            let fit = fit?;
            if !fit.exact {
                "randomized".clone_into(&mut metadata.policy.method);
            }
            let components = Arc::new(fit.components);
            for (mut member, given) in fit.members.into_iter().zip(given) {
                let first = given as u64 - member.statistics.rows;
                member.statistics.rows += first;
                member.statistics.outliers += first;
                metadata.boundaries.insert(member.boundary, member.statistics);
                layers.push(FittedLayer {
                    boundary: member.boundary,
                    mean: member.mean,
                    components: Arc::clone(&components),
                    variance: member.variance,
                });
            }
        }
        if let Some(path) = &self.evaluate {
            metadata.evaluation = Some(self.measure(path, &layers, &metadata)?);
        }
        let text = serde_json::to_string(&metadata)?;
        let mut bases = PcaBases { hidden_dim: spec.hidden_dim(), methodology: spec.id(), metadata: text, layers };
        if let (Some(text), Some(model)) = (&self.judge, &self.judge_model) {
            metadata.end_effect = Some(self.judged(text, model, &bases)?);
            bases.metadata = serde_json::to_string(&metadata)?;
        }
        if !self.methodology.exists() {
            if let Some(folder) = self.methodology.parent() {
                std::fs::create_dir_all(folder).with_context(|| format!("making the folder {}", folder.display()))?;
            }
            write_atomically(&self.methodology, format!("{}\n", spec.canonical()).as_bytes())?;
        }
        write_pca_bases(&self.out, &bases)?;
        let file = BasisFile::open(&self.out)?;
        match context.json {
            true => println!("{}", basis::describe(&file)),
            false => print!("{}{}", basis::heading(&file), basis::table(&file)),
        }
        Ok(())
    }

    fn open(&self) -> anyhow::Result<Inputs> {
        let is_npy = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "npy");
        match self.inputs.iter().filter(|path| is_npy(path)).count() {
            0 => {
                let files = self.inputs.iter().map(|path| ResidualFile::open(path)).collect::<Result<_, _>>()?;
                Ok(Inputs::SafeTensors(files))
            }
            count if count == self.inputs.len() => {
                let boundaries = match &self.boundaries {
                    Some(list) => parse_boundaries(list)?,
                    None => (0..count as u32).collect(),
                };
                if boundaries.len() != count {
                    let named = boundaries.len();
                    return Err(usage(format!("--boundaries names {named} boundaries for {count} .npy files")));
                }
                Ok(Inputs::Npy(boundaries.into_iter().zip(self.inputs.iter().cloned()).collect()))
            }
            _ => Err(usage("the inputs are .npy files and others; give one kind")),
        }
    }

    /// The boundaries to fit, in increasing order.
    fn boundaries(&self, inputs: &Inputs) -> anyhow::Result<Vec<u32>> {
        let files = match inputs {
            Inputs::Npy(files) => return Ok(files.keys().copied().collect()),
            Inputs::SafeTensors(files) => files,
        };
        let there: BTreeSet<u32> = files.iter().flat_map(ResidualFile::boundaries).collect();
        let wanted: Vec<u32> = match &self.boundaries {
            Some(list) => parse_boundaries(list)?.into_iter().collect::<BTreeSet<_>>().into_iter().collect(),
            None => there.iter().copied().collect(),
        };
        if let Some(missing) = wanted.iter().find(|boundary| !there.contains(boundary)) {
            return Err(usage(format!("the inputs hold no residuals of boundary {missing}, only of {there:?}")));
        }
        if wanted.is_empty() {
            return Err(usage("the inputs hold no residuals"));
        }
        Ok(wanted)
    }

    /// The rule for `k` that the options name.
    fn rule(&self) -> anyhow::Result<Option<KRule>> {
        if let Some(share) = self.coverage {
            if !(0.001..=1.0).contains(&share) {
                return Err(usage(format!("--coverage {share} is not between 0.001 and 1")));
            }
            return Ok(Some(KRule::Coverage { per_thousand: (share * 1000.0).round() as u32 }));
        }
        if let Some(per_thousand) = self.per_thousand {
            return match per_thousand {
                1..=1000 => Ok(Some(KRule::PerThousand { per_thousand, floor: self.floor })),
                _ => Err(usage(format!("--per-thousand {per_thousand} is not between 1 and 1000"))),
            };
        }
        Ok(self.k.map(KRule::Fixed))
    }

    /// The methodology: read and compared with everything that is known, or made.
    fn spec(
        &self,
        inputs: &mut Inputs,
        boundaries: &[u32],
        capture: &BTreeMap<String, String>,
    ) -> anyhow::Result<MethodologySpec> {
        let path = basis::display(&self.methodology);
        let wanted = self.rule()?;
        let (rows, width) = inputs.read(boundaries.first().copied().unwrap_or(0))?.dim();
        if !self.methodology.exists() {
            let Some(rule) = wanted else {
                return Err(usage(format!(
                    "{path} does not exist; name it, or make it by adding --k, --per-thousand or --coverage"
                )));
            };
            let hash = match capture.get("corpus_hash") {
                Some(hash) => hash.clone(),
                None => format!("inputs:{}", hashes(&self.inputs)?.into_values().collect::<Vec<_>>().join("+")),
            };
            let spec = json!({
                "model": self.model,
                "hidden_dim": width,
                "k_rule": rule_json(rule, None),
                "boundaries": boundaries,
                "calibration": { "corpus_hash": hash, "tokens": rows },
            });
            return MethodologySpec::parse(&spec.to_string()).map_err(|error| usage(error.to_string()));
        }
        let spec = read_spec(&self.methodology)?;
        let differs = |what: &str, says: String, is: String| {
            Err(usage(format!("{path} says {what} {says}, but it is {is} here; name another methodology")))
        };
        if spec.model() != self.model {
            return differs("model", spec.model().to_owned(), self.model.clone());
        }
        if spec.hidden_dim() as usize != width {
            return differs("hidden_dim", spec.hidden_dim().to_string(), width.to_string());
        }
        if let Some(wanted) = wanted.filter(|wanted| *wanted != spec.k_rule()) {
            return differs("k:", rule(spec.k_rule()), rule(wanted));
        }
        if let Some(named) = spec.boundaries().filter(|named| *named != boundaries) {
            return differs("boundaries", format!("{named:?}"), format!("{boundaries:?}"));
        }
        if let (Some(calibration), Some(hash)) = (spec.calibration(), capture.get("corpus_hash")) {
            if calibration.corpus_hash != *hash {
                return differs("corpus_hash", calibration.corpus_hash.clone(), hash.clone());
            }
            if calibration.tokens != rows as u64 {
                return differs("tokens", calibration.tokens.to_string(), rows.to_string());
            }
        }
        Ok(spec)
    }

    /// Judges the components by the output of the model.
    fn judged(&self, text: &Source, model: &str, bases: &PcaBases) -> anyhow::Result<EndEffect> {
        let basis = BasisFile::from_bytes(&self.out, &encode_pca_bases(&self.out, bases)?)?;
        let spec = ModelSpec::parse(model).map_err(|error| usage(error.to_string()))?;
        let mut split = split_for(&spec, &basis).map_err(as_usage)?;
        let sampling = Sampling { temperature: 1.0, top_p: 1.0, seed: self.seed };
        let windows = Windows { context: JUDGE_CONTEXT, max_tokens: self.judge_tokens, sampling };
        let is_demo = split.info().config_fp == demo_config_fp()?;
        let windows = text.windows(&mut split, windows, &|| tokenizer_of(None, Some(&spec), is_demo))?;
        // Without the folder, which is nobody's business.
        let name = match text {
            Source::Text(path) | Source::Tokens(path) => {
                path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
            }
            Source::Sample(_) => text.to_string(),
        };
        let bar = progress_bar("judging", 1)?;
        let effect =
            judge(&mut split, &Arc::new(basis), &windows, name, self.judge_budget / 100.0, &mut |done, total| {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            });
        bar.finish_and_clear();
        effect.map_err(as_usage)
    }

    /// Measures the layers on other residuals.
    fn measure(&self, path: &Path, layers: &[FittedLayer], metadata: &Metadata) -> anyhow::Result<Evaluation> {
        let mut file = ResidualFile::open(path)?;
        let mut evaluation = Evaluation { inputs: hashes(&[path.to_owned()])?, ..Evaluation::default() };
        for layer in layers {
            let Some(rows) = file.read(layer.boundary)? else { continue };
            let mut ks: Vec<usize> = self.evaluate_at.clone();
            ks.retain(|k| *k <= layer.components.nrows());
            let median_norm = metadata.median_norm(layer.boundary).unwrap_or(0.0);
            let figures = evaluate(layer, median_norm, rows.view(), &ks);
            let boundary = layer.boundary;
            let figures = figures.with_context(|| {
                format!("{}: residuals of boundary {boundary} do not fit the basis", path.display())
            })?;
            evaluation.boundaries.insert(boundary, figures);
        }
        Ok(evaluation)
    }
}

impl Inputs {
    /// The residuals of a boundary, of all files together.
    fn read(&mut self, boundary: u32) -> anyhow::Result<Array2<f32>> {
        match self {
            Self::Npy(files) => {
                let path = files.get(&boundary).with_context(|| format!("no file for boundary {boundary}"))?;
                Ok(read_npy(path)?)
            }
            Self::SafeTensors(files) => {
                let mut matrices = Vec::new();
                for file in files {
                    matrices.extend(file.read(boundary)?);
                }
                if matrices.len() == 1 {
                    return matrices.pop().context("nothing to fit to");
                }
                let views: Vec<_> = matrices.iter().map(|matrix| matrix.view()).collect();
                concatenate(Axis(0), &views)
                    .with_context(|| format!("the inputs differ in width at boundary {boundary}"))
            }
        }
    }

    /// The rows that are the first positions of texts, as far as the files say how long their windows are. What the first
    /// token of a text leaves behind is like no other position's residual.
    fn firsts(&self, boundary: u32) -> BTreeSet<usize> {
        let Self::SafeTensors(files) = self else { return BTreeSet::new() };
        let mut firsts = BTreeSet::new();
        let mut start = 0;
        for file in files {
            let rows = file.rows(boundary);
            let window = file.metadata().get("window").and_then(|window| window.parse::<usize>().ok());
            if let Some(window) = window.filter(|window| *window > 1) {
                firsts.extend((0..rows).step_by(window).map(|row| start + row));
            }
            start += rows;
        }
        firsts
    }

    /// What all files say alike of themselves.
    fn metadata(&self) -> BTreeMap<String, String> {
        let Self::SafeTensors(files) = self else { return BTreeMap::new() };
        let mut files = files.iter().map(ResidualFile::metadata);
        let mut metadata = files.next().cloned().unwrap_or_default();
        for other in files {
            metadata.retain(|key, value| other.get(key) == Some(value));
        }
        metadata
    }
}

/// All rows but some.
fn without(rows: Array2<f32>, left_out: &BTreeSet<usize>) -> Array2<f32> {
    if left_out.is_empty() {
        return rows;
    }
    let kept: Vec<usize> = (0..rows.nrows()).filter(|row| !left_out.contains(row)).collect();
    rows.select(Axis(0), &kept)
}

/// Reads a list such as `1,2,8..12`, in its order and without repetitions.
fn parse_boundaries(list: &str) -> anyhow::Result<Vec<u32>> {
    let wrong = || usage(format!("--boundaries {list:?}: write different numbers and LO..HI, separated by commas"));
    let mut boundaries = Vec::new();
    for part in list.split(',') {
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        let range = match part.split_once("..") {
            Some((from, to)) => number(from)?..number(to)?,
            None => number(part)?..number(part)?.saturating_add(1),
        };
        if range.is_empty() || range.len() > 100_000 {
            return Err(wrong());
        }
        boundaries.extend(range);
    }
    let different: BTreeSet<_> = boundaries.iter().collect();
    if different.len() == boundaries.len() { Ok(boundaries) } else { Err(wrong()) }
}

/// Names and BLAKE3 hashes of files.
fn hashes(paths: &[PathBuf]) -> anyhow::Result<BTreeMap<String, String>> {
    let hash = |path: &PathBuf| {
        let mut hasher = blake3::Hasher::new();
        let file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
        hasher.update_reader(file).with_context(|| format!("reading {}", path.display()))?;
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((name, format!("blake3:{}", hasher.finalize().to_hex())))
    };
    paths.iter().map(hash).collect()
}

/// A bar on stderr; nothing if that is no terminal.
fn fit_bar(group: &[u32]) -> anyhow::Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {msg} {elapsed}")?;
    let names: Vec<String> = group.iter().map(u32::to_string).collect();
    let bar = ProgressBar::new(1).with_style(style).with_prefix(format!("boundary {}", names.join(", ")));
    bar.enable_steady_tick(Duration::from_millis(200));
    Ok(bar)
}

fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_length(progress.total);
    bar.set_position(progress.done);
    bar.set_message(match progress.phase {
        Phase::Moments => "means and norms",
        Phase::Products => "sums of products",
        Phase::Eigenvectors => "eigenvectors",
        Phase::Variances => "variances",
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_boundaries_are_read() {
        let read = |list: &str| parse_boundaries(list).ok();
        assert_eq!(read("3,1,8..11"), Some(vec![3, 1, 8, 9, 10]));
        for wrong in ["", "1,1", "2,1..4", "1,", "a", "5..5", "6..2", "0..4000000000", "-1"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
