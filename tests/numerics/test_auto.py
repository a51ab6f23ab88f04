"""``stage="auto"``: a mixed plan computes, bit for bit, what stage 3 does."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.test_stages import Block
from ranks import refused, run
from torch import Tensor, nn
from traced import compile_once

import zerograph
from zerograph.core.errors import ConfigError, InfeasibleError
from zerograph.core.machine import machine_named
from zerograph.planner.estimate.estimate import RESERVE
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search import Search

WIDTH, LAYERS = 64, 4
ROWS = (4, 4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(33, WIDTH), nn.Linear(WIDTH, 33)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train(options: dict[str, Any], rows: tuple[int, ...] = ROWS) -> dict[str, Any]:
    """Losses of a few steps of ``rows`` sequences, the more on higher ranks, and what was planned."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backend = zerograph.backend(compute="eager", bucket_size="128KiB", prefetch=1, **options)
    if rows == ROWS:
        compile_once(model, backend)
    else:  # Dynamo makes of several shapes one graph
        torch._dynamo.reset()
        model.compile(backend=backend)
    losses = []
    for step, count in enumerate(rows):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 33, (count + dist.get_rank(), 16), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "losses": losses,
        "plan": backend.plan.to_json(),
        "residencies": [b.residency for b in backend.plan.buckets],
        "recompute": backend.plan.recompute,
        "unsharded": backend.report().peak_whole_buckets,
        "placements": {type(p).__name__ for p in model.parameters()},
        "stage": backend.report().stage,
    }


def _peaks() -> tuple[int, int]:
    """Bytes that the smallest and the fastest plan of the model above need on this rank."""
    torch.manual_seed(0)
    model = Model()
    backend = zerograph.backend(stage=3, compute="eager", bucket_size="128KiB")
    compile_once(model, backend)
    tokens = torch.zeros(4 + dist.get_rank(), 16, dtype=torch.int64)
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    constraints = Constraints("auto", dist.get_world_size(), bucket_size=2**17, prefetch=1)
    best = Search(backend.frames[-1].step, constraints, machine_named("cpu")).best
    return best[0].peak, best[-1].peak


@cache  # several tests ask for the same, and compiling takes seconds
def _peaks_of_ranks() -> list[tuple[int, int]]:
    return run(2, _peaks)


def _budget(share: float) -> int:
    """A memory at ``share`` of the way between those, of the rank with the larger batch."""
    smallest, fastest = _peaks_of_ranks()[1]
    return int((smallest + share * (fastest - smallest)) / (1 - RESERVE)) + 1


@cache
def _stage_3(rows: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    return run(2, _train, {"stage": 3}, rows)


@cache
def _auto(share: float, rows: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    return run(2, _train, {"stage": "auto", "memory": _budget(share)}, rows)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_mixed_plan_gives_the_losses_of_stage_3(share: float) -> None:
    plain, mixed = _stage_3(), _auto(share)
    assert [r["losses"] for r in mixed] == [r["losses"] for r in plain]
    assert mixed[0]["plan"] == mixed[1]["plan"]
    assert mixed[0]["placements"] == {"DTensor"}
    assert mixed[0]["stage"] == "auto"
    kept = mixed[0]["residencies"].count("backward")
    assert 0 < kept <= len(mixed[0]["residencies"]) - (share < 1)  # with all the memory, all may stay
    assert plain[0]["unsharded"] < mixed[0]["unsharded"] <= kept + 2
    assert bool(mixed[0]["recompute"]) == (share < 1)


@pytest.mark.slow
def test_other_shapes_keep_the_plan() -> None:
    rows = (4, 3, 6)
    assert [r["losses"] for r in _auto(1.0, rows)] == [r["losses"] for r in _stage_3(rows)]


def test_a_budget_that_nothing_fits_is_an_error_on_all_ranks() -> None:
    for text in run(2, refused, _train, {"stage": "auto", "memory": "1MiB"}):
        assert "InfeasibleError" in text
        assert "may use 963 KiB" in text
        assert "what would help: " in text


def _smaller_batches_until_one_fits(memory: int) -> list[int]:
    model = Model()
    backend = zerograph.backend(stage="auto", memory=memory, compute="eager", bucket_size="128KiB", prefetch=1)
    model.compile(backend=backend)
    tried = []
    for rows in (512, 4):
        time.sleep(0.5 * dist.get_rank())  # a rank that is late must not be taken for its last attempt
        tried.append(rows)
        try:
            model(torch.zeros(rows, 16, dtype=torch.int64)).sum().backward()
            break
        except InfeasibleError:
            continue
    return tried


@pytest.mark.slow
def test_a_smaller_batch_may_be_tried_after_an_infeasible_one() -> None:
    assert run(2, _smaller_batches_until_one_fits, _budget(1.0)) == [[512, 4]] * 2


def _budgets_that_differ(memory: int) -> str:
    if dist.get_rank() == 0:
        memory *= 2
    plan = str(_train({"stage": "auto", "memory": memory})["plan"])
    with pytest.raises(InfeasibleError) as caught:
        _train({"stage": "auto", "memory": memory // 20})
    assert "; rank 1 has the least device memory of all ranks" in str(caught.value)
    return plan


def test_the_smallest_budget_of_all_ranks_counts() -> None:
    plan = _auto(0.5)[0]["plan"]
    assert run(2, _budgets_that_differ, _budget(0.5)) == [plan, plan]


def test_a_fixed_stage_searches_what_is_left() -> None:
    found = run(2, _train, {"stage": 3, "memory": _budget(0.1)})[0]
    assert found["losses"] == _stage_3()[0]["losses"]
    assert set(found["residencies"]) == {"use"}
    assert found["recompute"]


def test_a_cpu_needs_to_be_given_its_memory() -> None:
    model = nn.Linear(4, 4)
    model_compiled = torch.compile(model, backend=zerograph.backend(stage="auto"))
    with pytest.raises(ConfigError, match="needs to be told how much memory"):
        model_compiled(torch.zeros(1, 4))


def test_one_rank_counts_its_states_and_recomputes_to_fit() -> None:
    model = Model()
    tokens = torch.zeros(64, 16, dtype=torch.int64)
    recomputed = {}
    for memory in ("64MiB", "10MiB"):
        torch._dynamo.reset()
        backend = zerograph.backend(memory=memory, compute="eager", machine="cpu")
        model.compile(backend=backend)
        model(tokens).sum().backward()
        recomputed[memory] = len(backend.plan.recompute)
    assert recomputed["64MiB"] == 0 < recomputed["10MiB"]
    torch._dynamo.reset()
    model.compile(backend=zerograph.backend(memory="2MiB", compute="eager"))
    with pytest.raises(InfeasibleError, match="MiB of shards and optimizer states"):
        model(tokens)
