//! What a node does when systemd runs it: takes the sockets that were opened for it, and says how it is.
//!
//! Without systemd nothing of this happens: there are no sockets to take, and what would be said is said to nobody. Only
//! `daemon` and the programs use it. A node starts no other programs, so what systemd wrote into its environment reaches
//! nobody else.

pub mod notify;
pub mod sockets;
