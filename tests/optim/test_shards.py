"""Native optimizers on DTensor shards: as torch's, on every rank alike, through checkpoints of any world size."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from numerics.compare import Values, full, full_values, mean_over_ranks, mine, seeded
from optim.training import PAIRS
from ranks import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zerograph
import zerograph.optim as native
from zerograph.core.errors import UnsupportedError
from zerograph.dryrun.compile_only import simulated_rank
from zerograph.optim import host
from zerograph.sharding.shards import as_shard


class Net(nn.Module):
    """A bias of 3 rows, of which a second rank holds one, and a scale that is too small to be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


def _net(stage: int, seed: int = 0) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    return _compiled(Net(), stage)


def _compiled(model: nn.Module, stage: int) -> nn.Module:
    model.compile(backend=zerograph.backend(stage=stage, compute="eager", bucket_size="1KB"))
    return model


def _backward(model: nn.Module, step: int, scale: float = 1.0) -> float:
    x = mine([torch.randn(8, 6, generator=seeded(step))])[0]
    loss = model(x).square().mean()
    (scale * loss).backward()
    return mean_over_ranks(loss).item()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, **options: Any) -> list[float]:
    losses = []
    for step in steps:
        losses.append(_backward(model, step, options.get("grad_scale", 1.0)))
        optimizer.step(**options)
        optimizer.zero_grad()
    return losses


def _differences(stage: int) -> dict[str, float]:
    """How far ours and torch's are apart after training, by algorithm."""
    model, start = _net(stage), Net().state_dict()
    _backward(model, 0)
    found = {}
    for name, (ours, theirs, options) in PAIRS.items():
        ends = []
        for cls in (ours, theirs):
            model.load_state_dict(start)
            model.zero_grad()
            optimizer = cls(model.parameters(), **options | {"eps": 1e-3} if "eps" in options else options)
            _train(model, optimizer, range(4))
            ends.append(full_values(model))
            for p, state in optimizer.state.items():
                assert all(isinstance(v, DTensor) == isinstance(p, DTensor) for n, v in state.items() if n != "step")
        found[name] = max(float((ends[0][n] - ends[1][n]).abs().max()) for n in start)
    return found


def test_shards_go_where_torchs_optimizers_take_them() -> None:
    for differences in run(2, _differences, 3):
        assert all(d <= 1e-6 for d in differences.values()), differences


def _clipped(stage: int, fused: bool) -> tuple[list[float], Values, list[float]]:
    model, norms = _net(stage), []
    optimizer = native.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    losses = []
    for step in range(4):
        if fused:
            losses += _train(model, optimizer, range(step, step + 1), grad_scale=8.0, clip=0.1)
            norms.append(optimizer.grad_norm)
        else:
            losses.append(_backward(model, step))
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, full_values(model), norms


@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_in_the_step_counts_every_gradient_once(stage: int) -> None:
    truth = run(2, _clipped, stage, False)[0]
    ranks = run(2, _clipped, stage, True)
    for losses, values, norms in ranks:
        assert losses == pytest.approx(truth[0], rel=1e-5)
        assert norms == pytest.approx(truth[2], rel=1e-5)
        assert all(torch.allclose(values[n], truth[1][n], atol=1e-6) for n in values)
    assert ranks[0][2] == ranks[1][2]


def _skips(stage: int) -> tuple[int, float, bool]:
    """In step 1 one gradient element is not finite, on one rank alone if ranks hold different ones."""
    model = _net(stage)
    optimizer = native.AdamW(model.parameters(), lr=0.05)
    calls, total = [], host.over_our_ranks
    for step in range(3):
        _backward(model, step)
        before = full_values(model)
        if step == 1 and (stage == 0 or dist.get_rank() == 1):
            grad = model.up._parameters["weight"].grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = math.nan
        host.over_our_ranks = lambda value, *rest: calls.append(value.numel()) or total(value, *rest)
        try:
            optimizer.step()
        finally:
            host.over_our_ranks = total
        optimizer.zero_grad()
        after = full_values(model)
        assert all(torch.equal(before[n], after[n]) for n in before) == (step == 1)
    assert calls == ([] if stage == 0 else [1, 1, 1])
    return optimizer.skipped, optimizer.grad_norm, math.isfinite(sum(v.sum().item() for v in after.values()))


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_skip_together(stage: int) -> None:
    first, second = run(2, _skips, stage)
    assert first == second
    assert first[0] == 1 and first[2]


