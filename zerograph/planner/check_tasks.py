"""What must be true of a planned step that moves things between tiers, read off the fields of its tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from zerograph.core.plan import Bucket, Plan
from zerograph.core.planfile import PlanFile
from zerograph.core.step import layer_of, layer_of_activation
from zerograph.core.timeline import Span

Found = tuple[Span | None, str, str]
"""The task that is wrong, if any; the module that it is about; what is wrong."""
Part = tuple[int, int]
"""A bucket and a tile of it."""


def parts(bucket: Bucket) -> list[Part]:
    """The tiles of a bucket; one where it is whole."""
    return [(bucket.index, tile) for tile in range(bucket.tiles)]


def _label(plan: Plan, part: Part) -> tuple[str, str]:
    """The bucket's name, and what people call that part of it."""
    index, tile = part
    if not 0 <= index < len(plan.buckets):
        return "", f"bucket {index}"
    bucket = plan.buckets[index]
    return bucket.name, bucket.name if bucket.tiles == 1 else f"{bucket.name} tile {tile + 1}/{bucket.tiles}"


def reductions(file: PlanFile) -> Iterator[Found]:
    """Every bucket that trains is reduced once, tile by tile."""
    plan = file.plan
    if plan.world_size == 1:
        return
    wanted = Counter(part for b in plan.buckets if any(p.trainable for p in b.params) for part in parts(b))
    done = Counter((s.bucket, s.tile) for s in file.forecast.spans if s.operation == "reduce")
    for part in {**wanted, **done}:
        if wanted[part] != done[part]:
            name, label = _label(plan, part)
            yield None, name, f"gradients of {label} are reduced {done[part]} times, not {wanted[part]}"


def updates(file: PlanFile) -> Iterator[Found]:
    """Every shard is updated once, where its states live."""
    plan, updated = file.plan, [s for s in file.forecast.spans if s.operation == "update"]
    away = [b for b in plan.buckets if b.homes.optimizer != "device"]
    wanted = Counter(part for b in away if any(p.sharded and p.trainable for p in b.params) for part in parts(b))
    there = {bucket.index for bucket in away}
    done = Counter((s.bucket, s.tile) for s in updated if s.what == "states" and s.bucket in there)
    for part in {**wanted, **done}:
        if wanted[part] != done[part]:
            name, label = _label(plan, part)
            yield None, name, f"{label} is updated on the host {done[part]} times, not {wanted[part]}"
    here = any(b.homes.optimizer == "device" and any(p.trainable for p in b.params) for b in plan.buckets)
    steps = sum(span.what != "states" for span in updated)
    if here and steps != 1:
        yield None, "optimizer", f"the optimizer updates what lives on the device {steps} times, not once"


def arrivals(file: PlanFile) -> Iterator[Found]:
    """Whatever is read has come from the tier where it lives to the one where it is read."""
    spans, plan = file.forecast.spans, file.plan
    staged = file.machine.has_host  # otherwise the host's memory is the device's
    read = {(span.bucket, span.tile) for span in spans if (span.operation, span.what) == ("read", "states")}
    for span in spans:
        if not 0 <= span.bucket < len(plan.buckets):
            continue
        bucket = plan.buckets[span.bucket]
        homes = bucket.homes
        wanted: list[tuple[str, str]] = []  # operations, and what they move
        match span.operation, span.what:
            # A CPU has no host tier of its own: NVMe is read straight to where it is used.
            case "gather", _ if homes.parameters != "device":
                wanted = [("fetch" if staged else "read", "shard")]
            case "update", "states" if span.stream == "compute":
                wanted = [("fetch", "states")]
            case "fetch", "states":
                wanted = [("spill", "gradient")]
            case "spill", "states":
                wanted = [("update", "states")]
            case "update", _ if homes.optimizer != "device":
                # On a CPU plain SGD of parameters that compute in their own dtype keeps nothing anywhere else.
                masters = staged or any(p.trainable and p.is_master for p in bucket.params)
                states = homes.optimizer == "nvme" and (masters or (span.bucket, span.tile) in read)
                reads = states or homes.gradients == "nvme"
                spills = homes.gradients == "host" or (homes.gradients == "device" and staged)
                wanted = [("read", "states")] * reads + [("spill", "gradient")] * spills
            case "fetch", "shard" if homes.parameters == "nvme":
                wanted = [("read", "shard")]
            case "read", "states" if homes.gradients == "nvme":
                wanted = [("write", "gradient")]
            case ("write", "states") | ("fetch", "parameters"):
                wanted = [("update", "states")]
        before = [spans[task] for task in span.after if 0 <= task < len(spans)]
        there = {(s.operation, s.what) for s in before if (s.bucket, s.tile) == (span.bucket, span.tile)}
        for operation, what in wanted:
            if (operation, what) not in there:
                name, label = _label(plan, (span.bucket, span.tile))
                told = f"update {label}" if operation == "update" else f"{operation} {what} of {label}"
                yield span, name, f"{span.name} does not wait for {told}"


