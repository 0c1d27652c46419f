//! The fragmented UDP framing of the TypeScript `UDPFlowTransport`. Spec: `proto/SPEC.md`, "Fragmented UDP".
//!
//! A frame that is longer than a datagram travels in up to 255 parts, each behind a header of its own:
//!
//! ```text
//! byte  0          2       3       4
//!       | frame_id | index | total | part of the frame: at most mtu - 4 bytes
//!       | u16      | u8    | u8    |
//! ```
//!
//! `frame_id` is big-endian and goes up by one for each frame; every part but the last is full. Four pieces, none of which
//! does IO or reads a clock (time comes in as milliseconds from any fixed start):
//!
//! - [`Fragmenter`] cuts the bytes of a frame into datagrams;
//! - [`Reassembler`] joins them again, per peer and within limits;
//! - [`Received`] and [`InFlight`] are the two ends of the acknowledgement;
//! - [`StreamOrder`] brings the frames of one stream into the order of their sequence numbers.
//!
//! This framing has a port of its own: its datagrams cannot be told from plain ones by looking at them.

mod ack;
mod order;
mod reassembly;

use alloc::vec::Vec;

pub use self::{
    ack::{ACK_ENTRY_LEN, ACK_STREAM_ID, ACK_WINDOW, AckEntry, InFlight, Received, decode_acks, encode_ack, is_ack},
    order::{MAX_GAP, StreamOrder},
    reassembly::{Dropped, Limits, Outcome, Reassembler, Totals},
};

/// Bytes of a fragment header.
pub const HEADER_LEN: usize = 4;
/// Most parts of one frame: `total` is one byte.
pub const MAX_PARTS: usize = 255;
/// The datagram size of the TypeScript transport: 1500 less the IPv4 and UDP headers.
pub const DEFAULT_MTU: usize = 1472;
/// The largest datagram that IPv4 UDP carries.
pub const MAX_MTU: usize = 65_507;

/// What stands in front of each part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes 0..2: which frame of the sender this is a part of.
    pub frame_id: u16,
    /// Byte 2: which part, counted from 0. Must be less than `total`.
    pub index: u8,
    /// Byte 3: how many parts the frame has. Must not be 0.
    pub total: u8,
}

impl Header {
    /// Reads a header. Whether `index` and `total` fit each other is for [`Reassembler::push`] to say.
    #[must_use]
    pub const fn decode(bytes: [u8; HEADER_LEN]) -> Self {
        let [id1, id0, index, total] = bytes;
        Self { frame_id: u16::from_be_bytes([id1, id0]), index, total }
    }

    /// Writes a header.
    #[must_use]
    pub const fn encode(self) -> [u8; HEADER_LEN] {
        let [id1, id0] = self.frame_id.to_be_bytes();
        [id1, id0, self.index, self.total]
    }
}

/// Why a frame cannot be sent in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum SplitError {
    /// A datagram size without room for a part, or over [`MAX_MTU`].
    #[error("datagrams of {mtu} bytes, 5 to 65507 are possible")]
    Mtu {
        /// The size asked for.
        mtu: usize,
    },
    /// No bytes at all.
    #[error("an empty frame")]
    Empty,
    /// More than [`MAX_PARTS`] parts.
    #[error("frame of {len} bytes, 255 parts hold {max}")]
    TooLong {
        /// Bytes of the frame.
        len: usize,
        /// Bytes that can be sent.
        max: usize,
    },
}

/// Cuts frames into datagrams and counts frame ids.
#[derive(Debug, Clone)]
pub struct Fragmenter {
    next_id: u16,
    part_len: usize,
}

impl Fragmenter {
    /// Starts at frame id 0. `mtu` is the size of a full datagram, fragment header included.
    ///
    /// # Errors
    /// [`SplitError::Mtu`] if `mtu` is under 5 or over [`MAX_MTU`].
    pub const fn new(mtu: usize) -> Result<Self, SplitError> {
        Self::starting_at(mtu, 0)
    }

    /// As [`Fragmenter::new`], but with the id of the first frame.
    ///
    /// # Errors
    /// As [`Fragmenter::new`].
    pub const fn starting_at(mtu: usize, first_id: u16) -> Result<Self, SplitError> {
        match mtu.checked_sub(HEADER_LEN) {
            Some(part_len) if part_len > 0 && mtu <= MAX_MTU => Ok(Self { next_id: first_id, part_len }),
            _ => Err(SplitError::Mtu { mtu }),
        }
    }

