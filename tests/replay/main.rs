//! The prefix replay cache end to end: frame routes, HTTP, and the coordinator's rule over every carrier.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod faults;
mod http;
mod mesh;
mod routes;
mod support;
