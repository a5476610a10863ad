"""The flags of the model and its tables."""

from __future__ import annotations

import argparse

from oe_runtime import models
from oe_runtime.training import policies
from oe_runtime.training.argument_types import count, widths

PRECISIONS = ("float32", "bfloat16")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The flags of what is trained."""
    m = p.add_argument_group("model")
    m.add_argument("--model", choices=models.NAMES, default="deepfm", help="default deepfm")
    m.add_argument("--dim", type=count(1), default=9, help="width of an embedding (default 9)")
    m.add_argument(
        "--hidden",
        type=widths,
        default=models.Shape.hidden,
        metavar="N,N",
        help="layers of the deep part, of DLRM's top (default 256,128)",
    )
    m.add_argument(
        "--cin",
        type=widths,
        default=models.Shape.cin,
        metavar="N,N",
        help="xdeepfm: feature maps of the layers of its interaction network (default 64,64)",
    )
    m.add_argument(
        "--bottom",
        type=widths,
        default=models.Shape.bottom,
        metavar="N,N",
        help="dlrm: layers over the integers, before one of width --dim (default 512,256,64)",
    )
    m.add_argument(
        "--interaction",
        choices=models.INTERACTIONS,
        default=models.Shape.interaction,
        help="dlrm: inner products of all pairs of fields (dot, default), or none (cat)",
    )
    m.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="of the hidden layers' products (default float32); bfloat16 keeps weights in float32",
    )
    m.add_argument(
        "--row-precision",
        choices=PRECISIONS,
        default="float32",
        help="of the tables' rows (default float32); bfloat16 halves their memory and traffic, the "
        "optimizer's state stays in float32",
    )
    m.add_argument(
        "--index",
        choices=("array", "hash"),
        default="array",
        help="tables with a row for each of a field's ids (array, default), or for any 64-bit id, made when "
        "it is first trained (hash)",
    )
    m.add_argument(
        "--admission",
        type=policies.admission,
        metavar="RULE",
        help=f"with --index hash: only ids that came so often get a row: {policies.ADMISSION_HELP}",
    )
    m.add_argument(
        "--eviction",
        type=policies.eviction,
        default=[],
        metavar="RULE,…",
        help=f"rows that go: {policies.EVICTION_HELP}",
    )
    m.add_argument(
        "--max-cardinality",
        type=count(0),
        default=0,
        metavar="N",
        help="cap on the ids of a field; 0 (default) keeps Criteo's 26 cardinalities, 10 million ids in all",
    )
