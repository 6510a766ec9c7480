"""What follows from cgroup tables, modes of directories and mounts, without touching the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.runtime.confine import confinement, resource_limits, sandbox_view
from shoal.runtime.confine.mounts import Mounts
from shoal.runtime.files import spool
from shoal.wire import GpuHandle, TaskResources, TaskSpec
from tests.support.runtime.task_specs import change_task_spec
from tests.support.runtime.tasks import a_task_spec

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


def test_version_1_cgroups_are_made_below_our_own_in_every_controller(tmp_path: Path) -> None:
    bases = resource_limits.usable_v1_bases(resource_limits.parse_hierarchies(hybrid(tmp_path), HYBRID_OWN))
    assert bases == {
        "cpu": f"{tmp_path}/cpu",
        "cpuacct": f"{tmp_path}/cpu",
        "memory": f"{tmp_path}/memory/inner/deep",
        "pids": f"{tmp_path}/pids",
    }


def test_version_1_without_a_needed_controller_is_not_usable(tmp_path: Path) -> None:
    table = "\n".join(line for line in hybrid(tmp_path).splitlines() if "memory" not in line)
    assert resource_limits.usable_v1_bases(resource_limits.parse_hierarchies(table, HYBRID_OWN)) is None


def test_version_2_is_used_if_our_parent_delegates_controllers(tmp_path: Path) -> None:
    service = tmp_path / "user.slice" / "shoal.service"
    service.mkdir(parents=True)
    for path in (service, service.parent, tmp_path):
        (path / "cgroup.controllers").write_text("cpu memory pids")
        (path / "cgroup.procs").write_text("")
    (service / "cgroup.subtree_control").mkdir()  # a group with processes refuses the write
    (service.parent / "cgroup.subtree_control").write_text("cpu memory pids")
    table = f"30 1 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    hierarchy = resource_limits.parse_hierarchies(table, "0::/user.slice/shoal.service\n")
    assert resource_limits.usable_v2_base(hierarchy) == str(service.parent)


def test_version_2_without_controllers_is_not_usable(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("")
    table = f"30 1 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert resource_limits.usable_v2_base(resource_limits.parse_hierarchies(table, "0::/\n")) is None


def test_version_2_limits_have_the_kernels_format(tmp_path: Path) -> None:
    group = resource_limits.CgroupV2(str(tmp_path), "att.node")
    directory = Path(group.paths[0])
    directory.mkdir()
    for name in ("cpu.max", "pids.max", "memory.max", "memory.swap.max"):
        (directory / name).write_text("")
    group.make(TaskResources(cpus=1.5, memory_bytes=1 << 30, max_processes=10))
    written = {name: (directory / name).read_text() for name in ("cpu.max", "pids.max", "memory.max")}
    assert written == {"cpu.max": "150000 100000", "pids.max": "10", "memory.max": str(1 << 30)}
    (directory / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    (directory / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert (group.oom_kills(), group.cpu_seconds()) == (1, 2.5)


def test_reaching_the_memory_limit_is_no_kill(tmp_path: Path) -> None:
    group = resource_limits.CgroupV1({"memory": str(tmp_path)}, "att.node")
    directory = Path(group.paths[0])
    directory.mkdir()
    (directory / "memory.failcnt").write_text("41\n")
    assert group.oom_kills() == 0
    (directory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert group.oom_kills() == 0
    (directory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.oom_kills() == 2


def test_kills_for_memory_are_counted_in_the_clusters_cgroup(tmp_path: Path) -> None:
    hierarchy = resource_limits.parse_hierarchies(hybrid(tmp_path), HYBRID_OWN)
    assert resource_limits.oom_kills(hierarchy) == 0
    (tmp_path / "memory" / "oom_control").write_text("oom_kill 7\n")
    (tmp_path / "memory" / "inner" / "deep" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert resource_limits.oom_kills(hierarchy) == 2
    (tmp_path / "step" / "task_0").mkdir(parents=True)
    (tmp_path / "step" / "task_0" / "memory.events").write_text("max 9\noom 3\noom_kill 1\n")
    unified = f"30 1 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert resource_limits.oom_kills(resource_limits.parse_hierarchies(unified, "0::/step/task_0\n")) == 1


def test_killed_rank_without_own_cgroup_ran_out_of_memory_if_the_cluster_counted_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = [
        resource_limits.Hierarchy(
            is_unified=True, controllers=frozenset(), mount="/", cgroup_dir=str(tmp_path)
        )
    ]
    monkeypatch.setattr(resource_limits, "hierarchies_here", lambda: around)
    (tmp_path / "memory.events").write_text("oom_kill 4\n")
    task = confinement.Confinement(a_task_spec(confinement=()), spool.SpoolTask(tmp_path), "/bin")
    task.begin_ranks()
    assert not task.has_run_out_of_memory(was_killed=True)
    (tmp_path / "memory.events").write_text("oom_kill 5\n")
    assert task.has_run_out_of_memory(was_killed=True)
    assert not task.has_run_out_of_memory(was_killed=False)


def test_work_is_always_read_from_the_same_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counter has a zero of its own: after a change of counters, a working job would look idle."""
    task = confinement.Confinement(a_task_spec(confinement=()), spool.SpoolTask(tmp_path), "/bin")
    readings: list[float | None] = [700.0, None, 701.0]
    monkeypatch.setattr(task, "cpu_seconds", lambda: readings.pop(0))
    assert [task.work_seconds() for _ in range(3)] == [700.0, None, 701.0]
    seen = confinement.Confinement(a_task_spec(confinement=()), spool.SpoolTask(tmp_path), "/bin")
    assert seen.work_seconds() is not None, "without a counter it is read from the processes"
    monkeypatch.setattr(seen, "cpu_seconds", lambda: 1e9)
    assert (seen.work_seconds() or 0.0) < 1e9


