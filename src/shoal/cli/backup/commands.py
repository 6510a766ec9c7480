"""`shoal backup` and `shoal restore`: a home in one file, as of one event, while the home is in use."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import anyio
from cyclopts import Parameter

from shoal import __version__
from shoal.cli.backup import archive, database_copy
from shoal.cli.backup.archive import BackupManifest, ReportProgress
from shoal.cli.backup.files import (
    SkippedFiles,
    WalkedFile,
    allocated_bytes,
    give_checkpoints,
    stored_name,
    walk_home,
    walk_of_jobs,
)
from shoal.cli.control_plane.home import hold, load_remembered, prepare_home, remember, settings_for
from shoal.cli.flags import JsonFlag
from shoal.cli.output import print_json
from shoal.cli.progress import long_work
from shoal.cli.text import one_line
from shoal.clock import SystemClock
from shoal.errors import SpecError, StateError
from shoal.home import home_from_env, pid_holding
from shoal.settings import Settings
from shoal.store import LogHead, open_store, write_anchor
from shoal.store.copying import copy_postgres, copy_stopped_sqlite, load_postgres

DATABASE, ANCHOR, KEY = "shoal.db", "events.anchor", "keys/signing.key"
SQLITE = "sqlite:///"
CHOICES = {"logs": "spool/archived", "checkpoints": "checkpoints"}
"""What is left out unless `--with` names it."""
NOT_OURS = frozenset(
    {
        *("spool", "mailbox", "checkpoints", "caches", "sockets", "logs", "backup", "ray", "uids"),
        *("server.json", "server.lock", "serving.json", "serving-table.json", "leader.json"),
        *("site.json", "restore.json", "credentials.json", "port", "own-port", ANCHOR),
    }
)
"""Entries that belong to the processes of this home, or that Shoal makes again."""
NOT_KEYS = frozenset({"first-token", "asked-token", "data-plane.token"})
FOR_ONE_PLACE = ("database_url", "shared", "anchor_copy")
"""Options that a restored home must not take over: they name what production uses."""


def backup(
    path: Annotated[
        Path | None, Parameter(help="The file to write; by default one named by the time.")
    ] = None,
    *,
    include: Annotated[
        str, Parameter(name="--with", help="`logs`, `checkpoints` or both, comma-separated.")
    ] = "",
    verify: Annotated[bool, Parameter(negative="", help="Check the backup at PATH instead.")] = False,
    json: JsonFlag = False,
) -> int:
    """Write this home to one file, as of one event; jobs and the control plane keep running.

    The file holds the keys: its reader can act as any user. Restore it with
    `shoal restore`. `--verify` checks a backup by its hashes and its event log.
    """
    if verify:
        if path is None:
            raise SpecError("`--verify` needs the backup's path", hint="shoal backup --verify FILE")
        return _verify(path, json=json)
    settings, _ = settings_for({})
    if not settings.state_dir.joinpath("home-id").exists():
        raise StateError(f"there is no home to back up in {settings.state_dir}", hint="shoal up")
    target = _target(path, settings)
    with long_work("copying the database ...") as say:
        manifest = _write(settings, target, _choices(include), say)
    facts = {"path": str(target), "bytes": target.stat().st_size, "seq": manifest.seq}
    facts |= {"files": len(manifest.members), "left_out": manifest.left_out}
    facts |= {"skipped": manifest.skipped, "num_skipped": manifest.num_skipped}
    if json:
        print_json(facts)
        return 0
    size_told = _size(target.stat().st_size)
    print(f"{target}: {len(manifest.members)} files, {size_told}, up to event {manifest.seq}")
    for name, size in manifest.left_out.items():
        print(f"      without {name}: {_size(size)} (`--with {name}`)")
    _print_skipped(manifest)
    print(f"try   shoal backup --verify {target}")
    return 0


def restore(
    path: Annotated[Path, Parameter(help="A file that `shoal backup` wrote.")],
    *,
    home: Annotated[Path, Parameter(help="The new home: a directory that is empty or does not exist.")],
    database: Annotated[
        str | None, Parameter(help="An empty PostgreSQL database to restore to; by default SQLite.")
    ] = None,
    json: JsonFlag = False,
) -> int:
    """Unpack a backup to a new home. `shoal up --restored` then starts it.

    A home that runs on this machine is not touched.
    """
    target = home.absolute()
    _refuse_full(target)
    if database is not None and not database.startswith("postgresql"):
        raise SpecError("`--database` is not postgresql://...", hint="leave it out for SQLite in the home")
    if target.is_mount():
        raise SpecError(f"{target} is a mount point", hint=f"name a directory in it: `--home {target}/shoal`")
    part = target.with_name(f".{target.name}.{os.urandom(6).hex()}.part")
    try:
        prepare_home(part)
        with long_work("unpacking ...") as say:
            manifest = _unpack(path, part, say)
            give_checkpoints(part / CHOICES["checkpoints"], part / DATABASE)
            _save_options(part, database)
            if database is not None:  # last, because a second try needs an empty database
                _refuse_full(target)
                load_postgres(part / DATABASE, database, lambda done, of: say(f"table {done} of {of}"))
                (part / DATABASE).unlink()
        _publish(part, target, database)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if json:
        facts = {"home": str(target), "seq": manifest.seq, "files": len(manifest.members) - len(manifest.cut)}
        print_json({**facts, "skipped": manifest.skipped, "num_skipped": manifest.num_skipped})
        return 0
    print(f"{target}: {len(manifest.members) - len(manifest.cut)} files, up to event {manifest.seq}")
    _print_skipped(manifest)
    print(f"next  SHOAL_HOME={target} shoal up --restored --listen 127.0.0.1:0")
    return 0


def _refuse_full(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SpecError(f"{target} exists and is not empty", hint="name a new directory: `--home DIR`")


def _publish(part: Path, target: Path, database: str | None) -> None:
    """Make it the new home. Raise `StateError` if something was put there meanwhile."""
    try:
        part.rename(target)  # replaces nothing but an empty directory
    except OSError as error:
        hint = "name a new directory: `--home DIR`"
        if database is not None:
            hint += ", and an empty database: this one was filled (`dropdb NAME`, `createdb NAME`)"
        raise StateError(f"cannot move the restored home to {target}: {error.strerror}", hint=hint) from error


def _write(settings: Settings, target: Path, choices: set[str], say: ReportProgress) -> BackupManifest:
    from shoal.control.bootstrap import load_signing_key

    home = settings.state_dir
    with contextlib.ExitStack() as held, archive.open_writer(target) as writer:
        database, head = held.enter_context(_database(settings, target, say))
        if not writer.add(DATABASE, database):
            raise StateError("the copy of the database was removed before it was read", hint="try again")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            anchor = Path(folder) / ANCHOR
            write_anchor(anchor, head, load_signing_key(home))
            writer.add(ANCHOR, anchor)
        # After the database, so that everything it refers to exists.
        for walked in _files(settings, choices, writer.left_out):
            say(f"packing {stored_name(walked.name)}")
            writer.add_walked(walked)
        sizes = {name: _size_of(home, where) for name, where in CHOICES.items() if name not in choices}
        manifest = BackupManifest(
            shoal=__version__,
            made_at=time.time(),
            seq=head.seq,
            head=head.hash,
            left_out={name: size for name, size in sizes.items() if size},
            skipped=writer.left_out.named,
            num_skipped=writer.left_out.count,
            cut=tuple(writer.cut),
            members=writer.members,
        )
        writer.finish(manifest)
    return manifest


@contextlib.contextmanager
def _database(settings: Settings, target: Path, say: ReportProgress) -> Iterator[tuple[Path, LogHead]]:
    """Yield a SQLite copy of the database and remove it afterwards."""

    def report(done: int, of: int) -> None:
        say(f"copying the database: {100 * done // max(of, 1)} %")

    if settings.store_url.startswith(SQLITE) and pid_holding(settings.home) is not None:
        with database_copy.request_copy(settings.home) as copied:
            yield copied
        return
    copy = target.with_name(f".{target.name}.{os.urandom(6).hex()}.db")
    try:
        if not settings.store_url.startswith(SQLITE):
            yield copy, copy_postgres(settings.store_url, copy, report)
        else:
            with hold(settings.home):
                yield copy, copy_stopped_sqlite(Path(settings.store_url.removeprefix(SQLITE)), copy, report)
    finally:
        copy.unlink(missing_ok=True)


def _files(settings: Settings, choices: set[str], left_out: SkippedFiles) -> Iterator[WalkedFile]:
    def is_saved(top: str) -> bool:
        return top not in NOT_OURS and not top.startswith((DATABASE, "."))

    roots = {settings.state_dir, settings.home}
    seen: set[str] = set()
    for root in sorted(roots, key=lambda root_path: root_path != settings.state_dir):
        for walked in walk_home(root, left_out, is_saved):
            if walked.name not in seen and walked.base not in NOT_KEYS:
                seen.add(walked.name)
                yield walked
    for choice in sorted(choices):
        yield from walk_of_jobs(settings.state_dir, CHOICES[choice], left_out)


def _unpack(source: Path, target: Path, say: ReportProgress) -> BackupManifest:
    def take(name: str, file: IO[bytes], size: int) -> None:
        say(f"unpacking {stored_name(name)}")
        place = target / name
        for folder in reversed(Path(name).parents):  # `mkdir(parents=True)` sets the mode of the last only
            (target / folder).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as out:
            archive.copy_out(file, out)
            out.flush()
            os.fsync(out.fileno())

    try:
        manifest = archive.read_archive(source, take)
        for stored in manifest.cut:  # a program could take half a file for a checkpoint
            (target / archive.decoded_name(stored)).unlink()
        return manifest
    except OSError as error:
        problem = f"cannot restore {source}: {error.strerror or error}"
        raise StateError(problem, hint=f"ls -l {source}") from error


def _verify(source: Path, *, json: bool) -> int:
    """Raise `StateError` if a byte, the database or the event log differs from what was written."""
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder, long_work("checking ...") as say:
        place = Path(folder) / DATABASE

        def take(name: str, file: IO[bytes], size: int) -> None:
            say(f"checking {stored_name(name)}")
            with contextlib.ExitStack() as opened:
                kept = {DATABASE: place, KEY: place.with_name("key")}.get(name)
                out = opened.enter_context(kept.open("wb")) if kept is not None else None
                archive.copy_out(file, out)

        try:
            manifest = archive.read_archive(source, take)
        except OSError as error:
            problem = f"cannot check {source}: {error.strerror or error}"
            hint = f"ls -l {source}; df -h {folder}; `export TMPDIR=DIR` names a directory with more room"
            raise StateError(problem, hint=hint) from error
        key = place.with_name("key")
        if not key.exists():
            raise StateError(
                f"{source} has no {KEY}, which the check of the event log needs", hint="use another one"
            )
        anyio.run(_check_log, place, LogHead(manifest.seq, manifest.head), key.read_bytes())
    if json:
        print_json({"is_intact": True, "seq": manifest.seq, "files": len(manifest.members)})
    else:
        print(f"{source} is intact: {len(manifest.members)} files, {manifest.seq} events")
    return 0


async def _check_log(database: Path, head: LogHead, key: bytes) -> None:
    store = open_store(f"{SQLITE}{database}", clock=SystemClock(), chain_key=lambda _: key)
    try:
        flaw = await store.read(lambda tx: tx.events.verify(anchor=head))
    finally:
        await store.close()
    if flaw is not None:
        problem = f"its event log is broken at entry {flaw.seq}: {flaw.reason}"
        raise StateError(problem, hint="use another one")


def _save_options(home: Path, database: str | None) -> None:
    options = {name: text for name, text in load_remembered(home).items() if name not in FOR_ONE_PLACE}
    if database is not None:
        options["database_url"] = database
    remember(home, options)


def _target(path: Path | None, settings: Settings) -> Path:
    name = time.strftime("shoal-backup-%Y%m%d-%H%M%S.tar", time.gmtime())
    target = (path or Path(name)).absolute()
    target = target / name if target.is_dir() else target
    if not target.parent.is_dir():
        raise SpecError(f"there is no directory {target.parent}", hint=f"mkdir -p {target.parent}")
    for home in (settings.home, settings.state_dir, home_from_env()):
        if Path(os.path.realpath(target)).is_relative_to(home.resolve()):
            problem = f"{target} would be inside the home that it saves"
            raise SpecError(problem, hint="name a file elsewhere")
    return target


def _choices(text: str) -> set[str]:
    chosen = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := chosen - CHOICES.keys():
        problem = f"`--with {min(unknown)}` is not `logs` or `checkpoints`"
        raise SpecError(problem, hint="shoal backup --with logs")
    return chosen


def _size_of(home: Path, name: str) -> int:
    return allocated_bytes(walk_of_jobs(home, name, SkippedFiles()))


def _print_skipped(manifest: BackupManifest) -> None:
    for name, reason in manifest.skipped.items():
        print(f"      left out {one_line(name)}: {one_line(reason)}")
    if more := manifest.num_skipped - len(manifest.skipped):
        print(f"      left out {more:,} more")


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
