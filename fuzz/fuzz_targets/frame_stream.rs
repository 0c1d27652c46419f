//! See `aeon_fuzz::frame_stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aeon_fuzz::frame_stream(bytes));
