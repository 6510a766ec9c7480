"""Whether an archive is safe to unpack, and how long the check takes."""

from __future__ import annotations

import io
import tarfile

import pytest

from shoal.errors import SpecError
from shoal.tar_check import MAX_PARTS, TarLimits, check_tar
from tests.support.archives import entry, tar_with


def check(*members: tarfile.TarInfo) -> None:
    check_tar(io.BytesIO(tar_with((member, b"") for member in members)), TarLimits(100, 1000))


def test_a_name_of_as_many_folders_as_are_taken_passes() -> None:
    deepest = "a/" * (MAX_PARTS - 1) + "x"
    check(entry(deepest), entry("up/" * 60 + "link", tarfile.SYMTYPE, "../" * 60 + "target"))
    with pytest.raises(
        SpecError, match=r"entry `a/a/a/.*` has 101 parts between slashes; at most 100 are taken"
    ):
        check(entry(f"a/{deepest}"))


LEADING_OUT = {
    "above": {"e": ".."},
    "above from below": {"a/e": "b/../../../x"},
    "absolute": {"e": "/etc"},
    "above behind a link to the top": {"d": ".", "e": "d/.."},
    "above behind a link that comes later": {"a": "d/..", "d": "."},
    "above behind a link to a folder": {"d": "a/b", "e": "./d/../../../x"},
    "above behind a chain of links": {"d": ".", "e": "d", "f": "e/../x"},
    "above behind a link in a folder": {"p/q/d": "../..", "e": "p//q/d/.."},
}
INSIDE = {
    "a link to the top": {"a/b/top": "../.."},
    "up and down": {"a/e": "../b/../c/x"},
    "a link to a link": {"latest": "v1", "best": "latest/model"},
    "a link to itself": {"loop": "loop"},
}


def links(targets: dict[str, str]) -> list[tarfile.TarInfo]:
    return [entry(name, tarfile.SYMTYPE, target) for name, target in targets.items()]


@pytest.mark.parametrize("targets", LEADING_OUT.values(), ids=LEADING_OUT)
def test_links_that_lead_outside_by_way_of_each_other_are_refused(targets: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="leads outside the archive"):
        check(*links(targets))


@pytest.mark.parametrize("targets", INSIDE.values(), ids=INSIDE)
def test_links_that_stay_inside_are_taken(targets: dict[str, str]) -> None:
    check(*links(targets))
