"""Test a GPU host: load the driver, keep it loaded, and train one step on each GPU."""

import csv
import json
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import cuda, flavors, runtime
from .command import NOT_FOUND, CommandError, System
from .state import State
from .step import Action, Applied, Desired, Step

# One line: driver, TensorFlow, devices.
CHECKED = "/var/lib/oeprov/gpu-check"  # versions of the last passed test of the GPUs
UNIT_NAME = "oeprov-nvidia-persistence.service"
UNIT = "/etc/systemd/system/" + UNIT_NAME
ENABLED = "/etc/systemd/system/multi-user.target.wants/" + UNIT_NAME
# It also sets NVIDIA's daemon, if that runs: Ubuntu's starts with the mode off, others are not enabled.
UNIT_TEXT = """\
[Unit]
Description=oeprov: keep the NVIDIA driver loaded while nobody uses it
After=nvidia-persistenced.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-smi -pm 1

[Install]
WantedBy=multi-user.target
"""
_QUERY = "pci.bus_id,name,driver_version,memory.total,persistence_mode"
_STEP_TIMEOUT = 900  # TensorFlow compiles code for a newer GPU at its first use
# Runs in the environment's own interpreter, on TensorFlow 2.2 or later: steps of a small model on each GPU,
# whose loss must fall, and with several GPUs a sum over all of them through NCCL.
STEP = r"""
import json, os, sys
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf

def step(device):
    with tf.device(device):
        tf.random.set_seed(1)
        table = tf.Variable(tf.random.normal([1000, 16], stddev=0.1))
        weights = tf.Variable(tf.random.normal([16, 1], stddev=0.1))
        ids = tf.constant([[number % 1000] for number in range(4096)])
        labels = tf.cast(ids % 2, tf.float32)
        losses = []
        for _ in range(5):
            with tf.GradientTape() as tape:
                logits = tf.matmul(tf.reshape(tf.gather(table, ids), [-1, 16]), weights)
                losses_each = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(losses_each)
            gradients = tape.gradient(loss, [table, weights])
            table.assign_sub(50.0 * tf.convert_to_tensor(gradients[0]))
            weights.assign_sub(0.5 * gradients[1])
            losses.append(float(loss))
        where = logits.device
    return {"losses": losses, "device": where}

def total(count):
    strategy = tf.distribute.MirroredStrategy()
    each = strategy.run(lambda: tf.constant(1.0))
    return float(strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None))

def main(kind):
    devices = [item.name.replace("physical_device:", "") for item in tf.config.list_physical_devices(kind)]
    out = {"tensorflow": tf.__version__, "steps": [step(item) for item in devices]}
    out["sum"] = total(len(devices)) if kind == "GPU" and len(devices) > 1 else float(len(devices))
    return out

if __name__ == "__main__":
    print("OEPROV-GPU " + json.dumps(main("GPU")))
"""


class Smi(NamedTuple):
    """One line of nvidia-smi; ``memory`` in MiB."""

    bus: str
    name: str
    driver: str
    memory: int
    persistence: bool


def parse_smi(text: str) -> List[Smi]:
    """Parse the answer of nvidia-smi to ``_QUERY``: CSV without a header."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 5:
            memory = row[3].split()[0]
            size = int(memory) if memory.isdigit() else 0
            found.append(Smi(_bus(row[0]), row[1], row[2], size, row[4].strip() == "Enabled"))
    return found


def _bus(text: str) -> str:
    """00000000:3B:00.0, as nvidia-smi writes it → 0000:3b:00.0, as sysfs does."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def is_persistent(system: System) -> bool:
    """Our unit keeps the driver loaded, at each boot too."""
    return system.read(UNIT) == UNIT_TEXT and system.exists(ENABLED)


def python_of(state: State, desired: Desired) -> str:
    """Version of the environment's present or future Python; empty: unknown."""
    if state.runtime.exists and state.runtime.python:
        return state.runtime.python
    return flavors.get(desired).framework(state, desired)[1]


def bounds_of(state: State, desired: Desired) -> Optional[List[Tuple[str, cuda.Version]]]:
    """Version bounds of the TensorFlow for the GPUs; None without one."""
    return cuda.clauses(flavors.get(desired).framework(state, desired)[0])


def build(state: State, desired: Desired) -> Optional[cuda.Build]:
    """The present or future release of TensorFlow; None: none for GPUs, or none that fits."""
    bounds = bounds_of(state, desired)
    if bounds is None:
        return None
    there = cuda.build_of(state.runtime.distributions.get("tensorflow", ""))
    if there is not None and cuda.allowed(there, bounds):
        return there
    found = cuda.candidates(bounds, python_of(state, desired))
    return found[-1] if found else None


def _key(driver: str, tensorflow: str, devices: List[str]) -> str:
    words = ["driver " + driver, "TensorFlow " + tensorflow if tensorflow else "no TensorFlow"]
    return ", ".join(words + devices)


def plan_load() -> List[Step]:
    """One step that loads an installed driver."""
    return [
        Step(
            id="gpu-load",
            what="load the NVIDIA driver",
            why="it is not loaded",
            commands=[["modprobe", "nvidia"]],
            action="load_gpu_driver",
            role="gpu",
        )
    ]


