"""Say why no other node can take the place of a lost task."""

from __future__ import annotations

import msgspec

from shoal.model.attempt import NodeTask
from shoal.scheduler.explain.explainer import Explainer
from shoal.scheduler.explain.text import listed, need_text
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import Explanation, WaitReason
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate
from shoal.scheduler.order.queue import shape_key
from shoal.scheduler.placement.reservations import CapacityReservations


def explain_lost_task(
    candidate: Candidate,
    lost: NodeTask,
    state: ClusterState,
    reservations: CapacityReservations,
    policy: Policy,
    now: float,
) -> Explanation:
    """Return the reason in the words that waiting jobs get. There is no hint: the request of a running
    attempt cannot be changed.
    """
    explanation = Explainer(state, reservations, policy, now).explain(candidate)
    if explanation.why is WaitReason.NODES_EXCLUDED:
        explanation = _no_other_node(explanation, candidate, state)
    facts = {**explanation.facts, "lost_node": lost.node}
    return msgspec.structs.replace(explanation, hint=None, facts=facts)


def _no_other_node(explanation: Explanation, candidate: Candidate, state: ClusterState) -> Explanation:
    """Replace words about exclusions, because most excluded nodes are the attempt's own."""
    need = shape_key(candidate).demand.need
    needs = need_text(need, state.feasibility.distinguishing_amounts(need))
    excluded = listed(explanation.facts["excluded"])
    sentence = (
        f"needs another node with {needs}; the only such nodes are {excluded}, which are its own, "
        "excluded by its log rules or `exclude_nodes`, or not where its `topology` requires"
    )
    return msgspec.structs.replace(explanation, sentence=sentence)
