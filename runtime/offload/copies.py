"""Copies that programs gather in place of parameters: they follow what updates and users write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from zerograph.core.plan import Update
from zerograph.runtime.offload.hosted import Copy, host_like
from zerograph.runtime.offload.locations import COPY, PARAMETER, Locations
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.offload.slots import Slots
from zerograph.runtime.torch_private import local_tensor, versions


class Copies:
    """The copies, and how updates reach the parameters that they are of.

    Attributes:
        updates: where what is on the host is updated, there or on the device.
    """

    def __init__(self, room: ArenaRoom, locations: Locations, slots: Slots) -> None:
        self._room, self._locations, self._slots = room, locations, slots
        self._copies: dict[str, Copy] = {}  # by parameter
        self.updates: Update = "host"

    def add(self, name: str, copy: Copy | None) -> None:
        """From now on programs gather ``copy`` in place of a parameter, unless that is None."""
        if copy is not None:
            self._copies[name] = copy

    def known(self, name: str) -> Copy | None:
        """The copy of a parameter; None where it has none, or has been given other memory."""
        if self._locations.has_left(name):
            self._copies.pop(name, None)
        return self._copies.get(name)

    def fresh(self, name: str) -> Copy | None:
        """The copy that is gathered in place of a parameter, with its values of now; None where it has none."""
        copy = self.known(name)
        if copy is None:
            return None
        param, host = self._locations.params[name], self._locations.host
        now = versions(param)
        if copy.seen != now:
            if copy.cast is not None:
                self._locations.hosted.wait_for_parameters()
                copy.cast.copy_(local_tensor(param).detach())
            elif copy.tensor is not None and host is not None:
                host.upload({name: copy})
            elif copy.tensor is not None:
                copy.tensor.copy_(local_tensor(param).detach())
            else:
                self._cast(name, copy.dtype)
            copy.seen = now
        return copy

    def _cast(self, name: str, dtype: torch.dtype) -> None:
        """Write the copy of a parameter on NVMe anew, a slot at a time."""
        locations, arena = self._locations, self._room.arena
        local, block = locations.local(name).detach(), locations.blocks[name]
        flat, slot = local.as_strided((local.numel(),), (1,)), self._slots.free().view(dtype)
        for begin in range(0, local.numel(), len(slot)):
            part = flat[begin : begin + len(slot)]
            cast = slot[: len(part)].copy_(part)
            offset = (block.begins[name] + begin) * dtype.itemsize
            arena.wait(arena.write(locations.copied[block], cast, offset=offset))

    def copy_of(self, param: Tensor) -> Tensor | None:
        """The copy that an update of ``param`` writes too; None where it has none in the memory of the update."""
        name = self._locations.names().get(id(param), "") if self._copies else ""
        copy = self.known(name)
        if copy is None:
            return None
        if copy.late is not None:
            return copy.late
        # On a split machine an update on the host writes what is there; what is elsewhere follows.
        if self._locations.host is not None:
            is_there = name in self._locations.on_host and self.updates == "host"
            return copy.cast if is_there and not copy.is_late else None
        return copy.tensor

    def make_late(self, params: Iterable[Tensor]) -> set[int]:
        """Those of ``params``, by ``id``, that may be updated while programs compute, which gather copies of them in
        memory. From now on no update writes to these copies: they follow it (:meth:`updated`)."""
        moving, at = set(), self._locations
        for name, copy in self._of(params):
            if name in at.on_host:
                at.changes += not copy.is_late
                copy.is_late = True
            elif name in at.blocks and (copy.tensor is not None or copy.cast is not None):
                if copy.late is None:  # what follows later would be read from NVMe once more
                    like = torch.empty_like(at.local(name), dtype=copy.dtype, device="meta")
                    copy.late = (
                        host_like(like, at.host.memory) if at.host is not None else torch.empty_like(like, device="cpu")
                    )
                    at.changes += 1
            else:
                continue
            moving.add(id(at.params[name]))
        return moving

    def leave(self, params: Iterable[Tensor]) -> Callable[[], None]:
        """Let programs compute with copies of ``params`` as these are now; returns what waits until ``params`` may be
        written to."""
        for name, _ in self._of(params):
            self.fresh(name)
        host = self._locations.host
        return host.ascent() if host is not None else lambda: None

    def begin_to_follow(self, name: str) -> Tensor | None:
        """The copy, flat, that is to be brought the values that an update streams of a parameter; None where it has
        none, or streams that too. It counts as stale until :meth:`updated` says otherwise."""
        copy = self.known(name) if self._locations.host is not None else None
        if copy is None or copy.late is not None:
            return None
        copy.seen = None
        copy.renew()
        found = copy.tensor if copy.cast is None else copy.cast
        return found.as_strided((found.numel(),), (1,)) if found is not None else None

    def late(self, name: str) -> Tensor | None:
        """The second copy of a parameter, flat, which an update writes while programs compute; None where it has none.
        Kernels write it themselves, but of a parameter that follows its master."""
        copy = self.known(name)
        late = copy.late if copy is not None else None
        return late.as_strided((late.numel(),), (1,)) if late is not None else None

    def through_device(self, param: Tensor) -> str:
        """The name of ``param``, if it is on the host and updated on the device; else empty."""
        name = self._locations.names().get(id(param), "") if self.updates == "device" else ""
        self.known(name)
        return name if name in self._locations.on_host else ""

    def streamed(self, param: Tensor) -> tuple[tuple[str, torch.dtype], ...]:
        """The tensors of ``param`` on NVMe besides states, by name and dtype: the parameter itself, and its copy."""
        locations = self._locations
        name = locations.names().get(id(param), "") if locations.offloaded else ""
        copy = self.known(name)
        if name not in locations.offloaded or name in locations.on_host:
            return ()
        streams = copy is not None and copy.tensor is None and copy.cast is None
        copies = ((COPY, copy.dtype),) if copy is not None and streams else ()
        return ((PARAMETER, param.dtype), *copies)

    def updated(self, params: Iterable[Tensor]) -> None:
        """The copies of ``params`` have been written together with them; those on the device of what is on the host
        follow from now on."""
        rising = {}
        for name, copy in self._of(params):
            if copy.late is not None:
                self._follow(name, copy, copy.late)
            elif copy.is_late and copy.cast is not None:
                self.fresh(name)
            copy.seen = versions(self._locations.params[name])
            if name in self._locations.on_host and self.updates == "host":
                rising[name] = copy
        if rising:
            self._locations.hosted.upload(rising)

    def _follow(self, name: str, copy: Copy, values: Tensor) -> None:
        """Let programs compute with ``values`` from here on."""
        host = self._locations.host
        if copy.tensor is not None and host is not None:
            host.bring(name, copy, values)
            return
        if host is not None:
            host.wait_for_parameters()
        target = copy.tensor if copy.tensor is not None else copy.cast
        assert target is not None  # else it would not be late
        target.copy_(values)

    def touched(self, params: Iterable[Tensor]) -> None:
        """Something has written to ``params`` that versions may not show: their copies are stale."""
        for _, copy in self._of(params):
            copy.seen = None

    def _of(self, params: Iterable[Tensor]) -> Iterator[tuple[str, Copy]]:
        if self._copies:
            names = self._locations.names()
            known = (names.get(id(param), "") for param in params)
            yield from ((name, copy) for name in known if (copy := self.known(name)) is not None)

    @property
    def on_device(self) -> list[Tensor]:
        """Those that are there."""
        late = [copy.late for copy in self._copies.values()] if self._locations.host is None else []
        return [t for t in (*(copy.tensor for copy in self._copies.values()), *late) if t is not None]

    @property
    def bytes_on_host(self) -> int:
        """Bytes of those that are there."""
        there = (tensor for copy in self._copies.values() for tensor in (copy.cast, copy.late))
        return sum(tensor.nbytes for tensor in there if tensor is not None)
