"""Plain full parameters for a while."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from toy import Toy, adamw, build, compiled, differing, full, train

import zerograph
from zerograph.core.errors import ShardingError
from zerograph.sharding.gathered import group_of


def _looks_plain(stage: int) -> None:
    model = build()
    optimizer = adamw(model)
    compiled(model, stage)
    train(model, optimizer, range(1))
    outward = dict(model.named_parameters())
    before = full(model)
    with zerograph.gathered(model) as shown:
        assert shown is model and type(model) is Toy and type(model.up) is nn.Linear
        assert model.head.weight is model.embed.weight and model.embed.weight.shape == (9, 4)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in outward.values()]
        assert differing(dict(model.state_dict()), before) == []
        assert differing(copy.deepcopy(model).state_dict(), before) == []
        assert differing(pickle.loads(pickle.dumps(model)).state_dict(), before) == []
        model(torch.arange(3)).sum().backward()  # on this rank alone
        assert model.up.weight.grad.shape == model.up.weight.shape
        with torch.no_grad():
            model.embed.weight.zero_()
    assert all(now is outward[name] and now.grad is None for name, now in model.named_parameters())
    assert differing(full(model), before) == []
    train(model, optimizer, range(1, 2))
    assert set(differing(full(model), before)) >= {"embed.weight", "up.weight", "scale"}


@pytest.mark.parametrize(("world", "stage"), [(2, 3), (2, 0), (1, 3)])
def test_parameters_look_plain_and_changes_are_dropped(world: int, stage: int) -> None:
    run(world, _looks_plain, stage)


def _written_back(stage: int) -> tuple[list[float], list[str]]:
    """Losses after an edit inside gathered(), and what differs from the same edit of a model before sharding."""
    model, edited = build(), build()
    optimizer = adamw(model)
    compiled(model, stage)
    # Two backwards without a step: a cached bucket of stages 1 and 2 is whole when the edit comes.
    model(torch.arange(4)).sum().backward()
    optimizer.zero_grad()
    versions = {name: param._version for name, param in model.named_parameters()}
    with zerograph.gathered(model, writeback=True):
        for target in (model, edited):
            with torch.no_grad():
                target.embed.weight.mul_(2.0 if dist.get_rank() == 0 or target is edited else 3.0)
                target.scale.fill_(1.5)
                target.up.bias.fill_(0.25)
    # By its version autograd knows that what it saved of a parameter is stale, and a copy that computes is made anew.
    assert all(param._version > versions[name] for name, param in model.named_parameters())
    differences = differing(full(model), full(edited))
    losses = train(model, optimizer, range(2))
    reference = build()
    compiled(reference, stage)
    reference.load_state_dict(edited.state_dict())
    assert losses == train(reference, adamw(reference), range(2))
    return losses, differences


@pytest.mark.parametrize("stage", [3, 1, 0])
def test_writeback_stores_the_values_of_rank_0(stage: int) -> None:
    (losses, differences), (others, _) = run(2, _written_back, stage)
    assert differences == []
    assert losses == others


def _submodule_and_nesting() -> None:
    model = build()
    compiled(model)
    model(torch.arange(4))
    with zerograph.gathered(model.embed, writeback=True):
        assert type(model.embed) is nn.Embedding and type(model.up) is not nn.Linear
        with zerograph.gathered(model, writeback=True):
            assert model.head.weight is model.embed.weight
            with torch.no_grad():
                model.head.weight.fill_(7.0)
        assert type(model.up) is not nn.Linear and type(model.embed) is nn.Embedding
    assert torch.equal(model.embed.weight.full_tensor(), torch.full((9, 4), 7.0))
    with (
        zerograph.gathered(model),
        pytest.raises(ShardingError, match="enclosing"),
        zerograph.gathered(model.embed, writeback=True),
    ):
        pass
    assert type(model.up) is not nn.Linear


def test_a_submodule_alone_and_nested_contexts() -> None:
    run(2, _submodule_and_nesting)


def _failures() -> None:
    model = build()
    compiled(model)
    model(torch.arange(4))
    before, outward = full(model), dict(model.named_parameters())
    with pytest.raises(KeyError), zerograph.gathered(model, writeback=True):  # noqa: PT012
        model.scale.data.fill_(5.0)
        raise KeyError
    with pytest.raises(ShardingError, match=r"became \[3\]"), zerograph.gathered(model, writeback=True):
        model.up.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(ShardingError, match="no longer"), zerograph.gathered(model, writeback=True):
        model.head.weight = nn.Parameter(torch.zeros(9, 4))
    with pytest.raises(ShardingError, match="removed"), zerograph.gathered(model, writeback=True):
        del model.up.weight
    assert differing(full(model), before) == []
    assert all(p is outward[n] for n, p in model.named_parameters())
    with pytest.raises(ShardingError, match="gathered"):
        model.up.weight = nn.Parameter(torch.zeros(8, 4))


def test_failures_restore_the_shards() -> None:
    run(2, _failures)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


def _flat_weights() -> None:
    model = Recurrent()
    expected = model(torch.ones(2, 1, 4))
    zerograph.shard(model, zerograph.backend(stage=3))
    for inside in (False, True):
        with zerograph.gathered(model) if inside else torch.enable_grad():
            assert torch.equal(model(torch.ones(2, 1, 4)), expected)


def test_recurrent_modules() -> None:
    run(2, _flat_weights)


def _tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    expected = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    for hooks in (model[0]._forward_hooks, model[0]._forward_pre_hooks):
        hooks.clear()  # they cannot be pickled
    zerograph.shard(model, zerograph.backend(stage=3, mesh=mesh["dp"]))
    with zerograph.gathered(model):
        assert b"zerograph" not in pickle.dumps(model)
        other = copy.deepcopy(model)
    zerograph.shard(other, zerograph.backend(stage=3))
    assert torch.equal(full(other)["0.weight"], expected)
    assert torch.equal(full(model)["0.weight"], expected)


def test_a_tensor_parallel_module_is_copied_as_a_plain_one() -> None:
    run(2, _tensor_parallel)


def _on_a_part_of_the_job(path: Path) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        return
    model = build()
    zerograph.shard(model, zerograph.backend(stage=3, mesh=mesh))
    with zerograph.gathered(model, writeback=True):
        assert group_of(model) is group_of(model.up) is mesh.get_group()
        with zerograph.gathered(model.up, writeback=True):
            model.up.weight.data.fill_(3.0)
        zerograph.export(model, path)
    assert torch.equal(full(model)["up.weight"], torch.full((8, 4), 3.0))


def test_ranks_beside_the_mesh_need_not_take_part(tmp_path: Path) -> None:
    run(3, _on_a_part_of_the_job, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["up.weight"].eq(3).all()
