"""From a bearer token to a caller: one read of the store, then remembered for about a second.

A change of people or tokens made through the API takes effect at once (`forget`). A change made in the store
by another process takes effect within `KEPT_S`. A token's expiry is checked every time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NoReturn

import msgspec

from shoal.control.actor import load_caller
from shoal.control.capabilities import Records, Sealing
from shoal.errors import Unauthenticated
from shoal.identity import Caller, CallerKind, UserTokenText, parse_signed, parse_user_token
from shoal.identity.credentials import SignedKind, SignedToken
from shoal.model.attempt import AttemptState
from shoal.model.people import Project, User
from shoal.settings import Settings
from shoal.store import Tx

KEPT_S = 1.0
MAX_KEPT = 1024
MAX_TOKEN_LENGTH = 512
LOST = (
    "if you own the control plane and have lost your token, make another on its machine"
    " with `shoal login local --forget`, `shoal down`, `shoal up`"
)
LOST_OF_SEVERAL = (
    "if you have lost your token, ask an admin for `shoal token create`, or make one on"
    " another machine that has a control plane of this cluster; if you own the cluster "
    "and have no admin token left, type `shoal down` and `shoal up --admin-token`"
)
"""If several control planes share a directory, a start makes no token unless asked: the others
have theirs.
"""


class AuthenticatedCaller(msgspec.Struct, frozen=True):
    """A caller as of `at` on the monotonic clock. `user` is set for people."""

    caller: Caller
    user: User | None
    at: float
    generation: int = 0
    """The generation of rights in the store, from the transaction that read them."""


class Authenticator:
    """Resolves callers by their token, and projects by name, with a cache."""

    def __init__(self, records: Records, sealing: Sealing, settings: Settings) -> None:
        self._records = records
        self._sealing = sealing
        self._settings = settings
        self._remembered: OrderedDict[bytes, AuthenticatedCaller] = OrderedDict()
        self._projects: dict[str, tuple[Project, float]] = {}
        self._generation = 0

    def forget(self) -> None:
        """Drop everything remembered, because people, projects or tokens changed."""
        self._generation += 1
        self._remembered.clear()
        self._projects.clear()

    async def identify(self, text: str) -> AuthenticatedCaller:
        """The caller that presents this token. Raises `Unauthenticated`, the same for every reason."""
        if len(text) > MAX_TOKEN_LENGTH:
            self._refuse()
        signed = parse_signed(self._sealing.key, text)
        if signed is not None:
            return await self._signed(signed)
        presented = parse_user_token(text)
        if presented is None:
            self._refuse()
        # Remembered by digest, so a dump of this process holds no more tokens than it must.
        digest = hashlib.sha256(text.encode()).digest()
        remembered = self._remembered.get(digest)
        if remembered is None or self._records.clock.monotonic() - remembered.at > KEPT_S:
            remembered = await self._load(presented, digest)
        if (
            remembered.caller.expires_at is not None
            and remembered.caller.expires_at <= self._records.clock.now()
        ):
            self._refuse()
        return remembered

    async def project(self, name: str) -> Project | None:
        """The project, as it was at most `KEPT_S` ago."""
        kept = self._projects.get(name)
        now = self._records.clock.monotonic()
        if kept is not None and now - kept[1] <= KEPT_S:
            return kept[0]
        generation = self._generation
        project = await self._records.store.read(lambda tx: tx.people.get_project(name))
        if project is not None and generation == self._generation and len(self._projects) < MAX_KEPT:
            self._projects[name] = (project, now)
        return project

    async def _load(self, presented: UserTokenText, digest: bytes) -> AuthenticatedCaller:
        # Before the read: a change that commits during the read bumps the generation, and the result is not
        # kept.
        generation, now = self._generation, self._records.clock.monotonic()

        def load(tx: Tx) -> tuple[User, Caller, int] | None:
            token = tx.tokens.get(presented.token_id)
            caller = load_caller(tx, token) if presented.matches(token) else None
            return (*caller, tx.people.generation()) if caller is not None else None

        loaded = await self._records.store.read(load)
        self._remembered.pop(digest, None)
        if loaded is None:
            self._refuse()
        user, caller, rights_of = loaded
        authenticated = AuthenticatedCaller(caller=caller, user=user, at=now, generation=rights_of)
        if generation == self._generation:
            self._remembered[digest] = authenticated
            if len(self._remembered) > MAX_KEPT:
                self._remembered.popitem(last=False)
        return authenticated

    async def _signed(self, signed: SignedToken) -> AuthenticatedCaller:
        """`renew` judges a supervisor's claim. A job's token dies with its attempt."""
        if signed.kind is SignedKind.SUPERVISOR:
            caller = Caller(
                kind=CallerKind.SUPERVISOR,
                id=signed.attempt_id,
                name=f"{signed.attempt_id}@{signed.node}",
                attempt_id=signed.attempt_id,
                node=signed.node,
                body_digest=signed.digest,
            )
            return AuthenticatedCaller(caller=caller, user=None, at=0.0)

        if signed.kind is SignedKind.BOOTSTRAP:
            caller = Caller(
                kind=CallerKind.BOOTSTRAP,
                id=signed.attempt_id,
                name=f"bootstrap token of {signed.attempt_id}",
                attempt_id=signed.attempt_id,
            )
            return AuthenticatedCaller(caller=caller, user=None, at=0.0)

        if signed.kind is SignedKind.DATA_PLANE:
            caller = Caller(kind=CallerKind.DATA_PLANE, id="data_plane", name="data plane")
            return AuthenticatedCaller(caller=caller, user=None, at=0.0)

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

        task_caller = await self._records.store.read(load)
        if task_caller is None:
            self._refuse()
        return AuthenticatedCaller(caller=task_caller, user=None, at=0.0)

    def _refuse(self) -> NoReturn:
        """Refuse with the same words for every reason."""
        raise Unauthenticated(
            "this request has no valid token",
            hint="`shoal login URL` takes a token that `shoal token create` made (header "
            "`Authorization: Bearer TOKEN`); "
            f"{LOST_OF_SEVERAL if self._settings.shared is not None else LOST}",
        )


def bearer(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The token of a request that carries exactly one."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, text = values[0].partition(b" ")
    token = text.strip()
    if scheme.lower() != b"bearer" or not token.isascii():
        return None
    return token.decode("ascii") or None
