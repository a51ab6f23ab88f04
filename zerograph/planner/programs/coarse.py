"""One step under one plan as programs, before anything is partitioned or lowered: forward, backward and update.

Shards that live off the device are fetched into their slice of the gathered bucket (an in-place all-gather) when its
gather could begin. Reduced gradients are spilled one bucket after another. Saved activations leave after the last
layer that reads them, and begin to come back as many layers before the backward needs them as the plan says. Tiles of
an oversized operator follow one another, at most one more of them unsharded than is gathered ahead.

Gradients may be clipped by their norm, so no update (:mod:`~zerograph.planner.programs.updates`) begins before the
whole backward has ended, but by a plan that has them inside of it. Updates of states off the device follow it, or run
beside the next forward, whose gathers wait for them, or beside the whole next step, which computes with copies from
before: the coarse programs then begin with those of the step before.

The search makes coarse programs by the thousand: instructions are made once for a
:class:`~zerograph.planner.programs.schedule.Scheduler` and shared, and a coarse program is a list of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from zerograph.core.instructions import Compute, Instruction, WaitFetch, kept_shards, last_work
from zerograph.core.machine import Tier, hops, is_disk
from zerograph.core.placement import reads_again, updated_late
from zerograph.core.plan import Bucket, Placement, Plan
from zerograph.core.program import Program, ends_resident, stays_resident
from zerograph.core.slots import LEAVING, SLOTS
from zerograph.planner.programs import bucket_work
from zerograph.planner.programs.bucket_work import Slice
from zerograph.planner.programs.host_parts import with_host_parts
from zerograph.planner.programs.pieces import PhaseWork, Piece
from zerograph.planner.programs.placement import BucketPart
from zerograph.planner.programs.registers import SavedRegisters
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.programs.updates import follow_late, slot_of, update_beside, update_late, update_offloaded


def coarse_programs(
    scheduler: Scheduler, plan: Plan, leaving: int = sys.maxsize, *, adds: bool = False
) -> tuple[Program, ...]:
    """The programs of a step under ``plan``; each carries the registers of the one before it.

    Args:
        leaving: moves off the device that may be under way at a time; the compute waits for the one so many before.
        adds: reduced gradients are added to those of earlier micro-batches, which are given where they are off the
            device, and whose memory on it is held anyway.
    """
    return tuple(_CoarsePrograms(scheduler, plan, leaving, adds).programs)


def snapshot(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Coarse programs that later ones of its scheduler do not add to."""
    return tuple(
        replace(
            each, instructions=tuple(each.instructions), segments=tuple(each.segments), contents=tuple(each.contents),
            buckets=tuple(each.buckets),
        )
        for each in programs
    )  # fmt: skip


