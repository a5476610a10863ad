"""Vaulted inventories: finding their passwords, and keeping their values out of all output.

Passwords are Ansible's: ``ANSIBLE_VAULT_PASSWORD_FILE``, ``ANSIBLE_VAULT_IDENTITY_LIST`` or ansible.cfg, and
``--vault-id LABEL@SOURCE`` and ``--ask-vault-pass`` of our commands.
"""

from __future__ import annotations

import getpass
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from provision.cluster.errors import InventoryError

HOW = "name a file in ANSIBLE_VAULT_PASSWORD_FILE, or add --vault-id LABEL@FILE or --ask-vault-pass"
HIDDEN = "(vaulted)"
_HEADER = b"$ANSIBLE_VAULT"
_PROMPTS = ("prompt", "prompt_ask_vault_pass")
_SHORTEST = 4  # characters; hiding shorter words would spoil every text
_SHORTEST_PART = 8  # characters; a shorter secret counts as a whole value only
_FAILURE = re.compile(r"vault|undecryptable", re.IGNORECASE)


class Source(NamedTuple):
    """A password: its label, and a file, a program or ``prompt``."""

    label: str
    place: str


_wanted: list[Source] = []  # by the command line
_passwords: dict[Source, Any] = {}  # typed by the user, as Ansible's VaultSecret
_values: set[str] = set()  # vaulted texts that were read
_secrets: set[str] = set()  # those of them that are no settings of a wholly vaulted file


def want(ids: Sequence[str], ask: bool) -> None:
    """Set the sources that the command line names; replaces those of an earlier call."""
    _wanted[:] = [_source(text) for text in ids] + [_source("prompt")] * ask


def _source(text: str) -> Source:
    label, at, place = text.rpartition("@")
    place = place if place in _PROMPTS else str(Path(place).expanduser().absolute())
    return Source(label if at and label else "default", place)


def sources() -> list[Source]:
    """All known sources of passwords, in Ansible's order."""
    from ansible import constants

    listed = constants.config.get_config_value("DEFAULT_VAULT_IDENTITY_LIST") or []
    file = _default_file()
    found = [_source(str(text)) for text in listed] + _wanted
    return list(dict.fromkeys([*found, *([Source("default", file)] if file else [])]))


def unlock(loader: Any) -> None:
    """Give Ansible's loader the passwords; InventoryError when one cannot be read."""
    secrets = [(item.label, _password(item, loader)) for item in sources()]
    loader.set_vault_secrets(secrets)
    try:
        from ansible.parsing.vault import VaultSecretsContext  # of ansible-core 2.19
    except ImportError:  # pragma: no cover - depends on the ansible-core that is installed
        return
    current = VaultSecretsContext.current(optional=True)
    if current is None:
        VaultSecretsContext.initialize(VaultSecretsContext(secrets))
    else:
        current.secrets = secrets


def _password(source: Source, loader: Any) -> Any:
    from ansible.errors import AnsibleError
    from ansible.parsing.vault import VaultSecret, get_file_vault_secret

    if source.place in _PROMPTS:
        if source not in _passwords:
            _passwords[source] = VaultSecret(_ask(source).encode())
        return _passwords[source]
    try:
        if not Path(source.place).is_file():
            raise InventoryError(f"vault password file {source.place}: no such file; {HOW}")
        found = get_file_vault_secret(filename=source.place, vault_id=source.label, loader=loader)
        found.load()
        return found
    except AnsibleError as error:
        reason = " ".join(str(error).split())
        raise InventoryError(f"vault password file {source.place}: {reason}") from None
    except OSError as error:
        raise InventoryError(f"vault password file {source.place}: {error.strerror}; {HOW}") from None


def _ask(source: Source) -> str:
    if not sys.stdin.isatty():
        raise InventoryError(
            "the vault's password: no terminal to ask at; name a file in ANSIBLE_VAULT_PASSWORD_FILE or "
            "with --vault-id LABEL@FILE"
        )
    given = getpass.getpass(_prompt(source) + " ")
    if not given:
        raise InventoryError("the vault's password: none was given")
    return given


def _prompt(source: Source) -> str:
    return f"Vault password ({source.label}):"


def for_run() -> tuple[list[str], dict[str, str], dict[str, str]]:
    """For ansible-playbook: arguments, environment variables, and answers by the prompt's pattern."""
    found = sources()
    asked = [item for item in found if item.place in _PROMPTS]
    words = [word for item in asked for word in ("--vault-id", f"{item.label}@prompt")]
    answers = {rf"{re.escape(_prompt(item))}\s*?$": _passwords[item].bytes.decode() for item in asked}
    files = ",".join(f"{item.label}@{item.place}" for item in found if item not in asked)
    # Absolute paths, since Ansible runs in another directory.
    environment = {"ANSIBLE_VAULT_IDENTITY_LIST": files} if files else {}
    if file := _default_file():
        environment["ANSIBLE_VAULT_PASSWORD_FILE"] = file
    return words, environment, answers


def _default_file() -> str:
    from ansible import constants

    file = constants.config.get_config_value("DEFAULT_VAULT_PASSWORD_FILE")
    return str(Path(str(file)).absolute()) if file else ""


def is_failure(error: BaseException) -> bool:
    """Whether an error means that something could not be decrypted."""
    return any(_FAILURE.search(f"{type(item).__name__} {item}") for item in chain(error))


def chain(error: BaseException | None) -> Iterable[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def refusal() -> str:
    """Why something vaulted cannot be read."""
    if not sources():
        return f"is vaulted, and no password is known: {HOW}"
    return f"is vaulted, and none of the {len(sources())} password(s) opens it: {HOW}"


@cache
def is_vaulted_file(path: str) -> bool:
    """Whether all of a file is vaulted."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_HEADER)) == _HEADER
    except OSError:
        return False


def is_vaulted(value: Any) -> bool:
    """Whether a value of Ansible's is a vaulted text."""
    return type(value).__name__ in ("EncryptedString", "AnsibleVaultEncryptedUnicode")


def remember(text: str, *, secret: bool) -> None:
    """Hide a vaulted text in all later output; ``secret``: it may not stand in a job's files either."""
    lines = [line for line in text.splitlines() if len(line) >= _SHORTEST]
    _values.update(lines)
    if secret:
        _secrets.update(lines)


def has_secret(value: Any) -> bool:
    """Whether a value, or one inside it, is a secret or has one in it."""
    if isinstance(value, dict):
        return any(has_secret(item) for item in [*value, *value.values()])
    if isinstance(value, (list, tuple)):
        return any(has_secret(item) for item in value)
    text = str(value)
    return text in _secrets or any(len(item) >= _SHORTEST_PART and item in text for item in _secrets)


class Guarded:
    """A text stream that hides vaulted values; everything else is the wrapped stream's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without vaulted values."""
        return int(self._stream.write(hide(text) if isinstance(text, str) else text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Hide vaulted values in everything that is printed inside."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Guarded(before[0]), Guarded(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def hide(text: str) -> str:
    """The text without vaulted values."""
    for value in _values and sorted(_values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text
