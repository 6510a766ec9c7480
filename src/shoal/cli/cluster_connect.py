"""Connecting Shoal to the Slurm that `shoal cluster create` made, as the user who logged in."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING

from shoal.cli.show import note
from shoal.cli.text import one_line
from shoal.errors import NotFound, ShoalError, SpecError, StateError
from shoal.home import holder, home_from_env

if TYPE_CHECKING:
    from shoal.client.connection import Connection
    from shoal.cluster.facts import Facts
    from shoal.cluster.inventory import Inventory
    from shoal.engines.slurm.config import SlurmConfig

NOTICED_S = 30.0
"""A control plane asks Slurm for its nodes every ten seconds, or later where the answer takes long."""


def connect_shoal(inventory: Inventory, facts: Mapping[str, Facts]) -> str:
    """Connect this home's Shoal to the Slurm that was made; what to say about it.

    The command that connects is called as a person would call it. Not as root, as whom every job would run,
    and not as a user who is somebody else on another machine.
    """
    from shoal.cli.main import run_command
    from shoal.cluster.objections import unlike_users

    if said := _told_of_shared(inventory):
        return said
    words = _connecting(inventory)
    if is_root_login(inventory, facts):
        words[words.index("--ssh") + 1] = f"USER@{inventory.controller.address}"
        typed = shlex.join(words)
        return f"-- to connect, as a user who has an account on every machine: `shoal {typed}`"
    typed = shlex.join(words)
    if unlike_users(inventory, facts):
        why = "as jobs would run as somebody else: see the notes above"
        return f"-- Shoal was not connected to it, {why}; then `shoal {typed}`"
    if is_connected(inventory):
        return ""
    if holder(home_from_env()) is not None:
        create = f"`shoal cluster create --name {inventory.cluster}`"
        return f"-- Shoal runs here, and takes note of it after `shoal down`, {create}, `shoal up`"
    note("-- connecting Shoal to it")
    with redirect_stdout(sys.stderr):
        code = run_command(words)
    if not code:
        return ""
    why = f"(exit code {code}); the cluster itself works"
    return f"-- Shoal was not connected to it {why}. To try again: `shoal {typed}`"


def _told_of_shared(inventory: Inventory) -> str:
    """Tell a Shoal of this home that is up, and works there, of a shared directory that is new to it; what to
    say then. One that had none takes it up as it is, one that had another at its next start.
    """
    import msgspec

    from shoal.client.credentials import write_private
    from shoal.engines.slurm.config import FILE

    config, shared = _connected(), inventory.shared or ""
    if config is None or not works_there(inventory) or shared in {"", config.shared}:
        return ""
    if holder(home_from_env()) is None:
        return ""
    told = msgspec.structs.replace(config, shared=shared)
    write_private(home_from_env() / FILE, msgspec.json.encode(told).decode() + "\n")
    if not config.shared:
        return f"-- Shoal here takes {shared} up within half a minute, for jobs from then on"
    return f"-- Shoal here has {shared} from its next start on: `shoal down`, then `shoal up`"


def forget_nodes(inventory: Inventory, nodes: list[str]) -> str:
    """Have this home's Shoal, if it is up and works there, forget nodes that have left; what to say about it.

    It does so once it has asked Slurm again, and that lists them no more: waits for that.
    """
    if holder(home_from_env()) is not None and works_there(inventory):
        from shoal.cli.flags import connect

        note(f"-- taking {', '.join(nodes)} off the list of Shoal here, once it has asked Slurm again")
        deadline = time.monotonic() + NOTICED_S
        with suppress(ShoalError), connect() as shoal:
            nodes = [node for node in nodes if not _is_forgotten(shoal, node, deadline)]
        if not nodes:
            return ""
    typed = ", ".join(f"`shoal nodes remove {node}`" for node in nodes)
    return (
        f"-- a Shoal connected to it shows {', '.join(nodes)} as silent in ten seconds or so, as gone after"
        f" ten minutes, for a day; to have it off its list as soon as it is silent: {typed}"
    )


def _is_forgotten(shoal: Connection, node: str, deadline: float) -> bool:
    while True:
        try:
            shoal.remove_node(node)
        except NotFound:
            return True
        except StateError:  # it answered at the last look, or something there has not quite ended
            if time.monotonic() > deadline:
                return False
            time.sleep(1)
        else:
            return True


def is_root_login(inventory: Inventory, facts: Mapping[str, Facts]) -> bool:
    """Whether it is root who logs in to the controller: by name, or because nobody else was named."""
    if inventory.controller.user is not None:
        return inventory.controller.user == "root"
    fact = facts.get(inventory.controller.address)
    return fact is not None and fact.login[1] == 0


def _connecting(inventory: Inventory) -> list[str]:
    """The words after `shoal` that connect it."""
    from shoal.cluster.facts import PYTHON
    from shoal.cluster.node_part import NODE_DIR

    host = inventory.controller
    words = ["connect", "slurm", "--ssh", f"{host.user}@{host.address}" if host.user else host.address]
    if options := _ssh_options(inventory):
        words.append(f"--ssh-options={shlex.join(options)}")
    words += ["--python", PYTHON, "--python-path", NODE_DIR]
    return [*words, "--shared", inventory.shared] if inventory.shared else words


def _ssh_options(inventory: Inventory) -> list[str]:
    host = inventory.controller
    flags = {"-p": host.port, "-J": host.jump, "-i": inventory.identity}
    options = [word for flag, value in flags.items() if value for word in (flag, str(value))]
    if known := inventory.known_hosts:
        # ssh itself splits what it reads here at spaces.
        options += ["-o", f'UserKnownHostsFile="{known}"' if " " in known else f"UserKnownHostsFile={known}"]
    return options


def works_there(inventory: Inventory) -> bool:
    """Whether this home's Shoal has this very cluster for its work, whoever it is there."""
    if (config := _connected()) is None:
        return False
    host = inventory.controller
    is_same = config.cluster == inventory.cluster and host.label in config.heads
    return is_same or config.ssh.rpartition("@")[2] == host.address


