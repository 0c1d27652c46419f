//! Whole models over real sockets: any split over any mix of carriers gives the tokens of the model in one piece.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{path::PathBuf, time::Duration};

use aeon_proto::route::Route;
use aeon_station::{
    client::{
        ClientOptions, Pipeline, StationAddress, Want,
        generate::{GenerateOptions, Stop, generate},
        sampler::Sampling,
    },
    config::{Config, Settings},
    daemon::Node,
    demo,
    model::{CancelToken, Head, HeadOutput, LayerRange, load::load_transformer},
};
use common::{floats, read_ids, shared, wire::Wire, within};
use serde::Deserialize;
use tempfile::TempDir;

/// Stations in a row, on Unix sockets, TCP and UDP in turn.
struct Mesh {
    addresses: Vec<StationAddress>,
    nodes: Vec<Node>,
    _dir: TempDir,
}

async fn start(model: &str, bounds: &[u32], first_carrier: usize) -> Mesh {
    let dir = tempfile::tempdir().unwrap();
    let mut mesh = Mesh { addresses: Vec::new(), nodes: Vec::new(), _dir: dir };
    for (index, bounds) in bounds.windows(2).enumerate() {
        let mut settings = Settings::default();
        settings.model.model = Some(model.to_owned());
        settings.model.layers = Some(format!("{}..{}", bounds[0], bounds[1]));
        let socket = mesh._dir.path().join(index.to_string());
        let any_port = Some(([127, 0, 0, 1], 0).into());
        match (first_carrier + index) % 3 {
            0 => settings.listen.uds = Some(socket.clone()),
            1 => settings.listen.tcp = any_port,
            _ => settings.listen.udp = any_port,
        }
        let node = Node::start(&Config::try_from(settings).unwrap()).await.unwrap();
        mesh.addresses.push(match (node.tcp(), node.udp()) {
            (Some(address), _) => StationAddress::Tcp(address.to_string()),
            (_, Some(address)) => StationAddress::Udp(address.to_string()),
            _ => StationAddress::Unix(socket),
        });
        mesh.nodes.push(node);
    }
    mesh
}

const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };

/// Greedy tokens of a mesh.
async fn tokens(addresses: &[StationAddress], prompt: &[u32], count: usize) -> Vec<u32> {
    let mut pipeline = Pipeline::connect(addresses, &ClientOptions::default()).await.unwrap();
    let options = GenerateOptions { max_tokens: count, sampling: GREEDY, top_k: 1, stop: Vec::new() };
    let generated = within("a text", generate(&mut pipeline, prompt, &options, |_| true)).await.unwrap();
    assert!(matches!(generated.stop, Stop::MaxTokens | Stop::EndOfText(_)), "{:?}", generated.stop);
    within("RESET", pipeline.reset()).await.unwrap();
    generated.tokens
}

/// Greedy tokens of a model in this process, one step after another.
fn unsplit(model: &dyn LayerRange, prompt: &[u32], count: usize) -> Vec<u32> {
    let cancel = CancelToken::default();
    let mut cache = model.new_cache();
    let mut tokens = Vec::new();
    let mut input = prompt.to_vec();
    while tokens.len() < count {
        let residuals = model.forward(cache.as_mut(), model.embed(&input).unwrap(), &cancel).unwrap();
        let last = residuals.len() - model.info().hidden_dim;
        let HeadOutput::Tokens(next) = model.head(&residuals[last..], Head::Token, &cancel).unwrap() else { panic!() };
        if model.info().eos.contains(&next[0]) {
            break;
        }
        tokens.push(next[0]);
        input = next;
    }
    tokens
}

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    continuation_ids: Vec<u32>,
}

fn stories() -> Option<(PathBuf, Vec<Case>)> {
    let dir = shared("models/stories260K")?;
    let reference: Reference = serde_json::from_slice(&std::fs::read(dir.join("reference.json")).unwrap()).unwrap();
    Some((dir, reference.cases))
}

#[tokio::test(flavor = "multi_thread")]
async fn stories260k_split_in_any_way_gives_the_reference_tokens() {
    let Some((dir, cases)) = stories() else { return };
    let model = dir.to_str().unwrap();
    for (bounds, first_carrier) in
        [(&[0, 5][..], 0), (&[0, 5], 1), (&[0, 5], 2), (&[0, 2, 5], 0), (&[0, 3, 5], 2), (&[0, 1, 2, 3, 4, 5], 1)]
    {
        let mesh = start(model, bounds, first_carrier).await;
        for case in &cases {
            let count = case.continuation_ids.len();
            let got = tokens(&mesh.addresses, &case.prompt_ids, count).await;
            assert_eq!(got, case.continuation_ids[..got.len()], "split {bounds:?}");
            assert!(!got.is_empty());
        }
    }
}

