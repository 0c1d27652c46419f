//! The transformer backend on tiny random models: against a scalar double-precision implementation, cut into requests and
//! layer ranges in every way, and loaded from damaged files.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test stops at its first failure")]

mod bad_files;
mod batch;
mod compute;
mod gguf;
mod naive;
mod tiny;
