//! `aeonctl capture-residuals` against stations that hold the demo model, beside the model run directly.

use std::{fs, path::Path};

use aeon_station::{
    basis::{
        BasisFile,
        residuals::{Residuals, read_safetensors},
    },
    config::{Config, ListenSettings, ModelSettings, Settings},
    daemon::Node,
    demo,
    model::{CancelToken, LayerRange},
};

use crate::cli::{aeonctl, succeed};

const TEXT: &str = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n";

async fn node(layers: &str, listen: ListenSettings) -> Node {
    let model = ModelSettings { layers: Some(layers.to_owned()), ..ModelSettings::default() };
    let settings = Settings { model, listen, ..Settings::default() };
    Node::start(&Config::try_from(settings).unwrap()).await.unwrap()
}

/// Two stations, on a Unix socket and on UDP, and what `aeonctl` needs to name them.
async fn mesh(folder: &Path) -> ([Node; 2], Vec<String>) {
    let socket = folder.join("a.sock");
    let first = node("0..2", ListenSettings { uds: Some(socket.clone()), ..ListenSettings::default() }).await;
    let udp = ListenSettings { udp: Some(([127, 0, 0, 1], 0).into()), ..ListenSettings::default() };
    let second = node("2..6", udp).await;
    let stations = [format!("uds:{}", socket.display()), format!("udp:{}", second.udp().unwrap())];
    ([first, second], stations.into_iter().flat_map(|station| ["--station".to_owned(), station]).collect())
}

/// What crosses the boundaries 0, 2 and 6 when the model runs in this process, each window on its own.
fn directly(window: usize, max: usize) -> Residuals {
    let ids = demo::tokenizer().unwrap().encode(TEXT, false).unwrap();
    let parts = [demo::load(Some(0..2)).unwrap(), demo::load(Some(2..6)).unwrap()];
    let width = parts[0].info().hidden_dim;
    let mut crossings = [const { Vec::new() }; 3];
    for ids in ids.chunks(window - 1) {
        let mut values = parts[0].embed(&[&[0], ids].concat()).unwrap();
        crossings[0].extend_from_slice(&values);
        for (part, crossing) in parts.iter().zip(&mut crossings[1..]) {
            values = part.forward(&mut *part.new_cache(), values, &CancelToken::default()).unwrap();
            crossing.extend_from_slice(&values);
        }
    }
    let mut residuals = Residuals::default();
    for (boundary, mut values) in [0, 2, 6].into_iter().zip(crossings) {
        values.truncate(max * width);
        let matrix = ndarray::Array2::from_shape_vec((values.len() / width, width), values).unwrap();
        residuals.boundaries.insert(boundary, matrix);
    }
    residuals
}

#[test]
fn captured_residuals_are_those_of_the_model_and_a_basis_can_be_fitted_to_them() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::write(at.join("text.txt"), TEXT).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (nodes, stations) = runtime.block_on(mesh(at));
    let capture = |more: &[&str]| -> Vec<String> {
        let command = ["capture-residuals", "--text", "text.txt", "--out", "out.safetensors"];
        stations.iter().cloned().chain(command.iter().chain(more).map(|part| (*part).to_owned())).collect()
    };
    let text = succeed(at, &capture(&[]));
    assert!(text.contains("boundaries  0 2 6"), "{text}");
    let captured = read_safetensors(&at.join("out.safetensors")).unwrap();
    let expected = directly(256, 1000);
    assert_eq!(captured.boundaries.keys().collect::<Vec<_>>(), [&0, &2, &6]);
    for (captured, expected) in captured.boundaries.values().zip(expected.boundaries.values()) {
        assert_eq!(captured.dim(), expected.dim());
        let difference = captured.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference < 1e-4, "{difference}");
    }
    assert_eq!(captured.metadata["model"], "demo");
    assert_eq!(captured.metadata["corpus_hash"], format!("blake3:{}", blake3::hash(TEXT.as_bytes()).to_hex()));

    // Windows that end in the middle of a request and a limit that ends in the middle of a window.
    succeed(at, &capture(&["--window", "7", "--max-tokens", "3000"]));
    let captured = read_safetensors(&at.join("out.safetensors")).unwrap();
    let expected = directly(7, 3000);
    let rows = captured.boundaries[&6].nrows();
    assert_eq!(rows, expected.boundaries[&6].nrows());
    let difference = captured.boundaries[&6].iter().zip(&expected.boundaries[&6]).map(|(a, b)| (a - b).abs());
    assert!(difference.fold(0.0, f32::max) < 1e-4);
    succeed(at, &capture(&["--window", "7", "--max-tokens", "11"]));
    assert_eq!(read_safetensors(&at.join("out.safetensors")).unwrap().boundaries[&0].nrows(), 11);

    // From text to basis.
    succeed(at, &capture(&[]));
    let fit = ["basis", "fit", "out.safetensors", "--out", "demo.pcab", "--model", "demo", "--methodology", "m.json"];
    let more = ["--k", "8", "--boundaries", "2,6", "--evaluate", "out.safetensors", "--evaluate-at", "0,8"];
    let text = succeed(at, &[&fit[..], &more].concat());
    assert!(text.contains("On other text"), "{text}");
    let file = BasisFile::open(&at.join("demo.pcab")).unwrap();
    assert_eq!(file.boundaries().map(|part| (part.boundary, part.k)).collect::<Vec<_>>(), [(2, 8), (6, 8)]);
    assert!(file.median_norm(2).unwrap() > 1.0);

    for (more, says) in [
        (&["--window", "1"][..], "--window 1 is not between 2 and 1024"),
        (&["--window", "1025"], "--window 1025"),
        (&["--max-tokens", "0"], "captures nothing"),
    ] {
        let output = aeonctl(at, &capture(more));
        assert_eq!(output.status.code(), Some(64));
        assert!(String::from_utf8_lossy(&output.stderr).contains(says));
    }
    fs::write(at.join("text.txt"), "").unwrap();
    assert_eq!(aeonctl(at, &capture(&[])).status.code(), Some(64));
    let names: Vec<_> = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().ends_with(".tmp")), "{names:?}");
    runtime.block_on(async {
        for node in nodes {
            assert!(node.stop().await);
        }
    });
    // Nobody there any more: 69, and no file is left behind.
    fs::write(at.join("text.txt"), TEXT).unwrap();
    assert_eq!(aeonctl(at, &capture(&[])).status.code(), Some(69));
}
