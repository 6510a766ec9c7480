"""Jobs under their owners' accounts, over a Slurm on paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import SlurmEngine
from shoal.engines.slurm.shared_files import UnixAccount
from shoal.engines.slurm.states import SETTLE_S
from shoal.errors import EngineRefused
from shoal.model.evidence import Evidence
from shoal.wire import LaunchRequest, TaskSpecRequest
from tests.support.slurm.fake_slurm import BOOTED_AT, NO_PROOF, CancelledJobSlurm, slurm_task_spec

pytestmark = pytest.mark.anyio


class Accounts(CancelledJobSlurm):
    """Ana has an account, and so has root."""

    state = "IDLE"

    def account(self, name: str) -> UnixAccount | None:
        return {
            "ana": UnixAccount(name="ana", uid=1000, gid=1000),
            "root": UnixAccount(name="root", uid=0, gid=0),
        }.get(name)

    def create_owner_folders(self, shared: str, folders: Sequence[str], account: UnixAccount) -> None:
        self.given = shared, tuple(folders), account.name


def for_owners(tmp_path: Path, clock: VirtualClock, slurm: Accounts) -> SlurmEngine:
    config = SlurmConfig(as_owners=True, shared="/shared")
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca", shared="/shared")
    return SlurmEngine(tmp_path, clock=clock, access=reach, config=config, transport=slurm)


async def test_a_job_is_submitted_and_cancelled_as_its_owners_and_its_folders_are_the_owners(
    tmp_path: Path,
) -> None:
    slurm = Accounts()
    engine = for_owners(tmp_path, VirtualClock(), slurm)
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://login:1",), ca="ca", bootstrap_token="t"
    )
    mine = slurm_task_spec(owner="ana", nodes=("n0",), checkpoint_dir="/shared/checkpoints/job_1")
    await engine.launch(launch_request, (mine,))
    assert slurm.submitted_as == UnixAccount(name="ana", uid=1000, gid=1000)
    assert slurm.given == ("/shared", ("slurm/ana", "checkpoints/job_1"), "ana")
    assert slurm.request.output == "/shared/slurm/ana/shoal-att_1.0.out"
    engine.mailbox.add((mine,), None)
    await engine.cancel_launched("att_1")
    assert slurm.cancelled == (["train.default-7.shoal-att_1.0"], "ana")


@pytest.mark.parametrize("owner", ["root", "ghost", ""])
async def test_owner_without_an_account_is_refused_and_nothing_is_submitted(
    tmp_path: Path, owner: str
) -> None:
    slurm = Accounts()
    engine = for_owners(tmp_path, VirtualClock(), slurm)
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://login:1",), ca="ca", bootstrap_token="t"
    )
    with pytest.raises(EngineRefused, match=f"`{owner}`"):
        await engine.launch(launch_request, (slurm_task_spec(owner=owner, nodes=("n0",)),))
    assert not hasattr(slurm, "submitted_as")
    assert not hasattr(slurm, "given")


@pytest.mark.parametrize(("user", "is_over"), [("ana", True), ("eve", False), ("root", False)])
async def test_a_job_of_another_user_that_is_named_like_ours_is_not_believed(
    tmp_path: Path, user: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), Accounts()
    slurm.user = user
    engine = for_owners(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(owner="ana", nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    await engine.list_owned()
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.evidence in ((Evidence.ENDED,) if is_over else NO_PROOF)
