//! One position at a time, in each format, and which build of these loops runs.

use alloc::vec::Vec;

#[cfg(all(feature = "std", target_arch = "x86_64"))]
use super::x86;
use super::{I8_BLOCK, codebook::Codebook, half, rotation::Rotation};

/// Work that can be built for several kinds of processor. `run` and all that it calls are inlined into each.
pub(super) trait Job {
    type Output;

    fn run(self) -> Self::Output;
}

/// Which build runs. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    Portable,
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    Avx2(x86::Avx2),
}

impl Path {
    pub(super) fn detect() -> Self {
        #[cfg(all(feature = "std", target_arch = "x86_64"))]
        {
            static BEST: std::sync::OnceLock<Path> = std::sync::OnceLock::new();
            *BEST.get_or_init(|| x86::Avx2::detect().map_or(Self::Portable, Self::Avx2))
        }
        #[cfg(not(all(feature = "std", target_arch = "x86_64")))]
        Self::Portable
    }

    /// All builds that this processor can run.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        let mut all = alloc::vec![Self::Portable];
        all.extend((Self::detect() != Self::Portable).then(Self::detect));
        all
    }

    pub(super) fn run<J: Job>(self, job: J) -> J::Output {
        match self {
            Self::Portable => job.run(),
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Self::Avx2(path) => path.run(job),
        }
    }
}

/// `row - mean`.
#[inline(always)]
pub(super) fn centre(mean: Option<&[f32]>, row: &[f32], centred: &mut Vec<f32>) {
    centred.clear();
    match mean {
        Some(mean) => centred.extend(row.iter().zip(mean).map(|(value, mean)| value - mean)),
        None => centred.extend_from_slice(row),
    }
}

/// Squares summed in the order of a projection: sixteen sums over j mod 16, then a fixed tree.
#[inline(always)]
#[expect(clippy::indexing_slicing, reason = "all places are under 16")]
pub(super) fn sum_of_squares(values: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 16];
    let (sixteens, rest) = values.as_chunks::<16>();
    for sixteen in sixteens {
        sums = core::array::from_fn(|l| sums[l] + sixteen[l] * sixteen[l]);
    }
    for (sum, value) in sums.iter_mut().zip(rest) {
        *sum += value * value;
    }
    let s8: [f32; 8] = core::array::from_fn(|l| sums[l] + sums[l ^ 8]);
    let s4: [f32; 4] = core::array::from_fn(|l| s8[l] + s8[l ^ 4]);
    (s4[0] + s4[2]) + (s4[1] + s4[3])
}

/// Root mean square as a half: the sum divided by d, its root, each rounded to f32, then to f16.
#[inline(always)]
pub(super) fn gain(values: &[f32]) -> u16 {
    half::from_f32(libm::sqrtf(sum_of_squares(values) / values.len() as f32))
}

#[inline(always)]
pub(super) fn fits_halves(row: &[f32]) -> bool {
    row.iter().fold(true, |fits, value| fits & half::is_finite(half::from_f32(*value)))
}

#[inline(always)]
pub(super) fn are_finite_halves(bytes: &[u8]) -> bool {
    bytes.as_chunks().0.iter().fold(true, |fits, bytes| fits & half::is_finite(u16::from_le_bytes(*bytes)))
}

#[inline(always)]
pub(super) fn write_halves(row: &[f32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start.saturating_add(row.len().saturating_mul(2)), 0);
    let bytes = out.get_mut(start..).unwrap_or_default().as_chunks_mut().0;
    for (bytes, value) in bytes.iter_mut().zip(row) {
        *bytes = half::from_f32(*value).to_le_bytes();
    }
}

#[inline(always)]
pub(super) fn read_halves(bytes: &[u8], row: &mut [f32]) {
    for (value, bytes) in row.iter_mut().zip(bytes.as_chunks().0) {
        *value = half::to_f32(u16::from_le_bytes(*bytes));
    }
}

