"""Ansible's connection variables of a host, as options of the OpenSSH client that oeprov runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean

from provision.cluster.inventory import FirstLogin

_SUDO = "oeprov becomes root by `sudo -n`, which `oeprov adopt` sets up; remove this line"
_AGENT = "load the key into ssh-agent (ssh-add FILE) and remove this line"
_ONLY_SSH = "oeprov runs the `ssh` that is on the PATH; remove this line"
# Variable → values that are accepted because they change nothing (None: no value is), and what to do.
_REFUSED: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "ansible_private_key": (None, "name a file in ansible_ssh_private_key_file instead"),
    "ansible_ssh_private_key": (None, "name a file in ansible_ssh_private_key_file instead"),
    "ansible_private_key_passphrase": (None, _AGENT),
    "ansible_ssh_private_key_passphrase": (None, _AGENT),
    "ansible_ssh_pkcs11_provider": (None, _AGENT),
    "ansible_ssh_host": (None, "is an old name; use ansible_host"),
    "ansible_ssh_port": (None, "is an old name; use ansible_port"),
    "ansible_ssh_user": (None, "is an old name; use ansible_user"),
    "ansible_private_key_file": (None, "is another name; use ansible_ssh_private_key_file"),
    "ansible_ssh_executable": (("ssh",), _ONLY_SSH),
    "ansible_sudo_pass": (None, "is an old name; use ansible_become_password"),
    "ansible_become_method": (
        ("sudo", "ansible.builtin.sudo", "su", "ansible.builtin.su", "community.general.su"),
        "oeprov becomes root by sudo; `oeprov adopt` sets that up by sudo or su",
    ),
    "ansible_become_user": (("root",), "oeprov becomes root only"),
    "ansible_become_exe": (("sudo",), _SUDO),
    "ansible_become_flags": (("-n", "-H -S -n", ""), _SUDO),
}
# Ansible's names, the first that is set counts; `oeprov adopt` alone uses them.
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")
_BECOME_PASSWORDS = ("ansible_become_password", "ansible_become_pass")
_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_KEY_CHECKING = ("ansible_host_key_checking", "ansible_ssh_host_key_checking")
KEYS = (
    "ansible_host",
    "ansible_port",
    "ansible_user",
    "ansible_connection",
    "ansible_ssh_private_key_file",
    "ansible_become",
    "ansible_python_interpreter",
    *_ARGUMENTS,
    *_KEY_CHECKING,
    *_PASSWORDS,
    *_BECOME_PASSWORDS,
    *_REFUSED,
)
"""All connection variables that oeprov reads."""


def refusals(variables: Mapping[str, Any]) -> dict[str, str]:
    """Variable → why oeprov refuses it. The values are not repeated, since they may be secret."""
    found = {}
    for key, (harmless, why) in _REFUSED.items():
        value = variables.get(key)
        if value is not None and str(value).strip() not in (harmless or ("",)):
            found[key] = why
    for key in _ARGUMENTS:
        try:
            shlex.split(str(variables.get(key) or ""))
        except ValueError as error:
            found[key] = f"cannot be split into arguments: {error}"
    for key in (*_PASSWORDS, *_BECOME_PASSWORDS):
        if isinstance(variables.get(key), (int, float)):  # 0123 would be 83, and a lock-out may follow
            found[key] = (
                "is read as a number or a truth value, which may differ from what you wrote: put it in "
                "quotes ('…' in YAML, \"'…'\" in an INI file)"
            )
    return found


def first_login(variables: Mapping[str, Any]) -> FirstLogin:
    """What ``oeprov adopt`` logs in and becomes root with."""

    def password(names: tuple[str, ...]) -> str:
        return next((str(variables[key]) for key in names if variables.get(key) is not None), "")

    method = str(variables.get("ansible_become_method") or "sudo").rsplit(".", 1)[-1]
    return FirstLogin(password(_PASSWORDS), password(_BECOME_PASSWORDS), method)


# Ansible logs in and becomes root as our own ssh does: with keys and `sudo -n`.
WITHOUT_PASSWORDS = {
    **dict.fromkeys((*_PASSWORDS, *_BECOME_PASSWORDS), ""),
    "ansible_become_method": "sudo",
}
"""Variables for Ansible's runs on a host with a ``first_login``."""


def ssh_arguments(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Options for ``ssh`` in Ansible's order; the first of a kind wins. Unset variables give none."""
    common = [shlex.split(str(variables.get(key) or "")) for key in _ARGUMENTS]
    given = list(common[0])
    if any(
        variables.get(key) is not None and not boolean(str(variables[key]), strict=False)
        for key in _KEY_CHECKING
    ):
        given.append("-oStrictHostKeyChecking=no")
    if variables.get("ansible_port"):
        given.append(f"-oPort={variables['ansible_port']}")
    if variables.get("ansible_ssh_private_key_file"):
        given.append(f'-oIdentityFile="{Path(str(variables["ansible_ssh_private_key_file"])).expanduser()}"')
    if variables.get("ansible_user"):
        given.append(f'-oUser="{variables["ansible_user"]}"')
    return (*given, *common[1], *common[2])
