// Numbers of the protocol by name. A test compares them with the Rust crate.

/** Bytes of a frame header, and of the length in front of a frame on a stream. */
export const HEADER_LEN = 10;
export const PREFIX_LEN = 4;
/** The largest payload and the largest frame. */
export const MAX_PAYLOAD_LEN = 0xff_ffff;
export const MAX_FRAME_LEN = HEADER_LEN + MAX_PAYLOAD_LEN;

/** Bits of the flag byte. SUCCESS and FAILURE are what the answers of a station carry. */
export const Flags = Object.freeze({
  NONE: 0,
  FORK: 0x01,
  RACE: 0x02,
  FOLD: 0x04,
  VENT: 0x08,
  FIN: 0x10,
  RESPONSE: 0x20,
  HELIX: 0x40,
  ACK: 0x80,
  SUCCESS: 0x30,
  FAILURE: 0x38,
});

/** Route opcodes. */
export const Route = Object.freeze({
  HELLO: 0x0000,
  HEALTH: 0x0001,
  EMBED: 0x0002,
  FORWARD: 0x0003,
  LM_HEAD: 0x0004,
  RESET: 0x0005,
  BASIS_PUT: 0x0006,
  FORWARD_PCA: 0x0103,
  LM_HEAD_PCA: 0x0104,
  FORWARD_Q: 0x0203,
  LM_HEAD_Q: 0x0204,
  AMPLITUHEDRON_REPLAY: 0xb001,
  AMPLITUHEDRON_CAPTURE: 0xb002,
  SHARD_PUT: 0xf001,
  SHARD_GET: 0xf002,
});

/** The text form of a fingerprint or methodology id: `0x` and 8 hex digits. */
export function formatFingerprint(fingerprint) {
  if (!Number.isInteger(fingerprint) || fingerprint < 0 || fingerprint > 0xffff_ffff) {
    throw new RangeError(`fingerprint must be a whole number from 0 to 4294967295, got ${fingerprint}`);
  }
  return `0x${fingerprint.toString(16).padStart(8, '0')}`;
}
