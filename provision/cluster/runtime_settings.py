"""Inventory variables of what trains: ``runtime_*``; see ``provision.cluster.settings``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from provision.cluster.setting_types import Settings, Text


class RuntimeSettings(Settings):
    """What trains, and the Python environment that it runs in."""

    prefix: ClassVar[str] = "runtime_"
    flavor: Literal["oe_runtime", "openembedding", "deeprec"] = Field(
        default="oe_runtime",
        description="What trains: oeprov's own runtime, or unmodified OpenEmbedding or DeepRec. The same "
        "for all hosts of the cluster.",
    )
    venv: Text = Field(
        default="",
        description="Directory of the Python environment. Unset: /opt/oeprov/venv, on kind local the "
        "environment of oeprov itself. Other flavors: their name, as in /opt/oeprov/openembedding; on kind "
        "local below the state directory.",
    )
    python: Text = Field(default="python3", description="Interpreter that makes the environment.")
    extra: Literal["auto", "none", "tensorflow", "tensorflow-gpu", "torch"] = Field(
        default="auto",
        description="Framework to install with oeprov. auto: tensorflow on workers (tensorflow-gpu on kind "
        "gpu), none on hosts that only have parameter servers.",
    )
    index: Text = Field(
        default="",
        pattern=r"^(/.*|https?://.*)?$",
        description="Where pip gets packages: address of an index, or a directory of wheels on the host. "
        "Unset: as pip is configured there (PyPI).",
    )
    packages: list[Text] = Field(
        default=[], description="More system packages to install, besides those that oeprov needs."
    )
    repositories: dict[str, Text] = Field(
        default={},
        description="Mirrors of system packages: name -> address, a space, and the signing key's address or "
        "'unsigned'. For apt: name -> a line of sources.list. epel, crb, scl and nvidia replace these "
        "repositories of EL hosts, archive all of the distribution's, kernel the kernel's; other names are "
        "added. A directory of packages on the host works too.",
    )
    package: Text = Field(
        default="",
        description="Other flavors: what pip installs. openembedding: a requirement (unset: "
        "openembedding==0.1.2, without persistent memory); a path on the host or URL of an archive such as "
        "openembedding-0.1.2-pmem.tar.gz; or source, which builds runtime_repository on each host with "
        "persistent memory. deeprec: path on the hosts or URL of a wheel (unset: oeprov builds one).",
    )
    tensorflow: Text = Field(
        default="",
        pattern=r"^(\d+\.\d+\.\d+)?$",
        description="Flavor openembedding: version of TensorFlow. Unset: the newest known to work that runs "
        "on the host's Python.",
    )
    repository: Text = Field(
        default="",
        description="Other flavors: where git gets the sources with the training scripts. Unset: the "
        "project's own address. For a mirror of what the sources fetch by git, run on the hosts: git config "
        "--system url.MIRROR.insteadOf https://github.com/",
    )
    revision: Text = Field(
        default="",
        description="Other flavors: tag, branch or commit of the sources. Unset: one that is known to work.",
    )
    sources: Text = Field(
        default="",
        pattern=r"^(/.*)?$",
        description="Other flavors: directory on the hosts that already has the sources. Unset: oeprov gets "
        "them.",
    )
    variant: Literal["horovod", "standalone", "mirrored", "mpi"] = Field(
        default="horovod",
        description="Flavor openembedding: way to train. horovod: a parameter server, and workers under "
        "horovodrun. The others are its examples without a parameter server: one process (standalone), "
        "MirroredStrategy (mirrored), MultiWorkerMirroredStrategy under mpirun (mpi).",
    )
    image: Text = Field(
        default="",
        description="Flavor deeprec: image to build the wheel in. Unset: DeepRec's developer image.",
    )
    image_check: bool = Field(
        default=True,
        description="Check that the registry has images before anything changes. Set false where hosts "
        "reach no registry.",
    )
    arguments: list[Text] = Field(
        default=[],
        description="Other flavors: more arguments of the training script, such as --bf16.",
    )
    preload: Text = Field(
        default="",
        description="Other flavors: library to preload into training (LD_PRELOAD), such as jemalloc's.",
    )
