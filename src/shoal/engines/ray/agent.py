"""What runs on every node of Ray, in an actor: starts keepers, and says which of them live.

Sent there by value, so it stands on Python's library alone. It remembers nothing: each keeper has a record on
the node's disk (its process, and when that began), so that an agent that died is replaced by any other. A
keeper is no child of the agent's, nor of Ray's: Ray kills the children of its workers, and these outlive it.
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
"""What a burial exits with that found something which does not die: see `shoal.runtime.burial`."""
WORDS = 1000
MAX_READ = 8 << 20
"""Bytes of a record or an environment: jobs run as this user and may have changed either."""
MAX_OTHERS = 100
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ")
"""Of a worker's variables: nothing that Ray put there reaches a job."""
KEPT_S = 86400.0
"""How long the record of a keeper that is over stays."""
SYSTEMCTL_S, UNIT_S = 3.0, 60.0
"""What `systemctl` may take, and how old its answer may be."""
LAUNCH = """
import json, os, signal, sys
path, lock, more, *command = sys.argv[1:]
told, tell = os.pipe()  # closed by exec: then there is nothing to tell
if os.fork():
    os.close(tell)
    said = os.read(told, 4000)
    os.write(2, said)
    os._exit(1 if said else 0)  # the keeper is an orphan now: nobody's child whom Ray looks after
try:
    os.set_inheritable(int(lock), False)  # held until exec: by then it is known who runs
    os.setsid()
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")  # Ray has its workers killed first
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
    os.write(tell, f"{type(error).__name__}: {error}".encode())
    os._exit(127)
"""
"""Writes down who somebody is before it is that; who holds the lock may still become it."""


