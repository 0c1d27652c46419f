// The residual receiver over real sockets: checks in their order, sessions, cancels, limits, hostile bytes.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import dgram from 'node:dgram';
import { once } from 'node:events';
import { existsSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import net from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';

import {
  Flags,
  FrameReader,
  Route,
  decodeFrame,
  decodePayload,
  encodeFrame,
  encodePayload,
  encodePcar,
  encodePrefixedFrame,
  formatFingerprint,
  fp48,
} from 'aeon-proto';
import { Bases, Peer, Station, Vent, listenUdp, listenUnix } from 'aeon-proto/station';
import { bits, thrown } from './support.js';

const repo = fileURLToPath(new URL('../../..', import.meta.url));
const PATIENCE = 30_000;
let folder;
let bases;
let sockets = 0;
const ends = [];

before(() => {
  folder = mkdtempSync(join(tmpdir(), 'aeon-js-'));
  bases = Bases.load(join(repo, 'bases/demo'), join(repo, 'bases/methodologies'));
});
after(async () => {
  await Promise.all(ends.map((end) => end()));
  rmSync(folder, { recursive: true });
});

function payloadOf(text, body = new Uint8Array()) {
  const length = Buffer.alloc(2);
  length.writeUInt16BE(Buffer.byteLength(text));
  return new Uint8Array(Buffer.concat([length, Buffer.from(text), body]));
}

/** A connection that matches answers by opcode and sequence. */
async function connect(path) {
  const socket = net.connect({ path, allowHalfOpen: true });
  await once(socket, 'connect', { signal: AbortSignal.timeout(PATIENCE) });
  const reader = new FrameReader();
  const frames = [];
  let wake = () => {};
  let ended = false;
  socket.on('data', (chunk) => {
    reader.push(chunk);
    frames.push(...reader);
    wake();
  });
  socket.on('end', () => ((ended = true), wake()));
  socket.on('error', () => ((ended = true), wake()));
  socket.on('close', () => ((ended = true), wake()));
  ends.push(async () => socket.destroy());
  const next = async () => {
    const timeout = AbortSignal.timeout(PATIENCE);
    while (frames.length === 0) {
      if (ended) return undefined;
      assert.ok(!timeout.aborted, 'no answer came');
      await new Promise((resolve) => {
        wake = resolve;
        timeout.addEventListener('abort', resolve, { once: true });
      });
    }
    const frame = frames.shift();
    return { ...frame, ...decodePayload(frame.payload) };
  };
  let sequence = 0;
  const send = (streamId, meta, body, flags) => {
    sequence += 1;
    // A text goes as it is, right or wrong.
    const payload = typeof meta === 'string' ? payloadOf(meta, body) : encodePayload(meta, body);
    socket.write(encodePrefixedFrame({ streamId, sequence, flags, payload }));
    return sequence;
  };
  const request = async (streamId, meta, body) => {
    const sent = send(streamId, meta, body);
    const reply = await next();
    assert.deepEqual([reply.streamId, reply.sequence], [streamId, sent]);
    assert.equal(reply.flags, reply.meta.status < 300 ? Flags.SUCCESS : Flags.FAILURE);
    return reply;
  };
  return { socket, next, send, request, write: (bytes) => socket.write(bytes) };
}

async function serve(options, listenOptions) {
  const station = new Station(options);
  const path = join(folder, `${(sockets += 1)}.sock`);
  ends.push(await listenUnix(station, path, listenOptions));
  return { station, path, client: await connect(path) };
}

const demo = (options) => ({ hiddenDim: 128, layers: [3, 6], bases, ...options });
const bytesOf = (values) => new Uint8Array(Float32Array.from(values).buffer);
const raw = (positions, width = 4) => bytesOf(Array.from({ length: positions * width }, (_, n) => n + 0.5));
const floatsOf = (body) => new Float32Array(body.slice().buffer);

function pcar(changes = {}) {
  const basis = bases.get(bases.fingerprints[0]).basis;
  const k = changes.k ?? 8;
  return encodePcar({
    boundary: 3,
    k,
    hiddenDim: basis.hiddenDim,
    methodology: basis.methodology,
    basisFp: basis.basisFp,
    components: new Float32Array(2 * k).fill(0.25),
    ...changes,
  });
}

test('HELLO says what it is, to version 1 with its bases', async () => {
  const { client } = await serve(demo());
  const { meta: v0 } = await client.request(Route.HELLO, {});
  assert.deepEqual([v0.content_type, v0.bases, v0.accepts], ['application/x-aeon-flow', undefined, ['f32']]);
  const { meta } = await client.request(Route.HELLO, { content_type: 'application/x-aeon-flow; v=1' });
  assert.deepEqual([meta.status, meta.layers, meta.boundaries, meta.accepts], [200, [3, 6], [3], ['f32', 'pcar']]);
  assert.equal(meta.model.hidden_dim, 128);
  const [basis] = meta.bases;
  assert.match(basis.blake3, /^[0-9a-f]{64}$/);
  assert.equal(basis.basis_fp, formatFingerprint(bases.fingerprints[0]));
  assert.ok(basis.boundaries.some(({ boundary, k, explained }) => boundary === 3 && k === 64 && explained > 0.5));
});

test('an identity station of one layer has the fingerprint that the Rust one has', async () => {
  // BLAKE3-128 of {"family":"identity","hidden_dim":8,"vocab":65536}; tests/js_station.rs compares with the other side.
  const { client } = await serve({ hiddenDim: 8 });
  const { meta } = await client.request(Route.HELLO, {});
  assert.match(meta.model.config_fp, /^[0-9a-f]{32}$/);
  assert.deepEqual([meta.model.name, meta.model.n_layers, meta.layers], ['identity:8', 1, [0, 1]]);
});

test('residuals come back, compressed ones lifted, with what was done in the meta', async () => {
  const { client } = await serve(demo());
  const body = raw(2, 128);
  const reply = await client.request(Route.FORWARD, { fp48: fp48(body), timing: true }, body);
  assert.deepEqual(reply.body, body);
  const { timing, ...meta } = reply.meta;
  assert.deepEqual(meta, { status: 200, body: 'f32', pos: 0, seq: 2, layers: [3, 6], dim: 128, fp48: fp48(body) });
  assert.deepEqual(Object.keys(timing), ['queue_us', 'lift_us', 'compute_us']);
  const lifted = await client.request(Route.FORWARD_PCA, {}, pcar());
  const { basis } = bases.get(bases.fingerprints[0]);
  assert.deepEqual(bits(floatsOf(lifted.body)), bits(basis.liftPcar(pcar())));
  const compressed = await client.request(
    Route.FORWARD,
    { accept: ['q4', 'pcar'], accept_basis: [formatFingerprint(basis.basisFp)], accept_k: 5 },
    body,
  );
  assert.equal(compressed.meta.body, 'pcar');
  assert.deepEqual(compressed.body, basis.compress(6, floatsOf(body), 5));
});

test('every fault has its status, and the first in the order of the specification decides', async () => {
  const { client } = await serve(demo({ maxSeq: 3 }));
  const have = [formatFingerprint(bases.fingerprints[0])];
  const nan = bytesOf([...Array(127).fill(0), NaN]);
  const cases = [
    [0x4242, {}, raw(1, 128), 404, {}],
    [Route.EMBED, {}, new Uint8Array(4), 501, { layers: [3, 6] }],
    [Route.LM_HEAD_PCA, {}, pcar(), 501, { layers: [3, 6] }],
    [Route.FORWARD, '{"a":1,"a":2}', raw(1, 128), 400, {}],
    [Route.FORWARD, { pos: '0' }, raw(1, 128), 400, {}],
    [Route.FORWARD, { session: 'a b' }, raw(1, 128), 400, {}],
    [Route.FORWARD, { out: 'token' }, raw(1, 128), 501, { layers: [3, 6] }],
    [Route.FORWARD, {}, new Uint8Array(5), 400, {}],
    [Route.FORWARD, {}, new Uint8Array(4), 400, { hidden_dim: 128 }],
    [Route.FORWARD, {}, undefined, 400, {}],
    [Route.FORWARD, {}, raw(4, 128), 413, { max_seq: 3 }],
    [Route.FORWARD, { fp48: '000000000000' }, raw(1, 128), 400, {}],
    [Route.FORWARD, { boundary: 0 }, raw(1, 128), 409, { boundary: 3 }],
    [Route.FORWARD, { config_fp: 'ff' }, raw(1, 128), 409, undefined],
    [Route.FORWARD, { pos: 1 }, raw(1, 128), 409, { expected_pos: 0 }],
    [Route.FORWARD, { session: 'x', pos: 7 }, raw(1, 128), 409, { expected_pos: 0 }],
    [Route.FORWARD, { session: 'x', pos: 2 ** 24 }, raw(1, 128), 413, { context_len: 2 ** 24 }],
    [Route.FORWARD, {}, nan, 422, {}],
    [Route.FORWARD, { deadline_ms: 0 }, raw(1, 128), 504, {}],
    [Route.FORWARD, { accept: ['q4'] }, raw(1, 128), 400, {}],
    [Route.RESET, {}, undefined, 400, {}],
    [Route.FORWARD_PCA, {}, undefined, 400, {}],
    [Route.FORWARD_PCA, {}, pcar().subarray(1), 400, {}],
    [Route.FORWARD_PCA, {}, pcar({ k: 65 }), 400, { k: 64 }],
    [Route.FORWARD_PCA, {}, pcar({ components: new Float32Array(8 * 4) }), 413, { max_seq: 3 }],
  ];
  for (const [route, meta, body, status, fields] of cases) {
    const what = `${route} ${JSON.stringify(meta)} ${body?.length}`;
    const {
      meta: { status: got, error, ...rest },
    } = await client.request(route, meta, body);
    assert.equal(got, status, `${what}: ${error}`);
    assert.equal(typeof error, 'string');
    if (fields !== undefined) assert.deepEqual(rest, fields, what);
  }
  // Each of these faults hides those that stand before it in the list.
  let changes = {};
  for (const [key, value, status, fields] of [
    ['components', new Float32Array(16).fill(Infinity), 422, {}],
    ['boundary', 0, 409, { boundary: 3 }],
    ['hiddenDim', 64, 400, { hidden_dim: 128 }],
    ['methodology', 5, 412, { methodology: formatFingerprint(bases.get(bases.fingerprints[0]).methodology) }],
    ['basisFp', 6, 412, { have }],
  ]) {
    changes = { ...changes, [key]: value };
    const reply = await client.request(Route.FORWARD_PCA, {}, pcar(changes));
    const { status: got, error, ...rest } = reply.meta;
    assert.deepEqual([got, rest], [status, fields], error);
    if (key === 'basisFp') assert.ok(reply.metaText.startsWith('{"status":412,"error":"basis fingerprint mismatch"'));
  }
  const huge = await client.request(
    Route.FORWARD_PCA,
    {},
    pcar({ k: 64, components: new Float32Array(128).fill(3e38) }),
  );
  assert.equal(huge.meta.status, 422, 'infinite only after lifting');
  const { meta } = await client.request(Route.HEALTH, {});
  assert.equal(meta.errors, cases.length + 6);
});

test('a basis without components for the boundary is 412, and one that is of another methodology too', async () => {
  const { client } = await serve(demo({ layers: [40, 41] }));
  assert.equal((await client.request(Route.FORWARD_PCA, {}, pcar({ boundary: 40 }))).meta.status, 412);
  const without = new Bases();
  without.addBasis(readFileSync(join(repo, 'bases/demo/demo.pcab')));
  const other = await serve(demo({ bases: without }));
  assert.equal((await other.client.request(Route.FORWARD_PCA, {}, pcar())).meta.error, 'methodology mismatch');
});

test('sessions count positions, rewind, and are dropped', async () => {
  const { client, station } = await serve({ hiddenDim: 4 });
  const at = async (pos, positions = 1) => {
    const { meta } = await client.request(Route.FORWARD, { session: 's', pos }, raw(positions));
    return meta.status === 200 ? meta.pos : meta.expected_pos;
  };
  assert.equal(await at(undefined, 3), 0);
  assert.equal(await at(undefined, 2), 3);
  assert.equal(await at(9), 5, 'too far: it goes on at 5');
  assert.equal(await at(1), 1, 'rewound');
  assert.equal(await at(undefined), 2);
  const failed = await client.request(Route.FORWARD, { session: 's', pos: 0 }, bytesOf([NaN, 0, 0, 0]));
  assert.equal(failed.meta.status, 422);
  assert.equal(await at(undefined), 3, 'a refused request changed nothing');
  assert.equal((await client.request(Route.RESET, { session: 's' })).meta.status, 200);
  assert.equal((await client.request(Route.RESET, { session: 'unknown' })).meta.status, 200);
  assert.equal(await at(undefined), 0);
  // The least recently used goes, and what goes on with it is told.
  await Promise.all(
    Array.from({ length: 4096 }, (_, n) => client.send(Route.FORWARD, { session: `n${n}`, pos: 0 }, raw(1))),
  );
  for (let n = 0; n < 4096; n++) assert.equal((await client.next()).meta.status, 200);
  assert.equal((await client.request(Route.HEALTH, {})).meta.sessions, 4096);
  const dropped = await client.request(Route.FORWARD, { session: 's' }, raw(1));
  assert.deepEqual([dropped.meta.status, dropped.meta.expected_pos], [409, 0]);
  assert.equal(await at(0), 0, 'it may begin again');
  assert.ok(station.counters.requests > 4096);
});

test('what is never answered is only counted, and what is behind it still is answered', async () => {
  const { client, station } = await serve({ hiddenDim: 4 });
  for (let flags = 0; flags <= 0xff; flags++) {
    if ((flags & (Flags.RESPONSE | Flags.ACK | Flags.FORK | Flags.RACE | Flags.FOLD)) !== 0) {
      client.send(Route.HELLO, {}, new Uint8Array(), flags);
    }
  }
  client.write(encodePrefixedFrame({ streamId: 3, sequence: 1, payload: new Uint8Array() }));
  client.send(Route.FORWARD, {}, raw(1), Flags.VENT);
  assert.equal((await client.request(Route.FORWARD, {}, raw(1))).meta.status, 200);
  const helix = client.send(Route.HEALTH, {}, undefined, Flags.HELIX | Flags.FIN);
  assert.equal((await client.next()).sequence, helix);
  const { never_answered, empty, idle_cancel } = station.counters.dropped;
  assert.deepEqual([never_answered, empty, idle_cancel], [256 - 8, 1, 1]);
});

test('work that takes time is withdrawn by a cancel, in the order of its session', async () => {
  const begun = [];
  const waiting = [];
  const forward = ({ residuals, pos, signal, session }) => {
    if (session === undefined) return residuals;
    begun.push(pos);
    return new Promise((resolve, reject) => {
      waiting.push(() => resolve(residuals));
      signal.addEventListener('abort', () => reject(new Error('withdrawn')));
    });
  };
  const { client } = await serve({ hiddenDim: 4, forward });
  const first = client.send(Route.FORWARD, { session: 's' }, raw(2));
  const second = client.send(Route.FORWARD, { session: 's' }, raw(2));
  const third = client.send(Route.FORWARD, { session: 's' }, raw(2));
  // Other work goes past it, so the three are there.
  assert.equal((await client.request(Route.FORWARD, {}, raw(1))).meta.status, 200);
  assert.deepEqual(begun, [0], 'one at a time');
  const cancel = (sequence) =>
    client.write(
      encodePrefixedFrame({ streamId: Route.FORWARD, sequence, flags: Flags.VENT, payload: new Uint8Array() }),
    );
  cancel(second);
  cancel(first);
  for (const sequence of [first, second]) {
    const reply = await client.next();
    assert.deepEqual([reply.sequence, reply.flags, reply.meta.status], [sequence, Flags.FAILURE, 499]);
  }
  while (begun.length < 2) await new Promise((resolve) => setImmediate(resolve));
  assert.deepEqual(begun, [0, 0], 'the session is where it began');
  waiting.at(-1)();
  const reply = await client.next();
  assert.deepEqual([reply.sequence, reply.meta.status, reply.meta.pos], [third, 200, 0]);
  cancel(third);
  assert.equal((await client.request(Route.FORWARD, {}, raw(1))).meta.status, 200);
});

test('a request that failed after it rewound its session leaves it where the request began', async () => {
  let result = ({ residuals }) => residuals;
  const { client } = await serve({ hiddenDim: 4, forward: (input) => result(input) });
  assert.equal((await client.request(Route.FORWARD, { session: 's' }, raw(5))).meta.pos, 0);
  result = async () => {
    throw new Vent(503, 'busy');
  };
  assert.equal((await client.request(Route.FORWARD, { session: 's', pos: 2 }, raw(1))).meta.status, 503);
  result = ({ residuals }) => residuals;
  assert.equal((await client.request(Route.FORWARD, { session: 's' }, raw(1))).meta.pos, 2);
});

test('on UDP a copy of what is being worked on is dropped', async () => {
  const done = [];
  const forward = ({ residuals }) => new Promise((resolve) => done.push(() => resolve(residuals)));
  const station = new Station({ hiddenDim: 4, forward });
  const listener = await listenUdp(station, '127.0.0.1', 0);
  ends.push(listener.close);
  const socket = dgram.createSocket('udp4');
  ends.push(async () => socket.close());
  const answers = [];
  socket.on('message', (datagram) => answers.push(decodeFrame(datagram).streamId));
  const send = (frame) => socket.send(encodeFrame(frame), listener.address.port, '127.0.0.1');
  const request = { streamId: Route.FORWARD, sequence: 1, meta: { session: 's', pos: 0 }, body: raw(1) };
  send(request);
  send(request);
  send({ streamId: Route.HEALTH, sequence: 2, meta: {} });
  const until = async (count) => {
    while (answers.length < count) await once(socket, 'message', { signal: AbortSignal.timeout(PATIENCE) });
  };
  await until(1);
  assert.deepEqual([answers, done.length, station.counters.dropped.duplicate], [[Route.HEALTH], 1, 1]);
  done[0]();
  await until(2);
  send({ streamId: Route.HEALTH, sequence: 3, meta: {} });
  await until(3);
  assert.deepEqual(answers, [Route.HEALTH, Route.FORWARD, Route.HEALTH], 'one answer');
});

test('cancels are found behind more requests than are taken at once', async () => {
  let begun = 0;
  const done = [];
  const forward = ({ residuals, signal }) =>
    new Promise((resolve, reject) => {
      begun += 1;
      done.push(() => resolve(residuals));
      signal.addEventListener('abort', () => reject(new Error('withdrawn')));
    });
  const { client } = await serve({ hiddenDim: 4, forward });
  const sent = Array.from({ length: 70 }, () => client.send(Route.FORWARD, {}, raw(1)));
  for (const sequence of [sent[69], sent[0]]) {
    client.write(
      encodePrefixedFrame({ streamId: Route.FORWARD, sequence, flags: Flags.VENT, payload: new Uint8Array() }),
    );
    const { sequence: got, meta } = await client.next();
    assert.deepEqual([got, meta.status], [sequence, 499]);
    assert.ok(begun === 64 || sequence === sent[0], `${begun} at once`);
  }
  client.socket.end();
  const left = new Set(sent.slice(1, 69));
  while (left.size > 0) {
    done.splice(0).forEach((finish) => finish());
    const { sequence, meta } = await client.next();
    assert.equal(meta.status, 200);
    assert.ok(left.delete(sequence));
  }
  assert.deepEqual([begun, await client.next()], [69, undefined]);
});

test('RESET waits for its turn', async () => {
  const forward = ({ residuals }) => new Promise((resolve) => setTimeout(resolve, 20, residuals));
  const { client, station } = await serve({ hiddenDim: 4, forward });
  client.send(Route.FORWARD, { session: 's' }, raw(3));
  client.send(Route.RESET, { session: 's' });
  client.send(Route.FORWARD, { session: 's' }, raw(1));
  client.send(Route.RESET, { session: 's' });
  const seen = [];
  while (seen.length < 4) {
    const { streamId, meta } = await client.next();
    seen.push([streamId, meta.status, meta.pos]);
  }
  assert.deepEqual(seen, [
    [3, 200, 0],
    [5, 200, undefined],
    [3, 200, 0],
    [5, 200, undefined],
  ]);
  const { meta } = await client.request(Route.HEALTH, {});
  assert.deepEqual([meta.sessions, meta.queued, station.counters.errors], [0, 0, 0]);
});

test('a function that fails, refuses or returns nonsense gives a vent and ends nothing', async (t) => {
  const log = t.mock.method(console, 'error', () => {});
  const results = [
    [
      () => {
        throw new Error('secret path');
      },
      500,
    ],
    [
      async () => {
        throw new Error('secret path');
      },
      500,
    ],
    [() => new Float32Array(3), 500],
    [() => undefined, 500],
    [({ residuals }) => residuals.fill(NaN), 500],
    [
      () => {
        throw new Vent(503, 'busy', { retry_after_ms: 5 });
      },
      503,
    ],
    [
      () => {
        throw new Vent(503, 'busy', { huge: 'x'.repeat(100_000) });
      },
      503,
    ],
  ];
  let n = 0;
  const { client } = await serve({ hiddenDim: 4, forward: (input) => results[n][0](input) });
  for (; n < results.length; n++) {
    const { meta, metaText } = await client.request(Route.FORWARD, { session: 's' }, raw(1));
    assert.equal(meta.status, results[n][1], metaText);
    assert.ok(!metaText.includes('secret'));
  }
  results.push([({ residuals }) => residuals]);
  assert.equal((await client.request(Route.FORWARD, { session: 's' }, raw(1))).meta.pos, 0);
  assert.equal(log.mock.callCount(), 4);
});

test('a stream that is none of frames gets one vent and ends', async () => {
  const { path } = await serve({ hiddenDim: 4, maxFrame: 4096 });
  const frame = encodePrefixedFrame({ streamId: 3, sequence: 7, meta: {} });
  const prefixed = (prefix, rest = frame.subarray(4)) => Buffer.concat([Buffer.from(prefix), rest]);
  for (const [data, sequence, status] of [
    [prefixed([0, 0, 0, 9]), 0, 400],
    [prefixed([0, 0, 0, 40]), 7, 400],
    [prefixed([255, 255, 255, 255]), 7, 413],
    [encodePrefixedFrame({ streamId: 3, sequence: 7, body: new Uint8Array(5000) }), 7, 413],
  ]) {
    const client = await connect(path);
    client.send(Route.HEALTH, {});
    client.write(data);
    assert.equal((await client.next()).meta.status, 200, 'what came before is answered');
    const { sequence: got, flags, meta } = await client.next();
    assert.deepEqual([got, flags, meta.status], [sequence, Flags.FAILURE, status]);
    if (status === 413) assert.equal(meta.max_frame, 4096);
    assert.equal(await client.next(), undefined, 'closed');
  }
});

test('half a frame is not waited for without end, and a closed sending side still gets its answers', async () => {
  const { path } = await serve({ hiddenDim: 4 }, { halfFrameMs: 50 });
  const half = await connect(path);
  half.write(encodePrefixedFrame({ streamId: 3, sequence: 7, body: raw(1) }).subarray(0, 20));
  const { meta } = await half.next();
  assert.equal(meta.status, 400);
  assert.match(meta.error, /^half a frame: 20 bytes/);
  assert.equal(await half.next(), undefined);
  // Nor does a byte now and then stretch the time.
  const slow = await connect(path);
  const frame = encodePrefixedFrame({ streamId: 3, sequence: 7, body: raw(1000) });
  let at = 0;
  const drip = setInterval(() => slow.write(frame.subarray(at, (at += 1))), 10);
  assert.equal((await slow.next()).meta.status, 400);
  clearInterval(drip);
  assert.ok(at < 1000, `${at} bytes were waited for`);
  const closing = await connect(path);
  for (let n = 0; n < 20; n++) closing.send(Route.FORWARD, {}, raw(3));
  closing.socket.end();
  for (let n = 0; n < 20; n++) assert.equal((await closing.next()).meta.status, 200);
  assert.equal(await closing.next(), undefined);
});

test('a peer that does not read its answers is not read from either', async () => {
  const { station, path } = await serve({ hiddenDim: 4096 });
  const socket = net.connect(path);
  await once(socket, 'connect');
  ends.push(async () => socket.destroy());
  socket.pause();
  const frame = encodePrefixedFrame({ streamId: Route.FORWARD, sequence: 1, body: raw(4, 4096) });
  // 64 MiB of requests; the station must stop after what the kernel and its own bounds hold.
  for (let n = 0; n < 1024; n++) socket.write(frame);
  let seen = -1;
  while (station.counters.requests !== seen) {
    seen = station.counters.requests;
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
  assert.ok(seen < 300, `${seen} of 1024 requests were read`);
  assert.ok(socket.writableLength > 32 << 20, `only ${socket.writableLength} bytes are still with the peer`);
  // It goes on when the peer does.
  const reader = new FrameReader();
  let answers = 0;
  socket.on('data', (chunk) => {
    reader.push(chunk);
    for (const { flags } of reader) answers += flags === Flags.SUCCESS ? 1 : 0;
  });
  socket.resume();
  while (answers < 1024) await once(socket, 'data', { signal: AbortSignal.timeout(PATIENCE) });
});

test('connections over the limit get a 503 and are closed', async () => {
  const { path, station } = await serve({ hiddenDim: 4 }, { maxConnections: 1 });
  const second = await connect(path);
  const { meta } = await second.next();
  assert.deepEqual([meta.status, meta.retry_after_ms], [503, 250]);
  assert.equal(await second.next(), undefined);
  assert.equal(station.counters.connections_refused, 1);
});

test('hostile bytes neither end it nor silence it', async () => {
  const { path, station } = await serve(demo());
  const address = await listenUdp(station, '127.0.0.1', 0);
  ends.push(address.close);
  const udp = dgram.createSocket('udp4');
  ends.push(async () => udp.close());
  let state = 7;
  const random = (below) => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) % below;
  const good = [
    encodeFrame({ streamId: Route.FORWARD_PCA, sequence: 1, meta: { session: 'h', pos: 0 }, body: pcar() }),
    encodeFrame({ streamId: Route.HELLO, sequence: 2, meta: { content_type: 'application/x-aeon-flow; v=1' } }),
    encodeFrame({ streamId: Route.FORWARD, sequence: 3, meta: { accept: ['pcar', 'f32'] }, body: raw(1, 128) }),
  ];
  const peer = new Peer();
  let answers = 0;
  for (let n = 0; n < 3000; n++) {
    const bytes = Uint8Array.from(good[random(good.length)]);
    for (let change = random(4); change >= 0; change--) bytes[random(bytes.length)] = random(256);
    if (n % 3 === 0) {
      let frame;
      try {
        frame = decodeFrame(bytes);
      } catch {
        continue;
      }
      station.handle(frame, peer, () => (answers += 1));
    } else if (n % 30 === 1) {
      const client = await connect(path);
      client.write(bytes);
      client.socket.end();
    } else {
      udp.send(bytes.subarray(0, random(bytes.length + 1)), address.address.port, '127.0.0.1');
    }
  }
  assert.ok(answers > 100, `${answers}`);
  const client = await connect(path);
  assert.equal((await client.request(Route.FORWARD_PCA, {}, pcar())).meta.status, 200);
});

test('on UDP copies are answered once, and an old datagram cannot undo newer work', async () => {
  const calls = [];
  const station = new Station({ hiddenDim: 4, forward: ({ residuals, pos }) => (calls.push(pos), residuals) });
  const listener = await listenUdp(station, '127.0.0.1', 0);
  ends.push(listener.close);
  const socket = dgram.createSocket('udp4');
  ends.push(async () => socket.close());
  const send = (frame) => socket.send(frame, listener.address.port, '127.0.0.1');
  const exchange = async (frame) => {
    send(frame);
    const [datagram] = await once(socket, 'message', { signal: AbortSignal.timeout(PATIENCE) });
    const reply = decodeFrame(datagram);
    return { ...reply, ...decodePayload(reply.payload), datagram };
  };
  const forward = (sequence, meta, positions = 1) =>
    encodeFrame({ streamId: Route.FORWARD, sequence, meta, body: raw(positions) });

  assert.equal((await exchange(forward(1, { session: 's' }))).meta.status, 400, 'pos is needed on UDP');
  const old = forward(2, { session: 's', pos: 0 });
  const { datagram } = await exchange(old);
  assert.deepEqual((await exchange(forward(3, { session: 's', pos: 1 }))).meta.status, 200);
  const again = await exchange(old);
  assert.deepEqual([again.datagram, calls], [datagram, [0, 1]], 'the same bytes, and no work');
  // Another request with an older sequence is dropped: only HEALTH is answered.
  send(forward(1, { session: 's', pos: 0 }, 2));
  const { meta } = await exchange(encodeFrame({ streamId: Route.HEALTH, sequence: 9, meta: {} }));
  assert.deepEqual([meta.dropped.stale, calls], [1, [0, 1]]);
  // What does not fit a datagram is said, and the session is as it was.
  const wide = new Station({ hiddenDim: 4 });
  let refused;
  wide.handle(
    {
      streamId: Route.FORWARD,
      sequence: 1,
      flags: 0,
      payload: decodeFrame(forward(1, { session: 'w', pos: 0 }, 4090)).payload,
    },
    new Peer({ address: '127.0.0.1 1', maxReply: 65_507 }),
    (bytes) => (refused = decodePayload(decodeFrame(bytes).payload).meta),
  );
  assert.deepEqual([refused.status, refused.max_datagram], [413, 65_507]);
});

test('the program serves, replaces a stale socket but no living one, and ends by SIGTERM', async () => {
  const program = join(repo, 'proto/js/station/main.js');
  const path = join(folder, 'program.sock');
  const start = async (...args) => {
    const child = spawn(process.execPath, [program, ...args], { stdio: ['ignore', 'pipe', 'pipe'] });
    ends.push(async () => child.kill('SIGKILL'));
    let errors = '';
    child.stderr.setEncoding('utf8').on('data', (text) => (errors += text));
    const ended = once(child, 'close');
    while (!errors.includes('\n')) {
      const [data] = await Promise.race([once(child.stderr, 'data'), ended]);
      if (typeof data !== 'string') break;
    }
    return { child, ended, line: () => errors.trim() };
  };
  const args = [
    '--socket',
    path,
    '--udp',
    '127.0.0.1:0',
    '--dim',
    '128',
    '--layers',
    '3..6',
    '--bases',
    join(repo, 'bases/demo'),
  ];
  const good = [...args, '--methodologies', join(repo, 'bases/methodologies')];
  const first = await start(...good);
  assert.match(first.line(), /^ready uds=.*program\.sock udp=127\.0\.0\.1:\d+ model=identity:128 layers=3\.\.6$/);
  assert.equal(statSync(path).mode & 0o777, 0o660);
  const client = await connect(path);
  assert.equal((await client.request(Route.FORWARD_PCA, {}, pcar())).meta.status, 200);
  const rival = await start(...good);
  assert.deepEqual([(await rival.ended)[0], rival.line().includes('another station listens there')], [1, true]);
  first.child.kill('SIGKILL');
  await first.ended;
  assert.ok(existsSync(path), 'stale');
  const second = await start(...good);
  second.child.kill('SIGTERM');
  assert.equal((await second.ended)[0], 0, second.line());
  assert.ok(!existsSync(path));
  writeFileSync(path, 'a file');
  for (const [status, text, ...wrong] of [
    [1, 'no socket', ...good],
    [64, 'nothing to listen on', '--dim', '4'],
    [64, '--dim must be', '--socket', path],
    [64, '--layers must be', ...args, '--layers', '3-6'],
    [64, 'methodologies', ...args],
    [64, 'try --help', '--port', '1'],
    [64, 'hiddenDim', '--socket', path, '--dim', '0'],
    [1, 'at most 107', '--socket', `/tmp/${'x'.repeat(120)}`, '--dim', '4'],
  ]) {
    const { ended, line } = await start(...wrong);
    assert.equal((await ended)[0], status, line());
    assert.ok(line().includes(text), `${line()} without ${text}`);
  }
  assert.equal(thrown(() => new Station({ hiddenDim: 1.5 })).name, 'RangeError');
});
