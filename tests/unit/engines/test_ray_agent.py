"""The agent without Ray: it is a plain class, and what it starts are processes of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.engines.ray import agent as agent_module
from shoal.engines.ray.agent import Agent
from tests.support.host import is_alive
from tests.support.shares import until

KEY = "att_1.n0.0"
KEEPER = 'cat > "$1/summons"; env > "$1/env.new"; mv "$1/env.new" "$1/env"; echo ready >&2; exec sleep 100'


class Site:
    """A node's disk, and what was started from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.agent = Agent()
        self.burials = root / "burials"

    def task(self, script: str = KEEPER, bury_code: int = 0) -> dict[str, Any]:
        bury = f'echo buried >> "{self.burials}"; exit {bury_code}'
        return {
            "command": ["/bin/sh", "-c", script, "sh", str(self.root)],
            "bury": ["/bin/sh", "-c", bury],
            "env": {"PYTHONPATH": "/src"},
            "summons": '{"ticket": "t"}',
        }

    def start(self, **changes: Any) -> dict[str, Any]:
        return self.agent.start(str(self.root), KEY, self.task(**changes))

    def look(self) -> dict[str, Any]:
        return self.agent.look(str(self.root), [KEY]).get(KEY, {"state": "none"})

    def num_burials(self) -> int:
        return len(self.burials.read_text().split()) if self.burials.exists() else 0

    @property
    def record_file(self) -> Path:
        return self.root / "ray" / KEY / "keeper.json"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    tmp_path.chmod(0o700)
    site = Site(tmp_path)
    yield site
    for file in site.root.rglob("keeper.json"):
        pid = json.loads(file.read_text())["pid"]
        if is_alive(pid) and os.getsid(pid) == pid:
            os.kill(pid, signal.SIGKILL)


def test_a_keeper_gets_its_summons_and_is_nobodys_child(site: Site) -> None:
    told = site.start()
    until((site.root / "env").exists)
    summons = json.loads((site.root / "summons").read_text())
    assert summons == {"ticket": "t", "process": site.look()["process"]}
    assert told["is_new"]
    assert os.getsid(told["pid"]) == told["pid"]
    parent = Path(f"/proc/{told['pid']}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) != os.getpid()
    assert site.look()["state"] == "running"


def test_nothing_that_ray_set_reaches_a_keeper(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RAY_JOB_ID",
        "RAY_AUTH_TOKEN_PATH",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "LD_PRELOAD_X",
    ):
        monkeypatch.setenv(name, "1")
    site.start()
    until((site.root / "env").exists)
    names = {line.partition("=")[0] for line in (site.root / "env").read_text().splitlines()}
    assert "PATH" in names
    assert names <= {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LC_ALL",
        "TZ",
        "PYTHONPATH",
        "PWD",
        "_",
        "SHLVL",
        "OLDPWD",
    }


def test_starting_twice_is_one_keeper_and_any_agent_knows_it(site: Site) -> None:
    first = site.start()
    site.agent = Agent()
    assert site.start() == {"pid": first["pid"], "is_new": False}
    assert (site.look()["pid"], site.look()["state"]) == (first["pid"], "running")


def test_every_keeper_has_a_name_of_its_own_also_one_that_is_started_again(site: Site) -> None:
    first = site.start()
    name = site.look()["process"]
    assert re.fullmatch(r"[0-9a-f]{32}", name)
    site.start()
    assert site.look()["process"] == name
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: site.look()["state"] == "over")
    assert site.look()["process"] == name
    site.start()
    assert site.look()["process"] != name


def test_a_keeper_that_is_gone_is_over_only_when_nothing_of_its_share_runs(site: Site) -> None:
    told = site.start(bury_code=1)
    until(lambda: "ready" in site.look()["said"])
    os.kill(told["pid"], signal.SIGKILL)
    until(lambda: site.look()["state"] == "gone")
    until(lambda: site.look()["state"] == "gone" and site.num_burials() >= 2)
    record = json.loads(site.record_file.read_text())
    record["bury"] = ["/bin/true"]
    site.record_file.write_text(json.dumps(record))
    until(lambda: site.look()["state"] == "over")
    assert "ready" in site.look()["said"]


