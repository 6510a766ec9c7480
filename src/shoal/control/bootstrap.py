"""The first start of a home: one admin, one project, one token that is shown once, and a database with one
home.

Also the files of the cluster's certificate authority. They are made on first use and readable by their owner
alone.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from shoal import home_identity
from shoal.clock import Clock
from shoal.control.actor import SHOAL
from shoal.control.capabilities import Records, Sealing
from shoal.control.project_uids import claim_block, keep_blocks
from shoal.control.record import record_event
from shoal.errors import HomeMissing, StateError
from shoal.home_identity import HomeIdentity, RestoreRequest
from shoal.identity import mint_token
from shoal.identity.authority import CertifiedKey, is_valid_server, make_authority, make_server
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.settings import Settings
from shoal.store import Store, Tx

log = structlog.get_logger()
DEFAULT_PROJECT = "default"
HOME_ID = "home_id"
SITE_ID = "site_id"
"""Key in the database. Its value names the copy of the home that the database is tied to."""


def first_token_path(home: Path) -> Path:
    """Path of the first admin token, readable by its owner alone. The file stays until somebody has seen the
    token.
    """
    return home / "keys" / "first-token"


def token_request_path(home: Path) -> Path:
    """Path of a file that the owner of the home leaves after losing the token. The next start makes another
    token.
    """
    return home / "keys" / "asked-token"


def load_signing_key(home: Path) -> bytes:
    """Return the key that signs and seals: 256 random bits, made on first use and readable by the owner
    alone.
    """
    path = home / "keys" / "signing.key"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        write_private(path, os.urandom(32))
    return path.read_bytes()


def chain_key(tx: Tx, home: Path) -> bytes:
    """Return the key that chains the log of this home's database. Raise `StateError` if the database belongs
    to another home. In that case nothing was written into the database, and no key was made in a directory
    that is only not mounted.
    """
    if home_identity.read_request(home) is None:  # else `claim_database` gives the home its id back
        refuse_other_home(tx.meta.get(HOME_ID), home)
    return load_signing_key(home)


async def claim_database(
    store: Store, home: Path, *, is_bound_to_machine: bool = True
) -> RestoreRequest | None:
    """Tie the database to this home, for good. Return the operator's restore request if the home is a copy.

    The spool under the home is the record of what runs. From anywhere else running jobs would look lost. A
    home gets an id only if the database has none, because a directory that is not mounted looks like a new
    one. `StateError`: the database belongs to another home. `CopiedHome`: it belongs to the home that this
    one was copied from.
    """
    owner, site_id = await store.read(lambda tx: (tx.meta.get(HOME_ID), tx.meta.get(SITE_ID)))
    request = home_identity.read_request(home)
    if request is not None and owner is not None and home_id(home) is None:
        write_private(home_id_path(home), f"{owner}\n".encode())
    refuse_other_home(owner, home)
    home_identity.refuse_copy(home, is_bound_to_machine=is_bound_to_machine)
    identity = home_identity.read_identity(home)
    is_elsewhere = identity is not None and site_id is not None and identity.site_id != site_id
    if request is None and is_elsewhere:
        raise home_identity.CopiedHome(
            f"the database went on with another copy of {home} since this one was used",
            hint="use that copy; if it is gone for good, `shoal up --restored`",
        )
    is_copy = is_elsewhere or home_identity.is_copy(home, is_bound_to_machine=is_bound_to_machine)
    if request is not None and not is_copy:
        (home / home_identity.REQUEST).unlink()
        if identity is not None and identity.site_id == request.site_id:
            return None  # A start carried the request out and was killed before it removed the file.
        raise StateError(f"{home} is no copy, so there is nothing to restore", hint="shoal up")
    if owner is None:
        await _tie_database(store, home, is_copy=is_copy)
    return request


def _write_site(home: Path) -> HomeIdentity:
    """Record which directory the home is."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = HomeIdentity(site_id=os.urandom(16).hex(), directory=home_identity.identify(home))
    write_private(home / home_identity.FILE, home_identity.encode_record(identity))
    return identity


