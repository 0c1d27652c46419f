//! `aeonctl evaluate`: what each form of residuals costs a model.

mod chart;
mod html;
mod source;
mod table;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aeon_station::{
    basis::{BasisFile, atomic::write_atomically},
    client::sampler::Sampling,
    demo,
    evaluate::{
        EvaluateError, Mesh, Options, Report, Setting, Split, calibrate::calibrate, evaluate, live::Live,
        run::check_basis, text,
    },
    model::spec::ModelSpec,
    text::tokenizer::Tokenizer,
};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use self::source::{Source, Windows};
use crate::{Context, usage};

/// Seed of a calibration text beside that of the text to judge: they must not be the same.
const CALIBRATION_SEED: u64 = 0x5eed;

/// Options of `aeonctl evaluate`.
#[derive(Debug, Args)]
pub(crate) struct Evaluate {
    /// Text to judge with: a text file; a .json file of token windows (see --save-tokens); or sample:N, N windows that the
    /// model writes itself [default: the demo model's held-out text]
    #[arg(value_name = "TEXT")]
    text: Option<Source>,
    /// Model to cut in this process: a directory, FILE.gguf or demo. With --station, running stations are used instead
    #[arg(long, value_name = "M")]
    model: Option<String>,
    /// Boundaries to cut at, such as 8,15,23; all means every one [default: the middle]
    #[arg(long, value_name = "LIST")]
    cuts: Option<String>,
    /// Bodies to judge: f32, f16, i8, q3 to q8, qN:nomean, pcar (all components of the basis), pcar:K, pcar:K:escape
    /// [default: f32,f16,i8,q8,q6,q5,q4,q3, and pcar if the basis has components]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    wire: Vec<Setting>,
    /// Basis with the means that qN takes off and the components of pcar [default for the demo model: its own]
    #[arg(long, value_name = "FILE.pcab")]
    basis: Option<PathBuf>,
    /// Make a basis for the cuts from this text first, which must be another than the one to judge: a text file, a .json
    /// file of token windows, or sample:N
    #[arg(long, value_name = "TEXT", conflicts_with = "basis")]
    calibrate: Option<Source>,
    /// Positions to calibrate with at most
    #[arg(long, value_name = "N", default_value_t = 4096)]
    calibrate_tokens: usize,
    /// Positions of a window
    #[arg(long, value_name = "N", default_value_t = 128)]
    context: usize,
    /// Positions to judge at most; of a longer text, windows are taken evenly from all of it
    #[arg(long, value_name = "N", default_value_t = 2048)]
    max_tokens: usize,
    /// Judge all cuts together only, not also each by itself
    #[arg(long)]
    whole_only: bool,
    /// Drafts of which it is counted how many tokens the unsplit model accepts
    #[arg(long, value_name = "N", default_value_t = 30)]
    drafts: usize,
    /// Tokens of a draft
    #[arg(long, value_name = "K", default_value_t = 5)]
    draft_len: usize,
    /// Greedy texts that are compared until the first difference
    #[arg(long, value_name = "N", default_value_t = 4)]
    greedy: usize,
    /// Tokens of a greedy text
    #[arg(long, value_name = "N", default_value_t = 64)]
    greedy_len: usize,
    /// For sample:N, 1 draws as the model says, lower is more careful
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f32,
    /// For sample:N, draw from the most likely tokens that make up this share of the probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// tokenizer.json, model directory or GGUF file with the vocabulary, if the model has none beside it
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// Write the windows that were judged to this file, as a JSON array of arrays of token ids
    #[arg(long, value_name = "FILE.json")]
    save_tokens: Option<PathBuf>,
    /// Write a page with the curve of bytes against harm and all tables to this file
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
}

