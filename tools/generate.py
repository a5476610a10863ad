#!/usr/bin/env python3
"""Write the files that follow from the settings (`provision/cluster/settings.py`): `make generate`.

`--check` writes nothing and names the files that are not current. Only parts of some files are generated: in
the files of roles what is below MARK, in the sample the comment at each variable's first line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from provision.cluster import settings  # noqa: E402
from provision.cluster.setting_types import Scope, Settings  # noqa: E402
from provision.cluster.training_settings import (  # noqa: E402
    TRAINER_DEFAULTS,
    TRAINER_OPTIMIZERS,
    TrainingSettings,
    trainer_defaults,
)
from provision.inventory import schema  # noqa: E402

TRAINER_FLAGS = "oe_runtime/run/setting_flags.json"
LAUNCHERS_OWN = (
    "export",
    "restarts",
    "script",
    "script_arguments",
)  # settings of the training job that the trainer has no flag of
LAUNCH_FLAGS = "provision/cli/setting_flags.json"
NODE = "provision/node/step.py"  # what hosts are told of their settings
# Settings that hosts are told otherwise where they have their defaults; see ``Host.desired``.
SETTLED = {"kernel_version": "", "gpu_driver": "", "runtime_extra": "", "pmem_mode": "none"}
OF_ROLES = {"kernel_reboot_ok", "runtime_arguments", "runtime_preload"}  # settings that no plan depends on
MARK = "# Generated from the settings by `make generate`; edit above this line only."
WIDTH, COLUMN = 110, 41  # of the sample: its lines, and where comments begin
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list"}
_TYPES["object"] = "dict"
_OF_KIND = ("kernel", "pmem", "runtime", "gpu")  # roles of `oeprov_converge`, whose hosts say their kind


def outputs(models: Sequence[type[Settings]] = settings.MODELS) -> Iterator[tuple[str, str]]:
    """Each generated file with its text; in this order, since later ones follow from earlier ones."""
    yield str(TRAINER_OPTIMIZERS.relative_to(ROOT)), _json(_trainer_optimizers())
    yield TRAINER_FLAGS, _json(dict(_trainer_flags(models)))
    yield str(TRAINER_DEFAULTS.relative_to(ROOT)), _json(_trainer_defaults(models))
    trainer_defaults.cache_clear()
    yield LAUNCH_FLAGS, _json(dict(_launch_flags(models)))
    yield "inventory/schema.json", _json(schema.inventory_schema(models))
    for model in models:
        role = model.prefix.rstrip("_")
        if (ROOT / "roles" / role).is_dir():
            yield f"roles/{role}/defaults/main.yml", _defaults(role, model)
            yield f"roles/{role}/meta/argument_specs.yml", _argument_specs(role, model)
    yield NODE, _below(NODE, 4, "".join(_desired(models)))
    yield "inventory/sample.yml", _sample((ROOT / "inventory/sample.yml").read_text(), models)
    yield "docs/reference/settings.md", _reference(models)


def stale(models: Sequence[type[Settings]] = settings.MODELS) -> list[str]:
    """The files that are not as they would be generated."""
    return [path for path, text in outputs(models) if not _is_current(path, text)]


def _is_current(path: str, text: str) -> bool:
    return (ROOT / path).is_file() and (ROOT / path).read_text(encoding="utf-8") == text


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _trainer_flags(models: Sequence[type[Settings]]) -> Iterator[tuple[str, dict[str, Any]]]:
    training = [model for model in models if issubclass(model, TrainingSettings)]
    names = [name for model in training for name in model.model_fields if name not in LAUNCHERS_OWN]
    flags = {TrainingSettings.prefix + name: name for name in names}
    for model in training:
        for name, item in schema.described(model, "serialization").items():
            if name in names:
                marks = [mark.of for mark in model.model_fields[name].metadata if isinstance(mark, Scope)]
                scope = {"scope": marks[0]} if marks else {}
                yield name, {**item, **scope, "description": _as_flags(item["description"], flags)}


def _launch_flags(models: Sequence[type[Settings]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The training job's first."""
    flags = {model.prefix + field: name for model in models for name, (field, _) in model.flags().items()}
    for model in sorted(models, key=lambda model: not issubclass(model, TrainingSettings)):
        items = schema.described(model)
        for name, (field, mark) in model.flags().items():
            item = {**items[field], **({"enum": list(mark.allowed)} if mark.allowed else {})}
            kind = item.get("type", "size")  # a size is a number or a text
            bounds = {key: item[key] for key in ("minimum", "maximum") if key in item}
            said = item["description"] + _choices(item)
            for choice in set(items[field].get("enum", [])) - set(item.get("enum", [])):
                said = re.sub(rf" {choice}: [^.]*\.", "", said)  # the inventory's alone
            yield name, {"type": kind, **bounds, "help": _as_flags(said, flags)}


def _as_flags(text: str, flags: dict[str, str]) -> str:
    """A description that names flags instead of variables."""
    for variable, name in flags.items():
        text = re.sub(rf"\b{variable}\b", "--" + name.replace("_", "-"), text)
    return text


