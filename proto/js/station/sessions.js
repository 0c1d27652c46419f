// Sessions of a station that keeps no cache: the number of positions of each, and who changed it last.

import { Vent, positionVent } from './requests.js';

const MAX_SESSIONS = 4096;
/** Names of dropped sessions that are remembered, so that going on with one is refused and not begun anew. */
const MAX_DROPPED = 4096;
/** Senders of a session whose last sequence is remembered. */
const MAX_SENDERS = 8;

/** Whether a comes before b in the serial order of RFC 1982. */
const isBefore = (a, b) => a !== b && (b - a) >>> 0 < 0x8000_0000;

class Session {
  length = 0;
  usedAt = 0;
  /** The work that must be done before the next request of this session begins. */
  last = undefined;
  senders = new Map();

  isStale(sender, sequence) {
    const highest = this.senders.get(sender);
    return highest !== undefined && isBefore(sequence, highest);
  }

  changedBy(sender, sequence) {
    const highest = this.senders.get(sender);
    this.senders.delete(sender);
    this.senders.set(sender, highest !== undefined && isBefore(sequence, highest) ? highest : sequence);
    if (this.senders.size > MAX_SENDERS) this.senders.delete(this.senders.keys().next().value);
  }
}

export class Sessions {
  #sessions = new Map();
  #dropped = new Set();
  #maxIdleMs;

  constructor({ maxIdleMs = 3_600_000 } = {}) {
    this.#maxIdleMs = maxIdleMs;
  }

  get size() {
    return this.#sessions.size;
  }

  /** The session of a name, new if there is none. `pos` is where the request goes on, if it says so. */
  open(name, pos, now) {
    this.#expire(now);
    let session = this.#sessions.get(name);
    if (session === undefined) {
      // What a dropped session held is gone: only a request that begins at 0 may go on under its name.
      if (pos === undefined && this.#dropped.has(name)) {
        throw new Vent(409, 'the session was dropped; begin it again at pos 0', { expected_pos: 0 });
      }
      if (pos !== undefined && pos > 0) throw positionVent(pos, 0);
      this.#makeRoom();
      session = new Session();
    }
    this.#dropped.delete(name);
    // Maps keep the order of insertion: the least recently used is the first.
    this.#sessions.delete(name);
    this.#sessions.set(name, session);
    session.usedAt = now;
    return session;
  }

  get(name) {
    return this.#sessions.get(name);
  }

  /** Drops a session at the wish of its client. */
  reset(name) {
    this.#dropped.delete(name);
    return this.#sessions.delete(name);
  }

  #makeRoom() {
    if (this.#sessions.size < MAX_SESSIONS) return;
    for (const [name, session] of this.#sessions) {
      if (session.last !== undefined) continue;
      this.#drop(name);
      return;
    }
    throw new Vent(503, `no capacity: all ${MAX_SESSIONS} sessions are in use`, { retry_after_ms: 250 });
  }

  #expire(now) {
    for (const [name, session] of this.#sessions) {
      if (session.last !== undefined || now - session.usedAt < this.#maxIdleMs) return;
      this.#drop(name);
    }
  }

  #drop(name) {
    this.#sessions.delete(name);
    this.#dropped.add(name);
    if (this.#dropped.size > MAX_DROPPED) this.#dropped.delete(this.#dropped.values().next().value);
  }
}
