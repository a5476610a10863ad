"""Checkpoints looked at, compared and rewritten without a server, and increments."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oe_runtime import Client, TableSpec, checkpoint
from oe_runtime.checkpoint import cli
from oe_runtime.errors import CheckpointError

SAMPLE = Path(__file__).parents[1] / "data" / "formats" / "table-1-pool-1" / "checkpoints" / "step-0000000003"
SPECS = (
    TableSpec("wide/emb", 4, optimizer={"name": "adam"}),
    TableSpec("known", 2, index="array", input_dim=100, optimizer={"name": "adagrad"}),
)


def new_client(servers: int = 1) -> Client:
    client = Client.in_process(servers=servers)
    for spec in SPECS:
        client.create_table(spec)
    return client


def push(client: Client, keys: range, rate: float = 0.5) -> None:
    ids = np.array(keys, np.int64)
    pulled = client.pull([ids], [(0, 0), (1, 0)])
    client.push(pulled, [np.ones((len(g.inverse), g.dim), np.float32) for g in pulled.groups], rate)


def publish(
    client: Client, directory: Path, step: int, base: Path | None = None, keep: int = 9, packs: bool = False
) -> Path:
    def write(path: Path):
        (path / "dense").mkdir()
        (path / "dense" / "weights").write_bytes(bytes([step]) * 100)
        contents: dict[str, bytes] = {}
        tables = client.save(path, since=base, contents=contents if packs else None)
        for name, content in contents.items():
            (path / name).write_bytes(content)
        return {"tables": tables, "training": {"note": "kept"}}

    return checkpoint.publish(directory, step, write, base=base, keep=keep)


def rows(paths: list[Path], servers: int = 1):
    with new_client(servers) as client:
        client.restore(*paths)
        keys = {table: np.sort(client.export_rows(table)[0]) for table in (0, 1)}
        return {
            table: (found.tolist(), client.pull_rows(table, found).tolist()) for table, found in keys.items()
        }


def tool(*arguments: object, expect: int = 0) -> str:
    """What one command says, on both outputs."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main([str(argument) for argument in arguments])
    assert code == expect, said.getvalue()
    return said.getvalue()


@pytest.fixture(scope="module", params=["files", "packs"])
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run with three checkpoints: one in full by two servers, and two increments, which may be packs."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    packs = request.param == "packs"
    with new_client(2) as client:
        push(client, range(40))
        base = publish(client, directory, 1)
        push(client, range(3, 6))
        base = publish(client, directory, 2, base, packs=packs)
        push(client, range(39, 45))
        last = publish(client, directory, 3, base, packs=packs)
    assert {path.name for path in last.glob("server-*")} == (
        {"server-0-of-2.oets", "server-1-of-2.oets"}
        if packs
        else {f"server-{n}-of-2.{table}.oet" for n in (0, 1) for table in ("wide%2Femb", "known")}
    )
    return directory.parent


def test_increments_are_small_and_make_the_whole(run, tmp_path):
    first, second, third = checkpoint.published(run / "checkpoints")
    assert checkpoint.chain(third) == [first, second, third]
    found = cli.inspect(third)
    assert {(t["name"], t["rows"], t["increment"]) for t in found["tables"]} == {
        ("wide/emb", 6, True),
        ("known", 6, True),
    }
    with new_client(2) as client:
        for keys in (range(40), range(3, 6), range(39, 45)):
            push(client, keys)
        client.save(tmp_path)
    whole = rows([tmp_path])
    for servers in (1, 2, 3):
        assert rows([first, second, third], servers) == whole
    assert rows([first, second]) != whole


