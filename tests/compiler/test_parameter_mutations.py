"""Code that writes into a full parameter is refused, whichever operators it takes to get at its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from zerograph.compiler.parameter_mutations import refuse_mutations
from zerograph.core.errors import UnsupportedError
from zerograph.graph.ops import UNSHARD


def unbind(weight: Tensor) -> None:
    for row in weight.unbind(0):
        row.div_(row.norm())


def chunk(weight: Tensor) -> None:
    weight.chunk(2)[0].mul_(2)


def swap_axes(weight: Tensor) -> None:
    weight.swapaxes(0, 1)[1:].zero_()


def in_a_list(weight: Tensor) -> None:
    torch._foreach_mul_([weight], 2.0)


def of_data(weight: Tensor) -> None:
    weight.data.t().clamp_(-1, 1)


def activation(weight: Tensor) -> None:
    F.relu(weight, inplace=True)


def result(weight: Tensor) -> None:
    torch.mul(weight, 2, out=weight)


def copy(weight: Tensor) -> None:
    weight.t().reshape(-1).mul_(2)


def product(weight: Tensor) -> None:
    (weight * 2).unbind(0)[0].zero_()


def _refusals(forward: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """How the graph of ``forward`` is refused, which gets a full parameter and an input."""
    found: list[str] = []

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., list[Tensor]]:
        try:
            refuse_mutations(gm)
        except UnsupportedError as error:
            found.append(str(error))
        return lambda *_: [torch.zeros(4, 4)]

    torch.compiler.reset()  # it counts how often `model` is compiled
    param = nn.Parameter(torch.ones(4, 4))

    def model(x: Tensor) -> Tensor:
        return forward(UNSHARD(param, [4, 4], "layer.weight", "", torch.float32, torch.float32, False, None), x)

    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(4, 4))
    return found


def _editing(edit: Callable[[Tensor], None]) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            edit(weight)
        return x @ weight

    return forward


@pytest.mark.parametrize("edit", [unbind, chunk, swap_axes, in_a_list, of_data, activation, result])
def test_refuses_what_writes_into_a_parameter(edit: Callable[[Tensor], None]) -> None:
    (message,) = _refusals(_editing(edit))
    assert "changes parameter layer.weight in place" in message


@pytest.mark.parametrize("edit", [copy, product])
def test_accepts_what_writes_into_a_copy(edit: Callable[[Tensor], None]) -> None:
    assert _refusals(_editing(edit)) == []


def test_looks_into_what_is_checkpointed() -> None:
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        return checkpoint(_editing(unbind), weight, x, use_reentrant=False)  # type: ignore[no-any-return]

    (message,) = _refusals(forward)
    assert "changes parameter layer.weight in place (div_)" in message
