"""`shoal connect ray` over a bridge on paper: what it refuses, and what it writes down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shoal.cli.checkup_machine import check_programs
from shoal.cli.checkup_server import check_ray
from shoal.engines.ray import client as client_module
from shoal.engines.ray import head as head_module
from shoal.engines.ray.config import load_config
from tests.support.cli import Shell
from tests.unit.engines.test_ray_pieces import MISMATCH, answer, facts, row
from tests.unit.test_cli_connect import lay_down

BRIDGE = """
import json, sys
setup = json.loads(sys.stdin.readline())
assert setup["lifetime"] is None, "connect leaves no agents"
print(json.dumps({first}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"id": json.loads(line)["id"], "told": {nodes}}}), flush=True)
"""


class Ray:
    """What it answers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.token = file.with_name("token")
        self.token.write_text("secret")
        self.token.chmod(0o600)
        self.answers()

    def answers(
        self, uid: int = 1000, version: str = "2.60.0", failed: str = "", ends_with: str = ""
    ) -> None:
        first = {"failed": failed} if failed else {"ready": {"ray": version, "python": "3.11.2"}}
        told = answer(row(NodeManagerAddress="127.0.0.1"), **{"a" * 8: facts(uid=uid, ends_with=ends_with)})
        self._file.write_text(BRIDGE.format(first=first, nodes=told))

    @property
    def words(self) -> tuple[str, ...]:
        return ("connect", "ray", "--address", "10.0.0.1:6379", "--token-file", str(self.token))


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    monkeypatch.setattr(client_module, "BRIDGE", tmp_path / "bridge.py")
    monkeypatch.setattr(head_module, "knock", lambda _: None)  # nobody is there but the bridge
    return Ray(tmp_path / "bridge.py")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "home", monkeypatch, capsys)


def test_it_is_written_down_with_the_path_of_the_token_and_not_the_token(shell: Shell, ray: Ray) -> None:
    told = shell(*ray.words, "--project", "vision", "--json")
    assert told.code == 0, told.err
    said = json.loads(told.out)
    assert (said["version"], said["nodes"], said["gpus"]) == ("2.60.0", 1, 2)
    assert said["nodes_on"] == "127.0.0.1:7464"
    config = load_config(shell.home)
    assert (config.address, config.token_file) == ("10.0.0.1:6379", str(ray.token))
    assert (config.project, config.has_shared_trust, config.ray_python) == ("vision", False, sys.executable)
    assert "secret" not in (shell.home / "ray.json").read_text()
    assert json.loads((shell.home / "options.json").read_text())["engine"] == "ray"


def test_nodes_whose_jobs_end_with_a_unit_of_systemds_are_named(shell: Shell, ray: Ray) -> None:
    assert "note:" not in shell(*ray.words).err
    ray.answers(ends_with="ray.service")
    told = shell(*ray.words)
    assert told.code == 0
    assert "note: n0: jobs there are killed when ray.service ends" in told.err


