"""Adagrad (Duchi, Hazan and Singer, 2011), with arithmetic as torch.optim defines it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

import zerograph._core as _core
from zerograph.optim.algorithm import Algorithm, OnDevice
from zerograph.optim.host import HostOptimizer
from zerograph.optim.options import Options


def _on_device(own: OnDevice) -> None:
    adagrad(
        own.targets,
        own.unscaled,
        own.states(0),
        own.steps,
        foreach=True,
        lr=float(own.group["lr"]),
        **{name: own.group[name] for name in ("weight_decay", "lr_decay", "eps", "maximize")},
    )


ADAGRAD = Algorithm(
    _core.Algorithm.adagrad,
    arguments=("lr", "eps", "weight_decay", "lr_decay", "maximize"),
    slots=lambda group: ("sum",),
    on_device=_on_device,
    fill="initial_accumulator_value",
)


class Adagrad(HostOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` in one pass over memory.

    Takes torch's arguments, and ``master``, ``skip_nonfinite``, ``overlap``, ``delayed`` and ``warmup`` as
    :class:`zerograph.optim.Adam` does.
    """

    algorithm = ADAGRAD

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
        overlap: bool | Literal["forward"] = False,
        delayed: bool = False,
        warmup: int = 0,
        **torchs: Any,
    ) -> None:
        options = Options(master, skip_nonfinite, overlap, delayed, warmup)
        super().__init__(params, options, lr, lr_decay, weight_decay, initial_accumulator_value, eps, **torchs)
        for param, state in self.state.items():  # torch has made sums in the parameters' dtype, which may round them
            dtype = self._states.dtype(param, ADAGRAD)
            if state["sum"].dtype.itemsize < dtype.itemsize:
                state["sum"] = torch.full_like(param, initial_accumulator_value, dtype=dtype)
