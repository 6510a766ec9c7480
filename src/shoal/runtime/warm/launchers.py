"""Launchers that people write in front of their program, and which the supervisor has replaced.

`torchrun --nproc-per-node 4 train.py --lr 1` is, in a rank, `python train.py --lr 1`: the other ranks are
there already. Where a job has one rank on each node and the launcher is to start more there, the real one
runs, with the job's nodes as its group.
"""

from __future__ import annotations

import os
import sys

from . import names

LAUNCH = "torch.distributed.launch"
MODULES = {
    "torch.distributed.run": "torchrun",
    LAUNCH: LAUNCH,
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""The same launchers as `python -m` starts them."""
NAMES = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
SAME = {"deepspeed.pt": "deepspeed", "ds": "deepspeed"}
"""Other names of their scripts, which are only known by the interpreter that they start."""
_MODULE_OF = {
    "torchrun": "torch.distributed.run",
    LAUNCH: LAUNCH,
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}
MARK = "SHOAL_LAUNCHER"
"""Set for a launcher that is to run as it is, and for all that it starts."""
_PER_NODE = ("--nproc-per-node", "--num-gpus")
_IN_ALL = ("--num-processes",)
_NODES = ("--nnodes", "--num-machines", "--num-nodes")
_LOCAL_RANK = {LAUNCH: "--local-rank", "deepspeed": "--local_rank"}
"""Those that hand a program its number as an argument."""
_NO_LOCAL_RANK = {"--use-env", "--use_env", "--no_local_rank"}
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python's own that take the next word."""
_MEETING = (
    *("--nnodes", "--node-rank", "--master-addr", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--rdzv-conf", "--master-port", "--local-addr"),
)
"""Where and as whom a launcher meets those of other nodes: the job knows, whatever a script says."""
_COUNTS_GPUS = ("gpu", "auto")
_TASK_NAMES = (
    *("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_", "ROLE_", "CROSS_", "LOCAL_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_"),
)
"""Names that say which of the job's ranks this is: the launcher's own processes are others."""


FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Of the stand-ins, in a rank."""


class Refused(Exception):
    """The launcher cannot do in this job what it was told. `hint`: what to write instead; `report`: what the
    supervisor is told.
    """

    def __init__(self, message: str, hint: str, report: str = names.REFUSED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.report = report


def named(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The launcher that a command is, and its own arguments. None: it is none."""
    launcher, words = _named(name, arguments)
    return (launcher, words) if launcher is not None else (None, arguments)


def _named(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    if name in NAMES:
        return _subcommand(name, arguments)
    at = _after_options(arguments)
    words = arguments[at:]
    if words[:1] == ["-m"] and len(words) > 1 and words[1] in MODULES:
        return _subcommand(MODULES[words[1]], words[2:])
    script = os.path.basename(words[0]) if words else ""
    script = SAME.get(script, script)
    if script in NAMES and not words[0].startswith("-"):
        return _subcommand(script, words[1:])
    return None, arguments


def _subcommand(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """`accelerate launch` is a launcher; its other subcommands are programs like any other."""
    if name != "accelerate":
        return name, arguments
    return ("accelerate-launch", arguments[1:]) if arguments[:1] == ["launch"] else (None, arguments)


def _after_options(words: list[str]) -> int:
    """Where the options of Python's own end."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "-m", "-c"):
        at += 2 if words[at] in _PYTHON_VALUES else 1
    return at


def options(arguments: list[str]) -> list[str]:
    """What stands before the program."""
    at = _program_at(arguments)
    return arguments if at is None else arguments[:at]


def program(name: str, arguments: list[str], environment: dict[str, str]) -> list[str] | None:
    """The arguments for `python`; None: the real launcher is to run. `Refused`: it is neither."""
    at = _program_at(arguments)
    if at is None:
        if not arguments or {"-h", "--help", "--version"} & set(arguments):
            return None
        raise Refused(
            f"`{name}` has no program: no word is a file that ends with `.py`, and there is no `-m`",
            "write `python your_program.py` in `run`; Shoal starts the ranks itself",
        )
    before, words = arguments[:at], arguments[at:]
    if is_for_the_real_one(name, before, environment):
        return None
    head = ["-m", words[1]] if words[0] in ("-m", "--module") else words[:1]
    rest = words[len(head) :]
    if name in _LOCAL_RANK and not _NO_LOCAL_RANK & set(before):
        rest = [f"{_LOCAL_RANK[name]}={environment.get('SHOAL_LOCAL_RANK', '0')}", *rest]
    return [*head, *rest]


def _program_at(arguments: list[str]) -> int | None:
    for position, word in enumerate(arguments):
        if word in ("-m", "--module") and position + 1 < len(arguments):
            return position
        if word.endswith(".py") and os.path.isfile(word):
            return position
    return None


def is_for_the_real_one(name: str, before: list[str], environment: dict[str, str]) -> bool:
    """Whether the launcher is to start more processes than the job has ranks, and can do so in one group.

    `Refused`: it asks for another number of processes or nodes than there are.
    """
    nodes, each = _number(environment, "SHOAL_NUM_NODES"), _number(environment, "SHOAL_RANKS_PER_NODE")
    _refuse_other_nodes(before, nodes)
    asked, in_all = value_of(_PER_NODE, before), value_of(_IN_ALL, before)
    has_more = is_number(asked) and int(asked or 0) > 1
    has_more = has_more or (asked in _COUNTS_GPUS and "," in environment.get("CUDA_VISIBLE_DEVICES", ""))
    has_more = has_more or (is_number(in_all) and int(in_all or 0) > nodes)
    if each == 1 and has_more and (name in ("torchrun", LAUNCH) or nodes == 1):
        return True
    per_node, total = (asked, each, "on a node", 1), (in_all, each * nodes, "in all", nodes)
    for wanted, there, where, parts in (per_node, total):
        if wanted is not None and is_number(wanted) and int(wanted) != there:
            what = "process" if wanted == "1" else "processes"
            raise Refused(
                f"the launcher asks for {wanted} {what} {where}, and the job has {there}",
                f"set `ranks_per_node: {-(-int(wanted) // parts)}` in the job, or leave the option out",
            )
    return False


def _refuse_other_nodes(before: list[str], nodes: int) -> None:
    asked = value_of(_NODES, before) or ""
    low, _, high = asked.partition(":")
    if not is_number(low) or (high and not is_number(high)):
        return
    if not int(low) <= nodes <= int(high or low):
        what = "node" if asked == "1" else "nodes"
        raise Refused(
            f"the launcher asks for {asked} {what}, and the job has {nodes}",
            f"submit with `--nodes {low if not high else f'{low}..{high}'}`, or leave the option out",
        )


def real(name: str, arguments: list[str], environment: dict[str, str]) -> list[str]:
    """The arguments with which `python` runs the real launcher, as the part of one group that is here."""
    at = _program_at(arguments)
    before, rest = (arguments, []) if at is None else (arguments[:at], arguments[at:])
    if name in ("torchrun", LAUNCH) and at is not None:
        before = _meeting(before, environment)
    return ["-m", _MODULE_OF[name], *before, *rest]


def real_environment(name: str, environment: dict[str, str]) -> dict[str, str]:
    """What the real launcher finds: it gives numbers to its processes itself."""
    kept = {key: value for key, value in environment.items() if not key.startswith(_TASK_NAMES)}
    return {**kept, MARK: name}


def _meeting(before: list[str], environment: dict[str, str]) -> list[str]:
    nodes = environment.get("SHOAL_NUM_NODES", "1")
    port = value_of(("--master-port",), before) or environment.get("SHOAL_MASTER_PORT", "29500")
    others = _without_empty(before) if nodes == "1" else _without(_MEETING, before)
    if nodes == "1":
        return others  # it meets nobody: several of them may run here, each at the port it was given
    return [
        *("--nnodes", nodes, "--node-rank", environment.get("SHOAL_NODE_RANK", "0")),
        *("--master-addr", environment.get("SHOAL_MASTER_ADDR", "127.0.0.1"), "--master-port", port),
        *(word for word in others if word != "--standalone"),
    ]


def _without(names: tuple[str, ...], words: list[str]) -> list[str]:
    kept, is_value = [], False
    for word in words:
        option, has_value, _ = word.partition("=")
        is_dropped = option.replace("_", "-") in names
        if not is_dropped and not is_value:
            kept.append(word)
        is_value = is_dropped and not has_value
    return kept


def _without_empty(words: list[str]) -> list[str]:
    """Without `--nnodes=$SLURM_NNODES` and the like where there is no such variable."""
    return [word for word in words if not (word.startswith("--") and word.endswith("="))]


def identity(name: str, environment: dict[str, str]) -> dict[str, str]:
    """What a program behind this launcher finds, where it is the only rank of its job. Others have it."""
    if environment.get("SHOAL_WORLD_SIZE") != "1" or name == "accelerate-launch":
        return {}  # `accelerate launch` tells a single process nothing either
    found = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
        "MASTER_ADDR": environment.get("SHOAL_MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": environment.get("SHOAL_MASTER_PORT", "29500"),
    }
    if name == "deepspeed":
        return {**found, "LOCAL_SIZE": "1", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    return {
        **found,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": environment.get("SHOAL_ATTEMPT_ID", "shoal"),
        "TORCHELASTIC_RESTART_COUNT": environment.get("SHOAL_GENERATION", "0"),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def value_of(names: tuple[str, ...], words: list[str]) -> str | None:
    """What an option was given, as `--option=value` or `--option value`; None: it is not there.

    `-` and `_` are the same in it, as launchers take them.
    """
    for position, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") in names:
            return value if has_value else "".join(words[position + 1 : position + 2])
    return None


def is_number(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdigit() and len(text) < 10


def _number(environment: dict[str, str], name: str) -> int:
    text = environment.get(name)
    return int(text) if text is not None and is_number(text) else 1


def end(refused: Refused) -> None:
    """End the process with the sentence. From every rank: the first to end has the others stopped, perhaps
    before they have spoken.
    """
    sys.stderr.write(f"shoal: {refused.message}\nhint: {refused.hint}\n")
    tell(FOLDER, refused.report)
    os._exit(2)


def tell(folder: str, report: str) -> None:
    """Tell the supervisor, as a script may pass over how its launcher ended (`torchrun ... | tee log`)."""
    rank, group = os.environ.get("SHOAL_RANK"), os.environ.get("SHOAL_GENERATION", "0")
    try:
        fd = os.open(os.path.join(folder, names.WORLDS), os.O_WRONLY | os.O_APPEND)
    except OSError:
        return  # the program has removed the folder: it has its sentence all the same
    try:
        if rank is not None:
            os.write(fd, f"{rank} {group} 1 0 0.0 {report}\n".encode())
    finally:
        os.close(fd)
