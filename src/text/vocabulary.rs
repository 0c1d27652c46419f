//! The vocabulary inside a GGUF file, rewritten as a `tokenizer.json`.
//!
//! Two kinds exist: `gpt2` (byte-level, with its merges) and `llama` (SentencePiece, with a score for each token, from
//! which the merges follow).

use std::{collections::HashMap, path::Path};

use serde_json::{Value, json};

use super::tokenizer::{SPACE_MARK, TextError};
use crate::gguf::Gguf;

/// Token types of the format.
mod token_type {
    pub(super) const NORMAL: i64 = 1;
    pub(super) const UNKNOWN: i64 = 2;
    pub(super) const CONTROL: i64 = 3;
    pub(super) const USER_DEFINED: i64 = 4;
}

/// Cuts as the Qwen2 and Llama 3 tokenizers do, with the number of digits that stay together.
fn words(digits: &str) -> String {
    [
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
    .join("|")
}

/// What a file says about its vocabulary.
pub(super) struct Vocabulary {
    /// A `tokenizer.json`.
    pub(super) tokenizer: Value,
    pub(super) bos: Option<u32>,
    pub(super) eos: Vec<u32>,
    pub(super) bos_text: String,
    pub(super) eos_text: String,
    pub(super) chat_template: Option<String>,
}

/// Reads the vocabulary.
pub(super) fn read(file: &Gguf) -> Result<Vocabulary, TextError> {
    let source = Source { file };
    let kind = source.text("tokenizer.ggml.model")?;
    let tokens = file.texts("tokenizer.ggml.tokens").ok_or_else(|| source.missing("tokenizer.ggml.tokens"))?;
    let id = |key: &str| file.unsigned(key).and_then(|id| u32::try_from(id).ok());
    let text = |id: Option<u32>| id.and_then(|id| tokens.get(id as usize)).cloned().unwrap_or_default();
    let bos = id("tokenizer.ggml.bos_token_id");
    let ends = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"];
    let eos: Vec<u32> = ends.iter().filter_map(|key| id(key)).collect();
    let mut parts = match kind {
        "gpt2" => source.byte_level(tokens)?,
        "llama" => source.sentence_piece(tokens, &text(id("tokenizer.ggml.unknown_token_id")))?,
        _ => return Err(source.unsupported("tokenizer.ggml.model", kind)),
    };
    let adds_bos = file.boolean("tokenizer.ggml.add_bos_token").unwrap_or(parts.adds_bos);
    let tokenizer = parts.finish(source.added(tokens), bos.filter(|_| adds_bos), &text(bos));
    Ok(Vocabulary {
        tokenizer,
        bos,
        bos_text: text(bos),
        eos_text: text(eos.first().copied()),
        eos,
        chat_template: file.text("tokenizer.chat_template").map(str::to_owned),
    })
}

/// The parts of a `tokenizer.json`.
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
    model: Value,
    decoder: Value,
    /// Unless the file says otherwise.
    adds_bos: bool,
}

impl Parts {
    fn finish(&mut self, added: Value, bos: Option<u32>, bos_text: &str) -> Value {
        let post_processor = bos.map(|id| {
            let begin = json!({"SpecialToken": {"id": bos_text, "type_id": 0}});
            let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
            json!({
                "type": "TemplateProcessing",
                "single": [begin, text("A")],
                "pair": [begin, text("A"), text("B")],
                "special_tokens": {bos_text: {"id": bos_text, "ids": [id], "tokens": [bos_text]}},
            })
        });
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": self.normalizer.take(),
            "pre_tokenizer": self.pre_tokenizer.take(),
            "post_processor": post_processor,
            "decoder": self.decoder.take(),
            "model": self.model.take(),
        })
    }
}

struct Source<'a> {
    file: &'a Gguf,
}

impl<'a> Source<'a> {
    fn missing(&self, key: &str) -> TextError {
        TextError::MissingValue { path: self.path().to_owned(), key: key.to_owned() }
    }

    fn unsupported(&self, key: &str, got: &str) -> TextError {
        TextError::UnsupportedVocabulary { path: self.path().to_owned(), key: key.to_owned(), got: got.to_owned() }
    }

