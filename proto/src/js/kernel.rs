//! Lift and projection on arrays of the caller. Spec: `proto/spec-pca.md`, "Arithmetic".

use alloc::{format, vec, vec::Vec};

use js_sys::Float32Array;
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{fault, floats, is_absent, own_fault, whole};
use crate::{kernel, residual};

const CLASS: &str = "KernelError";

/// `mean + components × basis` for each position: `mean` is `[d]`, `basis` `[k, d]`, `components` `[n, k]`, the result
/// `[n, d]`, all row-major. `positions` is n; it is needed only where k is 0.
///
/// The bits are those of every other implementation of the protocol.
///
/// @throws KernelError if the lengths do not fit together, or for NaN and infinity before or after
#[wasm_bindgen(js_name = lift)]
pub fn lift(
    #[wasm_bindgen(unchecked_param_type = "Float32Array")] mean: &JsValue,
    #[wasm_bindgen(unchecked_param_type = "Float32Array")] basis: &JsValue,
    #[wasm_bindgen(unchecked_param_type = "Float32Array")] components: &JsValue,
    #[wasm_bindgen(unchecked_optional_param_type = "number")] positions: &JsValue,
) -> Result<Float32Array, JsValue> {
    let (mean, basis, components) = (floats(mean, "mean")?, floats(basis, "basis")?, floats(components, "components")?);
    let k = basis.len().checked_div(mean.len()).unwrap_or(0);
    let positions = match is_absent(positions) {
        true => components.len().checked_div(k).unwrap_or(1),
        false => whole(positions, "positions", u32::MAX)? as usize,
    };
    let len = positions.checked_mul(mean.len()).filter(|len| *len <= MAX_VALUES);
    let len = len.ok_or_else(|| too_many(positions, mean.len()))?;
    for (name, values) in [("mean", &mean), ("basis", &basis), ("components", &components)] {
        finite(name, values)?;
    }
    let mut out = vec![0.0; len];
    kernel::lift_batch(&mean, &basis, &components, &mut out).map_err(|error| fault(CLASS, &error))?;
    finite("lifted residual", &out)?;
    Ok(out.as_slice().into())
}

/// The components of `residual − mean` for each position: `residuals` is `[n, d]`, the result `[n, k]`.
///
/// @throws KernelError as `lift`
#[wasm_bindgen(js_name = project)]
pub fn project(
    #[wasm_bindgen(unchecked_param_type = "Float32Array")] mean: &JsValue,
    #[wasm_bindgen(unchecked_param_type = "Float32Array")] basis: &JsValue,
    #[wasm_bindgen(unchecked_param_type = "Float32Array")] residuals: &JsValue,
) -> Result<Float32Array, JsValue> {
    let (mean, basis, residuals) = (floats(mean, "mean")?, floats(basis, "basis")?, floats(residuals, "residuals")?);
    for (name, values) in [("mean", &mean), ("basis", &basis), ("residuals", &residuals)] {
        finite(name, values)?;
    }
    let k = basis.len().checked_div(mean.len()).unwrap_or(0);
    let positions = residuals.len().checked_div(mean.len()).unwrap_or(0);
    let len = positions.checked_mul(k).filter(|len| *len <= MAX_VALUES).ok_or_else(|| too_many(positions, k))?;
    let mut out = vec![0.0; len];
    kernel::project_batch(&mean, &basis, &residuals, &mut out).map_err(|error| fault(CLASS, &error))?;
    finite("components", &out)?;
    Ok(out.as_slice().into())
}

/// Values that one call may give: 1 GiB of them, a quarter of what the module can address.
pub(super) const MAX_VALUES: usize = 1 << 28;

pub(super) fn too_many(positions: usize, width: usize) -> JsValue {
    let message = format!("{positions} positions of {width} values are over the limit of {MAX_VALUES} values");
    own_fault(CLASS, "TooLarge", &message, &format!("{{\"positions\":{positions},\"width\":{width}}}"))
}

fn finite(name: &str, values: &[f32]) -> Result<(), JsValue> {
    residual::check_finite_values(values).map_err(|error| {
        let facts = format!("{{\"of\":\"{name}\",\"index\":{}}}", error.index);
        own_fault(CLASS, "NonFinite", &format!("value {} of the {name} is NaN or infinite", error.index), &facts)
    })
}

/// The result of a kernel on values that were checked.
pub(super) fn run(
    len: Option<usize>,
    positions: usize,
    width: usize,
    compute: impl FnOnce(&mut [f32]) -> Result<(), kernel::ShapeError>,
) -> Result<Vec<f32>, JsValue> {
    let len = len.filter(|len| *len <= MAX_VALUES).ok_or_else(|| too_many(positions, width))?;
    let mut out = vec![0.0; len];
    compute(&mut out).map_err(|error| fault(CLASS, &error))?;
    Ok(out)
}
