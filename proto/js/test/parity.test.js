// The Rust side and this package send every kind of body to each other over real sockets and compare the bytes.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { test } from 'node:test';

import { exchange, frames } from './parity.js';

// Named: it must be there. Not named: it is looked for where cargo puts it.
const program =
  process.env.AEON_PARITY ?? fileURLToPath(new URL('../../../target/debug/examples/parity', import.meta.url));
const skip =
  process.env.AEON_PARITY === undefined && !existsSync(program)
    ? `${program} is not there; cargo build -p aeon-proto --example parity`
    : false;

test('every kind of body is the same bytes on both sides', { skip, timeout: 60_000 }, async () => {
  const folder = mkdtempSync(join(tmpdir(), 'aeon-parity-'));
  const path = join(folder, 'p.sock');
  const rust = spawn(program, [path], { stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  let errors = '';
  rust.stdout.setEncoding('utf8').on('data', (text) => (output += text));
  rust.stderr.setEncoding('utf8').on('data', (text) => (errors += text));
  const ended = once(rust, 'close');
  try {
    while (!output.includes('\n')) await Promise.race([once(rust.stdout, 'data'), ended]);
    const port = Number(/^ready udp=(\d+)$/m.exec(output)[1]);
    await exchange(path, port);
    const [status] = await ended;
    assert.equal(status, 0, errors);
    const datagrams = frames().filter(([, frame]) => frame.length <= 65_507).length;
    assert.equal(datagrams, frames().length - 1);
    assert.equal(output.match(/ bytes equal$/gm).length, frames().length + datagrams, output);
  } finally {
    rust.kill();
    rmSync(folder, { recursive: true });
  }
});
