// Every entry of vectors/aeon-flow.json, with the outcome that tests/flow_vectors.rs has.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import {
  Flags,
  FragmentError,
  Fragmenter,
  FrameError,
  FrameReader,
  InFlight,
  MAX_FRAME_LEN,
  PayloadError,
  Reassembler,
  Received,
  Route,
  StreamOrder,
  decodeAcks,
  decodeFirstFrame,
  decodeFrame,
  decodeFrames,
  decodePayload,
  encodeFrame,
  encodeFrames,
  encodePayload,
  encodePrefixedFrame,
  routeName,
  statusDescription,
} from 'aeon-proto';
import { assertBytes, bytes, load, run, thrown, unhex } from './support.js';

const file = load('aeon-flow.json');
const SECTIONS = {
  frames: 122,
  station_payloads: 25,
  batches: 8,
  tcp: 9,
  tcp_receive: 8,
  udp_fragmented: 24,
  udp_receive: 16,
  udp_acks: 13,
  udp_ack_effects: 7,
  ordering: 12,
  errors: 27,
};

const frameOf = (entry) => ({
  streamId: entry.stream_id,
  sequence: entry.sequence,
  flags: entry.flags,
  payload: bytes(entry.payload),
});
const concat = (parts) => new Uint8Array(Buffer.concat(parts.map((part) => Uint8Array.from(part))));

test('every section is checked, 271 entries in all', () => {
  assert.deepEqual(Object.keys(file.counts).sort(), Object.keys(SECTIONS).sort());
  for (const [name, count] of Object.entries(SECTIONS)) assert.equal(file.counts[name], count, name);
  assert.equal(
    Object.values(SECTIONS).reduce((sum, count) => sum + count),
    271,
  );
});

test('frames', () => {
  run(file, 'frames', SECTIONS.frames, (entry) => {
    const frame = frameOf(entry);
    const encoded = encodeFrame(frame);
    assertBytes(encoded, entry.encoded);
    assert.deepEqual(decodeFrame(encoded), frame);
    assert.deepEqual(decodeFirstFrame(encoded), { ...frame, bytesRead: encoded.length });
    for (let len = 0; len < Math.min(encoded.length, 600); len++) {
      const error = thrown(() => decodeFrame(encoded.subarray(0, len)));
      assert.ok(error instanceof FrameError);
      assert.equal(error.code, len < 10 ? 'ShortHeader' : 'ShortPayload');
      assert.deepEqual(error.details, len < 10 ? { got: len } : { expected: frame.payload.length, got: len - 10 });
    }
    const error = thrown(() => decodeFrame(concat([encoded, [0]])));
    assert.deepEqual([error.code, error.details], ['TrailingBytes', { extra: 1 }]);
    // With its length in front, cut anywhere.
    const prefixed = encodePrefixedFrame(frame);
    assert.deepEqual(prefixed.subarray(4), encoded);
    for (const cut of [0, 1, 3, 4, 9, 13, 14, 15, prefixed.length - 1].filter((cut) => cut < prefixed.length)) {
      const reader = new FrameReader();
      reader.push(prefixed.subarray(0, cut));
      assert.equal(reader.next(), undefined);
      reader.push(prefixed.subarray(cut));
      assert.deepEqual([...reader], [frame]);
      assert.equal(reader.pending, 0);
    }
  });
});

test('station payloads', () => {
  run(file, 'station_payloads', SECTIONS.station_payloads, (entry) => {
    const head = { streamId: entry.stream_id, sequence: entry.sequence, flags: entry.flags };
    if (entry.valid) {
      const fill = entry.meta_fill;
      const metaText = fill ? fill.before + fill.repeat.repeat(fill.count) + fill.after : entry.meta_json;
      const body = bytes(entry.body);
      const encoded = encodeFrame({ ...head, meta: metaText, body });
      assertBytes(encoded, entry.encoded);
      const { payload } = decodeFrame(encoded);
      assertBytes(payload, entry.payload);
      assert.deepEqual(encodePayload(metaText, body), payload);
      const meta = metaText === '' ? {} : JSON.parse(metaText);
      assert.deepEqual(decodePayload(payload), { meta, metaText, body });
      return;
    }
    const payload = bytes(entry.payload);
    assert.deepEqual(decodeFrame(bytes(entry.encoded)), { ...head, payload }, 'only the payload is bad');
    const error = thrown(() => decodePayload(payload));
    assert.ok(error instanceof PayloadError);
    const expected = {
      'no room for the meta length': 'ShortPayload',
      'meta runs past the payload': 'ShortMeta',
      'meta is not UTF-8': 'NotUtf8',
      'meta is not JSON': 'Syntax',
      'meta is no object': 'NotObject',
    };
    assert.equal(error.code, expected[entry.problem]);
  });
});

