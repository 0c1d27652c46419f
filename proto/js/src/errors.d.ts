/** What all errors of the formats have in common; `instanceof` tells the formats apart, `code` the faults. */
export class AeonProtoError extends Error {
  constructor(message: string, code: string, details?: { [fact: string]: unknown }, cause?: Error);
  /** The name of the fault in the specification, such as `BadMagic` or `Truncated`. */
  readonly code: string;
  /** What was expected, what came, and where. */
  readonly details: { [fact: string]: unknown };
}
/** Bytes that are no frame, or a stream that is none of frames. */
export class FrameError extends AeonProtoError {}
/** A payload that does not split, or a meta that is no object by the rules of the protocol. */
export class PayloadError extends AeonProtoError {}
/** A PCAR body that is none, or that a basis cannot lift. */
export class PcarError extends AeonProtoError {}
/** A QRES body that is none, that does not fit a mean, or that holds NaN or infinity. */
export class QresError extends AeonProtoError {}
/** A basis file that is none. */
export class PcabError extends AeonProtoError {}
/** Arrays whose lengths do not fit together, or numbers that are not finite. */
export class KernelError extends AeonProtoError {}
/** A methodology spec that is none. */
export class MethodologyError extends AeonProtoError {}
/** A datagram that is no part of a frame, or a frame that cannot be cut. */
export class FragmentError extends AeonProtoError {}
/** A .bw blob that does not decode. */
export class BwDecodeError extends AeonProtoError {}
/** A BWAH envelope that does not decode. `InnerBlobError` has the fault of the blob as its `cause`, a `BwDecodeError`. */
export class BWAHDecodeError extends AeonProtoError {}
