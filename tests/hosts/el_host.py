"""A host that says that it is EL, with real dnf, rpm and rpmdb, and a repository of small packages.

Underneath is Debian: its Python, C library and dnf. Packages are made by rpmbuild on the host, hold next to
nothing, and stand for EL's by name, version and what their scripts do.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from bare_debian import BareDebian

PACKAGES = "python3,openssh-server,dnf,rpm,createrepo-c,python3-dnf,gnupg"
HIDDEN = "/usr/libexec/hidden/python3.11"  # the root's Python where ``stock_python`` keeps it
COLLECTION = "/opt/rh/rh-python38/root/usr"
REPOSITORY = "/srv/rpms"
RUNNING = "/boot/vmlinuz-$(uname -r)"
KERNEL = "5.4.278-1.el8.elrepo"
# kernel-lt's scripts do to /boot what the real ones do, the new default included.
_KERNEL_POST = f"""\
for name in vmlinuz-{KERNEL}.x86_64 initramfs-{KERNEL}.x86_64.img; do echo x >/boot/$name; done
printf 'CONFIG_FS_DAX=y\\nCONFIG_DEV_DAX_KMEM=m\\n' >/boot/config-{KERNEL}.x86_64
grubby --set-default /boot/vmlinuz-{KERNEL}.x86_64
"""
_GRUBBY = """\
#!/bin/sh
case $1 in
--default-kernel) cat /boot/default-kernel ;;
--set-default) echo "$2" >/boot/default-kernel ;;
*) echo "grubby: $*" >>/var/log/grubby ;;
esac
"""
_SPEC = """\
Name: {name}
Version: {version}
Release: {release}
Summary: stands for the package
License: none
BuildArch: noarch
{tags}
%description
x
{scripts}
%files
"""
FABRICS = ("580.65.06", "580.95.05", "580.105.08")
_FABRIC = """\
%post
printf '#!/bin/sh\\necho Fabric Manager version is : {}\\n' >/usr/bin/nv-fabricmanager
chmod +x /usr/bin/nv-fabricmanager
"""
# A module whose stream is the default one, as EL 8's AppStream has many.
_MODULES = """\
---
document: modulemd
version: 2
data:
  {name: tools, stream: "1", version: 1, context: x, arch: noarch, summary: x, description: x,
   license: {module: [MIT]}, dependencies: [{requires: {platform: [el8]}}],
   artifacts: {rpms: ["of-a-module-0:1-1.noarch"]}}
...
---
document: modulemd-defaults
version: 1
data: {module: tools, stream: "1"}
...
"""
# Packages of a Python bring no files: their scripts show one of this machine.
_LINK = "%post\n[ ! -x {0} ] || {{ mkdir -p $(dirname {1}) && ln -sf {0} {1}; }}\n"
# name, version, release, tags, scripts
_SMALL = [
    ("libpmem", "1.6.1", "1.el8", "", ""),
    ("libstdc++", "8.5.0", "22.el8", "", ""),
    ("python3.11", "3.11.9", "1.el8", "", _LINK.format(HIDDEN, "/usr/bin/python3.11")),
    ("rh-python38", "2.0", "5.el7", "", _LINK.format(HIDDEN, COLLECTION + "/bin/python3.8")),
    ("python36", "3.6.8", "39.el8", "", _LINK.format("/usr/libexec/hidden/python3.6", "/usr/bin/python3")),
    ("python3", "3.6.8", "13.el7", "", _LINK.format("/usr/libexec/hidden/python3.6", "/usr/bin/python3")),
    ("python3.11-numpy", "1.23.5", "1.el8", "Requires: python3.11", ""),
    ("ndctl", "78", "2.el8", "Requires: daxctl = 78", ""),
    ("daxctl", "78", "2.el8", "", ""),
    ("numactl", "2.0.16", "4.el8", "", ""),
    ("e2fsprogs", "1.45.6", "5.el8", "", ""),
    ("broken", "1", "1", "", "%pre\nexit 1"),
    ("of-a-module", "1", "1", "ModularityLabel: tools:1:1:x", ""),
    *[("nvidia-fabric-manager", version, "1", "", _FABRIC.format(version)) for version in FABRICS],
    ("kernel-lt", *KERNEL.split("-"), "", "%post\n" + _KERNEL_POST),
    # What dnf reads the release from, and what scripts need.
    ("rocky-release", "8.10", "1.9.el8", "Provides: system-release = 8.10\nProvides: /bin/sh", ""),
]


class ElHost(BareDebian):
    """One running host; ``os_release`` is what it says that it is."""

    def __init__(self, directory: Path, os_release: str) -> None:
        super().__init__(directory, PACKAGES)
        self.os_release = os_release

    def __enter__(self) -> ElHost:
        super().__enter__()
        self.put("/etc/os-release", self.os_release)
        self.put("/usr/bin/grubby", _GRUBBY)
        self.run("chmod +x /usr/bin/grubby; ln -sf dnf /usr/bin/yum; mkdir -p /root/specs /etc/yum.repos.d")
        self.run(f"echo x >{RUNNING}; echo {RUNNING} >/boot/default-kernel")
        self.run("echo x >/boot/initramfs-$(uname -r).img")
        for name, version, release, tags, scripts in _SMALL:
            text = _SPEC.format(name=name, version=version, release=release, tags=tags, scripts=scripts)
            self.put(f"/root/specs/{name}-{version}.spec", text)
        self.put("/root/modules.yaml", _MODULES)
        self.run(
            "cd /root/specs && for spec in *.spec; do rpmbuild -bb --quiet --define '_rpmdir "
            f"{REPOSITORY}' $spec; done && createrepo_c -q {REPOSITORY} && "
            f"modifyrepo_c --mdtype=modules /root/modules.yaml {REPOSITORY}/repodata"
        )
        return self

    def stock_python(self, python: Path | None, older: Path) -> None:
        """Hide the root's own Python, which its dnf keeps using; ``python3`` is ``python``, None: is missing.

        ``older`` is what a package of Python 3.6 brings.
        """
        self.run(f"mkdir -p {Path(HIDDEN).parent} && mv /usr/bin/python3.11 {HIDDEN} && rm /usr/bin/python3")
        self.run(f"sed -i '1s,.*,#!{HIDDEN},' $(readlink -f /usr/bin/dnf)")
        for path in (python, older):
            if path:
                self.bind(path.parents[1])
        self.run(f"ln -s {older} /usr/libexec/hidden/python3.6")
        if python:
            self.run(f"ln -s {python} /usr/bin/{'python3' if python == older else 'python'}")

    def make_key(self, name: str) -> str:
        """Make a new key for packages; returns the address of its public half."""
        home = f"/root/{name}"
        self.run(
            f"mkdir -p -m 700 {home} && export GNUPGHOME={home} && gpg --batch --quiet --passphrase '' "
            f"--quick-generate-key '{name} <{name}@example.org>' rsa2048 sign never && gpg --armor --export "
            f">{home}/public"
        )
        return f"file://{home}/public"

    def sign(self, repository: str, key: str) -> str:
        """Sign a repository's packages with a new key of that name; returns what ``make_key`` does."""
        public = self.make_key(key)
        self.run(
            f"export GNUPGHOME=/root/{key} && rpmsign --define '_gpg_name {key}' --define "
            f"'__gpg /usr/bin/gpg' --addsign $(find {repository} -name '*.rpm') && "
            f"createrepo_c -q {repository}"
        )
        return public

    def put(self, path: str, text: str) -> None:
        """Write a file on the host."""
        self.run(f"printf %s {shlex.quote(text)} >{path}")
