"""Caches of a project outlive its attempts, belong to it alone, and have a limit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.files import cache_cleanup, caches, removal
from shoal.runtime.files.caches import ProjectCache, cache_variables

USER = 61234


def cache(
    home: Path, project: str = "vision", uid: int | None = None, max_bytes: int = 1 << 40
) -> ProjectCache:
    return ProjectCache(project, max_bytes, str(home), uid)


def directory(project_cache: ProjectCache) -> Path:
    assert project_cache.directory is not None
    return Path(project_cache.directory)


def write(path: Path, *, used_ago_s: float = 0.0, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    at = caches.CLOCK.now() - used_ago_s
    for place in (path, path.parent):
        os.utime(place, (at, at))
    return path


def test_attempts_of_one_project_share_a_directory_and_those_of_two_do_not(tmp_path: Path) -> None:
    first, again = directory(cache(tmp_path)), directory(cache(tmp_path))
    other = directory(cache(tmp_path, "speech"))
    assert first == again
    assert other != first
    assert [path.stat().st_mode & 0o777 for path in (first, other, first.parent)] == [0o700] * 3


def test_new_project_with_an_old_name_does_not_get_the_old_caches(
    tmp_path: Path,
) -> None:
    assert directory(cache(tmp_path, uid=USER)) != directory(cache(tmp_path, uid=USER + 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_cache_belongs_to_its_user_and_one_of_another_user_is_not_used(tmp_path: Path) -> None:
    place = directory(cache(tmp_path, uid=USER))
    assert place.stat().st_uid == USER
    os.chown(place, USER + 1, USER + 1)
    write(place / "planted.py")
    assert cache(tmp_path, uid=USER).directory is None


@pytest.mark.parametrize("what", ["file", "link"])
def test_file_in_place_of_the_cache_ends_no_job(tmp_path: Path, what: str) -> None:
    place = directory(cache(tmp_path))
    place.rmdir()
    if what == "file":
        place.write_text("")
    else:
        place.symlink_to("/etc")
    assert cache(tmp_path).directory is None


def test_cache_that_cannot_be_opened_does_not_delay_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "WAIT_S", 0.0)
    place = tmp_path / "caches" / f"vision-{os.geteuid()}"
    place.parent.mkdir(mode=0o700)
    place.touch()
    without = cache(tmp_path)
    assert without.directory is None
    place.unlink()
    assert directory(cache(tmp_path)) == place


def test_job_runs_without_a_cache_that_another_job_locks_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "WAIT_S", 0.0)
    (tmp_path / "caches").mkdir(mode=0o700)
    with (tmp_path / "caches" / f"vision-{os.geteuid()}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache(tmp_path).directory is None
    assert cache(tmp_path).directory is not None


@pytest.mark.parametrize("project", ["../../etc", ".ssh", "a/b"])
def test_project_whose_name_is_a_path_has_no_cache(tmp_path: Path, project: str) -> None:
    assert cache(tmp_path, project).directory is None
    assert list(tmp_path.glob("**/*")) == []


def test_no_cache_is_made_if_the_operator_disables_caches(tmp_path: Path) -> None:
    assert cache(tmp_path, max_bytes=0).directory is None
    assert list(tmp_path.iterdir()) == []


def test_tools_find_their_caches_unless_the_job_sets_its_own() -> None:
    variables = cache_variables("/c", "/work", {})
    assert (variables["XDG_CACHE_HOME"], variables["HF_HUB_CACHE"], variables["TRITON_CACHE_DIR"]) == (
        "/c",
        "/c/huggingface/hub",
        "/c/triton",
    )
    assert cache_variables(None, "/work", {}) == {}
    assert cache_variables("/c", "/work", {"HOME": "/data/ana"}) == {}
    assert set(cache_variables("/c", "/work", {"XDG_CACHE_HOME": "/x"})) == set(caches.BY_HOME)


def test_configuration_and_tokens_of_a_job_end_with_its_attempt() -> None:
    variables = cache_variables("/c", "/work", {})
    assert variables["HF_HOME"] == "/work/.cache/huggingface"
    assert "MPLCONFIGDIR" not in variables, "its `matplotlibrc` would last"


def test_caches_of_hugging_face_follow_a_home_that_the_job_sets() -> None:
    variables = cache_variables("/c", "/work", {"HF_HOME": "/models"})
    assert not [name for name in variables if name.startswith("HF_")]
    assert "HF_HUB_CACHE" not in cache_variables("/c", "/work", {"HUGGINGFACE_HUB_CACHE": "/models"})


def test_only_the_lock_of_a_killed_build_is_removed(
    tmp_path: Path,
) -> None:
    first = cache(tmp_path)
    stale = write(directory(first) / "torch_extensions/py311_cpu/op/lock")
    living = write(directory(first) / "torch_extensions/py311_cpu/other/lock")
    outside = write(tmp_path / "outside/op/lock")
    (directory(first) / "torch_extensions/link").symlink_to(tmp_path / "outside")
    with living.open():
        cache(tmp_path).remove_stale_locks()
    assert (stale.exists(), living.exists(), outside.exists()) == (False, True, True)
    first.remove_stale_locks()
    assert not living.exists()


def test_entry_unused_for_the_longest_time_is_removed_first_and_whole(tmp_path: Path) -> None:
    day = 86400.0
    old = write(tmp_path / "huggingface/hub/models--a/blob", used_ago_s=9 * day, size=8192)
    write(tmp_path / "huggingface/hub/models--a/part", used_ago_s=9 * day)
    new = write(tmp_path / "huggingface/hub/models--b/blob", used_ago_s=2 * day, size=8192)
    now = write(tmp_path / "triton/abc/kernel", size=8192)
    ancient = write(tmp_path / "inductor/x/code.py", used_ago_s=40 * day)
    cache_cleanup.trim_cache(str(tmp_path), 1 << 40, is_alone=False)
    assert (ancient.exists(), old.exists()) == (False, True)
    cache_cleanup.trim_cache(str(tmp_path), 20_000, is_alone=False)
    assert [path.exists() for path in (old, old.parent, new, now)] == [False, False, True, True]
    cache_cleanup.trim_cache(str(tmp_path), 0, is_alone=False)
    assert [path.exists() for path in (new, now)] == [False, True]  # used a moment ago, perhaps by others
    cache_cleanup.trim_cache(str(tmp_path), 0, is_alone=True)
    assert not now.exists()
    assert not any(path.name.startswith(cache_cleanup.REMOVED) for path in tmp_path.iterdir())


def test_trim_ends_in_time_for_any_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are files at the top, which are looked at one by one; and removals that never end."""
    for number in range(50):
        write(tmp_path / f"flat{number}", used_ago_s=60 * cache_cleanup.DAY_S)
        write(tmp_path / f"{cache_cleanup.REMOVED}{number}" / "inner")
    monkeypatch.setattr(cache_cleanup, "MAX_LOOKED", 10)
    assert sum(1 for _ in until_out_of_time(tmp_path)) <= 10
    deadlines: list[float] = []
    monkeypatch.setattr(removal, "remove", lambda _path, *, timeout_s: deadlines.append(timeout_s))
    monkeypatch.setattr(cache_cleanup, "TRIM_S", 0.0)
    cache_cleanup.trim_cache(str(tmp_path), 0, is_alone=True)
    assert deadlines == []


