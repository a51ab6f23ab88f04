"""MLPs in one loop over their hidden dimension: trainings as close as sums allow to those of whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics.compare import full
from numerics.test_tiles import RowsIn, Training
from ranks import run
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from zerograph.core.machine import machine_named
from zerograph.dryrun.compile_only import compile_only
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


def _train(net: type[nn.Module], steps: int, tile: Any, **options: Any) -> tuple[Training, Tensor]:
    """A training, and what it gives before."""
    training = Training(None, net, stage=3, bucket_size=2000, tile=tile, **options)
    before = training.evaluated()
    training.steps(steps)
    return training, before


def _as_whole(net: type[nn.Module], steps: int, options: dict[str, Any], close: float) -> None:
    (tiled, first), (whole, expected) = (_train(net, steps, tile, **options) for tile in (WEIGHTS, "off"))
    found = {bucket.loop for bucket in tiled.backend.report().buckets}
    assert found - {""} == LOOPS[net]
    torch.testing.assert_close(first, expected, rtol=close, atol=close)
    (losses, values, after), (truth, theirs, last) = tiled.result(), whole.result()
    assert losses == pytest.approx(truth, rel=close)
    for name, value in theirs.items():
        torch.testing.assert_close(
            values[name], value, rtol=close, atol=2 * close, msg=lambda m, name=name: f"{name}: {m}"
        )
    torch.testing.assert_close(after, last, rtol=10 * close, atol=2 * close)


@pytest.mark.parametrize(
    ("world_size", "compute", "net"),
    [(2, "eager", Mlps), (2, "inductor", Few), (2, "eager", Library), (4, "eager", Few)],
    ids=["kinds", "inductor", "transformers", "ranks"],
)
def test_loops_train_as_whole_layers(world_size: int, compute: str, net: type[nn.Module]) -> None:
    run(world_size, _as_whole, net, 20, {"compute": compute}, 1e-6)


def _in_16_bits(net: type[nn.Module], options: dict[str, Any]) -> None:
    _as_whole(net, 5, options, 1e-2)
    torch.manual_seed(0)
    exact = net().double()
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(7), dtype=torch.float32).double()
    with torch.no_grad():
        truth = (exact if net is Library else Library.forward.__get__(exact))(x)
    _, before = _train(net, 0, WEIGHTS, **options)
    torch.testing.assert_close(before.double(), truth, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("net", "options"), [(Library, {"dtype": torch.bfloat16}), (Cast, {})], ids=["dtype", "autocast"]
)
def test_computing_in_16_bits(net: type[nn.Module], options: dict[str, Any]) -> None:
    run(2, _in_16_bits, net, options)


def _again() -> None:
    first, second = (_train(Few, 4, WEIGHTS)[0].result() for _ in range(2))
    assert first[0] == second[0] and torch.equal(first[2], second[2])
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())


def test_the_same_tiles_give_the_same_bits() -> None:
    run(2, _again)


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


def _apart(folder: str) -> str:
    training = Training(None, Few, stage=3, tile=WEIGHTS, offload="parameters", tier="nvme", path=folder, nvme="8MiB")
    training.backward(0)
    report = training.backend.report()
    assert not any(bucket.loop for bucket in report.buckets)
    return str(report)


def test_where_columns_would_be_read_piece_by_piece_rows_are_tiles(tmp_path: Path) -> None:
    for told in run(2, _apart, str(tmp_path)):
        assert "gelu: each weight has tiles of its rows by itself: tiles of columns are not read and written" in told


@pytest.mark.parametrize("recompute", ["auto", "full", "none"])
def test_the_middle_is_never_whole(recompute: str) -> None:
    tokens, hidden = 512, 1024

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Gelu(hidden) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(F.layer_norm(x, (24,)))
            return x.square().mean()

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        return Deep(), (torch.zeros(tokens, 24),)

    peaks = []
    for tile in ("off", {"*.weight": 8}):
        found = compile_only(make, world_size=2, tile=tile, recompute=recompute)
        file = forecast_file("tests", found, machine_named("cpu"))
        peaks.append(file.forecast.peaks["device"].bytes)
    # In two layers a middle is saved, and others are made beside it: of each an eighth is there.
    whole = 4 * tokens * hidden
    assert max(c.bytes for program in found.frame.programs.values() for c in program.contents) <= whole // 8
    assert peaks[1] < peaks[0] - whole
