"""What `shoal doctor` looks at between this machine and the control plane it talks to."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from urllib.parse import urlsplit

from shoal.cli.checkup import Finding, Level
from shoal.cli.checkup_machine import ELSEWHERE
from shoal.cli.home import load_remembered, token_of_others
from shoal.cli.text import duration, told_failing, told_taken, utc
from shoal.client.connection import Connection
from shoal.client.credentials import Credentials, find_endpoint
from shoal.errors import ServerUnreachable, ShoalError, SpecError, StandingBy, Unauthenticated
from shoal.home import holder, home_from_env
from shoal.settings import merge_options

SOON_S = 7 * 86400
SKEW_S = 5.0
"""Clocks that differ by more make ages, deadlines and the lifetimes of tokens wrong to the eye."""


def check_database() -> Finding:
    """Where PostgreSQL is configured: does something listen there, and is the driver installed."""
    home = home_from_env()
    url = merge_options({}, os.environ, load_remembered(home)).get("database_url", "")
    if not url.startswith("postgresql"):
        return Finding("database", Level.OK, url or f"sqlite in {home}")
    parts = urlsplit(url)
    place = f"{parts.hostname or 'localhost'}:{parts.port or 5432}"
    try:
        import psycopg  # noqa: F401 - only whether it is there
    except ImportError:
        hint = "`pip install 'shoal[postgres]'`"
        return Finding("database", Level.BROKEN, "the PostgreSQL driver is not installed", hint)
    try:
        with socket.create_connection((parts.hostname or "localhost", parts.port or 5432), timeout=3):
            return Finding("database", Level.OK, f"PostgreSQL listens at {place}")
    except OSError as error:
        hint = f"`pg_isready -h {parts.hostname or 'localhost'} -p {parts.port or 5432}`"
        return Finding("database", Level.BROKEN, f"nobody answers at {place}: {error}", hint)


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
    """Reachable, and does it know us."""
    try:
        endpoint = find_endpoint()
    except ServerUnreachable as error:
        return Finding("server", Level.WARN, error.message, error.hint or "`shoal up`")
    except SpecError:
        return Finding(
            "server", Level.WARN, "not asked: the credentials are broken", "mend those first, see above"
        )
    is_ours = endpoint.is_local and holder(home_from_env()) is None
    if is_ours:
        return Finding("server", Level.BROKEN, "the control plane of this home is not running", "`shoal up`")
    try:
        with Connection(patience_s=2.0) as shoal:
            me = shoal.me()
    except Unauthenticated as error:
        hint = f"`shoal login {endpoint.url}` with a token that an admin made by `shoal token create`"
        if os.environ.get("SHOAL_TOKEN"):
            hint = "`unset SHOAL_TOKEN`: it is what was refused, and what `shoal login` saved was not tried"
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
    return _about_token(
        f"{endpoint.url} knows you as {me.get('user') or me.get('actor')}", me.get("token") or {}
    )


def _about_token(told: str, token: dict[str, object]) -> Finding:
    expires = token.get("expires_at")
    left = float(expires) - time.time() if isinstance(expires, int | float) else None
    if left is not None and left < SOON_S:
        told = f"{told}; the token ends in {duration(left)}"
        return Finding(
            "server", Level.WARN, told, "`shoal token create --lifetime 30d`, then `shoal login URL`"
        )
    return Finding("server", Level.OK, told)


def check_server_clock() -> Finding:
    """Whether the clock of the control plane and of this machine agree, as far as one request can tell."""
    try:
        with Connection(patience_s=2.0) as shoal:
            asked_at, began = time.time(), time.monotonic()
            server = float(shoal.me()["now"])
            took_s = time.monotonic() - began
    except ShoalError:
        return Finding("server clock", Level.OK, "not asked: see `server`")
    return _about_clock(asked_at, server, took_s)


def _about_clock(asked_at: float, server: float, took_s: float) -> Finding:
    """The server looked at its clock at some moment of the `took_s` seconds after `asked_at`."""
    ahead_s = server - asked_at - min(max(server - asked_at, 0.0), took_s)
    if abs(ahead_s) <= SKEW_S:
        told = f"within {max(abs(ahead_s) + took_s, 0.1):.1f} s of this machine's"
        return Finding("server clock", Level.OK, told)
    told = f"{duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    hint = "`timedatectl set-ntp true` on the machine that is wrong; `date -u` on both tells which"
    return Finding("server clock", Level.WARN, told, hint)


def check_loops() -> Finding:
    """What the control plane does by itself: starting jobs, watching them, nodes, keeping house."""
    try:
        with Connection(patience_s=2.0) as shoal:
            failing = shoal.status().get("failing") or []
    except ShoalError:
        return Finding("loops", Level.OK, "not asked: see `server`")
    if not failing:
        return Finding("loops", Level.OK, "control loops: all run")
    hint = f"see its log: `tail {home_from_env() / 'logs' / 'control.log'}` where it runs"
    return Finding("loops", Level.BROKEN, "; ".join(map(told_failing, failing)), hint)


def check_services() -> Finding:
    """Whether services are called where they should be."""
    try:
        with Connection(patience_s=2.0) as shoal:
            port = shoal.status().get("taken_service_port")
    except ShoalError:
        return Finding("services", Level.OK, "not asked: see `server`")
    if port is None:
        return Finding("services", Level.OK, "at their own port, or none has run yet")
    hint = f"end the program that has it (`ss -ltnp 'sport = :{port}'`); services return by themselves"
    return Finding("services", Level.BROKEN, told_taken(port), hint)


def check_nodes() -> Finding:
    """What the control plane's engine has to say about its nodes."""
    try:
        with Connection(patience_s=2.0) as shoal:
            nodes = shoal.nodes()
    except ShoalError:
        return Finding("nodes", Level.OK, "not asked: see `server`")
    told = [f"{node['name']}: {remark}" for node in nodes for remark in node.get("remarks") or ()]
    unknown = [node for node in nodes if node.get("confinement") == "unknown"]
    if any(node.get("engine") in ELSEWHERE for node in unknown):
        told.append("what confines jobs there each supervisor finds out where it starts")
    elif unknown:
        names = ", ".join(node["name"] for node in unknown)
        told.append(f"jobs start on {names} all the same, confined by whatever their supervisors find there")
        hint = f"look again with `shoal nodes {unknown[0]['name']}`"
        return Finding("nodes", Level.WARN, "; ".join(told), hint)
    return Finding("nodes", Level.OK, "; ".join((f"{len(nodes)} known", *told)))


