//! The fragmented UDP transport. Spec: `proto/spec-bw.md`, "Fragmented UDP".

use alloc::{string::String, vec::Vec};

use js_sys::{Array, Object, Uint8Array};
use wasm_bindgen::prelude::{JsValue, wasm_bindgen};

use super::{array_of_bytes, big, bytes, fault, member, range, set, text, whole, whole_u16};
use crate::fragment::{self, AckEntry, Outcome};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** One row of an acknowledgement: bit i of `bits` says that sequence `base + i` has come. */
export interface AckEntry { streamId: number; base: number; bits: bigint; }
"#;

const CLASS: &str = "FragmentError";

/// Cuts frames into datagrams of at most `mtu` bytes.
#[wasm_bindgen]
#[derive(Debug)]
pub struct Fragmenter(fragment::Fragmenter);

#[wasm_bindgen]
impl Fragmenter {
    /// @throws FragmentError if no part fits such a datagram
    #[wasm_bindgen(constructor)]
    pub fn new(
        #[wasm_bindgen(unchecked_param_type = "number")] mtu: &JsValue,
        #[wasm_bindgen(unchecked_optional_param_type = "number")] first_frame_id: &JsValue,
    ) -> Result<Self, JsValue> {
        let mtu = whole(mtu, "mtu", u32::MAX)? as usize;
        let first = if first_frame_id.is_undefined() { 0 } else { whole_u16(first_frame_id, "firstFrameId")? };
        fragment::Fragmenter::starting_at(mtu, first).map(Self).map_err(|error| fault(CLASS, &error))
    }

    /// The datagrams of one frame, given as its bytes.
    ///
    /// @throws FragmentError if it does not fit 255 parts
    #[wasm_bindgen(unchecked_return_type = "Uint8Array[]")]
    pub fn split(
        &mut self,
        #[wasm_bindgen(unchecked_param_type = "Uint8Array")] frame: &JsValue,
    ) -> Result<Array, JsValue> {
        let frame = bytes(frame, "frame")?;
        let parts = self.0.split(&frame).map_err(|error| fault(CLASS, &error))?;
        Ok(array_of_bytes(parts.map(|part| {
            let mut datagram = Vec::new();
            part.write(&mut datagram);
            datagram
        })))
    }
}

/// Joins the parts of frames, for each peer and within limits.
#[wasm_bindgen]
#[derive(Debug)]
pub struct Reassembler(fragment::Reassembler<String>);

impl Default for Reassembler {
    fn default() -> Self {
        Self(fragment::Reassembler::new(fragment::Limits::default()))
    }
}

#[wasm_bindgen]
impl Reassembler {
    /// With the default limits: 1,024 frames and 64 MiB in all, 64 frames and 32 MiB a peer, 5 seconds.
    #[wasm_bindgen(constructor)]
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a datagram of a peer; `nowMs` is a clock that only goes forward. Returns the bytes of the frame that it
    /// completes, or `undefined`.
    ///
    /// @throws FragmentError if it is no part
    #[wasm_bindgen(unchecked_return_type = "Uint8Array | undefined")]
    pub fn push(
        &mut self,
        now_ms: f64,
        #[wasm_bindgen(unchecked_param_type = "string")] peer: &JsValue,
        #[wasm_bindgen(unchecked_param_type = "Uint8Array")] datagram: &JsValue,
    ) -> Result<Option<Uint8Array>, JsValue> {
        let (peer, datagram) = (text(peer, "peer")?, bytes(datagram, "datagram")?);
        // A cast from f64 saturates; a clock that is no number stands still.
        match self.0.push(now_ms as u64, &peer, &datagram).map_err(|error| fault(CLASS, &error))? {
            Outcome::Complete(frame) => Ok(Some((&*frame).into())),
            Outcome::Waiting | Outcome::Duplicate => Ok(None),
        }
    }

    /// Drops what has come of a peer's frames.
    pub fn forget(&mut self, #[wasm_bindgen(unchecked_param_type = "string")] peer: &JsValue) -> Result<(), JsValue> {
        self.0.forget(&text(peer, "peer")?);
        Ok(())
    }

    /// Bytes held for frames that are not complete.
    #[wasm_bindgen(getter, js_name = bytesHeld)]
    #[must_use]
    pub fn bytes_held(&self) -> usize {
        self.0.bytes()
    }
}

/// Brings what belongs to one stream into the order of its sequence numbers.
#[wasm_bindgen]
#[derive(Debug, Default)]
pub struct StreamOrder(fragment::StreamOrder<JsValue>);

#[wasm_bindgen]
impl StreamOrder {
    /// The first sequence number is 0 unless given.
    #[wasm_bindgen(constructor)]
    pub fn new(#[wasm_bindgen(unchecked_optional_param_type = "number")] first: &JsValue) -> Result<Self, JsValue> {
        let first = if first.is_undefined() { 0 } else { whole(first, "first", u32::MAX)? };
        Ok(Self(fragment::StreamOrder::starting_at(first)))
    }

