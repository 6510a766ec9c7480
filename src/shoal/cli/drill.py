"""`shoal drill`: inject a fault into a running job and measure what it costs.

The second half turns a drill and its result into lines for people.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.control_plane import daemon
from shoal.cli.flags import JobRef, JsonFlag, connect, resolve_job
from shoal.cli.output import print_folded, print_json, print_table
from shoal.cli.progress import long_work
from shoal.cli.text import one_line, utc
from shoal.client.connection import Connection
from shoal.client.credentials import env_for_home, read_server_file
from shoal.errors import SpecError, StateError
from shoal.home import home_from_env, pid_holding
from shoal.spec.quantity import parse_seconds

app = App(name="drill", help="Inject a fault into a running job and measure how the job recovers.")
MARGIN_S = 30.0
RESTART_S = 60.0

Rank = Annotated[int | None, Parameter(help="The rank; by default the last.")]
Node = Annotated[str | None, Parameter(help="The job's node; by default its last.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MeasureFlags:
    """How long to measure, and how to print the result."""

    window: Annotated[str, Parameter(help="The time over which goodput is measured.")] = "20s"
    within: Annotated[str, Parameter(help="The job must make progress again within this time.")] = "2m"
    json: JsonFlag = False

    def times(self) -> dict[str, Any]:
        return {"window_s": _seconds("window", self.window), "within_s": _seconds("within", self.within)}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HarmFlags(MeasureFlags):
    """The flags of a drill that could end the job."""

    force: Annotated[bool, Parameter(negative="", help="Do it even if it would end the job.")] = False


MEASURE, HARM = MeasureFlags(), HarmFlags()


@app.command(name="kill-rank")
def kill_rank(job: JobRef, *, rank: Rank = None, flags: HarmFlags = HARM) -> int:
    """Kill one rank, as when a process crashes."""
    return _run_drill("kill-rank", job, flags, rank=rank)


@app.command
def hang(job: JobRef, *, rank: Rank = None, flags: HarmFlags = HARM) -> int:
    """Stop one rank (SIGSTOP): it is alive and does nothing. It is continued if no hang detector acts."""
    return _run_drill("hang", job, flags, rank=rank)


@app.command(name="corrupt-checkpoint")
def corrupt_checkpoint(job: JobRef, *, flags: HarmFlags = HARM) -> int:
    """Change bytes of the newest checkpoint and kill every rank: the previous one must be used."""
    return _run_drill("corrupt-checkpoint", job, flags)


@app.command(name="kill-node")
def kill_node(job: JobRef, *, node: Node = None, flags: HarmFlags = HARM) -> int:
    """Kill the supervisor and the ranks of one node, as when a machine is lost. For operators."""
    return _run_drill("kill-node", job, flags, is_of_node=True, node=node)


@app.command
def partition(
    job: JobRef,
    *,
    lasts: Annotated[str, Parameter(name="--for", help="How long: `10s`.")],
    node: Node = None,
    flags: HarmFlags = HARM,
) -> int:
    """Cut one node's supervisor off from the control plane for a while. For operators."""
    return _run_drill("partition", job, flags, is_of_node=True, node=node, for_s=_seconds("for", lasts))


@app.command(name="kill-control")
def kill_control(*, flags: MeasureFlags = MEASURE) -> int:
    """Kill the control plane of this machine (SIGKILL) and start it again: jobs must not notice."""
    home = home_from_env()
    _server_of(home)
    with Connection(env=env_for_home()) as shoal:
        drill = shoal.drills.of_cluster("kill-control", **flags.times())
        _print_start(drill, json=flags.json)
        server = _kill_server(home)
        _start_again(server["pid"], is_managed=bool(server.get("is_foreground")))
        return _finish(shoal, drill, flags)


