// Every entry of the vectors of .bw, BWAH, PCAR, PCAB, methodology specs and kernels, with the outcome that Rust has.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import {
  BWAHDecodeError,
  Basis,
  BwDecodeError,
  KernelError,
  MethodologyError,
  PcabError,
  PcarError,
  QresError,
  decodeAmplituhedronCapture,
  decodeAmplituhedronReply,
  decodeBw,
  decodePcar,
  decodeQres,
  encodeAmplituhedronCapture,
  encodeAmplituhedronReply,
  encodeBw,
  encodePcar,
  encodeQres,
  fnv1a32,
  formatFingerprint,
  lift,
  liftReference,
  parseFingerprint,
  parseMethodology,
  prefixHash,
  project,
  readQres,
  xxh64,
} from 'aeon-proto';
import { assertBytes, bits, bytes, floats, load, ofBits, run, thrown, unhex } from './support.js';

/** Each of the facts must be told by the error. */
function assertFacts(error, facts) {
  for (const [key, value] of Object.entries(facts))
    assert.equal(error.details[key], value, `${key} of ${error.message}`);
}

const bw = load('bw.json');
const bwah = load('bwah.json');

test('blobs', () => {
  run(bw, 'valid', 53, (entry) => {
    const content = bytes(entry.content);
    const blob = encodeBw(content, entry.mime);
    assertBytes(blob, entry.encoded);
    assert.deepEqual(decodeBw(blob), { bytes: content, mime: entry.mime });
  });
});

test('bad blobs', () => {
  run(bw, 'invalid', 92, (entry) => {
    const error = thrown(() => decodeBw(bytes(entry.input)));
    assert.ok(error instanceof BwDecodeError);
    assert.deepEqual([error.name, error.code], ['BwDecodeError', entry.error]);
    assertFacts(error, entry.facts);
  });
});

test('replies', () => {
  run(bwah, 'replies', 10, (entry) => {
    const [tailResidual, kvSlab] = [floats(bytes(entry.tail)), floats(bytes(entry.kv))];
    const blob = encodeAmplituhedronReply({ hit: entry.hit, tailResidual, kvSlab });
    assertBytes(blob, entry.encoded);
    const reply = decodeAmplituhedronReply(blob);
    assert.equal(reply.hit, entry.hit);
    assert.deepEqual([bits(reply.tailResidual), bits(reply.kvSlab)], [bits(tailResidual), bits(kvSlab)]);
  });
});

test('captures', () => {
  run(bwah, 'captures', 5, (entry) => {
    const capture = {
      prefixHash: BigInt(entry.prefix_hash),
      prefixLen: entry.prefix_len,
      layerLo: entry.layer_lo,
      layerHi: entry.layer_hi,
      tailResidual: floats(bytes(entry.tail)),
      kvSlab: floats(bytes(entry.kv)),
    };
    const blob = encodeAmplituhedronCapture(capture);
    assertBytes(blob, entry.encoded);
    const decoded = decodeAmplituhedronCapture(blob);
    assert.equal(typeof decoded.prefixHash, 'bigint');
    for (const key of ['tailResidual', 'kvSlab']) {
      assert.deepEqual(bits(decoded[key]), bits(capture[key]));
      delete decoded[key];
      delete capture[key];
    }
    assert.deepEqual(decoded, capture);
  });
});

function assertBadEnvelope(error, entry) {
  assert.ok(error instanceof BWAHDecodeError && error instanceof Error);
  assert.deepEqual([error.name, error.code], ['BWAHDecodeError', entry.error]);
  if (entry.error === 'InnerBlobError') {
    assert.ok(error.cause instanceof BwDecodeError, 'the cause is kept');
    assert.deepEqual(
      [error.details.blob, error.details.cause, error.cause.code],
      [entry.blob, entry.cause, entry.cause],
    );
    assertFacts(error.cause, entry.facts);
  } else {
    assertFacts(error, entry.facts);
  }
}

test('bad replies', () => {
  run(bwah, 'invalid_replies', 107, (entry) => {
    assertBadEnvelope(
      thrown(() => decodeAmplituhedronReply(bytes(entry.input))),
      entry,
    );
  });
});

test('bad captures', () => {
  run(bwah, 'invalid_captures', 126, (entry) => {
    assertBadEnvelope(
      thrown(() => decodeAmplituhedronCapture(bytes(entry.input))),
      entry,
    );
  });
});