@pytest.mark.parametrize("is_ours", [True, False])
def test_while_ray_is_asked_that_is_said_and_not_among_the_data(
    shell: Shell, ray: Ray, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(head_module.Head, "ensure", lambda _: "10.0.0.1:6379")
    done = shell(*(("connect", "ray", "--as-root") if is_ours else ray.words), "--json")
    assert (done.code, json.loads(done.out)["nodes"]) == (0, 1), done.err
    told = "starting a Ray here and asking it for its nodes" if is_ours else "asking Ray for its nodes"
    assert done.err.startswith(told)
    assert done.err.endswith("\r\x1b[K"), "the line is gone when it is over"


def test_a_shared_directory_is_whole_and_is_there(
    shell: Shell, ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = shell(*ray.words, "--shared", "scratch")
    assert (refused.code, f"there is no directory {tmp_path}/scratch; make or" in refused.err) == (2, True)
    (tmp_path / "scratch").mkdir()
    assert shell(*ray.words, "--shared", "scratch", "--spool", "spool").code == 0
    config = load_config(shell.home)
    assert (config.shared, config.spool) == (f"{tmp_path}/scratch", f"{tmp_path}/spool")


def test_a_ray_without_a_token_is_not_used(shell: Shell, ray: Ray) -> None:
    refused = shell("connect", "ray", "--address", "10.0.0.1:6379")
    assert (refused.code, "no token for the Ray at 10.0.0.1:6379" in refused.err) == (2, True)


def test_a_token_that_others_can_read_is_not_used(shell: Shell, ray: Ray) -> None:
    ray.token.chmod(0o644)
    refused = shell(*ray.words)
    assert (refused.code, "0644" in refused.err, "chmod 600" in refused.err) == (2, True, True)


def test_root_is_refused_unless_it_is_said(shell: Shell, ray: Ray) -> None:
    ray.answers(uid=0)
    refused = shell(*ray.words)
    assert (refused.code, "all jobs would run as root" in refused.err) == (2, True)
    assert not (shell.home / "ray.json").exists()
    assert shell(*ray.words, "--as-root").code == 0


def test_no_ray_is_started_that_would_be_roots(
    shell: Shell, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def start(_: head_module.Head) -> str:
        started.append("a head")
        return "10.0.0.1:6379"

    monkeypatch.setattr(head_module.Head, "ensure", start)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    refused = shell("connect", "ray")
    assert (refused.code, "run `shoal` as a user, or say `--as-root`" in refused.err) == (2, True)
    assert not started
    assert shell("connect", "ray", "--as-root").code == 0
    assert started


def test_a_ray_of_our_own_is_not_said_to_be_on_another_machine(
    shell: Shell, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module.Head, "ensure", lambda _: "10.0.0.1:6379")
    assert shell("connect", "ray", "--as-root").code == 0
    lay_down(shell.home)
    refused = shell("connect", "local")
    told = "may run on the Ray (our own), and a control plane over this machine knows nothing of them"
    assert (refused.code, told in " ".join(refused.err.split())) == (3, True), refused.err


def test_doctor_says_which_ray_and_nothing_of_programs_on_this_machine(shell: Shell, ray: Ray) -> None:
    assert (check_ray().told, "nodes of the" in check_programs().told) == ("not connected", False)
    assert shell(*ray.words, "--project", "vision").code == 0
    told = f"connected to one at 10.0.0.1:6379, by {sys.executable}; jobs of project vision run as"
    assert check_ray().told.startswith(told)
    assert check_programs().told == "jobs run on nodes of the Ray, with the programs of those"


def test_another_version_is_said_with_both(shell: Shell, ray: Ray) -> None:
    ray.answers(failed=MISMATCH)
    refused = shell(*ray.words)
    assert refused.code == 2
    assert all(words in refused.err for words in ("2.60.0 on Python 3.11.7", "2.59.0", "--ray-python"))


def test_a_ray_too_old_for_tokens_is_refused(shell: Shell, ray: Ray) -> None:
    ray.answers(version="2.40.0")
    assert shell(*ray.words).code == 2


def test_who_is_let_in_is_said(shell: Shell, ray: Ray) -> None:
    assert "for jobs of project default: all in one Ray trust each other" in shell(*ray.words).out
    assert "for jobs of all projects" in shell(*ray.words, "--shared-trust").out
    assert load_config(shell.home).has_shared_trust


def test_a_ray_of_our_own_is_refused_where_several_control_planes_lead_in_turn(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SHARED", str(tmp_path / "shared"))
    monkeypatch.setenv("SHOAL_DATABASE_URL", "postgresql://db/shoal")
    refused = shell("connect", "ray")
    assert (refused.code, "is for this machine alone" in refused.err) == (2, True)
    assert "--shared none" in refused.err


def test_certificates_are_written_down_all_of_them_or_none(shell: Shell, ray: Ray, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}
    for path in files.values():
        path.write_text("PEM")
        path.chmod(0o600)
    words = [word for name, path in files.items() for word in (f"--tls-{name}", str(path))]
    refused = shell(*ray.words, *words[:4])
    assert (refused.code, "--tls-ca is not given" in refused.err) == (2, True)
    files["key"].chmod(0o644)
    refused = shell(*ray.words, *words)
    assert (refused.code, "key.pem has mode 0644" in refused.err) == (2, True)
    files["key"].chmod(0o600)
    assert shell(*ray.words, *words).code == 0
    config = load_config(shell.home)
    assert (config.tls_cert, config.tls_key, config.tls_ca) == tuple(map(str, files.values()))


def test_a_ray_of_our_own_has_no_certificates(shell: Shell, tmp_path: Path) -> None:
    refused = shell("connect", "ray", "--tls-cert", str(tmp_path / "cert.pem"))
    assert (refused.code, "on loopback alone" in refused.err) == (2, True)
