//! Half precision: IEEE 754 binary16, rounded to nearest, ties to even. No branches, so that whole rows are vectorised.

/// The bits of the half nearest to a value. What is 65,520 or more becomes infinity.
#[inline(always)]
pub(super) const fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Under 2^-14 a half is a multiple of 2^-24, which is what adding 0.5 rounds an f32 to.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    // The exponent moves by 127 - 15; half of the last place, less one if the place is even, makes the shift round.
    let normal = magnitude.wrapping_add(0xc800_0fff).wrapping_add(magnitude >> 13 & 1) >> 13;
    let half = if magnitude < 0x3880_0000 {
        small
    } else if magnitude < 0x4780_0000 {
        normal
    } else if magnitude <= 0x7f80_0000 {
        0x7c00
    } else {
        0x7e00
    };
    half as u16 | sign
}

/// The value of a half, exactly.
#[inline(always)]
pub(super) const fn to_f32(half: u16) -> f32 {
    let sign = (half as u32 & 0x8000) << 16;
    let magnitude = (half as u32 & 0x7fff) << 13;
    // Multiplying by 2^112 moves the exponent, and makes normal numbers of subnormal ones.
    let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let wide = if magnitude < 0x0f80_0000 { finite } else { magnitude | 0x7f80_0000 };
    f32::from_bits(wide | sign)
}

/// Whether it is neither NaN nor infinity.
#[inline(always)]
pub(super) const fn is_finite(half: u16) -> bool {
    half & 0x7c00 != 0x7c00
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_that_of_the_half_crate() {
        for half in 0..=u16::MAX {
            let theirs = ::half::f16::from_bits(half);
            assert_eq!(is_finite(half), theirs.is_finite());
            if theirs.is_nan() {
                assert!(to_f32(half).is_nan());
                continue;
            }
            assert_eq!(to_f32(half).to_bits(), theirs.to_f32_const().to_bits(), "{half:04x}");
            assert_eq!(from_f32(to_f32(half)), half);
        }
    }

    #[test]
    fn rounding_is_that_of_the_half_crate() {
        // All borders between halves and their neighbours, and every exponent with a mix of mantissas.
        let borders = (0..0x7c00_u16).flat_map(|half| {
            let (low, high) = (f64::from(to_f32(half)), f64::from(to_f32(half + 1)));
            let middle = if half == 0x7bff { 65_520.0 } else { ((low + high) / 2.0) as f32 };
            [middle.next_down(), middle, middle.next_up()]
        });
        let mixed = (0..1_u64 << 20).map(|n| f32::from_bits((n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32));
        for value in borders.chain(mixed).chain([f32::MAX, f32::INFINITY, f32::from_bits(1), 0.0]) {
            for value in [value, -value] {
                let theirs = ::half::f16::from_f32_const(value);
                if theirs.is_nan() {
                    assert!(!is_finite(from_f32(value)));
                } else {
                    assert_eq!(from_f32(value), theirs.to_bits(), "{value:e}");
                }
            }
        }
    }
}
