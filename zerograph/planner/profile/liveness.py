"""The values that a backward finds saved or computes again: the partitioner's decisions, predicted from a step.

The min-cut partitioner of AOTAutograd is modelled plainly: what the backward reads is saved, unless it is cheap to
compute from what is saved already and fuses into its reader (what a product reads does not), or from what is smaller
or returned to the user, which is then saved in its place. Layers that are recomputed save what enters and leaves them
only, and of the rest a saved set: activations by their lasting names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.core.step import Step, layers_of

Mode = Literal["auto", "full", "none"]
"""How a layer's activations are treated: as the partitioner finds cheapest, all recomputed (but for a saved set), or
all saved."""


class Graph:
    """A step with its values numbered, so that looking at all of them takes milliseconds.

    Attributes:
        step: the step.
        reads, writes: values of each operation.
        backward: index of the first operation of the backward.
        maker: of each value the operation that makes it; -1 for inputs.
        owner: of each value the one whose memory it looks at.
        size: bytes of each value that has memory of its own; 0 for views.
        whole: bytes of each that is made for some tokens at a time and can be saved all the same, where it is.
        params: of each value the parameters that it is, or is a view or cast of, if nothing else.
        params_read: of each operation the parameters that it computes with; views and casts do not, their readers do.
        layer: of each operation, filled in where tracing left no word of it.
        activation: lasting name of what each operation of the forward makes.
        leaves: values that a forward operation of another layer reads.
    """

    def __init__(self, step: Step) -> None:
        # As the partitioner does: operations of the forward that stand among those of the backward come first.
        self.ops = sorted(step.ops, key=lambda op: op.phase == "backward")
        self.backward = sum(op.phase == "forward" for op in self.ops)
        index = {value.name: i for i, value in enumerate(step.values)}
        self.step, self.values = step, step.values
        self.reads = [[index[name] for name in op.reads] for op in self.ops]
        self.writes = [index[op.writes[0]] for op in self.ops]
        self.maker = [-1] * len(index)
        for i, value in enumerate(self.writes):
            self.maker[value] = i
        self.owner = [index[value.alias_of] if value.alias_of else i for i, value in enumerate(step.values)]
        self.size = [0 if value.alias_of else value.bytes for value in step.values]
        self.whole = {i: value.whole for i, value in enumerate(step.values) if value.whole and not value.alias_of}
        self.outputs = {self.owner[index[name]] for name in step.outputs}
        phases = self.ops[: self.backward], self.ops[self.backward :]
        self.layer = [layer for ops in phases for layer in layers_of([op.module for op in ops])]
        self.activation = [op.activation for op in self.ops[: self.backward]]
        self.params = self._params()
        self.params_read = [
            tuple(sorted({name for r in reads for name in self.params[r]})) if not self.params[value] else ()
            for reads, value in zip(self.reads, self.writes, strict=True)
        ]
        self.leaves = {
            value
            for i in range(self.backward)
            for value in self.reads[i]
            if self.maker[value] >= 0 and self.layer[self.maker[value]] != self.layer[i]
        }

    @classmethod
    def of(cls, step: Step) -> Graph:
        """The graph of ``step``, which is made once."""
        found = step.derived.get(cls)
        if found is None:
            found = step.derived[cls] = cls(step)
        return found

    @cached_property
    def readers(self) -> tuple[dict[int, int], dict[int, int]]:
        """The first and the last operation of the backward that reads each value."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for i in range(self.backward, len(self.ops)):
            _need(self.reads[i], first, last, i, i)
        return first, last

    @cached_property
    def read_by_products(self) -> set[int]:
        """Values that products of the backward read, maybe as views: they have to be there whole, so none is
        repeated."""
        products = (i for i in range(self.backward, len(self.ops)) if self.ops[i].flops)
        return {self.owner[value] for i in products for value in self.reads[i]}

    def _params(self) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = [()] * len(self.values)
        for op, reads, value in zip(self.ops[: self.backward], self.reads, self.writes, strict=False):
            if self.values[value].kind == "gathered":
                found[value] = op.params
            elif op.cheap:
                tensors = [r for r in reads if self.values[r].bytes]
                if tensors and all(found[r] for r in tensors):
                    found[value] = tuple(dict.fromkeys(name for r in tensors for name in found[r]))
        return found


@dataclass(frozen=True, slots=True)
class Saved:
    """The values that one mode, were it that of all layers, saves and repeats.

    Attributes:
        since, until: of each value with memory that is saved, the first and last operation of the backward that needs
            it.
        repeats: before which operation of the backward which ones of the forward run again, in order.
    """

    since: dict[int, int]
    until: dict[int, int]
    repeats: dict[int, list[int]]


