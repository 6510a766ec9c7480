"""`shoal connect slurm` over commands on paper: who it connects as, and where it writes that down."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.engines.slurm.config import load_config
from tests.support.cli import Shell
from tests.unit.engines.test_slurm_pieces import NODE

COMMANDS = {
    "sinfo": "echo slurm 22.05.8",
    "scontrol": f"cat <<'END'\n{NODE.format(state='IDLE', reason='none')}\nEND",
    "ssh": 'echo "$@" >>"$SAID"\nfor last; do :; done\nexec sh -c "$last"',
    "id": 'echo "$FAKE_UID"',
}
CONNECT = ("connect", "slurm", "--ssh", "ana@login", "--nodes-on", "127.0.0.1:7464")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setenv("FAKE_UID", "1000")
    return Shell(tmp_path / "home", monkeypatch, capsys)


def test_root_is_refused_unless_it_is_said(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_UID", "0")
    refused = shell(*CONNECT)
    assert (refused.code, "all jobs would run as root" in refused.err) == (2, True)
    assert not (shell.home / "slurm.json").exists()
    assert shell(*CONNECT, "--as-root").code == 0
    assert shell(*CONNECT, "--json").code == 2


def test_only_root_connects_for_the_owners_of_jobs(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = shell(*CONNECT, "--as-owners")
    assert (refused.code, "only root may submit for others, and ana@login has uid 1000" in refused.err) == (
        2,
        True,
    )
    assert not (shell.home / "slurm.json").exists()
    monkeypatch.setenv("FAKE_UID", "0")
    assert "not both" in shell(*CONNECT, "--as-owners", "--as-root").err
    done = shell(*CONNECT, "--as-owners", "--system-accounts", "bot,ci")
    assert done.code == 0, done.err
    assert "jobs run under the Unix accounts of their owners" in done.out
    config = load_config(shell.home)
    assert (config.as_owners, config.system_accounts) == (True, ("bot", "ci"))


def test_words_for_ssh_are_used_and_kept(shell: Shell, tmp_path: Path) -> None:
    assert shell(*CONNECT, "--ssh-options=-p 2222 -i '/my key'").code == 0
    said = (tmp_path / "said").read_text()
    assert all("-p 2222 -i /my key ana@login" in line for line in said.splitlines())
    assert load_config(shell.home).ssh_options == ("-p", "2222", "-i", "/my key")


def test_it_is_written_where_a_control_plane_of_several_reads_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOAL_SHARED", str(tmp_path / "shared"))
    monkeypatch.setenv("SHOAL_DATABASE_URL", "postgresql://ana@db/shoal")
    told = shell(*CONNECT, "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["config"] == str(tmp_path / "shared" / "slurm.json")
    assert load_config(tmp_path / "shared").ssh == "ana@login"
