//! Where a text comes from.

use std::{
    convert::Infallible,
    fmt,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    str::FromStr,
};

use aeon_station::{
    client::sampler::Sampling,
    evaluate::{Mesh, text},
    text::tokenizer::Tokenizer,
};
use anyhow::Context as _;

use super::{as_usage, progress_bar};
use crate::usage;

/// Longest text that is read: far more tokens than anyone waits for.
const MAX_TEXT_LEN: u64 = 256 << 20;

/// How a text becomes windows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Windows {
    /// Positions of each.
    pub(crate) context: usize,
    /// Positions of all at most.
    pub(crate) max_tokens: usize,
    /// How the model writes them.
    pub(crate) sampling: Sampling,
}

/// Where a text comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A text file.
    Text(PathBuf),
    /// A file of token windows.
    Tokens(PathBuf),
    /// So many windows that the model writes.
    Sample(usize),
}

impl FromStr for Source {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let count = text.strip_prefix("sample:").and_then(|count| count.parse().ok()).filter(|count| *count > 0);
        Ok(match count {
            Some(count) => Self::Sample(count),
            None if text.ends_with(".json") => Self::Tokens(text.into()),
            None => Self::Text(text.into()),
        })
    }
}

impl Source {
    /// The text as windows of token ids; `tokenizer` is asked for only if it is needed.
    pub(crate) fn windows(
        &self,
        mesh: &mut dyn Mesh,
        windows: Windows,
        tokenizer: &dyn Fn() -> anyhow::Result<Tokenizer>,
    ) -> anyhow::Result<Vec<Vec<u32>>> {
        let Windows { context, max_tokens, sampling } = windows;
        match self {
            Self::Sample(count) => {
                let count = (*count).min((max_tokens / context.max(1)).max(1));
                let bar = progress_bar("sampling", (count * context.saturating_sub(1)) as u64)?;
                let windows = text::sample(mesh, count, context, sampling, &mut || bar.inc(1));
                bar.finish_and_clear();
                windows.map_err(as_usage)
            }
            Self::Tokens(path) => {
                let mut windows = text::read(mesh.info(), path).map_err(as_usage)?;
                let mut left = max_tokens;
                windows.retain(|window| {
                    let fits = window.len() <= left;
                    left -= if fits { window.len() } else { left };
                    fits
                });
                match windows.is_empty() {
                    true => Err(usage(format!("{max_tokens} positions are fewer than the first window of {self} has"))),
                    false => Ok(windows),
                }
            }
            Self::Text(path) => {
                let text = read_text(path).with_context(|| format!("reading the text {}", path.display()))?;
                let ids = tokenizer()?.encode(&text, false)?;
                text::windows(mesh.info(), &ids, context, max_tokens).map_err(as_usage)
            }
        }
    }
}

/// Reads a text of bounded length: what is behind a path may have no end.
fn read_text(path: &Path) -> io::Result<String> {
    let text = io::read_to_string(File::open(path)?.take(MAX_TEXT_LEN + 1))?;
    match text.len() as u64 > MAX_TEXT_LEN {
        true => Err(io::Error::other(format!("longer than {MAX_TEXT_LEN} bytes; cut it"))),
        false => Ok(text),
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(path) | Self::Tokens(path) => path.display().fmt(f),
            Self::Sample(count) => write!(f, "sample:{count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources() {
        let parse = |text: &str| text.parse::<Source>().unwrap_or_else(|never| match never {});
        assert_eq!(parse("sample:12"), Source::Sample(12));
        assert_eq!(parse("sample:0"), Source::Text("sample:0".into()));
        assert_eq!(parse("a/b.json"), Source::Tokens("a/b.json".into()));
        assert_eq!(parse("-"), Source::Text("-".into()));
    }
}
