//! `aeonctl demo`: a mesh of two stations in this process, on real carriers.

use std::{
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use aeon_proto::qres::Format;
use aeon_station::{
    basis::Registry,
    client::{
        Pipeline, StationAddress, Want,
        generate::{GenerateOptions, generate},
        sampler::{Sampler, Sampling},
    },
    config::{Config, ListenSettings, ModelSettings, Settings},
    daemon::Node,
    demo,
    model::{CancelToken, Head, HeadOutput, LayerRange},
};
use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use crate::{
    Context,
    fidelity::{self, Probe},
    report,
};

/// Options of `aeonctl demo`.
#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Text to go on from
    #[arg(long, value_name = "TEXT", default_value = "First Citizen:\nBefore we proceed")]
    prompt: String,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 120)]
    max_tokens: usize,
    /// 0 takes the most likely token each time; higher is bolder
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f32,
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Tokens of held-out text that are sent in each form.
const HELD_OUT_TOKENS: usize = 256;
/// Formats that are tried.
const FORMATS: [Format; 6] =
    [Format::F16, Format::I8, Format::Rotated(6), Format::Rotated(5), Format::Rotated(4), Format::Rotated(3)];
/// Numbers of components that are tried.
const COMPONENTS: [u32; 4] = [8, 16, 32, 64];
/// Candidates for each draw.
const TOP_K: u32 = 64;

/// A folder that only this user can enter, removed at the end.
pub(crate) struct PrivateFolder(PathBuf);

impl PrivateFolder {
    pub(crate) fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("aeon-demo-{:016x}", rand::random::<u64>()));
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn settings(layers: &str, listen: ListenSettings) -> Settings {
    let model = ModelSettings { layers: Some(layers.to_owned()), ..ModelSettings::default() };
    Settings { model, listen, ..Settings::default() }
}

impl Demo {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        let folder = PrivateFolder::new().context("making a folder for the socket")?;
        let socket = folder.path().join("flow.sock");
        let whole = demo::load(None)?;
        let n_layers = whole.info().n_layers;
        let cut = n_layers / 2;
        let uds = ListenSettings { uds: Some(socket.clone()), ..ListenSettings::default() };
        let udp = ListenSettings { udp: Some(([127, 0, 0, 1], 0).into()), ..ListenSettings::default() };
        let bases = Arc::new(Registry::fixed(demo::bases()?));
        let start = async |layers: std::ops::Range<u32>, listen| {
            let layers = format!("{}..{}", layers.start, layers.end);
            Node::start_with_bases(&Config::try_from(settings(&layers, listen))?, Arc::clone(&bases))
                .await
                .map_err(anyhow::Error::from)
        };
        let first = start(0..cut, uds).await?;
        let second = start(cut..n_layers, udp).await?;
        if !context.json {
            println!("station 1: {}", first.ready_line());
            println!("station 2: {}\n", second.ready_line());
        }
        let address = second.udp().context("the second station has no UDP address")?;
        let stations = [StationAddress::Unix(socket), StationAddress::Udp(address.to_string())];
        let mut pipeline = Pipeline::connect(&stations, &context.options).await?;
        let tokenizer = demo::tokenizer()?;
        let ids = tokenizer.encode(&self.prompt, true)?;
        let options = GenerateOptions {
            max_tokens: self.max_tokens,
            sampling: Sampling { temperature: self.temperature, top_p: 0.95, seed: self.seed },
            top_k: TOP_K,
            stop: Vec::new(),
        };
        let generated = generate(&mut pipeline, &ids, &options, |_| true).await?;
        let text = tokenizer.decode(&generated.tokens);
        let unsplit = unsplit(&whole, &ids, &options)?;
        let same = unsplit == generated.tokens;
        let hops = report::hops(&pipeline);
        let replay = Replayed::measure(&stations, context, &[&ids[..], &generated.tokens].concat()).await?;
        let basis = bases.current();
        let basis = basis.bases().next().context("the demo has no basis")?;
        let mut held_out = tokenizer.encode(demo::HELD_OUT, true)?;
        held_out.truncate(HELD_OUT_TOKENS);
        let fidelity = Probe::new(context, &stations, &held_out, basis).await?.rows(&FORMATS, &COMPONENTS).await?;
        let mut value = report::json(&generated, ids.len(), &hops, &text);
        value["fidelity"] = fidelity::json(&fidelity);
        value["identical_to_unsplit_run"] = same.into();
        value["replay"] = replay.json();
        if context.json {
            println!("{value}");
        } else {
            println!("{}{text}\n", self.prompt);
            print!("{}", report::text(&generated, ids.len(), &hops));
            println!("tokens identical to an unsplit run: {}", if same { "yes" } else { "NO" });
            print!("{}", replay.text());
            print!("\n{}", fidelity::text(&fidelity, held_out.len()));
        }
        pipeline.reset().await?;
        drop(pipeline);
        first.stop().await;
        second.stop().await;
        anyhow::ensure!(same, "the mesh gave other tokens than the model in one piece");
        anyhow::ensure!(replay.is_same, "the mesh gave another token after a replay than after a prefill");
        Ok(())
    }
}

