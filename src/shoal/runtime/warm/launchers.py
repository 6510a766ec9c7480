"""Launchers in front of a program, which the supervisor replaces.

In a rank, `torchrun --nproc-per-node 4 train.py --lr 1` means `python train.py --lr 1`, because the other
ranks already exist. If a job has one rank on each node and the launcher should start more there, the real
launcher runs with the job's nodes as its group.

The first constants name files in the folder of the stand-ins that the supervisor reads, too.
"""

from __future__ import annotations

import os
import sys

from . import options
from .options import LAUNCH

IMAGE = "image"
"""What the zygote has imported: its plan, the modules with their files, and how much memory that took."""
EXPECTED = "expected"
"""What the zygote should import: the plan and the modules of an earlier zygote's image."""
WARM = "warm"
"""Exists if the node is to have a zygote."""
KNOWN = "known"
"""The signature of the starts that the zygote can serve."""
WANTED = "wanted"
"""The last start that the zygote could not serve."""
WORLDS = "worlds"
"""The process groups that the ranks have formed, one line for each process."""
LAUNCHING = "launching"
"""Each launcher locks the byte of its rank in this file."""
STEPS = "steps"
"""Each program that `srun` has started holds a shared lock on the byte of its rank in this file."""
MEMBERS = "members"
"""The member of the job's process group locks the byte of its rank in this file."""
SECOND = "second-launcher"
"""In a line of `WORLDS`, in place of a library: the rank has run two launchers at the same time, or two
programs that are in the job's process group."""
REFUSED = "refused-launcher"
"""In the same place: the rank has started a launcher that was refused."""
LAUNCHED = "other-launcher"
"""In the same place: an unknown launcher started the process and gave it its rank."""


