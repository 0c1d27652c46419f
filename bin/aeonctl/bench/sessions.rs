//! Tokens a second of one station with one session and with several, beside a station that runs each request alone.
//!
//! Both stations are in this process, on the same weights and cores. Every round takes all numbers of sessions in turn on
//! both, so that what disturbs the machine disturbs all of them, and ratios are taken inside a round.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aeon_station::{
    client::{ClientOptions, Pipeline, StationAddress, Want},
    config::{LimitSettings, ModelSettings},
};
use clap::Args;
use serde_json::json;
use tokio::sync::Barrier;

use super::local::{Local, Spread, processor_seconds};
use crate::{Context, usage};

/// Options of `aeonctl bench sessions`.
#[derive(Debug, Args)]
pub(crate) struct Sessions {
    /// Model to serve, as for aeon-node --model
    #[arg(long, value_name = "M", default_value = "demo")]
    model: String,
    /// Numbers of sessions, beside one
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [4, 16])]
    counts: Vec<usize>,
    /// Tokens of each session's prompt
    #[arg(long, value_name = "N", default_value_t = 16)]
    prompt: usize,
    /// Tokens that each session generates in a round
    #[arg(long, value_name = "N", default_value_t = 32)]
    tokens: usize,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 7)]
    rounds: usize,
    /// Requests that run together, as for aeon-node --max-batch
    #[arg(long, value_name = "N", default_value_t = 16)]
    max_batch: usize,
    /// Model threads of each station, as for aeon-node --workers
    #[arg(long, value_name = "N", default_value_t = 2)]
    workers: usize,
}

/// What one station did with some sessions in one round.
struct Run {
    elapsed: Duration,
    processor: f64,
    /// Requests in a batch, on average.
    batch: f64,
    texts: Vec<Vec<u32>>,
}

/// The figures of one station with one number of sessions, one a round.
#[derive(Default)]
struct Figures {
    rate: Vec<f64>,
    ratio: Vec<f64>,
    processor_ms: Vec<f64>,
    batch: Vec<f64>,
}

impl Sessions {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        let Self { rounds, tokens, prompt, .. } = self;
        if [rounds, tokens, prompt, self.max_batch, self.workers].contains(&0) || self.counts.contains(&0) {
            return Err(usage("--rounds, --tokens, --prompt, --max-batch, --workers and --counts are at least 1"));
        }
        let counts: Vec<usize> =
            std::iter::once(1).chain(self.counts.iter().copied().filter(|count| *count > 1)).collect();
        let names = [format!("--max-batch {}", self.max_batch), "--max-batch 1".to_owned()];
        let mut stations = Vec::new();
        for max_batch in [self.max_batch, 1] {
            let limits = LimitSettings { max_batch: Some(max_batch), ..LimitSettings::default() };
            let (model, workers) = (Some(self.model.clone()), Some(self.workers));
            stations.push(Local::start(ModelSettings { model, workers, ..ModelSettings::default() }, limits).await?);
        }
        let mut figures: Vec<Vec<Figures>> =
            stations.iter().map(|_| counts.iter().map(|_| Figures::default()).collect()).collect();
        // The first round warms caches and clocks.
        for round in 0..=rounds {
            let mut texts = Vec::new();
            for (station, figures) in stations.iter().zip(&mut figures) {
                let mut single = None;
                let mut said = Vec::new();
                for (count, figures) in counts.iter().zip(figures) {
                    let run = self.round(station, *count).await?;
                    let generated = (count * tokens) as f64;
                    let rate = generated / run.elapsed.as_secs_f64();
                    let single = *single.get_or_insert(rate);
                    said.push(run.texts);
                    if round > 0 {
                        figures.rate.push(rate);
                        figures.ratio.push(rate / single);
                        figures.processor_ms.push(1e3 * run.processor / generated);
                        figures.batch.push(run.batch);
                    }
                }
                texts.push(said);
            }
            anyhow::ensure!(
                texts.windows(2).all(|texts| texts.first() == texts.last()),
                "the two stations did not generate the same tokens"
            );
        }
        for station in stations {
            station.node.stop().await;
        }
        self.print(context, &names, &counts, figures);
        Ok(())
    }

    /// Some sessions at once on one station; the prompts are not timed.
    async fn round(&self, station: &Local, count: usize) -> anyhow::Result<Run> {
        let barrier = Arc::new(Barrier::new(count + 1));
        let mut sessions = Vec::new();
        for n in 0..count {
            let address = StationAddress::Unix(station.socket.clone());
            let mut pipeline = Pipeline::connect(&[address], &ClientOptions::default()).await?;
            let vocab = pipeline.model().vocab;
            let prompt: Vec<u32> = (0..self.prompt).map(|at| ((n * 31 + at * 7 + 1) % vocab) as u32).collect();
            let (barrier, tokens) = (Arc::clone(&barrier), self.tokens);
            sessions.push(tokio::spawn(async move {
                let mut next = pipeline.extend(&prompt, Want::Token).await;
                barrier.wait().await;
                let mut text = Vec::new();
                for _ in 0..tokens {
                    let id = next?.ids.first().copied().unwrap_or_default();
                    text.push(id);
                    next = pipeline.extend(&[id], Want::Token).await;
                }
                next?;
                pipeline.reset().await?;
                anyhow::Ok(text)
            }));
        }
        let batches = &station.node.station().counters().batches;
        barrier.wait().await;
        let (started, processor, before) = (Instant::now(), processor_seconds(), batches.snapshot());
        let mut texts = Vec::new();
        for session in sessions {
            texts.push(session.await??);
        }
        let (elapsed, processor) = (started.elapsed(), processor_seconds() - processor);
        let after = batches.snapshot();
        let batch = (after.sum - before.sum) / (after.count - before.count).max(1) as f64;
        Ok(Run { elapsed, processor, batch, texts })
    }

    fn print(&self, context: &Context, names: &[String], counts: &[usize], figures: Vec<Vec<Figures>>) {
        let mut rows = Vec::new();
        if !context.json {
            println!("{}: median (first to third quartile) of {} rounds", self.model, self.rounds);
            println!("sessions  tokens/s  times one session       processor ms/token  requests/batch");
        }
        for (name, figures) in names.iter().zip(figures) {
            if !context.json {
                println!("{name}");
            }
            for (count, Figures { rate, ratio, processor_ms, batch }) in counts.iter().zip(figures) {
                let [rate, ratio, processor_ms, batch] = [rate, ratio, processor_ms, batch].map(Spread::of);
                if context.json {
                    rows.push(json!({
                        "station": name, "sessions": count, "tokens_per_second": rate.middle, "ratio": ratio.middle,
                        "ratio_q1": ratio.low, "ratio_q3": ratio.high, "processor_ms": processor_ms.middle,
                        "batch": batch.middle,
                    }));
                } else {
                    let (rate, ratio, spent) = (format!("{:.1}", rate.middle), format!("{ratio}"), processor_ms.middle);
                    println!("{count:>8}  {rate:>8}  {ratio:<22}  {spent:>18.2}  {:>14.1}", batch.middle);
                }
            }
        }
        if context.json {
            println!("{}", json!({ "model": self.model, "rounds": self.rounds, "sessions": rows }));
        } else {
            println!("Both stations generated the same tokens.");
        }
    }
}
