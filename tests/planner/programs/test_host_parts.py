"""Gathered buckets that each host keeps in parts: which gathers come from all hosts, seconds, memory and choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from planner.steps import Layer, profile_of, step_of

from zerograph.core.errors import ConfigError
from zerograph.core.instructions import Gather, WaitGather
from zerograph.core.machine import Link, machine_named
from zerograph.core.param_bytes import kept_in_host, sent_bytes
from zerograph.core.plan import GivenPlan, Placement, Plan, Residency
from zerograph.core.program import Program
from zerograph.planner.explain.reasons import reasons
from zerograph.planner.explain.replay import refuse_hosts
from zerograph.planner.programs.coarse import coarse_programs
from zerograph.planner.programs.host_parts import with_host_parts
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.programs.schedule import Scheduler
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.decisions import with_placements, with_tiles
from zerograph.planner.search.search import Search
from zerograph.sim.check import check_programs
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate, time_and_peaks

MIB = 2**20
MACHINE = replace(machine_named("cpu"), ranks_per_node=2, intra=Link(8e9), inter=Link(1e8))
TRACED = step_of([Layer(rows=MIB, stream=MIB // 4, inside=MIB // 4)] * 4)
# Gradients travel in few bits, so that a step waits for its gathers.
STEP = replace(TRACED, params=tuple(replace(p, reduce_wire="int4") for p in TRACED.params))
WORLD, HOSTS = 4, 2
RULE = plan_step(STEP, stage=3, world_size=WORLD, bucket_size=4 * MIB, prefetch=1, hosts=HOSTS)
RATES = Rates.of(MACHINE, RULE)


def staying(residency: Residency) -> Plan:
    return replace(RULE, buckets=tuple(replace(bucket, residency=residency) for bucket in RULE.buckets))


def programs_of(plan: Plan) -> tuple[Scheduler, tuple[Program, ...]]:
    params, names = [b.params for b in plan.buckets], [b.name for b in plan.buckets]
    scheduler = Scheduler(profile_of(STEP, plan), params, names, RATES)
    return scheduler, coarse_programs(scheduler, plan)


HOSTED = staying("host")


def test_a_backward_gathers_what_the_forward_brought_from_other_hosts() -> None:
    _, programs = programs_of(HOSTED)
    assert check_programs(programs, HOSTED) == []
    forward, backward, _ = programs
    gathers = {p.kind: [each for each in p.instructions if isinstance(each, Gather)] for p in (forward, backward)}
    waits = [each for p in programs for each in p.instructions if isinstance(each, WaitGather) and each.kept]
    sizes = {bucket.index: kept_in_host(bucket.params, HOSTS) for bucket in HOSTED.buckets}
    # Of all that ranks send, a rank of two in a host has the half.
    assert sizes == {bucket.index: sent_bytes(bucket.params) // 2 for bucket in HOSTED.buckets}
    assert not any(each.inside or each.ended for each in gathers["forward"])
    assert {each.bucket: each.kept for each in waits} == sizes
    assert all(each.inside for each in gathers["backward"])
    assert {each.bucket: each.ended for each in gathers["backward"] if each.ended} == sizes


def test_of_several_gathers_in_a_program_the_first_comes_from_all_hosts_and_the_last_ends() -> None:
    twice = [Gather(0, (), (), 0), WaitGather(0, bucket=0), Gather(0, (), (), 1), WaitGather(1, bucket=0)]
    size = kept_in_host(HOSTED.buckets[0].params, HOSTS)
    stated = {kind: with_host_parts(twice, HOSTED, kind) for kind in ("forward", "backward", "inference")}
    assert [(each.inside, each.ended) for each in stated["forward"][::2]] == [(False, 0), (True, 0)]  # type: ignore[union-attr]
    assert [each.kept for each in stated["forward"][1::2]] == [size, 0]  # type: ignore[union-attr]
    assert [(each.inside, each.ended) for each in stated["backward"][::2]] == [(True, 0), (True, size)]  # type: ignore[union-attr]
    assert stated["inference"] == twice and with_host_parts(twice, RULE, "forward") == twice


def test_it_takes_the_time_and_memory_that_lie_between() -> None:
    seconds, gathering, computing, peaks = {}, {}, {}, {}
    for residency in ("use", "host", "backward"):
        # With three reductions under way gradients are the peak of all.
        scheduler, programs = programs_of(plan := replace(staying(residency), reductions=2))
        seconds[residency], (peaks[residency], *_), _ = time_and_peaks(programs, scheduler.shared.costs)
        forecast, holdings = simulate(programs, RATES)
        assert (forecast.seconds, forecast.peaks["device"].bytes) == (seconds[residency], peaks[residency])
        gathering[residency], computing[residency] = (forecast.busy()[stream] for stream in ("gather", "compute"))
        kept = [each.bytes for each in holdings if "kept in this host" in each.name]
        wanted = [kept_in_host(bucket.params, HOSTS) for bucket in plan.buckets]
        assert sorted(kept) == (sorted(wanted) if residency == "host" else [])
    again = [sent_bytes(bucket.params) for bucket in RULE.buckets]
    between = sum(RATES.collective(size) - RATES.inside(size) for size in again)
    assert gathering["use"] - gathering["host"] == pytest.approx(between)
    assert gathering["host"] == pytest.approx(gathering["backward"]), "nothing is sent again"
    # The cores that compute carry the part of a gather inside of a host.
    inside = sum(map(RATES.inside, again))
    assert computing["use"] == pytest.approx(computing["host"])
    assert computing["host"] - computing["backward"] == pytest.approx(inside)
    assert seconds["use"] > seconds["host"] + 0.9 * between and seconds["host"] > seconds["backward"]
    assert peaks["use"] < peaks["host"] < peaks["backward"]


def test_a_search_keeps_parts_where_whole_buckets_have_no_room() -> None:
    def searched(stage: Literal[3, "auto"], hosts: int) -> Search:
        return Search(STEP, Constraints(stage, WORLD, bucket_size=4 * MIB, recompute="none", hosts=hosts), MACHINE)

    def kept(search: Search) -> bool:
        return any(bucket.residency == "host" for found in search.best for bucket in found.plan.buckets)

    found, without = searched("auto", HOSTS), searched(3, HOSTS)
    assert kept(found) and not kept(without) and not kept(searched("auto", 1))
    budget = without.smallest.peaks[0]
    assert found.within(budget).seconds < 0.8 * without.within(budget).seconds  # type: ignore[union-attr]


def test_only_what_is_whole_and_on_the_device_is_kept() -> None:
    away = Placement("host", "host", "host")
    assert {b.residency for b in with_placements(HOSTED, {0: away}).buckets} == {"use", "host"}
    assert with_placements(HOSTED, {0: away}).buckets[0].residency == "use"
    assert with_placements(HOSTED, {0: Placement(optimizer="host")}).buckets[0].residency == "host"
    assert with_tiles(HOSTED, {0: 2}).buckets[0].residency == "use"
    assert next(HOSTED.mistakes(), "") == ""
    moved = replace(HOSTED, buckets=(replace(HOSTED.buckets[0], placement=away), *HOSTED.buckets[1:]))
    assert "keeps parts of" in next(moved.mistakes())
    assert "in hosts, of which there are 1" in next(replace(HOSTED, hosts=1).mistakes())


def test_a_plan_of_other_hosts_is_refused() -> None:
    refuse_hosts(GivenPlan("plan.json", HOSTED), HOSTS)
    refuse_hosts(GivenPlan("plan.json", RULE), 1)
    with pytest.raises(ConfigError, match=r"each of 2 hosts keeps gathered buckets.*this run has 1 that"):
        refuse_hosts(GivenPlan("plan.json", HOSTED), 1)


def test_a_gather_inside_of_hosts_that_keep_nothing_is_found() -> None:
    _, (forward, *rest) = programs_of(HOSTED)
    forgets = tuple(replace(i, kept=0) if isinstance(i, WaitGather) else i for i in forward.instructions)
    wrong = check_programs([replace(forward, instructions=forgets), *rest], HOSTED)
    assert {each.check for each in wrong} == {"hosts"} and len(wrong) == len(HOSTED.buckets)


def test_it_is_explained() -> None:
    forecast, _ = simulate(programs_of(HOSTED)[1], RATES)
    found = reasons(HOSTED, STEP, Constraints("auto", WORLD, hosts=HOSTS), RATES, forecast, moments=2)
    assert any("a rank keeps 2 MiB of it for the backward" in each.why for each in found)
