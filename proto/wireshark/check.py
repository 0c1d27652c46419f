#!/usr/bin/env python3
"""Checks the Wireshark dissector with tshark: `check.py FOLDER [SEED]`, where FOLDER holds aeon-node and aeonctl.

1. live: starts stations, captures on loopback what aeonctl and a few hand-written peers say to them, and compares the
   fields with what is known of it: the stations' own counters, the basis, the options of each run.
2. golden: turns the vectors of proto/vectors into captures and compares the fields.
3. exchanges: made-up captures of copies, cancels, stock clients, both directions, cut and joined segments.
4. hostile: random and damaged bytes on all carriers; no Lua error may come of it.

Needs tshark, dumpcap and text2pcap, and the right to capture on loopback. AEON_CAPTURE=off skips the first part.
"""

import hashlib
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
LUA = HERE / "aeon_flow.lua"
VECTORS = HERE.parent / "vectors"
ROUTES = {
    "HELLO": 0, "HEALTH": 1, "EMBED": 2, "FORWARD": 3, "LM_HEAD": 4, "RESET": 5, "FORWARD_PCA": 0x103, "FORWARD_Q": 0x203,
    "LM_HEAD_PCA": 0x104, "AMPLITUHEDRON_REPLAY": 0xB001, "AMPLITUHEDRON_CAPTURE": 0xB002,
}
HOME = tempfile.TemporaryDirectory(prefix="aeon-shark-home-")
checks = 0


def check(condition, *what):
    """One thing that must hold; says what came otherwise."""
    global checks
    checks += 1
    if not condition:
        print("FAILED:", *what, file=sys.stderr, flush=True)
        sys.exit(1)


def same(got, expected, what):
    check(got == expected, f"{what}: got {got!r}, expected {expected!r}")


# ---- Frames and captures -----------------------------------------------------------------------------------------------


def payload(meta, body=b""):
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode() if meta is not None else b""
    return struct.pack(">H", len(text)) + text + body


def frame(route, sequence, flags=0, data=b""):
    stream = ROUTES.get(route, route)
    return struct.pack(">HIB", stream, sequence, flags) + len(data).to_bytes(3, "big") + data


def prefixed(data):
    return struct.pack(">I", len(data)) + data


class Capture:
    """Writes a classic capture file of raw IPv4 packets, one microsecond apart unless `at` says otherwise."""

    def __init__(self, path):
        self.path = path
        self.packets = []
        self.next_seq = {}

    def _add(self, protocol, data, at, snap):
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(data), 0, 0x4000, 64, protocol, 0, b"\x7f\0\0\1", b"\x7f\0\0\1")
        self.packets.append((len(self.packets) * 1e-6 if at is None else at, ip + data, snap))

    def udp(self, src, dst, data, at=None, snap=None):
        self._add(17, struct.pack(">HHHH", src, dst, 8 + len(data), 0) + data, at, snap)

    def tcp(self, src, dst, data, at=None, snap=None, mss=60000):
        for start in range(0, max(len(data), 1), mss):
            part = data[start : start + mss]
            seq = self.next_seq.get((src, dst), 1000)
            ack = self.next_seq.get((dst, src), 1000)
            self.next_seq[src, dst] = seq + len(part)
            header = struct.pack(">HHIIBBHHH", src, dst, seq, ack, 0x50, 0x18, 65535, 0, 0)
            self._add(6, header + part, at, snap)

    def write(self):
        with open(self.path, "wb") as out:
            out.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262144, 101))
            for at, data, snap in self.packets:
                taken = data[:snap] if snap else data
                seconds = int(at)
                out.write(struct.pack("<IIII", 1700000000 + seconds, round((at - seconds) * 1e6), len(taken), len(data)))
                out.write(taken)
        return self.path


def tshark(path, *args):
    """Runs tshark with the dissector; any word of Lua on its errors or in its output is a failure of the dissector."""
    command = ["tshark", "-X", f"lua_script:{LUA}", "-r", str(path), *args]
    # Neither the user's settings nor an installed copy of the dissector.
    own = {**os.environ, "HOME": str(HOME.name), "XDG_CONFIG_HOME": str(HOME.name)}
    done = subprocess.run(command, capture_output=True, timeout=300, env=own)
    errors = "\n".join(l for l in done.stderr.decode(errors="replace").splitlines() if "could be dangerous" not in l)
    out = done.stdout.decode(errors="replace")
    check(done.returncode == 0 and not errors.strip(), f"tshark {args}: exit {done.returncode}: {errors}")
    check("Lua Error" not in out, "Lua Error in the output of tshark", args, out[max(out.find("Lua Error") - 200, 0) :][:600])
    return out


def fields(path, names, *args, where="aeonflow"):
    """A list of dicts, one for each packet: field to list of values."""
    take = [arg for name in names for arg in ("-e", name)]
    out = tshark(path, "-Y", where, *args, "-T", "fields", "-E", "separator=/t", "-E", "aggregator=|", *take)
    rows = []
    for line in out.rstrip("\n").split("\n") if out else []:
        values = line.split("\t")
        rows.append({name: value.split("|") if value else [] for name, value in zip(names, values, strict=True)})
    return rows


def no_faults(path, *args):
    """No expert error, nothing malformed."""
    for where in ("_ws.malformed", "_ws.expert.severity == error"):
        found = tshark(path, *args, "-Y", where, "-V")
        check(not found, f"{where} in {path}:", found[:500], *re.findall(r".*Expert Info.*|.*aeon-flow,.*", found))


def expert_texts(path, *args, where="frame"):
    return [row["_ws.expert.message"] for row in fields(path, ["_ws.expert.message"], *args, where=where)]


# ---- 1. Live -------------------------------------------------------------------------------------------------------------


class Stations:
    def __init__(self, binaries, folder):
        self.binaries, self.folder, self.running = binaries, folder, []

    def start(self, *args):
        """Starts a node; returns the address on its ready line."""
        log = self.folder / f"node{len(self.running)}.log"
        with open(log, "wb") as out:
            node = subprocess.Popen([self.binaries / "aeon-node", *args], stderr=out, cwd=REPO)
        self.running.append(node)
        for _ in range(600):
            ready = re.search(r"^ready (\w+)=127\.0\.0\.1:(\d+) ", log.read_text(), re.M)
            if ready:
                return ready[1], int(ready[2])
            check(node.poll() is None, f"{args} stopped: {log.read_text()}")
            time.sleep(0.05)
        check(False, f"{args} did not get ready: {log.read_text()}")

    def stop(self):
        for node in self.running:
            node.terminate()
        for node in self.running:
            node.wait(timeout=30)


