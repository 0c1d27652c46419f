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
//! AVX-512 VBMI does the same for 8 words with one byte permutation: 48 bytes packed, 16 bytes parity. There the packing
//! and the hash run in one loop, because the hash is what costs: it has two multiplications for each word, of which the
//! vector unit does the one that depends on nothing, a block ahead of the scalar unit that does the other.
#![allow(unsafe_code)] // vector loads and stores take pointers

use core::arch::asm;
use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm_storel_epi64, _mm_storeu_si128,
    _mm_unpackhi_epi64, _mm_unpacklo_epi64, _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256,
    _mm256_permutevar8x32_epi32, _mm256_set_m128i, _mm256_setr_epi8, _mm256_setr_epi32, _mm256_shuffle_epi8,
    _mm256_storeu_si256, _mm512_extracti32x4_epi32, _mm512_inserti32x4, _mm512_loadu_si512, _mm512_mask_storeu_epi8,
    _mm512_maskz_loadu_epi8, _mm512_mullo_epi64, _mm512_permutexvar_epi8, _mm512_set1_epi64, _mm512_storeu_si512,
};
use std::arch::is_x86_feature_detected;

use xxhash_rust::xxh64::xxh64;

use super::{
    hash::{self, Lanes},
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
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vbmi")
        {
            Some(Self::Vbmi)
        } else if is_x86_feature_detected!("avx2") {
            Some(Self::Avx2)
        } else {
            None
        }
    }

    /// [`super::reference::pack`] of the words of `input` on this path, which must be one that the CPU has. Returns the XXH64
    /// of `input`.
    pub(super) fn pack(self, input: &[u8], parity: &mut [Parity], packed: &mut [Packed]) -> u64 {
        debug_assert!(self.is_there());
        let words = input.as_chunks().0;
        if words.len() != parity.len() || words.len() != packed.len() {
            reference::pack(words, parity, packed);
            return xxh64(input, 0);
        }
        match self {
            Self::Avx2 => {
                // SAFETY: a `Path` comes from `detect`, or in tests from a check of the same features.
                unsafe { pack_avx2(words, parity, packed) };
                xxh64(input, 0)
            }
            Self::Vbmi => {
                let (blocks, words_left) = words.as_chunks::<BLOCK>();
                let (parity, parity_left) = parity.as_chunks_mut::<BLOCK>();
                let (packed, packed_left) = packed.as_chunks_mut::<BLOCK>();
                // SAFETY: as above.
                unsafe { pack_vbmi(words_left, parity_left, packed_left) };
                if blocks.is_empty() {
                    return xxh64(input, 0);
                }
                // SAFETY: as above.
                let lanes = unsafe { pack_blocks(blocks, parity, packed) };
                finish(lanes, blocks.len(), input)
            }
        }
    }

    /// [`super::reference::unpack`] on this path, which must be one that the CPU has, into the words of `output`, whose last bytes
    /// are there already. Returns the XXH64 of all of `output`.
    pub(super) fn unpack(self, parity: &[Parity], packed: &[Packed], output: &mut [u8]) -> u64 {
        debug_assert!(self.is_there());
        let words = output.as_chunks_mut().0;
        if words.len() != parity.len() || words.len() != packed.len() {
            reference::unpack(parity, packed, words);
            return xxh64(output, 0);
        }
        match self {
            Self::Avx2 => {
                // SAFETY: as in `pack`.
                unsafe { unpack_avx2(parity, packed, words) };
                xxh64(output, 0)
            }
            Self::Vbmi => {
                let (blocks, words_left) = words.as_chunks_mut::<BLOCK>();
                let (parity, parity_left) = parity.as_chunks::<BLOCK>();
                let (packed, packed_left) = packed.as_chunks::<BLOCK>();
                // SAFETY: as in `pack`.
                unsafe { unpack_vbmi(parity_left, packed_left, words_left) };
                let count = blocks.len();
                if count == 0 {
                    return xxh64(output, 0);
                }
                // SAFETY: as in `pack`.
                let lanes = unsafe { unpack_blocks(parity, packed, blocks) };
                finish(lanes, count, output)
            }
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

/// Words that the fused loops move at once, 256 bytes.
const BLOCK: usize = 32;

/// The hash of all of `bytes`, of which `blocks` blocks are in `lanes`.
fn finish(lanes: Lanes, blocks: usize, bytes: &[u8]) -> u64 {
    let done = blocks.saturating_mul(size_of::<[Word; BLOCK]>());
    hash::finish(lanes, bytes.get(done..).unwrap_or_default(), bytes.len() as u64)
}

/// The words of a block, each times [`hash::P2`].
#[repr(align(64))]
struct Products([u64; BLOCK]);

/// `pack` of whole blocks; returns the lanes of the hash behind the last of them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vbmi")]
fn pack_blocks(words: &[[Word; BLOCK]], parity: &mut [[Parity; BLOCK]], packed: &mut [[Packed; BLOCK]]) -> Lanes {
    // SAFETY: `PLACES` is an array of 64 bytes; the load asks for no alignment.
    let places = unsafe { _mm512_loadu_si512(PLACES.as_ptr().cast::<__m512i>()) };
    let mut lanes = hash::START;
    let (mut first, mut second) = (Products([0; BLOCK]), Products([0; BLOCK]));
    let (mut now, mut before) = (&mut first, &mut second);
    for (n, ((words, parity), packed)) in words.iter().zip(parity).zip(packed).enumerate() {
        let (words, parity) = (words.as_chunks::<8>().0, parity.as_chunks_mut::<8>().0);
        let (packed, products) = (packed.as_chunks_mut::<8>().0, now.0.as_chunks_mut::<8>().0);
        for (((words, parity), packed), products) in words.iter().zip(parity).zip(packed).zip(products) {
            // SAFETY: `words` is an array of 64 bytes; the load asks for no alignment.
            let input = unsafe { _mm512_loadu_si512(words.as_ptr().cast::<__m512i>()) };
            let sorted = _mm512_permutexvar_epi8(places, input);
            // SAFETY: the mask lets 48 bytes through, as many as `packed` has; `parity` has 16. No store asks for
            // alignment.
            unsafe {
                _mm512_mask_storeu_epi8(packed.as_mut_ptr().cast::<i8>(), PACKED_MASK, sorted);
                _mm_storeu_si128(parity.as_mut_ptr().cast::<__m128i>(), _mm512_extracti32x4_epi32::<3>(sorted));
            }
            multiply(input, products);
        }
        if n > 0 {
            absorb(&mut lanes, before);
        }
        core::mem::swap(&mut now, &mut before);
    }
    absorb(&mut lanes, before);
    lanes
}

/// `unpack` of whole blocks; returns the lanes of the hash behind the last of them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vbmi")]
fn unpack_blocks(parity: &[[Parity; BLOCK]], packed: &[[Packed; BLOCK]], words: &mut [[Word; BLOCK]]) -> Lanes {
    // SAFETY: `SOURCES` is an array of 64 bytes; the load asks for no alignment.
    let sources = unsafe { _mm512_loadu_si512(SOURCES.as_ptr().cast::<__m512i>()) };
    let mut lanes = hash::START;
    let (mut first, mut second) = (Products([0; BLOCK]), Products([0; BLOCK]));
    let (mut now, mut before) = (&mut first, &mut second);
    for (n, ((words, parity), packed)) in words.iter_mut().zip(parity).zip(packed).enumerate() {
        let (words, parity) = (words.as_chunks_mut::<8>().0, parity.as_chunks::<8>().0);
        let (packed, products) = (packed.as_chunks::<8>().0, now.0.as_chunks_mut::<8>().0);
        for (((words, parity), packed), products) in words.iter_mut().zip(parity).zip(packed).zip(products) {
            // SAFETY: the mask asks for 48 bytes, as many as `packed` has; `parity` has 16. No load asks for alignment.
            let (low, high) = unsafe {
                let low = _mm512_maskz_loadu_epi8(PACKED_MASK, packed.as_ptr().cast::<i8>());
                (low, _mm_loadu_si128(parity.as_ptr().cast::<__m128i>()))
            };
            let output = _mm512_permutexvar_epi8(sources, _mm512_inserti32x4::<3>(low, high));
            // SAFETY: `words` is an array of 64 bytes; the store asks for no alignment.
            unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast::<__m512i>(), output) };
            multiply(output, products);
        }
        if n > 0 {
            absorb(&mut lanes, before);
        }
        core::mem::swap(&mut now, &mut before);
    }
    absorb(&mut lanes, before);
    lanes
}

