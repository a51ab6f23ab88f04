"""The factor of gradients in a step, and whether it is skipped: decided on the host, or on the device that has all
gradients, for which nothing then waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from zerograph.core.arguments import number, require
from zerograph.optim.tensors import uses_kernels

CLIP_HINT = "clip=1.0, or leave it out to scale nothing"


class Factor(NamedTuple):
    """Attributes:
    by: what gradients are multiplied by; where it was decided on a device, a float64 there.
    nonfinite: a float32 there, 1 where the step changes nothing and else 0; None where it is never skipped.
    """

    by: float | Tensor = 1.0
    nonfinite: Tensor | None = None

    @property
    def number(self) -> float:
        """``by``, for what is updated on the host."""
        assert isinstance(self.by, float)  # nothing is there, where a device decides
        return self.by

    def divisor(self, device: torch.device) -> Tensor | None:
        """The divisor that torch's kernels take in its place; None for 1."""
        if isinstance(self.by, Tensor):
            return self.by.reciprocal().float()
        # Filled there: a number that is copied from the host would wait for what the device does.
        number = 1.0 / self.by if self.by else math.inf
        return None if number == 1.0 else torch.full((), number, dtype=torch.float32, device=device)

    def divided(self, grads: list[Tensor]) -> list[Tensor]:
        """``grads``, of one device and dtype, divided by the divisor, for operators that do not divide."""
        divisor = self.divisor(grads[0].device)
        return grads if divisor is None else list(torch._foreach_div(grads, divisor.to(grads[0].dtype)))


def _is_elsewhere(scale: float | Tensor) -> TypeGuard[Tensor]:
    return isinstance(scale, Tensor) and not uses_kernels(scale)


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a step that concern its gradients.

    Attributes:
        scales: what the loss was multiplied by, a number or a tensor of one element each.
        clip: the largest norm of all gradients; None to take none for that.
        skips: whether gradients that are not finite skip the step.
        found_inf: of ``GradScaler``, which has looked at all gradients of all ranks: whether one is not finite.
    """

    scales: Sequence[float | Tensor]
    clip: float | None
    skips: bool
    found_inf: Tensor | None

    @property
    def takes_norm(self) -> bool:
        """Whether the norm of all gradients has a say."""
        return self.clip is not None or (self.skips and self.found_inf is None)

    @property
    def may_skip(self) -> bool:
        """Whether the step is skipped where something is not finite."""
        return self.skips or self.found_inf is not None

    def scale(self, there: bool = False) -> float | Tensor:
        """The product of ``scales``, without waiting for tensors on a device if it is wanted ``there``.

        Raises:
            ConfigError: one is no number, or their product zero, or ``clip`` is not positive.
        """
        hint = "give what the loss was multiplied by"
        here = [number("grad_scale", s, hint) for s in self.scales if not (there and _is_elsewhere(s))]
        scale: float | Tensor = math.prod(here)
        require(bool(scale), "grad_scale=0: gradients cannot be divided by it", hint)
        if self.clip is not None:
            require(self.clip > 0, f"clip={self.clip}: the largest norm allowed must be positive", CLIP_HINT)
        for other in self.scales if there else ():
            if _is_elsewhere(other):
                scale = scale * other.double().reshape(())
        return scale

    def decided(self, norm: float, scale: float) -> Factor | None:
        """The factor that follows from the norm of all gradients, divided by ``scale``; None to skip the step."""
        if self.skips and not math.isfinite(norm):
            return None
        ratio = self.clip / (norm + 1e-6) if self.clip is not None else 1.0
        return Factor((1.0 if ratio > 1.0 else ratio) / scale)  # a norm that is not a number stays one

    def decided_there(self, norm: Tensor | None, scale: float | Tensor) -> Factor:
        """The same on the device, where ``norm`` is, if it was taken."""
        nonfinite = self.found_inf
        if norm is not None and self.skips:
            bad = norm.isfinite().logical_not()
            nonfinite = bad if nonfinite is None else bad.logical_or(nonfinite)
        if norm is None or self.clip is None:
            by = 1.0 / scale
        else:  # two tensors: where one is a number, torch multiplies by a reciprocal, which rounds twice
            by = (norm.new_full((), self.clip) / (norm + 1e-6)).clamp(max=1.0) / scale
        # torch's kernels compare it with 1.
        return Factor(by, nonfinite if nonfinite is None else nonfinite.ne(0).float())
