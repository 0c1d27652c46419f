#!/usr/bin/env python3
"""check.py OUT: parses every case of OUT/cases.json with the compiled schemas and compares with what Rust read.

Also demands that every field of every schema was compared at least once. Needs the package kaitaistruct.
"""

import importlib
import io
import json
import pathlib
import re
import struct
import sys

import kaitaistruct

HERE, OUT = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[1])
sys.path.insert(0, str(OUT / "python"))
REFUSALS = (EOFError, kaitaistruct.ValidationFailedError, UnicodeDecodeError)
BYTES = (OUT / "bytes.bin").read_bytes()

# Fields with no value of their own: constants, padding, checks of a place, and the packed form of what is compared as
# `content`.
NOT_COMPARED = re.compile(
    r"\.(magic|tag|version|end|first|\w*padding|zeros|zero_count|\w+_place|\w+_is_floats|word_bits|parity_bits|reserved)$"
    r"|^(bw\.(tail|parity|packed)|bw\.low_bits\.\w+|bwah_capture\.flags|pcab\.flags)$"
    r"|^pcab\.(section\.(owner|owner_found|entry)|candidate\.\w+)$"
)
visited = set()


def snake(name):
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def content(blob):
    """The content of a .bw blob: each word is its low 48 and its high 16 bits, and behind the words stands the tail."""
    words = zip(blob.packed, blob.parity)
    return b"".join(struct.pack("<IHH", low.lo, low.hi, high) for low, high in words) + blob.tail


def check(good, where, expected, actual):
    if not good:
        raise SystemExit(f"{where}: {str(expected)[:200]} expected, {str(actual)[:200]} found")


def compare(where, expected, actual, data):
    if expected is None:
        check(actual is None, where, expected, actual)
    elif isinstance(expected, list):
        check(isinstance(actual, list) and len(actual) == len(expected), where, expected, actual)
        for n, (value, found) in enumerate(zip(expected, actual)):
            compare(f"{where}[{n}]", value, found, data)
    elif not isinstance(expected, dict):
        check(type(actual) is type(expected) and actual == expected, where, expected, actual)
    elif "f32" in expected:
        word = expected["f32"]
        if word & 0x7FFFFFFF > 0x7F800000:  # the way over a double may set the quiet bit of a NaN
            check(actual != actual, where, expected, actual)
        else:
            check(struct.unpack("<I", struct.pack("<f", actual))[0] == word, where, expected, actual)
    elif "at" in expected:
        check(actual == data[expected["at"]:expected["at"] + expected["len"]], where, expected, actual)
    else:
        for key, value in expected.items():
            if isinstance(value, dict) and "blob_at" in value:
                wanted = BYTES[value["blob_at"]:value["blob_at"] + value["len"]]
                check(content(actual) == wanted, where, "the content", "another")
                continue
            visited.add(snake(type(actual).__qualname__) + "." + key)
            compare(f"{where}.{key}", value, getattr(actual, key, None), data)


def parse(schema, data):
    name = "".join(word.capitalize() for word in schema.split("_"))
    parser = getattr(importlib.import_module(schema), name)
    return parser(kaitaistruct.KaitaiStream(io.BytesIO(data)))


def main():
    listed = json.loads((OUT / "cases.json").read_text())
    beyond = json.loads((HERE / "beyond.json").read_text())
    beyond = {(s, e) for s, errors in beyond.items() for e, about in errors.items() if "python" in about["in"]}
    same = refused = unseen = 0
    shown = set()
    for case in listed["cases"]:
        where, schema, error = case["id"], case["schema"], case.get("error")
        data = BYTES[case["at"]:case["at"] + case["len"]]
        try:
            parsed = parse(schema, data)
        except REFUSALS as refusal:
            check("fields" not in case, where, "a parse", repr(refusal))
            check((schema, error) not in beyond, where, f"that {schema} does not see {error}", repr(refusal))
            refused += 1
            continue
        if "fields" in case:
            compare(where, case["fields"], parsed, data)
            same += 1
        else:
            check((schema, error) in beyond, where, f"{schema} refuses {error}", "a parse")
            shown.add((schema, error))
            unseen += 1
    check(shown == beyond, "beyond.json", beyond - shown, "no case that shows it")
    total = same + refused + unseen
    check(total == len(listed["cases"]) and same and refused and unseen, "cases", len(listed["cases"]), total)
    fields = {field for field in json.loads((OUT / "schema-fields.json").read_text()) if not NOT_COMPARED.search(field)}
    check(fields <= visited, "fields that no vector compares", "none", sorted(fields - visited))
    print(f"python: {total} cases: {same} with the same fields, {refused} refused, {unseen} with faults that no schema sees; "
          f"{len(fields)} fields compared")


if __name__ == "__main__":
    main()
