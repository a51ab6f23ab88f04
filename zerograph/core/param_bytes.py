"""Bytes of parameters: of a rank's part, as it is kept, gathered and reduced. Planner and lowering count by these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerograph.core.placement import copy_tier
from zerograph.core.plan import Placement
from zerograph.core.step import ITEM_SIZE, Param


class Plain(NamedTuple):
    """A parameter that stays the user's own, as on one rank: its bytes, and whether it is trained."""

    bytes: int
    trained: bool


def shard_bytes(param: Param) -> int:
    """Bytes of the largest shard of ``param``."""
    return param.chunk_elements * ITEM_SIZE[param.dtype]


def copy_bytes(param: Param) -> int:
    """Bytes of the largest shard of ``param`` in the dtype that it is gathered in."""
    return param.chunk_elements * ITEM_SIZE[param.compute_dtype]


def fetched_bytes(param: Param, placement: Placement, split: bool) -> int:
    """Bytes of the largest shard of ``param`` as it comes from where parameters live: its copy, or itself where
    :func:`~zerograph.core.placement.copy_tier` says that it has none."""
    return copy_bytes(param) if _is_copied(param, placement, split) else shard_bytes(param)


def is_full(param: Param, placement: Placement, split: bool) -> bool:
    """Whether the shard, or the copy that stands for it, is the parameter that is computed with: one rank gathers it in
    its own place."""
    return param.home.ranks == 1 and (param.dtype == param.compute_dtype or _is_copied(param, placement, split))


def _is_copied(param: Param, placement: Placement, split: bool) -> bool:
    return param.sharded and copy_tier(param, placement, split) is not None


def gathered_bytes(params: Iterable[Param]) -> int:
    """Bytes that an all-gather of ``params`` fills: every rank's rows, padded to the largest shard.

    An unsharded parameter is cast at most: kernels read a master that has the compute dtype.
    """
    return sum(p.padded_elements * ITEM_SIZE[p.compute_dtype] for p in params if p.gather or p.dtype != p.compute_dtype)


def sent_bytes(params: Iterable[Param]) -> int:
    """Bytes that all ranks together send in an all-gather of ``params``."""
    some = (p for p in params if p.gather or p.dtype != p.compute_dtype)
    return sum(p.sent_bytes * (p.home.ranks if p.gather else 1) for p in some)


def kept_in_host(params: Iterable[Param], hosts: int) -> int:
    """Bytes of a gather of ``params`` that come to one rank from its peers on all ``hosts``: its part of them all."""
    return sum(p.sent_bytes * hosts for p in params if p.gather)


def reduced_bytes(params: Iterable[Param]) -> int:
    """Bytes of the full gradients of ``params`` as they are summed over ranks.

    An all-reduce counts twice: its sums go back to all ranks.
    """
    return sum(_reduced(p) * (2 if p.reduction == "all-reduce" else 1) for p in params)


def _reduced(param: Param) -> int:
    if param.reduce_wire is not None:
        return param.term_bytes * param.home.ranks
    return param.elements * ITEM_SIZE[param.reduce_dtype]


def averaged_bytes(params: Iterable[Param]) -> int:
    """Bytes of a rank's part of the gradients of ``params`` as their average over replicas sends it."""
    return sum(p.term_bytes if p.reduce_wire is not None else shard_bytes(p) for p in params)


def sizes_of_states(params: Iterable[Param], moments: int) -> dict[str, int]:
    """Bytes that an optimizer keeps of the largest shard of each parameter that it updates, by name, where it is not
    known: ``moments`` tensors of every one that trains."""
    return {p.name: shard_bytes(p) * moments for p in params if p.trainable}


def state_bytes(params: Iterable[Param], moments: int) -> tuple[int, int]:
    """Bytes on the device between steps: those of the shards, and of the optimizer's moments."""
    params = tuple(params)
    return sum(shard_bytes(p) for p in params), sum(sizes_of_states(params, moments).values())


def update_bytes(param: Param, states: int) -> int:
    """Bytes that an update of the largest shard of ``param`` on the device reads and writes.

    The shard, its gradient and the ``states`` (bytes) are read, and all but the gradient written.
    """
    return _updated(shard_bytes(param), states)


def plain_updates(params: Iterable[Plain], moments: int) -> tuple[int, ...]:
    """The same of the user's own parameters that are trained, one by one."""
    return tuple(_updated(p.bytes, p.bytes * moments) for p in params if p.trained)


def _updated(values: int, states: int) -> int:
    return 3 * values + 2 * states
