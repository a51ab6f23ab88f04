"""Training steps made by hand: stacks of layers, each two products with something cheap in between."""

from __future__ import annotations

from dataclasses import dataclass

from zerograph.ir import Op, Param, Step, Value


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
        self.ops.append(
            Op(name, name, phase, tuple(reads), (name,), params, source, module, flops, moved, cheap)  # type: ignore[arg-type]
        )
        return name


def step_of(layers: list[Layer], training: bool = True) -> Step:
    """Forward and backward of a stack of ``layers`` named ``blocks.0``, ``blocks.1``, ..."""
    build = _Builder()
    build.values.append(Value("x", layers[0].stream, "input"))
    stream = "x"
    for i, layer in enumerate(layers):
        module = f"blocks.{i}"
        build.params.append(Param(f"{module}.weight", (layer.rows,), "float32", "float32", "float32", True, True))
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
