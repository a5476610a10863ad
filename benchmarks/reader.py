"""Reading rows: our reader beside pandas and tf.data's CSV reader, in rows and bytes per second.

Criteo's rows, made rows of Avazu's columns, and of a schema with fractions, scales, several values per field,
64-bit ids and weights. Processor time per row stands beside the speed, because other programs disturb only
the latter.

Each contender reads the same file in a process of its own, in turns, and counts the rows. `parse` stops at
columns of numbers and texts; `to ids` goes on to what a model takes: normalised integers and hashed ids.
pandas is needed: pip install pandas
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from reporting import MISSED, RESULTS, header, table

HERE = Path(__file__).resolve().parent
REAL = HERE.parent.parent / "shared/data/criteo_kaggle_7200.tsv.gz"
ROWS_PER_SECOND, OTHERS = 1.5e6, 0.5  # the goals; OTHERS: of Criteo's speed, for other schemas
BLOCK = 7200  # made rows, repeated as Criteo's are
RICH = {
    "label": "bought",
    "numbers": {
        "price": "log1p",
        "age": {"scale": "min-max", "min": 18, "max": 90},
        "height": {"scale": "standard", "mean": 170, "deviation": 12},
        "share": "none",
        **{f"n{n}": {"scale": "standard", "mean": 0, "deviation": n} for n in range(1, 10)},
    },
    "categories": {
        "user": "hash64",
        **{f"c{n}": 40 * 2**n for n in range(1, 18)},
        "tags": {"cardinality": 1000, "separator": "|", "length": 10},
        "seen": {"cardinality": 50000, "separator": " ", "length": 20, "keep": "last", "padding": "before"},
    },
    "weight": "importance",
    "ignored": ["id"],
}
OTHER_FORMATS = (".csv", ".tsv.gz", ".tsv.zst", ".parquet", ".tfrecord")
TFRECORD_COPIES = 8  # writing them takes TensorFlow long


def ours(path: str) -> int:
    """Blocks, as `oe_runtime.data` gives them."""
    from oe_runtime.data import open_source

    return sum(block.rows for block in open_source(path).blocks())


def our_batches(path: str) -> int:
    """Training batches of 4096 rows, a tenth of the rows held out."""
    from oe_runtime.data import Split, open_source, training_batches

    return sum(batch.rows for batch in training_batches(open_source(path), Split(0.1), 4096)) * 10 // 9


def our_avazu(path: str) -> int:
    """Blocks of Avazu's columns."""
    from oe_runtime.data import open_source, row_schema

    return sum(block.rows for block in open_source(path, schema=row_schema.AVAZU).blocks())


def our_rich(path: str) -> int:
    """Blocks of RICH's columns."""
    from oe_runtime.data import open_source, row_schema

    schema = row_schema.parse(RICH, "RICH")
    return sum(block.rows for block in open_source(path, schema=schema).blocks())


def pandas_columns(path: str) -> int:
    """pandas.read_csv with its C parser and the types that it finds."""
    import pandas as pd

    return sum(len(frame) for frame in pd.read_csv(path, chunksize=32768))


def tensorflow_avazu(path: str) -> int:
    """CsvDataset of texts, but for the label, and to_hash_bucket_fast."""
    import tensorflow as tf

    from oe_runtime.data import row_schema

    sizes = [one.cardinality for one in row_schema.AVAZU.categories]

    def convert(label, *columns):
        ids = [tf.strings.to_hash_bucket_fast(c, n) for c, n in zip(columns, sizes, strict=True)]
        return label, tf.stack(ids, 1)

    defaults = [tf.constant([0], tf.int64)] + [tf.constant([""])] * len(sizes)
    return _csv_dataset(path, defaults, range(1, 2 + len(sizes)), convert)


def tensorflow_rich(path: str) -> int:
    """CsvDataset; numbers are scaled, fields of several values split, all hashed."""
    import tensorflow as tf

    sizes = [2**62, *[40 * 2**n for n in range(1, 18)]]

    def convert(label, *columns):
        price, age, height, share, *more = columns[:13]
        more = [column / n for n, column in enumerate(more, 1)]
        numbers = tf.stack([tf.math.log1p(price), (age - 18) / 72, (height - 170) / 12, share, *more], 1)
        singles, (tags, seen, weight) = columns[13:31], columns[31:]
        ids = [tf.strings.to_hash_bucket_fast(c, size) for c, size in zip(singles, sizes, strict=True)]
        for column, separator, size in ((tags, "|", 1000), (seen, " ", 50000)):
            ids.append(tf.strings.to_hash_bucket_fast(tf.strings.split(column, separator), size).to_tensor())
        return label, numbers, tuple(ids), weight

    defaults = [tf.constant([0], tf.int64), *[tf.constant([0.0])] * 13, *[tf.constant([""])] * 20]
    return _csv_dataset(path, [*defaults, tf.constant([1.0])], range(1, 36), convert)


