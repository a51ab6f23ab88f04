"""Options, loops and errors on an accelerator, alone and together: what is trained is what a CPU trains."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpu.trainings import (
    Dropping,
    Net,
    Row,
    Training,
    Trapping,
    accumulates,
    adamw,
    beside,
    same_as_on_a_cpu,
    steps,
    stock,
)
from numerics.compare import load, save
from numerics.host_cases import on_host
from numerics.test_caught_errors import TRAP
from ranks import run
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

import zerograph
from zerograph.core.errors import RankError


def matrices(model: nn.Module) -> Optimizer:
    return adamw(nn.ParameterList(p for p in model.parameters() if p.ndim > 1))


def trainable(model: nn.Module, cls: Any = zerograph.optim.AdamW, **options: Any) -> Optimizer:
    return cls([p for p in model.parameters() if p.requires_grad], **{"lr": 1e-2, "eps": 1e-3, **options})


def muon_alone(model: nn.Module) -> Optimizer:
    """Without others, beside which weights part by 1e-4: native updates in memory round those by 1e-7, and an element
    of a momentum that is sent in 16 bits may then become its neighbour. That this is the cause was not shown."""
    return zerograph.optim.Muon([p for p in model.parameters() if p.ndim > 1], lr=0.02, momentum=0.9)


def muon(model: nn.Module) -> Optimizer:
    wide, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": wide}, {"params": others, "use_muon": False, "lr": 1e-2, "eps": 1e-3}]
    return zerograph.optim.Muon(groups, lr=0.02, momentum=0.9)


class WithoutNoise(Net):
    """A bias of keys has no gradient but what sums leave when they are rounded, and OneBitAdam takes its sign."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.qkv.bias.requires_grad_(False)


def one_bit(model: nn.Module) -> Optimizer:
    return trainable(model, zerograph.optim.OneBitAdam, eps=1e-2, freeze_step=2)


def lamb(model: nn.Module) -> Optimizer:
    return zerograph.optim.LAMB(model.parameters(), lr=0.02, eps=1e-3)


def lion(model: nn.Module) -> Optimizer:
    return zerograph.optim.Lion(model.parameters(), lr=1e-3, overlap=True, skip_nonfinite=False)


def adagrad(model: nn.Module) -> Optimizer:
    return zerograph.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)


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


def resumes(t: Training) -> None:
    """By both kinds of checkpoints."""
    t.steps(2)
    model, optimizer = get_state_dict(t.model, t.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=t.folder)
    kept = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))
    t.steps(1)
    model, optimizer = get_state_dict(t.model, t.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=t.folder)
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
    """In forwards, backwards and a step, on all ranks, who leave out that batch."""
    t.steps(1)
    for place in ("forward 1", "backward 1", "forward 0", "backward 0"):
        with _trapped(t, place):
            t.backward()
        t.optimizer.zero_grad()
        t.steps(1)
    with t.backend.no_sync():
        t.backward()
        with _trapped(t, "backward 1"):
            t.backward()
    t.steps(1)
    hook = t.optimizer.register_step_pre_hook(lambda *_: {}["in a step"])
    with pytest.raises(KeyError, match="in a step"):
        t.steps(1)
    hook.remove()
    t.steps(1)


@contextlib.contextmanager
def _trapped(t: Training, place: str) -> Iterator[None]:
    """The block fails there; on a CPU a rank may hear of another's error before it comes to its own."""
    TRAP.place, TRAP.error = place, ValueError("boom")
    with pytest.raises((ValueError, RankError) if t.device.type == "cpu" else ValueError, match="boom"):
        yield
    TRAP.place = ""


def settles(t: Training) -> None:
    """Of updates one step late."""
    t.steps(3)
    with torch.no_grad():
        t.losses.append(t.compiled(t.tokens()).clone())
    accumulates(t)
    t.optimizer.settle()
    with torch.no_grad():
        t.model.blocks[0].up.weight.mul_(0.5)
    t.steps(2, clip=0.1)
    t.optimizer.settle()


def evaluates_with_dropout(t: Training) -> None:
    """Between batches whose masks are drawn, and with a backward of its own."""
    t.steps(1)
    t.model.eval()
    with torch.inference_mode():
        t.losses.append(t.compiled(t.tokens()).clone())
    t.backward()
    t.model.train()
    with t.backend.no_sync():
        t.backward()
    t.backward()
    t.step()
    t.steps(1)


def unfreezes(t: Training) -> None:
    """A layer, for another group; then freezes one, and steps by another optimizer between."""
    t.steps(2)
    frozen = t.model.blocks[0].out
    frozen.requires_grad_(True)
    t.optimizer.add_param_group({"params": list(frozen.parameters()), "lr": 3e-3})
    t.steps(2)
    t.model.blocks[1].up.requires_grad_(False)
    t.steps(2)
    other = zerograph.optim.SGD(t.model.blocks[1].down.parameters(), lr=0.01, momentum=0.9)
    t.backward()
    other.step()
    other.zero_grad()
    with torch.no_grad():
        t.losses.append(t.compiled(t.tokens()).clone())
    t.step()
    t.steps(1)


