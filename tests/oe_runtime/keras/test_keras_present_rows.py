"""Servers that have rows of a model's tables already, from an earlier run."""

from __future__ import annotations

import threading
import time
import warnings

import keras
import numpy as np
import pytest
from server_processes import Servers

import oe_runtime.keras as embed
from oe_runtime import Client, SpecError, Worker

pytestmark = pytest.mark.process


@pytest.fixture
def servers(tmp_path):
    running = Servers(tmp_path, 2)
    yield running
    running.end()


def one_table(dim=4):
    keras.backend.clear_session()
    ids = keras.Input((1,), dtype="int64")
    return keras.Sequential(
        [ids, keras.layers.Embedding(1000, dim, name="e"), keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def train(model):
    model.fit(np.arange(640)[:, None], np.ones((640, 1), np.float32), batch_size=64, verbose=0)


def rows(client):
    return sum(server["tables"]["e"]["rows"] for server in client.stats()["servers"])


def test_a_second_run_says_that_it_goes_on(servers):
    with Client(servers.endpoints) as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = embed.distributed_model(one_table(), client)
        model.compile("adam", "mse")
        train(model)
        with pytest.warns(UserWarning, match="the rows keep their optimizer's state") as said:
            model.compile("adam", "mse")  # its own rows are no news, but Adam begins anew for dense weights
        assert len(said) == 1
        model = embed.distributed_model(one_table(), client, fresh=False)
        model.compile("adam", "mse")  # meant
    with Client(servers.endpoints) as client:
        model = embed.distributed_model(one_table(), client)
        with pytest.warns(
            UserWarning, match=r"table e exists with 640 rows, which are kept.*fresh=True"
        ) as said:
            model.compile("adam", "mse")
        assert said[0].filename == __file__
        assert rows(client) == 640


def test_a_fresh_run_begins_anew_once(servers):
    with Client(servers.endpoints) as client:
        model = embed.distributed_model(one_table(), client)
        model.compile("adam", "mse")
        train(model)
        with Client(servers.endpoints) as other, warnings.catch_warnings():
            warnings.simplefilter("error")
            again = embed.distributed_model(one_table(8), other, fresh=True)
            with pytest.raises(SpecError, match="the job has 1 other client connected"):
                again.compile("sgd", "mse")
            assert rows(other) == 640
            client.close()
            for _ in range(1000):  # until the servers have seen that it is gone
                try:
                    again.compile("sgd", "mse")
                    break
                except SpecError:
                    time.sleep(0.01)
            assert rows(other) == 0
            train(again)
            again.compile("sgd", "mse")
            assert rows(other) == 640  # of this run, which goes on with them


class Two:
    """Stands for a job of two workers."""

    count = 2

    def __init__(self, rank):
        self.rank = rank

    def sum(self, values, _what):
        return values


def test_all_workers_begin_anew_together(servers):
    with Client(servers.endpoints, job="another") as other:

        def connections():
            return max(server["connections"]["open"] for server in other.stats()["servers"])

        alone = connections()
        with Client(servers.endpoints) as client:
            model = embed.distributed_model(one_table(), client)
            model.compile("adam", "mse")
            train(model)
        while connections() > alone:  # until both servers have seen that it is gone
            time.sleep(0.01)
    clients = [Client(servers.endpoints, worker=Worker(rank, of=2)) for rank in range(2)]
    models = [
        embed.distributed_model(one_table(), client, workers=Two(rank), fresh=True)
        for rank, client in enumerate(clients)
    ]
    failures = []

    def compiled(model):
        try:
            model.compile("adam", "mse")
        except Exception as error:
            failures.append(error)

    other = threading.Thread(target=compiled, args=(models[1],))
    other.start()
    compiled(models[0])
    other.join(60)
    assert not failures
    assert [rows(client) for client in clients] == [0, 0]
    assert models[0].tables["e"] == models[1].tables["e"]
    clients[0].assign("e", np.arange(4), np.ones((4, 4), np.float32))
    assert (clients[1].read_rows("e", np.arange(4)).rows == 1).all()
    for client in clients:
        client.close()
