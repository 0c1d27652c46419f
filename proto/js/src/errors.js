// The error classes of this package. The wasm module makes them through `makeError`.

/** What all errors of the formats have in common. */
export class AeonProtoError extends Error {
  constructor(message, code, details = {}, cause = undefined) {
    super(message, cause === undefined ? undefined : { cause });
    this.code = code;
    this.details = details;
  }
  get name() {
    return this.constructor.className;
  }
  static className = 'AeonProtoError';
}

// Names are written out: a minifier renames classes.
export class FrameError extends AeonProtoError {
  static className = 'FrameError';
}
export class PayloadError extends AeonProtoError {
  static className = 'PayloadError';
}
export class PcarError extends AeonProtoError {
  static className = 'PcarError';
}
export class QresError extends AeonProtoError {
  static className = 'QresError';
}
export class PcabError extends AeonProtoError {
  static className = 'PcabError';
}
export class KernelError extends AeonProtoError {
  static className = 'KernelError';
}
export class MethodologyError extends AeonProtoError {
  static className = 'MethodologyError';
}
export class FragmentError extends AeonProtoError {
  static className = 'FragmentError';
}
export class BwDecodeError extends AeonProtoError {
  static className = 'BwDecodeError';
}
export class BWAHDecodeError extends AeonProtoError {
  static className = 'BWAHDecodeError';
}

const classes = {
  FrameError,
  PayloadError,
  PcarError,
  QresError,
  PcabError,
  KernelError,
  MethodologyError,
  FragmentError,
  BwDecodeError,
  BWAHDecodeError,
};

/** Called by the wasm module. `facts` is an enum of Rust as serde writes it: "Name" or {"Name": fields}. */
export function makeError(className, message, facts) {
  const [code, details] = variant(JSON.parse(facts));
  let cause;
  if (code === 'InnerBlobError') {
    cause = new BwDecodeError(message.slice(message.lastIndexOf(': ') + 2), details.cause, details.facts);
    delete details.facts;
  }
  return new classes[className](message, code, details, cause);
}

/** Name and fields of a variant. A variant inside of it becomes the field `cause`, with its own fields in `facts`. */
function variant(value) {
  if (typeof value === 'string') return [value, {}];
  const [[code, fields]] = Object.entries(value);
  if (typeof fields !== 'object' || Array.isArray(fields)) return [code, { value: fields }];
  // A fault of a blob (Bw) only wraps the fault itself.
  if (code === 'Bw') return variant(fields);
  const details = {};
  const inner = fields.fault ?? (isVariant(fields) ? fields : undefined);
  if (inner !== undefined) [details.cause, details.facts] = variant(inner);
  if (inner !== fields) for (const [key, field] of Object.entries(fields)) if (key !== 'fault') details[key] = field;
  return [code, details];
}

function isVariant(value) {
  const keys = Object.keys(value);
  return keys.length === 1 && /^[A-Z]/.test(keys[0]);
}

/** Called by the wasm module: what a value is, for the message of a TypeError. */
export function describe(value) {
  if (value === null) return 'null';
  if (typeof value !== 'object') return typeof value === 'function' ? 'a function' : `${typeof value}`;
  return value.constructor?.name ?? 'an object';
}
