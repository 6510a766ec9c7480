"""Rows 28 and 29 on the node: archives no API would have taken, unpacked by a supervisor all the same."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from shoal.wire import EndKind, TaskSpec
from tests.support.archives import entry, tar_of, tar_with
from tests.support.runtime.confinement_modes import AVAILABLE, CGROUP, JOB_UID, MODES
from tests.support.runtime.task_specs import change_task_spec
from tests.support.runtime.tasks import RunningTask, StartTask, a_task_spec

FULL = (CGROUP, "bubblewrap", "uid")
WALLS = FULL if set(FULL) <= set(AVAILABLE) else ()
LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


def with_archive(
    start: StartTask, task_spec: TaskSpec, body: bytes, digest: str | None = None
) -> RunningTask:
    """A share whose order names this archive."""
    task = start(change_task_spec(task_spec, archive_digest=digest or hashlib.sha256(body).hexdigest()))
    Path(task.task.archive).write_bytes(body)
    return task


def past_every_path(outside: Path) -> bytes:
    """Links that resolve only beyond the longest path the system library follows (CVE-2025-4517)."""
    part, steps, members, above = "d" * 247, "abcdefghijklmnop", [], ""
    for step in steps:
        folder = entry(f"{above}{part}", tarfile.DIRTYPE)
        folder.mode = 0o755
        members += [(folder, b""), (entry(f"{above}{step}", LINK, part), b"")]
        above += f"{part}/"
    long = "/".join([*steps, "l" * 254])
    members.append((entry(long, LINK, "../" * len(steps)), b""))
    members.append((entry("escape", LINK, long + "/.." * 12 + str(outside)), b""))
    members.append((entry("escape/evil"), b""))
    return tar_with(members)


def hostile(outside: Path) -> dict[str, bytes]:
    up = "/".join([".."] * 12)
    return {
        "a name above": tar_with([(entry("../evil"), b"")]),
        "a name far above": tar_with([(entry(f"{up}{outside}/evil"), b"")]),
        "a name that climbs on the way": tar_with([(entry("a/../../evil"), b"")]),
        "a link to an absolute path": tar_with([(entry("l", LINK, str(outside)), b"")]),
        "a link above": tar_with([(entry("a/l", LINK, f"{up}{outside}"), b"")]),
        "a file below a link": tar_with([(entry("l", LINK, "d"), b""), (entry("l/evil"), b"")]),
        "a link below a link": tar_with([(entry("l", LINK, "d"), b""), (entry("l/m", LINK, ".."), b"")]),
        "a file over a link out of a link": tar_with(
            [
                (entry("deep/er/top", LINK, "../.."), b""),
                (entry("out", LINK, "deep/er/top/../evil"), b""),
                (entry("out"), b""),
            ]
        ),
        "a hard link above": tar_with([(entry("h", HARD, f"{up}{outside}/canary"), b""), (entry("h"), b"")]),
        "a hard link to an absolute path": tar_with([(entry("h", HARD, f"{outside}/canary"), b"")]),
        "links beyond the longest path": past_every_path(outside),
        "a device": tar_with([(entry("null", tarfile.CHRTYPE), b"")]),
        "a disk": tar_with([(entry("sda", tarfile.BLKTYPE), b"")]),
        "a pipe": tar_with([(entry("pipe", tarfile.FIFOTYPE), b"")]),
        "a name no file system takes": tar_with([(entry("x" * 300), b"")]),
        "a name that is not text": tar_with([(entry("../\udcff"), b"")]),
        "a file where a folder is": tar_with([(entry("a/b"), b""), (entry("a"), b"")]),
        "not an archive": b"#!/bin/sh\n" * 200,
        "nothing": b"",
        "half an archive": tar_of({"big": b"x" * 100_000})[:50_000],
        "a header of garbage": b"\xff" * 10_240,
    }


@pytest.fixture
def outside(open_place: Path) -> Path:
    (open_place / "canary").write_text("precious")
    return open_place


NAMES = list(hostile(Path("/x")))


@pytest.mark.parametrize("name", NAMES)
def test_an_archive_fails_with_a_reason_and_writes_nothing_outside(
    start: StartTask, outside: Path, name: str
) -> None:
    """Without any walls: what unpacks must hold by itself."""
    task = with_archive(start, a_task_spec(run="true", confinement=()), hostile(outside)[name])
    outcome = task.run()
    assert outcome.kind is EndKind.SETUP_FAILED, outcome
    assert outcome.started_at is None
    assert "unpack" in outcome.message
    assert sorted(path.name for path in outside.iterdir()) == ["canary"]
    assert (outside / "canary").read_text() == "precious"
    assert not any((above / "evil").exists() for above in Path(task.task.work).parents)
    assert Path(task.task.errors).read_text() == ""


@pytest.mark.parametrize("confinement", MODES)
def test_setuid_and_sticky_bits_do_not_come_out(start: StartTask, confinement: tuple[str, ...]) -> None:
    program = entry("p")
    program.mode = 0o7777
    task_spec = a_task_spec(run="stat -c %a p", confinement=confinement, uid=JOB_UID)
    task = with_archive(start, task_spec, tar_with([(program, b"")]))
    assert task.run().kind is EndKind.SUCCEEDED, task.describe()
    assert task.texts() == ["755"]


def test_an_archive_that_is_not_the_one_ordered_is_not_unpacked(start: StartTask) -> None:
    task = with_archive(start, a_task_spec(confinement=WALLS, uid=JOB_UID), tar_of({"a": b"x"}), "0" * 64)
    outcome = task.run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "SHA-256" in outcome.message
    assert list(Path(task.task.work).iterdir()) == []


def test_a_bomb_of_holes_takes_no_disk(start: StartTask) -> None:
    info = tarfile.TarInfo("bomb")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0"}
    info.pax_headers["GNU.sparse.size"] = str(10 << 30)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    outcome = with_archive(start, a_task_spec(confinement=WALLS, uid=JOB_UID), out.getvalue()).run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "claims to hold" in outcome.message


@pytest.mark.serial
def test_entries_without_end_are_held_to_the_jobs_own_time_and_memory(start: StartTask) -> None:
    body = entry("d/", tarfile.DIRTYPE).tobuf() * 200_000
    limits = {"cpus": 1.0, "memory_bytes": 64 << 20}
    task_spec = a_task_spec(confinement=WALLS, uid=JOB_UID, **limits, time_limit_s=2.0, grace_s=0.1)
    outcome = with_archive(start, task_spec, body).run()
    assert (outcome.kind, outcome.started_at) == (EndKind.TIME_LIMIT, None), outcome


def test_an_archive_larger_than_the_jobs_memory_does_not_need_it(start: StartTask) -> None:
    body = tar_of({"big": b"x" * (64 << 20)})
    task_spec = a_task_spec(
        run="stat -c %s big",
        confinement=WALLS,
        uid=JOB_UID,
        cpus=1.0,
        memory_bytes=48 << 20,
    )
    task = with_archive(start, task_spec, body)
    assert task.run().kind is EndKind.SUCCEEDED, task.describe()
    assert task.texts() == [str(64 << 20)]
