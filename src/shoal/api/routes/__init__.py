"""The routes, one file for each noun. Each file declares its routes with their permissions.

A handler reads its body or query (`requests`, `queries`), asks `Call.allow` for the route's permission, calls
the control plane or reads the store, and returns a view (`views/`). No route decides what a role may do.

jobs, job_output, archives   submit and follow jobs, their logs, metrics and checkpoints
services, nodes, drills      services; nodes and windows; injected faults
me, users, projects          the caller, people and their tokens, projects and members
events                       the event log and the audit
internal                     supervisors, node agents and data planes
"""

from shoal.api.routes import (
    archives,
    drills,
    events,
    internal,
    job_output,
    jobs,
    me,
    nodes,
    projects,
    services,
    users,
)

ALL = (
    me.routes,
    jobs.routes,
    job_output.log_routes,
    job_output.metric_routes,
    job_output.checkpoint_routes,
    archives.routes,
    nodes.node_routes,
    nodes.window_routes,
    services.routes,
    internal.serving_routes,
    drills.routes,
    events.routes,
    users.user_routes,
    projects.routes,
    users.token_routes,
    internal.supervisor_routes,
    internal.mailbox_routes,
)