def _choices(item: dict[str, Any]) -> str:
    """A sentence with the choices, unless the description names them all."""
    choices = item.get("enum", [])
    if all(re.search(rf"\b{re.escape(choice)}\b", item["description"]) for choice in choices):
        return ""
    return f" One of {', '.join(choices)}."


def _trainer_defaults(models: Sequence[type[Settings]]) -> dict[str, Any]:
    """What the trainer takes for each setting that may be unset."""
    from oe_runtime.run.options import EPOCHS, parser

    found = {**vars(parser().parse_args(["--data", "x", "--stock"])), "epochs": EPOCHS}
    training = [model for model in models if issubclass(model, TrainingSettings)]
    fields = {name: field for model in training for name, field in model.model_fields.items()}
    unset = [name for name, field in fields.items() if field.default is None]
    values = {name: found[name] for name in unset if found.get(name) not in (None, [])}
    return {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in values.items()
    }


# Rules of tables under the names that the trainer has for options of them.
OPTIONS = {"amsgrad": {"name": "adam", "amsgrad": True}, "momentum": {"name": "sgd", "momentum": 0.9}}


def _trainer_optimizers() -> dict[str, list[int]]:
    """The numbers of each optimizer's state per weight and per row, from tables of dim 1 and 2."""
    from oe_runtime import Client, TableSpec
    from oe_runtime.run.optimizers import LEARNING_RATES
    from oe_runtime.spec import OPTIMIZERS

    client = Client.in_process()
    rules = {name.replace("_", ""): {"name": name} for name in OPTIMIZERS} | OPTIONS

    def values(name: str, dim: int) -> int:
        table = client.create_table(TableSpec(f"{name}-{dim}", dim, optimizer=rules[name]))
        return sum(client.slots(table).values())

    one, two = ({name: values(name, dim) for name in LEARNING_RATES} for dim in (1, 2))
    return {name: [two[name] - one[name], 2 * one[name] - two[name]] for name in LEARNING_RATES}


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _yaml(value: Any, indent: int = 0) -> str:
    if not value:
        return ""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH - indent)
    return textwrap.indent(text, " " * indent)


def _below(path: str, indent: int, text: str) -> str:
    """The file with the text below its mark."""
    before, mark, _ = (ROOT / path).read_text(encoding="utf-8").partition(" " * indent + MARK + "\n")
    if not mark:
        raise SystemExit(f"{path}: has no line: {MARK}")
    return before + mark + text


def _defaults(role: str, model: type[Settings]) -> str:
    values = {name: item["default"] for name, item in _read(role, model).items()}
    return _below(f"roles/{role}/defaults/main.yml", 0, _yaml(values))


def _read(role: str, model: type[Settings]) -> dict[str, dict[str, Any]]:
    """The variables that the role reads: all where `oeprov_converge` does, else those that its tasks name."""
    found = {model.prefix + name: item for name, item in schema.described(model).items()}
    if role in _OF_KIND:
        return found
    tasks = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "roles" / role / "tasks").iterdir())
    return {name: item for name, item in found.items() if re.search(rf"\b{name}\b", tasks)}


def _desired(models: Sequence[type[Settings]]) -> Iterator[str]:
    """The fields of the planner's ``Desired`` that are settings; it runs where the models cannot."""
    for model in models:
        if model.prefix not in ("kernel_", "pmem_", "ssd_", "runtime_", "gpu_"):
            continue
        for name, item in schema.described(model).items():
            variable = model.prefix + name
            value = SETTLED.get(variable, item["default"])
            plain = type(value).__name__
            kind = {"list": "List[str]", "dict": "Dict[str, str]"}.get(plain, plain)
            if variable not in OF_ROLES:
                yield f"    {variable}: {kind} = {json.dumps(value) if isinstance(value, str) else value}\n"


def _argument_specs(role: str, model: type[Settings]) -> str:
    options = {}
    if role in _OF_KIND:
        options["oeprov_kind"] = _option(schema.described(settings.OeprovSettings)["kind"])
    options.update({name: _option(item) for name, item in _read(role, model).items()})
    return _below(f"roles/{role}/meta/argument_specs.yml", 6, _yaml(options, 6))


def _option(item: dict[str, Any]) -> dict[str, Any]:
    kind = "str" if "enum" in item else _TYPES.get(item.get("type", ""), "raw")
    option: dict[str, Any] = {"description": item["description"], "type": kind}
    if kind == "list":
        option["elements"] = _TYPES.get(item["items"].get("type", ""), "raw")
    if "enum" in item:
        option["choices"] = item["enum"]
    return {**option, **({"default": item["default"]} if "default" in item else {"required": True})}


_LINE = re.compile(r"(?P<head> *(?P<off># +)?[a-z_]+:(?P<value>.*?))(\s{2,}# .*)?")
_SHORT = 160  # a longer description is cut after its first sentence; the reference has all of it
_MORE = re.compile(rf" {{{COLUMN}}}# ")


