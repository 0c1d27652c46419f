// Compiled, not run: the types say what the package does. A line under @ts-expect-error must not compile.

import {
  BWAHDecodeError,
  Basis,
  FrameReader,
  Route,
  decodeAmplituhedronCapture,
  decodeAmplituhedronReply,
  decodeBw,
  decodeFrame,
  decodePayload,
  decodePcar,
  decodeQres,
  encodeAmplituhedronCapture,
  encodeAmplituhedronReply,
  encodeFrame,
  encodePcar,
  encodeQres,
  init,
  lift,
  liftReference,
  parseMethodology,
  prefixHash,
  project,
  readQres,
  type AmplituhedronCapture,
  type Frame,
  type Pcar,
  type Qres,
} from 'aeon-proto';
import { lift as plainLift } from 'aeon-proto/reference';
import { Bases, Station, Vent, listenUdp, listenUnix } from 'aeon-proto/station';

const floats = new Float32Array(4);
const frame: Frame = decodeFrame(
  encodeFrame({ streamId: Route.FORWARD, sequence: 1, meta: { session: 's' }, body: new Uint8Array() }),
);
const { meta, metaText, body } = decodePayload(frame.payload);
const text: string = metaText;
const status: unknown = meta.status;

const reply = decodeAmplituhedronReply(encodeAmplituhedronReply({ hit: true, tailResidual: floats }));
const tail: Float32Array | undefined = reply.tailResidual;
const capture: AmplituhedronCapture = decodeAmplituhedronCapture(body);
const hash: bigint = capture.prefixHash + prefixHash(new Uint32Array(1));
encodeAmplituhedronCapture({ ...capture, prefixHash: hash });
const mime: string = decodeBw(body).mime;

const pcar: Pcar = decodePcar(
  encodePcar({ boundary: 0, k: 4, hiddenDim: 4, methodology: 0, basisFp: 0, components: floats }),
);
const basis = Basis.open(body);
const qres: Qres = decodeQres(encodeQres({ kind: 'q4', boundary: 0, hiddenDim: 4, residuals: floats }));
const read: Float32Array = readQres(
  encodeQres({ kind: 'i8', boundary: 0, hiddenDim: 4, residuals: floats, mean: undefined }),
);
const lifted: Float32Array = basis.liftPcar(basis.compress(0, floats, 2));
const entry = basis.entry(0);
const k: number | undefined = entry?.k;
const id: number = parseMethodology('{}').id;
const all: Float32Array[] = [
  lift(floats, floats, floats),
  lift(floats, floats, floats, 1),
  project(floats, floats, floats),
  liftReference(floats, floats, floats),
  plainLift(floats, floats, floats),
  lifted,
];
{
  using scoped = Basis.open(body);
  scoped.boundaries satisfies Uint32Array;
}

const reader = new FrameReader({ maxFrame: 1024, bare: true });
for (const next of reader) next.sequence satisfies number;

const bases = Bases.load('bases');
const station = new Station({
  hiddenDim: 4,
  layers: [3, 6],
  bases,
  forward: async ({ residuals, signal }) => {
    if (signal.aborted) throw new Vent(503, 'busy', { retry_after_ms: 1 });
    return residuals;
  },
});
const close: () => Promise<void> = await listenUnix(station, '/tmp/s');
const { address } = await listenUdp(station, '127.0.0.1', 0);
address.port satisfies number;
await init(new URL('file:///module.wasm'));

try {
  decodeFrame(body);
} catch (error) {
  if (error instanceof BWAHDecodeError) error.code satisfies string;
}

// @ts-expect-error a reply says whether it is a hit
encodeAmplituhedronReply({ tailResidual: floats });
// @ts-expect-error the hash is a bigint
encodeAmplituhedronCapture({ ...capture, prefixHash: 1 });
// @ts-expect-error bytes, not a buffer
decodeFrame(new ArrayBuffer(10));
// @ts-expect-error a frame has a sequence
encodeFrame({ streamId: 1 });
// @ts-expect-error payload or meta, not both
encodeFrame({ streamId: 1, sequence: 1, payload: body, meta: {} });

export { all, bases, close, id, k, mime, pcar, qres, read, status, tail, text };
