//! Stations and links that fail: lossy and broken networks, damaged datagrams, stations that die in the middle of a text.
//! Whatever happens, a text that comes out is the one of an undisturbed run, or an error says which station it was.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

#[path = "../common/mod.rs"]
mod common;

mod command;
mod damage;
mod death;
mod emulator;
mod links;
mod process;
