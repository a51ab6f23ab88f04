"""The record that distinguishes one native optimizer from another; :mod:`zerograph.optim.host` does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zerograph._core as _core
from zerograph.optim.factor import Factor
from zerograph.optim.parts import Member, Part
from zerograph.runtime import kernels
from zerograph.runtime.comm.communicator import Communicator

Group = Mapping[str, Any]
"""A parameter group of ``torch.optim``."""

_FLAGS = {"amsgrad", "decoupled_weight_decay", "maximize", "nesterov"}


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Parameters on a device that are updated together.

    Attributes:
        group: that they are in.
        part: that has them; one without gradients among its members has no say.
        members, grads: those with gradients, and these.
        factor: what gradients are multiplied by, and whether anything changes.
        params: the outward parameters of ``members``; only where the algorithm is ``joint``.
    """

    group: Group
    part: Part
    members: Sequence[Member]
    grads: list[Tensor]
    factor: Factor
    params: Sequence[Tensor] = ()

    @property
    def targets(self) -> list[Tensor]:
        """The tensors that are updated."""
        return [m.target for m in self.members]

    @property
    def steps(self) -> list[Tensor]:
        """How many updates each has had."""
        return [m.step for m in self.members if m.step is not None]

    def states(self, slot: int) -> list[Tensor]:
        """The state of each member in that slot; none where the algorithm has no such slot."""
        return [m.states[slot] for m in self.members if slot < len(m.states)]

    @property
    def scale(self) -> Tensor | None:
        """The divisor of the gradients; None for 1."""
        return self.factor.divisor(self.grads[0].device)

    @property
    def unscaled(self) -> list[Tensor]:
        """The gradients, of one dtype, divided by the scale, for operators that do not divide."""
        return self.factor.divided(self.grads)


class RanksOf(NamedTuple):
    """The ranks of a joint update.

    Attributes:
        comm: between those that split a parameter; None where none is split.
        program: the update's name in errors.
        device: of what is computed of whole parameters; None: where they are.
    """

    comm: Communicator | None
    program: str
    device: torch.device | None = None


Joint = Callable[[Sequence[OnDevice], RanksOf], Callable[[], None]]
"""Looks at all parameters of a step, wherever they are, and returns the function that updates them.

Raises:
    UnsupportedError: one cannot be updated; nothing has changed then.
"""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How parameters are updated.

    Attributes:
        native: the kernel on the host; None where there is none.
        arguments: the values of a group that it takes, by torch's names.
        slots: the names of a group's state tensors, in the order of the kernels' slots.
        on_device: updates by torch's operators, of gradients in the dtype of the targets; None where it is ``joint``.
        joint: updates all parameters of a step together by torch's operators, on any tier, since it needs more of one
            than a rank has. States on NVMe are read and written through their mappings.
        kernel: does the same by a kernel of ours, of gradients in their own dtype, and writes parameters that follow
            from masters too; None where there is none.
        fill: the argument that new slots hold; empty for 0.
        counts: whether each parameter's state has a ``step``.
        counts_on_device: whether that of a parameter on a device lies there too.
        starts_from_gradient: whether a new slot is given the gradient itself.
        skips_on_device: whether ``on_device`` changes nothing where the factor says so.
    """

    native: _core.Algorithm | None
    arguments: tuple[str, ...]
    slots: Callable[[Group], tuple[str, ...]]
    on_device: Callable[[OnDevice], None] | None = None
    joint: Joint | None = None
    kernel: Callable[[OnDevice], None] | None = None
    fill: str = ""
    counts: bool = True
    counts_on_device: bool = False
    starts_from_gradient: bool = False
    skips_on_device: bool = False

    def rule(self, group: Group) -> _core.Rule:
        """How the kernel on the host updates ``group``."""
        assert self.native is not None  # of others no kernel is called
        values = {name: group[name] for name in self.arguments}
        if "betas" in values:
            values["beta1"], values["beta2"] = values.pop("betas")
        given: dict[str, Any] = {
            name: bool(value) if name in _FLAGS else float(value) for name, value in values.items()
        }
        if "decoupled_weight_decay" in given:
            given["decoupled"] = given.pop("decoupled_weight_decay")
        return _core.Rule(self.native, **given)

    def kernel_for(self, local: Tensor, target: torch.dtype) -> Callable[[OnDevice], None] | None:
        """The kernel of ours that updates ``local``, which lies on a device, or its master, of dtype ``target``."""
        known = kernels.available(local.device) and {local.dtype, target}.issubset(kernels.DTYPES)
        return self.kernel if known else None
