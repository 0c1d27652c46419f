// A residual receiver: takes raw and compressed residuals, lifts what is compressed, and gives the result to a function.
//
// The order of the checks is that of proto/SPEC.md, "Status codes". This file knows no socket: a carrier brings frames and
// the peer that they came from, and sends what it is given.

import { blake3 } from '@noble/hashes/blake3.js';
import {
  Flags,
  MAX_FRAME_LEN,
  Route,
  decodePayload,
  decodePcar,
  encodeFrame,
  formatFingerprint,
  parseFingerprint,
  parseRequestMeta,
  routeName,
} from 'aeon-proto';

import { Bases } from './bases.js';
import { Copies } from './copies.js';
import {
  CONTENT_TYPE,
  MAX_POSITION,
  Vent,
  asksForV1,
  boundaryVent,
  cancelled,
  checkContext,
  checkFinite,
  checkFp48,
  positionVent,
  tooLarge,
  ventOf,
  withFp48,
} from './requests.js';
import { Sessions } from './sessions.js';

/** The largest UDP datagram over IPv4. */
export const MAX_DATAGRAM = 65_507;
const VERSION = '0.1.0';
/** Fingerprints that a vent lists at most. */
const MAX_HAVE = 64;
/** More than header and meta of any success take. */
const REPLY_OVERHEAD = 320;
const NEVER_ANSWERED = Flags.RESPONSE | Flags.ACK | Flags.FORK | Flags.RACE | Flags.FOLD;
const RETRY_AFTER_MS = 250;
/** The longest meta of a vent, so that it fits every carrier. */
const MAX_VENT_META = 4096;

const fingerprint128 = (text) => Buffer.from(blake3(Buffer.from(text))).toString('hex', 0, 16);
const identity = ({ residuals }) => residuals;

/** Who sends: one for each stream connection, and one for each address on UDP. */
export class Peer {
  /** Requests in flight by opcode and sequence. */
  inFlight = new Map();

  constructor({ address, maxReply = MAX_FRAME_LEN } = {}) {
    /** The sender's address, on UDP only. */
    this.address = address;
    this.maxReply = maxReply;
  }
}

export class Station {
  #forward;
  #sessions;
  #copies = new Copies();
  #started = Date.now();
  #inFlight = 0;
  #inFlightBytes = 0;

  /** See index.d.ts. */
  constructor(options) {
    const { hiddenDim, layers = [0, 1], nLayers = layers[1], bases = new Bases(), forward = identity } = options;
    this.name = options.name ?? 'aeon-station-js';
    this.hiddenDim = inRange('hiddenDim', hiddenDim, 1, 1 << 22);
    this.layers = [inRange('layers[0]', layers[0], 0, 0xffff), inRange('layers[1]', layers[1], layers[0] + 1, 0xffff)];
    this.nLayers = inRange('nLayers', nLayers, layers[1], 0xffff);
    this.vocab = inRange('vocab', options.vocab ?? 65_536, 1, 1 << 24);
    this.bases = bases;
    this.limits = {
      maxFrame: inRange('maxFrame', options.maxFrame ?? MAX_FRAME_LEN, 1024, MAX_FRAME_LEN),
      maxSeq: inRange('maxSeq', options.maxSeq ?? 4096, 1, 1 << 20),
      maxInFlight: 1024,
      maxInFlightBytes: 256 << 20,
    };
    this.counters = {
      requests: 0,
      errors: 0,
      connections: 0,
      connections_refused: 0,
      send_errors: 0,
      dropped: {
        never_answered: 0,
        empty: 0,
        undecodable: 0,
        peer_not_allowed: 0,
        duplicate: 0,
        stale: 0,
        idle_cancel: 0,
      },
    };
    this.#forward = forward;
    this.#sessions = new Sessions();
    const shape = `"hidden_dim":${this.hiddenDim},"vocab":${this.vocab}`;
    const [lo, hi] = this.layers;
    this.config =
      lo === 0 && hi === 1 && this.nLayers === 1
        ? `{"family":"identity",${shape}}`
        : `{"family":"identity",${shape},"n_layers":${this.nLayers}}`;
    this.configFp = options.configFp ?? fingerprint128(this.config);
    this.layersFp = options.layersFp ?? fingerprint128('identity');
  }

