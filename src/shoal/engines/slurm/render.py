"""What Slurm is told: a request, the arguments of `sbatch`, and the batch script. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping

import msgspec

from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.nodes import GRES
from shoal.engines.slurm.partitions import ANY, Partition, time_for
from shoal.errors import EngineRefused
from shoal.wire import Order, Summons

END = "SHOAL_SUMMONS_END"
GpuKinds = Mapping[str, tuple[str, ...]]
"""By node: of each GPU, by its index, as Slurm spells it."""
FOLLOWED = 'path=$(readlink -e -- "$PYTHONPATH") && PYTHONPATH=$path; exec "$@"'
"""Where it is a link, what it leads to on that node now: a keeper stays with one version of Shoal."""
UNPLAIN = re.compile(r"[^A-Za-z0-9_.@-]")
INCARNATION = re.compile(r"0|[1-9][0-9]*")
MAX_PART = 48
"""Characters of a job's or project's name in the name of a Slurm job: slurmdbd keeps 255 bytes of it."""
EXPORTED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ")


def job_name(order: Order, incarnation: int) -> str:
    """Return the name of a Slurm job: what people call the job, then the attempt and the incarnation.

    The engine knows its jobs by this exact name, whatever became of the id, and of the comment, which plugins
    of sites rewrite. `squeue` shows the first 8 characters unless it is told otherwise. No part of an order
    that the name is made of changes while its attempt lives.
    """
    job = f"{_plain(order.job_name)}.{_plain(order.project)}-{order.job_number}"
    return f"{job}.shoal-{order.attempt_id}.{incarnation}"


def is_name_of(order: Order, name: str) -> bool:
    """Whether this is the name of a Slurm job of the order's attempt, of any incarnation."""
    begin = job_name(order, 0).removesuffix("0")
    return name.startswith(begin) and INCARNATION.fullmatch(name.removeprefix(begin)) is not None


def comment(order: Order) -> str:
    """Return a sentence for people. Nothing of ours reads it."""
    whose = f" of {_plain(order.owner)}" if order.owner else ""
    return (
        f"Shoal job {_plain(order.project)}/{order.job_number} {_plain(order.job_name)}{whose}, "
        f"attempt {order.attempt_id}, incarnation {order.incarnation}"
    )


def _plain(text: str) -> str:
    """Return at most `MAX_PART` characters that mean nothing to a shell or terminal, in a path, or in a list
    of `scancel --name`, where a comma separates.
    """
    return UNPLAIN.sub("_", text)[:MAX_PART]


def sbatch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What `sbatch` is run with, and hence the keeper: nothing of ours, and nothing that people have set to
    change what `sbatch` does.
    """
    return {name: value for name, value in environ.items() if name in (*EXPORTED, "SLURM_CONF")}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be, whichever door it goes through."""

    name: str
    comment: str
    nodes: tuple[str, ...]
    cpus: int
    """For the one task on each node."""
    memory_mb: int = 0
    """On each node; 0: as the site has it."""
    gpus: tuple[tuple[str, int], ...] = ()
    """On each node: kinds as Slurm spells them, empty for any, and how many."""
    others: tuple[str, ...] = ()
    """One on each node of what else Slurm counts there."""
    time: str = ""
    """In minutes, or as Slurm spells a limit of its own; empty: as the site has it."""
    output: str
    script: str
    partition: str = ""
    account: str = ""
    qos: str = ""

    @property
    def gres(self) -> str:
        gpus = [":".join(["gpu", *([kind] if kind else []), str(count)]) for kind, count in self.gpus]
        return ",".join([*gpus, *(f"{name}:1" for name in self.others)])


