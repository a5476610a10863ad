"""What a host should be (``Desired``) and the way there (``Step``, ``Part``, ``Plan``): plain JSON values."""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from .command import System


class Step(NamedTuple):
    """One thing to do, shown to the user before it is done.

    ``destroys`` names the objects whose data is lost, as ``--consent HOST:OBJECT`` takes them; it is empty
    for a safe step. ``commands`` are the exact argument vectors, for display only: ``edit FILE -OLD +NEW``
    and ``write FILE TEXT`` are changes that oeprov makes itself, and ``<…>`` is a value that an earlier step
    brings. A finished step whose ``what`` has such a gap is shown by the message of its ``Applied``.
    ``apply`` carries out ``action`` with ``args``.
    """

    id: str
    what: str
    why: str
    destroys: List[str] = []
    reboots: bool = False
    commands: List[List[str]] = []
    action: str = ""
    args: Dict[str, Any] = {}
    role: str = "pmem"  # the Ansible role that carries it out
    preparing: bool = False  # interrupts nothing that runs on the host, so all hosts do it at once
    disturbs: bool = False  # memory or files that a parameter server may hold are gone afterwards
    scope: str = "host"  # "training": `oeprov pmem-mode` leaves it out


class Applied(NamedTuple):
    """The result of a step; ``changed`` is False if there was nothing to do."""

    changed: bool
    message: str


# Carries out a step with its ``args``. The second time it changes nothing. Raises CommandError.
Action = Callable[[System, Dict[str, Any]], Applied]


class Part(NamedTuple):
    """One mechanism's share of a plan: steps before and after the reboot, kernel arguments, why to reboot."""

    before: List[Step] = []
    add_arguments: List[str] = []
    remove_arguments: List[str] = []
    arguments_why: str = ""
    reboot_why: str = ""  # empty: needs no reboot
    after: List[Step] = []
    notes: List[str] = []
    problems: List[str] = []


def join(first: Part, second: Part) -> Part:
    """Put two shares together, the steps of the first one first."""
    return Part(
        first.before + second.before,
        first.add_arguments + second.add_arguments,
        first.remove_arguments + second.remove_arguments,
        "; ".join(why for why in (first.arguments_why, second.arguments_why) if why),
        "; ".join(why for why in (first.reboot_why, second.reboot_why) if why),
        first.after + second.after,
        first.notes + second.notes,
        first.problems + second.problems,
    )


CONSENT = "--consent "


def note_left(desired: "Desired", what: str, names: List[str]) -> str:
    """The note on what a removal leaves; ``names``: what to consent to, to lose it too."""
    flags = " ".join(f"{CONSENT}{desired.host}:{name}" for name in names)
    return f"left: {what}; to lose that too, add: {flags}"


class Plan(NamedTuple):
    """The steps for one host, in order, bound to the state they were made from by its digest.

    ``problems`` say why the host cannot get there; a plan with problems must not be applied. ``notes`` are
    for information.
    """

    host: str
    steps: List[Step] = []
    digest: str = ""
    notes: List[str] = []
    problems: List[str] = []

    @property
    def converged(self) -> bool:
        """Nothing to do and nothing in the way."""
        return not self.steps and not self.problems

    @property
    def destroys(self) -> List[str]:
        """All objects that the steps destroy, in order, without repeats."""
        return list(dict.fromkeys(item for step in self.steps for item in step.destroys))

    @property
    def consentable(self) -> List[str]:
        """``HOST:OBJECT`` of all that is lost with consent only: objects of steps, then those in notes."""
        words = [word for note in self.notes for word in note.split(CONSENT)[1:]]
        named = [f"{self.host}:{item}" for item in self.destroys] + [word.split()[0] for word in words]
        return list(dict.fromkeys(named))

    def role_steps(self, role: str) -> List[Step]:
        """The steps of one Ansible role, in order; ``all`` stands for every role."""
        return [step for step in self.steps if role in (step.role, "all")]

    def _split_at_reboot(self) -> Tuple[List[Step], List[Step]]:
        """The steps before the first reboot, and that reboot (empty: there is none)."""
        for number, step in enumerate(self.steps):
            if step.action == "reboot":
                return self.steps[:number], [step]
        return self.steps, []

    def steps_before_reboot(self) -> List[Step]:
        """Steps of other roles that the reboot waits for; it does not wait for those that only prepare."""
        before, reboot = self._split_at_reboot()
        return [step for step in before if reboot and step.role != "kernel" and not step.preparing]

    def ready_steps(self, role: str, preparing: bool) -> List[Step]:
        """The steps that a role can do now; ``preparing``: only steps that interrupt nothing."""
        before, reboot = self._split_at_reboot()
        ready = [step for step in before if step.role == role and (step.preparing or not preparing)]
        if role == "kernel" and not preparing and not self.steps_before_reboot():
            ready += reboot
        return ready


