// A frame codec in plain JavaScript, as one writes it in TypeScript: objects in, fresh arrays out.
// For each line "PAYLOAD_LEN MILLISECONDS" on standard input it writes "ENCODE_NS DECODE_NS".

import { createInterface } from 'node:readline';

const HEADER_LEN = 10;

class FlowCodec {
  encode(frame) {
    const buffer = new Uint8Array(HEADER_LEN + frame.payload.length);
    const view = new DataView(buffer.buffer);
    view.setUint16(0, frame.streamId);
    view.setUint32(2, frame.sequence);
    view.setUint8(6, frame.flags);
    view.setUint8(7, (frame.payload.length >> 16) & 0xff);
    view.setUint8(8, (frame.payload.length >> 8) & 0xff);
    view.setUint8(9, frame.payload.length & 0xff);
    buffer.set(frame.payload, HEADER_LEN);
    return buffer;
  }

  decode(buffer) {
    if (buffer.length < HEADER_LEN) throw new Error(`frame of ${buffer.length} bytes has no header`);
    const view = new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength);
    const length = (view.getUint8(7) << 16) | (view.getUint8(8) << 8) | view.getUint8(9);
    if (buffer.length < HEADER_LEN + length) throw new Error(`frame of ${buffer.length} bytes is cut`);
    return {
      streamId: view.getUint16(0),
      sequence: view.getUint32(2),
      flags: view.getUint8(6),
      payload: buffer.slice(HEADER_LEN, HEADER_LEN + length),
    };
  }
}

const codec = new FlowCodec();
let sink = 0;

// Time that this process ran, in ns: what others take of the core does not count.
function ran() {
  const { user, system } = process.cpuUsage();
  return (user + system) * 1e3;
}

function measure(milliseconds, call) {
  const start = ran();
  let calls = 0;
  let now = start;
  while (now < start + milliseconds * 1e6) {
    for (let n = 0; n < 4096; n++) sink ^= call(calls + n);
    calls += 4096;
    now = ran();
  }
  return (now - start) / calls;
}

for await (const line of createInterface({ input: process.stdin })) {
  const [length, milliseconds] = line.split(' ').map(Number);
  const payload = new Uint8Array(length).fill(7);
  const bytes = codec.encode({ streamId: 3, sequence: 1, flags: 0, payload });
  const encode = measure(milliseconds / 2, (sequence) => codec.encode({ streamId: 3, sequence, flags: 0, payload }).length);
  const decode = measure(milliseconds / 2, () => codec.decode(bytes).payload.length);
  console.log(`${encode} ${decode}`);
}
if (sink === -1) console.log(sink);
