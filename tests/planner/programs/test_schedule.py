"""Schedules of plans, made before anything is partitioned or lowered, against forecasts of the programs that result.

Tests ``planner/profile/regions.py``, ``planner/programs/coarse.py``, ``planner/programs/pieces.py``,
``planner/programs/registers.py`` and ``planner/programs/bucket_work.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import harness
import pytest
import torch
from compiler.test_scale import GPT
from planner.programs.test_forecasts import Stack
from planner.steps import profile_of
from torch import Tensor, nn

import zerograph
from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.instructions import Move
from zerograph.core.machine import TIERS, Machine, machine_named
from zerograph.core.param_bytes import state_bytes
from zerograph.core.plan import Placement
from zerograph.core.timeline import Forecast
from zerograph.dryrun.compile_only import Compiled
from zerograph.dryrun.forecast import forecast_file
from zerograph.planner.explain.check_file import check_file
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import head_of, tiled
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.forecasts import forecast_plan, forecast_programs
from zerograph.planner.programs.schedule import Scheduler
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate

pytestmark = pytest.mark.costly

WORLD = 4


class Gated(nn.Module):
    """RMS norm and a gated product, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class GatedModel(nn.Module):
    def __init__(self, width: int = 256, layers: int = 5, vocab: int = 700) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.layers = nn.ModuleList(Gated(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Plain(nn.Module):
    """Convolutions, and no repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.second(self.first(images).relu()).relu().mean((2, 3)))


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT(), (torch.zeros(4, 128, dtype=torch.int64),)


def gated() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GatedModel(), (torch.zeros(4, 128, dtype=torch.int64),)


def stack() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Stack(), (torch.empty(2048, 64),)


def plain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Plain(), (torch.empty(8, 3, 32, 32),)


@cache  # tests look at what was compiled, and change none of it
def compiled(make: harness.Make, world_size: int = WORLD, **options: Any) -> Compiled:
    return harness.dry_run(world_size, make, **options)


def single(tmp_path: Path, make: harness.Make, names: Sequence[str], **options: Any) -> Path:
    """A plan that recomputes all layers but for what each has of these activations."""
    found = compiled(make, **options)
    step, plan = found.frame.step, found.frame.plan
    layers = profile_of(step, plan).layers
    save = tuple(f"{layer}{name}" for layer in layers for name in names)
    file = forecast_file("tests", found, machine_named("cpu"))
    path = tmp_path / "plan.json"
    path.write_text(replace(file, plan=replace(plan, recompute=layers, save=save)).to_json())
    return path


def forecasts(make: harness.Make, **options: Any) -> tuple[Forecast, Forecast, int]:
    """Of the programs and of the schedule; and the bytes that both hold from the start."""
    frame = compiled(make, **options).frame
    plan, machine = frame.plan, replace(machine_named("cpu"), device="cuda")
    true = forecast_programs([frame.programs["forward"], frame.programs["backward"]], plan, machine).forecast
    rates = Rates(machine, WORLD, plan.compute_dtype)
    scheduler = Scheduler(
        profile_of(frame.step, plan), [b.params for b in plan.buckets], [b.name for b in plan.buckets], rates
    )
    states = state_bytes([p for b in plan.buckets for p in b.params], moments=2)
    held = (Holding("states", "state", "device", sum(states), -1, -1),)
    ours, _ = simulate(coarse_programs(scheduler, plan), rates, held=held)
    return true, ours, sum(states)


SINGLE: list[tuple[harness.Make, tuple[str, ...], dict[str, Any], float]] = [
    (gpt, (".up:addmm",), {"bucket_size": "16MiB"}, 0.01),
    (gpt, (".qkv:addmm", ":scaled_dot_product_attention"), {"bucket_size": "16MiB"}, 0.01),
    (gated, (".gate:mm", ".up:mm"), {"bucket_size": "4MiB"}, 0.03),
]


@pytest.mark.parametrize(("make", "names", "options", "tolerance"), SINGLE)
def test_a_schedule_with_single_activations_agrees_with_the_programs(
    tmp_path: Path, make: harness.Make, names: tuple[str, ...], options: dict[str, Any], tolerance: float
) -> None:
    whole, _, held = forecasts(make, recompute="full", **options)
    true, ours, _ = forecasts(make, plan=single(tmp_path, make, names, **options))
    wanted, found = true.peaks["device"].bytes - held, ours.peaks["device"].bytes - held
    print(f"work {wanted / 1e6:.2f} MB, all recomputed {(whole.peaks['device'].bytes - held) / 1e6:.2f}")
    assert found == pytest.approx(wanted, rel=tolerance)
    assert true.seconds < whole.seconds
    assert true.peaks["device"].bytes > whole.peaks["device"].bytes


SETTINGS: list[tuple[str, harness.Make, dict[str, Any], float]] = [
    ("GPT", gpt, {"bucket_size": "16MiB"}, 0.01),
    ("GPT recomputed", gpt, {"bucket_size": "16MiB", "recompute": "full"}, 0.01),
    ("GPT half recomputed in bfloat16", gpt, {"bucket_size": "16MiB", "recompute": 0.5, "dtype": torch.bfloat16}, 0.01),
    ("GPT in small buckets", gpt, {"bucket_size": "2MiB", "prefetch": 2}, 0.1),
    ("gated", gated, {"bucket_size": "4MiB"}, 0.03),
    ("gated, stage 1", gated, {"bucket_size": "4MiB", "stage": 1}, 0.03),
    ("short layers", stack, {"bucket_size": "64KiB"}, 0.01),
    ("no layers", plain, {}, 0.1),
]


@pytest.mark.parametrize(("make", "options", "tolerance"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS])
def test_a_schedule_agrees_with_the_programs(make: harness.Make, options: dict[str, Any], tolerance: float) -> None:
    true, ours, held = forecasts(make, **options)
    wanted, found = true.peaks["device"].bytes - held, ours.peaks["device"].bytes - held
    print(
        f"work {wanted / 1e6:.2f} MB, scheduled {found / wanted - 1:+.1%}; time {ours.seconds / true.seconds - 1:+.1%}"
    )
    assert found == pytest.approx(wanted, rel=tolerance)
    assert ours.seconds == pytest.approx(true.seconds, rel=0.03)


DISK = machine_named("cpu")
SPLIT = replace(DISK, name="split", split=True)


def with_placements(path: Path, seed: int, found: Compiled, machine: Machine) -> Path:
    """The plan of what was compiled, with buckets that live anywhere between memory and NVMe."""
    draw = Random(seed)
    file = forecast_file("tests", found, machine)
    every = (Placement(*tiers) for tiers in product(TIERS if machine.split else ("device", "nvme"), repeat=3))
    ways = [placement for placement in every if placement.in_order]
    buckets = tuple(
        replace(bucket, placement=draw.choice(ways), ahead=draw.randint(0, file.plan.prefetch))
        for bucket in file.plan.buckets
    )
    path.write_text(replace(file, plan=replace(file.plan, buckets=buckets)).to_json())
    return path


@pytest.mark.parametrize(
    ("machine", "world_size", "options", "tolerance"),
    [
        (DISK, 1, {"bucket_size": "16MiB", "dtype": torch.float32, "prefetch": 2}, 0.03),
        (DISK, 4, {"bucket_size": "16MiB", "dtype": torch.bfloat16}, 0.03),
        (SPLIT, 1, {"bucket_size": "16MiB", "dtype": torch.bfloat16}, 0.03),
        (SPLIT, 4, {"bucket_size": "2MiB", "prefetch": 2}, 0.1),  # layers are cut: another activation crosses a cut
    ],
    ids=lambda value: value.title if isinstance(value, Machine) else str(value),
)
def test_a_schedule_over_several_tiers_agrees_with_the_programs(
    tmp_path: Path, machine: Machine, world_size: int, options: dict[str, Any], tolerance: float
) -> None:
    whole = compiled(gpt, world_size, offload="parameters", tier="nvme", path="/", machine=machine, **options)
    for seed in range(2):
        path = with_placements(tmp_path / f"{seed}.json", seed, whole, machine)
        more = {"dtype": options["dtype"]} if "dtype" in options else {}
        found = harness.dry_run(world_size, gpt, plan=path, path=str(tmp_path), **more)
        file, frame = forecast_file("tests", found, machine), found.frame
        plan, true = frame.plan, file.forecast
        assert {violation.check for violation in check_file(file)} <= {"budget"}
        assert PlanFile.from_json(file.to_json()) == file
        early = any("what the write of its gradient" in v.message for v in check_file(without_reads(file)))
        assert early == any(bucket.placement.spilled == "nvme" for bucket in plan.buckets)
        rates = Rates(machine, world_size, plan.compute_dtype)
        scheduler = Scheduler(
            profile_of(frame.step, plan), [b.params for b in plan.buckets], [b.name for b in plan.buckets], rates
        )
        ours, _ = forecast_plan(scheduler, plan)
        assert len({bucket.placement for bucket in plan.buckets}) > 1
        assert ours.seconds == pytest.approx(true.seconds, rel=0.05)
        assert ours.peaks["device"].bytes == pytest.approx(true.peaks["device"].bytes, rel=tolerance)
        if machine.split:
            assert ours.peaks["host"].bytes == pytest.approx(true.peaks["host"].bytes, rel=tolerance)
        assert ours.peaks["nvme"].bytes == true.peaks["nvme"].bytes
        for operation in ("read", "write", "fetch", "spill"):
            assert moved(ours, operation) == pytest.approx(moved(true, operation), rel=0.03), operation


def without_reads(file: PlanFile) -> PlanFile:
    """``file`` with an update that reads states before anything wrote gradients."""
    *before, update = file.programs
    instructions = tuple(
        replace(i, reads=()) if isinstance(i, Move) and i.source == "nvme" else i for i in update.instructions
    )
    return replace(file, programs=(*before, replace(update, instructions=instructions)))


def moved(forecast: Forecast, operation: str) -> float:
    """Seconds of what is moved so, which are bytes at one rate."""
    return sum(span.end - span.start for span in forecast.spans if span.operation == operation)


def test_the_loss_of_a_traced_model_is_found_and_tiled() -> None:
    """What the partitioner would do with tiles cannot be asked; what it does with the rest is the same."""
    frame = compiled(gated).frame
    graph = Graph(frame.step)
    head = head_of(graph)
    assert head is not None
    assert head.bytes == 4 * 128 * 700 * 4
    assert head.weights.keys() == {op.name for op in frame.step.ops if op.flops and op.module in ("head", "")}
    small = {v.name: v.bytes for v in tiled(frame.step, head, 4).values}
    untouched = {v.name: v.bytes for v in frame.step.values if v.name not in head.large}
    assert untouched.items() <= small.items()
    assert {small[name] for name in head.large} == {head.bytes // 4}
    # All three products of the head run in the forward.
    ahead = {op.name for op in tiled(frame.step, head, 4).ops if op.phase == "forward"}
    assert head.weights.keys() <= ahead and not head.weights.keys() <= {o.name for o in graph.ops[: graph.backward]}
    returning = compiled(gpt, bucket_size="16MiB").frame.step
    assert head_of(Graph(returning)) is None


def test_sources_are_lines_of_the_model() -> None:
    """Also of parameters, which a property of ours reads."""
    step = compiled(gated).frame.step
    files = {op.source.rpartition(":")[0] for op in step.ops if op.source}
    assert __file__ in files
    assert not any(Path(file).is_relative_to(Path(zerograph.__file__).parent) for file in files)
    assert all(op.source.startswith(__file__) for op in step.ops if "unshard" in op.target and op.module)
