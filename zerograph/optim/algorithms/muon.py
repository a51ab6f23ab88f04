"""Muon (Jordan et al., 2024), with arithmetic as torch.optim defines it, for matrices that are split over ranks; AdamW
for the rest.

Momentum is elementwise: each rank has that of its rows, wherever they live. In each step, once all gradients are known,
the rows of each matrix go to its owner, which orthogonalizes the whole and sends each rank its rows of the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph.core.arguments import require, require_flag
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.optim.algorithm import Algorithm, OnDevice, RanksOf
from zerograph.optim.algorithms.adam import ADAM
from zerograph.optim.host import HostOptimizer
from zerograph.optim.joint import in_order
from zerograph.optim.matrices import SENT, SplitMatrix, here, on_owners
from zerograph.optim.newton_schulz import Iterations, orthogonalized
from zerograph.optim.options import Options, refuse_beside_programs, require_ranges
from zerograph.runtime.dtensors import is_replicated, is_split_by_rows, shard_ranks
from zerograph.runtime.joined import our_axes

_AdjustLr = Literal["original", "match_rms_adamw"]
_ADAMW: Mapping[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, "maximize": False,
    "decoupled_weight_decay": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Update:
    """That of this rank's rows of one matrix."""

    given: OnDevice
    place: int  # among the members
    device: torch.device

    def rows(self) -> Tensor:
        """Move the momentum; returns the update before it is orthogonalized."""
        group, member = self.given.group, self.given.members[self.place]
        momentum = member.states[0]
        (grad,) = self.given.factor.divided([self.given.grads[self.place].to(momentum.dtype)])
        momentum.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return update.to(SENT).to(self.device)

    def put(self, rows: Tensor) -> None:
        """Change the parameter by the orthogonalized update."""
        group, target, lr = self.given.group, self.given.members[self.place].target, float(self.given.group["lr"])
        shape = self.given.params[self.place].shape
        target.mul_(1 - lr * group["weight_decay"])
        target.add_(rows.to(target.device), alpha=-lr * _ratio(group["adjust_lr_fn"], *shape))


def _ratio(adjust: _AdjustLr | None, rows: int, columns: int) -> float:
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _joint(given: Sequence[OnDevice], ranks: RanksOf) -> Any:
    alike: dict[Iterations, tuple[list[SplitMatrix], list[SplitMatrix]]] = {}
    still = list[_Update]()
    for name, own, place in in_order(given):
        iterations = Iterations(tuple(own.group["ns_coefficients"]), own.group["ns_steps"], own.group["eps"])
        kinds, param = alike.setdefault(iterations, ([], [])), own.params[place]
        is_split = _is_split(param, ranks)
        update = _Update(own, place, ranks.device or own.members[place].local.device)
        if not float(own.group["lr"]):
            still.append(update)
            continue
        rows, columns = param.shape
        cost = iterations.cost(rows, columns)
        kinds[is_split].append(SplitMatrix(name, (rows, columns), cost, update.rows, update.put))

    def run() -> None:
        # Learning rates of 0 change momentum only. DCP makes states by a step with them on some ranks, who may not wait
        # for the others.
        for update in still:
            update.rows()
        for iterations, (whole, split) in alike.items():
            compute = partial(orthogonalized, iterations=iterations)
            here(whole, compute)
            if split:
                assert ranks.comm is not None  # as was looked at
                on_owners(split, ranks.comm, ranks.program, compute)

    return run


def _is_split(param: Tensor, ranks: RanksOf) -> bool:
    """Whether the ranks have rows of a matrix, and not each all of it.

    Raises:
        UnsupportedError: they have it in another form.
    """
    if is_replicated(param):
        return False
    assert isinstance(param, DTensor)
    if ranks.comm is None:
        raise UnsupportedError(
            f"Muon: a matrix of shape {list(param.shape)} is split over ranks by something else than ZeroGraph, which "
            "then knows no way to bring it to one rank",
            "let zerograph.backend(...) shard it, or use an elementwise optimizer",
        )
    if not is_split_by_rows(param) or shard_ranks(our_axes(param.device_mesh)) != ranks.comm.world_size:
        raise UnsupportedError(
            f"Muon cannot orthogonalize a matrix of shape {list(param.shape)} that is placed as {param.placements}: "
            "tensor parallelism splits it too, and no rank is sent all of it",
            "give it to AdamW (a group with use_muon=False), or train without tensor parallelism",
        )
    return True


