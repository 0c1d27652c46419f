/**
 * `mean + components × basis` for one position, in plain JavaScript: `mean` is `[d]`, `basis` `[k, d]`, `components` `[k]`.
 * It is slow and checks nothing; it is there to be read, and to be compared with.
 */
export function lift(mean: Float32Array, basis: Float32Array, components: Float32Array): Float32Array;
