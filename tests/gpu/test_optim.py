"""Native optimizers of parameters on a GPU, and of groups that lie on both sides."""

from __future__ import annotations

import pytest
import torch
from gpu.accelerator import here
from optim.training import PAIRS, assert_close, give_gradients, parameters

import zerograph.optim as native


def _spread(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(here())) if i % 2 else p for i, p in enumerate(params)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_group_on_host_and_device(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    mine, its = _spread(parameters()), parameters()
    optimizer, other = ours(mine, **options), theirs(its, **options)
    for step in range(20):
        give_gradients(its, step)
        for p, q in zip(mine, its, strict=True):
            p.grad = 8.0 * q.grad.to(p.device)
        optimizer.step(grad_scale=8.0, clip=1.0)
        torch.nn.utils.clip_grad_norm_(its, 1.0)
        other.step()
    assert_close([p.cpu() for p in mine], its, 1e-4, 1e-5)


@pytest.mark.parametrize("cls", [native.AdamW, native.SGD, native.Adagrad, native.Lion])
def test_masters_on_a_device(cls: type) -> None:
    mine, its = _spread(parameters(torch.bfloat16)), parameters(torch.bfloat16)
    optimizer, other = cls(mine, lr=1e-3, master=torch.float32), cls(its, lr=1e-3, master=torch.float32)
    for step in range(5):
        give_gradients(its, step)
        for p, q in zip(mine, its, strict=True):
            p.grad = q.grad.to(p.device)
        optimizer.step()
        other.step()
    ours = [optimizer.state[p]["master"].cpu() for p in mine]
    assert_close(ours, [other.state[p]["master"] for p in its], 1e-4, 1e-5)
