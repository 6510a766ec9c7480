"""The very first start: one admin, one project, one token that is shown once; a database's one home."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from shoal import site
from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.record import note
from shoal.control.uids import claim_block, keep_blocks
from shoal.errors import HomeMissing, StateError
from shoal.identity import mint_token
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.site import RestoreRequest, Site
from shoal.store import Store, Tx

log = structlog.get_logger()
DEFAULT_PROJECT = "default"
HOME_ID = "home_id"
SITE_ID = "site_id"
"""In the database: which copy of the home it is tied to."""


def first_token_path(home: Path) -> Path:
    """Where the first admin token waits, readable by its owner alone, until somebody was shown it."""
    return home / "keys" / "first-token"


def asked_token_path(home: Path) -> Path:
    """Left by whoever owns the home and has no token any more: the next start makes another one."""
    return home / "keys" / "asked-token"


def load_key(home: Path) -> bytes:
    """The key that signs and seals; made on first use. 256 random bits, readable by its owner alone."""
    path = home / "keys" / "signing.key"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        write_private(path, os.urandom(32))
    return path.read_bytes()


def chain_key(tx: Tx, home: Path) -> bytes:
    """What the log of this home's database is chained with. `StateError`: it is another home's, and nothing
    was written in it, nor a key made in a directory that is only not mounted.
    """
    if site.read_request(home) is None:  # else `claim` gives the home its id back
        refuse_strange_home(tx.meta.get(HOME_ID), home)
    return load_key(home)


async def claim(store: Store, home: Path, *, is_bound_to_machine: bool = True) -> RestoreRequest | None:
    """Tie the database to this home, for good. Returns the operator's word where the home is a copy.

    What runs is known by the spool under its home: seen from anywhere else it would look lost. A home gets an
    id where the database has none yet, and never else: a directory that is not mounted looks like a new one.
    `StateError`: the database belongs to another home. `CopiedHome`: to the one that this was copied from.
    """
    owner, site_id = await store.read(lambda tx: (tx.meta.get(HOME_ID), tx.meta.get(SITE_ID)))
    request = site.read_request(home)
    if request is not None and owner is not None and home_id(home) is None:
        write_private(home_id_path(home), f"{owner}\n".encode())
    refuse_strange_home(owner, home)
    site.refuse_copy(home, is_bound_to_machine=is_bound_to_machine)
    known = site.read_site(home)
    is_elsewhere = known is not None and site_id is not None and known.site_id != site_id
    if request is None and is_elsewhere:
        raise site.CopiedHome(
            f"the database went on with another copy of {home} since this one was used",
            hint="use that copy; if it is gone for good, `shoal up --restored`",
        )
    is_copy = is_elsewhere or site.is_copy(home, is_bound_to_machine=is_bound_to_machine)
    if request is not None and not is_copy:
        (home / site.REQUEST).unlink()
        if known is not None and known.site_id == request.site_id:
            return None  # it was carried out, and the start that did so was killed before it removed the word
        raise StateError(f"{home} is no copy, so there is nothing to restore", hint="shoal up")
    if owner is None:
        await _begin(store, home, is_copy=is_copy)
    return request


def _mark(home: Path) -> Site:
    """Record which directory the home is."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Site(site_id=os.urandom(16).hex(), directory=site.identify(home))
    write_private(home / site.FILE, site.encoded(made))
    return made


async def _begin(store: Store, home: Path, *, is_copy: bool) -> None:
    """The id is written last: a home that has one has a past. A copy is marked when it is settled."""
    own, known = home_id(home), site.read_site(home)
    if not is_copy and (known is None or own is None):
        known = _mark(home)
    if own is None:
        own = os.urandom(16).hex()
        write_private(home_id_path(home), f"{own}\n".encode())

    def change(tx: Tx) -> None:
        tx.meta.set(HOME_ID, own)
        if known is not None and not is_copy:
            tx.meta.set(SITE_ID, known.site_id)

    await store.write(change)


