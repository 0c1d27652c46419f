//! PCAR bodies. Spec: `proto/spec-pca.md`, "PCAR".

use alloc::vec::Vec;

use js_sys::{Float32Array, Object, Uint8Array};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{bytes, fault, floats, member, set, whole};
use crate::pcar::{self, Header, PcarBody};

pub(super) const CLASS: &str = "PcarError";

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** What is written into a PCAR body: one block for each position. */
export interface PcarInit {
  /** Number of layers already applied. */
  boundary: number;
  /** Components of each position. */
  k: number;
  hiddenDim: number;
  /** Id of the methodology spec; see `parseMethodology`. */
  methodology: number;
  /** Fingerprint of the basis file; see `Basis.basisFp`. */
  basisFp: number;
  /** `[positions, k]`, row-major. */
  components: Float32Array;
}
/** A PCAR body. */
export interface Pcar extends PcarInit {
  /** Number of positions. */
  seq: number;
}
"#;

/// Writes a PCAR body. The bit patterns of the components are kept, NaN and infinity too; receivers refuse those.
///
/// @throws RangeError if a number does not fit its field
/// @throws PcarError if the components are no whole number of positions
#[wasm_bindgen(js_name = encodePcar)]
pub fn encode_pcar(#[wasm_bindgen(unchecked_param_type = "PcarInit")] body: &JsValue) -> Result<Uint8Array, JsValue> {
    let field = |key| whole(&member(body, key)?, key, u32::MAX);
    let header = Header {
        boundary: field("boundary")?,
        k: field("k")?,
        hidden_dim: field("hiddenDim")?,
        methodology: field("methodology")?,
        basis_fp: field("basisFp")?,
    };
    let components = floats(&member(body, "components")?, "components")?;
    let mut out = Vec::new();
    pcar::encode(&header, &components, &mut out).map_err(|error| fault(CLASS, &error))?;
    Ok(out.as_slice().into())
}

/// Reads a PCAR body: one block or several with the same header, and nothing behind the last.
///
/// @throws PcarError
#[wasm_bindgen(js_name = decodePcar, unchecked_return_type = "Pcar")]
pub fn decode_pcar(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] body: &JsValue) -> Result<Object, JsValue> {
    let body = bytes(body, "body")?;
    let body = PcarBody::decode(&body).map_err(|error| fault(CLASS, &error))?;
    let mut components = Vec::new();
    body.read_components(&mut components);
    let object = Object::new();
    set(&object, "boundary", &body.boundary().into())?;
    set(&object, "k", &body.k().into())?;
    set(&object, "hiddenDim", &body.hidden_dim().into())?;
    set(&object, "methodology", &body.methodology().into())?;
    set(&object, "basisFp", &body.basis_fp().into())?;
    set(&object, "seq", &(body.seq() as f64).into())?;
    set(&object, "components", &Float32Array::from(components.as_slice()))?;
    Ok(object)
}
