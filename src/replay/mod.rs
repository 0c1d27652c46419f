//! The prefix replay cache: what a station computed for a prompt, kept for the next one that begins a session with it.
//!
//! [`key`] says what a prefix is called on the wire, [`cache`] holds the entries, [`coordinator`] is the rule by which a
//! client uses the caches of several stations. Nothing here knows frames, sessions or sockets; the station
//! (`station::replay`) and the HTTP listener (`admin`) call it. Spec: `proto/SPEC.md`, "Prefix replay".

pub mod cache;
pub mod coordinator;
pub mod key;
