"""`shoal drill`: break something of a live job on purpose, and see what that costs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from shoal.cli import daemon
from shoal.cli.drill_words import begun, measuring, report, row
from shoal.cli.flags import JobRef, JsonFlag, connect, one_job
from shoal.cli.progress import long_work
from shoal.cli.show import print_folded, print_json, print_table
from shoal.client.connection import Connection
from shoal.client.credentials import env_for_home, read_server_file
from shoal.errors import SpecError, StateError
from shoal.home import holder, home_from_env
from shoal.spec.quantity import parse_seconds

app = App(name="drill", help="Break something of a live job on purpose, and measure how it goes on.")
MARGIN_S = 30.0
RESTART_S = 60.0

Rank = Annotated[int | None, Parameter(help="Which rank; the last, if not given.")]
Node = Annotated[str | None, Parameter(help="Which of the job's nodes; the last, if not given.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Measure:
    """How long to look, and how to tell what was seen."""

    window: Annotated[str, Parameter(help="Over how long goodput is measured.")] = "20s"
    within: Annotated[str, Parameter(help="A job that has not gone on by then has not recovered.")] = "2m"
    json: JsonFlag = False

    def times(self) -> dict[str, Any]:
        return {"window_s": _seconds("window", self.window), "within_s": _seconds("within", self.within)}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Harm(Measure):
    """And whether the job may end by it."""

    force: Annotated[bool, Parameter(negative="", help="Also where it would be the end of the job.")] = False


MEASURE, HARM = Measure(), Harm()


@app.command(name="kill-rank")
def kill_rank(job: JobRef, *, rank: Rank = None, flags: Harm = HARM) -> int:
    """Kill one rank, as when a process crashes."""
    return _of_job("kill-rank", job, flags, rank=rank)


@app.command
def hang(job: JobRef, *, rank: Rank = None, flags: Harm = HARM) -> int:
    """Stop one rank (SIGSTOP): it lives and does nothing. Continued if nobody misses it."""
    return _of_job("hang", job, flags, rank=rank)


@app.command(name="corrupt-checkpoint")
def corrupt_checkpoint(job: JobRef, *, flags: Harm = HARM) -> int:
    """Change bytes of the newest checkpoint and kill every rank: the one before must be used."""
    return _of_job("corrupt-checkpoint", job, flags)


@app.command(name="kill-node")
def kill_node(job: JobRef, *, node: Node = None, flags: Harm = HARM) -> int:
    """Kill the supervisor and the ranks of one node, as when a machine is lost. For operators."""
    return _of_job("kill-node", job, flags, is_of_node=True, node=node)


@app.command
def partition(
    job: JobRef,
    *,
    lasts: Annotated[str, Parameter(name="--for", help="How long: `10s`.")],
    node: Node = None,
    flags: Harm = HARM,
) -> int:
    """Keep one node's supervisor from reaching the control plane, for a while. For operators."""
    return _of_job("partition", job, flags, is_of_node=True, node=node, for_s=_seconds("for", lasts))


@app.command(name="kill-control")
def kill_control(*, flags: Measure = MEASURE) -> int:
    """Kill the control plane of this machine (SIGKILL) and start it again: jobs must not notice."""
    home = home_from_env()
    _server_of(home)
    with Connection(env=env_for_home()) as shoal:
        drill = shoal.drills.of_cluster("kill-control", **flags.times())
        _say_begun(drill, json=flags.json)
        server = _kill_server(home)
        _start_again(server["pid"], is_managed=bool(server.get("is_foreground")))
        return _finish(shoal, drill, flags)


@app.command
def history(
    job: Annotated[str | None, Parameter(help="Of this job alone.")] = None,
    *,
    limit: Annotated[int, Parameter(help="How many, the newest.")] = 20,
    json: JsonFlag = False,
) -> int:
    """List past drills and what came of them."""
    with connect() as shoal:
        found = shoal.drills.history(one_job(shoal, job) if job else None, limit)
    if json:
        print_json(found)
    elif not found:
        print("no drills yet; `shoal drill kill-rank JOB` is one")
    else:
        heads = ("WHEN (UTC)", "DRILL", "JOB", "NOTICED", "STEP", "LOST", "GOODPUT", "OUTCOME")
        print_table(heads, (row(drill) for drill in found), elastic="DRILL")
    return 0


def _of_job(kind: str, job: str, flags: Harm, *, is_of_node: bool = False, **asked: Any) -> int:
    with connect() as shoal:
        ask = shoal.drills.of_cluster if is_of_node else shoal.drills.of_ranks
        drill = ask(kind, one_job(shoal, job), **flags.times(), is_forced=flags.force, **asked)
        _say_begun(drill, json=flags.json)
        return _finish(shoal, drill, flags)


def _say_begun(drill: dict[str, Any], *, json: bool) -> None:
    if not json:
        print_folded(begun(drill))


def _finish(shoal: Connection, drill: dict[str, Any], flags: Measure) -> int:
    """Wait for the result and print it. 0 only where the job went on."""
    times = flags.times()
    patience_s = sum(times.values()) + float(drill["for_s"] or 0.0) * 2 + MARGIN_S
    with long_work(measuring(drill, **times)):
        ended = shoal.drills.wait(drill, patience_s)
    if flags.json:
        print_json(ended)
    else:
        print("\n".join(report(ended)))
    return 0 if ended["result"]["outcome"] in ("recovered", "unharmed") else 1


def _server_of(home: Path) -> dict[str, Any]:
    """What the control plane that holds this home now has said of itself."""
    pid, server = holder(home), read_server_file(home) or {}
    if pid is None:
        raise StateError(f"no control plane is running in {home}", hint="shoal up")
    if pid <= 0 or server.get("pid") != pid:
        raise StateError(f"the control plane of {home} is just being started", hint="try again in a moment")
    return server


def _kill_server(home: Path) -> dict[str, Any]:
    """Kill the control plane that holds this home, and nobody else; what it had said of itself."""
    pid = _server_of(home)["pid"]
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise StateError(f"the control plane (process {pid}) has just ended", hint="shoal up") from None
    try:
        # Who still holds the home is who was opened: its number cannot be another's.
        server = _server_of(home)
        if server["pid"] != pid:
            raise StateError("the control plane was just started again", hint="try again in a moment")
        signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    return server


def _start_again(killed: int, *, is_managed: bool) -> None:
    """Where a service manager does it, that is waited for; not for ever: a terminal starts nothing again."""
    home = home_from_env()
    deadline = time.monotonic() + RESTART_S
    with long_work(f"waiting for who starts the control plane again (at most {RESTART_S:g} s)"):
        while (pid := holder(home)) == killed or (is_managed and pid is None):
            if time.monotonic() > deadline:
                if pid is None:
                    break
                raise StateError(f"process {killed} still runs after {RESTART_S:g} s", hint="shoal doctor")
            time.sleep(daemon.POLL_S)
    daemon.start()


def _seconds(flag: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as wrong:
        raise SpecError(f"`--{flag}`: {wrong}", hint="a time is `10s`, `2m`") from None
