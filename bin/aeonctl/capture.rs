//! `aeonctl capture-residuals`: runs a text through a mesh and keeps what crosses each boundary.

use std::{collections::BTreeMap, io::Read, path::PathBuf};

use aeon_station::{basis::residuals::ResidualWriter, client::Pipeline};
use anyhow::Context as _;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::{Context, generate::tokenizer_for, usage};

/// Positions of a window unless the user says otherwise; most texts refer back less far.
const DEFAULT_WINDOW: usize = 256;

/// Options of `aeonctl capture-residuals`.
#[derive(Debug, Args)]
pub(crate) struct Capture {
    /// Text to run through the mesh; - reads standard input
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// tokenizer.json, model directory or GGUF file with the model's vocabulary (not needed for the demo model)
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// File for the residuals: a tensor boundary.N, f32 [positions, width], for each boundary
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
    /// Positions to capture at most; of a longer text, windows are taken evenly from all of it
    #[arg(long, value_name = "N", default_value_t = 8192)]
    max_tokens: usize,
    /// Positions of each window of the text; each begins with the token that begins a text [default: 256, or the context]
    #[arg(long, value_name = "N")]
    window: Option<usize>,
}

impl Capture {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        if self.max_tokens == 0 {
            return Err(usage("--max-tokens 0 captures nothing"));
        }
        let stations = context.stations()?;
        let text = self.read_text()?;
        let mut pipeline = Pipeline::connect(stations, &context.options).await?;
        let tokenizer = tokenizer_for(self.tokenizer.as_deref(), &pipeline)?;
        let ids = tokenizer.encode(&text, false)?;
        let model = pipeline.model().clone();
        let window = self.window.unwrap_or(DEFAULT_WINDOW.min(model.max_position));
        let first: Vec<u32> = model.bos.into_iter().collect();
        if window <= first.len() || window > model.max_position {
            let (least, most) = (first.len() + 1, model.max_position);
            return Err(usage(format!(
                "--window {window} is not between {least} and {most}, the context of {}",
                model.name
            )));
        }
        let windows = windows(&ids, &first, window, self.max_tokens);
        let rows: usize = windows.iter().map(Vec::len).sum();
        if rows == 0 {
            return Err(usage(format!("{} holds no text", self.text.display())));
        }
        let corpus_hash = format!("blake3:{}", blake3::hash(text.as_bytes()).to_hex());
        let metadata = BTreeMap::from([
            ("model".to_owned(), model.name.clone()),
            ("config_fp".to_owned(), model.config_fp.clone()),
            ("corpus_hash".to_owned(), corpus_hash.clone()),
            ("corpus_bytes".to_owned(), text.len().to_string()),
            ("tokens".to_owned(), rows.to_string()),
            ("window".to_owned(), window.to_string()),
        ]);
        let boundaries: Vec<u32> = pipeline.boundaries().collect();
        let shapes = boundaries.iter().map(|boundary| (*boundary, (rows, model.hidden_dim)));
        let mut writer = ResidualWriter::create(&self.out, shapes, &metadata)?;
        let bar = ProgressBar::new(rows as u64)
            .with_style(ProgressStyle::with_template("{bar:30} {pos}/{len} positions, {per_sec}, {eta} left")?);
        for ids in &windows {
            let crossings = tokio::select! {
                crossings = pipeline.residuals(ids) => crossings?,
                _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted; no file was written"),
            };
            for crossing in crossings {
                writer.append(crossing.boundary, &crossing.values)?;
            }
            bar.inc(ids.len() as u64);
        }
        bar.finish_and_clear();
        writer.finish()?;
        let bytes = 4 * rows * model.hidden_dim * boundaries.len();
        if context.json {
            let out = self.out.display().to_string();
            println!(
                "{}",
                json!({ "out": out, "model": model.name, "positions": rows, "windows": windows.len(),
                    "boundaries": boundaries, "width": model.hidden_dim, "corpus_hash": corpus_hash })
            );
        } else {
            println!("{}: {rows} positions in {} windows of {}", self.out.display(), windows.len(), model.name);
            println!("  boundaries  {}", boundaries.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
            println!("  width       {} ({} of residuals)", model.hidden_dim, indicatif::HumanBytes(bytes as u64));
            println!("  corpus      {corpus_hash}");
        }
        Ok(())
    }

    fn read_text(&self) -> anyhow::Result<String> {
        if self.text.as_os_str() == "-" {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("reading the text from standard input")?;
            return Ok(text);
        }
        std::fs::read_to_string(&self.text).with_context(|| format!("reading the text {}", self.text.display()))
    }
}

/// Cuts `ids` into windows that begin with `first`, and takes evenly spaced ones of them, at most `max` ids in all.
fn windows(ids: &[u32], first: &[u32], window: usize, max: usize) -> Vec<Vec<u32>> {
    let all: Vec<_> = ids.chunks(window.saturating_sub(first.len()).max(1)).collect();
    let wanted = all.len().min(max.div_ceil(window));
    let mut left = max;
    let mut taken = Vec::new();
    for index in 0..wanted {
        let mut ids = [first, all[index * all.len() / wanted]].concat();
        ids.truncate(left);
        left -= ids.len();
        taken.push(ids);
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_spread_over_the_text_and_bounded() {
        let ids: Vec<u32> = (10..30).collect();
        assert_eq!(windows(&ids, &[1], 11, 100), [[&[1], &ids[..10]].concat(), [&[1], &ids[10..]].concat()]);
        assert_eq!(windows(&ids, &[1], 5, 12), [vec![1, 10, 11, 12, 13], vec![1, 14, 15, 16, 17], vec![1, 22]]);
        assert_eq!(windows(&ids, &[], 5, 5), [[10, 11, 12, 13, 14]]);
        assert!(windows(&[], &[1], 5, 5).is_empty());
    }
}
