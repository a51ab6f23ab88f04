"""Updates that programs see one step later, of one optimizer: ZeRO-Offload's one-step delayed parameter update (Ren et
al., 2021).

A step begins to update what programs gather copies of, on the host beside the next forward and backward. The next step
waits for it, lets the copies follow, and begins its own update. One copy is enough where what is updated is in memory:
it changes in a step, while nothing computes. Of what passes through slots on its way back to NVMe, an update writes a
second copy. A parameter that programs read itself cannot change beside them. Its gradients and the values of its groups
are kept, and the next step updates it first, so that all parameters are equally late.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.core.machine import is_disk
from zerograph.optim.factor import Factor
from zerograph.optim.owner import Owner, StepsOf, Untouched
from zerograph.optim.parts import UpdateRow
from zerograph.optim.update import PendingUpdate
from zerograph.runtime import delayed


class DelayedSteps(StepsOf):
    """A :class:`~zerograph.runtime.delayed.DelayedUpdate`.

    How many ordinary steps are still to come is in the groups, as ``warmup``: state dicts have it.

    Attributes:
        changing: the parameters of the update that is under way, and those that are written to NVMe together with them.
    """

    def __init__(self, optimizer: Owner) -> None:
        super().__init__(optimizer)
        self._pending: tuple[PendingUpdate, list[UpdateRow], Factor] | None = None  # beside, behind it, their factor
        self._seen = Untouched([])  # of what changes, as the update began
        self.changing: list[Tensor] = []
        delayed.follow(self)

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
        beside, behind = self._rows(late)
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
        self._pending, self.changing, self._seen = (update, behind, factor), changing, Untouched(changing)
        store.unsettled.add(self)
        update.stream_beside(store.in_background)

    def _rows(self, late: set[int]) -> tuple[list[UpdateRow], list[UpdateRow]]:
        """The rows that are updated beside programs, and those that are not."""
        rows: tuple[list[UpdateRow], list[UpdateRow]] = [], []
        for index, group in enumerate(self.optimizer.param_groups):
            values = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}  # of this step
            for place in (0, 1):
                params = [p for p in group["params"] if (id(p) in late) is (place == 0)]
                if params:
                    layout = self.optimizer.layout((index, place), group, params)
                    rows[place].append(UpdateRow((index, place), values, layout, layout.gradients()))
        return rows

    @torch.inference_mode(False)  # an evaluation settles, and copies serve training afterwards
    @torch.no_grad()
    def settle(self) -> None:
        """Return when the last update has ended, and programs see its values.

        Raises:
            Exception: what it failed with. Nothing goes on then before a checkpoint is loaded.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self.changing = []
        opt, (update, behind, factor) = self.optimizer, pending
        if opt.store is not None:
            opt.store.unsettled.discard(self)
        try:
            self._refuse_changed()
            update.wait()
            opt.update(behind, factor).wait()
        except BaseException as error:
            if opt.store is not None:
                opt.store.slots.wait()  # before a checkpoint is loaded
            self.failed(error)
            raise
        if opt.steps is not None:
            opt.steps.updated()

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

    def _refuse_changed(self) -> None:
        changed = self._seen.changed
        if changed:
            raise ZeroGraphError(
                f"{len(changed)} parameters, the first of shape {list(changed[0].shape)}, were written to while {self} "
                "with delayed=True updated them: their values may be either",
                "call optimizer.settle() before you change parameters; now load a checkpoint",
            )

    def _refuse_idle(self, why: str) -> NoReturn:
        raise ConfigError(
            f"{self}(delayed=True): nothing can be updated while the model computes: {why}",
            'zerograph.backend(offload="optimizer") keeps copies on a device with a memory of its own, and elsewhere '
            'with dtype=torch.bfloat16; so does "gradients" with tier="host", and "parameters" there with that dtype '
            "on the host; or leave delayed out",
        )

    def refuse(self, what: str, hint: str) -> NoReturn:
        """Raises:
        ConfigError: always.
        """
        raise ConfigError(f"{what} with delayed=True: the update of a step ends in the next one", hint)
