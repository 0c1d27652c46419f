//! AVX2: the same loops, built for a processor that has it. The only `unsafe` of this module.
//!
//! Nothing is written for the processor by hand: the compiler may use wider vectors, but may neither fuse nor reorder, so
//! the bits stay the same.
#![allow(unsafe_code)]

use super::rows::Job;

/// Proof that the processor and the operating system support AVX2, BMI1 and BMI2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let all = std::is_x86_feature_detected!("avx2")
            && std::is_x86_feature_detected!("bmi1")
            && std::is_x86_feature_detected!("bmi2");
        all.then_some(Self(()))
    }

    pub(super) fn run<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "avx2,bmi1,bmi2")]
        fn run<J: Job>(job: J) -> J::Output {
            job.run()
        }
        // SAFETY: `self` exists, so the features are there.
        unsafe { run(job) }
    }
}