async def _tie_database(store: Store, home: Path, *, is_copy: bool) -> None:
    """Write the id last: a home that has an id has a past. `restored.py` marks a copy once it is settled."""
    this_id, identity = home_id(home), home_identity.read_identity(home)
    if not is_copy and (identity is None or this_id is None):
        identity = _write_site(home)
    if this_id is None:
        this_id = os.urandom(16).hex()
        write_private(home_id_path(home), f"{this_id}\n".encode())

    def change(tx: Tx) -> None:
        tx.meta.set(HOME_ID, this_id)
        if identity is not None and not is_copy:
            tx.meta.set(SITE_ID, identity.site_id)

    await store.write(change)


def refuse_other_home(owner: str | None, home: Path) -> None:
    """Raise `StateError` unless the database is tied to this home or to none. `owner` is the id of the home
    it is tied to. `HomeMissing`: this home has no id, as when its file system is not mounted.
    """
    this_id, path = home_id(home), home_id_path(home)
    if owner not in (None, this_id):
        kind = HomeMissing if this_id is None else StateError
        raise kind(
            f"this database belongs to another SHOAL_HOME (id {owner}), not to {home} "
            f"(id {this_id or 'none'})",
            hint=f"use the home it was made with; if that is gone for good, `echo {owner} > {path}` and then "
            "`shoal up --restored`; to stand by for another control plane, share its directory: "
            "`--shared DIR`",
        )


def home_id_path(home: Path) -> Path:
    return home / "home-id"


def home_id(home: Path) -> str | None:
    """Return the id of the home, or None if it has none. `OSError`: the file cannot be read now."""
    try:
        return home_id_path(home).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None


def register_name(home: Path) -> str:
    """Return the home's name in this machine's register of uids.

    A restored copy has the `home-id` of its original and a `site_id` of its own. Until the copy is settled,
    its restore request names the `site_id`. So the note of a copy never replaces the note of its original.
    """
    identity = home_identity.read_request(home) or home_identity.read_identity(home)
    return f"{home_id(home)}:{identity.site_id if identity is not None else ''}"


async def ensure_admin(records: Records, sealing: Sealing, settings: Settings, admin_name: str) -> None:
    """Make the first admin if there is no user. Otherwise make another token if the home's owner asked for
    one.

    The token is on disk before the user exists. If a kill comes in between, the next start makes another
    token.
    """
    users = await records.store.read(lambda tx: tx.people.users())
    if users:
        if home_identity.read_request(settings.state_dir) is None:  # else `finish_restore` does
            await _note_uids(records.store, settings)
        await _replace_lost_token(records, sealing, settings, admin_name, users)
        return
    token = _write_token(records, sealing, settings, records.new_id("usr"), "first admin token")
    first_uid = claim_block(settings.state_dir, register_name(settings.state_dir))

    def change(tx: Tx) -> None:
        now = records.clock.now()
        user = User(user_id=token.user_id, name=admin_name, cluster_role=Role.ADMIN, created_at=now)
        tx.people.add_user(user)
        tx.people.begin_uids(first_uid)
        tx.people.add_project(Project(name=DEFAULT_PROJECT, uid=tx.people.next_uid(), created_at=now))
        tx.people.set_membership(
            Membership(user_id=user.user_id, user_name=user.name, project=DEFAULT_PROJECT, role=Role.LEAD)
        )
        tx.tokens.add(token)
        record_event(tx, "cluster.created", now, SHOAL, data={"admin": admin_name})

    await records.store.write(change)
    _drop_token_request(settings.home)


