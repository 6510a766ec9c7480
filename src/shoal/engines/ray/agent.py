"""The Ray agent: an actor on every node of Ray that starts node agents and reports which of them live.

Ray sends it to the node by value, so it uses Python's standard library only. It remembers nothing: each
node agent has a record on the node's disk (its process and start time), so any new Ray agent can replace
one that died. A node agent is no child of the Ray agent or of Ray, because Ray kills the children of its
workers, and node agents outlive those.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,300}")
LAUNCH_S, BURY_S = 30.0, 60.0
LEFT = 2
"""The exit code of a reaping that found processes which do not die: see `shoal.runtime.agent.reaping`."""
WORDS = 1000
MAX_READ = 8 << 20
"""Bytes of a record or an environment. Jobs run as this user and may have changed either."""
MAX_OTHERS = 100
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ")
"""The variables of a Ray worker that a job gets: nothing that Ray sets reaches a job."""
KEPT_S = 86400.0
"""How long the record of a node agent that is over stays."""
SYSTEMCTL_S, UNIT_S = 3.0, 60.0
"""How long `systemctl` may take, and for how long its reply is used."""
LAUNCH = """
import json, os, signal, sys
path, lock, more, *command = sys.argv[1:]
reader, writer = os.pipe()  # exec closes it: then there is no error to report
if os.fork():
    os.close(writer)
    message = os.read(reader, 4000)
    os.write(2, message)
    os._exit(1 if message else 0)  # the node agent is an orphan now, no child of a process of Ray
try:
    os.set_inheritable(int(lock), False)  # held until exec: by then the record names the process
    os.setsid()
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")  # Ray lets the kernel kill its workers first
    except OSError as error:
        os.write(2, f"oom_score_adj stays: {error}\\n".encode())
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    record = {**json.loads(more), "pid": os.getpid(), "ticks": ticks}
    with open(f"{path}.draft", "w") as draft:
        json.dump(record, draft)
        draft.flush()
        os.fsync(draft.fileno())
    os.rename(f"{path}.draft", path)
    os.execve(command[0], command, os.environ)
except BaseException as error:
    os.write(writer, f"{type(error).__name__}: {error}".encode())
    os._exit(127)
