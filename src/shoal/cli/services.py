"""`shoal serve`, `services`, `scale`: HTTP servers that run as replicas behind one address."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.queue import WATCH_S, draw
from shoal.cli.remarks import about_files
from shoal.cli.show import at_work, fitted, folded, is_bounded, note, print_json, slow_work, table
from shoal.cli.submit import is_served, start_server
from shoal.cli.text import duration, in_one_breath, lines_of, one_line, utc
from shoal.errors import LimitReached, ShoalError, SpecError, StateError

if TYPE_CHECKING:
    from shoal.client.handles import JobHandle

ServiceRef = Annotated[str, Parameter(help="A service: `NAME`, `PROJECT/NAME` or `svc_...`.")]
POLL_S = 0.2
NOT_FOUND = 127
"""A shell's exit code for a program, or a library of it, that is not there."""
URL_S = 10.0
"""How long who started the server waits to be told where its service is called: a data plane starts, too."""
RESIZES_SHOWN = 6
MIN_FOLDED = 3
"""So many replicas besides the first that wait for the same are one row."""
HEADS = ("SERVICE", "RELEASE", "READY", "REPLICAS", "ROLLOUT", "AGE", "PATH")


def serve(
    file: Annotated[Path, Parameter(help="A service file (YAML) with `name` and `run`.")],
    /,
    *,
    wait: Annotated[
        float | None,
        Parameter(
            help="Return when it is ready, and its rollout through; give up after so many seconds. "
            "A release that was taken back is an error."
        ),
    ] = None,
    project: Annotated[
        str | None, Parameter(name=["--project", "-p"], help="Instead of the one that the file names.")
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Run a service, or roll it over to what the file says now.

    Needed: `name`, `run` (the server listens at $PORT). Also: `kind: service`,
    `replicas: 0..8` or `{min, max}`, `readiness: /health` or `{path, interval,
    timeout, failures, dead_after, within}`, `scale {target, value, window,
    cooldown, to_zero_after, sleep_after}`, `rollout: canary` or `{strategy,
    steps, bake, max_unavailable, rollback_on {error_rate, latency, requests}}`,
    `limits {rps, concurrency, per}`, `cap`, `max_wait`, `timeout`, `retries`,
    `repeatable`, `hedge_after`, `drain`, `affinity`, `balance`, `hosts`, `origins`, `public`,
    `port` (a number or `socket`), `network: open` or `private`, `model` (a name, or
    `{job, step, save}` for a job's checkpoint). Those of a job (`shoal run
    --help`): `resources`, `env`, `secrets`, `mounts`, `setup`, `workdir`,
    `include`, `exclude`, `project`, `queue`, `priority`, `topology`, `log_rules`, `fence`, `grace`.

    The same file and folder again change nothing. A changed file in `workdir`
    makes a new release as a changed field does, and a new release has as many
    replicas as its file says, whatever `shoal scale` said.

    Replicas are jobs: `shoal logs NAME` prints what one that serves writes,
    `shoal services NAME` why others wait.
    """
    from shoal.client.sdk import Shoal
    from shoal.spec.files import load_service

    spec = load_service(file)  # what is wrong with it is said before a server is started for it
    is_new = not is_served()
    if is_new:
        start_server()
    with Shoal() as shoal:
        with slow_work() as shoal.on_progress:
            made = shoal.serve(file, **({"project": project} if project else {}))
        for text in about_files(made.get("left_behind") or {}):
            note(text)
        release, because = made["newest_release"], made.get("because")
        with at_work(f"{made['ref']}: release {release} starts"):
            if is_new or wait is not None:
                made = _located(shoal.services.show, made)
            if wait is not None:
                made = _wait(shoal.services.show, shoal.job, made, wait)
    if json:
        print_json(made)
        return 0
    why = f" ({because})" if because else ""
    print(one_line(f"{made['ref']}: release {release}{why}, at {made.get('url') or made['path']}"))
    if release == 1 and made.get("url"):
        note("\n".join(how_to_call(made, spec.readiness.path, is_public=spec.public)))
    return 0


def how_to_call(service: dict[str, Any], path: str, *, is_public: bool) -> list[str]:
    """What to type, far enough in to be left on one line each. `path`: one that it answers well."""
    url = shlex.quote(one_line(service["url"]).removesuffix("/") + path)
    first = "call it:" if service["ready"] else "call it, once it is ready:"
    if is_public:
        return [first, f"     curl -sS {url}"]
    whose = f"--project {one_line(service['project'])} --service {one_line(service['name'])}"
    return [
        first,
        f"     TOKEN=$(shoal token create {whose})",
        f'     curl -sS -H "Authorization: Bearer $TOKEN" {url}',
    ]


def _located(show: Any, made: dict[str, Any]) -> dict[str, Any]:
    """With its address, as soon as there is one. It is served all the same where nobody says so."""
    deadline = time.monotonic() + URL_S
    while not made.get("url") and time.monotonic() < deadline:
        time.sleep(POLL_S)
        try:
            made = show(made["id"])
        except ShoalError as error:
            note(f"it is served; where it is called is not known: {error}")
            break
    return made


def _wait(
    show: Callable[[str], dict[str, Any]],
    find_job: Callable[[str], JobHandle],
    made: dict[str, Any],
    for_s: float,
) -> dict[str, Any]:
    """Until the release that was made serves alone. `StateError`: it was taken back, another came, or its
    program is not there.
    """
    deadline, release, looked_at = time.monotonic() + for_s, made["newest_release"], ""
    while not _is_settled(made):
        _check_kept(made, release)
        failed_ref = (made.get("failure") or {}).get("ref", "")
        if failed_ref != looked_at:
            looked_at = failed_ref
            _check_program(made, find_job(failed_ref).data, release)
        if time.monotonic() > deadline:
            why = last_words(made)
            raise LimitReached(
                f"after {for_s:g} s {made['ready']} of {made['replicas']} of {made['ref']} are ready"
                + (f": {why}" if why else ""),
                hint=f"it goes on; look with `shoal services {made['ref']}`",
            )
        time.sleep(POLL_S)
        made = show(made["id"])
    _check_kept(made, release)
    return made


def _check_kept(service: dict[str, Any], release: int) -> None:
    rollout, ref = service.get("rollout") or {}, service["ref"]
    if rollout.get("new") == release and rollout["stage"] == "rolled_back":
        words = last_words(service) if service.get("failure") else ""
        raise StateError(
            f"release {release} of {ref} was rolled back: {rollout['because']}"
            + (f"; the last said: {words}" if words else ""),
            hint=f"release {service['release']} serves on; `shoal events {ref}` says what happened",
        )
    if service["newest_release"] != release:
        raise StateError(
            f"release {release} of {ref} was overtaken by release {service['newest_release']}",
            hint=f"`shoal rollout {ref}` says how far that one is",
        )


def _check_program(service: dict[str, Any], failed: dict[str, Any], release: int) -> None:
    """`failed`: the job of the replica that failed last. It may be of an older release."""
    if failed["exit_code"] != NOT_FOUND or (failed["replica"] or {}).get("release") != release:
        return
    ref = service["ref"]
    raise StateError(
        f"release {release} of {ref} cannot start: {last_words(service)}",
        hint=f"mend the file and `shoal serve` it again; until then {ref} is tried again and again",
    )


def last_words(service: dict[str, Any]) -> str:
    """What the last replica died of, else why the newest is not ready, as far as anybody said."""
    told = [
        one["because"] for one in service.get("servers", ()) if one["because"] and one["state"] != "ready"
    ]
    failure = service.get("failure")
    return in_one_breath(failure["because"] if failure else told[-1] if told else "")


def _is_settled(service: dict[str, Any]) -> bool:
    rollout = service.get("rollout")
    is_rolling = rollout is not None and rollout["stage"] in ("rolling", "canary")
    asleep = sum(one["state"] == "asleep" for one in service.get("servers", ()))
    return not is_rolling and service["ready"] + asleep >= service["replicas"]


def services(
    service: Annotated[str | None, Parameter(help="Only this one, with its replicas.")] = None,
    /,
    *,
    project: Annotated[str | None, Parameter(name=["--project", "-p"], help="Only this project.")] = None,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], negative="", help="Keep it up to date.")
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
    bases = {one["url"].removesuffix(one["path"]) for one in services if one.get("url")}
    rows = [row(one, now) for one in services]
    called = [f"called at {one_line(base)}" for base in sorted(bases)]
    return "\n".join([table(HEADS, rows, elastic="PATH"), *called])


def row(service: dict[str, Any], now: float) -> tuple[str, ...]:
    low, high = service["min_replicas"], service["max_replicas"]
    return (
        one_line(service["ref"]),
        str(service["release"]),
        ready_cell(service),
        spelled_range(low, high),
        "stopping" if service["is_stopping"] else rollout_word(service.get("rollout")),
        duration(now - service["created_at"]),
        one_line(service["path"]),
    )


def ready_cell(service: dict[str, Any]) -> str:
    """`1/2`; `2+1/2` where more are ready than there should be, as in a rollout."""
    ready, wanted = service["ready"], service["replicas"]
    return f"{ready}/{wanted}" if ready <= wanted else f"{wanted}+{ready - wanted}/{wanted}"


def ready_words(service: dict[str, Any]) -> str:
    """`2 of 2 ready`; in a rollout those of the new release are told beside them."""
    ready, rollout = service["ready"], service.get("rollout") or {}
    new = rollout.get("new")
    fresh = 0
    if rollout.get("stage") in ("rolling", "canary"):
        fresh = sum(one["release"] == new and one["state"] == "ready" for one in service["servers"])
    beside = f", and {fresh} of release {new}" if fresh else ""
    return f"{ready - fresh} of {service['replicas']} ready{beside}"


def spelled_range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def rollout_word(rollout: dict[str, Any] | None) -> str:
    """`rolling to 3`; nothing once it is done."""
    if rollout is None or rollout["stage"] == "done":
        return ""
    if rollout["stage"] == "rolled_back":
        return f"release {rollout['new']} rolled back"
    step = f", step {rollout['step'] + 1}" if rollout["stage"] == "canary" else ""
    return f"{rollout['stage']} to {rollout['new']}{step}"


def screen(service: dict[str, Any]) -> str:
    """One service: a line about it, its load, its replicas, and how it came to have so many."""
    release = _release(service, service["release"])
    head = f"{service['ref']}: {release}, {ready_words(service)}"
    word = rollout_word(service.get("rollout"))
    because = (service.get("rollout") or {}).get("because") or ""
    lines = [one_line(head + (f", {word}" if word else "") + (f" ({because})" if because else ""))]
    load = service.get("load")
    if load:
        lines.append(f"{load['in_flight']} requests there, {load['queued']} waiting, {load['rps']} a second")
    lines += no_room(service)
    if service.get("starts"):
        lines.append(cold_start_line(service["starts"]))
    rows = replica_rows(service["servers"])
    heads = ("JOB", "RELEASE", "STATE", "NODE", "ADDRESS", "COLD START", "WHY")
    lines += [table(heads, rows, elastic="WHY")] if rows else []
    return "\n".join(lines + troubles(service, time.time()) + resizes(service))


def replica_rows(servers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One for each, but of many that wait for the same reason one for the first and one for the others."""
    alike: dict[tuple[int, str], int] = {}
    for one in servers:
        if one["state"] == "queued":
            alike[one["release"], one["because"]] = alike.get((one["release"], one["because"]), 0) + 1
    rows, shown = [], set()
    for one in servers:
        reason = one["release"], one["because"]
        others = alike.get(reason, 0) - 1 if one["state"] == "queued" else 0
        if others < MIN_FOLDED:
            rows.append(_replica_row(one))
        elif reason not in shown:
            shown.add(reason)
            rows += [_replica_row(one), _replica_row({**one, "ref": f"{others:,} more"})]
    return rows


def _replica_row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one_line(one["ref"]),
        str(one["release"]),
        one["state"],
        one_line(", ".join(one["nodes"])) or "-",
        one_line(one["address"]) or "-",
        "-" if one["cold_start_s"] is None else f"{one['cold_start_s']:.1f} s",
        in_one_breath(one["because"]),
    )


def troubles(service: dict[str, Any], now: float) -> list[str]:
    """Why it has fewer than it should: what the last one died of, and what the newest has not answered."""
    was_taken_back = (service.get("rollout") or {}).get("stage") == "rolled_back"
    if service["ready"] >= service["replicas"] and not was_taken_back:
        return []
    told: list[str] = []
    failure = service.get("failure")
    if failure:
        ref, nth = one_line(failure["ref"]), service["failures"]
        also = f", {nth} in a row" if nth > 1 else ""
        first, *words = lines_of(failure["because"]) or ["nobody knows why"]
        told += ["", f"{ref} ended {duration(now - failure['at'])} ago{also}: {first}"]
        told += [f"     {word}" for word in words]
        told.append(f"hint: all it wrote: `shoal logs {ref}`; then mend it, and `shoal serve` its file again")
    silent = [one for one in service["servers"] if one["state"] == "running" and one["because"]]
    for one in silent[-1:]:
        ref, began = one_line(one["ref"]), one.get("started_at")
        since = f" for {duration(now - began)}" if began else ""
        told += ["", f"{ref} runs and was not ready{since}: {in_one_breath(one['because'])}"]
        told.append(f"hint: what it writes: `shoal logs {ref}`; where it is asked: `readiness` in its file")
    return [folded(line) if is_bounded() else line for line in told]


def resizes(service: dict[str, Any]) -> list[str]:
    """The newest of them, as lines that fit the screen."""
    newest = (service.get("resizes") or [])[-RESIZES_SHOWN:]
    told = (
        f"{utc(one['at'], '%m-%d %H:%M:%SZ')}  {one['replicas']}: {one_line(one['because'])}"
        for one in newest
    )
    return ["", "REPLICAS WANTED", *map(fitted, told)] if newest else []


def no_room(service: dict[str, Any]) -> list[str]:
    """That a rollout waits for room, why, and what to type."""
    rollout = service.get("rollout") or {}
    if not rollout.get("waits"):
        return []
    told = f"no room for one more replica: {rollout['waits']}"
    ref, low, high = service["ref"], service["min_replicas"], service["max_replicas"]
    again = spelled_range(low, high)
    if rollout["stage"] == "canary":
        hint = f"make room, or roll without a canary: `shoal rollout {ref} --promote`"
    else:
        hint = (
            "make room, or have it replaced in place, while it answers 503: "
            f"`shoal scale {ref} 0`, then `shoal scale {ref} {again}`"
        )
    may_miss = ((service.get("spec") or {}).get("rollout") or {}).get("max_unavailable", 1)
    is_stuck = rollout["stage"] == "canary" or service["replicas"] == 1 or not may_miss
    return [one_line(told), *([one_line(f"hint: {hint}")] if is_stuck else [])]


def _release(service: dict[str, Any], number: int) -> str:
    """With the model that it serves, where that is known."""
    known = {one["number"]: one["model"] for one in service.get("releases", ())}
    model = known.get(number)
    return f"release {number} ({model})" if model else f"release {number}"


def cold_start_line(starts: list[dict[str, float]]) -> str:
    """Of the last replicas: how long they took from the wish for them, and with what."""
    from statistics import median

    total = median(sum(one.values()) for one in starts)
    queued, starting, loading = (
        median(one[part] for one in starts) for part in ("queued_s", "starting_s", "loading_s")
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
    """Say how many replicas a service may have, until its next release says it anew."""
    from shoal.spec.service_clauses import read_replicas

    try:
        asked = read_replicas(replicas)
    except ValueError as wrong:
        raise SpecError(f"`{one_line(replicas)}`: {wrong}", hint="`shoal scale NAME 0..8`") from None
    assert isinstance(asked, dict)
    if asked["min"] > asked["max"]:
        raise SpecError(
            f"`{one_line(replicas)}`: {asked['min']} at least is more than {asked['max']} at most",
            hint=f"`shoal scale {one_line(service)} {asked['max']}..{asked['min']}`",
        )
    with connect() as shoal:
        changed = shoal.services.scale(service, asked["min"], asked["max"])
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
    undo: Annotated[bool, Parameter(negative="", help="Back to the release before.")] = False,
    promote: Annotated[bool, Parameter(negative="", help="Watch a canary no longer: it takes over.")] = False,
    json: JsonFlag = False,
) -> int:
    """Show how a service comes from one release to the next, or turn it back or on."""
    if undo and promote:
        raise SpecError("`--undo` or `--promote`, one of the two", hint="see `shoal rollout --help`")
    with connect() as shoal:
        if undo or promote:
            found = shoal.services.rollout(service, "undo" if undo else "promote")
        else:
            found = shoal.services.show(service)
    if json:
        print_json(found["rollout"])
        return 0
    print("\n".join([one_line(rollout_line(found)), *no_room(found)]))
    return 0


def rollout_line(service: dict[str, Any]) -> str:
    told = service.get("rollout")
    if told is None:
        return f"{service['ref']}: {_release(service, service['release'])} was the first"
    new, old = (_release(service, told[which]) for which in ("new", "old"))
    word = rollout_word(told) or f"{new} took over from {old}"
    share = f" with {told['share']:.0%} of the requests" if told.get("share") else ""
    return f"{service['ref']}: {word}{share}" + (f" ({told['because']})" if told["because"] else "")
