"""Vaulted inventories: passwords from files, programs, people; one sentence without; values stay secret."""

import inspect
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ansible.parsing.vault import VaultLib, VaultSecret

from provision.cli import main as cli
from provision.cluster import share
from provision.cluster.errors import InventoryError, TrainingError
from provision.hosts import playbook
from provision.inventory import vault
from provision.inventory.loader import load
from provision.jobs import jobspec

PASSWORD, LABEL = "open sesame", "prod"
SECRET = "jemalloc-of-nobody-else"
INVENTORY = """\
all:
  vars:
    runtime_packages: {packages}
    training_data: generate:1000
  children:
    parameter_servers: {{hosts: {{one: }}}}
    workers: {{hosts: {{one: }}}}
  hosts:
    one: {{ansible_connection: local, oeprov_kind: local, runtime_extra: none}}
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("ANSIBLE_VAULT"):
            monkeypatch.delenv(name)
    yield
    vault.want((), False)
    vault._values.clear()
    vault._secrets.clear()
    vault._passwords.clear()


def encrypted(text: str) -> str:
    return str(VaultLib([(LABEL, VaultSecret(PASSWORD.encode()))]).encrypt(text).decode())


def inline(directory: Path) -> Path:
    path = directory / "inventory.yml"
    value = encrypted(SECRET).rstrip().replace("\n", "\n          ")
    path.write_text(INVENTORY.format(packages=f"\n      - !vault |\n          {value}"))
    return path


def whole(directory: Path) -> Path:
    path = directory / "inventory.yml"
    path.write_text(encrypted(INVENTORY.format(packages=f"[{SECRET}]")))
    return path


def beside(directory: Path) -> Path:
    path = directory / "inventory.yml"
    path.write_text(INVENTORY.format(packages='["{{ vault_package }}"]'))
    (directory / "group_vars" / "all").mkdir(parents=True)
    (directory / "group_vars" / "all" / "vault.yml").write_text(encrypted(f"vault_package: {SECRET}\n"))
    return path


WAYS = [inline, whole, beside]


def password(directory: Path, text: str = PASSWORD) -> Path:
    path = directory / "password"
    path.write_text(text + "\n")
    return path


@pytest.mark.parametrize("way", WAYS)
def test_the_password_comes_from_a_file_a_program_or_by_its_label(
    tmp_path: Path, way: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = way(tmp_path)  # type: ignore[operator]
    file = password(tmp_path)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho '{PASSWORD}'\n")
    program.chmod(0o755)
    client = tmp_path / "keys-client"  # Ansible calls it with --vault-id LABEL
    client.write_text(f'#!/bin/sh\n[ "$1 $2" = "--vault-id {LABEL}" ] && echo "{PASSWORD}"\n')
    client.chmod(0o755)
    other = tmp_path / "other"
    other.write_text("wrong\n")
    for ids in (
        [str(file)],
        [str(program)],
        [f"other@{password(tmp_path)}"],
        [f"{LABEL}@{client}"],
        [f"dev@{other}", f"{LABEL}@{program}"],
    ):
        vault.want(ids, False)
        assert load(path).hosts["one"].runtime.packages == [SECRET]
    vault.want((), False)
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("ANSIBLE_VAULT_PASSWORD_FILE", "password"),
        ("ANSIBLE_VAULT_IDENTITY_LIST", "a@password"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert load(path).hosts["one"].runtime.packages == [SECRET]


@pytest.mark.parametrize("way", WAYS)
def test_without_the_password_there_is_one_sentence(
    tmp_path: Path, way: object, capfd: pytest.CaptureFixture[str]
) -> None:
    path = way(tmp_path)  # type: ignore[operator]
    where = tmp_path / "group_vars" / "all" / "vault.yml" if way is beside else path
    words = ["inventory", "check", "-i", str(path)]
    assert cli.run(words) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"error: {where}:")
    assert err.endswith(f"is vaulted, and no password is known: {vault.HOW}\n")
    assert err.count("\n") == 1
    assert cli.run([*words, "--vault-id", str(password(tmp_path, "wrong"))]) == 1
    assert f"is vaulted, and none of the 1 password(s) opens it: {vault.HOW}\n" in capfd.readouterr().err
    assert cli.run([*words, "--vault-id", f"{LABEL}@{tmp_path / 'none'}"]) == 1
    assert capfd.readouterr().err.startswith(f"error: vault password file {tmp_path / 'none'}: no such file")
    assert cli.run([*words, "--vault-id", str(password(tmp_path))]) == 0
    out, err = capfd.readouterr()
    assert "fine: 1 host, 1 in parameter_servers, 1 in workers" in out
    assert err == ""


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "Invalid vault password was provided"),
        ("#!/no/such\n", "No such file"),
        ("#!/bin/sh\necho no key in the keyring >&2; exit 2\n", "returned non-zero (2)"),
    ],
)
def test_a_password_file_that_gives_none(
    tmp_path: Path, text: str, piece: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_text(text)
    program.chmod(0o755 if text else 0o644)
    assert cli.run(["inventory", "check", "-i", str(whole(tmp_path)), "--vault-id", str(program)]) == 1
    err = capfd.readouterr().err
    (line,) = [line for line in err.splitlines() if line != "no key in the keyring"]  # its own words
    assert line.startswith(f"error: vault password file {program}: ")
    assert piece in line


@pytest.mark.parametrize("way", [inline, beside])
def test_a_secret_is_not_written_into_a_job(tmp_path: Path, way: object) -> None:
    """Neither directly nor by a variable; on the command line, the setting may be replaced."""
    path = way(tmp_path)  # type: ignore[operator]
    text = path.read_text().replace("runtime_packages:", "training_script_arguments:")
    path.write_text(text.replace("training_data: generate:1000", "training_script: train.py"))
    vault.want([str(password(tmp_path))], False)
    found = load(path)
    with pytest.raises(TrainingError) as caught:
        jobspec.check_secrets(found, {})
    assert str(caught.value).startswith(f"{path}: training_script_arguments: is a secret of the vault, which")
    assert SECRET not in str(caught.value)
    jobspec.check_secrets(found, {"script_arguments": []})


def test_a_wholly_vaulted_inventory_starts_jobs_but_its_values_are_not_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = whole(tmp_path)
    cluster = "".join(
        f"    kubernetes_{key}: {value}\n"
        for key, value in {
            "claim": "ours-alone",
            "storage_class": "fast",
            "storage_size": "5 GiB",
            "server_image": "our-server:1",
            "worker_image": "our-worker:1",
        }.items()
    )
    content = INVENTORY.format(packages="[]").replace("generate:1000", "/shared/clicks-of-us")
    content = content.replace("  children:", cluster + "  children:")
    path.write_text(encrypted(content))
    words = ["-i", str(path), "--vault-id", str(password(tmp_path))]
    assert cli.run(["manifests", *words]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "the manifests would show values of a vaulted file" in err
    jobspec.check_secrets(load(path), {})


def test_addresses_may_be_vaulted(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yml"
    value = encrypted("198.51.100.7").rstrip().replace("\n", "\n          ")
    text = INVENTORY.format(packages="[]").replace(
        "ansible_connection: local, oeprov_kind: local", "oeprov_kind: cpu"
    )
    path.write_text(
        text.replace("all:\n  vars:\n", f"all:\n  vars:\n    ansible_host: !vault |\n          {value}\n")
    )
    vault.want([str(password(tmp_path))], False)
    found = load(path)
    assert found.hosts["one"].address == "198.51.100.7"
    jobspec.check_secrets(found, {})


def test_modules_do_not_log_their_arguments_on_hosts(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-config")), "dump", "--only-changed"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_CONFIG": str(share.root() / "ansible.cfg"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "DEFAULT_NO_TARGET_SYSLOG" in done.stdout
    assert playbook._environment()["ANSIBLE_NO_TARGET_SYSLOG"] == "True"


def test_nobody_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    vault.want((), True)
    with pytest.raises(InventoryError, match="no terminal to ask at"):
        load(whole(tmp_path))


def test_a_vaulted_value_of_others_needs_no_password(tmp_path: Path) -> None:
    path = inline(tmp_path)
    path.write_text(path.read_text().replace("runtime_packages:", "their_packages:"))
    assert load(path).hosts["one"].runtime.packages == []


@pytest.mark.parametrize("way", WAYS)
def test_no_vaulted_value_is_printed(
    tmp_path: Path, way: object, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = way(tmp_path)  # type: ignore[operator]
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(password(tmp_path)))
    monkeypatch.setenv("COLUMNS", "60")
    more = ["-i", str(path), "--state-dir", str(tmp_path / "state")]
    for words in (
        ["plan", "--commands"],
        ["plan", "--json"],
        ["inventory", "show", "--json"],
        ["bootstrap", "--check"],
        ["doctor"],
        ["report", "--output", str(tmp_path / "report.html")],
    ):
        cli.run([*words, *more])
        out, err = capfd.readouterr()
        assert SECRET not in out + err, words
        assert vault.HIDDEN in out or words[0] in ("report", "doctor")
        assert "error" not in err
    assert SECRET not in (tmp_path / "report.html").read_text()
    if way is not inline:
        return
    path.write_text(path.read_text().replace("runtime_packages: \n      - !vault", "pmem_mode: !vault"))
    assert cli.run(["inventory", "check", "-i", str(path)]) == 1
    err = capfd.readouterr().err
    assert "pmem_mode: found '(vaulted)'" in err
    assert SECRET not in err


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_hosts_are_set_up_from_a_vaulted_inventory(tmp_path: Path, way: object) -> None:
    """By a file that is named relative to where oeprov is called; Ansible's run opens it too."""
    path = way(tmp_path)  # type: ignore[operator]
    password(tmp_path)
    content = INVENTORY.format(packages="[]").replace("generate:1000", SECRET)
    if way is whole:
        path.write_text(encrypted(content))
    argv = ["bootstrap", "-i", path.name, "--yes", "--state-dir", "state", "--vault-id", f"{LABEL}@password"]
    if way is not whole:  # what needs a package cannot be done here
        text = path.read_text()
        path.write_text(text.replace("runtime_packages", "kernel_arguments"))
    done = subprocess.run(
        [sys.executable, "-m", "provision.cli", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "state" / "pmem0").is_dir()
    for file in (tmp_path / "state").rglob("*"):
        assert not file.is_file() or SECRET not in file.read_text(errors="replace"), file


@pytest.mark.process
def test_a_person_is_asked_once(tmp_path: Path) -> None:
    path = whole(tmp_path)
    path.write_text(encrypted(INVENTORY.format(packages="[]")))
    parent, child = pty.openpty()
    argv = [sys.executable, "-m", "provision.cli", "bootstrap", "-i", str(path), "--ask-vault-pass", "--yes"]
    with subprocess.Popen(
        [*argv, "--state-dir", str(tmp_path / "state")],
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
    ) as running:
        os.close(child)
        said = b""
        while b"password (default):" not in said:  # what is typed before is thrown away
            said += os.read(parent, 4096)
        os.write(parent, f"{PASSWORD}\n".encode())
        try:
            while part := os.read(parent, 4096):
                said += part
        except OSError:
            pass  # the end
        os.close(parent)
    text = said.decode()
    assert running.returncode == 0, text
    assert text.count("Vault password (default):") == 1
    assert PASSWORD not in "".join(
        file.read_text(errors="replace") for file in (tmp_path / "state").rglob("*") if file.is_file()
    )
    assert (tmp_path / "state" / "pmem0").is_dir()


def commands(app: typer.Typer) -> Iterator[Any]:
    """The functions of all commands."""
    yield from (item.callback for item in app.registered_commands)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance)


