"""How much of what a forward saves is off the device when it ends, as far as a step tells."""

from __future__ import annotations

from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.core.step import Step
from zerograph.planner.profile.liveness import Graph, saved


def offloaded(step: Step, plan: Plan) -> dict[Tier, int]:
    """Bytes of saved activations by the tier that ``plan`` has them wait on."""
    found: dict[Tier, int] = {}
    tier_of = dict(plan.offload)
    if not tier_of or not step.training:
        return found
    graph, again = Graph.of(step), frozenset(plan.recompute)
    saved_until = saved(graph, "none" if plan.save_others else "auto").until
    saved_set = saved(graph, "full", frozenset(plan.save)).until if again else saved_until
    for i in range(graph.backward):
        value, layer = graph.writes[i], graph.layer[i]
        tier = tier_of.get(graph.activation[i], tier_of.get(layer)) if layer else None
        # What the model returns, the user gets on the device.
        if tier is not None and value in (saved_set if layer in again else saved_until) and value not in graph.outputs:
            found[tier] = found.get(tier, 0) + graph.size[value]
    return found