def test_an_increment_without_its_base_is_refused(run, tmp_path):
    first, second, third = checkpoint.published(run / "checkpoints")
    with new_client() as client:
        push(client, range(7))
        for chain, words in (
            ([third], "is an increment on the file with the checksum"),
            ([first, third], "but before it comes"),
        ):
            with pytest.raises(CheckpointError, match=words) as error:
                client.restore(*chain)
            assert str(third) in str(error.value)
        assert len(client.export_rows(0)[0]) == 7
    copy = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", copy)
    manifest = copy / first.name / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    for change, words in ((lambda: None, "another"), (lambda: shutil.rmtree(copy / first.name), "missing")):
        change()
        with pytest.raises(CheckpointError, match=f"{second.name} is an increment on .*{words}"):
            checkpoint.chain(copy / third.name)
        assert f"{copy / first.name}" in tool("verify", copy / third.name, expect=1)
        assert "nothing was written" in tool("reshard", copy / third.name, "--servers", 2, expect=1)


def test_bases_are_kept_as_long_as_they_are_needed(tmp_path):
    with new_client() as client:
        push(client, range(9))
        base = publish(client, tmp_path, 1)
        for step in (2, 3):
            push(client, range(step))
            base = publish(client, tmp_path, step, base, keep=1)
        assert [path.name[-1] for path in checkpoint.published(tmp_path)] == ["1", "2", "3"]
        publish(client, tmp_path, 4, keep=1)
        assert [path.name[-1] for path in checkpoint.published(tmp_path)] == ["4"]
        with pytest.raises(CheckpointError, match="does not lie in"):
            publish(client, tmp_path / "other", 5, tmp_path / "step-0000000004")


def test_inspect_tells_what_is_there(run):
    found = json.loads(tool("inspect", SAMPLE, "--json"))
    assert (found["step"], found["format"], found["other_files"]) == (3, 1, {"dense.bin": 64})
    known, wide = found["tables"]
    assert (wide["name"], wide["dim"], wide["dtype"], wide["rows"]) == ("wide/emb", 3, "float32", 7)
    assert (known["rows"], known["servers"], known["formats"]) == (7, 2, [1])
    assert wide["optimizer"]["name"] == "adagrad"
    assert wide["bytes"] == sum(path.stat().st_size for path in SAMPLE.glob("*.wide%2Femb.oet"))
    text = tool("inspect", SAMPLE)
    assert "adagrad" in text
    assert "uniform" in text
    for place in (run, run / "checkpoints"):
        listed = tool("inspect", place)
        assert "increment on step-0000000002" in listed
        assert len(listed.splitlines()) == 4
    file = next(iter(SAMPLE.glob("server-0*known.oet")))
    assert "table known, server 0 of 2" in tool("inspect", file)
    assert json.loads(tool("verify", run, "--json"))["problems"] == []


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_verify_lists_every_problem(tmp_path):
    copy = tmp_path / SAMPLE.name
    shutil.copytree(SAMPLE, copy)
    assert "no problem" in tool("verify", copy)
    flip(copy / "dense.bin", 5)
    flip(copy / "server-0-of-2.known.oet", -20)
    os.truncate(copy / "server-1-of-2.known.oet", 300)
    (copy / "server-1-of-2.wide%2Femb.oet").unlink()
    (copy / "server-7-of-9.other.oet").write_text("foreign")
    problems = json.loads(tool("verify", copy, "--json", expect=1))["problems"]
    for name, words in (
        ("dense.bin", "SHA-256"),
        ("server-0-of-2.known.oet", "SHA-256"),
        ("server-0-of-2.known.oet", "its checksum is wrong"),
        ("server-1-of-2.known.oet", "300 bytes, the manifest says"),
        ("server-1-of-2.wide%2Femb.oet", "No such file"),
        ("server-1-of-2.wide%2Femb.oet", "is missing"),
        ("server-7-of-9.other.oet", "is not in manifest.json"),
        ("server-7-of-9.other.oet", "it has only 7 bytes"),
    ):
        assert any(name in problem and words in problem for problem in problems), (name, words, problems)
    manifest = json.loads((copy / "manifest.json").read_text())
    for tables in ([7], "none", [{"file": "server-3-of-4.known.oet"}]):
        (copy / "manifest.json").write_text(json.dumps({**manifest, "tables": tables}))
        assert "manifest.json: tables: " in tool("verify", copy, expect=1)
    said = tool("reshard", copy, "--servers", 1, expect=1)
    assert "nothing was written" in said
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]


