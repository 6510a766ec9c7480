"""Who may do what: tokens, callers, permissions, and the sealing of secrets.

Pure: keys, time and randomness are arguments. Nothing here reads the store or knows HTTP.
"""

from shoal.identity.authorize import authorize, visible_projects
from shoal.identity.caller import Caller, CallerKind, user_caller
from shoal.identity.grants import check_makes_tokens, check_member_grant, check_token_grant, reaches
from shoal.identity.permissions import LEAST_ROLE, Permission, is_at_least, lesser
from shoal.identity.seal import SecretsUnreadable, open_secrets, seal_secrets
from shoal.identity.signed import (
    SignedToken,
    data_plane_token,
    job_token,
    parse_signed,
    proof_key,
    replica_secret,
    ticket,
)
from shoal.identity.tokens import MintedToken, UserTokenText, hash_secret, mint_token, parse_user_token

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
    "check_makes_tokens",
    "check_member_grant",
    "check_token_grant",
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
    "reaches",
    "replica_secret",
    "seal_secrets",
    "ticket",
    "user_caller",
    "visible_projects",
]
