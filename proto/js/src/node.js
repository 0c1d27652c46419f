// The entry for Node: the module is read from its file at once, so there is nothing to wait for.

import { readFileSync } from 'node:fs';

import { initSync } from './aeon_proto.js';

initSync({ module: readFileSync(new URL('./aeon_proto_bg.wasm', import.meta.url)) });

export * from './api.js';

/** Does nothing here: it is for programs that also run in a browser. */
export async function init() {}