def looks(t: Training) -> None:
    """At parameters, exported and gathered, and at a recorded step."""
    t.steps(1)
    with zerograph.gathered(t.model):
        t.losses.append(t.model.blocks[1].up.weight.detach().sum())
    with t.backend.record() as recording:
        t.steps(1)
    assert recording.forecast.seconds > 0
    path = t.folder.with_suffix(".safetensors")
    zerograph.export(t.model, path)
    t.losses.append(load_file(path)["embed.weight"].sum())
    t.steps(1)


def moves(t: Training) -> None:
    """Its checkpoint goes to other stages, whose states alone are on the host."""
    t.steps(2)
    save(t, str(t.folder))
    for stage in (1, 2):
        other = Training(adamw, True, t.folder, stage=stage, **on_host("optimizer"))
        load(other, str(t.folder))
        other.steps(2)
        t.losses += other.losses
    t.steps(1)


BF16 = {"dtype": torch.bfloat16}
WIRES = {"gather_wire": "int8", "reduce_wire": "int4"}
IN_MEMORY = {
    "stage 0": Row({"stage": 0}, clips),
    "stage 1": Row({"stage": 1}, accumulates),
    "stage 2": Row({"stage": 2, **BF16}, accumulates),
    "clipped": Row({}, clips),
    "Muon": Row({"stage": 2}, accumulates, muon_alone),
    "clipped by the native step": Row({"stage": 1}, clips_natively, adamw),
    "GradScaler": Row({}, scales),
    "GradScaler of the native step": Row({}, scales, adamw),
    "autocast": Row({}, autocasts, autocast=True),
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
    "errors": Row({}, fails, net=Trapping),
    "replicas": Row({}, clips, mesh=(2, 1)),
    "dropout, recomputed": Row({"recompute": "full"}, accumulates, net=Dropping),
    "dropout in tiles of the batch": Row({"batch_tiles": 3}, accumulates, net=Dropping),
    "searched": Row({"stage": "auto", "memory": "330KiB"}, evaluates_with_dropout, net=Dropping),
    "looked at": Row({}, looks),
    "unfrozen": Row({}, unfreezes, trainable),
    "LAMB": Row({"stage": 1}, clips_natively, lamb),
    "OneBitAdam": Row({"stage": 1}, accumulates, one_bit, net=WithoutNoise),
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
    "updated one step late": Row(BF16, steps, beside(delayed=True), "host"),
    "resumed": Row({}, resumes, adamw, "nvme", activations=True),
    "two optimizers": Row({}, has_two_optimizers, matrices, "host"),
    "errors": Row({}, fails, adamw, "nvme", activations=True, net=Trapping),
    "replicas": Row({}, clips, adamw, "host", activations=True, mesh=(2, 1)),
    "dropout": Row({"recompute": 0.5}, evaluates_with_dropout, adamw, "nvme", activations=True, net=Dropping),
    "dropout in tiles of weights": Row(
        {"tile": 2, "prefetch": 3, "recompute": "full"}, accumulates, adamw, "nvme", activations=True, net=Dropping
    ),
    "updated on the device": Row({}, accumulates, adamw, "host", there={"update": "device"}, near=True),
    "nothing ahead": Row({"prefetch": 0}, accumulates, adamw, "nvme"),
    "states of stage 1": Row({"stage": 1}, accumulates, stock, "host", "optimizer"),
    "states of stage 2": Row({"stage": 2}, accumulates, adamw, "nvme", "optimizer"),
    "gradients of stage 2": Row({"stage": 2, **BF16}, clips_natively, adamw, "nvme", "gradients"),
    "GradScaler at stage 2": Row({"stage": 2}, scales, adamw, "host", "gradients", activations=True),
    "searched": Row({"stage": "auto", "memory": "500KiB"}, looks, adamw, "nvme", activations=True, net=Dropping),
    "unfrozen": Row({}, unfreezes, trainable, "nvme", activations=True, there={"nvme": "16MiB"}),
    "loaded at other stages": Row(BF16, moves, adamw, "nvme", activations=True),
    "states updated one step late": Row({}, settles, beside(delayed=True), "nvme", "optimizer"),
    "updated one step late, resumed": Row(BF16, resumes, beside(delayed=True), "host"),
    "Muon": Row({"stage": 2}, accumulates, muon, "host", "gradients"),
    "Muon in 16 bits": Row(BF16, accumulates, muon, "nvme", activations=True),
    "LAMB": Row({}, accumulates, lamb, "host"),
    "Lion in the backward": Row({"batch_tiles": 3}, steps, lion, "nvme", activations=True, net=Dropping),
    "Adagrad": Row({}, clips_natively, adagrad, "host"),
}
ROWS = IN_MEMORY | {f"offloaded, {name}": row for name, row in OFFLOADED.items()}


@pytest.mark.parametrize("name", ROWS)
def test_training_is_that_of_a_cpu(name: str, tmp_path: Path) -> None:
    run(ROWS[name].world, same_as_on_a_cpu, ROWS[name], tmp_path)