    /// Takes one item and returns what can be delivered now.
    #[wasm_bindgen(unchecked_return_type = "unknown[]")]
    pub fn push(
        &mut self,
        #[wasm_bindgen(unchecked_param_type = "number")] sequence: &JsValue,
        #[wasm_bindgen(unchecked_param_type = "unknown")] item: JsValue,
    ) -> Result<Array, JsValue> {
        Ok(self.0.push(whole(sequence, "sequence", u32::MAX)?, item).into_iter().collect())
    }

    /// Items that wait for one before them.
    #[wasm_bindgen(getter)]
    #[must_use]
    pub fn held(&self) -> usize {
        self.0.held()
    }
}

/// Frames that were sent and not acknowledged yet.
#[wasm_bindgen]
#[derive(Debug, Default)]
pub struct InFlight(fragment::InFlight<JsValue>);

#[wasm_bindgen]
impl InFlight {
    /// Nothing in flight.
    #[wasm_bindgen(constructor)]
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes a frame that was sent at `nowMs`.
    pub fn insert(
        &mut self,
        #[wasm_bindgen(unchecked_param_type = "number")] stream_id: &JsValue,
        #[wasm_bindgen(unchecked_param_type = "number")] sequence: &JsValue,
        now_ms: f64,
        #[wasm_bindgen(unchecked_param_type = "unknown")] frame: JsValue,
    ) -> Result<(), JsValue> {
        let (stream_id, sequence) = (whole_u16(stream_id, "streamId")?, whole(sequence, "sequence", u32::MAX)?);
        self.0.insert(stream_id, sequence, now_ms as u64, frame);
        Ok(())
    }

    /// Forgets what an entry acknowledges and returns how many frames that were.
    pub fn acknowledge(
        &mut self,
        #[wasm_bindgen(unchecked_param_type = "AckEntry")] entry: &JsValue,
    ) -> Result<usize, JsValue> {
        Ok(self.0.acknowledge(entry_of(entry)?))
    }

    /// The frames that were sent at least `afterMs` ago; they count as sent now.
    #[wasm_bindgen(unchecked_return_type = "unknown[]")]
    pub fn overdue(&mut self, now_ms: f64, after_ms: f64) -> Array {
        self.0.overdue(now_ms as u64, after_ms as u64).map(|(_, _, frame)| frame.clone()).collect()
    }

    /// Stream id and sequence of each frame in flight.
    #[wasm_bindgen(unchecked_return_type = "[streamId: number, sequence: number][]")]
    #[must_use]
    pub fn keys(&self) -> Array {
        let pair = |(stream_id, sequence): (u16, u32)| Array::of2(&stream_id.into(), &sequence.into());
        self.0.keys().map(pair).collect()
    }
}

/// Frames that have come and are not acknowledged yet.
#[wasm_bindgen]
#[derive(Debug, Default)]
pub struct Received(fragment::Received);

#[wasm_bindgen]
impl Received {
    /// Nothing received.
    #[wasm_bindgen(constructor)]
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes a frame.
    ///
    /// @throws RangeError if a number does not fit its field
    pub fn insert(
        &mut self,
        #[wasm_bindgen(unchecked_param_type = "number")] stream_id: &JsValue,
        #[wasm_bindgen(unchecked_param_type = "number")] sequence: &JsValue,
    ) -> Result<(), JsValue> {
        self.0.insert(whole_u16(stream_id, "streamId")?, whole(sequence, "sequence", u32::MAX)?);
        Ok(())
    }

    /// The next acknowledgement, as the bytes of a frame; `undefined` if there is nothing to acknowledge. One holds 64
    /// sequence numbers of each stream: call it until it gives none.
    #[wasm_bindgen(js_name = takeAck, unchecked_return_type = "Uint8Array | undefined")]
    pub fn take_ack(&mut self) -> Result<Option<Uint8Array>, JsValue> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let mut frame = Vec::new();
        fragment::encode_ack(&self.0.take(usize::MAX), &mut frame).map_err(|error| range(&error))?;
        Ok(Some(frame.as_slice().into()))
    }
}

/// The entries of an acknowledgement's payload.
#[wasm_bindgen(js_name = decodeAcks, unchecked_return_type = "AckEntry[]")]
pub fn decode_acks(#[wasm_bindgen(unchecked_param_type = "Uint8Array")] payload: &JsValue) -> Result<Array, JsValue> {
    let entries = Array::new();
    for AckEntry { stream_id, base, bits } in fragment::decode_acks(&bytes(payload, "payload")?) {
        let object = Object::new();
        set(&object, "streamId", &stream_id.into())?;
        set(&object, "base", &base.into())?;
        set(&object, "bits", &bits.into())?;
        entries.push(&object);
    }
    Ok(entries)
}

fn entry_of(entry: &JsValue) -> Result<AckEntry, JsValue> {
    Ok(AckEntry {
        stream_id: whole_u16(&member(entry, "streamId")?, "streamId")?,
        base: whole(&member(entry, "base")?, "base", u32::MAX)?,
        bits: big(&member(entry, "bits")?, "bits")?,
    })
}
