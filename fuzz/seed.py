#!/usr/bin/env python3
"""Writes the fuzz corpus from proto/vectors. Run it again when the vectors change; it never removes a file."""
import hashlib
import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
VECTORS = HERE.parent / "proto" / "vectors"
LARGEST = 2048  # longer vectors only slow the fuzzer down


def load(name):
    return json.loads((VECTORS / f"{name}.json").read_text())


def seed(target, data):
    if len(data) > LARGEST:
        return
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def hexes(value):
    """All byte strings that are written out in a vector, in order."""
    if isinstance(value, dict):
        if isinstance(value.get("hex"), str):
            yield bytes.fromhex(value["hex"])
        for inner in value.values():
            yield from hexes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from hexes(inner)


flow = load("aeon-flow")
frames = [data for entry in flow["frames"] for data in hexes(entry["encoded"])]
frames = [data for data in frames if 10 <= len(data) <= 300]
for index, frame in enumerate(frames[::4]):
    prefixed = len(frame).to_bytes(4, "big") + frame
    seed("frame_stream", bytes([0, index % 256]) + prefixed)
    seed("frame_stream", bytes([1, index % 256]) + frame)
seed("frame_stream", b"\x00\x05" + b"".join(len(f).to_bytes(4, "big") + f for f in frames[:12]))
seed("frame_stream", b"\x03\x05" + b"".join(frames[:12]))

for entry in flow["station_payloads"]:
    for data in hexes(entry):
        seed("payload", data)
for meta in [
    "",
    "{}",
    '{"session":"a.b:c","pos":7,"accept":["pcar","f32"],"accept_basis":["0xa1b2c3d4"],"accept_k":8,"boundary":3}',
    '{"return":"topk","top_k":5,"in":"ids","out":"token","timing":true,"deadline_ms":250,"config_fp":"0x01020304"}',
    '{"content_type":"application/octet-stream","trace":"00-0-0-01","token":"00ff","fp48":"0123456789ab"}',
    '{"session":"\\u0061\\ud83d\\ude00","x":[[[{"y":[1,-2,3.5e7,null,true]}]]]}',
]:
    text = meta.encode()
    seed("payload", len(text).to_bytes(2, "big") + text + b"\0\0\x80\x3f")

for name in ["pcar", "pcab", "qres"]:
    for case in load(name)["cases"]:
        for data in hexes(case):
            seed(name, data)
for data in hexes(load("bw")):
    seed("bw", data)
bwah = load("bwah")
for target, sections in {"bwah_reply": ["replies", "invalid_replies"], "bwah_capture": ["captures", "invalid_captures"]}.items():
    for section in sections:
        for entry in bwah[section]:
            for data in hexes(entry):
                seed(target, data)
for case in load("methodology")["cases"]:
    seed("methodology", case["text"].encode())


def datagram(peer, wait, data):
    return bytes([peer, wait]) + len(data).to_bytes(2, "big") + data


def part(frame_id, index, total, data):
    return frame_id.to_bytes(2, "big") + bytes([index, total]) + data


for index, frame in enumerate(frames[:40:4]):
    half = len(frame) // 2
    first, second = part(index, 0, 2, frame[:half]), part(index, 1, 2, frame[half:])
    seed("fragments", datagram(0, 1, part(index, 0, 1, frame)))
    seed("fragments", datagram(0, 1, second) + datagram(1, 1, first) + datagram(0, 1, second) + datagram(0, 9, first))
# Over each limit of the check: frames in all and of one peer, bytes of one peer, age.
seed("fragments", b"".join(datagram(i % 4, 20, part(i, i % 3, 3, b"x" * 60)) for i in range(20)))
seed("fragments", b"".join(datagram(0, 1, part(i, 0, 3, b"x" * 5)) for i in range(6)))
seed("fragments", b"".join(datagram(0, 1, part(i // 3, i % 3, 4, b"x" * 300)) for i in range(6)))
seed("fragments", b"".join(datagram(i % 2, 250, part(1, i % 5, 5, b"x" * 9)) for i in range(12)))
for index, total in [(0, 0), (3, 3), (255, 3), (2, 2)]:
    seed("fragments", datagram(0, 1, part(1, 0, 3, b"abc")) + datagram(0, 1, part(1, index, total, b"abc")))

KEY = b'{"prefix_hash":"0x0000000000000007","prefix_len":4,"layer_lo":0,"layer_hi":6}'
for limit, pieces in [
    (4096, [KEY]),
    (4096, [KEY[:9], b"", KEY[9:], None]),
    (8, [b"1234", b"5678"]),
    (8, [b"1234", b"5678", b"9"]),
    (0, []),
    (100, [b"x" * 60, 255]),
    (100, [b"x" * 60, 254]),
    (100, [255]),
    (50, [b"\xff\xfe"]),
]:
    data = b"".join(bytes([p]) if isinstance(p, int) else bytes([len(p)]) + p for p in pieces if p is not None)
    seed("http_body", limit.to_bytes(2, "big") + data)

seed("config", (HERE.parent / "systemd" / "node.toml").read_bytes())
for text in [
    "",
    'name = "n"\n[model]\nmodel = "identity:8:100"\nlayers = "0..1"\nworkers = 2\n[listen]\nuds = "/a"\nuds-mode = "0660"\n',
    '[listen]\nudp = "127.0.0.1:0"\ntcp = "[::1]:80"\nhttp = "0.0.0.0:1"\nallow = ["10.0.0.0/8", "::1"]\nadmin-allow = ["fd00::/8"]\n'
    'uds-allow-uid = [0, 1000]\nstock-clients = true\nauth-key-file = "/k"\nauth-window = 30\nbare-frames = false\n',
    "[limits]\nmax-frame = 16_777_225\nmax-seq = 0x1000\ngrace = 0\nmax-queued-bytes = 9223372036854775807\nframe-timeout = 1\n",
    '[log]\nlog-format = "json"\nlog-level = "warn,aeon_station::request=debug"\n',
    'model = { model = "upstream:uds:/a,b,3584,152064", layers = "3..2" }\n',
    'listen.allow = ["10.0.0.0/40"]\nlimits.max-sessions = 0\n',
    '[model]\nmodel = "x.gguf"\nmodel = "twice"\n',
    "[listen]\nudss = 1\n",
    "a = " + "[" * 300,
    "limits.grace = 1e9\n",
    "[limits]\ngrace = -1\n",
]:
    seed("config", text.encode())
