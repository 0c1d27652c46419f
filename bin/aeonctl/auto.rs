//! `generate --wire auto`: for each hop the smallest body that keeps the whole mesh within a budget.

use std::{path::Path, sync::Arc};

use aeon_station::{
    basis::BasisFile,
    client::{Pipeline, Wire, pipeline::QuantisedWire, sampler::Sampling},
    evaluate::{
        Options, Report, Setting,
        choose::{Choice, choose, nats},
        evaluate,
        live::Live,
        text,
    },
};
use anyhow::Context as _;

use crate::{Context, evaluate::as_usage, usage};

/// The text that the mesh writes to be judged by, if no evaluation was given.
const WINDOWS: usize = 2;
const WINDOW: usize = 64;
/// Longest evaluation that is read: 80 cuts with 20 bodies each have about 600 KiB.
const MAX_FILE_LEN: u64 = 16 << 20;

/// Where the figures come from, and what may be spent.
pub(crate) struct Auto<'a> {
    /// What `aeonctl --json evaluate` printed; the mesh is judged now if there is none.
    pub(crate) evaluation: Option<&'a Path>,
    /// Per cent of perplexity.
    pub(crate) budget: f64,
    /// This client's own basis.
    pub(crate) local: Option<Arc<BasisFile>>,
}

impl Auto<'_> {
    /// The form of each link, and what was chosen and why.
    pub(crate) async fn wire(&self, pipeline: &Pipeline, context: &Context) -> anyhow::Result<(Wire, String)> {
        let boundaries: Vec<u32> = pipeline.stages().iter().skip(1).map(|stage| stage.hello.layers[0]).collect();
        if boundaries.is_empty() {
            return Ok((Wire::Exact, "wire auto: one station, so that no residuals travel\n".to_owned()));
        }
        let (mut report, source) = match self.evaluation {
            Some(path) => (self.read(path, pipeline)?, path.display().to_string()),
            None => (self.judge(pipeline, context).await?, "text that the mesh wrote just now".to_owned()),
        };
        // Components have a verdict of their own, and a request that names them.
        let is_offered = |body: &str| matches!(body.parse(), Ok(Setting::F32 | Setting::Quantised { .. }));
        report.settings.retain(|setting| is_offered(&setting.body));
        let mut text = String::new();
        if !self.has_means(pipeline) {
            let count = report.settings.len();
            report
                .settings
                .retain(|setting| !matches!(setting.body.parse(), Ok(Setting::Quantised { mean: true, .. })));
            if report.settings.len() < count {
                text += "wire auto: bodies judged with a mean are left out, since not every hop has a basis with one\n";
            }
        }
        let choices = choose(&report, &boundaries, self.budget / 100.0).with_context(|| {
            format!("the evaluation has cuts at {:?} by themselves, this mesh at {boundaries:?}", report.cuts)
        });
        let choices = choices
            .map_err(|error| usage(format!("{error:#}; make one of this mesh with: aeonctl --json evaluate")))?;
        text += &format!(
            "wire auto: budget {} % of perplexity, {:.5} nats a token; judged on {} positions of {source}\n",
            self.budget,
            nats(self.budget / 100.0),
            report.positions
        );
        let mut wires = Vec::new();
        let mut cost = 0.0;
        for (choice, next) in choices.iter().zip(pipeline.stages().iter().skip(1)) {
            let Choice { boundary, offer, raw } = choice;
            let wire = match offer.setting {
                Setting::Quantised { format, mean } if next.hello.takes(format.name()) => {
                    let local = self.local.clone().filter(|_| mean);
                    let basis_fp = local.as_ref().map(|basis| basis.basis_fp());
                    Some(Wire::Quantised(QuantisedWire { format, basis_fp, local }))
                }
                _ => None,
            };
            match &wire {
                Some(_) => {
                    let (body, bytes) = (offer.setting, offer.bytes);
                    text += &format!(
                        "  boundary {boundary}: {body}, {bytes} of {raw} bytes a token, costs {:.5}\n",
                        offer.cost
                    );
                    cost += offer.cost;
                }
                None => text += &format!("  boundary {boundary}: f32, {raw} bytes a token, costs nothing\n"),
            }
            wires.push(wire.unwrap_or(Wire::Exact));
        }
        text += &format!("  in all {cost:.5} nats, the sum of the cuts\n");
        Ok((Wire::Each(wires), text))
    }

    /// Whether the two sides of every hop have a mean to take off: by a basis that both stations have, or by this client's.
    fn has_means(&self, pipeline: &Pipeline) -> bool {
        pipeline.stages().windows(2).all(|pair| {
            let [stage, next] = pair else { return false };
            let boundary = next.hello.layers[0];
            next.hello.bases.iter().filter(|basis| basis.has(boundary)).any(|basis| match &self.local {
                Some(own) => own.blake3().to_hex().as_str() == basis.blake3,
                None => stage.hello.basis(basis.fingerprint()).is_some_and(|theirs| theirs.blake3 == basis.blake3),
            })
        })
    }

    fn read(&self, path: &Path, pipeline: &Pipeline) -> anyhow::Result<Report> {
        let name = path.display();
        let file = std::fs::File::open(path).with_context(|| format!("reading the evaluation {name}"))?;
        let text = std::io::read_to_string(std::io::Read::take(file, MAX_FILE_LEN))
            .with_context(|| format!("reading the evaluation {name}"))?;
        let report: Report = serde_json::from_str(&text)
            .map_err(|error| usage(format!("{name}: {error}; what aeonctl --json evaluate prints is expected")))?;
        let model = pipeline.model();
        if report.config_fp != model.config_fp || report.hidden_dim != model.hidden_dim {
            return Err(usage(format!(
                "{name} is about the model {}, the stations serve {}",
                report.model, model.name
            )));
        }
        Ok(report)
    }

    /// Judges the mesh on what it writes itself.
    async fn judge(&self, pipeline: &Pipeline, context: &Context) -> anyhow::Result<Report> {
        let stations: Vec<_> = pipeline.stages().iter().map(|stage| stage.address().clone()).collect();
        let mut live = Live::connect(&stations, &context.options).await.map_err(as_usage)?;
        // Without a mean a body costs no less, so that what is chosen holds with one too.
        let mean = if self.local.is_some() { "" } else { ":nomean" };
        let rotated = ["q8", "q7", "q6", "q5", "q4", "q3"].map(|body| format!("{body}{mean}"));
        let bodies = ["f16", "i8"].map(str::to_owned).into_iter().chain(rotated);
        let settings: Vec<Setting> = bodies.filter_map(|body| body.parse().ok()).collect();
        let options = Options { drafts: 0, greedy: 0, ..Options::default() };
        let sampling = Sampling { temperature: 1.0, top_p: 1.0, seed: 0 };
        let window = WINDOW.min(pipeline.model().max_position);
        let judged = tokio::task::block_in_place(|| {
            let windows = text::sample(&mut live, WINDOWS, window, sampling, &mut || {})?;
            evaluate(&mut live, &windows, &settings, self.local.as_ref(), &options, &mut |_, _| {})
        });
        live.end().await;
        judged.map_err(as_usage)
    }
}
