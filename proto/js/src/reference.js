// The lift as the specification writes it, in plain JavaScript. Every other implementation must give these bits.

/** `mean + components × basis` for one position: mean [d], basis [k, d], components [k]. */
export function lift(mean, basis, components) {
  const d = mean.length;
  return Float32Array.from(mean, (start, j) => {
    let y = start;
    for (let i = 0; i < components.length; i++) {
      y = Math.fround(y + Math.fround(components[i] * basis[i * d + j]));
    }
    return y;
  });
}
