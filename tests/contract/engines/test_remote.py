"""The contract over node agents on 'other machines': task specs over TLS, spools of their own, logs in
pieces."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from shoal.engines.base import Submission
from shoal.identity import bootstrap_token
from shoal.identity.authority import make_authority
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.wire import EndKind, LaunchRequest
from tests.contract.engines.engine_contract import EngineContract, RankProgram
from tests.contract.engines.mailbox_world import MailboxWorld
from tests.support.fakes.remote_engine import ProcessEngine
from tests.support.runtime.task_specs import change_task_spec
from tests.support.runtime.tasks import pids_with

SWEEPER = shutil.which("systemd-tmpfiles")


class RemoteWorld(MailboxWorld):
    node_names = ProcessEngine.node_names
    engine: ProcessEngine

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.keepers: dict[tuple[str, str, int], list[subprocess.Popen[bytes]]] = {}
        self.engine = self.open()

    def open(self) -> ProcessEngine:
        return ProcessEngine(self.home, self.server.access(spool=str(self.spool)), self.keepers)

    def keepers_of(self, attempt_id: str) -> list[subprocess.Popen[bytes]]:
        return [item for key, result in self.keepers.items() if key[0] == attempt_id for item in result]

    def errors(self, attempt_id: str, node: str = "n1") -> str:
        return (self.home / f"{attempt_id}.{node}.err").read_text()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RemoteWorld]:
    world = RemoteWorld(tmp_path)
    with world.server.serving(world.engine):
        yield world
        await world.end_all()
        await anyio.to_thread.run_sync(world.engine.wait)


class TestRemoteEngine(EngineContract):
    pass


@pytest.mark.anyio
class TestKeepers:
    async def test_the_files_of_a_share_are_gone_from_the_node_once_its_end_is_recorded(
        self, world: RemoteWorld
    ) -> None:
        submission = world.submission(RankProgram(lines=("done",)))
        await world.run_to_end(submission)
        await anyio.to_thread.run_sync(world.engine.wait)
        assert not os.path.exists(world.spool_task(submission.attempt_id, "n1").directory)  # noqa: ASYNC240, PTH110

    async def test_a_second_process_gets_no_order_and_says_why(self, world: RemoteWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        [task] = world.engine.mailbox.find(submission.attempt_id).values()
        launch_request = LaunchRequest(
            attempt_id=submission.attempt_id,
            urls=world.server.settings.urls_for_supervisors,
            ca=world.server.access().ca,
            bootstrap_token=submission.bootstrap_token,
        )
        await world.engine.launch(launch_request, (task.task_spec,))
        second = world.keepers_of(submission.attempt_id)[-1]
        assert await anyio.to_thread.run_sync(second.wait) == 3
        assert "was given to another" in world.errors(submission.attempt_id)
        assert world.num_starts(submission.attempt_id) == 1

    @pytest.mark.parametrize("wrong", ["bootstrap token", "authority"])
    async def test_without_the_right_bootstrap_token_and_authority_nothing_begins(
        self, world: RemoteWorld, wrong: str
    ) -> None:
        stranger = make_authority("somebody else", time.time()).certificate.decode()

        def change(launch_request: LaunchRequest) -> LaunchRequest:
            if wrong == "bootstrap token":
                return msgspec.structs.replace(
                    launch_request, bootstrap_token=bootstrap_token(b"x" * 32, launch_request.attempt_id)
                )
            return msgspec.structs.replace(launch_request, ca=stranger, patience_s=0.5)

        world.engine.before_start = change
        submission = world.submission()
        await world.engine.submit(submission)
        [agent] = world.keepers_of(submission.attempt_id)
        assert await anyio.to_thread.run_sync(agent.wait) == 3
        message = world.errors(submission.attempt_id)
        assert ("answered 401" if wrong == "bootstrap token" else "CERTIFICATE_VERIFY_FAILED") in message
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert seen.evidence is Evidence.PENDING

    async def test_a_killed_supervisor_is_buried_by_its_keeper(self, world: RemoteWorld) -> None:
        submission = world.submission(RankProgram(exit_code=None, has_children=True, is_deaf=True))
        await world.run_until_started(submission)
        await world.until_running(submission.attempt_id)
        assert spool.signal_supervisor(world.spool_task(submission.attempt_id, "n1"), signal.SIGKILL)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert (seen.outcome.kind, world.num_running(submission.attempt_id)) == (EndKind.LOST, 0)

    async def test_what_hid_from_a_killed_supervisor_is_found_by_its_keeper(self, world: RemoteWorld) -> None:
        mark = f"sleep\0{random.randrange(10**6, 10**9)}"
        run = f"env -i setsid {mark} & while :; do sleep 0.1; done".replace("\0", " ")
        submission = changed(world.submission(), run=run, confinement=())
        await world.run_until_started(submission)
        while not pids_with(mark):
            await world.pass_time()
        assert spool.signal_supervisor(world.spool_task(submission.attempt_id, "n1"), signal.SIGKILL)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert (seen.outcome.kind, pids_with(mark)) == (EndKind.LOST, [])

    async def test_a_killed_supervisor_whose_files_were_swept_away_is_buried_by_its_keeper(
        self, world: RemoteWorld
    ) -> None:
        submission = world.submission(RankProgram(exit_code=None, has_children=True, is_deaf=True))
        submission = changed(submission, confinement=())
        await world.run_until_started(submission)
        await world.until_running(submission.attempt_id)
        task = world.spool_task(submission.attempt_id, "n1")
        claim = spool.read_claim(task)
        assert claim is not None
        for path in Path(task.directory).iterdir():  # noqa: ASYNC240
            if path.is_file():
                path.unlink()
        os.kill(claim.pid, signal.SIGKILL)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert (seen.outcome.kind, world.num_running(submission.attempt_id)) == (EndKind.LOST, 0)

    @pytest.mark.skipif(SWEEPER is None, reason="there is no systemd-tmpfiles here (apt install systemd)")
    async def test_what_sweeps_old_files_away_leaves_those_of_a_share_that_runs(
        self, world: RemoteWorld, tmp_path: Path
    ) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        task = world.spool_task(submission.attempt_id, "n1").directory
        before = set(os.listdir(task))  # noqa: PTH208
        old = world.spool / "old"
        old.touch()
        rules = tmp_path / "rules.conf"
        rules.write_text(f"e {world.spool} - - - 0\n")  # whatever its age
        assert SWEEPER is not None
        await anyio.run_process([SWEEPER, "--clean", str(rules)])
        assert not old.exists(), "it swept"
        assert {"task_spec.json", "claimed", "lock"} <= before
        assert before <= set(os.listdir(task))  # noqa: PTH208

    async def test_what_was_logged_while_nobody_listened_is_handed_in_later(self, world: RemoteWorld) -> None:
        submission = world.submission()
        shown = "echo before; for i in 1 2 3 4 5 6 7 8; do sleep 0.2; echo line $i; done"
        submission = changed(submission, run=shown)
        await world.run_until_started(submission)
        hear = world.engine.mailbox.receive
        world.engine.mailbox.receive = _away  # type: ignore[method-assign, assignment]
        while b"line 8" not in _read(world.spool_task(submission.attempt_id, "n1").log):
            await world.pass_time()
        world.engine.mailbox.receive = hear  # type: ignore[method-assign]
        await world.until(submission.attempt_id, Evidence.ENDED)
        log = await world.whole_log(submission.attempt_id, "n1")
        assert [line.split(b" ", 3)[3] for line in log.splitlines()] == [
            b"before",
            *(f"line {i}".encode() for i in range(1, 9)),
        ]

    async def test_an_order_that_was_taken_back_is_never_given(self, world: RemoteWorld) -> None:
        held: list[LaunchRequest] = []
        world.engine.before_start = held.append
        submission = world.submission()
        await world.engine.submit(submission)
        await world.engine.cancel(submission.attempt_id, 5.0)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.STOPPED
        [task] = world.engine.mailbox.find(submission.attempt_id).values()
        world.engine.before_start = lambda launch_request: launch_request
        await world.engine.launch(held[0], (task.task_spec,))
        assert await anyio.to_thread.run_sync(world.keepers_of(submission.attempt_id)[-1].wait) == 3
        assert world.num_starts(submission.attempt_id) == 0

    async def test_a_submission_that_the_cluster_lost_is_made_again(self, world: RemoteWorld) -> None:
        lost: list[LaunchRequest] = []

        def lose_the_first(launch_request: LaunchRequest) -> LaunchRequest | None:
            lost.append(launch_request)
            return None if len(lost) == 1 else launch_request

        world.engine.before_start = lose_the_first
        submission = world.submission(RankProgram(lines=("once",)))
        await world.engine.submit(submission)
        while len(lost) < 2:
            await world.engine.submit(submission)
            await world.pass_time()
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.SUCCEEDED
        assert world.num_starts(submission.attempt_id) == 1

    async def test_no_secret_is_on_a_command_line_in_an_environment_or_on_a_disk(
        self, world: RemoteWorld
    ) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        secrets = (submission.bootstrap_token.encode(), b"swordfish")
        for pid in tree.all_pids():
            for name in ("cmdline", "environ"):
                result = _read(f"/proc/{pid}/{name}")
                is_rank = b"SHOAL_ATTEMPT_ID=" in result  # of whichever run of this test
                assert not any(secret in result for secret in secrets[: 1 if is_rank else 2]), (pid, name)
        for path in (p for root in (world.home, world.spool) for p in root.rglob("*") if p.is_file()):
            assert not any(secret in path.read_bytes() for secret in secrets), path


def changed(submission: Submission, **changes: object) -> Submission:
    """With all its task specs changed so."""
    task_specs = tuple(change_task_spec(task_spec, **changes) for task_spec in submission.task_specs)
    return msgspec.structs.replace(submission, task_specs=task_specs)


def _read(path: str) -> bytes:
    """What is in it; nothing where it is gone or not ours to read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
        return file.read()
    return b""


def _away(*_: object) -> None:
    raise OSError(5, "the control plane's disk does not answer")
