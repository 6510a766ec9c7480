"""What every caller gets from every route. Literal, so that a change of rights is a change of this page.

`y` allowed · `401` unknown caller · `403` known, not allowed · `404` may not even know that it exists.
Requests with a bootstrap token, and the status reports of node agents, find no mailbox here: the engine's
nodes are this machine. The last four columns are further tokens of ada's (see `world`): of less scope, or of
one project. The aim is always a thing of project `vision`; ben (`member`) owns it, bea (`other`) is a member
too.
"""

from __future__ import annotations

CALLERS = (
    *("nobody", "viewer", "member", "other", "lead", "stranger", "operator", "admin"),
    *("job", "supervisor", "data_plane", "bootstrap"),
    *("reader", "submitter", "bound", "bound_elsewhere"),
)
LIKE_NOBODY = ("service", "expired", "orphan", "ended_job")
"""Tokens that are not valid here: one of one service, and one that has expired."""

_TABLE = """
GET    /healthz                           y   y   y   y   y   y   y   y   y   y   y   y   y   y   y   y
GET    /openapi.json                      401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
GET    /v1/me                             401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
GET    /v1/status                         401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
GET    /v1/self                           401 403 403 403 403 403 403 403 y   403 403 403 403 403 403 403
POST   /v1/supervisor/renew               401 403 403 403 403 403 403 403 403 y   403 403 403 403 403 403
POST   /v1/mailbox/fetch                  401 403 403 403 403 403 403 403 403 403 403 404 403 403 403 403
POST   /v1/mailbox/archive                401 403 403 403 403 403 403 403 403 403 403 404 403 403 403 403
POST   /v1/mailbox/dispatch               401 403 403 403 403 403 403 403 403 404 403 403 403 403 403 403
GET    /v1/jobs                           401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
POST   /v1/jobs                           401 403 y   y   y   404 y   y   403 403 403 403 403 y   y   404
GET    /v1/jobs/{job_id}                  401 y   y   y   y   404 y   y   y   403 403 403 y   y   y   404
GET    /v1/jobs/{job_id}/why              401 y   y   y   y   404 y   y   y   403 403 403 y   y   y   404
GET    /v1/jobs/{job_id}/logs             401 y   y   y   y   404 y   y   y   403 403 403 y   y   y   404
GET    /v1/jobs/{job_id}/logs/stream      401 y   y   y   y   404 y   y   y   403 403 403 y   y   y   404
GET    /v1/jobs/{job_id}/metrics          401 y   y   y   y   404 y   y   y   403 403 403 y   y   y   404
GET    /v1/jobs/{job_id}/checkpoints      401 y   y   y   y   404 y   y   y   403 403 403 y   y   y   404
POST   /v1/jobs/{job_id}/stop             401 403 y   403 y   404 y   y   403 403 403 403 403 403 y   404
POST   /v1/jobs/{job_id}/retry            401 403 y   403 y   404 y   y   403 403 403 403 403 403 y   404
POST   /v1/arrays/{array_id}/stop         401 403 y   403 y   404 y   y   403 403 403 403 403 403 y   404
GET    /v1/archives/{digest}              401 y   y   y   y   404 y   y   403 403 403 403 y   y   y   404
PUT    /v1/archives/{digest}              401 403 y   y   y   404 y   y   403 403 403 403 403 y   y   404
GET    /v1/nodes                          401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
GET    /v1/nodes/{name}                   401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
DELETE /v1/nodes/{name}                   401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
POST   /v1/nodes/{name}/cordon            401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
POST   /v1/nodes/{name}/drain             401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
POST   /v1/nodes/{name}/resume            401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
POST   /v1/nodes/{name}/declare-dead      401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
GET    /v1/windows                        401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
POST   /v1/windows                        401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
DELETE /v1/windows/{window_id}            401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
GET    /v1/services                       401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
POST   /v1/services                       401 403 y   y   y   404 y   y   403 403 403 403 403 y   y   404
GET    /v1/services/{service_id}          401 y   y   y   y   404 y   y   403 403 403 403 y   y   y   404
POST   /v1/services/{service_id}/scale    401 403 y   403 y   404 y   y   403 403 403 403 403 403 y   404
POST   /v1/services/{service_id}/rollout  401 403 y   403 y   404 y   y   403 403 403 403 403 403 y   404
POST   /v1/services/{service_id}/stop     401 403 y   403 y   404 y   y   403 403 403 403 403 403 y   404
GET    /v1/serving/table                  401 403 403 403 403 403 403 403 403 403 y   403 403 403 403 403
POST   /v1/serving/reports                401 403 403 403 403 403 403 403 403 403 y   403 403 403 403 403
GET    /v1/drills                         401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
POST   /v1/drills                         401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
POST   /v1/jobs/{job_id}/drills           401 403 y   403 y   404 y   y   403 403 403 403 403 403 y   404
GET    /v1/events                         401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
GET    /v1/events/stream                  401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
GET    /v1/audit                          401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
GET    /v1/audit/verify                   401 403 403 403 403 403 y   y   403 403 403 403 403 403 403 403
GET    /v1/users                          401 403 403 403 403 403 403 y   403 403 403 403 403 403 403 403
POST   /v1/users                          401 403 403 403 403 403 403 y   403 403 403 403 403 403 403 403
PATCH  /v1/users/{name}                   401 403 403 403 403 403 403 y   403 403 403 403 403 403 403 403
GET    /v1/projects                       401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
POST   /v1/projects                       401 403 403 403 403 403 403 y   403 403 403 403 403 403 403 403
PATCH  /v1/projects/{name}                401 403 403 403 403 403 403 y   403 403 403 403 403 403 403 403
GET    /v1/projects/{name}/members        401 y   y   y   y   404 y   y   403 403 403 403 y   y   y   404
PUT    /v1/projects/{name}/members/{user} 401 403 403 403 y   404 y   y   403 403 403 403 403 403 y   404
DELETE /v1/projects/{name}/members/{user} 401 403 403 403 y   404 y   y   403 403 403 403 403 403 y   404
GET    /v1/tokens                         401 y   y   y   y   y   y   y   403 403 403 403 y   y   y   y
POST   /v1/tokens                         401 y   y   y   y   y   y   y   403 403 403 403 403 y   y   y
DELETE /v1/tokens/{token_id}              401 404 y   404 404 404 404 y   403 403 403 403 404 404 404 404
"""


def expected() -> dict[str, dict[str, str]]:
    """By `METHOD path`, then by caller."""
    rows = [line.split() for line in _TABLE.strip().splitlines()]
    callers = (*CALLERS, *LIKE_NOBODY)
    return {
        f"{method} {path}": dict(zip(callers, [*cells, *[cells[0]] * len(LIKE_NOBODY)], strict=True))
        for method, path, *cells in rows
    }
