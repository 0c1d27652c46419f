#!/usr/bin/env python3
"""Writes meta.json, body.json, station.json and fragment.json beside itself, from the specification alone.

What the public TypeScript implementation knows nothing of: request meta, answers with a status, bodies by route, and the
illegal forms of the fragment header. Shares no code with the Rust one; standard library only, and running it twice gives
the same files.
"""
import json
import pathlib
import struct

from make_bw import blob, envelope, hexed, given
from make_pca import bits, pcar_block

REQUEST, CANCEL, SUCCESS, FAILURE, ACK = 0x00, 0x08, 0x30, 0x38, 0x80
HELLO, HEALTH, EMBED, FORWARD, LM_HEAD, RESET = range(6)
FORWARD_PCA, LM_HEAD_PCA, REPLAY, CAPTURE, SHARD_PUT, SHARD_GET = 0x0103, 0x0104, 0xB001, 0xB002, 0xF001, 0xF002


def text(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def frame(stream_id, sequence, flags, payload):
    assert len(payload) < 1 << 24
    return struct.pack(">HIB", stream_id, sequence, flags) + struct.pack(">I", len(payload))[1:] + payload


def payload(meta, body=b""):
    meta = meta.encode()
    return struct.pack(">H", len(meta)) + meta + body


def f32s(*values):
    return struct.pack("<%df" % len(values), *values)


def u32s(*values):
    return struct.pack("<%dI" % len(values), *values)


# ---------------------------------------------------------------- meta

EVERY_KEY = {
    "content_type": "application/x-aeon-flow; v=1", "session": "s-1", "pos": 5, "accept": ["q4", "new", "f32", "q4"],
    "accept_basis": ["0xdeadbeef", "0x1"], "accept_k": 9, "boundary": 3, "config_fp": "ab", "deadline_ms": 100,
    "timing": True, "return": "topk", "top_k": 4, "in": "ids", "out": "token", "fp48": "00000000ffff",
    "trace": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "token": "t", "pad": "xxxx", "unknown": [{}],
}


def meta_requests():
    """Name, text, and the keys that a reader finds: those of the text, as it takes them."""
    yield "nothing", "", {}
    yield "empty-object", "{}", {}
    yield "spaces", ' {\t"pos" :\n7 }\r\n', {"pos": 7}
    read = {key: value for key, value in EVERY_KEY.items() if key not in ("pad", "unknown")}
    yield "every-key", text(EVERY_KEY), read | {"accept": ["q4", "f32"], "accept_basis": [0xDEADBEEF, 1], "fp48": 0xFFFF}
    yield "escaped-key-and-value", r'{"s\u0065ssion":"\u0061.b"}', {"session": "a.b"}
    yield "session-of-64", text({"session": "a" * 64}), {"session": "a" * 64}
    yield "session-characters", text({"session": "AZaz09._:-"}), {"session": "AZaz09._:-"}
    yield "pos-largest", '{"pos":18446744073709551615}', {"pos": 2**64 - 1}
    yield "accept-nothing-known", text({"accept": ["new", "q2", "q9", "F32"]}), {"accept": []}
    kinds = ["f32", "f16", "i8", "pcar", *(f"q{n}" for n in range(3, 9)), *(f"e{n}" for n in range(3, 9))]
    yield "accept-every-kind", text({"accept": kinds}), {"accept": kinds}
    yield "limits-of-u32", text({"accept_k": 2**32 - 1, "boundary": 0, "top_k": 2**32 - 1}), {
        "accept_k": 2**32 - 1, "boundary": 0, "top_k": 2**32 - 1}
    yield "defaults-spelled-out", text({"return": "token", "in": "residual", "out": "residual", "timing": False}), {
        "return": "token", "in": "residual", "out": "residual", "timing": False}
    yield "logits", text({"return": "logits"}), {"return": "logits"}
    yield "fp48-upper-case", text({"fp48": "ABCDEF012345"}), {"fp48": 0xABCDEF012345}
    yield "nested-32", '{"x":' + "[" * 31 + "]" * 31 + "}", {}
    yield "same-key-in-two-objects", '{"x":{"a":1},"y":{"a":1}}', {}
    yield "non-ascii", text({"trace": "\u00e9\U0001d11e"}), {"trace": "\u00e9\U0001d11e"}


def bad_metas():
    """Name, text, error, and the key that a Field error names."""
    for name, bad in [("open", "{"), ("word", "nothing"), ("two-objects", "{}{}"), ("comma", '{"pos":1,}'),
                      ("comment", "{/**/}"), ("single-quotes", "{'pos':1}"), ("nan", '{"x":NaN}'),
                      ("leading-zero", '{"x":01}'), ("control-character", '{"x":"\n"}'),
                      ("lone-surrogate", r'{"x":"\ud834"}'), ("byte-order-mark", "\ufeff{}"), ("space-alone", " ")]:
        yield name, bad, "Syntax", None
    for name, bad in [("array", "[]"), ("null", "null"), ("number", "1"), ("string", '"{}"')]:
        yield name, bad, "NotObject", None
    for name, bad in [("key-twice", '{"pos":1,"pos":1}'), ("key-twice-escaped", r'{"pos":1,"p\u006fs":1}'),
                      ("unknown-key-twice", '{"x":1,"y":2,"x":3}'), ("key-twice-deep", '{"x":[{"a":{"b":1,"b":2}}]}')]:
        yield name, bad, "DuplicateKey", None
    yield "nested-33", '{"x":' + "[" * 32 + "]" * 32 + "}", "TooDeep", None
    wrong = {
        "content_type": [1], "session": ["", "a b", "a" * 65, "\u00e9", 7, None], "pos": [-1, 1.5, "1", 2**64, [1]],
        "accept": ["f32", [1], None], "accept_basis": [["beef"], ["0x123456789"], ["0x"], ["0x+1"], [1], "0x1"],
        "accept_k": [2**32, -1], "boundary": [None, 2**32], "config_fp": [1], "deadline_ms": [True, "5"],
        "timing": [1, "true"], "return": ["best", 1, "Token"], "top_k": [[], 2**32], "in": ["text", 0], "out": [0, "ids"],
        "trace": [1], "token": [[]], "fp48": ["123", 1, "+00000000001", "00000000000g", "0x0000000001"],
    }
    for key, values in wrong.items():
        for n, value in enumerate(values):
            yield f"{key}-{n}", text({key: value}), "Field", key


KEY = {"prefix_hash": "0x0102030405060708", "prefix_len": 5, "layer_lo": 0, "layer_hi": 28}


def replay_keys():
    """Name, text, key, conditions."""
    read = {**KEY, "prefix_hash": "0x0102030405060708"}
    yield "plain", text(KEY), read
    yield "decimal-strings", text({**KEY, "prefix_hash": "72623859790382856", "prefix_len": "5", "layer_hi": "28"}), read
    yield "hash-as-number", text({**KEY, "prefix_hash": 2**53 - 1}), {**read, "prefix_hash": "0x001fffffffffffff"}
    yield "hash-in-upper-case", text({**KEY, "prefix_hash": "0XABCDEF"}), {**read, "prefix_hash": "0x0000000000abcdef"}
    yield "largest", text({"prefix_hash": "18446744073709551615", "prefix_len": 2**32 - 1, "layer_lo": 65535,
                           "layer_hi": "0xffff"}), {
        "prefix_hash": "0xffffffffffffffff", "prefix_len": 2**32 - 1, "layer_lo": 65535, "layer_hi": 65535}
    conditions = {"prefix_digest": "0123456789abcdef" * 2, "mesh_fp": "f" * 32, "exact": True, "basis_fp": "0x0badf00d"}
    yield "conditions", text({**KEY, **conditions}), {**read, **conditions, "basis_fp": 0x0BADF00D}
    yield "conditions-false", text({**KEY, "exact": False}), {**read, "exact": False}
    yield "digest-in-upper-case", text({**KEY, "prefix_digest": "ABCDEF" + "0" * 26}), {
        **read, "prefix_digest": "abcdef" + "0" * 26}


def bad_replay_keys():
    for key in KEY:
        yield f"without-{key}", text({k: v for k, v in KEY.items() if k != key}), key
    wrong = {
        "prefix_hash": [2**53, -1, 1.5, "", "0x", "+1", "0x+1", "0x10000000000000000", "18446744073709551616", "1g", None],
        "prefix_len": [2**32, "0x100000000", True], "layer_lo": [65536, "65536"], "layer_hi": [65536, []],
        "prefix_digest": ["0" * 31, "0" * 33, "g" * 32, 1], "mesh_fp": ["0x" + "0" * 30, None], "exact": [1, "true"],
        "basis_fp": ["beef", 1, "0x123456789"],
    }
    for key, values in wrong.items():
        for n, value in enumerate(values):
            yield f"{key}-{n}", text({**KEY, key: value}), key


HELLO_ANSWER = {
    "status": 200, "content_type": "application/x-aeon-flow; v=1",
    "station": {"name": "s1", "version": "0.1.0", "uptime_ms": 1234},
    "model": {"name": "demo", "hidden_dim": 128, "vocab": 512, "n_layers": 6, "max_position": 512, "bos": 1, "eos": [2],
              "config_fp": "00112233445566778899aabbccddeeff", "layers_fp": "ffeeddccbbaa99887766554433221100"},
    "layers": [0, 3], "boundaries": [0], "accepts": ["f32", "pcar"],
    "limits": {"max_frame": 16777225, "max_datagram": 65507, "max_seq": 512},
    "bases": [{"basis_fp": "0x1a9fb320", "blake3": "0" * 64, "methodology": "0x0000002a",
               "boundaries": [{"boundary": 3, "k": 16, "explained": 0.75}]}],
}


def without(value, *path):
    value = json.loads(json.dumps(value))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return value


def hellos():
    yield "version-1", HELLO_ANSWER
    zero = without(HELLO_ANSWER, "bases")
    zero |= {"content_type": "application/x-aeon-flow", "accepts": ["f32"]}
    yield "version-0", zero
    yield "no-bos", {**HELLO_ANSWER, "model": {**HELLO_ANSWER["model"], "bos": None, "eos": []}}
    yield "last-layers", {**HELLO_ANSWER, "layers": [3, 6], "boundaries": [3, 6]}
    yield "unknown-members", {**HELLO_ANSWER, "new": {"a": [1]}}


def bad_hellos():
    for path in [("content_type",), ("station",), ("model",), ("layers",), ("accepts",), ("limits",), ("model", "hidden_dim"),
                 ("model", "n_layers"), ("model", "eos"), ("limits", "max_frame"), ("station", "name")]:
        yield "without-" + "-".join(path), without(HELLO_ANSWER, *path)
    yield "layers-of-one", {**HELLO_ANSWER, "layers": [0]}
    yield "layers-of-three", {**HELLO_ANSWER, "layers": [0, 3, 6]}
    yield "layers-below-zero", {**HELLO_ANSWER, "layers": [-1, 3]}
    yield "accepts-a-string", {**HELLO_ANSWER, "accepts": "f32"}
    yield "width-as-text", {**HELLO_ANSWER, "model": {**HELLO_ANSWER["model"], "hidden_dim": "128"}}


def shards():
    """Name, meta of a PUT, and the value that a GET gives back, as text."""
    values = ["null", "false", "0", "-1", "18446744073709551615", "-9223372036854775808", "2.5", '""', '"\u00e9"', "[]", "{}",
              '{"b":1,"a":[{"c":null},true],"\\u0001":0}', "[[[1]]]"]
    for n, value in enumerate(values):
        yield f"value-{n}", '{"shard":"a","key":"k","value":%s}' % value, ("a", "k"), value
    yield "names-of-256-bytes", text({"shard": "\u00e9" * 128, "key": "k" * 256, "value": 1}), ("\u00e9" * 128, "k" * 256), "1"
    yield "spaces-and-other-keys", ' { "value" : [ 1 , 2 ] , "x" : 1, "key" : " " , "shard" : "a/b" } ', ("a/b", " "), "[1,2]"


def bad_shards():
    """Name, meta of a PUT, status."""
    good = {"shard": "a", "key": "k", "value": 1}
    for key in good:
        yield f"without-{key}", text({k: v for k, v in good.items() if k != key}), 400
    for key in ("shard", "key"):
        for n, value in enumerate(["", "x" * 257, "\u00e9" * 129, 7, None, ["a"]]):
            yield f"{key}-{n}", text({**good, key: value}), 400
    yield "value-with-a-key-twice", '{"shard":"a","key":"k","value":{"a":1,"a":2}}', 400
    yield "value-too-deep", '{"shard":"a","key":"k","value":' + "[" * 32 + "]" * 32 + "}", 400
    yield "nothing", "", 400


# ---------------------------------------------------------------- bodies


def bodies():
    """Name, bytes: read as u32 and as f32."""
    yield "empty", b""
    yield "one-value", f32s(1.0)
    yield "ids", u32s(0, 1, 511, 2**32 - 1)
    yield "zeros-of-both-signs", f32s(0.0, -0.0)
    yield "smallest-and-largest", u32s(1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x80000001, 0xFF7FFFFF)
    yield "nine-values", f32s(*(0.5 * n - 2 for n in range(9)))
    yield "infinity", u32s(0x3F800000, 0x7F800000)
    yield "minus-infinity-first", u32s(0xFF800000, 0x3F800000)
    yield "quiet-nan-last", u32s(0, 0, 0x7FC00000)
    yield "signalling-nan-and-payload", u32s(0x7F800001, 0xFFFFFFFF)


def heads():
    """Name, kind, positions, top_k, vocab, body, values."""
    yield "token", "u32", 1, None, u32s(7), {"ids": [7]}
    yield "token-a-position", "u32", 3, None, u32s(7, 0, 511), {"ids": [7, 0, 511]}
    yield "topk", "topk", 1, 3, u32s(9, 2, 5) + f32s(2.5, 1.0, 1.0), {"ids": [9, 2, 5], "logits": [2.5, 1.0, 1.0]}
    yield "topk-two-positions", "topk", 2, 2, u32s(9, 2) + f32s(2.5, 1.0) + u32s(4, 3) + f32s(0.0, -1.0), {
        "ids": [9, 2, 4, 3], "logits": [2.5, 1.0, 0.0, -1.0]}
    yield "logits", "logits", 2, None, f32s(0.5, -0.5, 3.0, 1.0), {"logits": [0.5, -0.5, 3.0, 1.0]}


# ---------------------------------------------------------------- frames of a station

STATUSES = {
    400: {}, 403: {"token": "dG9rZW4"}, 404: {}, 409: {"expected_pos": 5}, 412: {"have": ["0x1a9fb320"]},
    413: {"max_frame": 16777225}, 422: {}, 499: {}, 500: {}, 501: {"layers": [0, 3]}, 503: {"retry_after_ms": 100}, 504: {},
}
PCAR = pcar_block([1.0, -2.0], hidden_dim=896)
TAIL = blob(given(hexed(0x3F800000)))


def station_frames():
    """Name, stream id, sequence, flags, meta, body."""
    yield "hello", HELLO, 1, REQUEST, text({"content_type": "application/x-aeon-flow; v=1"}), b""
    yield "hello-empty-meta", HELLO, 2, REQUEST, "", b""
    yield "hello-answer", HELLO, 1, SUCCESS, text(HELLO_ANSWER), b""
    yield "health", HEALTH, 3, REQUEST, "{}", b""
    yield "health-answer", HEALTH, 3, SUCCESS, text({"status": 200, "draining": False, "requests": 3, "dropped": {}}), b""
    yield "embed", EMBED, 4, REQUEST, "{}", u32s(1, 2, 3)
    yield "embed-answer", EMBED, 4, SUCCESS, text({"status": 200, "body": "f32", "seq": 1, "dim": 2}), f32s(0.5, -1.0)
    yield "forward", FORWARD, 5, REQUEST, text({"session": "s", "pos": 0}), f32s(0.5, -1.0)
    yield "forward-bare", FORWARD, 6, REQUEST, "", f32s(0.5, -1.0)
    yield "forward-ids", FORWARD, 7, REQUEST, text({"in": "ids", "out": "token", "session": "s"}), u32s(1, 2)
    yield "forward-fin-and-helix", FORWARD, 7, 0x50, "{}", f32s(1.0)
    yield "forward-answer", FORWARD, 5, SUCCESS, text(
        {"status": 200, "body": "f32", "pos": 0, "seq": 1, "layers": [0, 3], "dim": 2}), f32s(2.0, 3.0)
    yield "forward-answer-token", FORWARD, 7, SUCCESS, text(
        {"status": 200, "body": "u32", "pos": 0, "seq": 2, "layers": [0, 6], "dim": 128}), u32s(77)
    yield "forward-answer-pcar", FORWARD, 5, SUCCESS, text({"status": 200, "body": "pcar", "seq": 1, "dim": 896}), PCAR
    yield "forward-answer-bare", FORWARD, 6, SUCCESS, "{}", f32s(2.0, 3.0)
    yield "lm-head", LM_HEAD, 8, REQUEST, text({"return": "topk", "top_k": 2}), f32s(0.5, -1.0)
    yield "lm-head-answer", LM_HEAD, 8, SUCCESS, text({"status": 200, "body": "topk", "seq": 1, "dim": 2}), (
        u32s(9, 2) + f32s(2.5, 1.0))
    yield "reset", RESET, 9, REQUEST, text({"session": "s"}), b""
    yield "reset-answer", RESET, 9, SUCCESS, text({"status": 200}), b""
    yield "forward-pca", FORWARD_PCA, 10, REQUEST, text({"session": "s", "pos": 0}), PCAR
    yield "forward-pca-two-positions", FORWARD_PCA, 11, REQUEST, "", PCAR + PCAR
    yield "forward-pca-answer", FORWARD_PCA, 10, SUCCESS, text({"status": 200, "body": "f32", "seq": 1, "dim": 1}), f32s(1.0)
    yield "lm-head-pca", LM_HEAD_PCA, 12, REQUEST, "", PCAR
    yield "lm-head-pca-answer", LM_HEAD_PCA, 12, SUCCESS, text({"status": 200, "body": "u32", "seq": 1, "dim": 2}), u32s(5)
    yield "replay", REPLAY, 13, REQUEST, text({**KEY, "session": "s", "exact": True}), b""
    yield "replay-hit", REPLAY, 13, SUCCESS, text(
        {"status": 200, "body": "bwah", "prefix_len": 5, "layers": [0, 28], "dim": 1, "provenance": "raw",
         "slab_bytes": 0, "spliced": True}), envelope(TAIL, None)
    yield "replay-miss", REPLAY, 14, SUCCESS, text({"status": 204}), b""
    yield "capture", CAPTURE, 15, REQUEST, "", envelope(TAIL, blob(b""), (0x0102030405060708, 5, 0, 28))
    yield "capture-of-a-session", CAPTURE, 16, REQUEST, text({**KEY, "session": "s"}), b""
    yield "capture-answer", CAPTURE, 15, SUCCESS, text(
        {"status": 200, "captured": True, "held": 1, "held_bytes": 516}), b""
    yield "shard-put", SHARD_PUT, 17, REQUEST, text({"shard": "a", "key": "k", "value": {"x": [1, None, 2.5]}}), b""
    yield "shard-put-answer", SHARD_PUT, 17, SUCCESS, text(
        {"status": 200, "held": 1, "vented": 0, "capacity": 1024, "held_bytes": 140, "capacity_bytes": 1048576}), b""
    yield "shard-get", SHARD_GET, 18, REQUEST, text({"shard": "a", "key": "k"}), b""
    yield "shard-get-answer", SHARD_GET, 18, SUCCESS, text(
        {"status": 200, "shard": "a", "key": "k", "value": {"x": [1, None, 2.5]}}), b""
    yield "body-that-is-not-looked-at", SHARD_GET, 19, REQUEST, text({"shard": "a", "key": "k"}), b"\1\2\3"
    yield "unknown-route", 0x1234, 20, REQUEST, "", b"\1\2\3"
    for status, fields in STATUSES.items():
        yield f"vent-{status}", FORWARD, status, FAILURE, text({"status": status, "error": "why", **fields}), b""
    yield "vent-before-a-header", 0, 0, FAILURE, text({"status": 400, "error": "length prefix of 3 bytes"}), b""


def plain_frames():
    """Name, stream id, sequence, flags, payload, and what it is to a station: a cancel, or never answered."""
    yield "cancel", FORWARD, 5, CANCEL, b"", "cancel"
    yield "cancel-with-payload", FORWARD, 5, CANCEL | 0x10, b"\xff", "cancel"
    yield "opening", 0xFFFE, 0, 0x01, struct.pack(">4H", HELLO, FORWARD, FORWARD_PCA, SHARD_GET), "never"
    yield "ack", 0xFFFF, 0, ACK, struct.pack(">HIII", 4, 0, 0, 0x25), "never"
    yield "ack-of-two-streams-and-a-rest", 0xFFFF, 0, ACK, struct.pack(">HIIIHIII", 4, 7, 1, 0, 5, 2**32 - 1, 0, 3) + b"x", "never"
    yield "ack-flag-elsewhere", FORWARD, 5, ACK, b"\0", "never"
    for flag in (0x01, 0x02, 0x04):
        yield f"flag-{flag:02x}", FORWARD, 5, flag, b"\xff\xff", "never"
        yield f"flag-{flag:02x}-with-vent", FORWARD, 5, flag | 0x08, b"", "never"


def bad_station_frames():
    """Name, stream id, flags, payload, and the error of the reader who meets it first."""
    yield "no-payload", FORWARD, REQUEST, b"", "ShortPayload"
    yield "one-byte", FORWARD, REQUEST, b"\0", "ShortPayload"
    yield "answer-of-one-byte", FORWARD, SUCCESS, b"\0", "ShortPayload"
    yield "meta-cut", FORWARD, REQUEST, b"\0\3{}", "ShortMeta"
    yield "meta-of-65535-not-there", HELLO, REQUEST, b"\xff\xff{}", "ShortMeta"
    yield "vent-with-cut-meta", FORWARD, FAILURE, b"\0\x10{}", "ShortMeta"
    yield "meta-not-utf8", FORWARD, REQUEST, b"\0\5{\"\xff\":", "NotUtf8"
    for name, bad, error, key in bad_metas():
        if key is None:
            yield f"meta-{name}", RESET, REQUEST, payload(bad), error
    for name, route, flags in [("embed", EMBED, REQUEST), ("forward", FORWARD, REQUEST), ("lm-head", LM_HEAD, REQUEST),
                               ("forward-answer", FORWARD, SUCCESS)]:
        for extra in (1, 2, 3):
            yield f"{name}-body-of-{4 + extra}", route, flags, payload("{}", bytes(4 + extra)), "Length"
    yield "pcar-empty", FORWARD_PCA, REQUEST, payload(""), "Truncated"
    yield "pcar-cut", FORWARD_PCA, REQUEST, payload("", PCAR[:-1]), "Truncated"
    yield "pcar-tag", LM_HEAD_PCA, REQUEST, payload("", b"PCAB" + PCAR[4:]), "BadTag"
    yield "pcar-of-raw-floats", FORWARD_PCA, REQUEST, payload("", f32s(*range(8))), "BadTag"
    yield "capture-cut", CAPTURE, REQUEST, payload("", envelope(TAIL, TAIL, (1, 2, 3, 4))[:-1]), "Truncated"
    yield "capture-is-a-reply", CAPTURE, REQUEST, payload("", envelope(TAIL, None)), "Truncated"
    yield "hit-with-bad-magic", REPLAY, SUCCESS, payload("", envelope(TAIL, None, magic=b"BWAX")), "BadMagic"
    yield "hit-with-changed-tail", REPLAY, SUCCESS, payload("", envelope(TAIL[:-1] + b"\x40", None)), "InnerBlobError"


# ---------------------------------------------------------------- fragments


def fragments():
    """Name, frame id, index, total, part."""
    yield "one-part", 0, 0, 1, frame(FORWARD, 0, SUCCESS, b"")
    yield "one-byte", 1, 0, 1, b"\0"
    yield "first-of-two", 2, 0, 2, b"ab"
    yield "last-of-two", 2, 1, 2, b"c"
    yield "last-of-255", 0xFFFF, 254, 255, b"\xff" * 20
    yield "full", 0x0102, 3, 4, bytes(1468)


def bad_fragments():
    """Name, datagram, error."""
    for length in range(5):
        yield f"length-{length}", bytes([0, 1, 0, 1])[:length], "Short"
    yield "no-parts", b"\0\1\0\0x", "ZeroTotal"
    yield "index-is-total", b"\0\1\2\2x", "IndexPastTotal"
    yield "index-255-of-255", b"\0\1\xff\xffx", "IndexPastTotal"
    yield "index-1-of-1", b"\0\1\1\1x", "IndexPastTotal"


def ack_payloads():
    """Name, entries (stream, base, bits), bytes behind them."""
    yield "nothing", [], b""
    yield "one", [(4, 0, 0x25)], b""
    yield "high-bits", [(4, 1, 1 << 63 | 1 << 32)], b""
    yield "all-ones", [(0xFFFF, 2**32 - 1, 2**64 - 1)], b""
    yield "three-streams", [(1, 0, 1), (2, 5, 3), (0xFFFE, 64, 2**64 - 1)], b""
    for length in (1, 13):
        yield f"rest-of-{length}", [(4, 0, 1)], b"\xaa" * length
    yield "rest-alone", [], b"\xaa" * 13


def pairs(sequences, base, mask):
    return [base + bit for bit in range(64) if mask >> bit & 1 and base + bit < 2**32]


# ---------------------------------------------------------------- files


def save(name, sections):
    sections = {key: list(entries) for key, entries in sections.items()}
    for key, entries in sections.items():
        assert len({entry["id"] for entry in entries}) == len(entries), key
    lines = ["{", f' "format": "{name}-vectors",', ' "version": 1,']
    lines.append(' "counts": ' + json.dumps({key: len(entries) for key, entries in sections.items()}) + ",")
    for n, (key, entries) in enumerate(sections.items()):
        rows = ["  " + json.dumps(entry, separators=(",", ":")) for entry in entries]
        lines += [f' "{key}": [', ",\n".join(rows), " ]" + ("," if n + 1 < len(sections) else "")]
    lines.append("}")
    pathlib.Path(__file__).with_name(name + ".json").write_text("\n".join(lines) + "\n", encoding="ascii")
    print(name, {key: len(entries) for key, entries in sections.items()})


def whole(name, stream_id, sequence, flags, content, **more):
    return {"id": name, "stream_id": stream_id, "sequence": sequence, "flags": flags, **more,
            "encoded": {"hex": frame(stream_id, sequence, flags, content).hex()}}


def finite(data):
    words = struct.unpack("<%dI" % (len(data) // 4), data)
    return next((n for n, word in enumerate(words) if word & 0x7F800000 == 0x7F800000), None)


def main():
    save("meta", {
        "requests": ({"id": n, "text": t, "fields": f} for n, t, f in meta_requests()),
        "invalid_requests": ({"id": n, "text": t, "error": e, "key": k} for n, t, e, k in bad_metas()),
        "replay_keys": ({"id": n, "text": t, "fields": f} for n, t, f in replay_keys()),
        "invalid_replay_keys": ({"id": n, "text": t, "error": "Field", "key": k} for n, t, k in bad_replay_keys()),
        "shards": ({"id": n, "text": t, "shard": s, "key": k, "value": v} for n, t, (s, k), v in shards()),
        "invalid_shards": ({"id": n, "text": t, "status": s} for n, t, s in bad_shards()),
        "hellos": ({"id": n, "text": text(v), "fields": v} for n, v in hellos()),
        "invalid_hellos": ({"id": n, "text": text(v)} for n, v in bad_hellos()),
    })
    save("body", {
        "words": ({"id": n, "body": {"hex": b.hex()}, "words": list(struct.unpack("<%dI" % (len(b) // 4), b)),
                   "first_not_finite": finite(b)} for n, b in bodies()),
        "heads": ({"id": n, "kind": kind, "seq": seq, "top_k": k, "body": {"hex": b.hex()},
                   "ids": v.get("ids", []), "logits": [bits(x) for x in v.get("logits", [])]}
                  for n, kind, seq, k, b, v in heads()),
        "invalid": ({"id": f"length-{n}", "body": {"hex": "00" * n}, "error": "Length"} for n in (1, 2, 3, 5, 6, 7, 4097)),
    })
    save("station", {
        "frames": (whole(n, s, q, f, payload(m, b), meta=m, body={"hex": b.hex()}) for n, s, q, f, m, b in station_frames()),
        "plain": (whole(n, s, q, f, p, payload={"hex": p.hex()}, role=r) for n, s, q, f, p, r in plain_frames()),
        "invalid": (whole(n, s, 7, f, p, error=e) for n, s, f, p, e in bad_station_frames()),
    })
    save("fragment", {
        "valid": ({"id": n, "frame_id": i, "index": x, "total": t, "part": {"hex": p.hex()},
                   "datagram": {"hex": (struct.pack(">HBB", i, x, t) + p).hex()}} for n, i, x, t, p in fragments()),
        "invalid": ({"id": n, "datagram": {"hex": d.hex()}, "error": e} for n, d, e in bad_fragments()),
        "acks": ({"id": n, "payload": {"hex": (b"".join(struct.pack(">HIQ", *e) for e in entries) + rest).hex()},
                  "entries": [{"stream_id": s, "base": b, "sequences": pairs(s, b, m)} for s, b, m in entries],
                  "ignored": len(rest)} for n, entries, rest in ack_payloads()),
    })


if __name__ == "__main__":
    main()