class Dumpcap:
    """A running capture of `ports` on loopback."""

    def __init__(self, path, ports):
        self.path = path
        self.marks = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sink.bind(("127.0.0.1", 0))
        wanted = " or ".join(f"port {port}" for port in [*ports, self.sink.getsockname()[1]])
        self.errors = open(f"{path}.err", "w+", encoding="utf-8")
        command = ["dumpcap", "-q", "-i", "lo", "-s", "0", "-B", "32", "-f", wanted, "-w", str(path)]
        self.process = subprocess.Popen(command, stderr=self.errors)
        self.mark(b"capture has begun")

    def mark(self, text):
        """Sends a datagram until it is in the file: then all that was before is there too."""
        for _ in range(300):
            self.marks.sendto(text, self.sink.getsockname())
            if self.path.exists() and text in self.path.read_bytes():
                return
            if self.process.poll() is not None:
                self.errors.seek(0)
                check(False, f"dumpcap cannot capture on loopback: {self.errors.read()}"
                      "\nIt needs root or CAP_NET_RAW; AEON_CAPTURE=off skips this part.")
            time.sleep(0.1)
        check(False, "dumpcap does not write what it should capture")

    def stop(self):
        self.mark(b"capture has ended")
        self.process.send_signal(2)
        self.process.wait(timeout=30)


def receive_frame(stream):
    size = struct.unpack(">I", stream.read(4))[0]
    return stream.read(size)


