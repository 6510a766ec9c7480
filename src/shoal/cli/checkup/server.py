"""The checks of `shoal doctor` between this machine and the control plane it talks to."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from urllib.parse import urlsplit

from shoal.cli.checkup.machine import REMOTE_ENGINES, Finding, Level
from shoal.cli.control_plane.home import load_remembered, token_of_others
from shoal.cli.text import duration, failing_loop_text, taken_port_text, utc
from shoal.client.connection import Connection
from shoal.client.credentials import Credentials, find_endpoint
from shoal.errors import ServerUnreachable, ShoalError, SpecError, StandingBy, Unauthenticated
from shoal.home import home_from_env, pid_holding
from shoal.settings import merge_options

SOON_S = 7 * 86400
SKEW_S = 5.0
"""A larger difference of the clocks makes ages, deadlines and lifetimes of tokens look wrong."""


def check_database() -> Finding:
    """Whether PostgreSQL, if it is configured, listens, and whether its driver is installed."""
    home = home_from_env()
    url = merge_options({}, os.environ, load_remembered(home)).get("database_url", "")
    if not url.startswith("postgresql"):
        return Finding("database", Level.OK, url or f"sqlite in {home}")
    parts = urlsplit(url)
    place = f"{parts.hostname or 'localhost'}:{parts.port or 5432}"
    try:
        import psycopg  # noqa: F401 - only to see whether it is installed
    except ImportError:
        hint = "`pip install 'shoal[postgres]'`"
        return Finding("database", Level.BROKEN, "the PostgreSQL driver is not installed", hint)
    try:
        with socket.create_connection((parts.hostname or "localhost", parts.port or 5432), timeout=3):
            return Finding("database", Level.OK, f"PostgreSQL listens at {place}")
    except OSError as error:
        hint = f"`pg_isready -h {parts.hostname or 'localhost'} -p {parts.port or 5432}`"
        return Finding("database", Level.BROKEN, f"no answer at {place}: {error}", hint)


def check_credentials() -> Finding:
    path = Credentials(home_from_env()).path
    if os.environ.get("SHOAL_TOKEN"):
        return Finding("credentials", Level.OK, "SHOAL_TOKEN is set and used")
    if not path.exists():
        ours = "`shoal up` makes one (`shoal down` first if it runs)"
        hint = f"{token_of_others(path.parent) or ours}; `shoal login URL` saves another server's"
        return Finding("credentials", Level.WARN, "no token saved yet", hint)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return Finding("credentials", Level.BROKEN, f"others can read {path}", f"`chmod 600 {path}`")
    try:
        servers = Credentials(home_from_env()).load()["servers"]
    except SpecError as error:
        return Finding("credentials", Level.BROKEN, error.message, error.hint or "")
    return Finding("credentials", Level.OK, f"{len(servers)} saved in {path}")


def check_server() -> Finding:
    """Whether the server can be reached and accepts the token."""
    try:
        endpoint = find_endpoint()
    except ServerUnreachable as error:
        return Finding("server", Level.WARN, error.message, error.hint or "`shoal up`")
    except SpecError:
        return Finding(
            "server", Level.WARN, "not checked: the credentials are broken", "fix those first, see above"
        )
    is_ours = endpoint.is_local and pid_holding(home_from_env()) is None
    if is_ours:
        return Finding("server", Level.BROKEN, "the control plane of this home is not running", "`shoal up`")
    try:
        with Connection(patience_s=2.0) as shoal:
            me = shoal.me()
    except Unauthenticated as error:
        hint = f"`shoal login {endpoint.url}` with a token that an admin made by `shoal token create`"
        if os.environ.get("SHOAL_TOKEN"):
            hint = (
                "`unset SHOAL_TOKEN`: that token was refused; the one that `shoal login` saved was not tried"
            )
        elif endpoint.is_local:
            ours = "`shoal down`, `shoal up`: that makes another token"
            hint = f"`shoal login local --forget`, {token_of_others(home_from_env()) or ours}"
        return Finding(
            "server", Level.BROKEN, f"{endpoint.url} does not know your token: {error.message}", hint
        )
    except StandingBy as error:
        return Finding("server", Level.OK, error.message)
    except ShoalError as error:
        return Finding("server", Level.BROKEN, error.message, error.hint or "`shoal up`")
    return _token_finding(
        f"{endpoint.url} knows you as {me.get('user') or me.get('actor')}", me.get("token") or {}
    )


def _token_finding(summary: str, token: dict[str, object]) -> Finding:
    expires = token.get("expires_at")
    left = float(expires) - time.time() if isinstance(expires, int | float) else None
    if left is not None and left < SOON_S:
        summary = f"{summary}; the token ends in {duration(left)}"
        return Finding(
            "server", Level.WARN, summary, "`shoal token create --lifetime 30d`, then `shoal login URL`"
        )
    return Finding("server", Level.OK, summary)


def check_server_clock() -> Finding:
    """Whether the clocks of the control plane and of this machine agree, within the time of one request."""
    try:
        with Connection(patience_s=2.0) as shoal:
            asked_at, began = time.time(), time.monotonic()
            server = float(shoal.me()["now"])
            took_s = time.monotonic() - began
    except ShoalError:
        return Finding("server clock", Level.OK, "not checked: see `server`")
    return _clock_finding(asked_at, server, took_s)


def _clock_finding(asked_at: float, server: float, took_s: float) -> Finding:
    """Compare the clocks. The server read its clock at some time in the `took_s` seconds after `asked_at`."""
    ahead_s = server - asked_at - min(max(server - asked_at, 0.0), took_s)
    if abs(ahead_s) <= SKEW_S:
        difference = f"within {max(abs(ahead_s) + took_s, 0.1):.1f} s of this machine's"
        return Finding("server clock", Level.OK, difference)
    difference = f"{duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    hint = "`timedatectl set-ntp true` on the machine that is wrong; `date -u` on both shows which"
    return Finding("server clock", Level.WARN, difference, hint)


def check_loops() -> Finding:
    """Whether the control plane's loops run: those that start jobs, watch them and nodes, and clean up."""
    try:
        with Connection(patience_s=2.0) as shoal:
            failing = shoal.status().get("failing") or []
    except ShoalError:
        return Finding("loops", Level.OK, "not checked: see `server`")
    if not failing:
        return Finding("loops", Level.OK, "control loops: all run")
    hint = f"read its log on the server: `tail {home_from_env() / 'logs' / 'control.log'}`"
    return Finding("loops", Level.BROKEN, "; ".join(map(failing_loop_text, failing)), hint)


