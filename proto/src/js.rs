//! What JavaScript sees of the `.bw` codec and the BWAH envelope, by `wasm-bindgen`. Spec: `proto/SPEC.md`, "BWAH".
//!
//! The functions take and return plain objects with the names of the original TypeScript codec, since the Rust signatures
//! have no JavaScript form. Everything is checked on the way in: a number that does not fit its field is a `RangeError`,
//! never cut to its low bits. Bytes that do not decode throw an `Error` whose `name` is `BWAHDecodeError` or
//! `BwDecodeError`, whose `code` is the name of the fault (`BadMagic`, `Truncated`, …) and whose `message` tells all causes.
//!
//! Compiles everywhere; does something on `wasm32-unknown-unknown` only.
#![allow(unsafe_code)] // in what the macros expand to

use alloc::{format, string::String, vec::Vec};
use core::error::Error as StdError;

use js_sys::{Error, Float32Array, Object, RangeError, Reflect, Uint8Array};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use crate::{bw, bwah};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** A reply of the replay cache; a miss has no payloads. */
export interface AmplituhedronReply { hit: boolean; tailResidual?: Float32Array; kvSlab?: Float32Array; }
/** What is put into the replay cache. */
export interface AmplituhedronCapture {
  prefixHash: bigint; prefixLen: number; layerLo: number; layerHi: number;
  tailResidual: Float32Array; kvSlab: Float32Array;
}
/** The content of a .bw blob. */
export interface DecodedBw { bytes: Uint8Array; mime: string; }
"#;

#[wasm_bindgen]
extern "C" {
    /// An object of the TypeScript type `AmplituhedronReply`.
    #[wasm_bindgen(typescript_type = "AmplituhedronReply")]
    #[derive(Debug)]
    pub type Reply;

    #[wasm_bindgen(method, getter)]
    fn hit(this: &Reply) -> bool;
    #[wasm_bindgen(method, getter, js_name = tailResidual)]
    fn tail(this: &Reply) -> Option<Vec<f32>>;
    #[wasm_bindgen(method, getter, js_name = kvSlab)]
    fn kv(this: &Reply) -> Option<Vec<f32>>;

    /// An object of the TypeScript type `AmplituhedronCapture`.
    #[wasm_bindgen(typescript_type = "AmplituhedronCapture")]
    #[derive(Debug)]
    pub type Capture;

    #[wasm_bindgen(method, getter, js_name = prefixHash)]
    fn prefix_hash(this: &Capture) -> JsValue;
    #[wasm_bindgen(method, getter, js_name = prefixLen)]
    fn prefix_len(this: &Capture) -> JsValue;
    #[wasm_bindgen(method, getter, js_name = layerLo)]
    fn layer_lo(this: &Capture) -> JsValue;
    #[wasm_bindgen(method, getter, js_name = layerHi)]
    fn layer_hi(this: &Capture) -> JsValue;
    #[wasm_bindgen(method, getter, js_name = tailResidual)]
    fn capture_tail(this: &Capture) -> Vec<f32>;
    #[wasm_bindgen(method, getter, js_name = kvSlab)]
    fn capture_kv(this: &Capture) -> Vec<f32>;

    /// An object of the TypeScript type `DecodedBw`.
    #[wasm_bindgen(typescript_type = "DecodedBw")]
    #[derive(Debug)]
    pub type DecodedBw;
}

/// [`bwah::try_encode_amplituhedron_reply`]; a miss gives an empty array.
///
/// # Errors
/// A `RangeError` if a payload is too long.
#[wasm_bindgen(js_name = encodeAmplituhedronReply)]
pub fn encode_amplituhedron_reply(reply: &Reply) -> Result<Vec<u8>, JsValue> {
    let (tail, kv) = (reply.tail(), reply.kv());
    bwah::try_encode_amplituhedron_reply(reply.hit(), tail.as_deref(), kv.as_deref()).map_err(|error| range(&error))
}

/// [`bwah::decode_amplituhedron_reply`].
///
/// # Errors
/// An `Error` named `BWAHDecodeError`.
#[wasm_bindgen(js_name = decodeAmplituhedronReply)]
pub fn decode_amplituhedron_reply(blob: &[u8]) -> Result<Reply, JsValue> {
    let reply = bwah::decode_amplituhedron_reply(blob).map_err(|error| bwah_error(&error))?;
    let object = Object::new();
    set(&object, "hit", &reply.hit.into())?;
    if let Some(tail) = reply.tail {
        set(&object, "tailResidual", &Float32Array::from(tail.as_slice()))?;
    }
    if let Some(kv) = reply.kv {
        set(&object, "kvSlab", &Float32Array::from(kv.as_slice()))?;
    }
    Ok(JsValue::from(object).into())
}

