"""An operator of graphs: tokens go to the ranks that have their experts, and results come back.

Counts of tokens differ by rank, expert and step, and nothing is dropped or padded (dropless, as in MegaBlocks,
arXiv:2211.15841). The backward computes the experts again, so that what a graph saves has the size of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph.core.arguments import require
from zerograph.core.errors import UnsupportedError
from zerograph.runtime.torch_private import resolve_group

Experts = Callable[..., Tensor]
"""``(tokens, expert, *parameters) -> results``: of ``[n, width]`` tokens, sorted by the local number of their expert,
``[n]``; n may be 0."""


def routed(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    experts: str,
    group: dist.ProcessGroup,
) -> Tensor:
    """For each token the sum of what the experts that it chose make of it, wherever these are; all ranks of ``group``
    call it together.

    Args:
        tokens: ``[tokens, width]`` of this rank.
        index: ``[tokens, k]``, the experts that each chose, numbered over the ranks of ``group``, in their order.
        weights: ``[tokens, k]``, by which their results are multiplied.
        parameters: of this rank's experts, ``[experts, ...]`` each; of DTensors this rank's parts.
        experts: the name of what computes them, known by :func:`register_experts`.
        group: ranks that have equally many experts each.

    Returns:
        ``[tokens, width]``.
    """
    own = [param.to_local() if isinstance(param, DTensor) else param for param in parameters]
    return torch.ops.zerograph.routed_experts(tokens, index, weights, own, experts, group.group_name)  # type: ignore[no-any-return]


def register_experts(name: str, compute: Experts) -> None:
    """Let ``name`` stand for ``compute`` in graphs, which layers that compute alike share and which are kept on disk:
    what computes something else has another one.

    Raises:
        ConfigError: ``name`` is empty.
    """
    require(bool(name), "experts have no name", "one that tells what they compute, such as 'swiglu'")
    _KNOWN[name] = compute


_KNOWN: dict[str, Experts] = {}


def _computing(name: str) -> Experts:
    if name not in _KNOWN:
        raise UnsupportedError(
            f"no experts are known as {name!r} in this process, whose graph another one made",
            "call divide_experts, or register_experts, before the model",
        )
    return _KNOWN[name]


@dataclass(frozen=True, slots=True)
class _Routes:
    """Who sends how many rows to whom: each choice of a token is a row.

    Attributes:
        group: the ranks.
        choices: of a token.
        order: the rows by the expert that they go to.
        sent, received: rows, by rank.
        grouped: the received rows by expert, which come by rank and then by expert.
        expert: of each, the local number.
    """

    group: dist.ProcessGroup
    choices: int
    order: Tensor
    sent: list[int]
    received: list[int]
    grouped: Tensor
    expert: Tensor

    @classmethod
    def of(cls, index: Tensor, each: int, group: dist.ProcessGroup) -> _Routes:
        """Those of tokens that chose ``index``, where each rank has so many experts: collective."""
        ranks, chosen = group.size(), index.reshape(-1)
        counts = chosen.new_zeros(ranks * each).scatter_add_(0, chosen, torch.ones_like(chosen)).view(ranks, each)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        # The host has to know them: it waits here, and nowhere else.
        sent, received = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
        local = torch.arange(each, device=index.device).repeat(ranks)
        local = local.repeat_interleave(coming.view(-1), output_size=sum(received))
        grouped = local.argsort(stable=True)
        return cls(group, index.shape[-1], chosen.argsort(stable=True), sent, received, grouped, local[grouped])

    def rows(self, tokens: Tensor) -> Tensor:
        """One of its token for each choice, in the order in which they go."""
        return tokens[self.order // self.choices]

    def there(self, rows: Tensor) -> Tensor:
        """Rows that are in that order, where their experts are, by expert."""
        return _exchanged(rows, self.sent, self.received, self.group)[self.grouped]

    def back(self, rows: Tensor) -> Tensor:
        """Results of experts, by token and choice: ``[tokens, k, ...]``."""
        by_rank = torch.empty_like(rows)
        by_rank[self.grouped] = rows
        came = _exchanged(by_rank, self.received, self.sent, self.group)
        found = torch.empty_like(came)
        found[self.order] = came
        return found.view(-1, self.choices, *rows.shape[1:])


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


@torch.library.custom_op("zerograph::routed_experts", mutates_args=())
def _routed(
    tokens: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], experts: str, group: str
) -> Tensor:
    compute, routes = _computing(experts), _Routes.of(index, len(parameters[0]), resolve_group(group))
    made = compute(routes.there(routes.rows(tokens)), routes.expert, *parameters)
    return (routes.back(made) * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


@torch.library.custom_op("zerograph::routed_experts_backward", mutates_args=())
def _routed_backward(
    grad: Tensor,
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    parameters: list[Tensor],
    trained: list[bool],
    experts: str,
    group: str,
) -> list[Tensor]:
    """Gradients of tokens, of weights, and of those parameters that are trained."""
    compute, routes = _computing(experts), _Routes.of(index, len(parameters[0]), resolve_group(group))
    came, of_results = routes.there(routes.rows(torch.cat([tokens, grad.to(tokens.dtype)], dim=1))).chunk(2, dim=1)
    shares = routes.there(weights.reshape(-1)[routes.order])

    learned = [place for place, train in enumerate(trained) if train]

    def run(rows: Tensor, *given: Tensor) -> Tensor:
        changed = dict(zip(learned, given, strict=True))
        return compute(rows, routes.expert, *(changed.get(place, param) for place, param in enumerate(parameters)))

    # Autograd has no say below an operator; functorch has.
    made, backward = torch.func.vjp(run, came, *(parameters[place] for place in learned))  # type: ignore[misc]
    of_rows, *of_params = backward((of_results * shares.unsqueeze(1)).to(made.dtype))
    of_shares = (made.to(weights.dtype) * of_results.to(weights.dtype)).sum(1)
    return [routes.back(of_rows).sum(1), routes.back(of_shares), *(g.contiguous() for g in of_params)]


@_routed.register_fake
def _(tokens: Tensor, *_: object) -> Tensor:
    return torch.empty_like(tokens, memory_format=torch.contiguous_format)


@_routed_backward.register_fake
def _(
    grad: Tensor, tokens: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], trained: list[bool],
    *_: object,
) -> list[Tensor]:  # fmt: skip
    made = [tokens, weights, *(p for p, train in zip(parameters, trained, strict=True) if train)]
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in made]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tokens, index, weights, parameters, ctx.experts, ctx.group = inputs
    ctx.save_for_backward(tokens, index, weights, *parameters)
    ctx.trained = [p.requires_grad for p in parameters]


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    tokens, index, weights, *parameters = ctx.saved_tensors
    of_tokens, of_weights, *found = torch.ops.zerograph.routed_experts_backward(
        grad, tokens, index, weights, parameters, ctx.trained, ctx.experts, ctx.group
    )
    rest = iter(found)
    return of_tokens, None, of_weights, [next(rest) if train else None for train in ctx.trained], None, None


_routed.register_autograd(_backward, setup_context=_save)
