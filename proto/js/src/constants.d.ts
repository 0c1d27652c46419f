/** Bytes of a frame header. */
export const HEADER_LEN: 10;
/** Bytes of the length in front of a frame on a stream. */
export const PREFIX_LEN: 4;
/** The largest payload: 24 bits of length. */
export const MAX_PAYLOAD_LEN: 0xffffff;
/** The largest frame, header included. */
export const MAX_FRAME_LEN: number;
/** Bits of the flag byte. SUCCESS and FAILURE are what the answers of a station carry. */
export const Flags: Readonly<{
  NONE: 0;
  FORK: 0x01;
  RACE: 0x02;
  FOLD: 0x04;
  VENT: 0x08;
  FIN: 0x10;
  RESPONSE: 0x20;
  HELIX: 0x40;
  ACK: 0x80;
  SUCCESS: 0x30;
  FAILURE: 0x38;
}>;
/** Route opcodes. */
export const Route: Readonly<{
  HELLO: 0x0000;
  HEALTH: 0x0001;
  EMBED: 0x0002;
  FORWARD: 0x0003;
  LM_HEAD: 0x0004;
  RESET: 0x0005;
  BASIS_PUT: 0x0006;
  FORWARD_PCA: 0x0103;
  LM_HEAD_PCA: 0x0104;
  FORWARD_Q: 0x0203;
  LM_HEAD_Q: 0x0204;
  AMPLITUHEDRON_REPLAY: 0xb001;
  AMPLITUHEDRON_CAPTURE: 0xb002;
  SHARD_PUT: 0xf001;
  SHARD_GET: 0xf002;
}>;
/** The text form of a fingerprint or methodology id: `0x` and 8 hex digits. */
export function formatFingerprint(fingerprint: number): string;
