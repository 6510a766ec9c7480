"""The planted bugs, room by room. `old` occurs exactly once in its file; a unit test holds that."""

from __future__ import annotations

from tests.mutants.planted import (
    api,
    cluster,
    control,
    engines,
    identity,
    model,
    runtime,
    scheduler,
    serving,
    store,
)

MUTANTS = (
    *control.MUTANTS,
    *model.MUTANTS,
    *scheduler.MUTANTS,
    *runtime.MUTANTS,
    *engines.MUTANTS,
    *cluster.MUTANTS,
    *store.MUTANTS,
    *identity.MUTANTS,
    *api.MUTANTS,
    *serving.MUTANTS,
)
