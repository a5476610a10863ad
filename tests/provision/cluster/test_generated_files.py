"""A setting is declared once: what follows from it is generated, current, and has a setting that is added."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from oe_runtime.run.optimizers import LEARNING_RATES
from oe_runtime.run.options import parser
from provision.cluster import settings
from provision.cluster.setting_types import Flag
from provision.cluster.training_settings import TrainingSettings, trainer_defaults
from provision.jobs.placement import training_words
from provision.node.step import Desired

ROOT = Path(__file__).parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load()


def test_generated_files_are_current() -> None:
    assert generate.stale() == [], "these files do not follow the settings; run: make generate"


def test_a_changed_description_makes_every_file_with_it_stale() -> None:
    class Changed(settings.PmemSettings):
        mount_prefix: str = Field(default="/mnt/pmem", description="Another description.")

    models = [Changed if model is settings.PmemSettings else model for model in settings.MODELS]
    assert generate.stale(models) == [
        "inventory/schema.json",
        "roles/pmem/meta/argument_specs.yml",
        "inventory/sample.yml",
        "docs/reference/settings.md",
    ]


def test_an_optimizer_that_is_added_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEARNING_RATES, "zadam", 0.1)
    monkeypatch.setitem(generate.OPTIONS, "zadam", {"name": "adam", "amsgrad": True})
    path = "provision/cluster/trainer_optimizers.json"
    assert generate.stale() == [path]
    assert json.loads(dict(generate.outputs())[path])["zadam"] == [3, 0]


def test_a_setting_that_is_added_appears_in_all_outputs() -> None:
    class More(TrainingSettings):
        patience: Annotated[int | None, Flag()] = Field(
            default=None, ge=2, description="Epochs without progress. See training_epochs."
        )

    class MorePmem(settings.PmemSettings):
        """Text."""

        colour: Literal["red", "blue"] = Field(default="red", description="Colour of the modules.")

    more = {TrainingSettings: More, settings.PmemSettings: MorePmem}
    found = dict(generate.outputs([more.get(model, model) for model in settings.MODELS]))

    for path in (generate.TRAINER_FLAGS, generate.LAUNCH_FLAGS):
        flag = json.loads(found[path])["patience"]
        assert (flag["type"], flag["minimum"]) == ("integer", 2)
        assert "Epochs without progress. See --epochs." in flag.values()
    known = json.loads(found["inventory/schema.json"])["definitions"]["variables"]["properties"]
    assert known["training_patience"]["anyOf"][0] == {"minimum": 2, "type": "integer"}
    assert known["pmem_colour"]["default"] == "red"
    assert "\npmem_colour: red\n" in found["roles/pmem/defaults/main.yml"]
    assert (
        "      pmem_colour:\n        description: Colour of the modules.\n        type: str\n"
        "        choices:\n          - red\n          - blue\n        default: red\n"
    ) in found["roles/pmem/meta/argument_specs.yml"]
    sample = found["inventory/sample.yml"].splitlines()
    assert "    # training_patience:                 # Epochs without progress. See training_epochs" in sample
    line = "          # pmem_colour: red             # Colour of the modules. One of red, blue"
    assert sample[sample.index(line) - 1].strip().startswith(("pmem_", "#"))
    reference = found["docs/reference/settings.md"]
    facts = "*whole number from 2 · flag `--patience`*"
    assert (
        f"### `training_patience`\n\nEpochs without progress. See training_epochs.\n\n{facts}\n" in reference
    )
    assert (
        "### `pmem_colour`\n\nColour of the modules.\n\n*one of `red`, `blue` · default `red`*\n" in reference
    )


def test_hand_written_parts_of_the_sample_stay() -> None:
    text = """\
a: 1  # mine
workers:
  worker_count: 2   # old
  # worker_port: 1
  worker_environment:   # old
    B: c
"""
    made = generate._sample(text, [settings.WorkerSettings])
    lines = [line for line in made.splitlines() if not line.startswith(" " * 41)]
    assert [re.sub(r" +# [A-Z].*", "", line) for line in lines] == [
        "a: 1  # mine",
        "workers:",
        "  worker_count: 2",
        "  # worker_port: 1",
        "  # worker_threads: 0",
        "  worker_environment:",
        "    B: c",
    ]
    assert "(default 1)" in made
    assert "(example, default 0)" in made
    assert generate._sample(made, [settings.WorkerSettings]) == made


def test_the_node_has_the_same_defaults() -> None:
    """``Desired`` runs where the models cannot; the few that it has otherwise are settled before it."""
    mine = {
        model.prefix + name: field
        for model in settings.HOST_MODELS
        for name, field in model.model_fields.items()
    }
    settled = {"kernel_version": "", "gpu_driver": "", "runtime_extra": "", "pmem_mode": "none"}
    for name in set(mine) & set(Desired._fields):
        assert Desired._field_defaults[name] == settled.get(name, mine[name].default), name


class TestTrainer:
    """The trainer and the settings that are its flags too."""

    flags: ClassVar[dict[str, Any]] = {action.dest: action for action in parser()._actions}
    fields = TrainingSettings.model_fields

    def test_has_a_flag_for_each_setting(self) -> None:
        own = {"script"}  # a flag with words of its own, and the words after a lone --
        assert set(self.fields) - set(self.flags) - own == {"restarts", "script_arguments"}
        assert set(self.flags["optimizer"].choices) == set(LEARNING_RATES)

    def test_decides_what_may_be_unset_and_nothing_else(self) -> None:
        """One of both says a default, never both."""
        unset = {name for name, field in self.fields.items() if field.default is None}
        assert set(trainer_defaults()) <= unset
        assert unset - set(trainer_defaults()) == {
            "steps", "admission", "eviction", "staleness", "learning_rate",
            "schema", "label", "categories", "numbers", "eval_data",
        }  # fmt: skip
        for name in set(self.fields) - unset - {"export", "restarts", "data", "script", "script_arguments"}:
            assert self.flags[name].default == self.fields[name].default, name

    def test_is_told_nothing_that_is_not_set(self) -> None:
        words = training_words(TrainingSettings(data="x", export=False), Path("/run"))
        assert words == [
            "--model", "deepfm", "--data", "x", "--keep-checkpoints", "3", "--server-wait", "300",
            "--run-dir", "/run",
        ]  # fmt: skip
        words = training_words(TrainingSettings(pipeline=True, jit=False, workqueue=True), Path("/run"))
        assert {"--pipeline", "--no-jit", "--workqueue", "--on-worker-lost"} <= set(words)

    def test_understands_every_setting_that_a_job_of_an_earlier_version_has(self) -> None:
        earlier = TrainingSettings(data="x").decided()
        words = training_words(earlier, Path("/run"))
        given = parser().parse_args([*words, "--stock"])
        assert (given.dim, given.epochs, given.pipeline, given.jit) == (9, 1, True, False)
        assert given.hidden == (256, 128)