def returns(file: PlanFile) -> Iterator[Found]:
    """Activations leave the device before they come back, and whatever computes next with them waits for them."""
    spans, tier_of = file.forecast.spans, dict(file.plan.offload)
    staged = file.machine.has_host
    awaited = {task for span in spans if span.stream == "compute" for task in span.after}
    for index, span in enumerate(spans):
        if span.what != "activations" or span.label not in tier_of or span.operation not in ("read", "fetch"):
            continue
        away = tier_of[span.label] == "nvme"
        left = "read" if span.operation == "fetch" and away else "write" if away else "spill"
        before = [spans[task] for task in span.after if 0 <= task < len(spans)]
        if not any((s.operation, s.what, s.label) == (left, "activations", span.label) for s in before):
            yield span, span.module, f"{span.name} does not wait for {left} activations of {span.label}"
        if (span.operation == "fetch" or not staged) and index not in awaited:
            yield span, span.module, f"nothing that computes waits for {span.name}"


def layers(file: PlanFile) -> Iterator[Found]:
    """What is decided of layers is of layers that the step has."""
    plan, there = file.plan, {layer_of(span.module) for span in file.forecast.spans}
    for name in (*plan.recompute, *plan.save, *(name for name, _ in plan.offload)):
        if (layer_of_activation(name) or name) not in there:
            yield None, name, f"what {name} saves was decided, and nothing runs in such a layer"


def tokens(file: PlanFile) -> Iterator[Found]:
    """What the plan divides into tiles of tokens, tasks run in so many: the loss, and the layers that it names; and
    nothing else."""
    plan = file.plan
    regions = {layer_of_activation(name): name for name in plan.token_regions}
    tiles = {"": plan.loss_tiles, **dict.fromkeys(regions, plan.token_tiles)}  # by layer; the loss is in none
    left = {layer: count for layer, count in tiles.items() if count > 1}
    for span in file.forecast.spans:
        layer = layer_of(span.module)
        wanted = tiles.get(layer, 1)
        if span.token_tiles == wanted:
            left.pop(layer, None)
        elif span.token_tiles > 1:
            yield span, span.module, f"{span.name} runs in {span.token_tiles} tiles of tokens, the plan has {wanted}"
    for layer, wanted in left.items():
        name = regions[layer] if layer else plan.head
        yield None, layer or name, f"{name} is in {wanted} tiles of tokens, and no task makes one"


def use(file: PlanFile) -> Iterator[Found]:
    """Every sharded bucket is gathered, and something that computes waits for every gather."""
    if file.plan.world_size == 1 or file.plan.stage == 0:
        return
    spans = file.forecast.spans
    awaited = {task for span in spans if span.stream == "compute" for task in span.after}
    gathered = {span.bucket for span in spans if span.operation == "gather"}
    for bucket in file.plan.buckets:
        if bucket.index not in gathered and any(p.sharded for p in bucket.params):
            yield None, bucket.name, f"{bucket.name} is sharded and never gathered"
    for index, span in enumerate(spans):
        if span.operation == "gather" and index not in awaited:
            yield span, span.module, f"nothing that computes waits for {span.name}"


def gathers(file: PlanFile) -> Iterator[Found]:
    """No bucket is gathered while it is whole, and no more tiles are whole at a time than are gathered ahead."""
    spans, whole = file.forecast.spans, defaultdict[str, list[tuple[float, float]]](list)
    # Buckets of one layer may share a name.
    there = Counter(_label(file.plan, part)[1] for bucket in file.plan.buckets for part in parts(bucket))
    for holding in file.holdings:
        held = 0 <= holding.first < len(spans) and -1 <= holding.last < len(spans)
        if held and holding.kind == "gathered" and holding.name in there:
            end = file.forecast.seconds if holding.last == -1 else spans[holding.last].end
            whole[holding.name].append((spans[holding.first].start, end))
    for label, times in whole.items():
        if _most_at_a_time(times) > there[label]:
            at_once = ((start, end) for (_, end), (start, _) in pairwise(sorted(times)) if start < end)
            start, end = next(at_once)
            yield None, label, f"{label} is gathered at {start:g} s, and whole until {end:g} s"
    for bucket, ahead in zip(file.plan.buckets, file.plan.ahead(), strict=True):
        if bucket.tiles > 1:
            labels = [_label(file.plan, part)[1] for part in parts(bucket)]
            most = _most_at_a_time([time for label in labels for time in whole[label]])
            if most > (ahead + 1) * there[labels[0]]:
                text = f"{most} tiles of {bucket.name} are whole at a time, {ahead + 1} may be"
                yield None, bucket.name, text


def _most_at_a_time(times: list[tuple[float, float]]) -> int:
    """The most of some intervals that overlap; what ends at a moment makes room for what starts then."""
    events = sorted([(end, -1) for _, end in times] + [(start, 1) for start, _ in times])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