def check_services() -> Finding:
    """Whether services listen on their own port."""
    try:
        with Connection(patience_s=2.0) as shoal:
            port = shoal.status().get("taken_service_port")
    except ShoalError:
        return Finding("services", Level.OK, "not checked: see `server`")
    if port is None:
        return Finding("services", Level.OK, "at their own port, or none has run yet")
    hint = f"end the program that has the port (`ss -ltnp 'sport = :{port}'`); services return by themselves"
    return Finding("services", Level.BROKEN, taken_port_text(port), hint)


def check_nodes() -> Finding:
    """What the engine of the control plane remarks about its nodes."""
    try:
        with Connection(patience_s=2.0) as shoal:
            nodes = shoal.nodes()
    except ShoalError:
        return Finding("nodes", Level.OK, "not checked: see `server`")
    remarks = [f"{node['name']}: {remark}" for node in nodes for remark in node.get("remarks") or ()]
    unknown = [node for node in nodes if node.get("confinement") == "unknown"]
    if any(node.get("engine") in REMOTE_ENGINES for node in unknown):
        remarks.append("each supervisor finds out on its node what confines its job")
    elif unknown:
        names = ", ".join(node["name"] for node in unknown)
        remarks.append(f"jobs start on {names} all the same, confined as their supervisors can on the node")
        hint = f"check again with `shoal nodes {unknown[0]['name']}`"
        return Finding("nodes", Level.WARN, "; ".join(remarks), hint)
    return Finding("nodes", Level.OK, "; ".join((f"{len(nodes)} known", *remarks)))


def check_policy() -> Finding:
    """Whether every rack that the policy of this home caps has a node. A node may join later."""
    try:
        with Connection(patience_s=2.0) as shoal:
            problems = racks_without_nodes(shoal)
    except ShoalError:
        return Finding("policy", Level.OK, "not checked: see `server`")
    if problems is None:
        return Finding("policy", Level.OK, "every rack in it has nodes")
    return Finding(
        "policy", Level.WARN, problems, "`shoal nodes --json` shows labels; the policy file has the caps"
    )