    fn path(&self) -> &'a Path {
        self.file.path()
    }

    fn text(&self, key: &str) -> Result<&'a str, TextError> {
        self.file.text(key).ok_or_else(|| self.missing(key))
    }

    fn token_type(&self, id: usize) -> i64 {
        let types = self.file.integers("tokenizer.ggml.token_type");
        types.and_then(|types| types.get(id)).copied().unwrap_or(token_type::NORMAL)
    }

    /// Tokens that are found in a text before it is cut.
    fn added(&self, tokens: &[String]) -> Value {
        let entry = |(id, token): (usize, &String)| {
            let special = match self.token_type(id) {
                token_type::CONTROL | token_type::UNKNOWN => true,
                token_type::USER_DEFINED => false,
                _ => return None,
            };
            let flags = json!({"id": id, "content": token, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false});
            Some(flags)
        };
        tokens.iter().enumerate().filter_map(entry).collect()
    }

    fn byte_level(&self, tokens: &[String]) -> Result<Parts, TextError> {
        let key = "tokenizer.ggml.merges";
        let merges = self.file.texts(key).ok_or_else(|| self.missing(key))?;
        let bytes = |cuts: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": cuts});
        let sequence = |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
        let split = |digits: &str| json!({"type": "Split", "pattern": {"Regex": words(digits)}, "behavior": "Isolated", "invert": false});
        let kind = self.file.text("tokenizer.ggml.pre").unwrap_or("default");
        let mut normalizer = Value::Null;
        let mut llama3 = false;
        let pre_tokenizer = match kind {
            "default" | "gpt-2" => bytes(true),
            "smollm" => sequence(json!({"type": "Digits", "individual_digits": true}), bytes(true)),
            "qwen2" => {
                normalizer = json!({"type": "NFC"});
                sequence(split(r"\p{N}"), bytes(false))
            }
            "llama-bpe" | "llama3" | "llama-v3" => {
                llama3 = true;
                sequence(split(r"\p{N}{1,3}"), bytes(false))
            }
            _ => return Err(self.unsupported("tokenizer.ggml.pre", kind)),
        };
        let model = json!({
            "type": "BPE",
            "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": llama3,
            "vocab": ids(tokens),
            "merges": merges,
        });
        Ok(Parts { normalizer, pre_tokenizer, model, decoder: bytes(true), adds_bos: llama3 })
    }

    fn sentence_piece(&self, tokens: &[String], unknown: &str) -> Result<Parts, TextError> {
        let key = "tokenizer.ggml.scores";
        let scores = self.file.floats(key).ok_or_else(|| self.missing(key))?;
        let mark = SPACE_MARK.to_string();
        let mut normalizers = Vec::new();
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": mark}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if self.file.boolean("tokenizer.ggml.add_space_prefix").unwrap_or(true) {
            normalizers.push(json!({"type": "Prepend", "prepend": mark}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": mark}));
        let model = json!({
            "type": "BPE",
            "dropout": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "unk_token": if unknown.is_empty() { Value::Null } else { json!(unknown) },
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": ids(tokens),
            "merges": self.merges(tokens, scores),
        });
        Ok(Parts {
            normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
            pre_tokenizer: Value::Null,
            model,
            decoder: json!({"type": "Sequence", "decoders": decoders}),
            adds_bos: true,
        })
    }

    /// Every way to make a token of two others, the token of the highest score first.
    fn merges(&self, tokens: &[String], scores: &[f32]) -> Vec<(String, String)> {
        let is_normal = |id: &usize| self.token_type(*id) == token_type::NORMAL;
        let known: HashMap<&str, usize> =
            tokens.iter().enumerate().filter(|(id, _)| is_normal(id)).map(|(id, token)| (token.as_str(), id)).collect();
        let mut found = Vec::new();
        for (id, token) in tokens.iter().enumerate().filter(|(id, _)| is_normal(id)) {
            for (cut, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(cut);
                if let (Some(a), Some(b)) = (known.get(left), known.get(right)) {
                    let score = scores.get(id).copied().unwrap_or(f32::NEG_INFINITY);
                    found.push((score, (*a, *b), (left.to_owned(), right.to_owned())));
                }
            }
        }
        found.sort_by(|(a, a_ids, _), (b, b_ids, _)| b.total_cmp(a).then(a_ids.cmp(b_ids)));
        found.into_iter().map(|(_, _, merge)| merge).collect()
    }
}

/// Token to id.
fn ids(tokens: &[String]) -> HashMap<&str, usize> {
    tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect()
}
