//! Packing and unpacking words with AVX2 and AVX-512, chosen at run time. Same bytes as [`super::reference`].
//!
//! Each step moves a whole number of words, and its slices are cut into arrays of exactly the bytes that it touches, so
//! that no load or store reaches past its own array. Words that remain go through the reference.
//!
//! ```text
//! AVX2, 4 words     | a6 A2 | b6 B2 | c6 C2 | d6 D2 |   8-byte words of 6 low and 2 high bytes
//! shuffle in halves | a6 b6 A2 B2   | c6 d6 C2 D2   |
//! permute 4-byte    | a6 b6 c6 d6           | A2 B2 C2 D2 |   24 bytes packed, 8 bytes parity
//! ```
//!
//! AVX-512 VBMI does the same for 8 words with one byte permutation: 48 bytes packed, 16 bytes parity.
#![allow(unsafe_code)] // vector loads and stores take pointers

use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm_storel_epi64, _mm_storeu_si128,
    _mm_unpackhi_epi64, _mm_unpacklo_epi64, _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256,
    _mm256_permutevar8x32_epi32, _mm256_set_m128i, _mm256_setr_epi8, _mm256_setr_epi32, _mm256_shuffle_epi8,
    _mm256_storeu_si256, _mm512_extracti32x4_epi32, _mm512_inserti32x4, _mm512_loadu_si512, _mm512_mask_storeu_epi8,
    _mm512_maskz_loadu_epi8, _mm512_permutexvar_epi8, _mm512_storeu_si512,
};
use std::arch::is_x86_feature_detected;

use super::{
    layout::{Packed, Parity, Word},
    reference,
};

/// The widest path that this CPU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// 4 words a step.
    Avx2,
    /// 8 words a step.
    Vbmi,
}

impl Path {
    /// What this CPU has, if any.
    pub(super) fn detect() -> Option<Self> {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vbmi")
        {
            Some(Self::Vbmi)
        } else if is_x86_feature_detected!("avx2") {
            Some(Self::Avx2)
        } else {
            None
        }
    }

    /// [`reference::pack`] on this path, which must be one that the CPU has.
    pub(super) fn pack(self, words: &[Word], parity: &mut [Parity], packed: &mut [Packed]) {
        debug_assert!(self.is_there());
        match self {
            // SAFETY: a `Path` comes from `detect`, or in tests from a check of the same features.
            Self::Avx2 => unsafe { pack_avx2(words, parity, packed) },
            // SAFETY: as above.
            Self::Vbmi => unsafe { pack_vbmi(words, parity, packed) },
        }
    }

    /// [`reference::unpack`] on this path, which must be one that the CPU has.
    pub(super) fn unpack(self, parity: &[Parity], packed: &[Packed], words: &mut [Word]) {
        debug_assert!(self.is_there());
        match self {
            // SAFETY: as in `pack`.
            Self::Avx2 => unsafe { unpack_avx2(parity, packed, words) },
            // SAFETY: as in `pack`.
            Self::Vbmi => unsafe { unpack_vbmi(parity, packed, words) },
        }
    }

    /// Whether the CPU has this path or a wider one.
    fn is_there(self) -> bool {
        match Self::detect() {
            Some(Self::Vbmi) => true,
            Some(Self::Avx2) => self == Self::Avx2,
            None => false,
        }
    }
}

