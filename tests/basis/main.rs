//! Basis files on disk: opening good and bad ones, what becomes of a basis whose file is destroyed, reloading a set, reading
//! residuals and fitting to them, and the commands of `aeonctl` that do all of it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test stops at its first failure")]

mod capture;
mod cli;
mod damage;
mod files;
mod fit;
mod reload;
mod residuals;
mod shipped;
mod toy;
