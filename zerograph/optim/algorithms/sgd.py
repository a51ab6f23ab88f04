"""SGD with momentum and Nesterov's, with arithmetic as torch.optim defines it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

import zerograph._core as _core
from zerograph.optim.algorithm import Algorithm, OnDevice
from zerograph.optim.host import HostOptimizer
from zerograph.optim.options import Options


def _on_device(own: OnDevice) -> None:
    first = {id(m) for m, fresh in zip(own.part.members, own.part.fresh, strict=False) if fresh}
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    # The fused kernel takes all tensors of a call as first ones, or none.
    for is_first in (True, False):
        chosen = [(m, g) for m, g in zip(own.members, own.grads, strict=True) if (id(m) in first) is is_first]
        if chosen:
            torch._fused_sgd_(
                [m.target for m, _ in chosen],
                [g for _, g in chosen],
                [m.states[0] for m, _ in chosen if m.states],
                is_first_step=is_first,
                grad_scale=own.scale,
                found_inf=own.factor.nonfinite,
                **{name: own.group[name] for name in names},
            )


MOMENTUM = Algorithm(
    _core.Algorithm.sgd,
    arguments=("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"),
    slots=lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
    on_device=_on_device,
    counts=False,
    starts_from_gradient=True,
    skips_on_device=True,
)


class SGD(HostOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` in one pass over memory.

    Takes torch's arguments, and ``master``, ``skip_nonfinite``, ``overlap``, ``delayed`` and ``warmup`` as
    :class:`zerograph.optim.Adam` does.
    """

    algorithm = MOMENTUM

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        master: torch.dtype | None = None,
        skip_nonfinite: bool = True,
        overlap: bool | Literal["forward"] = False,
        delayed: bool = False,
        warmup: int = 0,
        **torchs: Any,
    ) -> None:
        options = Options(master, skip_nonfinite, overlap, delayed, warmup)
        super().__init__(params, options, lr, momentum, dampening, weight_decay, nesterov, **torchs)
