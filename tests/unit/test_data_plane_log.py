"""The log of a data plane that lives for months stays below a size."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.data_plane import bound_log


def test_log_of_a_living_data_plane_is_emptied_and_its_older_part_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.data_plane.MAX_LOG_BYTES", 10)
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
