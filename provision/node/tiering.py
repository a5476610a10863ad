"""Mode tiered: the kernel moves pages between DRAM and memory nodes by their use.

The memory becomes nodes as in mode system-ram. Here are demotion, NUMA balancing between tiers and the
weights of interleaving, now and at every boot, and the way back. Nothing is bound to nodes.
"""

import re
from typing import Any, Dict, List

from . import numa
from .command import CommandError, System
from .state import State, Tiering
from .step import Action, Applied, Desired, Part, Step

MODE = "tiered"
UNIT_NAME = "oeprov-tiering.service"
UNIT = "/etc/systemd/system/" + UNIT_NAME
ENABLED = "/etc/systemd/system/multi-user.target.wants/" + UNIT_NAME
DEMOTION = "/sys/kernel/mm/numa/demotion_enabled"  # since 5.15
BALANCING = "/proc/sys/kernel/numa_balancing"
BETWEEN_TIERS = "2"  # of BALANCING, since 5.18: promote pages of slower nodes that are used often
WEIGHTS = "/sys/kernel/mm/mempolicy/weighted_interleave"  # since 6.9
_TIERS = "/sys/devices/virtual/memory_tiering"  # since 6.1
# Values from before the unit started, PATH VALUE per line. systemd removes the directory when it stops.
_BEFORE = "/run/oeprov-tiering/before"


def observe(system: System) -> Tiering:
    """What the kernel does between tiers; empty values where it has no such setting."""
    nodes = [name for name in system.list(WEIGHTS) if re.fullmatch(r"node\d+", name)]
    tiers = [name for name in system.list(_TIERS) if re.fullmatch(r"memory_tier\d+", name)]
    return Tiering(
        demotion=system.read(DEMOTION).strip(),
        balancing=system.read(BALANCING).strip(),
        weights={name[4:]: system.read(f"{WEIGHTS}/{name}").strip() for name in nodes},
        auto_weights=system.read(f"{WEIGHTS}/auto").strip(),
        tiers={name: numa.parse_list(system.read(f"{_TIERS}/{name}/nodelist")) for name in tiers},
    )


