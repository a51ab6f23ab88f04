"""Which ranks a model is sharded over, and which meshes are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run, warned
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import zerograph
from zerograph.core.errors import ConfigError
from zerograph.dryrun.compile_only import simulated_rank
from zerograph.sharding.ranks import Ranks, resolve_mesh, will_be_alone


def _meshes() -> str:
    config = zerograph.backend(stage=3).config
    mesh = resolve_mesh(config, "cpu")
    assert mesh is not None and mesh.size() == 2 and not will_be_alone(config)
    first = zerograph.backend(stage=3, mesh=DeviceMesh("cpu", [0])).config
    assert will_be_alone(first)
    with pytest.raises(ConfigError, match="mesh is on 'cpu', the model on 'cuda'"):
        resolve_mesh(first, "cuda")
    if dist.get_rank() == 0:
        ranks = Ranks.connect(first, torch.device("cpu"))
        assert (ranks.size, ranks.agreement, ranks.host) == (1, None, None)
        return ""
    with pytest.raises(ConfigError) as caught:
        resolve_mesh(first, "cpu")
    return str(caught.value)


def test_a_mesh_is_found_or_refused() -> None:
    first, second = run(2, _meshes)
    assert first == "" and "rank 1 is not in the mesh, which has ranks [0]" in second


@pytest.mark.parametrize("ranks", [[[1, 0], [3, 2]], [[2, 3], [0, 1]], [3, 2, 1, 0]])
def test_a_mesh_whose_ranks_do_not_ascend_is_refused(ranks: list[list[int]] | list[int]) -> None:
    with simulated_rank(0, 4):
        mesh = DeviceMesh("cpu", ranks)
        with pytest.raises(ConfigError, match="along each axis they must ascend"):
            resolve_mesh(zerograph.backend(stage=3, mesh=mesh).config, "cpu")


def _beside_a_gpu() -> None:
    config = zerograph.backend(stage=3).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # where it is, torch's meshes over gloo make a group
        for device in ("cpu", "cuda"):
            mesh = resolve_mesh(config, device)
            assert mesh is not None and mesh.device_type == device and mesh.size() == 2
            assert mesh.get_group() is dist.group.WORLD


def test_the_mesh_has_the_group_that_is_there() -> None:
    run(2, _beside_a_gpu)


def test_a_model_beside_the_current_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    config = zerograph.backend(stage=3).config
    messages = r"(?s)the model is on cuda:1, and the current device is cuda:0.*hint: .*torch\.cuda\.set_device\(1\)"
    with pytest.raises(ConfigError, match=messages):
        Ranks.connect(config, torch.device("cuda", 1))
    assert Ranks.connect(config, torch.device("cuda", 0)).size == 1


def _replicas() -> tuple[list[str], float, float]:
    """What one rank is told, and the sum of its weights: in a mesh of its own, and over all ranks."""
    sums = []
    meshes = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard"))
    with warned() as messages:
        for options in ({"mesh": meshes["shard"]}, {"mesh": meshes["replica"]}, {}):
            torch.manual_seed(dist.get_rank())
            model = nn.Linear(4, 4)
            zerograph.shard(model, zerograph.backend(**options))
            weight = model.weight
            sums.append((weight.full_tensor() if isinstance(weight, DTensor) else weight).sum().item())
    return messages, sums[0], sums[1]


def test_replicas_outside_of_a_mesh_are_reported_once() -> None:
    first, second = run(2, _replicas)
    for rank, (messages, _, _) in enumerate((first, second)):
        assert len(messages) == 1, "not where a mesh has all ranks"
        assert (
            messages[0].startswith(f"mesh= has rank {rank} of the job's 2: other ranks")
            and "leave mesh= out" in messages[0]
        )
        assert "first values" in messages[0] and "gradients" in messages[0]
    assert first[1] != second[1] and first[2] == second[2], "as they are told"


def test_a_process_without_a_group_is_alone() -> None:
    config = zerograph.backend(stage=3).config
    assert resolve_mesh(config, "cpu") is None and will_be_alone(config)


def test_a_process_without_a_group_cannot_keep_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROGRAPH_TRANSPORT", "group")
    with pytest.raises(ConfigError, match=r"(?s)and there is none.*hint: torch\.distributed\.init_process_group"):
        resolve_mesh(zerograph.backend(stage=3).config, "cpu")
