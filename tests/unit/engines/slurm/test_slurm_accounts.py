"""Under whose Unix account a job runs on Slurm: who is refused, and what others can put in the way."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engines.slurm.client import CommandTransport
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.engines.slurm.shared_files import UnixAccount, check_account, parse_account
from shoal.errors import EngineRefused, EngineUnreachable

ANA = UnixAccount(name="ana", uid=1000, gid=1000, home="/home/ana")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away: `sudo make test`")


@pytest.mark.parametrize(
    ("account", "problem"),
    [
        (None, "none is called `ana`: submit as a user who has one"),
        (UnixAccount(name="ana", uid=0, gid=0), "is root's (uid 0)"),
        (UnixAccount(name="ana", uid=999, gid=1000), "has uid 999"),
        (UnixAccount(name="ana", uid=64030, gid=1000), "`--system-accounts ana`"),
    ],
)
def test_an_owner_without_an_account_of_a_persons_is_refused_by_name(
    account: UnixAccount | None, problem: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        check_account("ana", account, ())
    assert problem in refused.value.message
    assert "`ana`" in refused.value.message


def test_a_system_account_is_taken_where_it_was_named_and_root_never_is() -> None:
    bot = UnixAccount(name="bot", uid=300, gid=300)
    assert check_account("bot", bot, ("bot",)) == bot
    assert check_account("ana", ANA, ()) == ANA
    with pytest.raises(EngineRefused, match="root's"):
        check_account("root", UnixAccount(name="root", uid=0, gid=0), ("root",))


def test_a_name_that_is_a_number_is_nobodys_uid() -> None:
    assert parse_account("ana", "ana:x:1000:1001:Ana:/home/ana:/bin/sh\n") == UnixAccount(
        name="ana", uid=1000, gid=1001, home="/home/ana"
    )
    assert parse_account("0", "root:x:0:0:root:/root:/bin/bash\n") is None
    assert CommandTransport().account("0") is None
    assert CommandTransport().account("nobody-is-called-so") is None
    nobody = CommandTransport().account("nobody")
    assert nobody is not None
    assert nobody.uid == pwd.getpwnam("nobody").pw_uid


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_an_account_that_was_there_is_not_gone_because_nobody_can_look_it_up(folder: Path) -> None:
    """`getent` says the same of a name that nobody has and of a directory that is away."""
    transport = CommandTransport()
    program(folder, "getent", "exit 2")
    assert transport.account("ana") is None
    program(folder, "getent", "echo ana:x:1000:1000:Ana:/home/ana:/bin/sh")
    assert transport.account("ana") == ANA
    assert transport.account("eve") is None
    program(folder, "getent", "exit 2")
    with pytest.raises(EngineUnreachable, match="knows no `ana` now, and did before"):
        transport.account("ana")
    assert transport.account("eve") is None


def test_a_name_with_lines_in_it_makes_no_job_of_somebody_else(folder: Path) -> None:
    forged = "2|CANCELLED|ana|N/A|shoal-att_1.0|None"
    program(
        folder,
        "squeue",
        f"""mark=${{SQUEUE_FORMAT%%\\%*}}
case $* in *$mark*) exit 9 ;; esac
printf '%s1|RUNNING|eve|N/A|x\\n%s\\n|None\\n' "$mark" '{forged}'
printf '%s3|RUNNING|ana|N/A|y|None\\n' "$mark\"""",
    )
    jobs = CommandTransport(as_owners=True).jobs()
    assert [(job.job_id, job.user) for job in jobs] == [("1", "eve"), ("3", "ana")]


def test_what_runs_as_another_user_has_nothing_of_ours_in_its_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATABASE", "postgresql://shoal:secret@db/shoal")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    program(folder, "setpriv", f'echo "$@" > {folder}/words; env > {folder}/env; pwd >> {folder}/env; echo 7')
    requested = SlurmJobRequest(
        name="x", comment="", nodes=("n0",), cpus=1, output="/dev/null", script="script"
    )
    assert CommandTransport(as_owners=True).submit(requested, ANA) == "7"
    message = (folder / "words").read_text()
    assert message.startswith("--reuid=1000 --regid=1000 --init-groups sbatch --parsable ")
    text = (folder / "env").read_text()
    assert "SLURM_CONF=/etc/slurm/slurm.conf" in text
    assert "secret" not in text
    assert {"HOME=/home/ana", "USER=ana", "LOGNAME=ana"} <= set(text.splitlines())
    assert text.endswith("\n/\n")


