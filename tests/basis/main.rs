//! Basis files on disk: opening good and bad ones, what becomes of a basis whose file is destroyed, reloading a set, reading
//! residuals and fitting to them.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test stops at its first failure")]

mod damage;
mod files;
mod fit;
mod reload;
mod residuals;
mod toy;
