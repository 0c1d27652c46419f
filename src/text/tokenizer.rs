//! Text to token ids and back, with the vocabulary of a `tokenizer.json` or of a GGUF file.
//!
//! Encoding is the `tokenizers` crate's. Decoding is done here, token by token in bytes, so that a stream of tokens gives
//! its text as soon as a character is complete and the parts join to the text of all tokens at once.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

use super::{
    chat::ChatTemplate,
    vocabulary::{self, Vocabulary},
};
use crate::gguf::{Gguf, GgufError};

/// Largest JSON file read: vocabularies of 256,000 tokens with their merges have about 35 MB.
const MAX_FILE_LEN: u64 = 1 << 28;

/// Tokens that end a text or a turn in the common chat formats. A vocabulary that has one as a special token means it so.
const ENDS: [&str; 7] =
    ["</s>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"];

/// The character that stands for a space in SentencePiece vocabularies.
pub(super) const SPACE_MARK: char = '\u{2581}';

/// Why text could not be turned into tokens, or a vocabulary not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file cannot be read.
    #[error("{path}: cannot read the file")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is longer than any vocabulary.
    #[error("{path}: longer than {max} bytes")]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit.
        max: u64,
    },
    /// The path leads to no vocabulary.
    #[error("{path}: no tokenizer (expected tokenizer.json, a directory that holds one, or a file *.gguf)")]
    NoTokenizer {
        /// What was given.
        path: PathBuf,
    },
    /// A JSON file is not what it should be.
    #[error("{path}: bad JSON")]
    BadJson {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The vocabulary is malformed.
    #[error("{path}: bad vocabulary")]
    BadVocabulary {
        /// The file.
        path: PathBuf,
        /// The library's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A GGUF file is malformed.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A value of a GGUF file is absent.
    #[error("{path}: {key} is missing (the file holds no vocabulary)")]
    MissingValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A vocabulary is of a kind that is not read.
    #[error(
        "{path}: {key} {got:?} is not supported (supported: llama; gpt2 with default, smollm, qwen2 or llama-bpe; \
         a tokenizer.json serves instead)"
    )]
    UnsupportedVocabulary {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        got: String,
    },
    /// A chat template is malformed, or refuses the messages.
    #[error("chat template failed")]
    Template {
        /// Where and why.
        source: minijinja::Error,
    },
    /// The text could not be encoded.
    #[error("cannot encode the text")]
    Encode {
        /// The library's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// How the bytes of a token are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Each character of a token stands for a byte.
    Bytes,
    /// Text with marks for spaces and `<0xNN>` for single bytes.
    Marks {
        /// Whether the first space of a text was added by the encoder.
        strip_first: bool,
    },
    /// Only the library knows.
    Other,
}

