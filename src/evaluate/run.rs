//! The evaluation itself.
//!
//! ```text
//! part 0 ──> codec ──> part 1 ──> codec ──> part 2 ──> logits ─┐
//! part 0 ────────────> part 1 ────────────> part 2 ──> logits ─┴─> compared
//! ```
//!
//! Each window is run once without codecs and once for each body. What leaves part 0 is the same in all runs, so it is
//! computed once. A greedy continuation of the reference is judged by running the candidate over the reference's own tokens
//! and looking where it would have chosen another: up to there both are the same text.

use std::sync::Arc;

use super::{
    codec::{BodyCodec, Escapes, Setting, codec, norm},
    error::EvaluateError,
    logits::{Difference, Distributions},
    mesh::{Mesh, MeshInfo, Slot},
    report::{HopReport, Report, SettingReport},
    tally::{Crossings, Output},
    text::check,
};
use crate::{basis::BasisFile, model::head::argmax};

/// Positions whose logits of the candidate are held at once.
const HEAD_CHUNK: usize = 16;

/// What is measured, beside what always is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whether each boundary is also judged by itself.
    pub alone: bool,
    /// Drafts to try, spread over the text.
    pub drafts: usize,
    /// Tokens of a draft.
    pub draft_len: usize,
    /// Greedy continuations to try, spread over the windows.
    pub greedy: usize,
    /// Tokens of a continuation.
    pub greedy_len: usize,
}

impl Default for Options {
    /// Boundaries by themselves, 30 drafts of 5 tokens, 4 continuations of 64.
    fn default() -> Self {
        Self { alone: true, drafts: 30, draft_len: 5, greedy: 4, greedy_len: 64 }
    }
}

/// Told how many of how many runs are done.
pub type OnProgress<'a> = dyn FnMut(usize, usize) + 'a;

/// Compares a mesh with each body on its boundaries to the same mesh without.
///
/// Memory: the logits of one window, and a few figures for each position, body and boundary.
///
/// # Errors
/// See [`EvaluateError`].
pub fn evaluate(
    mesh: &mut dyn Mesh,
    windows: &[Vec<u32>],
    settings: &[Setting],
    basis: Option<&Arc<BasisFile>>,
    options: &Options,
    on_progress: &mut OnProgress<'_>,
) -> Result<Report, EvaluateError> {
    let info = mesh.info().clone();
    check(&info, windows.to_vec())?;
    check_basis(&info, basis)?;
    let mut candidates =
        settings.iter().map(|setting| Candidate::new(*setting, &info, basis)).collect::<Result<Vec<_>, _>>()?;
    let total = windows.len() * (1 + candidates.len());
    let mut done = 0;
    let mut reference_surprise = 0.0;
    let mut positions = 0;
    let mut tried = [0; 2];
    for (index, window) in windows.iter().enumerate() {
        let places = places(index, windows, &info, options);
        let reference = Reference::run(mesh, window, &places)?;
        reference_surprise += reference.surprise;
        positions += window.len() - 2;
        for place in &places {
            tried[usize::from(place.kind == Kind::Greedy)] += 1;
        }
        done += 1;
        on_progress(done, total);
        let escapes = (0..info.cuts.len()).map(|hop| reference.escapes(hop, &info, basis)).collect::<Vec<_>>();
        for candidate in &mut candidates {
            candidate.run(mesh, &reference, &escapes, basis)?;
            if options.alone && info.cuts.len() > 1 {
                for hop in 0..info.cuts.len() {
                    candidate.run_alone(mesh, &reference, hop)?;
                }
            }
            done += 1;
            on_progress(done, total);
        }
    }
    let surprise = reference_surprise / positions.max(1) as f64;
    Ok(Report {
        perplexity: surprise.exp(),
        windows: windows.len(),
        context: windows.iter().map(Vec::len).max().unwrap_or(0),
        positions,
        drafts: [tried[0], options.draft_len],
        greedy: [tried[1], options.greedy_len],
        settings: candidates.iter().map(|candidate| candidate.report(&info, basis, surprise, tried, options)).collect(),
        hidden_dim: info.hidden_dim,
        model: info.name,
        config_fp: info.config_fp,
        cuts: info.cuts,
    })
}

