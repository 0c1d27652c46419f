// The other side of proto/examples/parity.rs: the same frames, made by this package. `node parity.js SOCKET UDP_PORT`.

import dgram from 'node:dgram';
import { once } from 'node:events';
import net from 'node:net';

import {
  Flags,
  FrameReader,
  Route,
  encodeAmplituhedronCapture,
  encodeAmplituhedronReply,
  encodeFrame,
  encodePcar,
} from 'aeon-proto';

const PATIENCE = 20_000;
const MAX_DATAGRAM = 65_507;

/** Bit patterns that a careless codec changes, then a fixed sequence of finite numbers. */
function floats(count) {
  const special = [0x8000_0000, 0x0000_0001, 0x7fc0_0001, 0xffa0_0000, 0xff80_0000, 0x7f7f_ffff];
  const rest = Array.from(
    { length: count },
    (_, n) => ((Math.imul(n, 2_654_435_761) & 0x3fff_ffff) | 0x2000_0000) >>> 0,
  );
  return new Float32Array(Uint32Array.from([...special, ...rest].slice(0, count)).buffer);
}

const bytesOf = (values) => new Uint8Array(values.buffer);

export const frames = () =>
  [
    [
      'json',
      {
        streamId: Route.HELLO,
        sequence: 1,
        meta: {
          content_type: 'application/x-aeon-flow; v=1',
          pad: '"\\/\b\f\n\r\t\u0001\u007fé𝄞',
          timing: true,
          layers: [0, 6],
          accept: ['f32', 'pcar'],
          model: { hidden_dim: 896, bos: null },
          pos: Number.MAX_SAFE_INTEGER,
        },
      },
    ],
    ['empty', { streamId: Route.HEALTH, sequence: 0xffff_ffff, flags: Flags.FIN, meta: {} }],
    ['u32', { streamId: Route.EMBED, sequence: 2, body: bytesOf(Uint32Array.of(0, 1, 65_535, 0xffff_ffff)) }],
    ['f32', { streamId: Route.FORWARD, sequence: 3, meta: { session: 'parity', pos: 0 }, body: bytesOf(floats(3584)) }],
    [
      'f32 of 64 positions',
      {
        streamId: Route.FORWARD,
        sequence: 4,
        flags: Flags.SUCCESS,
        meta: { status: 200, body: 'f32' },
        body: bytesOf(floats(64 * 896)),
      },
    ],
    [
      'pcar',
      {
        streamId: Route.FORWARD_PCA,
        sequence: 5,
        body: encodePcar({
          boundary: 3,
          k: 29,
          hiddenDim: 3584,
          methodology: 0xe18ac075,
          basisFp: 0xdeadbeef,
          components: floats(58),
        }),
      },
    ],
    [
      'bwah reply',
      {
        streamId: Route.AMPLITUHEDRON_REPLAY,
        sequence: 6,
        flags: Flags.SUCCESS,
        meta: { status: 200 },
        body: encodeAmplituhedronReply({ hit: true, tailResidual: floats(3584), kvSlab: floats(7) }),
      },
    ],
    [
      'bwah miss',
      {
        streamId: Route.AMPLITUHEDRON_REPLAY,
        sequence: 7,
        flags: Flags.SUCCESS,
        meta: { status: 204 },
        body: encodeAmplituhedronReply({ hit: false }),
      },
    ],
    [
      'bwah capture',
      {
        streamId: Route.AMPLITUHEDRON_CAPTURE,
        sequence: 8,
        body: encodeAmplituhedronCapture({
          prefixHash: 0xfedcba9876543210n,
          prefixLen: 17,
          layerLo: 0,
          layerHi: 28,
          tailResidual: floats(896),
          kvSlab: floats(0),
        }),
      },
    ],
    [
      'vent',
      {
        streamId: Route.FORWARD_PCA,
        sequence: 9,
        flags: Flags.FAILURE,
        meta: { status: 412, error: 'basis fingerprint mismatch', have: ['0x1a9fb320'] },
      },
    ],
  ].map(([name, frame]) => [name, encodeFrame(frame)]);

function compare(what, expected, got) {
  if (Buffer.compare(expected, got) !== 0) {
    const first = expected.findIndex((byte, n) => byte !== got[n]);
    throw new Error(`${what}: byte ${first} differs, ${expected.length} bytes expected, ${got.length} came`);
  }
  console.log(`${what}: ${got.length} bytes equal`);
}

/** Sends every frame to the Rust side, and compares what comes back. */
export async function exchange(path, port) {
  const mine = frames();
  const signal = AbortSignal.timeout(PATIENCE);

  const stream = net.connect(path);
  await once(stream, 'connect', { signal });
  for (const [, frame] of mine) {
    const prefix = Buffer.alloc(4);
    prefix.writeUInt32BE(frame.length);
    stream.write(prefix);
    stream.write(frame);
  }
  const reader = new FrameReader();
  const names = mine.map(([name]) => name);
  for (let n = 0; n < mine.length;) {
    const [chunk] = await once(stream, 'data', { signal });
    reader.push(chunk);
    for (const frame of reader) compare(`unix ${names[n]}`, mine[n++][1], encodeFrame(frame));
  }
  stream.destroy();

  const socket = dgram.createSocket('udp4');
  for (const [name, frame] of mine.filter(([, frame]) => frame.length <= MAX_DATAGRAM)) {
    socket.send(frame, port, '127.0.0.1');
    const [datagram] = await once(socket, 'message', { signal });
    compare(`udp ${name}`, frame, datagram);
  }
  socket.close();
}

if (process.argv[1] === import.meta.filename) await exchange(process.argv[2], Number(process.argv[3]));
