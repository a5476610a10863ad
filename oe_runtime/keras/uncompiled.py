"""Tables for `predict` and calls of a model before `compile`, which Keras allows.

Tables on servers need the optimizer of `compile`. Until then, the rows are in this process: those that the
model brings, and initial ones. Nothing changes on the servers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

from oe_runtime.client import Client
from oe_runtime.keras.served import Served, Table
from oe_runtime.model_tables import rows_on_servers


def connect(served: Served) -> Served:
    """Give the layers tables in this process; return the model as it is served by them.

    Warns of rows of these tables on the servers, which are not used before `compile`.
    """
    if served.is_first and not served.fresh and not served.client.restores:
        for name, rows in rows_on_servers(served.client, served.layers).items():
            if rows:
                warnings.warn(
                    f"table {name} has {rows:,} rows on the servers, which the model does not use before "
                    "compile: compile it with the optimizer that trained them to predict from them",
                    stacklevel=5,
                )
    client = Client.in_process()
    tables = {}
    for name, layer in served.layers.items():
        spec = layer.table_spec(name, {"name": "sgd"}, served.settings)
        tables[name] = Table(client, client.create_table(spec), spec, until_compile=True)
        if layer.first_rows is not None:
            tables[name].assign(layer.first_rows)
    for name, layer in served.layers.items():
        layer.table = tables[name]
    uncompiled = copy.copy(served)
    uncompiled.client = client
    return uncompiled


def disconnect(served: Served, own: Sequence[Table]) -> None:
    """Take the tables of `connect`, if there are any, from the layers, and close the client of `own` ones.

    Others are of a model that shares some of the layers, and has more on their client.
    """
    for layer in served.layers.values():
        if layer.table is not None and layer.table.until_compile:
            layer.table = None
    for table in own:
        if table.until_compile:
            table.client.close()
