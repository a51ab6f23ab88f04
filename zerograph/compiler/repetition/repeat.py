"""The joint graph of a deep model from that of the same model with a few of its layers.

A layer is a stretch of the forward and one of the backward. One layer of the middle is repeated: a copy reads from the
copies beside it what the traced layer reads from the layers beside it. How the copies hang together is read from *two*
traced layers of the middle, which must be the same but for the layers they touch. That the layers left out are like
those two is known from Dynamo's graph, which has all of them (:mod:`zerograph.compiler.repetition.shorten`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from zerograph.compiler.repetition.layer_nodes import LayerNodes, LayerPlace, NotRepeated, Stack
from zerograph.compiler.torch_private import fake_as, is_fake, lazily_coded, outside_fake_mode
from zerograph.graph.layers import module_of
from zerograph.graph.nodes import SPEC_AT, Activation, backward_nodes, is_view


class Joint(NamedTuple):
    """A joint graph.

    Attributes:
        gm: the graph.
        outputs: how many of its outputs are the forward's.
        static: indices of the inputs that stay where they are between calls.
        inputs: of a graph of all layers, for each input, the one of the traced graph that it is, and in which copy of a
            repeated layer; -1 where it is not repeated.
    """

    gm: fx.GraphModule
    outputs: int
    static: list[int]
    inputs: tuple[tuple[int, int], ...] = ()


def repeat_layers(joint: Joint, stack: Stack) -> Joint:
    """``joint``, of a model that has a few layers of ``stack``, with all of them instead.

    Raises:
        NotRepeated: its layers are no stretches of the graph, or the two in the middle differ.
    """
    with outside_fake_mode():  # the dry run's
        return _Repeating(joint, stack).run()


@dataclass(slots=True)
class _Repeating:
    joint: Joint
    stack: Stack
    nodes: LayerNodes = field(default_factory=LayerNodes)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of what is not repeated
    copies: dict[tuple[LayerPlace, int], fx.Node] = field(default_factory=dict)
    regions: tuple[int, int] = (0, 0)  # of torch.utils.checkpoint: the template's last one, and how many are a layer's
    elements: dict[int, torch.Tensor] = field(default_factory=dict)  # of fake tensors made here, what is in them, by id
    graph: fx.Graph = field(default_factory=fx.Graph)

    @property
    def template(self) -> int:
        """The traced layer that is repeated; the one before it and the next lie in the middle too, or are the last."""
        return len(self.stack.traced) - 2

    @property
    def count(self) -> int:
        """How many times the template stands in the result."""
        return len(self.stack.layers) - len(self.stack.traced) + 1

    def run(self) -> Joint:
        nodes = list(self.joint.gm.graph.nodes)
        self._assign_layers(nodes)
        # Numbers of checkpointed regions rise through the graph: the difference of two layers tells how many each has.
        last = [max((n.meta.get("ac_graph_id", 0) for n in self._nodes_of(i)), default=0) for i in (-1, 0)]
        self.regions = last[1], last[1] - last[0]
        static: list[int] = []
        wanted = {n for i, n in enumerate(n for n in nodes if n.op == "placeholder") if i in set(self.joint.static)}
        taken: list[tuple[fx.Node, int]] = []  # which input each of the result's is
        # The backward visits layers from the last to the first, so that copies of its stretch are made in that order.
        for stretch in _stretches(nodes, self.nodes.places, self.template):
            numbers = self._numbers(stretch)
            for number in numbers:
                for node in stretch:
                    if node.op == "output":
                        self._output(node, taken)
                        continue
                    if number is None:
                        self._keep(node)
                    else:
                        self._copy(node, number)
                    if node.op == "placeholder":
                        if node in wanted:
                            static.append(len(taken))
                        taken.append((node, -1 if number is None else number))
        gm = lazily_coded(self.joint.gm, self.graph)
        gm.graph.lint()
        index = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
        return Joint(gm, len(self.stack.outputs), static, tuple((index[node], number) for node, number in taken))

    def _nodes_of(self, shift: int) -> list[fx.Node]:
        """The nodes of the template, or of the layer so many later."""
        return [node for node, place in self.nodes.places.items() if place.layer == self.template + shift]

    def _numbers(self, stretch: list[fx.Node]) -> Iterable[int | None]:
        place = self.nodes.places.get(stretch[0])
        if place is None or place.layer != self.template:
            return (None,)
        return range(self.count) if place.part != "backward" else reversed(range(self.count))

    def _assign_layers(self, nodes: list[fx.Node]) -> None:
        behind = backward_nodes(self.joint.gm.graph)
        computing = [n for n in nodes if n.op not in ("placeholder", "output")]
        forward = [n for n in computing if n not in behind]
        backward = [n for n in computing if n in behind]
        order = range(len(self.stack.traced))
        self.nodes.add_stretches("forward", forward, [*map(self._label, forward)], order)
        self.nodes.add_stretches("backward", backward, [*map(self._label, backward)], order[::-1])
        self.nodes.add_inputs(
            nodes,
            lambda node: (user for user in node.users if user.op != "output"),
            lambda node: "tangent" if _is_tangent(node) else "input",
        )
        for name in ("input", "tangent", "forward", "backward"):
            # The template and its neighbour must match node by node; the first and the last layer are copied as they
            # are.
            sizes = [
                sum(p.part == name and p.layer == i for p in self.nodes.at) for i in (self.template - 1, self.template)
            ]
            if sizes[0] != sizes[1]:
                raise NotRepeated(f"two of its layers have {sizes[0]} and {sizes[1]} nodes in the {name}")

    def _label(self, node: fx.Node) -> int | None:
        """The place in the stack of the module that ``node`` belongs to."""
        found = re.match(rf"{re.escape(self.stack.path)}\.(\d+)(?:\.|$)", module_of(node) or "")
        return self.stack.traced.index(int(found[1])) if found else None

    def _keep(self, node: fx.Node) -> fx.Node:
        """A node that is not repeated."""
        place = self.nodes.places.get(node)
        layer = place.layer if place is not None else None

        def source(old: fx.Node) -> fx.Node:
            there = self.nodes.places.get(old)
            if there is None or there.layer != self.template:
                return self.new[old]
            if layer == self.template - 1:
                return self.copies[there, 0]
            if layer == self.template + 1:
                return self.copies[there, self.count - 1]
            raise NotRepeated(f"{node.name} outside of the layers reads {old.name} of one in their middle")

        # What reads the template now reads its first copy, or its last one.
        made = self.graph.node_copy(node, source)
        made.meta = dict(node.meta)
        # Regions behind the template make room for those of its copies: torch tells regions apart by number.
        if node.meta.get("ac_graph_id", -1) > self.regions[0]:
            made.meta["ac_graph_id"] += (self.count - 1) * self.regions[1]
        if layer is not None:
            number = self.stack.layers[layer] if layer < self.template else self.stack.layers[layer + self.count - 1]
            self._relabel(made, layer, number)
        self.new[node] = made
        return made

    def _copy(self, node: fx.Node, number: int) -> fx.Node:
        """A node of the template, in its copy of that number."""
        place = self.nodes.places[node]
        twin = self.nodes.at[place._replace(layer=place.layer - 1)]
        if (node.op, type(node.target)) != (twin.op, type(twin.target)) or (
            node.op != "placeholder" and node.target != twin.target
        ):
            raise NotRepeated(f"{node.name} and {twin.name} of two layers are different operators")
        # A policy of torch.utils.checkpoint may count the operators, or layers, that it is asked about.
        if node.meta.get("recompute") != twin.meta.get("recompute"):
            raise NotRepeated(f"{node.name} and {twin.name} of two layers are not recomputed alike")
        # The one argument in which layers may differ: their parameter's name. `_relabel` sets it.
        spec = SPEC_AT.get(node.target, -1)  # type: ignore[call-overload]
        args = tuple(
            a if i == spec else self._argument(a, b, node, number)
            for i, (a, b) in enumerate(zip(node.args, twin.args, strict=True))
        )
        kwargs = {k: self._argument(a, twin.kwargs.get(k), node, number) for k, a in node.kwargs.items()}
        # Named without its number: from a number on fx tries every name that earlier copies took (torch 2.11 and
        # older).
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=_stem(node.name))
        if node.op == "placeholder":
            made.target = made.name
        made.meta = dict(node.meta)
        made.meta["val"] = self._value(made, node, twin)
        if "ac_graph_id" in node.meta:
            made.meta["ac_graph_id"] = node.meta["ac_graph_id"] + number * self.regions[1]
        self._relabel(made, place.layer, self.stack.layers[self.template + number])
        self.copies[place, number] = made
        return made

    def _argument(self, a: Any, b: Any, node: fx.Node, number: int) -> Any:
        """``a`` of the template, where the layer before has ``b``, for a copy."""
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self._source(a, b, number)
        if type(a) is not type(b):
            raise NotRepeated(f"{node.name} has {a!r} where the layer before has {b!r}")
        if isinstance(a, (list, tuple)) and len(a) == len(b):
            return type(a)([self._argument(x, y, node, number) for x, y in zip(a, b, strict=True)])
        if a != b:
            raise NotRepeated(f"{node.name} has {a!r} where the layer before has {b!r}")
        return a

    def _source(self, a: fx.Node, b: fx.Node, number: int) -> fx.Node:
        found = self._beside(a, b, number)
        return self.new[found] if isinstance(found, fx.Node) else self.copies[found]

    def _beside(self, a: fx.Node, b: fx.Node, number: int) -> fx.Node | tuple[LayerPlace, int]:
        """The node or copy that stands for ``a``, which the template reads where the layer before reads ``b``."""
        here, there = self.nodes.places.get(a), self.nodes.places.get(b)
        # Both read the same node outside of layers.
        if a is b and here is None:
            return a
        shift = here.layer - self.template if here is not None else None
        if here is None or shift not in (-1, 0, 1) or (there is not None and there.layer != here.layer - 1):
            raise NotRepeated(f"two layers read {a.name} and {b.name}")
        if shift == -1:
            # The first copy reads the layer that stands before the template, the others read the copy before.
            return (here._replace(layer=self.template), number - 1) if number else a
        if there is None:
            raise NotRepeated(f"two layers read {a.name} and {b.name}")
        if shift == 0:
            if here != there._replace(layer=here.layer):
                raise NotRepeated(f"two layers read {a.name} and {b.name} of their own")
            return here, number
        # In the backward a layer reads from the next one; for the last copy that is the traced layer behind the
        # template.
        return (there, number + 1) if number < self.count - 1 else a

    def _output(self, node: fx.Node, taken: list[tuple[fx.Node, int]]) -> None:
        """Outputs of the forward; then the gradient of each input."""
        values: Any = node.args[0]
        inputs = [n for n in self.joint.gm.graph.find_nodes(op="placeholder", sort=True) if not _is_tangent(n)]
        given, grads = values[: self.joint.outputs], values[self.joint.outputs :]
        if len(grads) != len(inputs):
            raise NotRepeated("it returns more than its outputs and a gradient for each input")
        grad_of = dict(zip(inputs, grads, strict=True))
        results = [self._result(given[i], number) for i, number in self.stack.outputs]
        for source, number in taken:
            if source in grad_of:
                results.append(self._grad(grad_of, source, number))
        out = self.graph.output(tuple(results) if isinstance(values, tuple) else results)
        # Both are lists with an entry for each output of the graph that was traced.
        out.meta = {k: v for k, v in node.meta.items() if k not in ("desc", "output_stack_traces")}

    def _result(self, value: Any, number: int) -> Any:
        repeated = isinstance(value, fx.Node) and self._repeated(value)
        if repeated != (number >= 0):
            raise NotRepeated(f"it returns {value} of one of its layers")
        if repeated:
            return self.copies[self.nodes.places[value], number]
        return self.new[value] if isinstance(value, fx.Node) else value

    def _repeated(self, node: fx.Node) -> bool:
        place = self.nodes.places.get(node)
        return place is not None and place.layer == self.template

    def _grad(self, grad_of: dict[fx.Node, Any], source: fx.Node, number: int) -> Any:
        grad = grad_of[source]
        if number < 0:
            if isinstance(grad, fx.Node) and self._repeated(grad):
                raise NotRepeated(f"the gradient of {source.name} is {grad.name} of one layer")
            return self.new[grad] if isinstance(grad, fx.Node) else grad
        place = self.nodes.places[source]
        return self._argument(grad, grad_of[self.nodes.at[place._replace(layer=place.layer - 1)]], source, number)

    def _value(self, made: fx.Node, node: fx.Node, twin: fx.Node) -> Any:
        """A fake value like ``node``'s for its copy ``made``: passes look at which values share memory."""
        val, other = node.meta.get("val"), twin.meta.get("val")
        if [*map(_layout, _tensors(val))] != [*map(_layout, _tensors(other))]:
            raise NotRepeated(f"{node.name} has another shape than in the layer before")
        source = made.args[0] if made.args else None
        # Not a new value: elements of a tuple that share memory must go on sharing it.
        if node.target is operator.getitem and isinstance(source, fx.Node):
            return source.meta["val"][made.args[1]]
        base = source.meta["val"] if isinstance(source, fx.Node) and is_view(node) else None
        if isinstance(val, (list, tuple)):
            return type(val)([self._fake(v, base) for v in val])
        return self._fake(val, base)

    def _fake(self, val: Any, base: Any) -> Any:
        """A value like ``val``, in memory of its own or, for a view, in that of ``base``."""
        if not is_fake(val):
            return val
        shape, stride, offset = val.shape, val.stride(), val.storage_offset()
        # `as_strided` keeps the dtype: a view with another one (`view.dtype`) counts as memory of its own.
        viewed = base if isinstance(base, torch.Tensor) and base.dtype == val.dtype else None
        element = self.elements.get(id(viewed))
        if (viewed is not None and element is None) or not all(type(n) is int for n in (*shape, *stride, offset)):
            with val.fake_mode:
                if viewed is not None:
                    return torch.as_strided(viewed, shape, stride, offset)
                return torch.empty_strided(shape, stride, dtype=val.dtype, device=val.device)
        if element is not None:
            element = element.as_strided(shape, stride, offset)
        else:
            element = torch.empty_strided(shape, stride, dtype=val.dtype, device="meta")
        made = fake_as(val, element)
        self.elements[id(made)] = element
        return made

    def _relabel(self, node: fx.Node, layer: int, number: int) -> None:
        """Let ``node`` belong to layer ``number`` of the stack, instead of to the one traced in place ``layer``."""
        # Only whole parts of a path: layer 1 is no part of layer 11.
        path, traced = self.stack.path, self.stack.traced[layer]
        replace = _replacer(rf"(^|\.){re.escape(path)}\.{traced}(?=\.|$)", rf"\g<1>{path}.{number}")
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            modules = node.meta.get(key)
            if modules:
                node.meta[key] = {replace(k): (replace(name), cls) for k, (name, cls) in modules.items()}
        fact = node.meta.get("zg")
        if isinstance(fact, Activation):
            module, colon, rest = fact.name.partition(":")
            node.meta["zg"] = Activation(f"{replace(module)}{colon}{rest}")
        if node.op == "call_function" and node.target in SPEC_AT:
            stack = parameters_in(path)
            rename = _replacer(rf"^{re.escape(stack)}\.{traced}(?=\.)", f"{stack}.{number}")
            at = SPEC_AT[node.target]
            node.update_arg(at, rename(str(node.args[at])))