def plan(state: State, desired: Desired, again: bool) -> List[Step]:
    """Steps that keep the driver loaded and test each GPU; ``again``: repeat a passed test."""
    steps = []
    if desired.gpu_persistence and not state.gpu.persistence:
        steps.append(
            Step(
                id="gpu-persistence",
                what="keep the NVIDIA driver loaded while nobody uses it",
                why="otherwise each start of a program waits for it, and its settings are lost",
                commands=[["write", UNIT, UNIT_TEXT], ["systemctl", "enable", "--now", UNIT_NAME]],
                action="keep_gpu_driver",
                role="gpu",
            )
        )
    trains = bounds_of(state, desired) is not None
    tensorflow = state.runtime.distributions.get("tensorflow", "") if trains else ""
    if again or state.gpu.checked != _key(state.gpu.driver, tensorflow, state.gpu.devices):
        python = runtime.interpreter(desired.runtime_venv)
        steps.append(
            Step(
                id="gpu-check",
                what="train a step on each GPU" if trains else "check each GPU with nvidia-smi",
                why="driver, CUDA or GPUs differ from the last test",
                commands=[_smi_command()] + ([[python, "-I", "-c", "<a training step>"]] if trains else []),
                action="check_gpu",
                role="gpu",
                args={"python": python if trains else "", "devices": state.gpu.devices},
            )
        )
    return steps


def _smi_command() -> List[str]:
    return ["nvidia-smi", "--query-gpu=" + _QUERY, "--format=csv,noheader"]


def _load(system: System, args: Dict[str, Any]) -> Applied:
    if system.exists("/sys/module/nvidia"):
        return Applied(False, "the NVIDIA driver is loaded")
    result = system.run(["modprobe", "nvidia"])
    if not result.ok or not system.exists("/sys/module/nvidia"):
        hints = {
            "key was rejected": "Secure Boot refuses a module without a signature that the firmware knows",
            "required key": "Secure Boot refuses a module without a signature that the firmware knows",
            "no such device": "the driver does not know this GPU, or another one has it",
        }
        said = next((hint for words, hint in hints.items() if words in result.err.lower()), "see dmesg")
        raise CommandError("{}; {}".format(result.explain() if not result.ok else "modprobe nvidia", said))
    return Applied(True, "loaded NVIDIA driver {}".format(system.read("/sys/module/nvidia/version").strip()))


def _keep(system: System, args: Dict[str, Any]) -> Applied:
    changed = system.write(UNIT, UNIT_TEXT)
    system.check(["systemctl", "daemon-reload"])
    system.check(["systemctl", "enable", "--quiet", "--now", UNIT_NAME], timeout=300)
    off = [item.bus for item in ask(system) if not item.persistence]
    if off:
        raise CommandError(
            f"persistence mode is still off on {', '.join(off)}: see journalctl -u {UNIT_NAME}"
        )
    return Applied(changed, "persistence mode is on, at the next boot too")


def ask(system: System) -> List[Smi]:
    """Ask nvidia-smi about every GPU; CommandError says what to do after a failure."""
    result = system.run(_smi_command(), timeout=300)
    if result.code == NOT_FOUND:
        raise CommandError("nvidia-smi is not installed: it comes with the driver's own packages")
    text = result.out + result.err
    if "version mismatch" in text:
        raise CommandError(
            "nvidia-smi: the driver was updated, and the old one is loaded until the next reboot"
        )
    if not result.ok:
        raise CommandError(result.explain())
    return parse_smi(result.out)


def _check(system: System, args: Dict[str, Any]) -> Applied:
    devices: List[str] = args["devices"]
    seen = ask(system)
    lost = [name for name in devices if name not in [item.bus for item in seen]]
    if lost:
        raise CommandError(
            f"nvidia-smi does not see {len(lost)} of {len(devices)} GPUs: {', '.join(lost)}; see dmesg "
            "(NVRM, Xid)"
        )
    tensorflow = _train(system, args["python"], len(seen)) if args["python"] else ""
    changed = system.write(CHECKED, _key(seen[0].driver, tensorflow, devices) + "\n")
    models = ", ".join(f"{item.name} ({item.memory} MiB)" for item in seen)
    done = f"TensorFlow {tensorflow} trained a step on each" if tensorflow else "nvidia-smi sees all"
    return Applied(changed, f"{models}: {done}")


def _train(system: System, python: str, count: int) -> str:
    """Train one step on each GPU; returns the version of TensorFlow, or raises CommandError."""
    result = system.run([python, "-I", "-c", STEP], timeout=_STEP_TIMEOUT)
    lines = [line for line in result.out.splitlines() if line.startswith("OEPROV-GPU ")]
    if not result.ok or not lines:
        raise CommandError("a training step: " + result._replace(argv=[python, "-c", "…"]).explain())
    found: Dict[str, Any] = json.loads(lines[-1].split(" ", 1)[1])
    problem = judge(found, count)
    if problem:
        raise CommandError(f"TensorFlow {found['tensorflow']}: {problem}")
    named = system.run(
        [python, "-I", "-c", "import importlib.metadata as m; print(m.version('tensorflow'))"], timeout=60
    )
    return named.out.strip() or str(found["tensorflow"])


def judge(found: Dict[str, Any], count: int) -> str:
    """The fault of the steps on ``count`` GPUs; empty if there is none."""
    steps = found["steps"]
    if len(steps) < count:
        return (
            f"it uses {len(steps)} of {count} GPUs: libraries of CUDA or cuDNN were not found, or not those "
            "that it was built with"
        )
    for number, item in enumerate(steps):
        losses = item["losses"]
        if "GPU" not in item["device"]:
            return f"the step for GPU {number} ran on {item['device']}"
        # This catches NaN too.
        if not losses[-1] < losses[0]:
            return f"training on GPU {number} does not learn: losses {losses}"
    if found["sum"] != len(steps):
        return f"the sum over {len(steps)} GPUs (NCCL) is {found['sum']}"
    return ""


ACTIONS: Dict[str, Action] = {"load_gpu_driver": _load, "keep_gpu_driver": _keep, "check_gpu": _check}