def test_what_a_dead_keeper_left_and_does_not_die_is_told_until_it_is_gone(site: Site) -> None:
    told = site.start(bury_code=agent_module.LEFT)
    until(lambda: "ready" in site.look()["said"])
    os.kill(told["pid"], signal.SIGKILL)
    until(lambda: site.look()["state"] == "left")
    site.agent = Agent()
    assert site.look()["state"] == "left"
    change(site, bury=["/bin/false"])  # by now nobody can say
    until(lambda: site.look()["state"] == "gone")
    change(site, bury=["/bin/true"])
    until(lambda: site.look()["state"] == "over")


def test_after_a_restart_of_the_machine_everything_is_over(site: Site) -> None:
    site.start()
    pid = json.loads(site.record_file.read_text())["pid"]
    record = json.loads(site.record_file.read_text())
    site.record_file.write_text(json.dumps({**record, "boot": "another"}))
    assert site.look()["state"] == "over"
    assert is_alive(pid)  # the number is another's by then: nobody is killed for it
    site.agent.end(str(site.root), [KEY])
    assert is_alive(pid)
    site.record_file.write_text(json.dumps(record))


def test_what_was_started_in_another_container_is_not_judged(site: Site) -> None:
    site.start()
    record = json.loads(site.record_file.read_text())
    site.record_file.write_text(json.dumps({**record, "space": "pid:[1]"}))
    assert site.look()["state"] == "hidden"
    assert not site.burials.exists()
    site.record_file.write_text(json.dumps(record))


def test_the_number_of_a_dead_keeper_may_be_anybodys(site: Site) -> None:
    site.start()
    record = json.loads(site.record_file.read_text())
    site.record_file.write_text(json.dumps({**record, "pid": os.getpid()}))
    site.agent.end(str(site.root), [KEY])  # would end this very test
    assert site.look()["state"] in ("gone", "over")
    site.record_file.write_text(json.dumps(record))


def test_an_end_is_asked_for_with_a_signal(site: Site) -> None:
    told = site.start()
    site.agent.end(str(site.root), [KEY, "att_2.n0.0"])
    until(lambda: not is_alive(told["pid"]))


def test_a_program_that_is_not_there_is_said_at_once(site: Site) -> None:
    task = {**site.task(), "command": ["/nowhere/python"]}
    with pytest.raises(OSError, match="No such file or directory: '/nowhere/python'"):
        site.agent.start(str(site.root), KEY, task)


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".hidden"])
def test_a_key_is_a_name_and_no_path(site: Site, key: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        site.agent.start(str(site.root), key, site.task())


def test_a_place_that_others_can_change_is_refused(site: Site) -> None:
    site.root.chmod(0o777)
    for ask in (site.start, site.look, lambda: site.agent.end(str(site.root), [KEY])):
        with pytest.raises(PermissionError):
            ask()
    site.root.chmod(0o700)


def test_where_everybody_may_add_names_it_has_a_place_of_its_own(site: Site) -> None:
    site.root.chmod(0o1777)
    told = site.start()
    assert site.look()["pid"] == told["pid"]
    own = site.root / f"shoal-{os.getuid()}"
    assert (own.stat().st_mode & 0o777, (own / "ray" / KEY / "keeper.json").exists()) == (0o700, True)


def test_a_place_that_somebody_has_taken_is_not_used_and_another_is_found_again(site: Site) -> None:
    site.root.chmod(0o1777)
    taken = site.root / f"shoal-{os.getuid()}"
    taken.symlink_to("/nowhere")
    with pytest.raises(PermissionError):
        site.look()
    told = site.start()
    assert site.look()["pid"] == told["pid"]
    assert Agent().start(str(site.root), KEY, site.task()) == {"pid": told["pid"], "is_new": False}
    assert len(list(site.root.glob(f"{taken.name}-*"))) == 1


def test_records_are_found_wherever_this_user_had_its_place(site: Site) -> None:
    site.root.chmod(0o1777)
    usual = site.root / f"shoal-{os.getuid()}"
    usual.mkdir()
    usual.chmod(0o777)
    told = site.start()
    usual.chmod(0o700)  # the one for new records by now
    assert site.look()["pid"] == told["pid"]
    assert not site.start()["is_new"]


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_nobody_else_can_add_records_whatever_the_umask(site: Site, umask: int) -> None:
    site.root.chmod(0o755)
    before = os.umask(umask)
    try:
        site.start()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (site.root / "ray", site.root / "ray" / KEY)] == [
        0o700
    ] * 2
    (site.root / "ray").chmod(0o775)  # as older versions left it
    assert site.look()["state"] == "running"
    assert (site.root / "ray").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["open", "link", "another's"])
