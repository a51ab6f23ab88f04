"""The forecast of real programs: memory balances, and is what the plan promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from graphs import fake_world
from torch import Tensor, nn

import zerograph
from zerograph.core.files.runfile import Measured, move_key
from zerograph.core.instructions import Move, Reduce
from zerograph.core.machine import machine_named
from zerograph.core.param_bytes import shard_bytes, sizes_of_states
from zerograph.core.plan import Placement
from zerograph.core.program import Program
from zerograph.planner.programs.forecasts import ProgramForecast, forecast_programs
from zerograph.planner.programs.updates import update_program
from zerograph.sim.check import check_programs
from zerograph.sim.rates import Rates

WIDTH, LAYERS, WORLD = 64, 6, 4
WEIGHT = 2 * (WIDTH * WIDTH + WIDTH) * 4  # bytes of one block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seen(
    stage: int, *, rows: int = 8, measured: Measured | None = None, machine: str = "cpu"
) -> tuple[ProgramForecast, zerograph.Backend]:
    backend = compiled(stage, rows)
    programs = [backend.program["forward"], backend.program["backward"]]
    return forecast_programs(programs, backend.plan, machine_named(machine), measured=measured), backend


@cache  # tests look at what was compiled, and change none of it
def compiled(stage: int, rows: int) -> zerograph.Backend:
    torch._dynamo.reset()
    with fake_world(rank=0, world_size=WORLD):
        model = Stack()
        backend = zerograph.backend(stage=stage, compute="eager", bucket_size=WEIGHT)
        model.compile(backend=backend)
        model(torch.randn(rows, WIDTH)).sum().backward()
    return backend


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_is_taken_and_given_back(stage: int) -> None:
    found, _ = seen(stage)
    device = found.forecast.memory["device"]
    states = [h for h in found.holdings if h.first == -1]
    assert {h.kind for h in states} == {"param", "state"}
    base = sum(h.bytes for h in states)
    assert base == 3 * -(-LAYERS * WEIGHT // WORLD)
    left = sum(h.bytes for h in found.holdings if h.last == -1 and h.first != -1)
    assert device[-1][1] == base + left
    assert min(level for _, level in device) >= base


def test_holdings_add_up_to_the_curve() -> None:
    found, _ = seen(3)
    spans = found.forecast.spans
    peak = found.forecast.peaks["device"]
    for time, level in found.forecast.memory["device"]:
        assert sum(h.bytes for h in found.holdings if h.held_at(time, spans)) == level
    assert max(level for _, level in found.forecast.memory["device"]) == peak.bytes


def test_the_gradient_of_an_output_is_held_until_it_is_read_last() -> None:
    rows = 512
    found, _ = seen(3, rows=rows)
    backward = [s for s in found.forecast.spans if s.phase == "backward"]
    given = [h for h in found.holdings if h.first == backward[0].task and h.kind == "gradient"]
    assert sum(h.bytes for h in given) == rows * WIDTH * 4
    computes = next(s.task for s in backward if s.stream == "compute")
    assert max(h.last for h in given) == computes, "the last layer's backward reads it, and no other"


def test_only_on_a_cpu_is_the_growth_of_the_process_reported() -> None:
    found, _ = seen(3)
    assert found.resident is not None
    assert found.resident.peak == found.forecast.peaks["device"].bytes
    assert found.resident.transport > WORLD * WEIGHT // WORLD  # a shard of each rank
    assert seen(3, machine="h100-80gb")[0].resident is None


# The backward of the first block reads one weight, for which the buffer of the others is too large.
@pytest.mark.parametrize(("machine", "few"), [("h100-80gb", 2 * WEIGHT), ("cpu", WEIGHT + 4 * WIDTH * WIDTH)])
def test_stage_3_holds_few_buckets_and_stage_1_all(machine: str, few: int) -> None:
    """Where nothing overlaps, the bucket that is gathered ahead takes the memory of the one before it."""
    unsharded = {}
    for stage in (1, 3):
        found, _ = seen(stage, machine=machine)
        gathered = [h for h in found.holdings if h.kind == "gathered" or h.name.startswith("free buffer")]
        unsharded[stage] = max(
            sum(h.bytes for h in gathered if h.held_at(span.start, found.forecast.spans))
            for span in found.forecast.spans
        )
    assert unsharded[1] == LAYERS * WEIGHT
    assert unsharded[3] == few


def bytes_moved(program: Program) -> dict[str, int]:
    """By operation, the bytes of all moves of it."""
    found = Counter[str]()
    for each in program.instructions:
        if isinstance(each, Move):
            found[each.operation] += each.bytes
    return dict(found)


def test_every_product_is_counted() -> None:
    found, _ = seen(3, rows=8)
    forward = LAYERS * 2 * 2 * 8 * WIDTH * WIDTH
    counted = sum(span.flops for span in found.forecast.spans)
    assert counted == pytest.approx(3 * forward, rel=0.1)  # the first layer needs no gradient of its input


def test_modules_and_lines_are_known() -> None:
    found, _ = seen(3)
    named = [s for s in found.forecast.spans if s.module == "blocks.3" and s.stream == "compute"]
    assert named and all("test_forecasts.py:" in s.source for s in named)


def test_measured_seconds_replace_rates() -> None:
    _, backend = seen(3)
    digests = {s.digest: 1.0 for p in backend.program.values() for s in p.segments}
    half = dict.fromkeys(range(len(backend.plan.buckets)), 0.5)
    found, _ = seen(3, measured=Measured(segments=digests, gathers=half, reduces=half))
    spans = [s for s in found.forecast.spans if s.name != "optimizer update"]
    assert all(s.end - s.start == pytest.approx(1.0 if s.stream == "compute" else 0.5) for s in spans)
    # A run has the seconds in which nothing computed, also where a network carries collectives.
    assert found.forecast.exposed_communication >= 0.5 * sum(s.stream == "gather" for s in spans)


def test_compute_waits_where_the_program_does() -> None:
    """A wait for a reduction holds up what follows it, so that full gradients do not pile up."""
    slow = Measured(reduces=dict.fromkeys(range(LAYERS), 1.0))
    found, _ = seen(3, measured=slow)
    full = [h for h in found.holdings if h.kind == "temporary" and h.bytes == WIDTH * WIDTH * 4]
    most = max(sum(h.held_at(s.start, found.forecast.spans) for h in full) for s in found.forecast.spans)
    assert 2 <= most <= 6  # of two layers, with one more on its way
    update = found.forecast.spans[-1]
    assert update.start >= LAYERS


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_nothing_is_wrong_with_the_programs(stage: int) -> None:
    _, backend = seen(stage)
    programs = [backend.program["forward"], backend.program["backward"]]
    params = [p for bucket in backend.plan.buckets for p in bucket.params]
    assert check_programs([*programs, update_program(backend.plan, sizes_of_states(params, 2))], backend.plan) == []
    again = [replace(p, instructions=[s for s in p.instructions if not isinstance(s, Reduce)]) for p in programs]
    assert any(
        "which is not there" in str(wrong) or "reduced 0 times" in str(wrong)
        for wrong in check_programs(again, backend.plan)
    )


def test_states_on_the_host_pass_through_the_device_to_be_updated_there() -> None:
    _, backend = seen(3)
    machine = replace(machine_named("cpu"), split=True)
    offloaded = tuple(replace(b, placement=Placement("device", "host", "host")) for b in backend.plan.buckets)
    plan = replace(backend.plan, buckets=offloaded, update="device")
    params = [p for bucket in plan.buckets for p in bucket.params]
    state_sizes, masters = sizes_of_states(params, 2), sum(shard_bytes(p) for p in params)
    update = update_program(plan, state_sizes, Rates(machine, WORLD, "float32"))
    moved = bytes_moved(update)
    states = sum(state_sizes.values()) + masters
    assert moved == {"fetch": states + masters, "spill": states}  # gradients come too, and do not go back
    programs = [backend.program["forward"], backend.program["backward"]]
    here, there = (forecast_programs(programs, replace(plan, update=where), machine) for where in ("device", "host"))
    updates = [span.stream for span in here.forecast.spans if span.operation == "update"]
    assert set(updates) == {"compute"} and len(updates) == len(plan.buckets)
    peaks = [(found.forecast.peaks["device"].bytes, found.forecast.peaks["host"].bytes) for found in (here, there)]
    assert peaks[0][0] >= peaks[1][0] and peaks[0][1] < peaks[1][1]  # new parameters are not staged on the host
    assert "cpu_update" in {span.stream for span in there.forecast.spans}


def test_states_on_nvme_are_read_updated_and_written_bucket_by_bucket() -> None:
    _, backend = seen(3)
    plan, machine = backend.plan, machine_named("cpu")
    there = replace(plan, buckets=tuple(replace(b, placement=Placement(optimizer="nvme")) for b in plan.buckets))
    programs = [backend.program["forward"], backend.program["backward"]]
    state_sizes = sizes_of_states([p for bucket in plan.buckets for p in bucket.params], 2)
    update = update_program(there, state_sizes, Rates(machine, WORLD, "float32"))
    moved = bytes_moved(update)
    assert moved == {
        "read": sum(state_sizes.values()),
        "write": sum(state_sizes.values()),
    }  # parameters stay: they are no masters of 16 bits
    assert len(update_program(there, state_sizes).instructions) == 1
    offloaded = forecast_programs(programs, there, machine)
    assert {"nvme_read", "cpu_update", "nvme_write"} <= {span.stream for span in offloaded.forecast.spans}
    assert offloaded.forecast.peaks["nvme"].bytes == sum(state_sizes.values())
    measured = Measured(moves={move_key("update", "states", bucket.index, ""): 1.0 for bucket in plan.buckets})
    slow = forecast_programs(programs, there, machine, measured=measured).forecast
    assert slow.seconds > sum(span.stream == "cpu_update" for span in slow.spans) >= LAYERS
    # Of states that are updated in memory a recording has one number.
    measured = Measured(update=1.0)
    assert forecast_programs(programs, plan, machine, measured=measured).forecast.seconds > 1.0
