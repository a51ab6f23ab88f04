"""The interface of an optimizer for updates that run beside a backward or a forward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from zerograph.optim.factor import Factor
from zerograph.optim.parts import UpdateRow
from zerograph.optim.tensors import GroupLayout
from zerograph.optim.torch_private import tell_failed_step
from zerograph.optim.update import PendingUpdate
from zerograph.runtime.comm.entry import reason_of
from zerograph.runtime.executor.early import Arrival
from zerograph.runtime.executor.residency import StepCount, params_in
from zerograph.runtime.offload.fetches import FetchedRun
from zerograph.runtime.offload.shards import ShardStore


class Owner(Protocol):
    """The part of :class:`~zerograph.optim.host.HostOptimizer` that is needed."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    store: ShardStore | None
    steps: StepCount | None
    skipped: int

    @property
    def early(self) -> object:
        """Its updates inside of backwards, where it makes some."""

    def layout(self, key: tuple[int, ...], group: Mapping[str, Any], params: Sequence[Tensor]) -> GroupLayout:
        """The layout of some ``params`` of a group, kept under ``key``."""

    def factor(self, rows: Sequence[UpdateRow], grad_scale: float | Tensor | None, clip: float | None) -> Factor | None:
        """The factor of the gradients; None to skip the step."""

    def start(self, grad_scale: float | Tensor | None, clip: float | None) -> PendingUpdate:
        """Begin an ordinary step."""

    def prepare(self, rows: Sequence[UpdateRow]) -> object:
        """Make states that are missing."""

    def update(
        self,
        rows: Sequence[UpdateRow],
        factor: Factor,
        arrival: Arrival | None = None,
        kept: Sequence[FetchedRun] = (),
    ) -> PendingUpdate:
        """Begin to update."""

    def leave_half_done(self, why: str) -> None:
        """Do not go on before a checkpoint is loaded."""


class StepsOf:
    """Updates of one optimizer, which it does not keep alive."""

    def __init__(self, optimizer: Owner) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Owner:
        """The optimizer whose updates these are."""
        found = self._optimizer()
        assert found is not None  # whoever asks has it, or an update is under way and keeps it
        return found

    @property
    def params(self) -> list[Tensor]:
        """All that the optimizer has."""
        return params_in(self.optimizer.param_groups)

    def failed(self, error: BaseException) -> None:
        """An update ended half done by ``error``, which is on its way to the caller: the other ranks hear of it."""
        self.optimizer.leave_half_done(reason_of(error))
        tell_failed_step(self.optimizer, error)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return type(self.optimizer).__name__
