// What a user of the package meets: loading without a bundler, wrong arguments, memory, the examples of the README.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { test } from 'node:test';

import * as proto from 'aeon-proto';
import { thrown } from './support.js';

const root = fileURLToPath(new URL('..', import.meta.url));
const run = (source) =>
  execFileSync(process.execPath, ['--input-type=module', '-e', source], { cwd: root, encoding: 'utf8' }).trim();

test('the web entry works once init was given a module, and says so before', () => {
  const output = run(`
    import { readFileSync } from 'node:fs';
    import { fnv1a32, init, BWAHDecodeError, decodeAmplituhedronReply } from 'aeon-proto/web';
    try { fnv1a32(new Uint8Array()); } catch (error) { console.log(error.name); }
    const module = new WebAssembly.Module(readFileSync('dist/aeon_proto_bg.wasm'));
    await Promise.all([init(module), init(module)]);
    await init();
    console.log(fnv1a32(new Uint8Array()));
    try { decodeAmplituhedronReply(new Uint8Array(5)); } catch (error) { console.log(error instanceof BWAHDecodeError); }
  `);
  assert.equal(output, 'TypeError\n2166136261\ntrue');
});

test('the web entry fetches the module by URL, and a failed load can be repeated', () => {
  const output = run(`
    import { createServer } from 'node:http';
    import { readFileSync } from 'node:fs';
    import { fnv1a32, init } from 'aeon-proto/web';
    const server = createServer((request, response) => {
      if (request.url !== '/module.wasm') return response.writeHead(404).end();
      response.writeHead(200, { 'content-type': 'application/wasm' }).end(readFileSync('dist/aeon_proto_bg.wasm'));
    });
    await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
    const base = 'http://127.0.0.1:' + server.address().port;
    await init(base + '/missing').catch(() => console.log('failed'));
    await init(new URL(base + '/module.wasm'));
    console.log(fnv1a32(new Uint8Array()));
    server.closeAllConnections();
    server.close();
  `);
  assert.equal(output, 'failed\n2166136261');
});

test('arguments of the wrong type are a TypeError that says what came', () => {
  const buffer = new ArrayBuffer(20);
  for (const [operation, text] of [
    // Read as bytes, an ArrayBuffer would be an empty array: a miss.
    [() => proto.decodeAmplituhedronReply(buffer), 'blob must be a Uint8Array, got ArrayBuffer'],
    [() => proto.decodeFrame('0003'), 'data must be a Uint8Array, got string'],
    [() => proto.decodeFrame(undefined), 'data must be a Uint8Array, got undefined'],
    [
      () => proto.encodeAmplituhedronReply({ hit: true, tailResidual: [1, 2] }),
      'tailResidual must be a Float32Array, got Array',
    ],
    [
      () => proto.encodeAmplituhedronReply({ hit: true, tailResidual: new Float64Array(1) }),
      'tailResidual must be a Float32Array, got Float64Array',
    ],
    [
      () => proto.encodeAmplituhedronReply({ tailResidual: new Float32Array(1) }),
      'hit must be a boolean, got undefined',
    ],
    [() => proto.encodeAmplituhedronReply(null), 'the argument must be an object, got null'],
    [
      () => proto.encodeFrame({ streamId: '3', sequence: 1 }),
      'streamId must be a whole number from 0 to 65535, got string',
    ],
    [() => proto.encodeFrame({ streamId: 3, sequence: 1, meta: 5 }), 'meta must be an object or JSON text, got number'],
    [
      () => proto.encodeFrame({ streamId: 3, sequence: 1, payload: new Uint8Array(2), meta: {} }),
      'meta must be absent beside a payload, which holds both, got Object',
    ],
    [() => proto.encodeFrames({}), 'frames must be an array, got Object'],
    [() => proto.lift(new Float32Array(1), [1], new Float32Array(1)), 'basis must be a Float32Array, got Array'],
    [() => proto.parseMethodology(7), 'spec must be JSON text or an object, got number'],
    [() => proto.Basis.open(buffer), 'file must be a Uint8Array, got ArrayBuffer'],
    [() => proto.encodeAmplituhedronCapture({ prefixHash: 1 }), 'prefixHash must be a bigint, got number'],
  ]) {
    const error = thrown(operation);
    assert.ok(error instanceof TypeError, `${error}`);
    assert.equal(error.message, text);
  }
});

test('numbers that do not fit their field are a RangeError, never cut', () => {
  const capture = {
    prefixHash: 0n,
    prefixLen: 1,
    layerLo: 0,
    layerHi: 1,
    tailResidual: new Float32Array(1),
    kvSlab: new Float32Array(0),
  };
  proto.encodeAmplituhedronCapture(capture);
  for (const wrong of [
    { prefixHash: -1n },
    { prefixHash: 1n << 64n },
    { prefixLen: 2 ** 32 },
    { prefixLen: 1.5 },
    { prefixLen: NaN },
    { layerLo: 65536 },
    { layerHi: -1 },
  ]) {
    const [[key, value]] = Object.entries(wrong);
    const error = thrown(() => proto.encodeAmplituhedronCapture({ ...capture, ...wrong }));
    assert.ok(error instanceof RangeError, `${key} ${value}: ${error}`);
    assert.ok(error.message.startsWith(key), error.message);
  }
  const long = { streamId: 0, sequence: 0, meta: { pad: 'x'.repeat(65536) } };
  assert.match(thrown(() => proto.encodeFrame(long)).message, /^meta of 65546 bytes, a payload holds at most 65535$/);
  const pcar = { boundary: 0, k: 1, hiddenDim: 1, methodology: 0, basisFp: 2 ** 32, components: new Float32Array(1) };
  assert.ok(thrown(() => proto.encodePcar(pcar)) instanceof RangeError);
});

