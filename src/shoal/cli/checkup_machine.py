"""What `shoal doctor` looks at on this machine. Changes nothing, needs no server."""

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
from pathlib import Path

from shoal.cli.checkup import Finding, Level
from shoal.cli.home import load_remembered, refuse_unsafe_home, settings_for
from shoal.cli.text import size, utc
from shoal.home import holder, home_from_env
from shoal.ownership import UnsafePath
from shoal.settings import DEFAULT_PORT, merge_options

ELSEWHERE = ("slurm", "ray")
"""Engines whose nodes nobody here has looked at."""
LITTLE_BYTES, TOO_LITTLE_BYTES = 2 << 30, 100 << 20
WANTED_FILES, NEEDED_FILES = 4096, 512
RELEASED_AT = 1_760_000_000.0
"""A clock before this version of Shoal is wrong."""
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
    told = f"Python {platform.python_version()} at {sys.executable}, SQLite {sqlite3.sqlite_version}"
    missing = [name for name in SERVER_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "python", Level.BROKEN, f"{told}; not installed: {', '.join(missing)}", "`pip install shoal`"
        )
    return Finding("python", Level.OK, told)


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
    told = f"{size(free)} free where {home} is"
    if free < TOO_LITTLE_BYTES:
        return Finding("disk", Level.BROKEN, told, f"free some: `du -sh {home}/*`")
    level = Level.WARN if free < LITTLE_BYTES else Level.OK
    return Finding("disk", level, told, f"free some: `du -sh {home}/*`")


def check_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a control plane takes all that it can use of it
    if hard >= WANTED_FILES:
        return Finding("files", Level.OK, f"{hard} open files allowed")
    level = Level.BROKEN if hard < NEEDED_FILES else Level.WARN
    told = f"{hard} open files allowed; {WANTED_FILES} are wanted"
    return Finding("files", level, told, f"as root: `ulimit -n {WANTED_FILES}`, then `shoal up`")


def check_clock() -> Finding:
    now, before = time.time(), time.monotonic()
    if now < RELEASED_AT:
        stamp = utc(now, "%Y-%m-%d")
        return Finding(
            "clock", Level.BROKEN, f"this machine believes it is {stamp}", "`timedatectl set-ntp true`"
        )
    drift = _sync_state()
    if drift == "no":
        return Finding("clock", Level.WARN, "the clock is not synchronised", "`timedatectl set-ntp true`")
    is_sane = time.monotonic() >= before
    return Finding("clock", Level.OK if is_sane else Level.BROKEN, f"{utc(now)} UTC")


def _sync_state() -> str:
    """`yes`, `no`, or empty where nobody can tell."""
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
        told = "open: without root all jobs are one user's, and connect to each other's ports"
        return Finding(
            "network", Level.WARN, told, "`network: private` closes a service; root closes projects"
        )
    if firewall.find_nft() is None:
        told = "open: jobs of one project can connect to those of another"
        return Finding(
            "network",
            Level.WARN,
            told,
            "`apt install nftables` (or dnf, pacman), then `shoal down` and `shoal up`",
        )
    if not firewall.works():
        told = "open: nftables is installed, and this kernel takes no rules here"
        return Finding("network", Level.WARN, told, "`nft list ruleset` says why")
    if opened := _running_uids() - firewall.closed_uids():
        told = f"open: the rules for user {min(opened)}, whose job runs, were removed by somebody else"
        return Finding("network", Level.WARN, told, "the next job that its project starts writes them again")
    return Finding(
        "network", Level.OK, "closed between projects by nftables; a job opens its ports by `network: open`"
    )


def _running_uids() -> set[int]:
    """Projects' users with jobs on this machine. A spool that machines share has those of the others, too."""
    from shoal.runtime import spool

    settings, _ = settings_for({})
    uids = set()
    for place in filter(Path.is_dir, settings.state_dir.glob("spool/live/*/*")):
        share = spool.Share(place)
        claim, order = spool.read_claim(share), spool.read_order(share)
        is_here = claim is not None and claim.boot_id == spool.boot_id()
        if is_here and order is not None and order.uid is not None:
            uids.add(order.uid)
    return uids


