"""Acknowledged writes survive SIGKILL, a full disk and a disk that takes no writes."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.errors import StoreUnavailable
from shoal.store import Store, Tx, open_store
from tests.support.store_records import a_job, submit

ROUNDS = 6
WRITERS = 8
HUNGRY = """
import sys
import anyio
from shoal.clock import SystemClock
from shoal.store import open_store
from tests.support.store_records import submit

async def write(store, name):
    number = 0
    while True:
        number += 1
        taken = await store.write(lambda tx: submit(tx, number, key=f"{name}-{number}"))
        sys.stdout.write(f"{taken}\\n")
        sys.stdout.flush()

async def main():
    store = open_store(sys.argv[1], clock=SystemClock())
    async with anyio.create_task_group() as group:
        for writer in range(int(sys.argv[3])):
            group.start_soon(write, store, f"{sys.argv[2]}-{writer}")

anyio.run(main)
"""


def _url(home: Path) -> str:
    return f"sqlite:///{home}/shoal.db"


async def test_every_acknowledged_write_survives_sigkill(tmp_path: Path) -> None:
    dice = random.Random(20261115)
    acknowledged: list[int] = []
    for attempt in range(ROUNDS):
        acknowledged += _killed(_url(tmp_path), f"round-{attempt}", dice.uniform(0.0, 0.15))
    store = open_store(_url(tmp_path), clock=SystemClock())
    assert len(acknowledged) > ROUNDS
    assert len(set(acknowledged)) == len(acknowledged), "no number was given twice"
    lost = await store.read(lambda tx: [n for n in acknowledged if tx.jobs.by_number("vision", n) is None])
    assert lost == []
    assert await store.read(lambda tx: tx.events.verify()) is None
    await store.close()
    with sqlite3.connect(tmp_path / "shoal.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def _killed(url: str, name: str, after_s: float) -> list[int]:
    """Numbers acknowledged by a process of many writers, killed some time after its first answer."""
    command = [sys.executable, "-c", HUNGRY, url, name, str(WRITERS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        timer = threading.Timer(after_s, process.kill)
        timer.start()
        rest = process.stdout.read()
        timer.join()
    # The last line may be cut. Then it was not acknowledged.
    return [int(line) for line in (first + rest).split(b"\n")[:-1]]


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "shoal-test", str(mounted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.serial
async def test_full_disk_is_reported_and_the_store_recovers_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    store = open_store(_url(small_disk), clock=SystemClock())
    assert await store.write(lambda tx: submit(tx, 1)) == 1
    _fill(ballast)
    acknowledged = await _write_until_refused(store)
    assert await store.read(lambda tx: tx.jobs.count_open("vision")) == 1 + acknowledged
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="full"):
            await store.write(_large)
    ballast.unlink()
    assert await store.write(lambda tx: submit(tx, 500)) == 2 + acknowledged
    assert await store.read(lambda tx: tx.events.verify()) is None
    await store.close()
    reopened = open_store(_url(small_disk), clock=SystemClock())
    assert await reopened.read(lambda tx: tx.jobs.count_open("vision")) == 2 + acknowledged
    await reopened.close()


def _fill(ballast: Path) -> None:
    """Write until the disk has no block left."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\x00" * 4096)
        except OSError:
            return


async def _write_until_refused(store: Store) -> int:
    """Return how many small writes found room."""
    for number in range(2, 400):
        try:
            await store.write(partial(submit, number=number))
        except StoreUnavailable:
            return number - 2
    pytest.fail("the disk never became full")


def _large(tx: Tx) -> None:
    tx.jobs.add(a_job(99_999, spec_json="x" * (1 << 20)))


