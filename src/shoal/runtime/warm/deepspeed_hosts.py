"""How many nodes and processes `deepspeed` takes from its host file, `--include` and `--exclude`.

Shoal has chosen the nodes and their GPUs: what is named there is passed over, but there must be as many.
"""

from __future__ import annotations

import os

from . import launchers, options

DEFAULT_FILE = "/job/hostfile"
ITSELF = "localhost"
"""The only host where there is no file."""


def numbers(command: options.Command) -> dict[str, launchers.Said]:
    """The numbers, by the option that says the same. `Refused`: DeepSpeed would not take these either."""
    told = command.value("hostfile")
    path = told or DEFAULT_FILE
    place, remedy = f"`{path}`", "leave `--hostfile` out" if told else f"remove `{path}`"
    slots, has_file = {ITSELF: _visible_gpus()}, os.path.isfile(path)
    if has_file:
        with open(path, encoding="utf-8") as file:
            slots = _hosts(file.readlines(), path)
    for option in ("include", "exclude"):
        text = command.value(option)
        if text:
            place, remedy = f"`--{option}`", f"leave `--{option}` out"
            chosen = _chosen(option, text, slots)
            if option == "exclude":
                chosen = {name: slots[name] - chosen.get(name, set()) for name in slots}
            slots = chosen
    names = [name for name in slots if slots[name]]
    nodes = command.value("num-nodes")
    names = names[: int(nodes or 0)] if launchers.is_number(nodes) else names
    counts = sorted({len(slots[name]) for name in names})
    if len(counts) > 1 and not command.value("num-gpus"):
        raise launchers.Refused(
            f"the launcher asks for {' and '.join(map(str, counts))} processes on different nodes ({place})",
            f"each node of a job has as many: set `ranks_per_node` in the job, and {remedy}",
        )
    said = {"num-nodes": str(len(names))} if has_file else {}
    if counts and (has_file or command.value("include") or command.value("exclude")):
        said["num-gpus"] = str(counts[0])
    return {option: launchers.Said(number, place, remedy) for option, number in said.items()}


def _visible_gpus() -> set[int]:
    return set(range(len([gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])))


def _hosts(lines: list[str], path: str) -> dict[str, set[int]]:
    """The slots of each host in a file of lines like `node-1 slots=8`."""
    found = {}
    for line in lines:
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        count = words[1][len("slots=") :] if len(words) > 1 and words[1].startswith("slots=") else ""
        if not launchers.is_number(count) or words[0] in found:
            raise launchers.Refused(
                f"`deepspeed` cannot read the line `{line.strip()}` of `{path}`",
                "write a line `NAME slots=NUMBER` for each host, or no file: Shoal has chosen the nodes",
            )
        found[words[0]] = set(range(int(count)))
    return found


def _chosen(option: str, text: str, slots: dict[str, set[int]]) -> dict[str, set[int]]:
    """The hosts and their slots that `node-1@node-2:0,2` names. No number means all of them."""
    chosen: dict[str, set[int]] = {}
    for spec in text.split("@"):
        name, _, listed = spec.partition(":")
        words = listed.split(",") if listed else []
        if name not in slots or not all(launchers.is_number(word) for word in words):
            raise launchers.Refused(
                f"`deepspeed --{option} {text}` names `{spec}`, and there is only {', '.join(slots)}",
                f"leave `--{option}` out: Shoal has chosen the nodes and their GPUs",
            )
        chosen[name] = chosen.get(name, set()) | ({int(word) for word in words} or slots[name])
    return chosen