async def _note_uids(store: Store, settings: Settings) -> None:
    """Note on this machine that the home at this path uses the uids of its projects."""
    home = settings.state_dir
    projects = await store.read(lambda tx: tx.people.projects())
    if uids := keep_blocks([project.uid for project in projects], home, register_name(home)):
        log.warning("another home on this machine has the users of these projects", uids=uids)


async def _replace_lost_token(
    records: Records, sealing: Sealing, settings: Settings, admin_name: str, users: list[User]
) -> None:
    """Make another token for an admin, preferably the one with this name. The tokens before it stay valid, so
    that a lost file of one person locks out no admin that holds a copy. This gives no new power: a process
    that may write here can also read the signing key.
    """
    admins = [user for user in users if user.is_active and user.cluster_role is Role.ADMIN]
    if not admins or not _is_token_requested(settings.home):
        return
    admin = min(admins, key=lambda user: (user.name != admin_name, user.created_at))
    token = _write_token(records, sealing, settings, admin.user_id, "in place of a lost one")
    data = {"user": admin.name, "token": token.token_id, "label": token.label}

    def change(tx: Tx) -> None:
        tx.tokens.add(token)
        record_event(tx, "token.created", records.clock.now(), SHOAL, data=data)

    await records.store.write(change)
    _drop_token_request(settings.home)


def _write_token(records: Records, sealing: Sealing, settings: Settings, user_id: str, label: str) -> Token:
    """Return a new token. Its text is on disk for the home's owner."""
    minted = mint_token(token_id := records.new_id("tok"), sealing.random)
    write_private(first_token_path(settings.state_dir), minted.text.encode())
    now = records.clock.now()
    return Token(
        token_id=token_id, user_id=user_id, secret_hash=minted.secret_hash, label=label, created_at=now
    )


def _is_token_requested(home: Path) -> bool:
    """Whether the user that runs this very process asked for a token."""
    path = token_request_path(home)
    return path.is_file() and path.lstat().st_uid == os.geteuid()


def _drop_token_request(home: Path) -> None:
    token_request_path(home).unlink(missing_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Write the file whole or not at all. It is on disk when this returns, with mode 0600 from the first
    instant.
    """
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


LOCAL_NAMES = ("localhost", "127.0.0.1")


def load_authority(home: Path, clock: Clock) -> CertifiedKey:
    """Return the home's authority. The control planes of one cluster share it in their shared directory."""
    certificate, key = _files_of(home)
    if not certificate.exists():
        authority = make_authority("shoal cluster", clock.now())
        write_private(key, authority.key)
        write_private(certificate, authority.certificate)
    return CertifiedKey(certificate.read_bytes(), key.read_bytes())


def load_certificate(settings: Settings, clock: Clock) -> tuple[Path, Path]:
    """Return the files of the certificate by which supervisors know this control plane. Make a new
    certificate if it is old or the addresses changed. Blocks, and may be repeated. `OSError`: the authority
    is missing, or the disk takes no writes. This never makes another authority, because no running supervisor
    would know it.
    """
    authority = CertifiedKey(*(path.read_bytes() for path in _files_of(settings.state_dir)))
    keys = settings.home / "keys"  # its own: another control plane has other addresses
    certificate, key = keys / "nodes.pem", keys / "nodes.key"
    names = {
        *LOCAL_NAMES,
        socket.gethostname(),
        settings.nodes_host,
        *hosts_of(settings.urls_for_supervisors),
    }
    if certificate.exists() and key.exists():
        current = CertifiedKey(certificate.read_bytes(), key.read_bytes())
        if is_valid_server(current, authority, names, clock.now()):
            return certificate, key
    pair = make_server(authority, names, clock.now())
    write_private(key, pair.key)
    write_private(certificate, pair.certificate)
    return certificate, key


def _files_of(home: Path) -> tuple[Path, Path]:
    return home / "keys" / "ca.pem", home / "keys" / "ca.key"


def hosts_of(urls: tuple[str, ...]) -> set[str]:
    return {host for url in urls if (host := urlsplit(url).hostname)}
