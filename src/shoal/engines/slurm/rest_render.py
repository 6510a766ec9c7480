"""What slurmrestd is told, in the version of its language that it speaks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.engines.slurm.partitions import UNLIMITED
from shoal.engines.slurm.render import Request

Body = dict[str, Any]
Renderer = Callable[[Request, Mapping[str, str]], Body]


def job_v38(request: Request, environment: Mapping[str, str]) -> Body:
    """Of Slurm 22.05. It takes the words of `sbatch` in an odd spelling: a list of `nodes` is passed over,
    `required_nodes` and `tres_per_node` are refused, `requeue` means yes whatever its value is.
    """
    job = {
        "nodes": str(len(request.nodes)),
        "nodelist": ",".join(request.nodes),
        "no_requeue": True,
        "no_kill": "set",
        "gres": request.gres,
        "memory_per_node": request.memory_mb,
        "time_limit": _minutes(request),
        "environment": dict(environment),
    }
    return {"script": request.script, "job": _given(_alike(request) | job)}


def job_v42(request: Request, environment: Mapping[str, str]) -> Body:
    """Of Slurm 24.11."""
    job = {
        "script": request.script,
        "minimum_nodes": len(request.nodes),
        "maximum_nodes": len(request.nodes),
        "required_nodes": list(request.nodes),
        "requeue": False,
        "kill_on_node_fail": False,
        "tres_per_node": ",".join(f"gres/{one}" for one in request.gres.split(",") if one),
        "memory_per_node": _number(request.memory_mb),
        "time_limit": _number(_minutes(request)) or _infinite(request),
        "environment": [f"{name}={value}" for name, value in environment.items()],
    }
    return {"job": _given(_alike(request) | job)}


RENDERERS: dict[str, Renderer] = {"v0.0.42": job_v42, "v0.0.38": job_v38}
"""By version, the one to be preferred first."""


def _alike(request: Request) -> Body:
    return {
        "name": request.name,
        "comment": request.comment,
        "tasks": len(request.nodes),
        "tasks_per_node": 1,
        "cpus_per_task": request.cpus,
        "current_working_directory": "/",
        "open_mode": "append",
        "standard_output": request.output,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
    }


def _minutes(request: Request) -> int:
    """0: the longest that the site gives, or as it has it."""
    return int(request.time) if request.time.isdigit() else 0


def _infinite(request: Request) -> Body | None:
    return {"set": True, "infinite": True, "number": 0} if request.time == UNLIMITED else None


def _number(value: int) -> Body | None:
    return {"set": True, "infinite": False, "number": value} if value else None


def _given(job: Body) -> Body:
    """Without what is left to the site."""
    return {name: value for name, value in job.items() if value is False or value}
