"""Launchers that people write in front of their program, and which the supervisor has replaced.

`torchrun --nproc-per-node 4 train.py --lr 1` is, in a rank, `python train.py --lr 1`: the other ranks are
there already. Where a job has one rank on each node and the launcher is to start more there, the real one
runs, with the job's nodes as its group.
"""

from __future__ import annotations

import os
import sys

from . import names, options
from .options import LAUNCH

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
MODULE_OF = {
    "torchrun": "torch.distributed.run",
    LAUNCH: LAUNCH,
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}
MARK = "SHOAL_LAUNCHER"
"""Set for a launcher that is to run as it is, and for all that it starts."""
_TORCH = ("torchrun", LAUNCH)
_PER_NODE = ("nproc-per-node", "num-gpus", "num-accelerators")
_IN_ALL = ("num-processes",)
_NODES = ("nnodes", "num-machines", "num-nodes")
_LOCAL_RANK = {LAUNCH: "--local-rank", "deepspeed": "--local_rank"}
"""Those that hand a program its number as an argument."""
_NO_LOCAL_RANK = ("use-env", "no-local-rank")
_MEETING = (
    *("nnodes", "node-rank", "master-addr", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
    *("master-port", "local-addr", "standalone"),
)
"""Where and as whom a launcher meets those of other nodes: the job knows, whatever a script says."""
_DEVICES = ("gpu", "cpu", "auto")
"""What `torchrun --nproc-per-node` counts by itself."""
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


class Said:
    """A number that a launcher was given. `place`: where; `remedy`: what to do there if it is wrong."""

    def __init__(self, value: str, place: str = "", remedy: str = "leave the option out") -> None:
        self.value = value
        self.place = f" ({place})" if place else ""
        self.remedy = remedy


def named(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The launcher that a command is, and its own arguments. None: it is none."""
    launcher, words = _named(name, arguments)
    return (launcher, words) if launcher is not None else (None, arguments)


def _named(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    if name in NAMES:
        return _subcommand(name, arguments)
    module, words = _of_python(arguments)
    if module is not None:
        return _subcommand(MODULES[module], words) if module in MODULES else (None, arguments)
    script = os.path.basename(words[0]) if words else ""
    script = SAME.get(script, script)
    return _subcommand(script, words[1:]) if script in NAMES else (None, arguments)


def _subcommand(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """`accelerate launch` is a launcher; its other subcommands are programs like any other."""
    if name != "accelerate":
        return name, arguments
    return ("accelerate-launch", arguments[1:]) if arguments[:1] == ["launch"] else (None, arguments)


def _of_python(words: list[str]) -> tuple[str | None, list[str]]:
    """The module of a Python's command line and its words, or None and the script with its words."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word, at = words[at], at + 1
        if word == "--":
            break
        if word.startswith("--"):
            at += word == "--check-hash-based-pycs"  # the only long one that takes the next word
            continue
        position = next((n for n, letter in enumerate(word) if letter in "cmWX"), len(word))
        letter, value = word[position : position + 1], word[position + 1 :]
        if letter and not value:
            value, at = "".join(words[at : at + 1]), at + 1
        if letter == "c":
            return None, []
        if letter == "m":
            return value, words[at:]
    return None, words[at:]


def program(
    command: options.Command, environment: dict[str, str], in_files: dict[str, Said]
) -> list[str] | None:
    """The arguments for `python`; None: the real launcher is to run. `Refused`: it is neither.

    `in_files`: the numbers that the launcher has from files, by the option that stands for each.
    """
    name, rest = command.name, command.rest
    if command.has("help") or not (command.options or rest):
        return None
    if not rest:
        raise Refused(
            f"`{name}` has no program behind its options",
            "write `python your_program.py` in `run`; Shoal starts the ranks itself",
        )
    if is_for_the_real_one(command, environment, in_files):
        return None
    if _is_set(command, "run-path", environment):
        head = []
    elif _is_set(command, "no-python", environment):
        raise Refused(
            f"`{name} --no-python` cannot start `{rest[0]}` here: Shoal starts the ranks itself",
            f"write `{' '.join(rest)}` in `run`, without the launcher",
        )
    else:
        head = ["-m"] if _is_set(command, "module", environment) else []
    if not head and not os.path.exists(rest[0]):
        raise Refused(
            f"`{name}` is to start `{rest[0]}`, and there is no such file in {os.getcwd()}",
            "write the program's path as it is there; options of the launcher go in front of it",
        )
    local = []
    if name in _LOCAL_RANK and not any(command.has(flag) for flag in _NO_LOCAL_RANK):
        local = [f"{_LOCAL_RANK[name]}={environment.get('SHOAL_LOCAL_RANK', '0')}"]
    return [*head, rest[0], *local, *rest[1:]]


def _is_set(command: options.Command, flag: str, environment: dict[str, str]) -> bool:
    told = environment.get(_variable(flag), "0") if command.name in _TORCH else "0"
    return command.has(flag) or told not in ("", "0")


def _variable(option: str) -> str:
    """Where torchrun reads an option that is not in its command line."""
    return f"PET_{option.upper().replace('-', '_')}"


def is_for_the_real_one(
    command: options.Command, environment: dict[str, str], in_files: dict[str, Said]
) -> bool:
    """Whether the launcher is to start more processes than the job has ranks, and can do so in one group.

    `Refused`: it asks for another number of processes or nodes than there are.
    """
    nodes, each = _number(environment, "SHOAL_NUM_NODES"), _number(environment, "SHOAL_RANKS_PER_NODE")
    _refuse_other_nodes(_said(command, _NODES, environment, in_files), nodes)
    on_a_node = _said(command, _PER_NODE, environment, in_files)
    in_all = _said(command, _IN_ALL, environment, in_files)
    has_more = _processes(on_a_node, environment) > 1 or _processes(in_all, environment) > nodes
    if each == 1 and has_more and (command.name in _TORCH or nodes == 1):
        return True
    for said, there, where, parts in (
        (on_a_node, each, "on a node", 1),
        (in_all, each * nodes, "in all", nodes),
    ):
        if said is not None and is_number(said.value) and int(said.value) != there:
            what = "process" if said.value == "1" else "processes"
            raise Refused(
                f"the launcher asks for {said.value} {what} {where}{said.place}, and the job has {there}",
                f"set `ranks_per_node: {-(-int(said.value) // parts)}` in the job, or {said.remedy}",
            )
    return False


def _said(
    command: options.Command, names: tuple[str, ...], environment: dict[str, str], in_files: dict[str, Said]
) -> Said | None:
    """The number behind one of these options, or the one that stands for it in a variable or a file."""
    for name in names:
        value, variable = command.value(name), _variable(name)
        if value is not None:
            return Said(value)
        if command.name in _TORCH and environment.get(variable):
            return Said(environment[variable], f"`{variable}`", f"leave `{variable}` out")
    return next((in_files[name] for name in names if name in in_files), None)


def _processes(said: Said | None, environment: dict[str, str]) -> int:
    """How many processes a launcher would start for a number or a kind of device; 0: it does not say."""
    value = "" if said is None else said.value
    if value not in _DEVICES:
        return int(value) if is_number(value) else 0
    gpus = [number for number in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    if value == "cpu" or (value == "auto" and not gpus):
        return _number(environment, "SLURM_CPUS_ON_NODE")
    return len(gpus)


def _refuse_other_nodes(said: Said | None, nodes: int) -> None:
    if said is None:
        return
    low, _, high = said.value.partition(":")
    if not is_number(low) or (high and not is_number(high)):
        return
    if not int(low) <= nodes <= int(high or low):
        what = "node" if said.value == "1" else "nodes"
        raise Refused(
            f"the launcher asks for {said.value} {what}{said.place}, and the job has {nodes}",
            f"submit with `--nodes {low if not high else f'{low}..{high}'}`, or {said.remedy}",
        )


def real(command: options.Command, environment: dict[str, str]) -> list[str]:
    """The arguments with which `python` runs the real launcher, as the part of one group that is here."""
    before = command.before()
    if command.name in _TORCH and command.rest:
        before = _meeting(command, environment)
    return ["-m", MODULE_OF[command.name], *before, *command.rest]


def real_environment(command: options.Command, environment: dict[str, str]) -> dict[str, str]:
    """What the real launcher finds: it gives numbers to its processes itself."""
    meets = environment.get("SHOAL_NUM_NODES", "1") != "1"
    dropped = {_variable(option) for option in _MEETING} if meets else set()
    kept = {name: value for name, value in environment.items() if not name.startswith(_TASK_NAMES)}
    return {**{name: value for name, value in kept.items() if name not in dropped}, MARK: command.name}


def _meeting(command: options.Command, environment: dict[str, str]) -> list[str]:
    nodes = environment.get("SHOAL_NUM_NODES", "1")
    count = []
    said = _said(command, _PER_NODE, environment, {})
    if said is not None and said.value in _DEVICES:
        # torchrun would count the CPUs of the machine where nothing holds the job to its own.
        count = ["--nproc-per-node", str(_processes(said, environment))]
    if nodes == "1":
        # It meets nobody: several of them may run here, each at the port it was given.
        return [*command.before(), *count]
    port = command.value("master-port") or environment.get("SHOAL_MASTER_PORT", "29500")
    return [
        *("--nnodes", nodes, "--node-rank", environment.get("SHOAL_NODE_RANK", "0")),
        *("--master-addr", environment.get("SHOAL_MASTER_ADDR", "127.0.0.1"), "--master-port", port),
        *command.before(_MEETING),
        *count,
    ]


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


def tell(folder: str, report: str, world: int = 1, member: int = 0) -> None:
    """Tell the supervisor, as a script may pass over how its launcher ended (`torchrun ... | tee log`).

    `world` and `member`: this rank is that member of a world of this size, which a launcher makes.
    """
    rank, group = os.environ.get("SHOAL_RANK"), os.environ.get("SHOAL_GENERATION", "0")
    try:
        fd = os.open(os.path.join(folder, names.WORLDS), os.O_WRONLY | os.O_APPEND)
    except OSError:
        return  # the program has removed the folder: it has its sentence all the same
    try:
        if rank is not None:
            os.write(fd, f"{rank} {group} {world} {member} 0.0 {report}\n".encode())
    finally:
        os.close(fd)
