"""Why a plan is as it is, for people: its decisions, one by one, with what each costs and gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from zerograph.core.files.planfile import Reason
from zerograph.core.machine import is_disk
from zerograph.core.param_bytes import kept_in_host, sent_bytes, shard_bytes, update_bytes
from zerograph.core.plan import DEVICE, Bucket, Overlap, Plan
from zerograph.core.step import Step, layer_of_activation
from zerograph.core.timeline import Forecast
from zerograph.core.units import counted, format_bytes, format_seconds
from zerograph.planner.programs.placement import Shards
from zerograph.planner.search.constraints import Constraints
from zerograph.sim.rates import Rates

_FASTEST = "predicted to be the fastest of the plans that were searched and fit"
_ASKED = "it was asked for"
_ARGUMENTS: Mapping[Overlap, str] = {
    "none": "no overlap", "backward": "overlap=True", "forward": 'overlap="forward"', "delayed": "delayed=True",
}  # fmt: skip
"""Of zerograph's optimizers."""


def reasons(
    plan: Plan, step: Step, constraints: Constraints, rates: Rates, forecast: Forecast, *, moments: int, searched: bool
    = True, unexecuted: str = "",
) -> Iterator[Reason]:  # fmt: skip
    """The decisions of ``plan``, and what each of them costs and gains.

    Args:
        constraints: what the user fixed.
        forecast: of the step under the plan.
        moments: tensors that the optimizer keeps per parameter.
        searched: whether the plan was found by a search; else rules decided what the user left open.
        unexecuted: what of it cannot be run yet.
    """
    yield Reason(
        "plan", f"stage {plan.stage}", "stage auto shards all of it" if constraints.stage == "auto" else _ASKED
    )
    if searched:
        yield Reason("plan", f"prefetch {plan.prefetch}", _FASTEST if constraints.prefetch is None else _ASKED)
        yield Reason(
            "plan", counted(len(plan.buckets), "bucket"), _FASTEST if constraints.bucket_size is None else _ASKED
        )
    if constraints.offload != "none":
        off = sum(bucket.placement != DEVICE for bucket in plan.buckets)
        cause = "it was chosen" if constraints.offload == "auto" else f"offload={constraints.offload} was asked for"
        yield Reason("plan", f"shards of {counted(off, 'bucket')} off the device", cause)
        if constraints.overlap != "none":
            why = _FASTEST if constraints.overlap == "auto" else _ASKED
            yield Reason("plan", f"an optimizer with {_ARGUMENTS[plan.overlap]}", why)
        if constraints.update != "host":
            why = _FASTEST if constraints.update == "auto" else _ASKED
            yield Reason("plan", f"states of the host are updated on the {plan.update}", why)
    if unexecuted:
        yield Reason("plan", "forecast from the schedule of the traced step", "this plan cannot be run yet")
    again = rates.products(sum(span.flops for span in forecast.spans) - sum(op.flops for op in step.ops))
    by_rule = _FASTEST if searched else "recompute is auto"
    yield from _activations(plan, by_rule if constraints.recompute == "auto" else _ASKED, again)
    for bucket in plan.buckets:
        if bucket.placement == DEVICE:
            why = _stays(bucket, rates, plan.hosts, constraints.stage == "auto")
        else:
            why = _leaves(bucket, rates, moments)
        yield Reason(bucket.name, _decided(bucket), why)
    if plan.loss_tiles > 1:
        yield Reason("loss", f"in {plan.loss_tiles} tiles of tokens", "logits never exist whole")
    if plan.token_tiles > 1:
        text = f"{counted(len(plan.token_regions), 'layer')} in {plan.token_tiles} tiles of "
        if plan.by_sample:
            yield Reason("tokens", f"{text}whole samples", "a layer's weights are fetched and gathered once for all")
        else:
            why = "no tensor wider than the model is whole; each tile reads their weights again"
            yield Reason("tokens", f"MLPs of {text}tokens", why)
    yield from under_way(plan)
    yield from _updated(step, plan, moments)


def _activations(plan: Plan, why: str, again: float) -> Iterator[Reason]:
    """``again``: seconds of the products that the backward computes a second time."""
    if plan.recompute:
        yield Reason("activations", recomputed(plan), f"{why}; products that run again take {format_seconds(again)}")
    elif plan.save_others:
        yield Reason("activations", "all saved", why)
    else:
        yield Reason("activations", "saved where the partitioner finds that cheaper than recomputing", why)
    for name, tier in plan.offload:
        what = "it" if layer_of_activation(name) else "what it saves"
        yield Reason(name, f"{what} waits on {tier} for the backward", "copies run beside the compute of other layers")


