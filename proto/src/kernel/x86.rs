//! AVX2 and AVX-512F lanes: the only `unsafe` of this crate's kernels.
//!
//! Both types can only be made by `detect`, so holding a value proves that the processor has the instructions; each
//! block below rests on that. Multiplication and addition are separate instructions: a fused one would round once where
//! the specification rounds twice.
#![allow(unsafe_code)]

use core::arch::x86_64::{
    __m256, __m512, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps, _mm256_add_ps,
    _mm256_castpd_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps,
    _mm256_storeu_ps, _mm256_sub_ps, _mm512_add_ps, _mm512_castps_pd, _mm512_castps512_ps256, _mm512_extractf64x4_pd,
    _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_storeu_ps, _mm512_sub_ps,
};

use super::{
    Lift, Project,
    tile::{self, LANES, Lanes, Work},
};

/// Proof that the processor and the operating system support AVX-512F.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx512(());

/// Proof that the processor and the operating system support AVX2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        // AVX2 as well: the horizontal sum uses 256-bit instructions.
        (std::is_x86_feature_detected!("avx512f") && std::is_x86_feature_detected!("avx2")).then_some(Self(()))
    }

    pub(super) fn lift(self, job: Lift<'_>) {
        #[target_feature(enable = "avx512f,avx2")]
        fn run(lanes: Avx512, job: Lift<'_>) {
            tile::lift::<_, 16, 4, 4>(lanes, job);
        }
        // SAFETY: `self` exists, so the features are there.
        unsafe { run(self, job) }
    }

    pub(super) fn project(self, job: Project<'_>) {
        #[target_feature(enable = "avx512f,avx2")]
        fn run(lanes: Avx512, job: Project<'_>) {
            tile::project::<_, 8, 4, 4>(lanes, job);
        }
        // SAFETY: `self` exists, so the features are there.
        unsafe { run(self, job) }
    }

    pub(super) fn read(self, values: &[f32]) -> f32 {
        #[target_feature(enable = "avx512f,avx2")]
        fn run(lanes: Avx512, values: &[f32]) -> f32 {
            tile::read::<_, 16>(lanes, values)
        }
        // SAFETY: `self` exists, so the features are there.
        unsafe { run(self, values) }
    }
}

impl Lanes for Avx512 {
    type Vector = __m512;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` exists, so AVX-512F is there.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        // SAFETY: AVX-512F is there; the reference covers the 64 bytes read, and `loadu` takes any alignment.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, vector: __m512, out: &mut [f32; LANES]) {
        // SAFETY: AVX-512F is there; the reference covers the 64 bytes written, and `storeu` takes any alignment.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so AVX-512F is there.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so AVX-512F is there.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so AVX-512F is there.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn outline<W: Work<Self>>(self, work: W) {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx2")]
        fn run<W: Work<Avx512>>(lanes: Avx512, work: W) {
            work.run(lanes);
        }
        // SAFETY: `self` exists, so the features are there.
        unsafe { run(self, work) }
    }

    #[inline(always)]
    fn tree(self, vector: __m512) -> f32 {
        // SAFETY: `self` exists, so AVX-512F and AVX2 are there.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(vector)));
            fold8(_mm256_add_ps(_mm512_castps512_ps256(vector), high))
        }
    }
}

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        std::is_x86_feature_detected!("avx2").then_some(Self(()))
    }

    pub(super) fn lift(self, job: Lift<'_>) {
        #[target_feature(enable = "avx2")]
        fn run(lanes: Avx2, job: Lift<'_>) {
            tile::lift::<_, 4, 4, 1>(lanes, job);
        }
        // SAFETY: `self` exists, so the feature is there.
        unsafe { run(self, job) }
    }

    pub(super) fn project(self, job: Project<'_>) {
        #[target_feature(enable = "avx2")]
        fn run(lanes: Avx2, job: Project<'_>) {
            tile::project::<_, 4, 4, 1>(lanes, job);
        }
        // SAFETY: `self` exists, so the feature is there.
        unsafe { run(self, job) }
    }

    pub(super) fn read(self, values: &[f32]) -> f32 {
        #[target_feature(enable = "avx2")]
        fn run(lanes: Avx2, values: &[f32]) -> f32 {
            tile::read::<_, 4>(lanes, values)
        }
        // SAFETY: `self` exists, so the feature is there.
        unsafe { run(self, values) }
    }
}

impl Lanes for Avx2 {
    /// Lanes 0 to 7 and 8 to 15.
    type Vector = [__m256; 2];

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        // SAFETY: `self` exists, so AVX2 is there.
        [unsafe { _mm256_set1_ps(value) }; 2]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::Vector {
        let ([low, high], _) = values.as_chunks::<8>() else { return self.splat(0.0) };
        // SAFETY: AVX2 is there; each reference covers the 32 bytes read, and `loadu` takes any alignment.
        unsafe { [_mm256_loadu_ps(low.as_ptr()), _mm256_loadu_ps(high.as_ptr())] }
    }

    #[inline(always)]
    fn store(self, vector: Self::Vector, out: &mut [f32; LANES]) {
        let ([low, high], _) = out.as_chunks_mut::<8>() else { return };
        // SAFETY: AVX2 is there; each reference covers the 32 bytes written, and `storeu` takes any alignment.
        unsafe {
            _mm256_storeu_ps(low.as_mut_ptr(), vector[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), vector[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: `self` exists, so AVX2 is there.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: `self` exists, so AVX2 is there.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: `self` exists, so AVX2 is there.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn outline<W: Work<Self>>(self, work: W) {
        #[inline(never)]
        #[target_feature(enable = "avx2")]
        fn run<W: Work<Avx2>>(lanes: Avx2, work: W) {
            work.run(lanes);
        }
        // SAFETY: `self` exists, so the feature is there.
        unsafe { run(self, work) }
    }

    #[inline(always)]
    fn tree(self, vector: Self::Vector) -> f32 {
        // SAFETY: `self` exists, so AVX2 is there.
        unsafe { fold8(_mm256_add_ps(vector[0], vector[1])) }
    }
}

/// The last three levels of the tree: l with l + 4, l with l + 2, then the last two.
#[inline]
#[target_feature(enable = "avx2")]
fn fold8(s8: __m256) -> f32 {
    let s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps::<1>(s8));
    let s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps::<0b01>(s2, s2)))
}
