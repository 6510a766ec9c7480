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

from shoal.cli.checkup.server import racks_without_nodes
from shoal.cli.control_plane import daemon
from shoal.cli.control_plane import home as home_module
from shoal.cli.control_plane.home import ask_for_admin_token, prepare_home, settings_for
from shoal.cli.flags import JsonFlag
from shoal.cli.jobs.stop_and_retry import wait_for_ends
from shoal.cli.output import note, print_json
from shoal.cli.text import failing_loop_text, one_line, unanswered_engine_text
from shoal.client.connection import Connection
from shoal.client.credentials import env_for_home, find_endpoint
from shoal.client.handles import JobHandle
from shoal.errors import ShoalError, SpecError, StateError
from shoal.home import home_from_env, pid_holding

OPEN = ("queued", "starting", "running", "stopping")
RestoredFlag = Annotated[
    bool,
    Parameter(negative="", help="This home is a copy: end its open jobs, and make it a home of its own."),
]
PolicyFlag = Annotated[
    str | None,
    Parameter(help="A YAML file of scheduling fields that differ from the default; `none` drops it."),
]
AdminTokenFlag = Annotated[
    bool, Parameter(negative="", help="Make a new admin token and print it once, if all others were lost.")
]
RerunFlag = Annotated[
    bool,
    Parameter(negative="", help="With `--restored`: the original is gone, so start open jobs again."),
]

KeepLogs = Annotated[
    str | None, Parameter(help="How long to keep logs and checkpoints after the end (30d); SHOAL_KEEP_LOGS.")
]
MaxKeptBytes = Annotated[
    str | None, Parameter(help="How many bytes of old logs to keep (10 GiB); SHOAL_MAX_KEPT_BYTES.")
]
MaxCacheBytes = Annotated[
    str | None, Parameter(help="Size of a project's caches on a node (50 GiB; 0 for none).")
]
AnchorCopy = Annotated[
    str | None,
    Parameter(help="A directory that also keeps the end of the event log; `none` to stop."),
]


