"""What cgroup tables, modes of directories and mounts lead to, without touching the machine."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from shoal.errors import SpecError
from shoal.runtime import spool
from shoal.runtime.confine import cgroup, cgroup1, cgroup2, confinement, rlimits, view
from shoal.runtime.confine.mounts import Mounts
from shoal.wire import GpuHandle, Limits, Order
from tests.support.shares import an_order

HYBRID_OWN = "4:memory:/inner/deep\n2:cpu,cpuacct:/\n1:pids:/\n0::/\n"


def hybrid(root: Path) -> str:
    for path in ("memory/inner/deep", "cpu", "pids", "unified"):
        (root / path).mkdir(parents=True)
    return (
        f"31 23 0:28 / {root} rw - tmpfs tmpfs rw\n"
        f"32 31 0:29 / {root}/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
        f"35 31 0:32 / {root}/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n"
        f"39 31 0:36 / {root}/pids rw,relatime - cgroup cgroup rw,pids\n"
        f"41 31 0:38 / {root}/unified rw,relatime - cgroup2 cgroup2 rw\n"
    )


def test_version_1_groups_are_made_below_our_own_in_every_controller(tmp_path: Path) -> None:
    bases = cgroup1.usable_bases(cgroup.hierarchies(hybrid(tmp_path), HYBRID_OWN))
    assert bases == {
        "cpu": f"{tmp_path}/cpu",
        "cpuacct": f"{tmp_path}/cpu",
        "memory": f"{tmp_path}/memory/inner/deep",
        "pids": f"{tmp_path}/pids",
    }


def test_version_1_without_a_needed_controller_is_not_usable(tmp_path: Path) -> None:
    table = "\n".join(line for line in hybrid(tmp_path).splitlines() if "memory" not in line)
    assert cgroup1.usable_bases(cgroup.hierarchies(table, HYBRID_OWN)) is None


def test_version_2_is_used_where_our_parent_hands_controllers_down(tmp_path: Path) -> None:
    service = tmp_path / "user.slice" / "shoal.service"
    service.mkdir(parents=True)
    for path in (service, service.parent, tmp_path):
        (path / "cgroup.controllers").write_text("cpu memory pids")
        (path / "cgroup.procs").write_text("")
    (service / "cgroup.subtree_control").mkdir()  # a group with processes refuses the write
    (service.parent / "cgroup.subtree_control").write_text("cpu memory pids")
    table = f"30 1 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    found = cgroup.hierarchies(table, "0::/user.slice/shoal.service\n")
    assert cgroup2.usable_base(found) == str(service.parent)


def test_version_2_without_controllers_is_not_usable(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("")
    table = f"30 1 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert cgroup2.usable_base(cgroup.hierarchies(table, "0::/\n")) is None


def test_version_2_limits_are_written_as_the_kernel_wants_them(tmp_path: Path) -> None:
    group = cgroup2.CgroupV2(str(tmp_path), "att.node")
    directory = Path(group.paths[0])
    directory.mkdir()
    for name in ("cpu.max", "pids.max", "memory.max", "memory.swap.max"):
        (directory / name).write_text("")
    group.make(an_order(limits=Limits(cpus=1.5, memory_bytes=1 << 30, max_processes=10)))
    written = {name: (directory / name).read_text() for name in ("cpu.max", "pids.max", "memory.max")}
    assert written == {"cpu.max": "150000 100000", "pids.max": "10", "memory.max": str(1 << 30)}
    (directory / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    (directory / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert (group.oom_kills(), group.cpu_seconds()) == (1, 2.5)


def test_meeting_the_memory_limit_is_not_being_killed_for_it(tmp_path: Path) -> None:
    group = cgroup1.CgroupV1({"memory": str(tmp_path)}, "att.node")
    directory = Path(group.paths[0])
    directory.mkdir()
    (directory / "memory.failcnt").write_text("41\n")
    assert group.oom_kills() == 0
    (directory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert group.oom_kills() == 0
    (directory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.oom_kills() == 2


def test_kills_for_memory_are_counted_in_the_cgroup_that_the_cluster_made_for_us(tmp_path: Path) -> None:
    found = cgroup.hierarchies(hybrid(tmp_path), HYBRID_OWN)
    assert cgroup.oom_kills(found) == 0
    (tmp_path / "memory" / "oom_control").write_text("oom_kill 7\n")
    (tmp_path / "memory" / "inner" / "deep" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert cgroup.oom_kills(found) == 2
    (tmp_path / "step" / "task_0").mkdir(parents=True)
    (tmp_path / "step" / "task_0" / "memory.events").write_text("max 9\noom 3\noom_kill 1\n")
    unified = f"30 1 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert cgroup.oom_kills(cgroup.hierarchies(unified, "0::/step/task_0\n")) == 1


def test_share_without_cgroups_of_its_own_ran_out_of_memory_if_its_rank_was_killed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = [cgroup.Hierarchy(is_unified=True, controllers=frozenset(), mount="/", own=str(tmp_path))]
    monkeypatch.setattr(cgroup, "here", lambda: around)
    (tmp_path / "memory.events").write_text("oom_kill 4\n")
    share = confinement.Confinement(an_order(confinement=()), spool.Share(tmp_path), "/bin")
    share.begin_ranks()
    assert not share.has_run_out_of_memory(was_killed=True)
    (tmp_path / "memory.events").write_text("oom_kill 5\n")
    assert share.has_run_out_of_memory(was_killed=True)
    assert not share.has_run_out_of_memory(was_killed=False)


def test_work_is_read_from_one_counter_alone_and_one_that_cannot_be_read_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a zero of its own: after a change from one to the other who works would look idle."""
    share = confinement.Confinement(an_order(confinement=()), spool.Share(tmp_path), "/bin")
    told: list[float | None] = [700.0, None, 701.0]
    monkeypatch.setattr(share, "cpu_seconds", lambda: told.pop(0))
    assert [share.work_seconds() for _ in range(3)] == [700.0, None, 701.0]
    seen = confinement.Confinement(an_order(confinement=()), spool.Share(tmp_path), "/bin")
    assert seen.work_seconds() is not None, "where nobody counts it, it is seen"
    monkeypatch.setattr(seen, "cpu_seconds", lambda: 1e9)
    assert (seen.work_seconds() or 0.0) < 1e9