MUON = Algorithm(
    None,
    arguments=(),
    slots=lambda group: ("momentum_buffer",),
    joint=_joint,
    counts=False,
)


class Muon(HostOptimizer):
    """``torch.optim.Muon`` for parameters that are split over ranks, and AdamW for the rest.

    One rank orthogonalizes each matrix, once in each step; ranks have about the same work, and on a device matrices of
    one shape are one batch. Where parameters are not split (stage 0, one process), each rank does so with all of them.
    Groups with ``use_muon=False`` are updated by AdamW; these take ``lr``, ``betas``, ``eps``, ``weight_decay``,
    ``amsgrad`` and ``maximize``, with the defaults of :class:`zerograph.optim.AdamW`.

    Args:
        params: matrices, or groups; those with ``use_muon=False`` may have parameters of any shape.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: those of
            ``torch.optim.Muon``, for groups of matrices.
        master, skip_nonfinite: as of :class:`zerograph.optim.Adam`.
        overlap, delayed: False only, as an update needs the messages of all ranks.

    Raises:
        ConfigError: a value is out of its range, a parameter is no matrix, or updates shall run beside programs.
        UnsupportedError: in a step, a matrix that tensor parallelism splits.
    """

    algorithm = MUON

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: _AdjustLr | None = None,
        *,
        master: torch.dtype | None = None,
        skip_nonfinite: bool = True,
        overlap: bool | str = False,
        delayed: bool = False,
    ) -> None:
        refuse_beside_programs("Muon", overlap, delayed, "needs the rows that all ranks have of a matrix")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, Options(master, skip_nonfinite), defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. One of ``torch.optim.Muon`` does not say which groups are AdamW's: they stay so."""
        rest = [group.get("use_muon", True) is False for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, is_adamws in zip(self.param_groups, rest, strict=True):
            for name, value in {"use_muon": False, **_ADAMW}.items() if is_adamws else ():
                group.setdefault(name, value)

    @classmethod
    def algorithm_of(cls, group: Mapping[str, Any]) -> Algorithm:
        """Adam for groups with ``use_muon=False``."""
        return MUON if group.get("use_muon", True) else ADAM

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ConfigError: a value is out of its range, or a parameter of a group for Muon is no matrix.
        """
        use_muon = param_group.get("use_muon", True)
        require_flag("use_muon", use_muon, "False lets AdamW update a group")
        super().add_param_group(dict(param_group) if use_muon else {**_ADAMW, **param_group})
        added = self.param_groups[-1]
        if not use_muon:
            for name in self.defaults.keys() - _ADAMW.keys() - param_group.keys():
                del added[name]
        try:
            if use_muon:
                _check(added)
            else:
                require_ranges("a group of Muon with use_muon=False: AdamW", added)
        except ConfigError:
            self.param_groups.pop()
            raise


def _check(group: Mapping[str, Any]) -> None:
    require_ranges(
        "Muon",
        group,
        ("lr", "weight_decay", "momentum", "eps"),
        hint=', ns_coefficients are three numbers, ns_steps is below 100, adjust_lr_fn is "original" or '
        '"match_rms_adamw"',
        nesterov=lambda value: type(value) is bool,
        ns_coefficients=lambda value: len(value) == 3 and all(math.isfinite(one) for one in value),
        ns_steps=lambda value: type(value) is int and 0 <= value < 100,
        adjust_lr_fn=lambda value: value in (None, "original", "match_rms_adamw"),
    )
    shapes = [tuple(param.shape) for param in group["params"] if param.ndim != 2]
    require(
        not shapes,
        f"Muon orthogonalizes matrices, and {len(shapes)} parameters are none, the first of shape {(*shapes, ())[0]}",
        'give those to AdamW: Muon([{"params": matrices}, {"params": rest, "use_muon": False, "lr": 3e-4}])',
    )
