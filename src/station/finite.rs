//! Looking for NaN and infinity with the widest instructions that the processor has: every residual is looked at twice, on
//! its way in and on its way out.

use aeon_proto::residual::{self, NonFinite};
use pulp::{Arch, NullaryFnOnce};

/// Whether any of some little-endian f32 is NaN or infinite: its exponent is all ones.
struct AnyBad<'a>(&'a [[u8; 4]]);

impl NullaryFnOnce for AnyBad<'_> {
    type Output = bool;

    #[inline(always)]
    fn call(self) -> bool {
        const EXPONENT: u32 = 0x7f80_0000;
        // No early exit, and one number to gather in, so that it becomes a few wide instructions for 16 values.
        let bad = |word: &[u8; 4]| u32::from(u32::from_le_bytes(*word) & EXPONENT == EXPONENT);
        self.0.iter().fold(0, |any, word| any | bad(word)) != 0
    }
}

/// As [`residual::check_finite`], faster.
pub(super) fn check_body(body: &[u8]) -> Result<(), NonFinite> {
    let (words, _) = body.as_chunks();
    if Arch::new().dispatch(AnyBad(words)) { residual::check_finite(body) } else { Ok(()) }
}

/// As [`residual::check_finite_values`], faster.
pub(super) fn check_values(values: &[f32]) -> Result<(), NonFinite> {
    match cfg!(target_endian = "little") {
        true => check_body(bytemuck::cast_slice(values)),
        false => residual::check_finite_values(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bad_value_is_named_wherever_it_stands() {
        for len in [0, 1, 15, 16, 17, 100, 3584] {
            let mut values = vec![f32::MAX; len];
            assert_eq!(check_values(&values), Ok(()));
            for index in (0..len).step_by(1 + len / 40) {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    values[index] = bad;
                    assert_eq!(check_values(&values), residual::check_finite_values(&values));
                    assert_eq!(check_values(&values), Err(NonFinite { index }));
                    let bytes: Vec<u8> =
                        [0xff; 1].into_iter().chain(values.iter().flat_map(|v| v.to_le_bytes())).collect();
                    assert_eq!(check_body(&bytes[1..]), Err(NonFinite { index }), "unaligned");
                    values[index] = -0.0;
                }
            }
        }
    }
}
