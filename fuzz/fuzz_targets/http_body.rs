//! See `aeon_fuzz::http_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::http_body(bytes));
