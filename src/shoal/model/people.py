"""Users, projects, memberships and tokens: who there is. What they may do is decided in `identity`."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    """Ordered from least to most; `operator` and `admin` are held on the whole cluster."""

    VIEWER = "viewer"
    """Reads jobs, logs and events of the project."""
    MEMBER = "member"
    """Also submits, and stops or retries their own jobs."""
    LEAD = "lead"
    """Also acts on everybody's jobs in the project and manages its members."""
    OPERATOR = "operator"
    """Also manages nodes, and sees every project."""
    ADMIN = "admin"
    """Also manages users, projects, quotas and tokens of others."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    user_id: str
    name: str
    is_active: bool = True
    cluster_role: Role | None = None
    """`operator` or `admin`, or None for people with project roles alone."""
    created_at: float = 0.0


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """So many GPUs and CPUs. None: nothing is said about that device."""

    gpus: int | None = None
    cpus: float | None = None


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """Projects form a tree: what one holds counts for every project above it too."""

    name: str
    uid: int
    """The Unix user its jobs run as where the machine allows it; never given to another project."""
    max_open_jobs: int = 10_000
    """Quota on jobs accepted and not ended."""
    max_jobs_per_day: int = 100_000
    """Jobs submitted or tried again in a day (UTC), each element of an array as one. What is recorded of a
    job stays for ever, so a loop that submits and stops would fill the disk."""
    max_priority: int = 100
    """The highest priority a member may ask for."""
    max_upload_bytes: int = 256 << 20
    parent: str | None = None
    """The project it is a part of."""
    quota: Devices | None = None
    """Guaranteed: within it the project's jobs come before those of projects that borrow."""
    limit: Devices | None = None
    """Never more than this, however idle the cluster is."""
    borrow: Devices | None = None
    """At most so much above its quota, of the devices that the quota names. None: whatever is idle."""
    weight: float = 1.0
    """Its part of what is shared, beside projects of the same parent."""
    created_at: float = 0.0


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    user_id: str
    user_name: str
    project: str
    role: Role


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A bearer token's public half: the secret is known only as a hash."""

    token_id: str
    user_id: str
    secret_hash: bytes
    label: str = ""
    scope: Role = Role.ADMIN
    """The most this token may do, whatever its user may."""
    project: str | None = None
    """Good in this project alone; None: wherever its user is."""
    service: str | None = None
    """Good for requests to this service of its project alone: it opens nothing of Shoal's own."""
    parent: str | None = None
    """The token that this one was made with: when the parent is revoked, so is this one."""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_living(self, now: float) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)
