"""This engine, driven by lines on standard input (contenders.py): in process, or over loopback to a server.

python ours.py '{"where": "loopback", "tls": "off", "share": true, "index": "hash", "storage": [], "dim": 9,
                 "rows": 1000, "optimizer": "adagrad"}'

"storage" are options of the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import oe_runtime as oe

TOKEN = "a token for the servers of a benchmark"  # noqa: S105


@contextmanager
def _client(where: str, tls: str, share: bool, storage: list[str]) -> Iterator[oe.Client]:
    if where == "in process":
        with oe.Client.in_process() as client:
            yield client
        return
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_text(TOKEN)
        token.chmod(0o600)
        command = [sys.executable, "-m", "oe_runtime.server", "--exit-with-parent", "--tls", tls]
        command += ["--ready-file", f"{folder}/ready", "--token-file", str(token), *storage]
        # Pools in memory are flushed as persistent memory is: CLWB and fences instead of msync.
        environment = {**os.environ, "PMEM_IS_PMEM_FORCE": "1"}
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        try:
            while not Path(folder, "ready").exists():
                if server.poll() is not None:
                    sys.exit("the server ended before it listened")
                time.sleep(0.01)
            port = json.loads(Path(folder, "ready").read_text())["port"]
            with oe.Client([f"127.0.0.1:{port}"], token=TOKEN, tls=tls, share_memory=share) as client:
                yield client
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    """Fill the table, then answer lines."""
    asked = json.loads(sys.argv[1])
    dim, rows = asked["dim"], asked["rows"]
    spec = oe.TableSpec(
        "benchmark",
        dim,
        optimizer={"name": asked["optimizer"]},
        **({"index": "array", "input_dim": rows} if asked["index"] == "array" else {}),
    )
    with _client(asked["where"], asked["tls"], asked["share"], asked["storage"]) as client:
        lookups = [(client.create_table(spec), 0)]
        for begin in range(0, rows, 200_000):
            pulled = client.pull([np.arange(begin, min(begin + 200_000, rows))], lookups)
            client.push(pulled, [np.full(pulled.groups[0].rows.shape, 0.01, np.float32)], 0.01)
        print("ready", flush=True)
        for line in sys.stdin:
            file, batch = line.split()
            gradient = np.full((int(batch), dim), 0.01, np.float32)
            out = np.empty((int(batch), dim), np.float32)
            times = []
            for ids in np.fromfile(file, np.int64).reshape(-1, int(batch)):
                start = time.perf_counter()
                pulled = client.pull([ids], lookups)
                client.embeddings(pulled.groups[0], out)
                middle = time.perf_counter()
                client.push(pulled, [gradient], 0.01)
                times += [middle - start, time.perf_counter() - middle]
            print(*times, flush=True)


if __name__ == "__main__":
    main()