def saved(graph: Graph, mode: Mode, saved_set: Set[str] = frozenset()) -> Saved:
    """The values that are saved when all layers are treated in ``mode``.

    Args:
        saved_set: activations of recomputed layers that are saved all the same.
    """
    first, last = map(dict, graph.readers)
    forced = [_is_forced(graph, i, mode, saved_set) for i in range(graph.backward)]
    for i in reversed(range(graph.backward)):
        value = graph.writes[i]
        # From the last on: what a forced operation reads is needed where that is, and may be forced itself.
        if forced[i] and value in first:
            _need(graph.reads[i], first, last, first[value], last[value])
    materialized = graph.read_by_products
    to_save, there = _to_save(graph, mode, forced, first, materialized, frozenset())
    if mode != "none" and (instead := _smaller(graph, mode, to_save, there, materialized)):
        to_save, _ = _to_save(graph, mode, forced, first, materialized, instead)
    # The readers anew: above they were spread through forced operations only.
    return _resolve(graph, to_save, *map(dict, graph.readers))


def offloaded(step: Step, plan: Plan) -> dict[Tier, int]:
    """Bytes of saved activations by the tier that ``plan`` has them wait on, as far as a step tells."""
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


def _need(values: Sequence[int], first: dict[int, int], last: dict[int, int], begin: int, end: int) -> None:
    for value in values:
        if value not in first:
            first[value], last[value] = begin, end
            continue
        if begin < first[value]:
            first[value] = begin
        if end > last[value]:
            last[value] = end


def _is_forced(graph: Graph, i: int, mode: Mode, saved_set: Set[str]) -> bool:
    if graph.ops[i].again:
        return True
    inside = mode == "full" and bool(graph.layer[i]) and graph.writes[i] not in graph.leaves
    return inside and graph.activation[i] not in saved_set


def _to_save(
    graph: Graph, mode: Mode, forced: Sequence[bool], wanted: dict[int, int], materialized: Set[int], given: Set[int]
) -> tuple[set[int], list[bool]]:
    """The memory that the forward saves, ``given`` with it, and of each value whether the backward has it then."""
    to_save: set[int] = {*given}
    there = [maker < 0 or bool(params) for maker, params in zip(graph.maker, graph.params, strict=True)]
    for i in range(graph.backward):
        value = graph.writes[i]
        owner = graph.owner[value]
        if there[value] or owner in to_save or (forced[i] and value in wanted):
            there[value] = True
        elif value not in materialized and _is_repeated_freely(graph, i, mode):
            there[value] = all(there[r] for r in graph.reads[i])
        if value in wanted and not there[value]:
            there[value] = True
            to_save.add(owner)
    return to_save, there


def _smaller(graph: Graph, mode: Mode, to_save: Set[int], there: Sequence[bool], materialized: Set[int]) -> set[int]:
    """The values saved in the place of others of ``to_save``, which are cheap to compute from them and take more.

    A loss makes values as large as the logits. Where the model returns logits these are there anyway, and in 16 bits
    they take half as much. Values that layers save are left as they are: sources of one value are those of others, too.
    """
    found: set[int] = set()

    def is_free(i: int) -> bool:
        return graph.writes[i] not in materialized and _is_repeated_freely(graph, i, mode)

    for value in sorted(v for v in to_save - graph.outputs if graph.maker[v] >= 0 and not graph.layer[graph.maker[v]]):
        sources = _sources(graph, value, is_free, there)
        new = sources - to_save - found - graph.outputs
        if (
            value not in sources
            and all(graph.size[source] for source in sources)
            and sum(graph.size[v] for v in new) < graph.size[value]
        ):
            found |= sources
    return found


def _sources(graph: Graph, value: int, is_free: Callable[[int], bool], there: Sequence[bool]) -> set[int]:
    """The memory from which ``value`` is computed by operations that are free alone; what is ``there`` left out."""
    found, seen, left = set[int](), {value}, [value]
    while left:
        one = left.pop()
        if not is_free(graph.maker[one]):
            found.add(graph.owner[one])
            continue
        reads = [r for r in graph.reads[graph.maker[one]] if r not in seen and not there[r]]
        seen.update(reads)
        left += reads
    return found


def _is_repeated_freely(graph: Graph, i: int, mode: Mode) -> bool:
    value = graph.writes[i]
    # A view costs nothing in any mode.
    if mode == "auto" or graph.owner[value] != value:
        return graph.ops[i].cheap
    return mode == "full" and graph.ops[i].cheap and not graph.layer[i]  # what leaves a layer is saved


def _resolve(graph: Graph, to_save: set[int], first: dict[int, int], last: dict[int, int]) -> Saved:
    """Follow what the backward needs through what is repeated, back to what is kept."""
    since: dict[int, int] = {}
    until: dict[int, int] = {}
    repeats: dict[int, list[int]] = {}
    for i in reversed(range(graph.backward)):
        value = graph.writes[i]
        if value not in first:
            continue
        owner = graph.owner[value]
        if owner in to_save:
            since[owner] = min(since.get(owner, first[value]), first[value])
            until[owner] = max(until.get(owner, 0), last[value])
            continue
        repeats.setdefault(first[value], []).append(i)
        _need(graph.reads[i], first, last, first[value], last[value])
    return Saved(since, until, {at: found[::-1] for at, found in repeats.items()})
