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
        description="What trains: oeprov's own runtime, or OpenEmbedding or DeepRec as they are. The "
        "same for all hosts of the cluster.",
    )
    venv: Text = Field(
        default="",
        description="The environment's directory; default: /opt/oeprov/venv, and on kind local the "
        "environment that oeprov itself runs in. Other flavors have one of their own name: "
        "/opt/oeprov/openembedding, on kind local below the state directory.",
    )
    python: Text = Field(default="python3", description="Interpreter that makes the environment.")
    extra: Literal["auto", "none", "tensorflow", "tensorflow-gpu", "torch"] = Field(
        default="auto",
        description="Framework to install with oeprov. auto: tensorflow on workers (tensorflow-gpu on kind "
        "gpu), none on hosts that are parameter servers only.",
    )
    index: Text = Field(
        default="",
        pattern=r"^(/.*|https?://.*)?$",
        description="Where pip gets packages: the address of an index, or a directory of wheels on the host; "
        "default: as pip is configured there (PyPI).",
    )
    packages: list[Text] = Field(
        default=[], description="System packages to install beyond those that oeprov knows it needs."
    )
    repositories: dict[str, Text] = Field(
        default={},
        description="Where system packages come from, for sites with mirrors: name -> address, and after a "
        "space that of the signing key, or 'unsigned'. epel, crb, scl, nvidia take the place of those that "
        "EL hosts get packages from, archive of all of the distribution's own, kernel of the kernel's; other "
        "names are used too. For apt, name -> a line of sources.list. A directory of packages on the host is "
        "taken for either.",
    )
    package: Text = Field(
        default="",
        description="Other flavors: what pip installs. openembedding: a requirement (default: "
        "openembedding==0.1.2, without persistent memory), or path on the host or URL of an archive such as "
        "openembedding-0.1.2-pmem.tar.gz, or source: built on each host, with persistent memory, from "
        "runtime_repository. deeprec: path on the hosts or URL of a wheel; default: one is "
        "built.",
    )
    tensorflow: Text = Field(
        default="",
        pattern=r"^(\d+\.\d+\.\d+)?$",
        description="Flavor openembedding: version of TensorFlow; default: the newest known to go with it "
        "that runs on the host's Python.",
    )
    repository: Text = Field(
        default="",
        description="Other flavors: where git gets their sources, which have the scripts that are run; "
        "default: the project's own address. What those fetch by git in turn comes from a mirror with git "
        "config --system url.MIRROR.insteadOf https://github.com/ on the hosts.",
    )
    revision: Text = Field(
        default="",
        description="Other flavors: tag, branch or commit of the sources; default: one that is known to "
        "work.",
    )
    sources: Text = Field(
        default="",
        pattern=r"^(/.*)?$",
        description="Other flavors: directory on the hosts that has the sources already; default: oeprov "
        "gets "
        "them into the environment.",
    )
    variant: Literal["horovod", "standalone", "mirrored", "mpi"] = Field(
        default="horovod",
        description="Flavor openembedding: horovod: a parameter server and workers under horovodrun; the "
        "others "
        "are its examples without a server of its own: one process (standalone), MirroredStrategy "
        "(mirrored), "
        "MultiWorkerMirroredStrategy under mpirun (mpi).",
    )
    image: Text = Field(
        default="",
        description="Flavor deeprec: developer image that the wheel is built in; default: DeepRec's own.",
    )
    image_check: bool = Field(
        default=True,
        description="Ask the registry for images before anything is changed; false: for hosts without one.",
    )
    arguments: list[Text] = Field(
        default=[],
        description="Other flavors: more words for the training script's command line, such as --bf16.",
    )
    preload: Text = Field(
        default="",
        description="Other flavors: library that training is started with (LD_PRELOAD), such as jemalloc's.",
    )
