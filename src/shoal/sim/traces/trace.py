"""One job of a trace, in a form that is common to all formats.

Opens a trace: plain, gzipped, or the tables inside a tar file. Nothing is unpacked onto the disk.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TextIO

import msgspec

from shoal.errors import SpecError


class TraceJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job as the log describes it. Amounts are for all its nodes together. None if the log has no value."""

    job_id: str
    submitted_at: float
    """Seconds on the log's own clock."""
    run_s: float
    limit_s: float | None = None
    num_processors: int = 0
    num_gpus: float = 0
    num_cpus: float = 0
    memory_bytes: int = 0
    num_nodes: int | None = None
    user: str | None = None
    group: str | None = None
    name: str | None = None
    """The program: a name, or the number of an executable."""
    project: str | None = None
    """The tenant: a virtual cluster, an account, or one of several clusters in the log."""
    queue: str | None = None

    @property
    def planned_s(self) -> float:
        """The run time that a scheduler must assume: the limit, or the run time if there is no limit."""
        return self.run_s if self.limit_s is None else self.limit_s


class TraceError(SpecError):
    """A trace with invalid content. Names the file, the line and the value."""

    code = "trace.invalid"


def malformed(path: object, line: int, complaint: str, *, hint: str | None = None) -> TraceError:
    return TraceError(f"{path}:{line}: {complaint}", hint=hint, file=str(path), line=line)


GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The lines of a file. The first bytes, not the name, decide whether it is compressed."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            binary = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            # Old logs hold bytes of any encoding in their comments. No field that we read does.
            with io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="") as text:
                yield text
    except FileNotFoundError:
        raise TraceError(f"no trace at {path}", hint=f"ls {path.parent}") from None
    except (gzip.BadGzipFile, EOFError) as error:
        raise TraceError(f"{path}: damaged gzip file: {error}", hint=f"gzip --test {path}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", hint=f"ls -ld {path}") from error


def tables_in(path: Path) -> Iterator[tuple[str, TextIO]]:
    """Every `.csv` in a tar file, in order of name, with its name without the ending."""
    try:
        with tarfile.open(path) as archive:
            members = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".csv")]
            for member in sorted(members, key=lambda m: m.name):
                binary = archive.extractfile(member)
                assert binary is not None, "a plain file has contents"
                with io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="") as text:
                    yield PurePosixPath(member.name).stem, text
    except FileNotFoundError:
        raise TraceError(f"no trace at {path}", hint=f"ls {path.parent}") from None
    except tarfile.TarError as error:
        raise TraceError(f"{path}: damaged tar file: {error}", hint=f"tar -tf {path}") from error