def _csv_dataset(path: str, defaults: list, columns, convert: Callable) -> int:
    import tensorflow as tf

    rows = tf.data.experimental.CsvDataset(path, defaults, header=True, select_cols=list(columns))
    rows = rows.batch(4096).map(convert, tf.data.AUTOTUNE).prefetch(2)
    return sum(int(batch[0].shape[0]) for batch in rows)


def pandas_parse(path: str) -> int:
    """pandas.read_csv with its C parser, a block at a time."""
    return sum(len(frame) for frame in _frames(path))


def pandas_ids(path: str) -> int:
    """The same, then log1p and pandas' own hash, modulo the cardinalities."""
    import numpy as np
    import pandas as pd

    from oe_runtime.data.criteo import CARDINALITIES, CATEGORIES, INTEGERS

    rows = 0
    for frame in _frames(path):
        dense = frame[list(INTEGERS)].to_numpy(np.float32)
        np.nan_to_num(np.sign(dense) * np.log1p(np.abs(dense)), copy=False)
        for name, cardinality in zip(CATEGORIES, CARDINALITIES, strict=True):
            texts = frame[name].to_numpy(object)
            (pd.util.hash_array(texts, categorize=False) % np.uint64(cardinality)).astype(np.int64)
        rows += len(frame)
    return rows


def _frames(path: str):
    import pandas as pd

    from oe_runtime.data.criteo import CATEGORIES, COLUMNS, INTEGERS

    types = {"label": "int8", **dict.fromkeys(INTEGERS, "float32"), **dict.fromkeys(CATEGORIES, object)}
    options = {"sep": "\t", "header": None, "names": list(COLUMNS), "quoting": 3, "chunksize": 32768}
    return pd.read_csv(path, dtype=types, na_values=[""], keep_default_na=False, **options)


def tensorflow_parse(path: str) -> int:
    """tf.data.experimental.CsvDataset, batches of 4096."""
    return _tensorflow(path, lambda *columns: columns)


def tensorflow_ids(path: str) -> int:
    """The same, then log1p and to_hash_bucket_fast, on all cores."""
    import tensorflow as tf

    from oe_runtime.data.criteo import CARDINALITIES

    def convert(label, *columns):
        dense = tf.stack([tf.cast(c, tf.float32) for c in columns[:13]], 1)
        ids = [tf.strings.to_hash_bucket_fast(c, n) for c, n in zip(columns[13:], CARDINALITIES, strict=True)]
        return label, tf.sign(dense) * tf.math.log1p(tf.abs(dense)), tf.stack(ids, 1)

    return _tensorflow(path, convert)


def _tensorflow(path: str, convert: Callable) -> int:
    import tensorflow as tf

    defaults = [tf.constant([0], tf.int64)] * 14 + [tf.constant([""])] * 26
    kind = "GZIP" if path.endswith(".gz") else None
    rows = tf.data.experimental.CsvDataset(
        path, defaults, compression_type=kind, field_delim="\t", use_quote_delim=False
    )
    rows = rows.batch(4096).map(convert, tf.data.AUTOTUNE).prefetch(2)
    return sum(int(batch[0].shape[0]) for batch in rows)


def arrow_parse(path: str) -> int:
    """pyarrow.csv, which our reader was built on before: columns only."""
    import pyarrow as pa
    import pyarrow.csv as csv

    from oe_runtime.data.criteo import CATEGORIES, COLUMNS, INTEGERS

    types = {
        "label": pa.int8(),
        **dict.fromkeys(INTEGERS, pa.int64()),
        **dict.fromkeys(CATEGORIES, pa.binary()),
    }
    with csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=list(COLUMNS), block_size=2 << 20),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=types, null_values=[""]),
    ) as reader:
        return sum(table.num_rows for table in reader)


def inflate(path: str) -> int:
    """The limit for compressed files: decompression alone, on one core."""
    import pyarrow as pa

    from oe_runtime.data.text import BLOCK_BYTES

    with pa.CompressedInputStream(pa.OSFile(path), "gzip" if path.endswith(".gz") else "zstd") as stream:
        return sum(data.count(b"\n") for data in iter(lambda: stream.read(BLOCK_BYTES), b""))


def copy(path: str) -> int:
    """The limit for plain files: reading them from the page cache, on one core."""
    from oe_runtime.data.text import BLOCK_BYTES

    with open(path, "rb", buffering=0) as file:
        return sum(data.count(b"\n") for data in iter(lambda: file.read(BLOCK_BYTES), b""))


