"""MLPs in one loop over their hidden dimension: trainings as close as sums allow to those of whole weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import Rank
from numerics.compare import assert_same, full, seeded
from numerics.test_tiles import RowsIn, Training, adamw, backward, made, trains
from ranks import run
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from zerograph.core.machine import machine_named
from zerograph.dryrun.forecast import forecast_file


class Gelu(nn.Module):
    """Two linear layers with biases; ranks and tiles divide the middle unevenly."""

    def __init__(self, hidden: int = 71, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, hidden, bias=bias), nn.Linear(hidden, 24, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SwiGlu(nn.Module):
    """A gated middle."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((24, 50), (24, 50), (50, 24)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Transposed(nn.Module):
    """GPT-2's: weights whose rows are inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = RowsIn(24, 29), RowsIn(29, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Infinite(nn.Module):
    """Its middle is infinite where the first layer gives zero, as of rows that pad a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 29), nn.Linear(29, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.rsqrt(self.up(x).square()).tanh())


class Mlps(nn.Module):
    """One of each kind, one of them frozen, one half frozen, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu, self.glu, self.transposed, self.infinite = Gelu(), SwiGlu(), Transposed(), Infinite()
        self.frozen, self.partly, self.twice = Gelu(40, bias=False).requires_grad_(False), Gelu(40), Gelu(30)
        self.partly.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.gelu.up.weight.dtype)
        for mlp in (
            self.gelu,
            self.glu,
            self.transposed,
            self.infinite,
            self.frozen,
            self.partly,
            self.twice,
            self.twice,
        ):
            x = x + mlp(F.layer_norm(x, (24,)))
        return x


class Few(nn.Module):
    """Linear layers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu, self.transposed = Gelu(), Transposed()

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.gelu.up.weight.dtype)
        return self.transposed(torch.tanh(x + self.gelu(x)))


class Library(nn.Module):
    """The MLPs of two models of transformers, and a linear layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=52, num_attention_heads=2))
        self.gpt2 = GPT2MLP(50, GPT2Config(n_embd=24, n_head=2, resid_pdrop=0.0))
        self.between = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.between.weight.dtype)
        return x + self.gpt2(torch.tanh(self.between(x + self.llama(x))))


class Cast(Library):
    """The same, computed in 16 bits by autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


LOOPS = {
    Mlps: {"gelu", "glu", "transposed", "infinite", "frozen", "partly", "twice"},
    Few: {"gelu", "transposed"},
    Library: {"llama", "gpt2"},
    Cast: {"llama", "gpt2"},
}
WEIGHTS = {"*.weight": 3}
RANKS = partial(harness.run, by_rank=True)


def mlps(steps: int, rank: Rank) -> tuple[dict[str, Tensor], set[str]]:
    """What a training leaves, and the MLPs that run in a loop."""
    found = trains(steps, rank)
    return found, {bucket.loop for bucket in rank.backend.report().buckets} - {""}


def trained(
    world_size: int, net: type[nn.Module], steps: int, tile: Any = WEIGHTS, run: Any = RANKS, **options: Any
) -> list[dict[str, Tensor]]:
    """By rank."""
    rules = {"optimizer": adamw, "stage": 3, "bucket_size": 2000, "tile": tile, **options}
    found = run(world_size, partial(mlps, steps), made, net, **rules)
    assert all(loops == (LOOPS[net] if tile == WEIGHTS else set()) for _, loops in found)
    return [values for values, _ in found]


def assert_as_untiled(
    world_size: int, net: type[nn.Module], steps: int, close: float, **options: Any
) -> list[dict[str, Tensor]]:
    tiled, untiled = (trained(world_size, net, steps, tile, **options) for tile in (WEIGHTS, "off"))
    for ours, theirs in zip(tiled, untiled, strict=True):
        for name, value in theirs.items():
            near = {"losses": (1, 0), "before": (1, 1), "after": (10, 2)}.get(name, (1, 2))
            rtol, atol = (close * times for times in near)
            torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
    return tiled