def refuse_strange_home(owner: str | None, home: Path) -> None:
    """`StateError` unless the database whose home has the id `owner` is this home's, or nobody's yet;
    `HomeMissing` where this home has no id, as one whose file system is not mounted.
    """
    own, path = home_id(home), home_id_path(home)
    if owner not in (None, own):
        kind = HomeMissing if own is None else StateError
        raise kind(
            f"this database belongs to another SHOAL_HOME (id {owner}), not to {home} (id {own or 'none'})",
            hint=f"use the home it was made with; if that is gone for good, `echo {owner} > {path}` and then "
            "`shoal up --restored`; to stand by for another control plane, share its directory: "
            "`--shared DIR`",
        )


def home_id_path(home: Path) -> Path:
    return home / "home-id"


def home_id(home: Path) -> str | None:
    """None: it has none. `OSError`: that cannot be said now."""
    try:
        return home_id_path(home).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None


def register_name(home: Path) -> str:
    """Return the home's name in this machine's register of uids.

    A restored copy has the `home-id` of its original and a `site_id` of its own, which its restore request
    names until it is settled. So the note of a copy never takes the place of its original's.
    """
    known = site.read_request(home) or site.read_site(home)
    return f"{home_id(home)}:{known.site_id if known is not None else ''}"


async def prepare(core: Core, admin_name: str) -> None:
    """Make the first admin if there is nobody yet; else another token, where the home's owner asked for it.

    The token is on disk before the user is: killed in between, the next start makes another.
    """
    users = await core.store.read(lambda tx: tx.people.users())
    if users:
        if site.read_request(core.settings.state_dir) is None:  # else `restored.finish` does
            await _keep_uids(core)
        await _replace_lost(core, admin_name, users)
        return
    token = _laid_down(core, core.new_id("usr"), "first admin token")
    first_uid = claim_block(core.settings.state_dir, register_name(core.settings.state_dir))

    def change(tx: Tx) -> None:
        now = core.clock.now()
        user = User(user_id=token.user_id, name=admin_name, cluster_role=Role.ADMIN, created_at=now)
        tx.people.add_user(user)
        tx.people.begin_uids(first_uid)
        tx.people.add_project(Project(name=DEFAULT_PROJECT, uid=tx.people.next_uid(), created_at=now))
        tx.people.set_membership(
            Membership(user_id=user.user_id, user_name=user.name, project=DEFAULT_PROJECT, role=Role.LEAD)
        )
        tx.tokens.add(token)
        note(tx, "cluster.created", now, SHOAL, data={"admin": admin_name})

    await core.store.write(change)
    _forget_asked(core.settings.home)


async def _keep_uids(core: Core) -> None:
    """Note on this machine that the uids of the projects are taken, and by the home at this path."""
    home = core.settings.state_dir
    projects = await core.store.read(lambda tx: tx.people.projects())
    if uids := keep_blocks([project.uid for project in projects], home, register_name(home)):
        log.warning("another home on this machine has the users of these projects", uids=uids)


async def _replace_lost(core: Core, admin_name: str, users: list[User]) -> None:
    """Another token of an admin's, the one of this name first. Those before stay valid: who copied one is not
    locked out by somebody's lost file. Nobody gains by it: who may write here can read the signing key.
    """
    admins = [user for user in users if user.is_active and user.cluster_role is Role.ADMIN]
    if not admins or not _is_asked_for_token(core.settings.home):
        return
    admin = min(admins, key=lambda user: (user.name != admin_name, user.created_at))
    token = _laid_down(core, admin.user_id, "in place of a lost one")
    data = {"user": admin.name, "token": token.token_id, "label": token.label}

    def change(tx: Tx) -> None:
        tx.tokens.add(token)
        note(tx, "token.created", core.clock.now(), SHOAL, data=data)

    await core.store.write(change)
    _forget_asked(core.settings.home)


def _laid_down(core: Core, user_id: str, label: str) -> Token:
    """A new token, whose text is on disk for the home's owner."""
    minted = mint_token(token_id := core.new_id("tok"), core.random)
    write_private(first_token_path(core.settings.state_dir), minted.text.encode())
    now = core.clock.now()
    return Token(
        token_id=token_id, user_id=user_id, secret_hash=minted.secret_hash, label=label, created_at=now
    )


def _is_asked_for_token(home: Path) -> bool:
    """By whoever runs this very process, and nobody else."""
    path = asked_token_path(home)
    return path.is_file() and path.lstat().st_uid == os.geteuid()


def _forget_asked(home: Path) -> None:
    asked_token_path(home).unlink(missing_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, on disk when this returns, mode 0600 from the first instant."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
