"""Train a model at several stages and compare it with plain PyTorch in one process on the whole batch.

A test module describes a model and its data as a :class:`Case`; :func:`stages` trains it on every rank, and
:func:`check` holds the results against the truth. With equal rows per rank, the mean of the ranks' mean losses is the
mean loss of the whole batch, and so are the gradients.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import zerograph
from zerograph.runtime.torch_private import local_tensor

ALL = (0, 1, 2, 3)
Values = dict[str, Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum SGD: parameters stay proportional to gradients, so that no noise is blown up as Adam does."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def normal(*shape: int) -> Callable[[torch.Generator, int], tuple[Tensor, ...]]:
    """Batches of ``rows`` samples of ``shape`` each."""
    return lambda generator, rows: (torch.randn(rows, *shape, generator=generator),)


@dataclass
class Case:
    """A model to train.

    Attributes:
        model: already initialized from seed 0.
        batch: from (generator, rows) the tensors of a batch; each is split by rows over ranks.
        loss: from (model, *batch) a mean over the rows.
        optimizer: from the model.
        rows: per rank.
        steps: of training.
    """

    model: nn.Module
    batch: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor] = squared
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    rows: int = 3
    steps: int = 3


@dataclass
class Result:
    """What training left: mean losses over ranks, full parameters and buffers, and compiled frames."""

    losses: list[float]
    values: Values
    frames: int = 0


def mean_over_ranks(value: Tensor) -> Tensor:
    mean = value.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def full(value: Tensor) -> Tensor:
    """The whole of ``value`` as a plain tensor of its own, on the host.

    It is gathered there too: where ranks share a GPU, gloo's gather of tensors on it ends the process in torch 2.11."""
    value = value.detach()
    if isinstance(value, DTensor) and value.device_mesh.device_type != "cpu":
        mesh = DeviceMesh.from_group(value.device_mesh.get_group(), "cpu")
        local, shape, stride = value.to_local().cpu(), value.shape, value.stride()
        value = DTensor.from_local(local, mesh, value.placements, shape=shape, stride=stride)
    return (value.full_tensor() if isinstance(value, DTensor) else value.cpu()).clone()


def full_values(model: nn.Module) -> Values:
    """Full parameters and buffers by name."""
    return {name.removeprefix("_orig_mod."): full(value) for name, value in model.state_dict(keep_vars=True).items()}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mine(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return [t.chunk(world)[rank] for t in tensors]


def train(make: Callable[[], Case], stage: int | None, shape: tuple[int, ...] | None = None, **options: Any) -> Result:
    """Train a fresh model, on a mesh of all ranks of that ``shape``; ``stage`` None is plain PyTorch on the whole
    batch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = make()
    optimizer = case.optimizer(case.model)
    backend, model = None, case.model
    if stage is not None:
        options |= {"mesh": init_device_mesh("cpu", shape)} if shape is not None else {}
        backend = zerograph.backend(stage=stage, **{"compute": "eager", "bucket_size": "1KB"} | options)
        model = torch.compile(case.model, backend=backend)
    losses = []
    for step in range(case.steps):
        batch = case.batch(seeded(step), case.rows * dist.get_world_size())
        loss = case.loss(model, *(batch if backend is None else mine(batch)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss if backend is None else mean_over_ranks(loss)).item())
    return Result(losses, full_values(case.model), len(backend.frames) if backend is not None else 0)


def stages(make: Callable[[], Case], chosen: Sequence[int], options: dict[str, Any]) -> dict[int | None, Result]:
    """On each rank: the truth (key None) and every stage in ``chosen``."""
    return {stage: train(make, stage, **options) for stage in (None, *chosen)}


def check(results: dict[int | None, Result], rel: float = 1e-5, atol: float = 1e-5, skip: Sequence[str] = ()) -> None:
    """Losses within ``rel`` and values within ``atol`` of the truth; stages 1 to 3 equal to the bit."""
    truth = results[None]
    ours = {stage: r for stage, r in results.items() if stage is not None}
    for stage, result in ours.items():
        seen = f"stage {stage}: losses {result.losses} against {truth.losses}"
        assert result.losses == pytest.approx(truth.losses, rel=rel), seen
        assert result.values.keys() == truth.values.keys(), f"stage {stage}"
        for name, value in truth.values.items():
            if name not in skip:
                where = f"stage {stage}: {name}"
                torch.testing.assert_close(
                    result.values[name], value, rtol=rel, atol=atol, msg=lambda m, where=where: f"{where}: {m}"
                )
    sharded = [r for stage, r in ours.items() if stage > 0]
    for other in sharded[1:]:
        assert other.losses == sharded[0].losses
        assert_same(other.values, sharded[0].values)


def assert_same(ours: Values, theirs: Values) -> None:
    """Equal to the bit."""
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{different} differ"


def snapshot(model: nn.Module) -> nn.Module:
    """A plain copy for a reference, taken before anything is compiled."""
    return copy.deepcopy(model)


def pickled_and_back(model: nn.Module) -> None:
    """Pickle the state of a sharded ``model``, zero this rank's shards, and load it again."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        for param in model.parameters():
            local_tensor(param.data).zero_()
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))


def close(ours: tuple[list[float], Values], truth: tuple[list[float], Values], tolerance: float = 2e-5) -> None:
    """Losses and values, where sums over ranks are in another order, so that the last bits differ."""
    assert ours[0] == pytest.approx(truth[0], rel=1e-5)
    assert ours[1].keys() == truth[1].keys()
    for name, value in truth[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


class Steps:
    """A loop over steps, each on the batch of its number; a subclass has the model and takes a backward."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]

    def backward(self, seed: int) -> None:
        raise NotImplementedError

    def values(self) -> Values:
        return full_values(self.model)

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: range = range(3)) -> tuple[list[float], Values]:
        for seed in steps:
            self.step(seed)
        return self.losses, self.values()


def save(training: Any, path: str) -> None:
    """The model and the optimizer of ``training``, into a folder of DCP's."""
    states, moments = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": states, "optimizer": moments}, checkpoint_id=path)


def load(training: Any, path: str) -> None:
    """What :func:`save` wrote, into ``training``, whose model is sharded first."""
    zerograph.shard(training.model, training.backend)
    states, moments = get_state_dict(training.model, training.optimizer)
    dcp.load({"model": states, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(training.model, training.optimizer, model_state_dict=states, optim_state_dict=moments)