/// A vocabulary.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    form: Form,
    special: HashMap<u32, String>,
    byte_of: HashMap<char, u8>,
    bos: Option<u32>,
    eos: Vec<u32>,
    chat: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Loads the vocabulary of a model directory, of a `tokenizer.json` or of a GGUF file.
    ///
    /// # Errors
    /// [`TextError`].
    pub fn from_path(path: &Path) -> Result<Self, TextError> {
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
            return Self::from_gguf(&Gguf::open(path)?);
        }
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        if !file.exists() {
            return Err(TextError::NoTokenizer { path: path.to_owned() });
        }
        let beside = |name: &str| {
            let path = file.with_file_name(name);
            if path.exists() { read(&path).map(Some) } else { Ok(None) }
        };
        let template = beside("chat_template.jinja")?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        Self::build(&read(&file)?, beside("tokenizer_config.json")?.as_deref(), template, &file)
    }

    /// Takes the bytes of a `tokenizer.json` and, if there is one, of a `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TextError::BadVocabulary`], [`TextError::BadJson`], [`TextError::Template`].
    pub fn from_bytes(tokenizer: &[u8], config: Option<&[u8]>) -> Result<Self, TextError> {
        Self::build(tokenizer, config, None, Path::new("tokenizer.json"))
    }

    /// Takes the vocabulary and the chat template of a GGUF file.
    ///
    /// # Errors
    /// [`TextError::MissingValue`], [`TextError::UnsupportedVocabulary`], [`TextError::BadVocabulary`],
    /// [`TextError::Template`].
    pub fn from_gguf(file: &Gguf) -> Result<Self, TextError> {
        let Vocabulary { tokenizer, bos, eos, bos_text, eos_text, chat_template } = vocabulary::read(file)?;
        let inner = tokenizers::Tokenizer::from_bytes(tokenizer.to_string())
            .map_err(|source| TextError::BadVocabulary { path: file.path().to_owned(), source })?;
        let chat = chat_template.map(|source| ChatTemplate::new(source, bos_text, eos_text)).transpose()?;
        Ok(Self::new(inner, bos, &eos, chat))
    }

    fn build(
        tokenizer: &[u8],
        config: Option<&[u8]>,
        template: Option<String>,
        path: &Path,
    ) -> Result<Self, TextError> {
        let inner = tokenizers::Tokenizer::from_bytes(tokenizer)
            .map_err(|source| TextError::BadVocabulary { path: path.to_owned(), source })?;
        let config: Config = match config {
            None => Config::default(),
            Some(bytes) => serde_json::from_slice(bytes)
                .map_err(|source| TextError::BadJson { path: path.with_file_name("tokenizer_config.json"), source })?,
        };
        let text = |token: &Option<TokenName>| token.as_ref().map_or("", TokenName::text).to_owned();
        let (bos, eos) = (text(&config.bos_token), text(&config.eos_token));
        let ids = (inner.token_to_id(&bos), inner.token_to_id(&eos));
        let template = template.or_else(|| config.chat_template.and_then(Templates::main));
        let chat = template.map(|source| ChatTemplate::new(source, bos, eos)).transpose()?;
        Ok(Self::new(inner, ids.0, ids.1.as_slice(), chat))
    }

    /// Finds out how tokens become bytes, and which ones end a text.
    fn new(inner: tokenizers::Tokenizer, bos: Option<u32>, eos: &[u32], chat: Option<ChatTemplate>) -> Self {
        let decoder = inner.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or(Value::Null);
        let added = inner.get_added_tokens_decoder();
        let special: HashMap<u32, String> =
            added.iter().filter(|(_, token)| token.special).map(|(id, token)| (*id, token.content.clone())).collect();
        let ends = special.iter().filter(|(_, text)| ENDS.contains(&text.as_str())).map(|(id, _)| *id);
        let mut eos: Vec<u32> = ends.chain(eos.iter().copied()).collect();
        eos.sort_unstable();
        eos.dedup();
        Self { form: form_of(&decoder), special, byte_of: byte_table(), bos, eos, chat, inner }
    }

    /// The ids of a text; with `special`, also those that the model expects around it, such as the one that begins a text.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|source| TextError::Encode { source })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids, without special tokens. Bytes that form no character become U+FFFD; unknown ids become nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut decoder = self.decoder();
        let mut text: String = ids.iter().map(|id| decoder.push(*id)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// Decodes tokens one by one from the beginning of a text.
    #[must_use]
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder { tokenizer: self, held: Vec::new(), started: false, ids: Vec::new(), sent: 0 }
    }

    /// Decodes tokens one by one as the continuation of `ids`, whose own text is not given again.
    #[must_use]
    pub fn decoder_after(&self, ids: &[u32]) -> Decoder<'_> {
        let mut decoder = self.decoder();
        for id in ids {
            decoder.push(*id);
        }
        decoder
    }

    /// The token that begins a text, if the vocabulary says so.
    #[must_use]
    pub const fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a text or a turn, ascending.
    #[must_use]
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// How conversations are written for this model, if its files say so.
    #[must_use]
    pub const fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat.as_ref()
    }

    /// The id of a token by its text.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of a token as the vocabulary writes it.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Ids in the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The bytes that a token adds to a text.
    fn bytes_of(&self, id: u32) -> Vec<u8> {
        if self.special.contains_key(&id) {
            return Vec::new();
        }
        let Some(token) = self.inner.id_to_token(id) else { return Vec::new() };
        match self.form {
            Form::Bytes => {
                let bytes: Option<Vec<u8>> = token.chars().map(|c| self.byte_of.get(&c).copied()).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
            _ => {
                let hex =
                    token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
                match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                    Some(byte) => vec![byte],
                    None => token.replace(SPACE_MARK, " ").into_bytes(),
                }
            }
        }
    }
}