def check_policy() -> Finding:
    """Whether every rack that the policy of this home caps has a node. One may join later."""
    try:
        with Connection(patience_s=2.0) as shoal:
            told = racks_without_nodes(shoal)
    except ShoalError:
        return Finding("policy", Level.OK, "not asked: see `server`")
    if told is None:
        return Finding("policy", Level.OK, "nothing in it is without effect")
    return Finding(
        "policy", Level.WARN, told, "`shoal nodes --json` shows labels; the policy file has the caps"
    )


def racks_without_nodes(shoal: Connection) -> str | None:
    """None also where the server is not of this home: its policy is not known here."""
    path = load_remembered(home_from_env()).get("policy", "none")
    if path == "none" or not shoal.transport.endpoint.is_local:
        return None
    from shoal.control.policy_file import read_policy
    from shoal.scheduler.power import unknown_racks

    caps, nodes = read_policy(Path(path)).power_caps, shoal.nodes()
    return unknown_racks(caps, (node.get("labels") or {} for node in nodes)) if nodes else None


def check_slurm() -> Finding:
    """Of the Slurm that this home is connected to: what of it is not used, and why."""
    home = home_from_env()
    remembered = merge_options({}, os.environ, load_remembered(home))
    if remembered.get("engine") != "slurm":
        return Finding("slurm", Level.OK, "not connected")
    from shoal.engines.slurm.config import load_config
    from shoal.engines.slurm.door import open_door
    from shoal.engines.slurm.rights import parts_of

    shared = remembered.get("shared", "none")
    try:
        config = load_config(home if shared == "none" else Path(shared))
        door = open_door(config)
        parts = parts_of(config, door.facts(), door.partitions(), door.nodes())
    except ShoalError as error:
        return Finding("slurm", Level.BROKEN, error.message, error.hint or "`shoal connect slurm`")
    closed = [f"partition `{one.name}` is {one.state}" for one in parts.usable if not one.is_up]
    told = [f"partition `{name}` is left out: {why}" for name, why in parts.left_out.items()]
    used = f"jobs may go to {', '.join(one.name for one in parts.usable) or 'no partition'}"
    level = Level.WARN if closed or not parts.usable else Level.OK
    return Finding("slurm", level, "; ".join((used, *closed, *told)), "`sinfo` shows its partitions")


def check_ray() -> Finding:
    """The Ray that this home is connected to. Whether it answers its nodes tell."""
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
    whose = f"at {config.address}" if config.address else "of our own, on this machine"
    users = "all projects" if config.has_shared_trust else f"project {config.project}"
    told = f"connected to one {whose}, by {config.ray_python}; jobs of {users} run as who started it"
    return Finding("ray", Level.OK, told)


def check_certificates() -> Finding:
    """Until when other machines know the control plane of this home."""
    home = home_from_env()
    own = home / "keys" / "nodes.pem"
    if not own.exists():
        return Finding("certificates", Level.OK, "none: no other machine asks here")
    from shoal.identity.authority import RENEW_DAYS, valid_until

    shared = merge_options({}, os.environ, load_remembered(home)).get("shared", "none")
    authority = (home if shared == "none" else Path(shared)) / "keys" / "ca.pem"
    renew = f"`shoal up` makes another; one that runs does, too, or says why not in {home}/logs/control.log"
    files = f"{authority} {authority.with_suffix('.key')}"
    replace = f"once no job runs on other machines: `shoal down`, `rm {files}`, `shoal up`"
    ends = ((valid_until(own.read_bytes()), renew), (valid_until(authority.read_bytes()), replace))
    first, hint = min(ends)
    left_s = first - time.time()
    level = Level.BROKEN if left_s <= 0 else Level.WARN if left_s < RENEW_DAYS * 86400 else Level.OK
    dates = [utc(until, "%Y-%m-%d") for until, _ in ends]
    told = f"for nodes: good until {dates[0]}, their authority until {dates[1]} (UTC)"
    return Finding("certificates", level, told, hint)


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
