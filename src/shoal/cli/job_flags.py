"""The flags that describe a job: the names of the YAML fields, read and checked by `spec`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from cyclopts import Group, Parameter

NEEDS = Group("What it needs, on each node", sort_key=1)
AGAIN = Group("When it fails", sort_key=2)
Text = str | None
Many = tuple[str, ...]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Text as typed: `spec` alone knows what `32GB..` means."""

    name: Annotated[Text, Parameter(name=["--name", "-n"], help="What to call it.")] = None
    project: Annotated[Text, Parameter(name=["--project", "-p"], help="Whose it is.")] = None
    queue: Annotated[Text, Parameter(help="Which queue.")] = None
    priority: Annotated[
        Text, Parameter(help="-1000 to 1000 or a class; higher goes first.", allow_leading_hyphen=True)
    ] = None
    time_limit: Annotated[Text, Parameter(help="Such as `2h`; stopped after that.")] = None
    deadline: Annotated[Text, Parameter(help="To have ended by: `14:00` UTC, or in `6h`.")] = None
    workdir: Annotated[Text, Parameter(help="Directory to send along, `''` for none; the current one.")] = (
        None
    )
    include: Annotated[
        Many, Parameter(name="--include", negative="", help="Files to send though git ignores them: `data/`.")
    ] = ()
    exclude: Annotated[
        Many, Parameter(name="--exclude", negative="", help="Files not to send: `*.ckpt`.")
    ] = ()
    shared: Annotated[bool | None, Parameter(negative="", help="One working folder for all nodes.")] = None
    setup: Annotated[Text, Parameter(help="A command to run first, once on each node.")] = None
    env: Annotated[
        Many, Parameter(name=["--env", "-e"], negative="", help="NAME=VALUE, or NAME as set here.")
    ] = ()
    secrets: Annotated[
        Many, Parameter(name="--secret", negative="", help="NAME as set here; its value travels sealed.")
    ] = ()
    mounts: Annotated[Many, Parameter(name="--mount", negative="", help="SOURCE:TARGET[:ro].")] = ()
    after: Annotated[
        Many, Parameter(name="--after", negative="", help="Start after this job, or array, has succeeded.")
    ] = ()
    array: Annotated[Text, Parameter(help="Many jobs: `0..99`, `0-99%10`.")] = None
    gpus: Annotated[Text, Parameter(group=NEEDS, help="`8`, `H100`, `H100:8`, or `0.5` of one.")] = None
    nodes: Annotated[Text, Parameter(group=NEEDS, help="How many nodes: `2` or `2..4`.")] = None
    cpus: Annotated[Text, Parameter(group=NEEDS, help="`4`, `0.5` or `4+`.")] = None
    memory: Annotated[Text, Parameter(group=NEEDS, help="`32GB` or `32GB..`.")] = None
    disk: Annotated[Text, Parameter(group=NEEDS, help="`100GB`.")] = None
    ranks_per_node: Annotated[
        Text, Parameter(group=NEEDS, help="Processes; one for each GPU if not given.")
    ] = None
    exclusive: Annotated[
        bool | None, Parameter(negative="", group=NEEDS, help="Whole nodes, shared with nobody.")
    ] = None
    exclude_nodes: Annotated[
        Many, Parameter(name="--exclude-node", negative="", group=NEEDS, help="A node it must not run on.")
    ] = ()
    require: Annotated[
        Many, Parameter(name="--require", negative="", group=NEEDS, help="LABEL=VALUE its nodes must have.")
    ] = ()
    topology: Annotated[
        Text, Parameter(group=NEEDS, help="All nodes within one `rack`, or `spread:rack`: each in another.")
    ] = None
    retry: Annotated[Text, Parameter(group=AGAIN, help="How often to try again.")] = None
    retry_on: Annotated[
        Many, Parameter(name="--retry-on", negative="", help="exit signal oom setup time_limit.", group=AGAIN)
    ] = ()
    retry_backoff: Annotated[Text, Parameter(group=AGAIN, help="Pause before the first retry; doubles.")] = (
        None
    )
    log_rules: Annotated[
        Many,
        Parameter(
            name="--log-rule", negative="", help="REGEX=exclude_node or REGEX=stop_retries.", group=AGAIN
        ),
    ] = ()
    checkpoint: Annotated[Text, Parameter(group=AGAIN, help="Folder kept from attempt to attempt.")] = None
    world: Annotated[
        Text, Parameter(group=AGAIN, help="`any`: process groups need not span all ranks of the job.")
    ] = None
    grace: Annotated[Text, Parameter(group=AGAIN, help="Time between SIGTERM and SIGKILL.")] = None
    network: Annotated[Text, Parameter(help="`open`: other projects may connect to its ports.")] = None
    fence: Annotated[Text, Parameter(group=AGAIN, help="Silence after which a cut-off job stops itself.")] = (
        None
    )

    def given(self) -> dict[str, Any]:
        """The flags that were typed, by the spec's names."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in told.items() if value is not None and value != ()}


NO_FLAGS = JobFlags()
