// The carriers of a station: Unix sockets and UDP.

import { chmodSync, lstatSync, unlinkSync } from 'node:fs';
import dgram from 'node:dgram';
import net from 'node:net';

import { Flags, FrameError, FrameReader, PREFIX_LEN, decodeFrame } from 'aeon-proto';

import { MAX_DATAGRAM, Peer } from './station.js';

/** A frame that has begun must arrive whole within this time for each started MiB of it. */
const HALF_FRAME_MS = 10_000;
/** Requests in flight on one connection before it is read no further. */
const MAX_CONNECTION_IN_FLIGHT = 64;
/** Bytes and number of the requests behind them that are read to find cancels. */
const MAX_BACKLOG = 64 << 10;
const MAX_BACKLOG_FRAMES = 1024;
const MAX_CONNECTIONS = 1024;
/** The longest path of a Unix socket on Linux. */
const MAX_PATH = 107;

/** Listens on a Unix socket; resolves to a function that closes it and all its connections. */
export async function listenUnix(
  station,
  path,
  { halfFrameMs = HALF_FRAME_MS, maxConnections = MAX_CONNECTIONS } = {},
) {
  if (Buffer.byteLength(path) > MAX_PATH) {
    throw new RangeError(`socket path of ${Buffer.byteLength(path)} bytes, Linux takes at most ${MAX_PATH}: ${path}`);
  }
  await removeStale(path);
  const open = new Set();
  // Half open: a peer that closes its sending side still gets its answers.
  const server = net.createServer({ allowHalfOpen: true }, (socket) => {
    if (open.size >= maxConnections) {
      station.counters.connections_refused += 1;
      const message = `${maxConnections} connections are open, no more are taken`;
      socket.on('error', () => {});
      socket.end(prefixed(station.vent(0, 0, 503, message, { retry_after_ms: 250 })));
      return;
    }
    open.add(socket);
    station.counters.connections += 1;
    socket.on('close', () => {
      open.delete(socket);
      station.counters.connections -= 1;
    });
    serve(station, socket, halfFrameMs);
  });
  await listening(server, () => server.listen(path));
  chmodSync(path, 0o660);
  return () =>
    new Promise((resolve) => {
      server.close(() => resolve());
      for (const socket of open) socket.destroy();
    });
}

/** Reads requests off one connection and writes its answers. */
function serve(station, socket, halfFrameMs) {
  const reader = new FrameReader({ maxFrame: station.limits.maxFrame });
  const peer = new Peer({ maxReply: station.limits.maxFrame });
  // Requests that wait because too many are in flight; they are read only to find cancels behind them.
  const backlog = [];
  let backlogBytes = 0;
  let hasEnded = false;
  let isRefused = false;
  let timer;
  let frameBegan;

  const send = (bytes) => {
    if (socket.destroyed || socket.writableEnded) station.counters.send_errors += 1;
    else socket.write(prefixed(bytes));
  };
  // Says once what is wrong with the stream, and reads no more of it.
  const refuse = (streamId, sequence, status, message, fields) => {
    isRefused = true;
    send(station.vent(streamId, sequence, status, message, fields));
    // A peer that does not read its answers must not keep the connection.
    clearTimeout(timer);
    timer = setTimeout(() => socket.destroy(), halfFrameMs);
    finish();
  };
  // What came before is still answered.
  const finish = () => {
    const isDone = peer.inFlight.size === 0 && backlog.length === 0;
    if ((isRefused || hasEnded) && isDone && !socket.writableEnded) socket.end(() => socket.destroy());
  };
  // The time runs from the frame's beginning, so that single bytes do not stretch it; each MiB that came adds to it.
  const watch = () => {
    clearTimeout(timer);
    if (isRefused || hasEnded || reader.pending === 0) {
      frameBegan = undefined;
      return;
    }
    frameBegan ??= Date.now();
    const ms = halfFrameMs * (1 + Math.floor(reader.pending / (1 << 20)));
    timer = setTimeout(
      () => {
        refuse(0, 0, 400, `half a frame: ${reader.pending} bytes of it came in ${ms} ms`);
      },
      Math.max(0, frameBegan + ms - Date.now()),
    );
  };
  const take = (frame) => {
    if (peer.inFlight.size < MAX_CONNECTION_IN_FLIGHT) return station.handle(frame, peer, send);
    if (frame.flags & Flags.VENT) {
      const at = backlog.findIndex(
        ({ streamId, sequence }) => streamId === frame.streamId && sequence === frame.sequence,
      );
      if (at < 0) return station.handle(frame, peer, send);
      const [{ streamId, sequence, payload }] = backlog.splice(at, 1);
      backlogBytes -= payload.length;
      return send(station.vent(streamId, sequence, 499, 'cancelled'));
    }
    backlog.push(frame);
    backlogBytes += frame.payload.length;
    return undefined;
  };
  const isBlocked = () =>
    socket.writableNeedDrain ||
    (peer.inFlight.size >= MAX_CONNECTION_IN_FLIGHT &&
      (backlogBytes >= MAX_BACKLOG || backlog.length >= MAX_BACKLOG_FRAMES));
  const read = () => {
    while (backlog.length > 0 && peer.inFlight.size < MAX_CONNECTION_IN_FLIGHT && !socket.writableNeedDrain) {
      const frame = backlog.shift();
      backlogBytes -= frame.payload.length;
      station.handle(frame, peer, send);
    }
    if (isRefused) return finish();
    try {
      while (!isBlocked()) {
        const frame = reader.next();
        if (frame === undefined) break;
        frameBegan = undefined;
        take(frame);
      }
    } catch (error) {
      if (!(error instanceof FrameError)) throw error;
      const { streamId, sequence, max } = error.details;
      if (error.code === 'FrameTooLarge') refuse(streamId, sequence, 413, error.message, { max_frame: max });
      else refuse(streamId, sequence, 400, error.message);
      return undefined;
    }
    if (isBlocked()) {
      // Its reader is slow or its requests take long: nothing more is read until there is room.
      clearTimeout(timer);
      frameBegan = undefined;
      socket.pause();
      return undefined;
    }
    if (socket.isPaused()) socket.resume();
    watch();
    return finish();
  };
  peer.onSettled = read;
  socket.on('data', (chunk) => {
    if (isRefused) return;
    reader.push(chunk);
    read();
  });
  socket.on('drain', read);
  socket.on('end', () => {
    hasEnded = true;
    if (!isRefused) clearTimeout(timer);
    finish();
  });
  socket.on('error', () => {});
  socket.on('close', () => {
    clearTimeout(timer);
    isRefused = true;
    backlog.length = 0;
    station.forget(peer);
  });
}

