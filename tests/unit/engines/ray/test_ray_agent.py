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
from tests.support.host.processes import is_alive
from tests.support.runtime.tasks import until

KEY = "att_1.n0.0"
KEEPER = (
    'cat > "$1/launch_request"; env > "$1/env.new"; mv "$1/env.new" "$1/env"; echo ready >&2; exec sleep 100'
)


class Site:
    """A node's disk, and what was started from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.agent = Agent()
        self.reapings = root / "reapings"

    def task(self, script: str = KEEPER, reap_code: int = 0) -> dict[str, Any]:
        reap = f'echo reaped >> "{self.reapings}"; exit {reap_code}'
        return {
            "command": ["/bin/sh", "-c", script, "sh", str(self.root)],
            "reap": ["/bin/sh", "-c", reap],
            "env": {"PYTHONPATH": "/src"},
            "launch_request": '{"token": "t"}',
        }

    def start(self, **changes: Any) -> dict[str, Any]:
        return self.agent.start(str(self.root), KEY, self.task(**changes))

    def look(self) -> dict[str, Any]:
        return self.agent.look(str(self.root), [KEY]).get(KEY, {"state": "none"})

    def num_reapings(self) -> int:
        return len(self.reapings.read_text().split()) if self.reapings.exists() else 0

    @property
    def record_file(self) -> Path:
        return self.root / "ray" / KEY / "node_agent.json"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    tmp_path.chmod(0o700)
    site = Site(tmp_path)
    yield site
    for file in site.root.rglob("node_agent.json"):
        pid = json.loads(file.read_text())["pid"]
        if is_alive(pid) and os.getsid(pid) == pid:
            os.kill(pid, signal.SIGKILL)


def test_node_agent_gets_its_launch_request_and_has_no_parent_of_ray(site: Site) -> None:
    result = site.start()
    until((site.root / "env").exists)
    launch_request = json.loads((site.root / "launch_request").read_text())
    assert launch_request == {"token": "t", "process": site.look()["process"]}
    assert result["is_new"]
    assert os.getsid(result["pid"]) == result["pid"]
    parent = Path(f"/proc/{result['pid']}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) != os.getpid()
    assert site.look()["state"] == "running"


def test_no_variable_of_ray_reaches_a_node_agent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_second_start_finds_the_same_node_agent_from_any_ray_agent(site: Site) -> None:
    first = site.start()
    site.agent = Agent()
    assert site.start() == {"pid": first["pid"], "is_new": False}
    assert (site.look()["pid"], site.look()["state"]) == (first["pid"], "running")


def test_every_start_of_a_node_agent_has_a_new_process_name(site: Site) -> None:
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


def test_dead_node_agent_is_over_only_when_nothing_of_its_task_runs(site: Site) -> None:
    result = site.start(reap_code=1)
    until(lambda: "ready" in site.look()["said"])
    os.kill(result["pid"], signal.SIGKILL)
    until(lambda: site.look()["state"] == "gone")
    until(lambda: site.look()["state"] == "gone" and site.num_reapings() >= 2)
    record = json.loads(site.record_file.read_text())
    record["reap"] = ["/bin/true"]
    site.record_file.write_text(json.dumps(record))
    until(lambda: site.look()["state"] == "over")
    assert "ready" in site.look()["said"]


def test_undying_processes_of_a_dead_node_agent_are_reported_until_they_end(site: Site) -> None:
    result = site.start(reap_code=agent_module.LEFT)
    until(lambda: "ready" in site.look()["said"])
    os.kill(result["pid"], signal.SIGKILL)
    until(lambda: site.look()["state"] == "left")
    site.agent = Agent()
    assert site.look()["state"] == "left"
    change(site, reap=["/bin/false"])  # by now nobody can say
    until(lambda: site.look()["state"] == "gone")
    change(site, reap=["/bin/true"])
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


def test_process_of_another_container_is_hidden(site: Site) -> None:
    site.start()
    record = json.loads(site.record_file.read_text())
    site.record_file.write_text(json.dumps({**record, "space": "pid:[1]"}))
    assert site.look()["state"] == "hidden"
    assert not site.reapings.exists()
    site.record_file.write_text(json.dumps(record))


def test_reused_pid_of_a_dead_node_agent_is_not_taken_for_it(site: Site) -> None:
    site.start()
    record = json.loads(site.record_file.read_text())
    site.record_file.write_text(json.dumps({**record, "pid": os.getpid()}))
    site.agent.end(str(site.root), [KEY])  # would end this very test
    assert site.look()["state"] in ("gone", "over")
    site.record_file.write_text(json.dumps(record))


def test_end_sends_sigterm_to_the_node_agent(site: Site) -> None:
    result = site.start()
    site.agent.end(str(site.root), [KEY, "att_2.n0.0"])
    until(lambda: not is_alive(result["pid"]))


def test_missing_program_is_reported_at_once(site: Site) -> None:
    task = {**site.task(), "command": ["/nowhere/python"]}
    with pytest.raises(OSError, match="No such file or directory: '/nowhere/python'"):
        site.agent.start(str(site.root), KEY, task)


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".hidden"])
def test_a_key_is_a_name_and_no_path(site: Site, key: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        site.agent.start(str(site.root), key, site.task())


def test_record_folder_that_others_can_change_is_refused(site: Site) -> None:
    site.root.chmod(0o777)
    for ask in (site.start, site.look, lambda: site.agent.end(str(site.root), [KEY])):
        with pytest.raises(PermissionError):
            ask()
    site.root.chmod(0o700)


def test_records_below_tmp_lie_in_a_private_folder(site: Site) -> None:
    site.root.chmod(0o1777)
    result = site.start()
    assert site.look()["pid"] == result["pid"]
    owned = site.root / f"shoal-{os.getuid()}"
    assert (owned.stat().st_mode & 0o777, (owned / "ray" / KEY / "node_agent.json").exists()) == (0o700, True)


def test_folder_name_taken_by_another_user_is_avoided_and_found_again(site: Site) -> None:
    site.root.chmod(0o1777)
    taken = site.root / f"shoal-{os.getuid()}"
    taken.symlink_to("/nowhere")
    with pytest.raises(PermissionError):
        site.look()
    result = site.start()
    assert site.look()["pid"] == result["pid"]
    assert Agent().start(str(site.root), KEY, site.task()) == {"pid": result["pid"], "is_new": False}
    assert len(list(site.root.glob(f"{taken.name}-*"))) == 1


def test_records_are_found_in_every_folder_of_this_user(site: Site) -> None:
    site.root.chmod(0o1777)
    usual = site.root / f"shoal-{os.getuid()}"
    usual.mkdir()
    usual.chmod(0o777)
    result = site.start()
    usual.chmod(0o700)  # the one for new records by now
    assert site.look()["pid"] == result["pid"]
    assert not site.start()["is_new"]


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_no_other_user_can_add_records_with_any_umask(site: Site, umask: int) -> None:
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
def test_record_that_another_user_could_have_written_is_not_trusted(site: Site, trap: str) -> None:
    result = site.start()
    kill(site, result["pid"])
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
    assert not site.reapings.exists()


def test_untrusted_record_does_not_hide_other_records(site: Site) -> None:
    bad, good = "att_0.n0.0", site.start()["pid"]
    hidden = site.agent.start(str(site.root), bad, site.task())["pid"]
    (site.root / "ray" / bad).chmod(0o777)
    seen = site.agent.look(str(site.root), [bad, KEY])
    assert {key: item["state"] for key, item in seen.items()} == {bad: "hidden", KEY: "running"}
    site.agent.end(str(site.root), [bad, KEY])
    until(lambda: not is_alive(good))
    assert is_alive(hidden), "whoever that is"


def test_node_agent_does_not_start_while_an_earlier_one_is_reaped(site: Site) -> None:
    result = site.start()
    record = json.loads(site.record_file.read_text())
    os.kill(result["pid"], signal.SIGKILL)
    until(lambda: not is_alive(result["pid"]))
    go = site.root / "go"
    waits = f'while [ ! -e "{go}" ]; do sleep 0.01; done'
    site.record_file.write_text(json.dumps({**record, "reap": ["/bin/sh", "-c", waits]}))
    assert site.look()["state"] == "gone"
    with pytest.raises(OSError, match="ask again"):
        site.start()
    go.touch()
    until(lambda: site.look()["state"] == "over")
    assert site.start()["is_new"]


def test_reaping_of_one_node_agent_proves_nothing_about_the_next(site: Site) -> None:
    result = site.start(reap_code=0)
    os.kill(result["pid"], signal.SIGKILL)
    until(lambda: site.look()["state"] == "over")
    over = site.record_file.with_name("over")
    before = over.read_text()
    again = site.start(reap_code=1)
    over.write_text(before)  # as if it had come late
    os.kill(again["pid"], signal.SIGKILL)
    until(lambda: not is_alive(again["pid"]))
    until(lambda: site.look()["state"] == "gone" and site.num_reapings() >= 3)


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


def test_old_record_is_reaped_before_it_is_removed(site: Site) -> None:
    result = site.start(reap_code=1)
    until(lambda: "ready" in site.look()["said"])
    kill(site, result["pid"])
    aged(site, "errors")
    assert site.look()["state"] == "gone"
    until(lambda: site.num_reapings() >= 1)
    change(site, reap=["/bin/true"])
    until(lambda: site.look()["state"] == "over")
    site.agent = Agent()
    assert site.look()["state"] == "over"  # since a moment
    aged(site, "over")
    site.agent = Agent()
    assert site.look()["state"] == "none"
    assert not site.record_file.parent.exists()


def test_record_without_queries_is_reaped_and_then_removed(site: Site) -> None:
    result = site.start()
    until(lambda: "ready" in site.look()["said"])
    kill(site, result["pid"])
    aged(site, "errors")
    site.agent.look(str(site.root), [])
    until(lambda: site.record_file.with_name("over").exists())
    aged(site, "over")
    Agent().look(str(site.root), [])
    assert not site.record_file.parent.exists()


def test_record_from_before_a_reboot_is_reported_for_a_day(site: Site) -> None:
    result = site.start()
    until(lambda: "ready" in site.look()["said"])
    kill(site, result["pid"])
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
def test_machine_is_identified_by_its_id_and_network_cards(
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


def test_abandoned_launch_is_awaited_and_not_repeated(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been late, and be a node agent yet: two of them would have one record."""
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