@app.command
def history(
    job: Annotated[str | None, Parameter(help="Only drills of this job.")] = None,
    *,
    limit: Annotated[int, Parameter(help="At most this many, the newest.")] = 20,
    json: JsonFlag = False,
) -> int:
    """List past drills and their results."""
    with connect() as shoal:
        drills = shoal.drills.history(resolve_job(shoal, job) if job else None, limit)
    if json:
        print_json(drills)
    elif not drills:
        print("no drills yet; `shoal drill kill-rank JOB` runs one")
    else:
        heads = ("WHEN (UTC)", "DRILL", "JOB", "NOTICED", "STEP", "LOST", "GOODPUT", "OUTCOME")
        print_table(heads, (history_row(drill) for drill in drills), elastic="DRILL")
    return 0


def _run_drill(kind: str, job: str, flags: HarmFlags, *, is_of_node: bool = False, **options: Any) -> int:
    with connect() as shoal:
        ask = shoal.drills.of_cluster if is_of_node else shoal.drills.of_ranks
        drill = ask(kind, resolve_job(shoal, job), **flags.times(), is_forced=flags.force, **options)
        _print_start(drill, json=flags.json)
        return _finish(shoal, drill, flags)


def _print_start(drill: dict[str, Any], *, json: bool) -> None:
    if not json:
        print_folded(start_line(drill))


def _finish(shoal: Connection, drill: dict[str, Any], flags: MeasureFlags) -> int:
    """Wait for the result and print it. Return 0 only if the job kept working."""
    times = flags.times()
    patience_s = sum(times.values()) + float(drill["for_s"] or 0.0) * 2 + MARGIN_S
    with long_work(progress_text(drill, **times)):
        ended = shoal.drills.wait(drill, patience_s)
    if flags.json:
        print_json(ended)
    else:
        print("\n".join(result_lines(ended)))
    return 0 if ended["result"]["outcome"] in ("recovered", "unharmed") else 1


def _server_of(home: Path) -> dict[str, Any]:
    """Return what the control plane that holds this home says of itself."""
    pid, server = pid_holding(home), read_server_file(home) or {}
    if pid is None:
        raise StateError(f"no control plane is running in {home}", hint="shoal up")
    if pid <= 0 or server.get("pid") != pid:
        raise StateError(f"the control plane of {home} is starting", hint="try again in a moment")
    return server


def _kill_server(home: Path) -> dict[str, Any]:
    """Kill the control plane that holds this home, and no other process. Return what it said of itself."""
    pid = _server_of(home)["pid"]
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise StateError(f"the control plane (process {pid}) has just ended", hint="shoal up") from None
    try:
        # The pidfd was opened first. If that pid holds the home now, the pidfd cannot be another process.
        server = _server_of(home)
        if server["pid"] != pid:
            raise StateError("the control plane was just started again", hint="try again in a moment")
        signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    return server


def _start_again(killed: int, *, is_managed: bool) -> None:
    """Start the control plane again. If a service manager does that, wait for it at most `RESTART_S`; nothing
    restarts a control plane that was started in a terminal.
    """
    home = home_from_env()
    deadline = time.monotonic() + RESTART_S
    with long_work(f"waiting for the control plane to be started again (at most {RESTART_S:g} s)"):
        while (pid := pid_holding(home)) == killed or (is_managed and pid is None):
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


DOES = {
    "kill-rank": "killing rank {rank} of {ref} on {node}",
    "hang": "stopping rank {rank} of {ref} on {node}",
    "corrupt-checkpoint": "damaging the newest checkpoint of {ref} and killing its ranks",
    "kill-node": "killing the supervisor of {ref} on {node} and all it runs",
    "partition": "cutting {node} off from the control plane for {for_s:g} s",
    "kill-control": "killing the control plane",
}
NO_STEP = "not known: the program had not reported a step"
NO_STEPS = "the program reports none: the drill watched whether its ranks keep running"
SIGNS = {
    "output": "they write output",
    "cpu": "they use CPU time, and have written nothing",
    "start": "they were started; they write nothing and use no CPU time",
}
NO_PACE = "not known: the program had reported too few steps"


def start_line(drill: dict[str, Any]) -> str:
    """Return one line that announces the drill."""
    return f"drill {one_line(drill['id'])}: {one_line(DOES[drill['kind']].format(**drill))}"


