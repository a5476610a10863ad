"""Hosts from Alibaba Cloud: ECS instances with given tags, through the official SDK.

A file such as ``ecs.yml`` names plugin ``oeprov_ecs`` and what to look for; it stands wherever an inventory
does, for Ansible too (``plugins/inventory/oeprov_ecs.py``). Credentials are found by the SDK alone:
environment, profile, RAM role. They never stand in the file, and nothing here prints them.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provision.cluster.errors import InventoryError
from provision.cluster.setting_types import explain
from provision.cluster.settings import Kind
from provision.node import platforms

PARAMETER_SERVERS, WORKERS = "parameter_servers", "workers"
_PAGE = 100  # the most that DescribeInstances gives
_LOGGERS = ("credentials", "alibabacloud-tea", "darabonba-core")  # the SDK's
_SECRETS = re.compile(r"(AccessKey\w*(%3D|=)|LTAI|STS\.)[^\s&,;'\"]+", re.IGNORECASE)


class Query(BaseModel):
    """The keys of ``ecs.yml``."""

    model_config = ConfigDict(extra="forbid")

    plugin: Literal["oeprov_ecs", "oeprov.oeprov.oeprov_ecs"]  # the latter from the installed collection
    regions: list[str] = Field(min_length=1)
    tags: dict[str, str] = Field(min_length=1)
    address: Literal["private", "public"] = "private"
    user: str = "root"
    private_key: str = ""
    port: int = Field(default=22, ge=1, le=65535)
    kinds: dict[str, Kind] = {}
    group_tag: str = "oeprov"
    endpoint: str = ""
    vars: dict[Literal["all", "parameter_servers", "workers"], dict[str, Any]] = {}


@dataclass(frozen=True)
class Found:
    """One host for the inventory."""

    name: str
    groups: tuple[str, ...]
    variables: dict[str, Any]


_NAMES = ("oeprov_ecs", "oeprov.oeprov.oeprov_ecs")


def is_query(content: Any) -> bool:
    """Whether a parsed file is a query of our inventory plugin, so that it lists no hosts itself."""
    return isinstance(content, dict) and content.get("plugin") in _NAMES


def read_query(path: Path) -> Query:
    """The checked file; InventoryError names each wrong key."""
    with _named(path):
        return _parse(path)


def find(path: Path) -> tuple[Found, ...]:
    """The hosts that the query finds, cached for this process; InventoryError says why there are none."""
    with _named(path):
        return _ask(path.absolute())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the file in front of every InventoryError."""
    try:
        yield
    except InventoryError as error:
        raise InventoryError.from_list([f"{path}: {line}" for line in error.problems]) from None


