//! The client: one station over any carrier, and a mesh of stations as one model.

pub mod address;
pub mod admin;
pub mod capture;
pub mod connection;
pub mod doctor;
pub mod error;
pub mod generate;
pub mod hello;
mod pass;
pub mod pipeline;
pub mod policy;
pub mod recovery;
pub mod replay;
mod rtt;
pub mod sampler;
mod watch;

pub use address::StationAddress;
pub use connection::{Client, ClientOptions, Reply};
pub use error::ClientError;
pub use hello::Hello;
pub use pipeline::{Pipeline, Want, Wire};