"""
"""The launcher records the process before the process becomes the program. While a process holds the lock,
it may still become the program."""


class Agent:
    """Every method may be repeated, from several threads, with the same result."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._reaping: set[str] = set()
        self._swept_at = 0.0
        self._unit, self._unit_at = "", 0.0

    def facts(self, root: str) -> dict[str, Any]:
        """Return the hardware of this machine and the user that jobs would run as."""
        place = root if root and os.path.isdir(root) else "/tmp"  # noqa: S108 - its size alone is asked
        return {
            "pid": os.getpid(),
            "uid": os.getuid(),
            "hostname": socket.gethostname(),
            "machine": _machine(),
            "boot_id": _boot_id(),
            "memory_bytes": _memory_bytes(),
            "disk_bytes": shutil.disk_usage(place).total,
            "devices": _variable_of(os.getppid(), "CUDA_VISIBLE_DEVICES"),
            "minors": _gpu_minors(),
            "ends_with": self._ends_with(),
        }

    def start(self, root: str, key: str, task: dict[str, Any]) -> dict[str, Any]:
        """Start a node agent, unless the one that was started for `key` lives.

        Its launch request goes to its standard input. `task` has the keys `command`, `reap` (the command
        that reaps it when it dies without a report), `env` and `launch_request` (the launch request).
        """
        with self._guard:
            folder = _make_folder(root, key)
            if folder in self._reaping:
                raise OSError("the processes of the earlier node agent are being ended; ask again")
            with _launching(folder) as lock:
                record = _record(folder)
                if record is not None and _lives(record) is True:
                    return {"pid": record["pid"], "is_new": False}
                self._launch(folder, lock, task)
            started = _record(folder)
            return {"pid": started["pid"] if started else None, "is_new": True}

    def look(self, root: str, keys: list[str]) -> dict[str, dict[str, Any]]:
        """Return the state of each key: `running`, `over`, `left`, `gone` or `hidden`.

        `over`: the agent looked and made sure that nothing of it runs. `left`: processes of it do not die.
        `gone`: it is not known whether all of it is over. `hidden`: this user cannot see the process, or
        cannot trust its record. Keys without a record are left out. `process` is the name under which that
        node agent, and no other, asks for its task spec.
        """
        self._sweep(root)
        states: dict[str, dict[str, Any]] = {}
        places = _places(root)
        for key in keys:
            try:
                folder = _folder(places, key)
            except PermissionError as error:
                states[key] = {"pid": None, "said": str(error), "state": "hidden"}
                continue
            record = _record(folder) if folder is not None else None
            if folder is not None and record is not None:
                states[key] = self._seen(folder, record)
        return states

    def end(self, root: str, keys: list[str]) -> None:
        """Ask node agents to stop their tasks. Records that this user cannot trust are skipped."""
        places = _places(root)
        for key in keys:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                folder = _folder(places, key)
                record = _record(folder) if folder is not None else None
                if record is not None and _lives(record) is True:
                    os.kill(record["pid"], signal.SIGTERM)

    def _ends_with(self) -> str:
        """Return the systemd unit that ends our node agents with it: see `ending_unit`. Cached for 60 s."""
        now = time.monotonic()
        with self._guard:
            if self._unit_at and now - self._unit_at <= UNIT_S:
                return self._unit
        unit = ending_unit()  # slow, so no start of a node agent may wait for it
        with self._guard:
            self._unit, self._unit_at = unit, now
        return unit

    def _launch(self, folder: str, lock: int, task: dict[str, Any]) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/over")
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | task["env"]
        # This name shows the mailbox whether the task spec went to exactly this process.
        process = os.urandom(16).hex()
        identity = {"boot": _boot_id(), "space": _pid_space(), "process": process}
        more = {"reap": task["reap"], "env": env, **identity}
        with open(f"{folder}/errors", "ab") as errors:
            launch_input = json.dumps({**json.loads(task["launch_request"]), "process": process}).encode()
            is_done = launch(
                f"{folder}/node_agent.json", lock, more, task["command"], env, errors, launch_input
            )
        if not is_done:
            raise OSError(f"no node agent could be started: {_last_words(folder)}")

    def _seen(self, folder: str, record: dict[str, Any]) -> dict[str, Any]:
        report = {"pid": record["pid"], "said": _last_words(folder), "process": record.get("process", "")}
        lives = _lives(record)
        if lives is None:
            return {**report, "state": "hidden"}
        if lives:
            return {**report, "state": "running"}
        if record["boot"] != _boot_id():
            return {**report, "state": "over", "said": "the machine was restarted since"}
        if not _is_over(folder, record):
            self._reap(folder, record)
        if _is_over(folder, record):
            return {**report, "state": "over"}
        return {**report, "state": "left" if _is_marked(folder, "left", record) else "gone"}

    def _reap(self, folder: str, record: dict[str, Any]) -> None:
        """Reap the task of a dead node agent on a thread. A repeated call starts no second thread."""
        if self._begins_burial(folder, record):
            threading.Thread(target=self._reap_now, args=(folder, record), daemon=True).start()

    def _reap_all(self, gone: list[tuple[str, dict[str, Any]]]) -> None:
        for folder, record in gone:
            if self._begins_burial(folder, record):
                self._reap_now(folder, record)

    def _begins_burial(self, folder: str, record: dict[str, Any]) -> bool:
        with self._guard:
            # another node agent was started in the meantime
            if folder in self._reaping or _record(folder) != record:
                return False
            self._reaping.add(folder)
            return True

    def _reap_now(self, folder: str, record: dict[str, Any]) -> None:
        try:
            with open(f"{folder}/errors", "ab") as errors:
                done = subprocess.run(
                    record["reap"],
                    env=record["env"],
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    cwd="/",
                    timeout=BURY_S,
                    check=False,
                )
            if done.returncode == 0:
                _write_over(folder, record)
            elif done.returncode == LEFT:
                _write_mark(folder, "left", record)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{folder}/left")
        except (OSError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"shoal agent: {folder} is not over yet: {error}\n")
        finally:
            with self._guard:
                self._reaping.discard(folder)

    def _sweep(self, root: str) -> None:
        """Remove records of node agents that have been over for a day.

        A node agent that is only gone may have left processes. Those are reaped first, one after the other,
        even if no caller asks.
        """
        now, gone = time.time(), []
        with self._guard:
            if now - self._swept_at < KEPT_S / 24:
                return
            self._swept_at = now
        folders = (f"{place}/{name}" for place in _places(root) for name in os.listdir(place))
        for folder in filter(_is_own, folders):
            record = _record(folder)
            if record is None or _lives(record) is not False:
                continue
            is_over = _is_over(folder, record)
            if not is_over and record["boot"] != _boot_id():
                _write_over(folder, record)  # first seen now: callers have a day to ask for it
                continue
            with contextlib.suppress(FileNotFoundError):
                is_old = now - os.stat(f"{folder}/{'over' if is_over else 'errors'}").st_mtime > KEPT_S
                if is_old and is_over:
                    shutil.rmtree(folder, ignore_errors=True)
                elif is_old:
                    gone.append((folder, record))
        if gone:
            threading.Thread(target=self._reap_all, args=(gone,), daemon=True).start()