/// Turns tokens into text as they come.
#[derive(Debug)]
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes of a character that is not complete.
    held: Vec<u8>,
    started: bool,
    /// All tokens and the length of the text given, for [`Form::Other`].
    ids: Vec<u32>,
    sent: usize,
}

impl Decoder<'_> {
    /// The text that this token completes, which may be none.
    pub fn push(&mut self, id: u32) -> String {
        if self.tokenizer.form == Form::Other {
            self.ids.push(id);
            return self.library_text(false);
        }
        let bytes = self.tokenizer.bytes_of(id);
        let mut bytes = bytes.as_slice();
        if let (false, [first, rest @ ..]) = (self.started, bytes) {
            self.started = true;
            if *first == b' ' && self.tokenizer.form == (Form::Marks { strip_first: true }) {
                bytes = rest;
            }
        }
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        let mut kept = 0;
        for chunk in self.held.utf8_chunks() {
            text.push_str(chunk.valid());
            kept = chunk.invalid().len();
            // Only the last bytes can still become a character.
            if kept > 0 && std::str::from_utf8(chunk.invalid()).is_err_and(|error| error.error_len().is_some()) {
                text.push(char::REPLACEMENT_CHARACTER);
                kept = 0;
            }
        }
        self.held.drain(..self.held.len() - kept);
        text
    }

    /// The rest: U+FFFD if the last character is not complete.
    pub fn finish(&mut self) -> String {
        if self.tokenizer.form == Form::Other {
            return self.library_text(true);
        }
        let held = std::mem::take(&mut self.held);
        String::from_utf8_lossy(&held).into_owned()
    }

    fn library_text(&mut self, last: bool) -> String {
        let text = self.tokenizer.inner.decode(&self.ids, true).unwrap_or_default();
        match text.get(self.sent..) {
            Some(new) if last || !new.ends_with(char::REPLACEMENT_CHARACTER) => {
                self.sent = text.len();
                new.to_owned()
            }
            _ => String::new(),
        }
    }
}

/// `tokenizer_config.json`, as far as it matters here.
#[derive(Debug, Default, Deserialize)]
struct Config {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    chat_template: Option<Templates>,
}

/// One chat template, or several with names.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Several(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Templates {
    /// The one for plain conversations.
    fn main(self) -> Option<String> {
        match self {
            Self::One(source) => Some(source),
            Self::Several(named) => named.into_iter().find(|named| named.name == "default").map(|named| named.template),
        }
    }
}

/// A token by its text, alone or with attributes.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TokenName {
    Text(String),
    Entry { content: String },
}

impl TokenName {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Entry { content: text } => text,
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    let unreadable = |source| TextError::Unreadable { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(MAX_FILE_LEN + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_LEN {
        return Err(TextError::TooLong { path: path.to_owned(), max: MAX_FILE_LEN });
    }
    Ok(bytes)
}

/// Reads the decoder's own description.
fn form_of(decoder: &Value) -> Form {
    let steps = match decoder.get("decoders").and_then(Value::as_array) {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(decoder),
    };
    let kind = |step: &Value| step.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let has = |name: &str| steps.iter().any(|step| kind(step) == name);
    if has("ByteLevel") {
        return Form::Bytes;
    }
    let replaces_mark = steps.iter().any(|step| {
        kind(step) == "Replace"
            && step.pointer("/pattern/String").and_then(Value::as_str) == Some(SPACE_MARK.to_string().as_str())
    });
    let strips = steps.iter().any(|step| match kind(step).as_str() {
        "Strip" => step.get("start").and_then(Value::as_u64).unwrap_or(0) > 0,
        "Metaspace" => step.get("prepend_scheme").and_then(Value::as_str) != Some("never"),
        _ => false,
    });
    if has("Metaspace") || has("ByteFallback") || replaces_mark {
        return Form::Marks { strip_first: strips };
    }
    Form::Other
}

/// The characters that stand for bytes in byte-level vocabularies: printable ones for themselves, the rest for the
/// characters from U+0100 on, in order.
fn byte_table() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=u8::MAX)
        .filter_map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let stands = if printable { char::from(byte) } else { char::from_u32(next)? };
            next += u32::from(!printable);
            Some((stands, byte))
        })
        .collect()
}
