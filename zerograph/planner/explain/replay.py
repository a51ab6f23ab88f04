"""Use the decisions of a plan that the user gave, after comparing it with what was traced."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from zerograph.core.errors import ConfigError
from zerograph.core.plan import Bucket, GivenPlan, Plan
from zerograph.core.step import Step, layer_of, layer_of_activation
from zerograph.core.units import format_ranks
from zerograph.planner.explain.check import CHECKS, differences
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import head_of
from zerograph.planner.profile.token_tiles import regions_of, warn_of_whole_layers

log = logging.getLogger(__name__)

_SHOWN = 6
"""Differences that an error names; more are counted."""


def replay(given: GivenPlan, step: Step) -> Plan:
    """The plan for ``step`` that ``given`` holds.

    A training step must have the very parameters that were planned. Evaluation may use fewer of them and trains none:
    it gets the same buckets, less what it does not read. Where parameters are the user's own, as in one process that
    moves none, and in what a graph break leaves without them, there are no buckets.

    Raises:
        ConfigError: the step is not the one that was planned; says what differs.
    """
    step = step.over(given.plan.world_size)  # which is compared before anything is traced
    if not step.training:
        return _for_evaluation(given, step)
    if not step.params and given.plan.buckets:
        return _of_activations(given.plan, step)
    asked = ["parameters", "layers", "loss", "tokens"]
    if given.plan.by_sample:
        # It is restricted to what the step can have: a batch of another size may have one sample.
        asked = asked[: 2 if step.untiled_logits else 3]
    found = [wrong.message for name in asked for wrong in CHECKS[name][1](step, given.plan)]
    _refuse(given, [*found, *_tiles(given.plan, step)])
    return given.plan


def restricted_to_step(plan: Plan, step: Step) -> Plan:
    """``plan`` without the saved activations that ``step`` does not make, and without the tiles that it cannot have.

    The plan may be that of another program of the frame, or of another rank; in evaluation a dropout makes nothing, for
    one. Which activations of a layer are saved, and where, decides no collective, so ranks may differ in that.
    """
    if not plan.save and not plan.offload and not plan.head and not plan.token_regions:
        return plan
    made = {op.activation for op in step.ops}
    by_token = {region.activation for region in regions_of(step, plan.by_sample)}
    regions = tuple(name for name in plan.token_regions if name in by_token)
    if regions != plan.token_regions:
        if plan.by_sample and step.training:
            warn_of_whole_layers(step, replace(plan, token_regions=regions), plan.token_tiles)
        plan = replace(plan, token_regions=regions) if regions else replace(plan, **_UNTILED)
    if plan.head not in made or step.untiled_logits:
        if plan.head and step.untiled_logits:
            tiles = f"{plan.loss_tiles} tiles of the loss were planned"
            log.warning("%s, and logits exist for all tokens at once, because %s", tiles, step.untiled_logits)
        plan = replace(plan, loss_tiles=1, head="")
    save = tuple(name for name in plan.save if name in made)
    offload = tuple((name, tier) for name, tier in plan.offload if name in made or not layer_of_activation(name))
    offload = offload if step.training else ()
    return plan if (save, offload) == (plan.save, plan.offload) else replace(plan, save=save, offload=offload)


def refuse_world_size(given: GivenPlan, world_size: int, replicas: int = 1) -> None:
    """Shards of another number of ranks have other sizes.

    Raises:
        ConfigError: the plan is for another number.
    """
    planned, of_replicas = given.plan.world_size, f" --replicas {replicas}" if replicas > 1 else ""
    if planned != world_size:
        raise ConfigError(
            f"the plan {given} is for {format_ranks(planned)}, and this run has {format_ranks(world_size, replicas)}",
            f"make one for this run: zerograph plan MODEL --world {world_size}{of_replicas} -o plan.json",
        )


def refuse_hosts(given: GivenPlan, hosts: int) -> None:
    """Other hosts keep other parts.

    Args:
        hosts: between which the ranks that split parameters communicate in a level of its own; else 1.

    Raises:
        ConfigError: the plan keeps parts of gathered buckets in another number.
    """
    if given.plan.hosts != hosts and any(bucket.residency == "host" for bucket in given.plan.buckets):
        raise ConfigError(
            f"in the plan {given} each of {given.plan.hosts} hosts keeps gathered buckets for the backward, and this "
            f"run has {hosts} that gather in two levels",
            "make one for this run, or run as many hosts with equally many CPU ranks each",
        )


def _for_evaluation(given: GivenPlan, step: Step) -> Plan:
    read = {p.name: p for p in step.params}
    planned = [replace(p, trainable=False) for bucket in given.plan.buckets for p in bucket.params]
    here = [replace(p, trainable=False) for p in step.params]
    found = [wrong.message for wrong in differences(planned, here) if wrong.module in read]
    _refuse(given, [*found, *_tiles(given.plan, step)])
    parts = [tuple(read[p.name] for p in bucket.params if p.name in read) for bucket in given.plan.buckets]
    kept = [replace(bucket, params=part) for bucket, part in zip(given.plan.buckets, parts, strict=True) if part]
    first = {p.name: at for at, p in enumerate(step.params)}
    # Buckets stand in order of first use, which evaluation may change.
    kept.sort(key=lambda bucket: min(first[p.name] for p in bucket.params))
    buckets: list[Bucket] = [replace(bucket, index=index) for index, bucket in enumerate(kept)]
    return replace(_without_activations(given.plan), buckets=tuple(buckets))


def _of_activations(plan: Plan, step: Step) -> Plan:
    """``plan`` with its decisions on activations that ``step`` makes, which reads no sharded parameters."""
    layers, head = {layer_of(op.module) for op in step.ops}, head_of(Graph.of(step)) if plan.head else None
    if head is None or head.activation != plan.head:
        plan = replace(plan, loss_tiles=1, head="")
    recompute = tuple(layer for layer in plan.recompute if layer in layers)
    offload = tuple((name, tier) for name, tier in plan.offload if (layer_of_activation(name) or name) in layers)
    return restricted_to_step(replace(plan, buckets=(), recompute=recompute, offload=offload), step)


def _without_activations(plan: Plan) -> Plan:
    """``plan`` without what it decides of activations."""
    return replace(plan, recompute=(), save=(), offload=(), loss_tiles=1, head="", **_UNTILED)


def _tiles(plan: Plan, step: Step) -> Iterator[str]:
    """Evaluation may use a parameter otherwise than training does."""
    read, tilable = {p.name for p in step.params}, set(step.tilable or ())
    for bucket in plan.buckets:
        names = [p.name for p in bucket.params if p.name in read - tilable]
        if bucket.tiles > 1 and names:
            yield f"parameter {names[0]} is in {bucket.tiles} tiles, and not used by products and lookups alone"


def _refuse(given: GivenPlan, found: Sequence[str]) -> None:
    if not found:
        return
    shown = [f"  {difference}" for difference in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"  and {len(found) - _SHOWN} more differences")
    raise ConfigError(
        f"the plan {given} is not one of this model:\n" + "\n".join(shown),
        "make the plan again from this model (zerograph plan MODEL -o plan.json), with the dtype that the backend gets",
    )


_UNTILED: dict[str, Any] = {"token_tiles": 1, "token_regions": (), "by_sample": False}
"""What plans say of layers that run whole."""
