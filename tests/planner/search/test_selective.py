"""Which single activations of recomputed layers a search may save, and that it does where memory is short.

Tests ``planner/profile/liveness.py`` and ``planner/explain/reasons.py``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.steps import Layer, profile_of, step_of, transformer
from quick import examples

from zerograph.core.machine import machine_named
from zerograph.core.plan import Plan
from zerograph.core.step import activation_names, layer_of_activation
from zerograph.planner.explain.reasons import recomputed
from zerograph.planner.explain.replay import restricted_to_step
from zerograph.planner.profile.liveness import Graph, saved
from zerograph.planner.profile.regions import profile
from zerograph.planner.programs.rules import plan_step
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.local_search import WORK
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import Candidate
from zerograph.planner.search.selective import STOPS, stops
from zerograph.sim.rates import Rates

GPU, WORLD = machine_named("h100-80gb"), 8
RATES = Rates(GPU, WORLD, "float32")


def test_names_last_from_trace_to_trace_and_number_what_repeats() -> None:
    places = [
        ("h.0.mlp", "h.0", "aten.mm.default"),
        ("h.0", "h.0", "aten.add.Tensor"),
        ("h.0.mlp", "h.0", "aten.mm.default"),
        ("shared.up", "h.0", "aten.mm.default"),
        ("h.1", "h.1", "aten._scaled_dot_product_flash_attention_for_cpu.default"),
        ("", "", "sin"),
    ]
    names = activation_names(places)
    attention = "h.1:scaled_dot_product_attention"
    assert names == ["h.0.mlp:mm", "h.0:add.Tensor", "h.0.mlp:mm#2", "h.0:mm", attention, ":sin"]
    assert [layer_of_activation(name) for name in names] == ["h.0", "h.0", "h.0", "h.0", "h.1", ""]
    assert layer_of_activation("h.0") == ""  # a layer is none


_LAYERS = st.lists(
    st.builds(
        Layer,
        inside=st.sampled_from([1024, 10**6, 10**8]),
        stream=st.sampled_from([1024, 10**7]),
        flops=st.sampled_from([10**6, 10**11, 10**13]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(50), deadline=None)
@given(layers=_LAYERS)
def test_stops_are_parts_of_each_other_and_save_what_they_say(layers: list[Layer]) -> None:
    graph = Graph(step_of(layers))
    everything = saved(graph, "auto").until
    all_of = {graph.activation[graph.maker[value]] for value in everything if graph.size[value]}
    for layer, found in stops(graph, RATES).items():
        assert len(found) <= STOPS
        for names in found:
            assert {layer_of_activation(name) for name in names} == {layer}
            assert names < all_of
            saved_until = saved(graph, "full", names).until
            inside = {graph.activation[graph.maker[value]] for value in saved_until} - set(_leaving(graph))
            assert {name for name in inside if layer_of_activation(name)} == names
        assert all(less < more for less, more in pairwise(found))


def _leaving(graph: Graph) -> list[str]:
    return [graph.activation[graph.maker[value]] for value in graph.leaves]


def test_the_cheap_one_is_given_up_first() -> None:
    """What follows a product takes as much memory as the product's own result, and no work."""
    step = step_of([Layer(inside=10**8, flops=10**13)] * 6)
    assert set(stops(Graph(step), RATES).values()) == {(frozenset({f"blocks.{i}:up"}),) for i in range(6)}


def test_layers_that_are_alike_stop_at_the_same_places() -> None:
    found = stops(Graph(transformer(6, 1024, 4096)), RATES)
    relative = {tuple(frozenset(n.removeprefix(layer) for n in names) for names in own) for layer, own in found.items()}
    assert len(found) == 6
    assert len(relative) <= 2  # the last has no layer behind it


