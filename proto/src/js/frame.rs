//! Frames and payloads. Spec: `proto/SPEC.md`, "Frame header" and "Payload".

use alloc::{string::String, vec::Vec};

use js_sys::{Array, JSON, Object, Uint8Array};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{bytes, fault, is_absent, json_value, member, set, text, whole, whole_u8, whole_u16, wrong_type};
use crate::{
    frame::{Flags, Frame, PREFIX_LEN},
    json,
    meta::{self, RequestMeta},
    payload::{FrameWriter, Payload},
    route::Route,
    status::Status,
};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** A JSON object: the meta of a payload. Numbers that may need 64 bits travel as strings. */
export type Meta = { [key: string]: unknown };
/** A frame as it is on the wire. */
export interface Frame {
  /** The route opcode, 0 to 0xffff; see `Route`. */
  streamId: number;
  /** The request id, 0 to 0xffffffff; the response echoes it. */
  sequence: number;
  /** The flag byte; see `Flags`. */
  flags: number;
  /** Meta and body; see `decodePayload`. */
  payload: Uint8Array;
}
/** A frame to be written: with a payload, or with the meta and body that make one. */
export type FrameInit =
  | { streamId: number; sequence: number; flags?: number; payload: Uint8Array; meta?: undefined; body?: undefined }
  | {
      streamId: number; sequence: number; flags?: number; meta?: Meta | string | null; body?: Uint8Array | null;
      payload?: undefined;
    };
/** A payload in its parts. */
export interface Payload {
  /** The meta, parsed. */
  meta: Meta;
  /** The meta as it came; empty stands for `{}`. */
  metaText: string;
  body: Uint8Array;
}
"#;

/// Encodes a frame. Without a payload, one is made from `meta` (an object, or JSON text that is kept verbatim) and `body`;
/// an absent or empty meta object takes no bytes.
///
/// @throws RangeError if a number does not fit its field, the payload 24 bits or the meta 16 bits of length
/// @throws PayloadError if the meta is no JSON object by the rules of the protocol
#[wasm_bindgen(js_name = encodeFrame)]
pub fn encode_frame(
    #[wasm_bindgen(unchecked_param_type = "FrameInit")] frame: &JsValue,
) -> Result<Uint8Array, JsValue> {
    let mut out = Vec::new();
    write(frame, &mut out)?;
    Ok(out.as_slice().into())
}

/// Encodes a frame with its length as u32 in front, as Unix sockets and TCP want it.
///
/// @throws as `encodeFrame`
#[wasm_bindgen(js_name = encodePrefixedFrame)]
pub fn encode_prefixed_frame(
    #[wasm_bindgen(unchecked_param_type = "FrameInit")] frame: &JsValue,
) -> Result<Uint8Array, JsValue> {
    let mut out = Vec::from([0; PREFIX_LEN]);
    write(frame, &mut out)?;
    let len = u32::try_from(out.len().saturating_sub(PREFIX_LEN)).unwrap_or(u32::MAX);
    if let Some(prefix) = out.first_chunk_mut::<PREFIX_LEN>() {
        *prefix = len.to_be_bytes();
    }
    Ok(out.as_slice().into())
}

/// Encodes frames one after another.
///
/// @throws as `encodeFrame`
#[wasm_bindgen(js_name = encodeFrames)]
pub fn encode_frames(
    #[wasm_bindgen(unchecked_param_type = "FrameInit[]")] frames: &JsValue,
) -> Result<Uint8Array, JsValue> {
    if !Array::is_array(frames) {
        return Err(wrong_type("frames", "an array", frames));
    }
    let mut out = Vec::new();
    for frame in Array::from(frames).iter() {
        write(&frame, &mut out)?;
    }
    Ok(out.as_slice().into())
}

/// Decodes bytes that are exactly one frame, as a datagram must be.
///
/// @throws FrameError
#[wasm_bindgen(js_name = decodeFrame, unchecked_return_type = "Frame")]
pub fn decode_frame(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] data: &JsValue) -> Result<Object, JsValue> {
    let data = bytes(data, "data")?;
    object_of(&Frame::decode_exact(&data).map_err(|error| fault("FrameError", &error))?)
}

/// Decodes the frame at the start of the bytes and says how long it is; what follows is not looked at.
///
/// @throws FrameError
#[wasm_bindgen(js_name = decodeFirstFrame, unchecked_return_type = "Frame & { bytesRead: number }")]
pub fn decode_first_frame(
    #[wasm_bindgen(unchecked_param_type = "Uint8Array")] data: &JsValue,
) -> Result<Object, JsValue> {
    let data = bytes(data, "data")?;
    let frame = Frame::decode(&data).map_err(|error| fault("FrameError", &error))?;
    let object = object_of(&frame)?;
    set(&object, "bytesRead", &(frame.encoded_len() as f64).into())?;
    Ok(object)
}

/// Decodes frames that stand one after another up to the end of the bytes.
///
/// @throws FrameError
#[wasm_bindgen(js_name = decodeFrames, unchecked_return_type = "Frame[]")]
pub fn decode_frames(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] data: &JsValue) -> Result<Array, JsValue> {
    let data = bytes(data, "data")?;
    let frames = Frame::decode_batch(&data).map_err(|error| fault("FrameError", &error))?;
    let objects = Array::new();
    for frame in frames {
        objects.push(&JsValue::from(object_of(&frame)?));
    }
    Ok(objects)
}

