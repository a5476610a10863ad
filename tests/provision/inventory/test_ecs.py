"""Hosts from Alibaba Cloud: the SDK itself asks a service on loopback that answers as documented."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from alibabacloud_credentials.client import Client
from alibabacloud_credentials.exceptions import CredentialException
from alibabacloud_credentials.utils import auth_util
from typer.testing import CliRunner

from provision.cli.main import app
from provision.cluster.errors import InventoryError
from provision.cluster.settings import Kind
from provision.hosts import playbook
from provision.inventory import ecs
from provision.inventory.loader import load

ANSWERS = json.loads(Path(__file__).parent.joinpath("ecs", "answers.json").read_text())
KEY, SECRET = "LTAI5tRecordedRecorded", "kNoBodyKnowsThisSecret000"


class Service(ThreadingHTTPServer):
    """DescribeInstances; ``answers`` by the token of the page, ``asked`` for what."""

    answers: dict[str, dict[str, Any]]
    asked: list[dict[str, str]]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        query = {**parse_qs(urlsplit(self.path).query), **parse_qs(self.rfile.read(size).decode())}
        asked = {key: values[0] for key, values in query.items()}
        asked["action"] = self.headers.get("x-acs-action", "")
        self.server.asked.append(asked)
        answer = self.server.answers[asked.get("NextToken", "")]
        body = json.dumps(answer.get("body", answer)).encode()
        self.send_response(answer.get("status", 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    first, second = ANSWERS["pages"]
    server = Service(("127.0.0.1", 0), Handler)
    server.answers = {"": first, first["NextToken"]: second}
    server.asked = []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(auth_util, "environment_access_key_id", KEY)  # read when it was imported
    monkeypatch.setattr(auth_util, "environment_access_key_secret", SECRET)
    yield server
    server.shutdown()
    server.server_close()


def write(tmp_path: Path, service: Service | None, more: str = "") -> Path:
    path = tmp_path / "ecs.yml"
    endpoint = service.address if service else "http://127.0.0.1:9"
    path.write_text(
        f"plugin: oeprov_ecs\nregions: [cn-hangzhou]\ntags: {{cluster: ads}}\nendpoint: {endpoint}\n" + more
    )
    return path


def refused(path: Path) -> str:
    with pytest.raises(InventoryError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert KEY not in message
    assert SECRET not in message
    return message.removeprefix(f"{path}: ")


def test_instances_of_all_pages_become_hosts(tmp_path: Path, service: Service) -> None:
    path = write(
        tmp_path,
        service,
        "user: ads\nprivate_key: ~/.ssh/ads.pem\nvars:\n  all: {training_dim: 16}\n"
        "  parameter_servers: {kernel_version: newest}\n",
    )
    found = load(path)
    assert (found.cluster, found.training.dim) == ("ecs", 16)
    assert found.parameter_servers == ["ps-0", "i-bp1ps1", "worker"]
    assert sorted(found.workers) == ["gpu-0", "i-bp1dup1", "i-bp1dup2", "worker"]
    hosts = {name: (host.address, host.kind) for name, host in found.hosts.items()}
    assert hosts == {
        "ps-0": ("172.16.0.10", Kind.re6p),
        "i-bp1ps1": ("172.16.0.11", Kind.re7p),  # its name has a space
        "gpu-0": ("172.16.0.12", Kind.gpu),
        "worker": ("172.16.0.14", Kind.cpu),
        "i-bp1dup1": ("10.0.0.15", Kind.cpu),  # classic network; two have the same name
        "i-bp1dup2": ("172.16.0.16", Kind.gpu),
    }
    host = found.hosts["ps-0"]
    assert (host.user, host.private_key, host.kernel.version) == ("ads", "~/.ssh/ads.pem", "newest")
    assert found.hosts["gpu-0"].kernel.version == "keep"
    assert [item.get("NextToken", "") for item in service.asked] == ["", ANSWERS["pages"][0]["NextToken"]]
    for item in service.asked:
        assert item["action"] == "DescribeInstances"
        assert (item["RegionId"], item["Tag.1.Key"], item["Tag.1.Value"]) == ("cn-hangzhou", "cluster", "ads")


def test_variables_beside_the_file_are_read_too(tmp_path: Path, service: Service) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "workers.yml").write_text("worker_count: 3\n")
    found = load(write(tmp_path, service, "vars: {parameter_servers: {pmem_mode: none}}\n"))
    assert found.hosts["gpu-0"].worker.count == 3
    assert found.hosts["ps-0"].worker.count == 1


def test_public_addresses(tmp_path: Path, service: Service) -> None:
    first = service.answers[""]["Instances"]["Instance"]
    service.answers[""] = {**ANSWERS["none"], "Instances": {"Instance": first[:2]}}
    found = ecs.find(write(tmp_path, service, "address: public\n"))
    assert [host.variables["ansible_host"] for host in found] == ["47.98.1.10", "47.98.1.11"]
    service.answers[""] = {**ANSWERS["none"], "Instances": {"Instance": first[:3]}}
    (tmp_path / "b").mkdir()
    said = refused(write(tmp_path / "b", service, "address: public\n"))
    assert said == "host gpu-0 (i-bp1gpu) has no public address; give it one, or set address: private"


def test_kinds_follow_from_instance_type_families() -> None:
    query = ecs.Query(
        plugin="oeprov_ecs",
        regions=["r"],
        tags={"a": "b"},
        kinds={"ecs.ebmre6p*": "bare_metal_pmem", "gn5i": "cpu"},
    )
    kinds = {
        "re6p-redis": "re6p",
        "ebmre6p": "bare_metal_pmem",
        "gn5i": "cpu",
        "gn8is": "gpu",
        "vgn7i-vws": "gpu",
    }
    kinds.update({"sccgn7ex": "gpu", "g7": "cpu", "r7p": "cpu", "ebmg7": "cpu"})
    assert {name: ecs.kind_of(query, "ecs." + name, 0).value for name in kinds} == kinds
    assert ecs.kind_of(query, "ecs.new", 4) is Kind.gpu


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("regoins: [x]\n", "regoins: unknown key; known are plugin, regions"),
        ("access_key_secret: abc\n", "access_key_secret: credentials do not belong here"),
        ("address: vpc\n", "address: found 'vpc'; allowed: private, public"),
        ("kinds: {gn7: gup}\n", "kinds.gn7: found 'gup'"),
        ("port: 0\n", "port: found 0; allowed: at least 1"),
        ("vars: {servers: {}}\n", "allowed: all, parameter_servers"),
        ("tags: {}\n", "tags: found {}"),
    ],
)
def test_a_file_that_is_wrong(more: str, said: str, tmp_path: Path) -> None:
    assert said in refused(write(tmp_path, None, more))


def test_another_plugin(tmp_path: Path) -> None:
    path = tmp_path / "aws.yml"
    path.write_text("plugin: oeprov.oeprov.another\nregions: [x]\n")
    assert "inventory plugin oeprov.oeprov.another is not installed: ansible-galaxy collection" in refused(
        path
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("none", "no instance in cn-hangzhou has the tags cluster=ads"),
        ("signature", "SignatureDoesNotMatch: Specified signature is not matched with our calculation"),
        ("forbidden", "Forbidden.RAM: User not authorized to operate on the specified resource"),
        ("unknown key", "InvalidAccessKeyId.NotFound: Specified access key is not found"),
    ],
)
def test_what_the_service_refuses(answer: str, said: str, tmp_path: Path, service: Service) -> None:
    service.answers[""] = ANSWERS[answer]
    assert said in refused(write(tmp_path, service))


def test_no_running_instance_is_an_error(tmp_path: Path, service: Service) -> None:
    stopped = service.answers[""]["Instances"]["Instance"][3:]
    service.answers[""] = {**ANSWERS["none"], "Instances": {"Instance": stopped}}
    assert "1 instance(s) in cn-hangzhou have the tags cluster=ads, and none is running" in refused(
        write(tmp_path, service)
    )


def test_a_tag_that_names_no_group(tmp_path: Path, service: Service) -> None:
    item = json.loads(json.dumps(service.answers[""]["Instances"]["Instance"][0]))
    item["Tags"]["Tag"].append({"TagKey": "role", "TagValue": "server"})
    service.answers[""] = {**ANSWERS["none"], "Instances": {"Instance": [item]}}
    assert "host ps-0: its tag role is 'server'; it may be" in refused(
        write(tmp_path, service, "group_tag: role\n")
    )


def test_a_service_that_cannot_be_reached(tmp_path: Path, service: Service) -> None:
    said = refused(write(tmp_path, None))
    assert said.startswith("region cn-hangzhou: ")


def test_no_credentials(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_util, "environment_access_key_id", None)
    monkeypatch.setattr(auth_util, "environment_ecs_metadata_disabled", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(auth_util, "home", str(tmp_path), raising=False)
    assert refused(write(tmp_path, service)).startswith("no credentials for Alibaba Cloud: set ALIBABA_CLOUD")
    assert not service.asked


def test_the_sdk_prints_nothing_itself(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Client) -> None:
        logging.getLogger("credentials").error("key %s", SECRET)
        raise CredentialException("unable to load credentials: " + SECRET)

    monkeypatch.setattr(Client, "get_credential", fail)
    assert "no credentials" in refused(write(tmp_path, service))
    assert not caplog.records


def test_no_sdk(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alibabacloud_ecs20140526", None)
    said = refused(write(tmp_path, service))
    assert said == "Alibaba Cloud's SDK is not installed: pip install 'oeprov[alibaba]'"


def test_the_commands_take_it(tmp_path: Path, service: Service) -> None:
    path = write(tmp_path, service)
    shown = CliRunner().invoke(app, ["inventory", "check", "-i", str(path)])
    assert (shown.exit_code, "6 hosts" in shown.output) == (0, True), shown.output


def test_ansible_takes_it(tmp_path: Path, service: Service) -> None:
    """As playbooks run: another process, with the plugin where oeprov says that it is."""
    environment = {**os.environ, **playbook._environment(), "ALIBABA_CLOUD_ACCESS_KEY_ID": KEY}
    environment["ALIBABA_CLOUD_ACCESS_KEY_SECRET"] = SECRET
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-inventory"),
            "-i",
            str(write(tmp_path, service)),
            "--list",
            "--limit",
            "ps-0,gpu-0",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["parameter_servers"]["hosts"] == ["ps-0"]
    assert found["workers"]["hosts"] == ["gpu-0"]
    # Ansible 2.19 says that it is no template.
    assert "ecs.gn7i-c16g1.4xlarge" in str(found["_meta"]["hostvars"]["gpu-0"]["ecs_instance_type"])
    assert SECRET not in done.stdout + done.stderr
