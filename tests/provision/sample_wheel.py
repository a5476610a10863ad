"""A wheel of one module, for indexes that are a directory."""

import zipfile
from pathlib import Path


def wheel(directory: Path, name: str, version: str, value: int) -> None:
    """Write it to ``directory``; ``NAME.VALUE`` is ``value``."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": f"VALUE = {value}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in {**texts, f"{info}/RECORD": record}.items():
            file.writestr(path, text)
