//! The hashes of the protocol. They tell honest mistakes apart; none protects against a forger.

use alloc::{format, string::String, vec::Vec};

use wasm_bindgen::prelude::{JsValue, wasm_bindgen};
use xxhash_rust::xxh64::xxh64;

use super::{bytes, words};
use crate::{bw, hash, residual};

/// FNV-1a 32: the fingerprint of a basis file, `basis_fp`.
#[wasm_bindgen(js_name = fnv1a32)]
pub fn fnv1a32(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] data: &JsValue) -> Result<u32, JsValue> {
    Ok(hash::fnv1a32(&bytes(data, "data")?))
}

/// XXH64 with seed 0.
#[wasm_bindgen(js_name = xxh64)]
pub fn xxh64_of(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] data: &JsValue) -> Result<u64, JsValue> {
    Ok(xxh64(&bytes(data, "data")?, 0))
}

/// The low 48 bits of XXH64, as the 12 hex digits that a meta carries.
#[wasm_bindgen(js_name = fp48)]
pub fn fp48(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] data: &JsValue) -> Result<String, JsValue> {
    Ok(format!("{:012x}", bw::fp48(&bytes(data, "data")?)))
}

/// The `prefixHash` of a prompt: XXH64 of its token ids as little-endian u32.
#[wasm_bindgen(js_name = prefixHash)]
pub fn prefix_hash(#[wasm_bindgen(unchecked_param_type = "Uint32Array")] ids: &JsValue) -> Result<u64, JsValue> {
    let mut data = Vec::new();
    residual::encode_u32s(&words(ids, "ids")?, &mut data);
    Ok(xxh64(&data, 0))
}
