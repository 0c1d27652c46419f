//! See `aeon_fuzz::pcar`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::pcar(bytes));
