//! A station holds a contiguous range of a language model's layers and serves them to peers over aeon-flow.
//!
//! The wire formats are in the crate `aeon_proto`; this crate adds the carriers, the request handler, the model backends
//! and the client.

pub mod admin;
pub mod auth_key;
pub mod basis;
pub mod causes;
pub mod client;
pub mod codec;
pub mod config;
pub mod control;
pub mod daemon;
pub mod demo;
pub mod evaluate;
pub mod gguf;
#[cfg(test)]
mod hostile;
pub mod model;
pub mod net;
pub mod replay;
pub mod station;
pub mod systemd;
pub mod telemetry;
pub mod text;
