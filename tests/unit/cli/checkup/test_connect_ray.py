"""`shoal connect ray` over a fake bridge: what it refuses and what it saves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shoal.cli.checkup.machine import check_programs
from shoal.cli.checkup.server import check_ray
from shoal.engines.ray import client as client_module
from shoal.engines.ray import head as head_module
from shoal.engines.ray.config import load_config
from tests.support.fakes.api_server import Shell
from tests.unit.cli.connect.test_connect import lay_down
from tests.unit.engines.ray.test_ray_parse_and_render import MISMATCH, answer, facts, row

BRIDGE = """
import json, sys
setup = json.loads(sys.stdin.readline())
assert setup["lifetime"] is None, "connect leaves no agents"
print(json.dumps({first}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"id": json.loads(line)["id"], "told": {nodes}}}), flush=True)
"""


class Ray:
    """Set the bridge's reply."""

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
        survey = answer(row(NodeManagerAddress="127.0.0.1"), **{"a" * 8: facts(uid=uid, ends_with=ends_with)})
        self._file.write_text(BRIDGE.format(first=first, nodes=survey))

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("connect", "ray", "--address", "10.0.0.1:6379", "--token-file", str(self.token))


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    monkeypatch.setattr(client_module, "BRIDGE", tmp_path / "bridge.py")
    monkeypatch.setattr(head_module, "probe", lambda _: None)  # only the bridge exists
    return Ray(tmp_path / "bridge.py")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "home", monkeypatch, capsys)


def test_config_has_the_path_of_the_token_and_not_the_token(shell: Shell, ray: Ray) -> None:
    result = shell(*ray.arguments, "--project", "vision", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["version"], document["nodes"], document["gpus"]) == ("2.60.0", 1, 2)
    assert document["nodes_on"] == "127.0.0.1:7464"
    config = load_config(shell.home)
    assert (config.address, config.token_file) == ("10.0.0.1:6379", str(ray.token))
    assert (config.project, config.has_shared_trust, config.ray_python) == ("vision", False, sys.executable)
    assert "secret" not in (shell.home / "ray.json").read_text()
    assert json.loads((shell.home / "options.json").read_text())["engine"] == "ray"


def test_nodes_whose_jobs_end_with_a_systemd_unit_are_named(shell: Shell, ray: Ray) -> None:
    assert "note:" not in shell(*ray.arguments).err
    ray.answers(ends_with="ray.service")
    result = shell(*ray.arguments)
    assert result.code == 0
    assert "note: n0: jobs there are killed when ray.service ends" in result.err


