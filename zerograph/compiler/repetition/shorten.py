"""A graph of Dynamo's with a few of its repeated layers: what AOTAutograd traces in place of all of them.

Dynamo has looked at every layer, so whether they are alike is read from its graph, node by node: the same operators
with the same arguments, on values of the same kind, reading from the layer before what that one reads from its own.
Then the joint graph of four layers, the first two and the last two, tells that of all
(:mod:`zerograph.compiler.repetition.repeat`). The first and the last one may differ from those between them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from zerograph.compiler.frame import Frame
from zerograph.compiler.repetition.layer_nodes import LayerNodes, LayerPlace, NotRepeated, Stack
from zerograph.compiler.repetition.repeat import Joint, parameters_in, repeat_layers
from zerograph.compiler.torch_private import as_dynamos, lazily_coded, separate_context, trace_and_split, trace_given
from zerograph.graph.layers import module_of
from zerograph.graph.nodes import CHECKPOINT, SPEC_AT, graph_named

log = logging.getLogger(__name__)

LEAST = 8
"""Layers that a stack has, at least, for tracing four of them to pay."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """A graph that has four layers of a stack.

    Attributes:
        gm: the graph.
        inputs: which inputs of the whole graph are this one's.
        stack: the layers, and which of them are left.
        input_of: the input of the whole graph for one of this graph, in the layer so many after the third.
    """

    gm: fx.GraphModule
    inputs: list[int]
    stack: Stack
    input_of: Callable[[int, int], int]

    def repeated(self, joint: Joint) -> Joint:
        """The joint graph of the whole graph, from this one's.

        Raises:
            NotRepeated: it does not repeat as the graph it comes from does.
        """
        if joint.outputs != len(self.gm.graph.output_node().args[0]):  # type: ignore[arg-type]
            raise NotRepeated("it returns more than its outputs")
        full = repeat_layers(joint, self.stack)
        # Inputs are repeated layer by layer; the whole graph must have them in that very order.
        given = len(self.inputs)  # behind them are the gradients of the outputs, which no layer has for itself
        order = [self.input_of(i, copy) for i, copy in full.inputs if i < given]
        if order != [*range(len(order))] or any(i < given for i, _ in full.inputs[len(order) :]):
            raise NotRepeated("its inputs are in another order")
        return full


def shorten(gm: fx.GraphModule) -> Shortened:
    """``gm``, as Dynamo records it, with four of the layers of its largest stack.

    Raises:
        NotRepeated: it has fewer than :data:`LEAST` layers, or they are not alike.
    """
    return _Shortening(gm).run()


class _Traced(Exception):
    """Raised with the joint graph that was wanted, and nothing behind it; None where there is no backward."""

    def __init__(self, joint: Joint | None) -> None:
        super().__init__()
        self.joint = joint


def joint_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> Joint | None:
    """The joint graph of ``gm``, traced as a graph of its own; None where it has no backward.

    AOTAutograd has no public way to end here: an exception of this function's own ends it.
    """

    def partition(
        joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int] = ()
    ) -> Any:
        raise _Traced(Joint(joint, num_fwd_outputs, list(static_lifetime_input_indices)))

    def compiles(*_: Any) -> Any:
        raise _Traced(None)

    try:
        with separate_context():
            trace_and_split(gm, inputs, forward=compiles, backward=compiles, inference=compiles, partition=partition)
    except _Traced as traced:
        return traced.joint
    raise AssertionError("AOTAutograd neither partitions nor compiles")


def few_layers(gm: fx.GraphModule, inputs: Sequence[Any]) -> Joint | None:
    """The joint graph of ``gm`` from that of four of its layers, where it trains and they are alike."""
    # Only joint graphs have layers repeated, and without gradients there is none.
    if not torch.is_grad_enabled():
        return None
    try:
        short = shorten(gm)
        joint = joint_of(short.gm, [inputs[i] for i in short.inputs])
        if joint is None:
            raise NotRepeated("it has no backward")
        found = short.repeated(joint)
    except NotRepeated as reason:
        log.debug("tracing all layers: %s", reason)
        return None
    log.debug("%s: traced %d of %d layers", short.stack.path, len(short.stack.traced), len(short.stack.layers))
    return found


@contextmanager
def tracing_few(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, AOTAutograd has the trace of ``gm`` from that of four of its layers, where they are alike."""
    joint = few_layers(gm, inputs) if frame.compilation.repeats_layers else None
    with nullcontext() if joint is None else _tracing_gives(joint.gm):
        yield


