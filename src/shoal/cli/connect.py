"""`shoal connect`: which cluster this home's control plane hands its work to, from the next `shoal up` on."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from shoal.cli import restore
from shoal.cli.cluster_words import counted
from shoal.cli.elsewhere import refuse_elsewhere, remember_same
from shoal.cli.flags import JsonFlag
from shoal.cli.home import load_remembered, prepare_home, remember, settings_for
from shoal.cli.progress import long_work
from shoal.cli.show import note, print_json
from shoal.cli.text import one_line
from shoal.client.credentials import write_private
from shoal.errors import SpecError, StateError
from shoal.home import holder, home_from_env
from shoal.settings import Settings, load_settings

if TYPE_CHECKING:
    from shoal.engines.ray.config import RayConfig
    from shoal.engines.slurm.config import SlurmConfig
    from shoal.model.node import NodeFacts

app = App(name="connect", help="Say where work runs: on a Slurm cluster, a Ray, or this machine.")
NODES_PORT = 7464
NodesPython = Annotated[
    str | None, Parameter(help="The Python with Shoal in it on the nodes (this one's path).")
]
PythonPath = Annotated[str, Parameter(help="Its PYTHONPATH, if Shoal is not installed in it.")]
SharedDir = Annotated[str, Parameter(help="A directory that all nodes have, for checkpoints.")]
SpoolDir = Annotated[str, Parameter(help="A directory on each node's own disk (below /tmp).")]
NodesOn = Annotated[
    str | None, Parameter(help="ADDRESS:PORT of this machine where nodes ask (found by itself).")
]
SshOptions = Annotated[
    str, Parameter(help="Words for `ssh` itself: `--ssh-options='-p 2222 -J ana@bastion'`.")
]
OfProject = Annotated[str, Parameter(help="The project whose jobs run there.")]
SharedTrust = Annotated[
    bool, Parameter(negative="", help="Jobs of all projects, which can read and stop each other's.")
]
AsOwners = Annotated[
    bool,
    Parameter(negative="", help="Each job under its owner's Unix account, of the same name. Needs root."),
]
SystemAccounts = Annotated[
    str, Parameter(help="NAME,NAME of owners whose uid may be a system's (below 1000).")
]
AsRoot = Annotated[
    bool, Parameter(negative="", help="Even if all jobs, whoever's they are, would run as root.")
]
SameCluster = Annotated[
    bool,
    Parameter(negative="", help="It is the cluster of before, under another name or at another address."),
]


@app.command
def slurm(
    *,
    partition: Annotated[str, Parameter(help="NAME,NAME: nodes of these alone, the first preferred.")] = "",
    account: Annotated[str, Parameter(help="Whom Slurm charges: NAME, or PROJECT=NAME,PROJECT=NAME.")] = "",
    qos: Annotated[str, Parameter(help="The quality of service to ask for, likewise.")] = "",
    python: NodesPython = None,
    python_path: PythonPath = "",
    shared: SharedDir = "",
    spool: SpoolDir = "",
    nodes_on: NodesOn = None,
    project: OfProject = "default",
    shared_trust: SharedTrust = False,
    ssh: Annotated[str, Parameter(help="USER@HOST of a login node, if this machine is none.")] = "",
    ssh_options: SshOptions = "",
    rest: Annotated[
        str, Parameter(help="Ask slurmrestd there (`https://HOST`, `unix:/PATH`), not Slurm's commands.")
    ] = "",
    jwt_file: Annotated[
        Path | None, Parameter(help="The file with a token for it, which you alone can read.")
    ] = None,
    rest_user: Annotated[str, Parameter(help="Whose jobs they are (the token's user).")] = "",
    as_owners: AsOwners = False,
    system_accounts: SystemAccounts = "",
    as_root: AsRoot = False,
    same_cluster: SameCluster = False,
    json: JsonFlag = False,
) -> int:
    """Connect a Slurm cluster: its nodes become Shoal's, and jobs run there under your own account.

    With `--as-owners` one control plane of root's serves many people, each under
    an account of their own. Asks Slurm for its nodes and starts nothing. The
    next `shoal up` uses it.
    """
    from shoal.cli.connect_places import places
    from shoal.cli.connect_slurm import ask_slurm, choices, rest_options, say_slurm
    from shoal.engines.slurm.config import FILE, SlurmConfig

    home = _free_home()
    config = SlurmConfig(
        partition=partition,
        **choices(account, qos),
        **places(python, python_path, spool, shared, ssh=ssh),
        project=project,
        has_shared_trust=shared_trust,
        ssh=ssh,
        ssh_options=tuple(shlex.split(ssh_options)),
        **rest_options(rest, jwt_file, rest_user, ssh),
        as_owners=as_owners,
        system_accounts=tuple(name for name in system_accounts.split(",") if name),
    )
    with long_work("asking Slurm for its nodes"):
        found = ask_slurm(config, as_root=as_root)
    if found.remark:
        note(f"note: {found.remark}")
    refuse_elsewhere(home, found.config.cluster_id, is_same=same_cluster)
    address = nodes_on or f"{_address_towards(found.nodes[0].address)}:{NODES_PORT}"
    file = _keep(home, "slurm", FILE, found.config, address)
    if same_cluster:
        remember_same(home, found.config.cluster_id)
    facts = _facts(found.version, found.nodes, address, file) | found.as_dict()
    if json:
        print_json(facts)
        return 0
    say_slurm(found, facts)
    _say_next(shared)
    return 0


@app.command
def ray(
    *,
    address: Annotated[
        str, Parameter(help="HOST:PORT of a Ray that runs; without it one is started here.")
    ] = "",
    token_file: Annotated[
        Path | None, Parameter(help="The file with that Ray's token, which you alone can read.")
    ] = None,
    tls_cert: Annotated[
        Path | None, Parameter(help="This machine's certificate in a Ray with `RAY_USE_TLS=1` (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, Parameter(help="Its key, which you alone can read.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="The authority whose certificates that Ray takes.")] = None,
    project: OfProject = "default",
    shared_trust: SharedTrust = False,
    ray_python: Annotated[
        str | None, Parameter(help="The Python with Ray in it on this machine (this one's path).")
    ] = None,
    python: NodesPython = None,
    python_path: PythonPath = "",
    shared: SharedDir = "",
    spool: SpoolDir = "",
    nodes_on: NodesOn = None,
    as_root: AsRoot = False,
    same_cluster: SameCluster = False,
    json: JsonFlag = False,
) -> int:
    """Connect a Ray: its nodes become Shoal's, and jobs run there as the user who started Ray.

    This machine must be one of its nodes. The next `shoal up` uses it.
    """
    from shoal.cli.connect_places import places, refuse_missing, whole_python
    from shoal.engines.ray.config import FILE, RayConfig

    home = _free_home()
    if address and token_file is None:
        raise SpecError(
            f"no token for the Ray at {address}: anybody may rule a Ray without one, so Shoal uses none",
            hint="`ray get-auth-token` on its head prints it: write that to a file, `--token-file FILE`",
        )
    if not address:
        _refuse_several(home)
    there = places(python, python_path, spool, shared)
    refuse_missing(there["shared"])
    there["shared"] = there["shared"] or ("" if address else str(home / "ray" / "shared"))
    config = RayConfig(
        address=address,
        token_file=str(token_file.absolute()) if token_file is not None and address else "",
        **_tls_files(address, {"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca}),
        ray_python=whole_python(ray_python or sys.executable),
        **there,
        project=project,
        has_shared_trust=shared_trust,
    )
    refuse_elsewhere(home, config.cluster_id, is_same=same_cluster)
    _refuse_root(config, as_root=as_root)
    doing = "asking Ray for its nodes" if address else "starting a Ray here and asking it for its nodes"
    with long_work(doing):
        version, found = _ask_ray(config, home, as_root=as_root)
    asked_at = nodes_on or f"{_address_towards(found[0].address)}:{NODES_PORT}"
    file = _keep(home, "ray", FILE, config, asked_at)
    if same_cluster:
        remember_same(home, config.cluster_id)
    facts = _facts(version, found, asked_at, file)
    _note_remarks(found)
    if json:
        print_json(facts)
    else:
        _say_ray(config, facts)
    return 0


def _tls_files(address: str, given: dict[str, Path | None]) -> dict[str, str]:
    """Where they are: all of them, or none."""
    named = {name: str(path.absolute()) for name, path in given.items() if path is not None}
    if named and not address:
        raise SpecError(
            "a Ray that Shoal starts is on loopback alone, without TLS", hint="name an `--address`"
        )
    if named and len(named) < len(given):
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in given if name not in named)
        raise SpecError(f"TLS needs a certificate, its key and an authority; {missing} is not given")
    return named


def _refuse_several(home: Path) -> None:
    """A Ray of our own is on loopback and ends with its machine: another control plane could not reach it."""
    shared = load_settings(load_remembered(home)).shared
    if shared is not None:
        raise SpecError(
            f"several control planes share {shared}, and a Ray that Shoal starts is for this machine alone",
            hint="name one that all reach: `shoal connect ray --address HOST:PORT --token-file FILE`; "
            "or have one control plane: `shoal up --shared none`",
        )


def _refuse_root(config: RayConfig, *, as_root: bool) -> None:
    """Before a Ray is started here that would be root's: nobody would use it, or end it."""
    if not config.address and os.geteuid() == 0 and not as_root:
        raise SpecError(
            "all jobs would run as root: that is who would start Ray here",
            hint="run `shoal` as a user, or say `--as-root`",
        )


