"""A dry run makes the programs that training runs, and leaves nothing to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import fake_world
from models import GPT, MLP, ids
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import ShardingError, UnsupportedError
from zerograph.core.program import Program
from zerograph.dryrun.compile_only import compile_only, simulated_rank
from zerograph.runtime.dtensors import own_slices

pytestmark = pytest.mark.costly


class Deep(nn.Module):
    """Deep enough that a few layers are traced in place of all, by Dynamo too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Remembering(nn.Module):
    """Keeps what it computed, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "gpt": (GPT, (ids(),)),
    "mlp": (MLP, (torch.ones(4, 16), torch.zeros(4, 4))),
    "deep": (Deep, (torch.ones(2, 8),)),
    "remembering": (Remembering, (torch.ones(3, 4),)),
}


def data(programs: dict[str, Program]) -> dict[str, Any]:
    """All that is in programs but names of nodes, and digests, which know some constants by identity."""
    return {
        kind: (
            program.instructions,
            program.inputs,
            program.outputs,
            [(s.operators, s.flops, s.moved, s.memory) for s in program.segments],
            [(r.bytes, r.storage, r.kind) for r in program.contents],
        )
        for kind, program in programs.items()
    }


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 1, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_programs_are_those_of_training(case: str, options: dict[str, Any]) -> None:
    make, inputs = CASES[case]
    dry = compile_only(lambda: (make(), inputs), world_size=2, **options)
    with fake_world(rank=0, world_size=2):
        model, backend = make(), zerograph.backend(compute="eager", **options)
        model.compile(backend=backend, dynamic=False)
        model(*inputs).sum().backward()
    assert data(dry.frame.programs) == data(backend.program)
    assert dry.frame.plan == backend.plan
    assert dry.frame.runtime is None
    assert [(p.graph, p.name, p.edits) for p in dry.frame.passes] == [
        (p.graph, p.name, p.edits) for p in backend.frames[-1].passes
    ]


def test_a_model_without_a_backward_is_refused() -> None:
    def frozen() -> tuple[nn.Module, Any]:
        return nn.Linear(4, 4).requires_grad_(False), (torch.ones(2, 4),)

    with pytest.raises(UnsupportedError, match="no backward"):
        compile_only(frozen, world_size=2)


def test_a_model_that_computes_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="nothing that could be compiled"):
        compile_only(lambda: (nn.Identity(), (3,)), world_size=2)


def test_a_lazy_model_is_refused_before_its_first_call() -> None:
    with pytest.raises(ShardingError, match=r"LazyLinear at the root has no shapes[^$]*hint: call the model once"):
        compile_only(lambda: (nn.LazyLinear(3), (torch.ones(2, 6),)), world_size=2)

    def called() -> tuple[nn.Module, Any]:
        model = nn.LazyLinear(3)
        model(torch.ones(1, 6))
        return model, (torch.ones(2, 6),)

    assert compile_only(called, world_size=2).frame.programs


@pytest.mark.parametrize("batch", [2, 5])
def test_samples_are_counted_behind_a_number(batch: int) -> None:
    class Scaled(nn.Linear):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return (scale * super().forward(x)).square().mean()

    inputs = torch.tensor(0.5), torch.ones(2, 4)
    found = compile_only(lambda: (Scaled(4, 4), inputs), world_size=2, sizes={"batch": batch}, programs=False)
    assert (found.tokens, found.unit) == (batch, "samples")


@pytest.mark.parametrize(
    ("shape", "counted"), [((4, 3, 16, 16), (4, "samples")), ((4, 16, 8), (64, "tokens")), ((4, 8), (4, "samples"))]
)
def test_pixels_and_features_are_no_tokens(shape: tuple[int, ...], counted: tuple[int, str]) -> None:
    class Pooled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float().flatten(1)[:, :4]).square().mean()

    dtype = torch.uint8 if len(shape) == 4 else torch.float32
    found = compile_only(lambda: (Pooled(4, 4), (torch.ones(shape, dtype=dtype),)), world_size=2, programs=False)
    assert (found.tokens, found.unit) == counted


def test_inputs_may_be_lists_and_dicts_of_tensors() -> None:
    class Detector(nn.Linear):
        def forward(self, images: list[Tensor], targets: dict[str, Tensor]) -> Tensor:
            return sum((super(Detector, self).forward(x) - targets["y"]).square().mean() for x in images)

    given = [torch.ones(2, 4), torch.ones(2, 4)], {"y": torch.ones(2, 4)}
    found = compile_only(lambda: (Detector(4, 4), given), world_size=2, sizes={"batch": 3}, programs=False)
    assert found.tokens == 3


def test_a_process_that_trains_next_has_its_own_rows() -> None:
    for rank in (0, 1):
        with simulated_rank(rank, 2):
            model = nn.Linear(4, 4, device="meta")
            zerograph.shard(model, zerograph.backend(stage=3))
            assert own_slices(model.weight.detach())[0] == slice(2 * rank, 2 * rank + 2)
