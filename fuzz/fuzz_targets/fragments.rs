//! See `aeon_fuzz::fragments`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::fragments(bytes));
