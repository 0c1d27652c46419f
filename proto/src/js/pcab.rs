//! Basis files. Spec: `proto/spec-pca.md`, "PCAB".

use alloc::{
    format,
    string::{String, ToString as _},
    vec::Vec,
};

use js_sys::{Array, Float32Array, Object, Uint8Array, Uint32Array};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{bytes, fault, floats, is_absent, json_value, kernel::run, named_fault, own_fault, pcar, set, whole};
use crate::{
    hash::fnv1a32,
    kernel,
    pcab::{Entry, Layout, Pcab},
    pcar::{Header, PcarBody},
    residual,
};

const CLASS: &str = "PcabError";

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** What a basis file has for one boundary. */
export interface BasisEntry {
  /** Number of layers already applied to the residuals that it is for. */
  boundary: number;
  /** Components; 0 if there is only a mean. */
  k: number;
  /** `[hiddenDim]` */
  mean: Float32Array;
  /** `[k, hiddenDim]`, row-major, one row a component. */
  basis: Float32Array;
  /** The variance along each component, then the total: `[k + 1]`. */
  variance: Float32Array;
  /** The share of the variance that the components cover, 0 to 1. */
  explained: number;
}
"#;

/// A basis file that was opened and verified. It lives in the memory of the module: call `free()` (or declare it with
/// `using`) when it is not needed any more; what is forgotten is freed when JavaScript collects the object.
#[wasm_bindgen]
#[derive(Debug)]
pub struct Basis {
    bytes: Vec<u8>,
    layout: Layout,
    basis_fp: u32,
}

