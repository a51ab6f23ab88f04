"""Gathered buckets that stay whole: how long, by residency, and what makes them stale."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

from zerograph.core.layout import Layout
from zerograph.core.plan import Residency
from zerograph.core.program import ends_resident, stays_resident
from zerograph.core.step import Param
from zerograph.runtime.comm.collectives import GroupCommunicator
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.residency import GatheredCache, StepCount

W = Param("w", (4,), "float32", "float32", "float32", True, Layout("rows", 2))
V = Param("v", (2,), "float32", "bfloat16", "float32", True, Layout("rows", 2))
FULL = [torch.ones(4), torch.ones(2, dtype=torch.bfloat16)]


Made = tuple[GatheredCache, StepCount, GradientAccumulation, GroupCommunicator]


@pytest.fixture
def made(group: dist.ProcessGroup) -> Made:
    steps, accumulation = StepCount({}), GradientAccumulation({"w": torch.zeros(4, requires_grad=True)})
    return GatheredCache(steps, accumulation), steps, accumulation, GroupCommunicator(group, torch.device("cpu"))


def gather(cache: GatheredCache, kind: str, residency: Residency = "step") -> bool:
    """A program that reads the bucket, as the executor runs it: whether it had to be gathered."""
    cache.enter(kind)
    found = cache.lookup(0, (W, V))
    if found is None and stays_resident(residency, kind):
        cache.store(0, (W, V), FULL)
    if ends_resident(residency, kind):
        cache.drop(0)
    return found is None


@contextmanager
def holding(accumulation: GradientAccumulation, comm: GroupCommunicator) -> Iterator[None]:
    """As between the backwards of two micro-batches, of which the first one is in ``no_sync``."""
    accumulation.add((W,), [torch.ones(4)], comm)
    yield
    accumulation.take((W,), [torch.ones(4)])


KINDS = ["forward", "backward", "forward", "backward", "inference", "forward"]


@pytest.mark.parametrize(
    ("residency", "gathers", "under_no_sync"),
    [
        ("use", [True] * 6, [True] * 6),
        ("backward", [True, False, True, False, True, True], [True, False, True, False, True, True]),
        ("step", [True, False, True, False, True, True], [True, False, False, False, False, False]),
    ],
)
def test_how_long_a_bucket_stays_resident(
    made: Made, residency: Residency, gathers: list[bool], under_no_sync: list[bool]
) -> None:
    cache, _, accumulation, comm = made
    assert [gather(cache, kind, residency) for kind in KINDS] == gathers
    cache.clear()
    with holding(accumulation, comm):
        assert [gather(cache, kind, residency) for kind in KINDS] == under_no_sync


def test_a_step_a_failure_and_ranks_that_met_again_make_it_stale(made: Made) -> None:
    cache, steps, accumulation, comm = made
    with holding(accumulation, comm):
        assert gather(cache, "forward") and not gather(cache, "forward")
        steps.value += 1
        assert gather(cache, "forward") and not gather(cache, "forward")
        cache.clear()
        assert gather(cache, "forward") and not gather(cache, "forward")
        cache.enter("forward", generation=1)
        assert cache.lookup(0, (W, V)) is None


def test_an_inference_keeps_nothing_and_reads_what_is_resident(made: Made) -> None:
    cache, _, accumulation, comm = made
    assert gather(cache, "inference")
    assert cache.bytes == 0
    with holding(accumulation, comm):
        assert gather(cache, "forward") and not gather(cache, "inference")


def test_a_part_of_a_bucket_is_resident_as_that(made: Made) -> None:
    """A backward may read fewer parameters than the forward gathered, or more."""
    cache, *_ = made
    cache.enter("forward")
    cache.store(0, (W,), FULL[:1])
    assert cache.holds(0) and cache.bytes == 16
    assert cache.lookup(0, (W, V)) is None and cache.lookup(0, (W,)) == [FULL[0]]
    cache.store(0, (V,), FULL[1:])
    assert cache.bytes == 16 + 4
    found = cache.lookup(0, (V, W))
    assert found is not None and found[0] is FULL[1] and found[1] is FULL[0]


def test_what_is_dropped_is_gone(made: Made) -> None:
    cache, *_ = made
    cache.enter("backward")
    cache.store(0, (W, V), FULL)
    cache.drop(0)
    cache.drop(0)  # which is nothing
    assert not cache.holds(0) and cache.bytes == 0


def test_steps_of_own_optimizers_are_counted_separately() -> None:
    """With a learning rate of 0 DCP makes states on ranks that have none, which is no step that ranks must share."""
    ours, theirs = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    count = StepCount({"ours": ours})

    def step(*params: nn.Parameter, **options: float) -> tuple[int, int]:
        for p in params:
            p.grad = torch.ones_like(p)
        torch.optim.SGD(params, **options).step()
        return count.value, count.own

    assert step(theirs) == (0, 0)
    assert step(nn.Parameter(ours.detach()[:1])) == (1, 0)
    assert step(ours, theirs) == (2, 1)
    assert step(ours, lr=0.0) == (3, 1)


class Hidden(torch.Tensor):
    """As quantized weights of other libraries: its memory is that of tensors inside of it."""

    @staticmethod
    def __new__(cls) -> Hidden:
        made: Hidden = torch.Tensor._make_wrapper_subclass(cls, (2,))
        return made

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> object:
        raise NotImplementedError(str(func))


def test_parameters_that_do_not_tell_their_memory_may_be_ours() -> None:
    ours = torch.zeros(2)
    count = StepCount({"ours": ours})
    assert not count._share_memory([torch.zeros(2)]) and count._share_memory([ours[1:]])
    assert count._share_memory([Hidden()])


def test_a_forward_drops_what_is_stale_as_it_gathers_and_other_programs_at_once(made: Made) -> None:
    cache, *_ = made
    gather(cache, "forward")
    cache.enter("backward")
    held = cache.bytes
    cache.enter("forward")
    assert cache.bytes == held > 0
    assert cache.lookup(0, (W, V)) is None and cache.bytes == 0
    gather(cache, "forward")
    cache.enter("forward")
    cache.enter("backward")  # the forward did not read it
    assert cache.bytes == 0
    gather(cache, "forward")
    cache.enter("inference")
    assert cache.bytes == 0


def test_a_count_that_is_gone_is_not_reported() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param])
    gc.collect()  # counts of other tests may be gone
    before = len(hooks)
    count = StepCount({"param": param})
    assert len(hooks) == before + 1
    del count
    gc.collect()
    assert len(hooks) == before
    optimizer.step()


def test_gradients_are_looked_at_only_where_something_stays_resident(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that waits for the last backward."""
    asked: list[str] = []
    monkeypatch.setattr(GradientAccumulation, "open", property(lambda _: bool(asked.append("open"))))
    cache, *_ = made
    for _ in range(2):
        gather(cache, "forward", "use")
    assert not asked
    for _ in range(2):
        gather(cache, "forward", "step")
    assert len(asked) == 1


def test_parts_that_a_host_keeps_go_when_shards_change_and_after_errors(made: Made) -> None:
    cache, steps, *_ = made
    cache.enter("forward")
    cache.in_host.store(0, (W, V), FULL)
    cache.enter("backward")
    assert cache.in_host.lookup(0, (V,)) == [FULL[1]]
    steps.value += 1
    cache.enter("forward")
    cache.in_host.store(0, (W,), FULL[:1])  # in place of what is stale
    cache.enter("backward")
    assert cache.in_host.lookup(0, (W,)) == [FULL[0]] and cache.in_host.lookup(0, (V,)) is None
    cache.in_host.drop(0)
    assert cache.in_host.lookup(0, (W,)) is None and cache.is_empty
    cache.in_host.store(0, (W, V), FULL)
    cache.clear()
    assert cache.in_host.is_empty
    cache.in_host.store(0, (W, V), FULL)
    cache.enter("inference", generation=1)
    assert cache.in_host.is_empty
