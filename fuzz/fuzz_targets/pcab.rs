//! See `aeon_fuzz::pcab`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::pcab(bytes));