test('batches', () => {
  run(file, 'batches', SECTIONS.batches, (entry) => {
    const frames = entry.frames.map(frameOf);
    const encoded = encodeFrames(frames);
    assertBytes(encoded, entry.encoded);
    assert.deepEqual(decodeFrames(encoded), frames);
  });
});

/** Reads messages without looking into them: a stream of the other implementation may hold any number of frames in one. */
function messagesOf(data) {
  const messages = [];
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  let at = 0;
  while (at + 4 <= data.length && at + 4 + view.getUint32(at) <= data.length) {
    messages.push(data.subarray(at + 4, at + 4 + view.getUint32(at)));
    at += 4 + view.getUint32(at);
  }
  return messages;
}

test('tcp', () => {
  const habits = ['two-frames-one-message', 'empty-message', 'empty-between'];
  run(file, 'tcp', SECTIONS.tcp, (entry) => {
    const messages = entry.messages.map((frames) => frames.map(frameOf));
    const encoded = concat(
      messages.flatMap((frames) => {
        const message = encodeFrames(frames);
        const prefix = Buffer.alloc(4);
        prefix.writeUInt32BE(message.length);
        return [prefix, message];
      }),
    );
    assertBytes(encoded, entry.encoded);
    const good = messages.findIndex((frames) => frames.length !== 1);
    const reader = new FrameReader();
    reader.push(encoded);
    const frames = [];
    const read = () => {
      for (const frame of reader) frames.push(frame);
    };
    if (good < 0) {
      read();
      assert.deepEqual(concat(messages.flat().map((frame) => encodePrefixedFrame(frame))), encoded);
    } else {
      // A message that is not one frame ends the stream; what came before it is delivered.
      assert.ok(habits.includes(entry.id));
      assert.equal(thrown(read).code, messages[good].length === 0 ? 'PrefixTooSmall' : 'PrefixMismatch');
    }
    assert.deepEqual(frames, messages.slice(0, good < 0 ? undefined : good).flat());
  });
});

test('tcp receive', () => {
  run(file, 'tcp_receive', SECTIONS.tcp_receive, (entry) => {
    const all = concat(entry.chunks.map(unhex));
    const messages = entry.messages.map(unhex);
    assert.deepEqual(
      messagesOf(all).map((m) => Buffer.from(m)),
      messages.map((m) => Buffer.from(m)),
    );
    const read = (chunks) => {
      const reader = new FrameReader();
      const frames = [];
      let code;
      for (const chunk of chunks) {
        reader.push(chunk);
        try {
          for (const frame of reader) frames.push(frame);
        } catch (error) {
          code = error.code;
        }
      }
      return { frames, code };
    };
    const bad = messages.findIndex((message) => message.length === 0);
    const expected = {
      frames: messages.slice(0, bad < 0 ? undefined : bad).map((message) => decodeFrame(message)),
      code: bad < 0 ? undefined : 'PrefixTooSmall',
    };
    assert.deepEqual(read(entry.chunks.map(unhex)), expected);
    assert.deepEqual(read([...all].map((byte) => Uint8Array.of(byte))), expected, 'byte by byte');
    for (let cut = 0; cut <= all.length; cut++) {
      assert.deepEqual(read([all.subarray(0, cut), all.subarray(cut)]), expected, `cut at ${cut}`);
    }
  });
});

