"""Which weights have a middle between them that can run for some of the hidden dimension at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from zerograph.core.instructions import Gather
from zerograph.core.step import Mlp
from zerograph.dryrun.compile_only import compile_only

pytestmark = pytest.mark.costly


class Layer(nn.Module):
    """Linear layers with ``middle`` between them."""

    def __init__(self, middle: Callable[..., Tensor], gated: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.middle = nn.Linear(8, 20), nn.Linear(20, 8), middle
        self.gate = nn.Linear(8, 20, bias=False) if gated else None
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * self.scale
        return self.down(self.middle(h) if self.gate is None else self.middle(h, self.gate(x)))


def mlps(model: nn.Module, *sizes: int, **options: Any) -> tuple[Mlp, ...]:
    """Those of a training step of ``model``, whose loss is a sum."""

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        return model.train(), (torch.zeros(*sizes or (2, 3, 8)),)

    return compile_only(make, world_size=2, **options).frame.step.mlps


@pytest.mark.parametrize("middle", [F.gelu, torch.relu, F.silu, lambda h: h.square().clamp(max=3)])
def test_pointwise_middles(middle: Callable[[Tensor], Tensor]) -> None:
    (found,) = mlps(Layer(middle))
    assert (found.hidden, found.weights) == (20, (("down.weight", 1), ("up.weight", 0)))


def test_a_gate_is_one_of_the_weights() -> None:
    (found,) = mlps(Layer(lambda h, gate: F.silu(gate) * h, gated=True))
    assert [name for name, _ in found.weights] == ["down.weight", "gate.weight", "up.weight"]


@pytest.mark.parametrize(
    "middle",
    [
        lambda h: F.layer_norm(h, (20,)),
        lambda h: F.softmax(h, -1),
        lambda h: F.dropout(F.relu(h), 0.5),
        lambda h: h / h.sum(-1, keepdim=True),
        lambda h: torch.cat([h[..., 10:], h[..., :10]], -1),
        lambda h: h.flip(-1),
        lambda h: h.view(2, 3, 4, 5).transpose(2, 3).reshape(2, 3, 20),
    ],
    ids=["norm", "softmax", "dropout", "share", "rotated", "flipped", "mixed"],
)
def test_middles_that_are_not(middle: Callable[[Tensor], Tensor]) -> None:
    assert mlps(Layer(middle)) == ()


class Returned(Layer):
    """The middle is returned too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = torch.relu(self.up(x))
        return self.down(h), h


def test_a_middle_that_is_returned_is_whole_anyway() -> None:
    assert mlps(Returned(torch.relu)) == ()


class Attention(nn.Module):
    """Values and outputs of attention are linear layers with something between them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_is_none() -> None:
    assert mlps(Attention()) == ()


def test_a_module_with_two_has_two_names() -> None:
    found = mlps(
        nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 8), nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 8))
    )
    assert sorted((mlp.hidden, dict(mlp.weights)) for mlp in found) == [
        (20, {"0.weight": 0, "2.weight": 1}),
        (30, {"3.weight": 0, "5.weight": 1}),
    ]
    assert len({mlp.name for mlp in found}) == 2


def test_a_constant_that_layers_share_leads_from_none_to_another() -> None:
    """As the ones in silu's gradients may be one tensor for all layers, where Inductor folds no constants."""

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        layers = [Layer(lambda h: torch.relu(h) * torch.full((2, 3, 20), 0.5, device=h.device)) for _ in range(2)]
        return nn.Sequential(*layers).train(), (torch.zeros(2, 3, 8),)

    options = {"tile": {"*": 2}, "bucket_size": "1KiB", "repeat_layers": False}
    with inductor_config.patch(joint_graph_constant_folding=False):
        frame = compile_only(make, world_size=2, **options).frame
    gathers = [each for each in frame.programs["backward"].instructions if isinstance(each, Gather)]
    assert {each.tile for each in gathers} == {0, 1} and len(frame.step.mlps) == 2
