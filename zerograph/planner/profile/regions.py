"""Divides a step into regions: what each layer computes in each phase, and which values live from one to another.

Operations of one layer that follow each other are a *region*. Its work is divided where it first reads a parameter, as
that is where a plan may cut it. Regions with equal operations cost the same, so that deep models are counted in the
time of a few layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

from zerograph.core.cost import Cost, Counted
from zerograph.core.segment_profile import Operator, SegmentProfile, segment_profile
from zerograph.core.step import Op, Param, Phase, Step, layer_of_activation
from zerograph.planner.profile.liveness import Graph, Mode, Saved, saved


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of a region: the parameters it reads, and its cost.

    ``gradients`` are the parameters whose full gradients it makes, with their bytes; ``end`` is the number of the
    region's operations up to its end.
    """

    params: tuple[str, ...]
    cost: Cost
    gradients: tuple[tuple[str, int], ...] = ()
    end: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of a region in one mode, and the memory it holds; an input is named by the value's number."""

    atoms: tuple[Atom, ...]
    memory: SegmentProfile


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's operations in one phase; ``layer`` is empty outside of repeated layers. ``work`` is by option.

    In ``token_tiles`` tiles the plan has some of it run.
    """

    phase: Phase
    layer: str
    module: str
    source: str
    work: tuple[Work, ...]
    token_tiles: int = 1


@dataclass(frozen=True, slots=True)
class Life:
    """Memory that lives from one region to another.

    Attributes:
        name, source: of the largest value that is counted in.
        activation: the lasting name of what a layer's forward saves; empty for what no option saves.
        bytes: of all of them.
        made: bytes of them that its region holds while it makes them: less where that runs for some tokens at a time.
        members: the values by number, with the bytes of each that are free when a region has read it last; 0 where
            that runs for some tokens at a time.
        start: the region that makes it.
        read: the last region of the same phase that reads it; None where the step returns it to the user.
        saved: by option of the layer that makes it, the last region of the backward that needs it, where it is saved.
        needed: by option, the first such region.
    """

    name: str
    source: str
    activation: str
    bytes: int
    made: int
    members: tuple[tuple[int, int], ...]
    start: int
    read: int | None
    saved: Mapping[int, int]
    needed: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """A step, ready to be scheduled in many ways.

    Each layer has a *recompute option*: how many of its activations it saves. At option 0 these are what enters and
    leaves it; at the last option all that the partitioner would save, or everything, as the plan has it for what is in
    no layer.

    Attributes:
        regions: those of the forward, then those of the backward.
        lives: what crosses from one to another.
        layers: repeated layers in order, those that can be recomputed.
        saved_sets: of each layer, the activations that the options between the first and the last save.
        params: of the step.
    """

    regions: tuple[Region, ...]
    lives: tuple[Life, ...]
    layers: tuple[str, ...]
    saved_sets: tuple[tuple[frozenset[str], ...], ...]
    params: tuple[Param, ...]
    training: bool

    @property
    def all_saved(self) -> int:
        """The last option."""
        return len(self.saved_sets[0]) + 1 if self.saved_sets else 1

    def options(self, recompute: Collection[str], save: Collection[str]) -> tuple[int, ...]:
        """The option of every layer where ``recompute`` are recomputed but for the activations ``save``.

        Raises:
            ValueError: no option of a layer saves just these.
        """
        own: dict[str, set[str]] = {layer: set() for layer in recompute}
        for name in save:
            own[layer_of_activation(name)].add(name)
        every = zip(self.layers, self.saved_sets, strict=True)
        return tuple(
            (frozenset(), *saved_sets).index(frozenset(own[layer])) if layer in own else self.all_saved
            for layer, saved_sets in every
        )

    def recomputed(self, options: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The layers that are recomputed at these options, and the activations of them that are saved all the same."""
        layers: list[str] = []
        save: list[str] = []
        for layer, saved_sets, option in zip(self.layers, self.saved_sets, options, strict=True):
            if option != self.all_saved:
                layers.append(layer)
                save += sorted(saved_sets[option - 1]) if option else ()
        return tuple(layers), tuple(save)


Works = dict[tuple[object, ...], tuple[Sequence[Op], Work]]
"""Works of several steps that have most operations in common, with the operations that each is of."""


