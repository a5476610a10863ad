"""`oeprov destroy` over real SSH and Ansible: what goes, what stays, a host that is down, a second time."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from converged import VENV, inventory, layer
from ssh_hosts import SshHost, SshHosts, why_not

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),
]
HERE = Path(__file__).parent
JOBS = "/var/lib/oeprov/jobs"
DONE, SAVED = "ended-20261122-101500", "deepfm-20261122-101500"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshHosts]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    files = layer(tmp_path / "layer")
    for name in ("systemctl", "journalctl"):
        path = files / "usr" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "systemd_standin.py", path)
        path.chmod(0o755)
    for job in (DONE, SAVED):
        directory = files / JOBS.lstrip("/") / job
        (directory / "run").mkdir(parents=True)
        (directory / "token").write_text("x\n")
    saved = files / JOBS.lstrip("/") / SAVED / "run" / "checkpoints" / "step-0000000010"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    unit = files / "etc/systemd/system" / f"oeprov-{DONE}-server-0.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    names = ["etc/oeprov/memory.env", "var/lib/oeprov/wheels/x.whl", "var/lib/oeprov/bundle/pip/y"]
    names += ["var/lib/oeprov/scripts/x.tar", "var/lib/oeprov/environments/x/bin/python"]
    for name in names:
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text("x\n")
    files.chmod(0o755)
    with SshHosts(tmp_path / "hosts", 2, layer=files) as made:
        yield made


def destroy(directory: Path, *words: str, code: int) -> str:
    argv = [sys.executable, "-m", "provision.cli", "destroy", "--state-dir", str(directory / "state"), *words]
    environment = {"cwd": directory, "stdin": subprocess.DEVNULL}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **environment)  # type: ignore[call-overload]
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return str(done.stdout + done.stderr)


def there(host: SshHost) -> list[str]:
    """What of oeprov's is on the host."""
    script = (
        f"for path in {VENV} /etc/oeprov /var/lib/oeprov/wheels /var/lib/oeprov/scripts "
        f"/var/lib/oeprov/environments {JOBS}/*; "
        "do [ -e $path ] && echo $path; done; "
        "ls /etc/systemd/system | grep ^oeprov-; true"
    )
    return host.enter("sh", "-c", script).split()


def test_destroy(tmp_path: Path, hosts: SshHosts) -> None:
    path = str(inventory(tmp_path / "inventory.yml", hosts))
    one, two = hosts
    before = [host.written() for host in hosts]
    assert "no terminal to ask at: add --yes" in destroy(tmp_path, "-i", path, code=1)
    shown = destroy(tmp_path, "-i", path, "--check", "--json", code=2)
    report = json.loads(next(line for line in shown.splitlines() if line.startswith("{")))
    steps = [step["id"] for step in report["pending"][0]["steps"]]
    assert steps == [f"units-{DONE}", f"files-{DONE}", "memkind-forget", "remove-files"]
    assert [host.written() for host in hosts] == before

    said = destroy(tmp_path, "-i", path, "--yes", "--limit", one.name, code=0)
    assert f"✓ {one.name}: left: job {SAVED} (1 checkpoint)" in said
    assert there(one) == [f"{JOBS}/{SAVED}"]
    assert len(there(two)) == 8, "the other host is as it was"
    assert one.enter("cat", f"{JOBS}/{SAVED}/run/checkpoints/step-0000000010/manifest.json") == "{}"

    two.stop()
    consent = f"{one.name}:job/{SAVED}"
    said = destroy(tmp_path, "-i", path, "--yes", "--consent", consent, code=1)
    assert f"✓ {one.name}: nothing that oeprov made is left, except system packages and kernels" in said
    assert f"✗ {two.name}: " in said
    assert "refuses connections" in said
    assert there(one) == []
    assert one.enter("sh", "-c", "ls -d /var/lib/oeprov || :") == ""
    two.start()
    again = destroy(tmp_path, "-i", path, "--yes", "--limit", one.name, "--consent", consent, code=0)
    assert "nothing to do" in again