def test_packs_are_verified_and_earlier_versions_refuse_them(tmp_path):
    with new_client() as client:
        push(client, range(9))
        path = publish(client, tmp_path, 1, packs=True)
    assert checkpoint.verify(path).manifest["format"] == 2, "which earlier versions refuse by its number"
    assert json.loads(tool("verify", tmp_path, "--json"))["problems"] == []
    pack = path / "server-0-of-1.oets"
    whole = pack.read_bytes()
    flip(pack, len(whole) - 9)
    said = tool("verify", tmp_path, expect=1)
    assert f"{pack} is damaged: its SHA-256 is not the manifest's" in said
    assert ".oet is damaged: its checksum is wrong" in said
    flip(pack, len(whole) - 9)
    flip(pack, 30)
    for command in ("verify", "inspect"):
        assert f"{pack} is damaged: the checksum of its index is wrong" in tool(command, path, expect=1)
    assert f"{pack} is damaged" in tool("reshard", path, "--servers", "2", expect=1)
    pack.write_bytes(whole)
    shutil.copy(pack, path / "server-1-of-2.oets")
    said = tool("verify", path, expect=1)
    assert "server-1-of-2.oets is not in manifest.json: files" in said
    assert "server-1-of-2.oets is damaged: a file in it is named 'server-0-of-1.wide%2Femb.oet'" in said
    (path / "server-1-of-2.oets").unlink()
    pack.unlink()
    assert f"{pack}: No such file or directory; the checkpoint is not whole" in tool("verify", path, expect=1)
    with new_client() as client, pytest.raises(CheckpointError, match="has no file of table"):
        client.restore(path)


def test_verify_compares_what_the_manifest_says_of_tables(tmp_path):
    with Client.in_process(servers=2) as client:
        client.create_table(TableSpec("t", 4, admission={"name": "counter", "filter_freq": 1}))
        pulled = client.pull([np.arange(9)], [(0, 0)])
        client.push(pulled, [np.ones((9, 4), np.float32)], 0.1)
        path = checkpoint.publish(tmp_path, 1, lambda directory: {"tables": client.save(directory)})
    assert "no problem" in tool("verify", path)
    file = path / "manifest.json"
    whole = file.read_text()
    for before, after, words in (
        ('"version": 1', '"version": 9', "server-0-of-2.t.oet: version is 9, but the file has 1"),
        ('"dim": 4', '"dim": 5', "spec.dim is 5, but the file has 4"),
        ('"name": "adagrad"', '"name": "adam"', "spec.optimizer.name is 'adam', but the file has 'adagrad'"),
        ('"servers": 2', '"servers": 3', "servers is 3, but the file has 2"),
        ('"rows": ', '"rows": 1', "rows is 1"),
        ('of-2.t.oet.filter"', 'of-3.t.oet.filter"', "filter is {"),
    ):
        assert before in whole
        at = whole.rindex(before) if "filter" in before else whole.index(before)
        file.write_text(whole[:at] + after + whole[at + len(before) :])
        said = tool("verify", path, expect=1)
        assert f"{file}: tables: server-" in said
        assert words in said


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["diff", SAMPLE], ["reshard", "--servers=2"]])
def test_what_is_no_checkpoint_is_a_clear_error(tmp_path, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"\x7fELF" + bytes(100))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text('{"format": 1, "step": 1, "files": {"a": 3}}')
    for name in ("empty", "file", "broken", "absent"):
        assert str(tmp_path / name) in tool(*command, tmp_path / name, expect=1)


