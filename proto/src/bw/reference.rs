//! Packing and unpacking words, the plain way. The paths in [`super::x86`] give the same bytes.

use super::layout::{Packed, Parity, Word};

/// Splits words into their high 16 and low 48 bits. The three slices have one length.
pub(super) fn pack(words: &[Word], parity: &mut [Parity], packed: &mut [Packed]) {
    for ((word, parity), packed) in words.iter().zip(parity).zip(packed) {
        let [b0, b1, b2, b3, b4, b5, b6, b7] = *word;
        *packed = [b0, b1, b2, b3, b4, b5];
        *parity = [b6, b7];
    }
}

/// Joins the high 16 and low 48 bits of words. The three slices have one length.
pub(super) fn unpack(parity: &[Parity], packed: &[Packed], words: &mut [Word]) {
    for ((word, parity), packed) in words.iter_mut().zip(parity).zip(packed) {
        let ([b0, b1, b2, b3, b4, b5], [b6, b7]) = (*packed, *parity);
        *word = [b0, b1, b2, b3, b4, b5, b6, b7];
    }
}
