"""A training step of a GPT made from its sizes alone: what an estimate plans when there is no model to trace.

Every layer has attention of four matrices and an MLP of four times the width; the head is tied to the embedding. The
backward reads the activations that Korthikanti et al. ("Reducing Activation Recomputation in Large Transformer Models",
2022) count: ``s*b*h*(34 + 5*a*s/h)`` bytes a layer in 16 bit, dropout masks and all.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerograph.core.layout import Layout, is_divided
from zerograph.core.step import ITEM_SIZE, Kind, Op, Param, Phase, Step, Value
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.training import Training

_FP32 = 4
_SHAPES = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
"""Rows and columns of a layer's matrices, in hidden sizes."""


def gpt(size: ModelSize, training: Training, world_size: int, layers: int, *, sharded: bool) -> Step:
    """Forward and backward of one micro-batch of the first ``layers`` layers of a model of ``size``.

    Where the number of parameters was given, every matrix has as many more or fewer rows; what that leaves over is a
    vector beside the embedding.

    Args:
        sharded: whether parameters are sharded over the ranks; those of fewer rows than ranks never are.
    """
    return _Gpt(size, training, world_size, layers, sharded).step()


class _Gpt:
    def __init__(self, size: ModelSize, training: Training, world_size: int, layers: int, sharded: bool) -> None:
        self.size, self.training, self.layers = size, training, layers
        self.ranks, self.splits = world_size, sharded
        self.tokens, self.item = training.tokens, ITEM_SIZE[training.dtype]
        self.stream = self.tokens * size.hidden * self.item
        self.ops: list[Op] = []
        self.values: list[Value] = [Value("tokens", 8 * self.tokens, "input")]
        self.bytes: dict[str, int] = {"tokens": 8 * self.tokens}
        self.params: list[Param] = []
        self.phase: Phase = "forward"
        self.inputs: dict[str, str] = {}  # what enters each layer

    def step(self) -> Step:
        size, module = self.size, "embed"
        self._param("embed.weight", self._rows(size.vocab), size.hidden)
        rest = size.parameters - self._elements(size.layers)
        if rest > 0:
            self._param("embed.rest", rest)
        unsharded = [f"whole {param.name}" for param in self.params]
        x = self._op("embedding", module, ("tokens", *unsharded), self.stream)
        for i in range(self.layers):
            x = self._layer(f"layers.{i}", x)
        loss = self._loss(x)
        self.phase = "backward"
        gradient = self._loss_backward(loss, x)
        for i in reversed(range(self.layers)):
            gradient = self._layer_backward(f"layers.{i}", gradient)
        for name in ("embed.weight", *(["embed.rest"] if rest > 0 else [])):
            self._gradient(name, module, self._op(f"d_{name}", module, (gradient,), self._full_bytes(name)))
        return Step(tuple(self.ops), tuple(self.values), tuple(self.params), True, ("loss",))

    def _elements(self, layers: int) -> int:
        h = self.size.hidden
        matrices = sum(self._rows(rows * h) * columns * h for rows, columns in _SHAPES.values())
        return layers * matrices + self._rows(self.size.vocab) * h

    def _rows(self, rows: int) -> int:
        return max(1, rows * self.size.parameters // self.size.formula)

    def _param(self, name: str, *shape: int) -> None:
        dtypes = self.training.dtypes
        home = Layout.home(self.ranks, sharded=self.splits and is_divided(shape, self.ranks))
        param = Param(name, shape, *dtypes, trainable=True, home=home)
        self.params.append(param)
        self.values.append(Value(f"shard {name}", 0, "input"))
        self.bytes[f"shard {name}"] = 0
        self._op(
            f"whole {name}", name.rpartition(".")[0], (f"shard {name}",), param.gathered_bytes, "gathered", (name,)
        )

    def _full_bytes(self, name: str) -> int:
        """Bytes of the full gradient of a parameter."""
        return self.bytes[f"whole {name}"] * ITEM_SIZE[self.training.dtypes[2]] // ITEM_SIZE[self.training.dtypes[1]]

    def _op(
        self, name: str, module: str, reads: Sequence[str], size: int, kind: Kind = "temporary",
        params: tuple[str, ...] = (), *, flops: int = 0, cheap: bool = False, fused: bool = False,
    ) -> str:  # fmt: skip
        """One operation that makes one value of ``size`` bytes; what is ``cheap`` fuses into what is around it.

        Matrices that ``fused`` attention multiplies stay in the cache.
        """
        moves = not cheap and kind == "temporary"
        moved = size + sum(self.bytes[read] for read in reads) if moves else 0
        packed = moved - size if flops and not fused else 0
        self.values.append(Value(name, size, kind))
        self.bytes[name] = size
        activation = f"{module}:{name}" if self.phase == "forward" else ""
        layer = module if module.startswith("layers.") else ""
        self.ops.append(
            Op(name, name.partition(" ")[0], self.phase, tuple(reads), (name,), params, "", layer, flops, moved, cheap,
               activation=activation, packed=packed, attention=flops if fused else 0)
        )  # fmt: skip
        return name

    def _linear(self, layer: str, name: str, x: str) -> str:
        rows, columns = (self.size.hidden * extent for extent in _SHAPES[name])
        own_rows = self._rows(rows)
        self._param(f"{layer}.{name}", own_rows, columns)
        flops = 2 * self.tokens * own_rows * columns
        return self._op(
            f"{name} {layer}", layer, (x, f"whole {layer}.{name}"), self.tokens * rows * self.item, flops=flops
        )

    def _linear_backward(self, layer: str, name: str, gradient: str, x: str) -> str:
        """The gradient of the product's input; that of its weight comes first."""
        rows, columns = (self.size.hidden * extent for extent in _SHAPES[name])
        flops = 2 * self.tokens * self._rows(rows) * columns
        weight = f"{layer}.{name}"
        self._gradient(
            weight, layer, self._op(f"dw_{name} {layer}", layer, (gradient, x), self._full_bytes(weight), flops=flops)
        )
        reads, size = (gradient, f"whole {weight}"), self.tokens * columns * self.item
        return self._op(f"dx_{name} {layer}", layer, reads, size, flops=flops)

    def _gradient(self, weight: str, layer: str, full: str) -> None:
        self._op(f"grad {full}", layer, (full,), self._full_bytes(weight), "gradient", (weight,))

    def _cheap(self, name: str, layer: str, reads: Sequence[str], size: int) -> str:
        return self._op(f"{name} {layer}", layer, reads, size, cheap=True)

    def _layer(self, layer: str, x: str) -> str:
        stream, mask = self.stream, self.tokens * self.size.hidden
        qkv = self._linear(layer, "qkv", self._cheap("norm1", layer, (x,), stream))
        out = self._linear(layer, "out", self._attention(layer, qkv))
        middle = self._cheap("add1", layer, (x, out, self._cheap("mask1", layer, (), mask)), stream)
        up = self._linear(layer, "up", self._cheap("norm2", layer, (middle,), stream))
        down = self._linear(layer, "down", self._cheap("gelu", layer, (up,), 4 * stream))
        self.inputs[layer] = x
        return self._cheap("add2", layer, (middle, down, self._cheap("mask2", layer, (), mask)), stream)

    @property
    def _scores(self) -> int:
        """Attention scores of one layer, in elements."""
        return self.training.batch * self.size.heads * self.training.seq**2

    def _attention(self, layer: str, qkv: str) -> str:
        product = 2 * self.tokens * self.training.seq * self.size.hidden
        if self.training.attention == "fused":
            return self._op(f"attention {layer}", layer, (qkv,), self.stream, flops=2 * product, fused=True)
        scores = self._op(f"scores {layer}", layer, (qkv,), self._scores * self.item, flops=product)
        softmax = self._cheap("softmax", layer, (scores,), self._scores * self.item)
        mask = self._cheap("mask", layer, (), self._scores)
        dropped = self._cheap("dropped", layer, (softmax, mask), self._scores * self.item)
        return self._op(f"attention {layer}", layer, (dropped, qkv), self.stream, flops=product)

    def _attention_backward(self, layer: str, gradient: str) -> str:
        product, qkv = 2 * self.tokens * self.training.seq * self.size.hidden, f"qkv {layer}"
        if self.training.attention == "fused":
            reads = (gradient, qkv, f"attention {layer}")
            return self._op(f"d_attention {layer}", layer, reads, 3 * self.stream, flops=4 * product, fused=True)
        scores, dropped = self._scores * self.item, f"dropped {layer}"
        d_dropped = self._op(f"d_dropped {layer}", layer, (gradient, qkv), scores, flops=product)
        d_value = self._op(f"d_value {layer}", layer, (gradient, dropped), self.stream, flops=product)
        d_scores = self._cheap("d_scores", layer, (d_dropped, f"softmax {layer}", f"mask {layer}"), scores)
        return self._op(f"d_qkv {layer}", layer, (d_scores, d_value, qkv), 3 * self.stream, flops=2 * product)

    def _layer_backward(self, layer: str, gradient: str) -> str:
        stream, x = self.stream, self.inputs[layer]
        d_down = self._cheap("d_down", layer, (gradient, f"mask2 {layer}"), stream)
        d_gelu = self._linear_backward(layer, "down", d_down, f"gelu {layer}")
        d_up = self._cheap("d_gelu", layer, (d_gelu, f"up {layer}"), 4 * stream)
        d_norm = self._linear_backward(layer, "up", d_up, f"norm2 {layer}")
        middle = self._cheap("d_middle", layer, (d_norm, f"add1 {layer}", gradient), stream)
        d_out = self._cheap("d_out", layer, (middle, f"mask1 {layer}"), stream)
        d_attention = self._linear_backward(layer, "out", d_out, f"attention {layer}")
        d_qkv = self._linear_backward(layer, "qkv", self._attention_backward(layer, d_attention), f"norm1 {layer}")
        return self._cheap("d_stream", layer, (d_qkv, x, middle), stream)

    def _loss(self, x: str) -> str:
        """Logits in the compute dtype and their float32 logarithms."""
        flops = 2 * self.tokens * self._rows(self.size.vocab) * self.size.hidden
        words = self.tokens * self.size.vocab
        norm = self._op("norm", "", (x,), self.stream, cheap=True)
        logits = self._op("logits", "", (norm, "whole embed.weight"), words * self.item, flops=flops)
        return self._op("loss", "", (self._op("logarithms", "", (logits,), words * _FP32),), 4)

    def _loss_backward(self, loss: str, x: str) -> str:
        flops = 2 * self.tokens * self._rows(self.size.vocab) * self.size.hidden
        words = self.tokens * self.size.vocab
        d_words = self._op("d_logarithms", "", (loss, "logarithms"), words * _FP32)
        d_logits = self._op("d_logits", "", (d_words,), words * self.item)
        full = self._op("dw_head", "", (d_logits, "norm"), self._full_bytes("embed.weight"), flops=flops)
        self._gradient("embed.weight", "", full)
        d_norm = self._op("d_head", "", (d_logits, "whole embed.weight"), self.stream, flops=flops)
        return self._op("d_norm", "", (d_norm, x), self.stream, cheap=True)
