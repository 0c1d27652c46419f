//! Stations in this process, and the model in one piece to hold them against.

use std::{path::Path, time::Duration};

use aeon_station::{
    client::{ClientOptions, Pipeline, StationAddress, Want, pipeline::Next},
    config::{Config, Settings},
    daemon::Node,
    model::{CancelToken, Head, HeadOutput, LayerRange, load::load_transformer},
};
use tempfile::TempDir;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carrier {
    Unix,
    Udp,
    Tcp,
}

/// A model that stations can serve and tests can run in one piece.
pub(crate) struct Model {
    pub(crate) spec: String,
    pub(crate) whole: Box<dyn LayerRange>,
    /// Where stations may be cut.
    pub(crate) cuts: &'static [u32],
}

/// The models to test with: the demo model always, stories260K where it is.
pub(crate) fn models() -> Vec<Model> {
    let whole = aeon_station::demo::load(None).unwrap();
    let mut models = vec![Model { spec: "demo".to_owned(), whole: Box::new(whole), cuts: &[0, 2, 5, 6] }];
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/models/stories260K");
    if dir.exists() {
        let spec = dir.to_str().unwrap().to_owned();
        let whole = load_transformer(&dir, None).unwrap();
        models.push(Model { spec, whole: Box::new(whole), cuts: &[0, 1, 3, 5] });
    } else {
        eprintln!("skipped: {} is not there", dir.display());
    }
    models
}

pub(crate) struct Stations {
    pub(crate) nodes: Vec<Option<Node>>,
    pub(crate) addresses: Vec<StationAddress>,
    _dir: TempDir,
}

/// Starts one station for each carrier, with the model's layers in order.
pub(crate) async fn start(model: &Model, carriers: &[Carrier], edit: impl Fn(usize, &mut Settings)) -> Stations {
    let n_layers = *model.cuts.last().unwrap();
    let bounds: Vec<u32> = match carriers.len() {
        1 => vec![0, n_layers],
        2 => vec![0, model.cuts[1], n_layers],
        _ => model.cuts.to_vec(),
    };
    let dir = tempfile::tempdir().unwrap();
    let (mut nodes, mut addresses) = (Vec::new(), Vec::new());
    for (index, carrier) in carriers.iter().enumerate() {
        let path = dir.path().join(format!("{index}.sock"));
        let mut settings = Settings::default();
        settings.model.model = Some(model.spec.clone());
        settings.model.layers = Some(format!("{}..{}", bounds[index], bounds[index + 1]));
        let any = "127.0.0.1:0".parse().ok();
        match carrier {
            Carrier::Unix => settings.listen.uds = Some(path.clone()),
            Carrier::Udp => settings.listen.udp = any,
            Carrier::Tcp => settings.listen.tcp = any,
        }
        // Small datagrams, so that a prompt takes many of them.
        settings.limits.max_datagram = Some(2048);
        edit(index, &mut settings);
        let node = Node::start(&Config::try_from(settings).unwrap()).await.unwrap();
        addresses.push(match carrier {
            Carrier::Unix => StationAddress::Unix(path),
            Carrier::Udp => StationAddress::Udp(node.udp().unwrap().to_string()),
            Carrier::Tcp => StationAddress::Tcp(node.tcp().unwrap().to_string()),
        });
        nodes.push(Some(node));
    }
    Stations { nodes, addresses, _dir: dir }
}

impl Stations {
    pub(crate) async fn pipeline(&self, replay: bool) -> Pipeline {
        let options = ClientOptions { request_timeout: Duration::from_secs(30), ..ClientOptions::default() };
        let mut pipeline = Pipeline::connect(&self.addresses, &options).await.unwrap();
        if replay {
            pipeline.use_replay();
        }
        pipeline
    }

    /// A number of a station's HEALTH.
    pub(crate) async fn health(&self, index: usize) -> serde_json::Value {
        let client = aeon_station::client::Client::connect(&self.addresses[index], ClientOptions::default());
        let reply = client.await.unwrap().request(aeon_proto::route::Route::HEALTH, |_| (), &[]).await.unwrap();
        serde_json::from_str(&reply.meta).unwrap()
    }
}

/// A prompt of the model's ids that no other seed gives.
pub(crate) fn prompt(model: &Model, len: usize, seed: u32) -> Vec<u32> {
    let vocab = model.whole.info().vocab as u32;
    (0..len as u32).map(|n| 3 + (n * n * 7 + n * 13 + seed * (n / 2 + 1)) % (vocab - 3)).collect()
}

/// What comes after a prompt, token by token.
pub(crate) async fn run(pipeline: &mut Pipeline, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut input = prompt.to_vec();
    for _ in 0..count {
        let Next { ids, .. } = pipeline.extend(&input, Want::Token).await.unwrap();
        tokens.push(ids[0]);
        input = ids;
    }
    tokens
}

/// The same without stations.
pub(crate) fn unsplit(model: &dyn LayerRange, prompt: &[u32], count: usize) -> Vec<u32> {
    let cancel = CancelToken::default();
    let mut cache = model.new_cache();
    let (mut tokens, mut input) = (Vec::new(), prompt.to_vec());
    for _ in 0..count {
        let residuals = model.forward(cache.as_mut(), model.embed(&input).unwrap(), &cancel).unwrap();
        let last = residuals.len() - model.info().hidden_dim;
        let HeadOutput::Tokens(next) = model.head(&residuals[last..], Head::Token, &cancel).unwrap() else { panic!() };
        tokens.push(next[0]);
        input = next;
    }
    tokens
}
