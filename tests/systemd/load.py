#!/usr/bin/env python3
"""Load on a station, and a hand that holds one of its threads still. Used by check.sh.

load.py requests SOCKET STOPFILE     FORWARD that accepts PCA components, on 4 connections, until STOPFILE is there
load.py connections SOCKET STOPFILE  a new connection and HELLO each time, until STOPFILE is there
load.py datagrams PORT STOPFILE      HELLO by UDP, each repeated until it is answered, until STOPFILE is there
load.py hold PID                     stops the first model thread of a process until the process is gone
"""
import ctypes, json, os, socket, struct, sys, threading, time

HELLO, FORWARD = 0, 3


def frame(opcode, sequence, meta, body=b""):
    text = json.dumps(meta).encode()
    payload = struct.pack(">H", len(text)) + text + body
    return struct.pack(">HIB", opcode, sequence, 0) + len(payload).to_bytes(3, "big") + payload


def meta_of(reply):
    (length,) = struct.unpack_from(">H", reply, 10)
    return json.loads(reply[12 : 12 + length])


def exchange(stream, request):
    stream.sendall(struct.pack(">I", len(request)) + request)
    reply, want = b"", 4
    while len(reply) < want:
        part = stream.recv(65536)
        if not part:
            raise OSError("closed")
        reply += part
        if len(reply) >= 4:
            want = 4 + struct.unpack_from(">I", reply)[0]
    return meta_of(reply[4:])


def dial(path):
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(30)
    stream.connect(path)
    return stream


def requests(path, stop):
    counts, failures = [0] * 4, []

    def work(n):
        stream = dial(path)
        while not os.path.exists(stop):
            counts[n] += 1
            meta = {"in": "ids", "accept": ["pcar", "f32"]}
            try:
                reply = exchange(stream, frame(FORWARD, counts[n], meta, struct.pack("<4I", 1, 2, 3, 4)))
                if reply["status"] != 200:
                    failures.append(reply)
            except OSError as error:
                failures.append(str(error))
                return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(f"requests={sum(counts)} failed={len(failures)} {failures[:3]}")


def connections(path, stop):
    refused = broken = done = 0
    while not os.path.exists(stop):
        try:
            stream = dial(path)
        except OSError:
            refused += 1
            time.sleep(0.005)
            continue
        try:
            done += exchange(stream, frame(HELLO, 1, {}))["status"] == 200
        except OSError:
            # The connection was there and its process was killed: that is no refusal.
            broken += 1
        stream.close()
    print(f"answered={done} refused={refused} broken={broken}")


def datagrams(port, stop):
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer.connect(("127.0.0.1", int(port)))
    peer.settimeout(0.2)
    answered = repeated = refused = sequence = 0
    while not os.path.exists(stop):
        sequence += 1
        request = frame(HELLO, sequence, {"pad": "0" * 1200})
        for tries in range(100):
            repeated += tries > 0
            try:
                peer.send(request)
                while struct.unpack_from(">I", peer.recv(65536), 2)[0] != sequence:
                    pass
                answered += 1
                break
            except TimeoutError:
                continue
            except ConnectionRefusedError:
                refused += 1
    print(f"answered={answered} refused={refused} of={sequence} repeated={repeated}")


def hold(pid):
    attach, wall = 16, 0x40000000
    for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
        with open(f"/proc/{pid}/task/{thread}/comm") as comm:
            if comm.read().startswith("model-"):
                if ctypes.CDLL(None, use_errno=True).ptrace(attach, int(thread), None, None) != 0:
                    sys.exit("ptrace is not allowed here")
                os.waitpid(int(thread), wall)
                print("held", flush=True)
                # A traced thread is gone only when its tracer has seen it go.
                os.waitpid(int(thread), wall)
                return
    sys.exit("no model thread")


if __name__ == "__main__":
    {"requests": requests, "connections": connections, "datagrams": datagrams, "hold": hold}[sys.argv[1]](*sys.argv[2:])
