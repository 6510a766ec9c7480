"""The quickstart and the start of the services guide, typed into a shell and compared with their output."""

from __future__ import annotations

import getpass
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from shoal.engines.local.inventory import node_name
from shoal.home import pid_holding
from tests.style.tree import ROOT
from tests.support.docs_pages import TypedCommand, blocks, blocks_of, transcript
from tests.support.planes.real import until

pytestmark = [
    pytest.mark.serial,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("pgrep") is None, reason="no pgrep: apt-get install procps"),
]
QUICKSTART = ROOT / "docs" / "quickstart.md"
SERVICES = ROOT / "docs" / "guides" / "services.md"
FIRST_SERVICE = "## The first one, in two minutes"
SERVED_AT = "http://127.0.0.1:7463"
"""The default port of data planes, as in the guide. Another cluster on this machine may have it."""
COMMAND_S = 60.0
SAME = (
    (r"\x1b\[[0-9;]*m", ""),
    (rf"\b{re.escape(node_name(socket.gethostname()))}\b", "vm"),
    (rf"\b{re.escape(getpass.getuser())}\b", "root"),
    (r"http://127\.0\.0\.1:\d+", "URL"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\b\d+\.\d s\b", "SECONDS"),
    (r"process \d+", "process N"),
    (r"\d+ entries, head [0-9a-f]{64}", "N entries, head HASH"),
    (r"\b(?:\d+m)?\d+s\b", "AGE"),
    (r"\bstarting\b|\brunning\b", "HOLDING"),
    (r"after step [1-9]\d*", "after step N"),
    (
        r"(?:cgroup\d|rlimits|affinity|bubblewrap|uid)(?: (?:affinity|bubblewrap|uid|nftables|[a-z]*~))*",
        "WALLS",
    ),
    (r"^vm default ready .*", "vm default ready THIS MACHINE"),
)
"""Text that may differ between runs and machines, and its placeholder in the comparison."""


def plain(line: str) -> str:
    line = re.sub(r"\s+", " ", line).strip()
    for pattern, word in SAME:
        line = re.sub(pattern, word, line)
    return line


def in_rank_order(lines: list[str]) -> list[str]:
    """Group neighbouring lines of ranks into a set, because ranks write in any order."""
    groups = groupby(lines, key=lambda line: re.match(r"\[\d+\]", line) is not None)
    return [line for is_rank, group in groups for line in (sorted(group) if is_rank else group)]


def is_alike(shown: list[str], expected: list[str]) -> bool:
    """`...` stands for any text within a line, and alone on a line for any number of lines."""
    if not shown:
        return not expected
    if shown[0] == "...":
        return any(is_alike(shown[1:], expected[skipped:]) for skipped in range(len(expected) + 1))
    pattern = ".*".join(map(re.escape, shown[0].split("...")))
    return (
        bool(expected)
        and re.fullmatch(pattern, expected[0]) is not None
        and is_alike(shown[1:], expected[1:])
    )


def differs(typed: TypedCommand, expected: str) -> str | None:
    """Return what a reader would see differently, or None."""
    has_gaps = "..." in typed.output
    order = list if has_gaps else in_rank_order
    shown, actual = (
        [plain(line) for line in order(lines)] for lines in (typed.output, expected.splitlines())
    )
    expected_text = "\n".join
    return (
        None
        if is_alike(shown, actual)
        else f"$ {typed.command}\n{expected_text(shown)}\n--- but it said\n{expected_text(actual)}"
    )


@dataclass(frozen=True)
class Reader:
    """A reader who types what the page shows, in a home and a folder of their own."""

    home: Path
    place: Path
    variables: dict[str, str] = field(default_factory=dict)
    """The environment of the reader's shell."""

    @property
    def env(self) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SHOAL_", "PYTEST"))}
        path = f"{self.home.parent / 'bin'}:{environment.get('PATH', os.defpath)}"
        # A port of our own: another cluster may have the default one.
        ours = {"SHOAL_HOME": str(self.home), "COLUMNS": "80", "NO_COLOR": "1"}
        ours |= dict.fromkeys(("SHOAL_LISTEN", "SHOAL_SERVE_ON"), "127.0.0.1:0")
        return {**environment, **ours, **self.variables, "PATH": path, "PYTHONPATH": str(ROOT / "src")}

    def type(self, command: str) -> str:
        """Return the terminal's output. The command is the shell's input, so that `pgrep -f` misses it."""
        name = match[1] if (match := re.match(r"([A-Z]+)=", command)) else None
        value = self.place.parent / "value"
        if name:
            command += f'\nprintf %s "${name}" > {value}'
        done = subprocess.run(
            ["bash"],
            input=command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
            env=self.env,
            cwd=self.place,
        )
        if name:
            self.variables[name] = value.read_text()
        return done.stdout

    def difference(self, step: TypedCommand) -> str | None:
        """What is not as it is written.

        Who looks at the queue too early looks again, and nobody reads so fast that a job is killed before it
        has made a step.
        """
        if step.command.startswith("kill"):
            until(lambda: "[0] step" in self.type("shoal logs --rank 0 steps"), "a first step")
        looks = step.command.startswith(("shoal queue", "shoal services"))
        deadline = time.monotonic() + (COMMAND_S if looks else 0.0)
        while (
            difference := differs(step, self.type(step.command))
        ) is not None and time.monotonic() < deadline:
            time.sleep(0.5)
        return difference


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    for name in ("bin", "place"):
        (tmp_path / name).mkdir()
    shim = tmp_path / "bin" / "shoal"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shoal.cli.main "$@"\n')
    shim.chmod(0o755)
    reader = Reader(tmp_path / "home", tmp_path / "place")
    yield reader
    if pid_holding(reader.home) is not None:
        reader.type("shoal down --jobs")
    if pid := pid_holding(reader.home):
        os.kill(pid, signal.SIGKILL)


def test_the_quickstart_happens_as_it_is_written(reader: Reader) -> None:
    typed = 0
    for block in blocks(QUICKSTART):
        if block.title:
            (reader.place / block.title).write_text(block.text)
        for step in transcript(block) if block.language == "console" else ():
            difference = reader.difference(step)
            assert difference is None, difference
            typed += 1
    assert typed > 15
    assert not reader.home.exists(), "and nothing of it is left"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl: apt-get install curl")
def test_the_first_service_happens_as_it_is_written(reader: Reader) -> None:
    section = SERVICES.read_text(encoding="utf-8").partition(FIRST_SERVICE)[2].partition("\n## ")[0]
    typed = 0
    for block in blocks_of(section):
        if block.title:
            (reader.place / block.title).write_text(block.text)
        for step in transcript(block) if block.language == "console" else ():
            if SERVED_AT in step.command:
                facts = json.loads((reader.home / "serving.json").read_text())
                step.command = step.command.replace(SERVED_AT, facts["url"])
            difference = reader.difference(step)
            assert difference is None, difference
            typed += 1
    assert typed > 10


def test_the_first_service_answers_only_what_comes_with_its_key(tmp_path: Path) -> None:
    [program] = [block for block in blocks(SERVICES) if block.title == "hello.py"]
    (tmp_path / "hello.py").write_text(program.text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"PORT": str(port), "GREETING": "hi", "SHOAL_REPLICA_KEY": "key", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "hello.py"], cwd=tmp_path, env=env) as server:
        try:
            until(lambda: get_reply(port, "key") == (200, b"hi, ana\n"), "the server answers")
            assert [get_reply(port, secret)[0] for secret in ("", "kez")] == [403, 403]
        finally:
            server.kill()


