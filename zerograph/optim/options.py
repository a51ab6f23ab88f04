"""The options of every native optimizer, besides the values of its algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zerograph.core.arguments import require, require_flag


@dataclass(frozen=True, slots=True)
class Options:
    """Attributes are the arguments that :class:`zerograph.optim.Adam` explains.

    Raises:
        ConfigError: ``master`` is neither None nor float32, ``moments`` neither float32 nor bfloat16; ``overlap``
            beside ``skip_nonfinite`` or ``delayed``; ``warmup`` is no number of steps, or without ``delayed``; a flag
            is no bool.
    """

    master: torch.dtype | None = None
    skip_nonfinite: bool = True
    overlap: bool | Literal["forward"] = False
    delayed: bool = False
    warmup: int = 0
    moments: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("skip_nonfinite", "delayed"):
            require_flag(name, getattr(self, name), f"leave {name} out for what it is by default")
        require(
            type(self.overlap) is bool or self.overlap == "forward",
            f"overlap={self.overlap!r:.80}: updates overlap the backward or the next forward",
            'overlap=True for the backward, overlap="forward" for the next forward, or leave it out',
        )
        require(
            self.master in (None, torch.float32),
            f"master={self.master}: masters are kept in torch.float32 only",
            "give master=torch.float32, or leave it out for parameters without masters",
        )
        require(
            self.moments in (None, torch.float32, torch.bfloat16),
            f"moments={self.moments}: moments are kept in torch.float32 or torch.bfloat16 only",
            "leave moments out for torch.float32; moments=torch.bfloat16 takes half the memory",
        )
        require(
            not (self.overlap is True and self.skip_nonfinite),
            "overlap=True updates parameters before all gradients are known, and skip_nonfinite=True, which is the "
            "default, decides by all of them",
            "skip_nonfinite=False beside overlap=True: values that are not finite then go into parameters",
        )
        require(
            not (self.overlap and self.delayed),
            f"overlap={self.overlap!r} and delayed=True say differently where updates run",
            "leave one of them out: overlap changes no numbers, delayed hides more",
        )
        require(
            type(self.warmup) is int and self.warmup >= 0 and (self.delayed or not self.warmup),
            f"warmup={self.warmup!r:.80} counts ordinary steps before those of delayed=True"
            + ", which is not given" * (not self.delayed),
            "warmup=40 beside delayed=True, or leave it out",
        )


def refuse_beside_programs(name: str, overlap: object, delayed: object, why: str) -> None:
    """Raises:
    ConfigError: the optimizer ``name`` was told to run updates beside programs, where it does what ``why`` says.
    """
    for argument, value in (("overlap", overlap), ("delayed", delayed)):
        require(
            value is False,
            f"{name}({argument}={value!r:.80}): its update {why}, which no program can wait for",
            f"leave {argument} out; AdamW and the other optimizers of zerograph.optim take it",
        )


def require_ranges(
    what: str,
    values: Mapping[str, Any],
    names: Sequence[str] = ("lr", "betas", "eps", "weight_decay"),
    hint: str = "",
    **checks: Callable[[Any], bool],
) -> None:
    """Require that the numbers called ``names`` are not negative, that betas are at least 0 and less than 1, and that
    ``checks`` hold, each of the value of its name. ``what`` got the values; ``hint`` says what ``checks`` ask for."""
    checks = {name: _are_betas if name == "betas" else _is_at_least_0 for name in names} | checks
    shown = ", ".join(f"{name}={values[name]!r:.80}" for name in checks)
    *others, last = (name for name in names if name != "betas")
    ranges = f"{', '.join(others)} and {last} are not negative"
    ranges += ", betas are two numbers of at least 0 and less than 1" * ("betas" in names)
    try:
        right = all(check(values[name]) for name, check in checks.items())
    except (TypeError, RuntimeError):  # no numbers, or tensors of several
        right = False
    require(right, f"{what}({shown})", ranges + hint)


def _is_at_least_0(value: Any) -> bool:
    return bool(value >= 0)


def _are_betas(value: Any) -> bool:
    return len(value) == 2 and all(0 <= beta < 1 for beta in value)