def _parse(path: Path) -> Query:
    try:
        content = yaml.safe_load(path.read_text())
        return Query.model_validate(content)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise InventoryError(f"cannot be read: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        raise InventoryError.from_list([_explain(item) for item in error.errors()]) from None


def _explain(item: Mapping[str, Any]) -> str:
    key = ".".join(str(word) for word in item["loc"])
    if item["type"] == "extra_forbidden":
        if re.search(r"access|secret|token|password", key, re.IGNORECASE):
            return (
                f"{key}: credentials do not belong here; set ALIBABA_CLOUD_ACCESS_KEY_ID and "
                "ALIBABA_CLOUD_ACCESS_KEY_SECRET, use a profile of `aliyun configure`, or a RAM role"
            )
        return f"{key}: unknown key; known are {', '.join(Query.model_fields)}"
    return f"{key}: {explain(item)}"


@cache
def _ask(path: Path) -> tuple[Found, ...]:
    query = _parse(path)
    instances = [item for region in query.regions for item in _instances(query, region)]
    tags = ", ".join(f"{key}={value}" for key, value in query.tags.items())
    where = ", ".join(query.regions)
    if not instances:
        raise InventoryError(f"no instance in {where} has the tags {tags}")
    running = [item for item in instances if item.status == "Running"]
    if not running:
        raise InventoryError(
            f"{len(instances)} instance(s) in {where} have the tags {tags}, and none is running"
        )
    names = [str(item.instance_name or "") for item in running]
    return tuple(_found(query, item, names) for item in running)


def _found(query: Query, item: Any, names: list[str]) -> Found:
    """An instance as a host, named by its name if that is unique and valid, else by its id."""
    name = str(item.instance_name or "")
    if names.count(name) != 1 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        name = str(item.instance_id)
    kind = kind_of(query, str(item.instance_type_family or ""), int(item.gpuamount or 0))
    variables: dict[str, Any] = {
        "ansible_host": _address(query, item, name),
        "ansible_user": query.user,
        "oeprov_kind": kind.value,
        "ecs_instance_id": str(item.instance_id),
        "ecs_instance_type": str(item.instance_type),
        "ecs_zone": str(item.zone_id or ""),
    }
    if query.port != 22:
        variables["ansible_port"] = query.port
    if query.private_key:
        variables["ansible_ssh_private_key_file"] = query.private_key
    return Found(name, _groups(query, item, name, kind), variables)


def kind_of(query: Query, family: str, gpus: int) -> Kind:
    """The kind of an instance type family such as ``ecs.re6p``; the file's ``kinds`` win."""
    short = family.removeprefix("ecs.")
    known = [(item, Kind(kind)) for kind in platforms.kinds() for item in platforms.get(kind).instance_types]
    for pattern, kind in (*query.kinds.items(), *known):
        if fnmatch.fnmatchcase(short, pattern.removeprefix("ecs.")):
            return kind
    return Kind("gpu" if gpus else "cpu")


def _groups(query: Query, item: Any, name: str, kind: Kind) -> tuple[str, ...]:
    """The groups in the instance's tag; without one, by its hardware."""
    tags = {tag.tag_key: tag.tag_value for tag in (item.tags.tag if item.tags else None) or []}
    said = str(tags.get(query.group_tag) or "")
    if not said:
        platform = platforms.get(kind.value)
        return (PARAMETER_SERVERS,) if platform.has_memory and platform.managed else (WORKERS,)
    groups = tuple(word for word in re.split(r"[\s,+/]+", said) if word)
    if not set(groups) <= {PARAMETER_SERVERS, WORKERS}:
        raise InventoryError(
            f"host {name}: its tag {query.group_tag} is {said!r}; it may be {PARAMETER_SERVERS}, "
            f"{WORKERS}, or both with a comma"
        )
    return groups


def _address(query: Query, item: Any, name: str) -> str:
    """The address that the file asks for: of the VPC (or classic network), or the elastic or public one."""
    if query.address == "private":
        inside = item.vpc_attributes and item.vpc_attributes.private_ip_address
        lists = [inside, item.inner_ip_address]
        single = ""
    else:
        lists = [item.public_ip_address]
        single = str((item.eip_address and item.eip_address.ip_address) or "")
    found = single or next((each.ip_address[0] for each in lists if each and each.ip_address), "")
    if not found:
        other = "public" if query.address == "private" else "private"
        raise InventoryError(
            f"host {name} ({item.instance_id}) has no {query.address} address; give it one, or set "
            f"address: {other}"
        )
    return str(found)


def _instances(query: Query, region: str) -> Iterator[Any]:
    """All instances with the tags in a region, page by page."""
    try:
        from alibabacloud_credentials.client import Client as Credentials
        from alibabacloud_credentials.exceptions import CredentialException
        from alibabacloud_ecs20140526 import models
        from alibabacloud_ecs20140526.client import Client
        from alibabacloud_tea_openapi.models import Config
    except ImportError:
        raise InventoryError("Alibaba Cloud's SDK is not installed: pip install 'oeprov[alibaba]'") from None
    for name in _LOGGERS:
        logging.getLogger(name).disabled = True  # tracebacks for each place without credentials
    try:
        credentials = Credentials()
        credentials.get_credential()
    except (CredentialException, ValueError, OSError):  # its text lists every place that it looked at
        raise InventoryError(
            "no credentials for Alibaba Cloud: set ALIBABA_CLOUD_ACCESS_KEY_ID and "
            "ALIBABA_CLOUD_ACCESS_KEY_SECRET, or use a profile of `aliyun configure`, or a RAM role"
        ) from None
    config = Config(credential=credentials, region_id=region, connect_timeout=10_000, read_timeout=60_000)
    if query.endpoint:
        scheme, _, host = query.endpoint.rpartition("://")
        config.endpoint, config.protocol = host, scheme or "https"
    tags = [models.DescribeInstancesRequestTag(key=key, value=value) for key, value in query.tags.items()]
    token = None
    try:
        client = Client(config)
        while True:
            request = models.DescribeInstancesRequest(
                region_id=region, tag=tags, max_results=_PAGE, next_token=token
            )
            body = client.describe_instances(request).body
            yield from (body.instances.instance if body.instances else None) or []
            token = body.next_token
            if not token:
                return
    except InventoryError:
        raise
    except Exception as error:  # the SDK's own, and those of whatever it reaches the network with
        raise InventoryError(f"region {region}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Code and first sentence of a service or network error, without keys."""
    code = str(getattr(error, "code", None) or "")
    text = str(getattr(error, "message", None) or error).strip() or type(error).__name__
    # "code: 403, …" is said twice; a wrong signature is shown with all that was signed.
    text = re.sub(r"^code: \d+, ", "", text.splitlines()[0]).split("request id")[0].split("server string")[0]
    text = _SECRETS.sub("…", text).strip(" .,:")[:200]
    return f"{code}: {text}" if code and code not in text else text
