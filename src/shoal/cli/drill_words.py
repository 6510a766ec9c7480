"""What a drill does and what came of it, in words for people."""

from __future__ import annotations

from typing import Any

from shoal.cli.text import one_line, utc

DOES = {
    "kill-rank": "killing rank {rank} of {ref} on {node}",
    "hang": "stopping rank {rank} of {ref} on {node}",
    "corrupt-checkpoint": "damaging the newest checkpoint of {ref} and killing its ranks",
    "kill-node": "killing the supervisor of {ref} on {node} and all it runs",
    "partition": "cutting {node} off from the control plane for {for_s:g} s",
    "kill-control": "killing the control plane",
}
NO_STEP = "not known: no step had been told of yet"
NO_STEPS = "the program tells of none: it was judged by whether its ranks run on"
SIGNS = {
    "output": "they write output",
    "cpu": "they use a processor, and have written nothing",
    "start": "they were started; they write nothing and use no processor",
}
NO_PACE = "not known: too few steps had been told of"


def begun(drill: dict[str, Any]) -> str:
    """One line, before it happens."""
    return f"drill {one_line(drill['id'])}: {one_line(DOES[drill['kind']].format(**drill))}"


def measuring(drill: dict[str, Any], window_s: float, within_s: float) -> str:
    """What is waited for, and for how long: a job that has gone on is still measured.

    Short: with the seconds behind it, it is to fit on one line of a terminal.
    """
    goal = "all jobs are heard" if drill["kind"] == "kill-control" else "the job goes on"
    return f"measuring for {window_s:g} s, and until {goal} (at most {within_s:g} s)"


def report(drill: dict[str, Any]) -> list[str]:
    """The result, a fact a line. What is not known of a job that did not go on is not told."""
    result = drill["result"]
    why = f": {one_line(result['because'])}" if result["because"] else ""
    lines = [("outcome", f"{result['outcome']}{why}")]
    if result["told"]:
        lines.append(("what", one_line(result["told"])))
    noticed = "answers again" if drill["kind"] == "kill-control" else "noticed"
    if result["noticed_s"] is not None:
        lines.append((noticed, f"after {result['noticed_s']:.2f} s"))
    if result["stepped_s"] is not None:
        fresh = f", in {_attempts(result['new_attempts'])}" if result["new_attempts"] else ""
        again = "next step" if _tells_steps(result) else "runs again"
        sign = f": {SIGNS[result['sign']]}" if result.get("sign") in SIGNS else ""
        lines.append((again, f"after {result['stepped_s']:.2f} s{fresh}{sign}"))
    went_on = drill["kind"] != "kill-control" and result["outcome"] in ("recovered", "unharmed")
    if _tells_steps(result):
        lines += _of_steps(result, went_on=went_on)
    elif went_on:
        if result.get("watched_s") is not None:
            lines.append(("watched", _watched(result)))
        lines.append(("steps", NO_STEPS))
    return [f"{name:<14} {value}" for name, value in lines]


def _watched(result: dict[str, Any]) -> str:
    before = result.get("num_ended", 0)
    told = f"for {result['watched_s']:.0f} s from then on: no rank failed"
    return (
        f"{told}; ranks had failed {'once' if before == 1 else f'{before} times'} before" if before else told
    )


def _of_steps(result: dict[str, Any], *, went_on: bool) -> list[tuple[str, str]]:
    lost, goodput = "", ""
    if result["steps_lost"] is not None:
        lost = str(result["steps_lost"])
    elif went_on:
        lost = NO_STEP
    if result["goodput"] is not None:
        goodput = _goodput(result)
    elif went_on:
        goodput = NO_STEP if result["steps_lost"] is None else NO_PACE
    return [(name, told) for name, told in (("steps lost", lost), ("goodput", goodput)) if told]


def row(drill: dict[str, Any]) -> tuple[str, ...]:
    """As narrow as eighty columns want it: where it was done, and why it failed, `--json` tells."""
    result = drill["result"] or {}
    return (
        utc(drill["started_at"], "%d %b %H:%M"),
        drill["kind"],
        drill["ref"] or "-",
        _seconds(result.get("noticed_s")),
        _seconds(result.get("stepped_s") if _tells_steps(result) else None),
        "-" if result.get("steps_lost") is None else str(result["steps_lost"]),
        "-" if result.get("goodput") is None else f"{result['goodput']:.0%}",
        str(result.get("outcome") or "under way"),
    )


def _tells_steps(result: dict[str, Any]) -> bool:
    """Whether there were steps to judge by; a server of an earlier version does not say."""
    return bool(result.get("tells_steps", True))


def _goodput(result: dict[str, Any]) -> str:
    """With its window; of several jobs, which `kill-control` looks at, there is no one pace."""
    share, window_s = f"{result['goodput']:.0%}", result.get("window_s")
    if window_s is None:
        return share  # of a server of an earlier version, which says no more
    step_s = result.get("step_s")
    if step_s is None:
        return f"{share} of {window_s:.0f} s around it"
    return f"{share} of the {window_s:.0f} s from then on, at {step_s:.3f} s a step"


def _seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}s"


def _attempts(count: int) -> str:
    return "a new attempt" if count == 1 else f"the last of {count} new attempts"
