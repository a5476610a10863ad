"""Looks at every host at once, one round trip a host.

The node package travels as a zip inside a small script on the standard input of ``python3 -``: nothing is
installed on the node. This machine is looked at in the same way, by a child process.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from provision import share
from provision.errors import HostError
from provision.inventory import Host, Inventory
from provision.node.__main__ import MARKER
from provision.node.state import State

CONNECT_TIMEOUT = 10
COMMAND_TIMEOUT = 120
MOST_AT_ONCE = 64
_SCRIPT = """\
import base64, json, os, shutil, sys, tempfile
if sys.version_info < (3, 6):
    sys.exit("Python 3.6 or newer is needed, this is " + sys.version.split()[0])
directory = tempfile.mkdtemp(prefix="oeprov-")
try:
    path = os.path.join(directory, "node.zip")
    with open(path, "wb") as archive:
        archive.write(base64.b64decode("{archive}"))
    sys.path.insert(0, path)
    from oeprov_node.__main__ import main
    main(json.loads(base64.b64decode("{wanted}").decode()))
finally:
    shutil.rmtree(directory, ignore_errors=True)
"""


@cache
def archive() -> bytes:
    """The node package as a zip, importable as ``oeprov_node``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(share.node_package().glob("*.py")):
            file.writestr(f"oeprov_node/{path.name}", path.read_bytes())
    return buffer.getvalue()


def payload(wanted: dict[str, Any]) -> str:
    """The script for ``python3 -`` that prints the state of the machine it runs on."""
    return _SCRIPT.format(
        archive=base64.b64encode(archive()).decode(),
        wanted=base64.b64encode(json.dumps(wanted).encode()).decode(),
    )


def parse(host: str, text: str) -> State:
    """The state in the output of the payload; HostError when there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith(MARKER):
            try:
                answer = json.loads(line[len(MARKER) :])
                if "error" in answer:
                    raise HostError(host, f"cannot be observed: {answer['error']}")
                return State.from_dict(answer["state"])
            except (ValueError, KeyError, TypeError) as error:
                raise HostError(host, f"sent a state that cannot be read: {error}") from None
    said = " / ".join(line.strip() for line in text.splitlines()[-3:] if line.strip())
    raise HostError(host, f"sent no state back{': ' + said if said else ''}")


def observe(inventory: Inventory) -> dict[str, State | HostError]:
    """The state of every host, or why it could not be seen; in the inventory's order."""
    hosts = list(inventory.hosts.values())
    with ThreadPoolExecutor(max_workers=min(len(hosts), MOST_AT_ONCE)) as pool:
        return dict(zip(inventory.hosts, pool.map(_try_host, hosts), strict=True))


def _try_host(host: Host) -> State | HostError:
    try:
        return observe_host(host)
    except HostError as error:
        return error


def observe_host(host: Host) -> State:
    """The state of one host; HostError says why it could not be seen and what to do."""
    script = payload(host.desired().to_dict())
    return parse(host.name, _here(host, script) if host.connection == "local" else _there(host, script))


def _here(host: Host, script: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-"], input=script, capture_output=True, text=True, timeout=COMMAND_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise HostError(host.name, f"did not answer within {COMMAND_TIMEOUT} s") from None
    if done.returncode:
        raise HostError(host.name, f"cannot be observed: {_last_line(done.stderr)}")
    return done.stdout


def _there(host: Host, script: str) -> str:
    from provision import remote

    command = f"sudo -n {host.python} -" if host.become else f"{host.python} -"
    code, out, err = remote.run(host, command, script, CONNECT_TIMEOUT, COMMAND_TIMEOUT)
    if code == 127:
        raise HostError(
            host.name,
            f"has no {host.python}; install Python 3, or set ansible_python_interpreter to its path",
        )
    if code and host.become and "sudo:" in err:
        raise HostError(host.name, f"sudo refused ({_last_line(err)}); it must work without a password")
    if code:
        raise HostError(host.name, f"cannot be observed: {_last_line(err) or f'exit status {code}'}")
    return out


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
