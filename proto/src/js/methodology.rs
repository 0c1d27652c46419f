//! Methodology specs and their ids. Spec: `proto/spec-pca.md`, "Methodology".

use alloc::string::String;

use js_sys::{JSON, Object};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{fault, json_value, set, wrong_type};
use crate::methodology::MethodologySpec;

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** A methodology spec that was checked. */
export interface Methodology {
  /** The id on the wire: FNV-1a 32 of the canonical text. */
  id: number;
  /** The spec as canonical JSON (RFC 8785). */
  canonical: string;
  /** The spec itself. */
  spec: { model: string; hidden_dim: number; k_rule: { [rule: string]: unknown }; [key: string]: unknown };
  /** Components by the rule, unless it needs variances or is of a later version. */
  k?: number;
}
"#;

/// Reads a methodology spec, given as JSON text or as an object.
///
/// @throws MethodologyError
#[wasm_bindgen(js_name = parseMethodology, unchecked_return_type = "Methodology")]
pub fn parse_methodology(
    #[wasm_bindgen(unchecked_param_type = "string | object")] spec: &JsValue,
) -> Result<Object, JsValue> {
    let text = match spec.as_string() {
        Some(text) => text,
        None if !spec.is_object() => return Err(wrong_type("spec", "JSON text or an object", spec)),
        None => String::from(JSON::stringify(spec)?),
    };
    let spec = MethodologySpec::parse(&text).map_err(|error| fault("MethodologyError", &error))?;
    let object = Object::new();
    set(&object, "id", &spec.id().into())?;
    set(&object, "canonical", &spec.canonical().into())?;
    set(&object, "spec", &json_value(spec.canonical())?)?;
    if let Ok(k) = spec.k_rule().k(spec.hidden_dim()) {
        set(&object, "k", &k.into())?;
    }
    Ok(object)
}
