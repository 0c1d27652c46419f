//! What JavaScript sees of this crate, by `wasm-bindgen`: the package in `proto/js`. Spec: `proto/SPEC.md`.
//!
//! The functions take and return plain objects and typed arrays, which JavaScript's collector frees; only [`pcab::Basis`] and
//! the four state machines of [`fragment`] live in the memory of the module. Everything is checked on the way in, since
//! JavaScript checks nothing: a value of the wrong type is a `TypeError` and a number that does not fit its field a
//! `RangeError`, never cut to its low bits. What the formats refuse throws the class of its format (`BWAHDecodeError`,
//! `PcarError`, …; they are written in `proto/js/src/errors.js`), whose `code` is the name of the variant in Rust, whose
//! `details` are its fields, and whose `message` tells all causes.
//!
//! Compiles everywhere; does something on `wasm32-unknown-unknown` only.
#![allow(unsafe_code)] // in what the macros expand to

pub mod bwah;
pub mod fragment;
pub mod frame;
pub mod hash;
pub mod kernel;
pub mod methodology;
pub mod pcab;
pub mod pcar;
pub mod qres;

use alloc::{format, string::String, vec::Vec};
use core::error::Error as StdError;

use js_sys::{Array, Float32Array, JSON, Object, RangeError, Reflect, TypeError, Uint8Array, Uint32Array};
use serde::Serialize;
use wasm_bindgen::{
    JsCast,
    prelude::{JsValue, wasm_bindgen},
};

#[wasm_bindgen(raw_module = "./errors.js")]
extern "C" {
    /// Makes an error of the class of this name; `facts` is the error as serde writes it.
    #[wasm_bindgen(js_name = makeError)]
    fn make_error(class: &str, message: &str, facts: &str) -> JsValue;
    /// What a value is, for the message of a `TypeError`.
    fn describe(value: &JsValue) -> String;
}

/// An error of this crate as the JavaScript class of its format.
fn fault<E: StdError + Serialize>(class: &str, error: &E) -> JsValue {
    make_error(class, &chain(error), &serde_json::to_string(error).unwrap_or_default())
}

/// An error that is a plain struct in Rust and so has no variant to name it.
fn named_fault<E: StdError + Serialize>(class: &str, code: &str, error: &E) -> JsValue {
    let facts = serde_json::to_string(error).unwrap_or_default();
    make_error(class, &chain(error), &format!("{{\"{code}\":{facts}}}"))
}

/// An error that only JavaScript callers can cause; `facts` is a JSON object.
fn own_fault(class: &str, code: &str, message: &str, facts: &str) -> JsValue {
    make_error(class, message, &format!("{{\"{code}\":{facts}}}"))
}

fn range(error: &dyn StdError) -> JsValue {
    RangeError::new(&chain(error)).into()
}

/// An error and its causes in one line.
fn chain(error: &dyn StdError) -> String {
    let mut text = format!("{error}");
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = format!("{cause}");
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

fn wrong_type(name: &str, expected: &str, got: &JsValue) -> JsValue {
    TypeError::new(&format!("{name} must be {expected}, got {}", describe(got))).into()
}

fn bytes(value: &JsValue, name: &str) -> Result<Vec<u8>, JsValue> {
    match value.dyn_ref::<Uint8Array>() {
        Some(array) => Ok(array.to_vec()),
        None => Err(wrong_type(name, "a Uint8Array", value)),
    }
}

fn floats(value: &JsValue, name: &str) -> Result<Vec<f32>, JsValue> {
    match value.dyn_ref::<Float32Array>() {
        Some(array) => Ok(array.to_vec()),
        None => Err(wrong_type(name, "a Float32Array", value)),
    }
}

fn words(value: &JsValue, name: &str) -> Result<Vec<u32>, JsValue> {
    match value.dyn_ref::<Uint32Array>() {
        Some(array) => Ok(array.to_vec()),
        None => Err(wrong_type(name, "a Uint32Array", value)),
    }
}

fn text(value: &JsValue, name: &str) -> Result<String, JsValue> {
    value.as_string().ok_or_else(|| wrong_type(name, "a string", value))
}

/// A number without a fraction from 0 to `max`.
fn whole(value: &JsValue, name: &str, max: u32) -> Result<u32, JsValue> {
    let Some(number) = value.as_f64() else {
        return Err(wrong_type(name, &format!("a whole number from 0 to {max}"), value));
    };
    let cut = number as u32;
    if f64::from(cut) == number && cut <= max {
        return Ok(cut);
    }
    Err(RangeError::new(&format!("{name} must be a whole number from 0 to {max}, got {number}")).into())
}

fn whole_u16(value: &JsValue, name: &str) -> Result<u16, JsValue> {
    whole(value, name, u16::MAX.into()).map(|number| u16::try_from(number).unwrap_or(u16::MAX))
}

fn whole_u8(value: &JsValue, name: &str) -> Result<u8, JsValue> {
    whole(value, name, u8::MAX.into()).map(|number| u8::try_from(number).unwrap_or(u8::MAX))
}

/// A bigint that fits u64.
fn big(value: &JsValue, name: &str) -> Result<u64, JsValue> {
    if !value.is_bigint() {
        return Err(wrong_type(name, "a bigint", value));
    }
    let expected = || RangeError::new(&format!("{name} must be a bigint from 0 to 0xffffffffffffffff"));
    u64::try_from(value.clone()).map_err(|_| expected().into())
}

/// A member of an object that a caller gave.
fn member(object: &JsValue, key: &str) -> Result<JsValue, JsValue> {
    if !object.is_object() {
        return Err(wrong_type("the argument", "an object", object));
    }
    Reflect::get(object, &key.into())
}

fn is_absent(value: &JsValue) -> bool {
    value.is_undefined() || value.is_null()
}

fn set(object: &Object, key: &str, value: &JsValue) -> Result<(), JsValue> {
    Reflect::set(object, &key.into(), value).map(|_| ())
}

/// Reads JSON that this crate has already checked.
fn json_value(text: &str) -> Result<JsValue, JsValue> {
    if text.is_empty() { Ok(Object::new().into()) } else { JSON::parse(text) }
}

fn array_of_bytes(items: impl IntoIterator<Item = Vec<u8>>) -> Array {
    items.into_iter().map(|item| JsValue::from(Uint8Array::from(item.as_slice()))).collect()
}
