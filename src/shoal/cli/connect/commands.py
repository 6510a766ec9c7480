"""`shoal connect`: choose which cluster this home's control plane uses from the next `shoal up` on."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.cluster.report import counted
from shoal.cli.connect.checks import record_same_cluster, refuse_other_cluster
from shoal.cli.control_plane import daemon
from shoal.cli.control_plane.home import load_remembered, prepare_home, remember, settings_for
from shoal.cli.flags import JsonFlag
from shoal.cli.output import note, print_json
from shoal.cli.progress import long_work
from shoal.cli.text import one_line
from shoal.client.credentials import write_private
from shoal.errors import SpecError, StateError
from shoal.home import home_from_env, pid_holding
from shoal.settings import Settings, load_settings

if TYPE_CHECKING:
    from shoal.engines.ray.config import RayConfig
    from shoal.engines.slurm.config import SlurmConfig
    from shoal.model.node import NodeFacts

app = App(name="connect", help="Choose where jobs run: a Slurm cluster, a Ray cluster or this machine.")
NODES_PORT = 7464
NodesPython = Annotated[
    str | None, Parameter(help="The Python on the nodes that has Shoal (this one's path).")
]
PythonPath = Annotated[str, Parameter(help="Its PYTHONPATH, if Shoal is not installed in it.")]
SharedDir = Annotated[str, Parameter(help="A directory shared by all nodes, for checkpoints.")]
SpoolDir = Annotated[str, Parameter(help="A directory on each node's own disk (below /tmp).")]
NodesOn = Annotated[str | None, Parameter(help="ADDRESS:PORT of this machine for the nodes (detected).")]
SshOptions = Annotated[
    str, Parameter(help="Options for `ssh` itself: `--ssh-options='-p 2222 -J ana@bastion'`.")
]
OfProject = Annotated[str, Parameter(help="The project whose jobs run there.")]
SharedTrust = Annotated[
    bool, Parameter(negative="", help="Jobs of all projects, which can read and stop each other's jobs.")
]
AsOwners = Annotated[
    bool,
    Parameter(negative="", help="Run each job under its owner's Unix account, of the same name. Needs root."),
]
SystemAccounts = Annotated[
    str, Parameter(help="NAME,NAME of owners whose uid may be a system one (below 1000).")
]
AsRoot = Annotated[bool, Parameter(negative="", help="Connect even if all jobs would run as root.")]
SameCluster = Annotated[
    bool,
    Parameter(negative="", help="It is the previous cluster, under another name or address."),
]


@app.command
def slurm(
    *,
    partition: Annotated[str, Parameter(help="NAME,NAME: only these partitions, the first preferred.")] = "",
    account: Annotated[
        str, Parameter(help="The account Slurm charges: NAME, or PROJECT=NAME,PROJECT=NAME.")
    ] = "",
    qos: Annotated[str, Parameter(help="The quality of service to request, in the same form.")] = "",
    python: NodesPython = None,
    python_path: PythonPath = "",
    shared: SharedDir = "",
    spool: SpoolDir = "",
    nodes_on: NodesOn = None,
    project: OfProject = "default",
    shared_trust: SharedTrust = False,
    ssh: Annotated[str, Parameter(help="USER@HOST of a login node, if this machine is not one.")] = "",
    ssh_options: SshOptions = "",
    rest: Annotated[
        str,
        Parameter(help="Use slurmrestd there (`https://HOST`, `unix:/PATH`) instead of Slurm's commands."),
    ] = "",
    jwt_file: Annotated[
        Path | None, Parameter(help="A file with its token, which only you can read.")
    ] = None,
    rest_user: Annotated[str, Parameter(help="The user jobs run as (the token's user).")] = "",
    as_owners: AsOwners = False,
    system_accounts: SystemAccounts = "",
    as_root: AsRoot = False,
    same_cluster: SameCluster = False,
    json: JsonFlag = False,
) -> int:
    """Connect a Slurm cluster: its nodes become Shoal's, and jobs run there under your own account.

    With `--as-owners` one control plane, run by root, serves many users, each
    under their own account. The command asks Slurm for its nodes and starts
    nothing. The next `shoal up` uses the cluster.
    """
    from shoal.cli.connect.checks import node_paths
    from shoal.cli.connect.slurm import charge_options, print_survey, rest_options, survey_slurm
    from shoal.engines.slurm.config import FILE, SlurmConfig

    home = _stopped_home()
    config = SlurmConfig(
        partition=partition,
        **charge_options(account, qos),
        **node_paths(python, python_path, spool, shared, ssh=ssh),
        project=project,
        has_shared_trust=shared_trust,
        ssh=ssh,
        ssh_options=tuple(shlex.split(ssh_options)),
        **rest_options(rest, jwt_file, rest_user, ssh),
        as_owners=as_owners,
        system_accounts=tuple(name for name in system_accounts.split(",") if name),
    )
    with long_work("asking Slurm for its nodes"):
        survey = survey_slurm(config, as_root=as_root)
    if survey.remark:
        note(f"note: {survey.remark}")
    refuse_other_cluster(home, survey.config.cluster_id, is_same=same_cluster)
    address = nodes_on or f"{_address_towards(survey.nodes[0].address)}:{NODES_PORT}"
    file = _save_connection(home, "slurm", FILE, survey.config, address)
    if same_cluster:
        record_same_cluster(home, survey.config.cluster_id)
    facts = _facts(survey.version, survey.nodes, address, file) | survey.as_dict()
    if json:
        print_json(facts)
        return 0
    print_survey(survey, facts)
    _print_next(shared)
    return 0


@app.command
def ray(
    *,
    address: Annotated[
        str, Parameter(help="HOST:PORT of a running Ray; without it a Ray is started here.")
    ] = "",
    token_file: Annotated[
        Path | None, Parameter(help="A file with that Ray's token, which only you can read.")
    ] = None,
    tls_cert: Annotated[
        Path | None, Parameter(help="This machine's certificate in a Ray with `RAY_USE_TLS=1` (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, Parameter(help="Its key, which only you can read.")] = None,
    tls_ca: Annotated[Path | None, Parameter(help="The certificate authority that Ray trusts.")] = None,
    project: OfProject = "default",
    shared_trust: SharedTrust = False,
    ray_python: Annotated[
        str | None, Parameter(help="The Python on this machine that has Ray (this one's path).")
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
    """Connect a Ray cluster: its nodes become Shoal's, and jobs run as the user who started Ray.

    This machine must be one of its nodes. The next `shoal up` uses the cluster.
    """
    from shoal.cli.connect.checks import absolute_python, node_paths, refuse_missing_shared
    from shoal.engines.ray.config import FILE, RayConfig

    home = _stopped_home()
    if address and token_file is None:
        raise SpecError(
            f"no token for the Ray at {address}: Shoal refuses a Ray that any user can control",
            hint="`ray get-auth-token` on its head prints it: write that to a file, `--token-file FILE`",
        )
    if not address:
        _refuse_several(home)
    there = node_paths(python, python_path, spool, shared)
    refuse_missing_shared(there["shared"])
    there["shared"] = there["shared"] or ("" if address else str(home / "ray" / "shared"))
    config = RayConfig(
        address=address,
        token_file=str(token_file.absolute()) if token_file is not None and address else "",
        **_tls_files(address, {"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca}),
        ray_python=absolute_python(ray_python or sys.executable),
        **there,
        project=project,
        has_shared_trust=shared_trust,
    )
    refuse_other_cluster(home, config.cluster_id, is_same=same_cluster)
    _refuse_root(config, as_root=as_root)
    doing = "asking Ray for its nodes" if address else "starting a Ray here and asking it for its nodes"
    with long_work(doing):
        version, nodes = _ask_ray(config, home, as_root=as_root)
    asked_at = nodes_on or f"{_address_towards(nodes[0].address)}:{NODES_PORT}"
    file = _save_connection(home, "ray", FILE, config, asked_at)
    if same_cluster:
        record_same_cluster(home, config.cluster_id)
    facts = _facts(version, nodes, asked_at, file)
    _note_remarks(nodes)
    if json:
        print_json(facts)
    else:
        _print_ray(config, facts)
    return 0


def _tls_files(address: str, files: dict[str, Path | None]) -> dict[str, str]:
    """Return the paths of the TLS files: all of them, or none."""
    named = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    if named and not address:
        raise SpecError(
            "a Ray that Shoal starts listens on loopback only, without TLS", hint="name an `--address`"
        )
    if named and len(named) < len(files):
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in files if name not in named)
        raise SpecError(f"TLS needs a certificate, its key and an authority; {missing} is not given")
    return named


def _refuse_several(home: Path) -> None:
    """Refuse a Ray of our own for several control planes: it is on loopback and ends with its machine."""
    shared = load_settings(load_remembered(home)).shared
    if shared is not None:
        raise SpecError(
            f"several control planes share {shared}, and a Ray that Shoal starts serves this machine only",
            hint="name one that all reach: `shoal connect ray --address HOST:PORT --token-file FILE`; "
            "or have one control plane: `shoal up --shared none`",
        )


def _refuse_root(config: RayConfig, *, as_root: bool) -> None:
    """Refuse before a Ray is started here as root: no job would use it, and nothing would stop it."""
    if not config.address and os.geteuid() == 0 and not as_root:
        raise SpecError(
            "all jobs would run as root, because root would start Ray here",
            hint="run `shoal` as a user, or add `--as-root`",
        )


def _ask_ray(config: RayConfig, home: Path, *, as_root: bool) -> tuple[str, list[NodeFacts]]:
    """Return the version and the nodes of a Ray. The agents that looked at the nodes are stopped."""
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
        raise SpecError("that Ray has no nodes with CPUs", hint="list them with `ray status`")
    deaf = [node.facts for node in nodes if not node.facts.is_alive]
    if len(deaf) == len(nodes):
        raise SpecError(f"no node of that Ray can be used: {deaf[0].name}: {deaf[0].remarks[0]}")
    if not as_root and any(node.uid == 0 for node in nodes):
        raise SpecError(
            "all jobs would run as root, because root runs Ray on its nodes",
            hint="start Ray as a user, or add `--as-root`",
        )
    return version, [node.facts for node in nodes]


def _note_remarks(nodes: list[NodeFacts]) -> None:
    for node in nodes:
        for remark in node.remarks:
            note(f"note: {one_line(node.name)}: {one_line(remark)}")


def _print_ray(config: RayConfig, facts: dict[str, Any]) -> None:
    nodes = counted(facts["alive"], "node")
    print(f"Ray {facts['version']}: {nodes}, {facts['cpus']:g} CPUs, {facts['gpus']} GPUs")
    whose = "all projects" if config.has_shared_trust else f"project {config.project}"
    asked_at = f"nodes will connect to {facts['nodes_on']}, over TLS"
    print(f"{asked_at}; for jobs of {whose}: jobs in one Ray can control each other")
    _print_next(config.shared)


@app.command
def local(*, same_cluster: SameCluster = False, json: JsonFlag = False) -> int:
    """Run jobs on this machine again."""
    from shoal.engines.home_records import this_machine
    from shoal.engines.ray.head import RayHead

    home = _stopped_home()
    is_shared = load_settings(load_remembered(home)).shared is not None
    machine = this_machine(is_shared=is_shared)
    refuse_other_cluster(home, machine, is_same=same_cluster)
    with long_work("stopping the Ray that Shoal started, if it runs"):
        has_stopped = RayHead(home / "ray", "").stop()
    _save_options(home, {"engine": "local", "nodes_on": "none"})
    if same_cluster:
        record_same_cluster(home, machine)
    if json:
        print_json({"engine": "local"})
    else:
        if has_stopped:
            print("stopped the Ray that Shoal had started")
        print("jobs run on this machine; next  shoal up")
    return 0


def _facts(version: str, nodes: list[NodeFacts], address: str, file: Path) -> dict[str, Any]:
    alive = [facts for facts in nodes if facts.is_alive]
    return {
        "version": version,
        "nodes": len(nodes),
        "alive": len(alive),
        "cpus": sum(node.cpus for node in alive),
        "gpus": sum(len(node.gpus) for node in alive),
        "nodes_on": address,
        "config": str(file),
    }


def _print_next(shared: str) -> None:
    if not shared:
        print("no shared directory: jobs with `checkpoint` will be refused (`--shared DIR`)")
    print("next  shoal up")


def _save_connection(
    home: Path, engine: str, name: str, config: SlurmConfig | RayConfig, address: str
) -> Path:
    """Save the config where a control plane reads it. Of several with one directory, each may lead."""
    import msgspec

    settings = _save_options(home, {"engine": engine, "nodes_on": address})
    prepare_home(settings.state_dir)
    file = settings.state_dir / name
    write_private(file, msgspec.json.encode(config).decode() + "\n")
    return file


def _stopped_home() -> Path:
    home = home_from_env()
    prepare_home(home)
    daemon.refuse_copy(settings_for({})[0])  # a copied home's Ray belongs to the original
    pid = pid_holding(home)
    if pid is not None:
        raise StateError(f"a control plane is running here (process {pid})", hint="`shoal down` first")
    return home


def _save_options(home: Path, options: dict[str, str]) -> Settings:
    merged = {**load_remembered(home), **options}
    settings = load_settings(merged)  # refuses settings that could not start
    remember(home, merged)
    return settings


def _address_towards(host: str) -> str:
    """Return the address of this machine from which packets to a node leave. Sends none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise SpecError(
                f"no route from here to the node {host}: {error.strerror or error}",
                hint="name this machine's address: `--nodes-on ADDRESS:7464`",
            ) from error
        return str(probe.getsockname()[0])