@pytest.mark.parametrize(
    ("world_size", "net", "options"),
    [(2, Mlps, {}), (2, Few, {"run": harness.run_processes, "compute": "inductor"}), (2, Library, {}), (4, Few, {})],
    ids=["kinds", "inductor", "transformers", "ranks"],
)
def test_loops_train_as_untiled_layers(world_size: int, net: type[nn.Module], options: dict[str, Any]) -> None:
    assert_as_untiled(world_size, net, 20, 1e-6, **options)


@pytest.mark.parametrize(
    ("net", "options"), [(Library, {"dtype": torch.bfloat16}), (Cast, {})], ids=["dtype", "autocast"]
)
def test_computing_in_16_bits(net: type[nn.Module], options: dict[str, Any]) -> None:
    tiled = assert_as_untiled(2, net, 5, 1e-2, **options)
    torch.manual_seed(0)
    exact = net().double()
    x = torch.randn(2, 5, 24, generator=seeded(7)).double()
    with torch.no_grad():
        truth = Library.forward(exact, x)
    for ours in tiled:
        torch.testing.assert_close(ours["before"].double(), truth, rtol=1e-2, atol=1e-2)


def test_the_same_tiles_give_the_same_bits() -> None:
    """On threads as on processes."""
    for ours, theirs in zip(trained(2, Few, 4), trained(2, Few, 4, run=harness.run_processes), strict=True):
        assert_same(ours, theirs)


def _accumulated(tile: Any) -> list[Tensor]:
    training = Training(None, Few, stage=3, bucket_size=2000, tile=tile)
    with training.backend.no_sync():
        training.backward(1)
        training.backward(2)
    training.backward(3)
    found = [full(p.grad) for p in training.model.parameters() if p.grad is not None]
    with training.backend.no_sync():
        training.backward(1)
    training.optimizer.zero_grad()
    for rows in (3, 5):  # the second number makes a dynamic graph
        training.backward(rows, rows)
    return found + [full(p.grad) for p in training.model.parameters() if p.grad is not None]


def _accumulate() -> None:
    for found, expected in zip(_accumulated(WEIGHTS), _accumulated("off"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_held_back_and_batches_of_other_sizes() -> None:
    run(2, _accumulate)


def _logged(rank: Rank) -> str:
    backward(rank, 0)
    report = rank.backend.report()
    assert not any(bucket.loop for bucket in report.buckets)
    return str(report)


def test_where_columns_would_be_read_piece_by_piece_rows_are_tiles(tmp_path: Path) -> None:
    options = {"offload": "parameters", "tier": "nvme", "path": str(tmp_path), "nvme": "8MiB"}
    for log in RANKS(2, _logged, made, Few, optimizer=adamw, stage=3, tile=WEIGHTS, **options):
        assert "gelu: each weight has tiles of its rows by itself: tiles of columns are not read and written" in log


class Deep(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gelu(hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (24,)))
        return x.square().mean()


def deep(tokens: int, hidden: int) -> tuple[nn.Module, tuple[Tensor]]:
    return Deep(hidden), (torch.zeros(tokens, 24),)


@pytest.mark.parametrize("recompute", ["auto", "full", "none"])
def test_the_middle_is_never_untiled(recompute: str) -> None:
    tokens, hidden = 512, 1024
    peaks = []
    for tile in ("off", {"*.weight": 8}):
        found = harness.dry_run(2, deep, tokens, hidden, tile=tile, recompute=recompute)
        file = forecast_file("tests", found, machine_named("cpu"))
        peaks.append(file.forecast.peaks["device"].bytes)
    # In two layers a middle is saved, and others are made beside it: of each an eighth is there.
    untiled = 4 * tokens * hidden
    assert max(c.bytes for program in found.frame.programs.values() for c in program.contents) <= untiled // 8
    assert peaks[1] < peaks[0] - untiled