def _tracing_gives(joint: fx.GraphModule) -> AbstractContextManager[None]:
    """Inside, AOTAutograd takes ``joint`` for its trace of a graph with a backward and these inputs."""
    wanted = [_layout(node.meta["val"]) for node in joint.graph.find_nodes(op="placeholder")]
    return trace_given(joint, lambda inputs: [*map(_layout, inputs)] == wanted)


@dataclass(slots=True)
class _Shortening:
    gm: fx.GraphModule
    path: str = ""
    numbers: tuple[int, ...] = ()  # of the layers
    nodes: LayerNodes = field(default_factory=LayerNodes)

    def run(self) -> Shortened:
        nodes = list(self.gm.graph.nodes)
        self._find_stack(nodes)
        self._assign_layers(nodes)
        last = len(self.numbers) - 1
        layers: list[dict[LayerPlace, fx.Node]] = [{} for _ in self.numbers]
        for where, node in self.nodes.at.items():
            layers[where.layer][where._replace(layer=0)] = node
        # Each layer of the middle is compared with the one before; the first and the last may be of another kind.
        for layer in range(2, last):
            self._compare(layer, layers[layer], layers[layer - 1])
        # Two layers of the middle stay: how they read from each other tells how the layers left out hang together.
        kept = (0, 1, last - 1, last)
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        returned, outputs = self._outputs(nodes[-1].args[0])
        for node in nodes[:-1]:
            place = self.nodes.places.get(node)
            if place is None or place.layer in kept:
                new[node] = graph.node_copy(node, partial(self._new_source, new, place))
                # AOTAutograd reads a placeholder's source from an attribute, which `node_copy` leaves behind.
                new[node].__dict__.update({k: v for k, v in node.__dict__.items() if k == "_dynamo_source"})
        graph.output(tuple(new[v] if isinstance(v, fx.Node) else v for v in returned)).meta = dict(nodes[-1].meta)
        given = [n for n in nodes if n.op == "placeholder"]
        index = {node: i for i, node in enumerate(given)}
        inputs = [i for i, node in enumerate(given) if node in new]

        def input_of(place: int, copy: int) -> int:
            node = given[inputs[place]]
            # An input of no layer, or of a layer that stands in both graphs.
            if copy < 0:
                return index[node]
            there = self.nodes.places.get(node)
            if there is None or there.layer != last - 1:
                raise NotRepeated(f"{node.name} is repeated, but no input of a layer")
            return index[self.nodes.at[there._replace(layer=2 + copy)]]

        traced = tuple(self.numbers[i] for i in kept)
        made = as_dynamos(lazily_coded(self.gm, graph), self.gm)
        return Shortened(made, inputs, Stack(self.path, traced, self.numbers, outputs), input_of)

    def _outputs(self, given: Any) -> tuple[list[Any], list[tuple[int, int]]]:
        """Which outputs the shortened graph has, and :attr:`Stack.outputs`.

        Those of one layer must stand together, and layer after layer: so do their gradients among the joint graph's
        inputs, which are repeated so.
        """
        last = len(self.numbers) - 1
        layers = [self.nodes.places[v].layer if v in self.nodes.places else -1 for v in given]
        left = [v for v, layer in zip(given, layers, strict=True) if layer not in range(2, last - 1)]
        repeated = [i for i, v in enumerate(left) if v in self.nodes.places and self.nodes.places[v].layer == last - 1]
        begin, end = (repeated[0], repeated[-1] + 1) if repeated else (len(left), len(left))
        outputs = [(i, -1) for i in range(begin)]
        outputs += [(i, copy) for copy in range(last - 2) for i in range(begin, end)]
        outputs += [(i, -1) for i in range(end, len(left))]

        def output_of(i: int, copy: int) -> Any:
            return left[i] if copy < 0 else self.nodes.at.get(self.nodes.places[left[i]]._replace(layer=2 + copy))

        if repeated != [*range(begin, end)] or [output_of(*at) for at in outputs] != [*given]:
            raise NotRepeated("it does not return the same of every layer, layer after layer")
        return left, outputs

    def _new_source(self, new: dict[fx.Node, fx.Node], reader: LayerPlace | None, old: fx.Node) -> fx.Node:
        """The node that a node at ``reader`` reads in place of ``old``."""
        there, last = self.nodes.places.get(old), len(self.numbers) - 1
        if there is None or there.layer in (0, 1, last - 1, last):
            return new[old]
        if reader is None or (reader.layer, there.layer) != (last - 1, last - 2):
            raise NotRepeated(f"{old.name} of a layer in the middle is read outside of it")
        return new[self.nodes.at[there._replace(layer=1)]]

    def _find_stack(self, nodes: list[fx.Node]) -> None:
        found: Counter[str] = Counter()
        numbers: dict[str, dict[int, None]] = {}
        for node in nodes:
            for match in re.finditer(r"\.(\d+)(?=\.|$)", f".{self._module(node)}"):
                path = match.string[1 : match.start()]
                found[path] += 1
                numbers.setdefault(path, {})[int(match[1])] = None
        deep = [path for path in found if path and len(numbers[path]) >= LEAST]
        if not deep:
            raise NotRepeated("it has no deep stack of layers")
        # Of an encoder and a decoder one stack only is repeated: that with the most nodes saves the most.
        self.path = max(deep, key=found.__getitem__)
        self.numbers = tuple(numbers[self.path])

    def _module(self, node: fx.Node) -> str:
        """The module that ``node`` belongs to; for a checkpointed region and its call, that of what runs in it."""
        body = graph_named(self.gm, node.args[0] if node.target is CHECKPOINT else node)
        if body is None:
            return module_of(node) or ""
        return next((module_of(n) or "" for n in body.graph.nodes if n.op not in ("placeholder", "output")), "")

    def _assign_layers(self, nodes: list[fx.Node]) -> None:
        computing = [n for n in nodes if n.op not in ("placeholder", "output")]
        stem = re.compile(rf"{re.escape(self.path)}\.(\d+)(?:\.|$)")
        order = {number: i for i, number in enumerate(self.numbers)}
        found = [stem.match(self._module(node)) for node in computing]
        layers = [order[int(match[1])] if match is not None else None for match in found]
        self.nodes.add_stretches("forward", computing, layers, range(len(order)))
        self.nodes.add_inputs(nodes, lambda node: node.users, lambda _: "input")

    def _compare(self, layer: int, parts: dict[LayerPlace, fx.Node], before: dict[LayerPlace, fx.Node]) -> None:
        """Raises unless ``layer``, of these ``parts``, does what the one before it does."""
        if parts.keys() != before.keys():
            raise NotRepeated(f"layers {layer - 1} and {layer} have {len(before)} and {len(parts)} nodes")
        stack = parameters_in(self.path)
        names = (f"{stack}.{self.numbers[layer]}.", f"{stack}.{self.numbers[layer - 1]}.")

        def alike(a: fx.Node, b: fx.Node) -> bool:
            here, there = self.nodes.places.get(a), self.nodes.places.get(b)
            if here is None or there is None:
                return a is b
            if here.layer == layer - 1 and layer == 2:
                return there.layer == 0  # which may be another kind of layer
            # A layer may read itself and the layer before; reading from farther away could not be repeated by two
            # samples.
            return here == there._replace(layer=there.layer + 1) and here.layer in (layer, layer - 1)

        for place, node in parts.items():
            self._compare_nodes(self.gm, node, before[place], alike, names)

    def _compare_nodes(
        self,
        gm: fx.GraphModule,
        a: fx.Node,
        b: fx.Node,
        alike: Callable[[fx.Node, fx.Node], bool],
        names: tuple[str, str],
    ) -> None:
        ours, theirs = graph_named(gm, a), graph_named(gm, b)
        same = a.op == b.op and _facts(a) == _facts(b) and (ours is None) == (theirs is None)
        if same and a.op != "placeholder" and ours is None:
            same = a.target == b.target and _same((a.args, a.kwargs), (b.args, b.kwargs), alike, _spec(a, names))
        if not same:
            raise NotRepeated(f"{a.name} and {b.name} of two layers differ")
        if ours is not None and theirs is not None:
            self._compare_bodies(ours, theirs, names)

    def _compare_bodies(self, a: fx.GraphModule, b: fx.GraphModule, names: tuple[str, str]) -> None:
        """Raises unless two checkpointed regions do the same."""
        ours, theirs = list(a.graph.nodes), list(b.graph.nodes)
        if len(ours) != len(theirs):
            raise NotRepeated("two of its checkpointed regions differ")
        if not _same_policy(*(region.meta.get("_checkpoint_context_fn") for region in (a, b))):
            raise NotRepeated("the context_fn of two of its checkpointed regions differ")
        twin = dict(zip(ours, theirs, strict=True))
        for x, y in twin.items():
            if graph_named(a, x) is not None or graph_named(b, y) is not None:
                raise NotRepeated("a checkpointed region has one inside")
            self._compare_nodes(a, x, y, lambda p, q: twin[p] is q, names)


