"""Parameters in tiles: outputs as of whole ones to the bit, and trainings as close as sums allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import Rank
from models import GPT
from numerics.compare import assert_same, full, full_values, mean_over_ranks, seeded
from ranks import run
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import CollectiveMismatch, ConfigError, RankError
from zerograph.core.machine import machine_named
from zerograph.core.plan import Placement
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file

SPLIT = replace(machine_named("cpu"), split=True)


class RowsIn(nn.Module):
    """A layer whose weight's rows are its inputs: transformers' ``Conv1D`` with a bias, ``x @ W`` without."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.weight.shape[1])


class Net(nn.Module):
    """Layers of both kinds, with a bias and without, of rows that ranks and tiles do not divide, twice used, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 70), nn.Linear(70, 24, bias=False)
        self.twice = nn.Linear(24, 24)
        self.wide, self.narrow = RowsIn(24, 29), RowsIn(29, 24, bias=False)
        self.fixed = RowsIn(24, 24).requires_grad_(False)
        self.frozen = nn.Linear(24, 26).requires_grad_(False)
        self.head = nn.Linear(26, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up.weight.dtype)
        h = x + self.down(torch.nn.functional.gelu(self.up(x)))
        h = self.twice(torch.tanh(self.twice(h)))
        h = h + self.narrow(torch.tanh(self.wide(torch.tanh(h))))
        h = self.fixed(torch.tanh(self.fixed(h)))
        return self.head(torch.tanh(self.frozen(h)))


class Tables(nn.Module):
    """Tables that are looked up: one is in products of both kinds too, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.marks = nn.Embedding(31, 24, padding_idx=3), nn.Embedding(27, 24).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        ids = x[..., 0].mul(9).long()
        h = x.to(self.words.weight.dtype) + self.words(ids.remainder(31)) + self.marks(ids.remainder(27))
        return h + torch.tanh(h @ self.words.weight.T / 24) @ self.words.weight / 31


TILABLE = {Net: 8, Tables: 2}


def made(net: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor]]:
    return net().train(), (torch.zeros(2, 5, 24),)


def planned(
    path: Path,
    world_size: int,
    tiles: int,
    placement: Placement = Placement(),  # noqa: B008
    net: type[nn.Module] = Net,
    **options: Any,
) -> Path:
    """A plan file in which every parameter that can be is in so many tiles."""

    machine = SPLIT if "host" in placement.offload_tiers else machine_named("cpu")
    offloaded = (
        {"offload": "parameters", "tier": "nvme", "path": "/", "machine": machine} if placement.offload_tiers else {}
    )
    found = harness.dry_run(world_size, made, net, bucket_size=4, **offloaded, **options)
    file = forecast_file("tests", found, machine)
    buckets = []
    for bucket in file.plan.buckets:
        (param,) = bucket.params
        trains = param.trainable or placement.parameters != "device"
        tiled = tiles if param.name in found.frame.step.tilable else 1
        own = placement if trains else Placement()
        buckets.append(replace(bucket, tiles=min(tiled, param.chunk), placement=own))
    assert sum(bucket.tiles > 1 for bucket in buckets) == TILABLE[net] * (tiles > 1)
    path.write_text(replace(file, plan=replace(file.plan, buckets=tuple(buckets))).to_json())
    return path


class Training:
    """One that can be looked at in between."""

    def __init__(self, plan: Path | None, net: type[nn.Module] = Net, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = net()
        self.backend = zerograph.backend(**({"plan": plan} if plan else {}), **{"compute": "eager"} | options)
        self.compiled = torch.compile(self.model, backend=self.backend)
        self.optimizer = zerograph.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.losses: list[float] = []

    def backward(self, seed: int, rows: int = 2) -> None:
        """Of a batch of this rank's own."""
        generator = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
        loss = self.compiled(torch.randn(rows, 5, 24, generator=generator)).float().square().mean()
        loss.backward()
        self.losses.append(mean_over_ranks(loss).item())

    def steps(self, count: int) -> None:
        """Train on that many batches."""
        for seed in range(count):
            self.backward(seed)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluated(self) -> Tensor:
        """Outputs for one batch."""
        with torch.no_grad():
            return self.compiled(torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(7))).clone()

    def result(self) -> tuple[list[float], dict[str, Tensor], Tensor]:
        """Losses, parameters, and outputs of an evaluation."""
        return self.losses, full_values(self.model), self.evaluated()


