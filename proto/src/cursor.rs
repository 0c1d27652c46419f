//! A checked reader over a byte slice, for the fixed layouts of this crate.
//!
//! Every read either returns a value or a [`Truncated`] that says where the bytes ended; none can panic.

/// Fewer bytes than a field needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
#[error("{needed} bytes expected at offset {offset}, {left} left")]
pub struct Truncated {
    /// Where the field starts, in bytes from the start of the buffer.
    pub offset: usize,
    /// Bytes that the field takes.
    pub needed: usize,
    /// Bytes that are there.
    pub left: usize,
}

/// A position in a byte slice that only moves forward.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Cursor<'a> {
    /// Starts at offset 0 of `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Bytes read so far.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes not yet read.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.offset..).unwrap_or_default()
    }

    /// Takes the next `len` bytes.
    ///
    /// # Errors
    /// [`Truncated`] if fewer are left; the cursor does not move then.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Truncated> {
        let rest = self.rest();
        let Some((head, _)) = rest.split_at_checked(len) else {
            return Err(Truncated { offset: self.offset, needed: len, left: rest.len() });
        };
        self.offset = self.offset.saturating_add(len);
        Ok(head)
    }

    /// Takes the next `N` bytes as an array.
    ///
    /// # Errors
    /// [`Truncated`] if fewer are left.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Truncated> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    /// One byte.
    ///
    /// # Errors
    /// [`Truncated`] at the end.
    pub fn u8(&mut self) -> Result<u8, Truncated> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    /// A little-endian u16.
    ///
    /// # Errors
    /// [`Truncated`] if fewer than 2 bytes are left.
    pub fn u16_le(&mut self) -> Result<u16, Truncated> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// A little-endian u32.
    ///
    /// # Errors
    /// [`Truncated`] if fewer than 4 bytes are left.
    pub fn u32_le(&mut self) -> Result<u32, Truncated> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// A little-endian u64.
    ///
    /// # Errors
    /// [`Truncated`] if fewer than 8 bytes are left.
    pub fn u64_le(&mut self) -> Result<u64, Truncated> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A big-endian u16.
    ///
    /// # Errors
    /// [`Truncated`] if fewer than 2 bytes are left.
    pub fn u16_be(&mut self) -> Result<u16, Truncated> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    /// A big-endian u32.
    ///
    /// # Errors
    /// [`Truncated`] if fewer than 4 bytes are left.
    pub fn u32_be(&mut self) -> Result<u32, Truncated> {
        Ok(u32::from_be_bytes(self.array()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_byte_orders_and_stops_at_the_end() {
        let mut cursor = Cursor::new(&[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(cursor.u16_le(), Ok(0x0201));
        assert_eq!(cursor.u32_be(), Ok(0x0304_0506));
        assert_eq!(cursor.u16_be(), Err(Truncated { offset: 6, needed: 2, left: 1 }));
        assert_eq!(cursor.u8(), Ok(7));
        assert_eq!(cursor.take(0), Ok(&[][..]));
        assert!(cursor.take(usize::MAX).is_err());
        assert_eq!(cursor.offset(), 7);
    }
}
