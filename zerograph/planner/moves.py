"""What must be true of a planned step that moves things between tiers, read off its tasks.

Tasks are told apart by the names that :mod:`zerograph.planner.run` and :mod:`zerograph.planner.updates` give them, with
the label of a bucket (``blocks.3``) or of a tile of it (``blocks.3 tile 2/4``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from zerograph.core.plan import Bucket, Homes
from zerograph.core.planfile import PlanFile
from zerograph.core.step import layer_of, layer_of_activation
from zerograph.core.timeline import Span

Found = tuple[Span | None, str, str]
"""The task that is wrong, if any; the module that it is about; what is wrong."""


def labels(bucket: Bucket) -> list[str]:
    """What tasks call a bucket, or each of its tiles."""
    if bucket.tiles == 1:
        return [bucket.name]
    return [f"{bucket.name} tile {tile + 1}/{bucket.tiles}" for tile in range(bucket.tiles)]


def reductions(file: PlanFile) -> Iterator[Found]:
    """Every bucket that trains is reduced once, tile by tile."""
    if file.plan.world_size == 1:
        return
    wanted = Counter(
        label for bucket in file.plan.buckets if any(p.trainable for p in bucket.params) for label in labels(bucket)
    )
    done = Counter(s.name.removeprefix("reduce ") for s in file.forecast.spans if s.stream == "reduce")
    for label in {**wanted, **done}:
        if wanted[label] != done[label]:
            text = f"gradients of {label} are reduced {done[label]} times, not {wanted[label]}"
            yield None, label.partition(" tile ")[0], text


def updates(file: PlanFile) -> Iterator[Found]:
    """Every shard is updated once, where its states live."""
    wanted = Counter(
        label
        for bucket in file.plan.buckets
        if bucket.homes.optimizer != "device" and any(p.sharded and p.trainable for p in bucket.params)
        for label in labels(bucket)
    )
    away = {bucket.name for bucket in file.plan.buckets if bucket.homes.optimizer != "device"}
    done = Counter(
        label
        for span in file.forecast.spans
        if span.stream == "cpu_update"
        for label in [span.name.removeprefix("update ")]
        if span.module in away
    )
    for label in {**wanted, **done}:
        if wanted[label] != done[label]:
            text = f"{label} is updated on the host {done[label]} times, not {wanted[label]}"
            yield None, label.partition(" tile ")[0], text
    here = any(b.homes.optimizer == "device" and any(p.trainable for p in b.params) for b in file.plan.buckets)
    steps = sum(span.stream == "compute" and span.name == "optimizer update" for span in file.forecast.spans)
    if here and steps != 1:
        yield None, "optimizer", f"the optimizer updates what lives on the device {steps} times, not once"


def arrivals(file: PlanFile) -> Iterator[Found]:
    """Whatever is read has come from the tier where it lives to the one where it is read."""
    spans, home = file.forecast.spans, _homes(file)
    staged = file.machine.device != "cpu"  # otherwise the host's memory is the device's
    for span in spans:
        if span.module not in home:
            continue
        homes, before = home[span.module], {spans[task].name for task in span.after if 0 <= task < len(spans)}
        label = span.name.partition(" ")[2]
        wanted: list[str] = []
        if span.stream == "gather" and homes.parameters != "device":
            wanted = [f"{'fetch' if staged else 'read'} shard of {label}"]
        elif span.stream == "cpu_update" and homes.optimizer != "device":
            reads = "nvme" in (homes.gradients, homes.optimizer)
            spills = homes.gradients == "host" or (homes.gradients == "device" and staged)
            wanted = [f"read states of {label}"] * reads + [f"spill gradient of {label}"] * spills
        elif span.name.startswith("fetch shard of ") and homes.parameters == "nvme":
            wanted = [f"read {span.name.removeprefix('fetch ')}"]
        elif span.name.startswith("read states of ") and homes.gradients == "nvme":
            wanted = [f"write gradient of {span.name.removeprefix('read states of ')}"]
        elif span.name.startswith(("write states of ", "fetch parameters of ")):
            wanted = [f"update {span.name.partition(' of ')[2]}"]
        missing = [name for name in wanted if name not in before]
        yield from ((span, span.module, f"{span.name} does not wait for {name}") for name in missing)


def returns(file: PlanFile) -> Iterator[Found]:
    """Activations leave the device before they come back, and whatever computes next with them waits for them."""
    spans, tier_of = file.forecast.spans, dict(file.plan.offload)
    staged = file.machine.device != "cpu"
    awaited = {task for span in spans if span.stream == "compute" for task in span.after}
    for index, span in enumerate(spans):
        move, _, layer = span.name.partition(" activations of ")
        if layer not in tier_of or move not in ("read", "fetch"):
            continue
        through = move == "fetch" and tier_of[layer] == "nvme"
        left = "read" if through else "write" if tier_of[layer] == "nvme" else "spill"
        before = {spans[task].name for task in span.after if 0 <= task < len(spans)}
        if f"{left} activations of {layer}" not in before:
            yield span, span.module, f"{span.name} does not wait for {left} activations of {layer}"
        if (move == "fetch" or not staged) and index not in awaited:
            yield span, span.module, f"nothing that computes waits for {span.name}"


def layers(file: PlanFile) -> Iterator[Found]:
    """What is decided of layers is of layers that the step has."""
    plan, there = file.plan, {layer_of(span.module) for span in file.forecast.spans}
    for name in (*plan.recompute, *plan.save, *(name for name, _ in plan.offload)):
        if (layer_of_activation(name) or name) not in there:
            yield None, name, f"what {name} saves was decided, and nothing runs in such a layer"


def use(file: PlanFile) -> Iterator[Found]:
    """Every sharded bucket is gathered, and something that computes waits for every gather."""
    if file.plan.world_size == 1 or file.plan.stage == 0:
        return
    spans = file.forecast.spans
    awaited = {task for span in spans if span.stream == "compute" for task in span.after}
    gathered = {span.module for span in spans if span.stream == "gather"}
    for bucket in file.plan.buckets:
        if bucket.name not in gathered and any(p.sharded for p in bucket.params):
            yield None, bucket.name, f"{bucket.name} is sharded and never gathered"
    for index, span in enumerate(spans):
        if span.stream == "gather" and index not in awaited:
            yield span, span.module, f"nothing that computes waits for {span.name}"


def _homes(file: PlanFile) -> dict[str, Homes]:
    """Homes by name; of parts of a layer that share one, only where they agree: tasks do not tell them apart."""
    found: dict[str, set[Homes]] = defaultdict(set)
    for bucket in file.plan.buckets:
        found[bucket.name].add(bucket.homes)
    return {name: homes.pop() for name, homes in found.items() if len(homes) == 1}


def gathers(file: PlanFile) -> Iterator[Found]:
    """No bucket is gathered while it is whole, and no more tiles are whole at a time than are gathered ahead."""
    spans, names = file.forecast.spans, Counter(bucket.name for bucket in file.plan.buckets)
    whole = defaultdict(list)
    for holding in file.holdings:
        if holding.kind == "gathered" and 0 <= holding.first < len(spans) and -1 <= holding.last < len(spans):
            end = file.forecast.seconds if holding.last == -1 else spans[holding.last].end
            whole[holding.name].append((spans[holding.first].start, end))
    for label, times in whole.items():
        if names[label.partition(" tile ")[0]] == 1:  # parts of one layer may share a name
            for (_, end), (start, _) in pairwise(sorted(times)):
                if start < end:
                    yield None, label, f"{label} is gathered at {start:g} s, and whole until {end:g} s"
    for bucket, ahead in zip(file.plan.buckets, file.plan.ahead(), strict=True):
        if bucket.tiles > 1 and names[bucket.name] == 1:
            most = _most_at_a_time([time for label in labels(bucket) for time in whole[label]])
            if most > ahead + 1:
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