class Desired(NamedTuple):
    """What the inventory asks of one host; the fields are named like its variables, see the settings.

    kernel_version, gpu_driver and runtime_extra are empty where a setting says to keep or to leave out.
    """

    host: str = ""
    kind: str = "cpu"
    parameter_server: bool = False  # host is in the group parameter_servers
    worker: bool = False
    retry_trials: bool = False  # repeat trial boots that failed before
    ansible_core: str = ""  # version of the controller's; "": Ansible is not used over a connection
    ansible_interpreter: str = ""  # Ansible's Python on the host, if the inventory names it
    runtime_requirements: List[str] = []  # what runtime_extra means (PEP 508), from oeprov's own metadata
    runtime_wheel_digest: str = ""  # of the sources of oeprov's wheel, for hosts other than local
    runtime_wheel_key: str = ""  # of the wheels that the controller builds itself; see build.wheel_key
    remove: bool = False  # `oeprov destroy`: remove what oeprov made, and do nothing else
    remove_objects: List[str] = []  # objects whose data may be lost
    remove_jobs: str = ""  # directory of jobs
    remove_known: bool = False  # the journal has the kernel arguments from before oeprov
    remove_arguments_before: List[str] = []  # these arguments
    remove_grub_default: str = "saved"  # GRUB_DEFAULT before oeprov; "saved" if unknown, which keeps it

    # Generated from the settings by `make generate`; edit above this line only.
    kernel_version: str = ""
    kernel_source: str = "distribution"
    kernel_repository_url: str = ""
    kernel_archive_url: str = ""
    kernel_arguments: List[str] = []
    kernel_trial_boot: bool = True
    kernel_reboot_timeout: int = 1800
    pmem_mode: str = "none"
    pmem_directory: str = ""
    pmem_size: int = 0
    pmem_memmap: str = ""
    pmem_namespaces: List[str] = []
    pmem_mount_prefix: str = "/mnt/pmem"
    pmem_filesystem: str = "ext4"
    pmem_map: str = "auto"
    pmem_movable: bool = True
    pmem_max_movable_ratio: float = 4.0
    pmem_dram_weight: int = 0
    pmem_device_timeout: int = 90
    ssd_devices: List[str] = []
    ssd_mount_prefix: str = "/mnt/ssd"
    ssd_filesystem: str = "ext4"
    runtime_flavor: str = "oe_runtime"
    runtime_venv: str = ""
    runtime_python: str = "python3"
    runtime_extra: str = ""
    runtime_index: str = ""
    runtime_packages: List[str] = []
    runtime_repositories: Dict[str, str] = {}
    runtime_package: str = ""
    runtime_tensorflow: str = ""
    runtime_repository: str = ""
    runtime_revision: str = ""
    runtime_sources: str = ""
    runtime_variant: str = "horovod"
    runtime_image: str = ""
    runtime_image_check: bool = True
    gpu_driver: str = ""
    gpu_persistence: bool = True
    gpu_fabric_manager: bool = True