class Agent:
    """Every method may be repeated, from several threads, and says the same to whoever asks again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._burying: set[str] = set()
        self._swept_at = 0.0
        self._unit, self._unit_at = "", 0.0

    def facts(self, root: str) -> dict[str, Any]:
        """What this machine is, and who jobs would be on it."""
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
        """Start a keeper, unless the one that was started for `key` lives. Its summons goes to its standard
        input. `task`: `command`, `bury` (what to run when it is gone without a word), `env`, `summons`.
        """
        with self._guard:
            folder = _make_folder(root, key)
            if folder in self._burying:
                raise OSError("what is left of the keeper before it is being ended; ask again")
            with _launching(folder) as lock:
                record = _record(folder)
                if record is not None and _lives(record) is True:
                    return {"pid": record["pid"], "is_new": False}
                self._launch(folder, lock, task)
            started = _record(folder)
            return {"pid": started["pid"] if started else None, "is_new": True}

    def look(self, root: str, keys: list[str]) -> dict[str, dict[str, Any]]:
        """By key: `running`, `over` (nothing of it runs: looked for and ended here), `left` (something of it
        does not die), `gone` (nobody knows yet whether all of it is), or `hidden` (it is not ours to see,
        or its record not ours to believe). Keys without a record are left out. And `process`: the name under
        which that keeper, and no other, asks for its order.
        """
        self._sweep(root)
        found: dict[str, dict[str, Any]] = {}
        places = _places(root)
        for key in keys:
            try:
                folder = _folder(places, key)
            except PermissionError as error:
                found[key] = {"pid": None, "said": str(error), "state": "hidden"}
                continue
            record = _record(folder) if folder is not None else None
            if folder is not None and record is not None:
                found[key] = self._seen(folder, record)
        return found

    def end(self, root: str, keys: list[str]) -> None:
        """Ask keepers to stop what they keep; those whose records are not ours to believe are passed over."""
        places = _places(root)
        for key in keys:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                folder = _folder(places, key)
                record = _record(folder) if folder is not None else None
                if record is not None and _lives(record) is True:
                    os.kill(record["pid"], signal.SIGTERM)

    def _ends_with(self) -> str:
        """The unit of systemd's that takes our keepers along: see `ending_unit`. Asked now and then."""
        now = time.monotonic()
        with self._guard:
            if self._unit_at and now - self._unit_at <= UNIT_S:
                return self._unit
        unit = ending_unit()  # takes its time: nobody who starts a keeper waits for it
        with self._guard:
            self._unit, self._unit_at = unit, now
        return unit

    def _launch(self, folder: str, lock: int, task: dict[str, Any]) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/over")
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | task["env"]
        # By what it says at the desk it is known whether the order went to this very process.
        process = os.urandom(16).hex()
        who = {"boot": _boot_id(), "space": _pid_space(), "process": process}
        more = {"bury": task["bury"], "env": env, **who}
        with open(f"{folder}/errors", "ab") as errors:
            given = json.dumps({**json.loads(task["summons"]), "process": process}).encode()
            is_done = launch(f"{folder}/keeper.json", lock, more, task["command"], env, errors, given)
        if not is_done:
            raise OSError(f"no keeper could be started: {_last_words(folder)}")

    def _seen(self, folder: str, record: dict[str, Any]) -> dict[str, Any]:
        told = {"pid": record["pid"], "said": _last_words(folder), "process": record.get("process", "")}
        lives = _lives(record)
        if lives is None:
            return {**told, "state": "hidden"}
        if lives:
            return {**told, "state": "running"}
        if record["boot"] != _boot_id():
            return {**told, "state": "over", "said": "the machine was restarted since"}
        if not _is_over(folder, record):
            self._bury(folder, record)
        if _is_over(folder, record):
            return {**told, "state": "over"}
        return {**told, "state": "left" if _is_marked(folder, "left", record) else "gone"}

    def _bury(self, folder: str, record: dict[str, Any]) -> None:
        """The keeper is gone: see that nothing of its share runs. On a thread; asked again, it is one."""
        if self._begins_burial(folder, record):
            threading.Thread(target=self._bury_now, args=(folder, record), daemon=True).start()

    def _bury_all(self, gone: list[tuple[str, dict[str, Any]]]) -> None:
        for folder, record in gone:
            if self._begins_burial(folder, record):
                self._bury_now(folder, record)

    def _begins_burial(self, folder: str, record: dict[str, Any]) -> bool:
        with self._guard:
            if folder in self._burying or _record(folder) != record:  # another was started meanwhile
                return False
            self._burying.add(folder)
            return True

    def _bury_now(self, folder: str, record: dict[str, Any]) -> None:
        try:
            with open(f"{folder}/errors", "ab") as errors:
                done = subprocess.run(
                    record["bury"],
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
                self._burying.discard(folder)

    def _sweep(self, root: str) -> None:
        """Remove records of keepers that have been over for long. Who is only gone may have left something:
        that is looked at first, whether or not anybody asks, one after the other.
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
                _write_over(folder, record)  # seen only now: whoever asks has a day for it
                continue
            with contextlib.suppress(FileNotFoundError):
                is_old = now - os.stat(f"{folder}/{'over' if is_over else 'errors'}").st_mtime > KEPT_S
                if is_old and is_over:
                    shutil.rmtree(folder, ignore_errors=True)
                elif is_old:
                    gone.append((folder, record))
        if gone:
            threading.Thread(target=self._bury_all, args=(gone,), daemon=True).start()


def launch(
    file: str,
    lock: int,
    more: dict[str, Any],
    command: list[str],
    env: dict[str, str],
    said: IO[bytes],
    given: bytes,
) -> bool:
    """Start somebody who outlives us, is nobody's child, and whose record is in `file` before it begins.

    `more`: what else the record says. `lock`: an open lock file, which it holds until it has begun, whatever
    becomes of us. `given`: its standard input. False: it did not begin, and `said` has the reason.
    """
    words = [sys.executable, "-I", "-S", "-c", LAUNCH, file, str(lock), json.dumps(more), *command]
    try:
        done = subprocess.run(
            words,
            input=given,
            stdout=said,
            stderr=said,
            env=env,
            cwd="/",
            pass_fds=(lock,),
            timeout=LAUNCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        said.write(f"it has not begun within {LAUNCH_S:g} s\n".encode())
        said.flush()
        return False
    return done.returncode == 0


def ending_unit(pid: int | str = "self") -> str:
    """The service of systemd's with which all ends that this process starts; empty: none, or nobody tells."""
    return ending_service(pid)[0]


def ending_service(pid: int | str) -> tuple[str, list[str]]:
    """The same, and the words that tell `systemctl` whose service it is.

    Whoever is started stays in the unit's control group, in whichever session: systemd.kill(5).
    """
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            unit, whose = service_of(file.read())
        if not unit:
            return "", []
        command = ["systemctl", *whose, "show", "--property=LoadState,KillMode", "--", unit]
        told = subprocess.run(command, capture_output=True, timeout=SYSTEMCTL_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "", []
    # Of a unit that it does not know it says what would be usual.
    said = set(told.split())
    is_ending = b"LoadState=loaded" in said and said & {b"KillMode=control-group", b"KillMode=mixed"}
    return (unit, whose) if is_ending else ("", [])


def service_of(cgroup: str) -> tuple[str, list[str]]:
    """By the text of `/proc/PID/cgroup`: the service whose control group that is, and the words that tell
    `systemctl` whose service; empty: none. A scope, such as a login's session, has no main process to end.
    """
    # Of the hierarchies of version 1 systemd's own alone counts, which stands before that of version 2.
    lines = [line.split(":", 2) for line in cgroup.splitlines() if line.count(":") >= 2]
    places = [place for _, names, place in lines if names in ("name=systemd", "")]
    units = [part for part in places[0].split("/") if part.endswith((".service", ".scope"))] if places else []
    if not units or units[-1].endswith(".scope"):
        return "", []
    is_users = any(unit.startswith("user@") for unit in units[:-1])
    return units[-1], ["--user"] if is_users else []


@contextlib.contextmanager
def _launching(folder: str) -> Iterator[int]:
    """One launch at a time, of whichever agent. `OSError`: one that was given up may become a keeper yet."""
    lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("a keeper is being started already; ask again") from None
        yield lock
    finally:
        os.close(lock)


def _roots(root: str) -> tuple[str, list[str]]:
    """Below which records lie: the usual directory, whosever it is, and those that are this user's own.

    By the rules for shares (`shoal.runtime.places`): where everybody may add names, as in /tmp, that is one
    of this user's own, and another where somebody had taken its name.
    """
    base = root or "/tmp"  # noqa: S108 - owner and mode of what is used below it are looked at
    if root and not _is_for_all(base):
        return base, [base] if _is_own(base) else []
    name = f"shoal-{os.getuid()}"
    with os.scandir(base) as entries:  # where everybody may add names, millions are never held at once
        others = sorted(entry.path for entry in entries if entry.name.startswith(f"{name}-"))[:MAX_OTHERS]
    return f"{base}/{name}", [one for one in (f"{base}/{name}", *others) if _is_own(one)]


def _own_root(root: str) -> str:
    """The one for new records, made where there is none. `PermissionError`: it is somebody else's."""
    usual, own = _roots(root)
    if own:
        return own[0]
    if os.path.lexists(usual) and usual != root:
        usual = f"{usual}-{os.urandom(4).hex()}"
    os.makedirs(usual, mode=0o700, exist_ok=True)
    _check_own(usual)  # whoever made it meanwhile
    return usual


def _places(root: str) -> list[str]:
    """Where records lie. `PermissionError` where there is one that is somebody else's, and no other: what
    lies there would be believed.
    """
    usual, own = _roots(root)
    if not own and os.path.lexists(usual):
        _check_own(usual)
    found = [f"{one}/ray" for one in own if os.path.lexists(f"{one}/ray")]
    for place in found:
        _make_own(place)
    return found


def _make_own(path: str) -> None:
    """A directory below one's own, which nobody else can change: also one that was made where others were
    allowed to, by the umask of the time.
    """
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
    """Whether it is a directory that nobody but this user can change."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _is_for_all(path: str) -> bool:
    """Whether everybody may add names and nobody take another's away, but root, and we."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return False
    is_open = facts.st_mode & stat.S_ISVTX and facts.st_mode & stat.S_IWOTH
    return bool(is_open and facts.st_uid in (0, os.getuid()))


def _folder(places: list[str], key: str) -> str | None:
    """Of the keeper's record; None: it has none. `PermissionError` where somebody else could have laid it."""
    if not KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no name for a keeper")
    found = [f"{place}/{key}" for place in places if os.path.lexists(f"{place}/{key}")]
    for folder in found[:1]:
        _check_own(folder)
    return found[0] if found else None


def _make_folder(root: str, key: str) -> str:
    place = f"{_own_root(root)}/ray"
    _make_own(place)
    folder = _folder(_places(root), key) or f"{place}/{key}"
    _make_own(folder)
    return folder


def _record(folder: str) -> dict[str, Any] | None:
    try:
        with open(f"{folder}/keeper.json", encoding="utf-8") as file:
            record: dict[str, Any] = json.loads(file.read(MAX_READ))
            return record
    except FileNotFoundError:
        return None


def _mark(record: dict[str, Any]) -> str:
    """Of that very process."""
    return f"{record['boot']} {record['pid']} {record['ticks']}"


def _is_over(folder: str, record: dict[str, Any]) -> bool:
    """Whether nothing of this keeper's share runs."""
    return _is_marked(folder, "over", record)


def _is_marked(folder: str, name: str, record: dict[str, Any]) -> bool:
    """Whether that was written of this very keeper; what was written of one before it says nothing."""
    try:
        with open(f"{folder}/{name}", encoding="ascii") as file:
            return file.read(MAX_READ) == _mark(record)
    except FileNotFoundError:
        return False


def _write_over(folder: str, record: dict[str, Any]) -> None:
    _write_mark(folder, "over", record)


def _write_mark(folder: str, name: str, record: dict[str, Any]) -> None:
    """Whole or not at all: who looks while it is written again must not find it gone."""
    draft = f"{folder}/{name}.{os.urandom(4).hex()}"
    with open(draft, "w", encoding="ascii") as file:
        file.write(_mark(record))
    os.replace(draft, f"{folder}/{name}")


def _lives(record: dict[str, Any]) -> bool | None:
    """Whether that very process runs. None: it was started where this one cannot see."""
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
    """What tells this machine from others of its name: its id, and its network cards, as images of machines
    may have an id in them. Empty in a container, or where there is none: it may be started anywhere.
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
    """Of another process of ours: Ray changes it for its workers."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for line in file.read(MAX_READ).split(b"\0"):
            if line.startswith(name.encode() + b"="):
                return line.partition(b"=")[2].decode("utf-8", "replace")
    return None


def _gpu_minors() -> list[int]:
    """Of the device files of NVIDIA's GPUs, in the order in which its driver counts them: by their bus."""
    top, found = "/proc/driver/nvidia/gpus", list[int]()
    for bus in sorted(os.listdir(top)) if os.path.isdir(top) else ():
        with contextlib.suppress(OSError), open(f"{top}/{bus}/information", encoding="utf-8") as file:
            found += [int(line.split()[-1]) for line in file if line.startswith("Device Minor:")]
    return found


def _last_words(folder: str) -> str:
    with contextlib.suppress(OSError), open(f"{folder}/errors", "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - WORDS, 0))
        return file.read(WORDS).decode("utf-8", "replace").strip()
    return ""
