//! What operators see of a running node and ask of it: metrics, lists, reload, drain, logs, dashboard, top.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

#[path = "../common/mod.rs"]
mod common;
mod control;
mod docs;
mod logs;
mod metrics;
mod support;
mod top;
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../basis/toy.rs"]
mod toy;
