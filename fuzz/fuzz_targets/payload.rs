//! See `aeon_fuzz::payload`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::payload(bytes));
