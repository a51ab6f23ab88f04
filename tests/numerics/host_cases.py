"""Trainings with what a device has no room for on the host, or where ``offloaded`` says, each beside one without.

They run on a CPU whose host counts as a second memory (tests/numerics/test_host_tier.py), and on an accelerator
(tests/gpu/test_tiers.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from numerics.compare import full
from numerics.test_offload import (
    BEHIND,
    HOST,
    Run,
    Trained,
    _accumulates_and_evaluates,
    _becomes_bfloat16,
    _changed_outside,
    _clipping_and_skipping,
    _rank,
    _same,
    _without_a_gradient,
    adamw,
    groups,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import zerograph
from zerograph.runtime.torch_private import local_tensor


def on_host(offload: str = "parameters") -> dict[str, Any]:
    """Options by which so much leaves the device of :class:`Run`."""
    own = HOST if Run.device.type == "cpu" else {"tier": "host"}
    return {**own, "offload": offload}


def on_disk(folder: Path, offload: str = "parameters") -> dict[str, Any]:
    """Options by which so much goes on from there to NVMe."""
    own = BEHIND if Run.device.type == "cpu" else {"tier": "nvme"}
    return {**own, "path": str(folder), "offload": offload}


def close(value: Tensor, expected: Tensor) -> None:
    """On a CPU to the bit; kernels of an accelerator round in other places than those that update on the host."""
    if Run.device.type == "cpu":
        assert torch.equal(value, expected)
    else:
        torch.testing.assert_close(value.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)


class Odd(nn.Module):
    """Its gradients are slices of one tensor, and expanded; and it returns a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(6, n)) for n in (3, 5))
        self.shift = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, torch.cat([self.left, self.right], 1))
        return y.square().sum() + (y + self.shift).sum(), self.left[:2]


def odd(offloaded: dict[str, Any]) -> None:
    found = []
    for more in ({}, offloaded):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Odd().to(Run.device)
        backend = zerograph.backend(stage=3, compute="eager", **more)
        compiled, optimizer = torch.compile(model, backend=backend), adamw(model)
        for times in range(3):
            for held in ((False,), (True, False), (False, True, False))[times]:
                with backend.no_sync() if held else contextlib.nullcontext():
                    loss, view = compiled(torch.ones(4, 8, device=Run.device))
                    loss.backward()
            kept = view.detach()
            before = kept.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.inference_mode():
                evaluated = compiled(torch.ones(2, 8, device=Run.device).new_ones(4, 8))[0].clone()
            assert torch.equal(kept, before) or not more
        found.append((evaluated, *(full(p.detach()) for p in model.parameters())))
    for there, here in zip(found[1], found[0], strict=True):
        close(there, here)


def alike(trains: Callable[[Run], None], offloaded: dict[str, Any] | None, make: Any = adamw, **options: Any) -> None:
    """Train in one memory, and with everything ``offloaded``, and compare to the bit. On an accelerator the
    first has all but the parameters on the host, so that both are updated there."""
    first = {} if Run.device.type == "cpu" else on_host("optimizer")
    # Functions of a module are alike in all cases, which share what they train in one memory.
    reference = in_memory if "<locals>" not in trains.__qualname__ else _trained
    here = reference(trains, make, **{**options, **first})
    _same(here, _trained(trains, make, **{**options, **(offloaded or on_host())}))


def _trained(trains: Callable[[Run], None], make: Any, **options: Any) -> Trained:
    training = Run(make, **{"stage": 3, **options})
    trains(training)
    return training.result()


in_memory = functools.cache(_trained)


def unusual_steps(training: Run) -> None:
    for trains in (_clipping_and_skipping, _changed_outside, _without_a_gradient, _becomes_bfloat16):
        trains(training)


def unusual(offloaded: dict[str, Any] | None = None) -> None:
    alike(unusual_steps, offloaded, dtype=torch.bfloat16)


def alike_everywhere(offloaded: dict[str, Any] | None = None) -> None:
    alike(_accumulates_and_evaluates, offloaded, dtype=torch.bfloat16)


def gradients(training: Run) -> None:
    """Of all the ways to ask for a gradient; one that is kept is never written over."""
    training.steps(1)
    weight, other = training.model.layers[0][0].weight, training.model.layers[1][0].bias
    training.backward()
    kept, before = weight.grad, full(weight.grad).clone()
    training.optimizer.step()
    training.optimizer.zero_grad()
    hook = weight.register_hook(lambda grad: grad * 2)
    training.steps(1)
    hook.remove()
    assert torch.equal(full(kept), before)
    with training.backend.no_sync():
        training.backward()
    training.backward()
    loss = training.compiled(training.tokens())
    found = torch.autograd.grad(loss, [weight, other])
    training.losses += [float(full(one).double().sum()) for one in found]
    training.steps(1)
    training.optimizer.zero_grad(set_to_none=False)
    training.steps(2)


def reads_gradients(offloaded: dict[str, Any] | None = None) -> None:
    alike(gradients, offloaded)


def resumed(folder: str, offloaded: dict[str, Any] | None = None) -> None:
    first = Run(groups, stage=3, dtype=torch.bfloat16, **(offloaded or on_host()))
    first.steps(3)
    model, optimizer = get_state_dict(first.model, first.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    kept = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))

    def resumes(second: Run) -> None:
        second.steps(1)
        model, optimizer = get_state_dict(second.model, second.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        second.losses, second.batches = [], torch.Generator().manual_seed(99 + _rank())
        second.steps(2)
        second.model.load_state_dict(kept[0])
        second.optimizer.load_state_dict(copy.deepcopy(kept[1]))
        second.steps(2)

    alike(resumes, offloaded, groups, dtype=torch.bfloat16)


def built_on_meta(offloaded: dict[str, Any], is_pinned: bool) -> None:
    """A model that is made where its parameters are ``offloaded`` to trains as one that is made on the device."""
    losses: list[list[float]] = []
    for more in ({}, offloaded):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        backend = zerograph.backend(stage=3, compute="eager", **more)
        zerograph.materialize(zerograph.shard(model, backend, device=Run.device))
        assert {local_tensor(p).is_pinned() for p in model.parameters()} == {bool(more) and is_pinned}
        compiled, optimizer = torch.compile(model, backend=backend), adamw(model)
        losses.append([])
        for _ in range(3):
            loss = compiled(torch.ones(4, 8, device=Run.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert is_pinned or not any(local_tensor(p).is_pinned() for p in model.parameters())
    close(torch.tensor(losses[1]), torch.tensor(losses[0]))


def memory_of_gradients() -> None:
    training = Run(adamw, stage=3, **on_host())
    training.steps(2)
    weight = training.model.layers[0][0].weight

    def address() -> int:
        training.backward()
        found = local_tensor(weight.grad).data_ptr()
        training.optimizer.zero_grad()
        return found

    first = address()
    assert address() == first
    training.backward()
    training.steps(1)  # to which it is added
    assert address() == address()
