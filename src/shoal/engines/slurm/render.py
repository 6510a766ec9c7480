"""Renders what Slurm gets: a job request, the arguments of `sbatch`, and the batch script. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping

import msgspec

from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.nodes import GRES
from shoal.engines.slurm.partitions import ANY_PARTITION, Partition, time_argument
from shoal.errors import EngineRefused
from shoal.wire import LaunchRequest, TaskIdentity, TaskSpec

END = "SHOAL_LAUNCH_REQUEST_END"
GpuKinds = Mapping[str, tuple[str, ...]]
"""By node: the kind of each GPU by its index, as Slurm spells it."""
RESOLVE_PYTHONPATH = 'path=$(readlink -e -- "$PYTHONPATH") && PYTHONPATH=$path; exec "$@"'
"""Resolves a PYTHONPATH that is a link on that node, so that a node agent stays with one version of Shoal."""
UNPLAIN = re.compile(r"[^A-Za-z0-9_.@-]")
REPLACEMENT_NUMBER = re.compile(r"0|[1-9][0-9]*")
MAX_PART = 48
"""Characters of a job's or project's name in the name of a Slurm job: slurmdbd keeps 255 bytes of it."""
EXPORTED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ")


def job_name(identity: TaskIdentity, replacement: int) -> str:
    """Return the name of a Slurm job: what people call the job, then the attempt and the replacement
    number.

    The engine finds its jobs by this exact name, not by the id or the comment, which sites' plugins
    rewrite. `squeue` shows the first 8 characters by default. No field that the name is made of changes
    while the attempt lives.
    """
    job = f"{_plain(identity.job_name)}.{_plain(identity.project)}-{identity.job_number}"
    return f"{job}.shoal-{identity.attempt_id}.{replacement}"


def is_name_of(identity: TaskIdentity, name: str) -> bool:
    """Return whether this names a Slurm job of this attempt, of any replacement."""
    begin = job_name(identity, 0).removesuffix("0")
    return name.startswith(begin) and REPLACEMENT_NUMBER.fullmatch(name.removeprefix(begin)) is not None


def comment(identity: TaskIdentity) -> str:
    """Return a sentence for people. Shoal does not read it."""
    whose = f" of {_plain(identity.owner)}" if identity.owner else ""
    return (
        f"Shoal job {_plain(identity.project)}/{identity.job_number} {_plain(identity.job_name)}{whose}, "
        f"attempt {identity.attempt_id}, replacement {identity.replacement}"
    )


def _plain(text: str) -> str:
    """Return at most `MAX_PART` characters that mean nothing to a shell, a terminal or a path, or in a list
    of `scancel --name`, where a comma separates.
    """
    return UNPLAIN.sub("_", text)[:MAX_PART]


def sbatch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of `sbatch`, and so of the node agent.

    It has none of our variables, and none that people set to change what `sbatch` does.
    """
    return {name: value for name, value in environ.items() if name in (*EXPORTED_VARIABLES, "SLURM_CONF")}


class SlurmJobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to submit a job, for any transport."""

    name: str
    comment: str
    nodes: tuple[str, ...]
    cpus: int
    """For the one task on each node."""
    memory_mb: int = 0
    """On each node; 0: the site's default."""
    gpus: tuple[tuple[str, int], ...] = ()
    """On each node: kinds as Slurm spells them, empty for any kind, and counts."""
    other_gres: tuple[str, ...] = ()
    """One on each node of what else Slurm counts there."""
    time: str = ""
    """In minutes, or as Slurm spells a limit; empty: the site's default."""
    output: str
    script: str
    partition: str = ""
    account: str = ""
    qos: str = ""

    @property
    def gres(self) -> str:
        gpus = [":".join(["gpu", *([kind] if kind else []), str(count)]) for kind, count in self.gpus]
        return ",".join([*gpus, *(f"{name}:1" for name in self.other_gres)])


