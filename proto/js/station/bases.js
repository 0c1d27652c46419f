// The bases and methodologies of a station, read from a folder.

import { readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';

import { blake3 } from '@noble/hashes/blake3.js';
import { Basis, formatFingerprint, parseMethodology } from 'aeon-proto';

const MAX_FILE = 1 << 30;

/** Basis files by fingerprint, and the ids of the methodologies that are known. */
export class Bases {
  #bases = new Map();
  #methodologies = new Set();

  /** Adds the bytes of a basis file; two files with one fingerprint are refused. */
  addBasis(bytes) {
    const basis = Basis.open(bytes);
    if (this.#bases.has(basis.basisFp)) {
      throw new Error(`two basis files with the fingerprint ${formatFingerprint(basis.basisFp)}; remove one`);
    }
    const entries = basis.entries();
    const info = {
      basis_fp: formatFingerprint(basis.basisFp),
      blake3: Buffer.from(blake3(bytes)).toString('hex'),
      methodology: formatFingerprint(basis.methodology),
      boundaries: entries.map(({ boundary, k, explained }) => ({ boundary, k, explained })),
    };
    const components = new Map(entries.map(({ boundary, k }) => [boundary, k]));
    this.#bases.set(basis.basisFp, { basis, info, components, ...pick(basis) });
    return basis;
  }

  /** Adds a methodology spec, given as JSON text or as an object. */
  addMethodology(spec) {
    const methodology = parseMethodology(spec);
    this.#methodologies.add(methodology.id);
    return methodology;
  }

  get(basisFp) {
    return this.#bases.get(basisFp);
  }

  knows(methodology) {
    return this.#methodologies.has(methodology);
  }

  get fingerprints() {
    return [...this.#bases.keys()];
  }

  /** What HELLO lists. */
  get list() {
    return [...this.#bases.values()].map(({ info }) => info);
  }

  /** Reads every `*.pcab` of a folder, and every `*.json` below the folder of methodologies. */
  static load(folder, methodologies = join(folder, 'methodologies')) {
    const bases = new Bases();
    for (const file of readdirSync(methodologies, { recursive: true }).map(String).sort()) {
      if (file.endsWith('.json'))
        inFile(join(methodologies, file), (bytes) => bases.addMethodology(bytes.toString('utf8')));
    }
    for (const file of readdirSync(folder).sort()) {
      if (file.endsWith('.pcab')) inFile(join(folder, file), (bytes) => bases.addBasis(bytes));
    }
    for (const { basis } of bases.#bases.values()) {
      if (!bases.knows(basis.methodology)) {
        throw new Error(`${basis}: its methodology is not in ${methodologies}; add its file there`);
      }
    }
    return bases;
  }
}

const pick = ({ basisFp, methodology, hiddenDim }) => ({ basisFp, methodology, hiddenDim });

function inFile(path, read) {
  try {
    const { size } = statSync(path);
    if (size > MAX_FILE) throw new Error(`${size} bytes, at most ${MAX_FILE} are read`);
    read(readFileSync(path));
  } catch (error) {
    throw new Error(`${path}: ${error.message}`, { cause: error });
  }
}
