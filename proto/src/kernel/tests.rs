//! Every path against the reference, bit for bit, and the reference against the written definition.

use alloc::{vec, vec::Vec};

use proptest::prelude::*;

use super::*;

/// SplitMix64: the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Finite values of both signs over 60 binary orders, and now and then a zero, a negative zero or a subnormal.
    fn value(&mut self) -> f32 {
        let bits = self.next();
        let sign = (bits as u32) & 0x8000_0000;
        let mantissa = (bits >> 32) as u32 & 0x007f_ffff;
        match bits & 0xf {
            0 => f32::from_bits(sign),
            1 => f32::from_bits(sign | mantissa),
            _ => f32::from_bits(sign | (97 + (bits >> 8) as u32 % 60) << 23 | mantissa),
        }
    }

    /// `len` values that start `offset` values into their allocation.
    fn values(&mut self, offset: usize, len: usize) -> Vec<f32> {
        (0..offset + len).map(|_| self.value()).collect()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Runs all paths on random numbers and compares each with the reference.
fn compare(random: &mut Random, d: usize, k: usize, n: usize) {
    let offset = (random.next() % 16) as usize;
    let mean = random.values(offset, d);
    let basis = random.values(offset / 2, k * d);
    let components = random.values(offset / 3, n * k);
    let residuals = random.values(offset / 4, n * d);
    let (mean, basis) = (&mean[offset..], &basis[offset / 2..]);
    let (components, residuals) = (&components[offset / 3..], &residuals[offset / 4..]);
    let run = |kernel: Kernel| {
        let mut lifted = vec![f32::NAN; offset + n * d];
        kernel.lift_batch(mean, basis, components, &mut lifted[offset..]).unwrap();
        let mut projected = vec![f32::NAN; offset + n * k];
        kernel.project_batch(mean, basis, residuals, &mut projected[offset..]).unwrap();
        (bits(&lifted), bits(&projected))
    };
    let expected = run(Kernel::REFERENCE);
    for kernel in Kernel::available() {
        let got = run(kernel);
        assert!(got.0 == expected.0, "lift {} d {d} k {k} n {n}", kernel.name());
        assert!(got.1 == expected.1, "project {} d {d} k {k} n {n}", kernel.name());
    }
}

#[test]
fn every_width_up_to_300() {
    let mut random = Random(1);
    for d in 1..=300 {
        for (k, n) in [(1, 1), (2, 3), (3, 1), (8, 2), (17, 1), (29, 9)] {
            compare(&mut random, d, k, n);
        }
    }
}

#[test]
fn every_number_of_components_and_positions() {
    let mut random = Random(2);
    for k in (0..=40).chain([127, 128, 129, 256, 257]) {
        compare(&mut random, 48, k, 1);
        compare(&mut random, 49, k, 5);
    }
    for n in 0..=20 {
        compare(&mut random, 70, 5, n);
    }
}

#[test]
fn production_shapes() {
    let mut random = Random(3);
    for (d, k) in [(896, 8), (3584, 29), (8192, 66)] {
        for n in [1, 32] {
            compare(&mut random, d, k, n);
        }
    }
}

#[test]
fn the_reference_is_the_written_definition() {
    // Values whose sums differ in every other order, or with a fused step.
    let (big, tiny) = (16_777_216.0_f32, 1.0_f32);
    let mut out = [0.0];
    Kernel::REFERENCE.lift(&[big], &[1.0, 1.0, -1.0], &[tiny, tiny, big], &mut out).unwrap();
    assert_eq!(out, [0.0]);
    let third = 1.0_f32 / 3.0;
    Kernel::REFERENCE.lift(&[-(third * third)], &[third], &[third], &mut out).unwrap();
    assert_eq!(out[0].to_bits(), 0);
    assert_ne!(third.mul_add(third, -(third * third)), 0.0);

    // Lane 0 takes j = 0, 16, 32: 2^24 + 1 + 1 stays 2^24 there, and lane 1 adds the rest only at the end.
    let mut row = [0.0; 33];
    (row[0], row[16], row[32], row[1]) = (big, tiny, tiny, 2.0);
    Kernel::REFERENCE.project(&[0.0; 33], &row, &[1.0; 33], &mut out).unwrap();
    assert_eq!(out, [big + 2.0]);
    // The tree: lanes 0 and 8 meet first, so 2^24 and -2^24 cancel before the ones come.
    let mut row = [0.0; 16];
    (row[0], row[8], row[1], row[2]) = (big, -big, tiny, tiny);
    Kernel::REFERENCE.project(&[0.0; 16], &row, &[1.0; 16], &mut out).unwrap();
    assert_eq!(out, [2.0]);
    // x is rounded before it is multiplied.
    Kernel::REFERENCE.project(&[tiny], &[1.0], &[big + 2.0], &mut out).unwrap();
    assert_eq!(out, [big]);
}

#[test]
fn signed_zeros_and_subnormals_keep_their_bits() {
    let least = f32::from_bits(1);
    for kernel in Kernel::available() {
        for d in [1, 15, 16, 17, 128, 200] {
            let mut out = vec![1.0; d];
            kernel.lift(&vec![-0.0; d], &vec![-0.0; d], &[1.0], &mut out).unwrap();
            assert!(out.iter().all(|y| y.to_bits() == 0x8000_0000), "{}", kernel.name());
            kernel.lift(&vec![-0.0; d], &vec![0.0; d], &[1.0], &mut out).unwrap();
            assert!(out.iter().all(|y| y.to_bits() == 0), "{}", kernel.name());
            kernel.lift(&vec![least; d], &vec![least; d], &[1.0], &mut out).unwrap();
            assert!(out.iter().all(|y| y.to_bits() == 2), "{}", kernel.name());
            let mut component = [1.0];
            kernel.project(&vec![0.0; d], &vec![1.0; d], &vec![-0.0; d], &mut component).unwrap();
            assert_eq!(component[0].to_bits(), 0, "{}", kernel.name());
            kernel.project(&vec![0.0; d], &vec![1.0; d], &vec![least; d], &mut component).unwrap();
            assert_eq!(component[0].to_bits(), d as u32, "{}", kernel.name());
        }
    }
}

#[test]
fn without_components_the_lift_is_the_mean() {
    let mut out = [0.0; 4];
    lift_batch(&[1.0, -0.0], &[], &[], &mut out).unwrap();
    assert_eq!(bits(&out), bits(&[1.0, -0.0, 1.0, -0.0]));
    project_batch(&[1.0, -0.0], &[], &[3.0, 4.0], &mut []).unwrap();
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let mut out = [7.0; 6];
    let two = [1.0, 2.0];
    assert_eq!(lift(&[], &[], &[], &mut []), Err(ShapeError::NoWidth));
    assert_eq!(lift(&two, &[1.0; 3], &[1.0], &mut out[..2]), Err(ShapeError::Basis { got: 3, d: 2 }));
    assert_eq!(
        lift(&two, &[1.0; 4], &[1.0], &mut out[..2]),
        Err(ShapeError::Components { got: 1, positions: 1, k: 2 })
    );
    assert_eq!(lift(&two, &[1.0; 4], &two, &mut out[..4]), Err(ShapeError::Positions { got: 2 }));
    assert_eq!(lift(&two, &[1.0; 4], &two, &mut out[..1]), Err(ShapeError::Positions { got: 0 }));
    assert_eq!(lift_batch(&two, &[1.0; 4], &two, &mut out[..5]), Err(ShapeError::Residuals { got: 5, d: 2 }));
    assert_eq!(project(&two, &[1.0; 4], &[1.0; 4], &mut out[..2]), Err(ShapeError::Positions { got: 2 }));
    assert_eq!(project(&two, &[1.0; 4], &[1.0; 3], &mut out[..2]), Err(ShapeError::Residuals { got: 3, d: 2 }));
    assert_eq!(
        project_batch(&two, &[1.0; 4], &[1.0; 4], &mut out[..5]),
        Err(ShapeError::Components { got: 5, positions: 2, k: 2 })
    );
    assert_eq!(out, [7.0; 6]);
}

#[test]
fn the_chosen_path_is_the_first_of_those_available() {
    assert_eq!(Some(Kernel::detect()), Kernel::available().next());
    assert_eq!(Kernel::available().last(), Some(Kernel::REFERENCE));
    for kernel in Kernel::available() {
        assert_eq!(kernel.read(&[1.0; 512]), 512.0, "{}", kernel.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn any_shape(seed in any::<u64>(), d in 1_usize..200, k in 0_usize..140, n in 0_usize..20) {
        compare(&mut Random(seed), d, k, n);
    }
}
