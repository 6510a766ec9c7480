"""All that holds one share's processes together and apart from the rest, behind one door.

A confinement named by the order is required: what cannot be had is an error. Without names it is the best
this machine offers, and `words` says what that is.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from shoal.errors import ShoalError
from shoal.runtime import checkpoint_folder, kernel, listening, spool, tree
from shoal.runtime.caches import ProjectCache
from shoal.runtime.confine import cgroup, cgroup1, cgroup2, firewall, rlimits, view
from shoal.runtime.confine.detect import candidates, find_bubblewrap
from shoal.runtime.confine.mounts import Mounts
from shoal.runtime.confine.programs import job_path, programs
from shoal.runtime.confine.sandbox import Sandbox, SandboxFailed
from shoal.runtime.confine.seen_work import SeenWork
from shoal.wire import Order

FULL_WEIGHT = 100
JOB_OOM_SCORE = "500"
"""When the whole machine runs out of memory, ranks go before supervisors and the control plane."""


class CannotConfine(ShoalError):
    """The order names a confinement that this machine does not offer."""

    code = "runtime.confinement"


class Confinement:
    """One share's limits and walls. `prepare` once, `enter` in every child, `kill` at the end."""

    def __init__(
        self, order: Order, share: spool.Share, node_path: str, at: spool.Share | None = None
    ) -> None:
        """`at`: where the directories lie that will be the share's own, before it is there; then `settle`."""
        self._order = order
        self._share = share
        self._at = at if at is not None else share
        stays = order.stays_in_cgroup
        self.words = candidates(stays=stays) if order.confinement is None else order.confinement
        self.uid = order.uid if "uid" in self.words else None
        self.path = job_path(node_path, self.uid) if "bubblewrap" in self.words else node_path
        self.sandbox: Sandbox | None = None
        self._groups = self._choose_groups()
        self._seen_work = SeenWork()
        self._is_work_counted: bool | None = None
        """By the kernel; None: nobody has asked yet."""
        self._oom_kills_before = 0
        self.memory_limit = order.limits.memory_bytes
        self._home = os.path.realpath(share.home)
        self._keep = programs(self.path, self.uid, self._home) if "bubblewrap" in self.words else ()
        self.cache = ProjectCache(order, self._home, self.uid)
        self._mounts = Mounts(order, self.uid, self._home, self._keep, self.cache.directory)
        self._has_own_network = order.probe is not None and order.probe.has_own_network

    @property
    def cgroups(self) -> tuple[str, ...]:
        return self._groups.paths if self._groups is not None else ()

    def prepare(self) -> None:
        """Make the cgroups, write down where they are, start the sandbox. Raises `ShoalError`, `OSError`."""
        if self._order.uid is not None and self.uid is None and self._order.confinement is None:
            raise CannotConfine(
                f"the job must run as user {self._order.uid}, and user {os.geteuid()} cannot start it so",
                hint="run `shoal up` as root, or without users of their own for projects",
            )
        self._close_network()
        if "bubblewrap" in self.words:
            self._start_sandbox()
        if self._groups is not None:
            spool.write_cgroups(self._at, self._groups.paths)
            self._groups.make(self._order)
        if self.sandbox is not None:
            self._wait_for_sandbox(self.sandbox)
        if self.sandbox is None:
            self._check_without_sandbox()

    def _close_network(self) -> None:
        """Keep other projects away. `FirewallFailed`: this node was said to do that, and does not."""
        if self.uid is None or "nftables" not in self.words:
            return
        try:
            firewall.close(self.uid)
        except firewall.FirewallFailed:
            if self._order.confinement is not None:
                raise
            self.words = tuple(word for word in self.words if word != "nftables")

    @property
    def walled_uid(self) -> int | None:
        """The job's user, where the kernel keeps those of other projects off its ports; None: it does not."""
        return self.uid if "nftables" in self.words else None

    def settle(self, order: Order) -> None:
        """The share is there, and ours: its directories take their places, its limits hold."""
        at, self._at, self._order = self._at, self._share, order
        spool.write_cgroups(self._share, self.cgroups)
        os.unlink(
            at.cgroups
        )  # what runs in them is the share's now: whoever buries that place must not kill it
        os.rename(at.work, self._share.work)
        os.rename(at.scratch, self._share.scratch)
        os.rename(at.stand_ins, self._share.stand_ins)
        if order.limits.memory_bytes is not None:
            self.limit_memory(order.limits.memory_bytes)
        self.weigh(FULL_WEIGHT)

    def limit_memory(self, memory_bytes: int) -> None:
        """Of all its processes together. `OSError`: they use more."""
        if self._groups is not None:
            self._groups.limit_memory(memory_bytes)
        self.memory_limit = memory_bytes

    def weigh(self, hundredths: int) -> None:
        """How much of the processors it gets where others want them too."""
        if self._groups is not None:
            self._groups.weigh(hundredths)

    def _wait_for_sandbox(self, sandbox: Sandbox) -> None:
        try:
            sandbox.wait_ready()
        except SandboxFailed:
            # Never where what the job asked for may be what failed: it must not choose its own walls.
            if self._order.confinement is not None or self._order.mounts or self._order.checkpoint_path:
                raise
            if self._has_own_network:
                raise
            # The program is there and may not be used, which `shoal nodes` has said all along.
            self.sandbox = None
            self._mounts.close()
            self.words = tuple(word for word in self.words if word != "bubblewrap")

    def _check_without_sandbox(self) -> None:
        if self._has_own_network:
            raise CannotConfine(
                "a network of its own needs bubblewrap, which is not in use on this node",
                hint="apt install bubblewrap, or leave out `network: private`",
            )
        if any(mount.source != mount.target for mount in self._order.mounts):
            raise CannotConfine(
                "mounts need bubblewrap, which is not in use on this node", hint="shoal doctor"
            )
        self._open_way(self._share.work, "work")
        if self.cache.directory is not None:
            self._open_way(self.cache.directory, "cache")
        if self._order.model_dir is not None:
            self._open_way(self._order.model_dir, "model")
            os.close(checkpoint_folder.open_directory(self._order.model_dir))
        socket_folder = listening.own_folder(self._order, self._home)
        if socket_folder is not None:
            self._open_way(socket_folder, "socket's")
        directory, path = self._order.checkpoint_dir, self._order.checkpoint_path
        if directory is None:
            return
        if path is not None and path.startswith("/"):
            raise CannotConfine(
                f"checkpoints at `{path}` need bubblewrap, which is not in use on this node",
                hint="give `checkpoint` a path without a leading `/`",
            )
        self._open_way(directory, "checkpoint")
        os.close(checkpoint_folder.open_directory(directory))

    def leave_network(self) -> None:
        """Children from now on are in the share's own network, if it has one; what prepared its place was
        not.
        """
        if self.sandbox is not None:
            self.sandbox.leave_network()

    def enter(self) -> None:
        """In a child that was just forked: take on every limit and leave every privilege. `OSError`: the
        child must not go on.
        """
        if self._groups is not None:
            for path in self._groups.paths:
                cgroup.write(f"{path}/{self._groups.join_file}", "0")
        with contextlib.suppress(OSError):
            cgroup.write("/proc/self/oom_score_adj", JOB_OOM_SCORE)
        if "rlimits" in self.words:
            rlimits.apply_limits(self._order, is_own_user=self.uid is not None)
        if "affinity" in self.words:
            rlimits.pin(self._order)
        kernel.leave_keyring()
        supervisor: int | None = os.getppid()
        if self.sandbox is not None:
            supervisor = None
            self.sandbox.enter()
            self._mounts.check()
            kernel.drop_capabilities()
        if self.uid is not None:
            gid = firewall.open_gid(self.uid) if self._order.has_open_network else self.uid
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(self.uid, self.uid, self.uid)
        kernel.forbid_new_privileges()
        kernel.die_with_parent(supervisor)

    def kill(self, *, reap: Callable[[], object], timeout_s: float) -> bool:
        """Kill every process of the share. False: some did not die in time. Repeat until True.

        `reap` collects this process's dead children, without which a sandbox cannot end.
        """
        if self.sandbox is not None:
            self.sandbox.kill()
        for path in self.cgroups:
            tree.unthrottle(path)
        return tree.kill_until_gone(self._processes, timeout_s=timeout_s, between=reap)

    def _processes(self) -> set[int]:
        found = tree.pids_in(self.cgroups)
        if self.sandbox is not None and not self.sandbox.is_gone():
            found.add(os.getpid())  # never signalled, but says: not yet
        if self.sandbox is None and not self.cgroups:
            found |= tree.descendants(os.getpid())
        return found

    def has_memory_for(self, share: float) -> bool:
        """Whether the share could use so much more than it does, by the factor, and stay within its limit."""
        limit, used = self.memory_limit, self.memory_bytes()
        return limit is None or (used is not None and used * (1 + share) <= limit)

    def processes(self) -> set[int]:
        """Every process of the share that can be seen now."""
        return tree.pids_in(self.cgroups) if self.cgroups else tree.descendants(os.getpid())

    def begin_ranks(self) -> None:
        """What the kernel killed for memory until now was not a rank."""
        self._oom_kills_before = self._oom_kills()

    def has_run_out_of_memory(self, *, was_killed: bool) -> bool:
        """Whether the kernel killed something in here for memory since the ranks began. Without cgroups of
        its own the share is in one of its cluster's, perhaps with others: then only of a rank that
        `was_killed`.
        """
        return (was_killed or self._groups is not None) and self._oom_kills() > self._oom_kills_before

    def _oom_kills(self) -> int:
        return self._groups.oom_kills() if self._groups is not None else cgroup.oom_kills(cgroup.here())

    def cpu_seconds(self) -> float | None:
        """CPU time used by the whole share, where the kernel counts it."""
        return self._groups.cpu_seconds() if self._groups is not None else None

    def work_seconds(self) -> float | None:
        """The same, or as far as it is seen where the kernel does not: to tell the idle from the busy.

        None: not to be read just now. Of two counters only one is ever read: each has a zero of its own.
        """
        counted_s = self.cpu_seconds()
        if self._is_work_counted is None:
            self._is_work_counted = counted_s is not None
        return counted_s if self._is_work_counted else self._seen_work.seconds()

    def memory_bytes(self) -> int | None:
        """What cannot be taken back from the share's processes, where the kernel counts it."""
        return self._groups.memory_bytes() if self._groups is not None else None

    def remove(self) -> None:
        """Remove the empty cgroups; one that stays busy is left for `spool.kill_leftovers`."""
        tree.remove_cgroups(self.cgroups)

    def _choose_groups(self) -> cgroup1.CgroupV1 | cgroup2.CgroupV2 | None:
        own = "" if self._at is self._share else f".{os.getpid()}"
        name = f"{self._order.attempt_id}.{self._order.node}{own}"
        found = cgroup.here()
        if "cgroup2" in self.words:
            base = cgroup2.usable_base(found, stays=self._order.stays_in_cgroup)
            if base is None:
                raise CannotConfine("cgroup version 2 with cpu, memory and pids is not delegated to us here")
            return cgroup2.CgroupV2(base, name)
        if "cgroup1" in self.words:
            bases = cgroup1.usable_bases(found)
            if bases is None:
                raise CannotConfine("cgroup version 1 with cpu, memory and pids is not writable here")
            return cgroup1.CgroupV1(bases, name)
        return None

    def _start_sandbox(self) -> None:
        program = find_bubblewrap()
        if program is None:
            raise SandboxFailed("there is no `bwrap` on this node", hint="apt install bubblewrap")
        arguments = view.view_arguments(
            uid=self.uid,
            home=self._home,
            work=self._share.work,
            work_source=self._at.work,
            scratch=self._at.scratch,
            stand_ins=self._share.stand_ins,
            stand_ins_source=self._at.stand_ins,
            keep=self._keep,
            gpu_devices=gpu_devices(self._order),
            mounts=self._mounts.open(),
        )
        self.sandbox = Sandbox(program, arguments, has_own_network=self._has_own_network)

    def _open_way(self, wanted: str, what: str) -> None:
        """Let the job's user pass through SHOAL_HOME to what is its own; it can list and read nothing there.

        Directories above SHOAL_HOME are not ours to open.
        """
        path = wanted
        while path != "/" and self.uid is not None:
            path = os.path.dirname(path)
            if view.may_enter(path, self.uid):
                continue
            if not view.is_within(path, self._home):
                raise CannotConfine(
                    f"the job's user {self.uid} cannot pass through `{path}` to its {what} directory",
                    hint="apt install bubblewrap, or choose another SHOAL_HOME, such as /var/lib/shoal",
                )
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IXOTH)


def gpu_devices(order: Order) -> tuple[str, ...]:
    """Device files of the given GPUs, with the shared ones NVIDIA's driver needs. Where the cluster chose
    them, those of all: which of them can be opened is for its own cgroup to say.
    """
    if not order.gpu_ids or order.are_gpus_simulated:
        return ()
    shared = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")
    minors = cgroup1.gpu_minors(os.listdir("/dev")) if order.are_gpus_chosen_there else order.gpu_minors
    names = (*(f"nvidia{minor}" for minor in minors), *shared)
    return tuple(path for path in (f"/dev/{name}" for name in names) if os.path.exists(path))
