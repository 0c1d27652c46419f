//! See `aeon_fuzz::methodology`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::methodology(bytes));
