"""How pip gets its index: a password in its address is in no command line."""

import pytest

from provision.node import pipindex, repositories


@pytest.mark.parametrize(
    ("index", "words", "environment"),
    [
        ("", [], {}),
        ("/srv/wheels", ["--no-index", "--find-links", "/srv/wheels"], {}),
        ("https://mirror/simple", ["--index-url", "https://mirror/simple"], {}),
        ("https://me:pw@mirror/simple", [], {"PIP_INDEX_URL": "https://me:pw@mirror/simple"}),
        ("https://mirror/a@b/simple", ["--index-url", "https://mirror/a@b/simple"], {}),
    ],
)
def test_a_password_is_passed_by_the_environment(
    index: str, words: list[str], environment: dict[str, str]
) -> None:
    assert pipindex.words(index) == words
    assert pipindex.environment(index) == environment


def test_repositories_with_a_password_are_for_root_alone() -> None:
    assert repositories.Use("/f", "baseurl=https://me:pw@mirror/os\n").mode == 0o600
    assert repositories.Use("/f", "baseurl=https://mirror/os\ngpgkey=https://mirror/a@b\n").mode == 0o644