#[wasm_bindgen]
impl Basis {
    /// Opens a basis file from its bytes and verifies every one of them. The bytes are copied.
    ///
    /// @throws PcabError
    pub fn open(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] file: &JsValue) -> Result<Self, JsValue> {
        let bytes = bytes(file, "file")?;
        let pcab = Pcab::open(&bytes).map_err(|error| fault(CLASS, &error))?;
        pcab.verify().map_err(|error| fault(CLASS, &error))?;
        let (layout, basis_fp) = (pcab.layout(), fnv1a32(&bytes));
        Ok(Self { bytes, layout, basis_fp })
    }

    /// Values of a residual.
    #[wasm_bindgen(getter, js_name = hiddenDim)]
    #[must_use]
    pub fn hidden_dim(&self) -> u32 {
        self.pcab().hidden_dim()
    }

    /// Id of the methodology spec by which the file was made.
    #[wasm_bindgen(getter)]
    #[must_use]
    pub fn methodology(&self) -> u32 {
        self.pcab().methodology()
    }

    /// The fingerprint of the file: FNV-1a 32 of all its bytes.
    #[wasm_bindgen(getter, js_name = basisFp)]
    #[must_use]
    pub fn basis_fp(&self) -> u32 {
        self.basis_fp
    }

    /// The boundaries that the file has, in increasing order.
    #[wasm_bindgen(getter)]
    #[must_use]
    pub fn boundaries(&self) -> Uint32Array {
        let boundaries: Vec<u32> = self.pcab().entries().map(|entry| entry.boundary()).collect();
        boundaries.as_slice().into()
    }

    /// The metadata, parsed.
    #[wasm_bindgen(getter, unchecked_return_type = "Meta")]
    pub fn metadata(&self) -> Result<JsValue, JsValue> {
        json_value(&self.metadata_text())
    }

    /// The metadata as it stands in the file; empty stands for `{}`.
    #[wasm_bindgen(getter, js_name = metadataText)]
    #[must_use]
    pub fn metadata_text(&self) -> String {
        String::from_utf8_lossy(self.pcab().metadata_bytes()).into_owned()
    }

    /// All entries, in increasing order of the boundary; copies.
    #[wasm_bindgen(unchecked_return_type = "BasisEntry[]")]
    pub fn entries(&self) -> Result<Array, JsValue> {
        let entries = Array::new();
        for entry in self.pcab().entries() {
            entries.push(&JsValue::from(object_of(&entry)?));
        }
        Ok(entries)
    }

    /// The entry for a boundary; a copy. `undefined` if the file has none.
    #[wasm_bindgen(unchecked_return_type = "BasisEntry | undefined")]
    pub fn entry(
        &self,
        #[wasm_bindgen(unchecked_param_type = "number")] boundary: &JsValue,
    ) -> Result<JsValue, JsValue> {
        let boundary = whole(boundary, "boundary", u32::MAX)?;
        match self.pcab().at_boundary(boundary) {
            Some(entry) => object_of(&entry).map(JsValue::from),
            None => Ok(JsValue::UNDEFINED),
        }
    }

    /// Number of components for a boundary; 0 if the file has none.
    #[wasm_bindgen(js_name = componentsAt)]
    pub fn components_at(
        &self,
        #[wasm_bindgen(unchecked_param_type = "number")] boundary: &JsValue,
    ) -> Result<u32, JsValue> {
        let boundary = whole(boundary, "boundary", u32::MAX)?;
        Ok(self.pcab().at_boundary(boundary).map_or(0, |entry| entry.k()))
    }

    /// Lifts a PCAR body to residuals `[positions, hiddenDim]`, after the checks of a receiver in their order.
    ///
    /// @throws PcarError: what `decodePcar` throws, then `UnknownBasis`, `MethodologyMismatch`, `HiddenDim`,
    ///   `BoundaryNotInBasis`, `TooManyComponents`, `NonFinite`, `LiftedNonFinite`
    #[wasm_bindgen(js_name = liftPcar)]
    pub fn lift_pcar(
        &self,
        #[wasm_bindgen(unchecked_param_type = "Uint8Array")] body: &JsValue,
    ) -> Result<Float32Array, JsValue> {
        let body = bytes(body, "body")?;
        let body = PcarBody::decode(&body).map_err(|error| fault(pcar::CLASS, &error))?;
        let refuse = |code: &str, message: &str, expected: u32, got: u32| {
            let facts = format!("{{\"expected\":{expected},\"got\":{got}}}");
            Err(own_fault(pcar::CLASS, code, message, &facts))
        };
        let pcab = self.pcab();
        let (expected, got) = (self.basis_fp, body.basis_fp());
        if got != expected {
            let message = format!("pcar for basis 0x{got:08x}, this one is 0x{expected:08x}");
            return refuse("UnknownBasis", &message, expected, got);
        }
        let (expected, got) = (pcab.methodology(), body.methodology());
        if got != expected {
            let message = format!("pcar of methodology 0x{got:08x}, the basis is of 0x{expected:08x}");
            return refuse("MethodologyMismatch", &message, expected, got);
        }
        let (expected, got) = (pcab.hidden_dim(), body.hidden_dim());
        if got != expected {
            let message = format!("pcar of width {got}, the basis has {expected}");
            return refuse("HiddenDim", &message, expected, got);
        }
        let entry = self.entry_with_components(body.boundary(), pcar::CLASS)?;
        let (expected, got) = (entry.k(), body.k());
        if got > expected {
            let message = format!("{got} components, the basis has {expected} at boundary {}", entry.boundary());
            return refuse("TooManyComponents", &message, expected, got);
        }
        body.check_finite().map_err(|error| named_fault(pcar::CLASS, "NonFinite", &error))?;
        let mut components = Vec::new();
        body.read_components(&mut components);
        let lifted = self.lift_values(&entry, body.k(), &components)?;
        residual::check_finite_values(&lifted).map_err(|error| {
            let message = format!("value {} of the lifted residual is NaN or infinite", error.index);
            own_fault(pcar::CLASS, "LiftedNonFinite", &message, &format!("{{\"index\":{}}}", error.index))
        })?;
        Ok(lifted.as_slice().into())
    }

    /// Writes residuals `[positions, hiddenDim]` as a PCAR body of `k` components a position (all that the basis has, if
    /// `k` is absent).
    ///
    /// @throws PcarError: `BoundaryNotInBasis`, `TooManyComponents`, `Ragged`, `NonFinite`
    #[wasm_bindgen(js_name = compress)]
    pub fn compress(
        &self,
        #[wasm_bindgen(unchecked_param_type = "number")] boundary: &JsValue,
        #[wasm_bindgen(unchecked_param_type = "Float32Array")] residuals: &JsValue,
        #[wasm_bindgen(unchecked_optional_param_type = "number")] k: &JsValue,
    ) -> Result<Uint8Array, JsValue> {
        let boundary = whole(boundary, "boundary", u32::MAX)?;
        let residuals = floats(residuals, "residuals")?;
        let entry = self.entry_with_components(boundary, pcar::CLASS)?;
        let k = if is_absent(k) { entry.k() } else { whole(k, "k", u32::MAX)? };
        if k > entry.k() {
            let message = format!("{k} components, the basis has {} at boundary {boundary}", entry.k());
            let facts = format!("{{\"expected\":{},\"got\":{k}}}", entry.k());
            return Err(own_fault(pcar::CLASS, "TooManyComponents", &message, &facts));
        }
        let d = self.pcab().hidden_dim() as usize;
        let positions = residuals.len().checked_div(d).unwrap_or(0);
        residual::check_finite_values(&residuals).map_err(|error| named_fault(pcar::CLASS, "NonFinite", &error))?;
        let mean = entry.mean();
        let basis = entry.basis();
        let rows = basis.get(..d.saturating_mul(k as usize)).unwrap_or_default();
        let len = positions.checked_mul(k as usize);
        let components = run(len, positions, k as usize, |out| kernel::project_batch(&mean, rows, &residuals, out))?;
        residual::check_finite_values(&components).map_err(|error| named_fault(pcar::CLASS, "NonFinite", &error))?;
        let header = Header {
            boundary,
            k,
            hidden_dim: self.pcab().hidden_dim(),
            methodology: self.pcab().methodology(),
            basis_fp: self.basis_fp,
        };
        let mut body = Vec::new();
        crate::pcar::encode(&header, &components, &mut body).map_err(|error| fault(pcar::CLASS, &error))?;
        Ok(body.as_slice().into())
    }

    /// `name`, `methodology` and `basisFp` in one line, for logs.
    #[wasm_bindgen(js_name = toString)]
    #[must_use]
    pub fn describe(&self) -> String {
        let (d, methodology) = (self.pcab().hidden_dim(), self.pcab().methodology());
        let boundaries: Vec<String> = self.pcab().entries().map(|entry| entry.boundary().to_string()).collect();
        let (fp, boundaries) = (self.basis_fp, boundaries.join(","));
        format!("basis 0x{fp:08x} of width {d}, methodology 0x{methodology:08x}, boundaries {boundaries}")
    }
}

