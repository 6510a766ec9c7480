"""The word that makes a copied home a home of its own: never about what the original still uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import site
from shoal.cli import restore
from shoal.cli.home import load_remembered, remember
from shoal.errors import SpecError

PRODUCTION = "postgresql://shoal:secret@db.example.org/shoal"
DRILL = "postgresql://shoal@db.example.org/drill"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `cp -a` makes it: with the original's `site.json` and options."""
    home = tmp_path / "copy"
    (home / "logs").mkdir(parents=True)
    original = site.Site(site_id="11aa", directory=site.identify(tmp_path))
    (home / site.FILE).write_bytes(site.encoded(original))
    (home / "home-id").write_text("0123\n")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    return home


def ask(**flags: str | None) -> None:
    restore.request({**flags}, is_restored=True, runs_again=False)


@pytest.mark.parametrize(
    ("remembered", "named"),
    [
        ({"database_url": PRODUCTION}, "the database db.example.org/shoal"),
        ({"database_url": "sqlite:////srv/shoal/shoal.db"}, "the database /srv/shoal/shoal.db"),
        (
            {"database_url": PRODUCTION, "shared": "/srv/shared"},
            "db.example.org/shoal and the shared directory /srv/shared",
        ),
    ],
)
def test_copy_that_remembers_what_its_original_uses_is_not_restored_with_it(
    copy: Path, remembered: dict[str, str], named: str
) -> None:
    remember(copy, remembered)
    with pytest.raises(SpecError, match=named) as refused:
        ask()
    assert "secret" not in str(refused.value)
    assert "--database URL" in str(refused.value.hint)
    assert not (copy / site.REQUEST).exists()
    assert load_remembered(copy) == remembered


def test_variable_is_not_the_operator_s_word_either(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATABASE_URL", PRODUCTION)
    with pytest.raises(SpecError, match="may be its original's"):
        ask()


def test_database_of_the_original_needs_a_name_where_only_the_shared_directory_is_named(
    copy: Path, tmp_path: Path
) -> None:
    remember(copy, {"database_url": PRODUCTION, "shared": "/srv/shared"})
    with pytest.raises(SpecError, match=r"the database db\.example\.org/shoal, which"):
        ask(shared=str(tmp_path))


def test_database_that_is_named_anew_is_remembered_before_the_word_is_given(copy: Path) -> None:
    remember(copy, {"database_url": PRODUCTION, "shared": "/srv/shared", "queues": "night"})
    ask(database_url=DRILL, shared="none")
    assert load_remembered(copy) == {"database_url": DRILL, "shared": "none", "queues": "night"}
    assert site.read_request(copy) is not None


@pytest.mark.parametrize("inside", [None, "shoal.db"])
def test_copy_with_its_database_inside_is_restored_without_another_word(
    copy: Path, inside: str | None
) -> None:
    if inside is not None:
        remember(copy, {"database_url": f"sqlite:///{copy / inside}"})
    ask()
    assert site.read_request(copy) is not None


def test_unpacked_backup_uses_the_database_it_was_restored_to(copy: Path) -> None:
    (copy / site.FILE).unlink()
    remember(copy, {"database_url": DRILL})
    ask()
    assert site.read_request(copy) is not None


def test_word_that_is_given_again_makes_the_same_home_of_the_copy(copy: Path) -> None:
    """The start that carries it out may have been killed in between."""
    words = []
    for _ in range(2):
        ask()
        words.append(site.read_request(copy))
    assert words[0] is not None
    assert words[0] == words[1]
