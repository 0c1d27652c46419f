#!/usr/bin/env python3
"""Writes the golden vectors of QRES beside this file.

A second implementation of proto/spec-qres.md that shares no code with the Rust one; standard library only. Run it after a
change of the specification, and look at the difference before committing it:

    python3 proto/vectors/make_qres.py && git diff proto/vectors

f32 arithmetic is done in f64 and rounded by struct. That is exact for sums, products, quotients and square roots, since 53
bits are at least twice 24 plus 2.
"""

import json
import math
import pathlib
import struct

from make_lloyd_max import levels as gaussian_levels

HERE = pathlib.Path(__file__).parent
MASK = 2**64 - 1


def f32(x):
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def bits(x):
    return "%08x" % struct.unpack("<I", struct.pack("<f", x))


def half(x):
    """The bytes of the nearest half, or None for what is too large."""
    try:
        return None if math.isinf(x) else struct.pack("<e", x)
    except OverflowError:
        return None


def of_half(data):
    return struct.unpack("<e", data)[0]


def table(count):
    positive = [f32(v) for v in gaussian_levels(count)]
    return [-v for v in reversed(positive)] + positive


LEVELS = {count: table(count) for count in range(3, 9)}
BORDERS = {count: [f32(f32(a + b) * 0.5) for a, b in zip(t, t[1:])] for count, t in LEVELS.items()}


