"""What a home's work is on before it is connected to something else: while that may run, it stays there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.home import load_remembered
from shoal.errors import SpecError, StateError
from shoal.settings import Settings, load_settings

if TYPE_CHECKING:
    from shoal.engines.cluster_id import ClusterId

SHOWN = 5


def refuse_elsewhere(home: Path, cluster: ClusterId, *, is_same: bool) -> None:
    """`StateError` while something of this home's may run on another cluster than this one, which knows
    nothing of it and would say that it is lost. `is_same`: somebody says that it is not another.
    """
    from shoal.engines.cluster_id import all_left

    settings = load_settings(load_remembered(home))
    before = _cluster_before(settings)
    if not before.is_other(cluster):
        return
    is_alike = before.engine == cluster.engine
    if is_same and is_alike:
        return
    running = [one for one in all_left(settings.state_dir, before.place) if one.open_nodes]
    if running:
        shown = "; ".join(map(str, running[:SHOWN])) + (" ..." if len(running) > SHOWN else "")
        same = "; if it is the same under another name: `--same-cluster`" if is_alike else ""
        raise StateError(
            f"{len(running)} of this home's attempts may run on {before}, and a control plane over {cluster} "
            f"knows nothing of them: {shown}",
            hint="`shoal up`, and let them end or `shoal down --jobs`, which waits for what is silent until "
            f"its fence has passed; of a machine that is gone: `shoal nodes declare-dead NODE` first{same}",
        )


def remember_same(home: Path, cluster: ClusterId) -> None:
    """What was handed to it under another name is its own. For once it is connected."""
    from shoal.engines.cluster_id import write_cluster

    settings = load_settings(load_remembered(home))
    if _cluster_before(settings).engine == cluster.engine:
        write_cluster(settings.state_dir, cluster)


def _cluster_before(settings: Settings) -> ClusterId:
    """Where work was handed to until now."""
    from shoal.control.elsewhere import cluster_for
    from shoal.engines.cluster_id import ClusterId, read_cluster

    recorded = read_cluster(settings.state_dir)
    if recorded is not None:
        return recorded
    try:
        return cluster_for(settings)
    except SpecError:  # it cannot be read, or is not there any more
        return ClusterId(engine=settings.engine)