def progress_text(drill: dict[str, Any], window_s: float, within_s: float) -> str:
    """Say what the command waits for, and for how long. A job that works again is still measured.

    The line is short: with the seconds behind it, it must fit on one line of a terminal.
    """
    goal = "all jobs answer" if drill["kind"] == "kill-control" else "the job recovers"
    return f"measuring for {window_s:g} s, and until {goal} (at most {within_s:g} s)"


def result_lines(drill: dict[str, Any]) -> list[str]:
    """Return the result, one fact a line. Leave out unknown facts of a job that did not recover."""
    result = drill["result"]
    why = f": {one_line(result['because'])}" if result["because"] else ""
    lines = [("outcome", f"{result['outcome']}{why}")]
    if result["detail"]:
        lines.append(("what", one_line(result["detail"])))
    noticed = "answers again" if drill["kind"] == "kill-control" else "noticed"
    if result["noticed_s"] is not None:
        lines.append((noticed, f"after {result['noticed_s']:.2f} s"))
    if result["stepped_s"] is not None:
        fresh = f", in {_attempts_text(result['new_attempts'])}" if result["new_attempts"] else ""
        again = "next step" if _tells_steps(result) else "runs again"
        sign = f": {SIGNS[result['sign']]}" if result.get("sign") in SIGNS else ""
        lines.append((again, f"after {result['stepped_s']:.2f} s{fresh}{sign}"))
    went_on = drill["kind"] != "kill-control" and result["outcome"] in ("recovered", "unharmed")
    if _tells_steps(result):
        lines += _step_lines(result, went_on=went_on)
    elif went_on:
        if result.get("watched_s") is not None:
            lines.append(("watched", _watched_text(result)))
        lines.append(("steps", NO_STEPS))
    return [f"{name:<14} {value}" for name, value in lines]


def _watched_text(result: dict[str, Any]) -> str:
    before = result.get("num_ended", 0)
    text = f"for {result['watched_s']:.0f} s after that: no rank failed"
    return (
        f"{text}; ranks had failed {'once' if before == 1 else f'{before} times'} before" if before else text
    )


def _step_lines(result: dict[str, Any], *, went_on: bool) -> list[tuple[str, str]]:
    lost, goodput = "", ""
    if result["steps_lost"] is not None:
        lost = str(result["steps_lost"])
    elif went_on:
        lost = NO_STEP
    if result["goodput"] is not None:
        goodput = _goodput_text(result)
    elif went_on:
        goodput = NO_STEP if result["steps_lost"] is None else NO_PACE
    return [(name, text) for name, text in (("steps lost", lost), ("goodput", goodput)) if text]


def history_row(drill: dict[str, Any]) -> tuple[str, ...]:
    """Return a row that fits into 80 columns. `--json` adds the node and why the drill failed."""
    result = drill["result"] or {}
    return (
        utc(drill["started_at"], "%d %b %H:%M"),
        drill["kind"],
        drill["ref"] or "-",
        _seconds_text(result.get("noticed_s")),
        _seconds_text(result.get("stepped_s") if _tells_steps(result) else None),
        "-" if result.get("steps_lost") is None else str(result["steps_lost"]),
        "-" if result.get("goodput") is None else f"{result['goodput']:.0%}",
        str(result.get("outcome") or "under way"),
    )


def _tells_steps(result: dict[str, Any]) -> bool:
    """Whether there were steps to judge by. A server of an earlier version does not report that."""
    return bool(result.get("tells_steps", True))


def _goodput_text(result: dict[str, Any]) -> str:
    """Return the goodput with its window. `kill-control` looks at several jobs, which have no common pace."""
    share, window_s = f"{result['goodput']:.0%}", result.get("window_s")
    if window_s is None:
        return share  # a server of an earlier version reports no window
    step_s = result.get("step_s")
    if step_s is None:
        return f"{share} of {window_s:.0f} s around it"
    return f"{share} of the {window_s:.0f} s after it, at {step_s:.3f} s a step"


def _seconds_text(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}s"


def _attempts_text(count: int) -> str:
    return "a new attempt" if count == 1 else f"the last of {count} new attempts"
