"""Whether an archive is safe to unpack, and what finding out costs."""

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
