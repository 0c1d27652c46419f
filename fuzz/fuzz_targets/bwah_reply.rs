//! See `aeon_fuzz::bwah_reply`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::bwah_reply(bytes));
