#!/usr/bin/env node
// A residual receiver as a program: says one line to stderr when it is ready, ends by SIGTERM or SIGINT with status 0.

import { endianness } from 'node:os';
import { parseArgs } from 'node:util';

import { Bases } from './bases.js';
import { listenUdp, listenUnix } from './server.js';
import { Station } from './station.js';

const HELP = `aeon-station-js --dim D [--socket PATH] [--udp ADDR:PORT] [--bases DIR] [--methodologies DIR]
                [--layers LO..HI] [--n-layers N] [--config-fp HEX]

Receives residuals over aeon-flow and returns them, lifted if they came as PCA components.

  --dim D              values of a residual
  --socket PATH        listen on a Unix socket
  --udp ADDR:PORT      listen on UDP; only loopback peers are answered. Port 0 takes a free one
  --bases DIR          load DIR/*.pcab
  --methodologies DIR  where their methodologies are (DIR/methodologies of --bases)
  --layers LO..HI      the layers that it stands for; residuals come in at boundary LO (0..1)
  --n-layers N         layers of the whole model (HI)
  --config-fp HEX      config_fp of the model, if clients check it`;

const USAGE = 64;

function fail(message, code = USAGE) {
  console.error(`aeon-station-js: ${message}`);
  process.exit(code);
}

function number(name, text) {
  if (!/^\d{1,9}$/.test(text ?? '')) fail(`--${name} must be a whole number, got ${text ?? 'nothing'}`);
  return Number(text);
}

function options() {
  const string = { type: 'string' };
  try {
    return parseArgs({
      options: {
        dim: string,
        socket: string,
        udp: string,
        bases: string,
        methodologies: string,
        layers: string,
        'n-layers': string,
        'config-fp': string,
        help: { type: 'boolean', short: 'h' },
      },
    }).values;
  } catch (error) {
    return fail(`${error.message}; try --help`);
  }
}

const given = options();
if (given.help) {
  console.log(HELP);
  process.exit(0);
}
if (endianness() !== 'LE') fail('this machine is big-endian, residuals are not', 1);
if (given.socket === undefined && given.udp === undefined) fail('nothing to listen on: give --socket or --udp');
const layers = /^(\d{1,5})\.\.(\d{1,5})$/
  .exec(given.layers ?? '0..1')
  ?.slice(1)
  .map(Number);
if (layers === undefined) fail(`--layers must be LO..HI, got ${given.layers}`);
const udp = given.udp === undefined ? undefined : /^\[?([^\]]+?)\]?:(\d{1,5})$/.exec(given.udp);
if (udp === null) fail(`--udp must be ADDR:PORT, got ${given.udp}`);

let station;
try {
  station = new Station({
    hiddenDim: number('dim', given.dim),
    layers,
    nLayers: given['n-layers'] === undefined ? undefined : number('n-layers', given['n-layers']),
    bases: given.bases === undefined ? undefined : Bases.load(given.bases, given.methodologies),
    configFp: given['config-fp'],
  });
} catch (error) {
  fail(error.message);
}

const close = [];
const ready = [];
// Before the ready line: whoever waits for it may end this process at once.
for (const signal of ['SIGTERM', 'SIGINT']) {
  process.on(signal, () => {
    Promise.all(close.map((end) => end())).then(() => process.exit(0));
  });
}
try {
  if (given.socket !== undefined) {
    close.push(await listenUnix(station, given.socket));
    ready.push(`uds=${given.socket}`);
  }
  if (udp !== undefined) {
    const listener = await listenUdp(station, udp[1], Number(udp[2]));
    close.push(listener.close);
    const { address, port } = listener.address;
    ready.push(`udp=${address.includes(':') ? `[${address}]` : address}:${port}`);
  }
} catch (error) {
  await Promise.all(close.map((end) => end()));
  fail(error.message, 1);
}
console.error(`ready ${ready.join(' ')} model=identity:${station.hiddenDim} layers=${layers[0]}..${layers[1]}`);
