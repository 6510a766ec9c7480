"""One file per noun. Each declares its routes with their permissions; none decides what a role may do."""

from shoal.api.routes import (
    archives,
    checkpoints,
    drills,
    events,
    jobs,
    logs,
    me,
    metrics,
    nodes,
    projects,
    services,
    serving,
    supervisor,
    tokens,
    users,
    windows,
)

ALL = (
    me.routes,
    jobs.routes,
    logs.routes,
    metrics.routes,
    checkpoints.routes,
    archives.routes,
    nodes.routes,
    windows.routes,
    services.routes,
    serving.routes,
    drills.routes,
    events.routes,
    users.routes,
    projects.routes,
    tokens.routes,
    supervisor.routes,
)