@pytest.mark.serial
async def test_read_only_disk_is_reported_at_open_and_works_when_it_is_writable(small_disk: Path) -> None:
    store = open_store(_url(small_disk), clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    await store.close()
    _call("mount", "-o", "remount,ro", str(small_disk))
    try:
        with pytest.raises(StoreUnavailable, match="Read-only"):
            open_store(_url(small_disk), clock=SystemClock())
    finally:
        _call("mount", "-o", "remount,rw", str(small_disk))
    store = open_store(_url(small_disk), clock=SystemClock())
    assert await store.write(lambda tx: submit(tx, 2)) == 2
    await store.close()


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[Path, str, str]]:
    """A home whose files can be made immutable, which open files cannot tell from a read-only disk.

    `mount -o remount,ro` does not work: the kernel refuses while a file is open for writing.
    """
    home = tmp_path / "home"
    home.mkdir()
    (home / "probe").write_bytes(b"")
    if os.geteuid() != 0 or shutil.which("chattr") is None:
        pytest.skip("making a file immutable needs root and chattr")
    done = subprocess.run(["chattr", "+i", str(home / "probe")], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this file system has no immutable files: {done.stderr.strip()}")
    yield home, "+i", "-i"
    subprocess.run(["chattr", "-R", "-i", str(home)], check=True)


@pytest.mark.serial
async def test_disk_that_turns_read_only_under_an_open_store_is_reported_and_recovered_from(
    frozen: tuple[Path, str, str],
) -> None:
    home, freeze, thaw = frozen
    store = open_store(_url(home), clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    _call("chattr", "-R", freeze, str(home))
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="read-only"):
            await store.write(lambda tx: submit(tx, 2))
        assert await store.read(lambda tx: tx.jobs.count_open("vision")) == 1
    _call("chattr", "-R", thaw, str(home))
    assert await store.read(lambda tx: tx.jobs.count_open("vision")) == 1
    assert await store.write(lambda tx: submit(tx, 2)) == 2
    await store.close()


FREEZING = """
import subprocess
import sys
import anyio
from shoal.clock import SystemClock
from shoal.errors import StoreUnavailable
from shoal.store import open_store
from tests.support.store_records import submit

def chattr(sign):
    subprocess.run(["chattr", "-R", f"{sign}i", sys.argv[1]], check=True)

def count(tx):
    chattr("+")
    return tx.jobs.count_open("vision")

def add(tx):
    chattr("+")
    return submit(tx, 2)

async def main():
    store = open_store(sys.argv[2], clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    print("seen:", await store.read(count))
    chattr("-")
    try:
        await store.write(add)
    except StoreUnavailable as error:
        print("refused:", error.message)
    chattr("-")
    print("taken:", await store.write(lambda tx: submit(tx, 2)))
    await store.close()

anyio.run(main)
"""


@pytest.mark.serial
def test_disk_that_turns_read_only_during_a_transaction_fails_one_write_not_the_process(
    frozen: tuple[Path, str, str],
) -> None:
    home, *_ = frozen
    command = [sys.executable, "-c", FREEZING, str(home), _url(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    seen, refused, taken = done.stdout.splitlines()
    assert refused.startswith("refused: the store is not available")
    assert (seen, taken) == ("seen: 1", "taken: 2")


SQUEEZED = """
import resource
import sys
import anyio
from shoal.clock import SystemClock
from shoal.errors import StoreUnavailable
from shoal.store import open_store
from tests.support.store_records import submit

async def main():
    store = open_store(sys.argv[1], clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        await store.write(lambda tx: submit(tx, 2))
    except StoreUnavailable as error:
        print("refused:", error.message)
    print("seen:", await store.read(lambda tx: tx.jobs.count_open("vision")))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print("taken:", await store.write(lambda tx: submit(tx, 2)))
    await store.close()

anyio.run(main)
"""


def test_write_that_the_kernel_refuses_is_not_acknowledged_even_without_root(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SQUEEZED, _url(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    refused, seen, taken = done.stdout.splitlines()
    assert refused.startswith("refused: the store is not available")
    assert (seen, taken) == ("seen: 1", "taken: 2")


async def test_lack_of_file_descriptors_is_reported_and_recovered_from(tmp_path: Path) -> None:
    """Without a spare descriptor a broken connection cannot be replaced: refuse, and try again next time."""
    store = open_store(_url(tmp_path), clock=SystemClock())
    await store.write(lambda tx: submit(tx, 1))
    writer = store._writer
    await anyio.to_thread.run_sync(writer._committer.abandon)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreUnavailable):
            await store.write(lambda tx: submit(tx, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    deadline = time.monotonic() + 30
    while True:
        try:
            assert await store.write(lambda tx: submit(tx, 2)) == 2
            break
        except StoreUnavailable:
            assert time.monotonic() < deadline
    await store.close()
