"""The optimizer's update as tasks: on the device, and on the host bucket by bucket where the states live off it.

Gradients may be clipped by their norm, so no update begins before the whole backward has ended. Host updates then run
as a pipeline: gradients that stayed on the device come down, states on NVMe are read, updated and written through at
most :data:`BUFFERS` staging buffers, and new parameters go up again where they live on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from zerograph.core.machine import Tier
from zerograph.core.plan import Homes
from zerograph.core.timeline import Stream
from zerograph.planner.rates import Rates
from zerograph.planner.simulate import Memory, Task, on
from zerograph.planner.transfers import Transfer

BUFFERS = 3
"""Staging buffers on the host, each for one bucket or tile: one being read, one in use, one being written."""
GRADIENT, STATES, COPY = "staged gradient", "staged states", "staged copy"


class Step(Protocol):
    """What updates are added to: a :class:`~zerograph.planner.run.Run`."""

    def add(self, task: Task) -> int:
        """Append ``task``; returns its index."""

    def took(self, what: str, label: str, tier: Tier, size: int, task: int) -> None:
        """``task`` takes memory."""

    def gave(self, what: str, label: str, tier: Tier, size: int, task: int) -> None:
        """That memory is free at the end of ``task``."""


class HostUpdates:
    """Updates on the host, in the order in which they are asked for."""

    def __init__(self, rates: Rates, step: Step, start: tuple[int, ...]) -> None:
        """``start``: tasks that have to end before the first update begins."""
        self.rates, self.step, self.start = rates, step, start
        self.released: list[tuple[int, ...]] = []  # per update the tasks after which its staging buffer is free

    def update(self, part: Transfer, homes: Homes, spilled: int | None) -> None:
        """Update one bucket or tile whose states live off the device.

        Args:
            spilled: the task that moved its gradient off the device; None when it stayed there.
        """
        shards, staging = part.shards, self.rates.staging
        free = self.start
        if len(self.released) >= BUFFERS:
            free = tuple(sorted({*free, *self.released[-BUFFERS]}))
        inputs = [*self._gradient(part, homes, free, spilled), *self._states(part, homes, free, spilled)]
        used = 0 if homes.gradients == "host" or not self._copies(homes.gradients) else shards.gradient
        stays = staging == "device" and homes.parameters == "device"
        copy = 0 if homes.parameters == "host" or stays else shards.copy
        after = tuple(sorted({*free, *inputs}))
        seconds = self.rates.host_update(shards.traffic)
        updated = self._task("update", part, "cpu_update", seconds, after, on(staging, copy), on(staging, used))
        self.step.gave(GRADIENT, part.label, staging, used, updated)
        self.step.took(COPY, part.label, staging, copy, updated)
        self.released.append(self._results(part, homes, copy, updated))

    def _copies(self, tier: Tier) -> bool:
        """Whether what lives on ``tier`` needs a copy in a staging buffer to be read by an update."""
        return tier == "nvme" or self.rates.staging == "host"

    def _gradient(self, part: Transfer, homes: Homes, free: tuple[int, ...], spilled: int | None) -> Iterator[int]:
        if homes.gradients == "device" and self._copies("device"):
            size = part.shards.gradient
            seconds = self.rates.transfer("d2h", size)
            task = self._task("spill gradient of", part, "d2h", seconds, free, on("host", size), ())
            self.step.took(GRADIENT, part.label, "host", size, task)
            yield task
        elif spilled is not None:
            yield spilled

    def _states(self, part: Transfer, homes: Homes, free: tuple[int, ...], spilled: int | None) -> Iterator[int]:
        states = part.shards.optimizer if homes.optimizer == "nvme" else 0
        read = states + (part.shards.gradient if homes.gradients == "nvme" else 0)
        if read:
            after = free if spilled is None else tuple(sorted({*free, spilled}))
            seconds = self.rates.transfer("nvme_read", read)
            task = self._task("read states of", part, "nvme_read", seconds, after, on(self.rates.staging, read), ())
            self.step.took(STATES, part.label, self.rates.staging, states, task)
            self.step.took(GRADIENT, part.label, self.rates.staging, read - states, task)
            yield task

    def _results(self, part: Transfer, homes: Homes, copy: int, updated: int) -> tuple[int, ...]:
        """What an update has made goes home; returns the tasks after which its staging buffer is free."""
        shards, staging, ends = part.shards, self.rates.staging, [updated]
        if homes.optimizer == "nvme":
            write = shards.optimizer + (shards.copy if homes.parameters == "nvme" else 0)
            seconds = self.rates.transfer("nvme_write", write)
            written = self._task("write states of", part, "nvme_write", seconds, (updated,), (), on(staging, write))
            self.step.gave(STATES, part.label, staging, shards.optimizer, written)
            self.step.gave(COPY, part.label, staging, write - shards.optimizer, written)
            ends.append(written)
        if homes.parameters == "device" and copy:
            seconds = self.rates.transfer("h2d", copy)
            fetched = self._task("fetch parameters of", part, "h2d", seconds, (updated,), (), on(staging, copy))
            self.step.gave(COPY, part.label, staging, copy, fetched)
            ends.append(fetched)
        return tuple(ends)

    def _task(
        self, what: str, part: Transfer, stream: Stream, seconds: float, after: tuple[int, ...], takes: Memory,
        gives: Memory,
    ) -> int:  # fmt: skip
        return self.step.add(Task(f"{what} {part.label}", stream, seconds, after, takes, gives, part.name))