/// The time to the first token of one prompt, twice: by prefill, and by replay on both stations.
struct Replayed {
    prompt_len: usize,
    first: Duration,
    again: Duration,
    skipped: bool,
    is_same: bool,
}

impl Replayed {
    /// Tokens of the prompt.
    const LEN: usize = 200;

    async fn measure(stations: &[StationAddress], context: &Context, text: &[u32]) -> anyhow::Result<Self> {
        let prompt: Vec<u32> = text.iter().copied().cycle().take(Self::LEN).collect();
        let mut times = [Duration::ZERO; 2];
        let mut tokens = Vec::new();
        let mut skipped = false;
        for time in &mut times {
            let mut pipeline = Pipeline::connect(stations, &context.options).await?;
            pipeline.use_replay();
            let started = Instant::now();
            let next = pipeline.extend(&prompt, Want::Token).await?;
            *time = started.elapsed();
            tokens.push(next.ids);
            skipped = pipeline.replay_stats().skipped > 0;
            pipeline.captured().await;
            pipeline.reset().await?;
        }
        let is_same = tokens.windows(2).all(|pair| pair[0] == pair[1]);
        Ok(Self { prompt_len: prompt.len(), first: times[0], again: times[1], skipped, is_same })
    }

    fn text(&self) -> String {
        format!(
            "\ntime to first token of a prompt of {} tokens:\n  first time {:>8.2} ms (prefill, then captured by both stations)\n  again      {:>8.2} ms ({}, {} token)\n",
            self.prompt_len,
            self.first.as_secs_f64() * 1000.0,
            self.again.as_secs_f64() * 1000.0,
            if self.skipped { "replayed by both stations, no prefill" } else { "NOT replayed" },
            if self.is_same { "the same" } else { "ANOTHER" },
        )
    }

    fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_len,
            "first_ms": self.first.as_secs_f64() * 1000.0,
            "again_ms": self.again.as_secs_f64() * 1000.0,
            "replayed": self.skipped,
            "same_token": self.is_same,
        })
    }
}

/// The tokens of the same model in one piece, without any carrier.
fn unsplit(model: &dyn LayerRange, prompt: &[u32], options: &GenerateOptions) -> anyhow::Result<Vec<u32>> {
    let cancel = CancelToken::default();
    let mut sampler = Sampler::new(options.sampling);
    let width = model.info().hidden_dim;
    let mut cache = model.new_cache();
    let mut tokens: Vec<u32> = Vec::new();
    let mut input = prompt.to_vec();
    while tokens.len() < options.max_tokens && cache.len() + input.len() <= model.info().max_position {
        let residuals = model.forward(cache.as_mut(), model.embed(&input)?, &cancel)?;
        let last = residuals.len() - width;
        let best = model.head(&residuals[last..], Head::TopK(options.top_k as usize), &cancel)?;
        let HeadOutput::TopK { ids, logits, .. } = best else { anyhow::bail!("the best few tokens were asked for") };
        let Some(token) = sampler.choose(&ids, &logits).filter(|token| !model.info().eos.contains(token)) else {
            break;
        };
        tokens.push(token);
        input = vec![token];
    }
    Ok(tokens)
}