test('pcar', () => {
  run(load('pcar.json'), 'cases', 26, (entry) => {
    const data = unhex(entry.hex);
    if (entry.error !== undefined) {
      const error = thrown(() => decodePcar(data));
      assert.ok(error instanceof PcarError);
      assert.equal(error.code, entry.error);
      return;
    }
    const { components, ...header } = decodePcar(data);
    const { expect } = entry;
    assert.deepEqual(header, {
      boundary: expect.boundary,
      k: expect.k,
      hiddenDim: expect.hidden_dim,
      methodology: expect.methodology,
      basisFp: expect.basis_fp,
      seq: expect.seq,
    });
    assert.deepEqual(bits(components), bits(ofBits(expect.components)));
    assert.deepEqual(encodePcar({ ...header, components }), data);
  });
});

test('qres', () => {
  const words = (list) => (list === null ? undefined : ofBits(list.split(' ')));
  run(load('qres.json'), 'cases', 106, (entry) => {
    const data = unhex(entry.hex);
    if (entry.error !== undefined) {
      for (const read of [decodeQres, readQres]) {
        const error = thrown(() => read(data));
        assert.ok(error instanceof QresError);
        assert.equal(error.code, entry.error);
      }
      return;
    }
    const { seq, escaped, ...header } = decodeQres(data);
    const { expect } = entry;
    assert.deepEqual(header, {
      kind: ['f16', 'i8', `q${expect.bits}`][expect.format],
      boundary: expect.boundary,
      hiddenDim: expect.hidden_dim,
      basisFp: expect.basis_fp,
      methodology: expect.methodology,
      seed: expect.seed,
    });
    assert.equal(seq, expect.seq);
    assert.deepEqual([...escaped], expect.escaped.map(Number));
    const mean = words(entry.mean);
    assert.deepEqual(bits(readQres(data, mean)), bits(words(entry.read)));
    const escape = Uint8Array.from(entry.escape.map(Number));
    assert.deepEqual(encodeQres({ ...header, mean, residuals: words(entry.residuals), escape }), data);
  });
});

test('qres that does not fit', () => {
  const residuals = new Float32Array(16).fill(1);
  const init = { kind: 'q4', boundary: 1, hiddenDim: 8, residuals };
  const code = (change) => thrown(() => encodeQres({ ...init, ...change })).code;
  assert.equal(code({ kind: 'q2' }), 'UnknownKind');
  assert.equal(code({ hiddenDim: 7 }), 'Shape');
  assert.equal(code({ hiddenDim: 2 ** 24 }), 'Shape');
  assert.equal(code({ basisFp: 5 }), 'Parts');
  assert.equal(code({ basisFp: 5, mean: new Float32Array(9) }), 'Parts');
  assert.equal(code({ kind: 'f16', seed: 1 }), 'Header');
  assert.equal(code({ residuals: new Float32Array(8).fill(NaN) }), 'NonFinite');
  assert.ok(thrown(() => encodeQres({ ...init, seed: -1 })) instanceof RangeError);
  assert.ok(thrown(() => encodeQres({ ...init, escape: [1, 0] })) instanceof TypeError);
  const named = encodeQres({ ...init, basisFp: 5, mean: new Float32Array(8) });
  assert.equal(thrown(() => readQres(named)).code, 'Parts');
  const body = encodeQres(init);
  body.set([0, 0x7e], 33);
  const error = thrown(() => readQres(body));
  assert.deepEqual([error.code, error.details.position], ['NonFinite', 0]);
});

test('pcab', () => {
  run(load('pcab.json'), 'cases', 58, (entry) => {
    const data = unhex(entry.hex);
    if (entry.error !== undefined) {
      const error = thrown(() => Basis.open(data));
      assert.ok(error instanceof PcabError);
      assert.equal(error.code, entry.error);
      return;
    }
    const basis = Basis.open(data);
    const { expect } = entry;
    assert.equal(basis.hiddenDim, expect.hidden_dim);
    assert.equal(basis.methodology, expect.methodology);
    assert.equal(formatFingerprint(basis.basisFp), expect.basis_fp);
    assert.equal(fnv1a32(data), basis.basisFp);
    assert.equal(basis.metadataText, expect.metadata);
    assert.deepEqual(basis.metadata, expect.metadata === '' ? {} : JSON.parse(expect.metadata));
    assert.deepEqual(
      [...basis.boundaries],
      expect.entries.map(({ boundary }) => boundary),
    );
    basis.entries().forEach((found, n) => {
      const expected = expect.entries[n];
      assert.deepEqual([found.boundary, found.k], [expected.boundary, expected.k]);
      assert.equal(basis.componentsAt(found.boundary), found.k);
      for (const key of ['mean', 'basis', 'variance'])
        assert.deepEqual(bits(found[key]), bits(ofBits(expected[key])), key);
      assert.deepEqual(basis.entry(found.boundary), found);
      if (found.k === 0) return;
      // What the file is for: compress what a lift gives, and lift it again.
      const residual = lift(found.mean, found.basis, new Float32Array(found.k).fill(0.5));
      const body = basis.compress(found.boundary, residual);
      const pcar = decodePcar(body);
      assert.deepEqual(bits(pcar.components), bits(project(found.mean, found.basis, residual)));
      assert.deepEqual(bits(basis.liftPcar(body)), bits(lift(found.mean, found.basis, pcar.components)));
    });
    assert.equal(basis.entry(4_000_000_000), undefined);
    basis.free();
  });
});

