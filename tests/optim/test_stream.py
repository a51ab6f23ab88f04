"""Updates of states on NVMe, cut into chunks of every size, equal those in memory to the bit.

Tests ``runtime/offload/slots.py``.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from quick import examples
from torch import nn
from torch.optim import Optimizer

import zerograph
import zerograph._core as _core
from zerograph.core.errors import StorageError
from zerograph.core.layout import Layout
from zerograph.core.plan import Bucket, Param, Placement, Plan
from zerograph.runtime.offload import slots
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import local_tensor

MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: zerograph.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: zerograph.optim.Adam(p, lr=0.1, amsgrad=True),
    "lion": lambda p: zerograph.optim.Lion(p, lr=0.1),
    "momentum": lambda p: zerograph.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, nesterov=False),
    "adagrad": lambda p: zerograph.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "moments": lambda p: zerograph.optim.AdamW(p, lr=0.1, moments=torch.bfloat16),
}


def params_of(sizes: list[int]) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": nn.Parameter(torch.randn(size, generator=generator)) for i, size in enumerate(sizes)}


def stored(params: dict[str, nn.Parameter], buckets: int, folder: Path, times: int = 2) -> ShardStore:
    store = ShardStore(params, lambda size: Arena([folder], times * size))
    described = [Param(n, tuple(p.shape), *["float32"] * 3, True, Layout("rows", 1)) for n, p in params.items()]
    parts = [tuple(described[i::buckets]) for i in range(buckets)]
    plan = Plan(
        3, 1, tuple(Bucket(i, f"b{i}", p, "use", Placement(optimizer="nvme")) for i, p in enumerate(parts) if p), 1
    )
    store.place(plan, 3)
    return store


def train(
    optimizer: Optimizer,
    params: dict[str, nn.Parameter],
    missing: list[bool],
    touched: str = "",
    store: ShardStore | None = None,
) -> None:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        if store is not None:
            store.slots.read_ahead()
        for state in optimizer.state.values():
            if touched in state:
                state[touched].mul_(0.9)
        for index, param in enumerate(params.values()):
            param.grad = torch.randn(param.shape, generator=generator)
            if step == 1 and missing[index % len(missing)]:
                param.grad = None  # keeps its states, and its count
        optimizer.step()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=8),
    buckets=st.integers(1, 3),
    slot=st.integers(32, 600),
    make=st.sampled_from(sorted(MAKE)),
    missing=st.lists(st.booleans(), min_size=1, max_size=3),
    touched=st.sampled_from(["", "exp_avg", "sum"]),
)
@example(sizes=[60_000], buckets=1, slot=32, make="adamw", missing=[False, False], touched="")
def test_chunks_of_any_size_give_the_same_bits(
    sizes: list[int], buckets: int, slot: int, make: str, missing: list[bool], touched: str, tmp_path: Path
) -> None:
    before, slots.SLOT = slots.SLOT, slot * 1024
    try:
        here, there = params_of(sizes), params_of(sizes)
        mine, theirs = MAKE[make](here.values()), MAKE[make](there.values())
        store = stored(there, buckets, tmp_path)
        theirs.store = store  # type: ignore[attr-defined]  # as a backend sets it
        train(mine, here, missing, touched)
        train(theirs, there, missing, touched, store)
        for name, param in here.items():
            assert torch.equal(param, there[name]), name
            for state, value in mine.state[param].items():
                assert torch.equal(value, theirs.state[there[name]][state]), (name, state)
        store.room.arena.close()
    finally:
        slots.SLOT = before


@pytest.mark.parametrize("point", [_core.FaultPoint.read, _core.FaultPoint.write])
@pytest.mark.parametrize("number", [1, 2, 6])
def test_a_failed_transfer_ends_the_update_and_leaves_nothing_under_way(
    point: _core.FaultPoint, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SLOT", 64 * 1024)
    params = params_of([20_000, 30_000])
    store = stored(params, 1, tmp_path)
    optimizer = zerograph.optim.AdamW(params.values())
    optimizer.store = store
    train(optimizer, params, [False])
    store.room.arena._engine.inject([(point, number, 1, _core.FaultEffect.error, errno.EIO)])
    with pytest.raises(StorageError, match="Input/output error"):
        optimizer.step()
    assert not store.room.arena._live
    with pytest.raises(StorageError, match="ended half done"):
        optimizer.step()


@pytest.mark.parametrize("touches", [False, True])
def test_what_was_read_ahead_is_not_read_again_unless_it_was_touched(
    touches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of([20_000, 30_000])
    store = stored(params, 2, tmp_path)
    optimizer = zerograph.optim.AdamW(params.values())
    optimizer.store, arena = store, store.room.arena
    train(optimizer, params, [False])
    reads, read = list[Extent](), arena.read
    monkeypatch.setattr(
        arena, "read", lambda extent, *args, **named: reads.append(extent) or read(extent, *args, **named)
    )
    store.slots.read_ahead()
    store.slots.read_ahead()  # of another program of this backward
    if touches:
        float(optimizer.state[params["p0"]]["exp_avg"].sum())
    optimizer.step()
    # Four of both moments in both chunks; the system brings neighbours of what is touched.
    assert (len(reads) > 4) is (touches or not arena.direct) and not arena._live


def test_an_update_that_is_waited_for_late_makes_nothing_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of([20_000, 30_000])
    store = stored(params, 2, tmp_path)
    optimizer = zerograph.optim.AdamW(params.values())
    optimizer.store, arena = store, store.room.arena
    train(optimizer, params, [False])
    pending = optimizer.start_step()
    pending.stream_beside(store.slots.in_background)
    while not pending.done():
        time.sleep(0.001)
    reads, read = list[Extent](), arena.read
    monkeypatch.setattr(
        arena, "read", lambda extent, *args, **named: reads.append(extent) or read(extent, *args, **named)
    )
    store.slots.read_ahead()
    pending.wait()  # as the next step does with a delayed one: only now parameters count as written to
    optimizer.step()
    assert len(reads) == 4 or not arena.direct


def test_what_comes_next_is_read_ahead_only_where_that_is_known(tmp_path: Path) -> None:
    ring, read = stored(params_of([20_000]), 1, tmp_path).slots, list[str]()

    class Reads:
        def __init__(self, name: str) -> None:
            self.name = name

        def read_ahead(self) -> None:
            read.append(self.name)

        def updated(self, _: object) -> None:
            pass

        def forget(self) -> None:
            pass

    def runs(update: Reads) -> None:
        ring.take(update)
        ring.has_run(update)

    first, second = Reads("first"), Reads("second")
    for update in (first, second):  # inside of a backward, the first time
        ring.in_background(partial(runs, update), more=True).result()
    assert read == []
    ring.read_ahead()  # the next backward begins, with the first of them
    assert read == []
    ring.in_background(partial(runs, first), more=True).result()
    assert read == ["second"]
    ring.take()


def test_a_failed_read_ahead_changes_nothing(tmp_path: Path) -> None:
    params = params_of([20_000, 30_000])
    store = stored(params, 1, tmp_path)
    optimizer = zerograph.optim.AdamW(params.values())
    optimizer.store = store
    train(optimizer, params, [False])
    before = {name: param.clone() for name, param in params.items()}
    store.room.arena._engine.inject([(_core.FaultPoint.read, 1, 1, _core.FaultEffect.error, errno.EIO)])
    store.slots.read_ahead()
    with pytest.raises(StorageError, match="Input/output error"):
        optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in params.items())
    optimizer.step()
    assert not any(torch.equal(param, before[name]) for name, param in params.items())


def test_a_new_optimizer_has_the_room_of_one_whose_states_are_read_ahead(tmp_path: Path) -> None:
    params = params_of([20_000])
    store = stored(params, 1, tmp_path, times=1)
    optimizer = zerograph.optim.AdamW(params.values())
    optimizer.store = store
    train(optimizer, params, [False])
    store.slots.read_ahead()
    optimizer = zerograph.optim.AdamW(params.values())
    optimizer.store = store
    train(optimizer, params, [False])


def _alike(change: Callable[[Optimizer, ShardStore], None], folder: Path) -> None:
    """``change`` something between a backward and a step: the step is as one that has read nothing ahead."""
    found = []
    for ahead in (False, True):
        params = params_of([20_000, 30_000])
        store = stored(params, 2, folder)
        optimizer = zerograph.optim.AdamW(params.values(), lr=0.1)
        optimizer.store = store
        train(optimizer, params, [False])
        if ahead:
            store.slots.read_ahead()
        change(optimizer, store)
        optimizer.step()
        found.append([p.detach().clone() for p in params.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _zeroed_and_gone_from_the_cache(optimizer: Optimizer, store: ShardStore) -> None:
    arena = store.room.arena
    time.sleep(0.02)  # a tick of the files' clock
    for state in optimizer.state.values():
        state["exp_avg"].data.zero_()
    for extent, mapping in list(arena._mappings.items()):
        mapping.drop(0, extent.bytes)
    for slab in arena._slabs:
        slab.flush(0, slab.bytes)
        slab.drop(0, slab.bytes)


def test_what_was_changed_counts_though_its_pages_are_gone(tmp_path: Path) -> None:
    _alike(_zeroed_and_gone_from_the_cache, tmp_path)


def test_reads_ahead_of_which_one_cannot_begin_are_not_taken_for_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of([20_000])
    store = stored(params, 1, tmp_path)
    optimizer = zerograph.optim.AdamW(params.values(), lr=0.1)
    optimizer.store, arena = store, store.room.arena
    train(optimizer, params, [False])
    store.slots.ring[0].fill_(7)
    read, calls = arena.read, itertools.count()

    def second_fails(*args: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise StorageError("cannot begin")
        return read(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(arena, "read", second_fails)
        with pytest.raises(StorageError):
            store.slots.read_ahead()
    optimizer.step()
    same = params_of([20_000])
    other = zerograph.optim.AdamW(same.values(), lr=0.1)
    train(other, same, [False])
    other.step()
    assert torch.equal(params["p0"], same["p0"])


def test_states_are_mappings_that_a_state_dict_shows(tmp_path: Path) -> None:
    params = params_of([3000])
    store = stored(params, 1, tmp_path)
    optimizer = zerograph.optim.AdamW(params.values())
    optimizer.store = store
    train(optimizer, params, [False])
    state = optimizer.state_dict()["state"][0]
    place = store.locations.places()[id(params["p0"])]
    assert store.states.holds(optimizer, place, "exp_avg", local_tensor(state["exp_avg"]))
    assert float(state["step"]) == 3 and state["exp_avg"].abs().sum() > 0
