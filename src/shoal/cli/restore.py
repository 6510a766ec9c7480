"""The operator's word that a copied home is to become a home of its own."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from shoal import site
from shoal.cli.home import SQLITE, load_remembered, remember, settings_for
from shoal.client.credentials import write_private
from shoal.errors import SpecError, StateError
from shoal.home import holder
from shoal.settings import Settings

INHERITED = ("database_url", "shared")
"""Options of a copied home that name what its original has."""


def refuse_copy(settings: Settings) -> None:
    """`CopiedHome` where the home's records are about another directory, and nobody has said what to do."""
    if settings.state_dir.is_dir():
        site.refuse_copy(settings.state_dir, is_bound_to_machine=settings.is_bound_to_machine)


def request(flags: dict[str, str | None], *, is_restored: bool, runs_again: bool) -> None:
    """Leave word for the start that follows. `StateError`: a control plane runs here, or there is no home."""
    if runs_again and not is_restored:
        raise SpecError("`--rerun` is about a restored home", hint="shoal up --restored --rerun")
    if not is_restored:
        return
    settings, _ = settings_for(flags)
    _refuse_inherited(settings, flags)
    home = settings.state_dir
    if (pid := holder(settings.home)) is not None:
        raise StateError(f"a control plane is already running here (process {pid})", hint="shoal status")
    if not home.is_dir():
        raise StateError(f"there is no {home}, so there is nothing to restore", hint="shoal up")
    # First: a start after a kill here must not carry the word out on the original's database.
    given = {name: text for name in INHERITED if (text := flags.get(name)) is not None}
    if given:
        remember(settings.home, load_remembered(settings.home) | given)
    earlier = site.read_request(home)  # it may be carried out in part
    site_id = os.urandom(16).hex() if earlier is None else earlier.site_id
    word = site.RestoreRequest(runs_again=runs_again, directory=site.identify(home), site_id=site_id)
    write_private(home / site.REQUEST, site.encoded(word).decode() + "\n")


def _refuse_inherited(settings: Settings, flags: dict[str, str | None]) -> None:
    """`SpecError` where the copy would settle the jobs in a database of its original.

    The options of a copied home name what the original has, and a variable may too. `shoal restore` drops
    them: it leaves a home without a `site.json`, whose database was named for it.
    """
    is_unpacked = settings.shared is None and site.read_site(settings.home) is None
    is_elsewhere = not _is_in(settings.home, settings.store_url)
    missing: list[str] = []
    if is_elsewhere and not is_unpacked and flags.get("database_url") is None:
        missing.append(f"the database {_shown(settings.store_url)}")
    if settings.shared is not None and flags.get("shared") is None:
        missing.append(f"the shared directory {settings.shared}")
    if missing:
        raise SpecError(
            f"{settings.home} would be restored with {' and '.join(missing)}, which may be its original's: "
            "every open job there would end",
            hint="name what the copy is to use: `shoal up --restored --database URL` with a copy of the "
            "database, or with the same one if the original is gone for good; and `--shared DIR`, or "
            "`--shared none`",
        )


def _is_in(home: Path, url: str) -> bool:
    """Whether the database is a file of this very home."""
    file = Path(os.path.realpath(url.removeprefix(SQLITE)))
    return url.startswith(SQLITE) and file.is_relative_to(home.resolve())


def _shown(url: str) -> str:
    """Return the host and the database's name, or the file. The rest of a URL may hold a password."""
    if url.startswith(SQLITE):
        return url.removeprefix(SQLITE)
    parts = urlsplit(url)
    return f"{parts.hostname or ''}{parts.path}"


def told(*, runs_again: bool) -> str:
    """What becomes of the copy's open jobs, in words."""
    if runs_again:
        return "the copy becomes a home of its own; jobs that ran when it was made begin again here"
    return (
        "the copy becomes a home of its own; its open jobs end here (`shoal queue --all`, "
        "`shoal retry JOB`), its services have no replicas (`shoal scale`), and the original is not touched"
    )
