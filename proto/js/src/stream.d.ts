import type { Frame } from './aeon_proto.js';

/**
 * Frames out of a byte stream that arrives in pieces of any size: each with its length as u32 in front, as on Unix
 * sockets and TCP, or without it (`bare`). Buffers grow with what has come, never with what a header announces.
 */
export class FrameReader implements Iterable<Frame> {
  /** `maxFrame` is the largest frame that is taken, header included; the protocol's own limit if absent. */
  constructor(options?: { maxFrame?: number; bare?: boolean });
  /** Bytes that came and are not part of a frame that was returned. */
  readonly pending: number;
  /** Takes a piece of the stream; it is copied. */
  push(chunk: Uint8Array): void;
  /**
   * The next frame, or `undefined` if more bytes are needed.
   *
   * @throws FrameError with code `PrefixTooSmall`, `PrefixMismatch` or `FrameTooLarge` and, in `details`, `streamId` and
   *   `sequence` as far as they could be read. The stream cannot be read on then: every later call throws the same.
   */
  next(): Frame | undefined;
  /** All frames that are complete. */
  [Symbol.iterator](): IterableIterator<Frame>;
}
