"""The optimizer's update as instructions: behind a backward, inside of it, and beside the next forward."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from operator import attrgetter

import pytest
from planner.steps import Layer, step_of
from planner.test_offload import GPU, placed, ruled, scheduler_of

from zerograph.core.files.programs_data import programs_data, programs_of
from zerograph.core.instructions import BeginUpdate, Free, Gather, HostUpdate, Move, Update, WaitReduce, kept_shards
from zerograph.core.layout import Layout
from zerograph.core.machine import Tier, machine_named
from zerograph.core.param_bytes import copy_bytes
from zerograph.core.placement import updated_late
from zerograph.core.plan import OVERLAPS, Bucket, Overlap, Param, Placement, Plan
from zerograph.core.program import Program, Register
from zerograph.core.slots import LEAVING
from zerograph.core.timeline import Forecast, Span
from zerograph.planner.programs.coarse import coarse_programs, snapshot
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.programs.updates import update_program, with_updates_inside
from zerograph.sim.check import check_programs
from zerograph.sim.rates import Rates

LAYERS, ROWS, LOSS = 6, 2**22, 4
FIRST, LAST = attrgetter("first"), attrgetter("last")
HOST, GRADIENTS, NVME = (
    Placement("device", "device", "host"),
    Placement("host", "host", "host"),
    Placement("nvme", "nvme", "nvme"),
)


def plan_of(placement: Placement, overlap: Overlap, tiles: int = 1, *, training: bool = True) -> tuple[Scheduler, Plan]:
    """A plan whose layers compute for longer than any of them is updated."""
    step = step_of([Layer(rows=ROWS, flops=2 * 10**10)] * LAYERS, training=training)
    plan = replace(placed(ruled(step), placement, tiles), overlap=overlap)
    return scheduler_of(step, plan, GPU), plan


def forecast(placement: Placement, overlap: Overlap, tiles: int = 1) -> Forecast:
    return forecast_plan(*plan_of(placement, overlap, tiles))[0]


def updates(found: Forecast) -> list[Span]:
    return [span for span in found.spans if span.stream == "cpu_update"]


@pytest.mark.parametrize("placement", [HOST, GRADIENTS, NVME], ids=str)
@pytest.mark.parametrize("tiles", [1, 3])
def test_each_gather_waits_for_the_update_of_its_bucket(placement: Placement, tiles: int) -> None:
    found = forecast(placement, "forward", tiles)
    first = {(s.bucket, s.tile): s for s in reversed(found.spans) if s.operation == "gather" and s.phase == "forward"}
    assert len(updates(found)) == len(first) == LAYERS * tiles
    for update in updates(found):
        behind = [s for s in found.spans if s.what in ("states", "parameters") and s.phase == "forward"]
        last = max(s.end for s in behind if s.bucket == update.bucket)  # of all its tiles: a parameter waits as one
        assert all(first[update.bucket, tile].start >= last >= update.end for tile in range(tiles))


@pytest.mark.parametrize("placement", [HOST, GRADIENTS], ids=str)
def test_only_what_nothing_computes_beside_takes_time(placement: Placement) -> None:
    """The first layer waits for its update, and the others find theirs done: in the forward nothing else waits."""
    after, beside = forecast(placement, "none"), forecast(placement, "forward")
    each = [s.end - s.start for s in updates(after)]
    assert [s.end - s.start for s in updates(beside)] == pytest.approx(each)
    assert beside.seconds == pytest.approx(after.seconds - sum(each) + each[0], rel=0.01)
    assert beside.seconds < 0.95 * after.seconds


@pytest.mark.parametrize("placement", [HOST, GRADIENTS, NVME], ids=str)
def test_gradients_of_the_step_before_are_held_until_they_are_used(placement: Placement) -> None:
    scheduler, plan = plan_of(placement, "forward")
    programs = snapshot(coarse_programs(scheduler, plan))
    assert check_programs(programs, plan) == []
    found, holdings = forecast_plan(scheduler, plan)
    gradients = [h for h in holdings if h.kind == "gradient" and h.name.startswith("gradient of") and h.first == -1]
    assert len(gradients) == LAYERS
    assert {h.tier for h in gradients} == {placement.spilled}
    assert all(0 <= h.last < max(s.task for s in found.spans if s.phase == "forward") for h in gradients)
    # As much is there behind the step as before it, and the loss.
    for tier in found.memory:
        before, behind = (sum(h.bytes for h in holdings if h.tier == tier and at(h) == -1) for at in (FIRST, LAST))
        assert behind - before == (LOSS if tier == "device" else 0)


@pytest.mark.parametrize("placement", [HOST, GRADIENTS, NVME, Placement("device", "device", "nvme")], ids=str)
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_gather_that_waits_for_no_update_is_found(placement: Placement, tiles: int) -> None:
    """Each end of each update is taken from what reads it."""
    scheduler, plan = plan_of(placement, "forward", tiles)
    forward, *rest = snapshot(coarse_programs(scheduler, plan))
    ends = {r for each in forward.instructions for r in each.writes if forward.contents[r].name.startswith("end of ")}
    assert len(ends) >= LAYERS * tiles
    for end in ends:
        early = [
            replace(each, reads=tuple(r for r in each.reads if r != end)) if end in each.reads else each  # type: ignore[call-arg]
            for each in forward.instructions
        ]
        found = check_programs([replace(forward, instructions=early), *rest], plan)
        assert {each.check for each in found} == {"overlap"}
        assert all("does not wait for" in each.message for each in found)


def test_updates_stand_where_the_plan_has_them() -> None:
    places: dict[Overlap, str] = {"none": "update", "backward": "backward", "forward": "forward"}
    for (own, here), (other, there) in permutations(places.items(), 2):
        found = check_programs(snapshot(coarse_programs(*plan_of(GRADIENTS, own))), plan_of(GRADIENTS, other)[1])
        assert {each.check for each in found} == {"overlap"}
        texts = f"is in the {here}, and by the plan in the {there}", "is not updated inside of the backward"
        assert all(any(text in each.message for text in texts) for each in found)
        assert any(texts[0] in each.message for each in found)


@pytest.mark.parametrize("placement", [Placement(), HOST, GRADIENTS, NVME], ids=str)
def test_a_backward_updates_each_bucket_when_it_has_done_with_it(placement: Placement) -> None:
    """Gradients are then used up bucket by bucket, and none is written to NVMe."""
    behind, inside = forecast(placement, "none"), forecast(placement, "backward")
    own = [span for span in inside.spans if span.phase == "backward" and span.operation == "update"]
    assert len(own) == LAYERS and not any(s.what == "gradient" and s.operation == "write" for s in inside.spans)
    for update in own:
        works = [s for s in inside.spans if s.bucket == update.bucket and s.operation in ("gather", "reduce")]
        assert update.bucket >= 0 or placement == Placement()  # one instruction of the device may be of several
        assert all(update.start >= span.end for span in works if span.phase == "backward")
    assert inside.seconds <= behind.seconds * (0.95 if placement != Placement() else 1.000001)
    scheduler, plan = plan_of(placement, "backward")
    # On the host are shards that updates do not read from a disk again: of those under way, and of the next.
    kept = (LEAVING + 2) * scheduler.bucket_parts(0, 1)[0].shards.at(placement).fetched * (placement == NVME)
    for tier in inside.peaks:
        assert inside.peaks[tier].bytes <= behind.peaks[tier].bytes + kept * (tier == "host")
    left = [h for h in forecast_plan(scheduler, plan)[1] if h.kind == "gradient" and h.last == -1]
    assert not left  # but what every rank holds whole, of which these layers have nothing
    assert check_programs(snapshot(coarse_programs(scheduler, plan)), plan) == []


def test_a_backward_keeps_for_updates_what_it_has_read() -> None:
    scheduler, plan = plan_of(NVME, "backward")
    _, backward, _ = programs = snapshot(coarse_programs(scheduler, plan))
    kept = {each.bucket: each for each in backward.instructions if isinstance(each, Move) and each.kept}
    assert len(kept) == LAYERS
    for each in backward.instructions:
        if isinstance(each, HostUpdate):
            assert set(kept[each.bucket].writes) <= {*each.reads} & {*each.dead}
    read = [
        each.bytes for each in backward.instructions if isinstance(each, Move) and each.what == "states" and each.rises
    ]
    part = scheduler.bucket_parts(0, 1)[0]
    assert read == [part.shards.at(NVME).optimizer] * LAYERS  # moments alone
    # Nothing says so of a plan whose updates are behind the backward, or compute with copies.
    for other in (plan_of(NVME, "none"), plan_of(GRADIENTS, "backward")):
        instructions = (each for program in coarse_programs(*other) for each in program.instructions)
        assert not any(isinstance(each, Move) and each.kept for each in instructions)
    # What lets go of it before its update is found.
    early = [
        replace(each, dead=(*each.dead, *each.reads)) if isinstance(each, Move) and each.what == "shard" and each.reads
        and each.source == "host" else each
        for each in backward.instructions
    ]  # fmt: skip
    found = check_programs([programs[0], replace(backward, instructions=early), programs[2]], plan)
    assert any(wrong.check == "reads" and "which is free" in wrong.message for wrong in found)


def test_a_bucket_is_not_kept_for_an_update_that_is_far() -> None:
    """As that of a tied embedding, whose head the backward begins with."""
    fetches = [Move("nvme", "device", "shard", "", "", 1, (), (i,), bucket=i) for i in range(5)]
    work = [each for i in range(5) for each in (Gather(i, (), (i,), i), Free(i, (i,)))]
    begins = {0: 19, 1: 15, 2: 16, 3: 17, 4: 18}
    assert kept_shards([*fetches, *work], begins) == {1: 1, 2: 2, 3: 3}
    resident = [replace(each, resident=True) if isinstance(each, Gather) else each for each in work]
    assert kept_shards([*fetches, *resident], begins) == {}


def test_few_gradients_wait_for_updates_on_nvme() -> None:
    """They would be written else: a disk that is slower than the backward has it wait."""
    scheduler, plan = plan_of(NVME, "backward")
    _, holdings = forecast_plan(scheduler, plan)
    waiting = [h for h in holdings if h.kind == "gradient" and h.tier == "device" and h.name.startswith("gradient of")]
    most = max(sum(h.first <= at.first <= h.last for h in waiting) for at in waiting)
    assert len(waiting) == LAYERS > most


def test_a_delayed_step_holds_two_sets_of_gradients_of_all_buckets() -> None:
    """Of those whose states are on the device, too: the optimizer has them until its next step has them applied."""
    scheduler, plan = plan_of(HOST, "delayed")
    buckets = [replace(b, placement=HOST if b.index % 2 else Placement()) for b in plan.buckets]
    found: dict[Overlap, Forecast] = {}
    for overlap in ("none", "delayed"):
        mixed = replace(plan, buckets=tuple(buckets), overlap=overlap)
        found[overlap], holdings = forecast_plan(scheduler, mixed)
        assert check_programs(snapshot(coarse_programs(scheduler, mixed)), mixed) == []
    (own, *_) = (part.shards.gradient for part in scheduler.bucket_parts(0, 1))
    old = [h for h in holdings if h.kind == "gradient" and h.first == -1]
    assert {tier: sum(h.bytes for h in old if h.tier == tier) for tier in ("device", "host")} == {
        "device": own * LAYERS // 2,
        "host": own * LAYERS // 2,
    }
    assert found["delayed"].peaks["device"].bytes > found["none"].peaks["device"].bytes


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("placement", [HOST, GRADIENTS], ids=str)
def test_updates_that_are_lost_or_elsewhere_are_found(placement: Placement, overlap: Overlap) -> None:
    """Buckets of both kinds: an update that stands in another program, and new parameters that go nowhere."""
    scheduler, plan = plan_of(placement, overlap)
    buckets = tuple(replace(b, placement=placement if b.index % 2 else Placement()) for b in plan.buckets)
    plan = replace(plan, buckets=buckets)
    programs = snapshot(coarse_programs(scheduler, plan))
    assert check_programs(programs, plan) == []
    for number, program in enumerate(programs):
        for each in program.instructions:
            without = replace(program, instructions=[other for other in program.instructions if other is not each])
            lost = [*programs[:number], without, *programs[number + 1 :]]
            if each.operation == "update" or (isinstance(each, Move) and each.what == "parameters"):
                assert check_programs(lost, plan), each
            if isinstance(each, Update) and each.sizes:
                for other in {0, 1, 2} - {number}:
                    moved = list(lost)
                    moved[other] = replace(moved[other], instructions=[*moved[other].instructions, each])
                    assert "overlap" in {wrong.check for wrong in check_programs(moved, plan)}, (each, other)


@pytest.mark.parametrize("placement", [HOST, NVME, GRADIENTS], ids=str)
def test_what_an_update_wrote_is_offloaded(placement: Placement) -> None:
    scheduler, plan = plan_of(placement, "none")
    *before, update = snapshot(coarse_programs(scheduler, plan))
    remaining = [
        each for each in update.instructions if not isinstance(each, Move) or (each.rises and each.what == "states")
    ]
    found = check_programs([*before, replace(update, instructions=remaining)], plan)
    nowhere = any("which goes nowhere" in wrong.message for wrong in found if wrong.check == "updates")
    assert nowhere == (placement != GRADIENTS)  # there it is written in place


@pytest.mark.parametrize("placement", [Placement(), GRADIENTS], ids=str)
def test_work_for_what_is_updated_already_is_found(placement: Placement) -> None:
    scheduler, plan = plan_of(placement, "backward")
    forward, backward, update = snapshot(coarse_programs(scheduler, plan))
    first = next(at for at, each in enumerate(backward.instructions) if each.operation == "update")
    moved = [*backward.instructions, *backward.instructions[:first]]
    found = check_programs([forward, replace(backward, instructions=moved), update], plan)
    assert "works for what is updated already" in "".join(each.message for each in found if each.check == "overlap")


def test_micro_batches_leave_updates_to_the_step() -> None:
    """Their gradients are added to those before."""
    _, backward, update = coarse_programs(*plan_of(GRADIENTS, "backward"), adds=True)
    assert not any(each.operation == "update" for each in backward.instructions)
    assert sum(each.operation == "update" for each in update.instructions) >= LAYERS


def test_registers_that_are_given_are_there_once_and_read() -> None:
    scheduler, plan = plan_of(GRADIENTS, "forward")
    forward, *rest = programs = snapshot(coarse_programs(scheduler, plan))
    assert {w.check for w in check_programs([replace(forward, given=forward.given[1:]), *rest], plan)} == {"reads"}
    read = {register for program in programs for each in program.instructions for register in each.reads}
    unread = next(at for at in range(len(forward.contents)) if at not in read)
    found = check_programs([replace(forward, given=(*forward.given, unread)), *rest], plan)
    assert any("nothing reads it" in wrong.message for wrong in found)
    for given in ([*forward.given, forward.given[0]], [float(forward.given[0])], [True], [len(forward.contents)]):
        data = programs_data(programs)
        data["programs"][0]["given"] = given
        with pytest.raises(ValueError, match="the forward is given registers that are not there, or one twice"):
            programs_of(data)
    data = programs_data(programs)
    data["programs"][1]["given"] = [forward.given[0]]
    with pytest.raises(ValueError, match="which only the first program of a step is"):
        programs_of(data)


def test_a_file_moves_between_tiers_that_are_there() -> None:
    data = programs_data(snapshot(coarse_programs(*plan_of(GRADIENTS, "none"))))
    data["programs"][0]["instructions"]["Move"]["target"]["of"][0] = "tape"
    with pytest.raises(ValueError, match="moves bytes from host to tape"):
        programs_of(data)


def test_an_inference_updates_nothing() -> None:
    (forward,) = coarse_programs(*plan_of(GRADIENTS, "forward", training=False))
    assert not forward.given and not any(each.operation == "update" for each in forward.instructions)


def test_states_on_the_device_hide_behind_nothing() -> None:
    assert forecast(Placement(), "forward").seconds == forecast(Placement(), "none").seconds


def test_an_update_on_the_device_beside_a_forward_is_no_plan() -> None:
    for overlap in ("backward", "forward"):
        _, plan = plan_of(GRADIENTS, overlap)
        assert list(replace(plan, update="device").mistakes())
    assert list(replace(plan, overlap="sideways").mistakes()) == ["updates beside 'sideways'"]  # type: ignore[arg-type]


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_delayed_update_of_states_on_nvme_writes_a_second_copy(gradients: Tier, tiles: int) -> None:
    placement = Placement("device", gradients, "nvme")
    scheduler, plan = plan_of(placement, "delayed", tiles)
    found, holdings = forecast_plan(scheduler, plan)
    assert check_programs(snapshot(coarse_programs(scheduler, plan)), plan) == []
    # States are read at once, and copies change behind the backward.
    states = [span for span in found.spans if span.what == "states"]
    assert {span.operation for span in states} == {"read", "update", "write"} and states[0].start == 0
    assert {span.phase for span in states} == {"forward"}
    computes = [span.end for span in found.spans if span.stream == "compute" and span.phase != "update"]
    follows = [span for span in found.spans if span.what == "parameters"]
    assert len(follows) == LAYERS * tiles and min(span.start for span in follows) >= max(computes)
    copies = sum(h.bytes for h in holdings if h.name.startswith("second copy") and h.tier == "host")
    params = [p for bucket in plan.buckets for p in bucket.params]
    assert copies == sum(copy_bytes(p) for p in params)
    assert found.seconds < forecast(placement, "forward", tiles).seconds


@pytest.mark.parametrize("placement", [HOST, Placement("device", "host", "host")], ids=str)
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_delayed_update_runs_beside_the_whole_next_step(placement: Placement, tiles: int) -> None:
    """No gather waits for it, copies change behind the backward, and two sets of gradients are held."""
    scheduler, plan = plan_of(placement, "delayed", tiles)
    found, holdings = forecast_plan(scheduler, plan)
    assert check_programs(snapshot(coarse_programs(scheduler, plan)), plan) == []
    computes = [span for span in found.spans if span.stream == "compute" and span.phase != "update"]
    assert len(updates(found)) == LAYERS * tiles and updates(found)[0].start == 0
    follows = [span for span in found.spans if span.what == "parameters"]
    assert len(follows) == LAYERS * tiles
    assert min(span.start for span in follows) >= max(span.end for span in computes)
    assert found.seconds < forecast(placement, "forward", tiles).seconds
    gradients = [h for h in holdings if h.kind == "gradient" and h.tier == "host"]
    old, new = (sum(h.bytes for h in gradients if at(h) == -1) for at in (FIRST, LAST))
    assert old == new
    states = sum(h.bytes for h in holdings if h.kind == "state" and h.tier == "host")
    assert found.peaks["host"].bytes == states + 2 * old


@pytest.mark.parametrize("overlap", ["forward", "delayed"])
def test_buckets_of_a_layer_share_its_name(overlap: Overlap) -> None:
    """Gradients of the step before are found again by their bucket's name."""
    _, plan = plan_of(Placement("device", "host", "host"), overlap)
    plan = replace(plan, buckets=tuple(replace(bucket, name="blocks.0") for bucket in plan.buckets))
    scheduler = scheduler_of(step_of([Layer(rows=ROWS, flops=2 * 10**10)] * LAYERS), plan, GPU)
    assert check_programs(snapshot(coarse_programs(scheduler, plan)), plan) == []


