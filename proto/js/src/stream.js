// Frames out of a byte stream that arrives in pieces of any size.

import { decodeFrame } from './aeon_proto.js';
import { HEADER_LEN, MAX_FRAME_LEN, MAX_PAYLOAD_LEN, PREFIX_LEN } from './constants.js';
import { FrameError } from './errors.js';

/** Reads frames with their u32 length in front, as on Unix sockets and TCP; or without it (`bare`). */
export class FrameReader {
  #maxFrame;
  #prefixLen;
  #buffer = new Uint8Array(0);
  #start = 0;
  #end = 0;
  #failed;

  constructor({ maxFrame = MAX_FRAME_LEN, bare = false } = {}) {
    if (!Number.isInteger(maxFrame) || maxFrame < HEADER_LEN || maxFrame > MAX_FRAME_LEN) {
      throw new RangeError(`maxFrame must be a whole number from ${HEADER_LEN} to ${MAX_FRAME_LEN}, got ${maxFrame}`);
    }
    this.#maxFrame = maxFrame;
    this.#prefixLen = bare ? 0 : PREFIX_LEN;
  }

  /** Bytes that came and are not part of a frame that was returned. */
  get pending() {
    return this.#end - this.#start;
  }

  /** Takes a piece of the stream; it is copied. */
  push(chunk) {
    if (!(chunk instanceof Uint8Array)) throw new TypeError('chunk must be a Uint8Array');
    const needed = this.pending + chunk.length;
    if (this.#end + chunk.length > this.#buffer.length) {
      let target = this.#buffer;
      // The buffer grows with what has come, never with what a header announces.
      if (needed > target.length || target.length > 4 * needed + 65536)
        target = new Uint8Array(Math.max(1024, 2 * needed));
      target.set(this.#buffer.subarray(this.#start, this.#end));
      [this.#buffer, this.#end, this.#start] = [target, this.pending, 0];
    }
    this.#buffer.set(chunk, this.#end);
    this.#end += chunk.length;
  }

  /** The next frame, or `undefined` if more bytes are needed. After an error the stream cannot be read on. */
  next() {
    if (this.#failed) throw this.#failed;
    const bytes = this.#buffer.subarray(this.#start, this.#end);
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    const at = this.#prefixLen;
    const prefix = at > 0 && bytes.length >= PREFIX_LEN ? view.getUint32(0) : undefined;
    if (prefix < HEADER_LEN) {
      const message = `length prefix ${prefix} is under 10, the bytes of a frame header`;
      this.#fail(message, 'PrefixTooSmall', { prefix, streamId: 0, sequence: 0 });
    }
    if (bytes.length < at + HEADER_LEN) return undefined;
    const names = { streamId: view.getUint16(at), sequence: view.getUint32(at + 2) };
    const payloadLen = view.getUint32(at + 6) & MAX_PAYLOAD_LEN;
    const frameLen = HEADER_LEN + payloadLen;
    const len = Math.max(prefix ?? 0, frameLen);
    if (len > this.#maxFrame) {
      const message = `frame of ${len} bytes, at most ${this.#maxFrame} are taken`;
      this.#fail(message, 'FrameTooLarge', { len, max: this.#maxFrame, ...names });
    }
    if (prefix !== undefined && prefix !== frameLen) {
      const message = `length prefix ${prefix} does not equal 10 + ${payloadLen} of the header behind it`;
      this.#fail(message, 'PrefixMismatch', { prefix, payloadLen, ...names });
    }
    if (bytes.length < at + frameLen) return undefined;
    const frame = decodeFrame(bytes.subarray(at, at + frameLen));
    this.#start += at + frameLen;
    if (this.#start === this.#end) this.#start = this.#end = 0;
    return frame;
  }

  #fail(message, code, details) {
    this.#failed = new FrameError(message, code, details);
    throw this.#failed;
  }

  /** All frames that are complete. */
  *[Symbol.iterator]() {
    for (let frame = this.next(); frame !== undefined; frame = this.next()) yield frame;
  }
}
