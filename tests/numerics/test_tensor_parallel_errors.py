"""Errors and budgets beside tensor parallelism reach all ranks of both axes: two by two ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from numerics.compare import close, full_values, seeded, sgd
from numerics.test_caught_errors import TRAP, trapped
from numerics.test_tensor_parallel import WIDTH, WORLD, Training, grid
from ranks import RankFailure, run
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerograph
from zerograph.core.errors import CollectiveMismatch, RankError

PROMPT = 20.0
"""Seconds within which all ranks raise. The process group's timeout is half an hour."""
LAYERS = 2


class Layer(nn.Module):
    """The trap lies between two products, behind the second of which ranks of the axis sum."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.up, self.down = number, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(trapped(torch.tanh(self.up(x)), self.number))


class Trapped:
    """A model in training that can be made to fail; with ``stage`` None plain PyTorch's on the whole batch."""

    def __init__(self, stage: int | None) -> None:
        torch.manual_seed(0)
        self.net, self.mesh = nn.Sequential(*(Layer(number) for number in range(LAYERS))), grid()
        self.stage, self.losses, self.compiled = stage, list[float](), self.net
        if stage is not None:
            for layer in self.net:
                parallelize_module(layer, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            backend = zerograph.backend(stage=stage, compute="eager", bucket_size="200B", mesh=self.mesh["dp"])
            self.compiled = torch.compile(self.net, backend=backend)
        self.optimizer = sgd(self.net)

    def step(self, seed: int) -> None:
        whole = torch.randn(4, WIDTH, generator=seeded(seed))
        batch = whole if self.stage is None else whole.chunk(2)[self.mesh.get_local_rank("dp")]
        loss = self.compiled(batch).square().mean()
        if TRAP.place == "python":
            TRAP.pass_by("python")
        loss.backward()
        if self.stage is not None:
            loss = loss.detach().clone()
            dist.all_reduce(loss, group=self.mesh["dp"].get_group())
            loss /= 2
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def prompt(*kinds: type[Exception]) -> Iterator[list[str]]:
    """The block raises one of ``kinds`` soon; its text is added to the list."""
    start, texts = time.monotonic(), list[str]()
    with pytest.raises(kinds) as caught:
        yield texts
    texts.append(str(caught.value))
    assert time.monotonic() - start < PROMPT, caught.value


def _fails(transport: str, stage: int) -> None:
    """Rank 3 fails in a forward, where ranks along ``tp`` then sum, in a backward, and in its loss."""
    fails = dist.get_rank() == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", transport)
        ours, truth = Trapped(stage), Trapped(None)
        for training in (ours, truth):
            training.step(0)
        for seed, place in enumerate(("forward 1", "backward 1", "forward 0", "python"), start=1):
            TRAP.place, TRAP.error = place if fails else "", ValueError(f"boom in {place}")
            if not fails:
                with prompt(RankError, CollectiveMismatch) as texts:
                    ours.step(100)
                assert "rank 3" in texts[0] and (place == "python" or f"boom in {place}" in texts[0]), texts
            else:
                with prompt(ValueError):
                    ours.step(100)
                if place == "python":  # it goes on with the next step, where the others are still in this one
                    with prompt(RankError, CollectiveMismatch):
                        ours.step(101)
            ours.optimizer.zero_grad()
            for training in (ours, truth):
                training.step(seed)
    close((ours.losses, full_values(ours.net)), (truth.losses, full_values(truth.net)))


def _fails_on_both_transports() -> None:
    for transport, stage in (("auto", 3), ("group", 0)):
        _fails(transport, stage)


def test_all_ranks_of_both_axes_fail_and_go_on() -> None:
    run(WORLD, _fails_on_both_transports)


def _budgets() -> tuple[str, int]:
    rank = dist.get_rank()  # of which 3 has least, and odd ones predict with other rates
    machine = "cpu" if rank % 2 else "v100-32gb-dgx2"
    training = Training(stage="auto", memory=f"{64 - rank}MiB", machine=machine, once=False)
    training.run()
    plan = training.backend.plan
    return plan.digest, training.backend._planner.budget()


def test_the_least_budget_of_both_axes_counts() -> None:
    plans, budgets = zip(*run(WORLD, _budgets), strict=True)
    assert len(set(plans)) == len(set(budgets)) == 1
    assert budgets[0] < 61 * 2**20


def _dies() -> None:
    training = Trapped(3)
    training.step(0)
    if dist.get_rank() == 3:  # which says nothing before
        TRAP.pass_by = lambda place: os._exit(1) if place == "forward 1" else None  # type: ignore[method-assign]
    with prompt(RankError) as texts:
        training.step(1)
    raise AssertionError(texts[0])


def test_the_death_of_a_rank_is_told_on_both_axes() -> None:
    with pytest.raises(RankFailure) as caught:
        run(WORLD, _dies)
    for rank in range(3):
        assert "rank 3" in caught.value.ranks[rank].splitlines()[-1], caught.value.ranks[rank]
