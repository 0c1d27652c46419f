//! Which model and layers a station is to serve, as it is written on a command line. Only text is read here.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Vocabulary of the identity backend unless one is given.
pub const IDENTITY_VOCAB: usize = 1 << 16;

/// Which model a station serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// The model that is part of the program.
    Demo,
    /// A directory in the Hugging Face layout.
    Directory(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// Returns what comes in.
    Identity {
        /// Width of a residual.
        hidden_dim: usize,
        /// Token ids.
        vocab: usize,
    },
    /// Another station behind this one.
    Upstream {
        /// Its address, such as `uds:/run/a.sock`.
        station: String,
        /// Width of a residual.
        hidden_dim: usize,
        /// Token ids.
        vocab: usize,
    },
}

/// Why a text names no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Nothing was given.
    #[error("empty model (expected demo, DIRECTORY, FILE.gguf, identity:DIM[:VOCAB] or upstream:STATION,DIM,VOCAB)")]
    Empty,
    /// `identity:` is followed by something else than one or two numbers.
    #[error("bad model {text:?} (expected identity:DIM[:VOCAB])")]
    Identity {
        /// What was given.
        text: String,
    },
    /// `upstream:` is followed by something else than an address and two numbers.
    #[error("bad model {text:?} (expected upstream:STATION,DIM,VOCAB with STATION as uds:PATH, udp:ADDR or tcp:ADDR)")]
    Upstream {
        /// What was given.
        text: String,
    },
    /// A number is zero or too large.
    #[error("{what} is {got}, expected 1 to {max}")]
    OutOfRange {
        /// Which number.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The largest accepted.
        max: u64,
    },
    /// A layer range is not two numbers in order.
    #[error("bad layers {text:?} (expected LO..HI with LO below HI, such as 0..12)")]
    Layers {
        /// What was given.
        text: String,
    },
}

/// Largest hidden size and vocabulary accepted without a file that proves them.
const MAX_DIM: u64 = 1 << 16;
const MAX_VOCAB: u64 = 1 << 22;

impl ModelSpec {
    /// Reads `DIRECTORY | FILE.gguf | identity:DIM[:VOCAB] | upstream:STATION,DIM,VOCAB | demo`. A directory called
    /// `demo` is `./demo`.
    ///
    /// # Errors
    /// [`SpecError`] with the form that was expected.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        if let Some(rest) = text.strip_prefix("identity:") {
            let bad = || SpecError::Identity { text: text.to_owned() };
            let (hidden_dim, vocab) = match rest.split_once(':') {
                None => (rest, None),
                Some((hidden_dim, vocab)) => (hidden_dim, Some(vocab)),
            };
            let vocab = vocab.map(|vocab| number("vocabulary", vocab, MAX_VOCAB, bad)).transpose()?;
            let hidden_dim = number("hidden size", hidden_dim, MAX_DIM, bad)?;
            return Ok(Self::Identity { hidden_dim, vocab: vocab.unwrap_or(IDENTITY_VOCAB) });
        }
        if let Some(rest) = text.strip_prefix("upstream:") {
            let bad = || SpecError::Upstream { text: text.to_owned() };
            // From the right, since a socket path may contain commas.
            let mut parts = rest.rsplitn(3, ',');
            let (Some(vocab), Some(hidden_dim), Some(station)) = (parts.next(), parts.next(), parts.next()) else {
                return Err(bad());
            };
            if station.is_empty() {
                return Err(bad());
            }
            let vocab = number("vocabulary", vocab, MAX_VOCAB, bad)?;
            let hidden_dim = number("hidden size", hidden_dim, MAX_DIM, bad)?;
            return Ok(Self::Upstream { station: station.to_owned(), hidden_dim, vocab });
        }
        match text {
            "" => Err(SpecError::Empty),
            "demo" => Ok(Self::Demo),
            _ if is_gguf(Path::new(text)) => Ok(Self::Gguf(text.into())),
            _ => Ok(Self::Directory(text.into())),
        }
    }
}

impl FromStr for ModelSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::parse(text)
    }
}

fn number(what: &'static str, text: &str, max: u64, bad: impl Fn() -> SpecError) -> Result<usize, SpecError> {
    let got: u64 = text.parse().map_err(|_| bad())?;
    match usize::try_from(got) {
        Ok(small) if (1..=max).contains(&got) => Ok(small),
        _ => Err(SpecError::OutOfRange { what, got, max }),
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Layers `LO..HI` of a model, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSpec(Range<u32>);

impl LayerSpec {
    /// Reads `LO..HI` with `LO < HI`.
    ///
    /// # Errors
    /// [`SpecError::Layers`].
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let bad = || SpecError::Layers { text: text.to_owned() };
        let (lo, hi) = text.split_once("..").ok_or_else(bad)?;
        match (lo.parse(), hi.parse()) {
            (Ok(lo), Ok(hi)) if lo < hi => Ok(Self(lo..hi)),
            _ => Err(bad()),
        }
    }

    /// The layers.
    #[must_use]
    pub fn range(&self) -> Range<u32> {
        self.0.clone()
    }
}

impl FromStr for LayerSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models() {
        let identity = |hidden_dim, vocab| Ok(ModelSpec::Identity { hidden_dim, vocab });
        let upstream =
            |station: &str| Ok(ModelSpec::Upstream { station: station.to_owned(), hidden_dim: 3584, vocab: 152_064 });
        for (text, expected) in [
            ("demo", Ok(ModelSpec::Demo)),
            ("./demo", Ok(ModelSpec::Directory("./demo".into()))),
            ("/models/a b", Ok(ModelSpec::Directory("/models/a b".into()))),
            ("m/x.Q4_1.gguf", Ok(ModelSpec::Gguf("m/x.Q4_1.gguf".into()))),
            ("X.GGUF", Ok(ModelSpec::Gguf("X.GGUF".into()))),
            ("identity:64", identity(64, IDENTITY_VOCAB)),
            ("identity:64:100", identity(64, 100)),
            ("upstream:uds:/run/a.sock,3584,152064", upstream("uds:/run/a.sock")),
            ("upstream:uds:/run/a,b.sock,3584,152064", upstream("uds:/run/a,b.sock")),
            ("upstream:udp:[::1]:4000,3584,152064", upstream("udp:[::1]:4000")),
            ("", Err(SpecError::Empty)),
        ] {
            assert_eq!(ModelSpec::parse(text), expected, "{text}");
        }
        for text in ["identity:", "identity:x", "identity:1:2:3", "identity:1:", "identity:-1"] {
            assert_eq!(ModelSpec::parse(text), Err(SpecError::Identity { text: text.to_owned() }));
        }
        for text in ["upstream:", "upstream:a,1", "upstream:,1,2", "upstream:a,b,c"] {
            assert_eq!(ModelSpec::parse(text), Err(SpecError::Upstream { text: text.to_owned() }));
        }
        for text in ["identity:0", "identity:65537", "identity:1:0", "upstream:a,1,99999999"] {
            assert!(matches!(ModelSpec::parse(text), Err(SpecError::OutOfRange { .. })), "{text}");
        }
    }

    #[test]
    fn layers() {
        assert_eq!(LayerSpec::parse("0..12").map(|layers| layers.range()), Ok(0..12));
        for text in ["", "3", "3..3", "4..3", "a..b", "0..", "..4", "0..=4", "-1..2", "0..4294967296"] {
            assert_eq!(LayerSpec::parse(text), Err(SpecError::Layers { text: text.to_owned() }));
        }
    }
}
