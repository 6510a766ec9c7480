"""A job that uses up what it can: it ends as it should, its supervisor stays awake, nothing is left over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.files import spool
from shoal.wire import EndKind, LogRule, RuleAction
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, needs
from tests.support.runtime.tasks import (
    TASK_CREDENTIALS,
    RenewalServer,
    StartTask,
    a_task_spec,
    pids_with,
    until,
)

FULL = (CGROUP, "bubblewrap", "uid")
pytestmark = [needs(*FULL), pytest.mark.serial]
SMALL = {"cpus": 0.5, "memory_bytes": 128 << 20, "max_processes": 64, "max_log_bytes": 1 << 16}
EVIL_RULES = tuple(LogRule(match=f"(a+)+c{number}$", action=RuleAction.STOP_RETRIES) for number in range(64))
SAY_A = "while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab; done"

HOGS = {
    "forks without end": "bomb() { bomb | bomb & sleep 61; }; bomb; wait",
    "threads without end": (
        "python -c 'import threading, time\nwhile True:\n"
        " try: threading.Thread(target=time.sleep, args=(61,)).start()\n"
        " except RuntimeError: time.sleep(0.1)'"
    ),
    "zombies without end": "python -c 'import os, time\nwhile True:\n try: os.fork() or os._exit(0)\n "
    "except OSError: time.sleep(0.1)'",
    "memory without end, in a child that restarts": (
        "while :; do python -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'; done"
    ),
    "memory in /dev/shm": "while :; do head -c 1M /dev/zero >> /dev/shm/x; done",
    "lines without end": "yes spam",
    "one line without end": "tr '\\0' x < /dev/zero",
    "errors without end": "yes spam >&2",
    "words a byte at a time": "python -uc 'import os\nwhile True: os.write(1, b\"x\")'",
    "a log that nobody wants": "exec >&- 2>&-; sleep 62",
    "a blocked log": "python -c 'import os, time; os.set_blocking(1, False)\nwhile True:\n try: os.write(1, "
    'b"x" * 65536)\n except OSError: time.sleep(0.1)\'',
    "signals it ignores": "trap '' TERM INT HUP; while :; do sleep 0.1; done",
    "a stop of itself": "kill -STOP $$",
}


@pytest.mark.parametrize("hog", HOGS)
def test_a_hog_is_held_to_its_limits_and_ends_when_its_time_is_up(start: StartTask, hog: str) -> None:
    task = start(
        a_task_spec(run=HOGS[hog], **SMALL, time_limit_s=0.8, grace_s=0.2, confinement=FULL, uid=JOB_UID)
    )
    outcome = task.run()
    assert outcome.kind in (EndKind.TIME_LIMIT, EndKind.OUT_OF_MEMORY, EndKind.EXITED), outcome
    assert outcome.kind is EndKind.TIME_LIMIT or hog.startswith(("memory", "forks")), outcome
    assert outcome.cpu_s is not None
    assert outcome.cpu_s < 4.0
    assert Path(task.task.log).stat().st_size < SMALL["max_log_bytes"] + 500
    assert not [path for path in spool.read_cgroups(task.task) if Path(path).exists()]
    assert not Path(task.task.scratch).exists()


@pytest.mark.parametrize("way", ["time limit", "signal"])
def test_patterns_that_never_finish_keep_no_end_waiting(start: StartTask, way: str) -> None:
    task_spec = a_task_spec(
        run=SAY_A, **SMALL, grace_s=0.2, confinement=FULL, uid=JOB_UID, log_rules=EVIL_RULES,
        time_limit_s=1.0 if way == "time limit" else None,
    )  # fmt: skip
    task = start(task_spec)
    process = task.spawn()
    until(lambda: bool(task.texts()), describe=task.describe)
    if way == "signal":
        process.send_signal(signal.SIGTERM)
    # Nowhere near what all patterns together would take.
    outcome = task.outcome(timeout_s=8.0)
    assert outcome.kind is (EndKind.TIME_LIMIT if way == "time limit" else EndKind.STOPPED)
    assert outcome.rules_hit == ()


def test_leases_are_renewed_while_patterns_never_finish(start: StartTask) -> None:
    with contextlib.closing(RenewalServer()) as plane:
        task_spec = a_task_spec(
            run=SAY_A, cpus=0.5, grace_s=0.2, log_rules=EVIL_RULES, time_limit_s=3.0,
            control_url=plane.url, renew_s=0.2, fence_s=10.0, confinement=FULL, uid=JOB_UID,
        )  # fmt: skip
        task = start(task_spec, TASK_CREDENTIALS)
        outcome = task.run()
        assert outcome.kind is EndKind.TIME_LIMIT, outcome
        assert any("are dropped too" in text for text in task.texts("e"))
        assert plane.phases().count("running") > 1


@contextlib.contextmanager
def accomplice(name: str) -> Iterator[None]:
    """Takes a descriptor from whoever connects and writes to it for as long as it lives."""
    program = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen()\n"
        "print('on', flush=True)\n"
        "c, _ = s.accept(); fd = socket.recv_fds(c, 10, 1)[1][0]; c.sendall(b'x')\n"
        "for _ in range(3): os.fork()\n"
        "while True: os.write(fd, b'on and on\\n' * 400)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, name], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_pipe_handed_to_another_process_does_not_keep_the_task_open(start: StartTask) -> None:
    name = f"shoal-accomplice-{os.getpid()}"
    hand_over = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); "
        "socket.send_fds(s, [b'x'], [1]); s.recv(1)"
    )
    with accomplice(name):
        run = f'python -c "{hand_over}"; exit 6'
        outcome = start(a_task_spec(run=run, **SMALL, confinement=FULL, uid=JOB_UID)).run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 6)


def test_nothing_of_a_hog_runs_on_when_its_supervisor_is_killed(start: StartTask) -> None:
    mark = f"63.{os.getpid()}"
    deaf = f"setsid sh -c 'trap \"\" TERM HUP; sleep {mark}'"
    run = f"trap '' TERM; for i in 1 2 3 4; do {deaf} & done; sleep {mark}"
    task = start(a_task_spec(run=run, **SMALL, confinement=FULL, uid=JOB_UID))
    process = task.spawn()
    until(lambda: len(pids_with(mark)) >= 5, describe=task.describe)
    process.kill()
    process.wait(10)
    until(lambda: pids_with(mark) == [])
