"""Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), with arithmetic as torch.optim defines it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

import zerograph._core as _core
from zerograph.core.arguments import require
from zerograph.optim.algorithm import Algorithm, Group, OnDevice
from zerograph.optim.host import HostOptimizer
from zerograph.optim.options import Options
from zerograph.runtime import kernels


def _slots(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _kernel(own: OnDevice) -> None:
    from zerograph.runtime.kernels import adamw  # imports Triton

    group, (beta1, beta2) = own.group, own.group["betas"]
    pairs = zip(own.targets, own.grads, strict=True)
    tensors = adamw.Tensors(
        own.targets,
        [g if g.dtype in kernels.DTYPES else g.to(target.dtype) for target, g in pairs],
        own.states(0),
        own.states(1),
        own.steps,
        own.states(2),
        [m.local for m in own.members] if own.part.mastered else [],
    )
    rule = adamw.Rule(
        group["lr"],
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group["decoupled_weight_decay"]),
        bool(group["maximize"]),
    )
    adamw.update(tensors, rule, own.factor.by, own.factor.nonfinite)


def _on_device(own: OnDevice) -> None:
    beta1, beta2 = own.group["betas"]
    names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
    adam(
        own.targets,
        own.grads,
        own.states(0),
        own.states(1),
        own.states(2),
        own.steps,
        fused=True,
        grad_scale=own.scale,
        found_inf=own.factor.nonfinite,
        beta1=beta1,
        beta2=beta2,
        **{name: own.group[name] for name in names},
    )


ADAM = Algorithm(
    _core.Algorithm.adam,
    arguments=("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize"),
    slots=_slots,
    on_device=_on_device,
    kernel=_kernel,
    counts_on_device=True,
    skips_on_device=True,
)


class _AdamUpdate(HostOptimizer):
    algorithm = ADAM

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        master: torch.dtype | None = None,
        moments: torch.dtype | None = None,
        skip_nonfinite: bool = True,
        overlap: bool | Literal["forward"] = False,
        delayed: bool = False,
        warmup: int = 0,
        **torchs: Any,
    ) -> None:
        require(
            not (amsgrad and moments == torch.bfloat16),
            "amsgrad=True with moments=torch.bfloat16: a maximum of rounded moments never comes down again",
            "leave moments out, which keeps them in float32, or amsgrad",
        )
        options = Options(master, skip_nonfinite, overlap, delayed, warmup, moments)
        super().__init__(params, options, lr, betas, eps, weight_decay, amsgrad, **torchs)


class Adam(_AdamUpdate, torch.optim.Adam):
    """``torch.optim.Adam`` in one pass over memory.

    Takes torch's arguments; ``foreach``, ``fused`` and ``capturable`` change nothing on the host. Further ones:

    Args:
        master: ``torch.float32`` keeps float32 masters of low-precision parameters in ``state[p]["master"]``, which
            take the update; the parameters are rounded copies of them. A change of a parameter through ``.data`` is
            undone by the next step (docs/guide/optimizers.md has the alternative).
        moments: dtype of ``exp_avg`` and ``exp_avg_sq``, float32 if None; ``torch.bfloat16`` halves them.
        skip_nonfinite: skip steps with a gradient that is not finite, on all ranks, and count them in ``skipped``.
            Needs one more read of the gradients before the update, as ``clip`` does.
        overlap: where updates run beside the model (docs/guide/optimizers.md): True lets backwards update parameters
            as their gradients are reduced, and needs ``skip_nonfinite=False``; ``"forward"`` lets the next forward
            wait for each update where it first gathers the parameters. Neither changes a number, and both need a
            backend of zerograph.
        delayed: let the next forward and backward compute with the parameters before an update, which the host makes
            meanwhile (ZeRO-Offload; docs/guide/optimizers.md). It changes training, and needs a backend with
            ``tier="host"``.
        warmup: steps before the first delayed one.

    Raises:
        ValueError: torch refuses a value. ConfigError, UnsupportedError: as :class:`HostOptimizer` says.
    """


class AdamW(_AdamUpdate, torch.optim.AdamW):
    """``torch.optim.AdamW`` in one pass over memory; arguments are those of :class:`Adam`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **rest)