test('fragmented datagrams', () => {
  run(file, 'udp_fragmented', SECTIONS.udp_fragmented, (entry) => {
    const fragmenter = new Fragmenter(entry.mtu, entry.first_frame_id);
    entry.frames.map(frameOf).forEach((frame, n) => {
      const encoded = encodeFrame(frame);
      let datagrams = [];
      try {
        datagrams = fragmenter.split(encoded);
      } catch (error) {
        assert.ok(error instanceof FragmentError);
        assert.equal(error.code, 'TooLong');
      }
      const joined = entry.datagrams_joined?.[n];
      if (joined !== undefined) {
        assert.equal(datagrams.length, joined.count);
        assertBytes(concat(datagrams), joined);
      } else {
        assert.equal(datagrams.length, entry.datagrams[n].length);
        datagrams.forEach((datagram, part) => assertBytes(datagram, entry.datagrams[n][part]));
      }
      const reassembler = new Reassembler();
      datagrams.reverse().forEach((datagram, part) => {
        const whole = reassembler.push(0, 'peer', datagram);
        assert.deepEqual(whole, part + 1 === datagrams.length ? encoded : undefined);
      });
    });
  });
});

/** The receiving side put together, as in the Rust test. */
function receive(datagrams, first) {
  const reassembler = new Reassembler();
  const streams = new Map();
  const delivered = [];
  const acks = [];
  for (const datagram of datagrams) {
    let frame;
    try {
      const whole = reassembler.push(0, 'peer', datagram);
      if (whole === undefined) continue;
      frame = decodeFrame(whole);
    } catch (error) {
      assert.ok(error instanceof FragmentError || error instanceof FrameError);
      continue;
    }
    if ((frame.flags & Flags.ACK) !== 0) {
      if (frame.streamId === 0xffff) acks.push(...decodeAcks(frame.payload));
      continue;
    }
    if (!streams.has(frame.streamId)) streams.set(frame.streamId, new StreamOrder(first));
    delivered.push(...streams.get(frame.streamId).push(frame.sequence, frame));
  }
  return { delivered, acks };
}

test('receiving datagrams', () => {
  run(file, 'udp_receive', SECTIONS.udp_receive, (entry) => {
    const datagrams = entry.datagrams.map(unhex);
    const { delivered, acks } = receive(datagrams, 0);
    if (['single-index-ignored', 'bytes-after-the-frame'].includes(entry.id)) {
      assert.deepEqual(delivered, [], 'dropped');
      const strict = datagrams.map((datagram) => concat([[0, 0, 0, 1], datagram.subarray(4, 14 + datagram[13])]));
      assert.deepEqual(receive(strict, 0).delivered, entry.delivered.map(frameOf), 'the strict form is not');
    } else {
      assert.deepEqual(delivered, entry.delivered.map(frameOf));
    }
    assert.deepEqual(acks, entry.id === 'ack-not-delivered' ? [{ streamId: 4, base: 0, bits: 1n }] : []);
  });
});

test('acknowledgements', () => {
  run(file, 'udp_acks', SECTIONS.udp_acks, (entry) => {
    const received = new Received();
    for (const { stream_id, sequences } of entry.received) {
      for (const sequence of sequences) received.insert(stream_id, sequence);
    }
    const frame =
      received.takeAck() ?? encodeFrame({ streamId: 0xffff, sequence: 0, flags: Flags.ACK, payload: new Uint8Array() });
    const datagrams = new Fragmenter(1472, entry.frame_id).split(frame);
    assert.equal(datagrams.length, 1);
    assert.deepEqual(datagrams[0], unhex(entry.datagram));
  });
});

test('what an acknowledgement leaves', () => {
  run(file, 'udp_ack_effects', SECTIONS.udp_ack_effects, (entry) => {
    const inFlight = new InFlight();
    for (const { stream_id, sequence } of entry.inflight) inFlight.insert(stream_id, sequence, 0, 'frame');
    for (const ack of decodeAcks(unhex(entry.ack_payload))) inFlight.acknowledge(ack);
    assert.deepEqual(
      inFlight.keys(),
      entry.left.map(({ stream_id, sequence }) => [stream_id, sequence]),
    );
    assert.equal(inFlight.overdue(10, 5).length, entry.left.length);
    assert.equal(inFlight.overdue(12, 5).length, 0, 'they count as sent again');
  });
});

