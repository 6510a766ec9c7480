"""The head of a Ray of our own, over a head on paper: one is started, known, and found again by anybody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engines.ray.head import RayHead, make_temp
from shoal.errors import EngineUnreachable, SpecError
from tests.support.host.processes import is_alive
from tests.support.runtime.tasks import until

PAPER = f"""#!{sys.executable}
import json, os, pathlib, socket, sys, time
home = pathlib.Path(__file__).parent
with open(home / "begun", "a") as file:
    file.write(f"{{os.getpid()}} {{json.loads((home / 'ray' / 'head.json').read_text())['pid']}}\\n")
(home / "env").write_text(json.dumps(dict(os.environ)))
while not (home / "gate").exists():
    time.sleep(0.02)
port = next(word.partition("=")[2] for word in sys.argv if word.startswith("--port="))
listener = socket.create_server(("127.0.0.1", int(port)))
print("Ray runtime started.", flush=True)
while True:
    listener.accept()[0].close()
"""
ENSURE = """
import pathlib, sys
from shoal.engines.ray.head import RayHead
RayHead(pathlib.Path(sys.argv[1]), sys.argv[2]).ensure()
"""


class Site:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = home / "python"
        self.python.write_text(PAPER)
        self.python.chmod(0o700)
        self.head = RayHead(home / "ray", str(self.python))

    def open(self) -> None:
        (self.home / "gate").touch()

    def begun(self) -> list[tuple[int, int]]:
        """By head that began: its process, and which one was on record by then."""
        file = self.home / "begun"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for pid, _ in site.begun():
        if is_alive(pid) and os.getsid(pid) == pid:
            os.kill(pid, signal.SIGKILL)


def test_a_head_is_on_record_before_it_begins_and_is_found_again(site: Site) -> None:
    site.open()
    first = site.head.ensure()
    assert RayHead(site.home / "ray", str(site.python)).ensure() == first
    [(pid, on_record)] = site.begun()
    assert pid == on_record
    assert os.getsid(pid) == pid
    assert site.head.stop()
    until(lambda: not is_alive(pid))


def test_a_head_whose_starter_was_killed_is_not_forgotten(site: Site) -> None:
    starter = subprocess.Popen([sys.executable, "-c", ENSURE, str(site.home / "ray"), str(site.python)])
    until(lambda: bool(site.begun()))
    starter.kill()
    starter.wait()
    site.open()
    [(pid, _)] = site.begun()
    until(lambda: "started" in (site.home / "ray" / "head.log").read_text())
    site.head.ensure()
    assert [item for item, _ in site.begun()] == [pid]
    assert site.head.stop()
    until(lambda: not is_alive(pid))


def test_record_of_an_older_shoal_is_taken_for_another_home_s(site: Site) -> None:
    site.open()
    first = site.head.ensure()
    [(pid, _)] = site.begun()
    file = site.home / "ray" / "head.json"
    older = json.loads(file.read_text())
    del older["inode"]
    file.write_text(json.dumps(older))
    assert not site.head.is_running()
    assert not site.head.stop()
    assert site.head.ensure() != first
    assert is_alive(pid)


def test_no_secret_of_the_control_plane_reaches_the_head(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "swordfish")
    site.open()
    site.head.ensure()
    result = json.loads((site.home / "env").read_text())
    assert "PATH" in result
    assert "swordfish" not in result.values()


def test_missing_python_is_reported_with_a_command_to_type(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachable, match="No such file") as raised:
        RayHead(tmp_path / "ray", str(tmp_path / "none")).ensure()
    assert "--ray-python" in (raised.value.hint or "")


def test_python_without_ray_is_reported_at_once_with_the_install_command(site: Site) -> None:
    message = "Error while finding module specification for 'ray.scripts.scripts' (ModuleNotFoundError: "
    script = f"#!/bin/sh\necho begun >>{site.home}/tries\necho \"{message}No module named 'ray')\"\nexit 1\n"
    site.python.write_text(script)
    with pytest.raises(SpecError, match=f"there is no Ray in {site.python}") as refused:
        site.head.ensure()
    assert "`pip install -c constraints.txt -e '.[ray]'`" in str(refused.value.hint)
    assert (site.home / "tries").read_text() == "begun\n"


SOCKET = "session_2026-10-10_10-10-10_123456_4194304/sockets/plasma_store"
"""The longest that Ray makes below its own directory."""


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.mark.parametrize("trap", ["", "link", "file", "open", "another's"])
def test_head_finds_a_socket_folder_if_the_usual_name_is_taken(everybodys: Path, trap: str) -> None:
    usual = everybodys / f"shoal-{os.getuid()}"
    if trap == "link":
        usual.symlink_to("/nowhere")
    elif trap == "file":
        usual.touch()
    elif trap:
        usual.mkdir()
        usual.chmod(0o777 if trap == "open" else 0o700)
    if trap == "another's":
        if os.getuid() != 0:
            pytest.skip("only root gives files away: `sudo make test`")
        os.chown(usual, 1, 1)
    temp = make_temp(Path("/home/ana/.shoal/ray"), str(everybodys))
    assert temp == make_temp(Path("/home/ana/.shoal/ray"), str(everybodys))
    for path in (temp.parent, temp.parent.parent):
        facts = path.lstat()
        assert (facts.st_uid, facts.st_mode & 0o777) == (os.getuid(), 0o700)
    assert (temp.parent.parent == usual) is (trap == "")
    least = str(temp).replace(str(everybodys), "/tmp").replace(f"shoal-{os.getuid()}", "shoal-4294967294")
    assert len(f"{least}/{SOCKET}") <= 107


def test_a_place_for_sockets_that_cannot_be_made_private_is_said_and_nothing_is_to_be_removed(
    everybodys: Path,
) -> None:
    temp = make_temp(Path("/home/ana/.shoal/ray"), str(everybodys))
    temp.parent.rmdir()
    temp.parent.touch()
    with pytest.raises(EngineUnreachable, match=str(temp.parent)) as raised:
        make_temp(Path("/home/ana/.shoal/ray"), str(everybodys))
    assert "rm" not in (raised.value.hint or "").split()


def test_stop_removes_the_socket_folder_of_the_head(site: Site) -> None:
    site.open()
    site.head.ensure()
    temp = Path(json.loads((site.home / "ray" / "head.json").read_text())["temp"])
    assert temp.parent.is_dir()
    assert site.head.stop()
    assert not temp.parent.exists()
    assert temp.parent.parent.is_dir()