#[inline(always)]
pub(super) fn read_whole(bytes: &[u8], row: &mut [f32]) {
    for (value, bytes) in row.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

/// The scale of a block: its largest magnitude over 127, rounded to f32 and then to f16.
#[inline(always)]
pub(super) fn i8_scale(block: &[f32]) -> u16 {
    // The magnitudes of finite floats have the order of their bits, and whole numbers are vectorised.
    let most = block.iter().fold(0, |most, value| value.abs().to_bits().max(most));
    half::from_f32(f32::from_bits(most) / 127.0)
}

#[inline(always)]
pub(super) fn write_i8(row: &[f32], out: &mut Vec<u8>) {
    for block in row.chunks(I8_BLOCK) {
        out.extend_from_slice(&i8_scale(block).to_le_bytes());
    }
    let start = out.len();
    out.resize(start.saturating_add(row.len()), 0);
    let codes = out.get_mut(start..).unwrap_or_default();
    for (block, codes) in row.chunks(I8_BLOCK).zip(codes.chunks_mut(I8_BLOCK)) {
        let scale = half::to_f32(i8_scale(block));
        if scale == 0.0 {
            continue;
        }
        for (value, code) in block.iter().zip(codes) {
            let scaled = (value / scale).clamp(-127.0, 127.0);
            // Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even, and leaves it in the low bits.
            *code = (scaled + 12_582_912.0).to_bits() as u8;
        }
    }
}

#[inline(always)]
pub(super) fn read_i8(bytes: &[u8], row: &mut [f32]) {
    let scales = row.len().div_ceil(I8_BLOCK).saturating_mul(2);
    let (scales, codes) = bytes.split_at_checked(scales).unwrap_or_default();
    let blocks = row.chunks_mut(I8_BLOCK).zip(codes.chunks(I8_BLOCK));
    for ((row, codes), scale) in blocks.zip(scales.as_chunks().0) {
        let scale = half::to_f32(u16::from_le_bytes(*scale));
        for (value, code) in row.iter_mut().zip(codes) {
            *value = f32::from(i8::from_le_bytes([*code])) * scale;
        }
    }
}

/// `values` is the difference from the mean and is used up; `gain` is [`gain`] of it and finite.
#[inline(always)]
pub(super) fn write_rotated(
    values: &mut [f32],
    gain: u16,
    book: &Codebook,
    rotation: &Rotation,
    scratch: &mut [f32],
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(&gain.to_le_bytes());
    rotation.forward(values, scratch);
    // The rotation multiplied by its block length, a power of two: the product here is exact.
    let mut scale = half::to_f32(gain) * rotation.block() as f32;
    if scale == 0.0 {
        // All values are read as the mean, whatever their codes; these are the codes of 0.
        values.fill(0.0);
        scale = 1.0;
    }
    let bits = usize::from(book.bits());
    let start = out.len();
    let len = values.len().saturating_mul(bits).div_ceil(8);
    // Eight codes are `bits` bytes. They are written as eight bytes of which the next ones overwrite the rest.
    out.resize(start.saturating_add(len).saturating_add(8), 0);
    let mut place = start;
    let (eights, rest) = values.as_chunks::<8>();
    let mut last = [0.0; 8];
    for (last, rest) in last.iter_mut().zip(rest) {
        *last = *rest;
    }
    let mut put = |eight: &[f32; 8], count: usize| {
        let codes = book.codes(eight.map(|value| value / scale));
        let mut word = 0;
        for (n, code) in codes.into_iter().enumerate().take(count) {
            word |= u64::from(code) << bits.wrapping_mul(n);
        }
        if let Some(bytes) = out.get_mut(place..).and_then(|out| out.first_chunk_mut()) {
            *bytes = word.to_le_bytes();
        }
        place = place.wrapping_add(bits);
    };
    for eight in eights {
        put(eight, 8);
    }
    if !rest.is_empty() {
        put(&last, rest.len());
    }
    out.truncate(start.saturating_add(len));
}

#[inline(always)]
pub(super) fn read_rotated(
    bytes: &[u8],
    book: &Codebook,
    rotation: &Rotation,
    mean: Option<&[f32]>,
    scratch: &mut [f32],
    row: &mut [f32],
) {
    let Some((gain, codes)) = bytes.split_first_chunk() else { return };
    let gain = half::to_f32(u16::from_le_bytes(*gain));
    let bits = usize::from(book.bits());
    let mask = (1_u64 << bits).wrapping_sub(1);
    let mut left = codes;
    for row in row.chunks_mut(8) {
        let word = match left.first_chunk::<8>() {
            Some(bytes) => u64::from_le_bytes(*bytes),
            None => left.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
        };
        left = left.get(bits..).unwrap_or_default();
        for (n, value) in row.iter_mut().enumerate() {
            *value = book.level((word >> bits.wrapping_mul(n) & mask) as u8) * gain;
        }
    }
    rotation.backward(row, scratch);
    // A power of two: exact.
    let scale = 1.0 / rotation.block() as f32;
    match mean {
        Some(mean) => row.iter_mut().zip(mean).for_each(|(value, mean)| *value = *value * scale + mean),
        None => row.iter_mut().for_each(|value| *value *= scale),
    }
}

/// Whether the bits after the last code are 0.
pub(super) fn is_padded(codes: &[u8], d: usize, bits: u8) -> bool {
    let used = d.wrapping_mul(usize::from(bits)) % 8;
    used == 0 || codes.last().is_none_or(|last| last >> used == 0)
}