#[target_feature(enable = "avx2")]
fn pack_avx2(words: &[Word], parity: &mut [Parity], packed: &mut [Packed]) {
    let halves = _mm256_setr_epi8(
        0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 6, 7, 14, 15, //
        0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 6, 7, 14, 15,
    );
    let gather = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7);
    let (words, words_left) = words.as_chunks::<4>();
    let (parity, parity_left) = parity.as_chunks_mut::<4>();
    let (packed, packed_left) = packed.as_chunks_mut::<4>();
    for ((words, parity), packed) in words.iter().zip(parity).zip(packed) {
        let packed = packed.as_flattened_mut();
        // SAFETY: `words` is an array of 32 bytes; the load asks for no alignment.
        let input = unsafe { _mm256_loadu_si256(words.as_ptr().cast::<__m256i>()) };
        let sorted = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(input, halves), gather);
        let (low, high) = (_mm256_castsi256_si128(sorted), _mm256_extracti128_si256::<1>(sorted));
        // SAFETY: `packed` is an array of 24 bytes, of which these stores write 0..16 and 16..24; `parity` is one of 8
        // bytes. Neither store asks for alignment.
        unsafe {
            _mm_storeu_si128(packed.as_mut_ptr().cast::<__m128i>(), low);
            _mm_storel_epi64(packed.as_mut_ptr().add(16).cast::<__m128i>(), high);
            _mm_storel_epi64(parity.as_mut_ptr().cast::<__m128i>(), _mm_unpackhi_epi64(high, high));
        }
    }
    reference::pack(words_left, parity_left, packed_left);
}

#[target_feature(enable = "avx2")]
fn unpack_avx2(parity: &[Parity], packed: &[Packed], words: &mut [Word]) {
    let halves = _mm256_setr_epi8(
        0, 1, 2, 3, 4, 5, 12, 13, 6, 7, 8, 9, 10, 11, 14, 15, //
        0, 1, 2, 3, 4, 5, 12, 13, 6, 7, 8, 9, 10, 11, 14, 15,
    );
    let scatter = _mm256_setr_epi32(0, 1, 2, 6, 3, 4, 5, 7);
    let (words, words_left) = words.as_chunks_mut::<4>();
    let (parity, parity_left) = parity.as_chunks::<4>();
    let (packed, packed_left) = packed.as_chunks::<4>();
    for ((words, parity), packed) in words.iter_mut().zip(parity).zip(packed) {
        let packed = packed.as_flattened();
        // SAFETY: `packed` is an array of 24 bytes, of which these loads read 0..16 and 16..24; `parity` is one of 8
        // bytes. No load asks for alignment.
        let (low, high) = unsafe {
            let high = _mm_loadl_epi64(packed.as_ptr().add(16).cast::<__m128i>());
            let parity = _mm_loadl_epi64(parity.as_ptr().cast::<__m128i>());
            (_mm_loadu_si128(packed.as_ptr().cast::<__m128i>()), _mm_unpacklo_epi64(high, parity))
        };
        let sorted = _mm256_permutevar8x32_epi32(_mm256_set_m128i(high, low), scatter);
        let output = _mm256_shuffle_epi8(sorted, halves);
        // SAFETY: `words` is an array of 32 bytes; the store asks for no alignment.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast::<__m256i>(), output) };
    }
    reference::unpack(parity_left, packed_left, words_left);
}

/// For each byte of 8 packed words (48 bytes, then 16 of parity) its place in the 8 words.
#[allow(clippy::indexing_slicing, reason = "evaluated when compiled")]
const PLACES: [u8; 64] = {
    let mut places = [0; 64];
    let mut word = 0;
    while word < 8 {
        let mut byte = 0;
        while byte < 8 {
            let at = if byte < 6 { 6 * word + byte } else { 48 + 2 * word + byte - 6 };
            places[at] = (8 * word + byte) as u8;
            byte += 1;
        }
        word += 1;
    }
    places
};

/// The inverse of [`PLACES`].
#[allow(clippy::indexing_slicing, reason = "evaluated when compiled")]
const SOURCES: [u8; 64] = {
    let mut sources = [0; 64];
    let mut at = 0;
    while at < 64 {
        sources[PLACES[at] as usize] = at as u8;
        at += 1;
    }
    sources
};

