"""Norms to log, of each parameter and its gradient: one pass over this rank's memory and one reduction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerograph.core.errors import ShardingError
from zerograph.optim.clip import groups_in, groups_of, order_of_norm, over_ranks, power_sums
from zerograph.runtime import delayed
from zerograph.runtime.dtensors import Groups
from zerograph.runtime.executor import late_gradients
from zerograph.runtime.torch_private import local_tensor
from zerograph.sharding.adopt import model_given


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of a model's parameters and gradients, the same on every rank.

    Attributes:
        p: order of the norms.
        weights: norm of each parameter, by name.
        gradients: norm of the gradient of each parameter that has one, by name.
    """

    p: float
    weights: dict[str, float]
    gradients: dict[str, float]

    @property
    def weight(self) -> float:
        """Norm of all parameters together."""
        return self._joint(self.weights.values())

    @property
    def gradient(self) -> float:
        """Norm of all gradients together, as :func:`zerograph.clip_grad_norm_` returns it."""
        return self._joint(self.gradients.values())

    def _joint(self, norms: Iterable[float]) -> float:
        every = torch.tensor([0.0, *norms], dtype=torch.float64, device="cpu")
        return float(torch.linalg.vector_norm(every, self.p))


def norms(model: nn.Module, norm_type: float = 2.0) -> Norms:
    """Norms of the parameters of ``model`` and of their gradients, over the shards of all ranks.

    Sharded and plain models alike. All ranks call it together. It waits for the device: call it when you log.

    Args:
        model: a tied parameter counts once, under its first name.
        norm_type: the p of the norms; ``math.inf`` is the largest absolute value.

    Raises:
        ConfigError: ``model`` is none, or ``norm_type`` is not positive.
        ShardingError: a parameter is on the meta device.
        UnsupportedError: a tensor is partial over ranks, or they lie on several meshes.
    """
    order = order_of_norm(norm_type)
    params = dict(model_given(model, "zerograph.norms").named_parameters())
    _refuse_meta(params)
    delayed.settle(params.values())
    late_gradients.complete(params.values())
    kinds: dict[Groups, list[Tensor]] = {}
    for param, groups in zip(params.values(), groups_of(list(params.values())), strict=True):
        kinds.setdefault(groups, []).append(param)
    powers = torch.cat([_powers([], order), *_over_ranks(kinds, order)], dim=1)
    found = (powers if math.isinf(order) else powers ** (1.0 / order)).tolist()
    places = {id(p): i for i, p in enumerate(itertools.chain.from_iterable(kinds.values()))}
    weights, gradients = ({n: row[places[id(p)]] for n, p in params.items()} for row in found)
    return Norms(order, weights, {n: gradients[n] for n, p in params.items() if p.grad is not None})


def _refuse_meta(params: dict[str, nn.Parameter]) -> None:
    for name, param in params.items():
        if param.is_meta:
            raise ShardingError(
                f"parameter {name} is on the meta device and has no values", "call zerograph.materialize(model) first"
            )


def _powers(params: Sequence[Tensor], p: float) -> Tensor:
    """This rank's sums of powers: a row of weights, and one of gradients with 0 where there is none."""
    found = torch.zeros(2, len(params), dtype=torch.float64, device="cpu")
    both: tuple[list[Tensor | None], ...] = (list(params), [param.grad for param in params])
    for row, tensors in zip(found, both, strict=True):
        present = {i: _as_floats(local_tensor(t.detach())) for i, t in enumerate(tensors) if t is not None}
        if present:
            row[list(present)] = power_sums(list(present.values()), p).to(row)
    return found


def _as_floats(tensor: Tensor) -> Tensor:
    """Quantized weights that are frozen may be integers."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()


def _over_ranks(kinds: Mapping[Groups, Sequence[Tensor]], p: float) -> list[Tensor]:
    """The same over all ranks. Each parameter has a place for its gradient: ranks add up vectors of one length."""
    powers = {kind: _powers(params, p) for kind, params in kinds.items()}
    # To where its groups communicate.
    there = {kind: powers[kind].to(local_tensor(kinds[kind][0]).device) for kind in kinds if kind}
    return [each.cpu() for each in (powers | over_ranks(there, p, groups_in(there))).values()]
