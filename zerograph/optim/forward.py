"""Updates inside of the next forward, of one optimizer: begun by its step, and awaited bucket by bucket where programs
first gather what they update.

By then the norm of all gradients is known, so that clipping and skipped steps change nothing, and no number differs
from that of an ordinary step. The time of an update hides behind the forward of the layers before it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.optim.factor import Factor
from zerograph.optim.owner import Owner, StepsOf, Untouched
from zerograph.optim.parts import UpdateRow
from zerograph.optim.update import PendingUpdate
from zerograph.runtime import delayed
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import local_tensor

AT_ONCE = -1
"""Stands for the gather of parameters that no program gathers: the step itself updates them."""


class _Awaited(NamedTuple):
    """The update of the parameters that one gather brings."""

    update: PendingUpdate
    params: Untouched
    grads: Untouched


class ForwardSteps(StepsOf):
    """A :class:`~zerograph.runtime.delayed.ForwardUpdate`.

    Attributes:
        changing: the parameters whose updates are under way, and those that are written to NVMe together with them.
    """

    def __init__(self, optimizer: Owner) -> None:
        super().__init__(optimizer)
        self._under_way: dict[int, _Awaited] = {}  # by the number of the first gather
        self.changing: list[Tensor] = []
        delayed.follow(self)

    def step(self, grad_scale: float | Tensor | None, clip: float | None) -> None:
        """Begin updates that programs wait for, each before it reads what they change.

        Raises:
            ConfigError: programs gather none of the parameters, so that no forward could wait for one.
            UnsupportedError: a parameter or gradient that cannot be updated; nothing has changed then.
            StorageError: there is no room for states; nothing has changed then.
        """
        opt, store = self.optimizer, self.optimizer.store
        gathers = store.fetches.gathers() if store is not None else {}
        gathers = {id(p): gathers[id(p)] for p in self.params if id(p) in gathers and not delayed.is_read_eagerly(p)}
        if store is None or not gathers:
            self._refuse_idle()
        store.refuse_half_done()
        # The norm is summed in the order of an ordinary step.
        factor = opt.factor(self._rows({})[AT_ONCE], grad_scale, clip)
        if factor is None:
            opt.skipped += 1
            return
        rows = self._rows(gathers)
        opt.prepare([row for own in rows.values() for row in own])
        now = rows.pop(AT_ONCE, [])
        store.fetches.following.add(self)
        try:
            if now:
                opt.update(now, factor).wait()
            # All are made before the first one streams: making one may write to states.
            for number in (order := sorted(rows)):
                self._under_way[number] = self._begin(store, rows[number], factor)
            for number in order:
                beside = functools.partial(store.in_background, more=number != order[-1])
                self._under_way[number].update.stream_beside(beside)
        except BaseException as error:
            self._fail(error)
            raise

    def _begin(self, store: ShardStore, rows: list[UpdateRow], factor: Factor) -> _Awaited:
        update = self.optimizer.update(rows, factor)
        given = [p for row in rows for p in row.layout.params if p.grad is not None]
        # A backward of a forward before this step must not find them: autograd refuses it by their versions.
        torch.autograd.graph.increment_version([t for p in given for t in (p, local_tensor(p))])
        changing = [*given, *store.locations.neighbours(given)]
        self.changing += changing
        # An update on the device writes to what is on the host as anybody does.
        watched = changing if store.copies.updates == "host" else []
        return _Awaited(update, Untouched(watched), Untouched([p.grad for p in given if p.grad is not None]))

    def _rows(self, gathers: dict[int, int]) -> dict[int, list[UpdateRow]]:
        """The rows of each gather, whose number ``gathers`` has by ``id`` of the parameter."""
        rows: dict[int, list[UpdateRow]] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            params: dict[int, list[Tensor]] = {}
            for param in group["params"]:
                params.setdefault(gathers.get(id(param), AT_ONCE), []).append(param)
            for number, own in params.items():
                key = (index, number) if gathers else (index,)
                layout = self.optimizer.layout(key, group, own)
                grads = layout.gradients()
                if any(grads.addresses) or not gathers:
                    rows.setdefault(number, []).append(UpdateRow(key, group, layout, grads))
        return rows

    def settle(self) -> None:
        """Return when all updates of the last step have ended.

        Raises:
            Exception: an update failed. Nothing goes on then before a checkpoint is loaded.
        """
        self.wait_for(list(self._under_way))

    @torch.inference_mode(False)  # an evaluation settles, and copies serve training afterwards
    @torch.no_grad()
    def wait_for(self, gathers: Iterable[int]) -> bool:
        """Return when the updates of what ``gathers``, by their numbers, bring have ended, and whether nobody has
        waited for one of them before; raises as :meth:`settle`."""
        before = len(self._under_way)
        keeps = self._optimizer()  # which the updates under way refer to, and nobody else perhaps
        try:
            for number in gathers:
                bucket = self._under_way.get(number)
                if bucket is not None:
                    self._refuse_changed(bucket)
                    bucket.update.wait()
                    del self._under_way[number]
        except BaseException as error:
            self._fail(error)
            raise
        if not self._under_way and keeps is not None:
            self._end()
        return len(self._under_way) < before

    def _end(self) -> None:
        self.changing = []
        store = self.optimizer.store
        if store is not None:
            store.fetches.following.discard(self)

    def _fail(self, error: BaseException) -> None:
        for bucket in self._under_way.values():
            with contextlib.suppress(Exception):  # the first error is on its way to the caller
                bucket.update.wait()
        self._under_way.clear()
        if self.optimizer.store is not None:
            self.optimizer.store.slots.take()  # after Ctrl-C nothing waits for what streams
        self._end()
        self.failed(error)

    def _refuse_changed(self, bucket: _Awaited) -> None:
        for what, changed in (("parameters", bucket.params.changed), ("gradients", bucket.grads.changed)):
            if changed:
                raise ZeroGraphError(
                    f"{len(changed)} {what}, the first of shape {list(changed[0].shape)}, were written to before the "
                    f'forward in which {self} with overlap="forward" ends its step: values may be either',
                    "call optimizer.settle() before you change parameters or gradients (zero_grad() as it is by "
                    "default sets gradients to None, and needs no such call); now load a checkpoint",
                )

    def _refuse_idle(self) -> NoReturn:
        raise ConfigError(
            f'{self}(overlap="forward"): no compiled forward gathers its parameters, so that none could wait for '
            "their updates",
            "train with zerograph.backend(stage=1, 2 or 3), on one process with offload=, before the first step; or "
            "leave overlap out",
        )

    def refuse(self, what: str, hint: str) -> NoReturn:
        """Raises:
        ConfigError: always.
        """
        raise ConfigError(f'{what} with overlap="forward": the update of a step ends in the next forward', hint)