def _scaled(cls: Any) -> tuple[list[float], Values]:
    model = _net(3)
    optimizer, losses = cls(model.parameters(), lr=0.05, eps=1e-3), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(5):
        scaler.scale(torch.ones(()))
        losses.append(_backward(model, step, scaler.get_scale()))
        if step == 2 and dist.get_rank() == 1:
            model.up._parameters["weight"].grad.to_local()[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(scaler.get_scale())
    return losses, full_values(model)


def test_grad_scaler_on_shards() -> None:
    """What is not finite on one rank alone is skipped by all, though the first gradient is whole on each."""
    truth = run(2, _scaled, torch.optim.AdamW)
    assert truth[0][0] == truth[1][0] and truth[0][0][1::2] == [8.0, 16.0, 8.0, 8.0, 16.0]
    for (losses, values), (expected, theirs) in zip(run(2, _scaled, native.AdamW), truth, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert all(torch.allclose(values[n], theirs[n], atol=1e-6) for n in values)


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    match kind:
        case "torch":
            return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
        case "moments":
            return native.AdamW(model.parameters(), lr=0.05, eps=1e-3, moments=torch.bfloat16)
    return native.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def _save(path: str, kind: str) -> tuple[list[float], Values]:
    model = _net(3)
    optimizer = _optimizer(model, kind)
    _train(model, optimizer, range(2))
    states, moments = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": moments}, checkpoint_id=path)
    return _train(model, optimizer, range(2, 4)), full_values(model)


def _resume(path: str, kind: str) -> tuple[list[float], Values]:
    model = _net(3, seed=1)
    optimizer = _optimizer(model, kind)
    states, moments = get_state_dict(model, optimizer)
    dcp.load({"model": states, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)
    return _train(model, optimizer, range(2, 4)), full_values(model)


@pytest.mark.parametrize(
    ("before", "after", "world"),
    [("ours", "ours", 1), ("torch", "ours", 2), ("moments", "moments", 1)],
)
def test_checkpoints_across_world_sizes_and_optimizers(before: str, after: str, world: int, tmp_path: Path) -> None:
    losses, values = run(2, _save, str(tmp_path), before)[0]
    resumed, ours = run(world, _resume, str(tmp_path), after)[0]
    assert resumed == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(ours[n], values[n], atol=1e-5) for n in values)


def _before_sharding() -> bool:
    """Steps on plain parameters, then shards; and whole state is loaded into shards."""
    ends = []
    for cls in (native.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = Net()
        optimizer = cls(model.parameters(), lr=0.05, eps=1e-3)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        whole = copy.deepcopy(optimizer.state_dict())
        _compiled(model, 3)
        _train(model, optimizer, range(2))
        if cls is native.AdamW:
            optimizer.load_state_dict(whole)
        else:
            for state, loaded in zip(optimizer.state.values(), whole["state"].values(), strict=True):
                for name in state:
                    state[name] = as_shard(loaded[name], state[name]) if name != "step" else loaded[name]
        _train(model, optimizer, range(2, 4))
        ends.append(full_values(model))
    return all(torch.allclose(ends[0][n], ends[1][n], atol=1e-6) for n in ends[0])


def test_states_of_unsharded_parameters_are_split_with_them() -> None:
    assert run(2, _before_sharding) == [True, True]


def _placements() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    two = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    split, partial = dist.tensor.Shard(0), dist.tensor.Partial()
    param = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [split]))
    param.grad = DTensor.from_local(torch.ones(4, 2), mesh, [partial])
    native.SGD([param], lr=1.0).step()
    assert torch.equal(param.to_local(), -torch.ones(2, 2)), "a gradient placed otherwise is brought to its parameter"
    param = nn.Parameter(DTensor.from_local(torch.ones(2, 2), two, [split, split]))
    param.grad = torch.ones_like(param)
    assert zerograph.clip_grad_norm_([param], 1e9).item() == pytest.approx(8**0.5)
    native.SGD([param], lr=1.0).step()
    assert not param.to_local().any()
    param = nn.Parameter(DTensor.from_local(torch.ones(2, 2), two, [split, partial]))
    param.grad = DTensor.from_local(torch.ones(2, 2), two, [split, partial])
    with pytest.raises(UnsupportedError, match="parts of a sum"):
        native.SGD([param], lr=1.0).step()
    both = [nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [split]))]
    both.append(nn.Parameter(DTensor.from_local(torch.ones(2, 2), two, [dist.tensor.Replicate(), split])))
    for each in both:
        each.grad = torch.ones_like(each)
    assert zerograph.clip_grad_norm_(both, 1e9).item() == pytest.approx(12**0.5), "two meshes of the same ranks"


def test_placements() -> None:
    run(2, _placements)


def test_norms_over_meshes_of_other_ranks_are_refused() -> None:
    """Their ranks may come to the groups of both in other orders."""
    with simulated_rank(0, 4):
        meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2, 3], [0, 1])]
        # Each by itself: torch keeps the meshes of results, and groups of other tests have had the same names.
        both, grads = (
            [DTensor.from_local(torch.ones(2), m, [Shard(0)], run_check=False) for m in meshes] for _ in "ab"
        )
        params = list(map(nn.Parameter, both))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        with pytest.raises(UnsupportedError, match="split over 2 process groups"):
            zerograph.clip_grad_norm_(params, 1.0)


def _on_two_meshes() -> None:
    """A norm that another axis replicates, beside weights that know nothing of that axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank("dp")
    params = [
        nn.Parameter(DTensor.from_local(torch.ones(2), mesh["dp"], [Shard(0)], run_check=False)),
        nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()], run_check=False)),
    ]
    for param in params:
        own = torch.full((2,), 1.0 + rank)
        param.grad = DTensor.from_local(own, param.device_mesh, param.placements, run_check=False)
    optimizer = native.AdamW(params, lr=0.1)
    optimizer.step(clip=1.0)
    assert optimizer.grad_norm == pytest.approx(math.sqrt(2 * (2 * 1 + 2 * 4)))


def test_each_axis_is_summed_over_once() -> None:
    run(4, _on_two_meshes)
