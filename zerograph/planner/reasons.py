"""Why a plan is as it is, for people: its decisions, one by one, with what each costs and gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zerograph.core.plan import DEVICE, Bucket, Plan
from zerograph.core.planfile import Reason
from zerograph.core.step import Step, layer_of_activation
from zerograph.core.units import format_bytes, format_seconds
from zerograph.planner.schedule import Scheduler
from zerograph.planner.search import Wish
from zerograph.planner.space import Candidate


def reasons(found: Candidate, wish: Wish, step: Step, unexecuted: str) -> Iterator[Reason]:
    """The decisions of ``found``, and what each of them costs and gains; ``unexecuted`` is what cannot be run yet."""
    plan, scheduler = found.plan, found.space.scheduler
    fastest = "of the plans that were looked at and fit every tier, it is predicted to be the fastest"
    asked = "it was asked for"
    yield Reason("plan", f"stage {plan.stage}", "stage auto shards all of it" if wish.stage == "auto" else asked)
    yield Reason("plan", f"prefetch {plan.prefetch}", fastest if wish.prefetch is None else asked)
    yield Reason("plan", f"{len(plan.buckets)} buckets", fastest if wish.bucket_size is None else asked)
    off = sum(bucket.homes != DEVICE for bucket in plan.buckets)
    told = "it was chosen" if wish.offload == "auto" else f"offload={wish.offload} was asked for"
    yield Reason("plan", f"shards of {off} {'bucket' if off == 1 else 'buckets'} off the device", told)
    if unexecuted:
        yield Reason("plan", "forecast from the schedule of the traced step", "this plan cannot be run yet")
    for bucket in plan.buckets:
        yield Reason(bucket.name, _decided(bucket), _why(bucket, scheduler) or fastest)
    if plan.loss_tiles > 1:
        yield Reason("loss", f"in {plan.loss_tiles} tiles of tokens", "logits never exist whole")
    yield from _activations(plan, fastest if wish.recompute == "auto" else asked)
    yield from under_way(plan)
    yield from updated(step, plan)


def _activations(plan: Plan, why: str) -> Iterator[Reason]:
    if plan.recompute:
        yield Reason("activations", recomputed(plan), why)
    for name, tier in plan.offload:
        what = "it" if layer_of_activation(name) else "what it saves"
        yield Reason(name, f"{what} waits on {tier} for the backward", "copies run beside the compute of other layers")


def under_way(plan: Plan) -> Iterator[Reason]:
    """What is waited for later than as soon as possible, and why."""
    if plan.reductions > 1:
        yield Reason("reductions", f"up to {plan.reductions} under way", "the backward would wait for a long one")
    if plan.fetch_ahead > 1:
        text = f"come back from {plan.fetch_ahead} layers before their own on"
        yield Reason("offloaded activations", text, "the copies of one take longer than a layer")


def updated(step: Step, plan: Plan) -> Iterator[Reason]:
    """What the optimizer does, and when."""
    updates = step.updates
    if updates:
        done = f"{len(updates)} parameter" + ("" if len(updates) == 1 else "s") + " updated"
        if all(bucket.homes.optimizer == "device" for bucket in plan.buckets):
            done += f", {format_bytes(sum(op.moved for op in updates))} read and written"
        yield Reason("optimizer", done, "gradients may be clipped by their norm, so it waits for the whole backward")


def recomputed(plan: Plan) -> str:
    """What is computed again, for people."""
    layers = "layer" if len(plan.recompute) == 1 else "layers"
    text = f"{len(plan.recompute)} {layers} recomputed in the backward: {', '.join(runs(plan.recompute))}"
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


def describe_bucket(bucket: Bucket) -> str:
    """What is gathered together, when, and how long it stays, for people."""
    count = f"{len(bucket.params)} parameter" + ("" if len(bucket.params) == 1 else "s")
    tied = "".join(f", {p.name} is also {' and '.join(p.tied_to)}" for p in bucket.params if p.tied_to)
    ahead = "" if bucket.ahead is None else f", gathered {bucket.ahead} ahead"
    return f"{count}, {format_bytes(bucket.gathered_bytes)}, residency {bucket.residency}{ahead}{tied}"


def _decided(bucket: Bucket) -> str:
    tiles = f", in {bucket.tiles} tiles" if bucket.tiles > 1 else ""
    return f"{describe_bucket(bucket)}{tiles}, {bucket.homes}"


def _why(bucket: Bucket, scheduler: Scheduler) -> str:
    """What it costs to live off the device, and what that frees."""
    if bucket.homes == DEVICE:
        return ""
    shards, rates = scheduler.bucket_parts(bucket.index, 1)[0].shards, scheduler.rates
    freed = -sum(size for tier, size in shards.moved(bucket.homes) if tier == "device")
    freed += shards.gradient if bucket.homes.gradients != "device" else 0
    update = rates.host_update(shards.traffic)
    if "nvme" in (bucket.homes.optimizer, bucket.homes.parameters):
        update = max(update, rates.transfer("nvme_write", shards.optimizer))
    return f"it frees {format_bytes(freed)} of the device, and its update takes {format_seconds(update)} there"