def get_reply(port: int, secret: str) -> tuple[int, bytes]:
    """Return the status and the body; status 0 if the port is closed."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=COMMAND_S)
    try:
        headers = {"x-shoal-caller": "ana"} | ({"x-shoal-secret": secret} if secret else {})
        link.request("GET", "/", headers=headers)
        answer = link.getresponse()
        return answer.status, answer.read()
    except ConnectionRefusedError:
        return 0, b""
    finally:
        link.close()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (["default/1"], "default/2"),
        (["[0] goes on after step 14"], "[0] goes on after step 0"),
        (["-- default/1 succeeded"], "-- default/1 succeeded\nerror: and more"),
        (["...", "[0] step 80 of 80"], "[0] step 60 of 80"),
        (["-- default/1 succeeded"], ""),
    ],
)
def test_a_difference_that_matters_is_seen(shown: list[str], expected: str) -> None:
    assert differs(TypedCommand("shoal", shown), expected) is not None


def test_a_difference_that_does_not_matter_is_not_seen() -> None:
    shown = ["-- started on vm", "[0] one", "[1] two", "-- ended after 12s"]
    expected = f"-- started on {node_name(socket.gethostname())}\n[1] two\n[0] one\n-- ended after 1m05s"
    assert differs(TypedCommand("shoal", shown), expected) is None