/// The 48 bytes of 8 packed words.
const PACKED_MASK: u64 = (1 << 48) - 1;

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn pack_vbmi(words: &[Word], parity: &mut [Parity], packed: &mut [Packed]) {
    // SAFETY: `PLACES` is an array of 64 bytes; the load asks for no alignment.
    let places = unsafe { _mm512_loadu_si512(PLACES.as_ptr().cast::<__m512i>()) };
    let (words, words_left) = words.as_chunks::<8>();
    let (parity, parity_left) = parity.as_chunks_mut::<8>();
    let (packed, packed_left) = packed.as_chunks_mut::<8>();
    for ((words, parity), packed) in words.iter().zip(parity).zip(packed) {
        // SAFETY: `words` is an array of 64 bytes; the load asks for no alignment.
        let input = unsafe { _mm512_loadu_si512(words.as_ptr().cast::<__m512i>()) };
        let sorted = _mm512_permutexvar_epi8(places, input);
        // SAFETY: the mask lets 48 bytes through, as many as `packed` has; `parity` has 16. No store asks for alignment.
        unsafe {
            _mm512_mask_storeu_epi8(packed.as_mut_ptr().cast::<i8>(), PACKED_MASK, sorted);
            _mm_storeu_si128(parity.as_mut_ptr().cast::<__m128i>(), _mm512_extracti32x4_epi32::<3>(sorted));
        }
    }
    reference::pack(words_left, parity_left, packed_left);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn unpack_vbmi(parity: &[Parity], packed: &[Packed], words: &mut [Word]) {
    // SAFETY: `SOURCES` is an array of 64 bytes; the load asks for no alignment.
    let sources = unsafe { _mm512_loadu_si512(SOURCES.as_ptr().cast::<__m512i>()) };
    let (words, words_left) = words.as_chunks_mut::<8>();
    let (parity, parity_left) = parity.as_chunks::<8>();
    let (packed, packed_left) = packed.as_chunks::<8>();
    for ((words, parity), packed) in words.iter_mut().zip(parity).zip(packed) {
        // SAFETY: the mask asks for 48 bytes, as many as `packed` has; `parity` has 16. No load asks for alignment.
        let (low, high) = unsafe {
            let low = _mm512_maskz_loadu_epi8(PACKED_MASK, packed.as_ptr().cast::<i8>());
            (low, _mm_loadu_si128(parity.as_ptr().cast::<__m128i>()))
        };
        let output = _mm512_permutexvar_epi8(sources, _mm512_inserti32x4::<3>(low, high));
        // SAFETY: `words` is an array of 64 bytes; the store asks for no alignment.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast::<__m512i>(), output) };
    }
    reference::unpack(parity_left, packed_left, words_left);
}

#[cfg(test)]
mod tests {
    use alloc::{vec, vec::Vec};

    use super::*;

    /// Every path against the reference, at every start modulo 64 that matters, with guard bytes behind the output.
    #[test]
    fn every_path_gives_the_bytes_of_the_reference() {
        let bytes: Vec<u8> = (0..16_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for path in [Path::Avx2, Path::Vbmi].into_iter().filter(|path| path.is_there()) {
            for count in (0..300).chain([511, 512, 513, 1792]) {
                for shift in [0, 1, 7, 33] {
                    let input = bytes[shift..shift + 8 * count].as_chunks::<8>().0;
                    let mut parity = vec![0xa5; 2 * count + shift + 8];
                    let mut packed = vec![0xa5; 6 * count + shift + 8];
                    let (mut expected_parity, mut expected_packed) = (parity.clone(), packed.clone());
                    fn cut<const N: usize>(buffer: &mut [u8], shift: usize, count: usize) -> &mut [[u8; N]] {
                        buffer[shift..shift + N * count].as_chunks_mut().0
                    }
                    path.pack(input, cut(&mut parity, shift, count), cut(&mut packed, shift, count));
                    let expected = (cut(&mut expected_parity, shift, count), cut(&mut expected_packed, shift, count));
                    reference::pack(input, expected.0, expected.1);
                    assert!(parity == expected_parity && packed == expected_packed, "{path:?} {count} {shift}");
                    let mut words = vec![0xa5; 8 * count + shift + 8];
                    let mut again = words.clone();
                    let (parity, packed) = (cut(&mut parity, shift, count), cut(&mut packed, shift, count));
                    path.unpack(parity, packed, cut(&mut words, shift, count));
                    reference::unpack(parity, packed, cut(&mut again, shift, count));
                    assert!(words == again, "{path:?} {count} {shift}");
                    assert_eq!(cut(&mut words, shift, count), input);
                }
            }
        }
    }
}
