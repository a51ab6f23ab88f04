"""One training step as data: what the planner reads. No torch in here.

A :class:`Step` lists operations in execution order with the values they read and write. Sizes are bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from zerograph.core.layout import Collective, Layout, largest, transition

Kind = Literal["param", "gathered", "activation", "gradient", "state", "temporary", "input"]
KIND_NAMES: Mapping[Kind, str] = {
    "param": "parameters",
    "state": "optimizer states",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "activation": "activations",
    "input": "inputs",
    "temporary": "temporaries",
}
"""As people call the uses of memory. In the order in which pictures stack them: what hardly changes in a step carries
what comes and goes."""
Phase = Literal["forward", "backward"]
"""The loss that a model computes is the end of its forward; one that the user computes of its outputs is no part of a
step. Updates are the optimizer's, which follows the backward."""

Dimension = Literal["batch", "seq"]
"""Sizes of a model's inputs that can be solved for: sequences, and tokens in each."""

ITEM_SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}
ITEM_SIZE |= {"int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}

WIRE_BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "sign": 1}
WIRE_BLOCK = 256
"""Elements that share a scale, a float32, in wires of less than 16 bits (``csrc/wire.h`` has the layout)."""
WIRE_MOST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
"""The largest number of a format, which the largest magnitude of a block becomes; "sign" has none."""


