"""Gradients of parameters that ranks read as they like: reduced together when a backward ends.

Each rank has gradients of those that it read. The others count as zeros, as with DistributedDataParallel's
``find_unused_parameters``, and a parameter that no rank has read gets none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

import torch
from torch import Tensor

from zerograph.core.layout import Layout
from zerograph.core.plan import Param
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import Entry, sequence_of
from zerograph.runtime.executor import early, local_gradients
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.residency import StepCount
from zerograph.runtime.torch_private import after_backward, current_backward, placed_as

AT_ONCE = 64 * 2**20
"""Bytes of full tensors that one message brings, or a little more."""


_ALL: weakref.WeakSet[LateGradients] = weakref.WeakSet()
"""The late gradients of all backends: a reader of gradients is given parameters alone."""


def refuse_reading(params: Sequence[Tensor]) -> None:
    """Raises:
    UnsupportedError: the gradients of ``params`` are about to be read as averages, and are each rank's own.
    ConfigError: a backward has updated some of ``params`` by theirs.
    """
    local_gradients.refuse_reading(params)
    early.refuse_reading(params)


def complete(params: Iterable[Tensor]) -> None:
    """Gradients of ``params`` are about to be read on all ranks: see :meth:`LateGradients.complete`.

    Raises: as :func:`refuse_reading`.
    """
    params = list(params)
    refuse_reading(params)
    known = {id(param) for param in params} if _ALL else set()
    for late in [late for late in _ALL if not known.isdisjoint(late.expected)]:
        late.complete()


class LateGradients:
    """Those of one backend."""

    def __init__(self, comm: Communicator, steps: StepCount, accumulation: GradientAccumulation) -> None:
        _ALL.add(self)
        self._comm, self._steps, self._accumulation = comm, steps, accumulation
        # By ``id``, in the order in which all ranks first unsharded them.
        self._params: dict[int, tuple[Param, Tensor]] = {}
        self._own: dict[int, Tensor] = {}  # of this rank, full, from the backward that runs
        self._waiting: int | None = None  # the backward at whose end they are reduced
        self._expected = False

    def expect(self, params: Iterable[tuple[Param, Tensor]]) -> None:
        """A forward has unsharded ``params``, described and outward: ranks may come to have gradients of them."""
        for described, outward in params:
            if described.trainable:
                self._params[id(outward)] = described, outward  # in another dtype than last time, perhaps
                self._accumulation.late.add(described.name)
                self._expected = True

    @property
    def expected(self) -> Set[int]:
        """By ``id``, the parameters that ranks may have gradients of which are not reduced yet."""
        return self._params.keys() if self._expected else frozenset()

    def forget(self) -> None:
        """Drop the gradients that a failed backward left."""
        self._own.clear()

    def add(self, outward: Tensor, grad: Tensor) -> None:
        """A gradient of this rank, in a backward."""
        known = self._own.get(id(outward))
        self._own[id(outward)] = grad if known is None else known + grad
        self.reduce_after_backward()

    def reduce_after_backward(self, then: Callable[[], None] = lambda: None) -> None:
        """A backward runs through what ranks read as they like: at its end all reduce, whatever they have."""
        backward = current_backward()
        if self._waiting != backward:  # one that failed has reduced nothing
            self._waiting = backward
            after_backward(self._end)
        after_backward(then)

    def complete(self) -> None:
        """Reduce with the other ranks, if this one has not in a backward: its loss depended on no such parameter."""
        if self._expected and not self._accumulation.active:
            self._reduce()

    def _end(self) -> None:
        self._waiting = None
        self._keep_back() if self._accumulation.active else self._reduce()

    @torch.no_grad()
    def _keep_back(self) -> None:
        """Inside of ``no_sync`` gradients are held, and a later backward reduces them."""
        for described, outward in [self._params[key] for key in self._own]:
            (mark,) = self._accumulation.add([described], [self._own[id(outward)]], self._comm)
            _accumulate(outward, mark)
        self._own.clear()

    @torch.no_grad()
    def _reduce(self) -> None:
        own, self._own, self._expected = self._own, {}, False
        before = self._accumulation.state
        self._accumulation.forget_dropped()  # while all that tell are there
        held = {key: self._accumulation.withdraw(described) for key, (described, _) in self._params.items()}
        # One by one, as autograd and GradientAccumulation do: the sum has the same bits.
        rounds = [[(*pair, grads.get(key)) for key, pair in self._params.items()] for grads in (own, held)]
        names = [described.name for described, _ in self._params.values()]
        entry = Entry("reduction of gradients of uncompiled forwards", sequence_of(names), self._steps.own)
        reduced: list[tuple[Tensor, Tensor]] = []
        try:
            with together(self._comm, entry):
                found = iter(self._anywhere([grad is not None for each in rounds for *_, grad in each]))
                for each in rounds:
                    reduced += self._reduced([one for one in each if next(found)])
        except BaseException:
            self._accumulation.state = before  # of micro-batches that did not fail
            raise
        for outward, grad in reduced:
            _accumulate(outward, grad)

    def _anywhere(self, has: Sequence[bool]) -> list[bool]:
        """For each gradient, whether any rank has one."""
        single = "float32"
        whole = Layout("whole", self._comm.world_size)
        param = Param("which parameters have gradients", (len(has),), single, single, single, False, whole)
        mine = torch.tensor(has, dtype=torch.float32, device=next(iter(self._params.values()))[1].device)
        (share,) = self._comm.finish_reduce(self._comm.start_reduce([param], [mine]))
        return (share > 0).tolist()  # type: ignore[no-any-return]

    def _reduced(self, grads: Sequence[tuple[Param, Tensor, Tensor | None]]) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's rows of the averages of ``grads``, by outward parameter; this rank may have some of them."""
        own = {id(outward): grad for _, outward, grad in grads}
        for part in in_messages([(described, outward) for described, outward, _ in grads]):
            params = [described for described, _ in part]
            full = [_or_zeros(own[id(outward)], described, outward) for described, outward in part]
            results = self._comm.finish_reduce(self._comm.start_reduce(params, full))
            yield from ((outward, result) for (_, outward), result in zip(part, results, strict=True))


def _or_zeros(grad: Tensor | None, described: Param, outward: Tensor) -> Tensor:
    dtype = torch_dtype(described.reduce_dtype)
    if grad is None:
        return torch.zeros(described.shape, dtype=dtype, device=outward.device)
    return grad.to(dtype).contiguous()


def _accumulate(outward: Tensor, own: Tensor) -> None:
    """Add this rank's rows of a gradient as autograd does, with the user's hooks."""
    rows = own.to(outward.device, outward.dtype)
    torch.autograd.backward([outward], [placed_as(rows, outward)])


def in_messages(params: Sequence[tuple[Param, Tensor]]) -> Iterator[list[tuple[Param, Tensor]]]:
    """``params`` in parts that a message holds."""
    part: list[tuple[Param, Tensor]] = []
    for each in params:
        part.append(each)
        if sum(described.gathered_bytes for described, _ in part) >= AT_ONCE:
            yield part
            part = []
    if part:
        yield part
