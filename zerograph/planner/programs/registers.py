"""The registers of coarse programs, and of them those of values that live from one layer to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerograph.core.cost import Cost
from zerograph.core.instructions import Compute
from zerograph.core.machine import Tier
from zerograph.core.program import Register, Segment
from zerograph.core.segment_profile import SegmentProfile
from zerograph.core.step import Kind
from zerograph.planner.profile.regions import Life, Profile
from zerograph.sim.costs import Costs
from zerograph.sim.rates import Rates


class Registers:
    """The registers of all coarse programs of a scheduler, behind those that are there; what has the same key is one.

    Attributes:
        contents: what each holds.
        bucket: of those that hold a gathered bucket or tile, or a gradient of one.
    """

    def __init__(self, contents: Iterable[Register] = ()) -> None:
        self.contents = list(contents)
        self.bucket: dict[int, int] = {}
        self._of: dict[object, int] = {}

    def get(
        self, key: object, name: str, size: int, kind: Kind, tier: Tier = "device", *, bucket: int = -1,
        storage: int | None = None,
    ) -> int:  # fmt: skip
        """The register of ``key``, which holds that."""
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = len(self.contents)
            self.contents.append(Register(name, size, found if storage is None else storage, kind, tier))
            if bucket >= 0:
                self.bucket[found] = bucket
        return found


class SharedInstructions:
    """What coarse programs of variants of a step share, whose buckets are the same.

    Attributes:
        registers, segments: of all coarse programs.
        costs: of their instructions.
        made: instructions, parts of buckets and segments by what tells them apart.
    """

    def __init__(self, rates: Rates) -> None:
        self.registers = Registers()
        self.segments: list[Segment] = []
        self.costs = Costs(rates)
        self.made: dict[tuple[object, ...], Any] = {}

    def segment(self, cost: Cost, temporary: int, slices: int = 1) -> int:
        """The segment of that much work."""
        key = ("segment", cost, temporary, slices)
        found: int | None = self.made.get(key)
        if found is None:
            found = self.made[key] = len(self.segments)
            memory = SegmentProfile((temporary,))
            self.segments.append(Segment("", 0, memory=memory, slices=slices, **cost._asdict()))
        return found

    def compute(
        self,
        work: int,
        outs: tuple[int, ...],
        dead: tuple[int, ...],
        module: str,
        source: str,
        args: tuple[int, ...] = (),
        token_tiles: int = 1,
    ) -> Compute:
        """The instruction that does that."""
        key = (work, outs, dead, module, source, args, token_tiles)
        found: Compute | None = self.made.get(key)
        if found is None:
            found = self.made[key] = Compute(work, args, outs, dead, module, source, token_tiles)
        return found


def options_of(profile: Profile, options: Sequence[int]) -> list[int]:
    """The option of each region: its layer's, and outside of layers the last."""
    of_layer = dict(zip(profile.layers, options, strict=True))
    return [of_layer.get(region.layer, profile.all_saved) for region in profile.regions]


class SavedRegisters:
    """The registers of values that live from one region to another; those that begin, move and end alike share one.

    Attributes:
        begins, ends: region -> registers.
        leaves: what is offloaded, by the region of the forward that reads it last, by the plan's name for it, and by
            the region of the backward that needs it first.
        comes: the same by the region of the backward that needs it first, and by the plan's name for it.
        lives: by register, what it stands for.
    """

    def __init__(self, profile: Profile, options: Sequence[int], tier_of: Mapping[str, Tier], registers: Registers):
        groups: dict[tuple[int, int | None, str, int, int], int] = {}
        members: dict[tuple[int, int | None, str, int, int], list[Life]] = {}
        for life in profile.lives:
            end, what, need = end_of(life, options), None, None
            if end == life.start:
                continue  # the region's memory tells of it
            region = profile.regions[life.start]
            # Only what layers save may leave; what the model returns (`read` is None) the user gets on the device.
            if tier_of and region.layer and region.phase == "forward" and life.read is not None:
                what = next((name for name in (life.activation, region.layer) if name in tier_of), None)
                need = need_of(life, options) if what is not None else None
            if what is None or need is None or life.read is None:
                key = (life.start, end, "", -1, -1)
            else:
                key = (life.start, end, what, life.read, need)
            groups[key] = groups.get(key, 0) + life.bytes
            members.setdefault(key, []).append(life)
        self.begins: dict[int, tuple[int, ...]] = {}
        self.ends: dict[int, tuple[int, ...]] = {}
        self.leaves: dict[int, dict[str, dict[int, list[int]]]] = {}
        self.comes: dict[int, dict[str, list[int]]] = {}
        self.lives: dict[int, list[Life]] = {}
        for key, size in groups.items():
            start, end, what, read, need = key
            name = max(members[key], key=lambda life: life.bytes).name
            # With the size: at another option the same regions save something else.
            register = registers.get(("saved", *key, size), name, size, "activation")
            self.lives[register] = members[key]
            self.begins[start] = (*self.begins.get(start, ()), register)
            if end is not None:
                self.ends[end] = (*self.ends.get(end, ()), register)
            if what:
                self.leaves.setdefault(read, {}).setdefault(what, {}).setdefault(need, []).append(register)
                self.comes.setdefault(need, {}).setdefault(what, []).append(register)


def end_of(life: Life, options: Sequence[int]) -> int | None:
    """The region that a life ends with; None where the user gets it.

    The layer that makes it says how long it is saved, and so does the one that reads it last: a layer that computes
    itself again begins with what entered it.
    """
    if life.read is None:
        return None
    own, end = options[life.start], life.read
    for option, region in life.saved.items():
        if region > end and (option == own or options[region] == option):
            end = region
    return end


def need_of(life: Life, options: Sequence[int]) -> int | None:
    """The region of the backward that first reads what a life holds; None where none does."""
    own = options[life.start]
    found = [life.needed[k] for k, region in life.saved.items() if k == own or options[region] == k]
    return min(found, default=None)
