#!/usr/bin/env python3
"""Prints the Lloyd-Max levels of the unit Gaussian as f32 bit patterns: the positive half for 3 to 8 bits, ascending.

Each level is the mean of its cell, cell borders lie midway between levels. Solved by Newton's method in double precision;
Python 3 with its standard library alone.
"""
import math
import struct
from statistics import NormalDist


def density(t):
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi) if t < math.inf else 0.0


def tail(t):
    return 0.5 * math.erfc(t / math.sqrt(2)) if t < math.inf else 0.0


def levels(bits):
    half = 1 << (bits - 1)
    start = NormalDist(0, math.sqrt(3))
    x = [start.inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)]
    for _ in range(100):
        borders = [0.0] + [(a + b) / 2 for a, b in zip(x, x[1:])] + [math.inf]
        below, diagonal, above, fault = [], [], [], []
        for i in range(half):
            a, b = borders[i], borders[i + 1]
            p = tail(a) - tail(b)
            mean = (density(a) - density(b)) / p
            by_a = density(a) * (mean - a) / p
            by_b = density(b) * (b - mean) / p if b < math.inf else 0.0
            # A border moves by half of what either neighbour moves; the first one does not move.
            half_a = by_a / 2 if i > 0 else 0.0
            below.append(-half_a)
            diagonal.append(1 - half_a - by_b / 2)
            above.append(-by_b / 2)
            fault.append(x[i] - mean)
        for i in range(1, half):
            factor = below[i] / diagonal[i - 1]
            diagonal[i] -= factor * above[i - 1]
            fault[i] -= factor * fault[i - 1]
        step = [0.0] * half
        for i in reversed(range(half)):
            step[i] = (fault[i] - (above[i] * step[i + 1] if i + 1 < half else 0.0)) / diagonal[i]
        x = [a - s for a, s in zip(x, step)]
        if max(map(abs, step)) < 1e-10:
            return x
    raise SystemExit(f"{bits} bits: no convergence")


def main():
    for bits in range(3, 9):
        words = [struct.unpack("<I", struct.pack("<f", v))[0] for v in levels(bits)]
        print(f"{bits}:", " ".join(f"{w:08x}" for w in words))


if __name__ == "__main__":
    main()
