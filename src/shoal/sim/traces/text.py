"""Open a trace: plain, gzipped, or the tables inside a tar file. Nothing is unpacked onto the disk."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TextIO

from shoal.sim.traces.job import TraceError

GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The lines of a file. Looks at the first bytes, not at the name, to see whether it is compressed."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            binary = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            # Old logs hold bytes of any encoding in their comments; no field we read does.
            with io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="") as text:
                yield text
    except FileNotFoundError:
        raise TraceError(f"no trace at {path}", hint=f"ls {path.parent}") from None
    except (gzip.BadGzipFile, EOFError) as error:
        raise TraceError(f"{path}: damaged gzip file: {error}", hint=f"gzip --test {path}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", hint=f"ls -ld {path}") from error


def tables_in(path: Path) -> Iterator[tuple[str, TextIO]]:
    """Every `.csv` in a tar file, by name in order, with its name without the ending."""
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
