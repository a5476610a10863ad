"""A machine with Debian's GRUB in a directory: it reboots, panics and loses its power as told."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

from provision.node import bootentry
from provision.node.command import NOT_FOUND, Result, System
from provision.node.state import BootEntry

OLD, NEW = "6.1.0-55-amd64", "6.1.0-56-amd64"
CONFIG = "CONFIG_FS_DAX=y\nCONFIG_DEV_DAX_KMEM=m\nCONFIG_X86_PMEM_LEGACY=m\n"
ROOT = "root=UUID=5f3c ro"
SYSCTL = "/proc/sys/kernel/"
_HEAD = """\
if [ -s $prefix/grubenv ]; then
  load_env
fi
function load_video {
  insmod all_video
}
"""
_CUSTOM = """\
### BEGIN /etc/grub.d/41_custom ###
if [ -f  ${config_directory}/custom.cfg ]; then
  source ${config_directory}/custom.cfg
fi
"""


class PowerCut(Exception):
    """The power was cut."""


class Stuck(Exception):
    """The machine does not come up and does not come back."""


def entry(indent: str, title: str, name: str, release: str, words: str) -> str:
    """One entry as Debian's 10_linux writes it."""
    body = ["load_video", "if [ x$grub_platform = xxen ]; then insmod xzio; fi", "insmod ext2"]
    body += [f"echo\t'Loading Linux {release} ...'", f"linux\t/vmlinuz-{release} {words}"]
    body += [f"initrd\t/initrd.img-{release}"]
    lines = "".join(f"{indent}\t{line}\n" for line in body)
    head = f"menuentry '{title}' --class debian --class os $menuentry_id_option '{name}' {{"
    return f"{indent}{head}\n{lines}{indent}}}\n"


@functools.cache
def sourced(text: str) -> tuple[str, str]:
    """GRUB_DEFAULT and kernel arguments as a shell, which grub-mkconfig is, reads them."""
    script = text + '\nprintf "%s\\n%s" "$GRUB_DEFAULT" "$GRUB_CMDLINE_LINUX $GRUB_CMDLINE_LINUX_DEFAULT"'
    found = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    default, words = found.split("\n")
    return default, words