def test_a_copy_that_changes_while_programs_compute_with_it_is_found() -> None:
    scheduler, plan = plan_of(HOST, "delayed")
    forward, backward, update = snapshot(coarse_programs(scheduler, plan))
    moved = [each for each in update.instructions if getattr(each, "what", "") == "parameters"]
    early = replace(backward, instructions=[*backward.instructions, *moved])
    found = check_programs([forward, early, update], plan)
    assert "changes a copy while programs compute with it" in "".join(each.message for each in found)


def test_parameters_without_a_copy_are_updated_behind_the_backward() -> None:
    """Those of which programs gather the values themselves, or copies on NVMe."""
    scheduler, plan = plan_of(GRADIENTS, "delayed")
    forward, _, update = snapshot(coarse_programs(scheduler, plan))
    assert sum(each.operation == "update" and each.stream == "cpu_update" for each in update.instructions) == LAYERS
    # By gradients of the step before, and those of this one are kept.
    earlier = set(forward.given)
    assert len(earlier) == LAYERS
    assert all(earlier & set(each.reads) for each in update.instructions if each.stream == "cpu_update")
    _, plan = plan_of(NVME, "delayed")
    assert not any(updated_late(plan, bucket) for bucket in plan.buckets)
    assert list(plan.mistakes()) == ["delayed updates by gradients on a disk"]


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_program_gets_the_updates_that_its_backward_begins(tier: Tier) -> None:
    """Gradients that would leave for NVMe are taken before, so that nothing moves them."""
    params = (Param("a.weight", (64, 64), "float32", "float32", "float32", True, Layout("rows", 2)),)
    buckets = tuple(
        Bucket(i, f"layers.{i}", params, "use", placement=Placement("device", tier, "nvme" if i else "device"))
        for i in (0, 1)
    )
    plan = replace(Plan(3, 2, buckets, 1), overlap="backward")
    contents = tuple(Register(f"r{i}", 64, "gradient", "device", i) for i in range(4))
    reduces = [WaitReduce(i, (i + 2,), bucket=i, updatable=(0,)) for i in (0, 1)]
    leaves = Move("device", "nvme", "gradient", "layers.1", "layers.1", 64, (3,), (3,), (3,), 1, offload_tier="nvme")
    begins = [BeginUpdate(i) for i in (0, 1)]
    instructions = (*reduces, *([leaves] if tier == "nvme" else ()), *begins)
    backward = Program("backward", 2, 4, instructions, (2, 3), (), contents, ("layers.0", "layers.1"))
    state_sizes, rates = {"a.weight": 2 * 64 * 32 * 4}, Rates(machine_named("cpu"), 2, "float32")

    program, inside = with_updates_inside(backward, plan, state_sizes, rates)
    assert inside == (1,)  # states on the device are updated behind the backward
    assert [each.operation for each in program.instructions] == [
        "reduce", "reduce", "update", "read", "update", "write", "update",
    ]  # fmt: skip
    update = next(each for each in program.instructions if isinstance(each, HostUpdate))
    assert 3 in update.reads and 3 in update.dead
    assert max(r for each in program.instructions for r in (*each.reads, *each.writes)) < program.registers
    behind = update_program(plan, state_sizes, rates, program, inside)
    assert [each.buckets for each in behind.instructions if isinstance(each, Update)] == [(0,)]
    assert not [each for each in behind.instructions if isinstance(each, HostUpdate)]
    # An optimizer without overlap leaves the program as it is.
    same, none = with_updates_inside(backward, replace(plan, overlap="none"), state_sizes, rates)
    assert none == () and same.instructions == backward.instructions
