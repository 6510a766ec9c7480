"""The checks of `shoal doctor` on this machine, and `Finding`, the result of a check.

The checks change nothing and need no server.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import pwd
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shoal.cli.control_plane.home import load_remembered, refuse_unsafe_home, settings_for
from shoal.cli.text import size, utc
from shoal.home import home_from_env, pid_holding
from shoal.ownership import UnsafePath
from shoal.settings import DEFAULT_PORT, merge_options


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but something is missing."""
    BROKEN = "broken"
    """Something will fail until it is repaired."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `hint` is what to type; without a hint there is nothing to do."""

    name: str
    level: Level
    message: str
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "level": self.level.value, "message": self.message, "hint": self.hint}


REMOTE_ENGINES = ("slurm", "ray")
"""Engines whose nodes are other machines, which these checks do not see."""
LITTLE_BYTES, TOO_LITTLE_BYTES = 2 << 30, 100 << 20
WANTED_FILES, NEEDED_FILES = 4096, 512
RELEASED_AT = 1_760_000_000.0
"""This version of Shoal is newer than any earlier clock."""
SERVER_NEEDS = (
    "alembic",
    "anyio",
    "fastapi",
    "msgspec",
    "pydantic",
    "sqlalchemy",
    "structlog",
    "uvicorn",
    "yaml",
)


def check_python() -> Finding:
    message = f"Python {platform.python_version()} at {sys.executable}, SQLite {sqlite3.sqlite_version}"
    missing = [name for name in SERVER_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "python", Level.BROKEN, f"{message}; not installed: {', '.join(missing)}", "`pip install shoal`"
        )
    return Finding("python", Level.OK, message)


