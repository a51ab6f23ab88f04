"""Layers that nothing tells apart are found, and for a while a few of them stand for all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from dryrun.test_fold import DEPTH, Layer, Model, small
from torch import nn

from zerograph.graph.repeated_layers import LEAST, Stack, repeated_layers


def stack() -> Stack:
    found = repeated_layers(small())
    assert found is not None
    return found


def test_layers_that_differ_are_no_stack() -> None:
    every_second = [Layer(i, dropout=0.1 * (i % 2)) for i in range(DEPTH)]
    assert repeated_layers(Model([*every_second])) is None
    assert repeated_layers(Model([Layer(i, wide=2 + (i == 4)) for i in range(DEPTH)])) is None
    one = Layer(0)
    assert repeated_layers(Model([one] * DEPTH)) is None
    shared = [Layer(i) for i in range(DEPTH)]
    shared[3].up.weight = shared[5].up.weight
    assert repeated_layers(Model([*shared])) is None
    hooked = [Layer(i) for i in range(DEPTH)]
    hooked[2].register_forward_hook(lambda *_: None)
    assert repeated_layers(Model([*hooked])) is None
    assert repeated_layers(Model([Layer(i) for i in range(LEAST - 1)])) is None
    assert repeated_layers(Model([Layer(2 * i) for i in range(DEPTH)])) is None
    found = repeated_layers(small())
    assert found is not None and (found.path, len(found.layers)) == ("layers", DEPTH)
    assert found.numbers == (("", "number"),)


def layers(change: Callable[[Layer, int], object]) -> Model:
    made = [Layer(i) for i in range(DEPTH)]
    for i, layer in enumerate(made):
        change(layer, i)
    return Model([*made])


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        (lambda layer, i: setattr(layer, "also", i), True),
        (lambda layer, i: setattr(layer.up, "index", i), True),
        (lambda layer, i: setattr(layer, "sizes", [1, (2, {"a": 3.0})]), True),
        (lambda layer, i: setattr(layer, "window", [1, (2, {"a": i == 3})]), False),
        (lambda layer, i: setattr(layer, "scale", 0.5 * i), False),
        (lambda layer, i: setattr(layer, "first", i == 0), False),
        (lambda layer, i: setattr(layer, "down_from", DEPTH - i), False),
        (lambda layer, i: setattr(layer, "table", np.zeros(2)), False),
        (lambda layer, i: setattr(layer, "constant", torch.zeros(2)), False),
        (lambda layer, i: setattr(layer, "only here", 1) if i == 2 else None, False),
        (lambda layer, i: layer.register_buffer("mask", torch.zeros(2)), True),
        (lambda layer, i: layer.register_buffer("mask", torch.zeros(2 + (i == 1))), False),
        (lambda layer, i: layer.up.weight.requires_grad_(i != 4), False),
        (lambda layer, i: layer.double() if i == 4 else None, False),
        (lambda layer, i: setattr(layer, "norm", nn.RMSNorm(4)) if i == 4 else None, False),
    ],
)
def test_what_tells_layers_apart(change: Callable[[Layer, int], object], alike: bool) -> None:
    """A number that counts them does not; nor does what is equal. What cannot be compared is taken for different."""
    assert (repeated_layers(layers(change)) is not None) is alike


def test_the_longest_stack_is_taken() -> None:
    model = nn.Module()
    model.short = nn.Sequential(*(nn.Linear(2, 2) for _ in range(LEAST)))
    model.long = nn.ModuleList(nn.Linear(2, 2) for _ in range(LEAST + 1))
    found = repeated_layers(model)
    assert found is not None and found.path == "long"
    assert repeated_layers(nn.ModuleList(nn.Linear(2, 2) for _ in range(LEAST))) is None, "the model itself is no stack"
    assert repeated_layers(nn.Linear(2, 2)) is None


def test_both_ends_and_the_middle_are_traced() -> None:
    first, second = stack().probes()
    assert (first, second) == ((0, 1, DEPTH - 2, DEPTH - 1), (0, 1, DEPTH // 2 - 1, DEPTH - 2, DEPTH - 1))


def test_a_few_layers_stand_for_all_for_a_while() -> None:
    found = stack()
    with found.only((0, 5)):
        assert list(found.container.named_children()) == [("0", found.layers[0]), ("1", found.layers[5])]
        assert len(found.container) == 2  # type: ignore[arg-type]
        hidden = found.layers[5].number
        assert found.layers[2].number == 2
        kept = {"handed on": hidden}
        for use in (
            lambda: hidden + 1,
            lambda: hidden == 5,
            lambda: [1, 2][hidden],
            lambda: f"{hidden}",
            lambda: -hidden,
        ):
            with pytest.raises(RuntimeError, match="its layers compute with their number"):
                use()
    assert kept["handed on"] is hidden
    assert [layer.number for layer in found.layers] == list(range(DEPTH))
    assert tuple(found.container.children()) == found.layers


def test_layers_are_back_after_an_error() -> None:
    found = stack()
    with pytest.raises(ZeroDivisionError), found.only((0, 1)):
        raise ZeroDivisionError
    assert tuple(found.container.children()) == found.layers and found.layers[1].number == 1