/// [`bwah::try_encode_amplituhedron_capture`].
///
/// # Errors
/// A `RangeError` if a number does not fit its field or a payload is too long.
#[wasm_bindgen(js_name = encodeAmplituhedronCapture)]
pub fn encode_amplituhedron_capture(capture: &Capture) -> Result<Vec<u8>, JsValue> {
    let prefix_hash = u64::try_from(capture.prefix_hash())
        .map_err(|_| RangeError::new("prefixHash must be a bigint from 0 to 0xffffffffffffffff"))?;
    let prefix_len = whole(&capture.prefix_len(), "prefixLen", u32::MAX)?;
    let layer_lo = layer(&capture.layer_lo(), "layerLo")?;
    let layer_hi = layer(&capture.layer_hi(), "layerHi")?;
    let (tail, kv) = (capture.capture_tail(), capture.capture_kv());
    bwah::try_encode_amplituhedron_capture(prefix_hash, prefix_len, layer_lo, layer_hi, &tail, &kv)
        .map_err(|error| range(&error))
}

/// [`bwah::decode_amplituhedron_capture`].
///
/// # Errors
/// An `Error` named `BWAHDecodeError`.
#[wasm_bindgen(js_name = decodeAmplituhedronCapture)]
pub fn decode_amplituhedron_capture(blob: &[u8]) -> Result<Capture, JsValue> {
    let capture = bwah::decode_amplituhedron_capture(blob).map_err(|error| bwah_error(&error))?;
    let object = Object::new();
    set(&object, "prefixHash", &capture.prefix_hash.into())?;
    set(&object, "prefixLen", &capture.prefix_len.into())?;
    set(&object, "layerLo", &capture.layer_lo.into())?;
    set(&object, "layerHi", &capture.layer_hi.into())?;
    set(&object, "tailResidual", &Float32Array::from(capture.tail.as_slice()))?;
    set(&object, "kvSlab", &Float32Array::from(capture.kv.as_slice()))?;
    Ok(JsValue::from(object).into())
}

/// [`bw::try_encode`].
///
/// # Errors
/// A `RangeError` if content or type are too long.
#[wasm_bindgen(js_name = encodeBw)]
pub fn encode_bw(bytes: &[u8], mime: &str) -> Result<Vec<u8>, JsValue> {
    bw::try_encode(bytes, mime).map_err(|error| range(&error))
}

/// [`bw::decode`].
///
/// # Errors
/// An `Error` named `BwDecodeError`.
#[wasm_bindgen(js_name = decodeBw)]
pub fn decode_bw(blob: &[u8]) -> Result<DecodedBw, JsValue> {
    let decoded = bw::decode(blob).map_err(|error| decode_error("BwDecodeError", error.name(), &error))?;
    let object = Object::new();
    set(&object, "bytes", &Uint8Array::from(decoded.bytes.as_slice()))?;
    set(&object, "mime", &decoded.mime.into())?;
    Ok(JsValue::from(object).into())
}

fn set(object: &Object, key: &str, value: &JsValue) -> Result<(), JsValue> {
    Reflect::set(object, &key.into(), value).map(|_| ())
}

/// A number without a fraction from 0 to `max`.
fn whole(value: &JsValue, name: &str, max: u32) -> Result<u32, JsValue> {
    let number = value.as_f64().unwrap_or(f64::NAN);
    let cut = number as u32;
    if f64::from(cut) == number && cut <= max {
        return Ok(cut);
    }
    Err(RangeError::new(&format!("{name} must be a whole number from 0 to {max}")).into())
}

fn layer(value: &JsValue, name: &str) -> Result<u16, JsValue> {
    whole(value, name, u16::MAX.into()).map(|layer| layer as u16)
}

fn range(error: &dyn StdError) -> JsValue {
    RangeError::new(&chain(error)).into()
}

fn bwah_error(error: &bwah::BwahError) -> JsValue {
    decode_error("BWAHDecodeError", error.name(), error)
}

fn decode_error(name: &str, code: &str, error: &dyn StdError) -> JsValue {
    let thrown = Error::new(&chain(error));
    thrown.set_name(name);
    // Setting a property of an object made here cannot fail, and the error is worth throwing without it.
    let _ = Reflect::set(&thrown, &"code".into(), &code.into());
    thrown.into()
}

/// An error and its causes in one line.
fn chain(error: &dyn StdError) -> String {
    let mut text = format!("{error}");
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