def test_over_ssh_an_owner_gets_no_more_of_roots_session_than_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's environment is the login node's: `ssh` on paper passes ours on as that."""
    passed = {"SSH_AUTH_SOCK": "/tmp/agent", "SUDO_COMMAND": "x", "KRB5CCNAME": "FILE:/tmp/krb5cc_0"}
    passed |= {"SLURM_CONF": "/etc/slurm/a conf", "LANG": "C.UTF-8", "HOME": "/root"}
    for name, value in passed.items():
        monkeypatch.setenv(name, value)
    for name in ("LC_ALL", "TZ"):
        monkeypatch.delenv(name, raising=False)
    program(folder, "ssh", 'for last; do :; done; exec sh -c "$last"')
    program(folder, "setpriv", f'echo "$@" > {folder}/words; env > {folder}/env; pwd >> {folder}/env; echo 7')
    requested = SlurmJobRequest(
        name="x", comment="", nodes=("n0",), cpus=1, output="/dev/null", script="script"
    )
    assert CommandTransport("root@login", as_owners=True).submit(requested, ANA) == "7"
    assert (folder / "words").read_text().startswith("--reuid=1000 --regid=1000 --init-groups sbatch ")
    lines = (folder / "env").read_text().splitlines()
    assert lines[-1] == "/"
    assert {"HOME=/home/ana", "USER=ana", "LOGNAME=ana", "SLURM_CONF=/etc/slurm/a conf"} <= set(lines)
    names = {line.partition("=")[0] for line in lines[:-1]} - {"PWD", "OLDPWD", "SHLVL", "_"}  # of that `sh`
    assert names == {"PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF"}


@pytest.fixture
def shared() -> Iterator[Path]:
    """Reachable for everybody, which a test's own folder is not."""
    path = Path(tempfile.mkdtemp(prefix="shoal-accounts-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def nobody() -> UnixAccount:
    entry = pwd.getpwnam("nobody")
    return UnixAccount(name="nobody", uid=entry.pw_uid, gid=entry.pw_gid)


def give(shared: Path) -> None:
    CommandTransport().create_owner_folders(str(shared), ["slurm/nobody", "checkpoints/job_1"], nobody())


def mode(path: Path) -> tuple[int, str]:
    facts = path.lstat()
    return facts.st_uid, f"{facts.st_mode & 0o7777:o}"


@as_root
def test_folders_are_the_accounts_alone_and_stay_as_their_owner_has_them(shared: Path) -> None:
    give(shared)
    uid = nobody().uid
    assert mode(shared / "slurm") == mode(shared / "checkpoints") == (0, "711")
    assert mode(shared / "slurm" / "nobody") == mode(shared / "checkpoints" / "job_1") == (uid, "700")
    (shared / "checkpoints" / "job_1").chmod(0o755)  # its owner lets others read it
    give(shared)
    assert mode(shared / "checkpoints" / "job_1") == (uid, "755")


@as_root
def test_a_link_in_the_place_of_a_folder_is_not_followed(shared: Path) -> None:
    (shared / "precious").mkdir(mode=0o700)
    (shared / "checkpoints").mkdir()
    (shared / "checkpoints" / "job_1").symlink_to(shared / "precious")
    with pytest.raises(EngineRefused, match="checkpoints/job_1 is a link"):
        give(shared)
    assert mode(shared / "precious") == (0, "700")


@as_root
def test_folders_of_somebody_else_are_not_given_away(shared: Path) -> None:
    (shared / "checkpoints" / "job_1").mkdir(parents=True)
    os.chown(shared / "checkpoints" / "job_1", 1, 1)
    with pytest.raises(EngineRefused, match="belongs to user 1"):
        give(shared)


@as_root
@pytest.mark.parametrize("top", ["slurm", "checkpoints"])
def test_folders_that_another_user_could_swap_are_not_given(shared: Path, top: str) -> None:
    """Left by the user under whom everything ran before."""
    (shared / top).mkdir(mode=0o711)
    os.chown(shared / top, 1, 1)
    with pytest.raises(EngineRefused, match=f"{top} must be root's: chown root {shared}/{top}"):
        give(shared)
    assert not list((shared / top).iterdir())
    os.chown(shared / top, 0, 0)
    give(shared)


@as_root
@pytest.mark.parametrize("case", ["owner", "writable", "above", "closed", "missing"])
def test_a_shared_directory_that_others_could_replace_or_not_reach_is_refused(
    shared: Path, case: str
) -> None:
    place = shared / "site" / "shoal"
    place.mkdir(parents=True)
    if case == "owner":
        os.chown(place, 1, 1)
    elif case == "writable":
        place.chmod(0o1777)
    elif case == "above":
        place.parent.chmod(0o775)
    elif case == "closed":
        place.parent.chmod(0o700)
    else:
        place.rmdir()
    text = {
        "owner": "must be root's",
        "writable": "must be root's",
        "above": f"they may write to {place.parent}",
        "closed": "cannot get to",
        "missing": "there is no directory",
    }
    # A file system that is not mounted now may be in a moment.
    with pytest.raises(EngineUnreachable if case == "missing" else EngineRefused, match=text[case]):
        give(place)
