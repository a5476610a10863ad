"""What firewalld and ufw say of ports, with stand-ins that answer as theirs do."""

import os
from pathlib import Path

import pytest
from recorded import Programs

from provision.node import health
from provision.node.command import System

FIREWALLD = """\
if "--state" in sys.argv:
    print("running")
elif "--get-active-zones" in sys.argv:
    print("public (default)\\n  interfaces: eth0\\nZONE\\n  sources: 10.0.0.0/8")
elif "--query-port=7700/tcp" in sys.argv and "--zone=public" in sys.argv:
    pass
elif "--list-rich-rules" in sys.argv:
    print("RULES")
else:
    sys.exit(1)
"""
UFW = """\
print("Status: active\\n\\nTo                     Action      From\\n--                     ------      ----")
print("22/tcp                 ALLOW       Anywhere\\n7700:7702/tcp          ALLOW       10.0.0.0/8")
print("80,443/tcp (v6)        ALLOW       Anywhere (v6)\\n7800                   DENY        Anywhere")
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("firewall-cmd", "ufw"):
        found.add(name, "sys.exit(252)")
    return found


def test_no_firewall(programs: Programs) -> None:
    assert health.observe_firewall(System(), [7700]) == ("", {})
    programs.add("ufw", 'print("Status: inactive")')
    assert health.observe_firewall(System(), [7700]) == ("", {})


@pytest.mark.parametrize(
    ("zone", "rules", "second"),
    [("internal", "", False), ("trusted", "", True), ("internal", 'rule family="ipv4" accept', True)],
)
def test_firewalld(programs: Programs, zone: str, rules: str, second: bool) -> None:
    programs.add("firewall-cmd", FIREWALLD.replace("ZONE", zone).replace('"RULES"', repr(rules)))
    assert health.observe_firewall(System(), [7700, 7701]) == ("firewalld", {"7700": True, "7701": second})


def test_ufw(programs: Programs) -> None:
    programs.add("ufw", UFW)
    found = health.observe_firewall(System(), [22, 443, 7701, 7703, 7800])
    assert found == ("ufw", {"22": True, "443": True, "7701": True, "7703": False, "7800": False})
    programs.add("ufw", UFW + 'print("Anywhere               ALLOW       10.0.0.0/8")')
    assert health.observe_firewall(System(), [7703]) == ("ufw", {"7703": True})
