//! Hostile peers: what they do costs others neither their answers nor the node its memory.
//!
//! [`faults`] holds one small test for each way in which peers once hurt a node. [`attacks`] runs real nodes under a limit
//! of address space (RLIMIT_AS), lets peers misbehave in every way known, and asks beside them as a well-behaved client
//! would: every one of its requests must be answered rightly. Its times are printed, not judged. [`soak`] counts what a node
//! holds under everything at once.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod attacks;
#[path = "../common/mod.rs"]
mod common;
mod counted;
mod faults;
mod guarded;
mod soak;