def live(binaries, folder):
    stations = Stations(binaries, folder)
    capture = None
    ctl = binaries / "aeonctl"
    bases = ["--bases", "bases/demo", "--methodologies", "bases/methodologies"]
    try:
        _, first = stations.start("--udp", "127.0.0.1:0", "--layers", "0..3", *bases)
        _, second = stations.start("--tcp", "127.0.0.1:0", "--layers", "3..6", *bases)
        _, bare = stations.start("--tcp", "127.0.0.1:0", "--bare-frames", "--layers", "3..6")
        _, stock = stations.start("--tcp", "127.0.0.1:0", "--stock-clients", "--model", "identity:4")
        capture = Dumpcap(folder / "live.pcapng", [first, second, bare, stock])

        def run(*args):
            done = subprocess.run([ctl, *args], capture_output=True, text=True, timeout=120)
            check(done.returncode == 0, f"aeonctl {args}: {done.stderr}")
            return done.stdout

        mesh = ["--station", f"udp:127.0.0.1:{first}", "--station", f"tcp:127.0.0.1:{second}"]
        prompt, tokens = "First Citizen: speak to the people of Rome", 5
        texts = []
        for options in ([], ["--wire", "pcar"], ["--wire", "pcar", "--k", "8"], ["--replay"], ["--replay"],
                        ["--wire", "q4"]):
            texts.append(run("generate", *mesh, "--max-tokens", str(tokens), *options, prompt))
        same(texts[3], texts[0], "the text of a run that captures")
        same(texts[4], texts[0], "the text of a run that replays")
        bare_mesh = ["--station", f"tcp:127.0.0.1:{bare}", "--bare-frames"]
        run("hello", *bare_mesh)
        residual = struct.pack("<128f", *[0.25] * 128)

        # A client that repeats a datagram, one with a basis that nobody has, one that cancels what is not there.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(20)
            udp.connect(("127.0.0.1", first))
            request = frame("FORWARD", 77, 0, payload({"session": "twice", "pos": 0}, residual))
            answers = []
            for _ in range(2):
                udp.send(request)
                answers.append(udp.recv(65535))
            same(answers[0], answers[1], "the answers to two copies")
            pcar = b"PCAR" + struct.pack("<5I2f", 0, 2, 128, 0, 0xDEADBEEF, 1.0, -2.0)
            udp.send(frame("FORWARD_PCA", 78, 0, payload({"session": "strange", "pos": 0}, pcar)))
            check(b'"status":412' in udp.recv(65535), "a strange basis is refused")
            udp.send(frame("FORWARD", 79, 0x08))
            udp.send(frame("HEALTH", 80, 0, payload({})))
            udp.recv(65535)
        # A pipeline on TCP in one segment, answered in any order.
        with socket.create_connection(("127.0.0.1", second), timeout=20) as tcp, tcp.makefile("rb") as reader:
            batch = [frame("LM_HEAD", n, 0, payload({}, residual)) for n in range(1, 9)]
            tcp.sendall(b"".join(prefixed(one) for one in batch))
            for _ in batch:
                receive_frame(reader)
        # A stock client: the fork first, then answers with FIN alone, one of them a failure.
        with socket.create_connection(("127.0.0.1", stock), timeout=20) as tcp, tcp.makefile("rb") as reader:
            fork = receive_frame(reader)
            same(fork[:2], b"\xff\xfe", "the stream of the fork")
            for n, route in enumerate(["FORWARD", 0x7777]):
                tcp.sendall(prefixed(frame(route, n, 0, payload({}, residual[:16]))))
                same(receive_frame(reader)[6], 0x10, "the flags of an answer to a stock client")
        counters = {}
        for port, station in ((first, mesh[1]), (second, mesh[3])):
            counters[port] = json.loads(run("health", "--json", "--station", station))
        capture.stop()
    finally:
        stations.stop()
        if capture and capture.process.poll() is None:
            capture.process.kill()

    path = capture.path
    names = ["frame.number", "udp.dstport", "tcp.dstport", "aeonflow.route", "aeonflow.kind", "aeonflow.session",
             "aeonflow.status", "aeonflow.time", "aeonflow.request_in", "aeonflow.response_in", "aeonflow.pcar.k",
             "aeonflow.qres.bits", "aeonflow.qres.boundary",
             "aeonflow.qres.basis_fp", "aeonflow.qres.escaped", "aeonflow.pcar.hidden_dim",
             "aeonflow.pcar.boundary", "aeonflow.pcar.basis_fp", "aeonflow.bwah.tail_len",
             "aeonflow.bw.orig_len", "aeonflow.body.kind", "aeonflow.body.dim", "aeonflow.stock", "aeonflow.copy_of",
             "aeonflow.answer_copy_of", "_ws.col.Info", "aeonflow.error", "aeonflow.body.positions", "aeonflow.opens"]
    rows = fields(path, names, "-2")
    no_faults(path)

    # A client on a busy machine repeats a datagram whose answer is late: what is counted is each once.
    every = rows
    rows = [row for row in every if not row["aeonflow.copy_of"] and not row["aeonflow.answer_copy_of"]]

    # Every answer has its request, at a time that is not before it; every request has its answer.
    answers = sum(row["aeonflow.kind"].count("response") + row["aeonflow.kind"].count("failure") for row in rows)
    requests = sum(row["aeonflow.kind"].count("request") for row in rows)
    matched = sum(len(row["aeonflow.request_in"]) for row in rows)
    times = [float(value) for row in rows for value in row["aeonflow.time"]]
    check(answers > 50, f"only {answers} answers")
    same(requests, answers, "requests beside answers")
    same(matched, answers, "answers with a request")
    same(len(times), answers, "answers with a time")
    check(all(0 <= value < 60 for value in times), "times are between 0 and a minute", times)
    same(sum(len(row["aeonflow.response_in"]) for row in rows), requests, "requests with an answer")
    back = {row["frame.number"][0]: row for row in every}
    for row in rows:
        for number in row["aeonflow.request_in"]:
            check(row["frame.number"][0] in back[number]["aeonflow.response_in"], "request and answer name each other", row)
            check(set(row["aeonflow.route"]) & set(back[number]["aeonflow.route"]), "both have one route", row)

    # As many requests as the stations counted. The last one of each is HEALTH itself, which may or may not be in its count.
    for port, counted in counters.items():
        seen = sum(row["aeonflow.kind"].count("request") for row in every
                   if row["udp.dstport"] == [str(port)] or row["tcp.dstport"] == [str(port)])
        counted = counted[0] if isinstance(counted, list) else counted
        counted = counted.get("requests", counted.get("health", {}).get("requests"))
        check(counted in (seen, seen - 1), f"station on {port} counted {counted} requests, the dissector {seen}")

    # Counts of each run, by its session (which answers get from their requests).
    runs = {}
    for row in rows:
        for session in row["aeonflow.session"][:1]:
            if len(session) == 32:
                kind = "answer" if row["aeonflow.kind"][0] == "response" else row["aeonflow.kind"][0]
                runs.setdefault(session, Counter())[row["aeonflow.route"][0], kind] += 1
    runs = list(runs.values())
    same(len(runs), 6, "runs")

    def expect(run, counts, what):
        for route, count in counts.items():
            same((run[route, "request"], run[route, "answer"]), (count, count), f"{what}: {route}")
        same(sum(run.values()), 2 * sum(counts.values()), f"{what}: other frames")

    expect(runs[0], {"FORWARD": 2 * tokens, "RESET": 2}, "exact")
    for run_of in runs[1:3]:
        expect(run_of, {"FORWARD": tokens, "FORWARD_PCA": tokens, "RESET": 2}, "pcar")
    expect(runs[3], {"AMPLITUHEDRON_REPLAY": 2, "FORWARD": 2 * tokens, "AMPLITUHEDRON_CAPTURE": 2, "RESET": 2}, "capture")
    expect(runs[4], {"AMPLITUHEDRON_REPLAY": 2, "LM_HEAD": 1, "FORWARD": 2 * (tokens - 1), "RESET": 2}, "replay"
           ) if runs[4]["LM_HEAD", "request"] and runs[4]["LM_HEAD", "answer"] else expect(
        runs[4], {"AMPLITUHEDRON_REPLAY": 2, "FORWARD": 2 * (tokens - 1), "RESET": 2}, "replay")

    expect(runs[5], {"FORWARD": tokens, "FORWARD_Q": tokens, "RESET": 2}, "q4")

    # PCA components of the basis that is there.
    basis = (REPO / "bases/demo/demo.pcab").read_bytes()
    fingerprint = 0x811C9DC5
    for byte in basis:
        fingerprint = (fingerprint ^ byte) * 0x01000193 & 0xFFFFFFFF
    entries = struct.unpack_from("<I", basis, 12)[0]
    basis_k = {struct.unpack_from("<I", basis, 64 + 32 * n)[0]: struct.unpack_from("<I", basis, 68 + 32 * n)[0]
               for n in range(entries)}[3]
    # Quantised bodies, each as an answer and as the request behind it; the first position of the session is escaped.
    quantised = [row for row in rows if row["aeonflow.qres.bits"]]
    same(len(quantised), 2 * tokens, "quantised bodies")
    same({(row["aeonflow.qres.bits"][0], row["aeonflow.qres.boundary"][0]) for row in quantised}, {("4", "3")}, "bits")
    same({int(row["aeonflow.qres.basis_fp"][0], 16) for row in quantised}, {fingerprint}, "its basis")
    check(sum(int(row["aeonflow.qres.escaped"][0]) for row in quantised) >= 2, "the first position is escaped")
    pcars = [row for row in rows if row["aeonflow.pcar.k"] and "412" not in row["aeonflow.status"]
             and row["aeonflow.session"] != ["strange"]]
    same(Counter(k for row in pcars for k in set(row["aeonflow.pcar.k"])), {str(basis_k): 2 * tokens, "8": 2 * tokens}, "k")
    for row in pcars:
        same(set(row["aeonflow.pcar.hidden_dim"]), {"128"}, "hidden_dim")
        same(set(row["aeonflow.pcar.boundary"]), {"3"}, "boundary")
        same({int(value, 16) for value in row["aeonflow.pcar.basis_fp"]}, {fingerprint}, "basis_fp")
        same(row["aeonflow.body.positions"], [str(len(row["aeonflow.pcar.k"]))], "blocks and positions")

    # The prefix cache: two misses, then two hits whose tails are one residual each.
    replays = [row for row in rows if row["aeonflow.route"] == ["AMPLITUHEDRON_REPLAY"]
               and row["aeonflow.kind"] == ["response"]]
    same([row["aeonflow.status"] for row in replays], [["204"], ["204"], ["200"], ["200"]], "status of replays")
    same([row["aeonflow.bwah.tail_len"] for row in replays], [[], [], ["532"], ["532"]], "tails")
    same([row["aeonflow.bw.orig_len"] for row in replays], [[], [], ["512"], ["512"]], "residuals in tails")

    # The hand-written peers.
    copies = [row for row in every if row["aeonflow.session"] == ["twice"]]
    same([bool(row["aeonflow.copy_of"]) for row in copies], [False, False, True, False], "copies of a request")
    same([bool(row["aeonflow.answer_copy_of"]) for row in copies], [False, False, False, True], "copies of an answer")
    same(copies[1]["aeonflow.body.dim"], ["128"], "width of a residual")
    refused = [row for row in rows if row["aeonflow.status"] == ["412"]]
    same([(row["aeonflow.kind"], row["aeonflow.route"]) for row in refused], [(["failure"], ["FORWARD_PCA"])], "412")
    check(refused[0]["aeonflow.error"][0].startswith("basis fingerprint mismatch"), "error of the 412", refused)
    check("→ 412 basis fingerprint mismatch" in refused[0]["_ws.col.Info"][0], "Info of the 412", refused)
    same(sum(row["aeonflow.kind"].count("cancel") for row in rows), 1, "cancels")
    heads = [row for row in rows if "LM_HEAD" in row["aeonflow.route"] and len(row["aeonflow.route"]) > 1]
    same(sum(len(row["aeonflow.route"]) for row in heads if "request" in row["aeonflow.kind"]), 8, "one segment of 8 frames")
    bares = [row for row in rows if row["tcp.dstport"] == [str(bare)]]
    same([row["aeonflow.route"] for row in bares], [["HELLO"]], "bare frames")
    stocks = [(row["aeonflow.kind"], row["aeonflow.status"]) for row in rows if row["aeonflow.stock"]]
    same(stocks, [(["control"], []), (["request"], []), (["response"], ["200"]), (["request"], []), (["failure"], ["404"])],
         "stock client")
    opened = [row["aeonflow.opens"] for row in rows if row["aeonflow.opens"]]
    same([int(value, 16) for value in opened[0]], [int(value[0:2].hex() + value[2:].hex(), 16) for value in
         [fork[n : n + 2] for n in range(10, len(fork), 2)]], "streams of the fork")

    # The same as JSON, and the meta by Wireshark's own JSON dissector.
    packets = json.loads(tshark(path, "-Y", "aeonflow.route == \"HELLO\" && aeonflow.status == 200", "-T", "json"))
    layer = packets[0]["_source"]["layers"]["aeonflow"]
    check("json" in json.dumps(layer) and "application/x-aeon-flow; v=1" in json.dumps(layer), "meta as JSON", layer)
    print(f"live: {requests} requests and {answers} answers over UDP and TCP, all matched")


