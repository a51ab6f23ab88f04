"""Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), with arithmetic as torch.optim defines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from zerograph import _core
from zerograph.core.errors import ConfigError
from zerograph.optim.factor import Factor
from zerograph.optim.host import HostOptimizer
from zerograph.optim.parts import Member, Part
from zerograph.runtime import kernels


class _AdamUpdate(HostOptimizer):
    _counts_on_device = True
    _skips_on_device = True

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
        overlap: bool = False,
        delayed: bool = False,
        warmup: int = 0,
        **torchs: Any,
    ) -> None:
        if amsgrad and moments == torch.bfloat16:
            raise ConfigError(
                "amsgrad=True with moments=torch.bfloat16: a maximum of rounded moments never comes down again",
                "leave moments out, which keeps them in float32, or amsgrad",
            )
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            master=master,
            moments=moments,
            skip_nonfinite=skip_nonfinite,
            overlap=overlap,
            delayed=delayed,
            warmup=warmup,
            **torchs,
        )

    def _slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _rule(self, group: Mapping[str, Any]) -> _core.Rule:
        beta1, beta2 = group["betas"]
        return _core.Rule(
            _core.Algorithm.adam,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group["decoupled_weight_decay"]),
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
        )

    def _has_kernel_for(self, local: Tensor, target: torch.dtype) -> bool:
        return kernels.available(local.device) and {local.dtype, target}.issubset(kernels.DTYPES)

    def _update_by_kernel(
        self, group: Mapping[str, Any], part: Part, grads: list[Tensor], members: Sequence[Member], factor: Factor
    ) -> None:
        from zerograph.runtime.kernels import adamw  # imports Triton

        beta1, beta2 = group["betas"]
        tensors = adamw.Tensors(
            [m.target for m in members],
            [g if g.dtype in kernels.DTYPES else g.to(m.target.dtype) for m, g in zip(members, grads, strict=True)],
            [m.states[0] for m in members],
            [m.states[1] for m in members],
            [m.step for m in members if m.step is not None],
            [m.states[2] for m in members] if group["amsgrad"] else [],
            [m.local for m in members] if part.mastered else [],
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
        adamw.update(tensors, rule, factor.by, factor.nonfinite)

    def _update_on_device(
        self,
        group: Mapping[str, Any],
        part: Part,
        grads: list[Tensor],
        members: Sequence[Member],
        scale: Tensor | None,
        nonfinite: Tensor | None,
    ) -> None:
        beta1, beta2 = group["betas"]
        adam(
            [m.target for m in members],
            grads,
            [m.states[0] for m in members],
            [m.states[1] for m in members],
            [m.states[2] for m in members] if group["amsgrad"] else [],
            [m.step for m in members if m.step is not None],
            fused=True,
            grad_scale=scale,
            found_inf=nonfinite,
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )


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
        overlap: let backwards update parameters as their gradients are reduced (docs/guide/optimizers.md). Needs a
            backend of zerograph, and ``skip_nonfinite=False``.
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
