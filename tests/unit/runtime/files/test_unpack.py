"""Unpacking archives, valid and hostile."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime.files import unpack


def archive(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> tuple[int, str]:
    path = tmp_path / "archive.tar"
    with tarfile.open(path, "w") as file:
        for info, data in members:
            file.addfile(info, io.BytesIO(data))
    return os.open(path, os.O_RDONLY), hashlib.sha256(path.read_bytes()).hexdigest()


def a_file(name: str, data: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def work(tmp_path: Path) -> str:
    (tmp_path / "in" / "work").mkdir(parents=True)
    return str(tmp_path / "in" / "work")


def test_files_folders_and_modes_are_unpacked(tmp_path: Path) -> None:
    folder = a_file("src", b"", type=tarfile.DIRTYPE, mode=0o755)
    fd, digest = archive(tmp_path, folder, a_file("src/a.py", b"print()", mode=0o755))
    directory = work(tmp_path)
    unpack.unpack(fd, digest, directory)
    assert Path(directory, "src/a.py").read_bytes() == b"print()"
    assert os.access(f"{directory}/src/a.py", os.X_OK)


def test_wrong_digest_unpacks_nothing(tmp_path: Path) -> None:
    fd, _ = archive(tmp_path, a_file("a"))
    directory = work(tmp_path)
    with pytest.raises(SpecError, match="SHA-256"):
        unpack.unpack(fd, "0" * 64, directory)
    assert not list(Path(directory).iterdir())


@pytest.mark.parametrize(
    "member",
    [
        a_file("../outside"),
        a_file("a/../../outside"),
        a_file("link", b"", type=tarfile.SYMTYPE, linkname="../outside"),
        a_file("link", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        a_file("link", b"", type=tarfile.LNKTYPE, linkname="../outside"),
        a_file("null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        a_file("pipe", b"", type=tarfile.FIFOTYPE),
    ],
)
def test_member_that_leaves_the_directory_is_refused(
    tmp_path: Path, member: tuple[tarfile.TarInfo, bytes]
) -> None:
    fd, digest = archive(tmp_path, member)
    with pytest.raises(SpecError, match="cannot be unpacked"):
        unpack.unpack(fd, digest, work(tmp_path))
    assert list((tmp_path / "in").iterdir()) == [tmp_path / "in" / "work"]


def test_member_below_a_link_does_not_lead_out(tmp_path: Path) -> None:
    """Each looks harmless by name, but together they would write above the directory."""
    members = (
        a_file("deep/er", b"", type=tarfile.DIRTYPE, mode=0o755),
        a_file("deep/er/root", b"", type=tarfile.SYMTYPE, linkname="../.."),
        a_file("deep/er/root/out", b"", type=tarfile.SYMTYPE, linkname="../../.."),
        a_file("out/outside"),
    )
    fd, digest = archive(tmp_path, *members)
    with pytest.raises(SpecError, match="cannot be unpacked"):
        unpack.unpack(fd, digest, work(tmp_path))
    assert list((tmp_path / "in").iterdir()) == [tmp_path / "in" / "work"]
    assert not (tmp_path / "outside").exists()


def test_link_that_climbs_behind_another_link_is_refused(tmp_path: Path) -> None:
    fd, digest = archive(
        tmp_path,
        a_file("d", b"", type=tarfile.SYMTYPE, linkname="."),
        a_file("e", b"", type=tarfile.SYMTYPE, linkname="d/.."),
    )
    with pytest.raises(SpecError, match=r"the link `e` leads outside, to `d/\.\.`"):
        unpack.unpack(fd, digest, work(tmp_path))


def test_link_that_stays_inside_is_kept(tmp_path: Path) -> None:
    fd, digest = archive(
        tmp_path, a_file("a/b", b"text"), a_file("a/link", b"", type=tarfile.SYMTYPE, linkname="../a/b")
    )
    directory = work(tmp_path)
    unpack.unpack(fd, digest, directory)
    assert Path(directory, "a/link").read_bytes() == b"text"


def test_absolute_name_stays_inside(tmp_path: Path) -> None:
    fd, digest = archive(tmp_path, a_file("/etc/shoal-was-here"))
    directory = work(tmp_path)
    unpack.unpack(fd, digest, directory)
    assert Path(directory, "etc/shoal-was-here").exists()


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "MAX_MEMBERS", 3)
    fd, digest = archive(tmp_path, *(a_file(str(number)) for number in range(4)))
    directory = work(tmp_path)
    with pytest.raises(SpecError, match="more than 3"):
        unpack.unpack(fd, digest, directory)


def test_archive_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    holes = tarfile.TarInfo("bomb")
    holes.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(1 << 40)}
    holes.pax_headers["GNU.sparse.map"] = "0,0"
    path = tmp_path / "archive.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        file.addfile(holes, io.BytesIO(b""))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(SpecError, match="claims to hold"):
        unpack.unpack(os.open(path, os.O_RDONLY), digest, work(tmp_path))