def test_rows_in_the_storage_of_servers_are_not_in_files(tmp_path):
    pool = {"checkpoint": 5, "servers": 2, "storage": "dram_pmem", "rows": {"a": 3, "b": 4}}

    def write(path: Path):
        (path / "dense").write_bytes(b"weights")
        return {"tables": [], "pool": pool}

    path = checkpoint.publish(tmp_path, 5, write)
    assert "rows in the storage of 2 servers (dram_pmem): 7 rows of 2 tables" in tool("inspect", path)
    assert "rows in the storage of 2 servers (dram_pmem)" in tool("inspect", tmp_path)
    assert json.loads(tool("inspect", path, "--json"))["pool"] == pool
    for command in (("diff", SAMPLE, path), ("diff", path, path), ("reshard", path, "--servers", 3)):
        said = tool(*command, expect=1)
        assert f"{path} has its rows in the storage of 2 servers" in said
        assert said.count("\n") == 1
    assert checkpoint.published(tmp_path) == [path]


@pytest.mark.parametrize("servers", [0, -1, 1025, 5_000_000_000])
def test_reshard_refuses_numbers_of_servers_out_of_range(tmp_path, servers):
    said = tool("reshard", SAMPLE, f"--servers={servers}", "--output", tmp_path / "new", expect=1)
    assert said == f"error: {servers} servers are not between 1 and 1024\n"
    assert not (tmp_path / "new").exists()


def test_inspect_says_that_a_file_is_missing(tmp_path):
    shutil.copytree(SAMPLE, tmp_path / SAMPLE.name)
    (tmp_path / SAMPLE.name / "server-1-of-2.known.oet").unlink()
    assert "server-1-of-2.known.oet: No such file" in tool("inspect", tmp_path / SAMPLE.name, expect=1)
    assert "damaged; see oeprov checkpoint verify" in tool("inspect", tmp_path)


def test_diff_counts_rows_and_how_far_they_moved(run, tmp_path):
    with new_client(3) as client:  # the rows of checkpoint 2 on other servers, then one push
        client.restore(*checkpoint.chain(run / "checkpoints" / "step-0000000002"))
        client.save(tmp_path)
        assert tool("diff", run / "checkpoints" / "step-0000000002", tmp_path).endswith("no difference\n")
        push(client, range(38, 42), rate=0.25)
        client.save(tmp_path)
    out = tool("diff", run / "checkpoints" / "step-0000000002", tmp_path, "--memory=1", "--json", expect=2)
    found = json.loads(out)["tables"]["known"]
    assert found["rows"] == [40, 42]
    assert (found["only_before"], found["only_after"], found["changed"]) == (0, 2, 2)
    # Adagrad from an accumulator of 1.1 to one of 2.1.
    assert found["weights"] == pytest.approx(0.25 / np.sqrt(2.1), rel=1e-5)
    assert found["state"] == pytest.approx(1)
    both = tool("diff", SAMPLE, tmp_path, expect=2)
    assert "table known: input_dim was 50, is 100" in both
    assert "table wide/emb: dim was 3, is 4" in both
    assert "dense/weights differs" in tool("diff", run / "checkpoints" / "step-0000000002", run, expect=2)


def test_reshard_writes_the_same_rows_for_other_servers(run, tmp_path):
    newest = checkpoint.published(run / "checkpoints")[-1]
    whole = rows(checkpoint.chain(newest))
    path = Path(json.loads(tool("reshard", run, "--servers", 3, "--output", tmp_path, "--json"))["path"])
    assert path == tmp_path / newest.name
    assert len(list(path.glob("server-*-of-3.known.oet"))) == 3
    assert "no problem" in tool("verify", path)
    assert "no difference" in tool("diff", newest, path)
    found = checkpoint.read(path)
    assert (found.step, found.base, found.manifest["training"]) == (3, None, {"note": "kept"})
    assert {entry["servers"] for entry in found.manifest["tables"]} == {3}
    for servers in (1, 3):
        assert rows([path], servers) == whole
    # Beside the old one it is the newest of its step, and nothing is removed for it.
    again = cli.reshard(path, 2)
    assert again.name == "step-0000000003.1"
    assert checkpoint.published(tmp_path) == [path, again]
    assert rows([again]) == whole


FILTERED = (
    TableSpec("counted", 3, admission={"name": "counter", "filter_freq": 3}),
    TableSpec(
        "bloom",
        3,
        admission={
            "name": "cbf",
            "filter_freq": 3,
            "max_element_size": 20_000,
            "false_positive_probability": 0.001,
        },
    ),
)