def refuse_fight(inventory: Inventory) -> None:
    """Raise if this home's Shoal is up and works there: what is ended by force it starts again."""
    if (pid := holder(home_from_env())) is not None and works_there(inventory):
        raise StateError(
            f"jobs of cluster `{inventory.cluster}` cannot be ended by force: Shoal here is up (process"
            f" {pid}) and would start them again",
            hint="`shoal down --jobs` first",
        )


def goodbye(inventory: Inventory) -> str:
    """What to say once the cluster is gone; nothing where this home's Shoal worked elsewhere."""
    if not works_there(inventory):
        return ""
    is_up, left = holder(home_from_env()) is not None, nodes_left()
    if left:
        # Else what the first one gives free begins on the next, which is then heard of too lately to be dead.
        shut = ", ".join(f"`shoal nodes cordon {one_line(node)}`" for node in left)
        dead = ", ".join(f"`shoal nodes declare-dead {one_line(node)}`" for node in left)
        begin = "" if is_up else "`shoal up`, "
        return (
            "-- Shoal here is still connected to it, and counts as running what nobody told it the end of."
            f" If all of that has ended, in this order: {begin}{shut}, after half a minute {dead},"
            " `shoal down --jobs` (or `shoal down`:"
            " what is not done begins again), `shoal connect local`"
        )
    first = "`shoal down`, then " if is_up else ""
    return f"-- Shoal here is still connected to it; back to this machine: {first}`shoal connect local`"


def nodes_left() -> list[str]:
    """The nodes on which something of this home's may run on its Slurm or Ray, as its disk says."""
    from shoal.cli.home import load_remembered
    from shoal.engines.cluster_id import DESK, all_left
    from shoal.settings import load_settings

    settings = load_settings(load_remembered(home_from_env()))
    return sorted({node for one in all_left(settings.state_dir, DESK) for node in one.open_nodes})


def _connected() -> SlurmConfig | None:
    from shoal.cli.home import load_remembered
    from shoal.engines.slurm.config import load_config

    home = home_from_env()
    if load_remembered(home).get("engine") != "slurm":
        return None
    try:
        return load_config(home)
    except SpecError:
        return None


def is_connected(inventory: Inventory) -> bool:
    """Whether this home's Shoal has this very cluster, reached this way, for its work."""
    if (config := _connected()) is None:
        return False
    host = inventory.controller
    ssh = f"{host.user}@{host.address}" if host.user else host.address
    return (config.ssh, list(config.ssh_options), config.shared) == (
        ssh,
        _ssh_options(inventory),
        inventory.shared or "",
    )
