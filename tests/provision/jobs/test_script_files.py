"""What of a training script's directory travels, and which packages it asks for."""

import os
import socket
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from provision.cluster.errors import TrainingError
from provision.jobs import script_files, script_packages


@pytest.fixture
def script(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    put(directory, {"train.py": "import model\n", "model/__init__.py": "", "model/net.py": "x = 1\n"})
    return directory / "train.py"


def put(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(script: Path) -> list[str]:
    return [entry.name for entry in script_files.collect(script).entries]


def refused(script: Path, words: str) -> None:
    with pytest.raises(TrainingError) as caught:
        script_files.collect(script).digest  # noqa: B018
    assert words in str(caught.value)


class TestFiles:
    def test_everything_but_what_no_worker_needs(self, script: Path) -> None:
        more = {".git/config": "", "model/__pycache__/net.pyc": "", ".venv/bin/python": "", "old.pyc": ""}
        put(script.parent, {**more, ".hidden": ""})
        assert names(script) == [".hidden", "model/__init__.py", "model/net.py", "train.py"]

    def test_ignore_file_has_the_syntax_of_gitignore(self, script: Path) -> None:
        ignore = "# big\n/data/\n*.csv\n!small.csv\n!venv/\nmodel/net.py\n"
        put(script.parent, {script_files.IGNORE: ignore, "data/a": "", "a.csv": "", "small.csv": ""})
        put(script.parent, {"venv/kept": "", "model/data/kept": ""})
        assert names(script) == [
            script_files.IGNORE, "model/__init__.py", "model/data/kept", "small.csv", "train.py", "venv/kept"
        ]  # fmt: skip

    def test_digest_is_of_the_content_alone(self, script: Path, tmp_path: Path) -> None:
        first = script_files.collect(script).digest
        os.utime(script, (1, 1))
        script.chmod(0o644)
        (script.parent / "empty").mkdir()
        assert script_files.collect(script).digest == first
        script.chmod(0o755)
        assert script_files.collect(script).digest != first
        script.chmod(0o644)
        script.write_text("import model  # changed\n")
        assert script_files.collect(script).digest != first

    def test_archive_has_modes_and_links(self, script: Path) -> None:
        put(script.parent, {"run.sh": "#!/bin/sh\n"})
        (script.parent / "run.sh").chmod(0o775)
        (script.parent / "latest").symlink_to(script.parent / "model")  # absolute
        (script.parent / "model" / "up.py").symlink_to("../train.py")
        with tarfile.open(fileobj=BytesIO(script_files.collect(script).archive)) as archive:
            found = {item.name: item for item in archive}
        assert {name: item.linkname for name, item in found.items() if item.issym()} == {
            "latest": "model",
            "model/up.py": "../train.py",
        }
        assert (found["run.sh"].mode, found["train.py"].mode) == (0o700, 0o600)
        assert {item.mtime for item in found.values()} == {0}

    def test_links_that_would_point_to_nothing_there(self, script: Path, tmp_path: Path) -> None:
        link = script.parent / "data"
        link.symlink_to(tmp_path)
        refused(script, f"{link} is a link that points out of the directory, to {tmp_path}")
        put(script.parent, {script_files.IGNORE: "/data\n"})
        assert "data" not in names(script)
        (script.parent / "gone").symlink_to("nothing")
        refused(script, "gone is a link that points to nothing")

    def test_odd_files_are_named(self, script: Path) -> None:
        os.mkfifo(script.parent / "pipe")
        refused(script, "pipe is a named pipe, which cannot travel to the workers; name it in")
        (script.parent / "pipe").unlink()
        with socket.socket(socket.AF_UNIX) as listening:
            here = Path.cwd()
            os.chdir(script.parent)
            try:
                listening.bind("s")
            finally:
                os.chdir(here)
            refused(script, "/s is a socket")

    def test_too_much_names_the_largest(self, script: Path) -> None:
        for number in range(7):
            with (script.parent / f"part-{number}").open("wb") as file:
                file.truncate((number + 1) << 22)
        refused(script, "has 117.4 MB, and at most 67.1 MB travel to the workers; the largest files: part-6")
        put(script.parent, {script_files.IGNORE: "part-*\n"})
        assert "part-6" not in names(script)

    def test_too_many(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(script_files, "MOST_FILES", 2)
        refused(script, "has more than 2 files, which would all travel")

    def test_script_that_is_kept_back(self, script: Path) -> None:
        put(script.parent, {script_files.IGNORE: "*.py\n"})
        refused(script, "keeps train.py itself from the workers; add the line !train.py at its end")
        put(script.parent, {script_files.IGNORE: "*.py\n!train.py\n"})
        assert names(script) == [script_files.IGNORE, "train.py"]

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_unreadable(self, script: Path) -> None:
        (script.parent / "model" / "net.py").chmod(0)
        refused(script, "net.py: Permission denied")


class TestPackages:
    def test_none(self, script: Path) -> None:
        assert script_packages.collect(script.parent) is None
        put(script.parent, {"pyproject.toml": "[tool.ruff]\n"})
        assert script_packages.collect(script.parent) is None
        put(script.parent, {"requirements.txt": "# later\n\n"})
        assert script_packages.collect(script.parent) is None

    def test_requirements_with_what_they_name(self, script: Path) -> None:
        put(script.parent, {"requirements.txt": "-r more/base.txt\n-c limits.txt\ntorch\n"})
        put(script.parent, {"more/base.txt": "--requirement=deep.txt\nnumpy\n", "more/deep.txt": "scipy\n"})
        put(script.parent, {"limits.txt": "numpy<3\n"})
        found = script_packages.collect(script.parent)
        assert found is not None
        assert set(found.files) == {"requirements.txt", "more/base.txt", "more/deep.txt", "limits.txt"}

    def test_project(self, script: Path) -> None:
        put(script.parent, {"pyproject.toml": '[project]\nname = "x"\ndependencies = ["deepctr>=0.9"]\n'})
        found = script_packages.collect(script.parent)
        assert found == script_packages.Packages("pyproject.toml", {"requirements.txt": "deepctr>=0.9\n"})
        put(script.parent, {"requirements.txt": "torch\n"})
        found = script_packages.collect(script.parent)
        assert found is not None
        assert found.source == "requirements.txt"

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({"requirements.txt": "numpy\n-e .\n"}, "requirements.txt line 2: found -e .; a package of the"),
            ({"requirements.txt": "./lib\n"}, "line 1: found ./lib; a package of the script's directory"),
            ({"requirements.txt": "-r ../base.txt\n"}, "it is outside of the script's directory"),
            ({"requirements.txt": "-r x/../../base.txt\n"}, "it is outside of the script's directory"),
            ({"requirements.txt": "a\n-f wheels\n"}, "line 2: found -f wheels; wheels of the script's"),
            ({"requirements.txt": "--find-links=wheels\n"}, "line 1: found --find-links=wheels; wheels of"),
            ({"requirements.txt": "-r base.txt\n"}, "base.txt: No such file or directory"),
            ({"pyproject.toml": "[project\n"}, "pyproject.toml: "),
            ({"pyproject.toml": '[project]\ndynamic = ["dependencies"]\n'}, "its dependencies are dynamic"),
        ],
    )
    def test_that_cannot_be_had(self, script: Path, files: dict[str, str], words: str) -> None:
        put(script.parent, files)
        with pytest.raises(TrainingError) as caught:
            script_packages.collect(script.parent)
        assert words in str(caught.value)

    def test_key_follows_all_that_matters(self) -> None:
        packages = script_packages.Packages("requirements.txt", {"requirements.txt": "numpy\n"})
        other = script_packages.Packages("requirements.txt", {"requirements.txt": "numpy<3\n"})
        keys = [packages.key("/a", ""), packages.key("/b", ""), packages.key("/a", "/w"), other.key("/a", "")]
        assert len(set(keys)) == 4
        assert packages.key("/a", "") == keys[0]
