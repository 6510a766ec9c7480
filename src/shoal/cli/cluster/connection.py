"""Connect this home's Shoal to the Slurm that `shoal cluster create` made, as the user who logged in."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING

from shoal.cli.output import note
from shoal.cli.text import one_line
from shoal.errors import NotFound, ShoalError, SpecError, StateError
from shoal.home import home_from_env, pid_holding

if TYPE_CHECKING:
    from shoal.client.connection import Connection
    from shoal.cluster.facts import Facts
    from shoal.cluster.inventory import Inventory
    from shoal.engines.slurm.config import SlurmConfig

NOTICED_S = 30.0
"""A control plane lists Slurm's nodes every ten seconds, or more slowly if the reply takes long."""


def connect_shoal(inventory: Inventory, facts: Mapping[str, Facts]) -> str:
    """Connect this home's Shoal to the new Slurm and return what to print about it.

    It calls the same command that a person would type. It does not connect as root, because every job would
    run as root, nor as a user whose uid belongs to another user on some machine.
    """
    from shoal.cli.main import run_command
    from shoal.cluster.preflight import mismatched_logins

    if message := _update_shared(inventory):
        return message
    arguments = _connect_arguments(inventory)
    if is_root_login(inventory, facts):
        arguments[arguments.index("--ssh") + 1] = f"USER@{inventory.controller.address}"
        typed = shlex.join(arguments)
        return f"-- to connect, as a user who has an account on every machine: `shoal {typed}`"
    typed = shlex.join(arguments)
    if mismatched_logins(inventory, facts):
        why = "because jobs would run as another user: see the notes above"
        return f"-- Shoal was not connected to it, {why}; when that is fixed, type `shoal {typed}`"
    if is_connected(inventory):
        return ""
    if pid_holding(home_from_env()) is not None:
        create = f"`shoal cluster create --name {inventory.cluster}`"
        return f"-- a control plane runs here; to connect it: `shoal down`, {create}, `shoal up`"
    note("-- connecting Shoal to it")
    with redirect_stdout(sys.stderr):
        code = run_command(arguments)
    if not code:
        return ""
    why = f"(exit code {code}); the cluster itself works"
    return f"-- Shoal was not connected to it {why}. To try again: `shoal {typed}`"


def _update_shared(inventory: Inventory) -> str:
    """Give a new shared directory to this home's Shoal if it runs and uses the cluster; return what to print.

    A Shoal without one takes it over as it runs; one that had another takes it over at its next start.
    """
    import msgspec

    from shoal.client.credentials import write_private
    from shoal.engines.slurm.config import FILE

    config, shared = _slurm_config(), inventory.shared or ""
    if config is None or not uses_cluster(inventory) or shared in {"", config.shared}:
        return ""
    if pid_holding(home_from_env()) is None:
        return ""
    updated = msgspec.structs.replace(config, shared=shared)
    write_private(home_from_env() / FILE, msgspec.json.encode(updated).decode() + "\n")
    if not config.shared:
        return f"-- Shoal here uses {shared} within half a minute, for jobs from then on"
    return f"-- Shoal here uses {shared} from its next start on: `shoal down`, then `shoal up`"


def forget_nodes(inventory: Inventory, nodes: list[str]) -> str:
    """Have this home's Shoal, if it runs and uses the cluster, forget nodes that left; return what to print.

    The control plane can forget a node only after Slurm no longer lists it, so this waits for that.
    """
    if pid_holding(home_from_env()) is not None and uses_cluster(inventory):
        from shoal.cli.flags import connect

        note(f"-- removing {', '.join(nodes)} from the nodes of Shoal here, after it has asked Slurm again")
        deadline = time.monotonic() + NOTICED_S
        with suppress(ShoalError), connect() as shoal:
            nodes = [node for node in nodes if not _is_forgotten(shoal, node, deadline)]
        if not nodes:
            return ""
    typed = ", ".join(f"`shoal nodes remove {node}`" for node in nodes)
    return (
        f"-- a Shoal connected to it shows {', '.join(nodes)} as silent in about ten seconds, then as gone"
        f" after ten minutes, for a day; to remove them as soon as they are silent: {typed}"
    )


def _is_forgotten(shoal: Connection, node: str, deadline: float) -> bool:
    while True:
        try:
            shoal.remove_node(node)
        except NotFound:
            return True
        except StateError:  # Slurm still listed it at the last look, or something there has not ended
            if time.monotonic() > deadline:
                return False
            time.sleep(1)
        else:
            return True