class _CoarsePrograms:
    def __init__(self, scheduler: Scheduler, plan: Plan, leaving: int, adds: bool) -> None:
        self.scheduler, self.plan, self.rates = scheduler, plan, scheduler.rates
        self.most_leaving, self.leaving = leaving, deque[int]()  # registers that moves off the device fill
        self.buckets: Sequence[Bucket] = plan.buckets
        self.inside: set[int] = set()  # buckets whose gradients the backward uses up; micro-batches leave them
        if plan.overlap == "backward" and not adds:
            self.buckets = [replace(bucket, placement=plan.placement_of(bucket)) for bucket in plan.buckets]
            self.inside = {bucket.index for bucket in plan.buckets if plan.updated_inside(bucket)}
        self.made, self.registers, self._once = scheduler.shared.made, scheduler.registers, scheduler.once
        self.programs: list[Program] = []
        self.instructions: list[Instruction] = []
        self.kind = "forward"
        self.parts = scheduler.all_bucket_parts(tuple(bucket.tiles for bucket in plan.buckets))
        self.own = [self._own(bucket) for bucket in self.buckets]
        self.ahead = plan.ahead()
        self.saved: SavedRegisters | None = None  # registers of activations, where some are offloaded
        if plan.offload:
            self.saved = scheduler.saved(scheduler.options(plan), plan.offload)
        self.tier_of = dict(plan.offload)  # layer or activation -> tier of what is saved of it
        self.unsharded: set[int] = set()  # buckets; of tiled ones the first tile
        self.fetched: set[int] = set()  # buckets whose gathers follow
        # Reductions that are not waited for: of what, into which register, if some leaves, if it is added to others.
        self.under_way: list[tuple[BucketPart, int, bool, bool]] = []
        self.reduced: dict[int, None] = {}  # buckets, in the order in which their gradients were reduced
        # Buckets and tiles that have a reduced gradient, to which others are added.
        self.summed = {(i, tile) for i, tiles in enumerate(self.parts) for tile in range(len(tiles)) if adds}
        # Layer or activation -> region -> registers of what of it is offloaded until then.
        self.waiting: dict[str, dict[int, list[int]]] = {}
        self.arriving: dict[int, list[WaitFetch]] = {}  # region -> waits for what it needs
        self.spills = 0  # through staging buffers, so far
        self.norm = -1  # the register that is ready when all gradients are
        self.late: deque[int] = deque()  # buckets that the forward is still to update, in the order of its gathers
        self.updated: dict[int, tuple[int, ...]] = {}  # buckets updated so far, with the registers of their ends
        self.updates = 0  # of states off the device, so far
        # Of updates beside this step: of whom, and registers.
        self.ends: list[tuple[BucketPart, Placement, tuple[int, ...]]] = []
        # Buckets and tiles -> registers of gradients of the step before, where updates are a step late.
        self.earlier: dict[tuple[int, int], tuple[int, ...]] = {}
        self.given = self._earlier_gradients()  # registers that the step before has filled
        for phase in scheduler.phases(plan):
            self.kind, self.instructions = phase.name, []
            if phase.name == "forward" and plan.overlap == "forward" and scheduler.profile.training:
                self.late.extend(dict.fromkeys(interval.bucket for interval in phase.intervals))
                self._update_ahead()
            elif phase.name == "forward" and plan.overlap == "delayed" and scheduler.profile.training:
                self._update_delayed()
            self._phase(phase)
            if phase.name == "backward" and self.inside:
                self._update_inside()
            self._end()
        if scheduler.profile.training:
            self.kind, self.instructions = "update", []
            self._update()
            self._end()

    def _earlier_gradients(self) -> tuple[int, ...]:
        """The registers off the device with gradients of earlier micro-batches, which the next spills add to."""
        parts = (part for part in sorted(self.summed) if self.parts[part[0]][part[1]].shards.gradient)
        return tuple(self._gradient(*part) for part in parts if self.buckets[part[0]].placement.spilled != "device")

    def _end(self) -> None:
        scheduler = self.scheduler
        instructions = with_host_parts(self.instructions, self.plan, self.kind, self.made)
        self.programs.append(
            Program(
                self.kind, 0, len(self.registers.contents), instructions, (), scheduler.shared.segments,
                self.registers.contents, scheduler.names, carries=True, given=self.given,
            )
        )  # fmt: skip
        self.given = ()

    def _phase(self, phase: PhaseWork) -> None:
        instructions = self.instructions
        backward = phase.name == "backward"
        for interval in phase.gathers.get(0, ()):
            self._gather(phase.intervals[interval].bucket)
        if backward and self.saved is not None:
            self._fetch_saved(phase, 0)
        ready: tuple[int, ...] = ()
        place = 0
        for piece in phase.pieces:
            if piece.first and self.saved is not None:
                # Here the compute waits for activations that it needs, and no earlier.
                instructions += self.arriving.pop(piece.region, ())
                place += 1
                if backward:
                    self._fetch_saved(phase, place)
            for interval in piece.intervals:
                self._free(phase, interval)
                # Those of the first interval began above, before anything computes.
                for other in phase.gathers.get(interval, ()) if interval else ():
                    self._gather(phase.intervals[other].bucket)
                bucket = phase.intervals[interval].bucket
                if bucket in self.fetched:
                    self.fetched.remove(bucket)
                    instructions.append(
                        self._once(bucket_work.gather_fetched, self.parts[bucket][0], self.buckets[bucket].placement)
                    )
                instructions.append(self._once(bucket_work.wait_gather, self.parts[bucket][0], self.own[bucket]))
            # Behind the frees and gathers of intervals that begin here: the pass `reduce` uses the next cut, too.
            for bucket in ready:
                self._reduce(bucket, 0, phase.gradients[bucket])
            ready = piece.ready
            if piece.slices > 1:
                self._tiled(piece)
            elif self.saved is not None and (piece.first or piece.last):
                instructions.append(self._offloading(piece))
            else:
                instructions.append(piece.compute)
            if piece.last and not backward and self.saved is not None:
                self._offload_saved(piece.region)
        for bucket in ready:
            self._reduce(bucket, 0, phase.gradients[bucket])
        self._free(phase, len(phase.intervals))
        while self.under_way:
            self._wait_reduce(last=backward and len(self.under_way) == 1)

    def _offloading(self, piece: Piece) -> Compute:
        """``piece`` with the registers of activations of which some are offloaded."""
        assert self.saved is not None
        key = (piece, self.saved)
        if key not in self.made:
            whole, begins, ends = piece.compute, self.saved.begins, self.saved.ends
            writes = (*(begins.get(piece.region, ()) if piece.first else ()), *piece.made)
            dead = ends.get(piece.region, ()) if piece.last else ()
            self.made[key] = self.scheduler.shared.compute(
                whole.segment, writes, dead, whole.module, whole.source, token_tiles=whole.token_tiles
            )
        found: Compute = self.made[key]
        return found

    def _slices(self, piece: Piece) -> Sequence[Slice]:
        """The slices of a piece on tiles."""
        key = (bucket_work.slices_of, piece, self.saved)
        if key not in self.made:
            full = self._offloading(piece) if self.saved is not None else piece.compute
            reads, makes = (tuple(self.parts[bucket] for bucket in own) for own in (piece.reads, piece.makes))
            # Pieces are made for each prefetch and recomputation, and many are alike.
            self.made[key] = self._once(bucket_work.slices_of, full, piece.region, piece.temporary, reads, makes)
        found: Sequence[Slice] = self.made[key]
        return found

    def _tiled(self, piece: Piece) -> None:
        """Slices of a piece: the tiles that each works on come before it, and are free and reduced after it."""
        instructions = self.instructions
        # The first tile may be there: the interval's gather, which began ahead, is of that one.
        brought = {bucket: int(bucket in self.unsharded) for bucket in piece.reads}
        brings = {bucket: self._brings(bucket) for bucket in piece.reads}
        self.unsharded.difference_update(piece.reads)
        for each in self._slices(piece):
            for part, wait in each.waits:
                bucket = part.bucket
                for ahead in range(brought[bucket], min(part.tiles, part.tile + self.ahead[bucket] + 1)):
                    instructions += brings[bucket][ahead]
                    brought[bucket] += 1
                instructions.append(wait)
            instructions.append(each.compute)
            instructions += each.frees
            for part, gradients in each.ready:
                self._reduce(part.bucket, part.tile, gradients)

    def _gather(self, bucket: int) -> None:
        if bucket not in self.unsharded:
            self.unsharded.add(bucket)
            while bucket in self.late:
                self._update_late()
            if self._gathers_late(bucket):
                self.fetched.add(bucket)
                part, placement = self.parts[bucket][0], self.buckets[bucket].placement
                self.instructions += self._once(bucket_work.fetch, part, placement, self._behind(bucket))
            else:
                self.instructions += self._brings(bucket)[0]
            if self.late:
                self._update_late()

    def _gathers_late(self, bucket: int) -> bool:
        """Whether only what is fetched begins ahead, and the gather where the bucket is needed: it would keep whoever
        tells the device what to do waiting for the disk, and on a CPU what computes."""
        tier, whole = self.buckets[bucket].placement.parameters, self.buckets[bucket].tiles == 1
        waits = is_disk(tier) or (tier != "device" and not self.rates.overlaps)
        return waits and whole and bool(self.parts[bucket][0].shards.alike)

    def _brings(self, bucket: int) -> Sequence[Sequence[Instruction]]:
        """By tile of a bucket, its gather, after fetching its shards."""
        parts, placement = self.parts[bucket], self.buckets[bucket].placement
        return self._once(bucket_work.bring_each, parts, placement, self.own[bucket], self._behind(bucket))

    def _behind(self, bucket: int) -> tuple[int, ...]:
        """The ends of the update that a gather of a bucket waits for: of all its tiles, as the runtime does."""
        return self.updated.get(bucket, ()) if self.kind == "forward" else ()

    def _own(self, bucket: Bucket) -> Placement | None:
        """The placement of a bucket of which this rank's slice of the whole is what the device holds anyway."""
        placement = bucket.placement
        if self.rates.world_size == 1:
            held = bucket.tiles == 1
        else:  # a gather of CPU ranks is not in place
            held = self.rates.overlaps and bucket.residency == "step" and placement.optimizer != "device"
        return placement if held and placement.parameters == "device" else None

    def _free(self, phase: PhaseWork, interval: int) -> None:
        for i in phase.frees.get(interval, ()):
            bucket = phase.intervals[i].bucket
            if self.buckets[bucket].tiles > 1:
                continue  # tiles are freed one by one
            if not stays_resident(self.buckets[bucket].residency, phase.name):
                self.unsharded.remove(bucket)
                ends = ends_resident(self.buckets[bucket].residency, phase.name)
                self.instructions.append(self._once(bucket_work.free, self.parts[bucket][0], self.own[bucket], ends))

    def _reduce(self, bucket: int, tile: int, grads: tuple[int, ...]) -> None:
        """Start a reduction, for which the compute waits when a later one starts."""
        part = self.parts[bucket][tile]
        self.reduced[bucket] = None
        if len(self.under_way) == self.plan.reductions:
            self._wait_reduce()
        # A bucket whose gradients are unsharded has none that could leave.
        leaves = self._leaves(bucket) and part.shards.gradient > 0
        again = (bucket, tile) in self.summed  # a tied parameter's tiles: the head's gradient, then the embedding's
        self.summed.add((bucket, tile))
        added = again and self.buckets[bucket].placement.spilled == "device"
        reduce = self._once(bucket_work.reduce, part, leaves, grads, added)
        self.under_way.append((part, reduce.out, leaves, again))
        self.instructions.append(reduce)

    def _wait_reduce(self, last: bool = False) -> None:
        """The next compute waits for the oldest reduction, whose gradient is offloaded; with the ``last`` one all
        gradients are there."""
        part, out, leaves, again = self.under_way.pop(0)
        self.instructions.append(self._once(bucket_work.wait_reduce, part, out, leaves and not again, last))
        if last:
            self.norm = bucket_work.norm_register(self.scheduler)
        if leaves:
            bucket, tile, tier = part.bucket, part.tile, self.buckets[part.bucket].placement.spilled
            if tier != "device":
                into = self._gradient(bucket, tile)
                there = (into,) if again else ()
                self._down("gradient", part.label, bucket, tile, (out,), (into,), tier, there)

    def _leaves(self, bucket: int) -> bool:
        """Whether shards of the gradients of a bucket leave, or are used up, apart from unsharded ones."""
        return self.buckets[bucket].placement.spilled != "device" or bucket in self.inside

    def _gradient(self, bucket: int, tile: int) -> int:
        """The register of the gradient by which a bucket or tile is updated."""
        part, tier = self.parts[bucket][tile], self.buckets[bucket].placement.spilled
        if tier != "device":
            return self._once(bucket_work.offloaded_gradient, part, tier)
        return bucket_work.reduced_gradient(self.scheduler, part, self._leaves(bucket))

    def _offload_saved(self, region: int) -> None:
        """Offload what no later layer of the forward reads, of layers whose activations are offloaded."""
        assert self.saved is not None
        contents = self.registers.contents
        for what, by_need in self.saved.leaves.get(region, {}).items():
            tier, into = self.tier_of[what], {}
            for need, registers in by_need.items():
                size = sum(contents[register].bytes for register in registers)
                key = ("into", what, region, need, size, tier)
                into[need] = self.registers.get(key, f"activations of {what}", size, "activation", tier)
                self.waiting.setdefault(what, {}).setdefault(need, []).append(into[need])
            here = tuple(register for registers in by_need.values() for register in registers)
            self._down("activations", what, -1, 0, here, tuple(into.values()), tier)

    def _fetch_saved(self, phase: PhaseWork, place: int) -> None:
        """Begin to bring back what regions from ``place`` on need, so many as the plan fetches ahead."""
        assert self.saved is not None
        for region in phase.regions[place : place + self.plan.fetch_ahead]:
            for what, back in self.saved.comes.get(region, {}).items() if region not in self.arriving else ():
                there = tuple(register for registers in self.waiting[what].values() for register in registers)
                own = tuple(self.waiting[what].pop(region))
                self.instructions += self._once(
                    bucket_work.activations_up, what, there, own, tuple(back), self.tier_of[what]
                )
                self.arriving.setdefault(region, []).append(self._once(bucket_work.wait_fetch, back[0]))

    def _down(
        self, what: str, label: str, bucket: int, tile: int, here: tuple[int, ...], into: tuple[int, ...], tier: Tier,
        there: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Move what is in registers on the device to ``into`` on ``tier``; what is ``there`` already it is added to."""
        slot = -1
        if len(hops("device", tier, self.rates.staging)) > 1:
            slot = slot_of(self.scheduler, "spill", self.spills)
            self.spills += 1
        self.instructions += self._once(
            bucket_work.moves_down, what, label, bucket, tile, here, into, tier, slot, there
        )
        self.leaving.append(into[0])
        if len(self.leaving) > self.most_leaving:
            self.instructions.append(self._once(bucket_work.wait_fetch, self.leaving.popleft()))

    def _update_ahead(self) -> None:
        """Begin the updates of the step before: all at once, but for those whose parameters the disk then reads again,
        which would wait for all of them."""
        begun = 0
        while self.late and (begun < SLOTS or not is_disk(self.buckets[self.late[0]].placement.parameters)):
            self._update_late()
            begun += 1

    def _update_late(self) -> None:
        """Begin the next of them."""
        bucket = self.late.popleft()
        if self.buckets[bucket].placement.optimizer != "device":
            self.given += self._update_beside(bucket)

    def _update_beside(self, bucket: int, kept: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Begin the update of a bucket whose states are off the device; the gradients that go with it."""
        placement, gradients = self.buckets[bucket].placement, list[int]()
        for tile, part in enumerate(self.parts[bucket]):
            if part.shards.gradient:
                gradients.append(self._gradient(bucket, tile))
                moves, ends = self._once(update_beside, part, placement, self.updates, (gradients[-1],), kept, kept)
                self.instructions += moves
                self.updates += 1
                self.updated[bucket] = self.updated.get(bucket, ()) + ends
        return tuple(gradients)

    def _update_delayed(self) -> None:
        """Begin the updates of the step before that run beside this whole step; all its gradients are there until both
        have ended."""
        for bucket in self.plan.buckets:
            placement = self.buckets[bucket.index].placement
            late = updated_late(self.plan, bucket)
            for tile, part in enumerate(self.parts[bucket.index]):
                if not part.reduced:
                    continue
                held = self._once(bucket_work.earlier_gradients, part, placement.spilled)
                self.earlier[bucket.index, tile] = held
                self.given += held
                if late and part.shards.gradient:
                    moves, ends = self._once(update_late, part, placement, self.updates, held[0])
                    self.instructions += moves
                    self.ends.append((part, placement, ends))
                    self.updates += 1
            if late:
                self.updated[bucket.index] = ()

    def _update_inside(self) -> None:
        """Begin the update of each bucket behind the last instruction of the backward that works for it."""
        last = last_work(self.instructions)
        backward, self.instructions = self.instructions, []
        ended: dict[int, list[int]] = {}
        for bucket in self.reduced:
            if bucket in self.inside and any(part.shards.gradient for part in self.parts[bucket]):
                # The forward reduces a head that is in tiles with its loss, and the backward may do nothing for it.
                ended.setdefault(last.get(bucket, -1), []).append(bucket)
        on_disk, kept = deque[int](), self._keep(backward, {b: at for at, own in ended.items() for b in own})
        for at in range(-1, len(backward)):
            self.instructions += backward[at : at + 1] if at >= 0 else ()
            for bucket in ended.get(at, ()):
                self._update_now(bucket, on_disk, kept.get(bucket, ()))

    def _keep(self, backward: list[Instruction], begins: dict[int, int]) -> dict[int, tuple[int, ...]]:
        """Keep on the host what updates there would read again from a disk, by bucket its registers."""
        kept = dict[int, tuple[int, ...]]()
        # Shards pass through the host there; no plan for a CPU has updates inside of the backward.
        for bucket, at in kept_shards(backward, begins).items() if self.rates.staging != "device" else ():
            if reads_again(self.plan.buckets[bucket]):
                backward[at : at + 2] = self._once(bucket_work.keep, *backward[at : at + 2])
                kept[bucket] = backward[at].writes
        return kept

    def _update_now(self, bucket: int, on_disk: deque[int], kept: tuple[int, ...]) -> None:
        """Begin the update of a bucket inside of the backward; ``on_disk`` are ends of those by gradients that would be
        written, which wait in memory: few may be under way. Of its parameters the registers ``kept`` are read."""
        if self.buckets[bucket].placement.optimizer == "device":
            self.instructions.append(self._once(Scheduler.update_inside, bucket, self._gradient(bucket, 0)))
            self.updated[bucket] = ()
            return
        waits = is_disk(self.plan.buckets[bucket].placement.spilled)
        if waits and len(on_disk) > LEAVING:
            self.instructions.append(self._once(bucket_work.wait_fetch, on_disk.popleft()))
        self._update_beside(bucket, kept)
        if waits:
            on_disk.append(self.updated[bucket][-1])

    def _update(self) -> None:
        """The optimizer, when all gradients are there: what lives on the device beside the rest."""
        scheduler, buckets = self.scheduler, self.buckets
        host = [bucket for bucket in self._by_readiness() if buckets[bucket].placement.optimizer != "device"]
        update = scheduler.update([*host, *self.updated])
        here = [update] if update.sizes or not host else []
        for key in self.ends:
            self.instructions += self._once(follow_late, *key, self.norm)
        if self.earlier:
            # The optimizer has the gradients of the step before until all of this one's are there.
            old = tuple(register for held in self.earlier.values() for register in held)
            new = (self._gradient(*key) for key in self.earlier if key[0] in self.reduced)
            here = [replace(update, reads=(*old, *new), dead=old)]
        # On a CPU the same processor updates both, one after the other; what is read for the second is read then.
        if self.rates.staging == "device":
            self.instructions += here
        for bucket in (bucket for bucket in host if bucket not in self.updated):
            placement = buckets[bucket].placement
            for tile, part in enumerate(self.parts[bucket]):
                if part.shards.gradient:
                    arrived = self.earlier.get((bucket, tile), ())[:1]
                    if not arrived and bucket in self.reduced:
                        arrived = (self._gradient(bucket, tile),)
                    self.instructions += self._once(
                        update_offloaded, part, self.plan.update, placement, self.updates, arrived, self.norm
                    )
                    self.updates += 1
        if self.rates.staging != "device":
            self.instructions += here

    def _by_readiness(self) -> list[int]:
        """All buckets, those whose gradients were reduced first before the others."""
        return list(dict.fromkeys((*self.reduced, *range(len(self.buckets)))))
