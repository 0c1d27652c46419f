// Why a request is not done: a status, the text for its sender, and the fields that go with it. And the checks that need
// nothing but the request.

import { PayloadError, PcarError, fp48 } from 'aeon-proto';

/** The content type of this protocol; version 1 adds a parameter. */
export const CONTENT_TYPE = 'application/x-aeon-flow';
/** Positions of a session at most. */
export const MAX_POSITION = 1 << 24;
/** The longest error text that a peer gets, in bytes. */
const MAX_TEXT = 300;

export class Vent extends Error {
  constructor(status, message, fields = {}) {
    super(message);
    this.status = status;
    this.fields = fields;
  }

  get name() {
    return 'Vent';
  }

  /** The meta of the frame. */
  get meta() {
    return { status: this.status, error: cut(this.message), ...this.fields };
  }
}

function cut(text) {
  const bytes = Buffer.from(text);
  if (bytes.length <= MAX_TEXT) return text;
  let end = MAX_TEXT;
  // Not inside a character: its later bytes are 10xxxxxx.
  while ((bytes[end] & 0xc0) === 0x80) end -= 1;
  return bytes.toString('utf8', 0, end);
}

export const cancelled = () => new Vent(499, 'cancelled');
export const positionVent = (got, expected) =>
  new Vent(409, `pos ${got} asked for, the session goes on at ${expected}`, { expected_pos: expected });
export const boundaryVent = (got, expected) =>
  new Vent(409, `boundary ${got} in the request, this route takes boundary ${expected}`, { boundary: expected });
export const tooLarge = (len, max, peer) =>
  new Vent(413, `reply of ${len} bytes does not fit, at most ${max}; ask for fewer positions at once`, {
    [peer.address === undefined ? 'max_frame' : 'max_datagram']: max,
  });

/** What is wrong with the JSON of a meta. */
const META_FAULTS = new Set(['Syntax', 'NotObject', 'DuplicateKey', 'TooDeep']);

/** The vent of whatever was thrown. The cause of a fault of the station's own is not for the peer. */
export function ventOf(error) {
  if (error instanceof Vent) return error;
  if (error instanceof PcarError && error.code === 'LiftedNonFinite') return new Vent(422, error.message);
  if (error instanceof PcarError) return new Vent(400, `PCAR body: ${error.message}`);
  if (error instanceof PayloadError)
    return new Vent(400, META_FAULTS.has(error.code) ? `meta: ${error.message}` : error.message);
  console.error('request failed:', error);
  return new Vent(500, "internal error; the station's log says more");
}

export function checkFp48(meta, body) {
  if (meta.fp48 === undefined) return;
  const [expected, got] = [meta.fp48.toLowerCase(), fp48(body)];
  if (got !== expected)
    throw new Vent(400, `fp48 of the body is ${got}, the request says ${expected}: the body was damaged on its way`);
}

export function withFp48(meta, call, body = new Uint8Array()) {
  if (call.meta.fp48 !== undefined) meta.fp48 = fp48(body);
  return meta;
}

export function checkContext(pos, seq) {
  if (pos + seq > MAX_POSITION) {
    throw new Vent(413, `positions up to ${pos + seq} asked for, the context of this model is ${MAX_POSITION}`, {
      context_len: MAX_POSITION,
    });
  }
}

export function checkFinite(values, status, message) {
  const index = values.findIndex((value) => !Number.isFinite(value));
  if (index >= 0) throw new Vent(status, message(index));
}

export function asksForV1(contentType) {
  const [name, ...parameters] = (contentType ?? '').split(';').map((part) => part.trim());
  const version = (part) => Number(/^v=\s*\+?(\d+)$/.exec(part)?.[1] ?? 0);
  return (
    name.toLowerCase() === CONTENT_TYPE && parameters.some((part) => version(part) >= 1 && version(part) <= 0xffff_ffff)
  );
}
