//! The text that is judged, as windows of token ids.

use std::path::Path;

use super::{
    error::EvaluateError,
    mesh::{Mesh, MeshInfo, Slot},
};
use crate::{
    basis::atomic::{WriteFileError, write_atomically},
    client::sampler::{Sampler, Sampling},
    model::head::{Collector, Head, HeadOutput},
};

/// Positions of a window that can be judged at all: the first, one that is judged, and the last.
pub const MIN_WINDOW: usize = 3;
/// Candidates of a draw at most.
const CANDIDATES: usize = 512;
/// Bytes of a window's logits, which are held while it is judged: 3,500 positions of a vocabulary of 152,000.
const MAX_LOGITS_LEN: usize = 2 << 30;
/// Longest file of windows: ten million tokens.
const MAX_FILE_LEN: u64 = 64 << 20;

/// Cuts `ids` into windows of `context` positions that begin with the token that begins a text, if the model has one, and
/// takes evenly spaced ones of them, at most `max` positions in all.
///
/// # Errors
/// [`EvaluateError::Context`], [`EvaluateError::TextTooShort`], [`EvaluateError::Token`].
pub fn windows(info: &MeshInfo, ids: &[u32], context: usize, max: usize) -> Result<Vec<Vec<u32>>, EvaluateError> {
    check_context(info, context)?;
    let first = info.bos.as_slice();
    let room = context - first.len();
    let shortest = MIN_WINDOW.max(room / 2);
    let mut all: Vec<&[u32]> = ids.chunks(room).collect();
    if all.len() > 1 && all.last().is_some_and(|last| last.len() < shortest) {
        // A few positions with next to nothing before them are judged by no one.
        all.pop();
    }
    let wanted = all.len().min((max / context).max(1));
    let taken = (0..wanted).map(|index| [first, all[index * all.len() / wanted]].concat()).collect();
    check(info, taken)
}

/// Checks windows that came from elsewhere.
///
/// # Errors
/// [`EvaluateError::Context`], [`EvaluateError::TextTooShort`], [`EvaluateError::Token`].
pub fn check(info: &MeshInfo, windows: Vec<Vec<u32>>) -> Result<Vec<Vec<u32>>, EvaluateError> {
    let shortest = windows.iter().map(Vec::len).min().unwrap_or(0);
    if shortest < MIN_WINDOW {
        return Err(EvaluateError::TextTooShort { got: shortest, needed: MIN_WINDOW });
    }
    check_context(info, windows.iter().map(Vec::len).max().unwrap_or(0))?;
    match windows.iter().flatten().find(|token| **token as usize >= info.vocab) {
        Some(token) => Err(EvaluateError::Token { token: *token, vocab: info.vocab, model: info.name.clone() }),
        None => Ok(windows),
    }
}

fn check_context(info: &MeshInfo, context: usize) -> Result<(), EvaluateError> {
    let room = MAX_LOGITS_LEN / (4 * info.vocab.max(1));
    let (least, most) = (MIN_WINDOW + usize::from(info.bos.is_some()), info.max_position.min(room));
    match (least..=most).contains(&context) {
        true => Ok(()),
        false => Err(EvaluateError::Context { got: context, least, most, model: info.name.clone() }),
    }
}

/// Has the model write `count` windows of `context` tokens. They begin with the token that begins a text (token 0 if the
/// model has none) and go on over ends of text. The same seed gives the same windows.
///
/// # Errors
/// See [`EvaluateError`].
pub fn sample(
    mesh: &mut dyn Mesh,
    count: usize,
    context: usize,
    sampling: Sampling,
    on_token: &mut dyn FnMut(),
) -> Result<Vec<Vec<u32>>, EvaluateError> {
    let info = mesh.info().clone();
    check_context(&info, context)?;
    let mut sampler = Sampler::new(sampling);
    let mut windows = Vec::new();
    for _ in 0..count {
        let mut ids = vec![info.bos.unwrap_or(0)];
        while ids.len() < context {
            let pos = ids.len() - 1;
            let mut residuals = mesh.embed(&ids[pos..])?;
            for part in 0..=info.cuts.len() {
                residuals = mesh.forward(part, Slot::Reference, pos, residuals)?;
            }
            let mut best = Collector::new(Head::TopK(CANDIDATES), 1, info.vocab);
            best.push(&mesh.logits(&residuals)?);
            if let HeadOutput::TopK { ids: candidates, logits, .. } = best.finish() {
                ids.extend(sampler.choose(&candidates, &logits));
            }
            on_token();
        }
        windows.push(ids);
    }
    Ok(windows)
}

