"""`shoal up` and `shoal down`: the control plane of this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from shoal.cli import daemon, data_plane_facts, restore
from shoal.cli.checkup_server import racks_without_nodes
from shoal.cli.flags import JsonFlag
from shoal.cli.home import ask_for_admin_token, prepare_home, settings_for
from shoal.cli.show import note, print_json
from shoal.cli.stopping import wait_for_ends
from shoal.cli.text import one_line, told_failing, told_unanswered
from shoal.client.connection import Connection
from shoal.client.credentials import env_for_home, find_endpoint
from shoal.client.handles import JobHandle
from shoal.errors import ShoalError, SpecError, StateError
from shoal.home import holder, home_from_env

OPEN = ("queued", "starting", "running", "stopping")
RestoredFlag = Annotated[
    bool,
    Parameter(negative="", help="This home is a copy: end its open jobs, and make it a home of its own."),
]
PolicyFlag = Annotated[
    str | None,
    Parameter(help="A file of scheduling fields that differ from the default, YAML; `none` drops it."),
]
AdminTokenFlag = Annotated[
    bool, Parameter(negative="", help="Make another admin token and show it once: all others were lost.")
]
RerunFlag = Annotated[
    bool,
    Parameter(negative="", help="With `--restored`: the original is gone, so begin open jobs again."),
]

KeepLogs = Annotated[
    str | None, Parameter(help="Keep logs and checkpoints of what ended so long (30d); SHOAL_KEEP_LOGS.")
]
MaxKeptBytes = Annotated[
    str | None, Parameter(help="Keep so many bytes of old logs (10 GiB); SHOAL_MAX_KEPT_BYTES.")
]
MaxCacheBytes = Annotated[str | None, Parameter(help="Of a project's caches on a node (50 GiB, 0: none).")]
AnchorCopy = Annotated[
    str | None,
    Parameter(help="Directory that also keeps the event log's end; `none`: no more."),
]


def up(
    *,
    demo: Annotated[
        str | None, Parameter(help="Add simulated nodes with fake GPUs: `16x8`; `none` removes them.")
    ] = None,
    listen: Annotated[
        str | None, Parameter(help="HOST:PORT; else `SHOAL_LISTEN`, else 127.0.0.1:7462.")
    ] = None,
    database: Annotated[
        str | None, Parameter(help="sqlite:///PATH or postgresql://...; a file in SHOAL_HOME if not given.")
    ] = None,
    tls_cert: Annotated[str | None, Parameter(help="Certificate file (PEM).")] = None,
    tls_key: Annotated[str | None, Parameter(help="Its key file (PEM).")] = None,
    behind_proxy: Annotated[
        bool | None, Parameter(help="A proxy in front does TLS: needed to listen elsewhere without it.")
    ] = None,
    allowed_hosts: Annotated[
        str | None, Parameter(help="Further names it answers to, comma-separated.")
    ] = None,
    mount_roots: Annotated[str | None, Parameter(help="Directories jobs may mount, comma-separated.")] = None,
    queues: Annotated[
        str | None, Parameter(help="Queues beside `default`, comma-separated; SHOAL_QUEUES.")
    ] = None,
    policy: PolicyFlag = None,
    keep_logs: KeepLogs = None,
    max_kept_bytes: MaxKeptBytes = None,
    max_cache_bytes: MaxCacheBytes = None,
    serve_on: Annotated[str | None, Parameter(help="HOST:PORT of services (127.0.0.1:7463).")] = None,
    data_plane: Annotated[str | None, Parameter(help="`embedded` or `haproxy` serves services.")] = None,
    serve_processes: Annotated[str | None, Parameter(help="Processes that take their requests (1).")] = None,
    shared: Annotated[
        str | None, Parameter(help="Directory of all control planes on one PostgreSQL; one leads.")
    ] = None,
    anchor_copy: AnchorCopy = None,
    restored: RestoredFlag = False,
    rerun: RerunFlag = False,
    admin_token: AdminTokenFlag = False,
    foreground: Annotated[bool, Parameter(negative="", help="Stay in front, for a service manager.")] = False,
    json: JsonFlag = False,
) -> int:
    """Start the control plane of this machine and wait until it answers.

    Options are remembered: the next `shoal up` without them brings the same
    cluster back. Loopback only, unless TLS or a proxy is declared.
    """
    flags = {
        "demo": demo,
        "listen": listen,
        "database_url": database,
        "tls_cert": _absolute(tls_cert),
        "tls_key": _absolute(tls_key),
        "behind_proxy": None if behind_proxy is None else str(behind_proxy),
        "allowed_hosts": allowed_hosts,
        "mount_roots": mount_roots,
        "queues": queues,
        "policy": _absolute(policy),
        "keep_logs": keep_logs,
        "max_kept_bytes": max_kept_bytes,
        "max_cache_bytes": max_cache_bytes,
        "serve_on": serve_on,
        "data_plane": _installed(data_plane),
        "serve_processes": serve_processes,
        "shared": _absolute(shared),
        "anchor_copy": _absolute(anchor_copy),
    }
    if admin_token:
        ask_for_admin_token(flags)
    restore.request(flags, is_restored=restored, runs_again=rerun)
    remark = restore.told(runs_again=rerun) if restored else ""
    return _stay(flags) if foreground else _start(flags, remark=remark, json=json)


def _absolute(path: str | None) -> str | None:
    """As text for the server, which has another working directory; `none` takes an option away."""
    return os.path.abspath(path) if path and path != "none" else path  # noqa: PTH100


def _start(flags: dict[str, str | None], *, remark: str, json: bool) -> int:
    """`remark`: what to say of a start that succeeded."""
    running = daemon.start(flags)
    if json:
        print_json(facts_of(running))
        return 0
    announce(running)
    if remark:
        note(remark)
    if line := over_what():
        print(f"      {line}")
    _go_on(running)
    return 0


def _go_on(running: daemon.Running) -> None:
    """What there is to say about it, and what to do first."""
    for text in remarks(running):
        note(text)
    if running.first_token:
        print("try   shoal run -- echo hello\n      shoal nodes\n      shoal queue --watch")


def _installed(data_plane: str | None) -> str | None:
    """The same. `StateError` if it needs a program that is not there."""
    from shoal.serving.haproxy.start import find_haproxy

    if data_plane == "haproxy" and find_haproxy() is None:
        raise StateError("there is no HAProxy on this machine", hint="`apt-get install haproxy`")
    return data_plane


def facts_of(running: daemon.Running) -> dict[str, object]:
    facts = {"url": running.url, "pid": running.pid, "was_running": running.was_running}
    return {**facts, "role": running.role, "leader": running.leader, "token": running.first_token}


def announce(running: daemon.Running) -> None:
    """Where it is, and the admin token in the one moment it is known."""
    word = "is already up" if running.was_running else "is up"
    if running.role != "leader":
        leads = f"{running.leader} leads" if running.leader else "another one leads"
        print(f"Shoal {word} at {running.url} (process {running.pid}) and stands by: {leads}")
        if running.leader:
            print(f"      commands ask whichever leads: `shoal login {running.leader},{running.url}`")
        return
    print(f"Shoal {word} at {running.url} (process {running.pid})")
    if running.first_token:
        print(f"admin token, shown this once: {running.first_token}")
        print(f"      saved for you in {home_from_env() / 'credentials.json'}")


def over_what() -> str:
    """Whose nodes do the work, and how many answer if that is known by now; empty: this machine."""
    settings, _ = settings_for({})
    if settings.engine == "local":
        return ""
    from shoal.control.elsewhere import cluster_for

    try:
        cluster = one_line(str(cluster_for(settings)))
    except SpecError:  # it is not connected any more
        return ""
    nodes, is_old = 0, False
    with suppress(ShoalError), Connection(env=env_for_home(), patience_s=0.0) as shoal:
        found = shoal.nodes()
        nodes = sum(bool(node["is_alive"]) for node in found)
        is_old = any(node.get("unanswered") for node in found)
    counted = f"{nodes} node{'' if nodes == 1 else 's'}" if nodes else "`shoal nodes` shows its nodes"
    return f"over {cluster}: {counted}{' when it last answered' if nodes and is_old else ''}"


def remarks(running: daemon.Running) -> Iterator[str]:
    """What may surprise: another port than the usual one, commands that talk to another server, a server that
    answers and cannot work.
    """
    if running.taken_port is not None:
        port = urlsplit(running.url).port
        yield f"note: port {running.taken_port} was taken; this server has {port} instead"
    if running.taken_serve_port is not None:
        port = running.taken_serve_port
        yield f"note: port {port} was taken; services have another one, which `shoal services` shows"
    if ending := told_unit(running.pid, settings_for({})[0].engine)[0]:
        yield f"warning: {ending}; see `shoal doctor`"
    there = find_endpoint()
    if there.url == running.url:
        with suppress(ShoalError), Connection(patience_s=2.0) as shoal:
            told = shoal.status()
            failing = told.get("failing") or ()
            if away := told.get("unanswered"):
                yield f"-- {told_unanswered(told['engine'], away)}"
            yield from (f"warning: {told_failing(one)}; see `shoal doctor`" for one in failing)
            unknown = racks_without_nodes(shoal)
            if unknown is not None:
                yield f"warning: {unknown}"
    else:
        turn = "`unset SHOAL_URL`" if there.chosen_by == "SHOAL_URL" else "`shoal login local`"
        chosen = f"{one_line(there.url)}, chosen by {there.chosen_by}"
        yield f"note: commands talk to {chosen}; {turn} turns to this one"


def told_unit(pid: int, engine: str) -> tuple[str, str]:
    """What ends with the service that the control plane is in, and what to type; empty: nothing does.

    Jobs on nodes of another cluster do not: only the data plane is beside the control plane then.
    """
    from shoal.engines.ray.agent import ending_service  # of Python's library alone, and knows it on nodes

    unit, whose = ending_service(pid)
    if not unit:
        return "", ""
    name, ends = one_line(unit), "jobs on this machine" if engine == "local" else "the data plane"
    typed = " ".join(["systemctl", *whose, "edit", shlex.quote(name)])
    return (
        f"systemd kills {ends} when {name} ends or is restarted, for its KillMode",
        f"`{typed}`, and write `[Service]` and `KillMode=process`, as in deploy/systemd/shoal.service",
    )


def _stay(flags: dict[str, str | None]) -> int:
    from shoal.cli import serve

    settings, options = settings_for(flags)
    prepare_home(settings.home)
    restore.refuse_copy(settings)
    pid = holder(settings.home)
    if pid is not None:
        raise StateError(
            f"a control plane is already running here (process {pid})", hint="`shoal down` first"
        )
    if told := told_unit(os.getpid(), settings.engine)[0]:
        note(f"warning: {told}; see `shoal doctor`")
    daemon.adopt(settings, options)
    os.environ.update(daemon.environment(options, settings.home))
    return serve.main(is_foreground=True)


def down(
    *,
    jobs: Annotated[
        bool, Parameter(negative="", help="Stop every service and open job first, for good.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Stop the control plane of this machine.

    Running jobs run on, and the next `shoal up` finds them again. A Ray that
    `shoal connect ray` started runs on, too.
    """
    home = home_from_env()
    stopped, services = _stop_jobs() if jobs and holder(home) is not None else ([], [])
    is_idle = not jobs and not json and holder(home) is not None and _is_idle()
    pid = daemon.stop(home)
    if jobs:
        data_plane_facts.stop(home)  # nothing is left that it could serve
    if json:
        print_json(
            {
                "was_running": pid is not None,
                "pid": pid,
                "stopped_jobs": stopped,
                "stopped_services": services,
            }
        )
    elif pid is None:
        print(f"no control plane is running in {home}")
    else:
        if services:
            names = ", ".join(map(one_line, services))
            print(f"stopped for good: {names} (`shoal serve FILE` starts a service again)")
        print(f"Shoal is down (process {pid} ended)")
        if not jobs and not is_idle:
            print("what runs, runs on; `shoal up` finds it again (`shoal down --jobs` stops them)")
    if not json and _has_own_ray(home):
        print("the Ray of our own runs on; `shoal connect local` ends it, once no job is left on it")
    return 0


def _has_own_ray(home: Path) -> bool:
    """Whether a Ray runs that `shoal connect ray` had started here."""
    from shoal.engines.ray.head import Head

    return Head(home / "ray", "").is_running()


def _is_idle() -> bool:
    """Whether nothing runs; not known counts as no."""
    try:
        with Connection(env=env_for_home(), patience_s=2.0) as shoal:
            return not any(shoal.status()["counts"].get(status) for status in OPEN[1:])
    except ShoalError:
        return False


def _stop_jobs() -> tuple[list[str], list[str]]:
    """End all services and open jobs; return the ids of the jobs and the names of the services."""
    with Connection(env=env_for_home()) as shoal:
        services = list(shoal.services.all())
        for service in services:
            shoal.services.stop(service["id"])  # or it would replace what is stopped
        handles = [JobHandle(shoal, job) for job in shoal.jobs(status=OPEN)]
        for handle in handles:
            handle.stop()
        return wait_for_ends(handles), [f"{one['project']}/{one['name']}" for one in services]
