"""Updates that go on behind their step, of one optimizer.

Inside of the next forward: programs wait bucket by bucket, where they first gather what is updated. The norm of all
gradients is known by the step's end, so that clipping and skipped steps change nothing, and no number differs from that
of an ordinary step. The time of an update hides behind the forward of the layers before it.

Seen by programs one step later: ZeRO-Offload's one-step delayed parameter update (Ren et al., 2021). A step begins to
update what programs gather copies of, on the host beside the next forward and backward. The next step waits for it,
lets the copies follow, and begins its own update. One copy is enough where what is updated is in memory: it changes in
a step, while nothing computes. Of what passes through slots on its way back to NVMe, an update writes a second copy. A
parameter that programs read itself cannot change beside them. Its gradients and the values of its groups are kept, and
the next step updates it first, so that all parameters are equally late.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.core.machine import is_disk
from zerograph.optim.factor import Factor
from zerograph.optim.owner import Owner, StepsOf
from zerograph.optim.parts import UpdateRow
from zerograph.optim.update import PendingUpdate
from zerograph.runtime import delayed
from zerograph.runtime.delayed import DelayedUpdate
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import Untouched, local_tensor

AT_ONCE = -1
"""Stands for the gather of parameters that no program gathers: the step itself updates them."""
ALL = -2
"""Stands for all gathers."""


@dataclass(slots=True)
class _LateUpdate:
    """An update under way.

    Attributes:
        seen: tensors that nobody else may write to meanwhile, by what they are.
        behind: rows that are updated once it has ended, and by which factor.
    """

    update: PendingUpdate
    seen: Mapping[str, Untouched]
    behind: tuple[Sequence[UpdateRow], Factor] | None = None


class LateSteps(StepsOf):
    """A :class:`~zerograph.runtime.delayed.DelayedUpdate`.

    Attributes:
        argument: asks for it.
        ends: when it does.
        changing: the parameters whose updates are under way, and those that are written to NVMe together with them.
    """

    argument: ClassVar[str]
    ends: ClassVar[str]

    def __init__(self, optimizer: Owner) -> None:
        super().__init__(optimizer)
        self._under_way: dict[int, _LateUpdate] = {}  # by the number of the first gather
        self._kept_in = set[DelayedUpdate]()
        self.changing: list[Tensor] = []
        delayed.follow(self)

    def _rows(self, place: Callable[[Tensor], int]) -> dict[int, list[UpdateRow]]:
        """The rows of all groups by the ``place`` of their parameters, with the values that the groups have now."""
        rows: dict[int, list[UpdateRow]] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            values = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            params: dict[int, list[Tensor]] = {}
            for param in group["params"]:
                params.setdefault(place(param), []).append(param)
            for number, own in params.items():
                layout = self.optimizer.layout((index, number), group, own)
                rows.setdefault(number, []).append(UpdateRow((index, number), values, layout, layout.gradients()))
        return rows

    def _keep(self, number: int, late: _LateUpdate, changing: Sequence[Tensor], kept_in: set[DelayedUpdate]) -> None:
        """Have ``late`` under way, and be known in ``kept_in`` until it has ended."""
        self._under_way[number] = late
        self.changing += changing
        self._kept_in = kept_in
        kept_in.add(self)

    def settle(self) -> None:
        """Return when all updates of the last step have ended, and programs see their values.

        Raises:
            Exception: one failed. Nothing goes on then before a checkpoint is loaded.
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
                late = self._under_way.get(number)
                if late is not None:
                    self._refuse_changed(late)
                    late.update.wait()
                    if late.behind is not None:
                        self.optimizer.update(*late.behind).wait()
                    del self._under_way[number]
        except BaseException as error:
            self._fail(error)
            raise
        if before and not self._under_way and keeps is not None:
            self._end()
            self._tell_seen()
        return len(self._under_way) < before

    def _tell_seen(self) -> None:
        """Programs see the values of the last step from here on."""

    def _end(self) -> None:
        self.changing = []
        self._kept_in.discard(self)

    def _fail(self, error: BaseException) -> None:
        for late in self._under_way.values():
            with contextlib.suppress(Exception):  # the first error is on its way to the caller
                late.update.wait()
        self._under_way.clear()
        if self.optimizer.store is not None:
            self.optimizer.store.slots.take()  # after Ctrl-C nothing waits for what streams
        self._end()
        self.failed(error)

    def _refuse_changed(self, late: _LateUpdate) -> None:
        for what, seen in late.seen.items():
            changed = seen.changed
            if changed:
                none = "zero_grad() as it is by default sets gradients to None, and needs no such call; "
                raise ZeroGraphError(
                    f"{len(changed)} {what}, the first of shape {list(changed[0].shape)}, were written to before "
                    f"{self.ends}, in which {self} with {self.argument} ends its step: values may be either",
                    f"call optimizer.settle() before you change {' or '.join(late.seen)}; "
                    f"{none if 'gradients' in late.seen else ''}now load a checkpoint",
                )

    def refuse(self, what: str, hint: str) -> NoReturn:
        """Raises:
        ConfigError: always.
        """
        raise ConfigError(f"{what} with {self.argument}: the update of a step ends in {self.ends}", hint)


