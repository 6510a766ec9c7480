"""The log of a data plane that lives for months stays below a size."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from shoal.cli.control_plane.data_plane import bound_log


def test_log_of_a_living_data_plane_is_emptied_and_its_older_part_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.control_plane.data_plane.MAX_LOG_BYTES", 10)
    path = tmp_path / "serving.log"
    bound_log(path)  # there is none before the first service
    with path.open("a") as living:
        living.write("twelve bytes")
        living.flush()
        bound_log(path)
        living.write("after")
    assert (path.read_text(), (tmp_path / "serving.log.1").read_text()) == ("after", "twelve bytes")
    bound_log(path)
    assert path.read_text() == "after"


def test_log_on_a_full_disk_is_emptied_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shoal.cli.control_plane.data_plane.MAX_LOG_BYTES", 10)
    monkeypatch.setattr(shutil, "copyfile", full)
    path = tmp_path / "serving.log"
    path.write_text("twelve bytes")
    bound_log(path)
    assert path.read_text() == ""


def test_log_that_cannot_be_emptied_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("shoal.cli.control_plane.data_plane.MAX_LOG_BYTES", 10)
    monkeypatch.setattr(os, "truncate", refuse)
    path = tmp_path / "serving.log"
    path.write_text("twelve bytes")
    bound_log(path)
    assert path.read_text() == "twelve bytes"