@pytest.mark.parametrize("version", [1, 2])
def test_files_in_shared_memory_count_as_used_memory(tmp_path: Path, version: int) -> None:
    group: resource_limits.CgroupV1 | resource_limits.CgroupV2
    if version == 1:
        group = resource_limits.CgroupV1({"memory": str(tmp_path)}, "att.node")
        stat = "cache 90\nrss 1\nshmem 1\ntotal_cache 90\ntotal_rss 30\ntotal_shmem 40\n"
    else:
        group = resource_limits.CgroupV2(str(tmp_path), "att.node")
        stat = "anon 30\nfile 90\nkernel_stack 5\nshmem 40\n"
    directory = Path(group.paths[0])
    directory.mkdir()
    assert group.memory_bytes() is None, "nothing counts it"
    (directory / "memory.stat").write_text(stat)
    assert group.memory_bytes() == 70


def test_version_2_limit_is_never_set_below_memory_that_cannot_be_reclaimed(tmp_path: Path) -> None:
    group = resource_limits.CgroupV2(str(tmp_path), "att.node")
    directory = Path(group.paths[0])
    directory.mkdir()
    (directory / "memory.stat").write_text("anon 30\nfile 90\nshmem 40\n")
    (directory / "memory.max").write_text("100")
    with pytest.raises(OSError, match="more memory than that is in use"):
        group.limit_memory(60)
    assert (directory / "memory.max").read_text() == "100"
    group.limit_memory(80)
    assert (directory / "memory.max").read_text().startswith("80")


def test_gpus_of_other_jobs_are_denied() -> None:
    names = ["null", "nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"]
    assert resource_limits.denied_gpus(names, (1,)) == [0, 10]


def test_device_files_go_by_minor_number_and_not_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path in {f"/dev/nvidia{n}" for n in (0, 1, 2, "ctl")})
    handles = (GpuHandle(index=0, minor=2, uuid="GPU-a"), GpuHandle(index=1, uuid="GPU-of-unknown-minor"))
    task_spec = a_task_spec(gpu_ids=(0, 1), gpus=handles)
    assert confinement.gpu_devices(task_spec.resources) == ("/dev/nvidia2", "/dev/nvidiactl")
    assert resource_limits.denied_gpus(["nvidia0", "nvidia1", "nvidia2"], task_spec.resources.gpu_minors) == [
        0,
        1,
    ]


