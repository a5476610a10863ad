"""Several worker processes on the tables of one job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import worker_process
from server_processes import Servers

from oe_runtime import Client, SpecError, Worker, WorkerLost
from oe_runtime.server import metrics

pytestmark = pytest.mark.process

BATCHES = 6


@pytest.fixture
def start(tmp_path):
    """Starts servers that end with the test."""
    started = []

    def start_servers(count):
        servers = Servers(tmp_path / f"servers-{len(started)}", count)
        started.append(servers)
        return servers

    yield start_servers
    for servers in started:
        servers.end()


def start_worker(endpoints, rank, of, begin, end, *save, restore=""):
    program = [sys.executable, str(Path(worker_process.__file__))]
    return subprocess.Popen(
        [*program, ",".join(endpoints), str(rank), str(of), str(begin), str(end), *save],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RESTORE": restore},
    )


def results(workers):
    """What the processes print, each only when all have."""
    digests = [worker.stdout.readline().strip() for worker in workers]
    for worker in workers:
        _, errors = worker.communicate("", timeout=120)
        assert worker.returncode == 0, errors
    return digests


def rows_of_one(of, batches):
    """The rows of one worker that has the shares of all, in one process."""
    with Client.in_process() as client:
        worker_process.tables(client)
        for batch in range(batches):
            shares = [worker_process.share(batch, rank) for rank in range(of)]
            ids = np.concatenate([ids for ids, _ in shares])
            gradients = [np.concatenate([gradients[dim] for _, gradients in shares]) for dim in (0, 1)]
            worker_process.push(client, ids, gradients)
        return worker_process.rows(client)


def reader(servers):
    client = Client(servers.endpoints, job="many")
    worker_process.tables(client)
    return client


@pytest.mark.parametrize("of", [2, 4])
def test_worker_processes_have_the_rows_of_one_with_the_whole_batch(start, of):
    digests = set()
    for _ in range(2):
        servers = start(2)
        digests.update(results([start_worker(servers.endpoints, rank, of, 0, BATCHES) for rank in range(of)]))
        with reader(servers) as client:
            np.testing.assert_allclose(
                worker_process.rows(client), rows_of_one(of, BATCHES), rtol=1e-4, atol=1e-5
            )
            versions = {
                table["version"]
                for server in client.stats()["servers"]
                for table in server["tables"].values()
            }
            assert versions == {BATCHES}
        servers.end()
    assert len(digests) == 1  # the same bits for all workers, both times


def test_a_killed_worker_stops_the_others_and_all_go_back(start, tmp_path):
    servers = start(2)
    saved = tmp_path / "saved"
    saved.mkdir()
    workers = [
        start_worker(servers.endpoints, 0, 2, 0, 3, str(saved)),
        start_worker(servers.endpoints, 1, 2, 0, 3),
    ]
    for worker in workers:
        assert worker.stdout.readline()
    workers[1].kill()
    workers[1].communicate()
    with Client(servers.endpoints, job="many", worker=Worker(1, 2)) as client:
        worker_process.tables(client)
        with pytest.raises(WorkerLost, match="worker 1 of 2 of job 'many' was lost"):
            worker_process.push(client, *worker_process.share(3, 1))
    workers[0].communicate("")
    again = [start_worker(servers.endpoints, rank, 2, 3, BATCHES, restore=str(saved)) for rank in range(2)]
    assert len(set(results(again))) == 1
    with reader(servers) as client:
        np.testing.assert_allclose(worker_process.rows(client), rows_of_one(2, BATCHES), rtol=1e-4, atol=1e-5)


def test_what_a_worker_is_told(start):
    endpoints = start(1).endpoints
    first = Client(endpoints, worker=Worker(0, 2, wait=0.1))
    worker_process.tables(first)
    worker_process.push(first, *worker_process.share(0, 0))
    with pytest.raises(WorkerLost, match=r"has waited 0\.1 s for worker 1 of 2 to push their share"):
        worker_process.rows(first)
    with pytest.raises(SpecError, match="'of' is 3, but the job's other workers have said 2"):
        Client(endpoints, worker=Worker(1, 3))
    with pytest.raises(SpecError, match="'rank' is 2; it must be a number from 0 to 1"):
        Client(endpoints, worker=Worker(2, 2))
    other = Client(endpoints)
    worker_process.tables(other)
    with pytest.raises(SpecError, match="connect as one of them"):
        worker_process.push(other, *worker_process.share(0, 0))
    other.close()
    first.close()
    Client.in_process().leave()  # nobody else is there


def test_jobs_with_workers_are_in_the_metrics(start):
    servers = start(1)
    with Client(servers.endpoints, job="many", worker=Worker(0, 2)) as client:
        worker_process.tables(client)
        worker_process.push(client, *worker_process.share(0, 0))
        stats = client.stats()["servers"][0]
        page = metrics.text({**stats, "tables": list(stats["tables"].values())}, 0.0)
    assert 'oe_job_workers{training_job="many",state="connected"} 1' in page
    assert 'oe_worker_waiting_requests{training_job="many",kind="pulls"} 0' in page
    assert 'oe_worker_held_pushes{training_job="many"} 1' in page
