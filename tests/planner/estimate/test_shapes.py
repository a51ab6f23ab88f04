"""Sizes read from names and shapes: layers, hidden size and vocabulary of models of many kinds."""

from __future__ import annotations

import pytest

from zerograph.planner.estimate.shapes import Shapes, size_of_shapes


def llama(layers: int = 3, hidden: int = 8, rows: int = 100) -> Shapes:
    shapes: dict[str, tuple[int, ...]] = {"model.embed.weight": (rows, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.attn.{n}.weight": (hidden, hidden) for n in "qo"}
        shapes |= {f"{layer}.attn.{n}.weight": (hidden // 4, hidden) for n in "kv"}
        shapes |= {f"{layer}.mlp.{n}.weight": (3 * hidden, hidden) for n in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down.weight": (hidden, 3 * hidden), f"{layer}.norm.weight": (hidden,)}
    return shapes | {"model.norm.weight": (hidden,), "head.weight": (rows, hidden)}


def experts() -> Shapes:
    return {
        "embed.weight": (100, 8),
        **{f"layers.{i}.router.weight": (4, 8) for i in range(2)},
        **{f"layers.{i}.experts.up": (4, 24, 8) for i in range(2)},
        **{f"layers.{i}.experts.down": (4, 8, 24) for i in range(2)},
    }


def separate_experts() -> Shapes:
    return {
        "embed.weight": (100, 8),
        **{f"layers.{i}.experts.{e}.up.weight": (24, 8) for i in range(2) for e in range(4)},
        **{f"layers.{i}.experts.{e}.down.weight": (8, 24) for i in range(2) for e in range(4)},
    }


def encoder_and_decoder() -> Shapes:
    return {
        "shared.weight": (100, 8),
        **{f"encoder.block.{i}.mlp.weight": (8, 8) for i in range(3)},
        **{f"decoder.block.{i}.mlp.weight": (8, 8) for i in range(3)},
    }


def classifier() -> Shapes:
    head = {"head.0.weight": (8, 8), "head.2.weight": (5, 8)}
    return {"patches.weight": (8, 3, 4, 4), **{f"layer.{i}.mlp.up.weight": (32, 8) for i in range(6)}, **head}


def sequential() -> Shapes:
    blocks = {f"{i}.{n}.weight": s for i in (1, 2) for n, s in (("up", (32, 8)), ("down", (8, 32)))}
    return {"0.weight": (100, 8), **blocks, "3.weight": (100, 8)}


def perceptron() -> Shapes:
    return {"0.weight": (64, 8), "0.bias": (64,), "2.weight": (64, 64), "4.weight": (5, 64)}


@pytest.mark.parametrize(
    ("shapes", "layers", "hidden", "vocab"),
    [
        (llama(), 3, 8, 100),
        (experts(), 2, 8, 100),
        (separate_experts(), 2, 8, 100),
        (encoder_and_decoder(), 6, 8, 100),
        (classifier(), 6, 8, 8),
        (sequential(), 2, 8, 100),
        (perceptron(), 3, 64, 5),
        ({"weight": (4, 8), "bias": (4,)}, 1, 4, 4),
        ({"scale": ()}, 1, 1, 1),
    ],
)
def test_sizes(shapes: Shapes, layers: int, hidden: int, vocab: int) -> None:
    size = size_of_shapes(shapes)
    assert (size.layers, size.hidden, size.vocab) == (layers, hidden, vocab)


def test_parameters_are_counted_exactly() -> None:
    assert size_of_shapes(llama(2, 8, 100)).parameters == 2 * (2 * 64 + 2 * 16 + 3 * 192 + 8) + 8 + 2 * 800
    assert size_of_shapes(experts()).parameters == 2 * (32 + 2 * 4 * 192) + 800


def test_what_is_given_replaces_what_was_read() -> None:
    size = size_of_shapes(llama(), heads=2, layers=9, vocab=7)
    assert (size.heads, size.layers, size.hidden, size.vocab) == (2, 9, 8, 7)
