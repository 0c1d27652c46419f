//! FNV-1a, 32 bits: the fingerprint of basis files and methodology specs. Spec: `proto/SPEC.md`, "Arithmetic".
//!
//! It tells honest mistakes apart (another file, another spec); it is no protection against a forger. A station
//! therefore also compares the BLAKE3 hash where it has both files.

/// A running FNV-1a 32 hash.
///
/// ```
/// use aeon_proto::hash::{Fnv1a32, fnv1a32};
/// let mut hash = Fnv1a32::new();
/// hash.update(b"foo");
/// hash.update(b"bar");
/// assert_eq!(hash.finish(), fnv1a32(b"foobar"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fnv1a32 {
    state: u32,
}

impl Fnv1a32 {
    const OFFSET_BASIS: u32 = 0x811c_9dc5;
    const PRIME: u32 = 0x0100_0193;

    /// The hash of no bytes.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: Self::OFFSET_BASIS }
    }

    /// Takes in more bytes; how they are cut into calls does not matter.
    pub fn update(&mut self, bytes: &[u8]) {
        self.state = bytes.iter().fold(self.state, |state, byte| (state ^ u32::from(*byte)).wrapping_mul(Self::PRIME));
    }

    /// The hash of all bytes so far.
    #[must_use]
    pub const fn finish(self) -> u32 {
        self.state
    }
}

impl Default for Fnv1a32 {
    fn default() -> Self {
        Self::new()
    }
}

/// The FNV-1a 32 hash of `bytes`.
#[must_use]
pub fn fnv1a32(bytes: &[u8]) -> u32 {
    let mut hash = Fnv1a32::new();
    hash.update(bytes);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // All but the last are published by the authors of FNV; the last comes from a second implementation in Python.
        for (text, expected) in [
            (&b""[..], 0x811c_9dc5),
            (b"a", 0xe40c_292c),
            (b"b", 0xe70c_2de5),
            (b"foo", 0xa9f3_7ed7),
            (b"foobar", 0xbf9c_f968),
            (b"\xcc\x24\x31\xc4", 0),
            (&[0xff; 256], 0x06a3_4ac5),
        ] {
            assert_eq!(fnv1a32(text), expected);
        }
    }

    #[test]
    fn pieces_give_the_hash_of_the_whole() {
        let bytes: alloc::vec::Vec<u8> = (0..=255).cycle().take(1000).collect();
        for cut in 0..=bytes.len() {
            let mut hash = Fnv1a32::default();
            hash.update(&bytes[..cut]);
            hash.update(&bytes[cut..]);
            assert_eq!(hash.finish(), fnv1a32(&bytes));
        }
    }
}
