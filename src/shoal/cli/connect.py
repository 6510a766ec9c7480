"""`shoal connect`: which cluster this home's control plane hands its work to, from the next `shoal up` on."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.flags import JsonFlag
from shoal.cli.home import load_remembered, prepare_home, remember
from shoal.cli.show import print_json
from shoal.client.credentials import write_private
from shoal.errors import SpecError, StateError
from shoal.home import holder, home_from_env
from shoal.settings import Settings, load_settings

if TYPE_CHECKING:
    from shoal.engines.slurm.config import SlurmConfig

app = App(name="connect", help="Say where work runs: on a Slurm cluster, or on this machine.")
NODES_PORT = 7464
SshOptions = Annotated[
    str, Parameter(help="Words for `ssh` itself: `--ssh-options='-p 2222 -J ana@bastion'`.")
]
AsRoot = Annotated[
    bool, Parameter(negative="", help="Even if all jobs, whoever's they are, would run as root.")
]


@app.command
def slurm(
    *,
    partition: Annotated[str, Parameter(help="Use its nodes alone, and submit to it.")] = "",
    account: Annotated[str, Parameter(help="The account that Slurm charges.")] = "",
    qos: Annotated[str, Parameter(help="The quality of service to ask for.")] = "",
    python: Annotated[
        str | None, Parameter(help="The Python with Shoal in it on the nodes (this one's path).")
    ] = None,
    python_path: Annotated[str, Parameter(help="Its PYTHONPATH, if Shoal is not installed in it.")] = "",
    shared: Annotated[str, Parameter(help="A directory that all nodes have, for checkpoints.")] = "",
    spool: Annotated[str, Parameter(help="A directory on each node's own disk (below /tmp).")] = "",
    nodes_on: Annotated[
        str | None, Parameter(help="ADDRESS:PORT of this machine where nodes ask (found by itself).")
    ] = None,
    ssh: Annotated[str, Parameter(help="USER@HOST of a login node, if this machine is none.")] = "",
    ssh_options: SshOptions = "",
    as_root: AsRoot = False,
    json: JsonFlag = False,
) -> int:
    """Connect a Slurm cluster: its nodes become Shoal's, and jobs run there under your own account.

    Asks Slurm for its nodes and starts nothing. The next `shoal up` uses it.
    """
    from shoal.engines.slurm.client import SlurmClient
    from shoal.engines.slurm.config import SlurmConfig
    from shoal.engines.slurm.parse import parse_nodes

    home = _free_home()
    client = SlurmClient(ssh, shlex.split(ssh_options))
    version = client.version()
    if not as_root:
        _refuse_root(client.uid(), ssh)
    found = [node.facts for node in parse_nodes(client.nodes(), {}, partition)]
    if not found:
        where = f" in partition `{partition}`" if partition else ""
        raise SpecError(f"Slurm has no nodes{where}", hint="see its partitions with `sinfo`")
    address = nodes_on or f"{_address_towards(found[0].address)}:{NODES_PORT}"
    config = SlurmConfig(
        partition=partition,
        account=account,
        qos=qos,
        python=python or sys.executable,
        python_path=python_path,
        spool=spool,
        shared=shared,
        ssh=ssh,
        ssh_options=tuple(shlex.split(ssh_options)),
    )
    file = _keep(home, config, address)
    alive = [facts for facts in found if facts.is_alive]
    facts: dict[str, Any] = {
        "version": version,
        "nodes": len(found),
        "alive": len(alive),
        "cpus": sum(one.cpus for one in alive),
        "gpus": sum(len(one.gpus) for one in alive),
        "nodes_on": address,
        "config": str(file),
    }
    if json:
        print_json(facts)
    else:
        print(f"{version}: {len(alive)} of {len(found)} nodes, {facts['cpus']:g} CPUs, {facts['gpus']} GPUs")
        print(f"nodes will ask at {address}, over TLS; jobs run under your own account")
        if not shared:
            print("no shared directory: jobs with `checkpoint` will be refused (`--shared DIR`)")
        print("next  shoal up")
    return 0


@app.command
def local(*, json: JsonFlag = False) -> int:
    """Run work on this machine again."""
    home = _free_home()
    _remember(home, {"engine": "local", "nodes_on": "none"})
    if json:
        print_json({"engine": "local"})
    else:
        print("work runs on this machine; next  shoal up")
    return 0


def _refuse_root(uid: int, ssh: str) -> None:
    if uid == 0:
        raise SpecError(
            f"all jobs would run as root: that is who asks Slurm {f'as {ssh}' if ssh else 'here'}",
            hint="be a user with an account on every node (`--ssh USER@HOST`), or say `--as-root`",
        )


def _keep(home: Path, config: SlurmConfig, address: str) -> Path:
    """Where a control plane reads it; of several with one directory, each may be the one that leads."""
    import msgspec

    from shoal.engines.slurm.config import FILE

    settings = _remember(home, {"engine": "slurm", "nodes_on": address})
    prepare_home(settings.state_dir)
    file = settings.state_dir / FILE
    write_private(file, msgspec.json.encode(config).decode() + "\n")
    return file


def _free_home() -> Path:
    home = home_from_env()
    prepare_home(home)
    pid = holder(home)
    if pid is not None:
        raise StateError(f"a control plane is running here (process {pid})", hint="`shoal down` first")
    return home


def _remember(home: Path, options: dict[str, str]) -> Settings:
    merged = {**load_remembered(home), **options}
    settings = load_settings(merged)  # refuses what could not be started
    remember(home, merged)
    return settings


def _address_towards(host: str) -> str:
    """The address of this machine from which packets to a node go out. Sends none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise SpecError(
                f"no way from here to the node {host}: {error.strerror or error}",
                hint="name this machine's address: `shoal connect slurm --nodes-on ADDRESS:7464`",
            ) from error
        return str(probe.getsockname()[0])
