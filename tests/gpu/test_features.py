"""Options, loops and errors on an accelerator, alone and together: what is trained is what a CPU trains."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpu.accelerator import here, watched
from models import GPT
from numerics import host_cases as cases
from numerics.test_caught_errors import TRAP, trapped
from numerics.test_offload import Run
from ranks import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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

    def __init__(self) -> None:
        super().__init__(width=32, depth=2)
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


class Training(Run):
    """Reads no loss before its end, which would wait for the device."""

    net = Net

    def __init__(self, make: Callable[[nn.Module], Optimizer], once: bool, **options: Any) -> None:
        super().__init__(make, **options)
        if once:
            self.compiled = TracedOnce(self.model, self.backend, options.get("mesh"))

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
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)


def matrices(model: nn.Module) -> Optimizer:
    return adamw(nn.ParameterList(p for p in model.parameters() if p.ndim > 1))


def beside(**options: Any) -> Any:
    return functools.partial(adamw, skip_nonfinite=False, **options)


def steps(t: Training) -> None:
    t.steps(4)


def accumulates(t: Training) -> None:
    for _ in range(2):
        with t.backend.no_sync():
            t.backward()
            t.backward()
        t.backward()
        t.step()
    t.backward()
    t.steps(1)


def clips(t: Training) -> None:
    for clip in (zerograph.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        t.backward()
        norm = clip(t.model.parameters(), 0.1).detach()
        t.losses.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        t.step()
    t.steps(1)


def clips_natively(t: Training) -> None:
    t.steps(2, clip=0.1)
    t.backward(float("inf"))
    t.step()
    t.steps(1, clip=0.1, grad_scale=2.0)
    assert t.optimizer.skipped == 1


def scales(t: Training) -> None:
    scaler = torch.amp.GradScaler(t.device.type, init_scale=8.0, growth_interval=2)
    for step in range(4):
        loss = t.compiled(t.tokens())
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        if step:
            scaler.unscale_(t.optimizer)
        scaler.step(t.optimizer)
        scaler.update()
        t.losses += [loss.detach(), scaler.get_scale()]
        t.optimizer.zero_grad()


def autocasts(t: Training) -> None:
    for _ in range(3):
        with torch.autocast(t.device.type, torch.bfloat16):
            loss = t.compiled(t.tokens())
        loss.backward()
        t.losses.append(loss.detach())
        t.step()


def evaluates(t: Training) -> None:
    t.steps(1)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            t.losses.append(t.compiled(t.tokens()).clone())
        t.steps(1)


def resumes(t: Training, folder: str) -> None:
    """By both kinds of checkpoints."""
    t.steps(2)
    model, optimizer = get_state_dict(t.model, t.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    kept = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))
    t.steps(1)
    model, optimizer = get_state_dict(t.model, t.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(t.model, t.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    t.steps(2)
    t.model.load_state_dict(kept[0])
    t.optimizer.load_state_dict(kept[1])
    t.steps(1)


def has_two_optimizers(t: Training) -> None:
    other = zerograph.optim.SGD([p for p in t.model.parameters() if p.ndim == 1], lr=0.01)
    for _ in range(3):
        t.backward()
        other.step(clip=0.1)
        t.step()
        other.zero_grad()


def fails(t: Training) -> None:
    """In forwards, backwards and a step, on both ranks, who leave out that batch."""
    t.steps(1)
    for place in ("forward 1", "backward 1", "forward 0", "backward 0"):
        TRAP.place = place
        with pytest.raises(ValueError, match="boom"):
            t.backward()
        t.optimizer.zero_grad()
        t.steps(1)
    with t.backend.no_sync():
        t.backward()
        TRAP.place = "backward 1"
        with pytest.raises(ValueError, match="boom"):
            t.backward()
    t.steps(1)
    hook = t.optimizer.register_step_pre_hook(lambda *_: {}["in a step"])
    with pytest.raises(KeyError, match="in a step"):
        t.steps(1)
    hook.remove()
    t.steps(1)


late = beside(delayed=True)


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        options: of the backend.
        tier: where parameters, gradients and states go.
        activations: whether activations go there, too; without a tier to the host.
        mesh: its shape, where it has two axes.
    """

    options: dict[str, Any]
    trains: Callable[..., None] = steps
    make: Callable[[nn.Module], Optimizer] = stock
    tier: str = ""
    activations: bool = False
    mesh: tuple[int, ...] = ()

    def offload(self, folder: Path) -> dict[str, Any]:
        """Options by which tensors leave the device."""
        found = {"host": cases.on_host(), "nvme": cases.on_disk(folder)}.get(self.tier, {})
        return found | ({"activations": self.tier or "host"} if self.activations else {})

    @property
    def wired(self) -> bool:
        """Whether collectives send less than they are given."""
        return "gather_wire" in self.options

    @property
    def coarse(self) -> bool:
        """Whether a difference of one bit becomes one of many."""
        return self.wired or "dtype" in self.options or self.trains is autocasts