fn demo_prompt() -> Vec<u32> {
    demo::tokenizer().unwrap().encode("First Citizen:\nBefore we proceed any further, hear me speak.\n", true).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_model_split_in_any_way_gives_the_tokens_of_one_piece() {
    let prompt = demo_prompt();
    let expected = unsplit(&demo::load(None).unwrap(), &prompt, 24);
    for (bounds, first_carrier) in
        [(&[0, 6][..], 2), (&[0, 1, 6], 1), (&[0, 3, 6], 0), (&[0, 1, 2, 3, 4, 5, 6], 0), (&[0, 2, 4, 6], 2)]
    {
        let mesh = start("demo", bounds, first_carrier).await;
        assert_eq!(tokens(&mesh.addresses, &prompt, 24).await, expected, "split {bounds:?} from {first_carrier}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_texts_at_once_do_not_disturb_each_other() {
    let model = demo::load(None).unwrap();
    let mesh = start("demo", &[0, 2, 4, 6], 0).await;
    let texts = (0..5_u32).map(|n| {
        let prompt: Vec<u32> = (0..6 + n).map(|i| (n * 131 + i * 17 + 2) % 1024).collect();
        let (expected, addresses) = (unsplit(&model, &prompt, 12), mesh.addresses.clone());
        async move { assert_eq!(tokens(&addresses, &prompt, 12).await, expected, "text {n}") }
    });
    futures_util::future::join_all(texts).await;
    for node in mesh.nodes {
        assert!(within("stopping", node.stop()).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_is_dropped_leaves_the_session_as_it_was() {
    let prompt = demo_prompt();
    let expected = unsplit(&demo::load(None).unwrap(), &prompt, 12);
    for first_carrier in 0..3 {
        let mesh = start("demo", &[0, 2, 4, 6], first_carrier).await;
        let mut pipeline = Pipeline::connect(&mesh.addresses, &ClientOptions::default()).await.unwrap();
        let (mut input, mut got, mut history) = (prompt.clone(), Vec::new(), Vec::<u32>::new());
        let mut in_all = 0;
        for _ in 0..12 {
            let mut patience = Duration::from_micros(100);
            let mut dropped = 0;
            // What is dropped is another token than the one that then goes on.
            loop {
                let other = [input[0] ^ 1, 7];
                if tokio::time::timeout(patience, pipeline.extend(&other, Want::Token)).await.is_ok() {
                    pipeline.rewind(history.len());
                    break;
                }
                dropped += 1;
                patience = patience * 3 / 2;
                assert_eq!(pipeline.history(), history);
            }
            in_all += dropped;
            let next = within("a step", pipeline.extend(&input, Want::Token)).await.unwrap();
            history.extend(&input);
            assert_eq!(pipeline.history(), history);
            got.push(next.ids[0]);
            input = next.ids;
        }
        assert_eq!(got, expected, "from {first_carrier}");
        assert!(in_all > 0, "nothing was dropped on its way");
    }
}

/// The original way: residuals in, residuals out, tokens from LM_HEAD, no meta at all.
async fn raw_tokens(wires: &mut [Wire], model: &dyn LayerRange, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut pending = prompt.to_vec();
    pending.reverse();
    while tokens.len() < count {
        let token = pending.pop().unwrap();
        let mut body = floats(&model.embed(&[token]).unwrap());
        for wire in &mut *wires {
            let answer = wire.ask(Route::FORWARD, "", &body).await;
            assert_eq!((answer.status(), answer.flags), (200, 0x30));
            body = answer.body;
        }
        if pending.is_empty() {
            let next = read_ids(&wires.last_mut().unwrap().ask(Route::LM_HEAD, "", &body).await.body);
            assert_eq!(next.len(), 1);
            tokens.push(next[0]);
            pending.push(next[0]);
        }
    }
    tokens
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_the_original_routes_gets_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let model = demo::load(None).unwrap();
    let prompt = &demo_prompt()[..8];
    let expected = unsplit(&model, prompt, 12);
    let mut nodes = Vec::new();
    let mut places = Vec::new();
    for (index, layers) in ["0..2", "2..5", "5..6"].into_iter().enumerate() {
        let mut settings = Settings::default();
        settings.model.layers = Some(layers.to_owned());
        settings.listen.connection_session = Some(true);
        settings.listen.bare_frames = Some(true);
        let socket = dir.path().join(layers);
        match index {
            1 => settings.listen.tcp = Some(([127, 0, 0, 1], 0).into()),
            _ => settings.listen.uds = Some(socket.clone()),
        }
        let node = Node::start(&Config::try_from(settings).unwrap()).await.unwrap();
        places.push((socket, node.tcp()));
        nodes.push(node);
    }
    // Two clients at once, each with the sessions of its connections.
    for _ in 0..2 {
        let mut clients = Vec::new();
        for _ in 0..2 {
            let mut wires = Vec::new();
            for (socket, tcp) in &places {
                wires.push(match tcp {
                    Some(address) => Wire::bare_tcp(*address).await,
                    None => Wire::uds(socket).await,
                });
            }
            clients.push(wires);
        }
        let texts = clients.iter_mut().map(|wires| raw_tokens(wires, &model, prompt, 12));
        for got in futures_util::future::join_all(texts).await {
            assert_eq!(got, expected);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_the_original_routes_gets_the_reference_tokens() {
    let Some((dir, cases)) = stories() else { return };
    let model = load_transformer(&dir, None).unwrap();
    let socket = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.model.model = Some(dir.to_str().unwrap().to_owned());
    settings.listen.uds = Some(socket.path().join("s"));
    settings.listen.connection_session = Some(true);
    let _node = Node::start(&Config::try_from(settings).unwrap()).await.unwrap();
    for case in &cases {
        let mut wires = [Wire::uds(&socket.path().join("s")).await];
        let count = case.continuation_ids.len().min(24);
        let got = raw_tokens(&mut wires, &model, &case.prompt_ids, count).await;
        assert_eq!(got, case.continuation_ids[..count]);
    }
}

/// A station in front of another, and the one behind it.
struct Pair {
    back: Option<Node>,
    back_settings: Settings,
    front: StationAddress,
    front_socket: PathBuf,
    _front: Node,
    _dir: TempDir,
}

impl Pair {
    async fn start(over_udp: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut back_settings = Settings::default();
        back_settings.listen.uds = Some(dir.path().join("back"));
        if over_udp {
            back_settings.listen.udp = Some(([127, 0, 0, 1], 0).into());
        }
        let back = Node::start(&Config::try_from(back_settings.clone()).unwrap()).await.unwrap();
        back_settings.listen.udp = back.udp();
        let place = match back.udp() {
            Some(address) => format!("udp:{address}"),
            None => format!("uds:{}", dir.path().join("back").display()),
        };
        let mut settings = Settings::default();
        settings.model.model = Some(format!("upstream:{place},128,1024"));
        let front_socket = dir.path().join("front");
        settings.listen.uds = Some(front_socket.clone());
        let node = Node::start(&Config::try_from(settings).unwrap()).await.unwrap();
        let front = StationAddress::Unix(front_socket.clone());
        Self { back: Some(back), back_settings, front, front_socket, _front: node, _dir: dir }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_front_station_gives_the_tokens_of_the_one_behind_it() {
    let prompt = demo_prompt();
    let expected = unsplit(&demo::load(None).unwrap(), &prompt, 12);
    for over_udp in [false, true] {
        let pair = Pair::start(over_udp).await;
        assert_eq!(tokens(std::slice::from_ref(&pair.front), &prompt, 12).await, expected, "over UDP: {over_udp}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_front_station_outlives_its_upstream() {
    let prompt = demo_prompt();
    let expected = unsplit(&demo::load(None).unwrap(), &prompt, 12);
    for over_udp in [false, true] {
        let mut pair = Pair::start(over_udp).await;
        let options = ClientOptions { connect_timeout: Duration::from_secs(5), ..ClientOptions::default() };
        let mut pipeline = Pipeline::connect(std::slice::from_ref(&pair.front), &options).await.unwrap();
        let mut input = prompt.clone();
        let mut got = Vec::new();
        for step in 0..12 {
            if step == 5 {
                within("stopping", pair.back.take().unwrap().stop()).await;
                // Meanwhile work is refused with a time to come back; what needs no upstream is answered.
                let mut wire = Wire::uds(&pair.front_socket).await;
                for _ in 0..2 {
                    let answer = wire.ask(Route::LM_HEAD, "", &floats(&[0.5; 128])).await;
                    assert_eq!(answer.status(), 503, "{}", answer.text);
                    assert!(answer.meta["retry_after_ms"].as_u64().unwrap() > 0);
                }
                assert_eq!(wire.ask(Route::HELLO, "", &[]).await.status(), 200);
                let config = Config::try_from(pair.back_settings.clone()).unwrap();
                pair.back = Some(Node::start(&config).await.unwrap());
            }
            let next = within("a step", pipeline.extend(&input, Want::Token)).await.unwrap();
            got.push(next.ids[0]);
            input = next.ids;
        }
        assert_eq!(got, expected, "over UDP: {over_udp}");
    }
}
