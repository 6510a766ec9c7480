"""`shoal serve`, `services`, `scale`: HTTP servers that run as replicas behind one address."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.jobs.queue import WATCH_S, draw
from shoal.cli.jobs.submit import file_notes, is_served, start_server
from shoal.cli.output import at_work, fitted, folded, is_bounded, note, print_json, slow_work, table
from shoal.cli.text import clean_lines, duration, joined_lines, one_line, utc
from shoal.errors import LimitReached, ShoalError, SpecError, StateError

if TYPE_CHECKING:
    from shoal.client.handles import JobHandle

ServiceRef = Annotated[str, Parameter(help="A service: `NAME`, `PROJECT/NAME` or `svc_...`.")]
POLL_S = 0.2
NOT_FOUND = 127
"""A shell's exit code for a missing program, or for one whose library is missing."""
URL_S = 10.0
"""How long `serve` waits for the service's address after it started the server: a data plane starts, too."""
RESIZES_SHOWN = 6
MIN_FOLDED = 3
"""Besides the first, at least this many replicas that wait for the same reason share one row."""
HEADS = ("SERVICE", "RELEASE", "READY", "REPLICAS", "ROLLOUT", "AGE", "PATH")


def serve(
    file: Annotated[Path, Parameter(help="A service file (YAML) with `name` and `run`.")],
    /,
    *,
    wait: Annotated[
        float | None,
        Parameter(
            help="Wait this many seconds until it is ready and its rollout is done. "
            "A release that was rolled back is an error."
        ),
    ] = None,
    project: Annotated[
        str | None, Parameter(name=["--project", "-p"], help="Instead of the project in the file.")
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Run a service, or roll it over to what the file says now.

    Required: `name`, `run` (the server listens at $PORT). Also: `kind: service`,
    `replicas: 0..8` or `{min, max}`, `readiness: /health` or `{path, interval,
    timeout, failures, dead_after, within}`, `scale {target, value, window,
    cooldown, to_zero_after, sleep_after}`, `rollout: canary` or `{strategy,
    steps, bake, max_unavailable, rollback_on {error_rate, latency, requests}}`,
    `limits {rps, concurrency, per}`, `cap`, `max_wait`, `timeout`, `retries`,
    `repeatable`, `hedge_after`, `drain`, `affinity`, `balance`, `hosts`, `origins`, `public`,
    `port` (a number or `socket`), `network: open` or `private`, `model` (a name, or
    `{job, step, save}` for a job's checkpoint). Fields of a job (`shoal run
    --help`): `resources`, `env`, `secrets`, `mounts`, `setup`, `workdir`,
    `include`, `exclude`, `project`, `queue`, `priority`, `topology`, `log_rules`, `fence`, `grace`.

    Serving the same file and folder again changes nothing. A changed file in
    `workdir` makes a new release, as a changed field does. A new release has
    as many replicas as its file says, whatever `shoal scale` said.

    Replicas are jobs: `shoal logs NAME` prints the output of a replica that
    serves, `shoal services NAME` says why others wait.
    """
    from shoal.client.sdk import Shoal
    from shoal.spec.files import load_service

    spec = load_service(file)  # report mistakes in the file before a server is started for it
    is_new = not is_served()
    if is_new:
        start_server()
    with Shoal() as shoal:
        with slow_work() as shoal.on_progress:
            service = shoal.serve(file, **({"project": project} if project else {}))
        for text in file_notes(service.get("left_behind") or {}):
            note(text)
        release, because = service["newest_release"], service.get("because")
        with at_work(f"{service['ref']}: release {release} starts"):
            if is_new or wait is not None:
                service = _wait_for_url(shoal.services.show, service)
            if wait is not None:
                service = _wait(shoal.services.show, shoal.job, service, wait)
    if json:
        print_json(service)
        return 0
    why = f" ({because})" if because else ""
    print(one_line(f"{service['ref']}: release {release}{why}, at {service.get('url') or service['path']}"))
    if release == 1 and service.get("url"):
        note("\n".join(how_to_call(service, spec.readiness.path, is_public=spec.public)))
    return 0


def how_to_call(service: dict[str, Any], path: str, *, is_public: bool) -> list[str]:
    """Return commands that call the service, indented so that each stays on one line. `path`: its readiness
    path.
    """
    url = shlex.quote(one_line(service["url"]).removesuffix("/") + path)
    first = "call it:" if service["ready"] else "call it when it is ready:"
    if is_public:
        return [first, f"     curl -sS {url}"]
    whose = f"--project {one_line(service['project'])} --service {one_line(service['name'])}"
    return [
        first,
        f"     TOKEN=$(shoal token create {whose})",
        f'     curl -sS -H "Authorization: Bearer $TOKEN" {url}',
    ]


def _wait_for_url(show: Any, service: dict[str, Any]) -> dict[str, Any]:
    """Return the service with its address, as soon as it has one. Without an address it is served all the
    same.
    """
    deadline = time.monotonic() + URL_S
    while not service.get("url") and time.monotonic() < deadline:
        time.sleep(POLL_S)
        try:
            service = show(service["id"])
        except ShoalError as error:
            note(f"the service runs, but its address is not known: {error}")
            break
    return service


def _wait(
    show: Callable[[str], dict[str, Any]],
    find_job: Callable[[str], JobHandle],
    service: dict[str, Any],
    for_s: float,
) -> dict[str, Any]:
    """Wait until the new release serves alone. Raise `StateError` if it was rolled back or overtaken, or if
    its program does not exist.
    """
    deadline, release, looked_at = time.monotonic() + for_s, service["newest_release"], ""
    while not _is_settled(service):
        _refuse_rollback(service, release)
        failed_ref = (service.get("failure") or {}).get("ref", "")
        if failed_ref != looked_at:
            looked_at = failed_ref
            _check_program(service, find_job(failed_ref).data, release)
        if time.monotonic() > deadline:
            why = last_words(service)
            raise LimitReached(
                f"after {for_s:g} s {service['ready']} of {service['replicas']} of {service['ref']} are ready"
                + (f": {why}" if why else ""),
                hint=f"it keeps starting; look with `shoal services {service['ref']}`",
            )
        time.sleep(POLL_S)
        service = show(service["id"])
    _refuse_rollback(service, release)
    return service


def _refuse_rollback(service: dict[str, Any], release: int) -> None:
    rollout, ref = service.get("rollout") or {}, service["ref"]
    if rollout.get("new") == release and rollout["stage"] == "rolled_back":
        reason = last_words(service) if service.get("failure") else ""
        raise StateError(
            f"release {release} of {ref} was rolled back: {rollout['because']}"
            + (f"; the last failure: {reason}" if reason else ""),
            hint=f"release {service['release']} still serves; `shoal events {ref}` lists what happened",
        )
    if service["newest_release"] != release:
        raise StateError(
            f"release {release} of {ref} was overtaken by release {service['newest_release']}",
            hint=f"`shoal rollout {ref}` shows its progress",
        )


def _check_program(service: dict[str, Any], failed: dict[str, Any], release: int) -> None:
    """Raise `StateError` if the program does not exist. `failed`: the job of the replica that failed last,
    which may be of an older release.
    """
    if failed["exit_code"] != NOT_FOUND or (failed["replica"] or {}).get("release") != release:
        return
    ref = service["ref"]
    raise StateError(
        f"release {release} of {ref} cannot start: {last_words(service)}",
        hint=f"fix the file and `shoal serve` it again; until then Shoal keeps retrying {ref}",
    )


def last_words(service: dict[str, Any]) -> str:
    """Return why the last replica failed, else the last reason why a replica is not ready, else ""."""
    reasons = [
        replica["because"]
        for replica in service.get("servers", ())
        if replica["because"] and replica["state"] != "ready"
    ]
    failure = service.get("failure")
    return joined_lines(failure["because"] if failure else reasons[-1] if reasons else "")


def _is_settled(service: dict[str, Any]) -> bool:
    rollout = service.get("rollout")
    is_rolling = rollout is not None and rollout["stage"] in ("rolling", "canary")
    asleep = sum(replica["state"] == "asleep" for replica in service.get("servers", ()))
    return not is_rolling and service["ready"] + asleep >= service["replicas"]


def services(
    service: Annotated[str | None, Parameter(help="Only this one, with its replicas.")] = None,
    /,
    *,
    project: Annotated[str | None, Parameter(name=["--project", "-p"], help="Only this project.")] = None,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], negative="", help="Keep the screen up to date.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """List services, or show one with its load, its replicas, and why there are so many."""
    with connect() as shoal:
        while True:
            listed = shoal.services.all(project) if service is None else []
            shown = None if service is None else shoal.services.show(service)
            if json:
                print_json(listed if shown is None else shown)
                return 0
            draw(listing(listed) if shown is None else screen(shown), is_live=watch)
            if not watch:
                return 0
            time.sleep(WATCH_S)


def listing(services: list[dict[str, Any]]) -> str:
    if not services:
        return "no services (`shoal serve FILE` runs one)"
    now = time.time()
    bases = {service["url"].removesuffix(service["path"]) for service in services if service.get("url")}
    rows = [row(service, now) for service in services]
    called = [f"called at {one_line(base)}" for base in sorted(bases)]
    return "\n".join([table(HEADS, rows, elastic="PATH"), *called])


def row(service: dict[str, Any], now: float) -> tuple[str, ...]:
    low, high = service["min_replicas"], service["max_replicas"]
    return (
        one_line(service["ref"]),
        str(service["release"]),
        ready_cell(service),
        spelled_range(low, high),
        "stopping" if service["is_stopping"] else rollout_text(service.get("rollout")),
        duration(now - service["created_at"]),
        one_line(service["path"]),
    )


def ready_cell(service: dict[str, Any]) -> str:
    """Return `1/2`, or `2+1/2` if more are ready than wanted, as during a rollout."""
    ready, wanted = service["ready"], service["replicas"]
    return f"{ready}/{wanted}" if ready <= wanted else f"{wanted}+{ready - wanted}/{wanted}"


def ready_text(service: dict[str, Any]) -> str:
    """Return `2 of 2 ready`; during a rollout, count those of the new release beside them."""
    ready, rollout = service["ready"], service.get("rollout") or {}
    new = rollout.get("new")
    fresh = 0
    if rollout.get("stage") in ("rolling", "canary"):
        fresh = sum(
            replica["release"] == new and replica["state"] == "ready" for replica in service["servers"]
        )
    beside = f", and {fresh} of release {new}" if fresh else ""
    return f"{ready - fresh} of {service['replicas']} ready{beside}"


def spelled_range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def rollout_text(rollout: dict[str, Any] | None) -> str:
    """Return `rolling to 3`, or "" when the rollout is done."""
    if rollout is None or rollout["stage"] == "done":
        return ""
    if rollout["stage"] == "rolled_back":
        return f"release {rollout['new']} rolled back"
    step = f", step {rollout['step'] + 1}" if rollout["stage"] == "canary" else ""
    return f"{rollout['stage']} to {rollout['new']}{step}"


def screen(service: dict[str, Any]) -> str:
    """Return the screen of one service: a line about it, its load, its replicas, and why it has so many."""
    release = _release(service, service["release"])
    head = f"{service['ref']}: {release}, {ready_text(service)}"
    word = rollout_text(service.get("rollout"))
    because = (service.get("rollout") or {}).get("because") or ""
    lines = [one_line(head + (f", {word}" if word else "") + (f" ({because})" if because else ""))]
    load = service.get("load")
    if load:
        lines.append(f"{load['in_flight']} requests there, {load['queued']} waiting, {load['rps']} a second")
    lines += no_room_lines(service)
    if service.get("starts"):
        lines.append(cold_start_line(service["starts"]))
    rows = replica_rows(service["servers"])
    heads = ("JOB", "RELEASE", "STATE", "NODE", "ADDRESS", "COLD START", "WHY")
    lines += [table(heads, rows, elastic="WHY")] if rows else []
    return "\n".join(lines + trouble_lines(service, time.time()) + resize_lines(service))


def replica_rows(servers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each replica. Of at least `MIN_FOLDED` + 1 that wait for the same reason, return one
    row for the first and one for all others.
    """
    alike: dict[tuple[int, str], int] = {}
    for replica in servers:
        if replica["state"] == "queued":
            alike[replica["release"], replica["because"]] = (
                alike.get((replica["release"], replica["because"]), 0) + 1
            )
    rows, shown = [], set()
    for replica in servers:
        reason = replica["release"], replica["because"]
        others = alike.get(reason, 0) - 1 if replica["state"] == "queued" else 0
        if others < MIN_FOLDED:
            rows.append(_replica_row(replica))
        elif reason not in shown:
            shown.add(reason)
            rows += [_replica_row(replica), _replica_row({**replica, "ref": f"{others:,} more"})]
    return rows


def _replica_row(replica: dict[str, Any]) -> tuple[str, ...]:
    return (
        one_line(replica["ref"]),
        str(replica["release"]),
        replica["state"],
        one_line(", ".join(replica["nodes"])) or "-",
        one_line(replica["address"]) or "-",
        "-" if replica["cold_start_s"] is None else f"{replica['cold_start_s']:.1f} s",
        joined_lines(replica["because"]),
    )


def trouble_lines(service: dict[str, Any], now: float) -> list[str]:
    """Say why replicas are missing: why the last one ended, and what the newest has not answered."""
    was_taken_back = (service.get("rollout") or {}).get("stage") == "rolled_back"
    if service["ready"] >= service["replicas"] and not was_taken_back:
        return []
    lines: list[str] = []
    failure = service.get("failure")
    if failure:
        ref, nth = one_line(failure["ref"]), service["failures"]
        also = f", {nth} in a row" if nth > 1 else ""
        first, *details = clean_lines(failure["because"]) or ["the reason is not known"]
        lines += ["", f"{ref} ended {duration(now - failure['at'])} ago{also}: {first}"]
        lines += [f"     {word}" for word in details]
        lines.append(
            f"hint: its output: `shoal logs {ref}`; fix the cause, then `shoal serve` its file again"
        )
    silent = [
        replica for replica in service["servers"] if replica["state"] == "running" and replica["because"]
    ]
    for replica in silent[-1:]:
        ref, began = one_line(replica["ref"]), replica.get("started_at")
        since = f" for {duration(now - began)}" if began else ""
        lines += ["", f"{ref} runs but has not been ready{since}: {joined_lines(replica['because'])}"]
        lines.append(f"hint: its output: `shoal logs {ref}`; what Shoal asks: `readiness` in its file")
    return [folded(line) if is_bounded() else line for line in lines]


def resize_lines(service: dict[str, Any]) -> list[str]:
    """Return the newest resizes, as lines that fit the screen."""
    newest = (service.get("resizes") or [])[-RESIZES_SHOWN:]
    text = (
        f"{utc(resize['at'], '%m-%d %H:%M:%SZ')}  {resize['replicas']}: {one_line(resize['because'])}"
        for resize in newest
    )
    return ["", "REPLICAS WANTED", *map(fitted, text)] if newest else []


def no_room_lines(service: dict[str, Any]) -> list[str]:
    """Say that a rollout waits for room, why, and what to type."""
    rollout = service.get("rollout") or {}
    if not rollout.get("waits"):
        return []
    text = f"no room for one more replica: {rollout['waits']}"
    ref, low, high = service["ref"], service["min_replicas"], service["max_replicas"]
    again = spelled_range(low, high)
    if rollout["stage"] == "canary":
        hint = f"make room, or end the canary: `shoal rollout {ref} --promote`"
    else:
        hint = (
            "make room, or replace it in place; meanwhile calls are answered 503: "
            f"`shoal scale {ref} 0`, then `shoal scale {ref} {again}`"
        )
    may_miss = ((service.get("spec") or {}).get("rollout") or {}).get("max_unavailable", 1)
    is_stuck = rollout["stage"] == "canary" or service["replicas"] == 1 or not may_miss
    return [one_line(text), *([one_line(f"hint: {hint}")] if is_stuck else [])]


def _release(service: dict[str, Any], number: int) -> str:
    """Return the release with the model that it serves, if that is known."""
    models = {entry["number"]: entry["model"] for entry in service.get("releases", ())}
    model = models.get(number)
    return f"release {number} ({model})" if model else f"release {number}"


def cold_start_line(starts: list[dict[str, float]]) -> str:
    """Return how long the last replicas took from the decision to start them, and for what."""
    from statistics import median

    total = median(sum(start.values()) for start in starts)
    queued, starting, loading = (
        median(start[part] for start in starts) for part in ("queued_s", "starting_s", "loading_s")
    )
    parts = f"{queued:.1f} queued, {starting:.1f} starting, {loading:.1f} loading"
    return f"cold start {total:.1f} s: {parts} (median of {len(starts)})"


def scale(
    service: ServiceRef,
    replicas: Annotated[str, Parameter(help="`3`, or `0..8`.")],
    /,
    *,
    json: JsonFlag = False,
) -> int:
    """Set how many replicas a service may have, until its next release sets it again."""
    from shoal.spec.service_fields import read_replicas

    try:
        bounds = read_replicas(replicas)
    except ValueError as wrong:
        raise SpecError(f"`{one_line(replicas)}`: {wrong}", hint="`shoal scale NAME 0..8`") from None
    assert isinstance(bounds, dict)
    if bounds["min"] > bounds["max"]:
        raise SpecError(
            f"`{one_line(replicas)}`: {bounds['min']} at least is more than {bounds['max']} at most",
            hint=f"`shoal scale {one_line(service)} {bounds['max']}..{bounds['min']}`",
        )
    with connect() as shoal:
        changed = shoal.services.scale(service, bounds["min"], bounds["max"])
    if json:
        print_json(changed)
    else:
        ref, least, most = one_line(changed["ref"]), changed["min_replicas"], changed["max_replicas"]
        off = f"; calls are answered 503 until `shoal scale {ref} 1`" if most == 0 else ""
        count = (
            f"{most} replica{'' if most == 1 else 's'}" if least == most else f"{least} to {most} replicas"
        )
        print(f"{ref}: {count}{off}")
    return 0


def rollout(
    service: ServiceRef,
    /,
    *,
    undo: Annotated[bool, Parameter(negative="", help="Go back to the previous release.")] = False,
    promote: Annotated[
        bool, Parameter(negative="", help="End the canary: the new release takes over.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Show the rollout from one release to the next; undo it or promote it."""
    if undo and promote:
        raise SpecError("`--undo` and `--promote` exclude each other", hint="see `shoal rollout --help`")
    with connect() as shoal:
        if undo or promote:
            shown = shoal.services.rollout(service, "undo" if undo else "promote")
        else:
            shown = shoal.services.show(service)
    if json:
        print_json(shown["rollout"])
        return 0
    print("\n".join([one_line(rollout_line(shown)), *no_room_lines(shown)]))
    return 0


def rollout_line(service: dict[str, Any]) -> str:
    state = service.get("rollout")
    if state is None:
        return f"{service['ref']}: {_release(service, service['release'])} was the first"
    new, old = (_release(service, state[which]) for which in ("new", "old"))
    word = rollout_text(state) or f"{new} took over from {old}"
    share = f" with {state['share']:.0%} of the requests" if state.get("share") else ""
    return f"{service['ref']}: {word}{share}" + (f" ({state['because']})" if state["because"] else "")
