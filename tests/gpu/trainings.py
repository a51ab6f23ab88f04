"""Trainings on an accelerator, each held against the same one on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.accelerator import here, watched
from models import GPT
from numerics import host_cases as cases
from numerics.test_caught_errors import trapped
from numerics.test_offload import Run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from traced import TracedOnce

import zerograph
from zerograph.runtime.torch_private import local_tensor

Trained = tuple[list[Tensor], dict[str, Tensor]]


class Net(GPT):
    """With tied weights and frozen ones. Its operators round on a CPU as they do on the fake device."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(width=32, depth=2, dropout=dropout)
        self.head.weight = self.embed.weight
        self.blocks[0].out.requires_grad_(False)
        for block in self.blocks:
            block.norm = nn.RMSNorm(32)  # torch keeps the mean of a LayerNorm in 16 bits on a CPU alone

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting each token from the one behind it."""
        return F.cross_entropy(super().forward(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())

    def _apply(self, *given: Any, **options: Any) -> Net:
        super()._apply(*given, **options)
        if self.head.weight is not self.embed.weight:  # parameters on the fake device are new ones, each for itself
            self.head.weight = self.embed.weight
        return self


class Trapping(Net):
    """Its layers may raise errors."""

    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(lambda _, __, x, index=index: trapped(x, index))


class Dropping(Net):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)


class Training(Run):
    """Reads no loss before its end, which would wait for the device.

    Attributes:
        folder: for files of its own.
    """

    net = Net

    def __init__(self, make: Callable[[nn.Module], Optimizer], once: bool, folder: Path, **options: Any) -> None:
        super().__init__(make, **options)
        self.folder = folder
        if once:
            self.compiled = TracedOnce(self.model, self.backend, options.get("mesh"))
        torch.manual_seed(0)  # of masks: the model's values were drawn on the host

    def backward(self, times: float = 1.0) -> None:
        loss = self.compiled(self.tokens())
        (loss * times).backward()
        self.losses.append(loss.detach())

    def step(self, **options: Any) -> None:
        self.optimizer.step(**options)
        self.optimizer.zero_grad()

    def trained(self) -> Trained:
        """Losses, and this rank's part of all parameters."""
        values = {name: local_tensor(value).detach().cpu() for name, value in self.model.state_dict().items()}
        return [torch.as_tensor(loss).cpu() for loss in self.losses], values


def stock(model: nn.Module) -> Optimizer:
    """Torch's."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    """Ours."""
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)


def beside(**options: Any) -> Any:
    """Ours, whose updates run beside programs."""
    return functools.partial(adamw, skip_nonfinite=False, **options)


def steps(t: Training) -> None:
    """The plainest loop."""
    t.steps(4)


def accumulates(t: Training) -> None:
    """With and without synchronizing."""
    for _ in range(2):
        with t.backend.no_sync():
            t.backward()
            t.backward()
        t.backward()
        t.step()
    t.backward()
    t.steps(1)


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        options: of the backend.
        there: of the backend on the accelerator alone.
        tier: where parameters, gradients and states go.
        leaves: how much of them, as ``offload=`` names it.
        activations: whether activations go there, too; without a tier to the host.
        mesh: its shape, where it has two axes.
        world: how many ranks train.
        near: whether its optimizer rounds otherwise on another device, even on the fake one.
        autocast: whether it changes dtypes in ways by which :class:`TracedOnce` tells no models apart.
    """

    options: dict[str, Any]
    trains: Callable[[Training], None] = steps
    make: Callable[[nn.Module], Optimizer] = stock
    tier: str = ""
    leaves: str = "parameters"
    activations: bool = False
    mesh: tuple[int, ...] = ()
    net: type[Net] = Net
    world: int = 2
    near: bool = False
    autocast: bool = False
    there: dict[str, Any] = field(default_factory=dict)

    def offload(self, folder: Path) -> dict[str, Any]:
        """Options by which tensors leave the device of :class:`Run`."""
        found: dict[str, Any] = {}
        if self.tier:
            found = cases.on_host(self.leaves) if self.tier == "host" else cases.on_disk(folder, self.leaves)
        return found | self.there | ({"activations": self.tier or "host"} if self.activations else {})

    @property
    def wired(self) -> bool:
        """Whether collectives send less than they are given."""
        return "gather_wire" in self.options

    @property
    def is_late(self) -> bool:
        """Whether programs see an update one step late."""
        return isinstance(self.make, functools.partial) and "delayed" in self.make.keywords

    @property
    def coarse(self) -> bool:
        """Whether a difference of one bit becomes one of many."""
        return self.wired or "dtype" in self.options or self.autocast

    def close(self) -> Callable[[Tensor, Tensor], None]:
        """To the bit on the fake device; but its native updates in memory round as torch's fused kernels do. A GPU's
        kernels round otherwise, of which wires, and 16 bits, make more."""
        if here().type != "fake":
            rtol, atol = (1e-2, 2e-2) if self.coarse else (1e-4, 1e-4)
        else:
            fused = self.make is not stock and not self.is_late and not self.tier
            rtol, atol = (1e-6, 1e-6) if self.near or fused else (0, 0)
        return functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)


def same_as_on_a_cpu(row: Row, folder: Path) -> None:
    """Train ``row`` on the accelerator, where nothing may race, and on a CPU."""
    Run.device = here()
    with watched() as races:
        there = _trained(row, here(), folder, row.offload(folder))
    assert not races
    with pytest.MonkeyPatch.context() as patch:
        if row.wired:  # ranks that share the host's memory would send nothing
            patch.setenv("ZEROGRAPH_TRANSPORT", "group")
        Run.device = torch.device("cpu")  # where only what is on another tier is updated late
        expected = _trained(row, Run.device, folder, row.offload(folder) if row.is_late else {})
    close = row.close()
    for mine, its in zip(there[0], expected[0], strict=True):
        close(mine, its)
    assert there[1].keys() == expected[1].keys()
    for name, mine in there[1].items():
        close(mine, expected[1][name])


def _trained(row: Row, device: torch.device, folder: Path, offload: dict[str, Any]) -> Trained:
    options = {"stage": 3, **row.options, **offload}
    Run.device, Training.net = device, row.net
    if row.mesh:
        options["mesh"] = init_device_mesh(device.type, row.mesh, mesh_dim_names=("replica", "shard"))
    training = Training(row.make, not row.autocast, folder / device.type, **options)
    with sdpa_kernel(SDPBackend.MATH):
        row.trains(training)
    return training.trained()