MODULES = {
    "torch.distributed.run": "torchrun",
    LAUNCH: LAUNCH,
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""The launchers by the module that `python -m` runs."""
NAMES = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
SAME = {"deepspeed.pt": "deepspeed", "ds": "deepspeed"}
"""Other names of launcher scripts. There are no stand-ins for them, so only the start hook sees them."""
MODULE_OF = {
    "torchrun": "torch.distributed.run",
    LAUNCH: LAUNCH,
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}
MARK = "SHOAL_LAUNCHER"
"""Set for a real launcher and all its children."""
QUERIES = ("-h", "--help", "-help", "-V", "--version", "-version", "--usage")
"""Options with which a launcher describes itself and starts nothing."""
LOST = "-1"
"""Stands for the rank and the round in the report of a process that has lost its variables."""
_TORCH = ("torchrun", LAUNCH)
_PER_NODE = ("nproc-per-node", "num-gpus", "num-accelerators")
_IN_ALL = ("num-processes",)
_NODES = ("nnodes", "num-machines", "num-nodes")
_LOCAL_RANK = {LAUNCH: "--local-rank", "deepspeed": "--local_rank"}
"""Launchers that pass the local rank to the program as an argument."""
_NO_LOCAL_RANK = ("use-env", "no-local-rank")
_RENDEZVOUS_OPTIONS = (
    *("nnodes", "node-rank", "master-addr", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
    *("master-port", "local-addr", "standalone"),
)
"""Options for the rendezvous of launchers on several nodes. The job decides these, so they are replaced."""
_DEVICES = ("gpu", "cpu", "auto", "xpu", "npu", "hpu", "mlu")
"""Values of `torchrun --nproc-per-node` for which torchrun counts devices."""
_TASK_NAMES = (
    *("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_", "ROLE_", "CROSS_", "LOCAL_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_"),
)
"""Prefixes of variables that number a rank of the job. Processes of a real launcher have other numbers."""


FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder of the stand-ins, when this code runs in a rank."""


class LauncherRefused(Exception):
    """The launcher's command line contradicts the job. `hint`: what to write instead. `report`: the word for
    the supervisor.
    """

    def __init__(self, message: str, hint: str, report: str = REFUSED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.report = report


class LauncherNumber:
    """A number from a launcher's options. `place`: where it is set. `remedy`: how to correct it."""

    def __init__(self, value: str, place: str = "", remedy: str = "leave the option out") -> None:
        self.value = value
        self.source = f" ({place})" if place else ""
        self.remedy = remedy


def recognize(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the launcher that a command runs, and its arguments. None: it is no launcher."""
    launcher, launcher_arguments = _recognize(name, arguments)
    return (launcher, launcher_arguments) if launcher is not None else (None, arguments)


def _recognize(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    if name in NAMES:
        return _subcommand(name, arguments)
    module, rest = _python_module(arguments)
    if module is not None:
        return _subcommand(MODULES[module], rest) if module in MODULES else (None, arguments)
    script = os.path.basename(rest[0]) if rest else ""
    script = SAME.get(script, script)
    return _subcommand(script, rest[1:]) if script in NAMES else (None, arguments)


def _subcommand(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Treat only `accelerate launch` as a launcher. Its other subcommands are ordinary programs."""
    if name != "accelerate":
        return name, arguments
    return ("accelerate-launch", arguments[1:]) if arguments[:1] == ["launch"] else (None, arguments)


def _python_module(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the module of `python -m` and its arguments, or None and the script with its arguments."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        word, at = arguments[at], at + 1
        if word == "--":
            break
        if word.startswith("--"):
            at += word == "--check-hash-based-pycs"  # the only long one that takes the next word
            continue
        position = next((n for n, letter in enumerate(word) if letter in "cmWX"), len(word))
        letter, value = word[position : position + 1], word[position + 1 :]
        if letter and not value:
            value, at = "".join(arguments[at : at + 1]), at + 1
        if letter == "c":
            return None, []
        if letter == "m":
            return value, arguments[at:]
    return None, arguments[at:]


def program_arguments(
    command: options.LauncherCommand, environment: dict[str, str], in_files: dict[str, LauncherNumber]
) -> list[str] | None:
    """Return the arguments for `python`. None: the real launcher has to run. `LauncherRefused`: neither
    works.

    `in_files`: numbers that the launcher reads from files, by the equivalent option.
    """
    name, rest = command.name, command.rest
    if command.has("help") or not (command.options or rest):
        return None
    if not rest:
        raise LauncherRefused(
            f"`{name}` has no program behind its options",
            "write `python your_program.py` in `run`; Shoal starts the ranks itself",
        )
    if needs_real_launcher(command, environment, in_files):
        return None
    if _is_set(command, "run-path", environment):
        head = []
    elif _is_set(command, "no-python", environment):
        raise LauncherRefused(
            f"`{name} --no-python` cannot start `{rest[0]}` here: Shoal starts the ranks itself",
            f"write `{' '.join(rest)}` in `run`, without the launcher",
        )
    else:
        head = ["-m"] if _is_set(command, "module", environment) else []
    if not head and not os.path.exists(rest[0]):
        raise LauncherRefused(
            f"`{name}` is to start `{rest[0]}`, and there is no such file in {os.getcwd()}",
            "write the program's path as it is there; options of the launcher go in front of it",
        )
    local = []
    if name in _LOCAL_RANK and not any(command.has(flag) for flag in _NO_LOCAL_RANK):
        local = [f"{_LOCAL_RANK[name]}={environment.get('SHOAL_LOCAL_RANK', '0')}"]
    return [*head, rest[0], *local, *rest[1:]]


def _is_set(command: options.LauncherCommand, flag: str, environment: dict[str, str]) -> bool:
    value = environment.get(_variable(flag), "0") if command.name in _TORCH else "0"
    return command.has(flag) or value not in ("", "0")


def _variable(option: str) -> str:
    """Return the variable from which torchrun reads an option that is not in its command line."""
    return f"PET_{option.upper().replace('-', '_')}"


def needs_real_launcher(
    command: options.LauncherCommand, environment: dict[str, str], in_files: dict[str, LauncherNumber]
) -> bool:
    """Whether the launcher should start more processes than the job has ranks, and can do so in one group.

    `LauncherRefused`: it asks for another number of processes or nodes than the job has.
    """
    nodes, each = _number(environment, "SHOAL_NUM_NODES"), _number(environment, "SHOAL_RANKS_PER_NODE")
    requested_nodes = _requested_number(command, _NODES, environment, in_files)
    on_a_node = _requested_number(command, _PER_NODE, environment, in_files)
    in_all = _requested_number(command, _IN_ALL, environment, in_files)
    _refuse_words(requested_nodes, "nodes")
    _refuse_words(in_all, "processes")
    if on_a_node is not None and on_a_node.value not in _DEVICES:
        _refuse_words(on_a_node, "processes on a node")
    _refuse_other_nodes(requested_nodes, nodes)
    has_more = _processes(on_a_node, environment) > 1 or _processes(in_all, environment) > nodes
    if each == 1 and has_more and (command.name in _TORCH or nodes == 1):
        return True
    for number, there, where, parts in (
        (on_a_node, each, "on a node", 1),
        (in_all, each * nodes, "in all", nodes),
    ):
        if number is not None and is_number(number.value) and int(number.value) != there:
            what = "process" if number.value == "1" else "processes"
            raise LauncherRefused(
                f"the launcher asks for {number.value} {what} {where}{number.source}, and the job has "
                f"{there}",
                f"set `ranks_per_node: {-(-int(number.value) // parts)}` in the job, or {number.remedy}",
            )
    return False


def _requested_number(
    command: options.LauncherCommand,
    names: tuple[str, ...],
    environment: dict[str, str],
    in_files: dict[str, LauncherNumber],
) -> LauncherNumber | None:
    """Return the number from one of these options, or from the equivalent variable or file."""
    for name in names:
        value, variable = command.value(name), _variable(name)
        if value is not None:
            return LauncherNumber(value)
        if command.name in _TORCH and environment.get(variable):
            return LauncherNumber(environment[variable], f"`{variable}`", f"leave `{variable}` out")
    return next((in_files[name] for name in names if name in in_files), None)


def _processes(requested: LauncherNumber | None, environment: dict[str, str]) -> int:
    """Return how many processes a launcher would start for a number or a kind of device. 0: unspecified."""
    value = "" if requested is None else requested.value
    if value not in _DEVICES:
        return int(value) if is_number(value) else 0
    gpus = [number for number in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    if value == "cpu" or (value == "auto" and not gpus):
        return _number(environment, "SLURM_CPUS_ON_NODE")
    return len(gpus)


def _refuse_words(number: LauncherNumber | None, noun: str) -> None:
    """Raise `LauncherRefused` for `four`. `-1` is DeepSpeed's word for no limit, and `1:4` is a range."""
    if number is None or number.value == "-1":
        return
    low, colon, high = number.value.partition(":")
    if not is_number(low) or (colon and not is_number(high)):
        raise LauncherRefused(
            f"the launcher asks for `{number.value}` {noun}{number.source}, which is no number",
            f"write a number, or {number.remedy}",
        )


def _refuse_other_nodes(number: LauncherNumber | None, nodes: int) -> None:
    if number is None:
        return
    low, _, high = number.value.partition(":")
    if not is_number(low) or (high and not is_number(high)):
        return
    if not int(low) <= nodes <= int(high or low):
        what = "node" if number.value == "1" else "nodes"
        raise LauncherRefused(
            f"the launcher asks for {number.value} {what}{number.source}, and the job has {nodes}",
            f"submit with `--nodes {low if not high else f'{low}..{high}'}`, or {number.remedy}",
        )


def real_launcher_arguments(command: options.LauncherCommand, environment: dict[str, str]) -> list[str]:
    """Return the arguments with which `python` runs the real launcher as this node's part of one group."""
    before = command.before()
    if command.name in _TORCH and command.rest:
        before = _rendezvous_options(command, environment)
    return ["-m", MODULE_OF[command.name], *before, *command.rest]


def real_environment(command: options.LauncherCommand, environment: dict[str, str]) -> dict[str, str]:
    """Return the real launcher's environment, without rank variables: it numbers its own processes."""
    meets = environment.get("SHOAL_NUM_NODES", "1") != "1"
    dropped = {_variable(option) for option in _RENDEZVOUS_OPTIONS} if meets else set()
    kept = {name: value for name, value in environment.items() if not name.startswith(_TASK_NAMES)}
    return {**{name: value for name, value in kept.items() if name not in dropped}, MARK: command.name}


def _rendezvous_options(command: options.LauncherCommand, environment: dict[str, str]) -> list[str]:
    nodes = environment.get("SHOAL_NUM_NODES", "1")
    count = []
    requested = _requested_number(command, _PER_NODE, environment, {})
    if requested is not None and requested.value in _DEVICES:
        # Without a CPU limit, torchrun would count all CPUs of the machine.
        count = ["--nproc-per-node", str(_processes(requested, environment))]
    if nodes == "1":
        # It has no peers, so several launchers may run here, each at its own port.
        return [*command.before(), *count]
    port = command.value("master-port") or environment.get("SHOAL_MASTER_PORT", "29500")
    return [
        *("--nnodes", nodes, "--node-rank", environment.get("SHOAL_NODE_RANK", "0")),
        *("--master-addr", environment.get("SHOAL_MASTER_ADDR", "127.0.0.1"), "--master-port", port),
        *command.before(_RENDEZVOUS_OPTIONS),
        *count,
    ]


def is_number(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdigit() and len(text) < 10


def _number(environment: dict[str, str], name: str) -> int:
    text = environment.get(name)
    return int(text) if text is not None and is_number(text) else 1


def exit_refused(refused: LauncherRefused) -> None:
    """Print the message and end the process. Every rank prints it, because the first one that ends makes the
    supervisor stop the others.
    """
    sys.stderr.write(f"shoal: {refused.message}\nhint: {refused.hint}\n")
    append_report(FOLDER, refused.report)
    os._exit(2)


def append_report(folder: str, report: str, world: int = 1, member: int = 0) -> None:
    """Report to the supervisor, because a script may ignore its launcher's exit code (`torchrun ... | tee
    log`).

    `world` and `member`: a launcher makes this rank that member of a world of this size.
    """
    rank, group = os.environ.get("SHOAL_RANK"), os.environ.get("SHOAL_RENDEZVOUS_ROUND", "0")
    if rank is None and report == REFUSED and "SHOAL_BOARD" not in os.environ:
        rank = group = LOST  # a spare, which has the board, is no rank and reports nothing
    try:
        fd = os.open(os.path.join(folder, WORLDS), os.O_WRONLY | os.O_APPEND)
    except OSError:
        return  # the program has removed the folder; the message was printed anyway
    try:
        if rank is not None:
            os.write(fd, f"{rank} {group} {world} {member} 0.0 {report}\n".encode())
    finally:
        os.close(fd)