def under_way(plan: Plan) -> Iterator[Reason]:
    """The transfers that are waited for later than as soon as possible, and why."""
    if plan.reductions > 1:
        yield Reason("reductions", f"up to {plan.reductions} under way", "the backward would wait for a long one")
    if plan.fetch_ahead > 1:
        text = f"come back from {plan.fetch_ahead} layers before their own on"
        yield Reason("offloaded activations", text, "the copies of one take longer than a layer")


def _updated(step: Step, plan: Plan, moments: int) -> Iterator[Reason]:
    """The updates of the optimizer, and when they run."""
    trained = [param for param in step.params if param.trainable and step.training]
    if trained:
        done = f"{counted(len(trained), 'parameter')} updated"
        if all(bucket.placement.optimizer == "device" for bucket in plan.buckets):
            moved = sum(update_bytes(param, shard_bytes(param) * moments) for param in trained)
            done += f", {format_bytes(moved)} read and written"
        if plan.overlap == "backward":
            yield Reason("optimizer", f"{done} inside of the backward, by buckets", "no gradient is kept for its norm")
            return
        yield Reason("optimizer", done, "gradients may be clipped by their norm, so it waits for the whole backward")
        if plan.overlap != "none" and any(bucket.placement.optimizer != "device" for bucket in plan.buckets):
            beside = "forward" if plan.overlap == "forward" else "step, which computes with copies from before"
            yield Reason("updates", f"of what left the device run beside the next {beside}", "they need no device")


def recomputed(plan: Plan) -> str:
    """The recomputed layers, for people."""
    text = f"{counted(len(plan.recompute), 'layer')} recomputed in the backward: {', '.join(runs(plan.recompute))}"
    if not plan.save:
        return text
    kinds = Counter(name.removeprefix(layer_of_activation(name)).lstrip(".") for name in plan.save)
    return f"{text}, but for {', '.join(f'{kind} of {count}' for kind, count in kinds.items())}"


def runs(layers: Sequence[str]) -> Iterator[str]:
    """``a.0 to a.3`` for layers that follow one another, others by themselves; of many the first ones."""
    found: list[list[str]] = []
    for layer in layers:
        stack, _, number = layer.rpartition(".")
        before = f"{stack}.{int(number) - 1}" if number.isdigit() else ""
        if found and found[-1][-1] == before:
            found[-1].append(layer)
        else:
            found.append([layer])
    yield from (run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found[:_SHOWN])
    if len(found) > _SHOWN:
        yield f"and {sum(map(len, found[_SHOWN:]))} more"


_SHOWN = 4


def _decided(bucket: Bucket) -> str:
    """The bucket, for people: what is gathered together, when, how long it stays, and where its shards are."""
    count = counted(len(bucket.params), "parameter")
    tied = "".join(f", {p.name} is also {' and '.join(p.tied_to)}" for p in bucket.params if p.tied_to)
    ahead = "" if bucket.ahead is None else f", gathered {bucket.ahead} ahead"
    tiles = f", in {bucket.tiles} tiles" if bucket.tiles > 1 else ""
    placement = "" if bucket.placement == DEVICE else f", {bucket.placement}"
    gathered = format_bytes(bucket.gathered_bytes)
    return f"{count}, {gathered}, residency {bucket.residency}{ahead}{tied}{tiles}{placement}"


def _stays(bucket: Bucket, rates: Rates, hosts: int, searched: bool) -> str:
    """Why ``bucket`` stays resident as long as it does: a gather more, or its bytes between forward and backward."""
    gather = format_seconds(rates.collective(sent_bytes(bucket.params)))
    held = format_bytes(bucket.gathered_bytes)
    if bucket.residency == "backward":
        return f"it holds {held} between forward and backward, which saves a gather of {gather}"
    if bucket.residency == "host":
        inside = format_seconds(rates.inside(sent_bytes(bucket.params)))
        part = format_bytes(kept_in_host(bucket.params, hosts))
        return f"a rank keeps {part} of it for the backward, whose gather takes {inside} in place of {gather}"
    if bucket.residency == "step":
        return "below stage 3 parameters stay whole from forward to backward"
    why = _FASTEST if searched else "stage 3 keeps parameters whole only while they are used"
    return f"{why}; its second gather takes {gather} and saves {held} between forward and backward"


def _leaves(bucket: Bucket, rates: Rates, moments: int) -> str:
    """The cost of keeping ``bucket`` off the device, and the bytes that it frees."""
    shards = Shards.of(bucket.params, moments, rates.staging)
    placed = shards.at(bucket.placement)
    freed = -sum(size for tier, size in shards.moved(bucket.placement) if tier == "device")
    freed += shards.gradient if bucket.placement.spilled != "device" else 0
    update = rates.host_update(placed.traffic, sum(p.sharded and p.trainable for p in bucket.params))
    if is_disk(tier := bucket.placement.optimizer):
        update = max(update, rates.transfer("host", tier, placed.optimizer))
    return f"it frees {format_bytes(freed)} of the device, and its update takes {format_seconds(update)} there"