impl Basis {
    const fn pcab(&self) -> Pcab<'_> {
        Pcab::with_layout(self.bytes.as_slice(), self.layout)
    }

    fn entry_with_components(&self, boundary: u32, class: &str) -> Result<Entry<'_>, JsValue> {
        self.pcab().at_boundary(boundary).filter(|entry| entry.k() > 0).ok_or_else(|| {
            let message = format!("the basis has no components for boundary {boundary}");
            own_fault(class, "BoundaryNotInBasis", &message, &format!("{{\"boundary\":{boundary}}}"))
        })
    }

    fn lift_values(&self, entry: &Entry<'_>, k: u32, components: &[f32]) -> Result<Vec<f32>, JsValue> {
        let d = self.pcab().hidden_dim() as usize;
        let mean = entry.mean();
        let basis = entry.basis();
        let rows = basis.get(..d.saturating_mul(k as usize)).unwrap_or_default();
        let positions = components.len().checked_div(k as usize).unwrap_or(0);
        run(positions.checked_mul(d), positions, d, |out| kernel::lift_batch(&mean, rows, components, out))
    }
}

fn object_of(entry: &Entry<'_>) -> Result<Object, JsValue> {
    let object = Object::new();
    set(&object, "boundary", &entry.boundary().into())?;
    set(&object, "k", &entry.k().into())?;
    set(&object, "mean", &Float32Array::from(&*entry.mean()))?;
    set(&object, "basis", &Float32Array::from(&*entry.basis()))?;
    set(&object, "variance", &Float32Array::from(&*entry.variance()))?;
    set(&object, "explained", &entry.explained().into())?;
    Ok(object)
}
