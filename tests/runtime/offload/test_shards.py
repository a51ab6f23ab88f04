"""Where states are: places in extents, what is reserved, and copies that follow what changes.

Tests ``runtime/offload/locations.py``, ``runtime/offload/copies.py``, ``runtime/offload/early.py``,
``runtime/offload/fetches.py``, ``runtime/offload/gradients.py`` and ``runtime/offload/states.py``.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from zerograph._core import FaultEffect, FaultPoint
from zerograph.core.errors import StorageError
from zerograph.core.layout import Layout
from zerograph.core.plan import Bucket, Param, Placement, Plan
from zerograph.runtime.offload.extents import ALIGNMENT
from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.offload.shards import UNIT, ShardStore

NVME = Placement(optimizer="nvme")


def described(name: str, param: nn.Parameter, compute: str = "float32", sharded: bool = True) -> Param:
    return Param(
        name, tuple(param.shape), "float32", compute, "float32", param.requires_grad, Layout.home(2, sharded=sharded)
    )


def store_of(folder: Path, params: dict[str, nn.Parameter]) -> ShardStore:
    return ShardStore(params, lambda size: Arena([folder], size))


def plan_of(*buckets: tuple[Param, ...], placement: Placement = NVME, world_size: int = 2) -> Plan:
    return Plan(3, world_size, tuple(Bucket(i, f"b{i}", p, "use", placement) for i, p in enumerate(buckets)), 1)


def owner() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))])


@pytest.fixture
def params() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    sizes = {"a": (70, 3), "empty": (0, 3), "b": (5000,), "frozen": (9, 9), "unsharded": (1, 7)}
    made = {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    made["frozen"].requires_grad_(False)
    return made


def test_states_of_a_bucket_lie_one_behind_another(params: dict[str, nn.Parameter], tmp_path: Path) -> None:
    store, holder = store_of(tmp_path, params), owner()
    specs = tuple(described(name, p, sharded=name != "unsharded") for name, p in params.items())
    store.place(plan_of(specs), 2)
    assert store.copies.copy_of(params["a"]) is None  # what computes in its own dtype stays
    places = store.locations.places()
    assert places.keys() == {id(params[name]) for name in ("a", "empty", "b")}
    block = places[id(params["a"])].block
    assert (places[id(params["a"])].begin, places[id(params["b"])].begin) == (0, 256)
    assert block.elements % UNIT == 0 and UNIT * 2 >= ALIGNMENT
    made = {n: store.states.of(holder, places[id(params[n])], "m", torch.float32, params[n], 0.5) for n in ("a", "b")}
    assert all(torch.equal(made[name], torch.full_like(params[name], 0.5)) for name in made)
    assert made["a"].untyped_storage().nbytes() == made["a"].nbytes  # whoever saves it saves that, and no more
    made["a"].fill_(7.0)
    assert made["b"].eq(0.5).all()
    assert store.states.holds(holder, places[id(params["a"])], "m", made["a"])
    assert not store.states.holds(holder, places[id(params["a"])], "m", made["a"].clone())
    assert not store.states.holds(owner(), places[id(params["a"])], "m", made["a"])


def test_a_state_that_is_asked_for_again_begins_anew(params: dict[str, nn.Parameter], tmp_path: Path) -> None:
    store, holder = store_of(tmp_path, params), owner()
    store.place(plan_of((described("a", params["a"]),)), 2)
    place = store.locations.places()[id(params["a"])]
    store.states.of(holder, place, "m", torch.float32, params["a"], 0.0).fill_(3.0)
    assert store.states.of(holder, place, "m", torch.float32, params["a"], 1.0).eq(1.0).all()


def test_extents_of_optimizers_that_are_gone_are_used_again(params: dict[str, nn.Parameter], tmp_path: Path) -> None:
    store = store_of(tmp_path, params)
    store.place(plan_of((described("b", params["b"]),)), 1)  # room for one moment of each parameter
    place = store.locations.places()[id(params["b"])]
    for value in range(5):
        holder = owner()
        state = store.states.of(holder, place, "m", torch.float32, params["b"], float(value))
        assert state.eq(value).all()
        del state, holder
    other = owner()
    kept = []
    with pytest.raises(StorageError, match=r"no room for .* they are for m\d of bucket b0(?s:.*)nvme="):
        kept.extend(store.states.of(other, place, f"m{i}", torch.float32, params["b"], 0.0) for i in range(9))


def test_what_was_made_on_nvme_and_stays_is_brought_into_memory(
    params: dict[str, nn.Parameter], tmp_path: Path
) -> None:
    store = store_of(tmp_path, params)
    offloaded, names = Placement("nvme", "nvme", "nvme"), ("a", "b")
    store.reserve({}, offloaded, masters=False, moments=2, early=True)
    wanted = {name: params[name].detach().clone() for name in names}
    for name in names:
        early = store.early.make(params[name])
        params[name].data = early.copy_(wanted[name])
    leaves, stays = (Bucket(i, name, (described(name, params[name]),), "use") for i, name in enumerate(names))
    seen = list[torch.Tensor]()
    store.place(Plan(3, 2, (replace(leaves, placement=offloaded), stays), 1), 2, moved=seen.append)
    assert [any(p is params[name] for p in seen) for name in names] == [True, True]
    assert [store.room.arena.maps(params[name]) for name in names] == [True, False]
    assert all(torch.equal(params[name], wanted[name]) for name in names)
    del early
    store.states.reclaim()
    assert store.room.arena.size - store.room.arena.free_bytes == UNIT * 4  # what leaves, in its bucket's place


def test_room_is_reserved_for_what_leaves(params: dict[str, nn.Parameter], tmp_path: Path) -> None:
    store = store_of(tmp_path, params)
    store.reserve({"a": Placement()}, Placement(), masters=False, moments=2)
    assert store.room.arena.size == 0
    store.room.opened = None
    store.reserve({"b": NVME}, Placement(), masters=False, moments=2)
    assert store.room.arena.size == 3 * UNIT * 2 * 4  # 5000 elements in whole units, two moments


def test_the_first_plan_decides(params: dict[str, nn.Parameter], tmp_path: Path) -> None:
    store = store_of(tmp_path, params)
    store.place(plan_of((described("a", params["a"]),), placement=Placement()), 2)
    assert store.room.opened is None and store.locations.places() == {}
    store.place(plan_of((described("a", params["a"]),)), 2)
    first = store.locations.places()[id(params["a"])]
    store.place(plan_of((described("b", params["b"]), described("a", params["a"]))), 2)
    assert store.locations.places()[id(params["a"])] == first
    assert store.locations.places()[id(params["b"])].begin == 0


def test_masters_leave_and_copies_follow_them(params: dict[str, nn.Parameter], tmp_path: Path) -> None:
    store, a = store_of(tmp_path, params), params["a"]
    before, specs = a.detach().clone(), described("a", a, "bfloat16")
    store.place(plan_of((specs,)), 2)
    assert torch.equal(a, before) and store.room.arena.maps(a)

    def gathered() -> torch.Tensor:
        (found,) = store.fetches.finish(store.fetches.start([specs], [a]))
        assert found.dtype == torch.bfloat16
        return found

    assert torch.equal(gathered(), before.bfloat16())
    kept = gathered().data_ptr()
    with torch.no_grad():
        a.mul_(2)
    assert torch.equal(gathered(), (before * 2).bfloat16()) and gathered().data_ptr() == kept
    a.data.mul_(2)  # which no version shows
    assert torch.equal(gathered(), (before * 2).bfloat16())
    store.copies.touched([a])
    assert torch.equal(gathered(), (before * 4).bfloat16())
    a.data = before.clone()  # other memory: it has come back
    assert store.fetches.start([specs], [a]).shards[0] is a and store.copies.copy_of(a) is None


def test_what_nobody_gathers_stays(params: dict[str, nn.Parameter], tmp_path: Path) -> None:
    store, a = store_of(tmp_path, params), params["a"]
    address = a.data_ptr()
    store.place(plan_of((described("a", a, "bfloat16", sharded=False),), world_size=1), 2)
    assert a.data_ptr() == address and store.locations.places() == {} and store.room.opened is None


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_parameter_that_cannot_be_written_stays_and_can_leave_later(
    nth: int, params: dict[str, nn.Parameter], tmp_path: Path
) -> None:
    arena = Arena([tmp_path], 2**20)
    store, before = ShardStore(params, lambda _: arena), {name: p.detach().clone() for name, p in params.items()}
    specs = [described(name, params[name]) for name in ("a", "b", "frozen")]
    plan = plan_of(tuple(specs[:2]), tuple(specs[2:]), placement=Placement("nvme", "nvme", "nvme"))
    arena._engine.inject([(FaultPoint.write, nth, 1, FaultEffect.error, errno.ENOSPC)])
    moved: list[torch.Tensor] = []
    with pytest.raises(StorageError, match="No space left"):
        store.place(plan, 2, moved.append)
    assert len(moved) == (2 if nth == 3 else 0)  # a bucket leaves as a whole
    for _ in range(2):
        for one in specs:
            (found,) = store.fetches.finish(store.fetches.start([one], [params[one.name]]))
            assert torch.equal(found, before[one.name]) and torch.equal(params[one.name], before[one.name])
        store.place(plan, 2, moved.append)
    assert len(moved) == 3 and all(arena.maps(params[one.name]) for one in specs)
    assert sum(store.bytes().values()) == arena.size - arena.free_bytes
