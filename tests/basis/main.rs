//! Basis files on disk: opening good and bad ones, what becomes of a basis whose file is destroyed, and reloading a set.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test stops at its first failure")]

mod damage;
mod files;
mod reload;
mod toy;
