"""Our axes of a mesh and the one that a model's tensors lie on already."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from zerograph.dryrun.compile_only import simulated_rank
from zerograph.runtime.joined import everyone_on, joined, other_axis, our_axes, shards_of


def test_two_axes_of_one_mesh() -> None:
    with simulated_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        both = joined(mesh["data"], mesh["tensor"])
        assert both == mesh and joined(mesh["data"], mesh["tensor"]) is both
        assert our_axes(both) == mesh["data"] and other_axis(both) == mesh["tensor"]
        assert shards_of(both) is mesh.get_group("data") and everyone_on(both).size() == 4
        assert our_axes(mesh["data"]) == mesh["data"] and other_axis(mesh["data"]) is None
        assert shards_of(mesh["tensor"]) is mesh.get_group("tensor")


def test_other_meshes_are_refused() -> None:
    with simulated_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for ours, other in ((mesh["a"], mesh["a"]), (mesh, mesh["b"]), (init_device_mesh("cpu", (4,)), mesh["b"])):
            with pytest.raises(RuntimeError):
                joined(ours, other)
