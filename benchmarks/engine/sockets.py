"""What the loopback device takes for the messages of a batch, driven by lines on its input (contenders.py).

python sockets.py DIM

A process that sends as many bytes as rows would have, and one that reads them: no look-ups, no arithmetic.
Each key crosses once. Both ends use the same memory again and again.
"""

import os
import socket
import sys
import time

import numpy as np

FIRST = 64 << 20  # bytes of memory at the start


def _receive(end: socket.socket, memory: memoryview) -> None:
    while memory:
        got = end.recv_into(memory)
        if got == 0:
            sys.exit("the other end has gone")
        memory = memory[got:]


def _serve(end: socket.socket) -> None:
    memory = memoryview(bytearray(FIRST))
    sizes = np.zeros(2, np.int64)
    while True:
        _receive(end, memoryview(sizes).cast("B"))  # bytes to come, bytes to send back
        come, back = (int(size) for size in sizes)
        if come < 0:
            return
        _receive(end, memory[:come])
        end.sendall(memory[:back])


def main() -> None:
    """Connect two processes, then answer lines."""
    dim = int(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        server, _ = listener.accept()
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _serve(server)
        return
    end = socket.create_connection(listener.getsockname())
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(FIRST))

    def exchange(out: int, back: int) -> float:
        start = time.perf_counter()
        end.sendall(np.array([out, back], np.int64))
        end.sendall(memory[:out])
        _receive(end, memory[:back])
        return time.perf_counter() - start

    exchange(FIRST, FIRST)
    print("ready", flush=True)
    for line in sys.stdin:
        file, batch = line.split()
        times = []
        for ids in np.fromfile(file, np.int64).reshape(-1, int(batch)):
            keys = len(np.unique(ids))
            times += [exchange(keys * 8, keys * dim * 4), exchange(keys * (8 + dim * 4), 24)]
        print(*times, flush=True)
    end.sendall(np.array([-1, 0], np.int64))


if __name__ == "__main__":
    main()
