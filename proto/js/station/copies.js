// Copies of UDP requests: what the network doubles or a client repeats is done once.

import { xxh64 } from 'aeon-proto';

/** Answers that are kept, and their bytes. */
const MAX_COPIES = 4096;
const MAX_COPY_BYTES = 32 << 20;

export class Copies {
  /** Answers by request; `null` while it is worked on. The oldest comes first. */
  #answers = new Map();
  #bytes = 0;

  /** What is known of a request: it is `new`, `inFlight`, or `done` with an answer. */
  begin({ streamId, sequence, payload }, address) {
    const key = `${address} ${streamId} ${sequence} ${xxh64(payload)}`;
    const known = this.#answers.get(key);
    if (known === undefined) {
      this.#answers.set(key, null);
      return { state: 'new', key };
    }
    return known === null ? { state: 'inFlight' } : { state: 'done', reply: known };
  }

  /** Keeps the answer to a request that was new; without one it is new again. */
  finish(key, reply) {
    if (key === undefined) return;
    this.#answers.delete(key);
    if (reply === undefined) return;
    this.#answers.set(key, reply);
    this.#bytes += reply.length;
    for (const [oldest, kept] of this.#answers) {
      if (this.#answers.size <= MAX_COPIES && this.#bytes <= MAX_COPY_BYTES) break;
      if (kept === null) continue;
      this.#answers.delete(oldest);
      this.#bytes -= kept.length;
    }
  }
}
