"""Give restored checkpoints to the users that the jobs of the restored home run as."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.engines.refusal import is_name
from shoal.store.copying import project_uids


def give_checkpoints(folder: Path, database: Path) -> None:
    """Give each job's directory, and all in it, to the user of the job's project in this database.

    A resumed job then writes beside what it saved. The folder must be out of everybody's reach. Only root can
    give files away; a home of any other user runs its jobs as that user. A job that was submitted after the
    database was copied stays root's, because the restored home does not know it.
    """
    if os.geteuid() != 0 or not folder.is_dir():
        return
    job_ids = sorted(path.name for path in folder.iterdir() if is_name(path.name))
    for job_id, uid in project_uids(database, job_ids).items():
        for directory, _, files in os.walk(folder / job_id):
            os.chown(directory, uid, uid, follow_symlinks=False)
            for name in files:
                os.chown(Path(directory, name), uid, uid, follow_symlinks=False)
