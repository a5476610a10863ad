"""This engine, driven by lines on standard input (contenders.py): in process, or over loopback to a server.

python ours.py '{"where": "loopback", "tls": "off", "share": true, "index": "hash", "storage": [], "dim": 9,
                 "rows": 1000, "optimizer": "adagrad"}'

"storage" are options of the server.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import oe_runtime as oe

sys.path.append(str(Path(__file__).resolve().parents[1]))

from processes import AS_PMEM, server


@contextmanager
def _client(where: str, tls: str, share: bool, storage: list[str]) -> Iterator[oe.Client]:
    if where == "in process":
        with oe.Client.in_process() as client:
            yield client
        return
    token = secrets.token_hex()
    with (
        TemporaryDirectory() as folder,
        server("dram", Path(folder), "--tls", tls, *storage, token=token, environment=AS_PMEM) as one,
        oe.Client([one.endpoint], token=token, tls=tls, share_memory=share) as client,
    ):
        yield client


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