class ForwardSteps(LateSteps):
    """Updates that end where the next forward first gathers what they change."""

    argument, ends = 'overlap="forward"', "the next forward"

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
        factor = opt.factor(self._rows(lambda _: ALL)[ALL], grad_scale, clip)
        if factor is None:
            opt.skipped += 1
            return
        found = self._rows(lambda p: gathers.get(id(p), AT_ONCE))
        rows = {n: own for n, every in found.items() if (own := [row for row in every if any(row.grads.addresses)])}
        opt.prepare([row for own in rows.values() for row in own])
        now = rows.pop(AT_ONCE, [])
        try:
            if now:
                opt.update(now, factor).wait()
            # All are made before the first one streams: making one may write to states.
            for number in (order := sorted(rows)):
                self._begin(store, number, rows[number], factor)
            for number in order:
                beside = functools.partial(store.in_background, more=number != order[-1])
                self._under_way[number].update.stream_beside(beside)
        except BaseException as error:
            self._fail(error)
            raise

    def _begin(self, store: ShardStore, number: int, rows: list[UpdateRow], factor: Factor) -> None:
        update = self.optimizer.update(rows, factor)
        given = [p for row in rows for p in row.layout.params if p.grad is not None]
        # A backward of a forward before this step must not find them: autograd refuses it by their versions.
        torch.autograd.graph.increment_version([t for p in given for t in (p, local_tensor(p))])
        changing = [*given, *store.locations.neighbours(given)]
        # An update on the device writes to what is on the host as anybody does.
        watched = Untouched(changing if store.copies.updates == "host" else [])
        grads = Untouched([p.grad for p in given if p.grad is not None])
        late = _LateUpdate(update, {"parameters": watched, "gradients": grads})
        self._keep(number, late, changing, store.fetches.following)

    def _refuse_idle(self) -> NoReturn:
        raise ConfigError(
            f'{self}(overlap="forward"): no compiled forward gathers its parameters, so that none could wait for '
            "their updates",
            "train with zerograph.backend(stage=1, 2 or 3), on one process with offload=, before the first step; or "
            "leave overlap out",
        )


class DelayedSteps(LateSteps):
    """Updates that programs see after the next step.

    How many ordinary steps are still to come is in the groups, as ``warmup``: state dicts have it.
    """

    argument, ends = "delayed=True", "the next step"

    def step(self, grad_scale: float | Tensor | None, clip: float | None) -> None:
        """Begin an update that programs see after the next step; or, of the first ones, make it at once.

        Raises:
            ConfigError: programs gather a copy of none of the parameters, so that nothing could run beside them.
            UnsupportedError: a gradient that cannot be updated; nothing has changed then.
        """
        opt = self.optimizer
        late, left = self._late_params(), min(g.get("warmup", opt.defaults["warmup"]) for g in opt.param_groups)
        if left:
            opt.start(grad_scale, clip).wait()
        else:
            self._begin(late, grad_scale, clip)
        for group in opt.param_groups:
            group["warmup"] = max(0, left - 1)

    def _begin(self, late: set[int], grad_scale: float | Tensor | None, clip: float | None) -> None:
        opt, store = self.optimizer, self.optimizer.store
        assert store is not None  # where copies are
        store.refuse_half_done()
        rows = self._rows(lambda p: id(p) in late)
        beside, behind = rows.get(True, []), rows.get(False, [])
        factor = opt.factor([*beside, *behind], grad_scale, clip)
        arrival = store.copies.leave(p for row in beside for p in row.layout.params)
        update = opt.update(beside, factor, arrival) if factor is not None else None
        given = [p for p in self.params if p.grad is not None]
        for param in given:
            param.grad = None  # the update has it
        if update is None or factor is None:
            opt.skipped += 1
            return
        changing = [*given, *store.locations.neighbours(given)]
        late_update = _LateUpdate(update, {"parameters": Untouched(changing)}, (behind, factor))
        self._keep(ALL, late_update, changing, store.unsettled)
        update.stream_beside(store.in_background)

    def _tell_seen(self) -> None:
        if self.optimizer.steps is not None:
            self.optimizer.steps.updated()

    def _late_params(self) -> set[int]:
        """By ``id``, the parameters that may change while programs compute."""
        store, params = self.optimizer.store, self.params
        if store is None:
            self._refuse_idle("no backend of zerograph has its parameters")
        if store.copies.updates == "device":
            self._refuse_idle('update="device" needs the device, which computes')
        places = store.locations.places()
        own = (places[id(param)].block for param in params if id(param) in places)
        if any(is_disk(store.gradients.tiers[block]) for block in own):
            self._refuse_idle("gradients on NVMe lie where the next backward writes its own")
        late = store.copies.make_late(p for p in params if not delayed.is_read_eagerly(p))
        if not late:
            self._refuse_idle("programs read the parameters themselves, and no copies of them in memory")
        return late

    def _refuse_idle(self, why: str) -> NoReturn:
        raise ConfigError(
            f"{self}(delayed=True): nothing can be updated while the model computes: {why}",
            'zerograph.backend(offload="optimizer") keeps copies on a device with a memory of its own, and elsewhere '
            'with dtype=torch.bfloat16; so does "gradients" with tier="host", and "parameters" there with that dtype '
            "on the host; or leave delayed out",
        )
