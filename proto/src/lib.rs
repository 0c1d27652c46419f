//! Byte formats of the aeon-flow protocol.
//!
//! What a station and its peers put on the wire, as plain functions from bytes to values and back: frames, payloads
//! (meta and body), routes, status codes, residual bodies, basis files, and the arithmetic between a residual and its PCA
//! components. The crate does no IO, reads no clock and spawns nothing; it builds with `no_std` and `alloc`. The
//! normative text for all of it is `proto/SPEC.md`.
//!
//! Frame and payload integers are **big-endian**; everything inside a body is **little-endian**.
#![no_std]
#![cfg_attr(not(test), warn(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

pub mod auth;
pub mod bw;
pub mod bwah;
pub mod cursor;
pub mod fragment;
pub mod frame;
pub mod hash;
#[cfg(feature = "js")]
pub mod js;
pub mod json;
pub mod kernel;
pub mod meta;
pub mod methodology;
pub mod payload;
pub mod pcab;
pub mod pcar;
pub mod qres;
pub mod residual;
pub mod route;
pub mod status;
