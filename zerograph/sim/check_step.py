"""Rules that the programs of a whole training step must keep by its plan: check by check. No torch in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerograph.core.instructions import (
    BeginUpdate,
    Compute,
    DeviceUpdate,
    Free,
    Gather,
    HostUpdate,
    Instruction,
    Move,
    Reduce,
    Update,
    View,
    Wait,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zerograph.core.machine import is_disk
from zerograph.core.placement import updated_late
from zerograph.core.plan import Bucket, Placement, Plan, tile_label
from zerograph.core.program import Program
from zerograph.core.step import layer_of, layer_of_activation


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something that is not as it must be, in a program, a plan or a plan file.

    Attributes:
        check: that found it.
        message: what is wrong, with numbers and names.
        module, source: what it is about, and the user's line; empty when unknown.
        task: the index of a step's operation or of a forecast's task; -1 where it is before the first or about none.
        program, place: the kind of program, and the place of the instruction in it; -1 where it is about none.
    """

    check: str
    message: str
    module: str = ""
    source: str = ""
    task: int = -1
    program: str = ""
    place: int = -1

    @classmethod
    def at(cls, check: str, program: Program, place: int, message: str) -> Wrong:
        """The instruction in that place of ``program`` is wrong."""
        instruction = program.instructions[place]
        source = instruction.source if isinstance(instruction, Compute) else ""
        text, module = f"{program.name(instruction)} {message}", program.module(instruction)
        return cls(check, text, module, source, program=program.kind, place=place)

    def __str__(self) -> str:
        where = f"{self.program} instruction {self.place}: " if self.place >= 0 else ""
        return where + self.message


TileKey = tuple[int, int]
"""A bucket and a tile of it."""
Trail = frozenset[tuple[str, str, TileKey | str]]
"""Operations, what each moved, and whose that is: a bucket's and tile's, or an activation's by its label."""


