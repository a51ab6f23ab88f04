"""LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020): Adam's update of
each tensor, scaled by the norm of its parameter over that of the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerograph.optim.algorithm import Algorithm, OnDevice, RanksOf
from zerograph.optim.clip import groups_in, groups_of, our_group, over_our_ranks, over_ranks, power_sums
from zerograph.optim.host import HostOptimizer
from zerograph.optim.joint import in_order
from zerograph.optim.options import Options, refuse_beside_programs, require_ranges
from zerograph.runtime.dtensors import Groups


def _joint(given: Sequence[OnDevice], ranks: RanksOf) -> Callable[[], None]:
    groups_of([param for own in given for param in own.params])  # refuses those that no ranks know the norms of

    def run() -> None:
        moved = [(own, _moved(own)) for own in given if own.members]
        # Learning rates of 0 change states only. DCP makes states by a step with them on some ranks, who may not wait
        # for the others.
        _apply([(own, updates) for own, updates in moved if float(own.group["lr"])], ranks)

    return run


def _moved(own: OnDevice) -> list[Tensor]:
    """Move the states; returns Adam's update with weight decay."""
    (beta1, beta2), states = own.group["betas"], own.states(0)
    grads = own.factor.divided([g.to(m.device, m.dtype) for g, m in zip(own.grads, states, strict=True)])
    torch._foreach_lerp_(states, grads, 1 - beta1)
    torch._foreach_mul_(own.states(1), beta2)
    torch._foreach_addcmul_(own.states(1), grads, grads, value=1 - beta2)
    torch._foreach_add_(own.steps, 1)
    counts = [float(step) for step in own.steps]
    roots = list(torch._foreach_div(own.states(1), [1 - beta2**count for count in counts]))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, float(own.group["eps"]))
    updates = list(torch._foreach_div(states, [1 - beta1**count for count in counts]))
    torch._foreach_div_(updates, roots)
    if own.group["weight_decay"]:
        torch._foreach_add_(updates, own.targets, alpha=float(own.group["weight_decay"]))
    return updates


def _apply(all_of: Sequence[tuple[OnDevice, list[Tensor]]], ranks: RanksOf) -> None:
    """Change all parameters, each by its update times the ratio of both norms."""
    made = {id(own): updates for own, updates in all_of}
    ordered = in_order([own for own, _ in all_of])
    if not ordered:
        return
    params = [own.params[place] for _, own, place in ordered]
    targets = [own.members[place].target for _, own, place in ordered]
    updates = [made[id(own)][place] for _, own, place in ordered]
    norms = _squares([name for name, _, _ in ordered], params, targets, updates, ranks).sqrt()
    # Where one of them is 0 the update is Adam's.
    ratios = torch.where((norms > 0).all(0), norms[0] / norms[1], 1.0).unbind()
    by_place = {(id(own), place): ratio for (_, own, place), ratio in zip(ordered, ratios, strict=True)}
    for own, updates in all_of:
        torch._foreach_mul_(updates, [by_place[id(own), place].to(update) for place, update in enumerate(updates)])
        torch._foreach_add_(own.targets, updates, alpha=-float(own.group["lr"]))


def _squares(
    names: list[str], params: list[Tensor], targets: list[Tensor], updates: list[Tensor], ranks: RanksOf
) -> Tensor:
    """The sums of squares of all of each target and of each update: two rows. One reduction has those of all tensors
    that are split over the same ranks."""
    kinds: dict[Groups, list[int]] = {}
    for place, groups in enumerate(groups_of(params)):
        kinds.setdefault(groups, []).append(place)
    device = targets[0].device
    own = {
        kind: torch.stack([power_sums([tensors[i] for i in places], 2.0).to(device) for tensors in (targets, updates)])
        for kind, places in kinds.items()
    }
    found = targets[0].new_zeros(2, len(params), dtype=torch.float64)
    for kind, sums in _over_ranks(own, names, params, ranks).items():
        found[:, kinds[kind]] = sums.to(found)
    return found


def _over_ranks(
    own: dict[Groups, Tensor], names: Sequence[str], params: Sequence[Tensor], ranks: RanksOf
) -> dict[Groups, Tensor]:
    groups = groups_in(own)
    ours = our_group(groups, params)
    found = over_ranks(own, 2.0, [group for group in groups if group is not ours])
    kinds = [kind for kind in found if ours is not None and ours in kind]
    if kinds:
        both = torch.cat([found[kind].double().reshape(-1) for kind in kinds])
        both = over_our_ranks(both, ranks.comm, ours, ranks.program, names)
        parts = both.split([found[kind].numel() for kind in kinds])
        found |= {kind: part.view(found[kind].shape) for kind, part in zip(kinds, parts, strict=True)}
    return found


TRUSTED = Algorithm(
    None,
    arguments=(),
    slots=lambda group: ("exp_avg", "exp_avg_sq"),
    joint=_joint,
)


class LAMB(HostOptimizer):
    """LAMB with bias correction; the trust ratio of a tensor is ``|parameter| / |update|``, and 1 where either is 0.

    A step makes one pass over gradients and states. The norms of all tensors are summed over ranks in one reduction;
    until then the updates are in memory, as large as this rank's part of the parameters in float32, and while they are
    made as much again or twice as much.

    Args:
        params: parameters, or groups of them.
        lr: often larger than AdamW's, with the batch.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: times the parameter, a part of the update whose norm counts.
        master, skip_nonfinite: as of :class:`zerograph.optim.Adam`.
        overlap, delayed: False only, as an update needs the norms of all ranks.

    Raises:
        ConfigError: a negative value, a beta outside of [0, 1), or updates shall run beside programs.
        UnsupportedError: in a step, a parameter that is a part of a sum, or parameters of several meshes.
    """

    algorithm = TRUSTED

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        master: torch.dtype | None = None,
        skip_nonfinite: bool = True,
        overlap: bool | str = False,
        delayed: bool = False,
    ) -> None:
        refuse_beside_programs("LAMB", overlap, delayed, "needs norms of whole tensors")
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        require_ranges("LAMB", defaults)
        defaults["betas"] = tuple(betas)
        super().__init__(params, Options(master, skip_nonfinite), defaults)
