//! Levels of the quantiser: Lloyd-Max for the unit Gaussian. Printed as bit patterns so that every language has the same.
//!
//! Made by `proto/vectors/make_lloyd_max.py`. A table holds the positive half in ascending order; the negative half mirrors
//! it. Code `c` of `b` bits means level `c` of all `2^b` in ascending order, so that code 0 is the most negative.

/// Fewest bits of a code.
pub const MIN_BITS: u8 = 3;
/// Most bits of a code.
pub const MAX_BITS: u8 = 8;

#[rustfmt::skip]
const LEVELS_3: [u32; 4] = [
    0x3e7a_f9f8, 0x3f41_8990, 0x3fac_0538, 0x4009_b97a,
];
#[rustfmt::skip]
const LEVELS_4: [u32; 8] = [
    0x3e03_79fd, 0x3ec6_ae44, 0x3f28_215e, 0x3f71_3d39, 0x3fa0_cc2f, 0x3fcf_1c25, 0x4004_6ac7, 0x402e_e2bf,
];
#[rustfmt::skip]
const LEVELS_5: [u32; 16] = [
    0x3d86_f128, 0x3e4a_ce19, 0x3ea9_aa6b, 0x3eee_f33d, 0x3f1a_dcee, 0x3f3f_4449, 0x3f65_0238, 0x3f86_3e88,
    0x3f9b_1c68, 0x3fb1_739a, 0x3fc9_c1d7, 0x3fe4_c40f, 0x4001_d6b0, 0x4014_55d8, 0x402c_3b4e, 0x4050_afd7,
];
#[rustfmt::skip]
const LEVELS_6: [u32; 32] = [
    0x3d08_d868, 0x3dcd_5eb4, 0x3e2b_4fe1, 0x3e70_3254, 0x3e9a_b905, 0x3ebd_95b0, 0x3ee0_be03, 0x3f02_20da,
    0x3f14_18c6, 0x3f26_4fd4, 0x3f38_cfe0, 0x3f4b_a3c5, 0x3f5e_d78e, 0x3f72_78bf, 0x3f83_4b54, 0x3f8d_a168,
    0x3f98_48c0, 0x3fa3_4d3c, 0x3fae_bcf1, 0x3fba_a8cd, 0x3fc7_257a, 0x3fd4_4ca4, 0x3fe2_3ed0, 0x3ff1_262b,
    0x4000_9d78, 0x4009_6557, 0x4013_2282, 0x401e_29dc, 0x402b_0689, 0x403a_b6cb, 0x404f_6352, 0x406f_9f5b,
];
#[rustfmt::skip]
const LEVELS_7: [u32; 64] = [
    0x3c89_db3b, 0x3d4e_cf82, 0x3dac_62b5, 0x3df1_6e5d, 0x3e1b_48bc, 0x3e3d_e96a, 0x3e60_9cab, 0x3e81_b2fe,
    0x3e93_2476, 0x3ea4_a48e, 0x3eb6_351f, 0x3ec7_d810, 0x3ed9_8f55, 0x3eeb_5cf0, 0x3efd_42f5, 0x3f07_a1c6,
    0x3f10_b077, 0x3f19_ceb8, 0x3f22_fdbe, 0x3f2c_3ece, 0x3f35_933c, 0x3f3e_fc6c, 0x3f48_7bd7, 0x3f52_1309,
    0x3f5b_c3a8, 0x3f65_8f70, 0x3f6f_783e, 0x3f79_800a, 0x3f81_d479, 0x3f86_fa9e, 0x3f8c_33aa, 0x3f91_80f0,
    0x3f96_e3db, 0x3f9c_5df6, 0x3fa1_f0ee, 0x3fa7_9e9a, 0x3fad_68fb, 0x3fb3_5248, 0x3fb9_5cf2, 0x3fbf_8bac,
    0x3fc5_e17c, 0x3fcc_61c0, 0x3fd3_1044, 0x3fd9_f152, 0x3fe1_09cc, 0x3fe8_5f48, 0x3fef_f838, 0x3ff7_dc1b,
    0x4000_09dc, 0x4004_54bb, 0x4008_d4e2, 0x400d_91dc, 0x4012_94eb, 0x4017_e9a0, 0x401d_9eb4, 0x4023_c752,
    0x402a_7d1e, 0x4031_e390, 0x403a_2dd4, 0x4043_a9ec, 0x404e_d7fe, 0x405c_a2b3, 0x406f_0934, 0x4086_11f9,
];
#[rustfmt::skip]
const LEVELS_8: [u32; 128] = [
    0x3c0a_61e7, 0x3ccf_948a, 0x3d2c_fe97, 0x3d72_3720, 0x3d9b_bac9, 0x3dbe_5dce, 0x3de1_0579, 0x3e01_d953,
    0x3e13_3316, 0x3e24_9076, 0x3e35_f1e0, 0x3e47_57c5, 0x3e58_c294, 0x3e6a_32bf, 0x3e7b_a8b7, 0x3e86_9278,
    0x3e8f_53ef, 0x3e98_18fb, 0x3ea0_e1d8, 0x3ea9_aec1, 0x3eb2_7ff3, 0x3ebb_55ac, 0x3ec4_302a, 0x3ecd_0fad,
    0x3ed5_f474, 0x3ede_dec0, 0x3ee7_ced5, 0x3ef0_c4f5, 0x3ef9_c165, 0x3f01_6235, 0x3f05_e726, 0x3f0a_6fa9,
    0x3f0e_fbe4, 0x3f13_8bfb, 0x3f18_2016, 0x3f1c_b85c, 0x3f21_54f5, 0x3f25_f60a, 0x3f2a_9bc6, 0x3f2f_4652,
    0x3f33_f5dc, 0x3f38_aa91, 0x3f3d_649f, 0x3f42_2436, 0x3f46_e987, 0x3f4b_b4c4, 0x3f50_8622, 0x3f55_5dd5,
    0x3f5a_3c15, 0x3f5f_211b, 0x3f64_0d20, 0x3f69_0061, 0x3f6d_fb1d, 0x3f72_fd94, 0x3f78_0809, 0x3f7d_1abf,
    0x3f81_1b00, 0x3f83_ad0a, 0x3f86_43a4, 0x3f88_def6, 0x3f8b_7f29, 0x3f8e_2468, 0x3f90_cedf, 0x3f93_7ebe,
    0x3f96_3435, 0x3f98_ef75, 0x3f9b_b0b3, 0x3f9e_7827, 0x3fa1_460a, 0x3fa4_1a97, 0x3fa6_f60e, 0x3fa9_d8b0,
    0x3fac_c2c3, 0x3faf_b48e, 0x3fb2_ae5f, 0x3fb5_b084, 0x3fb8_bb52, 0x3fbb_cf22, 0x3fbe_ec53, 0x3fc2_1346,
    0x3fc5_4464, 0x3fc8_801e, 0x3fcb_c6e7, 0x3fcf_193e, 0x3fd2_77a7, 0x3fd5_e2af, 0x3fd9_5aee, 0x3fdc_e104,
    0x3fe0_759e, 0x3fe4_1975, 0x3fe7_cd50, 0x3feb_9202, 0x3fef_6874, 0x3ff3_519c, 0x3ff7_4e89, 0x3ffb_605e,
    0x3fff_8859, 0x4001_e3ea, 0x4004_1024, 0x4006_49ac, 0x4008_9165, 0x400a_e84c, 0x400d_4f78, 0x400f_c821,
    0x4012_53a2, 0x4014_f37f, 0x4017_a972, 0x401a_776b, 0x401d_5fa3, 0x4020_64a4, 0x4023_895f, 0x4026_d13f,
    0x402a_404a, 0x402d_db43, 0x4031_a7dd, 0x4035_ad07, 0x4039_f345, 0x403e_853d, 0x4043_7082, 0x4048_c6c8,
    0x404e_9fbf, 0x4055_1c3d, 0x405c_6bac, 0x4064_d66f, 0x406e_d39f, 0x407b_3da6, 0x4085_f897, 0x4093_502a,
];

