// Reading of proto/vectors; `vectors/README.md` explains the notation.

import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';

import { xxh64 } from 'aeon-proto';

export const load = (name) => JSON.parse(readFileSync(new URL(`../../vectors/${name}`, import.meta.url), 'utf8'));

export const unhex = (hex) => new Uint8Array(Buffer.from(hex, 'hex'));

/** Bytes that are written out or given by a rule; `undefined` for null. */
export function bytes(value) {
  if (value === null || value === undefined) return undefined;
  if (typeof value === 'string') return unhex(value);
  if (value.hex !== undefined) return unhex(value.hex);
  const { len, add } = value.rule;
  return Uint8Array.from({ length: len }, (_, i) => 31 * i + add);
}

/** Compares bytes with any of the three notations. */
export function assertBytes(actual, expected, message) {
  assert.ok(actual instanceof Uint8Array, message);
  if (expected.sha256 === undefined && expected.xxh64 === undefined) {
    assert.deepEqual(Buffer.from(actual), Buffer.from(bytes(expected)), message);
    return;
  }
  assert.equal(actual.length, expected.length, message);
  if (expected.sha256 !== undefined)
    assert.equal(createHash('sha256').update(actual).digest('hex'), expected.sha256, message);
  if (expected.xxh64 !== undefined) assert.equal(xxh64(actual).toString(16).padStart(16, '0'), expected.xxh64, message);
}

/** Runs a check on each entry of a section and asserts how many there are. */
export function run(file, section, count, check) {
  const entries = file[section];
  assert.equal(entries.length, count, `${section} has another number of entries`);
  for (const entry of entries) {
    try {
      check(entry);
    } catch (error) {
      error.message = `${section}/${entry.id ?? entry.name}: ${error.message}`;
      throw error;
    }
  }
}

export function thrown(operation) {
  try {
    operation();
  } catch (error) {
    return error;
  }
  return assert.fail('an error was expected');
}

/** f32 values of little-endian bytes, and back: bit patterns are kept. */
export const floats = (data) => (data === undefined ? undefined : new Float32Array(data.slice().buffer));
export const bits = (values) => (values === undefined ? undefined : [...new Uint32Array(values.slice().buffer)]);
export const ofBits = (words) => new Float32Array(Uint32Array.from(words, (word) => parseInt(word, 16)).buffer);