def adamw(model: Any) -> torch.optim.Optimizer:
    return zerograph.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(rank: Rank, seed: int) -> float:
    """Loss of a batch of this rank's own, after its backward."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank.rank)
    loss = rank(torch.randn(2, 5, 24, generator=generator)).float().square().mean()
    loss.backward()
    return loss.item()


def evaluated(rank: Rank) -> Tensor:
    """Outputs for one batch."""
    with torch.no_grad():
        return rank(torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(7))).clone()


def update(rank: Rank) -> None:
    rank.optimizer.step()
    rank.optimizer.zero_grad()


def trains(steps: int, rank: Rank) -> dict[str, Tensor]:
    """Losses, outputs before and after, parameters and states."""
    before, losses = evaluated(rank), []
    for seed in range(steps):
        losses.append(backward(rank, seed))
        update(rank)
    return {"losses": torch.tensor(losses), "before": before, "after": evaluated(rank), **rank.local()}


def trained(plan: Path, world_size: int, net: type[nn.Module], script: Any, **options: Any) -> list[dict[str, Tensor]]:
    """What the script returns on each rank."""
    return harness.run(world_size, script, made, net, optimizer=adamw, by_rank=True, plan=plan, **options)


def assert_close(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            close = 1e-5 if name == "after" else 1e-6
            torch.testing.assert_close(
                ours[name], value, rtol=close, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


NETS = pytest.mark.parametrize("net", TILABLE, ids=lambda net: net.__name__)


@NETS
@pytest.mark.parametrize("world_size", [2, 4])
def test_tiles_train_as_untiled_parameters(world_size: int, net: type[nn.Module], tmp_path: Path) -> None:
    tiled, untiled = (planned(tmp_path / f"{tiles}.json", world_size, tiles, net=net) for tiles in (3, 1))
    script = partial(trains, 6)
    assert_close(*(trained(plan, world_size, net, script) for plan in (tiled, untiled)))


def _trained(plan: Path, count: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Tensor, Tensor]:
    training = Training(plan, **options)
    before = training.evaluated()
    training.steps(count)
    return *training.result(), before


def _tiled_and_untiled(tiled: Path, untiled: Path, net: type[nn.Module]) -> None:
    losses, values, after, before = _trained(tiled, 20, {"net": net, "compute": "inductor"})
    expected, truth, last, first = _trained(untiled, 20, {"net": net})
    torch.testing.assert_close(before, first, rtol=1e-6, atol=1e-6)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in truth.items():
        torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(after, last, rtol=1e-5, atol=1e-6)


@NETS
def test_tiles_train_as_untiled_parameters_from_end_to_end(net: type[nn.Module], tmp_path: Path) -> None:
    tiled, untiled = (planned(tmp_path / f"{tiles}.json", 2, tiles, net=net) for tiles in (3, 1))
    run(2, _tiled_and_untiled, tiled, untiled, net)


NVME, HOST = Placement("nvme", "nvme", "nvme"), Placement("host", "host", "host")


@pytest.mark.slow
@NETS
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_tiles_train_alike_wherever_they_live(net: type[nn.Module], world_size: int, tmp_path: Path) -> None:
    there: dict[str, Any] = {"path": str(tmp_path), "nvme": "8MiB"}
    placements = [("nvme", NVME, there), ("host", HOST, {}), ("behind", Placement("host", "nvme", "nvme"), there)]
    placements += [("here", Placement(), {})] if world_size > 1 else []  # a lone rank has nothing to gather in memory
    script, found = partial(trains, 4), []
    for name, placement, more in placements:
        plan = planned(tmp_path / f"{name}.json", world_size, 3, placement, net)
        found.append(trained(plan, world_size, net, script, **more))
        for ours, theirs in zip(found[0], found[-1], strict=True):
            assert_same(ours, theirs)
    untiled = planned(tmp_path / "whole.json", world_size, 1, NVME, net)
    assert_close(found[0], trained(untiled, world_size, net, script, **there))


def accumulates(rank: Rank) -> list[Tensor]:
    """Gradients of micro-batches, of which all but the last are held back; then of steps whose first are dropped."""
    found = list[Tensor]()
    for dropped in (None, "taken away", "zeroed"):
        if dropped == "zeroed":
            backward(rank, 4)
        with rank.backend.no_sync():
            backward(rank, 1)
            backward(rank, 2)
            if dropped:
                rank.optimizer.zero_grad(set_to_none=dropped == "taken away")
        backward(rank, 3)
        found += rank.gradients().values()
        update(rank)
    return found


@pytest.mark.parametrize("placement", [Placement(), NVME], ids=["here", "nvme"])
def test_gradients_that_no_sync_holds_back(placement: Placement, tmp_path: Path) -> None:
    _as_untiled(accumulates, placement, tmp_path)


def _as_untiled(train: Callable[[Rank], list[Tensor]], placement: Placement, tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "nvme": "8MiB"} if placement.offload_tiers else {}
    tiled, untiled = (
        trained(planned(tmp_path / f"{tiles}.json", 2, tiles, placement), 2, Net, train, **options) for tiles in (3, 1)
    )
    torch.testing.assert_close(tiled, untiled, rtol=1e-5, atol=1e-7)


def _goes_nowhere(rank: Rank) -> list[Tensor]:
    """Gradients that ``no_sync`` does not hold: of parameters that are not asked for, and of a frozen one."""
    bias, weight = rank.params["head.bias"], rank.params["up.weight"]
    with rank.backend.no_sync():
        rank(torch.ones(2, 5, 24)).square().mean().backward(inputs=[bias])
        assert all((p.grad is None) == (p is not bias) for p in rank.parameters())
        loss = rank(torch.ones(2, 5, 24)).square().mean()
        weight.requires_grad_(False)
        loss.backward()
        assert weight.grad is None
        weight.requires_grad_(True)
    backward(rank, 3)
    return list(rank.gradients().values())


@pytest.mark.parametrize("placement", [Placement(), NVME], ids=["here", "nvme"])
def test_gradients_that_no_sync_does_not_hold(placement: Placement, tmp_path: Path) -> None:
    _as_untiled(_goes_nowhere, placement, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [Placement(), NVME], ids=["here", "nvme"])
def test_updates_inside_of_backwards(placement: Placement, tmp_path: Path) -> None:
    plan, found = planned(tmp_path / "plan.json", 2, 3, placement), []
    options = {"path": str(tmp_path), "nvme": "8MiB"} if placement.offload_tiers else {}

    def optimizer(overlap: bool, model: Any) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        return zerograph.optim.AdamW(params, lr=1e-3, overlap=overlap, skip_nonfinite=False)

    for overlap in (False, True):
        make = partial(optimizer, overlap)
        found.append(harness.run(2, partial(trains, 3), made, Net, optimizer=make, by_rank=True, plan=plan, **options))
    for ours, theirs in zip(*found, strict=True):
        assert_same(ours, theirs)


def _sizes(tiled: Path, net: type[nn.Module]) -> None:
    ours, truth = Training(tiled, net), Training(None, net)
    truth.compiled = truth.model  # PyTorch's own
    for training in (ours, truth):
        for rows in (2, 3, 5, 1):  # the second number makes a dynamic graph
            training.backward(rows, rows)
        x = torch.randn(1, 24, generator=torch.Generator().manual_seed(3))
        training.compiled(x).sum().backward()  # one token
        training.compiled(x[:0]).sum().backward()  # none
    assert ours.losses == pytest.approx(truth.losses, rel=1e-6)
    for (name, p), q in zip(ours.model.named_parameters(), truth.model.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(
                full(p.grad), mean_over_ranks(q.grad), rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.slow
@NETS
def test_batches_of_other_sizes_of_one_token_and_of_none(net: type[nn.Module], tmp_path: Path) -> None:
    run(2, _sizes, planned(tmp_path / "plan.json", 2, 3, net=net), net)


@NETS
def test_computing_in_16_bits(net: type[nn.Module], tmp_path: Path) -> None:
    bf16 = {"dtype": torch.bfloat16}
    ours, truth = (
        trained(planned(tmp_path / f"{tiles}.json", 2, tiles, net=net, **bf16), 2, net, partial(trains, 5), **bf16)
        for tiles in (3, 1)
    )
    torch.testing.assert_close(ours, truth, rtol=1e-2, atol=1e-2)


def _asked(tiles: dict[str, int], rank: Rank) -> Tensor:
    losses = trains(3, rank)["losses"]
    if tiles:
        report = rank.backend.report()
        assert {b.params[0]: b.tiles for b in report.buckets if b.tiles > 1} == tiles
        assert report.peak_whole_buckets == 2  # a tile counts as a bucket, and prefetch is 1
        assert "up.weight" not in tiles or "in 5 tiles of 1" in str(report)
    return losses


@pytest.mark.parametrize(
    ("wanted", "tiles"),
    [
        (5, {f"{name}.weight": 5 for name in ("up", "down", "twice", "wide", "narrow", "fixed", "frozen")}),
        ({"up.*": 5, "wide.*": 3}, {"up.weight": 5, "wide.weight": 3}),
    ],
)
def test_a_backend_is_asked_for_tiles(wanted: Any, tiles: dict[str, int]) -> None:
    ours, truth = (
        harness.run(2, partial(_asked, there), made, Net, optimizer=adamw, by_rank=True, tile=tile, **ASKING)
        for tile, there in ((wanted, tiles), ("off", {}))
    )
    torch.testing.assert_close(ours, truth, rtol=1e-6, atol=0)


ASKING: dict[str, Any] = {"stage": 3, "bucket_size": 2000}


def _refuses() -> None:
    model = nn.Sequential(nn.LayerNorm((8, 4)), nn.Linear(4, 4))
    for wanted, text in (
        ({"0.*": 2}, r"tile= wants 0.weight \[8, 4\] in 2 tiles, and not only products and lookups use it"),
        ({"1.*": 3}, r"tile= wants 1.weight \[4, 4\] in 3 tiles, and each of 2 ranks has 2 rows of it"),
        ({"none.*": 2}, r"the pattern 'none.\*', and no parameter of the model is called so"),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=zerograph.backend(stage=3, compute="eager", tile=wanted))
        with pytest.raises(ConfigError, match=text):
            compiled(torch.zeros(2, 8, 4))


def test_what_cannot_be_in_tiles_is_named() -> None:
    run(2, _refuses)


def _looks_up(compute: str) -> list[str]:
    text = []
    for wrong in (8, -1):
        torch._dynamo.reset()
        table = nn.Embedding(8, 4)
        table.compile(backend=zerograph.backend(stage=3, compute=compute, tile={"weight": 2}))
        table(torch.arange(8))
        with pytest.raises((IndexError, RuntimeError, RankError)) as error:
            table(torch.full((8,), wrong))
        text.append(str(error.value))
    return text


@pytest.mark.parametrize("compute", ["eager", "inductor"])
def test_what_is_no_row_is_an_error_as_without_tiles(compute: str) -> None:
    for text in run(2, _looks_up, compute):
        assert all("index out of" in message for message in text)


def _differently() -> str:
    with pytest.raises((CollectiveMismatch, RankError)) as error:
        Training(None, **ASKING, tile=2 + dist.get_rank()).backward(0)
    return str(error.value)


def test_ranks_that_differ_in_their_tiles_hear_of_which(tmp_path: Path) -> None:
    assert any("up.weight rows 0 to" in text for text in run(2, _differently))


def gpt() -> tuple[nn.Module, tuple[Tensor]]:
    return GPT(loss=True, depth=2), (torch.zeros(2, 8, dtype=torch.int64),)


def _of_words(rank: Rank) -> tuple[list[float], bool]:
    """Losses, and whether anything is in tiles."""
    losses = []
    for step in range(3):
        loss = rank(torch.randint(0, 32, (2, 8), generator=seeded(step + rank.rank)))
        loss.backward()
        update(rank)
        losses.append(loss.item())
    return losses, any(b.tiles > 1 for b in rank.backend.report().buckets)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_that_repeat_and_are_recomputed(recompute: str) -> None:
    options: dict[str, Any] = {"optimizer": sgd, "by_rank": True, "stage": 3, "bucket_size": 3000}
    ours, truth = (harness.run(2, _of_words, gpt, recompute=recompute, tile=tile, **options) for tile in (3, "off"))
    for (losses, tiled), (expected, untiled) in zip(ours, truth, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert tiled and not untiled


def test_forecasts_count_one_tile_after_another() -> None:
    def make() -> tuple[nn.Module, tuple[Tensor]]:
        return nn.Linear(1024, 2048), (torch.zeros(2, 1024),)

    peaks = []
    for tile in (1, 8):
        found = compile_only(make, world_size=2, bucket_size=4, tile=tile)
        file = forecast_file("tests", found, machine_named("cpu"))
        assert not file.unexecuted
        peaks.append(file.forecast.peaks["device"].bytes)
    # Of 8 MiB that are gathered, and of as many that are reduced, an eighth is there, or two.
    assert peaks[1] < peaks[0] - 5 * 2**20


@pytest.mark.parametrize("options", [{"tile": 3}, {"loss_tiles": 4}], ids=["weights", "loss"])
def test_forecasts_know_what_the_forward_saves_by_the_names_of_the_backward(options: dict[str, int]) -> None:
    found = compile_only(gpt, world_size=2, bucket_size=4, **options)
    forward, backward = (found.frame.programs[kind] for kind in ("forward", "backward"))
    returned = {forward.contents[r].name for r in forward.outputs if r is not None}
    given = {backward.contents[r].name for r in range(backward.inputs)}
    own = {name for name in given if name.startswith("tangents")}
    assert given - own <= returned | {forward.contents[r].name for r in range(forward.inputs)}