test('methodology', () => {
  run(load('methodology.json'), 'cases', 34, (entry) => {
    if (entry.error !== undefined) {
      const error = thrown(() => parseMethodology(entry.text));
      assert.ok(error instanceof MethodologyError);
      assert.equal(error.code, entry.error);
      return;
    }
    const { id, canonical, spec, k } = parseMethodology(entry.text);
    assert.deepEqual([canonical, formatFingerprint(id), k ?? null], [entry.canonical, entry.id, entry.k ?? null]);
    assert.equal(parseMethodology(spec).id, id, 'an object has the id of its text');
  });
});

test('kernels: the module, plain JavaScript and the vectors agree bit for bit', () => {
  run(load('kernel.json'), 'cases', 11, (entry) => {
    const values = (key) => ofBits(entry[key].split(' ').filter((word) => word !== ''));
    const [mean, basis, components] = ['mean', 'basis', 'components'].map(values);
    const { d, k, n } = entry;
    assert.deepEqual([mean.length, basis.length, components.length], [d, k * d, n * k]);
    assert.deepEqual(bits(lift(mean, basis, components, n)), bits(values('lifted')));
    assert.deepEqual(bits(project(mean, basis, values('residuals'))), bits(values('projected')));
    for (let position = 0; position < n; position++) {
      const own = components.slice(position * k, (position + 1) * k);
      const expected = values('lifted').slice(position * d, (position + 1) * d);
      assert.deepEqual(bits(liftReference(mean, basis, own)), bits(expected));
      assert.deepEqual(bits(lift(mean, basis, own, 1)), bits(expected));
    }
  });
});

test('wide lifts agree bit for bit too', () => {
  // The widths of real models; values by a fixed generator of 32-bit numbers.
  let state = 1;
  const next = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.fround((state / 2 ** 31 - 1) * 3);
  };
  const random = (length) => Float32Array.from({ length }, next);
  for (const [d, k] of [
    [896, 8],
    [3584, 29],
    [130, 64],
  ]) {
    const [mean, basis, components] = [random(d), random(d * k), random(k)];
    assert.deepEqual(bits(lift(mean, basis, components)), bits(liftReference(mean, basis, components)));
  }
});

test('hashes', () => {
  assert.deepEqual(
    ['', 'a', 'foobar'].map((text) => fnv1a32(Buffer.from(text))),
    [0x811c9dc5, 0xe40c292c, 0xbf9cf968],
  );
  assert.equal(xxh64(Buffer.from('a')), 0xd24ec4f1a98c6e5bn);
  assert.equal(prefixHash(Uint32Array.of(1, 2)), xxh64(Uint8Array.of(1, 0, 0, 0, 2, 0, 0, 0)));
  assert.equal(parseFingerprint('0xBEEF'), 0xbeef);
  assert.equal(parseFingerprint('beef'), undefined);
  assert.throws(() => formatFingerprint(-1), RangeError);
});

test('shapes and numbers that do not fit are refused by name', () => {
  const f = (...values) => Float32Array.from(values);
  const code = (operation) => {
    const error = thrown(operation);
    assert.ok(error instanceof KernelError, `${error}`);
    return error.code;
  };
  assert.equal(
    code(() => lift(f(), f(), f())),
    'NoWidth',
  );
  assert.equal(
    code(() => lift(f(1, 2), f(1, 2, 3), f(1))),
    'Basis',
  );
  assert.equal(
    code(() => lift(f(1, 2), f(1, 2, 3, 4), f(1))),
    'Components',
  );
  assert.equal(
    code(() => lift(f(1, 2), f(1, 2), f(NaN))),
    'NonFinite',
  );
  assert.equal(
    code(() => lift(f(3e38), f(3e38), f(3e38))),
    'NonFinite',
  );
  assert.equal(
    code(() => lift(f(1, 2), f(), f(), 0xffff_ffff)),
    'TooLarge',
  );
  assert.equal(
    code(() => project(f(1, 2), f(1, 2), f(1, 2, 3))),
    'Residuals',
  );
});
