// P2 and P3 of the original design: encode and decode of a tail residual of 3584 f32 in V8, bound 200 µs at the median.
// Prints, and never fails on time.

import { decodeAmplituhedronReply, encodeAmplituhedronReply } from 'aeon-proto';

const BOUND = 200;
const WIDTH = 3584;
const RUNS = 2000;

// Normal numbers, as residuals are; a fixed generator, so that runs compare.
let state = 1;
const random = () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32;
const tailResidual = Float32Array.from(
  { length: WIDTH },
  () => Math.sqrt(-2 * Math.log(random() || 1)) * Math.cos(2 * Math.PI * random()),
);
const bytes = new Uint8Array(tailResidual.buffer);
const blob = encodeAmplituhedronReply({ hit: true, tailResidual });

let sink = 0;
/** Median and 99th percentile of one call, in µs. A sample is several calls, so that the clock's grain does not show. */
function measure(call) {
  const CALLS = 10;
  for (let n = 0; n < 500; n++) sink ^= call().length;
  const samples = Float64Array.from({ length: RUNS }, () => {
    const start = process.hrtime.bigint();
    for (let n = 0; n < CALLS; n++) sink ^= call().length;
    return Number(process.hrtime.bigint() - start) / CALLS / 1000;
  }).sort();
  return { p50: samples[RUNS / 2], p99: samples[Math.floor(RUNS * 0.99)] };
}

const floor = measure(() => bytes.slice());
const json = measure(() => JSON.stringify(Array.from(tailResidual)));
const show = (name, { p50, p99 }) => {
  const verdict = `${p50 <= BOUND ? 'within' : 'over'} the bound of ${BOUND} µs`;
  console.log(
    `${name}: p50 ${p50.toFixed(1)} µs, p99 ${p99.toFixed(1)} µs, ${(p50 / floor.p50).toFixed(1)} x a copy, ` +
      `${(p50 / json.p50).toFixed(3)} x JSON.stringify, ${verdict}`,
  );
};
console.log(
  `a tail residual of ${WIDTH} f32: ${bytes.length} bytes raw, ${blob.length} bytes as a BWAH reply; node ${process.version}`,
);
console.log(
  `copy of the same bytes: p50 ${floor.p50.toFixed(2)} µs; JSON.stringify of the values: p50 ${json.p50.toFixed(0)} µs`,
);
show(
  'P2 encode',
  measure(() => encodeAmplituhedronReply({ hit: true, tailResidual })),
);
show(
  'P3 decode',
  measure(() => decodeAmplituhedronReply(blob).tailResidual),
);
if (sink === -1) console.log(sink);