test('ordering', () => {
  run(file, 'ordering', SECTIONS.ordering, (entry) => {
    const order = new StreamOrder();
    for (const { push, delivers } of entry.steps) assert.deepEqual(order.push(push, push), delivers);
    assert.equal(order.held, entry.held_back);
  });
});

test('errors', () => {
  run(file, 'errors', SECTIONS.errors, (entry) => {
    const codes = { short_header: 'ShortHeader', short_payload: 'ShortPayload', trailing_bytes: 'TrailingBytes' };
    const outcome = (operation, expected) => {
      if (!entry.ok) {
        const error = thrown(operation);
        assert.ok(error instanceof FrameError);
        assert.equal(error.code, codes[entry.problem]);
      } else {
        assert.deepEqual(operation(), expected());
      }
    };
    const { input } = entry;
    switch (entry.operation) {
      case 'decode':
        return outcome(
          () => decodeFirstFrame(bytes(input)),
          () => ({ ...frameOf(entry.frame), bytesRead: entry.bytes_read }),
        );
      case 'decode_batch':
        return outcome(
          () => decodeFrames(bytes(input)),
          () => entry.frames.map(frameOf),
        );
      case 'encode':
        // Numbers that the other implementation cuts to their low bits are refused here; so is a payload too long.
        if (entry.problem !== 'oversize') assert.match(entry.id, /^encode-keeps-low-bits/);
        return assert.ok(thrown(() => encodeFrame(frameOf(input))) instanceof RangeError);
      case 'encode_batch':
        assert.equal(entry.problem, 'oversize');
        return assert.ok(thrown(() => encodeFrames(input.map(frameOf))) instanceof RangeError);
      default:
        return assert.fail(entry.operation);
    }
  });
});

test('the names of routes are those of the crate', () => {
  const names = {};
  for (let opcode = 0; opcode <= 0xffff; opcode++) {
    const name = routeName(opcode);
    if (name !== undefined) names[name] = opcode;
  }
  assert.deepEqual(names, { ...Route });
  assert.equal(statusDescription(412), 'basis or methodology mismatch');
  assert.ok(thrown(() => routeName(65536)) instanceof RangeError);
});

test('a reader refuses what is no stream of frames, and says which request it was', () => {
  const frame = encodePrefixedFrame({ streamId: 3, sequence: 7, meta: { a: 1 } });
  const fails = (data, options, code, details) => {
    const reader = new FrameReader(options);
    reader.push(data);
    const error = thrown(() => reader.next());
    assert.ok(error instanceof FrameError);
    assert.equal(error.code, code);
    assert.deepEqual(error.details, details);
    reader.push(frame);
    assert.equal(
      thrown(() => reader.next()),
      error,
      'it stays refused',
    );
  };
  const names = { streamId: 3, sequence: 7 };
  fails(concat([[0, 0, 0, 9], frame.subarray(4)]), {}, 'PrefixTooSmall', { prefix: 9, streamId: 0, sequence: 0 });
  fails(concat([[0, 0, 0, 30], frame.subarray(4)]), {}, 'PrefixMismatch', {
    prefix: 30,
    payloadLen: frame.length - 14,
    ...names,
  });
  fails(concat([[255, 255, 255, 255], frame.subarray(4)]), {}, 'FrameTooLarge', {
    len: 0xffff_ffff,
    max: MAX_FRAME_LEN,
    ...names,
  });
  fails(frame, { maxFrame: 12 }, 'FrameTooLarge', { len: frame.length - 4, max: 12, ...names });
  fails(frame.subarray(4), { maxFrame: 12, bare: true }, 'FrameTooLarge', { len: frame.length - 4, max: 12, ...names });
  const bare = new FrameReader({ bare: true });
  for (const byte of frame.subarray(4)) bare.push(Uint8Array.of(byte));
  assert.equal(decodePayload(bare.next().payload).meta.a, 1);
  assert.ok(thrown(() => new FrameReader({ maxFrame: 9 })) instanceof RangeError);
  assert.ok(thrown(() => new FrameReader().push([1, 2])) instanceof TypeError);
});
