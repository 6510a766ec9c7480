"""Users, projects, memberships and tokens. `identity` decides what they may do."""

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
    """Also acts on all jobs of the project and manages its members."""
    OPERATOR = "operator"
    """Also manages nodes, and sees every project."""
    ADMIN = "admin"
    """Also manages users, projects, quotas and tokens of others."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    user_id: str
    name: str
    is_active: bool = True
    cluster_role: Role | None = None
    """`operator` or `admin`. None for people who only have project roles."""
    created_at: float = 0.0


class DeviceAmounts(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of GPUs and CPUs. None leaves a device unset."""

    gpus: int | None = None
    cpus: float | None = None


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """Projects form a tree. What a project holds counts for every project above it too."""

    name: str
    uid: int
    """The Unix user that its jobs run as, if the machine allows it. It is never given to another project."""
    max_open_jobs: int = 10_000
    """Quota on jobs accepted and not ended."""
    max_jobs_per_day: int = 100_000
    """Jobs submitted or retried in a day (UTC). Each element of an array counts as one. The record of a job
    stays for ever, so a loop that submits and stops would fill the disk.
    """
    max_priority: int = 100
    """The highest priority a member may ask for."""
    max_upload_bytes: int = 256 << 20
    parent: str | None = None
    """The parent project."""
    quota: DeviceAmounts | None = None
    """Guaranteed devices. Within its quota the project's jobs come before those of projects that borrow."""
    limit: DeviceAmounts | None = None
    """The most the project may hold, however idle the cluster is."""
    borrow: DeviceAmounts | None = None
    """The most it may hold above its quota, of the devices that the quota names. None: whatever is idle."""
    weight: float = 1.0
    """Its weight against the other projects of the same parent."""
    created_at: float = 0.0


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    user_id: str
    user_name: str
    project: str
    role: Role


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """The public half of a bearer token. The secret is stored only as a hash."""

    token_id: str
    user_id: str
    secret_hash: bytes
    label: str = ""
    scope: Role = Role.ADMIN
    """The highest role this token can use, whatever its user may do."""
    project: str | None = None
    """The only project the token is good in. None: wherever its user is a member."""
    service: str | None = None
    """The token is good only for requests to this service of its project. It opens nothing of Shoal's own
    API.
    """
    parent: str | None = None
    """The token that this one was made with. Revoking the parent revokes this one."""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_living(self, now: float) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)