  /**
   * Handles one frame. `reply` is called with the bytes of the answer, at once or later; not at all for what is never
   * answered. Throws nothing, whatever the frame holds.
   */
  handle(frame, peer, reply) {
    if ((frame.flags & NEVER_ANSWERED) !== 0) {
      this.counters.dropped.never_answered += 1;
    } else if ((frame.flags & Flags.VENT) !== 0) {
      this.#cancel(frame, peer);
    } else if (frame.payload.length === 0) {
      this.counters.dropped.empty += 1;
    } else {
      this.#request(frame, peer, reply);
    }
  }

  /** The vent of a fault that is not one request's, such as a stream that cannot be read on. */
  vent(streamId, sequence, status, message, fields) {
    this.counters.errors += 1;
    return encodeFrame({ streamId, sequence, flags: Flags.FAILURE, meta: new Vent(status, message, fields).meta });
  }

  /** Withdraws what a peer that is gone has in flight. */
  forget(peer) {
    for (const job of peer.inFlight.values()) job.abort.abort();
  }

  #cancel({ streamId, sequence }, peer) {
    const job = peer.inFlight.get(`${streamId}:${sequence}`);
    if (job === undefined) this.counters.dropped.idle_cancel += 1;
    else job.abort.abort();
  }

  #request(frame, peer, reply) {
    this.counters.requests += 1;
    let copy;
    const answer = (meta, body, flags = Flags.SUCCESS) => {
      let bytes = encodeFrame({ streamId: frame.streamId, sequence: frame.sequence, flags, meta, body });
      const max = Math.min(peer.maxReply, this.limits.maxFrame);
      if (bytes.length > max) {
        this.counters.errors += 1;
        bytes = encodeFrame({
          streamId: frame.streamId,
          sequence: frame.sequence,
          flags: Flags.FAILURE,
          meta: tooLarge(bytes.length, max, peer).meta,
        });
        flags = Flags.FAILURE;
      }
      this.#copies.finish(copy, flags === Flags.SUCCESS ? bytes : undefined);
      reply(bytes);
    };
    const refuse = (error) => {
      this.counters.errors += 1;
      let { meta } = ventOf(error);
      // The fields of a vent that `forward` throws are not ours.
      if (Buffer.byteLength(JSON.stringify(meta)) > MAX_VENT_META) meta = { status: meta.status, error: meta.error };
      answer(meta, undefined, Flags.FAILURE);
    };
    try {
      const route = this.#route(frame.streamId);
      const { metaText, body } = decodePayload(frame.payload);
      const meta = parseRequestMeta(metaText);
      if (route === Route.HELLO) return answer(this.#hello(meta, Math.min(peer.maxReply, this.limits.maxFrame)));
      if (route === Route.HEALTH) return answer(this.#health());
      if (peer.address !== undefined && meta.session !== undefined) {
        const known = this.#copies.begin(frame, peer.address);
        if (known.state === 'inFlight') return void (this.counters.dropped.duplicate += 1);
        if (known.state === 'done') return reply(known.reply);
        copy = known.key;
      }
      const call = this.#prepare(route, meta, body, frame, peer);
      call.answer = answer;
      call.refuse = refuse;
      call.drop = () => {
        this.counters.dropped.stale += 1;
        this.#copies.finish(copy, undefined);
      };
      this.#start(call, frame, peer);
    } catch (error) {
      refuse(error);
    }
  }

  #route(opcode) {
    const name = routeName(opcode);
    if (name === undefined) throw new Vent(404, `unknown route 0x${opcode.toString(16).padStart(4, '0')}`);
    switch (opcode) {
      case Route.HELLO:
      case Route.HEALTH:
      case Route.FORWARD:
      case Route.FORWARD_PCA:
      case Route.RESET:
        return opcode;
      default:
        throw new Vent(501, `route ${name} is not enabled on this station, which only receives residuals`, {
          layers: this.layers,
        });
    }
  }

  /** What can be checked before the session's turn has come. */
  #prepare(route, meta, body, frame, peer) {
    const { session, pos } = meta;
    const isPca = route === Route.FORWARD_PCA;
    const call = {
      meta,
      session,
      pos,
      isPca,
      body,
      seq: 0,
      sequence: frame.sequence,
      sender: peer.address,
      abort: new AbortController(),
    };
    call.deadline = meta.deadline_ms === undefined ? Infinity : Date.now() + meta.deadline_ms;
    if (route === Route.RESET) {
      if (session === undefined) throw new Vent(400, 'RESET needs a session');
      checkFp48(meta, body);
      call.isReset = true;
      call.pos = undefined;
      return call;
    }
    if (meta.out === 'token' || (!isPca && meta.in === 'ids')) {
      const part = meta.out === 'token' ? 'head' : 'embedding';
      throw new Vent(501, `this station only receives residuals, it has no ${part}`, { layers: this.layers });
    }
    if (isPca) {
      checkFp48(meta, body);
      this.#checkPcar(call, body);
    } else {
      call.seq = this.#checkRaw(body);
    }
    call.compress = this.#outputBasis(meta, call.basis);
    const width = call.compress === undefined ? 4 * this.hiddenDim : 24 + 4 * call.compress.k;
    const max = Math.min(peer.maxReply, this.limits.maxFrame);
    const len = call.seq * width + REPLY_OVERHEAD;
    if (len > max) throw tooLarge(len, max, peer);
    if (!isPca) checkFp48(meta, body);
    const [boundary] = this.layers;
    if (meta.boundary !== undefined && meta.boundary !== boundary) throw boundaryVent(meta.boundary, boundary);
    if (meta.config_fp !== undefined && meta.config_fp.toLowerCase() !== this.configFp) {
      throw new Vent(409, "config_fp of the request differs from this model's: the stations hold different models", {
        config_fp: this.configFp,
      });
    }
    if (session !== undefined && pos === undefined && peer.address !== undefined) {
      throw new Vent(400, 'a session over UDP needs pos in every request');
    }
    if (session === undefined && pos > 0) throw positionVent(pos, 0);
    checkContext(pos ?? 0, call.seq);
    return call;
  }

  #checkRaw(body) {
    if (body.length % 4 !== 0) throw new Vent(400, `body of ${body.length} bytes is no multiple of 4`);
    if (body.length % (4 * this.hiddenDim) !== 0) {
      const message = `hidden_dim mismatch: body of ${body.length} bytes is no multiple of 4 x ${this.hiddenDim}`;
      throw new Vent(400, message, { hidden_dim: this.hiddenDim });
    }
    return this.#checkSeq(body.length / (4 * this.hiddenDim));
  }

  #checkSeq(seq) {
    const max = this.limits.maxSeq;
    if (seq === 0) throw new Vent(400, 'body is empty, at least one position is expected');
    if (seq > max)
      throw new Vent(413, `${seq} positions in one request, at most ${max} are taken; split it`, { max_seq: max });
    return seq;
  }

  #checkPcar(call, body) {
    if (body.length === 0) this.#checkSeq(0);
    const pcar = decodePcar(body);
    call.seq = this.#checkSeq(pcar.seq);
    const file = this.bases.get(pcar.basisFp);
    if (file === undefined) {
      const have = this.bases.fingerprints.slice(0, MAX_HAVE).map(formatFingerprint);
      throw new Vent(412, 'basis fingerprint mismatch', { have });
    }
    if (pcar.methodology !== file.methodology || !this.bases.knows(pcar.methodology)) {
      throw new Vent(412, 'methodology mismatch', { methodology: formatFingerprint(file.methodology) });
    }
    for (const [part, got] of [
      ['body', pcar.hiddenDim],
      ['basis', file.hiddenDim],
    ]) {
      if (got === this.hiddenDim) continue;
      const message = `hidden_dim mismatch: ${got} in the ${part}, this model has ${this.hiddenDim}`;
      throw new Vent(400, message, { hidden_dim: this.hiddenDim });
    }
    const [boundary] = this.layers;
    if (pcar.boundary !== boundary) throw boundaryVent(pcar.boundary, boundary);
    const max = file.components.get(boundary) ?? 0;
    if (max === 0) throw new Vent(412, `the basis has no components for boundary ${boundary}; send raw f32`);
    if (pcar.k > max)
      throw new Vent(400, `${pcar.k} components in the body, the basis has ${max} at this boundary`, { k: max });
    call.basis = file;
    call.components = pcar.components;
  }

  /** How the answer is compressed; `undefined` is raw f32. */
  #outputBasis(meta, input) {
    if (meta.accept === undefined) return undefined;
    const boundary = this.layers[1];
    const files =
      meta.accept_basis === undefined
        ? [input]
        : meta.accept_basis.map((text) => this.bases.get(parseFingerprint(text)));
    for (const kind of meta.accept) {
      if (kind === 'f32') return undefined;
      if (kind !== 'pcar') continue;
      for (const file of files) {
        const max = file?.components.get(boundary) ?? 0;
        const k = Math.min(max, meta.accept_k ?? max);
        if (k > 0 && file.hiddenDim === this.hiddenDim) return { basis: file.basis, boundary, k };
      }
    }
    throw new Vent(400, 'none of the accepted body kinds is supported; this station answers with f32');
  }

  /** Runs a call, or puts it behind what its session has to do first. */
  #start(call, frame, peer) {
    const { isReset } = call;
    if (isReset && this.#sessions.get(call.session) === undefined) {
      this.#sessions.reset(call.session);
      return call.answer(withFp48({ status: 200 }, call));
    }
    const session = call.session === undefined ? undefined : this.#sessions.open(call.session, call.pos, Date.now());
    if (
      this.#inFlight >= this.limits.maxInFlight ||
      this.#inFlightBytes + call.body.length > this.limits.maxInFlightBytes
    ) {
      const message = `overloaded: ${this.#inFlight} requests of ${this.#inFlightBytes} bytes are waiting`;
      throw new Vent(503, message, { retry_after_ms: RETRY_AFTER_MS });
    }
    const run = () => this.#run(call, session);
    const waiting = session?.last;
    const result = waiting === undefined ? run() : waiting.then(run);
    if (result === undefined) {
      if (isReset) this.#sessions.reset(call.session);
      return undefined;
    }
    // It takes time: from here on it can be cancelled, and its session's next request waits for it.
    const key = `${frame.streamId}:${frame.sequence}`;
    peer.inFlight.set(key, call);
    this.#inFlight += 1;
    this.#inFlightBytes += call.body.length;
    const done = result.finally(() => {
      if (peer.inFlight.get(key) === call) peer.inFlight.delete(key);
      this.#inFlight -= 1;
      this.#inFlightBytes -= call.body.length;
      if (session?.last === done) {
        session.last = undefined;
        if (isReset) this.#sessions.reset(call.session);
      }
      peer.onSettled?.();
    });
    if (session !== undefined) session.last = done;
    return undefined;
  }

  /** Does the work of a call. Returns a promise only if the function of the station does. */
  #run(call, session) {
    try {
      if (call.abort.signal.aborted) throw cancelled();
      let begin = 0;
      if (session !== undefined) {
        if (call.sender !== undefined && session.isStale(call.sender, call.sequence)) return call.drop();
        if (call.isReset) {
          // What is already behind it begins anew.
          session.length = 0;
          return call.answer(withFp48({ status: 200 }, call));
        }
        begin = call.pos ?? session.length;
        if (begin > session.length) throw positionVent(begin, session.length);
        checkContext(begin, call.seq);
      }
      const started = performance.now();
      const residuals = this.#residuals(call);
      const lifted = performance.now();
      if (call.abort.signal.aborted) throw cancelled();
      if (Date.now() >= call.deadline) throw new Vent(504, `deadline of ${call.meta.deadline_ms} ms passed`);
      if (session !== undefined) session.length = begin;
      const finish = (result) =>
        this.#finish(call, session, begin, result, { lift: lifted - started, compute: performance.now() - lifted });
      const output = this.#forward({
        residuals,
        seq: call.seq,
        pos: begin,
        boundary: this.layers[0],
        session: call.session,
        compressed: call.isPca,
        signal: call.abort.signal,
      });
      if (typeof output?.then !== 'function') return void finish(output);
      return output.then(finish).catch((error) => call.refuse(call.abort.signal.aborted ? cancelled() : error));
    } catch (error) {
      call.refuse(error);
      return undefined;
    }
  }

  #residuals(call) {
    if (!call.isPca) {
      // The body was copied out of the frame, so it starts at an aligned place; the platform must be little-endian.
      const values = new Float32Array(call.body.buffer, call.body.byteOffset, call.body.length / 4);
      checkFinite(values, 422, (index) => `value ${index} of the body is NaN or infinite`);
      return values;
    }
    checkFinite(call.components, 422, (index) => `value ${index} of the body is NaN or infinite`);
    return call.basis.basis.liftPcar(call.body);
  }

  #finish(call, session, begin, output, { lift, compute }) {
    if (call.abort.signal.aborted) throw cancelled();
    if (!(output instanceof Float32Array) || output.length !== call.seq * this.hiddenDim) {
      throw new Error(`forward must return a Float32Array of ${call.seq * this.hiddenDim} values`);
    }
    checkFinite(
      output,
      500,
      (index) => `value ${index} of the result is NaN or infinite though the request was finite`,
    );
    const body =
      call.compress === undefined
        ? new Uint8Array(output.buffer, output.byteOffset, output.byteLength)
        : call.compress.basis.compress(call.compress.boundary, output, call.compress.k);
    if (session !== undefined) {
      session.length = begin + call.seq;
      if (call.sender !== undefined) session.changedBy(call.sender, call.sequence);
    }
    const meta = {
      status: 200,
      body: call.compress === undefined ? 'f32' : 'pcar',
      pos: begin,
      seq: call.seq,
      layers: this.layers,
      dim: this.hiddenDim,
    };
    withFp48(meta, call, body);
    if (call.meta.timing === true) {
      const micros = (ms) => Math.max(0, Math.round(ms * 1000));
      meta.timing = { queue_us: 0, lift_us: micros(lift), compute_us: micros(compute) };
    }
    call.answer(meta, body);
  }

  #hello(meta, maxReply) {
    const v1 = asksForV1(meta.content_type);
    const hello = {
      status: 200,
      content_type: v1 ? `${CONTENT_TYPE}; v=1` : CONTENT_TYPE,
      station: { name: this.name, version: VERSION, uptime_ms: Date.now() - this.#started },
      model: {
        name: `identity:${this.hiddenDim}`,
        hidden_dim: this.hiddenDim,
        vocab: this.vocab,
        n_layers: this.nLayers,
        max_position: MAX_POSITION,
        bos: null,
        eos: [],
        config_fp: this.configFp,
        layers_fp: this.layersFp,
      },
      layers: this.layers,
      boundaries: [this.layers[0]],
      accepts: v1 && this.bases.fingerprints.length > 0 ? ['f32', 'pcar'] : ['f32'],
      limits: { max_frame: this.limits.maxFrame, max_datagram: MAX_DATAGRAM, max_seq: this.limits.maxSeq },
    };
    if (!v1) return hello;
    // As many as fit: the meta has 16 bits of length, and a datagram its own limit.
    const room = Math.min(0xffff, maxReply - 12);
    hello.bases = this.bases.list;
    while (hello.bases.length > 0 && Buffer.byteLength(JSON.stringify(hello)) > room) hello.bases.pop();
    return hello;
  }

  #health() {
    const { dropped, ...counters } = this.counters;
    return {
      status: 200,
      draining: false,
      uptime_ms: Date.now() - this.#started,
      ...counters,
      sessions: this.#sessions.size,
      session_bytes: 0,
      queued: this.#inFlight,
      queued_bytes: this.#inFlightBytes,
      dropped,
    };
  }
}

function inRange(name, value, min, max) {
  if (Number.isInteger(value) && value >= min && value <= max) return value;
  throw new RangeError(`${name} must be a whole number from ${min} to ${max}, got ${value}`);
}
