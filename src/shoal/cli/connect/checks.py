"""What `shoal connect` checks: paths that nodes use, and jobs that may run on the previous cluster.

Jobs start in other directories and on other machines. A relative path would mean another file there, and a
shared directory that is not mounted would be created on each node's own disk.

While jobs of a home may run on one cluster, the home cannot be connected to another.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.control_plane.home import load_remembered
from shoal.errors import SpecError, StateError
from shoal.settings import Settings, load_settings

if TYPE_CHECKING:
    from shoal.engines.slurm.transport import SlurmTransport


def node_paths(
    python: str | None, python_path: str, spool: str, shared: str, *, ssh: str = ""
) -> dict[str, Any]:
    """Return the paths for the config, as nodes see them. `ssh`: the nodes' paths are on other machines."""
    return {
        "python": absolute_python(python or sys.executable, ssh=ssh),
        "python_path": ":".join(
            absolute_path("--python-path", entry, ssh=ssh) for entry in python_path.split(":")
        ),
        "spool": absolute_path("--spool", spool, ssh=ssh),
        "shared": absolute_path("--shared", shared, ssh=ssh),
    }


def absolute_path(option: str, path: str, *, ssh: str = "") -> str:
    """Return the absolute path. `ssh`: it is on other machines, so a relative one cannot be completed."""
    if not path or path.startswith("/"):
        return path
    if ssh:
        raise SpecError(
            f"`{option} {path}` is relative, and {ssh} is another machine",
            hint=f"name the path that the nodes see, an absolute one: `{option} /DIR`",
        )
    return str(Path(path).expanduser().absolute())


def absolute_python(python: str, *, ssh: str = "") -> str:
    """Return an absolute path; a bare name stays, because each node looks it up in its PATH."""
    return absolute_path("--python", python, ssh=ssh) if "/" in python else python


def refuse_missing_shared(shared: str) -> None:
    """Raise `SpecError` if this machine, which is a node or mounts what nodes mount, lacks the directory."""
    if shared and not os.path.isdir(shared):  # noqa: PTH112 - a directory that cannot be read counts as missing
        raise _missing_shared(shared)


def check_shared_on_cluster(transport: SlurmTransport, shared: str, *, ssh: str, rest: str) -> str:
    """Check the directory where Slurm is asked. By REST that may be another machine, so return a remark."""
    if not shared or transport.has_folder(shared):
        return ""
    if not rest:
        raise _missing_shared(shared, f" on {ssh}" if ssh else "")
    return f"there is no directory {shared} on this machine; it must be on every node, and here"


def _missing_shared(shared: str, where: str = "") -> SpecError:
    return SpecError(
        f"there is no directory {shared}{where}; make or mount it on every machine",
        hint=f"`ls -ld {shared}` there, or name another: `--shared DIR`",
    )


if TYPE_CHECKING:
    from shoal.engines.home_records import ClusterId

SHOWN = 5


def refuse_other_cluster(home: Path, cluster: ClusterId, *, is_same: bool) -> None:
    """Raise `StateError` while jobs of this home may run on another cluster than `cluster`, which does not
    know them and would report them lost. `is_same`: the user says that it is the same cluster.
    """
    from shoal.engines.home_records import unfinished_attempts

    settings = load_settings(load_remembered(home))
    before = _cluster_before(settings)
    if not before.is_other(cluster):
        return
    is_alike = before.engine == cluster.engine
    if is_same and is_alike:
        return
    running = [
        attempt for attempt in unfinished_attempts(settings.state_dir, before.folder) if attempt.open_nodes
    ]
    if running:
        shown = "; ".join(map(str, running[:SHOWN])) + (" ..." if len(running) > SHOWN else "")
        same = "; if it is the same cluster under another name, add `--same-cluster`" if is_alike else ""
        raise StateError(
            f"{len(running)} of this home's attempts may run on {before}, and a control plane over {cluster} "
            f"does not know them: {shown}",
            hint="`shoal up`, and let them end or `shoal down --jobs`, which waits for silent ones until "
            f"their fence has passed; if a machine is gone: `shoal nodes declare-dead NODE` first{same}",
        )


def record_same_cluster(home: Path, cluster: ClusterId) -> None:
    """Give the cluster the attempts that it got under another name. Called once it is connected."""
    from shoal.engines.home_records import write_cluster

    settings = load_settings(load_remembered(home))
    if _cluster_before(settings).engine == cluster.engine:
        write_cluster(settings.state_dir, cluster)


def _cluster_before(settings: Settings) -> ClusterId:
    """Return the cluster that work was handed to until now."""
    from shoal.control.opening import cluster_for
    from shoal.engines.home_records import ClusterId, read_cluster

    recorded = read_cluster(settings.state_dir)
    if recorded is not None:
        return recorded
    try:
        return cluster_for(settings)
    except SpecError:  # it cannot be read, or does not exist any more
        return ClusterId(engine=settings.engine)
