"""Where ranks find a job's checkpoints in the folder that they start in."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime.files.checkpoint_storage import link


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the folder of the checkpoints and the one in which ranks start."""
    monkeypatch.chdir(tmp_path)
    for name in ("kept", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "kept", tmp_path / "work"


def test_empty_folders_of_the_snapshot_are_replaced(folders: tuple[Path, Path]) -> None:
    kept, work = folders
    (work / "out/best").mkdir(parents=True)
    (work / "out/last/old").mkdir(parents=True)
    link(str(kept), "out", str(work))
    assert (work / "out").readlink() == kept


def test_second_link_keeps_empty_folders_among_the_checkpoints(folders: tuple[Path, Path]) -> None:
    kept, work = folders
    for _ in range(2):
        link(str(kept), "out", str(work))
        (kept / "step-10").mkdir(exist_ok=True)
    assert (kept / "step-10").is_dir()


def test_file_of_the_snapshot_is_not_replaced(folders: tuple[Path, Path]) -> None:
    kept, work = folders
    (work / "out/last").mkdir(parents=True)
    (work / "out/last/model.pt").write_text("x")
    with pytest.raises(SpecError, match="`out` is in the snapshot of the workdir"):
        link(str(kept), "out", str(work))
    assert (work / "out/last/model.pt").read_text() == "x"
