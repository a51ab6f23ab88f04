"""Optimizers of others, on sharded parameters and beside them: torch's errors get a hint.

Steps that are refused are tested among the numerics, between calls.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.compare import full_values
from ranks import run
from torch import Tensor, nn

import zerograph


class ReadsGradients(torch.optim.Optimizer):
    """As timm's cautious optimizers and NovoGrad: computes with gradients what torch cannot do on rows."""

    def __init__(self, params: Any, read: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {})
        self.read = read

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.read(p)


def _clamped(p: Tensor) -> Any:
    return p.grad.norm().clamp_(min=0.1)  # type: ignore[union-attr]


def _beside_a_plain_tensor(p: Tensor) -> Any:
    return torch.mul(p.grad, torch.ones(3, 4))  # type: ignore[arg-type]


def _explained() -> None:
    for read in (_clamped, _beside_a_plain_tensor):
        model = nn.Linear(4, 6, bias=False)
        zerograph.shard(model, zerograph.backend())
        model.weight.grad = model.weight.detach().clone()
        optimizer = ReadsGradients(model.parameters(), read)
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        assert "hint: ReadsGradients does more than torch can do" in raised.value.__notes__[0]
        with pytest.raises(RuntimeError) as raised:
            optimizer.step(functools.partial(read, model.weight))
        assert not hasattr(raised.value, "__notes__")  # the caller's own code


def test_an_error_of_torch_about_rows_gets_a_hint() -> None:
    run(2, _explained)


class AroundAnother(torch.optim.Optimizer):
    """As timm's ``Lookahead``, which leaves ``Optimizer.__init__`` out and has only what a step asks for."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self.base, self.defaults, self.param_groups, self.state = base, base.defaults, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def _wrapped() -> None:
    model = nn.Linear(4, 6)
    zerograph.shard(model, zerograph.backend())
    before = full_values(model)
    optimizer = AroundAnother(torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer.zero_grad()  # from here on torch calls hooks of its steps
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for name, value in full_values(model).items():
        assert torch.equal(value, before[name] - 0.5)


def test_an_optimizer_around_another_one_steps() -> None:
    run(2, _wrapped)


class Takes(torch.optim.Optimizer):
    """Gives what its step takes each parameter; or, a module, its children."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, taken: Any) -> Any:  # type: ignore[override]
        return len(taken) if isinstance(taken, nn.Module) else taken(self.param_groups[0]["params"][0])


def _taken() -> None:
    zerograph.shard(nn.Linear(4, 6), zerograph.backend())  # whose watch of steps is of the process
    optimizer = Takes(nn.Linear(4, 6).parameters())
    assert optimizer.step(lambda param: param.shape) == (6, 4)
    assert optimizer.step(nn.Sequential(nn.ReLU(), nn.ReLU())) == 2


def test_a_step_may_take_functions_of_arguments_and_modules() -> None:
    run(2, _taken)


def _probed() -> None:
    model = torch.compile(nn.Linear(8, 5), backend=zerograph.backend(stage=1, compute="eager"))
    out, probe = model(torch.ones(2, 8)), nn.Linear(5, 1)
    if dist.get_rank() == 0:
        probe(out.detach()).sum().backward()
        torch.optim.SGD(probe.parameters()).step()
    out.square().mean().backward()


def test_an_optimizer_of_other_parameters_may_step_on_one_rank() -> None:
    run(2, _probed)
