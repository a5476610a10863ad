"""OpenEmbedding itself: PyPI's package, its server and its Horovod example, on loopback.

Eight minutes of downloads and compiling on two busy cores, so by hand, with a Python 3.8 in PATH or pyenv and
a checkout of v0.1.2 for its scripts:

    OEPROV_OPENEMBEDDING=… python -m pytest -m slow tests/provision/jobs/test_openembedding_real.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from other_pythons import find_python

PYTHON_3_8 = find_python("3.8")
SOURCES = os.environ.get("OEPROV_OPENEMBEDDING", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not PYTHON_3_8 or not SOURCES, reason="no Python 3.8, or OEPROV_OPENEMBEDDING is not set"
    ),
]


def test_pypis_package_is_installed_and_trains_with_its_server(tmp_path: Path) -> None:
    here = {
        "ansible_connection": "local",
        "oeprov_kind": "local",
        "pmem_mode": "none",
        "runtime_venv": str(tmp_path / "openembedding"),
        "runtime_python": str(PYTHON_3_8),
        "runtime_sources": SOURCES,
    }
    job = {
        "runtime_flavor": "openembedding",
        "training_model": "wdl",
        "training_data": f"{SOURCES}/examples/train100.csv",
        "training_batch_size": 20,
        "training_epochs": 2,
        "worker_count": 2,
    }
    groups = {name: {"hosts": {"localhost": None}} for name in ("parameter_servers", "workers")}
    inventory = {"all": {"vars": job, "hosts": {"localhost": here}, "children": groups}}
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(inventory))

    def oeprov(*words: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).parent / "oeprov"), *words, "-i", "inventory.yml"],
            cwd=tmp_path,
            env={**os.environ, "OEPROV_STATE_DIR": str(tmp_path / "state"), "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "1 host converged" in oeprov("bootstrap", "--yes")
    assert "nothing to do" in oeprov("plan")
    said = oeprov("launch-training")
    assert "server-0 listens on 127.0.0.1:" in said
    assert "done" in said
    (log,) = tmp_path.glob("state/jobs/*/logs/worker-0.log")
    assert "hvd.size():2" in log.read_text()