def wire_bytes(wire: str, elements: int) -> int:
    """Bytes of so many elements as ``wire`` sends them, one of :data:`WIRE_BITS`: all elements, then the scales."""
    bits = WIRE_BITS[wire]
    if bits == 16:
        return 2 * elements
    return -(-elements * bits // 32) * 4 + 4 * -(-elements // WIRE_BLOCK)


@dataclass(frozen=True, slots=True)
class Param:
    """One logical parameter, as the model sees it inward.

    Attributes:
        name: fully qualified name in the model (the first one, where weights are tied).
        shape: the full shape.
        dtype: dtype of the shard, the master copy.
        compute_dtype: dtype of the gathered parameter.
        reduce_dtype: dtype its gradient is summed over ranks in.
        trainable: whether a gradient reaches it in this step.
        home: its layout between steps: split by rows over ranks, or whole on each (scalars, what ranks cannot
            split, stage 0). One that is split along another dimension has rows of parts here.
        tied_to: other names that the model has for it: one parameter, gathered, reduced and updated once.
        gather_wire: format that its gathers send (:mod:`zerograph.core.wire`); None is the compute dtype.
        reduce_wire: format that reductions of its gradient send over a network; None is the dtype of the reduction.
        experts: ranks next to each other that have other experts in it each, and send each other tokens: every one of
            them has a parameter of its own here, whose gradient is the mean over all ranks all the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    trainable: bool
    home: Layout
    tied_to: tuple[str, ...] = ()
    gather_wire: str | None = None
    reduce_wire: str | None = None
    experts: int = 1

    @property
    def elements(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)

    @property
    def is_master(self) -> bool:
        """Whether it is float32 of which 16 bits compute: then a copy is gathered where it lives off the device."""
        return self.dtype == "float32" and self.compute_dtype in ("bfloat16", "float16")

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameter in the compute dtype."""
        return self.elements * ITEM_SIZE[self.compute_dtype]

    @property
    def sharded(self) -> bool:
        """Whether each rank has its own rows, and not the whole."""
        return self.home.part == "rows"

    @property
    def gather(self) -> Collective | None:
        """What makes the whole of what ranks have; None where each has it."""
        return transition(self.home.part, "whole")

    @property
    def reduction(self) -> Collective:
        """What sums its gradient over ranks."""
        found = transition("term", self.home.part)
        assert found is not None
        return found

    @property
    def chunk(self) -> int:
        """Rows of the largest shard."""
        return self.home.most(self.shape[0])

    @property
    def chunk_elements(self) -> int:
        """Elements of the largest shard; the padded length of every rank's part in a collective."""
        return self.chunk * prod(self.shape[1:]) if self.sharded else self.elements

    @property
    def padded_elements(self) -> int:
        """Elements of what a gather fills: every rank's rows, padded to the largest shard."""
        return self.chunk_elements * (self.home.ranks if self.sharded else 1)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a gather: its padded shard, in the format that this sends."""
        if self.gather_wire is not None:
            return wire_bytes(self.gather_wire, self.chunk_elements)
        return self.chunk_elements * ITEM_SIZE[self.compute_dtype]

    @property
    def term_bytes(self) -> int:
        """Bytes of what a rank sends to each that sums its gradient: a part of it, in the format that this sends."""
        if self.reduce_wire is not None:
            return wire_bytes(self.reduce_wire, self.summed_elements)
        return self.summed_elements * ITEM_SIZE[self.reduce_dtype]

    @property
    def summed_elements(self) -> int:
        """Elements of the gradient that one rank sums, at most: those of its shard, or of a replicated one its
        share."""
        return self.chunk_elements if self.sharded else largest(self.elements, self.home.ranks)

    def shard_rows(self, rank: int) -> slice:
        """The rows that ``rank``, one of all of the plan, holds; maybe none."""
        return self.home.rows(self.shape[0], rank // self.experts)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what ``rank`` holds."""
        if not self.sharded:
            return self.shape
        rows = self.shard_rows(rank)
        return (rows.stop - rows.start, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the step.

    Attributes:
        name: of the operation that makes it, or of the input.
        bytes: that it would take with memory of its own, on this rank.
        kind: what it is.
        alias_of: the value whose memory it looks at, which is no view itself; empty when the memory is its own.
        whole: the same of all of it, where it is made for some tokens at a time and a layer that saves it puts it
            together; 0 where ``bytes`` are of all.
    """

    name: str
    bytes: int
    kind: Kind
    alias_of: str = ""
    whole: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        name, target: of the node, and what it calls.
        reads, writes: values by name.
        params: the parameters that it reads directly, gathers (an ``unshard``), reduces the gradient of or updates.
        source: the user's ``file:line``; empty when unknown.
        module: fully qualified name of the module that it computes, or whose gradient (``blocks.3.mlp``); empty for the
            model's own operations, and where tracing left no word of it.
        flops: floating-point operations, of products, convolutions and attention only.
        attention: of these, those of a fused attention, which is no product to its kernels.
        moved: bytes that it reads and writes as a kernel of its own; 0 for what is fused into what is around it.
        packed: bytes of the matrices that it multiplies, which a CPU's libraries first copy into blocks.
        cheap: computing it again costs next to nothing (views, element-wise operations that fuse), so that the
            partitioner does that rather than save its result.
        again: the user's ``torch.utils.checkpoint`` has the backward compute it again.
        activation: lasting name of what a forward's operation makes (:func:`activation_names`); parts of a tuple have
            the tuple's.
        token_tiles: the plan has it run for some tokens at a time, in so many tiles.
    """

    name: str
    target: str
    phase: Phase
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    params: tuple[str, ...] = ()
    source: str = ""
    module: str = ""
    flops: int = 0
    moved: int = 0
    cheap: bool = False
    again: bool = False
    activation: str = ""
    token_tiles: int = 1
    packed: int = 0
    attention: int = 0


# Up to the first part that is a number: of experts in a layer (`blocks.3.experts.5`) the layer is what repeats.
_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def layer_of(module: str) -> str:
    """The repeated layer that ``module`` is or lies in: up to the outermost number (``blocks.3``), or empty."""
    found = _LAYER.match(module)
    return found[0] if found else ""


def layers_of(modules: Sequence[str]) -> list[str]:
    """The layer of each operation of one phase, in order; what stands between two layers and has none belongs to the
    one before."""
    found = [layer_of(module) for module in modules]
    inside = [i for i, layer in enumerate(found) if layer]
    for i in range(inside[0], inside[-1]) if inside else ():
        found[i] = found[i] or found[i - 1]
    return found


def activation_names(places: Iterable[tuple[str, str, str]]) -> list[str]:
    """A lasting name of what each operation of a forward makes, as plans have it: ``blocks.3.mlp:addmm``.

    The second result of the same operator in the same place is ``blocks.3.mlp:addmm#2``. Such a name is the same in
    every trace of the model, and in every layer that is alike but for the layer; names of a graph's nodes are not.
    Attention is called the same whichever kernel a device has for it.

    Args:
        places: module, layer (:func:`layers_of`) and operator (``aten.addmm.default``). A layer's call of a module
            elsewhere, such as one that all layers share, takes place in the layer.
    """
    seen: Counter[str] = Counter()
    names = []
    for module, layer, target in places:
        operator = target.removeprefix("aten.").removesuffix(".default")
        operator = _ATTENTION.sub("scaled_dot_product_attention", operator)
        name = f"{module if layer_of(module) == layer else layer}{_IN}{operator}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


_ATTENTION = re.compile(r"^_scaled_dot_product_\w+$")
_IN = ":"


def layer_of_activation(name: str) -> str:
    """The repeated layer that an activation belongs to; empty where it is in none, or no activation's name."""
    module, colon, _ = name.partition(_IN)
    return layer_of(module) if colon else ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table that is read by position, up to row ``last`` of ``rows``, by the user's ``file:line``."""

    last: int
    rows: int
    source: str


@dataclass(frozen=True, slots=True)
class TokenRegion:
    """The part of a layer that can run for some tokens at a time, if the layer is recomputed, or for some samples.

    Attributes:
        layer: that it is of.
        activation: lasting name of the widest that it makes, at which it begins.
        params: that it reads.
        values: that exist for the tokens of one tile only.
        moved: by operation, bytes that each further tile moves: weights that it reads again, sums that it adds to.
        sums: the operations that add to a sum.
        samples: of a region that runs for whole samples at a time, how many there are. It is then all of the layer that
            hangs together with what it begins at.
    """

    layer: str
    activation: str
    params: tuple[str, ...]
    values: tuple[str, ...]
    moved: tuple[tuple[str, int], ...]
    sums: tuple[str, ...] = ()
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Forward and, when training, backward of one frame, in execution order.

    Attributes:
        params: in order of first use in the forward.
        training: whether a backward follows.
        outputs: values that the forward returns to the user.
        lookups: tables that the model reads by position. Tracing asks nobody whether a row is there.
        untiled_logits: why logits exist for all tokens at once, whatever is planned; empty where nobody needs them.
        tilable: names of the parameters that can be used in tiles of their rows; None where no graph tells.
        loss_gradients: operations of the backward that a loss in tiles runs in the forward, by name.
        ends_at_break: whether the user's code goes on uncompiled, behind a graph break, with what the forward returns.
        token_regions: what of layers can run for some tokens at a time.
        whole_batches: layers that cannot run for some samples at a time where that was asked, each with the reason.
        derived: by class, what was computed of the step once and is kept with it; no part of what it is.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    params: tuple[Param, ...]
    training: bool
    outputs: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    untiled_logits: str = ""
    tilable: tuple[str, ...] | None = None
    loss_gradients: tuple[str, ...] = ()
    ends_at_break: bool = False
    token_regions: tuple[TokenRegion, ...] = ()
    whole_batches: tuple[tuple[str, str], ...] = ()
    derived: dict[type, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def movable(self, ranks: int) -> Step:
        """The same step with parameters that can leave the device: one rank's are unsharded, and are its shards."""
        if ranks > 1:
            return self
        homes = (Layout.home(1, sharded=bool(p.shape)) for p in self.params)
        return replace(self, params=tuple(replace(p, home=home) for p, home in zip(self.params, homes, strict=True)))

    def over(self, ranks: int) -> Step:
        """The same step with its parameters over so many ranks; as it is where these cannot divide its experts."""
        laid = all(param.home.ranks * param.experts == ranks for param in self.params)
        if laid or any(ranks % param.experts for param in self.params):
            return self
        return replace(self, params=tuple(replace(p, home=p.home.over(ranks // p.experts)) for p in self.params))
