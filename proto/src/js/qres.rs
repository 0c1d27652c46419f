//! QRES bodies. Spec: `proto/spec-qres.md`.

use alloc::{format, vec, vec::Vec};

use js_sys::{Float32Array, Object, Uint8Array};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{bytes, fault, floats, is_absent, kernel::MAX_VALUES, member, named_fault, own_fault, set, text, whole};
use crate::{
    qres::{self, Format, Header, Parts, QresBody, Rotation},
    residual,
};

const CLASS: &str = "QresError";

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** How a quantised residual is written; the name in `accept` and `body`. */
export type QresKind = 'f16' | 'i8' | 'q3' | 'q4' | 'q5' | 'q6' | 'q7' | 'q8';
/** What a QRES body says of itself. */
export interface QresHeader {
  kind: QresKind;
  /** Number of layers already applied. */
  boundary: number;
  hiddenDim: number;
  /** Fingerprint of the basis file whose mean was taken off; 0 for none. */
  basisFp: number;
  /** Methodology of that basis; 0 for none. */
  methodology: number;
  /** Seed of the rotation; 0 in `f16` and `i8`. */
  seed: number;
}
/** A QRES body without its numbers. */
export interface Qres extends QresHeader {
  /** Number of positions. */
  seq: number;
  /** One value a position: 1 if it is escaped, else 0. */
  escaped: Uint8Array;
}
/** What is written into a QRES body. */
export interface QresInit {
  kind: QresKind;
  boundary: number;
  hiddenDim: number;
  basisFp?: number;
  methodology?: number;
  seed?: number;
  /** The mean of the boundary, `[hiddenDim]`; needed if `basisFp` is not 0. See `Basis.entry`. */
  mean?: Float32Array;
  /** `[seq, hiddenDim]`, row-major. */
  residuals: Float32Array;
  /** One value a position: not 0 if it must be escaped. Without it, only what the format cannot hold is. */
  escape?: Uint8Array;
}
"#;

/// Writes a QRES body. The bits are those of every other implementation of the protocol.
///
/// @throws RangeError if a number does not fit its field
/// @throws QresError if the kind is unknown, the lengths do not fit together, or for NaN and infinity
#[wasm_bindgen(js_name = encodeQres)]
pub fn encode_qres(#[wasm_bindgen(unchecked_param_type = "QresInit")] body: &JsValue) -> Result<Uint8Array, JsValue> {
    let needed = |key| whole(&member(body, key)?, key, u32::MAX);
    let field = |key| {
        let value = member(body, key)?;
        if is_absent(&value) { Ok(0) } else { whole(&value, key, u32::MAX) }
    };
    let kind = text(&member(body, "kind")?, "kind")?;
    let Some(format) = Format::from_name(&kind) else {
        let message = format!("kind is {kind:?}, it must be one of f16, i8, q3 to q8");
        return Err(own_fault(CLASS, "UnknownKind", &message, "{}"));
    };
    let header = Header {
        boundary: needed("boundary")?,
        hidden_dim: needed("hiddenDim")?,
        basis_fp: field("basisFp")?,
        methodology: field("methodology")?,
        format,
        seed: field("seed")?,
    };
    let residuals = floats(&member(body, "residuals")?, "residuals")?;
    let mean = optional_mean(&member(body, "mean")?)?;
    let escape = member(body, "escape")?;
    let escape = if is_absent(&escape) { Vec::new() } else { bytes(&escape, "escape")? };
    // A rotation of a width that does not fit the residuals would be made in vain.
    let rotation = match header.hidden_dim as usize <= residuals.len() {
        true => rotation(&header),
        false => None,
    };
    if rotation.is_none() && format.is_rotated() {
        let shape = qres::EncodeError::Shape { got: residuals.len(), d: header.hidden_dim as usize };
        return Err(fault(CLASS, &shape));
    }
    let parts = Parts { mean: mean.as_deref(), rotation: rotation.as_ref() };
    let mut out = Vec::new();
    let is_escaped = |position: usize, _: &[f32]| escape.get(position).is_some_and(|escape| *escape != 0);
    qres::encode(&header, &parts, &residuals, is_escaped, &mut out).map_err(|error| fault(CLASS, &error))?;
    Ok(out.as_slice().into())
}

/// Checks the form of a QRES body and tells what it says of itself. `readQres` gives the residuals.
///
/// @throws QresError
#[wasm_bindgen(js_name = decodeQres, unchecked_return_type = "Qres")]
pub fn decode_qres(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] body: &JsValue) -> Result<Object, JsValue> {
    let body = bytes(body, "body")?;
    let body = QresBody::decode(&body).map_err(|error| fault(CLASS, &error))?;
    let header = body.header();
    let escaped: Vec<u8> = (0..body.seq()).map(|position| u8::from(body.is_escaped(position))).collect();
    let object = Object::new();
    set(&object, "kind", &header.format.name().into())?;
    set(&object, "boundary", &header.boundary.into())?;
    set(&object, "hiddenDim", &header.hidden_dim.into())?;
    set(&object, "seq", &(body.seq() as f64).into())?;
    set(&object, "basisFp", &header.basis_fp.into())?;
    set(&object, "methodology", &header.methodology.into())?;
    set(&object, "seed", &header.seed.into())?;
    set(&object, "escaped", &Uint8Array::from(escaped.as_slice()))?;
    Ok(object)
}

/// The residuals of a QRES body, `[seq, hiddenDim]`; `mean` is that of the boundary in the basis that the body names, and
/// left out if it names none.
///
/// @throws QresError, also for NaN and infinity in the body or in what comes out
#[wasm_bindgen(js_name = readQres)]
pub fn read_qres(
    #[wasm_bindgen(unchecked_param_type = "Uint8Array")] body: &JsValue,
    #[wasm_bindgen(unchecked_optional_param_type = "Float32Array")] mean: &JsValue,
) -> Result<Float32Array, JsValue> {
    let body = bytes(body, "body")?;
    let body = QresBody::decode(&body).map_err(|error| fault(CLASS, &error))?;
    body.check_finite().map_err(|error| named_fault(CLASS, "NonFinite", &error))?;
    let (header, mean) = (body.header(), optional_mean(mean)?);
    let width = header.hidden_dim as usize;
    let len = body.seq().checked_mul(width).filter(|len| *len <= MAX_VALUES);
    let Some(len) = len else {
        let message = format!("{} positions of {width} values are over the limit of {MAX_VALUES} values", body.seq());
        return Err(own_fault(CLASS, "TooLarge", &message, "{}"));
    };
    let rotation = rotation(header);
    let parts = Parts { mean: mean.as_deref(), rotation: rotation.as_ref() };
    let mut out = vec![0.0; len];
    body.read(&parts, &mut out).map_err(|error| fault(CLASS, &error))?;
    residual::check_finite_values(&out).map_err(|error| named_fault(CLASS, "NonFinite", &error))?;
    Ok(out.as_slice().into())
}

fn optional_mean(value: &JsValue) -> Result<Option<Vec<f32>>, JsValue> {
    if is_absent(value) { Ok(None) } else { floats(value, "mean").map(Some) }
}

fn rotation(header: &Header) -> Option<Rotation> {
    Rotation::new(header.hidden_dim as usize, header.seed).filter(|_| header.format.is_rotated())
}
