"""Every error that Shoal raises on purpose, grouped by the person or process that must act.

    ShoalError
    ├── SpecError           the request is wrong           422  exit 2
    ├── StateError          right request, wrong moment    409  exit 3
    ├── Denied              not known, or not allowed   401/403  exit 4
    ├── NotFound            no such thing, or not yours    404  exit 4
    ├── LimitReached        a quota or rate says no        429  exit 3
    │   └── TooLarge        more than is ever taken        413  exit 2
    ├── EngineRefused       the engine said no             502  exit 5
    │   └── NodeGone        not there; elsewhere perhaps   502  exit 5
    ├── EngineUnreachable   we could not ask               503  exit 6
    └── Bug                 our own invariant broke        500  exit 70

An error is a sentence with the value seen, facts for machines, and a hint that can be typed.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ShoalError(Exception):
    """The base of all errors. `code` is stable and for machines. `hint` ends with a command to type."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts


class SpecError(ShoalError):
    """The request can never work as written. `problems` lists all mistakes, not only the first."""

    code = "spec.invalid"
    status = 422
    exit_code = 2

    def __init__(
        self, message: str, *, problems: tuple[str, ...] = (), hint: str | None = None, **facts: Any
    ) -> None:
        super().__init__(message, hint=hint, **facts)
        self.problems = problems or (message,)


class ArchiveMissing(SpecError):
    """The project has no archive with this digest. Upload it, then send the same request again."""

    code = "archive.missing"


class StateError(ShoalError):
    """The request is well formed, but its object is in a state that does not allow it."""

    code = "state.conflict"
    status = 409
    exit_code = 3


class AlreadyLed(StateError):
    """Another control plane leads on this database."""

    code = "control.already_led"


class HomeMissing(StateError):
    """The database's home is missing. It never existed, or the shared directory is not mounted now."""

    code = "control.home_missing"


class LimitReached(ShoalError):
    """A quota, a rate or a size limit says no. The same request may work later."""

    code = "limit.reached"
    status = 429
    exit_code = 3


class TooLarge(LimitReached):
    """The body or archive is larger than this server accepts. Sending it again is useless."""

    code = "limit.too_large"
    status = 413
    exit_code = 2


class Denied(ShoalError):
    """The caller is known but not allowed to do this."""

    code = "denied"
    status = 403
    exit_code = 4


class Unauthenticated(Denied):
    """The caller is unknown: no credential, or one that is wrong, expired or revoked."""

    code = "unauthenticated"
    status = 401


class NotFound(ShoalError):
    """The object does not exist, or the caller may not see its project: deliberately the same reply."""

    code = "not_found"
    status = 404
    exit_code = 4


class NotVisible(NotFound):
    """The object may exist in a project that the caller may not see. The reply is identical to `NotFound`."""


class EngineRefused(ShoalError):
    """The engine refuses to run this. Nothing was started, and trying again is useless."""

    code = "engine.refused"
    status = 502
    exit_code = 5


class NodeGone(EngineRefused):
    """The node in the fact `node`, or one of its devices, is gone. Nothing was started."""

    code = "engine.node_gone"


class EngineUnreachable(ShoalError):
    """It is unknown whether the engine acted. Call `list_owned` before anything else."""

    code = "engine.unreachable"
    status = 503
    exit_code = 6


class ServerUnreachable(ShoalError):
    """The client could not reach a control plane."""

    code = "server.unreachable"
    status = 503
    exit_code = 6


class StoreUnavailable(ShoalError):
    """The store could not commit (disk full, read-only, database away). Nothing was acknowledged."""

    code = "store.unavailable"
    status = 503
    exit_code = 6


class Deposed(StoreUnavailable):
    """Another control plane has become the leader. This one makes no more changes and answers no requests."""

    code = "control.deposed"


class StandingBy(ShoalError):
    """This control plane is on standby and did nothing. Send the request to the leader."""

    code = "control.standing_by"
    status = 503
    exit_code = 6


class Bug(ShoalError):
    """An invariant of Shoal is broken. Carries the history that led to it."""

    code = "bug"
    status = 500
    exit_code = 70
