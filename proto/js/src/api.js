// What every entry of the package exports.

export {
  AeonProtoError,
  BWAHDecodeError,
  BwDecodeError,
  FragmentError,
  FrameError,
  KernelError,
  MethodologyError,
  PayloadError,
  PcabError,
  PcarError,
  QresError,
} from './errors.js';
export * from './constants.js';
export { FrameReader } from './stream.js';
export { lift as liftReference } from './reference.js';
export * from './aeon_proto.js';