class Tree(System):
    """A machine in a directory."""

    def put(self, path: str, text: str) -> None:
        """A file as it is there before anything happens."""
        real = Path(self.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_text(text)


class Machine(Tree):
    """Answers what boot steps ask; ``boot`` does what GRUB and the kernel would do."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.boots = 0
        self.panics: set[str] = set()  # releases and arguments that do not come up
        self.unloadable: set[str] = set()  # releases that GRUB cannot load
        self.half: list[str] = []  # packages that dpkg did not finish
        self.unpacking = False  # dpkg was killed before it could configure
        self.full = False  # /boot is full when an initial ramdisk is written
        self.mkconfig_fails = False
        self.system_state = "running"
        self.timer = False  # the trial's timer runs
        self.boot_on = "ext2"  # what GRUB finds its environment block on
        self.below = ""  # abstractions below that
        self.changes_left = -1  # power is cut after so many changes; -1: never
        self.asked: list[list[str]] = []
        self.put(SYSCTL + "panic", "0\n")
        self.put(SYSCTL + "panic_on_oops", "0\n")
        self.put("/etc/default/grub", 'GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX="console=ttyS0"\n')
        self.put("/boot/grub/grubenv", "# GRUB Environment Block\n" + "#" * 40)
        self.add_kernel(OLD)
        self.grub_mkconfig(["-o", "/boot/grub/grub.cfg"])
        self.boot()

    def add_kernel(self, release: str) -> None:
        """A complete kernel in /boot."""
        for name in ("vmlinuz-", "initrd.img-"):
            self.put(f"/boot/{name}{release}", "x" * 1000)
        self.put("/boot/config-" + release, CONFIG)

    # ---- What changes the machine ----------------------------------------------------------------------

    def _changes(self) -> None:
        if self.changes_left == 0:
            raise PowerCut
        self.changes_left -= 1

    def write(self, path: str, text: str, mode: int = 0o644) -> bool:
        if self.read(path) != text:
            self._changes()
        return super().write(path, text, mode)

    def remove(self, path: str) -> bool:
        if self.exists(path):
            self._changes()
        return super().remove(path)

    def which(self, name: str) -> str:
        return "/sbin/" + name if hasattr(self, name.replace("-", "_")) else ""

    def run(self, argv, timeout=0.0, environment=None):  # type: ignore[no-untyped-def]
        self.asked.append(argv)
        answer = getattr(self, argv[0].replace("-", "_"), None)
        if answer is None:
            return Result(argv, NOT_FOUND, "", "")
        found = answer(argv[1:])
        if isinstance(found, Result):
            return found._replace(argv=argv)
        return Result(argv, 0, found or "", "")

    def sh(self, words: list[str]) -> Result:
        done = subprocess.run(["sh", *words], capture_output=True, text=True, check=False)
        return Result([], done.returncode, done.stdout, done.stderr)

    def grub_mkconfig(self, words: list[str]) -> Result | None:
        if self.mkconfig_fails:
            return Result([], 1, "", "/usr/sbin/grub-probe: error: no such disk.")
        overrides = [self.read("/etc/default/grub.d/" + name) for name in self.list("/etc/default/grub.d")]
        try:
            default, added = sourced("\n".join([self.read("/etc/default/grub"), *overrides]))
        except (subprocess.CalledProcessError, ValueError):
            return Result([], 2, "", "/etc/default/grub: syntax error")
        releases = sorted(
            (name[8:] for name in self.list("/boot") if name.startswith("vmlinuz-")), reverse=True
        )
        line = f"{ROOT} {added}".strip()
        text = f"# default {default}\n" + _HEAD
        text += entry("", "Debian GNU/Linux", "gnulinux-simple-5f3c", releases[0], line)
        text += "submenu 'Advanced options' $menuentry_id_option 'gnulinux-advanced-5f3c' {\n"
        for release in releases:
            title = f"Debian GNU/Linux, with Linux {release}"
            text += entry("\t", title, f"gnulinux-{release}-advanced-5f3c", release, line)
            recovery = f"gnulinux-{release}-recovery-5f3c"
            text += entry("\t", title + " (recovery mode)", recovery, release, f"{ROOT} single")
        self.put(words[1], text + "}\n" + _CUSTOM)
        return None

    def _environment(self, name: str, value: str) -> None:
        self._changes()
        known = bootentry.parse_grubenv(self.read("/boot/grub/grubenv"))
        known[name] = value
        lines = "".join(f"{key}={text}\n" for key, text in known.items() if text)
        self.put("/boot/grub/grubenv", "# GRUB Environment Block\n" + lines + "#" * 40)

    def grub_set_default(self, words: list[str]) -> None:
        self._environment("saved_entry", words[0])

    def grub_reboot(self, words: list[str]) -> None:
        self._environment("next_entry", words[0])

    def grub_editenv(self, words: list[str]) -> None:
        assert words[1] == "unset"
        self._environment(words[2], "")

    def sync(self, words: list[str]) -> None:
        pass

    def systemctl(self, words: list[str]) -> str | Result:
        words = [word for word in words if word != "--no-reload"]
        if words[0] == "is-system-running":
            return self.system_state + "\n"
        if words[0] == "is-active":
            return "active\n" if self.timer else "inactive\n"
        if words[0] == "enable":
            self._changes()
            self.put("/etc/systemd/system/sysinit.target.wants/" + words[-1], "")
        if words[0] == "stop":
            self._changes()
            self.timer = False
        if words[0] == "disable":
            self._changes()
            Path(self.path("/etc/systemd/system/sysinit.target.wants/" + words[-1])).unlink(missing_ok=True)
        return ""

    def grub_probe(self, words: list[str]) -> str:
        assert words[1].startswith("/boot/")
        return {"--target=fs": self.boot_on + "\n", "--target=abstraction": self.below}[words[0]]

    def dpkg_query(self, words: list[str]) -> str:
        return "".join(f"{name}\thalf-configured\n" for name in self.half) + "bash\tinstalled\n"

    def dpkg(self, words: list[str]) -> str:
        assert words == ["--configure", "-a"]
        if not self.full and not self.unpacking:
            for name in self.half:
                self.add_kernel(name.replace("linux-image-", ""))
            self.half = []
        return ""

    def apt_get(self, words: list[str]) -> str | Result:
        self._changes()
        names = [word for word in words if word.startswith("linux-image-")]
        if "purge" in words:
            for name in names:
                self.half.remove(name)
                for path in Path(self.path("/boot")).glob("*-" + name.replace("linux-image-", "")):
                    path.unlink()
        if "install" not in words:
            return ""
        release = names[0].replace("linux-image-", "").replace("amd64", NEW, names[0] == "linux-image-amd64")
        if self.full:
            self.put("/boot/vmlinuz-" + release, "x" * 1000)
            self.half = names
            return Result([], 100, "", "cpio: write error: No space left on device\nE: Sub-process failed")
        self.half = [name for name in self.half if name not in names]
        self.add_kernel(release)
        self.grub_mkconfig(["-o", "/boot/grub/grub.cfg"])
        return ""

    # ---- What GRUB and the kernel do ------------------------------------------------------------------

    def power(self) -> None:
        """Back after a power cut."""
        self.changes_left = -1
        self.boot()

    def boot(self) -> None:
        """Reboot until something stays up; Stuck when nothing does."""
        for _ in range(4):
            self.boots += 1
            if self._try_boot():
                return
        raise Stuck("it boots again and again")

    def _try_boot(self) -> bool:
        known = bootentry.parse_grubenv(self.read("/boot/grub/grubenv"))
        menu = self.read("/boot/grub/grub.cfg")
        default = re.findall(r"^# default (.*)$", menu, re.MULTILINE)[0]
        if default == "saved":
            default = known.get("saved_entry", "")
        name = known.get("next_entry", "") or default
        if known.get("next_entry") and self.boot_on == "ext2" and not self.below:
            self._environment("next_entry", "")
        menus = bootentry.parse_menu(menu + "\n" + self.read("/boot/grub/custom.cfg"))
        found = next((item for item in menus if name in (item.entry.id, item.entry.title)), menus[0])
        chosen = self._loaded(found)
        words = chosen.arguments
        if chosen.release in self.panics or set(words) & self.panics:
            if not any(re.fullmatch(r"panic=\d+", word) for word in words):
                raise Stuck("panic")
            return False
        self.put("/proc/sys/kernel/osrelease", chosen.release + "\n")
        self.put("/proc/sys/kernel/random/boot_id", f"boot-{self.boots}\n")
        self.put("/proc/cmdline", f"BOOT_IMAGE=/vmlinuz-{chosen.release} " + " ".join(words) + "\n")
        self.put("/proc/uptime", "20.00 10.00\n")
        given = dict(word.split("=", 1) for word in words if "=" in word)
        self.put(SYSCTL + "panic", given.get("panic", "0") + "\n")
        self.put(SYSCTL + "panic_on_oops", "1\n" if given.get("oops") == "panic" else "0\n")
        wanted = self.exists("/etc/systemd/system/sysinit.target.wants/oeprov-trial.timer")
        self.timer = wanted and self._may_start("oeprov-trial.timer")
        on_trial = chosen is not found.entry
        if on_trial and not (self.timer and self.exists("/var/lib/oeprov/reboot.json")):
            raise Stuck("a boot on trial that nothing would end")
        return True

    def _may_start(self, unit: str) -> bool:
        """Whether systemd would start a unit, by the conditions that ours have."""
        text = self.read("/etc/systemd/system/" + unit)
        words = re.findall(r"^ConditionKernelCommandLine=(\S+)$", text, re.MULTILINE)
        paths = re.findall(r"^ConditionPathExists=!(\S+)$", text, re.MULTILINE)
        given = [word if "=" in words[0] else word.split("=")[0] for word in self.cmdline]
        return set(words) <= set(given) and not any(map(self.exists, paths))

    def _loaded(self, menu: bootentry.Menu) -> BootEntry:
        """What GRUB loads: of a trial the kernel that it tries, or the one that it starts instead."""
        chosen = menu.entry
        tried = re.search(r"if linux /vmlinuz-(\S+) (.*); then", "\n".join(menu.body))
        if tried and tried.group(1) not in self.unloadable:
            return chosen._replace(release=tried.group(1), arguments=tried.group(2).split())
        if chosen.release in self.unloadable:
            raise Stuck("GRUB waits at its menu")
        return chosen

    def expire(self) -> None:
        """Nobody confirmed: the trial's timer ends the boot."""
        assert self.timer
        assert self._may_start("oeprov-trial.service")
        self.put("/var/lib/oeprov/trial-expired", self.read("/proc/cmdline"))
        self.boot()

    @property
    def running(self) -> str:
        """Release of the kernel that runs."""
        return self.read("/proc/sys/kernel/osrelease").strip()

    @property
    def cmdline(self) -> list[str]:
        """Arguments of the kernel that runs."""
        return self.read("/proc/cmdline").split()


BLS = "/boot/loader/entries"


class El(Tree):
    """Rocky Linux 9: boot entries are files, changed by grubby. Canned answers: it cannot be had here."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.default = OLD
        self.copies_cmdline = False  # a new entry has the arguments of the boot that runs: EL 9
        self.asked: list[list[str]] = []
        for release in (OLD, NEW):
            self.write(
                f"/boot/loader/entries/1b2c-{release}.conf",
                f"title Rocky Linux ({release})\nlinux /vmlinuz-{release}\noptions $kernelopts\n",
            )
        self.write("/boot/grub2/grubenv", "kernelopts=root=/dev/sda1 ro\nsaved_entry=1b2c\n")
        self.write("/etc/default/grub", "GRUB_DEFAULT=saved\n")
        self.put("/proc/sys/kernel/osrelease", OLD)
        self.put("/proc/sys/kernel/random/boot_id", "one")

    def which(self, name: str) -> str:
        return "/sbin/" + name if name.startswith(("grub", "dracut")) else ""

    def run(self, argv, timeout=0.0, environment=None):  # type: ignore[no-untyped-def]
        self.asked.append(argv)
        out = ""
        if argv[0] == "grub2-reboot":
            self.write("/boot/grub2/grubenv", self.read("/boot/grub2/grubenv") + f"next_entry={argv[1]}\n")
        if argv[0] == "grub2-editenv":
            text = self.read("/boot/grub2/grubenv").replace("next_entry=oeprov-trial\n", "")
            self.write("/boot/grub2/grubenv", text)
        if argv[0] == "grub2-probe":
            out = "xfs\n" if argv[1] == "--target=fs" else ""
        if argv[:2] == ["grubby", "--default-kernel"]:
            out = f"/boot/vmlinuz-{self.default}\n"
        if argv[:2] == ["grubby", "--set-default"]:
            self.default = argv[2].replace("/boot/vmlinuz-", "")
        if argv[:2] == ["yum", "install"]:
            for name in (f"vmlinuz-{NEW}", f"initramfs-{NEW}.img"):
                self.put("/boot/" + name, "x")
            self.default = NEW  # as the package's scripts do
            if self.copies_cmdline:
                text = (
                    f"title Rocky Linux ({NEW})\nlinux /vmlinuz-{NEW}\noptions {self.read('/proc/cmdline')}\n"
                )
                self.write(f"{BLS}/1b2c-{NEW}.conf", text)
        for word in argv:
            if word.startswith("--remove-args="):
                for name in self.list(BLS):
                    lines = self.read(f"{BLS}/{name}").splitlines()
                    gone = word[14:].split()
                    kept = [" ".join(item for item in line.split(" ") if item not in gone) for line in lines]
                    self.write(f"{BLS}/{name}", "\n".join(kept) + "\n")
            if word.startswith("--args="):
                for name in self.list(BLS):
                    path = f"{BLS}/{name}"
                    self.write(path, self.read(path).rstrip() + " " + word[7:] + "\n")
        return Result(argv, 0, out, "")