@pytest.mark.parametrize("version", [1, 2])
def test_files_in_shared_memory_are_in_use_as_much_as_memory_of_processes(
    tmp_path: Path, version: int
) -> None:
    group: cgroup1.CgroupV1 | cgroup2.CgroupV2
    if version == 1:
        group = cgroup1.CgroupV1({"memory": str(tmp_path)}, "att.node")
        stat = "cache 90\nrss 1\nshmem 1\ntotal_cache 90\ntotal_rss 30\ntotal_shmem 40\n"
    else:
        group = cgroup2.CgroupV2(str(tmp_path), "att.node")
        stat = "anon 30\nfile 90\nkernel_stack 5\nshmem 40\n"
    directory = Path(group.paths[0])
    directory.mkdir()
    assert group.memory_bytes() is None, "nobody counts"
    (directory / "memory.stat").write_text(stat)
    assert group.memory_bytes() == 70


def test_version_2_limit_is_never_set_below_what_cannot_be_taken_back(tmp_path: Path) -> None:
    group = cgroup2.CgroupV2(str(tmp_path), "att.node")
    directory = Path(group.paths[0])
    directory.mkdir()
    (directory / "memory.stat").write_text("anon 30\nfile 90\nshmem 40\n")
    (directory / "memory.max").write_text("100")
    with pytest.raises(OSError, match="more memory than that is in use"):
        group.limit_memory(60)
    assert (directory / "memory.max").read_text() == "100"
    group.limit_memory(80)
    assert (directory / "memory.max").read_text().startswith("80")


def test_gpus_that_were_not_given_are_denied() -> None:
    names = ["null", "nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"]
    assert cgroup1.denied_gpus(names, (1,)) == [0, 10]


def test_device_files_go_by_minor_number_and_not_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path in {f"/dev/nvidia{n}" for n in (0, 1, 2, "ctl")})
    given = (GpuHandle(index=0, minor=2, uuid="GPU-a"), GpuHandle(index=1, uuid="GPU-of-unknown-minor"))
    order = an_order(gpu_ids=(0, 1), gpus=given)
    assert confinement.gpu_devices(order) == ("/dev/nvidia2", "/dev/nvidiactl")
    assert cgroup1.denied_gpus(["nvidia0", "nvidia1", "nvidia2"], order.gpu_minors) == [0, 1]


def test_of_gpus_that_the_cluster_chose_every_device_file_is_there_and_none_is_denied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: ["null", "nvidia10", "nvidia0", "nvidiactl", "nvidia-uvm"])
    monkeypatch.setattr(
        os.path, "exists", lambda path: path in ("/dev/nvidia0", "/dev/nvidia10", "/dev/nvidiactl")
    )
    order = an_order(gpu_ids=(0,), gpus=(GpuHandle(index=0),), are_gpus_chosen_there=True)
    assert confinement.gpu_devices(order) == ("/dev/nvidia0", "/dev/nvidia10", "/dev/nvidiactl")
    assert confinement.gpu_devices(an_order(are_gpus_chosen_there=True)) == ()
    assert denied_in(tmp_path / "chosen", order) == ""
    assert denied_in(tmp_path / "named", msgspec.structs.replace(order, are_gpus_chosen_there=False)) != ""


