//! Carriers: sockets in, [`crate::station::Station::handle`] out. Nothing here knows a model.

pub mod connection;
pub mod listener;
pub mod peer;
pub mod shutdown;
pub mod tcp;
pub mod udp;
pub mod uds;