    /// Bytes of the longest frame that can be sent.
    #[must_use]
    pub const fn max_frame_len(&self) -> usize {
        self.part_len.saturating_mul(MAX_PARTS)
    }

    /// Cuts the bytes of one frame. The frame id is used up only if this succeeds.
    ///
    /// # Errors
    /// [`SplitError::Empty`] or [`SplitError::TooLong`].
    pub fn split<'f>(&mut self, frame: &'f [u8]) -> Result<Parts<'f>, SplitError> {
        if frame.is_empty() {
            return Err(SplitError::Empty);
        }
        let too_long = SplitError::TooLong { len: frame.len(), max: self.max_frame_len() };
        let total = u8::try_from(frame.len().div_ceil(self.part_len)).map_err(|_| too_long)?;
        let frame_id = self.next_id;
        self.next_id = frame_id.wrapping_add(1);
        Ok(Parts { rest: frame.chunks(self.part_len), header: Header { frame_id, index: 0, total } })
    }

    /// Cuts one frame and appends its datagrams to `out`, one behind the other. All but the last are `mtu` bytes long, which
    /// is the form that segmentation offload takes.
    ///
    /// # Errors
    /// As [`Fragmenter::split`]; `out` is unchanged then.
    pub fn write(&mut self, frame: &[u8], out: &mut Vec<u8>) -> Result<(), SplitError> {
        let parts = self.split(frame)?;
        out.reserve(frame.len().saturating_add(parts.len().saturating_mul(HEADER_LEN)));
        for part in parts {
            part.write(out);
        }
        Ok(())
    }
}

/// The datagrams of one frame, in order.
#[derive(Debug, Clone)]
pub struct Parts<'f> {
    rest: core::slice::Chunks<'f, u8>,
    header: Header,
}

impl<'f> Iterator for Parts<'f> {
    type Item = Part<'f>;

    fn next(&mut self) -> Option<Part<'f>> {
        let part = Part { header: self.header, bytes: self.rest.next()? };
        self.header.index = self.header.index.wrapping_add(1);
        Some(part)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.rest.size_hint()
    }
}

impl ExactSizeIterator for Parts<'_> {}

/// One datagram: a header and the bytes behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<'f> {
    /// The first 4 bytes.
    pub header: Header,
    /// The part of the frame.
    pub bytes: &'f [u8],
}

impl Part<'_> {
    /// Appends the datagram to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.header.encode());
        out.extend_from_slice(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn parts_are_full_but_for_the_last_and_ids_wrap() {
        let mut fragmenter = Fragmenter::starting_at(8, 0xffff).unwrap();
        let mut out = vec![0xa5];
        fragmenter.write(b"abcdefghi", &mut out).unwrap();
        assert_eq!(out, *b"\xa5\xff\xff\x00\x03abcd\xff\xff\x01\x03efgh\xff\xff\x02\x03i");
        let parts: Vec<Part<'_>> = fragmenter.split(b"abcd").unwrap().collect();
        assert_eq!(parts, [Part { header: Header { frame_id: 0, index: 0, total: 1 }, bytes: b"abcd" }]);
    }

    #[test]
    fn sizes_at_and_past_their_limits() {
        for mtu in [0, 4, 65_508, usize::MAX] {
            assert_eq!(Fragmenter::new(mtu).unwrap_err(), SplitError::Mtu { mtu });
        }
        assert_eq!(Fragmenter::new(MAX_MTU).unwrap().max_frame_len(), 16_703_265);
        let mut fragmenter = Fragmenter::new(5).unwrap();
        assert_eq!(fragmenter.split(&[]).unwrap_err(), SplitError::Empty);
        assert_eq!(fragmenter.split(&[0; 255]).unwrap().len(), 255);
        let mut out = vec![1];
        assert_eq!(fragmenter.write(&[0; 256], &mut out), Err(SplitError::TooLong { len: 256, max: 255 }));
        assert_eq!(out, [1]);
        assert_eq!(fragmenter.split(&[0]).unwrap().next().unwrap().header.frame_id, 1, "a failure uses no id");
    }
}
