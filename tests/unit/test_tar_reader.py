"""Tar files of other programs are read, and headers that would cost much time are refused."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from shoal.tar_check import MAX_HEADER, MAX_RECORDS, TarEntry, TarKind, read_entries
from tests.support.archives import entry, tar_of

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
KINDS = {tarfile.REGTYPE: TarKind.FILE, tarfile.DIRTYPE: TarKind.FOLDER}
KINDS |= {tarfile.SYMTYPE: TarKind.LINK, tarfile.LNKTYPE: TarKind.HARD_LINK}
FILE = tar_of({"a": b"text"})


def entries(body: bytes) -> list[TarEntry]:
    return list(read_entries(io.BytesIO(body)))


def header(content: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    info = entry("header", kind)
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


def record(key: str, value: str) -> bytes:
    length = len(f"{key}={value}") + 5
    return f"{length:03} {key}={value}\n".encode()


def seen_by_tarfile(body: bytes) -> list[TarEntry]:
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        return [TarEntry(info.name, KINDS[info.type], info.size, info.linkname) for info in tar]


@pytest.mark.parametrize("name", FORMATS)
def test_an_archive_is_read_as_tarfile_reads_it(name: str) -> None:
    long = "folder/" * 20 + "file" if name == "ustar" else "folder/" * 60 + "f" * 200
    members = [entry("a"), entry("ü/\udcff"), entry(long), entry("d", tarfile.DIRTYPE)]
    members += [entry("l", tarfile.SYMTYPE, "../" * 30 + "a"), entry("h", tarfile.LNKTYPE, "a")]
    if name != "ustar":
        members.append(entry(long, tarfile.SYMTYPE, "t" * 300))
    for number, member in enumerate(members):
        member.mtime = number + 0.5 if name == "pax" else number
        member.size = 513 * number if member.isreg() else 0
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[name]) as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    assert [e._replace(name=e.name.rstrip("/")) for e in entries(out.getvalue())] == seen_by_tarfile(
        out.getvalue()
    )


@pytest.mark.parametrize("kind", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_archives_of_the_tar_program_are_read(tmp_path: Path, kind: str) -> None:
    name = "d" * 60 + "/" + "f" * 30
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("content")
    (tmp_path / "link").symlink_to(name)
    command = ["tar", f"--format={kind}", "-C", str(tmp_path), "-c", name, "link"]
    body = subprocess.run(command, capture_output=True, check=True).stdout
    assert entries(body) == [TarEntry(name, TarKind.FILE, 7, ""), TarEntry("link", TarKind.LINK, 0, name)]


def test_archives_of_git_are_read(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=ana", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "train.py").write_text("x")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    body = subprocess.run([*git, "archive", "HEAD"], capture_output=True, check=True).stdout
    assert entries(body) == [TarEntry("train.py", TarKind.FILE, 1, "")]


def test_the_records_of_pax_replace_what_a_header_says() -> None:
    body = header(record("path", "b") + record("size", "4")) + FILE
    assert entries(body) == [TarEntry("b", TarKind.FILE, 4, "")]
    assert entries(header(record("GNU.sparse.size", "9")) + FILE)[0].kind is TarKind.SPARSE


@pytest.mark.parametrize(
    "front",
    {
        "digits alone, for which tarfile takes quadratic time": header(b"1" * MAX_HEADER),
        "a large header": header(record("comment", "x" * 900) * 10),
        "a large GNU name": header(b"x" * (MAX_HEADER + 1), tarfile.GNUTYPE_LONGNAME),
        "many records": header(record("a", "b") * (MAX_RECORDS + 1)),
        "many headers in a row": header(record("a", "b")) * 4,
        "a length of 0": header(b"0 a=b\n"),
        "a length beyond the end": header(b"999 a=b\n"),
        "no key": header(b"5 =b\n"),
        "a size below 0": header(record("size", "-1")),
        "a name for all entries": header(record("path", "b"), tarfile.XGLTYPE),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_header_that_is_damaged_or_costs_time_is_refused(front: tuple[str, bytes]) -> None:
    with pytest.raises(ValueError, match=r"header|number"):
        entries(front[1] + FILE)


@pytest.mark.parametrize("body", [b"", FILE[:300], FILE[:700], b"x" * 2048], ids=range(4))
def test_a_file_that_is_cut_off_or_no_archive_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"empty|header|ends"):
        entries(body)


def test_each_header_is_read_once_and_no_content_is(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            read.append(size or 0)
            return super().read(size)

    body = tar_of({f"{number:0200}": b"x" * 5000 for number in range(50)})
    assert len(list(read_entries(Counted(body)))) == 50
    assert sum(read) <= 50 * 3 * 512 + 512