def until_out_of_time(place: Path) -> Iterator[cache_cleanup.CacheEntry]:
    with contextlib.suppress(cache_cleanup.OutOfTime):
        yield from cache_cleanup._entries(str(place), cache_cleanup.CLOCK.monotonic() + 60)


def test_trim_follows_no_link(tmp_path: Path) -> None:
    precious = write(tmp_path / "outside/a/b", used_ago_s=90 * 86400.0)
    place = tmp_path / "cache"
    (place / "torch").mkdir(parents=True)
    (place / "torch/link").symlink_to(tmp_path / "outside")
    (place / "top").symlink_to(tmp_path / "outside")
    cache_cleanup.trim_cache(str(place), 0, is_alone=True)
    assert precious.exists()
    assert not (place / "torch/link").is_symlink()


def test_trim_runs_as_the_jobs_user_and_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = USER if os.geteuid() == 0 else None
    tmp_path.chmod(0o700)  # that user cannot pass through the home
    project_cache = cache(tmp_path, uid=uid, max_bytes=1)
    big = write(directory(project_cache) / "torch/hub/model", size=10_000)
    for path in (big.parent.parent, big.parent, big):
        os.chown(path, uid or os.geteuid(), -1)
    kept = write(
        directory(project_cache) / "torch/roots/file", size=10_000
    )  # in a directory that is not that user's
    project_cache.trim()
    assert not big.exists()
    assert kept.exists() == (uid is not None)
    again = write(directory(project_cache) / "torch/hub2/model", size=10_000)
    project_cache.trim()
    assert again.exists()


def test_caches_of_an_unused_project_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, busy, here = cache(tmp_path, "gone"), cache(tmp_path, "busy"), cache(tmp_path, "here")
    for project_cache in (gone, busy):
        write(directory(project_cache) / "torch/x")
        os.utime(f"{project_cache.directory}.lock", (1.0, 1.0))
    os.close(gone._lock)
    here.trim()
    assert [directory(project_cache).exists() for project_cache in (gone, busy, here)] == [False, True, True]


def test_endless_trim_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object, **__: object) -> None:
        signal.pause()

    monkeypatch.setattr(cache_cleanup, "trim_cache", endless)
    monkeypatch.setattr(caches, "MAX_TRIM_S", 1)
    project_cache = cache(tmp_path)
    project_cache.trim()  # returns
    assert cache(tmp_path).directory == project_cache.directory, "its lock is held shared again"
