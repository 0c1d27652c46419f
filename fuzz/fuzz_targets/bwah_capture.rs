//! See `aeon_fuzz::bwah_capture`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::bwah_capture(bytes));