def profile(
    step: Step | Graph,
    base: Mode = "auto",
    saved_sets: Mapping[str, Sequence[frozenset[str]]] | None = None,
    works: Works | None = None,
) -> Profile:
    """Divide ``step`` into regions and count what each costs at each option that a plan may give to layers.

    Args:
        base: how layers at the last option are treated.
        saved_sets: by layer, the activations that each option between the first and the last saves
            (:func:`~zerograph.planner.search.selective.stops`); of those that have fewer options than others the last
            is repeated.
        works: those of variants of the step, to which this one's are added.
    """
    works = {} if works is None else works
    graph = step if isinstance(step, Graph) else Graph(step)
    listed = {layer: list(own) for layer, own in (saved_sets or {}).items()}
    between = max(map(len, listed.values()), default=0)
    sets = {layer: (*own, *(own[-1:] or [frozenset()]) * (between - len(own))) for layer, own in listed.items()}
    # One analysis of the step per option, for all layers at once: names of activations say their layer.
    names = [frozenset(name for own in sets.values() for name in own[k]) for k in range(between)]
    found = (saved(graph, "full"), *(saved(graph, "full", own) for own in names), saved(graph, base))
    spans = _spans(graph)
    region_of = [k for k, (begin, end) in enumerate(spans) for _ in range(begin, end)]
    crossing = _crossing(graph, region_of)
    regions = tuple(_region(graph, span, found, crossing, works) for span in spans)
    lives = _lives(graph, region_of, found, crossing)
    layers = tuple(dict.fromkeys(r.layer for r in regions if r.layer and r.phase == "forward"))
    options = tuple(sets.get(layer, (frozenset(),) * between) for layer in layers)
    return Profile(regions, lives, layers, options, graph.step.params, graph.step.training)


def _spans(graph: Graph) -> list[tuple[int, int]]:
    """First and one-past-last operation of every region."""
    spans = []
    for _, members in groupby(range(len(graph.ops)), key=lambda i: (i >= graph.backward, graph.layer[i])):
        inside = list(members)
        spans.append((inside[0], inside[-1] + 1))
    return spans


@dataclass(frozen=True, slots=True)
class _Crossing:
    """The facts that all regions share, of every option.

    Attributes:
        until: for each memory that is read in another region than the one that makes it, the last such region of its
            phase.
        gradients: full gradients by the parameter they belong to; they live until they are reduced.
        leaves: values that outlive the region that makes them, whatever is saved.
        fuses: of each operation whether it computes, and is no kernel of its own, nor takes one's results apart.
        operators: each as the profile of memory sees it.
    """

    until: dict[int, int]
    gradients: dict[int, str]
    leaves: Set[int]
    fuses: list[bool]
    operators: list[Operator]


def _crossing(graph: Graph, region_of: Sequence[int]) -> _Crossing:
    until: dict[int, int] = {}
    gradients: dict[int, str] = {}
    for i, reads in enumerate(graph.reads):
        reduces = graph.values[graph.writes[i]].kind == "gradient"
        for value in reads:
            owner = graph.owner[value]
            maker = graph.maker[owner]
            # Inputs are held anyway, gathered parameters by their bucket.
            if maker < 0 or graph.params[owner]:
                continue
            if reduces:
                gradients[owner] = graph.ops[i].params[0]
            elif region_of[i] != region_of[maker] and (maker < graph.backward) == (i < graph.backward):
                until[owner] = max(until.get(owner, 0), region_of[i])
    fuses = [_fuses(graph, i) for i in range(len(graph.ops))]
    leaves = {*until, *gradients, *graph.outputs}
    return _Crossing(until, gradients, leaves, fuses, [_operator(graph, i, fuses[i]) for i in range(len(graph.ops))])


def _lives(graph: Graph, region_of: Sequence[int], found: Sequence[Saved], crossing: _Crossing) -> tuple[Life, ...]:
    alike: dict[tuple[int, str, int | None, tuple[tuple[int, int, int], ...]], list[int]] = {}
    for i, value in enumerate(graph.writes):
        if not graph.size[value] or value in crossing.gradients or not _is_memory(graph, value):
            continue
        saved_values = tuple(
            (option, region_of[s.since[value]], region_of[s.until[value]])
            for option, s in enumerate(found)
            if value in s.until
        )
        returned = value in graph.outputs
        if saved_values or returned or value in crossing.until:
            read = None if returned else crossing.until.get(value, region_of[i])
            activation = graph.activation[i] if saved_values and graph.layer[i] else ""
            # Values with the same life are one: a layer saves hundreds, and the search moves each life about.
            alike.setdefault((region_of[i], activation, read, saved_values), []).append(i)
    lives = []
    for (start, activation, read, saved_values), members in alike.items():
        made = [graph.writes[i] for i in members]
        sizes = [graph.whole.get(value, graph.size[value]) for value in made]
        largest = graph.ops[members[sizes.index(max(sizes))]]
        saved = {option: until for option, _, until in saved_values}
        needed = {option: since for option, since, _ in saved_values}
        values = tuple((value, 0 if value in graph.whole else graph.size[value]) for value in made)
        size = sum(sizes), sum(graph.size[value] for value in made)
        lives.append(Life(largest.name, largest.source, activation, *size, values, start, read, saved, needed))
    return (*lives, *_gradients_of_outputs(graph, region_of))


def _gradients_of_outputs(graph: Graph, region_of: Sequence[int]) -> Iterator[Life]:
    """The gradients that the backward is given besides what the forward saved, until they are read last."""
    users = {r for reads in graph.reads[: graph.backward] for r in reads}
    ends: dict[int, int] = {}
    for i in range(graph.backward, len(graph.ops)):
        given = (graph.owner[r] for r in graph.reads[i])
        ends.update((r, region_of[i]) for r in given if graph.maker[r] < 0 and graph.size[r] and r not in users)
    for end in dict.fromkeys(ends.values()):
        values = tuple((value, graph.size[value]) for value, last in ends.items() if last == end)
        size = sum(size for _, size in values)
        yield Life("gradients of outputs", "", "", size, size, values, region_of[graph.backward], end, {}, {})