def test_no_device_file_is_denied_if_the_cluster_chose_the_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: ["null", "nvidia10", "nvidia0", "nvidiactl", "nvidia-uvm"])
    monkeypatch.setattr(
        os.path, "exists", lambda path: path in ("/dev/nvidia0", "/dev/nvidia10", "/dev/nvidiactl")
    )
    task_spec = a_task_spec(gpu_ids=(0,), gpus=(GpuHandle(index=0),), are_gpus_chosen_by_cluster=True)
    assert confinement.gpu_devices(task_spec.resources) == ("/dev/nvidia0", "/dev/nvidia10", "/dev/nvidiactl")
    assert confinement.gpu_devices(a_task_spec(are_gpus_chosen_by_cluster=True).resources) == ()
    assert denied_in(tmp_path / "chosen", task_spec) == ""
    assert denied_in(tmp_path / "named", change_task_spec(task_spec, are_gpus_chosen_by_cluster=False)) != ""


def denied_in(base: Path, task_spec: TaskSpec) -> str:
    """Return what is written to the file that denies devices, with plain directories as cgroups."""
    group = resource_limits.CgroupV1(dict.fromkeys(("cpu", "memory", "pids", "devices"), str(base)), "share")
    (place,) = map(Path, group.paths)
    place.mkdir(parents=True)
    for name in ("cpu.cfs_period_us", "cpu.cfs_quota_us", "pids.max", "devices.deny"):
        (place / name).touch()
    group.make(task_spec.resources)
    return (place / "devices.deny").read_text()


def test_simulated_gpus_open_no_device_file() -> None:
    task_spec = a_task_spec(gpu_ids=(0,), gpus=(GpuHandle(index=0, minor=0),), are_gpus_simulated=True)
    assert (task_spec.resources.gpu_minors, confinement.gpu_devices(task_spec.resources)) == ((), ())


def test_number_of_chosen_cpus_is_right_and_they_exist() -> None:
    chosen = resource_limits.chosen_cpus([0, 2, 4, 6], 2.5, "att_1 node-1")
    assert len(chosen) == 3
    assert chosen <= {0, 2, 4, 6}
    assert resource_limits.chosen_cpus([0, 1], 64, "x") == {0, 1}


def test_directory_closed_to_the_job_is_hidden_except_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_view, "may_enter", lambda directory, _uid: directory != "/root")
    interpreter = "/root/.pyenv/versions/3.11"
    assert sandbox_view.hidden_directories(200001, "/root/.shoal", (interpreter, "/usr")) == ["/root"]
    assert sandbox_view.hidden_directories(200001, "/srv/shoal", (interpreter,)) == ["/root", "/srv/shoal"]
    arguments = sandbox_view.view_arguments(
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


def test_closed_directory_is_recognized_by_its_mode(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    assert not sandbox_view.may_enter(str(closed), 200001)
    assert sandbox_view.may_enter(str(closed), closed.stat().st_uid)


@pytest.mark.parametrize(
    "target",
    ["data", "/", "/a/../etc", "/etc", "/usr/lib", "/proc/self", "/srv/shoal/keys", "/srv", "/data/"],
)
def test_mount_target_over_the_system_or_shoals_state_is_refused(target: str) -> None:
    with pytest.raises(SpecError):
        sandbox_view.check_target(target, "/srv/shoal")


@pytest.mark.parametrize("source", ["/", "/proc", "/run/docker", "/srv/shoal", "/srv/shoal/keys", "/srv"])
def test_mount_source_that_reveals_the_system_or_shoals_state_is_refused(source: str) -> None:
    with pytest.raises(SpecError):
        sandbox_view.check_source(source, source, "/srv/shoal")


def test_mounts_of_plain_data_are_allowed() -> None:
    sandbox_view.check_target("/data/sets", "/srv/shoal")
    sandbox_view.check_source("/data", "/mnt/data", "/srv/shoal")


def test_served_model_is_mounted_read_only_at_its_own_path(tmp_path: Path) -> None:
    save = tmp_path / "home" / "checkpoints" / "job_1" / "step-000000000010-1-0"
    save.mkdir(parents=True)
    mounts = Mounts(a_task_spec(model_dir=str(save)).folders, None, str(tmp_path / "home"), ())
    try:
        [mount] = mounts.open()
        assert (mount.source, mount.target, mount.is_read_only) == (str(save), str(save), True)
    finally:
        mounts.close()


def test_model_that_became_a_link_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "save").symlink_to(tmp_path)
    with pytest.raises(SpecError, match="cannot be used"):
        Mounts(a_task_spec(model_dir=str(tmp_path / "save")).folders, None, str(tmp_path / "home"), ()).open()