test('metas are checked on both ways', () => {
  const code = (operation) => {
    const error = thrown(operation);
    assert.ok(error instanceof proto.PayloadError, `${error}`);
    return [error.code, error.details];
  };
  const payload = (meta) => proto.encodePayload(meta);
  assert.deepEqual(payload({}), Uint8Array.of(0, 0));
  assert.deepEqual(payload('{}'), Uint8Array.of(0, 2, 0x7b, 0x7d), 'text is kept verbatim');
  assert.deepEqual(
    code(() => payload('{"a":1,"a":2}')),
    ['DuplicateKey', { key: 'a' }],
  );
  assert.deepEqual(
    code(() => payload([1])),
    ['NotObject', {}],
  );
  assert.deepEqual(
    code(() => payload('{"a":}')),
    ['Syntax', { offset: 5 }],
  );
  assert.equal(code(() => payload(`{"a":${'['.repeat(40)}${']'.repeat(40)}}`))[0], 'TooDeep');
  assert.deepEqual(
    code(() => proto.parseRequestMeta('{"pos":"7"}')),
    ['Field', { key: 'pos', expected: 'a whole number from 0' }],
  );
  assert.deepEqual(proto.parseRequestMeta('{"pos":7,"x":[{}]}'), { pos: 7, x: [{}] });
  const { meta } = proto.decodePayload(payload('{"__proto__":{"a":1}}'));
  assert.deepEqual(Object.keys(meta), ['__proto__']);
});

test('a hundred thousand calls do not grow the memory of the module', () => {
  const reply = { hit: true, tailResidual: new Float32Array(3584) };
  const garbage = new Uint8Array(100);
  const once = () => {
    proto.decodeAmplituhedronReply(proto.encodeAmplituhedronReply(reply));
    thrown(() => proto.decodeAmplituhedronReply(garbage));
    thrown(() => proto.Basis.open(garbage));
  };
  const { memory } = proto.initSync();
  for (let n = 0; n < 100; n++) once();
  const before = memory.buffer.byteLength;
  for (let n = 0; n < 25_000; n++) once();
  assert.equal(memory.buffer.byteLength, before);
});

test('a basis that was freed is refused, and frees its memory', () => {
  const file = readFileSync(new URL('../../../bases/demo/demo.pcab', import.meta.url));
  const { memory } = proto.initSync();
  let before;
  for (let n = 0; n < 200; n++) {
    const basis = proto.Basis.open(file);
    assert.equal(basis.hiddenDim, 128);
    basis.free();
    assert.ok(thrown(() => basis.hiddenDim) instanceof Error);
    before ??= memory.buffer.byteLength;
  }
  assert.equal(memory.buffer.byteLength, before);
  assert.equal(typeof proto.Basis.prototype.free, 'function');
});

test('lifting what a basis cannot lift names the fault, in the order of the specification', () => {
  const basis = proto.Basis.open(readFileSync(new URL('../../../bases/demo/demo.pcab', import.meta.url)));
  const k = basis.componentsAt(3);
  const good = {
    boundary: 3,
    k,
    hiddenDim: basis.hiddenDim,
    methodology: basis.methodology,
    basisFp: basis.basisFp,
    components: new Float32Array(k),
  };
  assert.equal(basis.liftPcar(proto.encodePcar(good)).length, basis.hiddenDim);
  const wrong = {
    components: new Float32Array(k).fill(NaN),
    boundary: 99,
    hiddenDim: 7,
    methodology: 1,
    basisFp: 2,
  };
  // Each fault hides those behind it.
  let body = { ...good };
  for (const [key, code] of [
    ['components', 'NonFinite'],
    ['boundary', 'BoundaryNotInBasis'],
    ['hiddenDim', 'HiddenDim'],
    ['methodology', 'MethodologyMismatch'],
    ['basisFp', 'UnknownBasis'],
  ]) {
    body = { ...body, [key]: wrong[key] };
    const error = thrown(() => basis.liftPcar(proto.encodePcar(body)));
    assert.ok(error instanceof proto.PcarError);
    assert.equal(error.code, code);
  }
  const many = { ...good, k: k + 1, components: new Float32Array(k + 1) };
  assert.deepEqual(thrown(() => basis.liftPcar(proto.encodePcar(many))).details, { expected: k, got: k + 1 });
  const huge = { ...good, components: new Float32Array(k).fill(3e38) };
  assert.equal(thrown(() => basis.liftPcar(proto.encodePcar(huge))).code, 'LiftedNonFinite');
  basis.free();
});

test('the examples of the README run', () => {
  const readme = readFileSync(join(root, 'README.md'), 'utf8');
  const examples = [...readme.matchAll(/```js\n([^]*?)```/g)].map(([, source]) => source);
  assert.ok(examples.length >= 4, `${examples.length} examples`);
  const folder = mkdtempSync(join(root, 'test', 'readme-'));
  try {
    examples.forEach((source, n) => {
      const file = join(folder, `example-${n}.js`);
      writeFileSync(file, source);
      const output = execFileSync(process.execPath, [file], {
        cwd: join(root, '../..'),
        encoding: 'utf8',
        timeout: 20_000,
      });
      const expected = [...source.matchAll(/console\.log\(.*\); \/\/ (.*)$/gm)].map(([, text]) => text);
      assert.ok(expected.length > 0, `example ${n} shows nothing`);
      assert.deepEqual(output.trim().split('\n'), expected, `example ${n}`);
    });
  } finally {
    rmSync(folder, { recursive: true });
  }
});