/// The levels of all codes, and where one code ends and the next begins.
#[derive(Debug)]
pub(super) struct Codebook {
    /// `[2^bits]`, ascending; the rest is unused.
    levels: [f32; 256],
    /// `borders[c]` is the least value of code `c + 1`: the mean of two levels, rounded to f32. NaN from the last code on:
    /// nothing is over it.
    borders: [f32; 256],
    bits: u8,
    /// For each cell of a grid the code below the only border that values of the cell can be compared with.
    grid: [u8; GRID],
}

/// Cells of the grid. They are so narrow that none meets two borders, of 8 bits either.
const GRID: usize = 2048;
/// The grid covers values from -8 to 8; outside lie only the first and the last code.
const GRID_REACH: f32 = 8.0;
const GRID_SCALE: f32 = 128.0;
/// How far a value can lie outside the cell that it is rounded into.
const GRID_MARGIN: f32 = 1.0 / 65_536.0;

static BOOKS: [Codebook; 6] = [
    Codebook::new(3, &LEVELS_3),
    Codebook::new(4, &LEVELS_4),
    Codebook::new(5, &LEVELS_5),
    Codebook::new(6, &LEVELS_6),
    Codebook::new(7, &LEVELS_7),
    Codebook::new(8, &LEVELS_8),
];

/// The levels of all codes of 3 to 8 bits, ascending, in units of the gain; `None` for other numbers of bits.
#[must_use]
pub fn levels(bits: u8) -> Option<&'static [f32]> {
    let book = Codebook::of(bits)?;
    book.levels.get(..1 << bits)
}

