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
