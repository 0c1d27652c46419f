//! Text to tokens and back, from both kinds of files, and as a stream.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test stops at its first failure")]

use std::path::{Path, PathBuf};

use aeon_station::text::{Message, TextError, Tokenizer};
use candle_core::quantized::gguf_file::{self, Value};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::json;

const TEXTS: [&str; 7] = [
    "Once upon a time",
    "",
    " two  spaces ",
    "caf\u{e9} na\u{ef}ve \u{1f980}\u{1f469}\u{200d}\u{1f680}",
    "tab\tand\nnewline\r\n\n  x",
    "123 it's 45.6",
    "\u{65e5}\u{672c}\u{8a9e}",
];

fn write_gguf(dir: &Path, values: &[(&str, Value)]) -> PathBuf {
    let path = dir.join("vocabulary.gguf");
    let values: Vec<_> = values.iter().map(|(key, value)| (*key, value)).collect();
    gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &values, &[]).unwrap();
    path
}

fn texts(texts: impl IntoIterator<Item = impl Into<String>>) -> Value {
    Value::Array(texts.into_iter().map(|text| Value::String(text.into())).collect())
}

/// The 256 characters that stand for bytes, in the order of the bytes.
fn byte_characters() -> Vec<String> {
    let mut next = 0x100;
    (0..=u8::MAX)
        .map(|byte| {
            let stands = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if stands { u32::from(byte) } else { next };
            next += u32::from(!stands);
            char::from_u32(code).unwrap().to_string()
        })
        .collect()
}

/// A byte-level vocabulary: 256 bytes, a few merges and two special tokens.
fn byte_level(dir: &Path, pre: &str) -> Result<Tokenizer, TextError> {
    let mut tokens = byte_characters();
    let merges = ["h e", "l l", "he ll", "\u{120} w", "1 2", "12 3", "\u{c3} \u{a9}"];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    tokens.extend(["<|im_start|>", "<|im_end|>"].map(str::to_owned));
    let n = tokens.len() as u32;
    let types = (0..n).map(|id| Value::I32(if id + 2 < n { 1 } else { 3 })).collect();
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}";
    let path = write_gguf(
        dir,
        &[
            ("tokenizer.ggml.model", Value::String("gpt2".into())),
            ("tokenizer.ggml.pre", Value::String(pre.into())),
            ("tokenizer.ggml.tokens", texts(tokens)),
            ("tokenizer.ggml.token_type", Value::Array(types)),
            ("tokenizer.ggml.merges", texts(merges)),
            ("tokenizer.ggml.bos_token_id", Value::U32(n - 2)),
            ("tokenizer.ggml.eos_token_id", Value::U32(n - 1)),
            ("tokenizer.chat_template", Value::String(template.into())),
        ],
    );
    Tokenizer::from_path(&path)
}

fn stories() -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/models/stories260K");
    if !dir.exists() {
        eprintln!("skipped: {} is not there", dir.display());
        return None;
    }
    Some(dir)
}

/// The vocabulary of stories260K as a GGUF file carries it: with scores and without merges.
fn sentence_piece(stories: &Path, dir: &Path) -> Tokenizer {
    let bytes = std::fs::read(stories.join("tokenizer.json")).unwrap();
    let vocabulary: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let mut tokens: Vec<(u64, String)> = vocabulary["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (id.as_u64().unwrap(), token.clone()))
        .collect();
    tokens.sort();
    let kind = |id: u64, token: &str| match id {
        0 => 2,
        1 | 2 => 3,
        _ if token.starts_with("<0x") => 6,
        _ => 1,
    };
    let path = write_gguf(
        dir,
        &[
            ("tokenizer.ggml.model", Value::String("llama".into())),
            ("tokenizer.ggml.tokens", texts(tokens.iter().map(|(_, token)| token.as_str()))),
            ("tokenizer.ggml.scores", Value::Array(tokens.iter().map(|(id, _)| Value::F32(-(*id as f32))).collect())),
            (
                "tokenizer.ggml.token_type",
                Value::Array(tokens.iter().map(|(id, token)| Value::I32(kind(*id, token))).collect()),
            ),
            ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U32(2)),
        ],
    );
    Tokenizer::from_path(&path).unwrap()
}

#[test]
fn scores_give_the_same_tokens_as_merges() {
    let Some(stories) = stories() else { return };
    let dir = tempfile::tempdir().unwrap();
    let from_scores = sentence_piece(&stories, dir.path());
    let from_merges = Tokenizer::from_path(&stories).unwrap();
    let story = "One day, a little girl named Lily found a needle in her room. She knew it was difficult to play.";
    for text in TEXTS.into_iter().chain([story]) {
        for special in [true, false] {
            let ids = from_scores.encode(text, special).unwrap();
            assert_eq!(ids, from_merges.encode(text, special).unwrap(), "{text:?}");
            assert_eq!(ids.first() == Some(&1), special, "{text:?}");
            assert_eq!(from_scores.decode(&ids), text);
        }
    }
    assert_eq!((from_scores.bos(), from_scores.eos()), (Some(1), [2].as_slice()));
    assert_eq!((from_merges.bos(), from_merges.eos()), (Some(1), [2].as_slice()));
}