def check_uids() -> Finding:
    """Whether somebody is a project's user, or may become one by `newuidmap`."""
    from shoal.control.uids import BLOCK, NUM_BLOCKS, REGISTRY, first_of, subordinate_ranges
    from shoal.loopback import FIRST_PROJECT_UID

    last = FIRST_PROJECT_UID + NUM_BLOCKS * BLOCK
    found = [one for one in subordinate_ranges() if one.start < last and one.stop > FIRST_PROJECT_UID]
    if found:
        told = f"uids {found[0].start} to {found[0].stop - 1} are subordinate ids and may be projects'"
        return Finding(
            "uids", Level.BROKEN, told, "move that range in /etc/subuid and /etc/subgid below 1900000000"
        )
    for account in pwd.getpwall():
        uid = account.pw_uid
        if FIRST_PROJECT_UID <= uid < last and (REGISTRY / str(first_of(uid))).exists():
            told = f"account {account.pw_name} has uid {uid}, which may be a project's"
            hint = f"`usermod -u UID {account.pw_name}` with a uid below {FIRST_PROJECT_UID}"
            return Finding("uids", Level.BROKEN, told, hint)
    return Finding("uids", Level.OK, "no user may become a project's user")


def check_unit() -> Finding:
    """Whether a service manager would end more than the control plane: where it runs, else where we are."""
    from shoal.cli.up import told_unit

    told, typed = told_unit(holder(home_from_env()) or os.getpid(), _engine())
    if told:
        return Finding("unit", Level.WARN, told, typed)
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
    """Where jobs run as their project's own user, that user must be able to reach the programs on PATH."""
    engine = _engine()
    if engine in ELSEWHERE:
        told = f"jobs run on nodes of the {engine.capitalize()}, with the programs of those"
        return Finding("programs", Level.OK, told)
    found = shutil.which("python3")
    if os.getuid() != 0 or found is None:
        return Finding("programs", Level.OK, f"jobs run as {os.getuid()} and see your programs")
    closed = [path for path in Path(found).resolve().parents if not path.stat().st_mode & 0o001]
    if closed and shutil.which("bwrap"):
        return Finding(
            "programs", Level.OK, f"jobs cannot enter {closed[-1]}; Python in jobs: {sys.prefix}/bin"
        )
    if closed:
        told = f"jobs run as another user, who cannot enter {closed[-1]} where your python3 is"
        return Finding(
            "programs",
            Level.WARN,
            told,
            "`apt-get install bubblewrap`, or start jobs with `/usr/bin/python3`",
        )
    return Finding("programs", Level.OK, f"jobs can reach {found}")


def _engine() -> str:
    """Where jobs of this home run."""
    return merge_options({}, os.environ, load_remembered(home_from_env())).get("engine", "local")


def check_port() -> Finding:
    if holder(home_from_env()) is not None:
        return Finding("port", Level.OK, "our own control plane is listening")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            told = f"127.0.0.1:{DEFAULT_PORT}: {error.strerror}; another one will be chosen"
            return Finding("port", Level.WARN, told, f"see who has it: `ss -ltnp 'sport = :{DEFAULT_PORT}'`")
    return Finding("port", Level.OK, f"127.0.0.1:{DEFAULT_PORT} is free")


def check_gpus() -> Finding:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        has_driver = Path("/dev/nvidiactl").exists()
        told = f"no NVIDIA GPU seen ({error})"
        if has_driver:
            return Finding(
                "gpus", Level.BROKEN, f"{told}, though a driver is loaded", "`nvidia-smi` says more"
            )
        engine = _engine()
        more = "try `shoal up --demo 4x8` for simulated ones"
        if engine != "local":
            more = f"jobs run on the nodes of {engine.capitalize()}: `shoal nodes` shows theirs"
        return Finding("gpus", Level.OK, f"{told}; {more}")
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
