"""Small parameters and gradients that two optimizers are compared on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zerograph.optim as native

SHAPES = [(3, 5), (17,), (), (0, 4), (2, 3, 4)]

PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (native.Adam, torch.optim.Adam, {"lr": 0.01}),
    "adam decay": (native.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "adam amsgrad maximize": (native.Adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adam tensor lr": (native.Adam, torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "adamw": (native.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw amsgrad": (native.AdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "eps": 1e-3}),
    "sgd": (native.SGD, torch.optim.SGD, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd momentum": (native.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    "sgd nesterov": (native.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adagrad": (native.Adagrad, torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "adagrad decay": (native.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
}
"""Each algorithm of ours, torch's, and their arguments."""


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params: Sequence[Tensor], step: int, scale: float = 1.0) -> None:
    """The same for all parameters of one shape and step, whatever their dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def give_wide_gradients(params: Sequence[Tensor], wide: Sequence[Tensor], step: int) -> None:
    """As :func:`give_gradients`, and to ``wide`` ones the same in float32."""
    give_gradients(params, step)
    for p, own in zip(wide, params, strict=True):
        p.grad = own.grad.float()


def train(optimizer: torch.optim.Optimizer, steps: int, start: int = 0, **step: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i in range(start, start + steps):
        give_gradients(params, i)
        optimizer.step(**step)


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close([t.detach() for t in ours], [t.detach() for t in theirs], rtol=rtol, atol=atol)