TEXT = [
    ("ours, to ids", ours),
    ("ours, batches of 4096", our_batches),
    ("pyarrow, parse", arrow_parse),
    ("pandas, parse", pandas_parse),
    ("pandas, to ids", pandas_ids),
    ("tf.data, parse", tensorflow_parse),
    ("tf.data, to ids", tensorflow_ids),
]


# By --short.
LEFT_OUT = ("pandas, parse", "tf.data, parse", "rich: pandas, parse", "rich: tf.data, to ids")


def measure(read: Callable[[str], int], path: str, pipe) -> None:
    """Read the file twice: a small part of it to import and warm up, then all of it against the clock."""
    read(str(Path(path).with_name("warm" + Path(path).name[4:])))
    start, used = time.perf_counter(), time.process_time()
    rows = read(path)
    pipe.send((rows, time.perf_counter() - start, time.process_time() - used))


def run(read: Callable[[str], int], path: Path) -> tuple[int, float, float]:
    """Rows, seconds and seconds of the processors, of a new process."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(read, str(path), send))
    process.start()
    send.close()
    result = receive.recv()
    process.join()
    return result


def prepare(folder: Path, source: Path, copies: int, formats: list[str]) -> None:
    """rows.tsv and other formats with the source's rows `copies` times, warm.tsv and so on with them once."""
    import pyarrow as pa
    import pyarrow.csv as csv

    from oe_runtime.data.write import SCHEMA, write_rows

    with pa.input_stream(str(source)) as stream:
        text = stream.read()
    rows = csv.read_csv(
        pa.BufferReader(text),
        csv.ReadOptions(column_names=SCHEMA.names, use_threads=False),
        csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types=SCHEMA, null_values=[""], strings_can_be_null=True),
    ).to_batches()
    for name, count in (("rows", copies), ("warm", 1)):
        (folder / f"{name}.tsv").write_bytes(text * count)
        for suffix in formats:
            times = min(count, TFRECORD_COPIES) if suffix == ".tfrecord" else count
            write_rows(folder / (name + suffix), rows * times)


def prepare_others(folder: Path, copies: int) -> None:
    """avazu.csv and rich.csv with made rows, and small ones to warm up."""
    rng = random.Random(1)
    avazu, rich = [], []
    for row in range(BLOCK):
        hexes = [f"{rng.randrange(2**32):08x}" for _ in range(9)]
        numbers = [rng.randrange(size) for size in (5, 4, 5, 24000, 5, 5, 450, 4, 70, 180, 70)]
        words = [f"{10**18 + row}", rng.randrange(2), f"141021{rng.randrange(24):02}", 1005, numbers[0]]
        avazu.append(",".join(map(str, [*words, *hexes, *numbers[1:]])))
        tags = "|".join(f"tag{rng.randrange(900)}" for _ in range(rng.randrange(6)))
        seen = " ".join(f"p{rng.randrange(50000)}" for _ in range(rng.randrange(12)))
        height = f"{rng.gauss(170, 12):.1f}" if rng.random() < 0.8 else ""
        first = [row, rng.randrange(2), f"{rng.expovariate(0.02):.2f}", rng.randrange(18, 90), height]
        middle = [f"{rng.random():.4f}", *(f"{rng.gauss(0, n):.3f}" for n in range(1, 10))]
        words = [f"u{rng.randrange(10**9)}", *(f"{rng.randrange(40 * 2**n):x}" for n in range(1, 18))]
        last = [*words, tags, seen, f"{rng.random():.2f}"]
        rich.append(",".join(map(str, [*first, *middle, *last])))
    from oe_runtime.data import row_schema

    names = ["id", "bought", *RICH["numbers"], *RICH["categories"], "importance"]
    for name, columns, lines in (("avazu", row_schema.AVAZU.columns, avazu), ("rich", names, rich)):
        text = "\n".join(lines) + "\n"
        for file, count in ((name, copies), (f"warm{name[4:]}", 1)):
            path = folder / name / f"{file}.csv"
            path.parent.mkdir(exist_ok=True)
            path.write_text(",".join(columns) + "\n" + text * count)