/// Refuses a basis that is not of this model.
pub fn check_basis(info: &MeshInfo, basis: Option<&Arc<BasisFile>>) -> Result<(), EvaluateError> {
    let Some(basis) = basis else { return Ok(()) };
    let (expected, got) = (info.hidden_dim, basis.hidden_dim() as usize);
    let (path, model) = (basis.path().to_owned(), info.name.clone());
    if expected != got {
        return Err(EvaluateError::BasisWidth { basis: path, model, expected, got });
    }
    match basis.metadata().calibration.capture.get("config_fp") {
        Some(got) if *got != info.config_fp => {
            let (expected, got) = (info.config_fp.clone(), got.clone());
            Err(EvaluateError::BasisModel { basis: path, model, expected, got })
        }
        _ => Ok(()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Draft,
    Greedy,
}

/// Where the reference goes on by itself: behind `at` tokens of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    kind: Kind,
    at: usize,
    len: usize,
}

/// The places of window number `index`, the last first, so that what is remembered only needs to be cut.
fn places(index: usize, windows: &[Vec<u32>], info: &MeshInfo, options: &Options) -> Vec<Place> {
    let len = windows[index].len();
    // Spread evenly: so many of the first windows have one more.
    let share = |wanted: usize| wanted / windows.len() + usize::from(index < wanted % windows.len());
    let mut places = Vec::new();
    let mut add = |kind, count: usize, tokens: usize| {
        for place in 0..count {
            let at = (len * (place + 1) / (count + 1)).max(1);
            let tokens = tokens.min(info.max_position.saturating_sub(at));
            if tokens > 0 {
                places.push(Place { kind, at, len: tokens });
            }
        }
    };
    add(Kind::Draft, share(options.drafts), options.draft_len);
    add(Kind::Greedy, share(options.greedy), options.greedy_len);
    places.sort_by_key(|place| std::cmp::Reverse(place.at));
    places
}

/// What a greedy run of the reference gave.
struct Continuation {
    place: Place,
    tokens: Vec<u32>,
    /// What left part 0 for all tokens but the last.
    first: Vec<f32>,
}

/// A window without codecs.
struct Reference<'a> {
    ids: &'a [u32],
    /// What crossed each cut.
    crossed: Vec<Vec<f32>>,
    output: Distributions,
    continuations: Vec<Continuation>,
    /// Of all judged positions.
    surprise: f64,
}

impl<'a> Reference<'a> {
    fn run(mesh: &mut dyn Mesh, ids: &'a [u32], places: &[Place]) -> Result<Self, EvaluateError> {
        let info = mesh.info().clone();
        let mut residuals = mesh.embed(ids)?;
        let mut crossed = Vec::new();
        for part in 0..=info.cuts.len() {
            residuals = mesh.forward(part, Slot::Reference, 0, residuals)?;
            if part < info.cuts.len() {
                crossed.push(residuals.clone());
            }
        }
        let output = Distributions::new(mesh.logits(&residuals)?, info.vocab);
        let surprise = (1..ids.len() - 1).map(|position| output.surprise(position, ids[position + 1])).sum();
        let mut continuations = Vec::new();
        for place in places {
            let mut tokens = vec![output.best(place.at - 1)];
            let mut first = Vec::new();
            while tokens.len() < place.len {
                let pos = place.at + tokens.len() - 1;
                let mut residuals = mesh.embed(&tokens[tokens.len() - 1..])?;
                for part in 0..=info.cuts.len() {
                    residuals = mesh.forward(part, Slot::Reference, pos, residuals)?;
                    if part == 0 {
                        first.extend_from_slice(&residuals);
                    }
                }
                tokens.push(argmax(&mesh.logits(&residuals)?));
            }
            continuations.push(Continuation { place: *place, tokens, first });
        }
        Ok(Self { ids, crossed, output, continuations, surprise })
    }