#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn multiply(words: __m512i, products: &mut [u64; 8]) {
    let product = _mm512_mullo_epi64(words, _mm512_set1_epi64(hash::P2.cast_signed()));
    // SAFETY: `products` is an array of 64 bytes; the store asks for no alignment.
    unsafe { _mm512_storeu_si512(products.as_mut_ptr().cast::<__m512i>(), product) };
}

/// Takes the stripes of a block into the lanes.
#[inline(always)]
fn absorb(lanes: &mut Lanes, products: &Products) {
    let [mut a, mut b, mut c, mut d] = *lanes;
    for [first, second, third, fourth] in core::hint::black_box(products).0.as_chunks().0 {
        a = absorb_word(a, *first);
        b = absorb_word(b, *second);
        c = absorb_word(c, *third);
        d = absorb_word(d, *fourth);
    }
    *lanes = [a, b, c, d];
}

/// The part of a round that depends on the round before.
///
/// The multiplication is written as the instruction. As an operator it would let the compiler see four equal chains and
/// run them as one vector, whose multiplication takes five times as long; the loop is then slower than no vectors at all.
#[inline(always)]
fn absorb_word(lane: u64, product: u64) -> u64 {
    let mut sum = lane.wrapping_add(product).rotate_left(31);
    // SAFETY: multiplies two registers; reads and writes no memory and leaves the stack alone.
    unsafe { asm!("imul {0}, {1}", inout(reg) sum, in(reg) hash::P1, options(pure, nomem, nostack)) };
    sum
}