def test_a_level_holds_what_is_spared_and_repeats_the_rest() -> None:
    layers = 4
    step = step_of([Layer(inside=10**8, flops=10**13)] * layers)
    found = profile(step, saved_sets=stops(Graph(step), RATES))
    assert found.all_saved == 2

    def held(option: int) -> int:
        return sum(life.bytes for life in found.lives if option in life.saved)

    def work(option: int) -> int:
        return sum(atom.cost.flops for region in found.regions for atom in region.work[option].atoms)

    assert [held(option) - held(0) for option in range(3)] == [0, layers * 10**8, 2 * layers * 10**8]
    assert [(work(option) - work(2)) // 10**13 for option in range(3)] == [layers, 0, 0]


def options(found: Candidate) -> tuple[int, ...]:
    return found.space.scheduler.options(found.plan)


def test_levels_are_read_back_from_the_plan_that_they_make() -> None:
    step = step_of([Layer(inside=10**8, flops=10**13)] * 4)
    search = Search(step, Constraints("auto", WORLD), GPU)
    chosen = [c for c in search.best if 1 in options(c)]
    assert chosen
    for candidate in chosen:
        plan = Plan.from_json(candidate.plan.to_json())
        assert search.variants[0].profile.options(plan.recompute, plan.save) == options(candidate)
        again = profile_of(step, plan)
        assert [again.options(plan.recompute, plan.save).count(option) for option in (0, 1)] == [
            options(candidate).count(0),
            options(candidate).count(1),
        ]


@pytest.mark.parametrize("layers", [2, 12])
def test_what_is_cheap_to_recompute_is_not_saved(layers: int) -> None:
    """Recomputing whole layers would cost a product each; half of what they save comes back for almost nothing."""
    step = step_of([Layer(inside=10**8, flops=10**13)] * layers)
    fastest = Search(step, Constraints("auto", WORLD), GPU).best[-1]
    everything = Search(step, Constraints("auto", WORLD, recompute="none"), GPU).best[-1]
    assert fastest.plan.save == tuple(f"blocks.{i}:up" for i in range(layers))
    assert fastest.seconds < everything.seconds * 1.001
    assert fastest.peak <= everything.peak - (layers - 1) * 10**8


def test_what_is_fixed_is_not_chosen() -> None:
    step = step_of([Layer(inside=10**8, flops=10**13)] * 6)
    for recompute in ("none", "full", 0.5):
        search = Search(step, Constraints("auto", WORLD, recompute=recompute), GPU)  # type: ignore[arg-type]
        assert {c.plan.save for c in search.best} == {()}


def test_one_activation_leaves_the_device_where_that_is_enough() -> None:
    """All copies that hide behind the compute are free; of the first layer only one hides."""
    machine = replace(GPU, nvme_capacity=0)
    step = step_of([Layer(stream=10**8, inside=10**9, flops=10**13)] * 3)
    search = Search(step, Constraints("auto", WORLD, offload="auto", tile=False), machine)
    alone = [c for c in search.best if c.plan.offload == (("blocks.0:up", "host"),)]
    assert alone
    fastest = search.best[-1]
    (enough, *_) = [c for c in alone if c.seconds <= fastest.seconds]
    assert 10**9 <= fastest.peak - enough.peak < 1.001 * 10**9
    assert enough.peaks[1] == pytest.approx(10**9, rel=0.001)


def test_activations_begin_to_come_back_early_where_one_layer_is_too_short() -> None:
    """A read from NVMe and a copy to the device follow one another: together they take longer than one layer."""
    step = step_of([Layer(stream=10**7, inside=2 * 10**8, flops=10**12)] * 16)
    search = Search(step, Constraints("auto", WORLD, offload="auto", tier="nvme", recompute="none"), GPU)
    early = [c for c in search.best if c.plan.fetch_ahead > 1]
    assert early
    for candidate in early:
        late = candidate.space.of(replace(candidate.plan, fetch_ahead=1))
        assert candidate.seconds < late.seconds
        assert Plan.from_json(candidate.plan.to_json()).fetch_ahead == candidate.plan.fetch_ahead


def test_a_deep_step_of_one_bucket_is_searched_in_bounds() -> None:
    """Few buckets are not few activations: single changes of all of these would be simulated for each plan."""
    step = step_of([Layer(rows=1024, stream=10**7, inside=10**8, flops=10**12)] * 96)
    search = Search(step, Constraints("auto", WORLD, bucket_size=2**40, prefetch=1, offload="auto"), GPU)
    assert sum(space.work for space in search.spaces) < 5 * WORK


def test_a_plan_of_another_program_saves_what_this_one_makes() -> None:
    step = step_of([Layer()] * 2)
    plan = replace(plan_step(step, stage=3, world_size=2, bucket_size=2**20, prefetch=1), recompute=("blocks.0",))
    here = replace(plan, save=("blocks.0:up",))
    assert restricted_to_step(here, step) is here
    assert restricted_to_step(replace(plan, save=("blocks.0:up", "blocks.0:dropped")), step) == here


def test_layers_are_reported_in_runs() -> None:
    def described(*layers: str, save: tuple[str, ...] = ()) -> str:
        return recomputed(Plan(3, 2, (), 1, layers, save))

    assert described("h.0") == "1 layer recomputed in the backward: h.0"
    assert described("h.0", "h.1", "h.2") == "3 layers recomputed in the backward: h.0 to h.2"
    assert described("a.0", "a.1", "b.1", "b.3").endswith("a.0 to a.1, b.1, b.3")
    assert described(*(f"h.{2 * i}" for i in range(6))).endswith("h.0, h.2, h.4, h.6, and 2 more")
    assert described("h.0", "h.1", save=("h.0.mlp:mm", "h.1.mlp:mm")).endswith("h.0 to h.1, but for mlp:mm of 2")