/** Listens on UDP, for loopback addresses only; resolves to the socket's address and a function that closes it. */
export async function listenUdp(station, address, port) {
  const socket = dgram.createSocket({ type: net.isIPv6(address) ? 'udp6' : 'udp4', recvBufferSize: 4 << 20 });
  // One peer for each address that has something in flight: there is nothing else to remember.
  const busy = new Map();
  socket.on('message', (datagram, from) => {
    if (!isLoopback(from.address)) {
      station.counters.dropped.peer_not_allowed += 1;
      return;
    }
    let frame;
    try {
      frame = decodeFrame(datagram);
    } catch {
      station.counters.dropped.undecodable += 1;
      return;
    }
    const name = `${from.address} ${from.port}`;
    const peer = busy.get(name) ?? new Peer({ address: name, maxReply: MAX_DATAGRAM });
    peer.onSettled = () => {
      if (peer.inFlight.size === 0) busy.delete(name);
    };
    station.handle(frame, peer, (bytes) => {
      socket.send(bytes, from.port, from.address, (error) => {
        if (error) station.counters.send_errors += 1;
      });
    });
    if (peer.inFlight.size > 0) busy.set(name, peer);
  });
  await listening(socket, () => socket.bind(port, address));
  // An error of one datagram must not end the station.
  socket.on('error', () => (station.counters.send_errors += 1));
  return { address: socket.address(), close: () => new Promise((resolve) => socket.close(() => resolve())) };
}

const isLoopback = (address) => /^(::ffff:)?127\./.test(address) || address === '::1';

function prefixed(frame) {
  const bytes = Buffer.allocUnsafe(PREFIX_LEN + frame.length);
  bytes.writeUInt32BE(frame.length);
  bytes.set(frame, PREFIX_LEN);
  return bytes;
}

function listening(server, start) {
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    server.once('listening', () => {
      server.off('error', reject);
      resolve();
    });
    start();
  });
}

/** Removes a socket that nobody listens on; a file that is no socket, or a station that is alive, is an error. */
async function removeStale(path) {
  let stat;
  try {
    stat = lstatSync(path);
  } catch (error) {
    if (error.code === 'ENOENT') return;
    throw error;
  }
  if (!stat.isSocket()) throw new Error(`${path} is there and no socket; remove it or choose another path`);
  const alive = await new Promise((resolve) => {
    const probe = net.connect(path);
    probe.once('connect', () => {
      probe.destroy();
      resolve(true);
    });
    probe.once('error', () => resolve(false));
  });
  if (alive) throw new Error(`${path}: another station listens there`);
  unlinkSync(path);
}