def up(
    *,
    demo: Annotated[
        str | None, Parameter(help="Add simulated nodes with fake GPUs: `16x8`; `none` removes them.")
    ] = None,
    listen: Annotated[
        str | None, Parameter(help="HOST:PORT; by default `SHOAL_LISTEN`, else 127.0.0.1:7462.")
    ] = None,
    database: Annotated[
        str | None, Parameter(help="sqlite:///PATH or postgresql://...; by default a file in SHOAL_HOME.")
    ] = None,
    tls_cert: Annotated[str | None, Parameter(help="Certificate file (PEM).")] = None,
    tls_key: Annotated[str | None, Parameter(help="Its key file (PEM).")] = None,
    behind_proxy: Annotated[
        bool | None, Parameter(help="A proxy in front terminates TLS; needed to listen elsewhere without it.")
    ] = None,
    allowed_hosts: Annotated[
        str | None, Parameter(help="Further host names of this server, comma-separated.")
    ] = None,
    mount_roots: Annotated[str | None, Parameter(help="Directories jobs may mount, comma-separated.")] = None,
    queues: Annotated[str | None, Parameter(help="Queues beside `default`, comma-separated.")] = None,
    policy: PolicyFlag = None,
    keep_logs: KeepLogs = None,
    max_kept_bytes: MaxKeptBytes = None,
    max_cache_bytes: MaxCacheBytes = None,
    serve_on: Annotated[str | None, Parameter(help="HOST:PORT for services (127.0.0.1:7463).")] = None,
    data_plane: Annotated[str | None, Parameter(help="`embedded` or `haproxy` serves services.")] = None,
    serve_processes: Annotated[str | None, Parameter(help="Processes for requests of services (1).")] = None,
    shared: Annotated[
        str | None, Parameter(help="Directory shared by all control planes on one PostgreSQL.")
    ] = None,
    anchor_copy: AnchorCopy = None,
    restored: RestoredFlag = False,
    rerun: RerunFlag = False,
    admin_token: AdminTokenFlag = False,
    foreground: Annotated[
        bool, Parameter(negative="", help="Stay in the foreground, for a service manager.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Start the control plane of this machine and wait until it answers.

    Options are remembered: the next `shoal up` without them brings the same
    cluster back. It listens on loopback only, unless TLS or a proxy is declared.
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
        "data_plane": _check_data_plane(data_plane),
        "serve_processes": serve_processes,
        "shared": _absolute(shared),
        "anchor_copy": _absolute(anchor_copy),
    }
    if admin_token:
        ask_for_admin_token(flags)
    daemon.request_restore(flags, is_restored=restored, runs_again=rerun)
    remark = daemon.restore_note(runs_again=rerun) if restored else ""
    return _run_foreground(flags) if foreground else _start(flags, remark=remark, json=json)


def _absolute(path: str | None) -> str | None:
    """Return an absolute path for the server, which has another working directory; `none` drops an option."""
    return os.path.abspath(path) if path and path != "none" else path  # noqa: PTH100


def _start(flags: dict[str, str | None], *, remark: str, json: bool) -> int:
    """Start it. `remark`: what to print after a start that succeeded."""
    running = daemon.start(flags)
    if json:
        print_json(facts_of(running))
        return 0
    announce(running)
    if remark:
        note(remark)
    if line := engine_text():
        print(f"      {line}")
    _print_remarks(running)
    return 0


def _print_remarks(running: daemon.RunningServer) -> None:
    """Print remarks about it, and what to type first."""
    for text in remarks(running):
        note(text)
    if running.first_token:
        print("try   shoal run -- echo hello\n      shoal nodes\n      shoal queue --watch")


def _check_data_plane(data_plane: str | None) -> str | None:
    """Return the same value. Raise `StateError` if it needs a program that is not installed."""
    from shoal.serving.haproxy.plane import find_haproxy

    if data_plane == "haproxy" and find_haproxy() is None:
        raise StateError("HAProxy is not installed on this machine", hint="`apt-get install haproxy`")
    return data_plane


def facts_of(running: daemon.RunningServer) -> dict[str, object]:
    facts = {"url": running.url, "pid": running.pid, "was_running": running.was_running}
    return {**facts, "role": running.role, "leader": running.leader, "token": running.first_token}


def announce(running: daemon.RunningServer) -> None:
    """Print where it listens, and the admin token at the only time it is known."""
    word = "is already up" if running.was_running else "is up"
    if running.role != "leader":
        leads = f"{running.leader} leads" if running.leader else "another one leads"
        print(f"Shoal {word} at {running.url} (process {running.pid}) and stands by: {leads}")
        if running.leader:
            print(f"      commands find the leader: `shoal login {running.leader},{running.url}`")
        return
    print(f"Shoal {word} at {running.url} (process {running.pid})")
    if running.first_token:
        print(f"admin token, shown this once: {running.first_token}")
        print(f"      saved for you in {home_from_env() / 'credentials.json'}")


def engine_text() -> str:
    """Name the cluster that does the work, and how many nodes answer; "" for this machine."""
    settings, _ = settings_for({})
    if settings.engine == "local":
        return ""
    from shoal.control.opening import cluster_for

    try:
        cluster = one_line(str(cluster_for(settings)))
    except SpecError:  # it is no longer connected
        return ""
    num_alive, is_old = 0, False
    with suppress(ShoalError), Connection(env=env_for_home(), patience_s=0.0) as shoal:
        nodes = shoal.nodes()
        num_alive = sum(bool(node["is_alive"]) for node in nodes)
        is_old = any(node.get("unanswered") for node in nodes)
    counted = (
        f"{num_alive} node{'' if num_alive == 1 else 's'}" if num_alive else "`shoal nodes` shows its nodes"
    )
    return f"over {cluster}: {counted}{' when it last answered' if num_alive and is_old else ''}"


def remarks(running: daemon.RunningServer) -> Iterator[str]:
    """Yield what may surprise: another port than the usual one, commands that talk to another server, a
    server that answers but cannot work.
    """
    if running.taken_port is not None:
        port = urlsplit(running.url).port
        yield f"note: port {running.taken_port} was taken; this server has {port} instead"
    if running.taken_serve_port is not None:
        port = running.taken_serve_port
        yield f"note: port {port} was taken; services have another one, which `shoal services` shows"
    if ending := unit_warning(running.pid, settings_for({})[0].engine)[0]:
        yield f"warning: {ending}; see `shoal doctor`"
    there = find_endpoint()
    if there.url == running.url:
        with suppress(ShoalError), Connection(patience_s=2.0) as shoal:
            view = shoal.status()
            failing = view.get("failing") or ()
            if away := view.get("unanswered"):
                yield f"-- {unanswered_engine_text(view['engine'], away)}"
            yield from (f"warning: {failing_loop_text(loop)}; see `shoal doctor`" for loop in failing)
            unknown = racks_without_nodes(shoal)
            if unknown is not None:
                yield f"warning: {unknown}"
    else:
        turn = "`unset SHOAL_URL`" if there.chosen_by == "SHOAL_URL" else "`shoal login local`"
        chosen = f"{one_line(there.url)}, chosen by {there.chosen_by}"
        yield f"note: commands talk to {chosen}; {turn} returns to this one"


def unit_warning(pid: int, engine: str) -> tuple[str, str]:
    """Return what ends with the systemd unit of the control plane, and what to type; "" if nothing does.

    Jobs on nodes of another cluster do not: only the data plane runs beside the control plane then.
    """
    # This module runs on nodes, where it needs the same rule; it imports only Python's standard library.
    from shoal.engines.ray.agent import ending_service

    unit, whose = ending_service(pid)
    if not unit:
        return "", ""
    name, ends = one_line(unit), "jobs on this machine" if engine == "local" else "the data plane"
    typed = " ".join(["systemctl", *whose, "edit", shlex.quote(name)])
    return (
        f"systemd kills {ends} when {name} ends or is restarted, because of its KillMode",
        f"`{typed}`, and write `[Service]` and `KillMode=process`, as in deploy/systemd/shoal.service",
    )


def _run_foreground(flags: dict[str, str | None]) -> int:
    from shoal.cli.control_plane import server

    settings, options = settings_for(flags)
    prepare_home(settings.home)
    daemon.refuse_copy(settings)
    pid = pid_holding(settings.home)
    if pid is not None:
        raise StateError(
            f"a control plane is already running here (process {pid})", hint="`shoal down` first"
        )
    if warning := unit_warning(os.getpid(), settings.engine)[0]:
        note(f"warning: {warning}; see `shoal doctor`")
    daemon.adopt(settings, options)
    os.environ.update(daemon.server_environment(options, settings.home))
    return server.main(is_foreground=True)


def down(
    *,
    jobs: Annotated[
        bool, Parameter(negative="", help="First stop every service and open job, for good.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Stop the control plane of this machine.

    Running jobs keep running, and the next `shoal up` finds them again. A Ray
    that `shoal connect ray` started keeps running, too.
    """
    home = home_from_env()
    stopped, services = _stop_jobs() if jobs and pid_holding(home) is not None else ([], [])
    is_idle = not jobs and not json and pid_holding(home) is not None and _is_idle()
    pid = daemon.stop(home)
    if jobs:
        home_module.stop_data_plane(home)  # there is nothing left that it could serve
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
            print("running jobs keep running; `shoal up` finds them again (`shoal down --jobs` stops them)")
    if not json and _has_own_ray(home):
        print("the Ray that Shoal started keeps running; `shoal connect local` stops it when it has no jobs")
    return 0


def _has_own_ray(home: Path) -> bool:
    """Whether a Ray that `shoal connect ray` started here is running."""
    from shoal.engines.ray.head import RayHead

    return RayHead(home / "ray", "").is_running()


def _is_idle() -> bool:
    """Whether no job runs; unknown counts as no."""
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
            shoal.services.stop(service["id"])  # first, or the service replaces the replicas
        handles = [JobHandle(shoal, job) for job in shoal.jobs(status=OPEN)]
        for handle in handles:
            handle.stop()
        return wait_for_ends(handles), [f"{service['project']}/{service['name']}" for service in services]
