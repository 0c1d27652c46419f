//! See `aeon_fuzz::qres`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::qres(bytes));