class SplitMix64:
    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def rounds(d, seed):
    random = SplitMix64(seed)
    for _ in range(2):
        words = [random.next() for _ in range(-(-d // 64))]
        signs = [words[j // 64] >> (j % 64) & 1 for j in range(d)]
        source = list(range(d))
        for last in range(d - 1, 0, -1):
            other = ((random.next() >> 32) * (last + 1)) >> 32
            source[last], source[other] = source[other], source[last]
        yield signs, source


def transform(values, block):
    apart = 1
    while apart < block:
        for low in range(len(values)):
            if low // apart % 2 == 0:
                a, b = values[low], values[low + apart]
                values[low], values[low + apart] = f32(a + b), f32(a - b)
        apart *= 2


def block_of(d):
    return d & -d


def rotate(values, seed):
    for signs, source in rounds(len(values), seed):
        values = [-values[j] if signs[j] else values[j] for j in source]
        transform(values, block_of(len(values)))
    return values


def rotate_back(values, seed):
    for signs, source in reversed(list(rounds(len(values), seed))):
        transform(values, block_of(len(values)))
        back = [0.0] * len(values)
        for value, j in zip(values, source):
            back[j] = -value if signs[j] else value
        values = back
    return values


def gain(values):
    sums = [0.0] * 16
    for j, value in enumerate(values):
        sums[j % 16] = f32(sums[j % 16] + f32(value * value))
    while len(sums) > 1:
        half_len = len(sums) // 2
        sums = [f32(sums[i] + sums[i + half_len]) for i in range(half_len)]
    return half(f32(math.sqrt(f32(sums[0] / len(values)))))


def scale(block):
    return half(f32(max(abs(v) for v in block) / 127))


def blocks(row):
    return [row[at:at + 64] for at in range(0, len(row), 64)]


def difference(row, mean):
    return [f32(a - b) for a, b in zip(row, mean)] if mean else row


def fits(row, form, mean):
    if form == (0, 16):
        return all(half(v) is not None for v in row)
    if form == (1, 8):
        return all(scale(block) is not None for block in blocks(row))
    return gain(difference(row, mean)) is not None


def plain(row, form, mean, seed):
    if form == (0, 16):
        return b"".join(half(v) for v in row)
    if form == (1, 8):
        out, codes = b"", b""
        for block in blocks(row):
            out += scale(block)
            unit = of_half(scale(block))
            for value in block:
                scaled = f32(value / unit) if unit else 0.0
                codes += struct.pack("<b", round(max(-127.0, min(127.0, scaled))))
        return out + codes
    values = difference(row, mean)
    out = gain(values)
    unit = f32(of_half(out) * block_of(len(row)))
    word = 0
    for j, value in enumerate(rotate(values, seed)):
        scaled = f32(value / unit) if unit else 0.0
        code = sum(scaled >= border for border in BORDERS[form[1]])
        word |= code << (form[1] * j)
    return out + word.to_bytes(-(-len(row) * form[1] // 8), "little")


def read_plain(data, d, form, mean, seed):
    if form == (0, 16):
        return [of_half(data[2 * j:2 * j + 2]) for j in range(d)]
    if form == (1, 8):
        count = -(-d // 64)
        units = [of_half(data[2 * n:2 * n + 2]) for n in range(count)]
        return [f32(code * units[j // 64]) for j, code in enumerate(struct.unpack("<%db" % d, data[2 * count:]))]
    unit, word = of_half(data[:2]), int.from_bytes(data[2:], "little")
    values = [f32(LEVELS[form[1]][word >> (form[1] * j) & 2 ** form[1] - 1] * unit) for j in range(d)]
    values = [f32(v / block_of(d)) for v in rotate_back(values, seed)]
    return [f32(a + b) for a, b in zip(values, mean)] if mean else values


def head(d, seq, form, boundary=3, basis_fp=0, methodology=0, seed=0, flags=0, tag=b"QRES"):
    return tag + struct.pack("<5IBBHI", boundary, d, seq, basis_fp, methodology, form[0], form[1], flags, seed)


def body(rows, form, mean=None, escape=(), **fields):
    """The body, what is escaped in it, and what it is read as."""
    d = len(rows[0])
    escaped = [n in escape or not fits(row, form, mean) for n, row in enumerate(rows)]
    whole = any(out and any(half(v) is None for v in row) for row, out in zip(rows, escaped))
    bitmap = sum(out << n for n, out in enumerate(escaped)).to_bytes(-(-len(rows) // 8), "little")
    data, read = b"", []
    for row, out in zip(rows, escaped):
        if out and whole:
            data += b"".join(struct.pack("<f", v) for v in row)
            read += row
        elif out:
            data += b"".join(half(v) for v in row)
            read += [of_half(half(v)) for v in row]
        else:
            part = plain(row, form, mean, fields.get("seed", 0))
            data += part
            read += read_plain(part, d, form, mean, fields.get("seed", 0))
    return head(d, len(rows), form, flags=int(whole), **fields) + bitmap + data, escaped, read


class Random:
    def __init__(self, seed):
        self.random = SplitMix64(seed)

    def value(self):
        """About a Gaussian, as an f32."""
        return f32(sum((self.random.next() >> 40) / 2**24 - 0.5 for _ in range(12)))

    def row(self, d, large=()):
        return [f32(self.value() + 40.0) if j in large else self.value() for j in range(d)]


def words(values):
    return " ".join(bits(v) for v in values)


def cases():
    def good(name, rows, form, mean=None, escape=(), **fields):
        data, escaped, read = body(rows, form, mean, escape, **fields)
        header = {"boundary": 3, "basis_fp": 0, "methodology": 0, "seed": 0} | fields
        expect = {"boundary": header["boundary"], "hidden_dim": len(rows[0]), "seq": len(rows),
                  "basis_fp": header["basis_fp"], "methodology": header["methodology"], "format": form[0],
                  "bits": form[1], "seed": header["seed"], "escaped": escaped}
        return {"name": name, "hex": data.hex(), "expect": expect, "escape": [n in escape for n in range(len(rows))],
                "mean": words(mean) if mean else None, "residuals": words(v for row in rows for v in row),
                "read": words(read)}

    def bad(name, data, error):
        return {"name": name, "hex": bytes(data).hex(), "error": error}

    random = Random(2026)
    forms = [(0, 16), (1, 8)] + [(2, count) for count in range(8, 2, -1)]
    named = {(0, 16): "f16", (1, 8): "i8"} | {(2, count): "q%d" % count for count in range(3, 9)}
    ramp = [0.5, -1.0, 1.5, 2.0, -2.5, 3.0, -3.5, 4.0]
    yield good("worked example of the specification", [[100.0] + ramp[1:], ramp], (2, 3), [0.5] * 8, (0,), boundary=1,
               basis_fp=0x1A9FB320, methodology=0x2A, seed=7)
    for form in forms:
        fields = {"seed": 5} if form[0] == 2 else {}
        yield good(named[form] + ", width 96", [random.row(96, (7,)) for _ in range(2)], form, None, (0,), **fields)
        for d in (1, 3, 8, 65):
            yield good("%s, width %d" % (named[form], d), [random.row(d)], form, **fields)
    for count in (3, 4, 6):
        mean = random.row(72, (1, 60))
        rows = [[f32(a + b) for a, b in zip(random.row(72), mean)] for _ in range(3)]
        yield good("q%d with a mean" % count, rows, (2, count), mean, (1,), basis_fp=0xA1B2C3D4, methodology=0x01020304,
                   seed=2**32 - 1, boundary=2**32 - 1)
    yield good("q4 of width 576", [random.row(576, (3, 99))], (2, 4), None, (), seed=8)
    yield good("nine positions", [random.row(8) for _ in range(9)], (2, 5), None, (0, 8), seed=1)
    for form in forms:
        fields = {"seed": 5} if form[0] == 2 else {}
        yield good("%s of zeros" % named[form], [[0.0] * 16, [-0.0] * 16], form, **fields)
        yield good("%s under the least half" % named[form], [[f32(1e-9)] * 16], form, **fields)
        rows = [random.row(16), [1e9] + random.row(15), random.row(16)]
        yield good("%s with what f16 cannot hold" % named[form], rows, form, None, (2,), **fields)
    mean = [f32(-3e38)] * 16
    yield good("a difference that overflows", [[f32(3e38)] * 16, random.row(16)], (2, 4), mean, (), basis_fp=1, methodology=2,
               seed=3)

    small, *_ = body([random.row(8), random.row(8), random.row(8)], (2, 3), None, (1,), seed=5)

    def put(at, *values):
        data = bytearray(small)
        data[at:at + len(values)] = bytes(values)
        return data

    yield bad("empty", b"", "Truncated")
    yield bad("header cut", small[:31], "Truncated")
    yield bad("header alone", small[:32], "Truncated")
    yield bad("last byte missing", small[:-1], "Length")
    yield bad("one byte more", small + b"\0", "Length")
    yield bad("other tag", put(0, *b"PCAR"), "BadTag")
    yield bad("tag in lower case", put(0, *b"qres"), "BadTag")
    yield bad("width 0", put(8, 0, 0, 0, 0), "Width")
    yield bad("width over 2^24", put(8, 1, 0, 0, 1), "Width")
    yield bad("width 2^24, not there", put(8, 0, 0, 0, 1), "Length")
    yield bad("width of all ones", put(8, 255, 255, 255, 255), "Width")
    yield bad("another width", put(8, 9), "Length")
    yield bad("no positions", put(12, 0), "NoPositions")
    yield bad("one position more", put(12, 4), "Length")
    yield bad("2^32 - 1 positions", put(12, 255, 255, 255, 255), "Truncated")
    yield bad("methodology without a basis", put(20, 1), "Unused")
    for form in [(2, 2), (2, 9), (0, 8), (0, 0), (1, 16), (3, 4), (255, 255)]:
        yield bad("format %d with %d bits" % form, put(24, *form), "UnknownFormat")
    yield bad("flag 2", put(26, 2), "UnknownFlags")
    yield bad("flag 0x8000", put(27, 0x80), "UnknownFlags")
    yield bad("escapes longer than they are", put(26, 1), "Length")
    yield bad("seed of a format without one", head(2, 1, (0, 16), seed=1) + b"\0" * 5, "Unused")
    yield bad("basis of a format without a mean", head(2, 1, (1, 8), basis_fp=1) + b"\0" * 5, "Unused")
    yield bad("bitmap beyond the last position", put(32, 0x0A), "Bitmap")
    yield bad("another position escaped too", put(32, 0x06), "Length")
    odd, *_ = body([random.row(3), random.row(3)], (2, 3), None, (), seed=5)
    yield bad("bits after the last code", odd[:-1] + bytes([odd[-1] | 0x80]), "Padding")
    # What is looked at first: tag, format, flags, width, unused fields, positions, bitmap, length.
    yield bad("format before flags", put(24, 9, 9, 9, 9), "UnknownFormat")
    yield bad("flags before the width", head(0, 1, (2, 3), flags=2) + b"\0", "UnknownFlags")
    yield bad("width before positions", head(0, 0, (2, 3)), "Width")
    yield bad("unused fields before positions", head(1, 0, (1, 8), seed=1), "Unused")


def main():
    listed = list(cases())
    assert len({case["name"] for case in listed}) == len(listed)
    lines = ",\n".join(" " + json.dumps(case) for case in listed)
    (HERE / "qres.json").write_text('{"made_by": "make_qres.py", "cases": [\n%s\n]}\n' % lines, encoding="ascii")
    print("qres", len(listed))


if __name__ == "__main__":
    main()
