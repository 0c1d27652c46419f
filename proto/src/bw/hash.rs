//! XXH64 with seed 0 from the middle on: for the fused loops of [`super::x86`], which do the first part themselves.
//!
//! The state is four lanes. Each stripe of 32 bytes is one word for each lane: multiplied by the second prime, added,
//! rotated, multiplied by the first. Only the last three depend on the stripe before; the first product does not, and that
//! is what a vector unit can do ahead.

/// The primes of the algorithm, in its own numbering.
pub(super) const P1: u64 = 0x9e37_79b1_85eb_ca87;
pub(super) const P2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const P3: u64 = 0x1656_67b1_9e37_79f9;
const P4: u64 = 0x85eb_ca77_c2b2_ae63;
const P5: u64 = 0x27d4_eb2f_1656_67c5;

/// The four lanes.
pub(super) type Lanes = [u64; 4];

/// Bytes of a stripe.
const STRIPE_LEN: usize = 32;

/// The lanes before the first stripe.
pub(super) const START: Lanes = [P1.wrapping_add(P2), P2, 0, 0_u64.wrapping_sub(P1)];

const fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1)
}

/// The hash of `len` bytes, at least 32 of which are in the lanes already; `rest` are the others.
pub(super) fn finish(mut lanes: Lanes, rest: &[u8], len: u64) -> u64 {
    let (stripes, rest) = rest.as_chunks::<STRIPE_LEN>();
    for stripe in stripes {
        for (lane, word) in lanes.iter_mut().zip(stripe.as_chunks().0) {
            *lane = round(*lane, u64::from_le_bytes(*word));
        }
    }
    let [a, b, c, d] = lanes;
    let mut hash =
        a.rotate_left(1).wrapping_add(b.rotate_left(7)).wrapping_add(c.rotate_left(12)).wrapping_add(d.rotate_left(18));
    for lane in lanes {
        hash = (hash ^ round(0, lane)).wrapping_mul(P1).wrapping_add(P4);
    }
    hash = hash.wrapping_add(len);
    let (words, rest) = rest.as_chunks();
    for word in words {
        let word = round(0, u64::from_le_bytes(*word));
        hash = (hash ^ word).rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
    }
    let (halves, rest) = rest.as_chunks();
    for half in halves {
        let half = u64::from(u32::from_le_bytes(*half)).wrapping_mul(P1);
        hash = (hash ^ half).rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
    }
    for byte in rest {
        hash = (hash ^ u64::from(*byte).wrapping_mul(P5)).rotate_left(11).wrapping_mul(P1);
    }
    hash = (hash ^ hash >> 33).wrapping_mul(P2);
    hash = (hash ^ hash >> 29).wrapping_mul(P3);
    hash ^ hash >> 32
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use xxhash_rust::xxh64::xxh64;

    use super::*;

    #[test]
    fn every_length_from_one_stripe_on() {
        let bytes: Vec<u8> = (0..400_u32).map(|i| (i.wrapping_mul(77_773) >> 5) as u8).collect();
        for len in 32..bytes.len() {
            assert_eq!(finish(START, &bytes[..len], len as u64), xxh64(&bytes[..len], 0), "{len}");
        }
    }
}