def test_a_record_that_somebody_else_could_have_laid_is_not_believed(site: Site, trap: str) -> None:
    told = site.start()
    kill(site, told["pid"])
    folder = site.record_file.parent
    aged(site, "errors")
    if trap == "open":
        folder.chmod(0o777)
    elif trap == "link":
        folder.rename(site.root / "there")
        folder.symlink_to(site.root / "there")
    elif os.getuid() != 0:
        pytest.skip("only root gives files away: `sudo make test`")
    else:
        os.chown(folder, 1, 1)
    assert (site.look()["state"], KEY in site.look()["said"]) == ("hidden", True)
    assert site.look()["pid"] is None
    with pytest.raises(PermissionError, match=KEY):
        site.start()
    Agent().look(str(site.root), [])  # sweeps
    time.sleep(0.2)
    assert not site.burials.exists()


def test_a_record_that_is_not_believed_says_nothing_about_the_others(site: Site) -> None:
    bad, good = "att_0.n0.0", site.start()["pid"]
    hidden = site.agent.start(str(site.root), bad, site.task())["pid"]
    (site.root / "ray" / bad).chmod(0o777)
    seen = site.agent.look(str(site.root), [bad, KEY])
    assert {key: one["state"] for key, one in seen.items()} == {bad: "hidden", KEY: "running"}
    site.agent.end(str(site.root), [bad, KEY])
    until(lambda: not is_alive(good))
    assert is_alive(hidden), "whoever that is"


def test_no_keeper_is_started_while_what_is_left_of_another_is_ended(site: Site) -> None:
    told = site.start()
    record = json.loads(site.record_file.read_text())
    os.kill(told["pid"], signal.SIGKILL)
    until(lambda: not is_alive(told["pid"]))
    go = site.root / "go"
    waits = f'while [ ! -e "{go}" ]; do sleep 0.01; done'
    site.record_file.write_text(json.dumps({**record, "bury": ["/bin/sh", "-c", waits]}))
    assert site.look()["state"] == "gone"
    with pytest.raises(OSError, match="ask again"):
        site.start()
    go.touch()
    until(lambda: site.look()["state"] == "over")
    assert site.start()["is_new"]


def test_the_burial_of_one_keeper_says_nothing_about_the_next(site: Site) -> None:
    told = site.start(bury_code=0)
    os.kill(told["pid"], signal.SIGKILL)
    until(lambda: site.look()["state"] == "over")
    over = site.record_file.with_name("over")
    before = over.read_text()
    again = site.start(bury_code=1)
    over.write_text(before)  # as if it had come late
    os.kill(again["pid"], signal.SIGKILL)
    until(lambda: not is_alive(again["pid"]))
    until(lambda: site.look()["state"] == "gone" and site.num_burials() >= 3)


def aged(site: Site, name: str) -> None:
    """As if nobody had written to it for two days."""
    before = time.time() - 2 * agent_module.KEPT_S
    os.utime(site.record_file.with_name(name), (before, before))


