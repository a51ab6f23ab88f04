"""Updates that need more of a parameter than this rank has: a whole matrix, or a norm of all of it.

All parameters of a step are updated together, so that ranks exchange few messages. Parameters, gradients and states on
the host or NVMe are ordinary tensors here, and copies that programs gather of them follow as they follow any edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from zerograph.optim.algorithm import Algorithm, Joint, OnDevice, RanksOf
from zerograph.optim.tensors import Gradients
from zerograph.runtime.comm.entry import reason_of
from zerograph.runtime.offload.shards import ShardStore


def in_order(given: Sequence[OnDevice]) -> list[tuple[str, OnDevice, int]]:
    """Names of all members, with their places, in one order on all ranks: parts have none, since a parameter of which a
    rank has no rows has no states on NVMe there, and is in another part."""
    groups = list(dict.fromkeys(id(own.group) for own in given))
    found = [
        (groups.index(id(own.group)), member.index, own, place)
        for own in given
        for place, member in enumerate(own.members)
    ]
    found.sort(key=lambda each: each[:2])
    return [(f"parameter {index} of group {group}", own, place) for group, index, own, place in found]


class JointUpdate:
    """The joint updates of one step; they have changed nothing before :meth:`run`."""

    def __init__(
        self, parts: Iterable[tuple[Algorithm, OnDevice, Gradients]], ranks: RanksOf, store: ShardStore | None
    ) -> None:
        """``parts`` are those of joint algorithms, with all gradients of each.

        Raises:
            UnsupportedError: one of their parameters cannot be updated.
        """
        self._parts, self._store = list[tuple[OnDevice, Gradients]](), store
        together: dict[Joint, list[OnDevice]] = {}
        for algorithm, given, grads in parts:
            assert algorithm.joint is not None  # others are updated one by one
            self._parts.append((given, grads))
            together.setdefault(algorithm.joint, []).append(given)
        self._updates = [joint(all_of, ranks) for joint, all_of in together.items()]

    @torch.no_grad()
    def run(self, failed: Callable[[str], None]) -> None:
        """Update everything; ``failed`` hears why a part of it was not."""
        try:
            for given, _ in self._parts:
                given.part.follow_copies()
            for update in self._updates:
                update()
            for given, _ in self._parts:
                if given.part.mastered and given.members:
                    torch._foreach_copy_([m.local for m in given.members], given.targets)
        except BaseException as error:
            failed(reason_of(error))  # states may be those of this step, and parameters those before it
            raise
        for given, grads in self._parts:
            self._tell(list(given.part.updated(grads)))

    def _tell(self, changed: list[Tensor]) -> None:
        if self._store is not None:
            self._store.copies.touched(changed)