def _same_policy(a: Any, b: Any) -> bool:
    """Whether two ``context_fn`` of checkpointed regions are one, or were made alike of the same code."""
    if isinstance(a, partial) and isinstance(b, partial):
        same = _same_policy(a.func, b.func) and len(a.args) == len(b.args) and a.keywords.keys() == b.keywords.keys()
        return same and all(
            _same_policy(x, y)
            for x, y in zip((*a.args, *a.keywords.values()), (*b.args, *map(b.keywords.get, a.keywords)), strict=True)
        )
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        made = [(f.__code__, f.__closure__, f.__defaults__, f.__kwdefaults__, f.__dict__) for f in (a, b)]
        return a is b or (made[0] == made[1] and a.__globals__ is b.__globals__)
    return bool(a == b)


def _facts(node: fx.Node) -> list[object]:
    """The facts about ``node``'s value that AOTAutograd will see.

    Raises:
        NotRepeated: it has a size that is not known.
    """
    value = node.meta.get("example_value")
    parts = value if isinstance(value, list | tuple) else (value,)
    return [(_layout(v), getattr(v, "requires_grad", False)) for v in parts]


def _layout(value: Any) -> tuple[object, ...]:
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in sizes):
        raise NotRepeated("its sizes are dynamic")
    return isinstance(value, DTensor), value.dtype, value.device, value.dim(), *sizes


def _spec(node: fx.Node, names: tuple[str, str]) -> Callable[[str, str], bool]:
    """Whether two texts among ``node``'s arguments are equal, but for the layer's name in that of a parameter."""
    if node.target not in SPEC_AT:
        return str.__eq__
    return lambda a, b: a == b or (a.startswith(names[0]) and names[1] + a.removeprefix(names[0]) == b)


def _same(a: Any, b: Any, alike: Callable[[fx.Node, fx.Node], bool], texts: Callable[[str, str], bool]) -> bool:
    # 1, 1.0 and True are equal, and trace to different graphs.
    if type(a) is not type(b):
        return False
    match a:
        case fx.Node():
            return alike(a, b)
        case list() | tuple():
            return len(a) == len(b) and all(_same(x, y, alike, texts) for x, y in zip(a, b, strict=True))
        case dict():
            return a.keys() == b.keys() and all(_same(a[k], b[k], alike, texts) for k in a)
        case slice():
            return _same((a.start, a.stop, a.step), (b.start, b.stop, b.step), alike, texts)
        case str():
            return texts(a, b)
    return bool(a == b)