impl Codebook {
    /// The levels for 3 to 8 bits.
    pub(super) fn of(bits: u8) -> Option<&'static Self> {
        BOOKS.get(usize::from(bits.checked_sub(MIN_BITS)?))
    }

    #[expect(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "runs while compiling")]
    const fn new(bits: u8, half: &[u32]) -> Self {
        let mut book = Self { levels: [0.0; 256], borders: [f32::NAN; 256], bits, grid: [0; GRID] };
        let mut n = 0;
        while n < half.len() {
            let level = f32::from_bits(half[n]);
            book.levels[half.len() + n] = level;
            book.levels[half.len() - 1 - n] = -level;
            n += 1;
        }
        let last = 2 * half.len() - 1;
        n = 0;
        while n < last {
            book.borders[n] = (book.levels[n] + book.levels[n + 1]) * 0.5;
            n += 1;
        }
        let (mut cell, mut code) = (0, 0);
        while cell < GRID {
            let least = cell as f32 / GRID_SCALE - GRID_REACH - GRID_MARGIN;
            while code < last && least >= book.borders[code] {
                code += 1;
            }
            book.grid[cell] = code as u8;
            cell += 1;
        }
        book
    }

    pub(super) const fn bits(&self) -> u8 {
        self.bits
    }

    /// The value that a code stands for, in units of the gain.
    #[inline(always)]
    pub(super) fn level(&self, code: u8) -> f32 {
        self.levels.get(usize::from(code)).copied().unwrap_or_default()
    }

    /// The codes of values, each the number of borders that the value is not below. NaN has code 0.
    #[inline(always)]
    pub(super) fn codes(&self, values: [f32; 8]) -> [u8; 8] {
        // The clamp sends what lies outside to the first and the last cell, which have one code each.
        let cells = values.map(|value| ((value + GRID_REACH) * GRID_SCALE).clamp(0.0, (GRID - 1) as f32) as u16);
        let mut codes = [0; 8];
        for (code, (cell, value)) in codes.iter_mut().zip(cells.into_iter().zip(values)) {
            let low = self.grid.get(usize::from(cell)).copied().unwrap_or_default();
            let border = self.borders.get(usize::from(low)).copied().unwrap_or_default();
            *code = low.wrapping_add(u8::from(value >= border));
        }
        codes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(book: &Codebook, value: f32) -> u8 {
        let codes = book.codes([0.0, 0.0, 0.0, value, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(codes[0], 1 << (book.bits - 1));
        codes[3]
    }

    #[test]
    fn a_code_is_the_number_of_borders_that_a_value_is_not_below() {
        for bits in MIN_BITS..=MAX_BITS {
            let book = Codebook::of(bits).unwrap();
            let count = 1_usize << bits;
            let borders = &book.borders[..count - 1];
            assert!(book.levels[..count].is_sorted() && borders.is_sorted());
            assert!(book.borders[count - 1..].iter().all(|border| border.is_nan()));
            let slow = |value: f32| borders.iter().filter(|border| value >= **border).count() as u8;
            let near = |value: f32| [value.next_down(), value, value.next_up()];
            let grid = (0..=2 * GRID).map(|n| n as f32 / 256.0 - 8.0);
            for value in borders.iter().copied().chain(grid).flat_map(near).chain([-1e30, 1e30, -0.0, 0.0]) {
                assert_eq!(code(book, value), slow(value), "{bits} bits, {value}");
            }
            assert_eq!(code(book, f32::NAN), 0);
            assert_eq!((code(book, f32::NEG_INFINITY), usize::from(code(book, f32::INFINITY))), (0, count - 1));
            for wanted in 0..count {
                assert_eq!(usize::from(code(book, book.level(wanted as u8))), wanted);
                assert_eq!(book.level(wanted as u8), -book.level((count - 1 - wanted) as u8));
            }
        }
        assert_eq!(levels(3).map(<[f32]>::len), Some(8));
        assert!(Codebook::of(2).is_none() && Codebook::of(9).is_none() && Codebook::of(0).is_none());
    }

    #[test]
    fn the_levels_are_those_that_textbooks_print() {
        // Max, "Quantizing for minimum distortion" (1960), table I, 8 and 16 levels.
        let book = Codebook::of(3).unwrap();
        for (code, level) in [0.2451, 0.7560, 1.3439, 2.1520].into_iter().enumerate() {
            assert!((book.level(4 + code as u8) - level).abs() < 6e-4, "{code}");
        }
        let book = Codebook::of(4).unwrap();
        for (code, level) in [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733].into_iter().enumerate() {
            assert!((book.level(8 + code as u8) - level).abs() < 6e-4, "{code}");
        }
    }
}