impl Evaluate {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        for (name, value, most) in [("temperature", self.temperature, 100.0), ("top-p", self.top_p, 1.0)] {
            if !(0.0..=most).contains(&value) {
                return Err(usage(format!("--{name} {value} is not between 0 and {most}")));
            }
        }
        if self.draft_len == 0 || self.greedy_len == 0 {
            return Err(usage("--draft-len and --greedy-len: at least 1"));
        }
        let report = if context.stations.is_empty() {
            let model = self.model.as_deref().unwrap_or("demo");
            let spec = ModelSpec::parse(model).map_err(|error| usage(error.to_string()))?;
            let cuts = match self.cuts.as_deref() {
                Some("all") => (1..layers(&spec)?).collect(),
                Some(list) => parse_cuts(list)?,
                None => vec![layers(&spec)? / 2],
            };
            let mut split = Split::load(&spec, &cuts).map_err(as_usage)?;
            tokio::task::block_in_place(|| self.judge(&mut split, Some(&spec)))?
        } else {
            if self.model.is_some() || self.cuts.is_some() {
                return Err(usage("--station and --model or --cuts: the stations are the model, cut where they meet"));
            }
            let mut live = Live::connect(&context.stations, &context.options).await.map_err(as_usage)?;
            let report = tokio::task::block_in_place(|| self.judge(&mut live, None));
            live.end().await;
            report?
        };
        if let Some(path) = &self.html {
            write_atomically(path, html::page(&report).as_bytes())?;
        }
        match context.json {
            true => println!("{}", serde_json::to_string(&report)?),
            false => print!("{}", table::text(&report)),
        }
        Ok(())
    }

    fn judge(&self, mesh: &mut dyn Mesh, spec: Option<&ModelSpec>) -> anyhow::Result<Report> {
        let is_demo = mesh.info().config_fp == demo_config_fp()?;
        let tokenizer = || tokenizer_of(self.tokenizer.as_deref(), spec, is_demo);
        let windows = |max_tokens, seed| Windows {
            context: self.context,
            max_tokens,
            sampling: Sampling { temperature: self.temperature, top_p: self.top_p, seed },
        };
        let judged = match &self.text {
            Some(source) => source.windows(mesh, windows(self.max_tokens, self.seed), &tokenizer)?,
            None if is_demo => {
                let ids = demo::tokenizer()?.encode(demo::HELD_OUT, false)?;
                text::windows(mesh.info(), &ids, self.context, self.max_tokens).map_err(as_usage)?
            }
            None => {
                return Err(usage("no text to judge with; name a text file, or sample:12 to have the model write one"));
            }
        };
        if let Some(path) = &self.save_tokens {
            text::write(path, &judged)?;
        }
        let basis = match (&self.basis, &self.calibrate) {
            (Some(path), _) => Some(Arc::new(BasisFile::open(path)?)),
            (None, Some(source)) => {
                let seed = self.seed ^ CALIBRATION_SEED;
                let texts = source.windows(mesh, windows(self.calibrate_tokens, seed), &tokenizer)?;
                let bar = progress_bar("calibrating", texts.len() as u64)?;
                let k = self.components(mesh.info().hidden_dim);
                let made = calibrate(mesh, &texts, k, &mut || bar.inc(1));
                bar.finish_and_clear();
                Some(made?)
            }
            (None, None) if is_demo => demo::bases()?.bases().next().map(Arc::clone),
            (None, None) => None,
        };
        check_basis(mesh.info(), basis.as_ref()).map_err(as_usage)?;
        let settings = match self.wire.is_empty() {
            false => self.wire.clone(),
            true => default_settings(basis.as_deref()),
        };
        let options = Options {
            alone: !self.whole_only,
            drafts: self.drafts,
            draft_len: self.draft_len,
            greedy: self.greedy,
            greedy_len: self.greedy_len,
        };
        let bar = progress_bar("judging", 1)?;
        let report = evaluate(mesh, &judged, &settings, basis.as_ref(), &options, &mut |done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        report.map_err(as_usage)
    }

    /// Components that a basis for the bodies asked for must have.
    fn components(&self, d: usize) -> u32 {
        let components = |setting: &Setting| match setting {
            Setting::Pcar { k, .. } => {
                k.unwrap_or_else(|| 8.max(u32::try_from(d * 8).unwrap_or(u32::MAX).div_ceil(1000)))
            }
            Setting::F32 | Setting::Quantised { .. } => 0,
        };
        self.wire.iter().map(components).max().unwrap_or(0)
    }
}

/// The vocabulary that was named, or that lies beside the model.
pub(crate) fn tokenizer_of(
    named: Option<&Path>,
    model: Option<&ModelSpec>,
    is_demo: bool,
) -> anyhow::Result<Tokenizer> {
    let beside = match model {
        Some(ModelSpec::Directory(path) | ModelSpec::Gguf(path)) => Some(path.as_path()),
        _ => None,
    };
    match (named.or(beside), is_demo) {
        (Some(path), _) => Ok(Tokenizer::from_path(path)?),
        (None, true) => Ok(demo::tokenizer()?),
        (None, false) => Err(usage(
            "the model's vocabulary is needed to read a text: add --tokenizer with its tokenizer.json, model directory or \
             GGUF file",
        )),
    }
}

pub(crate) fn demo_config_fp() -> anyhow::Result<String> {
    use aeon_station::model::LayerRange;
    Ok(demo::load(Some(0..1))?.info().config_fp.clone())
}

/// Layers of a model.
fn layers(spec: &ModelSpec) -> anyhow::Result<u32> {
    Split::layers(spec).map_err(as_usage)
}

fn default_settings(basis: Option<&BasisFile>) -> Vec<Setting> {
    let pcar = basis.is_some_and(|basis| basis.boundaries().any(|part| part.k > 0)).then_some("pcar");
    let names = ["f32", "f16", "i8", "q8", "q6", "q5", "q4", "q3"].into_iter().chain(pcar);
    names.filter_map(|name| name.parse().ok()).collect()
}

/// What the user can mend on the command line.
pub(crate) fn as_usage(error: EvaluateError) -> anyhow::Error {
    match error {
        EvaluateError::Cut { .. }
        | EvaluateError::CutOrder { .. }
        | EvaluateError::NoCut
        | EvaluateError::Unsplittable { .. }
        | EvaluateError::TextTooShort { .. }
        | EvaluateError::Context { .. }
        | EvaluateError::Token { .. }
        | EvaluateError::NoBasis { .. }
        | EvaluateError::BasisWidth { .. }
        | EvaluateError::BasisModel { .. }
        | EvaluateError::Components { .. } => usage(error.to_string()),
        EvaluateError::Client(error) => error.into(),
        error => error.into(),
    }
}

fn parse_cuts(list: &str) -> anyhow::Result<Vec<u32>> {
    let cuts: Result<Vec<u32>, _> = list.split(',').map(|cut| cut.trim().parse()).collect();
    cuts.map_err(|_| usage(format!("--cuts {list:?}: write numbers separated by commas, such as 8,15,23, or all")))
}

/// A bar on stderr; nothing if that is no terminal.
pub(crate) fn progress_bar(what: &'static str, total: u64) -> anyhow::Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix:11} {bar:30} {pos}/{len} {elapsed}, {eta} left")?;
    let bar = ProgressBar::new(total).with_style(style).with_prefix(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    Ok(bar)
}
