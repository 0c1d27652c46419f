// The entry for browsers and edge workers: nothing works before `init` is done.

import load from './aeon_proto.js';

export * from './api.js';

let loading;

/** Loads the module: from beside this file, from a URL or Response, or from bytes or a WebAssembly.Module. */
export function init(source) {
  loading ??= load(source === undefined ? undefined : { module_or_path: source }).then(
    () => {},
    (error) => {
      loading = undefined;
      throw error;
    },
  );
  return loading;
}