def filtered_client(servers: int) -> Client:
    client = Client.in_process(servers=servers)
    for spec in FILTERED:
        client.create_table(spec)
    return client


@pytest.mark.parametrize("servers", [1, 3])
def test_reshard_keeps_what_filters_have_counted(tmp_path, servers):
    """Keys that were pushed once or twice before are admitted when they were without the checkpoint."""
    directory = tmp_path / "checkpoints"
    with filtered_client(2) as client:
        push(client, range(3000))
        base = publish(client, directory, 1)
        push(client, range(2000))
        newest = publish(client, directory, 2, base)  # filters of an increment are whole
        push(client, range(1000))
        push(client, range(1500))
        wanted = {table: np.sort(client.export_rows(table)[0]) for table in (0, 1)}
    assert wanted[0].tolist() == list(range(1500))
    path = cli.reshard(newest, servers, tmp_path / "other")
    assert "no problem" in tool("verify", path)
    files = sorted(file.name for file in path.glob("*-of-*"))
    assert len(files) == 2 * 2 * servers, "rows and filters of two tables"
    assert all(f"-of-{servers}." in name for name in files)
    with filtered_client(servers) as client:
        client.restore(path)
        assert [len(client.export_rows(table)[0]) for table in (0, 1)] == [0, 0]
        push(client, range(1000))
        assert np.sort(client.export_rows(0)[0]).tolist() == list(range(1000))
        push(client, range(1500))
        for table, keys in wanted.items():
            np.testing.assert_array_equal(np.sort(client.export_rows(table)[0]), keys)


@pytest.mark.parametrize("name", ["manifest.json", "extra", "server-0-of-1.t.oet", "more.oet"])
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path, name, kind):
    """A checkpoint that somebody else made may have anything in the place of a file."""
    client = new_client()
    push(client, range(5))
    path = publish(client, tmp_path, 1)
    client.close()
    (path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to("/dev/zero")
    if name == "extra":
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["extra"] = {"bytes": 1, "sha256": "0"}
        (path / "manifest.json").write_text(json.dumps(manifest))
    said = tool("verify", path, expect=1)
    assert f"{path / name}" in said or f"{path} is not a checkpoint: {name}" in said
    assert "not a regular file" in said
    tool("reshard", path, "--servers", "2", expect=1)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 10**40},
        {"step": -1},
        {"files": {"": {"bytes": 1, "sha256": "0"}}},
        {"files": {"a\0b": {"bytes": 1, "sha256": "0"}}},
        {"base": {"name": "step-0000000001", "sha256": "0"}},
    ],
)
def test_manifests_that_cannot_be_are_refused(tmp_path, change):
    client = new_client()
    push(client, range(5))
    path = publish(client, tmp_path, 1)
    client.close()
    file = path / "manifest.json"
    text = file.read_text()
    for damaged in (json.dumps({**json.loads(text), **change}), "[" * 200_000, '{"files": ' * 100_000):
        file.write_text(damaged)
        tool("verify", path, expect=1)
        assert "Traceback" not in tool("reshard", path, "--servers", "2", expect=1)


def test_reshard_does_not_look_for_pools(tmp_path):
    """A shared directory may have those of anybody."""
    pool = tmp_path / "of somebody else"
    pool.mkdir()
    (pool / "oe-0123456789abcdef-super.pool").write_bytes(b"damaged")
    said = tool("reshard", tmp_path, "--servers", "2", expect=1)
    assert "oe-" not in said
    assert f"{tmp_path} is not a checkpoint: it has no manifest.json" in said


def test_the_former_name_of_the_command_works_with_a_notice(tmp_path):
    command = [sys.executable, "-m", "oe_runtime.checkpoint_tools", "verify", str(tmp_path / "nothing")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    notice, error = done.stderr.splitlines()
    assert notice == "note: oe_runtime.checkpoint_tools is now oe_runtime.checkpoint"
    assert error.endswith("there is no such path")