BF16 = {"dtype": torch.bfloat16}
WIRES = {"gather_wire": "int8", "reduce_wire": "int4"}
IN_MEMORY = {
    "stage 0": Row({"stage": 0}, clips),
    "stage 1": Row({"stage": 1}, accumulates),
    "stage 2": Row({"stage": 2, **BF16}, accumulates),
    "clipped": Row({}, clips),
    "clipped by the native step": Row({"stage": 1}, clips_natively, adamw),
    "GradScaler": Row({}, scales),
    "GradScaler of the native step": Row({}, scales, adamw),
    "autocast": Row({}, autocasts),
    "tiles of the loss": Row({"loss_tiles": 4}, accumulates),
    "tiles of the batch": Row({"batch_tiles": 3}, accumulates),
    "tiles of tokens": Row({"token_tiles": 2}, accumulates),
    "tiles of weights": Row({"tile": 2, "prefetch": 2}, accumulates),
    "wires": Row(WIRES, accumulates),
    "other wires": Row({"gather_wire": "fp8", "reduce_wire": "bf16", **BF16}, accumulates),
    "half recomputed": Row({"recompute": 0.5, **BF16}, accumulates),
    "activations on the host": Row({"recompute": 0.5, **BF16}, accumulates, activations=True),
    "updated in the backward": Row({}, steps, beside(overlap=True)),
    "updated beside the next forward": Row({}, steps, beside(overlap="forward")),
    "resumed": Row({}, resumes),
    "two optimizers": Row({}, has_two_optimizers, matrices),
    "errors": Row({}, fails),
    "replicas": Row({}, clips, mesh=(2, 1)),
}
OFFLOADED = {
    "accumulated": Row(BF16, accumulates, adamw, "host", activations=True),
    "clipped": Row({}, clips, adamw, "nvme", activations=True),
    "clipped by the native step": Row(BF16, clips_natively, adamw, "host"),
    "GradScaler": Row({}, scales, stock, "host"),
    "GradScaler of the native step": Row({}, scales, adamw, "nvme", activations=True),
    "evaluated": Row({}, evaluates, adamw, "nvme", activations=True),
    "tiles of loss and batch": Row({"batch_tiles": 3, "loss_tiles": 4}, accumulates, adamw, "host", activations=True),
    "tiles of weights and tokens": Row({"tile": 2, "token_tiles": 2}, accumulates, adamw, "nvme", activations=True),
    "wires": Row({**WIRES, "recompute": "full"}, accumulates, adamw, "nvme", activations=True),
    "updated in the backward": Row({}, steps, beside(overlap=True), "nvme", activations=True),
    "updated beside the next forward": Row(BF16, accumulates, beside(overlap="forward"), "nvme", activations=True),
    "updated one step late": Row(BF16, steps, late, "host"),
    "resumed": Row({}, resumes, adamw, "nvme", activations=True),
    "two optimizers": Row({}, has_two_optimizers, matrices, "host"),
    "errors": Row({}, fails, adamw, "nvme", activations=True),
    "replicas": Row({}, clips, adamw, "host", activations=True, mesh=(2, 1)),
}
ROWS = IN_MEMORY | {f"offloaded, {name}": row for name, row in OFFLOADED.items()}


def _trained(row: Row, device: torch.device, folder: Path, **options: Any) -> Trained:
    Run.device, Training.net = device, Trapping if row.trains is fails else Net
    if row.mesh:
        options["mesh"] = init_device_mesh(device.type, row.mesh, mesh_dim_names=("replica", "shard"))
    training = Training(row.make, row.trains is not autocasts, **{"stage": 3, **row.options, **options})
    with sdpa_kernel(SDPBackend.MATH):
        row.trains(training, *((str(folder / device.type),) if row.trains is resumes else ()))
    return training.trained()


def _same_as_on_a_cpu(name: str, folder: Path) -> None:
    Run.device, row = here(), ROWS[name]
    with watched() as races:
        there = _trained(row, here(), folder, **row.offload(folder))
    assert not races
    with pytest.MonkeyPatch.context() as patch:
        if row.wired:  # ranks that share the host's memory would send nothing
            patch.setenv("ZEROGRAPH_TRANSPORT", "group")
        Run.device = torch.device("cpu")  # where only what is on another tier is updated late
        expected = _trained(row, Run.device, folder, **(row.offload(folder) if row.make is late else {}))
    close = _close(row)
    for mine, its in zip(there[0], expected[0], strict=True):
        close(mine, its)
    assert there[1].keys() == expected[1].keys()
    for name, mine in there[1].items():
        close(mine, expected[1][name])


def _close(row: Row) -> Callable[[Tensor, Tensor], None]:
    """To the bit on the fake device; but its native updates in memory round as torch's fused kernels do. A GPU's
    kernels round otherwise, of which wires, and 16 bits, make more."""
    if here().type != "fake":
        rtol, atol = (1e-2, 2e-2) if row.coarse else (1e-4, 1e-4)
    else:
        rtol, atol = (1e-6, 1e-6) if row.make not in (stock, late) and not row.tier else (0, 0)
    return functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ROWS)
def test_training_is_that_of_a_cpu(name: str, tmp_path: Path) -> None:
    run(2, _same_as_on_a_cpu, name, tmp_path)
