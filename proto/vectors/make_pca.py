#!/usr/bin/env python3
"""Writes the golden vectors of PCAR, PCAB, methodology specs and the two kernels beside this file.

A second implementation of proto/SPEC.md that shares no code with the Rust one; standard library only. Run it after a
change of the specification, and look at the difference before committing it:

    python3 proto/vectors/make_pca.py && git diff proto/vectors

f32 arithmetic is done in f64 and rounded by struct. That is exact: a product of two f32 fits f64, and for a sum, 53 bits
are more than twice 24 plus 2, so rounding twice gives the same as rounding once.
"""

import json
import pathlib
import struct

HERE = pathlib.Path(__file__).parent


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bits(x):
    return "%08x" % struct.unpack("<I", struct.pack("<f", x))


def from_bits(u):
    return struct.unpack("<f", struct.pack("<I", u))[0]


def f32s(values):
    return b"".join(struct.pack("<f", v) for v in values)


def fnv1a32(data):
    state = 0x811C9DC5
    for byte in data:
        state = ((state ^ byte) * 0x01000193) & 0xFFFFFFFF
    return state


# ---------------------------------------------------------------- PCAR


def pcar_block(components, boundary=7, k=None, hidden_dim=896, methodology=0x01020304, basis_fp=0xA1B2C3D4, tag=b"PCAR"):
    k = len(components) if k is None else k
    return tag + struct.pack("<5I", boundary, k, hidden_dim, methodology, basis_fp) + f32s(components)


