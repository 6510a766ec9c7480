"""The operator's word that a copied home is to become a home of its own."""

from __future__ import annotations

from shoal import site
from shoal.cli.home import settings_for
from shoal.cli.show import note
from shoal.client.credentials import write_private
from shoal.errors import SpecError, StateError
from shoal.home import holder
from shoal.settings import Settings


def refuse_copy(settings: Settings) -> None:
    """`CopiedHome` where the home's records are about another directory, and nobody has said what to do."""
    if settings.state_dir.is_dir():
        site.refuse_copy(settings.state_dir, is_bound_to_machine=settings.is_bound_to_machine)


def request(
    flags: dict[str, str | None], *, is_restored: bool, runs_again: bool, is_quiet: bool = False
) -> None:
    """Leave word for the start that follows. `StateError`: a control plane runs here, or there is no home."""
    if runs_again and not is_restored:
        raise SpecError("`--rerun` is about a restored home", hint="shoal up --restored --rerun")
    if not is_restored:
        return
    settings, _ = settings_for(flags)
    home = settings.state_dir
    if (pid := holder(settings.home)) is not None:
        raise StateError(f"a control plane is already running here (process {pid})", hint="shoal status")
    if not home.is_dir():
        raise StateError(f"there is no {home}, so there is nothing to restore", hint="shoal up")
    word = site.RestoreRequest(runs_again=runs_again, directory=site.identify(home))
    write_private(home / site.REQUEST, site.encoded(word).decode() + "\n")
    if not is_quiet:
        note(told(runs_again=runs_again))


def told(*, runs_again: bool) -> str:
    """What becomes of the copy's open jobs, in words."""
    if runs_again:
        return "the copy becomes a home of its own; jobs that ran when it was made begin again here"
    return (
        "the copy becomes a home of its own; its open jobs end here (`shoal queue --all`, "
        "`shoal retry JOB`), its services have no replicas (`shoal scale`), and the original is not touched"
    )