def parameters_in(path: str) -> str:
    """The prefix of the parameter names of the module ``path``: the path without the variable that it begins with."""
    return re.sub(r"^[LG]\['\w+'\]\.", "", path)


def _replacer(pattern: str, replacement: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(replacement, text, count=1) if isinstance(text, str) else text


def _stretches(nodes: list[fx.Node], places: dict[fx.Node, LayerPlace], template: int) -> list[list[fx.Node]]:
    """``nodes`` in order, cut where the template's parts begin and end.

    Raises:
        NotRepeated: other nodes stand in between.
    """
    found: list[list[fx.Node]] = []
    seen: set[str] = set()
    before: str | None = ""
    for node in nodes:
        place = places.get(node)
        part = place.part if place is not None and place.layer == template else None
        if part != before or not found:
            # Copies of a stretch follow one another, so that each part of the template must be one stretch.
            if part in seen:
                raise NotRepeated(f"the {part} of a layer is not in one piece")
            seen |= {part} if part is not None else set()
            found.append([])
        found[-1].append(node)
        before = part
    return found


def _is_tangent(node: fx.Node) -> bool:
    """Whether ``node`` is the gradient of an output; AOTAutograd names inputs by what they are."""
    return "tangent" in str(node.target)


def _stem(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _tensors(val: Any) -> Iterable[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (list, tuple)):
        for v in val:
            yield from _tensors(v)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.device
