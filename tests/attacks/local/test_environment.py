"""Row 32: variables of a job reach its own programs alone, after the change of user; devices are forced."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.wire import EndKind
from tests.attacks.local.test_archives import with_archive
from tests.support.archives import tar_of
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, needs
from tests.support.runtime.tasks import StartTask, a_task_spec

FULL = (CGROUP, "bubblewrap", "uid")
pytestmark = needs(*FULL)
SPY = r"""
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void tell(void) {
    char name[64] = "?";
    FILE *self = fopen("/proc/self/comm", "r");
    if (self) { if (!fgets(name, sizeof name, self)) name[0] = 0; fclose(self); }
    FILE *out = fopen(SEEN, "a");
    if (out) { fprintf(out, "%d %s", (int) geteuid(), name); fclose(out); }
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_preloaded_library_is_loaded_by_the_jobs_programs_alone(start: StartTask, open_place: Path) -> None:
    library, seen = open_place / "spy.so", open_place / "seen"
    seen.touch()
    seen.chmod(0o666)
    command = ["cc", "-shared", "-fPIC", f'-DSEEN="{seen}"', "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SPY, text=True, check=True)
    env = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(open_place)}
    task_spec = a_task_spec(run="ls >/dev/null; true", setup="true", env=env, confinement=FULL, uid=JOB_UID)
    task = with_archive(start, task_spec, tar_of({"a.py": b""}))
    # Outside everything is read-only: the library may only write because the test lets it.
    assert task.run().kind is EndKind.SUCCEEDED
    names = {line.split()[1] for line in seen.read_text().splitlines()}
    uids = {line.split()[0] for line in seen.read_text().splitlines()}
    assert uids <= {str(JOB_UID)}
    assert names <= {"sh", "ls"}


HOSTILE = {
    "PATH": "/tmp/evil",
    "LD_PRELOAD": "/no/such.so",
    "LD_LIBRARY_PATH": "/tmp/evil",
    "PYTHONPATH": "/tmp/evil",
    "PYTHONHOME": "/tmp/evil",
    "PYTHONSTARTUP": "/tmp/evil.py",
    "BASH_ENV": "/tmp/evil.sh",
    "ENV": "/tmp/evil.sh",
    "IFS": "/",
    "GCONV_PATH": "/tmp/evil",
    "SHOAL_PATH": "/tmp/evil",
    "SHOAL_SERVER_FILE": "/tmp/evil.json",
    "http_proxy": "http://127.0.0.1:1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_variable_changes_nothing_before_the_jobs_own_program(start: StartTask, name: str) -> None:
    run = f'/usr/bin/printf "%s\\n" "${name}"' if name != "IFS" else "/usr/bin/printf '%s\\n' /"
    task_spec = a_task_spec(run=run, setup="true", env={name: HOSTILE[name]}, confinement=FULL, uid=JOB_UID)
    task = with_archive(start, task_spec, tar_of({"a.py": b""}))
    outcome = task.run()
    assert outcome.kind is EndKind.SUCCEEDED, task.describe()
    stand_ins = Path(task.task.work).parent / "stand-ins"
    in_front = {
        "PATH": f"{stand_ins}/bin:{HOSTILE['PATH']}",
        "PYTHONPATH": f"{stand_ins}/hook:{HOSTILE['PYTHONPATH']}",
        "BASH_ENV": f"{stand_ins}/bash_env",  # which reads the job's own
    }
    assert task.texts() == [in_front.get(name, HOSTILE[name])]
    assert Path(task.task.errors).read_text() == ""


FORCED = {
    "CUDA_VISIBLE_DEVICES": "",
    "NVIDIA_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "SHOAL_ATTEMPT_ID": "this attempt",
    "SHOAL_NODE": "node-1",
    "SHOAL_PROJECT": "demo",
    "SHOAL_RANK": "0",
    "SLURM_JOB_ID": "7",
}


def test_variables_of_shoal_about_devices_and_identity_cannot_be_overridden(start: StartTask) -> None:
    run = "; ".join(f'echo "{name}=${name}"' for name in FORCED)
    task_spec = a_task_spec(run=run, env=dict.fromkeys(FORCED, "all"), confinement=FULL, uid=JOB_UID)
    task = start(task_spec)
    assert task.run().kind is EndKind.SUCCEEDED
    variables = dict(text.split("=", 1) for text in task.texts())
    assert variables == {**FORCED, "SHOAL_ATTEMPT_ID": task_spec.identity.attempt_id}


def test_a_job_without_gpus_finds_no_device_of_one_whatever_it_asks_for(start: StartTask) -> None:
    env = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"), "all")
    task = start(a_task_spec(run="ls /dev; ls -d /dev/nvidia*", env=env, confinement=FULL, uid=JOB_UID))
    task.run()
    allowed = {"console", "core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin"}
    assert set(task.texts()) <= allowed | {"stdout", "tty", "urandom", "zero"}