def _is_memory(graph: Graph, value: int) -> bool:
    """Whether ``value`` is neither a gathered parameter nor a reduced gradient, which a plan moves."""
    return not graph.params[value] and graph.values[value].kind != "gradient"


def _region(graph: Graph, span: tuple[int, int], found: Sequence[Saved], crossing: _Crossing, works: Works) -> Region:
    begin, end = span
    first = graph.ops[begin]
    layer = graph.layer[begin]
    ops = graph.ops[begin:end]
    source = next((op.source for op in ops if op.source), "")
    work = []
    for s in found:
        # Operations that run again make what they make for this region alone.
        stays = frozenset(v for v in graph.writes[begin:end] if v in crossing.leaves or v in s.until)
        work.append(_work(graph, _sequence(graph, begin, end, s), stays, crossing, works))
    module, tiles = layer or max(ops, key=lambda op: op.flops).module, max(op.token_tiles for op in ops)
    return Region(first.phase, layer, module, source, tuple(work), tiles)


def _sequence(graph: Graph, begin: int, end: int, saved_values: Saved) -> list[int]:
    """The operations that run in a region, each after what it needs again of the forward."""
    if begin < graph.backward:
        return list(range(begin, end))
    # Right before its first reader, where torch's partitioner puts it (`reordering_to_mimic_autograd_engine`).
    return [k for i in range(begin, end) for k in (*saved_values.repeats.get(i, ()), i)]


def _work(graph: Graph, sequence: Sequence[int], stays: frozenset[int], crossing: _Crossing, works: Works) -> Work:
    # Variants number values alike, and share the operations that they do not change. While the operations are kept, no
    # other has the identity of one.
    ops = [graph.ops[i] for i in sequence]
    key = (tuple(map(id, ops)), stays)
    if key not in works:
        works[key] = ops, _counted(graph, sequence, stays, crossing)
    return works[key][1]


def _counted(graph: Graph, sequence: Sequence[int], stays: Set[int], crossing: _Crossing) -> Work:
    # What fuses has no traffic of its own: together it reads what comes from outside or from kernels, and writes what
    # stays and what products read (graph.costs.moved_bytes).
    fused = {graph.writes[i] for i in sequence if crossing.fuses[i]}
    inputs = {graph.owner[r] for i in sequence if graph.writes[i] in fused for r in graph.reads[i]} - fused
    given = {graph.owner[r] for i in sequence if graph.ops[i].flops for r in graph.reads[i]}
    moved = sum(graph.size[v] for found in (inputs, fused & (stays | given)) for v in found)
    # What is saved part by part is copied to its place, and read of all parts.
    moved += sum(2 * graph.whole.get(v, 0) for v in stays)
    there = (inputs & graph.whole.keys()).difference(graph.writes[i] for i in sequence)
    moved += sum(graph.whole[v] - graph.size[v] for v in there)
    atoms = tuple(_atoms(graph, sequence, moved, crossing))
    memory = segment_profile([crossing.operators[i] for i in sequence], stays, [atom.end for atom in atoms[:-1]])
    return Work(atoms, memory)


def _operator(graph: Graph, i: int, fuses: bool) -> Operator:
    value, op = graph.writes[i], graph.ops[i]
    size = graph.size[value] if _is_memory(graph, value) else 0
    reads = () if graph.owner[value] != value else [graph.owner[r] for r in graph.reads[i] if not graph.params[r]]
    return Operator(value, reads, size, bool(size or op.moved) and not fuses, op.flops > 0)


def _fuses(graph: Graph, i: int) -> bool:
    value = graph.writes[i]
    if not graph.size[value] or not _is_memory(graph, value):
        return False
    tuples = (graph.maker[r] for r in graph.reads[i] if not graph.values[r].bytes and graph.maker[r] >= 0)
    return not any(graph.ops[k].moved for k in (i, *tuples))


def _atoms(graph: Graph, sequence: Sequence[int], outside: int, crossing: _Crossing) -> Iterator[Atom]:
    """Stretches that begin where parameters are first read; ``outside`` bytes are read and written by all together."""
    read: set[str] = set()
    names: dict[str, None] = {}
    gradients: list[tuple[str, int]] = []
    costs: list[Counted] = [Cost(moved=outside)]
    for at, i in enumerate(sequence):
        used = graph.params_read[i]
        if not read.issuperset(used):
            if read:
                yield Atom(tuple(names), Cost.of(*costs), tuple(gradients), at)
                names, gradients, costs = {}, [], []
            read.update(used)
        if used:
            names.update(dict.fromkeys(used))
        costs.append(graph.ops[i])
        value = graph.writes[i]
        if value in crossing.gradients:
            gradients.append((crossing.gradients[value], graph.size[value]))
    yield Atom(tuple(names), Cost.of(*costs), tuple(gradients), len(sequence))