    /// Which positions are not ordinary at a cut: by the basis's median norm, or by this window's.
    fn escapes(&self, hop: usize, info: &MeshInfo, basis: Option<&Arc<BasisFile>>) -> Escapes {
        let known = basis.and_then(|basis| basis.median_norm(info.cuts[hop]));
        let median = known.or_else(|| {
            let mut norms: Vec<f64> = self.crossed[hop].chunks(info.hidden_dim).map(norm).collect();
            norms.sort_unstable_by(f64::total_cmp);
            norms.get(norms.len() / 2).map(|norm| *norm as f32)
        });
        Escapes::over(median)
    }
}

/// A body that is judged.
struct Candidate {
    setting: Setting,
    codecs: Vec<Box<dyn BodyCodec>>,
    boundaries: Vec<u32>,
    whole: Output,
    alone: Vec<Output>,
    crossings: Vec<Crossings>,
    accepted: usize,
    drafted: usize,
    greedy: usize,
    identical: usize,
}

impl Candidate {
    fn new(setting: Setting, info: &MeshInfo, basis: Option<&Arc<BasisFile>>) -> Result<Self, EvaluateError> {
        let codecs = info.cuts.iter().map(|boundary| codec(setting, *boundary, info.hidden_dim, basis));
        Ok(Self {
            setting,
            codecs: codecs.collect::<Result<_, _>>()?,
            boundaries: info.cuts.clone(),
            whole: Output::default(),
            alone: vec![Output::default(); info.cuts.len()],
            crossings: vec![Crossings::default(); info.cuts.len()],
            accepted: 0,
            drafted: 0,
            greedy: 0,
            identical: 0,
        })
    }

    /// Sends residuals over a hop.
    fn send(&mut self, hop: usize, pos: usize, residuals: &mut [f32]) -> Result<(), EvaluateError> {
        let sent = self.codecs[hop].transmit(pos, residuals).map_err(|source| EvaluateError::Codec {
            setting: self.setting.to_string(),
            boundary: self.boundaries[hop],
            source,
        })?;
        let crossings = &mut self.crossings[hop];
        crossings.bytes += sent.bytes;
        crossings.escaped += sent.escaped;
        Ok(())
    }

    /// The window and its continuations with the codec on all hops.
    fn run(
        &mut self,
        mesh: &mut dyn Mesh,
        reference: &Reference<'_>,
        escapes: &[Escapes],
        basis: Option<&Arc<BasisFile>>,
    ) -> Result<(), EvaluateError> {
        let d = mesh.info().hidden_dim;
        let mut residuals = reference.crossed[0].clone();
        for (hop, escapes) in escapes.iter().enumerate() {
            let before = residuals.clone();
            self.send(hop, 0, &mut residuals)?;
            let mean = basis.and_then(|basis| basis.boundary(self.boundaries[hop])).map_or(&[][..], |part| part.mean);
            let crossings = &mut self.crossings[hop];
            crossings.positions += before.len() / d;
            for (pos, (before, after)) in before.chunks(d).zip(residuals.chunks(d)).enumerate() {
                if !escapes.takes(pos, before) {
                    crossings.add(mean, before, after);
                }
            }
            residuals = mesh.forward(hop + 1, Slot::Candidate, 0, residuals)?;
        }
        let mut best = Vec::new();
        let whole = &mut self.whole;
        judge(
            mesh,
            reference,
            &residuals,
            |difference| {
                whole.add(difference);
            },
            &mut best,
        )?;
        for continuation in &reference.continuations {
            self.go_on(mesh, continuation, best[continuation.place.at - 1])?;
        }
        Ok(())
    }