/// Writes a payload: the meta as in `encodeFrame`, then the body.
///
/// @throws as `encodeFrame`
#[wasm_bindgen(js_name = encodePayload)]
pub fn encode_payload(
    #[wasm_bindgen(unchecked_param_type = "Meta | string | null | undefined")] meta: &JsValue,
    #[wasm_bindgen(unchecked_param_type = "Uint8Array | null | undefined")] body: &JsValue,
) -> Result<Uint8Array, JsValue> {
    let mut out = Vec::new();
    write_payload(Route(0), 0, Flags::NONE, meta, body, &mut out)?;
    Ok(out.get(crate::frame::HEADER_LEN..).unwrap_or_default().into())
}

/// Splits a payload into meta and body, and reads the meta: one JSON object without a key that stands twice, at most 32
/// levels deep.
///
/// @throws PayloadError
#[wasm_bindgen(js_name = decodePayload, unchecked_return_type = "Payload")]
pub fn decode_payload(
    #[wasm_bindgen(unchecked_param_type = "Uint8Array")] payload: &JsValue,
) -> Result<Object, JsValue> {
    let payload = bytes(payload, "payload")?;
    let parts = Payload::decode(&payload).map_err(|error| fault("PayloadError", &error))?;
    json::Object::parse(parts.meta).map_err(|error| fault("PayloadError", &error))?;
    let object = Object::new();
    set(&object, "meta", &json_value(parts.meta)?)?;
    set(&object, "metaText", &parts.meta.into())?;
    set(&object, "body", &Uint8Array::from(parts.body))?;
    Ok(object)
}

/// Reads the meta of a request as a station does: every known key must hold a value of its type.
///
/// @throws PayloadError; its code is `Field` for a known key with a wrong value
#[wasm_bindgen(js_name = parseRequestMeta, unchecked_return_type = "Meta")]
pub fn parse_request_meta(
    #[wasm_bindgen(unchecked_param_type = "string")] meta_text: &JsValue,
) -> Result<JsValue, JsValue> {
    let meta_text = text(meta_text, "metaText")?;
    RequestMeta::parse(&meta_text).map_err(|error| match error {
        meta::Error::Json(error) => fault("PayloadError", &error),
        error @ meta::Error::Field { .. } => fault("PayloadError", &error),
    })?;
    json_value(&meta_text)
}

/// Reads a fingerprint or methodology id: `0x` and 1 to 8 hex digits. `undefined` if the text is none.
#[wasm_bindgen(js_name = parseFingerprint)]
pub fn parse_fingerprint(fingerprint: &str) -> Option<u32> {
    meta::parse_fingerprint(fingerprint)
}

/// The name of a route opcode in the specification, if it has one.
///
/// @throws RangeError if it is no opcode
#[wasm_bindgen(js_name = routeName)]
pub fn route_name(
    #[wasm_bindgen(unchecked_param_type = "number")] opcode: &JsValue,
) -> Result<Option<String>, JsValue> {
    Ok(Route(whole_u16(opcode, "opcode")?).name().map(String::from))
}

/// What a status code means, in a few words.
///
/// @throws RangeError if it is no status code
#[wasm_bindgen(js_name = statusDescription)]
pub fn status_description(
    #[wasm_bindgen(unchecked_param_type = "number")] status: &JsValue,
) -> Result<String, JsValue> {
    Ok(Status(whole_u16(status, "status")?).description().into())
}

fn object_of(frame: &Frame<'_>) -> Result<Object, JsValue> {
    let object = Object::new();
    set(&object, "streamId", &frame.stream_id.into())?;
    set(&object, "sequence", &frame.sequence.into())?;
    set(&object, "flags", &frame.flags.0.into())?;
    set(&object, "payload", &Uint8Array::from(frame.payload))?;
    Ok(object)
}

fn write(frame: &JsValue, out: &mut Vec<u8>) -> Result<(), JsValue> {
    let stream_id = whole_u16(&member(frame, "streamId")?, "streamId")?;
    let sequence = whole(&member(frame, "sequence")?, "sequence", u32::MAX)?;
    let flags = member(frame, "flags")?;
    let flags = if flags.is_undefined() { Flags::NONE } else { Flags(whole_u8(&flags, "flags")?) };
    let (payload, meta, body) = (member(frame, "payload")?, member(frame, "meta")?, member(frame, "body")?);
    if payload.is_undefined() {
        return write_payload(Route(stream_id), sequence, flags, &meta, &body, out);
    }
    for (name, value) in [("meta", &meta), ("body", &body)] {
        if !is_absent(value) {
            return Err(wrong_type(name, "absent beside a payload, which holds both", value));
        }
    }
    let payload = bytes(&payload, "payload")?;
    Frame { stream_id, sequence, flags, payload: &payload }.encode(out).map_err(|error| super::range(&error))
}

fn write_payload(
    route: Route,
    sequence: u32,
    flags: Flags,
    meta: &JsValue,
    body: &JsValue,
    out: &mut Vec<u8>,
) -> Result<(), JsValue> {
    let meta = match meta.as_string() {
        Some(text) => text,
        None if is_absent(meta) => String::new(),
        None if !meta.is_object() => return Err(wrong_type("meta", "an object or JSON text", meta)),
        None => {
            let json = JSON::stringify(meta)?;
            let text = json.as_string().ok_or_else(|| wrong_type("meta", "an object or JSON text", meta))?;
            if text == "{}" { String::new() } else { text }
        }
    };
    json::Object::parse(&meta).map_err(|error| fault("PayloadError", &error))?;
    let body = if is_absent(body) { Vec::new() } else { bytes(body, "body")? };
    let mut writer = FrameWriter::new(out, route.0, sequence, flags);
    writer.meta_text(&meta);
    writer.body().extend_from_slice(&body);
    writer.finish().map(|_| ()).map_err(|error| super::range(&error))
}
