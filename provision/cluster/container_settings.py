"""Inventory variables of jobs in containers of this machine; set them under ``all: vars:``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from provision.cluster.setting_types import Settings, Text


class ContainerSettings(Settings):
    """Images for ``launch-training --on docker`` and ``podman``."""

    prefix: ClassVar[str] = "container_"
    server_image: Text = Field(
        default="oeprov-server",
        pattern=r"^[^\s-]\S*$",
        description="Image of parameter servers. containers/ has its recipe.",
    )
    worker_image: Text = Field(
        default="oeprov-worker",
        pattern=r"^[^\s-]\S*$",
        description="Image of workers. containers/ has its recipe.",
    )
    arguments: list[Text] = Field(
        default=[], description="More arguments of `docker run` or `podman run`, such as --gpus=all."
    )