def request(
    config: SlurmConfig,
    orders: tuple[Order, ...],
    kinds: GpuKinds,
    output: str,
    script: str,
    partition: Partition = ANY,
) -> Request:
    """Exactly what the shares were given, on exactly their nodes, in the partition that was chosen.

    Not a byte more: a margin for our own processes would leave the last GPU or CPU of a node to nobody.
    """
    first = orders[0]
    if first.gpu_milli != 1000:
        raise EngineRefused(
            f"job {first.job_number} asks for {first.gpu_milli / 1000:g} of a GPU; Slurm gives whole ones",
            hint="set `gpus: 1` in `resources`",
        )
    memory = max((order.limits.memory_bytes or 0 for order in orders), default=0)
    return Request(
        name=job_name(first, first.incarnation),
        comment=comment(first),
        nodes=tuple(order.node for order in orders),
        cpus=num_cpus(orders),
        memory_mb=max(memory >> 20, 1) if memory else 0,
        gpus=_gpus(orders, kinds),
        others=tuple(sorted(name.removeprefix(GRES) for name in first.require if name.startswith(GRES))),
        time=time_for(first, partition),
        output=output,
        script=script,
        partition=partition.name,
        account=config.account_of(first.project),
        qos=config.qos_of(first.project),
    )


def _gpus(orders: tuple[Order, ...], kinds: GpuKinds) -> tuple[tuple[str, int], ...]:
    """Of which kinds, where the nodes name them and all shares have the same: Slurm gives every node of a job
    the same. Shares with others are of a job that takes any kind.
    """
    chosen = [Counter(_kind(kinds, order.node, index) for index in order.gpu_ids) for order in orders]
    if all(one == chosen[0] for one in chosen) and "" not in chosen[0]:
        return tuple(sorted(chosen[0].items()))
    most = max(len(order.gpu_ids) for order in orders)
    return (("", most),) if most else ()


def _kind(kinds: GpuKinds, node: str, index: int) -> str:
    known = kinds.get(node, ())
    return known[index] if index < len(known) else ""


def sbatch_arguments(request: Request) -> list[str]:
    arguments = [
        "--parsable",
        f"--job-name={request.name}",
        f"--comment={request.comment}",
        f"--nodes={len(request.nodes)}",
        f"--nodelist={','.join(request.nodes)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.cpus}",
        "--no-requeue",
        "--no-kill",
        "--chdir=/",
        "--open-mode=append",
        f"--output={request.output}",
        # A list of names instead has every node run the user's login shell first, which takes what it takes.
        "--export=ALL",
    ]
    given = {
        "mem": f"{request.memory_mb}M" if request.memory_mb else "",
        "gres": request.gres,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
    }
    return [*arguments, *(f"--{name}={value}" for name, value in given.items() if value)]


def num_cpus(orders: tuple[Order, ...]) -> int:
    """On each node."""
    return max(math.ceil(order.limits.cpus) for order in orders)


def batch_script(
    config: SlurmConfig, summons: Summons, num_nodes: int, cpus: int, *, can_bind: bool = True
) -> str:
    """The summons goes to every task on its standard input: Slurm shows a job's script to its user alone."""
    told = msgspec.json.encode(summons).decode()
    keeper = [config.python, "-P", "-s", "-m", "shoal.runtime.keep", "$SLURMD_NODENAME"]
    srun = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    # Not every version inherits it; and to which CPUs ranks are bound is not a keeper's affair.
    srun.append(f"--cpus-per-task={cpus}")
    if can_bind:  # or `srun` writes into every job's output that it cannot be
        srun.append("--cpu-bind=none")
    srun += ["--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--input=all", "--unbuffered"]
    path = f"export PYTHONPATH={shlex.quote(config.python_path)}\n" if config.python_path else ""
    if path:
        keeper = ["sh", "-c", FOLLOWED, "keeper", *keeper]
    return (
        "#!/bin/sh\n"
        f"# Shoal attempt {summons.attempt_id}, incarnation {summons.incarnation}\n"
        "umask 077\n"
        "unset SLURM_EXPORT_ENV\n"
        f"{path}"
        f"exec {shlex.join([*srun, *keeper])} <<'{END}'\n"
        f"{told}\n"
        f"{END}\n"
    )
