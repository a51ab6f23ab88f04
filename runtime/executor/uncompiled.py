"""Collectives on parameters that code reads which is not compiled.

Programs are compared when they are compiled and when they begin. Code that is not compiled runs collectives as it reads
weights, and nobody knows before which. So each of its gathers and reductions is a program of its own, of one
collective, and ranks compare what it is of: in shared memory in the message itself, over process groups in a message of
16 bytes before it, as these end the process where messages differ in size. Ranks that read different parameters raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence

from torch import Tensor

from zerograph.core.plan import Param
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.comm.entry import ROUTES, Entry, reason_of, sequence_of
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.late_gradients import LateGradients, in_messages
from zerograph.runtime.executor.residency import StepCount

_ORDER = "every rank must read the same weights in the same order where code is not compiled"


class UncompiledReads:
    """Gathers and reductions of one backend's parameters, outside of its programs.

    Attributes:
        comm: between the ranks.
        known: the backend's parameters by ``id``, now and later.
        routes: whether ranks may read different parameters: where these are unsharded during a step anyway.
        late: gradients of such parameters.
        warned: forwards of which the user was warned that they read so.
    """

    def __init__(
        self,
        comm: Communicator,
        known: Container[int],
        steps: StepCount,
        accumulation: GradientAccumulation,
        stage: int,
    ) -> None:
        self.comm, self.known, self._steps = comm, known, steps
        self.routes = stage < 3
        self.late, self.warned = LateGradients(comm, steps, accumulation), set[str]()

    def __deepcopy__(self, _: object) -> UncompiledReads:
        """A copy of a model has the same ranks."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A model that came from a file has none before a backend takes it over."""
        return (type(None), ())

    def gather(self, param: Param, shard: Tensor, line: str) -> Tensor:
        """The full ``param``, which the user's ``line`` reads; all ranks call this.

        Raises:
            CollectiveMismatch: another rank does something else; on all ranks.
        """
        if not param.sharded:
            return _copied(param, shard)
        with self._alone(f"gather of {param.name}, which {line} reads uncompiled", param):
            (full,) = self.comm.finish_gather(self.comm.start_gather([param], [shard.detach()]))
        return full

    def gather_all(self, params: Sequence[tuple[Param, Tensor]], what: str) -> list[Tensor]:
        """All ``params``, given with this rank's shards, full: whatever ranks read of them in ``what``, which is not
        compiled. All ranks call this."""
        names = [param.name for param, _ in params]
        entry = Entry(f"{what}, which is not compiled", sequence_of(names), self._steps.own)
        full = [_copied(param, shard) if not param.sharded else None for param, shard in params]
        sharded = [pair for pair in params if pair[0].sharded]
        with together(self.comm, entry):
            found = (tensor for part in in_messages(sharded) for tensor in self._gathered(part))
            return [next(found) if tensor is None else tensor for tensor in full]

    def _gathered(self, part: Sequence[tuple[Param, Tensor]]) -> list[Tensor]:
        return self.comm.finish_gather(self.comm.start_gather(*zip(*part, strict=True)))  # type: ignore[arg-type]

    def reduce(self, param: Param, grad: Tensor, line: str) -> Tensor:
        """This rank's rows of the averaged gradient of ``param``, in the shard's dtype; likewise."""
        with self._alone(f"reduction of {param.name}, which {line} read uncompiled", param):
            (own,) = self.comm.finish_reduce(self.comm.start_reduce([param], [grad.contiguous()]))
        return own

    @contextlib.contextmanager
    def _alone(self, program: str, param: Param) -> Iterator[None]:
        """Around one collective. It ends without more messages on all ranks that take part in it, or on none: they have
        begun it. Their replicas hear of an error at their next program."""
        sequence = sequence_of([program.partition(" ")[0], param.name, str(param.shape)])
        entry = Entry(program, sequence, self._steps.own, _ORDER if self.routes else f"{_ORDER}; {ROUTES}")
        try:
            self.comm.enter(entry, compared=True)
            yield
        except BaseException as error:
            self.comm.abort(reason_of(error))
            raise


def _copied(param: Param, full: Tensor) -> Tensor:
    """An unsharded parameter, in the compute dtype; writing to the copy changes no parameter."""
    return full.detach().to(dtype=torch_dtype(param.compute_dtype), copy=True)
