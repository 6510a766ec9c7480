"""All limits and isolation of one task's processes, behind one interface.

If the task spec names confinements, they are required, and a missing one is an error. Otherwise the task gets
the best that this machine offers, and `mechanisms` lists it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from shoal.errors import ShoalError
from shoal.runtime.confine import firewall, resource_limits, sandbox_view
from shoal.runtime.confine.detect import candidates, find_bubblewrap
from shoal.runtime.confine.mounts import Mounts
from shoal.runtime.confine.resource_limits import ObservedCpuTime
from shoal.runtime.confine.sandbox import Sandbox, SandboxFailed
from shoal.runtime.confine.sandbox_view import job_path, readable_directories
from shoal.runtime.files import checkpoint_storage, spool
from shoal.runtime.files.caches import ProjectCache
from shoal.runtime.process import kernel, tree
from shoal.runtime.replica import listeners
from shoal.wire import TaskResources, TaskSpec

FULL_WEIGHT = 100
JOB_OOM_SCORE = "500"
"""When the whole machine runs out of memory, the kernel kills ranks before supervisors and the control
plane."""


class CannotConfine(ShoalError):
    """The task spec names a confinement that this machine does not offer."""

    code = "runtime.confinement"


class Confinement:
    """One task's limits and isolation. Call `prepare` once, `enter` in every child, and `kill` at the end."""

    def __init__(
        self,
        task_spec: TaskSpec,
        task: spool.SpoolTask,
        node_path: str,
        prepared: spool.SpoolTask | None = None,
    ) -> None:
        """`prepared`: where a standby makes the task's directories before the task exists; then `adopt`."""
        self._task_spec = task_spec
        self._task = task
        self._at = prepared if prepared is not None else task
        isolation = task_spec.isolation
        required = isolation.confinement
        self.mechanisms = candidates(stays=isolation.stays_in_cgroup) if required is None else required
        self.uid = isolation.uid if "uid" in self.mechanisms else None
        self.path = job_path(node_path, self.uid) if "bubblewrap" in self.mechanisms else node_path
        self.sandbox: Sandbox | None = None
        self._cgroups = self._choose_groups()
        self._observed_cpu = ObservedCpuTime()
        self._is_work_counted: bool | None = None
        """Whether the kernel counts CPU time. None: not checked yet."""
        self._oom_kills_before = 0
        self.memory_limit = task_spec.resources.memory_bytes
        self._home = os.path.realpath(task.home)
        self._keep = (
            readable_directories(self.path, self.uid, self._home) if "bubblewrap" in self.mechanisms else ()
        )
        self.cache = ProjectCache(
            task_spec.identity.project, task_spec.folders.cache_max_bytes, self._home, self.uid
        )
        self._socket_folder = listeners.program_socket_folder(task_spec, self._home)
        self._mounts = Mounts(
            task_spec.folders, self.uid, self._home, self._keep, self.cache.directory, self._socket_folder
        )
        probe = task_spec.program.probe
        self._has_own_network = probe is not None and probe.has_own_network

    @property
    def cgroups(self) -> tuple[str, ...]:
        return self._cgroups.paths if self._cgroups is not None else ()

    def prepare(self) -> None:
        """Make the cgroups, record their paths, start the sandbox. Raises `ShoalError`, `OSError`."""
        isolation = self._task_spec.isolation
        if isolation.uid is not None and self.uid is None and isolation.confinement is None:
            raise CannotConfine(
                f"the job must run as user {isolation.uid}, and user {os.geteuid()} cannot start it so",
                hint="run `shoal up` as root, or without users of their own for projects",
            )
        self._close_network()
        if "bubblewrap" in self.mechanisms:
            self._start_sandbox()
        if self._cgroups is not None:
            spool.write_cgroups(self._at, self._cgroups.paths)
            self._cgroups.make(self._task_spec.resources)
        if self.sandbox is not None:
            self._wait_for_sandbox(self.sandbox)
        if self.sandbox is None:
            self._check_without_sandbox()

    def _close_network(self) -> None:
        """Close the network to other projects. `FirewallFailed`: the spec requires that, and it failed."""
        if self.uid is None or "nftables" not in self.mechanisms:
            return
        try:
            firewall.close(self.uid)
        except firewall.FirewallFailed:
            if self._task_spec.isolation.confinement is not None:
                raise
            self.mechanisms = tuple(word for word in self.mechanisms if word != "nftables")

    @property
    def firewalled_uid(self) -> int | None:
        """The job's user, if the kernel keeps other projects off its ports, else None."""
        return self.uid if "nftables" in self.mechanisms else None

    def adopt(self, task_spec: TaskSpec) -> None:
        """Turn a prepared confinement into the task's: move the directories and set the limits."""
        at, self._at, self._task_spec = self._at, self._task, task_spec
        spool.write_cgroups(self._task, self.cgroups)
        os.unlink(
            at.cgroups
        )  # their processes belong to the task now, so reaping the slot must not kill them
        os.rename(at.work, self._task.work)
        os.rename(at.scratch, self._task.scratch)
        os.rename(at.stand_ins, self._task.stand_ins)
        if task_spec.resources.memory_bytes is not None:
            self.limit_memory(task_spec.resources.memory_bytes)
        self.set_cpu_weight(FULL_WEIGHT)

    def limit_memory(self, memory_bytes: int) -> None:
        """Limit the memory of all processes together. `OSError`: they already use more."""
        if self._cgroups is not None:
            self._cgroups.limit_memory(memory_bytes)
        self.memory_limit = memory_bytes

    def set_cpu_weight(self, hundredths: int) -> None:
        """Set the share of the CPUs that the task gets when other tasks want them, too."""
        if self._cgroups is not None:
            self._cgroups.set_cpu_weight(hundredths)

    def _wait_for_sandbox(self, sandbox: Sandbox) -> None:
        try:
            sandbox.wait_ready()
        except SandboxFailed:
            # If a request of the job may have caused the failure, the job must not run without the sandbox:
            # it would choose its own isolation.
            folders, required = self._task_spec.folders, self._task_spec.isolation.confinement
            if required is not None or folders.mounts or folders.checkpoint_path or self._has_own_network:
                raise
            # bubblewrap is installed but not permitted. `shoal nodes` shows that.
            self.sandbox = None
            self._mounts.close()
            self.mechanisms = tuple(word for word in self.mechanisms if word != "bubblewrap")

    def _check_without_sandbox(self) -> None:
        if self._has_own_network:
            raise CannotConfine(
                "a network of its own needs bubblewrap, which is not in use on this node",
                hint="apt install bubblewrap, or leave out `network: private`",
            )
        folders = self._task_spec.folders
        if any(mount.source != mount.target for mount in folders.mounts):
            raise CannotConfine(
                "mounts need bubblewrap, which is not in use on this node", hint="shoal doctor"
            )
        self._open_path(self._task.work, "work")
        if self.cache.directory is not None:
            self._open_path(self.cache.directory, "cache")
        if folders.model_dir is not None:
            self._open_path(folders.model_dir, "model")
            os.close(checkpoint_storage.open_directory(folders.model_dir))
        if self._socket_folder is not None:
            self._open_path(self._socket_folder, "socket's")
        directory, path = folders.checkpoint_dir, folders.checkpoint_path
        if directory is None:
            return
        if path is not None and path.startswith("/"):
            raise CannotConfine(
                f"checkpoints at `{path}` need bubblewrap, which is not in use on this node",
                hint="give `checkpoint` a path without a leading `/`",
            )
        self._open_path(directory, "checkpoint")
        os.close(checkpoint_storage.open_directory(directory))

    def leave_network(self) -> None:
        """Start later children in the task's own network, if it has one. Earlier ones were not in it."""
        if self.sandbox is not None:
            self.sandbox.leave_network()

    def enter(self) -> None:
        """Take on every limit and drop every privilege, in a newly forked child.

        `OSError`: the child must not continue.
        """
        if self._cgroups is not None:
            for path in self._cgroups.paths:
                resource_limits.write_cgroup_file(f"{path}/{self._cgroups.join_file}", "0")
        with contextlib.suppress(OSError):
            resource_limits.write_cgroup_file("/proc/self/oom_score_adj", JOB_OOM_SCORE)
        if "rlimits" in self.mechanisms:
            resource_limits.apply_rlimits(self._task_spec.resources, is_own_user=self.uid is not None)
        if "affinity" in self.mechanisms:
            identity = self._task_spec.identity
            resource_limits.pin_cpus(self._task_spec.resources.cpus, f"{identity.attempt_id} {identity.node}")
        kernel.leave_keyring()
        supervisor: int | None = os.getppid()
        if self.sandbox is not None:
            supervisor = None
            self.sandbox.enter()
            self._mounts.check()
            kernel.drop_capabilities()
        if self.uid is not None:
            gid = firewall.open_gid(self.uid) if self._task_spec.isolation.has_open_network else self.uid
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(self.uid, self.uid, self.uid)
        kernel.forbid_new_privileges()
        kernel.die_with_parent(supervisor)

    def kill(self, *, reap: Callable[[], object], timeout_s: float) -> bool:
        """Kill every process of the task. False: some did not die in time. Repeat until True.

        `reap` collects this process's dead children, without which a sandbox cannot end.
        """
        if self.sandbox is not None:
            self.sandbox.kill()
        for path in self.cgroups:
            tree.unthrottle(path)
        return tree.kill_until_gone(self._processes, timeout_s=timeout_s, after_round=reap)

    def _processes(self) -> set[int]:
        pids = tree.pids_in_cgroups(self.cgroups)
        if self.sandbox is not None and not self.sandbox.is_gone():
            pids.add(os.getpid())  # never signalled; it keeps the set from being empty
        if self.sandbox is None and not self.cgroups:
            pids |= tree.descendants(os.getpid())
        return pids

    def has_memory_for(self, fraction: float) -> bool:
        """Whether the task's memory could grow by this fraction and stay within its limit."""
        limit, used = self.memory_limit, self.memory_bytes()
        return limit is None or (used is not None and used * (1 + fraction) <= limit)

    def processes(self) -> set[int]:
        """Return every visible process of the task."""
        return tree.pids_in_cgroups(self.cgroups) if self.cgroups else tree.descendants(os.getpid())

    def begin_ranks(self) -> None:
        """Note that no out-of-memory kill until now has hit a rank."""
        self._oom_kills_before = self._oom_kills()

    def has_run_out_of_memory(self, *, was_killed: bool) -> bool:
        """Whether the kernel has killed a process of the task for memory since the ranks began.

        Without cgroups of its own the task is in a cgroup of its cluster, perhaps with other tasks. Then the
        kernel's count is believed only if a rank `was_killed`.
        """
        return (was_killed or self._cgroups is not None) and self._oom_kills() > self._oom_kills_before

    def _oom_kills(self) -> int:
        return (
            self._cgroups.oom_kills()
            if self._cgroups is not None
            else resource_limits.oom_kills(resource_limits.hierarchies_here())
        )

    def cpu_seconds(self) -> float | None:
        """CPU time of the whole task, or None if the kernel does not count it."""
        return self._cgroups.cpu_seconds() if self._cgroups is not None else None

    def work_seconds(self) -> float | None:
        """CPU time as in `cpu_seconds`, or an observed lower bound, to tell idle ranks from busy ones.

        None: it cannot be read now. Only one of the two counters is ever used, because they start at
        different values.
        """
        counted_s = self.cpu_seconds()
        if self._is_work_counted is None:
            self._is_work_counted = counted_s is not None
        return counted_s if self._is_work_counted else self._observed_cpu.seconds()

    def memory_bytes(self) -> int | None:
        """Memory of the task that cannot be reclaimed, or None if the kernel does not count it."""
        return self._cgroups.memory_bytes() if self._cgroups is not None else None

    def remove(self) -> None:
        """Remove the empty cgroups. `spool.kill_leftovers` removes one that stays busy."""
        tree.remove_cgroups(self.cgroups)

    def _choose_groups(self) -> resource_limits.CgroupV1 | resource_limits.CgroupV2 | None:
        suffix = "" if self._at is self._task else f".{os.getpid()}"
        identity = self._task_spec.identity
        name = f"{identity.attempt_id}.{identity.node}{suffix}"
        hierarchies = resource_limits.hierarchies_here()
        if "cgroup2" in self.mechanisms:
            base = resource_limits.usable_v2_base(
                hierarchies, stays=self._task_spec.isolation.stays_in_cgroup
            )
            if base is None:
                raise CannotConfine("cgroup version 2 with cpu, memory and pids is not delegated to us here")
            return resource_limits.CgroupV2(base, name)
        if "cgroup1" in self.mechanisms:
            bases = resource_limits.usable_v1_bases(hierarchies)
            if bases is None:
                raise CannotConfine("cgroup version 1 with cpu, memory and pids is not writable here")
            return resource_limits.CgroupV1(bases, name)
        return None

    def _start_sandbox(self) -> None:
        program = find_bubblewrap()
        if program is None:
            raise SandboxFailed("there is no `bwrap` on this node", hint="apt install bubblewrap")
        arguments = sandbox_view.view_arguments(
            uid=self.uid,
            home=self._home,
            work=self._task.work,
            work_source=self._at.work,
            scratch=self._at.scratch,
            stand_ins=self._task.stand_ins,
            stand_ins_source=self._at.stand_ins,
            keep=self._keep,
            gpu_devices=gpu_devices(self._task_spec.resources),
            mounts=self._mounts.open(),
        )
        self.sandbox = Sandbox(program, arguments, has_own_network=self._has_own_network)

    def _open_path(self, wanted: str, purpose: str) -> None:
        """Let the job's user pass through SHOAL_HOME to its own directory, without listing or reading others.

        Shoal does not change the mode of directories above SHOAL_HOME.
        """
        path = wanted
        while path != "/" and self.uid is not None:
            path = os.path.dirname(path)
            if sandbox_view.may_enter(path, self.uid):
                continue
            if not sandbox_view.is_within(path, self._home):
                raise CannotConfine(
                    f"the job's user {self.uid} cannot pass through `{path}` to its {purpose} directory",
                    hint="apt install bubblewrap, or choose another SHOAL_HOME, such as /var/lib/shoal",
                )
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IXOTH)


def gpu_devices(resources: TaskResources) -> tuple[str, ...]:
    """Return the device files of the task's GPUs and the shared ones that NVIDIA's driver needs.

    If the cluster chose the GPUs, return those of all GPUs: the cluster's own cgroup restricts them.
    """
    if not resources.has_real_gpus:
        return ()
    shared = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")
    minors = (
        resource_limits.gpu_minors(os.listdir("/dev"))
        if resources.are_gpus_chosen_by_cluster
        else resources.gpu_minors
    )
    names = (*(f"nvidia{minor}" for minor in minors), *shared)
    return tuple(path for path in (f"/dev/{name}" for name in names) if os.path.exists(path))
