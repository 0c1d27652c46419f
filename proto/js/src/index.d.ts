export * from './aeon_proto.js';
export * from './constants.js';
export * from './errors.js';
export { FrameReader } from './stream.js';
export { lift as liftReference } from './reference.js';

/**
 * Loads the wasm module. Not needed in Node. In a browser `await init()` fetches `aeon_proto_bg.wasm` from beside
 * `web.js`, or from the URL given; an edge worker passes the `WebAssembly.Module` that it imports. Until it is done, every
 * other function throws a TypeError. Later calls return the first load.
 */
export function init(source?: string | URL | Request | Response | BufferSource | WebAssembly.Module): Promise<void>;
