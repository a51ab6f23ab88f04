"""How a parameter of a model that computes on DTensors lies on both axes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.errors import UnsupportedError
from zerograph.core.layout import Layout
from zerograph.dryrun.compile_only import simulated_rank
from zerograph.runtime.dtensors import placements_of, shared_by_us
from zerograph.runtime.joined import other_axis, our_axes, shards_of
from zerograph.sharding.parallel import (
    is_expert,
    let_experts_lie_on,
    mesh_of_both,
    mesh_with_experts,
    parallel_of,
    placed_on_both,
    splits_evenly,
)


@pytest.mark.parametrize(
    ("rows", "placement", "part", "splits"),
    [
        (8, Shard(0), (4, 6), True),
        (6, Shard(0), (3, 6), False),
        (6, Shard(1), (6, 3), True),
        (1, Replicate(), (1, 6), False),
    ],
)
def test_our_ranks_share_one_part(rows: int, placement: Placement, part: tuple[int, int], splits: bool) -> None:
    with simulated_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        param = DTensor.from_local(torch.ones(part), mesh["tensor"], [placement], run_check=False)
        both = mesh_of_both({"weight": param, "plain": torch.ones(2)}, mesh["data"])
        assert both is not None and both == mesh
        parallel = parallel_of(param, both)
        assert (parallel.shape, parallel.part, parallel.computes) == ((rows, 6), part, True)
        assert splits_evenly(parallel, 2) == splits
        own = distribute_tensor(torch.ones(part), mesh["data"], placements_of(splits, mesh["data"]))
        assert shared_by_us(placed_on_both(own, parallel)) == (part, Layout.home(2, sharded=splits))
        plain = parallel_of(torch.ones(2, 3), both)
        assert (plain.shape, plain.part, plain.computes) == ((2, 3), (2, 3), False)
        given = torch.ones(2, 3)
        assert plain.inward(given) is given
        inward = parallel.inward(torch.ones(part))
        assert isinstance(inward, DTensor) and inward.placements == (placement,) and inward.shape == (rows, 6)


def test_refused() -> None:
    with simulated_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        on_data, on_tensor, a_sum = (
            DTensor.from_local(torch.ones(2), mesh[axis], [placement], run_check=False)
            for axis, placement in (("data", Shard(0)), ("tensor", Shard(0)), ("tensor", Partial()))
        )
        assert mesh_of_both({"weight": torch.ones(2)}, mesh["data"]) is None
        for params, ours in (([on_data], "data"), ([on_data, on_tensor], "data"), ([a_sum], "data")):
            with pytest.raises(UnsupportedError, match="parameter weight0 is a DTensor"):
                mesh_of_both({f"weight{i}": param for i, param in enumerate(params)}, mesh[ours])
        three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "parts"))
        beside = DTensor.from_local(torch.ones(2), three["parts"], [Shard(0)], run_check=False)
        with pytest.raises(UnsupportedError, match=r"weight is a DTensor on .* already, and ZeroGraph shards over"):
            mesh_of_both({"weight": beside}, three["replicas", "shards"])
        with pytest.raises(UnsupportedError, match="one rank alone"):
            mesh_of_both({"weight": on_tensor}, None)


def test_experts_lie_inside_of_our_axis() -> None:
    with simulated_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        everyone = DeviceMesh("cpu", [0, 1, 2, 3])
        param = DTensor.from_local(torch.ones(2, 3), mesh["expert"], [Shard(0)], run_check=False)
        assert not is_expert(param) and mesh_with_experts([param, torch.ones(2)], everyone) is None
        let_experts_lie_on(mesh["expert"])
        both = mesh_with_experts([param, torch.ones(2)], everyone)
        assert both == mesh and is_expert(param) and is_expert(param.to(torch.bfloat16))
        assert not is_expert(torch.ones(2)) and not is_expert(DTensor.from_local(torch.ones(2), everyone))
        assert our_axes(both) == mesh["data"] and other_axis(both) == mesh["expert"]
        assert shards_of(both) is None, "we communicate between more ranks"
        across = DTensor.from_local(torch.ones(2, 3), mesh["data"], [Shard(0)], run_check=False)
        let_experts_lie_on(mesh["data"])
        for params, ours in (([across], everyone), ([param, across], everyone), ([param], mesh["expert"])):
            with pytest.raises(UnsupportedError, match="not the last of two axes"):
                mesh_with_experts(params, ours)