def main() -> int:
    """Run the benchmark; 0 when the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default=str(REAL), help="Criteo rows, plain or compressed, or generate:ROWS"
    )
    parser.add_argument("--copies", type=int, default=60, help="how often the file has them (default 60)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="plain text only, and each peer once")
    parser.add_argument("--out", type=Path, default=RESULTS / "reader.md")
    options = parser.parse_args()
    generated = options.data.startswith("generate:")
    if not generated and not Path(options.data).exists():
        print(f"error: there is no {options.data}; name the rows with --data", file=sys.stderr)
        return 1
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryDirectory() as directory:
        folder, source = Path(directory), Path(options.data)
        if generated:
            source = folder / "generated.tsv"
            words = ["--rows", options.data.partition(":")[2], "--out", str(source)]
            make = [sys.executable, "-m", "oe_runtime.data.generate", *words]
            subprocess.run(make, check=True, stdout=sys.stderr)
        formats = [one for one in OTHER_FORMATS if not options.short or one == ".csv"]
        prepare(folder, source, options.copies, formats)
        readings = [(*contender, folder / "rows.tsv") for contender in TEXT]
        prepare_others(folder, options.copies)
        for name, ours_of, tensorflow_of in (
            ("Avazu", our_avazu, tensorflow_avazu),
            ("rich", our_rich, tensorflow_rich),
        ):
            path = folder / name.lower() / f"{name.lower()}.csv"
            readings.append((f"{name}: ours, to ids", ours_of, path))
            readings.append((f"{name}: pandas, parse", pandas_columns, path))
            readings.append((f"{name}: tf.data, to ids", tensorflow_of, path))
        readings += [("reading alone, no parsing", copy, folder / "rows.tsv")]
        for suffix in formats:
            readings.append((f"ours, to ids, {suffix[1:]}", ours, folder / f"rows{suffix}"))
        for suffix in (".tsv.gz", ".tsv.zst"):
            if suffix in formats:
                readings.append((f"decompression alone, {suffix[1:]}", inflate, folder / f"rows{suffix}"))
        if options.short:
            readings = [one for one in readings if one[0] not in LEFT_OUT]
        size = (folder / "rows.tsv").stat().st_size
        width = {
            path: path.stat().st_size / copy(str(path)) for _, _, path in readings if path.suffix != ".gz"
        }
        mb = width[folder / "rows.tsv"] / 1e6
        widths = {name: mb if path.parent == folder else width[path] / 1e6 for name, _, path in readings}
        speeds: dict[str, list[float]] = {name: [] for name, _, _ in readings}
        used: dict[str, list[float]] = {name: [] for name, _, _ in readings}
        for _ in range(options.rounds):
            for name, read, path in readings:
                rows, seconds, processors = run(read, path)
                speeds[name].append(rows / seconds)
                used[name].append(processors / rows * 1e6)
                print(f"{name}: {rows / seconds:,.0f} rows/s, {used[name][-1]:.2f} µs per row", flush=True)
    costs = {name: statistics.median(of) for name, of in used.items()}
    means = {name: statistics.median(of) for name, of in speeds.items()}
    cells = [
        [
            name,
            f"{means[name]:,.0f}",
            f"{min(of):,.0f} to {max(of):,.0f}",
            f"{means[name] * widths[name]:,.0f}",
            f"{costs[name]:.2f}",
        ]
        for name, of in speeds.items()
    ]
    best = means["ours, to ids"]
    # Two processors at work throughout; reading and Python's part are done beside the parsing.
    reach = 2e6 / costs["ours, to ids"]
    parts = {name: costs["ours, to ids"] / costs[f"{name}: ours, to ids"] for name in ("Avazu", "rich")}
    met = reach >= ROWS_PER_SECOND and min(parts.values()) >= OTHERS
    verdict = "met" if met else "MISSED"
    text = header("Reading rows")
    text += f"""{source.name} {options.copies} times over, {size / 1e6:,.0f} MB of TSV in the page
cache, and as many made rows of Avazu's columns and of a rich schema (13 numbers, most with fractions;
20 categories, of which two have several values; a weight), as .csv. The median of {options.rounds} rounds
in turns, each in a process of its own. MB are those of the rows as plain text, {mb * 1e6:.0f} bytes per row
of Criteo's, in other formats too. `to ids` ends with what a model takes: labels, numbers and hashed ids;
`parse` with columns of numbers and texts.
`µs per row` is processor time. Load when it ended: {os.getloadavg()[0]:.1f}.

"""
    text += table(["reader", "rows/s", "range", "MB/s", "µs per row"], cells)
    text += f"""
Goals: {ROWS_PER_SECOND / 1e6:.1f} M rows/s of Criteo's on two cores, and {OTHERS} of that for other schemas:
{verdict} by processor time. Criteo's were read at {best / 1e6:.2f} M rows/s, {best * mb:.0f} MB/s:
{best / means["pandas, to ids"]:.1f} × pandas and {best / means["tf.data, to ids"]:.1f} × tf.data, to ids.
By processor time two cores of its own have {reach / 1e6:.2f} M rows/s; Avazu's rows have
{parts["Avazu"]:.2f} of that, the rich schema's {parts["rich"]:.2f}.

Limits: a plain file is parsed by two threads, which is what its speed hangs on: reading alone is far faster.
A .gz file is one stream, which one core inflates: `decompression alone` is as fast as one file can be read.
Parquet is limited by decoding its strings, TFRecord by TensorFlow's parsing of examples.
"""
    options.out.write_text(text)
    print(text)
    return 0 if met else MISSED


if __name__ == "__main__":
    sys.exit(main())
