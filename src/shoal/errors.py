"""Every error Shoal raises on purpose, split by who must act.

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
    """Base of all: `code` is stable and for machines, `hint` ends with something to type."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts


class SpecError(ShoalError):
    """The request can never work as written. `problems` lists every mistake found, not the first."""

    code = "spec.invalid"
    status = 422
    exit_code = 2

    def __init__(
        self, message: str, *, problems: tuple[str, ...] = (), hint: str | None = None, **facts: Any
    ) -> None:
        super().__init__(message, hint=hint, **facts)
        self.problems = problems or (message,)


class ArchiveMissing(SpecError):
    """The project has no archive of this digest yet: upload it, then send the same request again."""

    code = "archive.missing"


class StateError(ShoalError):
    """The request is well formed but the thing it names is not in a state that allows it."""

    code = "state.conflict"
    status = 409
    exit_code = 3


class AlreadyLed(StateError):
    """Another control plane has the database: wait for it, or leave it."""

    code = "control.already_led"


class HomeMissing(StateError):
    """Where the database's home should be there is none: never was, or what they share is not mounted now."""

    code = "control.home_missing"


class LimitReached(ShoalError):
    """A quota, a rate or a size limit says no. The same request may work later."""

    code = "limit.reached"
    status = 429
    exit_code = 3


class TooLarge(LimitReached):
    """The body or archive is larger than this server takes; sending it again is useless."""

    code = "limit.too_large"
    status = 413
    exit_code = 2


class Denied(ShoalError):
    """Known, but not allowed."""

    code = "denied"
    status = 403
    exit_code = 4


class Unauthenticated(Denied):
    """Not known: no credential, or one that is wrong, expired or revoked."""

    code = "unauthenticated"
    status = 401


class NotFound(ShoalError):
    """No such thing, or one in a project the caller may not see: deliberately the same answer."""

    code = "not_found"
    status = 404
    exit_code = 4


class NotVisible(NotFound):
    """It may be there, in a project that the caller may not see. Answered like `NotFound`, to the letter."""


class EngineRefused(ShoalError):
    """The engine will not run this. Nothing was started, and trying again is useless."""

    code = "engine.refused"
    status = 502
    exit_code = 5


class NodeGone(EngineRefused):
    """The node, or a device of it, is not there any more: the fact `node` says which. Nothing was started."""

    code = "engine.node_gone"


class EngineUnreachable(ShoalError):
    """We do not know whether the engine acted: ask `list_owned` before anything else."""

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
    """Another control plane leads since: this one changes nothing any more, and answers for nothing."""

    code = "control.deposed"


class StandingBy(ShoalError):
    """This control plane waits for the lead, which another one has: nothing was done. Ask that one."""

    code = "control.standing_by"
    status = 503
    exit_code = 6


class Bug(ShoalError):
    """An invariant of ours does not hold. Carries the history that led here."""

    code = "bug"
    status = 500
    exit_code = 70
