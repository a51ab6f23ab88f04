"""Models of hundreds of layers: graphs are deeper than Python's stack, and work grows in proportion to depth."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph
from zerograph import passes, runtime
from zerograph.dryrun.compile_only import compile_only
from zerograph.planner.explain.check import check_plan

pytestmark = pytest.mark.costly

LAYERS = 160  # graphs of 1,100 operators a pass, where Python calls 1,000 deep
TILES: dict[str, Any] = {"tile": {"layers.*[05].up.weight": 2, "layers.*[05].down.weight": 2}, "token_tiles": 2}
OURS = tuple(str(Path(str(package.__file__)).parent) for package in (zerograph, passes, runtime))


class Layer(nn.Module):
    """A wide MLP beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) / 16


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _training(layers: int) -> Callable[[], tuple[nn.Module, tuple[Tensor]]]:
    return lambda: (Deep(layers).train(), (torch.zeros(2, 3, 8),))


def _train_deep() -> tuple[list[float], list[float]]:
    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, found = torch.linspace(-1, 1, 48).view(2, 3, 8), []
        for _ in range(2):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    plain, sharded = Deep(LAYERS), Deep(LAYERS)
    sharded.load_state_dict(plain.state_dict())
    backend = zerograph.backend(stage=3, compute="eager", **TILES)
    sharded.compile(backend=backend)
    found = losses(sharded), losses(plain)
    (frame,) = backend.frames
    assert frame.plan.token_regions == tuple(f"layers.{i}.up:addmm" for i in range(LAYERS))
    if dist.get_rank() == 0:
        assert not check_plan(frame.step, frame.plan)
    return found


@pytest.mark.slow
def test_160_layers_train_in_tiles_as_they_do_in_plain_torch() -> None:
    for losses, plain in ranks.run(2, _train_deep, timeout=600):
        torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)


def _calls(run: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """How often each of our functions is called, or goes on, while ``run`` runs."""
    found = Counter[tuple[str, str]]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.slow
def test_work_grows_in_proportion_to_depth() -> None:
    few, many = (_calls(lambda n=n: compile_only(_training(n), world_size=2, **TILES)) for n in (8, 32))
    assert many.total() < 4.4 * few.total()
    assert not [name for name, count in many.items() if count > 500 and count > 7 * few[name]]