def test_every_command_with_an_inventory_has_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    reading = {}
    for command in commands(cli.app):
        options = inspect.signature(command).parameters
        if "inventory" in options:
            reading[command.__name__] = {"vault_id", "ask_vault_pass"} <= options.keys()
    assert len(reading) >= 15
    assert all(reading.values()), reading
    assert cli.run(["resume", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--vault-id" in shown
    assert "--ask-vault-pass" in shown
    cli.run(["inventory", "schema"])
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["group_vars/workers.yml", "host_vars/one.yml"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "a: 1\n b: [\n",
            ":2:3: is not YAML: mapping values are not allowed in this context; check this line and the one "
            "before",
        ),
        ("training_dim: {{ x }}\n", ":1:15: is not YAML: "),
        ("- a\n", ": expected `key: value` lines, found something else"),
    ],
)
def test_a_file_beside_the_inventory_is_named_with_its_line(
    tmp_path: Path, text: str, words: str, name: str
) -> None:
    path = tmp_path / "inventory.yml"
    path.write_text(INVENTORY.format(packages="[]"))
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(InventoryError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{tmp_path / name}{words}")
    assert "\n" not in str(caught.value)


def test_the_line_of_the_inventory_itself(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yml"
    path.write_text("all:\n  vars:\n    a: 1\n   b: 2\n")
    with pytest.raises(InventoryError, match=r"inventory\.yml:4:4: is not YAML: "):
        load(path)
    path.write_bytes(b"all:\n  vars: {a: \xff}\n")
    with pytest.raises(InventoryError, match=r"inventory\.yml:2: is not YAML: .*UTF-8"):
        load(path)