def _ask_ray(config: RayConfig, home: Path, *, as_root: bool) -> tuple[str, list[NodeFacts]]:
    """Its version and nodes. The agents that looked at them are gone afterwards."""
    from shoal.engines.ray.client import RayClient
    from shoal.engines.ray.head import finder
    from shoal.engines.ray.parse import check_version, parse_nodes

    client = RayClient(
        config,
        namespace=f"shoal-connect-{os.urandom(4).hex()}",
        log_file=home / "logs" / "ray-connect.log",
        find=finder(config, home),
        is_passing=True,
    )
    try:
        version = client.version()["ray"]
        check_version(version)
        nodes = parse_nodes(client.nodes())
    finally:
        client.close()
    if not nodes:
        raise SpecError("that Ray has no nodes with CPUs", hint="see them with `ray status`")
    deaf = [node.facts for node in nodes if not node.facts.is_alive]
    if len(deaf) == len(nodes):
        raise SpecError(f"no node of that Ray can be used: {deaf[0].name}: {deaf[0].remarks[0]}")
    if not as_root and any(node.uid == 0 for node in nodes):
        raise SpecError(
            "all jobs would run as root: that is who runs Ray on its nodes",
            hint="start Ray as a user, or say `--as-root`",
        )
    return version, [node.facts for node in nodes]