def change(site: Site, **changes: Any) -> None:
    """Of the record, at once: somebody may be reading it."""
    draft = site.record_file.with_name("draft")
    draft.write_text(json.dumps({**json.loads(site.record_file.read_text()), **changes}))
    draft.rename(site.record_file)


def kill(site: Site, pid: int) -> None:
    """And let a new agent come in place of the one that knew it."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    site.agent = Agent()


def test_a_keeper_that_died_after_a_long_silence_is_judged_before_its_record_goes(site: Site) -> None:
    told = site.start(bury_code=1)
    until(lambda: "ready" in site.look()["said"])
    kill(site, told["pid"])
    aged(site, "errors")
    assert site.look()["state"] == "gone"
    until(lambda: site.num_burials() >= 1)
    change(site, bury=["/bin/true"])
    until(lambda: site.look()["state"] == "over")
    site.agent = Agent()
    assert site.look()["state"] == "over"  # since a moment
    aged(site, "over")
    site.agent = Agent()
    assert site.look()["state"] == "none"
    assert not site.record_file.parent.exists()


def test_what_nobody_asks_about_is_buried_and_then_forgotten(site: Site) -> None:
    told = site.start()
    until(lambda: "ready" in site.look()["said"])
    kill(site, told["pid"])
    aged(site, "errors")
    site.agent.look(str(site.root), [])
    until(lambda: site.record_file.with_name("over").exists())
    aged(site, "over")
    Agent().look(str(site.root), [])
    assert not site.record_file.parent.exists()


def test_what_was_there_before_a_restart_of_the_machine_is_told_for_a_day(site: Site) -> None:
    told = site.start()
    until(lambda: "ready" in site.look()["said"])
    kill(site, told["pid"])
    change(site, boot="another")
    aged(site, "errors")
    assert site.look()["said"] == "the machine was restarted since"
    aged(site, "over")
    site.agent = Agent()
    assert site.look()["state"] == "none"


def test_facts_are_those_of_this_machine(site: Site) -> None:
    facts = site.agent.facts(str(site.root))
    assert facts["uid"] == os.getuid()
    assert facts["memory_bytes"] > 1 << 20
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert sys.executable  # the launcher runs with it


@pytest.mark.parametrize(
    ("machine_id", "cards", "machine"),
    [
        ("5f2c\n", {"eth0": "02:42", "veth1": None}, "5f2c 02:42"),
        ("5f2c\n", {"eth1": "b", "eth0": "a"}, "5f2c a b"),
        ("5f2c\n", {"veth1": None}, ""),  # a container: its image may run anywhere
        ("", {"eth0": "02:42"}, ""),
        (None, {"eth0": "02:42"}, ""),
    ],
)
def test_a_machine_is_told_from_others_by_its_id_and_its_cards(
    tmp_path: Path, machine_id: str | None, cards: dict[str, str | None], machine: str
) -> None:
    (tmp_path / "etc").mkdir()
    if machine_id is not None:
        (tmp_path / "etc" / "machine-id").write_text(machine_id)
    for name, address in cards.items():
        card = tmp_path / "sys" / "class" / "net" / name
        card.mkdir(parents=True)
        (card / "address").write_text(address or "c")
        if address is not None:
            (card / "device").mkdir()
    assert agent_module._machine(str(tmp_path)) == machine


def test_a_launch_that_was_given_up_is_waited_for_and_not_repeated(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been late, and be a keeper yet: two of them would have one record."""
    late = agent_module.LAUNCH.replace("os.setsid()", "os.setsid(); import time; time.sleep(2)")
    monkeypatch.setattr(agent_module, "LAUNCH", late)
    monkeypatch.setattr(agent_module, "LAUNCH_S", 0.5)
    with pytest.raises(OSError, match="not begun within"):
        site.start()
    site.agent = Agent()
    with pytest.raises(OSError, match="being started already"):
        site.start()
    until(site.record_file.exists)
    until(lambda: site.look()["state"] == "running")
    monkeypatch.setattr(agent_module, "LAUNCH_S", 30.0)
    until((site.root / "env").exists)
    assert not site.start()["is_new"]
