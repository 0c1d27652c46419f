//! The `.bw` codec and the BWAH envelope, under the names of the original TypeScript codec. Spec: `proto/spec-bw.md`.

use js_sys::{Float32Array, Object, Uint8Array};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{big, bytes, fault, floats, is_absent, member, range, set, text, whole, whole_u16, wrong_type};
use crate::{bw, bwah};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** A reply of the replay cache; a miss has no payloads. */
export interface AmplituhedronReply { hit: boolean; tailResidual?: Float32Array; kvSlab?: Float32Array; }
/** What is put into the replay cache. */
export interface AmplituhedronCapture {
  /** XXH64 of the prefix; see `prefixHash`. */
  prefixHash: bigint;
  prefixLen: number; layerLo: number; layerHi: number;
  tailResidual: Float32Array; kvSlab: Float32Array;
}
/** The content of a .bw blob. */
export interface DecodedBw { bytes: Uint8Array; mime: string; }
"#;

/// Encodes a reply of the replay cache; a miss is an empty array.
///
/// @throws RangeError if a payload is too long
#[wasm_bindgen(js_name = encodeAmplituhedronReply)]
pub fn encode_amplituhedron_reply(
    #[wasm_bindgen(unchecked_param_type = "AmplituhedronReply")] reply: &JsValue,
) -> Result<Uint8Array, JsValue> {
    let hit = member(reply, "hit")?;
    let hit = hit.as_bool().ok_or_else(|| wrong_type("hit", "a boolean", &hit))?;
    let payload = |key| {
        let value = member(reply, key)?;
        if is_absent(&value) { Ok::<_, JsValue>(None) } else { floats(&value, key).map(Some) }
    };
    let (tail, kv) = (payload("tailResidual")?, payload("kvSlab")?);
    let blob =
        bwah::try_encode_amplituhedron_reply(hit, tail.as_deref(), kv.as_deref()).map_err(|error| range(&error))?;
    Ok(blob.as_slice().into())
}

/// Decodes a reply of the replay cache; an empty array is a miss.
///
/// @throws BWAHDecodeError
#[wasm_bindgen(js_name = decodeAmplituhedronReply, unchecked_return_type = "AmplituhedronReply")]
pub fn decode_amplituhedron_reply(
    #[wasm_bindgen(unchecked_param_type = "Uint8Array")] blob: &JsValue,
) -> Result<Object, JsValue> {
    let reply = bwah::decode_amplituhedron_reply(&bytes(blob, "blob")?).map_err(|error| bwah_error(&error))?;
    let object = Object::new();
    set(&object, "hit", &reply.hit.into())?;
    if let Some(tail) = reply.tail {
        set(&object, "tailResidual", &Float32Array::from(tail.as_slice()))?;
    }
    if let Some(kv) = reply.kv {
        set(&object, "kvSlab", &Float32Array::from(kv.as_slice()))?;
    }
    Ok(object)
}

/// Encodes what is to be put into the replay cache.
///
/// @throws RangeError if a number does not fit its field or a payload is too long
#[wasm_bindgen(js_name = encodeAmplituhedronCapture)]
pub fn encode_amplituhedron_capture(
    #[wasm_bindgen(unchecked_param_type = "AmplituhedronCapture")] capture: &JsValue,
) -> Result<Uint8Array, JsValue> {
    let prefix_hash = big(&member(capture, "prefixHash")?, "prefixHash")?;
    let prefix_len = whole(&member(capture, "prefixLen")?, "prefixLen", u32::MAX)?;
    let layer_lo = whole_u16(&member(capture, "layerLo")?, "layerLo")?;
    let layer_hi = whole_u16(&member(capture, "layerHi")?, "layerHi")?;
    let tail = floats(&member(capture, "tailResidual")?, "tailResidual")?;
    let kv = floats(&member(capture, "kvSlab")?, "kvSlab")?;
    let blob = bwah::try_encode_amplituhedron_capture(prefix_hash, prefix_len, layer_lo, layer_hi, &tail, &kv)
        .map_err(|error| range(&error))?;
    Ok(blob.as_slice().into())
}

/// Decodes what is to be put into the replay cache.
///
/// @throws BWAHDecodeError
#[wasm_bindgen(js_name = decodeAmplituhedronCapture, unchecked_return_type = "AmplituhedronCapture")]
pub fn decode_amplituhedron_capture(
    #[wasm_bindgen(unchecked_param_type = "Uint8Array")] blob: &JsValue,
) -> Result<Object, JsValue> {
    let capture = bwah::decode_amplituhedron_capture(&bytes(blob, "blob")?).map_err(|error| bwah_error(&error))?;
    let object = Object::new();
    set(&object, "prefixHash", &capture.prefix_hash.into())?;
    set(&object, "prefixLen", &capture.prefix_len.into())?;
    set(&object, "layerLo", &capture.layer_lo.into())?;
    set(&object, "layerHi", &capture.layer_hi.into())?;
    set(&object, "tailResidual", &Float32Array::from(capture.tail.as_slice()))?;
    set(&object, "kvSlab", &Float32Array::from(capture.kv.as_slice()))?;
    Ok(object)
}

/// Encodes bytes of a media type as a .bw blob.
///
/// @throws RangeError if content or type are too long
#[wasm_bindgen(js_name = encodeBw)]
pub fn encode_bw(
    #[wasm_bindgen(unchecked_param_type = "Uint8Array")] content: &JsValue,
    #[wasm_bindgen(unchecked_param_type = "string")] mime: &JsValue,
) -> Result<Uint8Array, JsValue> {
    let blob = bw::try_encode(&bytes(content, "content")?, &text(mime, "mime")?).map_err(|error| range(&error))?;
    Ok(blob.as_slice().into())
}

/// Decodes a .bw blob and checks its fingerprint.
///
/// @throws BwDecodeError
#[wasm_bindgen(js_name = decodeBw, unchecked_return_type = "DecodedBw")]
pub fn decode_bw(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] blob: &JsValue) -> Result<Object, JsValue> {
    let blob = bytes(blob, "blob")?;
    let decoded = bw::decode(&blob).map_err(|error| fault("BwDecodeError", &error))?;
    let object = Object::new();
    set(&object, "bytes", &Uint8Array::from(decoded.bytes.as_slice()))?;
    set(&object, "mime", &decoded.mime.into())?;
    Ok(object)
}

fn bwah_error(error: &bwah::BwahError) -> JsValue {
    fault("BWAHDecodeError", error)
}
