"""Training steps made by hand: stacks of layers, each two products with something cheap in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerograph.core.layout import Layout
from zerograph.core.plan import Plan
from zerograph.core.step import ITEM_SIZE, Op, Param, Step, Value, layer_of_activation
from zerograph.planner.profile.liveness import Mode
from zerograph.planner.profile.regions import Profile, profile


@dataclass(frozen=True)
class Layer:
    """One layer: bytes of its parameter (4 a row), of the stream through it, of what is inside, and work per product.

    ``padding`` cheap operations more than needed stand in each direction, as in real graphs.
    """

    rows: int = 1024
    stream: int = 4096
    inside: int = 16384
    flops: int = 10**6
    padding: int = 0


class _Builder:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.params: list[Param] = []

    def op(self, name: str, phase: str, module: str, reads: list[str], size: int, kind: str = "temporary",
           params: tuple[str, ...] = (), flops: int = 0, cheap: bool = True) -> str:  # fmt: skip
        moved = 0 if cheap or kind in ("gathered", "gradient") else 3 * size  # those two are moves, not kernels
        source = f"model.py:{len(module)}"
        self.values.append(Value(name, size, kind))  # type: ignore[arg-type]
        target = name.rstrip("0123456789")
        activation = f"{module}:{target}" if phase == "forward" else ""
        op = Op(name, target, phase, tuple(reads), (name,), params, source, module, flops, moved, cheap)  # type: ignore[arg-type]
        self.ops.append(replace(op, activation=activation))
        return name


ALONE = Layout("rows", 1)
"""The layout of traced parameters here; plans lay them over their ranks."""


def step_of(layers: list[Layer], training: bool = True) -> Step:
    """Forward and backward of a stack of ``layers`` named ``blocks.0``, ``blocks.1``, ..."""
    build = _Builder()
    build.values.append(Value("x", layers[0].stream, "input"))
    stream = "x"
    for i, layer in enumerate(layers):
        module = f"blocks.{i}"
        build.params.append(Param(f"{module}.weight", (layer.rows,), "float32", "float32", "float32", True, ALONE))
        build.values.append(Value(f"shard{i}", layer.rows, "input"))
        params = (f"{module}.weight",)
        full = build.op(f"full{i}", "forward", module, [f"shard{i}"], 4 * layer.rows, "gathered", params, cheap=False)
        up = build.op(
            f"up{i}", "forward", module, [stream, full], layer.inside, "temporary", params, layer.flops, False
        )
        act = build.op(f"act{i}", "forward", module, [up], layer.inside)
        for k in range(layer.padding):
            act = build.op(f"act{i}_{k}", "forward", module, [act], layer.inside)
        down = build.op(
            f"down{i}", "forward", module, [act, full], layer.stream, "temporary", params, layer.flops, False
        )
        stream = build.op(f"out{i}", "forward", module, [stream, down], layer.stream)
    build.op("loss", "forward", "", [stream], 4)
    if training:
        _backward(build, layers)
    return Step(tuple(build.ops), tuple(build.values), tuple(build.params), training, ("loss",))


def _backward(build: _Builder, layers: list[Layer]) -> None:
    gradient = build.op("d_loss", "backward", "", ["loss"], layers[-1].stream)
    for i in reversed(range(len(layers))):
        layer, module = layers[i], f"blocks.{i}"
        entering = f"out{i - 1}" if i else "x"
        params = (f"{module}.weight",)
        act = f"act{i}" if not layer.padding else f"act{i}_{layer.padding - 1}"
        d_act = build.op(f"d_act{i}", "backward", module, [gradient, f"full{i}"], layer.inside, "temporary", params,
                         layer.flops, False)  # fmt: skip
        d_up = build.op(f"d_up{i}", "backward", module, [d_act, f"up{i}", act], layer.inside)
        for k in range(layer.padding):
            d_up = build.op(f"d_up{i}_{k}", "backward", module, [d_up], layer.inside)
        whole = build.op(f"d_full{i}", "backward", module, [d_up, entering, act], 4 * layer.rows, "temporary", (),
                         2 * layer.flops, False)  # fmt: skip
        build.op(f"grad{i}", "backward", "", [whole], layer.rows, "gradient", params, cheap=False)
        through = build.op(f"d_in{i}", "backward", module, [d_up, f"full{i}"], layer.stream, "temporary", params,
                           layer.flops, False)  # fmt: skip
        gradient = build.op(f"d_out{i}", "backward", module, [gradient, through], layer.stream)


def of_kinds(step: Step, kinds: Sequence[tuple[bool, bool]]) -> Step:
    """``step`` of :func:`step_of` with each parameter sharded and trained or not; one that is not has no gradient."""
    pairs = list(zip(step.params, kinds, strict=True))
    params = tuple(
        replace(param, home=Layout.home(1, sharded=sharded), trainable=trainable)
        for param, (sharded, trainable) in pairs
    )
    still = {
        name
        for i, param in enumerate(params)
        if not param.trainable
        for name in (f"d_full{i}", f"grad{i}", f"update {param.name}")
    }
    ops = tuple(op for op in step.ops if op.name not in still)
    return replace(step, params=params, ops=ops, values=tuple(v for v in step.values if v.name not in still))


def transformer(layers: int, hidden: int, tokens: int, compute: str = "bfloat16", *, small: bool = False) -> Step:
    """Blocks of a transformer's four products, of 1:3, 1:1, 1:4 and 4:1 times ``hidden``, without attention.

    Args:
        small: a small parameter at both ends of each layer, so that neighbours share a bucket.
    """
    build, item = _Builder(), ITEM_SIZE[compute]  # type: ignore[index]  # a dtype by name
    build.values.append(Value("x", tokens * hidden * item, "input"))
    shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    stream, inputs = "x", {}

    def scaled(key: str, module: str, stream: str) -> str:
        param = f"{module}.{key}"
        build.params.append(Param(param, (hidden,), "float32", compute, "float32", True, ALONE))
        build.values.append(Value(f"shard_{key}", 4, "input"))
        size = hidden * item
        build.op(f"full_{key}", "forward", module, [f"shard_{key}"], size, "gathered", (param,), cheap=False)
        reads, size = [stream, f"full_{key}"], tokens * size
        return build.op(f"do_{key}", "forward", module, reads, size, "temporary", (param,))

    def scaled_back(key: str, module: str, gradient: str) -> str:
        param = (f"{module}.{key}",)
        whole = build.op(f"w_{key}", "backward", module, [gradient], hidden * item)
        build.op(f"grad_{key}", "backward", "", [whole], 4, "gradient", param, cheap=False)
        reads, size = [gradient, f"full_{key}"], tokens * hidden * item
        return build.op(f"d_{key}", "backward", module, reads, size, "temporary", param)

    for i in range(layers):
        module, entering = f"blocks.{i}", stream
        if small:
            stream = scaled(f"first{i}", module, stream)
        for name, (rows, columns) in shapes.items():
            key, param = f"{name}{i}", f"{module}.{name}.weight"
            shape = (rows * hidden, columns * hidden)
            build.params.append(Param(param, shape, "float32", compute, "float32", True, ALONE))
            build.values.append(Value(f"shard_{key}", 4, "input"))
            work, inputs[key] = 2 * tokens * shape[0] * shape[1], stream
            size = shape[0] * shape[1] * item
            build.op(f"full_{key}", "forward", module, [f"shard_{key}"], size, "gathered", (param,), cheap=False)
            stream = build.op(f"do_{key}", "forward", module, [stream, f"full_{key}"], tokens * shape[0] * item,
                              "temporary", (param,), work, False)  # fmt: skip
        if small:
            stream = scaled(f"last{i}", module, stream)
        stream = build.op(f"end{i}", "forward", module, [entering, stream], tokens * hidden * item)
    build.op("loss", "forward", "", [stream], 4)
    gradient = build.op("d_loss", "backward", "", ["loss"], tokens * hidden * item)
    for i in reversed(range(layers)):
        module, leaving = f"blocks.{i}", gradient
        if small:
            gradient = scaled_back(f"last{i}", module, gradient)
        for name, (rows, columns) in reversed(shapes.items()):
            key, param = f"{name}{i}", (f"{module}.{name}.weight",)
            work, size = 2 * tokens * rows * columns * hidden**2, rows * columns * hidden**2 * item
            whole = build.op(
                f"w_{key}", "backward", module, [gradient, inputs[key]], size, "temporary", (), work, False
            )
            build.op(f"grad_{key}", "backward", "", [whole], 4, "gradient", param, cheap=False)
            gradient = build.op(f"d_{key}", "backward", module, [gradient, f"full_{key}"],
                                tokens * columns * hidden * item, "temporary", param, work, False)  # fmt: skip
        if small:
            gradient = scaled_back(f"first{i}", module, gradient)
        gradient = build.op(f"d_end{i}", "backward", module, [leaving, gradient], tokens * hidden * item)
    return Step(tuple(build.ops), tuple(build.values), tuple(build.params), True, ("loss",))


def profile_of(step: Step, plan: Plan) -> Profile:
    """``step`` with the levels that ``plan`` gives to its layers."""
    saved_sets: dict[str, list[str]] = {layer: [] for layer in plan.recompute}
    for name in plan.save:
        saved_sets[layer_of_activation(name)].append(name)
    base: Mode = "none" if plan.save_others else "auto"
    return profile(step, base, {layer: (frozenset(names),) for layer, names in saved_sets.items() if names})
