//! Text for people, token ids for models. The client uses this; it knows no model, station or peer.

pub mod chat;
pub mod tokenizer;
mod vocabulary;

pub use chat::{ChatTemplate, Message};
pub use tokenizer::{Decoder, TextError, Tokenizer};
