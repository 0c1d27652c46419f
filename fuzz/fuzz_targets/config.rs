//! See `aeon_fuzz::config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::config(bytes));