#[test]
fn byte_level_vocabularies() {
    let dir = tempfile::tempdir().unwrap();
    for (pre, digits) in [("default", 1), ("smollm", 3), ("qwen2", 3), ("llama-bpe", 1)] {
        let tokenizer = byte_level(dir.path(), pre).unwrap();
        for text in TEXTS {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap()), text, "{pre}");
        }
        assert_eq!(tokenizer.encode("123", false).unwrap().len(), digits, "{pre}");
        assert_eq!(tokenizer.encode("hell w", false).unwrap().len(), 2, "{pre}");
        assert_eq!(tokenizer.token_id("<|im_end|>"), Some(264));
        assert_eq!(tokenizer.eos(), [264]);
        // Found in a text whole, shown to nobody.
        let ids = tokenizer.encode("a<|im_end|>b", false).unwrap();
        assert_eq!((ids.len(), ids[1]), (3, 264));
        assert_eq!(tokenizer.decode(&ids), "ab");
        let chat = tokenizer.chat_template().unwrap().render(&[Message::new("user", "hell")], true).unwrap();
        assert_eq!(chat, "<|im_start|>user\nhell<|im_end|>");
    }
    // Llama 3 files do not say that a text begins with a token, and yet it does.
    assert_eq!(byte_level(dir.path(), "llama-bpe").unwrap().encode("a", true).unwrap()[0], 263);
    assert!(
        matches!(byte_level(dir.path(), "unheard-of"), Err(TextError::UnsupportedVocabulary { got, .. }) if got == "unheard-of")
    );
}

/// A stream gives complete characters only, and all of them.
fn check_stream(tokenizer: &Tokenizer, ids: &[u32]) {
    let mut decoder = tokenizer.decoder();
    let mut parts: Vec<String> = ids.iter().map(|id| decoder.push(*id)).collect();
    parts.push(decoder.finish());
    assert_eq!(parts.concat(), tokenizer.decode(ids));
}

#[test]
fn streams_give_complete_characters() {
    let dir = tempfile::tempdir().unwrap();
    let mut tokenizers = vec![byte_level(dir.path(), "default").unwrap()];
    if let Some(stories) = stories() {
        tokenizers.push(Tokenizer::from_path(&stories).unwrap());
    }
    for tokenizer in &tokenizers {
        for text in TEXTS {
            let ids = tokenizer.encode(text, true).unwrap();
            check_stream(tokenizer, &ids);
            let mut decoder = tokenizer.decoder();
            let streamed: String = ids.iter().map(|id| decoder.push(*id)).collect();
            assert_eq!(streamed, text);
            assert!(!streamed.contains(char::REPLACEMENT_CHARACTER));
            // A continuation keeps the space that begins it.
            for cut in 1..ids.len() {
                let mut first = tokenizer.decoder();
                let begin: String = ids[..cut].iter().map(|id| first.push(*id)).collect();
                let mut rest = tokenizer.decoder_after(&ids[..cut]);
                let rest: String = ids[cut..].iter().map(|id| rest.push(*id)).collect();
                assert_eq!(begin + &rest, text);
            }
        }
        // Whatever a model says: broken characters, unknown ids.
        let mut random = StdRng::seed_from_u64(5);
        for _ in 0..500 {
            let ids: Vec<u32> = (0..random.random_range(0..30)).map(|_| random.random_range(0..600)).collect();
            check_stream(tokenizer, &ids);
        }
    }
    let half = [tokenizers[0].token_id("\u{c3}").unwrap()];
    let mut decoder = tokenizers[0].decoder();
    assert_eq!((decoder.push(half[0]), decoder.finish()), (String::new(), "\u{fffd}".to_owned()));
}

#[test]
fn other_vocabularies_decode_by_the_library() {
    let vocabulary = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": false},
        "model": {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"?": 0, "play": 1, "##ing": 2, "we": 3}},
    });
    let config = json!({"bos_token": {"content": "we"}, "eos_token": "?", "chat_template": [
        {"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages | length }}{{ bos_token }}"}]});
    let tokenizer =
        Tokenizer::from_bytes(vocabulary.to_string().as_bytes(), Some(config.to_string().as_bytes())).unwrap();
    let ids = tokenizer.encode("we playing", false).unwrap();
    assert_eq!((ids.as_slice(), tokenizer.decode(&ids).as_str()), ([3, 1, 2].as_slice(), "we playing"));
    check_stream(&tokenizer, &ids);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(3), [0].as_slice()));
    assert_eq!(tokenizer.chat_template().unwrap().render(&[], true).unwrap(), "0we");
}

#[test]
fn bad_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokenizer.json");
    assert!(matches!(Tokenizer::from_path(dir.path()), Err(TextError::NoTokenizer { .. })));
    std::fs::write(&file, "{}").unwrap();
    assert!(matches!(Tokenizer::from_path(dir.path()), Err(TextError::BadVocabulary { .. })));
    assert!(matches!(Tokenizer::from_path(&dir.path().join("absent.gguf")), Err(TextError::Gguf(_))));
    let named = |values: &[(&str, Value)]| Tokenizer::from_path(&write_gguf(dir.path(), values)).unwrap_err();
    assert!(matches!(named(&[]), TextError::MissingValue { key, .. } if key == "tokenizer.ggml.model"));
    let model = |kind: &str| ("tokenizer.ggml.model", Value::String(kind.into()));
    let tokens = ("tokenizer.ggml.tokens", texts(["a", "b"]));
    assert!(matches!(named(&[model("gpt2")]), TextError::MissingValue { key, .. } if key == "tokenizer.ggml.tokens"));
    let error = named(&[model("gpt2"), ("tokenizer.ggml.tokens", texts(["a", "b"]))]);
    assert!(matches!(error, TextError::MissingValue { key, .. } if key == "tokenizer.ggml.merges"));
    let error = named(&[model("t5"), ("tokenizer.ggml.tokens", texts(["a"]))]);
    assert!(matches!(error, TextError::UnsupportedVocabulary { got, .. } if got == "t5"));
    let merges = ("tokenizer.ggml.merges", texts(["a c"]));
    assert!(matches!(named(&[model("gpt2"), tokens, merges]), TextError::BadVocabulary { .. }));
}
