#!/usr/bin/env python3
"""Writes bw.json and bwah.json beside itself: blobs and envelopes made from the specification alone.

Everything is put together here byte by byte, XXH64 included, so that the Rust code is checked by a second reading of
the text and not by itself. Standard library only; running it twice gives the same files.
"""
import json
import pathlib
import struct

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def rotate(x, n):
    return (x << n | x >> (64 - n)) & MASK


def mix(lane, word):
    return rotate((lane + word * P2) & MASK, 31) * P1 & MASK


def xxh64(data):
    """XXH64 with seed 0."""
    at = 0
    if len(data) >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while len(data) - at >= 32:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [mix(lane, word) for lane, word in zip(lanes, words)]
            at += 32
        h = sum(rotate(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            h = ((h ^ mix(0, lane)) * P1 + P4) & MASK
    else:
        h = P5
    h = (h + len(data)) & MASK
    while len(data) - at >= 8:
        h = (rotate(h ^ mix(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) & MASK
        at += 8
    if len(data) - at >= 4:
        h = (rotate(h ^ struct.unpack_from("<I", data, at)[0] * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        h = rotate(h ^ byte * P5 & MASK, 11) * P1 & MASK
    h = (h ^ h >> 33) * P2 & MASK
    h = (h ^ h >> 29) * P3 & MASK
    return h ^ h >> 32


assert xxh64(b"") == 0xEF46DB3751D8E999
assert xxh64(b"a") == 0xD24EC4F1A98C6E5B

BYTES = "application/octet-stream"
CODES = {BYTES: 0, "application/json": 1, "text/plain": 2}


def blob(content, mime=BYTES, **change):
    """A .bw blob. `change` replaces fields by name, to make bad ones."""
    ext = b"" if mime in CODES else mime.encode()
    words = [content[at:at + 8] for at in range(0, len(content) - 7, 8)]
    fields = {
        "magic": b"BWB1",
        "version": b"\x01",
        "mime_code": bytes([CODES.get(mime, 0xFF)]),
        "fp48": struct.pack("<Q", xxh64(content))[:6],
        "word_bits": b"\x30",
        "parity_bits": b"\x10",
        "mime_ext_len": bytes([len(ext)]),
        "mime_ext": ext,
        "orig_len": struct.pack("<I", len(content)),
        "tail_len": bytes([len(content) % 8]),
        "tail": content[8 * len(words):],
        "parity": b"".join(word[6:] for word in words),
        "packed": b"".join(word[:6] for word in words),
    }
    return b"".join({**fields, **change}.values())


def envelope(tail, kv, key=None, **change):
    """A BWAH reply, or a capture if there is a key (hash, length, first and last layer). The payloads are blobs or None."""
    fields = {
        "magic": b"BWAH",
        "version": b"\x01",
        "flags": b"\x01" if tail is None else b"\x03",
        "tail_len": struct.pack("<I", len(tail or b"")),
        "kv_len": struct.pack("<I", len(kv or b"")),
        "key": struct.pack("<QIHH", *key) if key else b"",
        "tail": tail or b"",
        "kv": kv or b"",
    }
    return b"".join({**fields, **change}.values())


def rule(length, add=7):
    return {"rule": {"len": length, "add": add}}


def given(value):
    """The bytes that a value in the file stands for."""
    if "hex" in value:
        return bytes.fromhex(value["hex"])
    return bytes((i * 31 + value["rule"]["add"]) & 255 for i in range(value["rule"]["len"]))


def written(data):
    if len(data) <= 600:
        return {"hex": data.hex()}
    return {"length": len(data), "xxh64": f"{xxh64(data):016x}"}


def hexed(*values):
    """The bytes of f32 values given as bit patterns."""
    return {"hex": b"".join(struct.pack("<I", value) for value in values).hex()}


AWKWARD = hexed(0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x3F800000)
TEN = b"abcdefghij"


def bw_valid():
    for length in [*range(0, 26), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1024, 14336, 14339, 100000]:
        yield f"length-{length}", rule(length), BYTES
    yield "json", {"hex": b"{}".hex()}, "application/json"
    yield "text", {"hex": TEN.hex()}, "text/plain"
    yield "inline-empty", rule(9), ""
    yield "inline-short", rule(9), "a/b"
    yield "inline-parameter", rule(9), "text/plain; charset=utf-8"
    yield "inline-case-matters", rule(9), "Text/Plain"
    yield "inline-non-ascii", rule(9), "x/\u00e9\U0001d11e"
    yield "inline-127", rule(9), "x" * 127
    yield "all-zero", {"hex": "00" * 40}, BYTES
    yield "all-ones", {"hex": "ff" * 43}, BYTES
    yield "awkward-floats", AWKWARD, BYTES


def bw_invalid():
    """Name, bytes, error, and the facts that the error carries."""
    whole = blob(TEN, "text/plain")
    for length in range(len(whole)):
        if length < 15:
            facts = {"offset": 0, "needed": 15, "left": length}
        elif length < 19:
            facts = {"offset": 15, "needed": 4, "left": length - 15}
        elif length < 20:
            facts = {"offset": 19, "needed": 1, "left": 0}
        else:
            facts = {"offset": 20, "needed": 10, "left": length - 20}
        yield f"cut-{length}", whole[:length], "Truncated", facts
    for at in range(4):
        bad = bytearray(b"BWB1")
        bad[at] ^= 0x20
        yield f"magic-{at}", blob(TEN, magic=bytes(bad)), "BadMagic", {}
    for flag in (0x80, 0x40, 0x20, 0xE0):
        yield f"flags-{flag:02x}", blob(TEN, version=bytes([flag | 1])), "UnsupportedFlags", {"version": flag | 1}
    yield "flags-before-version", blob(TEN, version=b"\x82"), "UnsupportedFlags", {"version": 0x82}
    for version in (0, 2, 0x1F):
        yield f"version-{version}", blob(TEN, version=bytes([version])), "BadVersion", {"got": version}
    for code in (3, 4, 0x7F, 0x80, 0xFE):
        yield f"mime-code-{code}", blob(TEN, mime_code=bytes([code])), "UnknownMime", {"code": code}
    for bits in (0, 47, 49, 64):
        facts = {"word_bits": bits, "parity_bits": 16}
        yield f"word-bits-{bits}", blob(TEN, word_bits=bytes([bits])), "WordSize", facts
    for bits in (0, 8, 17):
        facts = {"word_bits": 48, "parity_bits": bits}
        yield f"parity-bits-{bits}", blob(TEN, parity_bits=bytes([bits])), "WordSize", facts
    for code in range(3):
        facts = {"code": code, "len": 3}
        data = blob(TEN, mime_code=bytes([code]), mime_ext_len=b"\x03", mime_ext=b"a/b")
        yield f"written-though-coded-{code}", data, "UnexpectedMime", facts
    for length in (128, 255):
        data = blob(TEN, mime_code=b"\xff", mime_ext_len=bytes([length]), mime_ext=b"x" * length)
        yield f"mime-length-{length}", data, "MimeTooLong", {"len": length}
    yield "mime-cut", blob(b"", "a/b")[:17], "Truncated", {"offset": 15, "needed": 3, "left": 2}
    data = blob(TEN, mime_code=b"\xff", mime_ext_len=b"\x04", mime_ext=b"a/\xc3/")
    yield "mime-not-utf8", data, "MimeNotUtf8", {"valid_up_to": 2}
    for mime, code in CODES.items():
        data = blob(TEN, mime_code=b"\xff", mime_ext_len=bytes([len(mime)]), mime_ext=mime.encode())
        yield f"written-has-code-{code}", data, "NonCanonicalMime", {"code": code}
    for tail_len in (0, 1, 3, 10, 255):
        facts = {"orig_len": 10, "tail_len": tail_len}
        yield f"tail-length-{tail_len}", blob(TEN, tail_len=bytes([tail_len])), "TailLen", facts
    yield "length-one-less", blob(TEN, orig_len=struct.pack("<I", 9)), "TailLen", {"orig_len": 9, "tail_len": 2}
    yield "length-one-word-less", blob(TEN, orig_len=struct.pack("<I", 2)), "TrailingBytes", {"extra": 8}
    facts = {"offset": 20, "needed": 18, "left": 10}
    yield "length-one-word-more", blob(TEN, orig_len=struct.pack("<I", 18)), "Truncated", facts
    facts = {"offset": 20, "needed": 0xFFFFFFFA, "left": 10}
    yield "length-huge", blob(TEN, orig_len=struct.pack("<I", 0xFFFFFFFA)), "Truncated", facts
    yield "one-byte-more", whole + b"\0", "TrailingBytes", {"extra": 1}
    yield "empty-and-one-byte-more", blob(b"") + b"\0", "TrailingBytes", {"extra": 1}
    yield "two-blobs", blob(b"") * 2, "TrailingBytes", {"extra": 20}
    fp = xxh64(TEN) & (1 << 48) - 1
    for bit in (0, 7, 8, 40, 47):
        data = blob(TEN, fp48=struct.pack("<Q", fp ^ 1 << bit)[:6])
        yield f"fp48-bit-{bit}", data, "Fingerprint", {"expected": fp ^ 1 << bit, "got": fp}
    for at in range(20, 30):
        data = bytearray(whole)
        data[at] ^= 1
        yield f"content-byte-{at}", bytes(data), "Fingerprint", {"expected": fp}
    big_endian = blob(TEN, fp48=struct.pack(">Q", fp)[2:])
    yield "fp48-big-endian", big_endian, "Fingerprint", {"got": fp}


def bwah_replies():
    """Name, hit, tail, kv."""
    yield "miss", False, None, None
    yield "hit-tail", True, AWKWARD, None
    yield "hit-tail-empty", True, rule(0), None
    yield "hit-without-tail", True, None, None
    yield "hit-kv-only", True, None, AWKWARD
    yield "hit-both", True, AWKWARD, rule(64)
    yield "hit-both-empty", True, rule(0), rule(0)
    yield "one-value", True, hexed(0x3F800000), None
    yield "3584-values", True, rule(14336), None
    yield "kv-of-10000-values", True, rule(14336), rule(40000)


def bwah_captures():
    """Name, key, tail, kv."""
    yield "zero", (0, 0, 0, 0), rule(0), rule(0)
    yield "key-bytes", (0x0102030405060708, 0x090A0B0C, 0x0D0E, 0x0F10), hexed(0x3F800000), hexed(0xBF800000)
    yield "all-ones", ((1 << 64) - 1, (1 << 32) - 1, 0xFFFF, 0xFFFF), AWKWARD, AWKWARD
    yield "tail-only", (7, 3, 0, 28), rule(14336), rule(0)
    yield "tail-and-kv", (7, 3, 14, 28), rule(14336), rule(12288)


def bwah_invalid(key):
    """Name, bytes, error, facts and for a bad payload which one. The same faults in a reply and in a capture."""
    tail, kv = blob(given(hexed(0x3F800000, 0xBF800000))), blob(given(hexed(0x40000000)))
    header = 30 if key else 14
    whole = envelope(tail, kv, key)
    for length in range(0 if key else 1, len(whole)):
        if length < header:
            facts = {"offset": 0, "needed": header, "left": length}
        elif length < header + 28:
            facts = {"offset": header, "needed": 28, "left": length - header}
        else:
            facts = {"offset": header + 28, "needed": 24, "left": length - header - 28}
        yield f"cut-{length}", whole[:length], "Truncated", facts, {}
    yield "cut-and-bad-magic", b"x" * (header - 1), "Truncated", {"needed": header, "left": header - 1}, {}
    for at in range(4):
        bad = bytearray(b"BWAH")
        bad[at] ^= 0x20
        yield f"magic-{at}", envelope(tail, kv, key, magic=bytes(bad)), "BadMagic", {}, {}
    for version in (0, 2, 0x81, 0xFF):
        yield f"version-{version}", envelope(tail, kv, key, version=bytes([version])), "BadVersion", {"got": version}, {}
    for flags in (0x00, 0x01, 0x02, 0x04, 0x05, 0x07, 0x0B, 0x80, 0x83, 0xFF):
        data = envelope(tail, kv, key, flags=bytes([flags]))
        yield f"flags-{flags:02x}", data, "ReservedFlags", {"flags": flags}, {}
    if key:
        data = envelope(None, kv, key, flags=b"\x01")
        yield "flags-01-without-tail", data, "ReservedFlags", {"flags": 1}, {}
    yield "one-byte-more", whole + b"\0", "TrailingBytes", {"extra": 1}, {}
    data = envelope(tail, kv, key, kv_len=struct.pack("<I", 23))
    yield "kv-length-one-less", data, "TrailingBytes", {"extra": 1}, {}
    data = envelope(tail, kv, key, tail_len=struct.pack("<I", 0xFFFFFFFF))
    yield "tail-length-huge", data, "Truncated", {"offset": header, "needed": 0xFFFFFFFF, "left": 52}, {}
    data = envelope(tail, kv, key, kv_len=struct.pack("<I", 0xFFFFFFFF))
    yield "kv-length-huge", data, "Truncated", {"offset": header + 28, "needed": 0xFFFFFFFF, "left": 24}, {}
    data = envelope(tail, kv, key, tail_len=struct.pack("<I", 27), kv_len=struct.pack("<I", 25))
    yield "blobs-cut-elsewhere", data, "InnerBlobError", {"needed": 8, "left": 7}, {"blob": "Tail", "cause": "Truncated"}
    yield "tail-of-no-bytes", envelope(b"", kv, key), "InnerBlobError", {"needed": 15, "left": 0}, {
        "blob": "Tail", "cause": "Truncated"}
    if key:
        yield "kv-of-no-bytes", envelope(tail, b"", key), "InnerBlobError", {"needed": 15, "left": 0}, {
            "blob": "Kv", "cause": "Truncated"}
    for name, bad, facts, cause in [
        ("magic", blob(bytes(8), magic=b"BWB2"), {}, "BadMagic"),
        ("flags", blob(bytes(8), version=b"\x81"), {"version": 0x81}, "UnsupportedFlags"),
        ("fp48", blob(bytes(8), fp48=bytes(6)), {"expected": 0}, "Fingerprint"),
        ("one-byte-more", blob(bytes(8)) + b"\0", {"extra": 1}, "TrailingBytes"),
        ("type", blob(bytes(8), "text/plain"), {}, "Mime"),
        ("type-written", blob(bytes(8), "a/b"), {}, "Mime"),
        ("length-3", blob(bytes(3)), {"len": 3}, "Length"),
        ("length-9", blob(bytes(9)), {"len": 9}, "Length"),
    ]:
        yield f"tail-{name}", envelope(bad, kv, key), "InnerBlobError", facts, {"blob": "Tail", "cause": cause}
        yield f"kv-{name}", envelope(tail, bad, key), "InnerBlobError", facts, {"blob": "Kv", "cause": cause}
    yield "both-bad", envelope(b"x" * 20, b"y" * 20, key), "InnerBlobError", {}, {"blob": "Tail", "cause": "BadMagic"}


def save(name, sections):
    lines = ["{", f' "format": "{name}-vectors",', ' "version": 1,']
    lines.append(' "counts": ' + json.dumps({key: len(entries) for key, entries in sections.items()}) + ",")
    for n, (key, entries) in enumerate(sections.items()):
        rows = ["  " + json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries]
        lines += [f' "{key}": [', ",\n".join(rows), " ]" + ("," if n + 1 < len(sections) else "")]
    lines.append("}")
    path = pathlib.Path(__file__).with_name(name + ".json")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def invalid_envelopes(key):
    return [
        {"id": name, "input": {"hex": data.hex()}, "error": error, **inner, "facts": facts}
        for name, data, error, facts, inner in bwah_invalid(key)
    ]


def main():
    save("bw", {
        "valid": [
            {"id": name, "mime": mime, "content": content, "encoded": written(blob(given(content), mime))}
            for name, content, mime in bw_valid()
        ],
        "invalid": [
            {"id": name, "input": {"hex": data.hex()}, "error": error, "facts": facts}
            for name, data, error, facts in bw_invalid()
        ],
    })
    encoded = lambda payload: None if payload is None else blob(given(payload))
    replies = [
        {"id": name, "hit": hit, "tail": tail, "kv": kv,
         "encoded": written(envelope(encoded(tail), encoded(kv)) if hit else b"")}
        for name, hit, tail, kv in bwah_replies()
    ]
    captures = [
        {"id": name, "prefix_hash": f"0x{key[0]:016x}", "prefix_len": key[1], "layer_lo": key[2], "layer_hi": key[3],
         "tail": tail, "kv": kv, "encoded": written(envelope(encoded(tail), encoded(kv), key))}
        for name, key, tail, kv in bwah_captures()
    ]
    save("bwah", {
        "replies": replies,
        "captures": captures,
        "invalid_replies": invalid_envelopes(None),
        "invalid_captures": invalid_envelopes((5, 4, 3, 2)),
    })


if __name__ == "__main__":
    main()
