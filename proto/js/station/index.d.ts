import type { Basis, Frame, Methodology } from 'aeon-proto';

/** The bases and methodologies of a station. */
export class Bases {
  /** Reads every `*.pcab` of a folder, and every `*.json` below the folder of methodologies. */
  static load(folder: string, methodologies?: string): Bases;
  /** Adds the bytes of a basis file; two files with one fingerprint are refused. */
  addBasis(bytes: Uint8Array): Basis;
  /** Adds a methodology spec, given as JSON text or as an object. */
  addMethodology(spec: string | object): Methodology;
  /** Fingerprints of the basis files. */
  readonly fingerprints: number[];
}

/** What came in one request. */
export interface Residuals {
  /** `[seq, hiddenDim]`; lifted, if components came. */
  residuals: Float32Array;
  seq: number;
  /** Index of the first position in the session. */
  pos: number;
  /** Number of layers already applied. */
  boundary: number;
  session?: string;
  /** Whether components came. */
  compressed: boolean;
  /** Aborted when the request is withdrawn. */
  signal: AbortSignal;
}

export interface StationOptions {
  /** Values of a residual. */
  hiddenDim: number;
  /** The layers `[lo, hi)` that it stands for; `[0, 1]` if absent. Residuals come in at boundary lo. */
  layers?: [lo: number, hi: number];
  /** Layers of the whole model; `hi` if absent. */
  nLayers?: number;
  name?: string;
  vocab?: number;
  bases?: Bases;
  /** What is done with residuals; they are returned as they came if absent. It may throw a `Vent`. */
  forward?: (input: Residuals) => Float32Array | Promise<Float32Array>;
  /** The largest frame that is taken and sent. */
  maxFrame?: number;
  /** Positions that one request may hold. */
  maxSeq?: number;
  /** Fingerprint of the model's configuration, as the other stations of the model give it. */
  configFp?: string;
  layersFp?: string;
}

/** A request that is refused: the status and fields of its vent. */
export class Vent extends Error {
  constructor(status: number, message: string, fields?: { [key: string]: unknown });
  readonly status: number;
  readonly fields: { [key: string]: unknown };
}

/** Who sends: one for each stream connection, and one for each address on UDP. */
export class Peer {
  constructor(options?: { address?: string; maxReply?: number });
}

/** A residual receiver; carriers bring it frames. */
export class Station {
  constructor(options: StationOptions);
  /** Handles one frame; `reply` gets the answer, at once or later, if there is one. */
  handle(frame: Frame, peer: Peer, reply: (frame: Uint8Array) => void): void;
}

/** Listens on a Unix socket; resolves to a function that closes it and all its connections. */
export function listenUnix(
  station: Station,
  path: string,
  options?: { halfFrameMs?: number; maxConnections?: number },
): Promise<() => Promise<void>>;

/** Listens on UDP, for loopback peers only: datagrams of others are counted and dropped. */
export function listenUdp(
  station: Station,
  address: string,
  port: number,
): Promise<{ address: { address: string; port: number }; close: () => Promise<void> }>;
