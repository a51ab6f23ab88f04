"""Adagrad (Duchi, Hazan and Singer, 2011), with arithmetic as torch.optim defines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from zerograph import _core
from zerograph.optim.host import HostOptimizer, unscaled
from zerograph.optim.parts import Member, Part


class Adagrad(HostOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` in one pass over memory.

    Takes torch's arguments, and ``master``, ``skip_nonfinite``, ``overlap``, ``delayed`` and ``warmup`` as
    :class:`zerograph.optim.Adam` does.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
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
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            master=master,
            skip_nonfinite=skip_nonfinite,
            overlap=overlap,
            delayed=delayed,
            warmup=warmup,
            **torchs,
        )
        for param, state in self.state.items():  # torch has made sums in the parameters' dtype, which may round them
            dtype = self._state_dtype(param)
            if state["sum"].dtype.itemsize < dtype.itemsize:
                state["sum"] = torch.full_like(param, initial_accumulator_value, dtype=dtype)

    def _slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def _fill(self, group: Mapping[str, Any]) -> float:
        return float(self.defaults["initial_accumulator_value"])

    def _rule(self, group: Mapping[str, Any]) -> _core.Rule:
        return _core.Rule(
            _core.Algorithm.adagrad,
            lr=float(group["lr"]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            lr_decay=float(group["lr_decay"]),
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
        adagrad(
            [m.target for m in members],
            unscaled(grads, scale),
            [m.states[0] for m in members],
            [m.step for m in members if m.step is not None],
            foreach=True,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
