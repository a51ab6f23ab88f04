"""Where what belongs to the parameters of a backend lives: nobody else knows of tiers.

On the host are ordinary tensors: parameters, their gradients, and whatever an optimizer keeps of them. Programs gather
a copy on the device: one that stays there, or where parameters have left too, one for each gather.

Tensors on NVMe lie in extents of one arena. The shards of a bucket lie there one behind another, so that an update
moves many small ones in one transfer. Each kind of state (a moment, a master copy) has an extent of its own, in which a
parameter has the same place, counted in elements. Whoever does not know of extents, a checkpoint or a stock optimizer,
sees ordinary tensors: mappings of them (:func:`~zerograph.runtime.offload.store.mapped_tensor`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerograph.core.errors import StorageError
from zerograph.core.machine import is_disk
from zerograph.core.placement import Unplanned, copy_tier, values_tier
from zerograph.core.plan import Bucket, Param, Placement, Plan
from zerograph.runtime import delayed
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.delayed import DelayedUpdate
from zerograph.runtime.offload.blocks import UNIT, Block
from zerograph.runtime.offload.copies import Copies
from zerograph.runtime.offload.early import EarlyParameters
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.fetches import Fetches
from zerograph.runtime.offload.gradients import OffloadedGradients
from zerograph.runtime.offload.hosted import Copy
from zerograph.runtime.offload.locations import COPY, PARAMETER, Locations
from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.offload.saved import SavedActivations
from zerograph.runtime.offload.slots import Slots
from zerograph.runtime.offload.states import OffloadedStates
from zerograph.runtime.offload.store import mapped_tensor
from zerograph.runtime.timings import Timings
from zerograph.runtime.torch_private import local_tensor, set_local, versions


class ShardStore:
    """The placement of one backend's parameters; it is given once, by the first plan that has one for a parameter.

    Attributes:
        locations: where each parameter lies.
        room: what there is on NVMe.
        slots: that states pass through.
        gradients: on their way to their tiers.
        copies: that are gathered in place of parameters.
        fetches: of what is gathered.
        states: of optimizers, on NVMe.
        early: parameters that were filled there before anything was planned.
        saved: activations that wait for the backward off the device.
        unsettled: delayed updates that are under way, which live until they are settled.
        timings: of transfers and updates, for recordings.
        half_done: by optimizer, why its last update changed a part of its parameters; until it loads a checkpoint.
    """

    def __init__(self, params: Mapping[str, Tensor], open_arena: Callable[[int], Arena | None]) -> None:
        """``params`` are the outward parameters by name, now and later; ``open_arena`` makes room for so many
        bytes, None where there may be no more."""
        self.locations, self.timings = Locations(params), Timings()
        self.room = ArenaRoom(open_arena, self._reclaim)
        self.slots = Slots(self.room, self.locations, lambda: self.gradients.wait())  # noqa: PLW0108  # made below
        self.gradients = OffloadedGradients(self.room, self.locations, self.slots)
        self.copies = Copies(self.room, self.locations, self.slots)
        self.fetches = Fetches(self.room, self.locations, self.copies, self.timings)
        self.states = OffloadedStates(self.room, self.slots)
        self.early = EarlyParameters(self.room, self.locations, self.states.reclaim)
        self.saved = SavedActivations(lambda: self.locations.host.memory if self.locations.host is not None else None)
        self.unsettled: set[DelayedUpdate] = set()
        self.half_done: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._keeps_pages = False

    def _reclaim(self) -> None:
        """Free what nobody needs on NVMe."""
        self.states.reclaim()
        self.gradients.on_nvme.reclaim(all_of_them=True)
        self.saved.let_go()

    # ---- placement

    def place(
        self,
        plan: Plan,
        moments: int,
        moved: Callable[[Tensor], None] = lambda _: None,
        rest: Placement | None = None,
        activations: int = 0,
    ) -> None:
        """Place the parameters of ``plan`` that have no place yet.

        :mod:`zerograph.core.placement` says where each lies, and what is gathered of it.

        Args:
            moments: tensors of float32 that an optimizer keeps of each parameter, for which room is reserved.
            moved: hears of each parameter that has other memory now, also where a later one fails.
            rest: how far parameters may leave that later plans hold; as far as those of ``plan``, unless given.
            activations: bytes of those that wait on NVMe for one backward, of all graphs that there are by now.

        Raises:
            StorageError: there is no room.
        """
        self.fetches.settle_following()  # a frame is compiled between a step and the end of its forward: memory moves
        self.copies.updates = plan.update
        own = {param.name: bucket.placement for bucket in plan.buckets for param in bucket.params}
        masters = any(p.is_master for b in plan.buckets for p in b.params)
        if activations > self.saved.room:
            self.reserve(own, rest or plan.farthest, masters, moments, activations=activations)
            lacking = activations - self.saved.room
            more = self.room.open(lacking) if lacking > 0 else None  # the first one was made before they were known
            if more is not None:
                self.saved.arenas.append(more)
            self.saved.room = max(self.saved.room, activations)
        for bucket in plan.buckets:
            if "host" in (bucket.placement.parameters, bucket.placement.optimizer):
                self._move_to_host(bucket, moved)
            if not is_disk(bucket.placement.optimizer):
                continue
            new = [p for p in bucket.params if p.sharded and p.name not in self.locations.blocks]
            remote = is_disk(bucket.placement.parameters)
            kinds: dict[tuple[bool, str], list[Param]] = {}
            for param in new if remote else [p for p in new if p.trainable]:
                kinds.setdefault((param.trainable, param.dtype), []).append(param)
            for params in kinds.values():
                self.reserve(own, rest or plan.farthest, masters, moments)
                self._house(bucket, params, moved)
                self.locations.changes += 1
            self._note_divided(bucket)
        self.early.bring_back(own, moved)

    def _note_divided(self, bucket: Bucket) -> None:
        """A block of an earlier plan may have parameters of ``bucket`` and of another one."""
        names, at = {param.name for param in bucket.params}, self.locations
        blocks = {at.blocks[name] for name in names if name in at.blocks}
        at.divided.update(block for block in blocks if not names.issuperset(block.begins))

    def reserve(
        self,
        own: Mapping[str, Placement],
        rest: Placement,
        masters: bool,
        moments: int,
        *,
        early: bool = False,
        activations: int = 0,
    ) -> None:
        """Make room for all of the model, where there is none yet: other frames read the rest of it.

        Args:
            own: placements by parameter, as far as they are known.
            rest: that of the others.
            masters: 16 bits compute, so that parameters in float32 are masters.
            moments: as :meth:`place` has it.
            early: parameters will lie apart at first, until they are moved to their buckets.
            activations: as :meth:`place` has it.

        Raises:
            StorageError: there is no room.
        """
        if self.room.opened is not None:
            return
        need = functools.partial(self._need, own, rest, masters, early)
        total = need(moments)
        arena = self.room.reserve(total + activations, lambda: need(moments + 1, all_train=True) + self.saved.room)
        self.saved.arenas, self.saved.room = [arena], arena.size - total

    def _need(
        self,
        own: Mapping[str, Placement],
        rest: Placement,
        masters: bool,
        early: bool,
        moments: int,
        all_train: bool = False,
    ) -> int:
        """Bytes on NVMe of the model, as :meth:`reserve` has it, or of one whose frozen parameters train too."""
        single, total, split = torch.float32.itemsize, 0, self.locations.host is not None
        for name, param in self.locations.params.items():
            placement = own.get(name, rest)
            if not is_disk(placement.optimizer):
                continue
            # Frozen ones count as if they trained, since they may later.
            unplanned = Unplanned(True, masters and param.dtype == torch.float32)
            each = param.itemsize * (is_disk(values_tier(unplanned, placement, split)) + early)
            each += torch.bfloat16.itemsize * is_disk(copy_tier(unplanned, placement, split))
            if param.requires_grad or all_train:
                # Of 16 bits an optimizer may keep a master.
                each += (moments + (param.itemsize < single)) * single
                each += param.itemsize * is_disk(placement.gradients)
            total += -(-local_tensor(param).numel() // UNIT) * UNIT * each
        return total

    def _move_to_host(self, bucket: Bucket, moved: Callable[[Tensor], None]) -> None:
        """Give parameters of a bucket their place on the host, where they are updated, or live and are not; what is
        gathered of them follows, on the device or beside them."""
        placement, at = bucket.placement, self.locations
        for described in bucket.params:
            name = described.name
            self.copies.known(name)
            if not described.sharded or name in at.offloaded or values_tier(described, placement, split=True) != "host":
                continue
            self.early.bring_back([name], moved)
            copy = at.hosted.copy_of(described, placement)
            at.offloaded[name] = at.local(name).data_ptr()
            at.on_host.add(name)
            self.copies.add(name, copy)
            at.changes += 1

    def _house(self, bucket: Bucket, params: Sequence[Param], moved: Callable[[Tensor], None]) -> None:
        """Give ``params`` of a bucket, of one dtype, their places."""
        at = self.locations
        block = Block.of(bucket.name, torch_dtype(params[0].dtype), {p.name: at.local(p.name).numel() for p in params})
        placement, split = bucket.placement, at.host is not None
        leaving = [p for p in params if is_disk(values_tier(p, placement, split))]
        if leaving:
            extent = self.room.extent(block, block.dtype, "parameters")
            try:
                for param in leaving:
                    self._carry(param, block, extent)
            except BaseException:  # all of them are where they were
                self.room.arena.free(extent)
                raise
            at.parameters[block] = extent
        if any(is_disk(copy_tier(p, placement, split)) for p in leaving):
            at.copied[block] = self.room.extent(block, torch.bfloat16, "copies")
        for param in leaving:
            self._leave(param, block, placement)
            moved(at.params[param.name])
        at.blocks.update(dict.fromkeys(block.begins, block))
        # Autograd takes gradients in the memory of their parameters only.
        stays = placement.gradients == "device" and at.lies_on_host(params[0].name)
        self.gradients.tiers[block] = "host" if stays else placement.gradients

    def _carry(self, described: Param, block: Block, extent: Extent) -> None:
        """Write the values of a parameter to its bucket's extent."""
        local, arena = self.locations.local(described.name), self.room.arena
        offset, early = block.begins[described.name] * local.dtype.itemsize, self.early.extent(local)
        if early is not None:
            self._move(early, extent, offset, local.nbytes)
        else:
            flat = local.detach().as_strided((local.numel(),), (1,))  # dense, in whatever order
            arena.wait(arena.write(extent, flat, offset=offset))

    def _move(self, source: Extent, target: Extent, offset: int, size: int) -> None:
        """Copy ``size`` bytes of an extent to a place in another one, a slot at a time."""
        slot, arena = self.slots.free(), self.room.arena
        for begin in range(0, size, len(slot)):
            part = slot[: min(len(slot), size - begin)]
            arena.wait(arena.read(source, part, offset=begin))
            arena.wait(arena.write(target, part, offset=offset + begin))

    def _leave(self, described: Param, block: Block, placement: Placement) -> None:
        """Let a parameter be what its bucket's extent holds of it; keep a copy that computes where it is a master, or
        its tier is nearer."""
        at = self.locations
        param = at.params[described.name]
        local, extent = local_tensor(param), at.parameters[block]
        offset = block.begins[described.name] * param.dtype.itemsize
        copy, dtype = None, torch_dtype(described.compute_dtype)
        tier = copy_tier(described, placement, split=at.host is not None)
        if is_disk(tier):
            copy = Copy(None, dtype, None)
        elif at.host is not None:
            copy = at.host.copy_of(described, placement)
        elif tier == "device":
            copy = Copy(local.detach().to(dtype), dtype, versions(param))
        self.copies.add(described.name, copy)
        self.early.leave(local)
        mapped = mapped_tensor(self.room.arena, extent, param.dtype, (local.numel(),), offset)
        set_local(param, mapped.as_strided(local.shape, local.stride()))
        at.offloaded[described.name] = mapped.data_ptr()

    # ---- steps

    def settle_updates(self, names: Iterable[str]) -> None:
        """Let copies follow delayed updates of the parameters ``names``."""
        params = self.locations.params
        delayed.settle(params[name] for name in names if name in params)

    def end_forward_updates(self) -> None:
        """A backward begins, whose forward has gathered what it reads: let updates inside of that end."""
        self.fetches.settle_following()
        if self._keeps_pages:
            self.drop_pages()

    def drop_pages(self) -> None:
        """Give back the memory of what somebody touched since the last step: a stock optimizer, a checkpoint."""
        # Updates under way use the slots; when they have ended is soon enough.
        self._keeps_pages = bool(self.fetches.following or self.unsettled)
        if self._keeps_pages:
            return
        self.slots.take()  # a step that was skipped
        if self.room.opened is not None:
            self.room.opened.drop_pages(self.locations.parameters.values())

    def in_background(self, work: Callable[[], None], *, more: bool = False) -> Future[None]:
        """Begin ``work`` in the background (:meth:`~zerograph.runtime.offload.slots.Slots.in_background`), when
        gradients have left the slots."""
        self.gradients.on_nvme.wait()
        return self.slots.in_background(work, more=more)

    def wait_for_parameters(self) -> None:
        """Return when no program reads what is on the host any more."""
        if self.locations.host is not None:
            self.locations.host.wait_for_parameters()

    def abandon(self) -> None:
        """A program failed: wait for what it wrote, whatever becomes of it, and for updates beside it."""
        for update in list(self.fetches.following):
            with contextlib.suppress(Exception):  # the program's error is on its way; half_done has this one
                update.settle()
        if self.locations.host is not None:
            self.locations.host.abandon()
        self.saved.abandon()
        self.gradients.on_nvme.abandon()

    def tell_failed(self) -> None:
        """Raises:
        Exception: what an update failed with, beside the caller and untold until now.
        """
        if self.half_done:
            self.fetches.settle_following()
            for update in list(self.unsettled):
                update.settle()

    def refuse_half_done(self) -> None:
        """Raises:
        StorageError: an update ended half done.
        """
        self.tell_failed()
        for why in list(self.half_done.values()):
            raise StorageError(
                f"the last update ended half done ({why}): some parameters and states are those after it",
                "load a checkpoint of the model and of its optimizer",
            )

    def extent(self, owner: Optimizer, block: Block, name: str, dtype: torch.dtype) -> Extent:
        """Where the states ``name`` of a bucket are that ``owner`` keeps, or
        :data:`~zerograph.runtime.offload.locations.PARAMETER` and
        :data:`~zerograph.runtime.offload.locations.COPY` what these are."""
        if name in (PARAMETER, COPY):
            return (self.locations.parameters if name == PARAMETER else self.locations.copied)[block]
        return self.states.extent(owner, block, name, dtype)

    # ---- accounts

    def on_device(self, held: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
        """The tensors on the device among local ones of parameters, by name, and copies there of others."""
        arena, there = self.room.opened, self.locations.names_on_host
        here = [t for name, t in held if name not in there and (arena is None or not arena.maps(t))]
        return here + self.copies.on_device

    def on_host(self) -> dict[str, int]:
        """Bytes on the host, of what is a memory of its own, by what they are for; without states, which are the
        optimizer's."""
        host = self.locations.host
        if host is None:
            return {}
        held = {
            "parameters": sum(self.locations.local(name).nbytes for name in self.locations.names_on_host),
            "copies": self.copies.bytes_on_host,
            "gradients": host.gradients,
            "slots": host.slots,
            "activations": self.saved.on_host,
        }
        return {what: size for what, size in held.items() if size}

    def bytes(self) -> dict[str, int]:
        """On NVMe, by what they are for."""
        held = {
            "parameters": sum(extent.bytes for extent in self.locations.parameters.values()),
            "copies": sum(extent.bytes for extent in self.locations.copied.values()),
            "gradients": self.gradients.on_nvme.bytes,
            "optimizer states": self.states.bytes,
            "activations": self.saved.bytes,
        }
        return {what: size for what, size in held.items() if size}