    /// The reference's tokens behind a place, and how many of them this candidate would have chosen too; `first` is its
    /// choice for the first of them.
    fn go_on(&mut self, mesh: &mut dyn Mesh, it: &Continuation, first: u32) -> Result<(), EvaluateError> {
        let mut chosen = vec![first];
        // What is paid for bytes is told by the windows.
        let paid: Vec<(usize, usize)> = self.crossings.iter().map(|hop| (hop.bytes, hop.escaped)).collect();
        if it.tokens.len() > 1 {
            let mut residuals = it.first.clone();
            for hop in 0..self.codecs.len() {
                self.send(hop, it.place.at, &mut residuals)?;
                residuals = mesh.forward(hop + 1, Slot::Candidate, it.place.at, residuals)?;
            }
            let (d, vocab) = (mesh.info().hidden_dim, mesh.info().vocab);
            for rows in residuals.chunks(HEAD_CHUNK * d) {
                chosen.extend(mesh.logits(rows)?.chunks(vocab).map(argmax));
            }
        }
        for (crossings, (bytes, escaped)) in self.crossings.iter_mut().zip(paid) {
            (crossings.bytes, crossings.escaped) = (bytes, escaped);
        }
        let same = chosen.iter().zip(&it.tokens).take_while(|(own, reference)| own == reference).count();
        match it.place.kind {
            Kind::Draft => {
                self.accepted += same;
                self.drafted += it.tokens.len();
            }
            Kind::Greedy => {
                self.greedy += same;
                self.identical += usize::from(same == it.tokens.len());
            }
        }
        Ok(())
    }

    /// The window with the codec on one hop, and raw residuals on the others.
    fn run_alone(&mut self, mesh: &mut dyn Mesh, reference: &Reference<'_>, hop: usize) -> Result<(), EvaluateError> {
        let paid = (self.crossings[hop].bytes, self.crossings[hop].escaped);
        let mut residuals = reference.crossed[hop].clone();
        self.send(hop, 0, &mut residuals)?;
        (self.crossings[hop].bytes, self.crossings[hop].escaped) = paid;
        for part in hop + 1..=self.codecs.len() {
            residuals = mesh.forward(part, Slot::Candidate, 0, residuals)?;
        }
        let output = &mut self.alone[hop];
        judge(mesh, reference, &residuals, |difference| output.add(difference), &mut Vec::new())
    }

    fn report(
        &self,
        info: &MeshInfo,
        basis: Option<&Arc<BasisFile>>,
        surprise: f64,
        [_, greedy]: [usize; 2],
        options: &Options,
    ) -> SettingReport {
        let hops = self.codecs.len() as f64;
        let share = |part: usize, whole: usize| (whole > 0).then(|| part as f64 / whole as f64);
        let whole = self.whole.effect(surprise);
        let hop = |hop: usize| {
            let (codec, crossings) = (&self.codecs[hop], &self.crossings[hop]);
            let knows_mean = basis.is_some_and(|basis| basis.boundary(info.cuts[hop]).is_some());
            let (mean_cosine, centred_cosine) = crossings.about_mean();
            let alone = match (info.cuts.len(), options.alone) {
                (1, _) => Some(whole),
                (_, true) => Some(self.alone[hop].effect(surprise)),
                (_, false) => None,
            };
            HopReport {
                boundary: info.cuts[hop],
                bytes: codec.payload_len(),
                body_bytes: codec.body_len(),
                escaped: share(crossings.escaped, crossings.positions).unwrap_or(0.0),
                cosine: crossings.cosine().0,
                cosine_p1: crossings.cosine().1,
                mean_cosine: knows_mean.then_some(mean_cosine),
                centred_cosine: knows_mean.then_some(centred_cosine),
                relative_error: crossings.error().0,
                relative_error_p99: crossings.error().1,
                alone,
            }
        };
        let sent = self.crossings.iter().map(|it| it.bytes as f64 / it.positions.max(1) as f64).sum::<f64>();
        SettingReport {
            body: self.setting.to_string(),
            bytes: self.codecs.iter().map(|codec| codec.payload_len() as f64).sum::<f64>() / hops,
            body_bytes: self.codecs.iter().map(|codec| codec.body_len() as f64).sum::<f64>() / hops,
            sent_bytes: sent / hops,
            whole,
            acceptance: share(self.accepted, self.drafted),
            greedy: share(self.greedy, greedy),
            identical: share(self.identical, greedy),
            hops: (0..self.codecs.len()).map(hop).collect(),
        }
    }
}

