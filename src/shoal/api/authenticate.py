"""From a bearer token to a caller: one read of the store, then remembered for about a second.

A change of people or tokens made through the API takes effect at once (`forget`); one made behind its
back, within `KEPT_S`. A token's expiry is looked at every time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NoReturn

import msgspec

from shoal.control import ControlPlane
from shoal.control.rights import load_caller
from shoal.errors import Unauthenticated
from shoal.identity import Caller, CallerKind, UserTokenText, parse_signed, parse_user_token
from shoal.identity.signed import SignedKind, SignedToken
from shoal.model.attempt import AttemptState
from shoal.model.people import Project, User
from shoal.store import Tx

KEPT_S = 1.0
MAX_KEPT = 1024
MAX_TOKEN_LENGTH = 512
LOST = (
    "who owns the control plane and lost theirs gets another where it runs, with "
    "`shoal login local --forget`, `shoal down`, `shoal up`"
)
LOST_OF_SEVERAL = (
    "who lost theirs gets another by `shoal token create` from an admin, or from another machine that "
    "has a control plane of this cluster; who owns the cluster and has no admin token left, by `shoal down` "
    "and `shoal up --admin-token`"
)
"""Where several share a directory a start makes none unless it is asked for: the others have theirs."""


class Known(msgspec.Struct, frozen=True):
    """A caller as of `at` on the monotonic clock. `user` is set for people."""

    caller: Caller
    user: User | None
    at: float
    generation: int = 0
    """Of the rights in the store, in the transaction that read them."""


class Authenticator:
    """Knows callers by their token, and projects by name."""

    def __init__(self, plane: ControlPlane) -> None:
        self._core = plane.core
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._projects: dict[str, tuple[Project, float]] = {}
        self._generation = 0

    def forget(self) -> None:
        """People, projects or tokens changed: nothing remembered counts any more."""
        self._generation += 1
        self._known.clear()
        self._projects.clear()

    async def identify(self, text: str) -> Known:
        """Who presents this token. Raises `Unauthenticated`, the same for every reason."""
        if len(text) > MAX_TOKEN_LENGTH:
            self._refuse()
        signed = parse_signed(self._core.key, text)
        if signed is not None:
            return await self._signed(signed)
        presented = parse_user_token(text)
        if presented is None:
            self._refuse()
        # Kept by digest: a dump of this process holds no more tokens than it must.
        digest = hashlib.sha256(text.encode()).digest()
        known = self._known.get(digest)
        if known is None or self._core.clock.monotonic() - known.at > KEPT_S:
            known = await self._load(presented, digest)
        if known.caller.expires_at is not None and known.caller.expires_at <= self._core.clock.now():
            self._refuse()
        return known

    async def project(self, name: str) -> Project | None:
        """The project, as it was at most `KEPT_S` ago."""
        kept = self._projects.get(name)
        now = self._core.clock.monotonic()
        if kept is not None and now - kept[1] <= KEPT_S:
            return kept[0]
        generation = self._generation
        project = await self._core.store.read(lambda tx: tx.people.get_project(name))
        if project is not None and generation == self._generation and len(self._projects) < MAX_KEPT:
            self._projects[name] = (project, now)
        return project

    async def _load(self, presented: UserTokenText, digest: bytes) -> Known:
        # Before the read: a change that commits while we read bumps it, and the answer is not kept.
        generation, now = self._generation, self._core.clock.monotonic()

        def load(tx: Tx) -> tuple[User, Caller, int] | None:
            token = tx.tokens.get(presented.token_id)
            found = load_caller(tx, token) if presented.matches(token) else None
            return (*found, tx.people.generation()) if found is not None else None

        loaded = await self._core.store.read(load)
        self._known.pop(digest, None)
        if loaded is None:
            self._refuse()
        user, caller, rights_of = loaded
        known = Known(caller=caller, user=user, at=now, generation=rights_of)
        if generation == self._generation:
            self._known[digest] = known
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        return known

    async def _signed(self, signed: SignedToken) -> Known:
        """A supervisor's claim is judged by `renew`; a job's token dies with its attempt."""
        if signed.kind is SignedKind.SUPERVISOR:
            caller = Caller(
                kind=CallerKind.SUPERVISOR,
                id=signed.attempt_id,
                name=f"{signed.attempt_id}@{signed.node}",
                attempt_id=signed.attempt_id,
                node=signed.node,
                body_digest=signed.digest,
            )
            return Known(caller=caller, user=None, at=0.0)

        if signed.kind is SignedKind.TICKET:
            caller = Caller(
                kind=CallerKind.TICKET,
                id=signed.attempt_id,
                name=f"ticket of {signed.attempt_id}",
                attempt_id=signed.attempt_id,
            )
            return Known(caller=caller, user=None, at=0.0)

        if signed.kind is SignedKind.DATA_PLANE:
            caller = Caller(kind=CallerKind.DATA_PLANE, id="data_plane", name="data plane")
            return Known(caller=caller, user=None, at=0.0)

        def load(tx: Tx) -> Caller | None:
            attempt = tx.attempts.get(signed.attempt_id)
            if attempt is None or attempt.state is AttemptState.ENDED:
                return None
            job = tx.jobs.get(attempt.job_id)
            assert job is not None
            return Caller(
                kind=CallerKind.JOB,
                id=job.job_id,
                name=job.reference,
                job_id=job.job_id,
                attempt_id=attempt.attempt_id,
                project=job.project,
                owner=job.owner,
            )

        found = await self._core.store.read(load)
        if found is None:
            self._refuse()
        return Known(caller=found, user=None, at=0.0)

    def _refuse(self) -> NoReturn:
        """The same words for every reason."""
        raise Unauthenticated(
            "no valid token came with this request",
            hint="`shoal login URL` takes a token that `shoal token create` made (header `Authorization: "
            f"Bearer TOKEN`); {LOST_OF_SEVERAL if self._core.settings.shared is not None else LOST}",
        )


def bearer(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The token of a request that carries exactly one."""
    found = [value for name, value in headers if name == b"authorization"]
    if len(found) != 1:
        return None
    scheme, _, text = found[0].partition(b" ")
    token = text.strip()
    if scheme.lower() != b"bearer" or not token.isascii():
        return None
    return token.decode("ascii") or None
