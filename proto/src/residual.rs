//! Plain bodies: packed little-endian f32 (residuals, logits) or u32 (token ids). Spec: `proto/SPEC.md`, "Bodies".
//!
//! A body starts wherever the meta ends, so it has no alignment. Reading borrows where the bytes happen to be aligned on
//! a little-endian machine and copies otherwise; the values are the same.

use alloc::{borrow::Cow, vec::Vec};

/// A body whose length is no whole number of 4-byte values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
#[error("body of {len} bytes is no multiple of 4")]
pub struct LengthError {
    /// Bytes of the body.
    pub len: usize,
}

/// A NaN or infinity where only finite numbers are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
#[error("value {index} is NaN or infinite")]
pub struct NonFinite {
    /// Which value, counted from 0.
    pub index: usize,
}

/// Reads a body as f32 values, bit patterns unchanged.
///
/// # Errors
/// [`LengthError`] if the length is no multiple of 4.
pub fn decode_f32s(body: &[u8]) -> Result<Cow<'_, [f32]>, LengthError> {
    decode(body, f32::from_le_bytes)
}

/// Reads a body as u32 values.
///
/// # Errors
/// [`LengthError`] if the length is no multiple of 4.
pub fn decode_u32s(body: &[u8]) -> Result<Cow<'_, [u32]>, LengthError> {
    decode(body, u32::from_le_bytes)
}

/// `read` is no function pointer, so that the loop becomes a plain copy.
fn decode<T: bytemuck::Pod>(body: &[u8], read: impl Fn([u8; 4]) -> T) -> Result<Cow<'_, [T]>, LengthError> {
    if !body.len().is_multiple_of(4) {
        return Err(LengthError { len: body.len() });
    }
    if cfg!(target_endian = "little")
        && let Ok(values) = bytemuck::try_cast_slice(body)
    {
        return Ok(Cow::Borrowed(values));
    }
    let (words, _) = body.as_chunks::<4>();
    Ok(Cow::Owned(words.iter().map(|word| read(*word)).collect()))
}

/// Appends f32 values to `out`, 4 bytes each.
pub fn encode_f32s(values: &[f32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        out.extend_from_slice(bytemuck::cast_slice(values));
    } else {
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
}

/// Appends u32 values to `out`, 4 bytes each.
pub fn encode_u32s(values: &[u32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        out.extend_from_slice(bytemuck::cast_slice(values));
    } else {
        out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
}

/// Checks that a packed f32 body holds no NaN and no infinity, without copying it.
///
/// Bytes after the last whole value are not looked at.
///
/// # Errors
/// [`NonFinite`] with the index of the first bad value.
pub fn check_finite(body: &[u8]) -> Result<(), NonFinite> {
    // An exponent of all ones is NaN or infinity. The first pass has no early exit, so that it vectorises.
    const EXPONENT: u32 = 0x7f80_0000;
    let (words, _) = body.as_chunks::<4>();
    let bad = |word: &[u8; 4]| u32::from_le_bytes(*word) & EXPONENT == EXPONENT;
    if !words.iter().fold(false, |any, word| any | bad(word)) {
        return Ok(());
    }
    words.iter().position(bad).map_or(Ok(()), |index| Err(NonFinite { index }))
}

/// Checks that no value is NaN or infinite.
///
/// # Errors
/// [`NonFinite`] with the index of the first bad value.
pub fn check_finite_values(values: &[f32]) -> Result<(), NonFinite> {
    if values.iter().fold(true, |all, value| all & value.is_finite()) {
        return Ok(());
    }
    values.iter().position(|value| !value.is_finite()).map_or(Ok(()), |index| Err(NonFinite { index }))
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn unaligned_and_aligned_bodies_read_the_same_bits() {
        let patterns = [0x7fc0_1234_u32, 0x8000_0000, 1, 0x7f80_0000, 0x3f80_0000];
        for offset in 0..4 {
            let mut bytes = vec![0xa5; offset];
            encode_u32s(&patterns, &mut bytes);
            let floats = decode_f32s(&bytes[offset..]).unwrap();
            let bits: Vec<u32> = floats.iter().map(|value| value.to_bits()).collect();
            assert_eq!(bits, patterns);
            assert_eq!(decode_u32s(&bytes[offset..]).unwrap(), &patterns[..]);
            let mut again = Vec::new();
            encode_f32s(&floats, &mut again);
            assert_eq!(again, bytes[offset..]);
        }
    }

    #[test]
    fn lengths_that_are_no_multiple_of_four_are_refused() {
        for len in 0..9 {
            let result = decode_f32s(&[0; 9][..len]).map(|values| values.len());
            let expected = if len % 4 == 0 { Ok(len / 4) } else { Err(LengthError { len }) };
            assert_eq!(result, expected);
        }
    }

    #[test]
    fn the_first_bad_value_is_named() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0, f32::MAX, -0.0, f32::MIN_POSITIVE / 2.0, 0.5];
            let mut body = Vec::new();
            encode_f32s(&values, &mut body);
            assert_eq!(check_finite(&body), Ok(()));
            assert_eq!(check_finite_values(&values), Ok(()));
            values[3] = bad;
            body.clear();
            encode_f32s(&values, &mut body);
            assert_eq!(check_finite(&body), Err(NonFinite { index: 3 }));
            assert_eq!(check_finite_values(&values), Err(NonFinite { index: 3 }));
        }
    }
}
