"""SGD with momentum and Nesterov's, with arithmetic as torch.optim defines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerograph import _core
from zerograph.optim.host import HostOptimizer
from zerograph.optim.parts import Member, Part


class SGD(HostOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` in one pass over memory.

    Takes torch's arguments, and ``master``, ``skip_nonfinite``, ``overlap``, ``delayed`` and ``warmup`` as
    :class:`zerograph.optim.Adam` does.
    """

    _counts = False
    _starts_from_gradient = True
    _skips_on_device = True

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
        overlap: bool = False,
        delayed: bool = False,
        warmup: int = 0,
        **torchs: Any,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            master=master,
            skip_nonfinite=skip_nonfinite,
            overlap=overlap,
            delayed=delayed,
            warmup=warmup,
            **torchs,
        )

    def _slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _rule(self, group: Mapping[str, Any]) -> _core.Rule:
        return _core.Rule(
            _core.Algorithm.sgd,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )

    def _update_on_device(
        self,
        group: Mapping[str, Any],
        part: Part,
        grads: list[Tensor],
        members: Sequence[Member],
        scale: Tensor | None,
        nonfinite: Tensor | None,
    ) -> None:
        first = {id(m) for m, fresh in zip(part.members, part.fresh, strict=False) if fresh}
        # The fused kernel takes all tensors of a call as first ones, or none.
        for is_first in (True, False):
            chosen = [(m, g) for m, g in zip(members, grads, strict=True) if (id(m) in first) is is_first]
            if chosen:
                torch._fused_sgd_(
                    [m.target for m, _ in chosen],
                    [g for _, g in chosen],
                    [m.states[0] for m, _ in chosen if m.states],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    maximize=group["maximize"],
                    is_first_step=is_first,
                    grad_scale=scale,
                    found_inf=nonfinite,
                )