def denied_in(base: Path, order: Order) -> str:
    """What is written to the file that denies devices, where cgroups are plain directories."""
    group = cgroup1.CgroupV1(dict.fromkeys(("cpu", "memory", "pids", "devices"), str(base)), "share")
    (place,) = map(Path, group.paths)
    place.mkdir(parents=True)
    for name in ("cpu.cfs_period_us", "cpu.cfs_quota_us", "pids.max", "devices.deny"):
        (place / name).touch()
    group.make(order)
    return (place / "devices.deny").read_text()


def test_simulated_gpus_open_no_device_file() -> None:
    order = an_order(gpu_ids=(0,), gpus=(GpuHandle(index=0, minor=0),), are_gpus_simulated=True)
    assert (order.gpu_minors, confinement.gpu_devices(order)) == ((), ())


def test_chosen_cpus_are_as_many_as_asked_and_exist() -> None:
    chosen = rlimits.chosen_cpus([0, 2, 4, 6], 2.5, "att_1 node-1")
    assert len(chosen) == 3
    assert chosen <= {0, 2, 4, 6}
    assert rlimits.chosen_cpus([0, 1], 64, "x") == {0, 1}


def test_directory_closed_to_the_job_is_hidden_and_the_interpreter_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view, "may_enter", lambda directory, _uid: directory != "/root")
    interpreter = "/root/.pyenv/versions/3.11"
    assert view.hidden_directories(200001, "/root/.shoal", (interpreter, "/usr")) == ["/root"]
    assert view.hidden_directories(200001, "/srv/shoal", (interpreter,)) == ["/root", "/srv/shoal"]
    arguments = view.view_arguments(
        uid=200001,
        home="/root/.shoal",
        work="/root/.shoal/spool/live/a/n/work",
        scratch="/s",
        stand_ins="/root/.shoal/spool/live/a/n/stand-ins",
        keep=(interpreter,),
        gpu_devices=(),
        mounts=(),
    )
    text = " ".join(arguments)
    assert text.index("--tmpfs /root") < text.index(f"--ro-bind {interpreter} {interpreter}")
    assert "--perms 0755 --dir /root/.pyenv --perms 0755 --dir /root/.pyenv/versions" in text
    assert "--bind /root/.shoal/spool/live/a/n/work /root/.shoal/spool/live/a/n/work" in text


def test_closed_directory_is_told_by_its_mode(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    assert not view.may_enter(str(closed), 200001)
    assert view.may_enter(str(closed), closed.stat().st_uid)


@pytest.mark.parametrize(
    "target",
    ["data", "/", "/a/../etc", "/etc", "/usr/lib", "/proc/self", "/srv/shoal/keys", "/srv", "/data/"],
)
def test_mount_target_over_the_system_or_shoals_state_is_refused(target: str) -> None:
    with pytest.raises(SpecError):
        view.check_target(target, "/srv/shoal")


@pytest.mark.parametrize("source", ["/", "/proc", "/run/docker", "/srv/shoal", "/srv/shoal/keys", "/srv"])
def test_mount_source_that_reveals_the_system_or_shoals_state_is_refused(source: str) -> None:
    with pytest.raises(SpecError):
        view.check_source(source, source, "/srv/shoal")


def test_mounts_of_plain_data_are_allowed() -> None:
    view.check_target("/data/sets", "/srv/shoal")
    view.check_source("/data", "/mnt/data", "/srv/shoal")


def test_model_that_is_served_is_mounted_where_it_lies_and_can_only_be_read(tmp_path: Path) -> None:
    save = tmp_path / "home" / "checkpoints" / "job_1" / "step-000000000010-1-0"
    save.mkdir(parents=True)
    mounts = Mounts(an_order(model_dir=str(save)), None, str(tmp_path / "home"), ())
    try:
        [mount] = mounts.open()
        assert (mount.source, mount.target, mount.is_read_only) == (str(save), str(save), True)
    finally:
        mounts.close()


def test_model_that_became_a_link_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "save").symlink_to(tmp_path)
    with pytest.raises(SpecError, match="cannot be used"):
        Mounts(an_order(model_dir=str(tmp_path / "save")), None, str(tmp_path / "home"), ()).open()