def racks_without_nodes(shoal: Connection) -> str | None:
    """Name capped racks without nodes. None also if the server is not of this home: its policy is unknown."""
    path = load_remembered(home_from_env()).get("policy", "none")
    if path == "none" or not shoal.transport.endpoint.is_local:
        return None
    from shoal.control.commands.policy import read_policy
    from shoal.scheduler.placement.power import unknown_racks

    caps, nodes = read_policy(Path(path)).power_caps, shoal.nodes()
    return unknown_racks(caps, (node.get("labels") or {} for node in nodes)) if nodes else None


def check_slurm() -> Finding:
    """Whether the Slurm that this home is connected to can be used, and which partitions are not used."""
    home = home_from_env()
    remembered = merge_options({}, os.environ, load_remembered(home))
    if remembered.get("engine") != "slurm":
        return Finding("slurm", Level.OK, "not connected")
    from shoal.engines.slurm.config import load_config, usable_partitions
    from shoal.engines.slurm.transport import open_transport

    shared = remembered.get("shared", "none")
    try:
        config = load_config(home if shared == "none" else Path(shared))
        door = open_transport(config)
        parts = usable_partitions(config, door.facts(), door.partitions(), door.nodes())
    except ShoalError as error:
        return Finding("slurm", Level.BROKEN, error.message, error.hint or "`shoal connect slurm`")
    closed = [
        f"partition `{partition.name}` is {partition.state}"
        for partition in parts.usable
        if not partition.is_up
    ]
    left_out = [f"partition `{name}` is left out: {why}" for name, why in parts.excluded.items()]
    used = f"jobs may go to {', '.join(partition.name for partition in parts.usable) or 'no partition'}"
    level = Level.WARN if closed or not parts.usable else Level.OK
    return Finding("slurm", level, "; ".join((used, *closed, *left_out)), "`sinfo` shows its partitions")


def check_ray() -> Finding:
    """Report the Ray that this home is connected to. `check_nodes` tells whether it answers."""
    home = home_from_env()
    remembered = merge_options({}, os.environ, load_remembered(home))
    if remembered.get("engine") != "ray":
        return Finding("ray", Level.OK, "not connected")
    from shoal.engines.ray.config import load_config

    shared = remembered.get("shared", "none")
    try:
        config = load_config(home if shared == "none" else Path(shared))
    except ShoalError as error:
        return Finding("ray", Level.BROKEN, error.message, error.hint or "`shoal connect ray`")
    whose = f"at {config.address}" if config.address else "that Shoal started on this machine"
    users = "all projects" if config.has_shared_trust else f"project {config.project}"
    message = (
        f"connected to Ray {whose}, by {config.ray_python}; jobs of {users} run as the user who started it"
    )
    return Finding("ray", Level.OK, message)


def check_certificates() -> Finding:
    """Until when nodes on other machines accept the certificate of this home's control plane."""
    home = home_from_env()
    nodes_file = home / "keys" / "nodes.pem"
    if not nodes_file.exists():
        return Finding("certificates", Level.OK, "none: no other machine connects here")
    from shoal.identity.authority import RENEW_DAYS, valid_until

    shared = merge_options({}, os.environ, load_remembered(home)).get("shared", "none")
    authority = (home if shared == "none" else Path(shared)) / "keys" / "ca.pem"
    renew = f"`shoal up` renews it; a running one does, too, or logs why not in {home}/logs/control.log"
    files = f"{authority} {authority.with_suffix('.key')}"
    replace = f"when no job runs on other machines: `shoal down`, `rm {files}`, `shoal up`"
    ends = ((valid_until(nodes_file.read_bytes()), renew), (valid_until(authority.read_bytes()), replace))
    first, hint = min(ends)
    left_s = first - time.time()
    level = Level.BROKEN if left_s <= 0 else Level.WARN if left_s < RENEW_DAYS * 86400 else Level.OK
    dates = [utc(until, "%Y-%m-%d") for until, _ in ends]
    message = f"for nodes: valid until {dates[0]}, the authority until {dates[1]} (UTC)"
    return Finding("certificates", level, message, hint)


SERVER_CHECKS = (
    check_database,
    check_credentials,
    check_server,
    check_server_clock,
    check_loops,
    check_services,
    check_nodes,
    check_policy,
    check_slurm,
    check_ray,
    check_certificates,
)
