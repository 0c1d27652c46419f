//! Text for people, token ids for models. The client uses this; it knows no model, station or peer.

pub mod tokenizer;

pub use tokenizer::{Decoder, TextError, Tokenizer};
