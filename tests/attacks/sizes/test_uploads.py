"""Row 29: what may be uploaded, by which callers, and that nothing else is ever stored."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from shoal.api.archives import Archives
from shoal.errors import LimitReached
from shoal.settings import ServerLimits
from shoal.tar_check import TarLimits
from tests.support.archives import entry, tar_of, tar_with
from tests.support.planes.world import ApiWorld, open_world

TAR = [("content-type", "application/x-tar")]
GOOD = tar_of({"train.py": b"print('hi')\n", "data/x.txt": b"x"})


def put(world: ApiWorld, body: bytes, role: str = "member", project: str = "vision") -> int:
    digest = hashlib.sha256(body).hexdigest()
    return world.call(
        "PUT", f"/v1/archives/{digest}?project={project}", role=role, body=body, headers=TAR
    ).status


def hostile() -> dict[str, bytes]:
    link, hard = tarfile.SYMTYPE, tarfile.LNKTYPE
    return {
        "parent": tar_with([(entry("../evil"), b"")]),
        "hidden parent": tar_with([(entry("a/../../evil"), b"")]),
        "absolute": tar_with([(entry("/etc/evil"), b"")]),
        "absolute link": tar_with([(entry("l", link, "/etc/passwd"), b"")]),
        "link out": tar_with([(entry("a/l", link, "../../x"), b"")]),
        "through a link": tar_with([(entry("l", link, "d"), b""), (entry("l/x"), b"")]),
        "over a link": tar_with([(entry("l", link, "d"), b""), (entry("l"), b"")]),
        "hard link out": tar_with([(entry("h", hard, "../../etc/passwd"), b"")]),
        "hard link to a link": tar_with([(entry("l", link, "d"), b""), (entry("h", hard, "l"), b"")]),
        "device": tar_with([(entry("null", tarfile.CHRTYPE), b"")]),
        "block device": tar_with([(entry("sda", tarfile.BLKTYPE), b"")]),
        "pipe": tar_with([(entry("p", tarfile.FIFOTYPE), b"")]),
        "compressed": gzip.compress(GOOD),
        "not a tar": b"#!/bin/sh\n" * 100,
        "nothing": b"",
        "sparse": sparse(),
        "long name": tar_with([(entry("x" * 5000), b"")]),
        "deep name": tar_with([(entry("a/" * 100 + "x"), b"")]),
        "deep target": tar_with([(entry("l", link, "a/" * 100 + "x"), b"")]),
    }


def sparse() -> bytes:
    """Return a file that claims to be a terabyte in one block."""
    info = entry("bomb", tarfile.GNUTYPE_SPARSE)
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[386:398] = b"00000000000\0"
    raw[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw) + b"\0" * 1024


@pytest.mark.parametrize("name,body", hostile().items(), ids=hostile().keys())
def test_a_hostile_archive_is_refused_and_not_kept(world: ApiWorld, name: str, body: bytes) -> None:
    assert put(world, body) in (400, 413, 422)
    digest = hashlib.sha256(body).hexdigest()
    assert world.call("GET", f"/v1/archives/{digest}", role="member").status == 404
    kept = [path.name for path in (world.plane.settings.home / "archives").iterdir()]
    assert not [entry for entry in kept if entry.startswith((".part", digest))]


def test_an_archive_is_kept_under_its_digest_and_may_be_sent_again(world: ApiWorld) -> None:
    assert (put(world, GOOD), put(world, GOOD)) == (200, 200)
    digest = hashlib.sha256(GOOD).hexdigest()
    assert (world.plane.settings.home / "archives" / f"{digest}.tar").read_bytes() == GOOD
    archive = world.call("GET", f"/v1/archives/{digest}", role="viewer").json()
    assert archive == {"digest": digest, "size_bytes": len(GOOD)}


def test_a_body_that_is_not_what_it_says_is_refused(world: ApiWorld) -> None:
    wrong = "0" * 64
    got = world.call("PUT", f"/v1/archives/{wrong}?project=vision", role="member", body=GOOD, headers=TAR)
    assert got.status == 422
    assert world.call("GET", f"/v1/archives/{wrong}", role="member").status == 404


def test_knowing_a_digest_does_not_give_the_archive_to_another_project(world: ApiWorld) -> None:
    body = tar_of({"secret.py": b"the recipe\n"})
    assert put(world, body) == 200
    digest = hashlib.sha256(body).hexdigest()
    assert world.call("GET", f"/v1/archives/{digest}", role="stranger").status == 404
    job = {"spec": {"run": "cat secret.py"}, "project": "speech", "archive": digest}
    assert world.call("POST", "/v1/jobs", role="stranger", data=job).status == 422
    assert world.call("POST", "/v1/jobs", role="member", data={**job, "project": "vision"}).status == 201


def test_uploads_are_limited_by_size_entries_and_what_they_unpack_to(tmp_path: Path) -> None:
    limits = ServerLimits(max_archive_bytes=1 << 20, max_archive_files=50, max_unpacked_bytes=200_000)
    with open_world(tmp_path, limits=limits) as world:
        assert put(world, tar_of({f"f{number}": b"" for number in range(50)})) == 200
        assert put(world, tar_of({f"f{number}": b"" for number in range(51)})) == 413
        assert put(world, tar_of({"big": b"x" * 200_001})) == 413
        assert put(world, tar_of({"big": b"x" * (2 << 20)})) == 413
        world.call("PATCH", "/v1/projects/vision", role="admin", data={"max_upload_bytes": 20_000})
        assert put(world, tar_of({"big": b"x" * 30_000})) == 413


def test_all_uploads_of_a_project_together_are_limited(tmp_path: Path) -> None:
    bodies = [tar_of({"big": bytes([number]) * 30_000}) for number in range(4)]
    size = len(bodies[0])
    limits = ServerLimits(max_project_archive_bytes=3 * size)
    with open_world(tmp_path, limits=limits) as world:
        assert [put(world, body) for body in bodies] == [200, 200, 200, 429]
        assert put(world, bodies[0]) == 200, "it is there already"
        assert put(world, bodies[3], role="stranger", project="speech") == 200
        digest = hashlib.sha256(bodies[3]).hexdigest()
        target = f"/v1/archives/{digest}?project=vision"
        reply = world.call("PUT", target, role="member", body=bodies[3], headers=TAR).json()
        assert f"would take {4 * size} bytes; at most {3 * size} are kept" in reply["detail"]
        assert f"SHOAL_MAX_PROJECT_ARCHIVE_BYTES={8 * size} shoal up" in reply["hint"]
        assert not list((world.plane.settings.home / "archives").glob(".part-*"))


def test_uploads_at_the_same_time_count_in_full_before_they_have_arrived(tmp_path: Path) -> None:
    bodies = [tar_of({"big": bytes([number]) * 30_000}) for number in range(2)]
    first, second = (hashlib.sha256(body).hexdigest() for body in bodies)
    archives = Archives(tmp_path, TarLimits(10, 1 << 20), 2 * len(bodies[0]) - 1)
    refused: list[str] = []

    async def slow() -> AsyncIterator[bytes]:
        yield bodies[0][:1000]
        with pytest.raises(LimitReached) as refusal:
            await archives.receive("vision", second, whole(), len(bodies[1]), is_allowed)
        refused.append(refusal.value.message)
        yield bodies[0][1000:]

    async def is_allowed() -> None:
        """No caller is revoked here."""

    async def whole() -> AsyncIterator[bytes]:
        yield bodies[1]

    async def both() -> None:
        assert await archives.receive("vision", first, slow(), len(bodies[0]), is_allowed) == len(bodies[0])
        assert await archives.receive("speech", second, whole(), len(bodies[1]), is_allowed) == len(bodies[1])

    anyio.run(both)
    assert len(refused) == 1
    assert (tmp_path / "archives" / f"{first}.tar").read_bytes() == bodies[0]


def test_a_header_that_is_itself_a_bomb_is_refused(world: ApiWorld) -> None:
    out = io.BytesIO()
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "x" * (3 << 20)}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    assert put(world, out.getvalue()) == 422


def test_a_pax_header_of_digits_is_refused_before_anything_looks_at_them(world: ApiWorld) -> None:
    """CVE-2024-6232: the pattern that tarfile searches in it takes ten minutes for 1 MiB."""
    info = entry("x", tarfile.XHDTYPE)
    info.size = 1 << 20
    body = info.tobuf(tarfile.USTAR_FORMAT) + b"1" * info.size + GOOD
    assert put(world, body) == 422