/// Compares what came out of the last part with the reference: the judged positions to `on_position`, the most likely token
/// of all of them into `best`.
fn judge(
    mesh: &mut dyn Mesh,
    reference: &Reference<'_>,
    residuals: &[f32],
    mut on_position: impl FnMut(&Difference),
    best: &mut Vec<u32>,
) -> Result<(), EvaluateError> {
    let ids = reference.ids;
    let next = |position: usize| ids.get(position + 1).copied().unwrap_or_default();
    for rows in residuals.chunks(HEAD_CHUNK * mesh.info().hidden_dim) {
        let logits = mesh.logits(rows)?;
        for difference in reference.output.compare(best.len(), &logits, next) {
            if (1..ids.len() - 1).contains(&best.len()) {
                on_position(&difference);
            }
            best.push(difference.best);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        demo,
        evaluate::{calibrate::calibrate, mesh::Split, text::windows},
        model::{CancelToken, Head, HeadOutput, LayerRange, spec::ModelSpec},
    };

    fn held_out(mesh: &Split, context: usize, max: usize) -> Vec<Vec<u32>> {
        let ids = demo::tokenizer().unwrap().encode(demo::HELD_OUT, false).unwrap();
        windows(mesh.info(), &ids, context, max).unwrap()
    }

    #[test]
    fn raw_residuals_change_nothing_and_the_perplexity_is_the_unsplit_models() {
        let mut split = Split::load(&ModelSpec::Demo, &[1, 4]).unwrap();
        let windows = held_out(&split, 32, 64);
        let mut seen = Vec::new();
        let report = evaluate(&mut split, &windows, &[Setting::F32], None, &Options::default(), &mut |done, of| {
            seen.push((done, of));
        });
        let report = report.unwrap();
        assert_eq!(seen, [(1, 4), (2, 4), (3, 4), (4, 4)]);
        let [raw] = &*report.settings else { panic!() };
        assert_eq!((raw.bytes, raw.body_bytes, raw.sent_bytes), (512.0, 512.0, 512.0));
        assert!(raw.whole.kl.abs() < 1e-12 && (raw.whole.perplexity_ratio - 1.0).abs() < 1e-12);
        assert_eq!((raw.whole.top1, raw.acceptance, raw.identical), (1.0, Some(1.0), Some(1.0)));
        assert_eq!((report.drafts, report.greedy, raw.greedy), ([30, 5], [4, 64], Some(64.0)));
        assert!(raw.hops.iter().all(|hop| (hop.cosine - 1.0).abs() < 1e-6 && hop.relative_error_p99 == 0.0));
        assert_eq!(report.positions, 60);

        let model = demo::load(None).unwrap();
        let mut surprise = 0.0;
        for window in &windows {
            let residuals = model.embed(window).unwrap();
            let residuals = model.forward(model.new_cache().as_mut(), residuals, &CancelToken::default()).unwrap();
            let HeadOutput::Logits(logits) = model.head(&residuals, Head::Logits, &CancelToken::default()).unwrap()
            else {
                panic!()
            };
            for (position, row) in logits.chunks(model.info().vocab).enumerate().skip(1).take(window.len() - 2) {
                let total: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
                surprise += total.ln() - f64::from(row[window[position + 1] as usize]);
            }
        }
        assert!((report.perplexity.ln() - surprise / 60.0).abs() < 1e-9);
    }

    #[test]
    fn fewer_components_do_more_harm_alone_and_together() {
        let mut split = Split::load(&ModelSpec::Demo, &[2, 4]).unwrap();
        let windows = held_out(&split, 64, 256);
        let basis = calibrate(&mut split, &windows, 96, &mut || {}).unwrap();
        let settings: Vec<Setting> = ["pcar:4", "pcar:32", "pcar:96"].map(|text| text.parse().unwrap()).into();
        let options = Options::default();
        let report = evaluate(&mut split, &windows, &settings, Some(&basis), &options, &mut |_, _| {}).unwrap();
        for pair in report.settings.windows(2) {
            let [worse, better] = pair else { panic!() };
            assert!(worse.whole.kl > better.whole.kl && worse.whole.top1 < better.whole.top1);
            assert!(worse.whole.perplexity_ratio > better.whole.perplexity_ratio);
            assert!(worse.acceptance <= better.acceptance && worse.greedy <= better.greedy);
            for (worse, better) in worse.hops.iter().zip(&better.hops) {
                assert!(worse.alone.unwrap().kl > better.alone.unwrap().kl);
                assert!(worse.cosine < better.cosine && worse.cosine_p1 <= worse.cosine);
                assert!(worse.centred_cosine < better.centred_cosine);
                assert!(worse.relative_error > better.relative_error);
            }
        }
        for setting in &report.settings {
            for hop in &setting.hops {
                assert!(hop.alone.unwrap().kl < setting.whole.kl, "one cut costs less than two");
                assert!(hop.mean_cosine.unwrap() < hop.cosine);
            }
        }
        let few = &report.settings[0];
        assert_eq!((few.bytes, few.body_bytes, few.sent_bytes), (16.0, 40.0, 40.0));
        assert!(few.acceptance.unwrap() < 0.9 && few.identical.unwrap() < 1.0);
    }

    #[test]
    fn acceptance_and_greedy_count_what_a_real_run_would_choose() {
        let mut split = Split::load(&ModelSpec::Demo, &[3]).unwrap();
        let windows = held_out(&split, 48, 48);
        let basis = calibrate(&mut split, &windows, 24, &mut || {}).unwrap();
        let setting = Setting::Pcar { k: Some(24), escape: false };
        let options = Options { alone: false, drafts: 3, draft_len: 5, greedy: 1, greedy_len: 24 };
        let report = evaluate(&mut split, &windows, &[setting], Some(&basis), &options, &mut |_, _| {}).unwrap();
        // The same by generating, token by token.
        let codec = codec(setting, 3, 128, Some(&basis)).unwrap();
        let mut generate = |prompt: &[u32], count: usize, lossy: bool| {
            let (mut tokens, mut input, mut pos) = (Vec::new(), prompt.to_vec(), 0);
            while tokens.len() < count {
                let residuals = split.embed(&input).unwrap();
                let mut residuals = split.forward(0, Slot::Candidate, pos, residuals).unwrap();
                if lossy {
                    codec.transmit(pos, &mut residuals).unwrap();
                }
                let residuals = split.forward(1, Slot::Candidate, pos, residuals).unwrap();
                pos += input.len();
                tokens.push(argmax(&split.logits(&residuals[residuals.len() - 128..]).unwrap()));
                input = tokens[tokens.len() - 1..].to_vec();
            }
            tokens
        };
        let mut same = |at: usize, count: usize| {
            let prompt = &windows[0][..at];
            let (exact, lossy) = (generate(prompt, count, false), generate(prompt, count, true));
            exact.iter().zip(&lossy).take_while(|(exact, lossy)| exact == lossy).count() as f64
        };
        let accepted = same(12, 5) + same(24, 5) + same(36, 5);
        assert_eq!(report.settings[0].acceptance, Some(accepted / 15.0));
        assert_eq!(report.settings[0].greedy, Some(same(24, 24)));
    }

    #[test]
    fn a_foreign_basis_is_refused() {
        let mut split = Split::load(&ModelSpec::Demo, &[3]).unwrap();
        let windows = held_out(&split, 32, 32);
        let mut other = split.info().clone();
        let basis = calibrate(&mut split, &windows, 0, &mut || {}).unwrap();
        assert!(check_basis(&other, Some(&basis)).is_ok());
        other.config_fp = "0".to_owned();
        assert!(matches!(check_basis(&other, Some(&basis)), Err(EvaluateError::BasisModel { .. })));
        other.hidden_dim = 64;
        assert!(matches!(check_basis(&other, Some(&basis)), Err(EvaluateError::BasisWidth { .. })));
    }
}
