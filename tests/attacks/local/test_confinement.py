"""Row 38: a rank inside all its walls tries to read, kill, trace, mount and become what is not its own."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.files import spool
from shoal.runtime.process.kernel import KEYCTL
from shoal.wire import EndKind, Mount
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, needs
from tests.support.runtime.tasks import ATTEMPT_ID, StartTask, a_task_spec, tasks_in, until

PROBE = Path(__file__).with_name("probe.py")
FULL = (CGROUP, "bubblewrap", "uid")
SOCKET = f"/run/shoal-{os.getpid()}.sock"
"""Open to everybody, as docker's is to its group."""
pytestmark = needs(*FULL)


def attempt_names() -> list[str]:
    """The probe's own list, read with facts that name nothing."""
    names = ("home", "share", "other_share", "setuid", "disk", "socket")
    facts = {**dict.fromkeys(names, "/x"), "uid": 0, "victim": 0, "server": 0, "supervisor": 0}
    code = f"import sys, runpy; sys.argv = ['p', {json.dumps(json.dumps(facts))}]; "
    code += f"print(*runpy.run_path({str(PROBE)!r}, run_name='p')['attempts'](), sep='\\n')"
    return subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()


NAMES = attempt_names()


def furnish(home: Path) -> None:
    """State as it is, but readable by all: what must hold here is the wall, not the mode."""
    for name in ("shoal.db", "keys/signing.key", "credentials.json", "archives/x.tar"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("secret")
        (home / name).chmod(0o644)


@pytest.fixture(scope="module")
def tried() -> Iterator[dict[str, dict[str, str]]]:
    place = Path(tempfile.mkdtemp(prefix="shoal-walls-", dir="/srv"))
    place.chmod(0o755)
    # No shebang and no interpreter: `id` itself, as an administrator might have left it.
    programs = place / "programs"
    programs.mkdir(mode=0o755)
    shutil.copy(PROBE, programs)
    shutil.copy("/usr/bin/id", programs)
    (programs / "id").chmod(0o4755)
    server = subprocess.Popen(["sleep", "600"], env={"SHOAL_SECRET": "secret"})
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    Path(SOCKET).chmod(0o666)
    listener.listen()
    try:
        with tasks_in(place / "home") as make:
            yield {**probe(make, programs, server.pid), "after": {"server": str(server.poll())}}
    finally:
        server.kill()
        server.wait()
        listener.close()
        Path(SOCKET).unlink()
        shutil.rmtree(place)


def probe(make: StartTask, programs: Path, server_pid: int) -> dict[str, dict[str, str]]:
    run = "echo secret > secret; chmod 755 .; chmod 644 secret; echo ready; exec sleep 600"
    other = make(
        a_task_spec(
            attempt_id=f"{ATTEMPT_ID}-victim", run=run, env={"S": "secret"}, confinement=FULL, uid=JOB_UID + 1
        )
    )
    furnish(other.home)
    other.spawn()
    until(lambda: "ready" in other.texts(), describe=other.describe)
    started = spool.read_started(other.task)
    assert started is not None
    task = make(a_task_spec(confinement=FULL))
    disk = next((f"/dev/{path.name}" for path in Path("/sys/block").iterdir()), "/dev/vda")
    facts = {
        "uid": JOB_UID,
        "home": str(other.home),
        "share": str(task.directory),
        "other_share": str(other.directory),
        "victim": started.pids[0],
        "server": server_pid,
        "supervisor": other.processes[0].pid,
        "setuid": "/programs/id",
        "disk": disk,
        "socket": SOCKET,
    }
    task_spec = a_task_spec(
        run=f"python /programs/probe.py {shlex.quote(json.dumps(facts))}",
        mounts=(Mount(source=str(programs), target="/programs"),),
        cpus=1.0,
        memory_bytes=256 << 20,
        max_processes=64,
        confinement=FULL,
        uid=JOB_UID,
    )
    spool.write_task_spec(task.task, task_spec)
    outcome = task.run()
    # Its last attempt kills everybody in reach, which is the rank's own shell.
    assert outcome.kind in (EndKind.SUCCEEDED, EndKind.SIGNALED), task.describe()
    assert other.processes[0].poll() is None
    assert spool.read_outcome(other.task) is None
    results = [json.loads(text) for text in task.texts()]
    return {result["attempt"]: result for result in results}


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_can(tried: dict[str, dict[str, str]], name: str) -> None:
    assert "refused" in tried[name], tried[name]


def test_signal_to_every_visible_process_reaches_no_other_job(tried: dict[str, dict[str, str]]) -> None:
    assert tried["after"] == {"server": "None"}
    assert set(tried) == {*NAMES, "after"}


JOIN_SESSION_KEYRING, SESSION_KEYRING = 1, -3
ADD_KEY = {"x86_64": 248, "aarch64": 217, "riscv64": 217}
READ_KEYS = """
import ctypes, struct
libc = ctypes.CDLL(None); libc.syscall.restype = ctypes.c_long
def read(key):
    room = ctypes.create_string_buffer(4096)
    size = libc.syscall(CALL, 11, ctypes.c_int(key), room, 4096)
    return room.raw[:max(size, 0)]
print(b"|".join(read(key) for (key,) in struct.iter_unpack("i", read(-3))))
"""


@pytest.mark.skipif(os.uname().machine not in ADD_KEY, reason="the number of the system call is not known")
def test_no_rank_finds_the_keys_of_the_user_that_started_shoal(start: StartTask) -> None:
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    call = KEYCTL[os.uname().machine]
    if libc.syscall(call, JOIN_SESSION_KEYRING, None) < 0:
        pytest.skip("the kernel has no keys here, or lets nobody use them")
    secret = b"operators-own"
    added = libc.syscall(
        ADD_KEY[os.uname().machine], b"user", b"shoal", secret, len(secret), ctypes.c_int(SESSION_KEYRING)
    )
    assert added > 0
    program = READ_KEYS.replace("CALL", str(call))
    alone = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert "operators-own" in alone  # inherited by whoever does not leave it
    task = start(a_task_spec(run=f"python -c {shlex.quote(program)}", confinement=FULL, uid=JOB_UID))
    assert task.run().kind is EndKind.SUCCEEDED, task.describe()
    assert task.texts() == ["b''"]