/// Reads windows that [`write()`] wrote.
///
/// # Errors
/// [`EvaluateError::Windows`], and those of [`check`].
pub fn read(info: &MeshInfo, path: &Path) -> Result<Vec<Vec<u32>>, EvaluateError> {
    let wrong =
        |source: Box<dyn std::error::Error + Send + Sync>| EvaluateError::Windows { path: path.to_owned(), source };
    let (file, len) = crate::basis::file::open_regular(path)?;
    if len > MAX_FILE_LEN {
        return Err(wrong(format!("{len} bytes, at most {MAX_FILE_LEN} expected").into()));
    }
    let text = std::io::read_to_string(std::io::Read::take(file, MAX_FILE_LEN)).map_err(|error| wrong(error.into()))?;
    check(info, serde_json::from_str(&text).map_err(|error| wrong(error.into()))?)
}

/// Writes windows as a JSON array of arrays of token ids.
///
/// # Errors
/// [`WriteFileError`].
pub fn write(path: &Path, windows: &[Vec<u32>]) -> Result<(), WriteFileError> {
    let lines: Vec<String> = windows.iter().map(|window| serde_json::json!(window).to_string()).collect();
    write_atomically(path, format!("[{}]\n", lines.join(",\n")).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{evaluate::mesh::Split, model::spec::ModelSpec};

    fn demo() -> Split {
        Split::load(&ModelSpec::Demo, &[3]).unwrap()
    }

    #[test]
    fn windows_begin_a_text_and_are_bounded() {
        let demo = demo();
        let info = demo.info();
        let bos = info.bos.unwrap();
        let ids: Vec<u32> = (10..40).collect();
        let cut = windows(info, &ids, 11, 100).unwrap();
        assert_eq!(cut.len(), 3);
        assert!(cut.iter().all(|window| window.len() == 11 && window[0] == bos));
        assert_eq!(windows(info, &ids, 11, 22).unwrap().len(), 2);
        // The last three tokens are too few for a window of their own.
        assert_eq!(windows(info, &ids[..13], 11, 100).unwrap().len(), 1);
        assert_eq!(windows(info, &ids[..4], 11, 100).unwrap(), [[bos, 10, 11, 12, 13]]);
        assert!(matches!(windows(info, &ids[..1], 11, 100), Err(EvaluateError::TextTooShort { got: 2, needed: 3 })));
        assert!(matches!(windows(info, &[], 11, 100), Err(EvaluateError::TextTooShort { .. })));
        assert!(matches!(windows(info, &ids, 3, 100), Err(EvaluateError::Context { .. })));
        assert!(matches!(windows(info, &ids, 100_000, 100), Err(EvaluateError::Context { .. })));
        assert!(matches!(windows(info, &[1, 2, 3, 70_000], 11, 100), Err(EvaluateError::Token { token: 70_000, .. })));
    }

    #[test]
    fn samples_repeat_and_survive_a_file() {
        let mut demo = demo();
        let sampling = Sampling { temperature: 1.0, top_p: 1.0, seed: 5 };
        let mut tokens = 0;
        let drawn = sample(&mut demo, 2, 8, sampling, &mut || tokens += 1).unwrap();
        assert_eq!((drawn.len(), drawn[0].len(), tokens), (2, 8, 14));
        assert_ne!(drawn[0], drawn[1]);
        assert_eq!(sample(&mut demo, 2, 8, sampling, &mut || {}).unwrap(), drawn);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("windows.json");
        write(&path, &drawn).unwrap();
        assert_eq!(read(demo.info(), &path).unwrap(), drawn);
        std::fs::write(&path, "[[1,-2]]").unwrap();
        assert!(matches!(read(demo.info(), &path), Err(EvaluateError::Windows { .. })));
        assert!(matches!(read(demo.info(), folder.path()), Err(EvaluateError::Open(_))));
    }
}