def pcar_cases():
    def good(name, rows, **header):
        body = b"".join(pcar_block(row, **header) for row in rows)
        fields = dict(boundary=7, k=len(rows[0]), hidden_dim=896, methodology=0x01020304, basis_fp=0xA1B2C3D4) | header
        expect = fields | {"seq": len(rows), "components": [bits(c) for row in rows for c in row]}
        return {"name": name, "hex": body.hex(), "expect": expect}

    def bad(name, body, error):
        return {"name": name, "hex": body.hex(), "error": error}

    one = pcar_block([1.0, -2.0])
    yield good("one position", [[1.0, -2.0]])
    yield good("one component", [[0.5]], boundary=0, hidden_dim=1, methodology=0, basis_fp=0)
    yield good("three positions", [[1.0, 2.0], [3.0, 4.0], [-0.0, 1e-45]])
    yield good("fields at their limits", [[f32(3.4028234663852886e38)]], boundary=2**32 - 1, hidden_dim=2**32 - 1,
               methodology=2**32 - 1, basis_fp=2**32 - 1)
    yield good("k over hidden_dim is for the receiver to refuse", [[1.0, 2.0]], hidden_dim=1)
    yield good("not finite, for the receiver to refuse", [[float("inf"), float("-inf")]])
    yield bad("empty", b"", "Truncated")
    yield bad("tag alone", b"PCAR", "Truncated")
    yield bad("header cut", one[:23], "Truncated")
    yield bad("header alone", one[:24], "Truncated")
    yield bad("component cut", one[:-1], "Truncated")
    yield bad("one byte more", one + b"\0", "Truncated")
    yield bad("second block cut", one + one[:-4], "Truncated")
    yield bad("other tag", pcar_block([1.0], tag=b"PCAB"), "BadTag")
    yield bad("tag in lower case", pcar_block([1.0], tag=b"pcar"), "BadTag")
    yield bad("second tag spoilt", one + pcar_block([1.0, 2.0], tag=b"PCA\0"), "BadTag")
    yield bad("no components", pcar_block([], k=0), "ZeroComponents")
    yield bad("no components, twice", pcar_block([], k=0) * 2, "ZeroComponents")
    yield bad("longest k that fits, not there", pcar_block([1.0], k=(2**32 - 1 - 24) // 4), "Truncated")
    yield bad("k whose length overflows", pcar_block([1.0], k=(2**32 - 1 - 24) // 4 + 1), "LengthOverflow")
    yield bad("k of all ones", pcar_block([1.0], k=2**32 - 1), "LengthOverflow")
    for field in ["boundary", "hidden_dim", "methodology", "basis_fp"]:
        yield bad("second block of another " + field, one + pcar_block([1.0, 2.0], **{field: 5}), "HeaderDiffers")
    yield bad("second block of another k", one + pcar_block([1.0]), "HeaderDiffers")


# ---------------------------------------------------------------- PCAB


def align(data):
    return data + b"\0" * (-len(data) % 64)


def pcab_file(hidden_dim, methodology, entries, meta):
    """entries: (boundary, mean, basis rows or the index of an earlier entry, variances[, a k to write in place of the basis's])"""
    at = 64 + 32 * len(entries)
    table, sections, bases = b"", b"", []
    base = at + -at % 64

    def place(values):
        nonlocal sections
        sections = align(sections)
        start = base + len(sections)
        sections += f32s(values)
        return start

    for boundary, mean, basis, variance, *other_k in entries:
        mean_off = place(mean)
        if isinstance(basis, int):
            k, basis_off = bases[basis]
        else:
            k, basis_off = len(basis), place([v for row in basis for v in row])
        bases.append((k, basis_off))
        k = other_k[0] if other_k else k
        table += struct.pack("<IIQQQ", boundary, k, mean_off, basis_off, place(variance))
    sections = align(sections)
    meta_off = base + len(sections)
    header = b"PCAB" + struct.pack("<5I", 1, hidden_dim, len(entries), methodology, 0)
    header += struct.pack("<3Q", meta_off, len(meta), meta_off + len(meta)) + b"\0" * 16
    return align(header + table) + sections + meta


SMALL = [
    (0, [0.5, 1.5, -2.0], [[1.0, 0.0, 0.0], [0.0, f32(0.6), f32(0.8)]], [3.0, 2.0, 6.0]),
    (2, [1.0, 1.0, 1.0], 0, [1.0, 4.0, 5.0]),
    (5, [0.0, -0.0, 7.0], [], [9.0]),
]


def pcab_cases():
    def good(name, hidden_dim, methodology, entries, meta):
        data = pcab_file(hidden_dim, methodology, entries, meta)
        listed = []
        for boundary, mean, basis, variance in entries:
            rows = entries[basis][2] if isinstance(basis, int) else basis
            listed.append({
                "boundary": boundary,
                "k": len(rows),
                "mean": [bits(v) for v in mean],
                "basis": [bits(v) for row in rows for v in row],
                "variance": [bits(v) for v in variance],
            })
        expect = {"hidden_dim": hidden_dim, "methodology": methodology, "basis_fp": "0x%08x" % fnv1a32(data),
                  "metadata": meta.decode(), "entries": listed}
        return {"name": name, "hex": data.hex(), "expect": expect}

    def bad(name, data, stage, error):
        return {"name": name, "hex": bytes(data).hex(), "stage": stage, "error": error}

    small = pcab_file(3, 0xDEADBEEF, SMALL, b'{"m":1}')

    def put(at, form, value):
        data = bytearray(small)
        struct.pack_into("<" + form, data, at, value)
        return data

    yield good("shared basis and mean only", 3, 0xDEADBEEF, SMALL, b'{"m":1}')
    toy = [(3, [0.5, -1.0], [[0.0, 1.0]], [4.0, 5.0])]
    yield good("worked example of the specification", 2, 0x2A, toy, b'{"model":"toy"}')
    yield good("smallest", 1, 0, [(0, [0.0], [], [0.0])], b"")
    yield good("empty object", 1, 1, [(2**32 - 1, [2.0], [[-1.0]], [4.0, 4.0])], b"{}")
    yield good("k = d", 2, 9, [(1, [0.0, 0.0], [[0.0, 1.0], [1.0, 0.0]], [2.0, 2.0, 4.0])], '{"é":"\U0001d11e"}'.encode())

    row = [[0.0, 1.0]]
    thrice = [(n, [0.0, 0.0], 0 if n else row, [1.0, 2.0]) for n in range(3)]
    yield good("three entries of one basis", 2, 9, thrice, b"{}")

    o = "open"
    yield bad("empty", b"", o, "Truncated")
    yield bad("header cut", small[:63], o, "Truncated")
    yield bad("header alone", small[:64], o, "Truncated")
    yield bad("last byte missing", small[:-1], o, "Truncated")
    yield bad("one byte more", small + b"\0", o, "TrailingBytes")
    yield bad("magic", put(0, "4s", b"PCAR"), o, "BadMagic")
    yield bad("version 0", put(4, "I", 0), o, "BadVersion")
    yield bad("version 2", put(4, "I", 2), o, "BadVersion")
    yield bad("width 0", put(8, "I", 0), o, "ZeroHiddenDim")
    yield bad("width too large for the file", put(8, "I", 2**32 - 1), o, "OutOfFile")
    yield bad("no entries", put(12, "I", 0), o, "NoEntries")
    yield bad("more entries than bytes", put(12, "I", 2**32 - 1), o, "Truncated")
    yield bad("flag", put(20, "I", 1), o, "UnknownFlags")
    yield bad("metadata not aligned", put(24, "Q", 641), o, "Unaligned")
    yield bad("metadata over the last variance", put(24, "Q", 576), o, "Overlap")
    yield bad("metadata past the end", put(24, "Q", 704), o, "OutOfFile")
    yield bad("metadata longer than the file", put(32, "Q", 8), o, "OutOfFile")
    yield bad("metadata of 2^64 - 1 bytes", put(32, "Q", 2**64 - 1), o, "SizeOverflow")
    yield bad("metadata that ends early", put(32, "Q", 6), o, "FileLen")
    yield bad("file_len one more", put(40, "Q", 648), o, "Truncated")
    yield bad("file_len one less", put(40, "Q", 646), o, "TrailingBytes")
    yield bad("reserved byte", put(63, "B", 1), o, "ReservedNotZero")
    yield bad("boundary twice", put(96, "I", 0), o, "BoundaryOrder")
    yield bad("boundaries falling", put(128, "I", 1), o, "BoundaryOrder")
    yield bad("k over the width", put(68, "I", 4), o, "TooManyComponents")
    yield bad("k of all ones", put(68, "I", 2**32 - 1), o, "TooManyComponents")
    yield bad("shared basis of another k", put(100, "I", 1), o, "SharedBasisK")
    two = (0, [0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [2.0, 1.0, 3.0])
    for k in (0, 1):
        sharing = [two, (1, [0.0, 0.0], 0, [1.0] * (k + 1), k)]
        yield bad("shared basis of another k, else in order: %d" % k, pcab_file(2, 0, sharing, b"{}"), o, "SharedBasisK")
    yield bad("mean not aligned", put(72, "Q", 196), o, "Unaligned")
    yield bad("mean over the table", put(72, "Q", 128), o, "Overlap")
    yield bad("mean after a gap", put(72, "Q", 256), o, "Gap")
    yield bad("mean at 2^64 - 64", put(72, "Q", 2**64 - 64), o, "OutOfFile")
    yield bad("mean at 2^64 - 1", put(72, "Q", 2**64 - 1), o, "SizeOverflow")
    yield bad("basis on the mean", put(80, "Q", 192), o, "Overlap")
    yield bad("basis shared with nothing", put(112, "Q", 320), o, "Overlap")
    yield bad("variance past the end", put(88, "Q", 1 << 40), o, "OutOfFile")
    yield bad("mean shared", put(104, "Q", 192), o, "Overlap")

    v = "verify"
    yield bad("padding behind the table", put(160, "B", 1), v, "PaddingNotZero")
    yield bad("padding before the metadata", put(639, "B", 0x80), v, "PaddingNotZero")
    yield bad("mean is NaN", put(192, "I", 0x7FC00000), v, "NonFinite")
    yield bad("basis is infinite", put(276, "I", 0x7F800000), v, "NonFinite")
    yield bad("total is infinite", put(456, "I", 0xFF800000), v, "NonFinite")
    yield bad("row too long", put(256, "f", 1.0001), v, "NotUnit")
    yield bad("row of zeros", put(256, "f", 0.0), v, "NotUnit")
    yield bad("rows not at right angles", put(268, "f", 0.01), v, "NotOrthogonal")
    yield bad("variance below zero", put(576, "f", -1.0), v, "NegativeVariance")
    yield bad("total below the parts", put(456, "f", 4.5), v, "TotalTooSmall")
    rising = [(0, [0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [1.0, 2.0, 3.0])]
    yield bad("variances rising", pcab_file(2, 0, rising, b"{}"), v, "VarianceOrder")
    yield bad("metadata is an array", put(640, "7s", b"[1,2,3]"), v, "Metadata")
    yield bad("metadata with a key twice", pcab_file(3, 0, SMALL, b'{"a":1,"a":1}'), v, "Metadata")
    yield bad("metadata is not UTF-8", put(640, "7s", b'{"\xff":1}'), v, "MetadataNotUtf8")


# ---------------------------------------------------------------- methodology


def canonical(value):
    """RFC 8785 for values without floats. json.dumps happens to use the same escapes."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return "{" + ",".join(canonical(key) + ":" + canonical(value[key]) for key in keys) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def methodology_cases():
    def good(name, text, k):
        value = json.loads(text)
        return {"name": name, "text": text, "canonical": canonical(value),
                "id": "0x%08x" % fnv1a32(canonical(value).encode()), "k": k}

    def bad(name, text, error):
        return {"name": name, "text": text, "error": error}

    def spec(more):
        return '{"model":"m","hidden_dim":4,"k_rule":{"fixed":2}%s}' % more

    k8 = '{"model":"qwen-0.5b","hidden_dim":896,"k_rule":{"per_thousand":8,"floor":8}}'
    yield good("k8", k8, 8)
    yield good("k8, spelled otherwise", ' {\n"k_rule" : {"floor":8 , "per_thousand":8},'
               '\t"hidden_dim":896,\r"\\u006dodel":"qwen\\u002d0.5b" }', 8)
    yield good("derive_policy_3584", '{"model":"qwen-coder-7b","variant":"derive_policy_3584","hidden_dim":3584,'
               '"k_rule":{"per_thousand":8,"floor":8}}', 29)
    yield good("all members", '{"boundaries":[0,1,24],"calibration":{"tokens":65536,"corpus_hash":"c0ffee"},'
               '"hidden_dim":8192,"k_rule":{"per_thousand":8,"floor":8},"model":"m","variant":"v"}', 66)
    yield good("coverage needs variances", '{"model":"m","hidden_dim":4,"k_rule":{"coverage_per_thousand":950}}', None)
    yield good("a rule of a later version", '{"model":"m","hidden_dim":4,"k_rule":{"entropy":1}}', None)
    yield good("at most the width", '{"model":"m","hidden_dim":4,"k_rule":{"per_thousand":8,"floor":8}}', 4)
    yield good("mean only", '{"model":"m","hidden_dim":4,"k_rule":{"fixed":0}}', 0)
    yield good("unknown members are hashed", spec(',"new":{"b":[1,{}],"a":null},"x":[true,false,"y"]'), 2)
    yield good("keys by UTF-16", spec(',"\ufb33":1,"\U0001f600":2,"\u20ac":3,"\\r":4,"1":5,"\\u0080":6,"\u00f6":7'), 2)
    yield good("escapes", spec(',"z":"\\u20ac$\\u000F\\u000aA\\u0027\\u0042\\u0022\\u005c\\\\\\"\\/\\b\\f\\t\\u007f\\u2028"'), 2)
    yield good("pair of surrogates", spec(',"z":"\\ud834\\udd1e"'), 2)
    yield good("largest integers", spec(',"z":[9007199254740991,-9007199254740991,0]'), 2)
    yield bad("not JSON", "{", "Json")
    yield bad("an array", "[]", "Json")
    yield bad("key twice", spec(',"model":"m"'), "Json")
    yield bad("key twice, deep", spec(',"z":{"a":1,"\\u0061":1}'), "Json")
    yield bad("lone surrogate", spec(',"z":"\\ud834"'), "Json")
    yield bad("nothing", "{}", "Missing")
    yield bad("no width", '{"model":"m","k_rule":{"fixed":2}}', "Missing")
    yield bad("no floor", '{"model":"m","hidden_dim":4,"k_rule":{"per_thousand":8}}', "Missing")
    yield bad("width 0", '{"model":"m","hidden_dim":0,"k_rule":{"fixed":0}}', "Field")
    yield bad("width over u32", '{"model":"m","hidden_dim":4294967296,"k_rule":{"fixed":0}}', "Field")
    yield bad("k over the width", '{"model":"m","hidden_dim":4,"k_rule":{"fixed":5}}', "Field")
    yield bad("two rules", '{"model":"m","hidden_dim":4,"k_rule":{"fixed":1,"coverage_per_thousand":1}}', "Field")
    yield bad("boundaries falling", spec(',"boundaries":[2,1]'), "Field")
    yield bad("tokens as text", spec(',"calibration":{"corpus_hash":"c","tokens":"1"}'), "Field")
    yield bad("fraction", spec(',"z":1.5'), "NotInteger")
    yield bad("integer spelled with a fraction", spec(',"z":1.0'), "NotInteger")
    yield bad("integer spelled with an exponent", spec(',"z":1e3'), "NotInteger")
    yield bad("negative zero", spec(',"z":[-0]'), "NotInteger")
    yield bad("2^53", spec(',"z":9007199254740992'), "IntegerTooLarge")
    yield bad("-2^53", spec(',"z":-9007199254740992'), "IntegerTooLarge")
    yield bad("id 0", spec(',"variant":"rqupahjr"'), "ReservedId")


# ---------------------------------------------------------------- kernels


def lift(mean, basis, components):
    out = []
    for j, y in enumerate(mean):
        for row, c in zip(basis, components):
            y = f32(y + f32(c * row[j]))
        out.append(y)
    return out


def project(mean, basis, residual):
    x = [f32(r - m) for r, m in zip(residual, mean)]
    out = []
    for row in basis:
        lanes = [0.0] * 16
        for j, b in enumerate(row):
            lanes[j % 16] = f32(lanes[j % 16] + f32(b * x[j]))
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [f32(lanes[i] + lanes[i + half]) for i in range(half)]
        out.append(lanes[0])
    return out


class Random:
    """Finite f32 of both signs over 60 binary orders, with zeros, negative zeros and subnormals among them."""

    def __init__(self, seed):
        self.state = seed

    def bits(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return self.state >> 32

    def value(self):
        kind, word = self.bits() >> 28, self.bits()
        sign, mantissa = word & 0x80000000, word & 0x007FFFFF
        exponent = 0 if kind < 2 else 97 + (word >> 23) % 60
        return from_bits(sign | exponent << 23 | (0 if kind == 0 else mantissa))

    def values(self, count):
        return [self.value() for _ in range(count)]


def kernel_cases():
    def flat(rows):
        return " ".join(bits(v) for row in rows for v in row)

    def case(name, mean, basis, components, residuals):
        return {
            "name": name,
            "d": len(mean),
            "k": len(basis),
            "n": len(components),
            "mean": flat([mean]),
            "basis": flat(basis),
            "components": flat(components),
            "residuals": flat(residuals),
            "lifted": flat(lift(mean, basis, c) for c in components),
            "projected": flat(project(mean, basis, r) for r in residuals),
        }

    mean, basis = [f32(0.1), f32(0.2)], [[f32(0.6), f32(0.8)], [f32(0.8), f32(-0.6)]]
    components = [f32(3.3), f32(-1.7)]
    yield case("worked example of the specification", mean, basis, [components], [lift(mean, basis, components)])
    random = Random(2026)
    shapes = [(1, 0, 1), (1, 1, 1), (3, 2, 2), (15, 1, 1), (16, 3, 1), (17, 3, 5), (40, 5, 1), (64, 9, 3), (130, 4, 1),
              (272, 2, 1)]
    for d, k, n in shapes:
        mean, basis = random.values(d), [random.values(d) for _ in range(k)]
        components, residuals = [random.values(k) for _ in range(n)], [random.values(d) for _ in range(n)]
        yield case("d %d, k %d, n %d" % (d, k, n), mean, basis, components, residuals)


def main():
    for name, cases in [("pcar", pcar_cases()), ("pcab", pcab_cases()), ("methodology", methodology_cases()),
                        ("kernel", kernel_cases())]:
        cases = list(cases)
        assert len({case["name"] for case in cases}) == len(cases), name
        lines = ",\n".join(" " + json.dumps(case, ensure_ascii=True) for case in cases)
        text = '{"made_by": "make_pca.py", "cases": [\n%s\n]}\n' % lines
        (HERE / (name + ".json")).write_text(text, encoding="ascii")
        print(name, len(cases))


if __name__ == "__main__":
    main()