def unit_text(weight: int) -> str:
    """Text of ``UNIT``; ``weight`` is that of nodes with CPUs, beside 1 of the others, and 0 sets none.

    It keeps the values that it finds, and restores them when it stops or fails.
    """
    # demotion_enabled says true and false, and not every kernel takes these words.
    script = (
        "failed=0; "
        'keep() { old=; read -r old <"$1"; case "$old" in true) old=1;; false) old=0;; esac; '
        f'echo "$1 $old" >>{_BEFORE}; }}; '
        'put() { echo "$2" >"$1"; now=; read -r now <"$1"; '
        '[ "$now" = "$3" ] || { echo "$1 is ${now:-missing} instead of $3"; failed=1; }; }; '
        f"keep {DEMOTION}; keep {BALANCING}; "
        f"put {DEMOTION} 1 true; put {BALANCING} {BETWEEN_TIERS} {BETWEEN_TIERS}; "
    )
    if weight:
        script += (
            f'for file in {WEIGHTS}/node*; do keep "$file"; done; '
            # Back to the kernel's own weights last; writing a weight turns them off.
            f"[ ! -e {WEIGHTS}/auto ] || keep {WEIGHTS}/auto; "
            f"for file in {WEIGHTS}/node*; do "
            # By cat: dash's read takes byte by byte, and then the kernel shows an empty list.
            'cpus=$(cat "/sys/devices/system/node/${file##*/}/cpulist"); '
            f'weight=1; [ -z "$cpus" ] || weight={weight}; put "$file" $weight $weight; done; '
        )
    script += "exit $failed"
    restore = f'[ ! -e {_BEFORE} ] || while read -r path value; do echo "$value" >"$path"; done <{_BEFORE}'

    def quoted(text: str) -> str:
        # systemd expands $ and % itself.
        return "/bin/sh -c '{}'".format(text.replace("$", "$$").replace("%", "%%"))

    return "\n".join(
        [
            "# Written by oeprov: pages move between DRAM and memory nodes by their use.",
            "[Unit]",
            "Description=Pages move between DRAM and memory nodes",
            # These set kernel.numa_balancing too.
            "After=systemd-sysctl.service tuned.service oeprov-system-ram.service",
            "",
            "[Service]",
            "Type=oneshot",
            "RemainAfterExit=yes",
            "RuntimeDirectory=oeprov-tiering",
            "ExecStart=" + quoted(script),
            "ExecStopPost=-" + quoted(restore),
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def _wanted_weights(tiering: Tiering, with_cpus: List[int], weight: int) -> Dict[str, str]:
    if not weight:
        return {}
    return {node: str(weight if int(node) in with_cpus else 1) for node in tiering.weights}


def differences(tiering: Tiering, with_cpus: List[int], weight: int) -> List[str]:
    """What is not as the mode sets it: path, value and wanted value, one line each."""
    pairs = [(DEMOTION, tiering.demotion, "true"), (BALANCING, tiering.balancing, BETWEEN_TIERS)]
    for node, value in _wanted_weights(tiering, with_cpus, weight).items():
        pairs.append((f"{WEIGHTS}/node{node}", tiering.weights[node], value))
    return [
        f"{path} is {found or 'missing'} instead of {value}" for path, found, value in pairs if found != value
    ]


def notes(state: State, desired: Desired) -> List[str]:
    """What becomes of the weights that the kernel sets by itself (Linux 6.16 or newer)."""
    auto, kept = state.tiering.auto_weights, unit_text(0)
    if desired.pmem_dram_weight and auto == "true":
        return [
            f"pmem_dram_weight {desired.pmem_dram_weight} turns the kernel's own weights of interleaving off "
            f"for the whole system ({WEIGHTS}/auto), also for programs of others: weights follow neither "
            "bandwidth nor hot-plug then; without pmem_dram_weight they stay"
        ]
    if not desired.pmem_dram_weight and auto == "false" and state.files.get(UNIT, kept) == kept:
        return [
            f"the kernel's own weights of interleaving are off: somebody has written a weight; `echo 1 "
            f">{WEIGHTS}/auto` turns them on again"
        ]
    return []


def _with_cpus(state: State) -> List[int]:
    return [node.id for node in state.numa if node.cpus]


def what_differs(state: State, desired: Desired) -> List[str]:
    """``differences`` of an observed host."""
    return differences(state.tiering, _with_cpus(state), desired.pmem_dram_weight)


def _same_tier(tiers: Dict[str, List[int]], fast: List[int], slow: List[int]) -> List[str]:
    """Why no page would move: the kernel takes a memory node for as fast as DRAM."""
    found = []
    for name, nodes in sorted(tiers.items()):
        same = [node for node in slow if node in nodes] if any(node in nodes for node in fast) else []
        found += [
            f"the kernel has node {node} in {name}, the tier of DRAM (nodes {numa.list_text(nodes)}), so it "
            "would move no page there: the firmware's tables (HMAT) do not say that the memory is slower, or "
            "the kernel is older than 6.10 and does not read that; use pmem_mode: system-ram"
            for node in same
        ]
    return found


def problems(state: State, desired: Desired) -> List[str]:
    """Why the running kernel cannot do it."""
    if state.assumed:
        return []
    found = []
    release = state.kernel.running
    for path, value in ((DEMOTION, state.tiering.demotion), (BALANCING, state.tiering.balancing)):
        if not value:
            found.append(
                f"kernel {release} has no {path}, which pmem_mode tiered needs: set kernel_version: newest "
                "or a release from 5.18 on, or use pmem_mode: system-ram"
            )
    if desired.pmem_dram_weight and not state.tiering.weights:
        found.append(
            f"kernel {release} has no {WEIGHTS}, which pmem_dram_weight needs: leave pmem_dram_weight out, "
            "or set kernel_version: newest or a release from 6.9 on"
        )
    slow = [item.target_node for item in state.dax if item.mode == "system-ram"]
    slow += [node.id for node in numa.cpuless(state) if not numa.other_memory(state, node)]
    return found + _same_tier(state.tiering.tiers, _with_cpus(state), sorted(set(slow)))


def plan(state: State, desired: Desired, nodes: Part) -> Part:
    """``nodes``, the way to memory nodes, with tiering in place of memkind's nodes."""
    steps = [step for step in nodes.after if step.action != "write_memkind_nodes"]
    steps += numa.forget_memkind(state, "the kernel chooses the node of each page")
    text, wrong = unit_text(desired.pmem_dram_weight), what_differs(state, desired)
    if state.files.get(UNIT) != text or ENABLED not in state.files or wrong:
        steps.append(
            Step(
                id="tiering",
                what="let the kernel move pages between DRAM and the memory nodes",
                why="; ".join(wrong) or "it must come back at the next boot",
                commands=[
                    ["write", UNIT, text],
                    ["systemctl", "enable", UNIT_NAME],
                    ["systemctl", "restart", UNIT_NAME],
                ],
                action="keep_tiering",
                args={"weight": desired.pmem_dram_weight},
            )
        )
    return nodes._replace(after=steps, notes=nodes.notes + notes(state, desired))


def forget(state: State) -> List[Step]:
    """Restore what the kernel did before; no step if the mode was not there."""
    if UNIT not in state.files and ENABLED not in state.files:
        return []
    return [
        Step(
            id="tiering-forget",
            what="remove " + UNIT,
            why="the kernel moves pages between nodes as before",
            commands=[["systemctl", "disable", "--now", UNIT_NAME], ["rm", UNIT]],
            action="forget_tiering",
        )
    ]


def _keep_tiering(system: System, args: Dict[str, Any]) -> Applied:
    weight, nodes = args["weight"], numa.observe_nodes(system)
    with_cpus = [node.id for node in nodes if node.cpus]
    slow = [node.id for node in numa.without_cpus(nodes)]
    if not slow:
        raise CommandError("there is no memory node without CPUs, so there is nothing to move pages to")
    for problem in _same_tier(observe(system).tiers, with_cpus, slow):
        raise CommandError(problem)
    changed = system.write(UNIT, unit_text(weight))
    if changed:
        system.check(["systemctl", "daemon-reload"])
    if not system.exists(ENABLED):
        system.check(["systemctl", "enable", "--quiet", UNIT_NAME])
        changed = True
    if changed or differences(observe(system), with_cpus, weight):
        # Without a stop first, a unit that is active would not set anything again.
        result = system.run(["systemctl", "restart", UNIT_NAME])
        wrong = differences(observe(system), with_cpus, weight)
        if wrong or not result.ok:
            raise CommandError(
                "{}; `journalctl -u {}` says more".format("; ".join(wrong) or result.explain(), UNIT_NAME)
            )
        changed = True
    return Applied(changed, f"pages move between nodes; {UNIT_NAME} does it at each boot")


def _forget_tiering(system: System, args: Dict[str, Any]) -> Applied:
    if not system.exists(UNIT) and not system.exists(ENABLED):
        return Applied(False, f"there is no {UNIT_NAME}")
    # Its stop restores the values from before.
    system.check(["systemctl", "disable", "--now", "--quiet", UNIT_NAME])
    system.remove(ENABLED)
    system.remove(UNIT)
    system.check(["systemctl", "daemon-reload"])
    return Applied(True, f"{UNIT_NAME} is gone, and what it set")


ACTIONS: Dict[str, Action] = {"keep_tiering": _keep_tiering, "forget_tiering": _forget_tiering}
