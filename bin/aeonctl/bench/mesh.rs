//! Tokens per second of the demo model on stations in this process.

use std::time::{Duration, Instant};

use aeon_station::{
    client::{
        ClientOptions, Pipeline, StationAddress,
        generate::{GenerateOptions, generate},
        sampler::Sampling,
    },
    config::{Config, ListenSettings, ModelSettings, Settings},
    daemon::Node,
    demo,
    model::LayerRange,
};
use anyhow::Context as _;

use crate::demo::PrivateFolder;

/// Text that every run goes on from.
const PROMPT: &str = "First Citizen:\nBefore we proceed";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Unix,
    Udp,
}

/// Stations that hold the layers of the demo model between them.
pub(super) struct Mesh {
    nodes: Vec<Node>,
    addresses: Vec<StationAddress>,
    _folder: PrivateFolder,
}

impl Mesh {
    /// Starts `count` stations, each with an equal share of the layers.
    pub(super) async fn start(carrier: Carrier, count: u32) -> anyhow::Result<Self> {
        let folder = PrivateFolder::new().context("making a folder for the sockets")?;
        let layers = demo::load(None)?.info().n_layers;
        let (mut nodes, mut addresses) = (Vec::new(), Vec::new());
        for index in 0..count {
            let range = format!("{}..{}", layers * index / count, layers * (index + 1) / count);
            let socket = folder.path().join(format!("{index}.sock"));
            let listen = match carrier {
                Carrier::Unix => ListenSettings { uds: Some(socket.clone()), ..ListenSettings::default() },
                Carrier::Udp => ListenSettings { udp: Some(([127, 0, 0, 1], 0).into()), ..ListenSettings::default() },
            };
            let model = ModelSettings { layers: Some(range), ..ModelSettings::default() };
            let node = Node::start(&Config::try_from(Settings { model, listen, ..Settings::default() })?).await?;
            addresses.push(match carrier {
                Carrier::Unix => StationAddress::Unix(socket),
                Carrier::Udp => StationAddress::Udp(node.udp().context("no UDP address")?.to_string()),
            });
            nodes.push(node);
        }
        Ok(Self { nodes, addresses, _folder: folder })
    }

    /// Generates `tokens` tokens in each of `sessions` sessions side by side; returns tokens per second of all together,
    /// prompts included in the time.
    pub(super) async fn run(&self, sessions: usize, tokens: usize, options: &ClientOptions) -> anyhow::Result<f64> {
        let ids = demo::tokenizer()?.encode(PROMPT, true)?;
        let mut pipelines = Vec::new();
        for _ in 0..sessions {
            pipelines.push(Pipeline::connect(&self.addresses, options).await?);
        }
        let settings = GenerateOptions {
            max_tokens: tokens,
            // Greedy text may end early; drawn text goes on.
            sampling: Sampling { temperature: 1.0, top_p: 0.95, seed: 1 },
            top_k: 64,
            stop: Vec::new(),
        };
        let started = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for mut pipeline in pipelines {
            let (ids, settings) = (ids.clone(), settings.clone());
            tasks.spawn(async move {
                let generated = generate(&mut pipeline, &ids, &settings, |_| true).await?;
                pipeline.reset().await?;
                anyhow::Ok(generated.tokens.len())
            });
        }
        let mut count = 0;
        while let Some(done) = tasks.join_next().await {
            count += done.context("a session's task ended")??;
        }
        Ok(count as f64 / started.elapsed().max(Duration::from_nanos(1)).as_secs_f64())
    }

    pub(super) async fn stop(self) {
        for node in self.nodes {
            node.stop().await;
        }
    }
}