def _note_remarks(found: list[NodeFacts]) -> None:
    for node in found:
        for remark in node.remarks:
            note(f"note: {one_line(node.name)}: {one_line(remark)}")


def _say_ray(config: RayConfig, facts: dict[str, Any]) -> None:
    nodes = counted(facts["alive"], "node")
    print(f"Ray {facts['version']}: {nodes}, {facts['cpus']:g} CPUs, {facts['gpus']} GPUs")
    whose = "all projects" if config.has_shared_trust else f"project {config.project}"
    asked_at = f"nodes will ask at {facts['nodes_on']}, over TLS"
    print(f"{asked_at}; for jobs of {whose}: all in one Ray trust each other")
    _say_next(config.shared)


@app.command
def local(*, same_cluster: SameCluster = False, json: JsonFlag = False) -> int:
    """Run work on this machine again."""
    from shoal.engines.cluster_id import this_machine
    from shoal.engines.ray.head import Head

    home = _free_home()
    is_shared = load_settings(load_remembered(home)).shared is not None
    machine = this_machine(is_shared=is_shared)
    refuse_elsewhere(home, machine, is_same=same_cluster)
    with long_work("stopping the Ray of our own, if it runs"):
        has_stopped = Head(home / "ray", "").stop()
    _remember(home, {"engine": "local", "nodes_on": "none"})
    if same_cluster:
        remember_same(home, machine)
    if json:
        print_json({"engine": "local"})
    else:
        if has_stopped:
            print("stopped the Ray of our own")
        print("work runs on this machine; next  shoal up")
    return 0


def _facts(version: str, found: list[NodeFacts], address: str, file: Path) -> dict[str, Any]:
    alive = [facts for facts in found if facts.is_alive]
    return {
        "version": version,
        "nodes": len(found),
        "alive": len(alive),
        "cpus": sum(one.cpus for one in alive),
        "gpus": sum(len(one.gpus) for one in alive),
        "nodes_on": address,
        "config": str(file),
    }


def _say_next(shared: str) -> None:
    if not shared:
        print("no shared directory: jobs with `checkpoint` will be refused (`--shared DIR`)")
    print("next  shoal up")


def _keep(home: Path, engine: str, name: str, config: SlurmConfig | RayConfig, address: str) -> Path:
    """Where a control plane reads it; of several with one directory, each may be the one that leads."""
    import msgspec

    settings = _remember(home, {"engine": engine, "nodes_on": address})
    prepare_home(settings.state_dir)
    file = settings.state_dir / name
    write_private(file, msgspec.json.encode(config).decode() + "\n")
    return file


def _free_home() -> Path:
    home = home_from_env()
    prepare_home(home)
    restore.refuse_copy(settings_for({})[0])  # its Ray, say, is the original's
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
                hint="name this machine's address: `--nodes-on ADDRESS:7464`",
            ) from error
        return str(probe.getsockname()[0])
