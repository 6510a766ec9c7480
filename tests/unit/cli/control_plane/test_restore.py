"""`shoal up --restored` makes a copied home a home of its own, and never touches what the original uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import home_identity
from shoal.cli.control_plane import daemon
from shoal.cli.control_plane.home import load_remembered, remember
from shoal.errors import SpecError

PRODUCTION = "postgresql://shoal:secret@db.example.org/shoal"
DRILL = "postgresql://shoal@db.example.org/drill"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home copied by `cp -a`, with the original's `site.json` and options."""
    home = tmp_path / "copy"
    (home / "logs").mkdir(parents=True)
    original = home_identity.HomeIdentity(site_id="11aa", directory=home_identity.identify(tmp_path))
    (home / home_identity.FILE).write_bytes(home_identity.encode_record(original))
    (home / "home-id").write_text("0123\n")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    return home


def ask(**flags: str | None) -> None:
    daemon.request_restore({**flags}, is_restored=True, runs_again=False)


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
    assert not (copy / home_identity.REQUEST).exists()
    assert load_remembered(copy) == remembered


def test_inherited_variable_is_not_taken_for_the_operators_choice(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATABASE_URL", PRODUCTION)
    with pytest.raises(SpecError, match="may be its original's"):
        ask()


def test_restore_with_only_the_shared_directory_named_still_needs_a_database(
    copy: Path, tmp_path: Path
) -> None:
    remember(copy, {"database_url": PRODUCTION, "shared": "/srv/shared"})
    with pytest.raises(SpecError, match=r"the database db\.example\.org/shoal, which"):
        ask(shared=str(tmp_path))


def test_database_named_for_a_restore_is_remembered_before_the_request(copy: Path) -> None:
    remember(copy, {"database_url": PRODUCTION, "shared": "/srv/shared", "queues": "night"})
    ask(database_url=DRILL, shared="none")
    assert load_remembered(copy) == {"database_url": DRILL, "shared": "none", "queues": "night"}
    assert home_identity.read_request(copy) is not None


@pytest.mark.parametrize("inside", [None, "shoal.db"])
def test_copy_with_its_database_inside_is_restored_without_options(copy: Path, inside: str | None) -> None:
    if inside is not None:
        remember(copy, {"database_url": f"sqlite:///{copy / inside}"})
    ask()
    assert home_identity.read_request(copy) is not None


def test_unpacked_backup_uses_the_database_it_was_restored_to(copy: Path) -> None:
    (copy / home_identity.FILE).unlink()
    remember(copy, {"database_url": DRILL})
    ask()
    assert home_identity.read_request(copy) is not None


def test_repeated_restore_request_makes_the_same_home(copy: Path) -> None:
    """The start that carries out the request may have been killed in between."""
    arguments = []
    for _ in range(2):
        ask()
        arguments.append(home_identity.read_request(copy))
    assert arguments[0] is not None
    assert arguments[0] == arguments[1]
