"""The service spec: an HTTP server that runs as replicas behind one address, validated and frozen."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from shoal.spec.job import Env, JobSpec, check_has_folder, check_secret_names
from shoal.spec.job_fields import Fence, Grace, LogRules, Mounts, Priority, RetrySpec, TimeLimit, Topology
from shoal.spec.resources import Resources
from shoal.spec.service_fields import (
    Affinity,
    Balance,
    Hedge,
    Hosts,
    LimitsSpec,
    Model,
    Network,
    Origins,
    Pause,
    Port,
    Readiness,
    ReadinessSpec,
    ReplicaRange,
    Replicas,
    Rollout,
    RolloutSpec,
    ScaleSpec,
)
from shoal.spec.text import EnvName, FilePatterns, Folder, JobName, Name, Script

MAX_CAP = 100_000
MAX_RETRIES = 5


class ServiceSpec(BaseModel):
    """Only `name` and `run` are needed. Resources are for each replica."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    kind: Literal["service"] = "service"
    name: JobName = Field(
        description="The service's name, unique in its project; served at `/{project}/{name}/`."
    )
    project: Name | None = Field(
        default=None, description="The project of the service; unset: your only project."
    )
    queue: Name = Field(default="default", description="A queue of the cluster.")
    priority: Priority = Field(
        default=0,
        description="Priority of its replicas, as of jobs: higher goes first, and may take from lower.",
    )
    resources: Resources = Resources.model_construct()
    workdir: Folder | None = Field(
        default=".", description="The folder to run in, copied at submission; null: an empty folder."
    )
    include: FilePatterns = Field(
        default=(),
        description="Files of `workdir` to copy although git ignores them, as in .gitignore: `data/`, "
        "`*.bin`.",
    )
    exclude: FilePatterns = Field(
        default=(), description="Files of `workdir` not to copy, as in .gitignore; overrides `include`."
    )
    setup: Script | None = Field(default=None, description="Run once on each node before the server.")
    run: Script = Field(description="Starts the server, for a shell. It listens at $PORT.")
    port: Port | None = Field(
        default=None,
        description="The port of the server if it is not $PORT: a node then has room for one replica. "
        "`socket`: the Unix socket $SHOAL_SOCKET, which only the balancer can reach.",
    )
    network: Network = Field(
        default="closed",
        description="Which programs may connect to its port, if the node can enforce it: `closed`: only"
        " the data plane; `open`: every program on the node; `private`: only the data "
        "plane, and the replica can connect to nothing after `setup`.",
    )
    env: Env = {}
    secrets: Annotated[tuple[EnvName, ...], Field(max_length=256)] = Field(
        default=(),
        description="Names of variables taken from the submitter's environment and never stored in the spec.",
    )
    mounts: Mounts = ()
    log_rules: LogRules = ()
    topology: Topology | None = None
    grace: Grace = Field(default=30.0, description="Time from the first signal to the kill.")
    fence: Fence = Field(default=1800.0, description="A replica cut off for this long stops by itself.")
    model: Model | None = Field(
        default=None,
        description="The model that it serves, kept with the release: a name, or `{job: NAME}` for a "
        "job's checkpoint.",
    )
    replicas: Replicas = ReplicaRange.model_construct(min=1, max=1)
    readiness: Readiness = ReadinessSpec.model_construct()
    scale: ScaleSpec = ScaleSpec.model_construct()
    rollout: Rollout = RolloutSpec.model_construct()
    drain: Pause = Field(
        default=30.0, description="Time for a replica to finish its requests before it stops."
    )
    limits: LimitsSpec = LimitsSpec.model_construct()
    cap: Annotated[int, Field(strict=True, ge=1, le=MAX_CAP)] = Field(
        default=64, description="Requests at the same time in one replica; more requests wait in front of it."
    )
    timeout: TimeLimit = Field(
        default=600.0, description="Time from the last byte of a request to the first byte of its answer."
    )
    max_wait: Pause = Field(
        default=60.0,
        description="How long a request waits for a free slot; longer by `readiness.within` if no "
        "replica is ready.",
    )
    retries: Annotated[int, Field(strict=True, ge=0, le=MAX_RETRIES)] = Field(
        default=1,
        description="Repeats of a request whose replica was lost before it answered, if repeating does "
        "no harm: GET, HEAD and OPTIONS, requests with an Idempotency-Key, completions with"
        " `balance: tokens`.",
    )
    repeatable: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Repeating any of its requests does no harm, not even a POST."
    )
    hedge_after: Hedge | None = Field(
        default=None,
        description="A GET or HEAD, or a request with an Idempotency-Key, without an answer after this "
        "time is also sent to a second replica; the first answer counts.",
    )
    affinity: Affinity | None = Field(
        default=None, description="`header:NAME` or `cookie:NAME`: the same value goes to the same replica."
    )
    balance: Balance = Field(
        default="least",
        description="`least`: the replica with the fewest requests; `tokens`: the soonest first token, "
        "for language models.",
    )
    hosts: Hosts = Field(default=(), description="Names in the `Host` header that mean this service.")
    origins: Origins = Field(
        default=(),
        description="Origins of web pages that may call it from a browser, as "
        "`https://app.example.org`; `*`: all pages. The data plane answers their CORS "
        "preflights.",
    )
    public: Annotated[bool, Field(strict=True)] = Field(default=False, description="Requests need no token.")

    @field_validator("network", mode="after")
    @classmethod
    def _network_is_of_one_node(cls, network: Network, info: ValidationInfo) -> Network:
        resources = info.data.get("resources")
        if network == "private" and isinstance(resources, Resources) and resources.nodes.max > 1:
            raise ValueError("`private` has room for one node; leave it out, or set `nodes: 1`")
        return network

    @field_validator("port", mode="after")
    @classmethod
    def _socket_is_of_one_node(cls, port: Port | None, info: ValidationInfo) -> Port | None:
        resources = info.data.get("resources")
        if port == "socket" and isinstance(resources, Resources) and resources.nodes.max > 1:
            raise ValueError("`socket` has room for one node; leave `port` out, or set `nodes: 1`")
        return port

    @field_validator("include", "exclude", mode="after")
    @classmethod
    def _files_have_a_folder(cls, patterns: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return check_has_folder(patterns, info.data.get("workdir", "."))

    @field_validator("secrets", mode="after")
    @classmethod
    def _secrets_stand_alone(cls, secrets: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return check_secret_names(secrets, info.data.get("env", {}))

    def canonical(self) -> dict[str, Any]:
        """Plain data with defaults left out; parsing it gives an equal spec."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def canonical_json(self) -> str:
        """The one text of this spec. `model_validate_json` reads it back."""
        return json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def replica_job(self) -> JobSpec:
        """What each replica runs. The service replaces a failed replica and does not retry its job."""
        shared = {name: getattr(self, name) for name in JobSpec.model_fields.keys() & type(self).model_fields}
        # a network of its own is the probe's concern
        network = "open" if self.network == "open" else "closed"
        fixed = {"ranks_per_node": 1, "retry": RetrySpec.model_construct(), "network": network}
        return JobSpec.model_construct(**{**shared, **fixed})
