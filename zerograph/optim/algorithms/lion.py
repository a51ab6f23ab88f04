"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of a moment is the update."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

import zerograph._core as _core
from zerograph.core.arguments import require_flag
from zerograph.optim.algorithm import Algorithm, OnDevice
from zerograph.optim.host import HostOptimizer
from zerograph.optim.options import Options, require_ranges


def _on_device(own: OnDevice) -> None:
    group, targets, moments, grads = own.group, own.targets, own.states(0), own.unscaled
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if group["weight_decay"]:
        torch._foreach_mul_(targets, 1 - lr * group["weight_decay"])
    # Not in place: the moment itself moves afterwards, by another beta.
    update = torch._foreach_lerp(moments, grads, 1 - beta1)
    torch._foreach_sign_(update)
    torch._foreach_add_(targets, update, alpha=-lr)
    torch._foreach_lerp_(moments, grads, 1 - beta2)


LION = Algorithm(
    _core.Algorithm.lion,
    arguments=("lr", "betas", "weight_decay", "maximize"),
    slots=lambda group: ("exp_avg",),
    on_device=_on_device,
    counts=False,
)


class Lion(HostOptimizer):
    """Lion in one pass over memory, with one state per element; weight decay is decoupled, as AdamW's is.

    Args:
        params: parameters, or groups of them.
        lr: 3 to 10 times smaller than AdamW's, and ``weight_decay`` as much larger.
        betas: of the update's interpolation, and of the moment.
        weight_decay: per step, times ``lr``.
        maximize: go up the gradient.
        master, skip_nonfinite, overlap, delayed, warmup: as of :class:`zerograph.optim.Adam`.

    Raises:
        ConfigError: a negative value, or a beta outside of [0, 1).
    """

    algorithm = LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: torch.dtype | None = None,
        skip_nonfinite: bool = True,
        overlap: bool | Literal["forward"] = False,
        delayed: bool = False,
        warmup: int = 0,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        require_ranges("Lion", defaults, ("lr", "betas", "weight_decay"))
        require_flag("maximize", maximize, "True goes up the gradient")
        defaults["betas"] = tuple(betas)
        super().__init__(params, Options(master, skip_nonfinite, overlap, delayed, warmup), defaults)