def check_step(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    """Everything that is wrong with ``programs`` as the step of ``plan``, check by check."""
    return (wrong for _, finder in STEP_CHECKS.values() for wrong in finder(programs, plan))


def _parts(bucket: Bucket) -> list[TileKey]:
    return [(bucket.index, tile) for tile in range(bucket.tiles)]


def _label(plan: Plan, part: TileKey) -> tuple[str, str]:
    """The bucket's name, and what people call that part of it."""
    index, tile = part
    if not 0 <= index < len(plan.buckets):
        return "", f"bucket {index}"
    bucket = plan.buckets[index]
    return bucket.name, tile_label(bucket.name, tile, bucket.tiles)


def _each(programs: Sequence[Program]) -> Iterator[tuple[Program, int, Instruction]]:
    return ((program, place, each) for program in programs for place, each in enumerate(program.instructions))


def _reductions(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    # On one rank gradients are unsharded: there is nothing to reduce.
    if plan.ranks == 1:
        return
    wanted = Counter(part for b in plan.buckets if any(p.trainable for p in b.params) for part in _parts(b))
    done = Counter((each.bucket, each.tile) for *_, each in _each(programs) if isinstance(each, Reduce))
    for bucket, tile in wanted if plan.token_regions else ():
        # Each tile of tokens reduces every tile of a weight that it reads.
        if plan.buckets[bucket].tiles > 1:
            wanted[bucket, tile] = max(1, done[bucket, 0])
    for part in {**wanted, **done}:
        if wanted[part] != done[part]:
            name, label = _label(plan, part)
            text = f"gradients of {label} are reduced {done[part]} times, not {wanted[part]}"
            yield Wrong("reductions", text, module=name)


def _updates(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    wanted, done = Counter[TileKey](), Counter[TileKey]()
    here = Counter[int]()
    moved = {r for *_, each in _each(programs) if isinstance(each, Move) for r in each.reads}
    for program, place, each in _each(programs):
        if isinstance(each, HostUpdate | DeviceUpdate):
            left = [r for r in each.writes if r not in moved and program.contents[r].kind != "temporary"]
            if left:
                yield Wrong.at(
                    "updates", program, place, f"writes {program.contents[left[0]].name}, which goes nowhere"
                )
            untiled = each.tiles == 1 and 0 <= each.bucket < len(plan.buckets)
            done.update(_parts(plan.buckets[each.bucket]) if untiled else [(each.bucket, each.tile)])
        elif isinstance(each, Update):
            here.update(each.buckets)
    for bucket in plan.buckets:
        trained, offloaded = [p for p in bucket.params if p.trainable], bucket.placement.optimizer != "device"
        # An unsharded parameter stays on the device, also in a bucket whose shards live elsewhere.
        if offloaded and any(p.sharded for p in trained):
            wanted.update(_parts(bucket))
        # The backward updates shards only: unsharded parameters are left to the step.
        kinds = {plan.updated_inside(bucket) and p.sharded for p in trained if not offloaded or not p.sharded}
        times = here[bucket.index]
        if times != len(kinds):
            text = f"{bucket.name} is updated on the device {times} times, not {len(kinds)}"
            yield Wrong("updates", text, module=bucket.name)
    for part in {**wanted, **done}:
        if wanted[part] != done[part]:
            name, label = _label(plan, part)
            text = f"{label} is updated on the host {done[part]} times, not {wanted[part]}"
            yield Wrong("updates", text, module=name)


def _beside(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    """Updates beside a forward, of the step before, or beside a backward: they are where the plan has them, gathers
    wait for them, and nothing works for what they have changed."""
    forwards = [program for program in programs if program.kind == "forward"]
    early = {bucket.index for bucket in plan.buckets if updated_late(plan, bucket)}
    if plan.overlap == "forward":
        early |= {each.bucket for *_, each in _each(forwards) if isinstance(each, Gather)}
        for program in forwards:
            yield from _unawaited(program)
    inside = {bucket.index for bucket in plan.buckets if plan.updated_inside(bucket)}
    updated = set[int]()  # by the backward
    followed = dict[int, set[int]]()  # by bucket, the tiles whose copies are brought the new values
    for program, place, each in _each(programs):
        text = ""
        match each:
            case HostUpdate(bucket=bucket) | DeviceUpdate(bucket=bucket):
                wanted = "forward" if bucket in early else "backward" if bucket in inside else "update"
                text = f"is in the {program.kind}, and by the plan in the {wanted}" if program.kind != wanted else ""
                updated |= {bucket} if program.kind == "backward" else set()
            case Update(buckets=buckets):
                wanted = "backward" if program.kind == "backward" and inside.issuperset(buckets) else "update"
                text = f"is in the {program.kind}, and by the plan in the {wanted}" if program.kind != wanted else ""
                updated.update(buckets if program.kind == "backward" else ())
            case BeginUpdate(bucket=bucket):
                updated.add(bucket)
            case Gather() | WaitGather() | Free() | Reduce() | WaitReduce() | Move(what="shard") if (
                program.kind == "backward" and each.bucket in updated
            ):
                text = "works for what is updated already"
            case Move(what="parameters", bucket=bucket, tile=tile) if plan.overlap == "delayed":
                followed.setdefault(bucket, set()).add(tile)
                text = "changes a copy while programs compute with it" if program.kind != "update" else ""
        if text:
            yield Wrong.at("overlap", program, place, text)
    for planned in plan.buckets:
        offloaded = any(p.trainable and p.sharded for p in planned.params)
        if planned.index in inside and offloaded and planned.index not in updated and forwards:
            yield Wrong("overlap", f"{planned.name} is not updated inside of the backward", module=planned.name)
        copied = updated_late(plan, planned) and planned.placement.parameters == "device"
        if copied and followed.get(planned.index) != set(range(planned.tiles)):
            yield Wrong("overlap", f"copies of {planned.name} do not follow its update", module=planned.name)


def _unawaited(forward: Program) -> Iterator[Wrong]:
    """What brings parameters before their update beside the forward has ended."""
    ends, seen = dict[int, list[Instruction]](), set[TileKey]()
    for place, each in enumerate(forward.instructions):
        match each:
            case HostUpdate() | Move(what="states", rises=False) | Move(what="parameters"):
                ends.setdefault(each.bucket, []).append(each)
            case Gather() | Move(what="shard") if (each.bucket, each.tile) not in seen:
                seen.add((each.bucket, each.tile))
                for end in ends.get(each.bucket, ()):
                    if set(each.reads).isdisjoint(end.writes):
                        yield Wrong.at("overlap", forward, place, f"does not wait for {forward.name(end)}")


def _arrivals(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    wanted, came = _Required(programs, plan), dict[int, Trail]()
    if any(program.given for program in programs):  # by the step before, which is like this one
        for _ in _read_elsewhere(programs, wanted, came):
            pass
        last = dict[str, Trail]()
        for register, trail in came.items():  # the buckets of a layer share its name
            name = programs[-1].contents[register].name
            last[name] = last.get(name, Trail()) | trail
        for register in (register for program in programs for register in program.given):
            came.setdefault(register, last.get(programs[-1].contents[register].name, Trail()))
    yield from _read_elsewhere(programs, wanted, came)


def _read_elsewhere(programs: Sequence[Program], wanted: _Required, came: dict[int, Trail]) -> Iterator[Wrong]:
    """``came`` is by register what has written into it; here the programs go on."""
    saved = dict[str, Trail]()  # lowered programs know what the one before them returned by its name
    for program in programs:
        contents = program.contents
        if not program.carries:
            came = {at: saved[c.name] for at, c in enumerate(contents[: program.inputs]) if c.name in saved}
        for place, each in enumerate(program.instructions):
            there = Trail().union(*(came.get(register, ()) for register in each.reads))
            whose = _whose(each)
            for operations, what in wanted.of(program, each):
                if there.isdisjoint((operation, what, whose) for operation in operations):
                    text = f"does not read what the {operations[0]} of its {what} wrote"
                    yield Wrong.at("arrivals", program, place, text)
            own = Trail({(each.operation, getattr(each, "what", ""), whose)})
            passed = there if isinstance(each, Wait | View) else Trail()
            for register in each.writes:
                # It may be written into what is there.
                came[register] = own | (came.get(register, passed) if register in each.reads else passed)
        saved = {contents[at].name: came[at] for at in program.outputs if at in came}


class _Required:
    """The data that instructions have to read, by where the plan has it live."""

    def __init__(self, programs: Sequence[Program], plan: Plan) -> None:
        self.buckets, self.tier_of = plan.buckets, dict(plan.offload)
        self.placements = list(map(plan.placement_of, plan.buckets))
        moves = (each for *_, each in _each(programs) if isinstance(each, Move) and each.what == "states")
        self.read = {each.bucket for each in moves if is_disk(each.source)}
        kept = {each.bucket for *_, each in _each(programs) if isinstance(each, Move) and each.kept}
        self.kept = {bucket for bucket in kept if plan.updated_inside(plan.buckets[bucket])}

    def of(self, program: Program, each: Instruction) -> Iterator[tuple[tuple[str, ...], str]]:
        """Operations, one of which has written something that ``each`` reads, and what they moved."""
        if isinstance(each, Move) and each.what == "activations" and each.rises and each.label in self.tier_of:
            on_disk = is_disk(self.tier_of[each.label])
            yield ("read" if each.source == "host" and on_disk else "write" if on_disk else "spill",), "activations"
        if not 0 <= (index := getattr(each, "bucket", -1)) < len(self.buckets):
            return
        bucket, placement = self.buckets[index], self.placements[index]
        match each:
            # A CPU has no host tier of its own: NVMe is read straight to where it is used.
            case Gather() if placement.parameters != "device":
                yield ("fetch", "read"), "shard"
            case Move(what="shard", source="host") if is_disk(placement.parameters):
                yield ("read",), "shard"
            case Move(what="states", source="host", target="device"):
                yield ("spill",), "gradient"
            case Move(what="states", source=source) if is_disk(source) and is_disk(placement.spilled):
                yield ("write",), "gradient"
            case DeviceUpdate():
                yield ("fetch",), "states"
            case HostUpdate():
                # Slots are on the host where that has another memory than the device.
                staged = each.slot is not None and program.contents[each.slot].tier == "host"
                yield from self._of_update(bucket, placement, staged)
            case Move(what="states", rises=False) | Move(what="parameters"):
                yield ("update",), "states"

    def _of_update(self, bucket: Bucket, placement: Placement, staged: bool) -> Iterator[tuple[tuple[str, ...], str]]:
        # On a CPU plain SGD of parameters that compute in their own dtype keeps nothing anywhere else.
        masters = any(p.trainable and p.is_master for p in bucket.params)
        if is_disk(placement.spilled) or (
            is_disk(placement.optimizer)
            and (masters or bucket.index in self.read or (staged and bucket.index not in self.kept))
        ):
            yield ("read",), "states"
        if placement.spilled == "host" or (placement.spilled == "device" and staged):
            yield ("spill",), "gradient"


def _whose(each: Instruction) -> TileKey | str:
    if isinstance(each, Move) and each.what == "activations":
        return each.label
    return getattr(each, "bucket", -1), getattr(each, "tile", 0)


def _use(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    # Gathers, and registers on the device of activations that come back, by where they begin.
    begun, unread = dict[TileKey | int, tuple[Program, int]](), list[tuple[Program, int]]()
    gathered = set[int]()
    for program, place, each in _each(programs):
        match each:
            case Gather():
                gathered.add(each.bucket)
                part = each.bucket, each.tile
                unread += [begun[part]] if part in begun else []
                begun[part] = program, place
            case WaitGather():
                begun.pop((each.bucket, each.tile), None)
            case Move(what="activations", rises=True):
                if program.contents[each.writes[0]].tier == "device":
                    begun[each.writes[0]] = program, place
            case WaitFetch():
                begun.pop(each.pending, None)
    for program, place in (*unread, *begun.values()):
        yield Wrong.at("use", program, place, "is waited for by nothing")
    for bucket in plan.buckets if plan.world_size > 1 and plan.stage > 0 else ():
        if bucket.index not in gathered and any(p.sharded for p in bucket.params):
            yield Wrong("use", f"{bucket.name} is sharded and never gathered", module=bucket.name)


def _tiles(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    unsharded, ahead = set[TileKey](), plan.ahead()
    for program, place, each in _each(programs):
        if isinstance(each, Gather) and each.tiles > 1 and 0 <= each.bucket < len(ahead):
            unsharded.add((each.bucket, each.tile))
            now = sum(bucket == each.bucket for bucket, _ in unsharded)
            if now > ahead[each.bucket] + 1:
                text = f"makes {now} tiles whole at a time, {ahead[each.bucket] + 1} may be"
                yield Wrong.at("tiles ahead", program, place, text)
        elif isinstance(each, Free) and not each.resident:
            unsharded.discard((each.bucket, each.tile))


def _hosts(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    gathered, kept = set[int](), set[int]()
    for program, place, each in _each(programs):
        if isinstance(each, WaitGather) and each.kept:
            kept.add(each.bucket)
        elif isinstance(each, Gather) and not each.inside:
            gathered.add(each.bucket)
        elif isinstance(each, Gather):
            # A backward that alone reads a bucket finds nothing, and gathers it from all hosts.
            if each.bucket in gathered and each.bucket not in kept:
                yield Wrong.at("hosts", program, place, "begins inside of hosts, which keep nothing of it")
            if each.ended:
                kept.discard(each.bucket)


def _layers(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    there = {layer_of(program.module(each)) for program, _, each in _each(programs)}
    for name in (*plan.recompute, *plan.save, *(name for name, _ in plan.offload)):
        if (layer_of_activation(name) or name) not in there:
            text = f"what {name} saves was decided, and nothing runs in such a layer"
            yield Wrong("layers", text, module=name)


def _tokens(programs: Sequence[Program], plan: Plan) -> Iterator[Wrong]:
    regions = {layer_of_activation(name): name for name in plan.token_regions}
    tiles = {"": plan.loss_tiles, **dict.fromkeys(regions, plan.token_tiles)}  # by layer; the loss is in none
    left = {layer: count for layer, count in tiles.items() if count > 1}
    for program, place, each in _each(programs):
        if isinstance(each, Compute):
            layer = layer_of(each.module)
            wanted = tiles.get(layer, 1)
            if each.token_tiles == wanted:
                left.pop(layer, None)
            elif each.token_tiles > 1:
                text = f"runs in {each.token_tiles} tiles of tokens, the plan has {wanted}"
                yield Wrong.at("tokens", program, place, text)
    for layer, wanted in left.items():
        name = regions[layer] if layer else plan.head
        yield Wrong("tokens", f"{name} is in {wanted} tiles of tokens, and nothing makes one", module=layer or name)


StepCheck = Callable[[Sequence[Program], Plan], Iterator[Wrong]]
STEP_CHECKS: Mapping[str, tuple[str, StepCheck]] = {
    "use": ("sharded parameters are gathered, and something waits for all that comes to the device", _use),
    "tiles ahead": ("no more tiles are whole at a time than are gathered ahead", _tiles),
    "hosts": ("ranks of a host gather among themselves what came from others before", _hosts),
    "arrivals": ("what is read has come from the tier where it lives", _arrivals),
    "reductions": ("gradients of every bucket are reduced once, tile by tile", _reductions),
    "updates": ("every shard is updated once, where its states live", _updates),
    "overlap": ("nothing works for parameters while or after they are updated beside a program", _beside),
    "layers": ("layers that are recomputed or offloaded exist", _layers),
    "tokens": ("what is divided over tokens runs in as many tiles", _tokens),
}
"""Name of a check, what it makes sure of, and what finds what is wrong."""
