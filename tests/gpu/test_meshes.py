"""Ranks of an accelerator on axes: replicas of shards, tensor parallel, pipelines, sequences that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.accelerator import here, watched
from gpu.test_features import BF16, WIRES, clips, fails, settles
from gpu.trainings import Dropping, Row, Trapping, accumulates, adamw, beside, same_as_on_a_cpu, steps, stock
from integrations import test_context_parallel as sequences
from integrations import test_expert_parallel as experts
from numerics import test_pipeline as pipelines
from numerics import test_tensor_parallel as tensor_parallel
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerograph
from zerograph.runtime.torch_private import local_tensor

WORLD = 4
REPLICAS: dict[str, Any] = {"mesh": (2, 2), "world": WORLD}
ROWS = {
    "clipped": Row({}, clips, near=True, **REPLICAS),  # the host's norms are summed in 64 bits
    "stage 1": Row({"stage": 1}, accumulates, **REPLICAS),
    "wires and tiles of the batch": Row({**WIRES, "batch_tiles": 3}, accumulates, **REPLICAS),
    "on the host": Row({}, accumulates, adamw, "host", activations=True, **REPLICAS),
    "updated in the backward": Row(
        BF16, steps, beside(overlap=True), "nvme", activations=True, net=Dropping, **REPLICAS
    ),
    "updated one step late": Row({**BF16, "stage": 2}, settles, beside(delayed=True), "host", "gradients", **REPLICAS),
    "errors": Row({}, fails, adamw, "host", net=Trapping, **REPLICAS),
}


@pytest.mark.parametrize("name", ROWS)
def test_replicas_of_shards_train_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    run(WORLD, same_as_on_a_cpu, ROWS[name], tmp_path)


def _same(kind: Any, make: Callable[[], Any]) -> None:
    """Trainings of a ``kind``, whose class says on which device."""
    found = list[tuple[list[float], dict[str, Tensor]]]()
    for device in (here(), torch.device("cpu")):
        with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.MATH), watched() as races:
            patch.setattr(kind, "device", device)
            training = make()
            for seed in range(3):
                training.step(seed)
            values = {name: local_tensor(value).cpu() for name, value in training.model.state_dict().items()}
            found.append((training.losses, values))
        assert not races
    torch.testing.assert_close(*found, rtol=0, atol=0)


def _tensor_parallel() -> None:
    _same(tensor_parallel.Training, lambda: tensor_parallel.Training(3, tensor_parallel.sequences, stock))


def _pipeline() -> None:
    _same(pipelines.Training, lambda: pipelines.Training(pipelines.Case()))


class _Pair:
    """Training on two ranks, which are all of ``mesh``: of more, transports add gradients in other orders."""

    device = torch.device("cpu")

    def __init__(self, mesh: DeviceMesh, model: nn.Module) -> None:
        self.rank, self.model, self.losses = mesh.get_rank(), model.to(self.device), list[float]()
        self.model.compile(backend=zerograph.backend(compute="eager"))
        self.optimizer = stock(self.model)

    def step(self, seed: int) -> None:
        loss = self.loss(torch.Generator().manual_seed(seed))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def loss(self, generator: torch.Generator) -> Tensor:
        raise NotImplementedError


class _Sequences(_Pair):
    """The ranks share each sequence (Ulysses)."""

    def __init__(self) -> None:
        mesh = init_device_mesh(self.device.type, (2,))
        super().__init__(mesh, sequences.Net(32, 2, 2, mesh.get_group()))

    def loss(self, generator: torch.Generator) -> Tensor:
        ids = torch.randint(0, sequences.VOCABULARY, (2, 17), generator=generator)
        own = slice(8 * self.rank, 8 * self.rank + 8)
        loss: Tensor = self.model(*(tokens[:, own].to(self.device) for tokens in (ids[:, :-1], ids[:, 1:])))
        return loss


class _Experts(_Pair):
    """Each rank has half of the experts, and sends the other one tokens, of which the numbers differ."""

    def __init__(self) -> None:
        mesh = init_device_mesh(self.device.type, (1, 2), mesh_dim_names=("dp", "ep"))
        super().__init__(mesh, experts.Net(mesh["ep"]))

    def loss(self, generator: torch.Generator) -> Tensor:
        batch = torch.randn(2, experts.TOKENS, experts.WIDTH, generator=generator)
        loss: Tensor = self.model(batch[self.rank].to(self.device)).square().mean()
        return loss


def _shared_sequences() -> None:
    _same(_Sequences, _Sequences)


def _divided_experts() -> None:
    _same(_Experts, _Experts)


@pytest.mark.parametrize(
    ("case", "world"),
    [(_tensor_parallel, WORLD), (_pipeline, WORLD), (_shared_sequences, 2), (_divided_experts, 2)],
    ids=["tensor parallel", "pipeline", "shared sequences", "divided experts"],
)
def test_other_axes_train_as_on_a_cpu(case: Callable[[], None], world: int) -> None:
    if here().type == "cuda":
        pytest.skip("gloo of torch 2.11 gathers no tensors of ranks that share a GPU")
    run(world, case)