# ---- 2. Golden -----------------------------------------------------------------------------------------------------------


def bytes_of(value):
    """A value of the vectors; None if only its digest stands there."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    if "hex" in value:
        return bytes.fromhex(value["hex"])
    if "rule" in value:
        return bytes((31 * n + value["rule"]["add"]) % 256 for n in range(value["rule"]["len"]))
    return None


def header(entry):
    data = bytes_of(entry["payload"])
    return entry["stream_id"], entry["sequence"], entry["flags"], len(data)


def golden(folder):
    vectors = json.loads((VECTORS / "aeon-flow.json").read_text())
    names = ["aeonflow.stream_id", "aeonflow.sequence", "aeonflow.flags", "aeonflow.length", "aeonflow.meta_len",
             "aeonflow.body.len", "aeonflow.meta", "aeonflow.prefix"]

    def headers(row):
        return [(int(s, 16), int(q), int(g, 16), int(n)) for s, q, g, n in
                zip(*(row[name] for name in names[:4]), strict=True)]

    def frame_bytes(entry):
        return frame(entry["stream_id"], entry["sequence"], entry["flags"], bytes_of(entry["payload"]))

    # Frames that fit a datagram, on UDP; all but the largest on TCP, whose segments cut them anywhere.
    udp = Capture(folder / "frames.pcap")
    small = [entry for entry in vectors["frames"] if len(bytes_of(entry["payload"])) <= 65497]
    for entry in small:
        udp.udp(17700, 40000, frame_bytes(entry))
    rows = fields(udp.write(), names, "-o", "aeonflow.udp_ports:17700")
    same([headers(row) for row in rows], [[header(entry)] for entry in small], "frames on UDP")
    for bare in (False, True):
        tcp = Capture(folder / f"frames-tcp-{bare}.pcap")
        wanted = [entry for entry in vectors["frames"] if len(bytes_of(entry["payload"])) < 1 << 20]
        stream = b"".join(frame_bytes(entry) if bare else prefixed(frame_bytes(entry)) for entry in wanted)
        tcp.tcp(40000, 17700, stream, mss=1411)
        rows = fields(tcp.write(), names, "-o", "aeonflow.tcp_ports:17700", "-o", f"aeonflow.framing:{'bare' if bare else 'prefixed'}")
        got = [one for row in rows for one in headers(row)]
        same(got, [header(entry) for entry in wanted], f"frames on TCP, bare {bare}")

    # Batches: bare frames one after another.
    for entry in vectors["batches"]:
        stream = b"".join(frame_bytes(one) for one in entry["frames"])
        if stream:
            check("hex" not in entry["encoded"] or bytes_of(entry["encoded"]) == stream, f"batch {entry['id']} encodes")
            tcp = Capture(folder / "batch.pcap")
            tcp.tcp(40000, 17700, stream)
            rows = fields(tcp.write(), names, "-o", "aeonflow.tcp_ports:17700", "-o", "aeonflow.framing:bare")
            same([one for row in rows for one in headers(row)], [header(one) for one in entry["frames"]], entry["id"])

    # Payloads: the meta text and the length of the body, or a fault.
    # Some are too large for a datagram, so each has a connection of its own.
    tcp = Capture(folder / "payloads.pcap")
    entries = vectors["station_payloads"]
    for n, entry in enumerate(entries):
        data = bytes_of(entry["payload"])
        data = payload(fill(entry), bytes_of(entry["body"])) if data is None else data
        tcp.tcp(40000 + n, 17700, prefixed(frame(entry["stream_id"], entry["sequence"], entry["flags"], data)))
    path = tcp.write()
    rows = fields(path, names, "-o", "aeonflow.tcp_ports:17700")
    texts = expert_texts(path, "-o", "aeonflow.tcp_ports:17700", where="aeonflow")
    for entry, row, text in zip(entries, rows, texts, strict=True):
        faulty = any(re.search(r"meta|payload|twice", one, re.I) for one in text)
        same(faulty, not entry["valid"], f"fault of payload {entry['id']} ({text})")
        if entry["valid"]:
            meta = fill(entry)
            same(int(row["aeonflow.meta_len"][0]), len(meta), f"meta_len of {entry['id']}")
            same(int(row["aeonflow.body.len"][0]), len(bytes_of(entry["body"])), f"body of {entry['id']}")

    # The fragmented transport.
    for entry in vectors["udp_fragmented"]:
        datagrams, frame_id = [], entry["first_frame_id"]
        for one in entry["frames"]:
            whole, room = frame_bytes(one), entry["mtu"] - 4
            parts = [whole[at : at + room] for at in range(0, len(whole), room)]
            if len(parts) <= 255:
                datagrams += [struct.pack(">HBB", frame_id, n, len(parts)) + part for n, part in enumerate(parts)]
                frame_id = (frame_id + 1) % 65536
        known = [one for group in entry.get("datagrams", []) for one in group]
        digests = [one["hex"] if "hex" in one else one["sha256"] for one in known]
        cut = [data.hex() if "hex" in one else hashlib.sha256(data).hexdigest() for data, one in zip(datagrams, known)]
        if "datagrams_joined" in entry:
            digests, cut = [one["sha256"] for one in entry["datagrams_joined"]], [hashlib.sha256(b"".join(datagrams)).hexdigest()]
        same(cut, digests, f"how {entry['id']} is cut")
        if not datagrams:
            continue
        udp = Capture(folder / "fragments.pcap")
        random.Random(entry["id"]).shuffle(datagrams)
        for one in datagrams:
            udp.udp(40000, 17701, one)
        rows = fields(udp.write(), names, "-o", "aeonflow.fragment_ports:17701")
        got = sorted(one for row in rows for one in headers(row))
        same(got, sorted(header(one) for one in entry["frames"]), f"fragments {entry['id']}")
    udp = Capture(folder / "acks.pcap")
    for entry in vectors["udp_acks"]:
        udp.udp(40000, 17701, bytes.fromhex(entry["datagram"]))
    acks = fields(udp.write(), ["aeonflow.ack.stream_id", "aeonflow.ack.base", "aeonflow.ack.sequences"],
                  "-o", "aeonflow.fragment_ports:17701")
    for entry, row in zip(vectors["udp_acks"], acks, strict=True):
        named = {}
        for stream, sequences in zip(row["aeonflow.ack.stream_id"], row["aeonflow.ack.sequences"], strict=True):
            named[int(stream, 16)] = [int(one) for one in sequences.split()]
        wanted = {}
        for one in entry["received"]:
            if one["sequences"]:
                base = min(one["sequences"])
                wanted[one["stream_id"]] = sorted({s for s in one["sequences"] if s - base < 64})
        same(named, wanted, f"acknowledgement {entry['id']}")

    # Bodies: PCAR by its vectors, BWAH and the blobs in it.
    cases = json.loads((VECTORS / "pcar.json").read_text())["cases"]
    udp = Capture(folder / "pcar.pcap")
    for case in cases:
        udp.udp(40000, 17700, frame("FORWARD_PCA", 1, 0, payload({}, bytes.fromhex(case["hex"]))))
    path = udp.write()
    rows = fields(path, ["aeonflow.pcar.boundary", "aeonflow.pcar.k", "aeonflow.pcar.hidden_dim", "aeonflow.pcar.methodology",
                         "aeonflow.pcar.basis_fp", "aeonflow.body.positions", "aeonflow.pcar.components"])
    for case, row, text in zip(cases, rows, expert_texts(path), strict=True):
        text = " ".join(text)
        if "error" in case:
            check(f"{case['error']}:" in text, f"PCAR {case['name']}: {text!r}, expected {case['error']}")
            continue
        want = case["expect"]
        check("not a row" not in text.lower(), f"PCAR {case['name']}: {text}")
        for key, base in (("boundary", 10), ("k", 10), ("hidden_dim", 10), ("methodology", 16), ("basis_fp", 16)):
            same({int(one, base) for one in row[f"aeonflow.pcar.{key}"]}, {want[key]}, f"PCAR {case['name']}: {key}")
        same(row["aeonflow.body.positions"], [str(want["seq"])], f"PCAR {case['name']}: positions")
        if "components" in want:
            raw = b"".join(bytes.fromhex(one)[::-1] for one in want["components"])
            same("".join(row["aeonflow.pcar.components"]).replace(":", ""), raw.hex(), f"PCAR {case['name']}: components")

    quantised = json.loads((VECTORS / "qres.json").read_text())["cases"]
    udp = Capture(folder / "qres.pcap")
    for case in quantised:
        udp.udp(40000, 17700, frame("FORWARD_Q", 1, 0, payload({}, bytes.fromhex(case["hex"]))))
    path = udp.write()
    keys = {"boundary": 10, "hidden_dim": 10, "seq": 10, "basis_fp": 16, "methodology": 16, "format": 10, "bits": 10, "seed": 16}
    rows = fields(path, [f"aeonflow.qres.{key}" for key in [*keys, "escaped"]] + ["aeonflow.body.positions"])
    for case, row, text in zip(quantised, rows, expert_texts(path), strict=True):
        text = " ".join(text)
        if "error" in case:
            check(f"{case['error']}:" in text, f"QRES {case['name']}: {text!r}, expected {case['error']}")
            continue
        want = case["expect"]
        check("QRES" not in text, f"QRES {case['name']}: {text}")
        for key, base in keys.items():
            same([int(one, base) for one in row[f"aeonflow.qres.{key}"]], [want[key]], f"QRES {case['name']}: {key}")
        same(row["aeonflow.qres.escaped"], [str(sum(want["escaped"]))], f"QRES {case['name']}: escaped")
        same(row["aeonflow.body.positions"], [str(want["seq"])], f"QRES {case['name']}: positions")

    bwah = json.loads((VECTORS / "bwah.json").read_text())
    blobs = json.loads((VECTORS / "bw.json").read_text())
    for reply in (True, False):
        good = [one for one in bwah["replies" if reply else "captures"] if bytes_of(one["encoded"])]
        bad = [one for one in bwah["invalid_replies" if reply else "invalid_captures"] if bytes_of(one["input"])]
        route = "AMPLITUHEDRON_REPLAY" if reply else "AMPLITUHEDRON_CAPTURE"
        udp = Capture(folder / "bwah.pcap")
        for one in good + bad:
            body = bytes_of(one.get("encoded") or one["input"])
            meta, flags = ({"status": 200, "body": "bwah"}, 0x30) if reply else ({}, 0)
            udp.udp(40000, 17700, frame(route, 1, flags, payload(meta, body)))
        path = udp.write()
        names = ["aeonflow.bwah.flags", "aeonflow.bwah.prefix_hash", "aeonflow.bwah.prefix_len", "aeonflow.bwah.layer_lo",
                 "aeonflow.bwah.layer_hi", "aeonflow.bw.orig_len", "aeonflow.bw.role"]
        rows, texts = fields(path, names), expert_texts(path)
        same(len(rows), len(good + bad), "BWAH packets")
        for one, row, text in zip(good + bad, rows, texts, strict=True):
            text = " ".join(text)
            if "input" in one:
                if one.get("cause") == "Fingerprint":
                    continue  # The dissector does not compute XXH64, and says so.
                check(f"{one['error']}:" in text, f"BWAH {one['id']}: {text!r}, expected {one['error']}")
                if "cause" in one:
                    check(f"{one['error']}: {one['blob'].lower()}: {one['cause']}" in text,
                          f"BWAH {one['id']}: {text!r}, expected {one['blob']} {one['cause']}")
                continue
            check("BWAH" not in text and ".bw" not in text, f"BWAH {one['id']}: {text}")
            held = [one[key] for key in ("tail", "kv") if one[key] is not None]
            same(row["aeonflow.bw.orig_len"], [str(len(bytes_of(value))) for value in held], f"BWAH {one['id']}: lengths")
            if not reply:
                same(int(row["aeonflow.bwah.prefix_hash"][0], 16), int(one["prefix_hash"], 16), f"{one['id']}: prefix_hash")
                for key in ("prefix_len", "layer_lo", "layer_hi"):
                    same(row[f"aeonflow.bwah.{key}"], [str(one[key])], f"BWAH {one['id']}: {key}")
    # Every blob of the vectors as a tail. One of another type or of no whole number of values is wrong only here.
    udp = Capture(folder / "bw.pcap")
    entries = [one for one in blobs["valid"] + blobs["invalid"] if bytes_of(one.get("encoded") or one["input"])]
    for one in entries:
        blob = bytes_of(one.get("encoded") or one["input"])
        body = b"BWAH\1\3" + struct.pack("<II", len(blob), 0) + blob
        udp.udp(40000, 17700, frame("AMPLITUHEDRON_REPLAY", 1, 0x30, payload({"status": 200, "body": "bwah"}, body)))
    path = udp.write()
    for one, text in zip(entries, expert_texts(path), strict=True):
        text = " ".join(text)
        if one.get("error") == "Fingerprint":
            continue
        if "error" in one:
            want = one["error"]
        elif one["mime"] != "application/octet-stream":
            want = "Mime"
        else:
            content = bytes_of(one["content"])
            want = "Length" if len(content) % 4 else None
        check(f"tail: {want}" in text if want else "tail:" not in text, f".bw {one['id']}: {text!r}, expected {want}")
    print(f"golden: {len(small)} frames, {len(cases)} PCAR and {len(quantised)} QRES bodies, "
          f"{len(entries)} blobs, and what holds them")


def fill(entry):
    """The meta text of a payload."""
    if "meta_fill" in entry:
        rule = entry["meta_fill"]
        return (rule["before"] + rule["repeat"] * rule["count"] + rule["after"]).encode()
    return entry["meta_json"].encode()


# ---- 3. Exchanges --------------------------------------------------------------------------------------------------------


def exchanges(folder):
    names = ["frame.number", "aeonflow.kind", "aeonflow.request_in", "aeonflow.response_in", "aeonflow.time",
             "aeonflow.copy_of", "aeonflow.answer_copy_of", "aeonflow.cancels", "aeonflow.session", "_ws.col.Info"]

    def get(row, *keys):
        return [",".join(row[f"aeonflow.{key}"]) for key in keys]

    body = struct.pack("<2f", 1.0, 2.0)
    ask = frame("FORWARD", 5, 0, payload({"session": "a", "pos": 0}, body))
    done = frame("FORWARD", 5, 0x30, payload({"status": 200, "body": "f32", "pos": 0, "seq": 1, "dim": 2}, body))
    # Copies on UDP: repeated before and after the answer; then the sequence is used again for something else. And the
    # other station asks back, over the same pair of ports and with the same sequence.
    udp = Capture(folder / "copies.pcap")
    udp.udp(40000, 17700, ask, at=0.0)
    udp.udp(40000, 17700, ask, at=0.1)
    udp.udp(17700, 40000, ask, at=0.15)
    udp.udp(17700, 40000, done, at=0.25)
    udp.udp(40000, 17700, ask, at=0.3)
    udp.udp(17700, 40000, done, at=0.35)
    udp.udp(40000, 17700, done, at=0.4)
    udp.udp(40000, 17700, frame("FORWARD", 5, 0, payload({"session": "b", "pos": 0}, body)), at=0.5)
    udp.udp(17700, 40000, done, at=0.625)
    udp.udp(17700, 40000, frame("FORWARD", 99, 0x38, payload({"status": 409, "error": "pos"})), at=0.7)
    for passes in ([], ["-2"]):
        rows = fields(udp.write(), names, *passes)
        same([get(row, "request_in", "time", "copy_of", "answer_copy_of", "session") for row in rows], [
            ["", "", "", "", "a"], ["", "", "1", "", "a"], ["", "", "", "", "a"], ["1", "0.250000000", "", "", "a"],
            ["", "", "1", "", "a"], ["1", "0.350000000", "", "4", "a"], ["3", "0.250000000", "", "", "a"],
            ["", "", "", "", "b"], ["8", "0.125000000", "", "", "b"], ["", "", "", "", ""]], f"copies, {passes}")
        if passes:
            same([get(row, "response_in")[0] for row in rows], ["4", "4", "7", "", "4", "", "", "9", "", ""], "answers in")
    check("not in the capture" in str(expert_texts(udp.path)[-1]), "an answer that nobody asked for")

    # A cancel names the request; the request is answered 499.
    tcp = Capture(folder / "cancel.pcap")
    tcp.tcp(40000, 17700, prefixed(ask))
    tcp.tcp(40000, 17700, prefixed(frame("FORWARD", 5, 0x08)))
    tcp.tcp(17700, 40000, prefixed(frame("FORWARD", 5, 0x38, payload({"status": 499, "error": "cancelled"}))))
    rows = fields(tcp.write(), names)
    same([get(row, "kind", "cancels", "request_in") for row in rows],
         [["request", "", ""], ["cancel", "1", ""], ["failure", "", "1"]], "a cancel")

    # One byte a segment, several frames a segment, and frames that begin and end in the middle of segments.
    many = [frame("LM_HEAD", n, 0, payload({"pos": n}, bytes(8 * n))) for n in range(1, 30)]
    for mss in (1, 7, 100, 60000):
        for bare in (False, True):
            tcp = Capture(folder / "segments.pcap")
            tcp.tcp(40000, 17700, b"".join(one if bare else prefixed(one) for one in many), mss=mss)
            options = ["-o", "aeonflow.tcp_ports:17700"]
            rows = fields(tcp.write(), ["aeonflow.sequence", "aeonflow.pos", "aeonflow.body.len", "_ws.col.Info"], *options)
            same([int(one) for row in rows for one in row["aeonflow.sequence"]], list(range(1, 30)), f"segments of {mss}")
            same([int(one) for row in rows for one in row["aeonflow.body.len"]], [8 * n for n in range(1, 30)], "bodies")
            info = "|".join(one for row in rows for one in row["_ws.col.Info"])
            same(info.count("LM_HEAD"), 29, f"frames in Info with segments of {mss}")
            no_faults(tcp.path, *options)
    # Without port numbers the bytes decide; and text on the same carriers is left alone.
    tcp = Capture(folder / "found.pcap")
    tcp.tcp(40000, 17700, prefixed(many[3]))
    tcp.tcp(40001, 17701, many[3])
    tcp.tcp(40002, 17702, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    tcp.udp(40003, 17703, many[3])
    tcp.udp(40004, 17704, b"some words that are no frame")
    tcp.udp(40005, 17705, many[3][:-1])
    rows = fields(tcp.write(), ["frame.number"])
    same([row["frame.number"] for row in rows], [["1"], ["2"], ["4"]], "frames that are recognised")
    same(fields(tcp.path, ["frame.number"], "-o", "aeonflow.heuristics:FALSE"), [], "frames with recognition off")
    rows = fields(tcp.path, ["frame.number"], "-d", "udp.port==17705,aeonflow", "-d", "tcp.port==17702,aeonflow")
    same([row["frame.number"] for row in rows], [["1"], ["2"], ["3"], ["4"], ["6"]], "decode as")

    # Faults of carriers, each with its own words.
    def fault(build, words, *options):
        capture = Capture(folder / "fault.pcap")
        build(capture)
        text = str(expert_texts(capture.write(), "-o", "aeonflow.tcp_ports:17700", "-o", "aeonflow.udp_ports:17700",
                                "-o", "aeonflow.fragment_ports:17701", *options))
        check(words in text, f"expected {words!r} in {text}")

    hello = frame("HELLO", 1, 0, payload({}))
    fault(lambda c: c.udp(40000, 17700, hello + b"x"), "datagram of 15 bytes, its header announces 14")
    fault(lambda c: c.udp(40000, 17700, hello[:-1]), "datagram of 13 bytes, its header announces 14")
    fault(lambda c: c.udp(40000, 17700, hello[:9]), "datagram of 9 bytes")
    fault(lambda c: c.tcp(40000, 17700, struct.pack(">I", 9) + hello), "frame length 9", "-o", "aeonflow.framing:prefixed")
    fault(lambda c: c.tcp(40000, 17700, struct.pack(">I", 15) + hello + b"x"), "frame length 15, its header announces 14")
    fault(lambda c: c.tcp(40000, 17700, struct.pack(">I", 16777226) + hello), "frame length 16777226")
    fault(lambda c: c.udp(40000, 17700, frame("HELLO", 1, 0, b"\xff\xff{}")), "The meta has 65535 bytes, but 2 are left")
    fault(lambda c: c.udp(40000, 17700, frame("HELLO", 1, 0, payload(b'{"a":{"b":1,"b":2}}'))), "The key b stands twice")
    fault(lambda c: c.udp(40000, 17700, frame("HELLO", 1, 0, payload(b"[1]"))), "no JSON object")
    fault(lambda c: c.udp(40000, 17700, frame("HELLO", 1, 0, payload(b'{"a":01}'))), "not JSON")
    fault(lambda c: c.udp(40000, 17700, frame("HELLO", 1, 0, payload(b'{"a":' + b"[" * 40 + b"]" * 40 + b"}"))), "32 levels")
    fault(lambda c: c.udp(40000, 17700, frame("HELLO", 1, 0, b"\0")), "at least 2 bytes")
    fault(lambda c: c.udp(40000, 17700, frame("FORWARD", 1, 0, payload({}, b"abc"))), "no whole number")
    fault(lambda c: c.udp(40000, 17700, frame("FORWARD", 1, 0, payload({}, struct.pack("<2f", 1, float("nan"))))),
          "value 1 is NaN")
    fault(lambda c: c.udp(40000, 17700, frame("FORWARD", 1, 0x01, payload({}))), "never answers")
    fault(lambda c: c.udp(40000, 17700, frame(0x7777, 1, 0, payload({}))), "No route")
    fault(lambda c: c.udp(40000, 17700, frame("FORWARD", 1, 0, payload({"session": 5}))), "session is 5")
    fault(lambda c: c.udp(40000, 17700, ask, snap=60), "payload bytes")
    fault(lambda c: c.tcp(40000, 17700, prefixed(ask), snap=70), "payload bytes")
    fault(lambda c: c.udp(40000, 17701, b"\0\0\5\2abc"), "no such part")
    fault(lambda c: c.udp(40000, 17701, b"\0\0\0\1"), "a part without bytes")
    # The same fragment id for two frames, a part twice, and the whole frame where its last part came.
    udp = Capture(folder / "joined.pcap")
    for number in (1, 2):
        whole = frame("LM_HEAD", number, 0, payload({}, bytes(8)))
        parts = [whole[:9], whole[9:18], whole[18:]]
        for index in (2, 0, 0, 1):
            udp.udp(40000, 17701, struct.pack(">HBB", 4, index, 3) + parts[index])
    rows = fields(udp.write(), ["frame.number", "aeonflow.sequence", "aeonflow_frag.fragment"], "-o", "aeonflow.fragment_ports:17701")
    same([list(row.values()) for row in rows], [[["4"], ["1"], ["2", "4", "1"]], [["8"], ["2"], ["6", "8", "5"]]], "joined")
    print("exchanges: copies, cancels, segments, ports, fragments and faults")


# ---- 4. Hostile bytes ----------------------------------------------------------------------------------------------------


def hostile(folder, seed):
    print(f"hostile: seed {seed}")
    dice = random.Random(seed)
    pcar = b"PCAR" + struct.pack("<5I2f", 0, 2, 128, 0, 7, 1.0, -2.0)
    qres = b"QRES" + struct.pack("<5IBBHI", 3, 8, 2, 7, 9, 2, 3, 0, 5) + b"\1" + bytes(16) + bytes(5)
    blob = b"BWB1\1\0" + bytes(6) + b"\x30\x10\0" + struct.pack("<IB", 12, 4) + bytes(12)
    bwah = b"BWAH\1\3" + struct.pack("<II", len(blob), len(blob))
    ok = {"status": 200, "body": "bwah", "dim": 2, "seq": 1, "pos": 1 << 52, "layers": [0, 3], "model": {"hidden_dim": 0}}
    seeds = [
        frame("HELLO", 1, 0, payload({"content_type": "x"})), frame("HELLO", 1, 0x30, payload(ok)),
        frame("FORWARD", 2, 0, payload({"session": "s", "pos": 3}, bytes(64))),
        frame("FORWARD", 2, 0x30, payload({**ok, "body": "f32"}, bytes(64))),
        frame("FORWARD_PCA", 3, 0, payload({}, pcar * 2)), frame("FORWARD_Q", 3, 0, payload({}, qres)),
        frame("AMPLITUHEDRON_REPLAY", 4, 0x30, payload(ok, bwah + blob * 2)),
        frame("AMPLITUHEDRON_CAPTURE", 5, 0, payload({}, bwah + bytes(16) + blob * 2)),
        frame("FORWARD", 2, 0x38, payload({"status": 409, "error": "é\u0000x", "have": [[], {}, None]})),
        frame(0xFFFE, 0, 1, b"\0\3\1\3"), frame(0xFFFF, 0, 0x80, bytes(28)), frame("FORWARD", 2, 0x08),
        frame("LM_HEAD", 6, 0x30, payload({**ok, "body": "topk", "dim": 1e308, "seq": 0}, bytes(16))),
        frame("FORWARD", 7, 0, payload(b'{"pos":-1,"in":"ids","accept":["f32",[[]]],"a":"\\ud83d\\ude00\\u0000"}', bytes(8))),
    ]

    def damaged():
        how = dice.randrange(4)
        if how == 0:
            return dice.randbytes(dice.randrange(0, 120))
        data = bytearray(dice.choice(seeds))
        for _ in range(dice.choice((0, 1, 1, 2, 8))):
            data[dice.randrange(len(data))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, dice.randrange(256)))
        if how == 1:
            del data[dice.randrange(len(data) + 1) :]
        if how == 2:  # The length fits again, so that what is inside is looked at.
            data[7:10] = (len(data) - 10).to_bytes(3, "big")
        return bytes(data)

    def dump(messages):
        lines = []
        for message in messages:
            for at in range(0, len(message), 16):
                lines.append(f"{at:06x} {message[at : at + 16].hex(' ')}")
            lines.append("")
        return "\n".join(lines) + "\n"

    kinds = {
        "udp": ("-u", "40000,17700", lambda: damaged()),
        "tcp": ("-T", "40000,17700", lambda: b"".join(prefixed(d) if dice.random() < 0.9 else d
                                                     for d in (damaged() for _ in range(dice.randrange(1, 4))))),
        "fragments": ("-u", "40000,17701", lambda: struct.pack(">HBB", dice.randrange(3), dice.randrange(3), dice.randrange(4))
                      + damaged()),
        "heuristic": ("-T", "40000,17702", damaged),
    }
    for name, (option, ports, make) in kinds.items():
        text, path = folder / f"{name}.txt", folder / f"hostile-{name}.pcap"
        messages = [message for message in (make() for _ in range(1500)) if message]
        text.write_text(dump(messages))
        made = subprocess.run(["text2pcap", "-q", option, ports, text, path], capture_output=True, text=True, timeout=120)
        check(made.returncode == 0, f"text2pcap: {made.stderr}")
        options = ["-o", "aeonflow.udp_ports:17700", "-o", "aeonflow.tcp_ports:17700", "-o", "aeonflow.fragment_ports:17701"]
        # One damaged length can swallow a whole connection, so there are also many short ones.
        short = Capture(folder / f"hostile-{name}-short.pcap")
        for n, message in enumerate(messages):
            short.tcp(30000 + n // 3, int(ports.split(",")[1]), message)
        runs = [(path, "prefixed")]
        if option == "-T":
            runs += [(short.write(), framing) for framing in ("prefixed", "bare", "detect")]
        for run, framing in runs:
            for passes in ([], ["-2"]):
                out = tshark(run, *options, "-o", f"aeonflow.framing:{framing}", *passes, "-V")
                check("aeon-flow" in out or name == "heuristic", f"{name} was not dissected")
                # What is recognised as no frame may go to a dissector that takes it for its own protocol: its affair.
                for fault in re.finditer(r"\[Malformed Packet: AEON", out):
                    check(False, f"{name}, {framing}: a fault inside the dissector", out[max(fault.start() - 1500, 0) :][:2000])
    print("hostile: no Lua error in 4 times 1500 packets, on every carrier and framing")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    binaries = Path(sys.argv[1]).resolve()
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory(prefix="aeon-shark-") as name:
        folder = Path(name)
        if os.environ.get("AEON_CAPTURE") == "off":
            print("live: skipped, AEON_CAPTURE=off")
        else:
            live(binaries, folder)
        golden(folder)
        exchanges(folder)
        hostile(folder, seed)
    print(f"{checks} checks passed")


if __name__ == "__main__":
    main()
