// node check.mjs OUT: parses every case of OUT/cases.json with the compiled schemas and compares with what Rust read.
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";

const here = path.dirname(fileURLToPath(import.meta.url));
const out = path.resolve(process.argv[2]);
const require = createRequire(out + "/");
const KaitaiStream = require("kaitai-struct/KaitaiStream");
const { cases, counts } = JSON.parse(fs.readFileSync(path.join(out, "cases.json"), "utf8"));
const beyond = JSON.parse(fs.readFileSync(path.join(here, "beyond.json"), "utf8"));
const all = fs.readFileSync(path.join(out, "bytes.bin"));

const camel = (name) => name.replace(/_(\w)/g, (_, letter) => letter.toUpperCase());
const refusals = Object.entries(KaitaiStream).filter(([name]) => /^(EOFError|Validation\w+Error)$/.test(name)).map(([, type]) => type);
const equal = (a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)) === 0;
const bits = (value) => {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  return view.getUint32(0);
};
const isNaNBits = (word) => (word & 0x7fffffff) >>> 0 > 0x7f800000;

// The content of a .bw blob: each word is its low 48 and its high 16 bits, and behind the words stands the tail.
const content = (blob) => {
  const words = Buffer.alloc(8 * blob.wordCount);
  for (let n = 0; n < blob.wordCount; n += 1) {
    words.writeUInt32LE(blob.packed[n].lo, 8 * n);
    words.writeUInt16LE(blob.packed[n].hi, 8 * n + 4);
    words.writeUInt16LE(blob.parity[n], 8 * n + 6);
  }
  return Buffer.concat([words, blob.tail]);
};

const compare = (where, expected, actual, input) => {
  const fail = () => {
    throw new Error(`${where}: ${JSON.stringify(expected)?.slice(0, 200)} expected, ${String(actual).slice(0, 200)} found`);
  };
  if (expected === null) {
    if (actual !== undefined) fail();
  } else if (Array.isArray(expected)) {
    if (actual?.length !== expected.length) fail();
    expected.forEach((value, n) => compare(`${where}[${n}]`, value, actual[n], input));
  } else if (typeof expected !== "object") {
    if (actual !== expected) fail();
  } else if ("f32" in expected) {
    if (typeof actual !== "number") fail();
    // A NaN in a JavaScript number keeps no payload.
    if (isNaNBits(expected.f32) ? !Number.isNaN(actual) : bits(actual) !== expected.f32) fail();
  } else if ("at" in expected) {
    if (!(actual instanceof Uint8Array) || !equal(actual, input.subarray(expected.at, expected.at + expected.len))) fail();
  } else {
    if (typeof actual !== "object") fail();
    for (const [key, value] of Object.entries(expected)) {
      if (value !== null && typeof value === "object" && "blob_at" in value) {
        if (!equal(content(actual), all.subarray(value.blob_at, value.blob_at + value.len))) fail();
      } else {
        compare(`${where}.${key}`, value, actual[camel(key)], input);
      }
    }
  }
};

const parsers = {};
const parse = (schema, input) => {
  const type = schema.split("_").map((word) => word[0].toUpperCase() + word.slice(1)).join("");
  parsers[schema] ??= require(path.join(out, "javascript", type + ".js"))[type];
  return new parsers[schema](new KaitaiStream(new Uint8Array(input).buffer));
};

const tally = { same: 0, refused: 0, beyond: 0 };
const seen = new Map();
for (const { id, schema, at, len, fields, error } of cases) {
  const input = all.subarray(at, at + len);
  let parsed;
  try {
    parsed = parse(schema, input);
  } catch (refusal) {
    if (!refusals.some((type) => refusal instanceof type)) throw refusal;
    if (fields !== undefined) throw new Error(`${id}: refused by ${schema}: ${refusal}`);
    if (beyond[schema]?.[error]?.in.includes("javascript")) throw new Error(`${id}: ${schema} does see ${error}: ${refusal}`);
    tally.refused += 1;
    continue;
  }
  if (fields !== undefined) {
    compare(id, fields, parsed, input);
    tally.same += 1;
  } else {
    if (!beyond[schema]?.[error]?.in.includes("javascript")) throw new Error(`${id}: ${schema} accepts what is ${error}`);
    seen.set(`${schema} ${error}`, id);
    tally.beyond += 1;
  }
}
for (const [schema, errors] of Object.entries(beyond)) {
  for (const [error, { in: languages }] of Object.entries(errors)) {
    if (languages.includes("javascript") && !seen.has(`${schema} ${error}`)) throw new Error(`${schema} ${error}: no case shows that it is not seen`);
  }
}
const total = tally.same + tally.refused + tally.beyond;
if (total !== cases.length || Object.values(counts).reduce((sum, [, used]) => sum + used, 0) === 0 || Object.values(tally).includes(0)) {
  throw new Error(`of ${cases.length} cases ${JSON.stringify(tally)}`);
}
console.log(`javascript: ${total} cases: ${tally.same} with the same fields, ${tally.refused} refused, ${tally.beyond} with faults that no schema sees`);