def is_root_login(inventory: Inventory, facts: Mapping[str, Facts]) -> bool:
    """Whether root logs in to the controller: named, or because no user was named."""
    if inventory.controller.user is not None:
        return inventory.controller.user == "root"
    fact = facts.get(inventory.controller.address)
    return fact is not None and fact.login[1] == 0


def _connect_arguments(inventory: Inventory) -> list[str]:
    """Return the arguments of `shoal` that connect it."""
    from shoal.cluster.facts import PYTHON
    from shoal.cluster.node_archive import NODE_DIR

    host = inventory.controller
    arguments = ["connect", "slurm", "--ssh", f"{host.user}@{host.address}" if host.user else host.address]
    if options := _ssh_options(inventory):
        arguments.append(f"--ssh-options={shlex.join(options)}")
    arguments += ["--python", PYTHON, "--python-path", NODE_DIR]
    return [*arguments, "--shared", inventory.shared] if inventory.shared else arguments


def _ssh_options(inventory: Inventory) -> list[str]:
    host = inventory.controller
    flags = {"-p": host.port, "-J": host.jump, "-i": inventory.identity}
    options = [word for flag, value in flags.items() if value for word in (flag, str(value))]
    if known_hosts := inventory.known_hosts:
        # ssh itself splits this value at spaces.
        options += [
            "-o",
            f'UserKnownHostsFile="{known_hosts}"'
            if " " in known_hosts
            else f"UserKnownHostsFile={known_hosts}",
        ]
    return options


def uses_cluster(inventory: Inventory) -> bool:
    """Whether this home's Shoal uses this cluster, as whichever user."""
    if (config := _slurm_config()) is None:
        return False
    host = inventory.controller
    is_same = config.cluster == inventory.cluster and host.label in config.heads
    return is_same or config.ssh.rpartition("@")[2] == host.address


def refuse_force_while_up(inventory: Inventory) -> None:
    """Raise if this home's Shoal runs and uses the cluster: it would restart what is ended by force."""
    if (pid := pid_holding(home_from_env())) is not None and uses_cluster(inventory):
        raise StateError(
            f"cannot end jobs of cluster `{inventory.cluster}` by force: Shoal here is up (process"
            f" {pid}) and would start them again",
            hint="`shoal down --jobs` first",
        )


def disconnect_hint(inventory: Inventory) -> str:
    """Return what to print when the cluster is gone; "" if this home's Shoal used another one."""
    if not uses_cluster(inventory):
        return ""
    is_up, left = pid_holding(home_from_env()) is not None, open_nodes()
    if left:
        # Cordon all first: otherwise jobs of the first node start on the next, which then is not silent.
        shut = ", ".join(f"`shoal nodes cordon {one_line(node)}`" for node in left)
        dead = ", ".join(f"`shoal nodes declare-dead {one_line(node)}`" for node in left)
        begin = "" if is_up else "`shoal up`, "
        return (
            "-- Shoal here is still connected to it, and counts its jobs as running until told otherwise."
            f" If all of them have ended, type in this order: {begin}{shut}, after half a minute {dead},"
            " `shoal down --jobs` (or `shoal down`:"
            " unfinished jobs start again), `shoal connect local`"
        )
    first = "`shoal down`, then " if is_up else ""
    return f"-- Shoal here is still connected to it; to return to this machine: {first}`shoal connect local`"


def open_nodes() -> list[str]:
    """Return the nodes of its Slurm or Ray on which jobs of this home may run, by its files."""
    from shoal.cli.control_plane.home import load_remembered
    from shoal.engines.home_records import MAILBOX, unfinished_attempts
    from shoal.settings import load_settings

    settings = load_settings(load_remembered(home_from_env()))
    return sorted(
        {node for attempt in unfinished_attempts(settings.state_dir, MAILBOX) for node in attempt.open_nodes}
    )


def _slurm_config() -> SlurmConfig | None:
    from shoal.cli.control_plane.home import load_remembered
    from shoal.engines.slurm.config import load_config

    home = home_from_env()
    if load_remembered(home).get("engine") != "slurm":
        return None
    try:
        return load_config(home)
    except SpecError:
        return None


def is_connected(inventory: Inventory) -> bool:
    """Whether this home's Shoal uses this cluster, reached with the same options."""
    if (config := _slurm_config()) is None:
        return False
    host = inventory.controller
    ssh = f"{host.user}@{host.address}" if host.user else host.address
    return (config.ssh, list(config.ssh_options), config.shared) == (
        ssh,
        _ssh_options(inventory),
        inventory.shared or "",
    )
