//! A text that a failing station cut short, in a file, to go on with later.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use aeon_station::client::{Pipeline, generate::GenerateOptions, sampler::Sampling};
use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::usage;

/// All that is needed to go on as if nothing had happened: the rest has the same tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Unfinished {
    /// Of the model.
    config_fp: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
    max_tokens: usize,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    seed: u64,
    stop: Vec<u32>,
    /// The form of residuals, which the rest must have too.
    wire: String,
}

impl Unfinished {
    pub(crate) fn new(pipeline: &Pipeline, prompt: Vec<u32>, options: &GenerateOptions, wire: String) -> Self {
        Self {
            config_fp: pipeline.model().config_fp.clone(),
            prompt,
            tokens: Vec::new(),
            max_tokens: options.max_tokens,
            temperature: options.sampling.temperature,
            top_p: options.sampling.top_p,
            top_k: options.top_k,
            seed: options.sampling.seed,
            stop: options.stop.clone(),
            wire,
        }
    }

    pub(crate) fn options(&self) -> GenerateOptions {
        let Self { temperature, top_p, seed, .. } = *self;
        GenerateOptions {
            max_tokens: self.max_tokens,
            sampling: Sampling { temperature, top_p, seed },
            top_k: self.top_k,
            stop: self.stop.clone(),
        }
    }

    /// Reads a file and checks that it belongs to the model and to the form of residuals asked for.
    pub(crate) fn read(path: &Path, pipeline: &Pipeline, wire: &str) -> anyhow::Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let unfinished: Self = serde_json::from_slice(&bytes)
            .map_err(|error| usage(format!("{} is no text that generate left: {error}", path.display())))?;
        let model = pipeline.model();
        if unfinished.config_fp != model.config_fp {
            return Err(usage(format!("{} was begun with another model than {}", path.display(), model.name)));
        }
        if unfinished.wire != wire {
            let (theirs, file) = (&unfinished.wire, path.display());
            return Err(usage(format!("{file} was begun with --wire {theirs}; go on with the same")));
        }
        let is_id = |id: &u32| (*id as usize) < model.vocab;
        if unfinished.prompt.is_empty() || !unfinished.prompt.iter().chain(&unfinished.tokens).all(is_id) {
            return Err(usage(format!("{} holds no tokens of {}", path.display(), model.name)));
        }
        Ok(unfinished)
    }

    /// Writes it to `path`, or to a new file in the folder for temporary ones; only its owner may read it.
    pub(crate) fn write(&self, path: Option<&Path>) -> anyhow::Result<PathBuf> {
        let is_new = path.is_none();
        let path = path.map_or_else(
            || std::env::temp_dir().join(format!("aeonctl-{:016x}.json", rand::random::<u64>())),
            Path::to_path_buf,
        );
        let open = || -> std::io::Result<File> {
            let mut options = OpenOptions::new();
            options.write(true).mode(0o600);
            // A name that is there already belongs to someone else.
            if is_new { options.create_new(true) } else { options.create(true).truncate(true) }.open(&path)
        };
        let bytes = serde_json::to_vec(self)?;
        open()
            .and_then(|mut file| file.write_all(&bytes))
            .with_context(|| format!("keeping the text so far in {}", path.display()))?;
        Ok(path)
    }
}