def _sample(text: str, models: Sequence[type[Settings]]) -> str:
    """The sample with a comment at each variable's first line, and a line for each variable that has none."""
    lines = text.splitlines()
    for model in models:
        last = -1
        for name, item in schema.shown(model).items():
            found = _first(lines, model.prefix + name)
            if found is None:
                if last < 0:
                    raise SystemExit(f"inventory/sample.yml: has no line for {model.prefix + name}")
                found = _end(lines, last)
                indent = lines[last][: len(lines[last]) - len(lines[last].lstrip())]
                lines.insert(found, f"{indent}# {model.prefix}{name}: {_shown(item)}".rstrip())
            match = _LINE.fullmatch(lines[found])
            if match is None:
                raise SystemExit(f"inventory/sample.yml:{found + 1}: not understood: {lines[found]}")
            end = found + 1
            while end < len(lines) and _MORE.match(lines[end]):
                end += 1
            lines[found:end] = _commented(match, item)
            last = found
    return "\n".join(lines) + "\n"


def _first(lines: list[str], key: str) -> int | None:
    return next((at for at, line in enumerate(lines) if re.match(rf" *(# +)?{key}:", line)), None)


def _end(lines: list[str], at: int) -> int:
    """Where the lines of a variable end: its comment's, and those of its value."""
    deeper = re.split(r"[a-z]", lines[at])[0] + "  "
    end = at + 1
    while end < len(lines) and (_MORE.match(lines[end]) or lines[end].startswith(deeper)):
        end += 1
    return end


def _commented(match: re.Match[str], item: dict[str, Any]) -> list[str]:
    said = item["description"]
    if len(said) > _SHORT:
        said = re.split(r"\. ", said)[0] + "."
    said = (said + _choices({**item, "description": said})).removesuffix(".")
    value, default = match["value"].strip(), _shown(item)
    if value != default:
        words = ["example"] if match["off"] else []
        words += [f"default {default}"] if default not in ("", "[]", "{}") else []
        said += f" ({', '.join(words)})" if words else ""
    head = match["head"].ljust(COLUMN)
    head += "" if head.endswith(" ") else "  "
    wrapped = textwrap.wrap(
        said, WIDTH - COLUMN - 2, initial_indent="x" * (len(head) - COLUMN), break_on_hyphens=False
    )
    wrapped[0] = wrapped[0][len(head) - COLUMN :]
    return [head + "# " + wrapped[0], *(" " * COLUMN + "# " + part for part in wrapped[1:])]


def _shown(item: dict[str, Any]) -> str:
    """The default as an inventory would have it."""
    value = item.get("default", "")
    if isinstance(value, int) and "type" not in item and value:  # a size
        unit, factor = next(
            pair for pair in (("G", 1 << 30), ("M", 1 << 20), ("", 1)) if value % pair[1] == 0
        )
        return f"{value // factor}{unit}"
    if value == "":
        return ""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _reference(models: Sequence[type[Settings]]) -> str:
    parts = [
        "# Inventory variables\n\nGenerated from the settings by `make generate`: do not edit.\n\n"
        "A size is a number of bytes, or text such as `512M`, `64G` or `1.5T` (powers of 1024). A default "
        "marked *the trainer's* is not passed on: the trainer uses its own. A flag belongs to `oeprov "
        "launch-training` and wins over the inventory.\n"
    ]
    for model in models:
        parts.append(f"## `{model.prefix}*`\n\n{model.__doc__}\n")
        marked = {field: "--" + name.replace("_", "-") for name, (field, _) in model.flags().items()}
        for name, item in schema.shown(model).items():
            facts = [_kind(item)]
            if shown := _shown(item):
                whose = " (the trainer's)" if model.model_fields[name].default is None else ""
                facts.append(f"default `{shown}`{whose}")
            if name in marked:
                facts.append(f"flag `{marked[name]}`")
            description = item["description"].replace("<", "&lt;").replace("*", "\\*")
            parts.append(f"### `{model.prefix}{name}`\n\n{description}\n\n*{' · '.join(facts)}*\n")
    return "\n".join(parts)


def _kind(item: dict[str, Any]) -> str:
    item = next((part for part in item.get("anyOf", ()) if "enum" in part), item)
    if "enum" in item:
        return "one of " + ", ".join(f"`{choice}`" for choice in item["enum"])
    kind = item.get("type")
    word = {
        None: "size",
        "string": "text",
        "integer": "whole number",
        "boolean": "true or false",
        "array": "list",
        "object": "mapping of names to texts",
    }.get(str(kind) if kind else None, "number")
    bounds = [
        f"{text} {item[key]}"
        for key, text in (("exclusiveMinimum", "above"), ("minimum", "from"), ("maximum", "to"))
        if key in item
    ]
    return " ".join([word, *bounds])


def main(words: Sequence[str] = tuple(sys.argv[1:])) -> int:
    """Write the files, or with --check name those that are not current; the exit status."""
    wrong = 0
    for path, text in outputs():
        if _is_current(path, text):
            continue
        wrong += 1
        if "--check" in words:
            print(f"{path}: not current; run: make generate")
            continue
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
        if ROOT / path == TRAINER_OPTIMIZERS:  # the settings, which have been read, follow from it
            return subprocess.run([sys.executable, __file__, *words], check=False).returncode
    return 1 if wrong and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main())
