"""Reduced gradients on their way to their tiers, on the host or on NVMe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerograph.core.machine import Tier, is_disk
from zerograph.core.plan import Param, ParamTile
from zerograph.runtime.buffers import tile_of
from zerograph.runtime.offload.blocks import Block
from zerograph.runtime.offload.locations import Locations
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.offload.slots import Slots
from zerograph.runtime.offload.spilled import SpilledGradients


class OffloadedGradients:
    """Moves gradients, and knows where the last ones are.

    Attributes:
        tiers: where those of a block's parameters go.
        on_nvme: those that go there.
    """

    def __init__(self, room: ArenaRoom, locations: Locations, slots: Slots) -> None:
        self._locations, self._slots = locations, slots
        self.on_nvme = SpilledGradients(room, locations, self._free_slots)
        self.tiers: dict[Block, Tier] = {}

    def spill(self, params: Sequence[Param], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Begin to move gradients to their tiers, where there are some; returns what autograd gets in their places.

        Raises:
            StorageError: there is no room, or a transfer failed.
        """
        made = {p.name: self._own(p, grad) for p, grad in zip(params, grads, strict=True) if grad is not None}
        offloaded: dict[Tier, dict[str, Tensor]] = {}
        for name, grad in made.items():
            offloaded.setdefault(self._tier_of(name, grad.dtype), {})[name] = grad
        given: dict[str, Tensor | None] = {}
        for tier, leaving in offloaded.items():
            if tier != "device":
                given |= self._spill_to_nvme(leaving) if is_disk(tier) else self._locations.hosted.spill(leaving)
        # model.to(dtype) has brought the others here.
        return [given.get(p.name, grad) for p, grad in zip(params, grads, strict=True)]

    def spill_tile(self, tile: ParamTile, grad: Tensor, into: Tensor | None) -> Tensor | None:
        """Begin to move a tile of a gradient, of which the first comes first, to its tier.

        Returns:
            The tensor for autograd in place of the whole gradient: for the first tile as :meth:`spill`, then ``into``,
            which that gave.

        Raises:
            StorageError: there is no room, or a transfer failed.
        """
        locations = self._locations
        like, grad = locations.local(tile.name).detach(), self._own(tile, grad)
        if tile.begin and not len(grad):
            return into
        tier = self._tier_of(tile.name, grad.dtype)
        if tier == "host":
            return locations.hosted.spill_tile(tile, grad, into)
        if is_disk(tier) and like.is_contiguous():
            given = self.on_nvme.spill_tile(locations.blocks[tile.name], tile, grad)
            return given if tile.begin == 0 else into
        # It leaves as a whole, if at all: its rows lie all over it.
        if tile.begin == 0:
            into = torch.empty_like(like, dtype=grad.dtype, device=grad.device)
        assert into is not None
        if locations.host is not None:
            locations.host.wait_for_gradients()
        tile_of(tile, into).copy_(grad)
        return into if tier == "device" or tile.end < len(like) else self._spill_to_nvme({tile.name: into})[tile.name]

    def _own(self, param: Param, grad: Tensor) -> Tensor:
        """A reduced gradient, or a tile of it, without the rows that pad the last shards."""
        rows = tile_of(param, self._locations.local(param.name))
        return grad[: len(rows)] if isinstance(param, ParamTile) else grad

    def _tier_of(self, name: str, dtype: torch.dtype) -> Tier:
        """Where a gradient in ``dtype`` is to go."""
        block = self._locations.blocks.get(name)
        if block is None:
            return "host" if name in self._locations.on_host or self._locations.lies_on_host(name) else "device"
        tier = self.tiers[block]
        # model.to(dtype) has brought the parameter here.
        return "device" if is_disk(tier) and dtype != block.dtype else tier

    def stage(self, params: Sequence[Param], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Begin to copy gradients, or tiles of them, to the host, from where :meth:`spill` moves them on."""
        made = {p.name: self._own(p, grad) for p, grad in zip(params, grads, strict=True) if grad is not None}
        return [*self._locations.hosted.stage(made).values()]

    def left_behind(self, params: Sequence[Param]) -> bool:
        """Whether one of ``params`` is in another memory than what a backward makes, as an earlier plan has it."""
        return any(self._locations.lies_on_host(p.name) for p in params)

    def _spill_to_nvme(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        by_block: dict[Block, dict[str, Tensor]] = {}
        for name, grad in grads.items():
            by_block.setdefault(self._locations.blocks[name], {})[name] = grad
        given: dict[str, Tensor | None] = {}
        for block, own in by_block.items():
            given |= self.on_nvme.spill(block, own)
        return given

    def _free_slots(self) -> list[Tensor]:
        self._slots.wait()
        return self._slots.of_gradients

    def wait(self) -> None:
        """Return when all that :meth:`spill` began is done.

        Raises:
            StorageError: a transfer failed.
        """
        if self._locations.host is not None:
            self._locations.host.wait_for_gradients()
        self.on_nvme.wait()

    def stay(self, block: Block) -> bool:
        """Whether the gradients of ``block`` are on a device that has another memory than the host, which updates."""
        return self._locations.host is not None and self.tiers[block] == "device"