def check_home() -> Finding:
    home = home_from_env()
    place = next(path for path in (home, *home.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        hint = "`export SHOAL_HOME=/a/directory/of/yours`"
        return Finding("home", Level.BROKEN, f"cannot write in {place}: {error.strerror}", hint)
    try:
        refuse_unsafe_home(home)
    except UnsafePath as error:
        return Finding("home", Level.BROKEN, f"`shoal up` refuses it: {error}", error.hint or "")
    if home.exists() and home.stat().st_mode & 0o066:
        return Finding("home", Level.WARN, f"others can look into {home}", f"`chmod 700 {home}`")
    return Finding("home", Level.OK, f"{home} is writable")


def check_disk() -> Finding:
    home = home_from_env()
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    message = f"{size(free)} free at {home}"
    if free < TOO_LITTLE_BYTES:
        return Finding("disk", Level.BROKEN, message, f"free some: `du -sh {home}/*`")
    level = Level.WARN if free < LITTLE_BYTES else Level.OK
    return Finding("disk", level, message, f"free some: `du -sh {home}/*`")


def check_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a control plane raises its soft limit to this
    if hard >= WANTED_FILES:
        return Finding("files", Level.OK, f"{hard} open files allowed")
    level = Level.BROKEN if hard < NEEDED_FILES else Level.WARN
    message = f"{hard} open files allowed; {WANTED_FILES} are wanted"
    return Finding("files", level, message, f"as root: `ulimit -n {WANTED_FILES}`, then `shoal up`")


def check_clock() -> Finding:
    now, before = time.time(), time.monotonic()
    if now < RELEASED_AT:
        stamp = utc(now, "%Y-%m-%d")
        return Finding(
            "clock", Level.BROKEN, f"the clock of this machine says {stamp}", "`timedatectl set-ntp true`"
        )
    drift = _sync_state()
    if drift == "no":
        return Finding("clock", Level.WARN, "the clock is not synchronised", "`timedatectl set-ntp true`")
    is_sane = time.monotonic() >= before
    return Finding("clock", Level.OK if is_sane else Level.BROKEN, f"{utc(now)} UTC")


def _sync_state() -> str:
    """Return `yes`, `no`, or "" if it is not known."""
    try:
        command = ["timedatectl", "show", "-p", "NTPSynchronized", "--value"]
        return subprocess.run(command, capture_output=True, text=True, timeout=3, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def check_cgroups() -> Finding:
    from shoal.runtime.confine.detect import detect

    walls = [word for word in detect() if word.startswith("cgroup")]
    if walls:
        return Finding("cgroups", Level.OK, f"{walls[0]}: CPU, memory and process limits are enforced")
    hint = "run `shoal up` as root, or under `systemd-run --user --scope -p Delegate=yes`"
    return Finding("cgroups", Level.WARN, "not writable: limits by rlimits and affinity only", hint)


def check_network() -> Finding:
    """Whether programs of one project can connect to those of another."""
    from shoal.runtime.confine import firewall

    if os.geteuid() != 0:
        message = "open: without root all jobs run as one user and can connect to each other's ports"
        return Finding(
            "network", Level.WARN, message, "`network: private` closes a service; root closes projects"
        )
    if firewall.find_nft() is None:
        message = "open: jobs of one project can connect to those of another"
        return Finding(
            "network",
            Level.WARN,
            message,
            "`apt install nftables` (or dnf, pacman), then `shoal down` and `shoal up`",
        )
    if not firewall.works():
        message = "open: nftables is installed, but this kernel accepts no rules here"
        return Finding("network", Level.WARN, message, "`nft list ruleset` shows the error")
    if opened := _running_uids() - firewall.closed_uids():
        message = f"open: another program removed the rules for user {min(opened)}, whose job is running"
        return Finding(
            "network", Level.WARN, message, "the next job that its project starts writes them again"
        )
    return Finding(
        "network", Level.OK, "closed between projects by nftables; a job opens its ports by `network: open`"
    )


def _running_uids() -> set[int]:
    """Return projects' users with jobs on this machine, or on all machines if they share a spool."""
    from shoal.runtime.files import spool

    settings, _ = settings_for({})
    uids = set()
    for place in filter(Path.is_dir, settings.state_dir.glob("spool/live/*/*")):
        share = spool.SpoolTask(place)
        claim, order = spool.read_claim(share), spool.read_task_spec(share)
        is_here = claim is not None and claim.boot_id == spool.boot_id()
        if is_here and order is not None and order.isolation.uid is not None:
            uids.add(order.isolation.uid)
    return uids


def check_uids() -> Finding:
    """Whether an account is a project's user, or may become one by `newuidmap`."""
    from shoal.control.project_uids import BLOCK, NUM_BLOCKS, REGISTRY, first_of, subordinate_ranges
    from shoal.local_sockets import FIRST_PROJECT_UID

    last = FIRST_PROJECT_UID + NUM_BLOCKS * BLOCK
    overlapping = [
        uids for uids in subordinate_ranges() if uids.start < last and uids.stop > FIRST_PROJECT_UID
    ]
    if overlapping:
        first = overlapping[0]
        message = f"uids {first.start} to {first.stop - 1} are subordinate ids and may be projects'"
        return Finding(
            "uids", Level.BROKEN, message, "move that range in /etc/subuid and /etc/subgid below 1900000000"
        )
    for account in pwd.getpwall():
        uid = account.pw_uid
        if FIRST_PROJECT_UID <= uid < last and (REGISTRY / str(first_of(uid))).exists():
            message = f"account {account.pw_name} has uid {uid}, which may be a project's"
            hint = f"`usermod -u UID {account.pw_name}` with a uid below {FIRST_PROJECT_UID}"
            return Finding("uids", Level.BROKEN, message, hint)
    return Finding("uids", Level.OK, "no user may become a project's user")


def check_unit() -> Finding:
    """Whether a service manager would end more than the control plane: the running one, else this process."""
    from shoal.cli.control_plane.up import unit_warning

    message, typed = unit_warning(pid_holding(home_from_env()) or os.getpid(), _engine())
    if message:
        return Finding("unit", Level.WARN, message, typed)
    return Finding("unit", Level.OK, "no service manager ends anything else with the control plane")


def check_bwrap() -> Finding:
    path = shutil.which("bwrap")
    if path is None:
        hint = "`apt install bubblewrap` (or dnf, pacman)"
        return Finding("bwrap", Level.WARN, "not installed: jobs see each other's files and processes", hint)
    command = [path, "--ro-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        hint = "`sysctl -w kernel.unprivileged_userns_clone=1`, or run `shoal up` as root"
        return Finding("bwrap", Level.WARN, f"installed but refused: {done.stderr.strip()[:100]}", hint)
    return Finding("bwrap", Level.OK, f"{path} works")


def check_programs() -> Finding:
    """Whether the project's user, under which jobs run, can reach the programs on PATH."""
    engine = _engine()
    if engine in REMOTE_ENGINES:
        message = f"jobs run on nodes of {engine.capitalize()}, with the programs there"
        return Finding("programs", Level.OK, message)
    python = shutil.which("python3")
    if os.getuid() != 0 or python is None:
        return Finding("programs", Level.OK, f"jobs run as {os.getuid()} and see your programs")
    closed = [path for path in Path(python).resolve().parents if not path.stat().st_mode & 0o001]
    if closed and shutil.which("bwrap"):
        return Finding(
            "programs", Level.OK, f"jobs cannot enter {closed[-1]}; Python in jobs: {sys.prefix}/bin"
        )
    if closed:
        message = f"jobs run as another user, who cannot enter {closed[-1]} where your python3 is"
        return Finding(
            "programs",
            Level.WARN,
            message,
            "`apt-get install bubblewrap`, or start jobs with `/usr/bin/python3`",
        )
    return Finding("programs", Level.OK, f"jobs can reach {python}")


def _engine() -> str:
    """Return the engine that runs jobs of this home."""
    return merge_options({}, os.environ, load_remembered(home_from_env())).get("engine", "local")


def check_port() -> Finding:
    if pid_holding(home_from_env()) is not None:
        return Finding("port", Level.OK, "our own control plane is listening")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            message = f"127.0.0.1:{DEFAULT_PORT}: {error.strerror}; another one will be chosen"
            return Finding(
                "port", Level.WARN, message, f"see who has it: `ss -ltnp 'sport = :{DEFAULT_PORT}'`"
            )
    return Finding("port", Level.OK, f"127.0.0.1:{DEFAULT_PORT} is free")


def check_gpus() -> Finding:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        has_driver = Path("/dev/nvidiactl").exists()
        message = f"no NVIDIA GPU seen ({error})"
        if has_driver:
            return Finding(
                "gpus", Level.BROKEN, f"{message}, though a driver is loaded", "`nvidia-smi` says more"
            )
        engine = _engine()
        more = "try `shoal up --demo 4x8` for simulated ones"
        if engine != "local":
            more = f"jobs run on the nodes of {engine.capitalize()}: `shoal nodes` shows theirs"
        return Finding("gpus", Level.OK, f"{message}; {more}")
    try:
        return Finding("gpus", Level.OK, f"{pynvml.nvmlDeviceGetCount()} NVIDIA GPUs")
    finally:
        pynvml.nvmlShutdown()


MACHINE_CHECKS = (
    check_python,
    check_home,
    check_disk,
    check_files,
    check_clock,
    check_cgroups,
    check_unit,
    check_bwrap,
    check_network,
    check_uids,
    check_programs,
    check_port,
    check_gpus,
)
