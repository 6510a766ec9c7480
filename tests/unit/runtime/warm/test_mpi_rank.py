"""A rank that waits for its place in an MPI world."""

from __future__ import annotations

import os
import socket
import time

import pytest

from shoal.runtime.warm import mpi_rank, mpirun


class Exited(Exception):
    """Raised instead of ending the process."""


@pytest.mark.parametrize(("answer", "code"), [({"code": 3}, 3), (None, 1)])
def test_rank_without_a_place_lets_the_rank_that_ended_the_world_end_first(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, int] | None, code: int
) -> None:
    slept: list[float] = []

    def leave(status: int) -> None:
        raise Exited(status)

    rank, host = socket.socketpair()
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(mpi_rank, "_connect_to_host", lambda *_: rank)
    with rank, host:
        if answer is not None:
            mpi_rank.send(host, answer)
        host.shutdown(socket.SHUT_WR)
        with pytest.raises(Exited) as end:
            mpi_rank.become("stand-ins", "folder", 1, "mpirun")
    assert end.value.args == (code,)
    assert slept == [mpi_rank.SETTLE_S]


def test_component_of_mpi_that_a_job_chooses_by_itself_reaches_its_program() -> None:
    chosen = {"OMPI_MCA_op": "^avx", "OMPI_MCA_coll": "^hcoll", "LR": "1"}
    alone = {"OMPI_MCA_op": mpirun.ALONE, "OMPI_MCA_coll": mpirun.ALONE, "PMI_PORT": "127.0.0.1:1"}
    assert mpi_rank.clean(chosen) == chosen
    assert mpi_rank.clean({**alone, "LR": "1"}) == {"LR": "1"}
