//! See `aeon_fuzz::bw`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::bw(bytes));
