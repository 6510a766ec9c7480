"""Which programs of the node a rank can run, when its user may not enter the directories they are in.

A root user's Python often lies in root's own, closed home. Whole Python environments are shown to the
job. So is Shoal's own source, which programs import as `shoal.runtime` and which a clone keeps outside of
its environment, and what environments have installed for editing below /tmp, which the job's own /tmp would
hide. Any other directory behind a closed one is left out of the job's PATH, where it could only fail.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import urllib.parse
from collections.abc import Iterator

import msgspec

from shoal.runtime.confine.view import PRIVATE, first_closed, is_within, may_enter

ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
MAX_RECORD_BYTES = 1 << 16
OWN_SOURCE = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))
"""The directory that holds the package `shoal`: `site-packages`, or `src` of a clone."""


class DirInfo(msgspec.Struct):
    editable: bool = False


class Origin(msgspec.Struct):
    """What installers write down of a package that came from no index (PEP 610)."""

    url: str
    dir_info: DirInfo = msgspec.field(default_factory=DirInfo)


_read_origin = msgspec.json.Decoder(Origin).decode


def job_path(node_path: str, uid: int | None) -> str:
    """The PATH of the ranks: what is out of reach gives way to the Python that runs Shoal."""
    entries: list[str] = []
    for entry in node_path.split(":"):
        if first_closed(entry, uid) is None or environment_of(entry) is not None:
            entries.append(entry)
        else:
            entries += [os.path.join(prefix, "bin") for prefix in (sys.prefix, sys.base_prefix)]
    return ":".join(dict.fromkeys(entries))


def programs(path: str, uid: int | None, home: str) -> tuple[str, ...]:
    """Directories that must stay readable, though the job's user cannot reach them by itself."""
    environments = [environment_of(entry) for entry in path.split(":")]
    entries = [found or entry for found, entry in zip(environments, path.split(":"), strict=True)]
    wanted = [sys.prefix, sys.base_prefix, *entries]
    real = {os.path.realpath(one) for one in wanted if one.startswith("/") and os.path.isdir(one)}
    for prefix in dict.fromkeys([sys.prefix, *filter(None, environments)]):
        real |= {place for place in edited(prefix) if _may_be_shown(place, uid, home)}
    if not any(is_within(OWN_SOURCE, place) for place in real) and not _meets(OWN_SOURCE, home):
        real.add(OWN_SOURCE)
    return tuple(sorted(real - {"/"}))


def edited(prefix: str) -> Iterator[str]:
    """Where packages lie that this environment has by `pip install -e`, as is written down beside each."""
    for record in glob.glob(f"{glob.escape(prefix)}/lib/python3*/site-packages/*.dist-info/direct_url.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(record, "rb") as file:
            told = _read_origin(file.read(MAX_RECORD_BYTES))
            if told.dir_info.editable and told.url.startswith("file:///"):
                yield os.path.realpath(urllib.parse.unquote(told.url.removeprefix("file://")))


def _may_be_shown(place: str, uid: int | None, home: str) -> bool:
    """Whether the job's own /tmp alone hides it: its user may read it outside, and nobody else put it there.

    What holds SHOAL_HOME is hidden with it.
    """
    top = next((top for top in PRIVATE if is_within(place, top) and place != top), None)
    if top is None or _meets(place, home) or not os.path.isdir(place):
        return False
    above = place
    while above != top:
        if os.lstat(above).st_uid not in {0, os.geteuid()} or not may_enter(above, uid):
            return False
        above = os.path.dirname(above)
    return True


def _meets(place: str, home: str) -> bool:
    return is_within(home, place) or is_within(place, home)


def environment_of(entry: str) -> str | None:
    """The Python environment whose `bin` this is, if it is one."""
    above = os.path.dirname(entry.rstrip("/"))
    is_environment = any(os.path.exists(os.path.join(above, mark)) for mark in ENVIRONMENT_MARKS)
    return above if is_environment or above in (sys.prefix, sys.base_prefix) else None