#[cfg(test)]
mod tests {
    use alloc::{vec, vec::Vec};

    use super::*;

    /// Cuts `count` arrays out of a buffer, from `shift` on.
    fn cut<const N: usize>(buffer: &mut [u8], shift: usize, count: usize) -> &mut [[u8; N]] {
        buffer[shift..shift + N * count].as_chunks_mut().0
    }

    /// Every path against the reference, from several starts, with bytes around the output that must stay.
    #[test]
    fn every_path_gives_the_bytes_and_the_hash_of_the_reference() {
        let bytes: Vec<u8> = (0..16_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let lens = (0..300).chain((300..2600).step_by(37)).chain([4088, 4096, 4103, 14_335, 14_336, 14_337]);
        for (path, len) in lens.flat_map(|len| [(Path::Avx2, len), (Path::Vbmi, len)]) {
            if !path.is_there() {
                continue;
            }
            for shift in [0, 1, 7, 33] {
                let input = &bytes[shift..shift + len];
                let (words, tail) = input.as_chunks();
                let count = words.len();
                let (mut parity, mut packed) = (vec![0xa5; 2 * count + 50], vec![0xa5; 6 * count + 50]);
                let (mut expected_parity, mut expected_packed) = (parity.clone(), packed.clone());
                let hash = path.pack(input, cut(&mut parity, shift, count), cut(&mut packed, shift, count));
                let expected = (cut(&mut expected_parity, shift, count), cut(&mut expected_packed, shift, count));
                reference::pack(words, expected.0, expected.1);
                assert!(parity == expected_parity && packed == expected_packed, "{path:?} {len} {shift}");
                assert_eq!(hash, xxh64(input, 0), "{path:?} {len} {shift}");

                let mut output = vec![0xa5; len + 50];
                let mut expected = output.clone();
                expected[shift..shift + len].copy_from_slice(input);
                output[shift + len - tail.len()..shift + len].copy_from_slice(tail);
                let (parity, packed) = (cut(&mut parity, shift, count), cut(&mut packed, shift, count));
                let hash = path.unpack(parity, packed, &mut output[shift..shift + len]);
                assert!(output == expected, "{path:?} {len} {shift}");
                assert_eq!(hash, xxh64(input, 0), "{path:?} {len} {shift}");
            }
        }
    }

    #[test]
    fn slices_of_different_lengths_do_no_harm() {
        for path in [Path::Avx2, Path::Vbmi].into_iter().filter(|path| path.is_there()) {
            for (parity, packed, words) in [(40, 0, 40), (0, 40, 40), (40, 40, 0), (70, 33, 64), (1, 65, 200)] {
                let (mut parity, mut packed) = (vec![[1; 2]; parity], vec![[2; 6]; packed]);
                let mut output = vec![3; 8 * words + 5];
                let hash = path.unpack(&parity, &packed, &mut output);
                assert_eq!(hash, xxh64(&output, 0));
                assert_eq!(path.pack(&output, &mut parity, &mut packed), hash);
            }
        }
    }
}
