"""Tokens, callers, permissions, and the sealing of secrets.

A request passes through this folder in this order:

1. `credentials` parses the bearer token. It checks the MAC of a signed token, and the hash of a user's token
that the caller has read from the store. 2. `authorization.user_caller` makes a `Caller` from the user, the
token and the memberships. 3. `authorization.authorize` looks up the permission of the route in
`permissions.LEAST_ROLE`, and raises `Denied` or `NotVisible` unless the caller's role is enough.

`credentials` also seals the secrets of jobs. `authority` makes the certificates of control planes, sidecars
and data planes. `replay` rebuilds the identity tables from the event log to find rows that were tampered
with.

Pure: keys, time and randomness are arguments. No file here reads the store or knows HTTP.
"""

from shoal.identity.authorization import (
    Caller,
    CallerKind,
    authorize,
    check_may_make_tokens,
    check_member_grant,
    check_token_grant,
    covers_token,
    user_caller,
    visible_projects,
)
from shoal.identity.credentials import (
    MintedToken,
    SecretsUnreadable,
    SignedToken,
    UserTokenText,
    bootstrap_token,
    data_plane_token,
    hash_secret,
    job_token,
    mint_token,
    open_secrets,
    parse_signed,
    parse_user_token,
    proof_key,
    replica_secret,
    seal_secrets,
)
from shoal.identity.permissions import LEAST_ROLE, Permission, is_at_least, lesser

__all__ = [
    "LEAST_ROLE",
    "Caller",
    "CallerKind",
    "MintedToken",
    "Permission",
    "SecretsUnreadable",
    "SignedToken",
    "UserTokenText",
    "authorize",
    "bootstrap_token",
    "check_may_make_tokens",
    "check_member_grant",
    "check_token_grant",
    "covers_token",
    "data_plane_token",
    "hash_secret",
    "is_at_least",
    "job_token",
    "lesser",
    "mint_token",
    "open_secrets",
    "parse_signed",
    "parse_user_token",
    "proof_key",
    "replica_secret",
    "seal_secrets",
    "user_caller",
    "visible_projects",
]