@pytest.mark.parametrize("is_ours", [True, False])
def test_progress_of_asking_ray_goes_to_standard_error(
    shell: Shell, ray: Ray, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(head_module.RayHead, "ensure", lambda _: "10.0.0.1:6379")
    done = shell(*(("connect", "ray", "--as-root") if is_ours else ray.arguments), "--json")
    assert (done.code, json.loads(done.out)["nodes"]) == (0, 1), done.err
    expected = "starting a Ray here and asking it for its nodes" if is_ours else "asking Ray for its nodes"
    assert done.err.startswith(expected)
    assert done.err.endswith("\r\x1b[K"), "the line is gone when it is over"


def test_shared_directory_is_absolute_and_must_exist(
    shell: Shell, ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = shell(*ray.arguments, "--shared", "scratch")
    assert (refused.code, f"there is no directory {tmp_path}/scratch; make or" in refused.err) == (2, True)
    (tmp_path / "scratch").mkdir()
    assert shell(*ray.arguments, "--shared", "scratch", "--spool", "spool").code == 0
    config = load_config(shell.home)
    assert (config.shared, config.spool) == (f"{tmp_path}/scratch", f"{tmp_path}/spool")


def test_a_ray_without_a_token_is_not_used(shell: Shell, ray: Ray) -> None:
    refused = shell("connect", "ray", "--address", "10.0.0.1:6379")
    assert (refused.code, "no token for the Ray at 10.0.0.1:6379" in refused.err) == (2, True)


def test_a_token_that_others_can_read_is_not_used(shell: Shell, ray: Ray) -> None:
    ray.token.chmod(0o644)
    refused = shell(*ray.arguments)
    assert (refused.code, "0644" in refused.err, "chmod 600" in refused.err) == (2, True, True)


def test_root_is_refused_without_as_root(shell: Shell, ray: Ray) -> None:
    ray.answers(uid=0)
    refused = shell(*ray.arguments)
    assert (refused.code, "all jobs would run as root" in refused.err) == (2, True)
    assert not (shell.home / "ray.json").exists()
    assert shell(*ray.arguments, "--as-root").code == 0


def test_no_ray_is_started_as_root(shell: Shell, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(_: head_module.RayHead) -> str:
        started.append("a head")
        return "10.0.0.1:6379"

    monkeypatch.setattr(head_module.RayHead, "ensure", start)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    refused = shell("connect", "ray")
    assert (refused.code, "run `shoal` as a user, or add `--as-root`" in refused.err) == (2, True)
    assert not started
    assert shell("connect", "ray", "--as-root").code == 0
    assert started


def test_started_ray_is_not_reported_as_another_machine(
    shell: Shell, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module.RayHead, "ensure", lambda _: "10.0.0.1:6379")
    assert shell("connect", "ray", "--as-root").code == 0
    lay_down(shell.home)
    refused = shell("connect", "local")
    expected = "may run on the Ray (our own), and a control plane over this machine does not know them"
    assert (refused.code, expected in " ".join(refused.err.split())) == (3, True), refused.err


def test_doctor_names_the_ray_and_skips_programs_of_this_machine(shell: Shell, ray: Ray) -> None:
    assert (check_ray().message, "nodes of the" in check_programs().message) == ("not connected", False)
    assert shell(*ray.arguments, "--project", "vision").code == 0
    expected = f"connected to Ray at 10.0.0.1:6379, by {sys.executable}; jobs of project vision run as"
    assert check_ray().message.startswith(expected)
    assert check_programs().message == "jobs run on nodes of Ray, with the programs there"


def test_version_mismatch_names_both_versions(shell: Shell, ray: Ray) -> None:
    ray.answers(failed=MISMATCH)
    refused = shell(*ray.arguments)
    assert refused.code == 2
    assert all(fragment in refused.err for fragment in ("2.60.0 on Python 3.11.7", "2.59.0", "--ray-python"))


def test_a_ray_too_old_for_tokens_is_refused(shell: Shell, ray: Ray) -> None:
    ray.answers(version="2.40.0")
    assert shell(*ray.arguments).code == 2


def test_connect_prints_whose_jobs_are_let_in(shell: Shell, ray: Ray) -> None:
    assert "for jobs of project default: jobs in one Ray can control each other" in shell(*ray.arguments).out
    assert "for jobs of all projects" in shell(*ray.arguments, "--shared-trust").out
    assert load_config(shell.home).has_shared_trust


def test_started_ray_is_refused_for_several_control_planes(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SHARED", str(tmp_path / "shared"))
    monkeypatch.setenv("SHOAL_DATABASE_URL", "postgresql://db/shoal")
    refused = shell("connect", "ray")
    assert (refused.code, "serves this machine only" in refused.err) == (2, True)
    assert "--shared none" in refused.err


def test_tls_files_are_saved_all_or_none(shell: Shell, ray: Ray, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}
    for path in files.values():
        path.write_text("PEM")
        path.chmod(0o600)
    arguments = [word for name, path in files.items() for word in (f"--tls-{name}", str(path))]
    refused = shell(*ray.arguments, *arguments[:4])
    assert (refused.code, "--tls-ca is not given" in refused.err) == (2, True)
    files["key"].chmod(0o644)
    refused = shell(*ray.arguments, *arguments)
    assert (refused.code, "key.pem has mode 0644" in refused.err) == (2, True)
    files["key"].chmod(0o600)
    assert shell(*ray.arguments, *arguments).code == 0
    config = load_config(shell.home)
    assert (config.tls_cert, config.tls_key, config.tls_ca) == tuple(map(str, files.values()))


def test_started_ray_has_no_certificates(shell: Shell, tmp_path: Path) -> None:
    refused = shell("connect", "ray", "--tls-cert", str(tmp_path / "cert.pem"))
    assert (refused.code, "on loopback only" in refused.err) == (2, True)