def launch(
    file: str,
    lock: int,
    more: dict[str, Any],
    command: list[str],
    env: dict[str, str],
    output: IO[bytes],
    stdin: bytes,
) -> bool:
    """Start a process that outlives us, has no parent of ours, and is recorded in `file` before it begins.

    `more`: further fields of the record. `lock`: an open lock file, which the process holds until it has
    begun, whatever happens to us. `stdin`: its standard input. False: it did not begin, and `output` has
    the reason.
    """
    command_line = [sys.executable, "-I", "-S", "-c", LAUNCH, file, str(lock), json.dumps(more), *command]
    try:
        done = subprocess.run(
            command_line,
            input=stdin,
            stdout=output,
            stderr=output,
            env=env,
            cwd="/",
            pass_fds=(lock,),
            timeout=LAUNCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        output.write(f"it has not begun within {LAUNCH_S:g} s\n".encode())
        output.flush()
        return False
    return done.returncode == 0


def ending_unit(pid: int | str = "self") -> str:
    """Return the systemd service whose end kills what this process starts; empty if none or unknown."""
    return ending_service(pid)[0]


def ending_service(pid: int | str) -> tuple[str, list[str]]:
    """Return the same, and the arguments that tell `systemctl` whose service it is.

    A started process stays in the unit's control group, in any session: systemd.kill(5).
    """
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            unit, whose = service_of(file.read())
        if not unit:
            return "", []
        command = ["systemctl", *whose, "show", "--property=LoadState,KillMode", "--", unit]
        properties = subprocess.run(command, capture_output=True, timeout=SYSTEMCTL_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "", []
    # For a unit that it does not know, systemctl reports the defaults.
    lines = set(properties.split())
    is_ending = b"LoadState=loaded" in lines and lines & {b"KillMode=control-group", b"KillMode=mixed"}
    return (unit, whose) if is_ending else ("", [])


def service_of(cgroup: str) -> tuple[str, list[str]]:
    """Return the service of a text of `/proc/PID/cgroup`, and the arguments for `systemctl`; empty: none.

    A scope, such as a login session, has no main process to end.
    """
    # Of the hierarchies of version 1, only systemd's own counts. It stands before that of version 2.
    lines = [line.split(":", 2) for line in cgroup.splitlines() if line.count(":") >= 2]
    places = [place for _, names, place in lines if names in ("name=systemd", "")]
    units = [part for part in places[0].split("/") if part.endswith((".service", ".scope"))] if places else []
    if not units or units[-1].endswith(".scope"):
        return "", []
    is_users = any(unit.startswith("user@") for unit in units[:-1])
    return units[-1], ["--user"] if is_users else []


@contextlib.contextmanager
def _launching(folder: str) -> Iterator[int]:
    """Hold the lock of one launch, across Ray agents.

    `OSError`: a launch that was given up may still become a node agent.
    """
    lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("a node agent is being started already; ask again") from None
        yield lock
    finally:
        os.close(lock)


def _roots(root: str) -> tuple[str, list[str]]:
    """Return the usual directory of records, whoever owns it, and those that this user owns.

    By the rules for tasks (`shoal.runtime.agent.spool_root`): where every user may add names, as in /tmp,
    it is a directory of this user's own, and another path if another user had taken its name.
    """
    base = root or "/tmp"  # noqa: S108 - owner and mode of what is used below it are looked at
    if root and not _is_for_all(base):
        return base, [base] if _is_own(base) else []
    name = f"shoal-{os.getuid()}"
    with os.scandir(base) as entries:  # where every user may add names, millions are never held at once
        others = sorted(entry.path for entry in entries if entry.name.startswith(f"{name}-"))[:MAX_OTHERS]
    return f"{base}/{name}", [path for path in (f"{base}/{name}", *others) if _is_own(path)]


def _own_root(root: str) -> str:
    """Return the directory for new records; create it if there is none.

    `PermissionError`: it belongs to another user.
    """
    usual, owned = _roots(root)
    if owned:
        return owned[0]
    if os.path.lexists(usual) and usual != root:
        usual = f"{usual}-{os.urandom(4).hex()}"
    os.makedirs(usual, mode=0o700, exist_ok=True)
    _check_own(usual)  # another process may have created it in the meantime
    return usual


def _places(root: str) -> list[str]:
    """Return the directories of records.

    `PermissionError`: the only path belongs to another user, and we would trust what lies there.
    """
    usual, owned = _roots(root)
    if not owned and os.path.lexists(usual):
        _check_own(usual)
    places = [f"{path}/ray" for path in owned if os.path.lexists(f"{path}/ray")]
    for place in places:
        _make_own(place)
    return places


def _make_own(path: str) -> None:
    """Create a directory that no other user can change. Fix the mode of one that an old umask left open."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    facts = os.lstat(path)
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and facts.st_mode & 0o022:
        os.chmod(path, 0o700)
    _check_own(path)


def _check_own(path: str) -> None:
    if not _is_own(path):
        raise PermissionError(f"{path} is not a directory that only user {os.getuid()} can change")


def _is_own(path: str) -> bool:
    """Return whether it is a directory that no other user can change."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _is_for_all(path: str) -> bool:
    """Return whether every user may add names, and no user but root and us may remove another's."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return False
    is_open = facts.st_mode & stat.S_ISVTX and facts.st_mode & stat.S_IWOTH
    return bool(is_open and facts.st_uid in (0, os.getuid()))


def _folder(places: list[str], key: str) -> str | None:
    """Return the folder of the node agent's record; None: it has none.

    `PermissionError`: another user could have written it.
    """
    if not KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no name for a node agent")
    folders = [f"{place}/{key}" for place in places if os.path.lexists(f"{place}/{key}")]
    for folder in folders[:1]:
        _check_own(folder)
    return folders[0] if folders else None


def _make_folder(root: str, key: str) -> str:
    place = f"{_own_root(root)}/ray"
    _make_own(place)
    folder = _folder(_places(root), key) or f"{place}/{key}"
    _make_own(folder)
    return folder


def _record(folder: str) -> dict[str, Any] | None:
    try:
        with open(f"{folder}/node_agent.json", encoding="utf-8") as file:
            record: dict[str, Any] = json.loads(file.read(MAX_READ))
            return record
    except FileNotFoundError:
        return None


def _mark(record: dict[str, Any]) -> str:
    """Return the text that identifies exactly this process."""
    return f"{record['boot']} {record['pid']} {record['ticks']}"


def _is_over(folder: str, record: dict[str, Any]) -> bool:
    """Return whether nothing of this node agent's task runs."""
    return _is_marked(folder, "over", record)


def _is_marked(folder: str, name: str, record: dict[str, Any]) -> bool:
    """Return whether the mark is about exactly this node agent. A mark about an earlier one says nothing."""
    try:
        with open(f"{folder}/{name}", encoding="ascii") as file:
            return file.read(MAX_READ) == _mark(record)
    except FileNotFoundError:
        return False


def _write_over(folder: str, record: dict[str, Any]) -> None:
    _write_mark(folder, "over", record)


def _write_mark(folder: str, name: str, record: dict[str, Any]) -> None:
    """Write the mark whole or not at all: a reader must not find it missing while it is written again."""
    draft = f"{folder}/{name}.{os.urandom(4).hex()}"
    with open(draft, "w", encoding="ascii") as file:
        file.write(_mark(record))
    os.replace(draft, f"{folder}/{name}")


def _lives(record: dict[str, Any]) -> bool | None:
    """Return whether exactly this process runs. None: it was started where this one cannot see."""
    if record["boot"] != _boot_id():
        return False
    if record["space"] != _pid_space():
        return None
    try:
        with open(f"/proc/{record['pid']}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[19]) == record["ticks"] and fields[0] not in (b"Z", b"X")


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _pid_space() -> str:
    return os.readlink("/proc/self/ns/pid")


def _machine(root: str = "") -> str:
    """Return what distinguishes this machine from others of its name: its id and its network cards.

    Images of machines may have an id in them. Empty in a container, or if there is none: such a system may
    be started anywhere.
    """
    try:
        with open(f"{root}/etc/machine-id", encoding="ascii") as file:
            parts = [file.read().strip()]
        for card in sorted(os.listdir(f"{root}/sys/class/net")):
            if os.path.exists(f"{root}/sys/class/net/{card}/device"):
                with open(f"{root}/sys/class/net/{card}/address", encoding="ascii") as file:
                    parts.append(file.read().strip())
    except (OSError, ValueError):
        return ""
    return " ".join(parts) if parts[0] and len(parts) > 1 else ""


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            total = min(total, int(file.read()))
    return total


def _variable_of(pid: int, name: str) -> str | None:
    """Return a variable of another process of ours, because Ray changes it for its workers."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for line in file.read(MAX_READ).split(b"\0"):
            if line.startswith(name.encode() + b"="):
                return line.partition(b"=")[2].decode("utf-8", "replace")
    return None


def _gpu_minors() -> list[int]:
    """Return the minor numbers of NVIDIA's device files, in the order in which its driver counts them: by
    bus.
    """
    top, minors = "/proc/driver/nvidia/gpus", list[int]()
    for bus in sorted(os.listdir(top)) if os.path.isdir(top) else ():
        with contextlib.suppress(OSError), open(f"{top}/{bus}/information", encoding="utf-8") as file:
            minors += [int(line.split()[-1]) for line in file if line.startswith("Device Minor:")]
    return minors


def _last_words(folder: str) -> str:
    with contextlib.suppress(OSError), open(f"{folder}/errors", "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - WORDS, 0))
        return file.read(WORDS).decode("utf-8", "replace").strip()
    return ""