def job_request(
    config: SlurmConfig,
    task_specs: tuple[TaskSpec, ...],
    gpu_kinds: GpuKinds,
    output: str,
    script: str,
    partition: Partition = ANY_PARTITION,
) -> SlurmJobRequest:
    """Return a request for exactly the tasks' resources, on exactly their nodes, in the chosen partition.

    It asks for no byte more: with a margin for our own processes, no job could use a node's last GPU or
    CPU.
    """
    identity, resources = task_specs[0].identity, task_specs[0].resources
    if resources.gpu_milli != 1000:
        raise EngineRefused(
            f"job {identity.job_number} asks for {resources.gpu_milli / 1000:g} of a GPU; "
            "Slurm gives whole ones",
            hint="set `gpus: 1` in `resources`",
        )
    memory = max((task_spec.resources.memory_bytes or 0 for task_spec in task_specs), default=0)
    return SlurmJobRequest(
        name=job_name(identity, identity.replacement),
        comment=comment(identity),
        nodes=tuple(task_spec.identity.node for task_spec in task_specs),
        cpus=num_cpus(task_specs),
        memory_mb=max(memory >> 20, 1) if memory else 0,
        gpus=_gpus(task_specs, gpu_kinds),
        other_gres=tuple(
            sorted(name.removeprefix(GRES) for name in resources.require if name.startswith(GRES))
        ),
        time=time_argument(resources, partition),
        output=output,
        script=script,
        partition=partition.name,
        account=config.account_of(identity.project),
        qos=config.qos_of(identity.project),
    )


def _gpus(task_specs: tuple[TaskSpec, ...], gpu_kinds: GpuKinds) -> tuple[tuple[str, int], ...]:
    """Return the GPU kinds and counts for each node.

    Kinds are set if the nodes name them and all tasks have the same, because Slurm gives every node of a
    job the same. Tasks with different kinds belong to a job that takes any kind.
    """
    chosen = [
        Counter(_kind(gpu_kinds, task_spec.identity.node, index) for index in task_spec.resources.gpu_ids)
        for task_spec in task_specs
    ]
    if all(kinds == chosen[0] for kinds in chosen) and "" not in chosen[0]:
        return tuple(sorted(chosen[0].items()))
    max_gpus = max(len(task_spec.resources.gpu_ids) for task_spec in task_specs)
    return (("", max_gpus),) if max_gpus else ()


def _kind(gpu_kinds: GpuKinds, node: str, index: int) -> str:
    kinds = gpu_kinds.get(node, ())
    return kinds[index] if index < len(kinds) else ""


def sbatch_arguments(request: SlurmJobRequest) -> list[str]:
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
        # With a list of names instead, every node first runs the user's login shell, for any length of
        # time.
        "--export=ALL",
    ]
    options = {
        "mem": f"{request.memory_mb}M" if request.memory_mb else "",
        "gres": request.gres,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
    }
    return [*arguments, *(f"--{name}={value}" for name, value in options.items() if value)]


def num_cpus(task_specs: tuple[TaskSpec, ...]) -> int:
    """Return the number of CPUs on each node."""
    return max(math.ceil(task_spec.resources.cpus) for task_spec in task_specs)


def batch_script(
    config: SlurmConfig, launch_request: LaunchRequest, num_nodes: int, cpus: int, *, can_bind: bool = True
) -> str:
    """Return the batch script.

    It passes the launch request to every task on standard input: Slurm shows a script only to its user.
    """
    encoded = msgspec.json.encode(launch_request).decode()
    agent = [config.python, "-P", "-s", "-m", "shoal.runtime.agent.bootstrap", "$SLURMD_NODENAME"]
    srun = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    # Not every version inherits it. A node agent must not affect which CPUs ranks are bound to.
    srun.append(f"--cpus-per-task={cpus}")
    if can_bind:  # otherwise `srun` writes into every job's output that it cannot bind
        srun.append("--cpu-bind=none")
    srun += ["--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--input=all", "--unbuffered"]
    path = f"export PYTHONPATH={shlex.quote(config.python_path)}\n" if config.python_path else ""
    if path:
        agent = ["sh", "-c", RESOLVE_PYTHONPATH, "keeper", *agent]
    return (
        "#!/bin/sh\n"
        f"# Shoal attempt {launch_request.attempt_id}, replacement {launch_request.replacement}\n"
        "umask 077\n"
        "unset SLURM_EXPORT_ENV\n"
        f"{path}"
        f"exec {shlex.join([*srun, *agent])} <<'{END}'\n"
        f"{encoded}\n"
        f"{END}\n"
    )
